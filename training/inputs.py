"""What a job is trained on, put together before anything is paid for; `--check` stops after it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import recipe
from accounting import RunMetrics, stack_versions
from delivery.store import set_hub_timeouts
from job import dataset, rules
from job.chat import Chat, Row, load_tokenizer
from job.environment import Environment, fingerprint
from job.scoring import Scorer
from job.settings import Settings
from job.weights import WeightsPlan, plan_weights
from training import conversations, trainers


@dataclass
class Job:
    """What is trained on what, and what it took so far."""

    env: Environment
    plan: WeightsPlan
    metrics: RunMetrics
    setup_began: float = 0.0
    step: int = 0
    resumed: bool = False

    def note(self, **facts: Any) -> None:
        self.metrics.notes |= facts


def load(settings: Settings, redact: Callable[[str], str]) -> tuple[Job, Settings]:
    """Load the environment and look the model up; returns the settings fitted to the model's context."""
    spec = settings.job
    set_hub_timeouts()
    env = Environment.load(spec.environment.id, spec.environment.params)
    plan = plan_weights(settings)
    metrics = RunMetrics(arm=settings.arm, phase=settings.phase, seed=settings.seed, model_id=settings.model)
    job = Job(env, plan, metrics)
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


def for_sft(settings: Settings, job: Job) -> tuple[Chat, list[Row], recipe.Batch]:
    """Tokenizer, rows and batch: all that can be refused is refused here, before weights are downloaded."""
    talk = Chat(load_tokenizer(job.plan.base, job.plan.base_commit), settings.thinking)
    rows, source, counts = dataset.sft_rows(settings, job.env, talk)
    batch = trainers.sft_batch(settings, job.plan)
    job.note(dataset_fingerprint=fingerprint(source), rows=vars(counts), batch=vars(batch))
    return talk, rows, batch


def for_rl(settings: Settings, job: Job) -> tuple[Chat, dataset.Prompts, recipe.Batch, conversations.Way]:
    """Tokenizer, prompts, batch, and how completions come about: the same for GRPO."""
    talk = Chat(load_tokenizer(job.plan.base, job.plan.base_commit), settings.thinking)
    prompts = dataset.rl_prompts(settings, job.env, talk)
    batch = trainers.rl_batch(settings, job.plan, job.env, len(prompts.rows))
    way = conversations.plan(settings, job.env, talk, prompts, Scorer(job.env))
    job.note(dataset_fingerprint=fingerprint(prompts.rows), prompts_over_budget=prompts.over_budget)
    return talk, prompts, batch, way
