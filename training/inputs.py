"""What a job is trained on, put together before anything is paid for; `--check` stops after it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import recipe
from accounting import RunMetrics, Tally, stack_versions, strict_json
from delivery.checkpoints import Manifest
from delivery.hub_client import set_hub_timeouts
from job import dataset, repository, rules
from job.chat import Chat, Row, load_tokenizer
from job.environment import Environment, fingerprint
from job.prefetch import Prefetch, check_room
from job.scoring import Scorer
from job.settings import Settings, SettingsError
from job.weights import WeightsPlan, plan_weights, warn_slow_kernels
from training import conversations, evaluation, merging, trainers


@dataclass
class Job:
    """What is trained on what, and what it took so far."""

    env: Environment
    plan: WeightsPlan
    metrics: RunMetrics
    found: list[Manifest]
    redact: Callable[[str], str]
    prefetch: Prefetch
    adapter: Path | None = None
    examiner: evaluation.Examiner | None = None
    setup_began: float = 0.0
    resumed_from: Manifest | None = None
    determinants: dict[str, Any] = field(default_factory=dict)  # of what is learnt

    def account(self, tally: Tally, attempt: str) -> None:
        """Write down what all attempts did together, and what this one did alone."""
        metrics, before = self.metrics, Tally()
        before.go_on_from(self.resumed_from.totals if self.resumed_from else {})
        metrics.wall_seconds = tally.train_wall
        metrics.train_tokens, metrics.generated_tokens = tally.train_tokens, tally.generated_tokens
        alone = {
            "id": attempt,
            "steps": tally.step - before.step,
            "train_wall": round(tally.train_wall - before.train_wall, 3),
            "train_tokens": tally.train_tokens - before.train_tokens,
            "generated_tokens": tally.generated_tokens - before.generated_tokens,
        }
        self.note(train_wall=tally.train_wall, nonfinite_steps=tally.nonfinite_steps, attempt=alone)

    def note(self, **facts: Any) -> None:
        self.metrics.notes |= facts


def load(
    settings: Settings, redact: Callable[[str], str], found: list[Manifest], *, download: bool = True
) -> tuple[Job, Settings]:
    """Load the environment and look the model up; returns the settings fitted to the model's context.

    `found` are the checkpoints of earlier attempts, newest first: their model's commits are this one's too.
    With `download` the weights are on their way from here on; what is refused later has not waited for them.
    """
    spec = settings.job
    set_hub_timeouts()
    pins = (found[0].model_commit, found[0].job.get("tokenizer_commit")) if found else ()
    origin = repository.locate(settings, *pins)
    files = repository.files(settings, origin)
    check_room(origin, settings, files)
    prefetch = Prefetch(origin, settings)
    if download:
        prefetch.start()
    env = Environment.load(spec.environment.id, spec.environment.params)
    plan = plan_weights(settings, origin, files)
    merging.check(settings, plan)
    warn_slow_kernels(plan, settings)
    metrics = RunMetrics(arm=settings.arm, phase=settings.phase, seed=settings.seed, model_id=settings.model)
    job = Job(env, plan, metrics, found, redact, prefetch)
    job.note(
        renderer="verifiers",
        thinking=settings.thinking,
        model_id=settings.model,
        environment=env.id,
        job_spec=json.loads(redact(spec.to_json())),
        hf_transfer=settings.hf_transfer,
        model_commit=plan.commit,
        environment_version=env.version,
        versions=stack_versions(),
    )
    return job, rules.fit_context(settings, plan.context_length)


def for_sft(settings: Settings, job: Job, check: Callable[[], None]) -> tuple[Chat, list[Row], recipe.Batch]:
    """Tokenizer, rows and batch: all that can be refused is refused here, before weights are downloaded."""
    talk = open_chat(settings, job.plan)
    rows, source, counts = dataset.sft_rows(settings, job.env, talk)
    batch = trainers.sft_batch(settings, job.plan)
    job.note(dataset_fingerprint=fingerprint(source), rows=vars(counts), batch=vars(batch))
    determine(settings, job)
    length = min(settings.sft_max_length + settings.eval_tokens, job.plan.context_length)
    job.examiner = evaluation.prepare(settings, job.env, talk, length, check)
    return talk, rows, batch


def open_chat(settings: Settings, plan: WeightsPlan) -> Chat:
    """The base model's tokenizer and template; SettingsError when the weights have no room for its tokens."""
    tokenizer = load_tokenizer(repository.description(settings, plan.base, plan.base_commit), plan.base)
    if tokenizer.eos_token is None:
        raise SettingsError(
            f"JobSpec model={plan.base!r}: its tokenizer names no end-of-sequence token, so no answer would"
            " ever end; set eos_token in its tokenizer_config.json"
        )
    if len(tokenizer) > plan.vocab_size:
        raise SettingsError(
            f"JobSpec model={plan.base!r}: its tokenizer has {len(tokenizer)} tokens, the weights of"
            f" {plan.source!r} have embeddings for {plan.vocab_size}; resize them, or take out the added ones"
        )
    return Chat(tokenizer, settings.thinking)


def for_rl(
    settings: Settings, job: Job, tally: Tally, check: Callable[[], None]
) -> tuple[Chat, dataset.Prompts, recipe.Batch, conversations.Way]:
    """Tokenizer, prompts, batch, and how completions come about: the same for GRPO."""
    talk = open_chat(settings, job.plan)
    prompts = dataset.rl_prompts(settings, job.env, talk)
    batch = trainers.rl_batch(settings, job.plan, job.env, len(prompts.rows))
    way = conversations.plan(settings, job.env, talk, prompts, Scorer(job.env, check), tally)
    counts = {"prompts": len(prompts.rows), "prompts_over_budget": prompts.over_budget}
    job.note(dataset_fingerprint=fingerprint(prompts.rows), rows=counts)
    determine(settings, job)
    job.examiner = evaluation.prepare(settings, job.env, talk, settings.rl_vllm_max_len, check, way)
    return talk, prompts, batch, way


# What a run may differ in and still go on from its checkpoints: speed, memory, reports.
FREE = {
    "sft": "sft_save_steps sft_per_device_bs sft_liger",
    "rl": "rl_save_steps rl_per_device_prompts rl_vllm_gpu_util rl_vllm_sleep rl_vllm_eager rl_use_vllm"
    " rl_adapter_sync",
}
SHARED = "mode seed model thinking quant lora_targets lora_rank lora_alpha init_from_adapter learning_rate"
SAMPLING = {
    "sft": "",
    "rl": "temperature kl_penalty_coef advantage_clip thinking_length_penalty_coef stop_sequences",
}


def determine(settings: Settings, job: Job) -> None:
    """Write down all that decides what is learnt; refuse the checkpoints of a job that is another."""
    own = [
        name
        for name in type(settings).model_fields
        if name.startswith(f"{settings.mode}_") and name not in FREE[settings.mode].split()
    ]
    names = [*SHARED.split(), *own, *SAMPLING[settings.mode].split()]
    determinants = {
        **{name: getattr(settings, name) for name in names},
        "environment": job.env.id,
        "environment.params": settings.job.environment.params,
        "dataset": job.metrics.notes["dataset_fingerprint"],
    }
    if job.plan.source != job.plan.base:  # of which only the weights' commit is in every manifest
        determinants["tokenizer_commit"] = job.plan.base_commit
    job.determinants = json.loads(job.redact(strict_json(determinants)))  # as they are in the manifests
    for manifest in job.found:
        manifest.check(job.determinants)
