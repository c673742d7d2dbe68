"""Fine-tune a LoRA adapter on one rented GPU: `RUN_MODE=sft|rl python worker.py`.

Reads a JobSpec and environment variables, trains with TRL on a verifiers environment, and streams heartbeats,
the adapter, `metrics.json` and a `DONE` sentinel to a Hugging Face dataset repository or a folder.
"""

import json
import logging
import os
import shutil
import sys
import time
import traceback
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

import recipe
from delivery.publisher import Publisher, say
from delivery.redaction import redactor
from delivery.store import Store, StoreError, Unavailable, folder_files, open_store
from job import chat, cli, rules, weights
from job.knobs import secret_values
from job.settings import Identity, Settings, SettingsError, identify
from training import engine, gpu, inputs, midrun, rewards, trainers, warm_start

log = logging.getLogger("worker")

ONE_LINE_ERRORS = (
    ValueError,
    StoreError,
    gpu.GpuNotReady,
    weights.ModelUnreachable,
    midrun.GradientFailure,
    rewards.NothingScored,
    engine.EngineProblem,
)
RETRIABLE_ERRORS = (Unavailable, gpu.GpuNotReady, weights.ModelUnreachable)


@dataclass(frozen=True)
class Run:
    """Who this run is, and the places it writes to."""

    identity: Identity
    store: Store
    publisher: Publisher
    redact: Callable[[str], str]
    attempt: str

    @classmethod
    def begin(cls, identity: Identity) -> "Run":
        """Start the publisher, so that whatever happens next can be told."""
        store = open_store(
            identity.hf_repo, identity.store_dir, identity.prefix, identity.token, identity.endpoint
        )
        redact, attempt = redactor(identity.secrets), uuid.uuid4().hex[:8]
        publisher = Publisher(
            store,
            {"run_id": identity.run_id, "mode": identity.mode, "seed": identity.seed, "attempt": attempt},
            identity.work_dir / "hb" / "heartbeat.json",
            redact=redact,
            min_interval_s=identity.heartbeat_min_s,
            deadline_s=identity.upload_deadline_s,
        )
        publisher.start()
        return cls(identity, store, publisher, redact, attempt)

    def clear(self) -> None:
        """Delete what an earlier attempt left; raises SettingsError when the work directory is no good."""
        folder = self.identity.work_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.json", "train_meta.json", "DONE"):
                self.local(name).unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(
                f"AUTOSLM_WORK_DIR={str(folder)!r}: cannot be used: {error.strerror}"
            ) from error

    def local(self, name: str) -> Path:
        return self.identity.work_dir / name

    def keep(self, name: str, text: str) -> bytes:
        """Write a local file; returns its content."""
        content = self.redact(text).encode()
        self.local(name).parent.mkdir(parents=True, exist_ok=True)
        self.local(name).write_bytes(content)
        return content


def main(env: MutableMapping[str, str]) -> None:
    """Run one job from beginning to end; reports any failure, then raises it unchanged."""
    identity, problem = identify(env)
    run = Run.begin(identity)
    try:
        run.clear()
        if problem is not None:
            raise problem
        export_token(env, identity)
        if is_done(run.store):
            replay(run)
            return
        run.publisher.beat("boot")
        settings = rules.resolve(env, identity)
        {"sft": run_sft, "rl": run_rl}[settings.mode](settings, run)
    except BaseException as error:
        report_failure(run, error)
        raise


def export_token(env: MutableMapping[str, str], identity: Identity) -> None:
    """Let plain library downloads see the token: they do not read HUGGINGFACE_TOKEN."""
    if identity.token:
        env["HF_TOKEN"] = identity.token


# --- the two jobs ---


def run_sft(settings: Settings, run: Run) -> None:
    """Supervised fine-tuning."""
    job, settings = inputs.load(settings, run.redact)
    talk, rows, batch = inputs.for_sft(settings, job)
    prepare(settings, run, job)
    policy = warm_model(settings, job)
    announce_training(run, job, "sft_model_load")
    losses, guard = midrun.as_callback(midrun.Losses, run.publisher), midrun.as_callback(midrun.GradientGuard)
    trainer = trainers.sft_trainer(settings, job.plan, talk, rows, batch, [losses, guard], policy)
    train(run, job, trainer, losses, guard)
    job.metrics.train_tokens = trainer.state.num_input_tokens_seen
    job.note(epochs=settings.sft_epochs)
    deliver_adapter(settings, run, job, trainer, talk)
    finish(settings, run, job)


def run_rl(settings: Settings, run: Run) -> None:
    """Reinforcement learning with GRPO."""
    job, settings = inputs.load(settings, run.redact)
    talk, prompts, batch, way = inputs.for_rl(settings, job)
    prepare(settings, run, job)
    policy = warm_model(settings, job)
    announce_training(run, job, "rl_train_start")
    progress = midrun.as_callback(midrun.Rewards, run.publisher, way.tally)
    guard = midrun.as_callback(midrun.GradientGuard)
    trainer = trainers.grpo_trainer(settings, job.plan, talk, prompts, batch, way, [progress, guard], policy)
    train(run, job, trainer, progress, guard)
    rewards.check(settings, job.step, progress.history, way.tally)
    job.metrics.generated_tokens = way.tally.generated_tokens
    job.note(**rewards.notes(settings, trainer.args, progress.history, way.tally))
    deliver_adapter(settings, run, job, trainer, talk)
    finish(settings, run, job)


# --- the steps they share ---


def prepare(settings: Settings, run: Run, job: inputs.Job) -> None:
    """Start the setup clock, wait for the device, bring the weights."""
    run.publisher.beat(f"{settings.mode}_start")
    job.setup_began = time.monotonic()
    # Of an earlier run in this folder, whose checkpoints rotation would count.
    shutil.rmtree(settings.output_dir, ignore_errors=True)
    card = recipe.catalog_model(settings.model).required_vram_gb(settings.job.algorithm)
    gpu.wait_for_gpu(settings.device, min_vram_gb=card)
    with run.publisher.counting("bytes", weights.cache_bytes):
        download_seconds = weights.prefetch(job.plan, settings)
    job.note(download_seconds=download_seconds)
    run.publisher.beat(
        "model_prefetched",
        model=job.plan.source,
        download_seconds=download_seconds,
        hf_transfer=settings.hf_transfer,
    )


def warm_model(settings: Settings, job: inputs.Job) -> Any:
    """The model that has the adapter of train.init_from_adapter already, None for a fresh run."""
    folder = warm_start.fetch(settings)
    if folder is None:
        return None
    model = warm_start.load(settings, job.plan, folder)
    shutil.rmtree(folder)
    return model


def announce_training(run: Run, job: inputs.Job, stage: str) -> None:
    """Stop the setup clock and say that training is about to begin."""
    job.metrics.setup_seconds = round(time.monotonic() - job.setup_began, 3)
    job.note(resumed=job.resumed)
    run.publisher.beat(stage, setup_seconds=job.metrics.setup_seconds, resumed=job.resumed)


def train(run: Run, job: inputs.Job, trainer: Any, progress: Any, guard: Any) -> None:
    """Train, timed, and refuse a result that learnt nothing."""
    began = time.monotonic()
    with run.publisher.counting("micro_steps", lambda: progress.micro_steps):
        trainer.train()
    job.metrics.wall_seconds = round(time.monotonic() - began, 3)
    job.step = trainer.state.global_step
    guard.check(job.step)
    job.note(train_wall=job.metrics.wall_seconds, nonfinite_steps=guard.nonfinite_steps)


def deliver_adapter(settings: Settings, run: Run, job: inputs.Job, trainer: Any, talk: chat.Chat) -> None:
    """Save adapter and tokenizer, and return once they are in the store."""
    folder = settings.output_dir / "adapter"
    trainers.save_adapter(trainer, talk.tokenizer, job.plan, folder)
    run.publisher.upload("adapter/", folder_files(folder, "adapter"))
    run.publisher.beat(f"{settings.mode}_trained", train_wall=job.metrics.wall_seconds, step=job.step)


def finish(settings: Settings, run: Run, job: inputs.Job) -> None:
    """Account for the run: train_meta.json, metrics.json, DONE, in this order."""
    metrics = job.metrics
    tokens = {"train_tokens": metrics.train_tokens, "generated_tokens": metrics.generated_tokens}
    meta = metrics.train_meta(settings.output_dir / "adapter")
    run.publisher.offer("train_meta.json", {"train_meta.json": run.keep("train_meta.json", meta)})
    run.publisher.beat(
        f"{settings.mode}_train_done", train_wall=metrics.wall_seconds, **tokens, step=job.step
    )
    run.publisher.upload("metrics.json", {"metrics.json": run.keep("metrics.json", metrics.to_json())})
    run.publisher.stop_pings()
    run.publisher.upload("DONE", {"DONE": run.keep("DONE", f"{time.time():.3f}")})
    run.publisher.beat("done", step=job.step)
    run.publisher.flush()
    say(f"NODE DONE: {run.redact(metrics.to_json(indent=None))}")


# --- endings ---


def replay(run: Run) -> None:
    """The job is finished already: bring its metrics back."""
    run.publisher.beat("already_done")
    run.keep("metrics.json", read_metrics(run.store))
    run.publisher.stop_pings()
    run.publisher.flush()


@retry(
    retry=retry_if_exception_type(Unavailable), stop=stop_after_attempt(3), wait=wait_fixed(2), reraise=True
)
def is_done(store: Store) -> bool:
    """Whether the job has finished; access is proven first, or no rights would look like no file."""
    store.open()
    return store.exists("DONE")


@retry(stop=stop_after_attempt(3), wait=wait_fixed(2), reraise=True)
def read_metrics(store: Store) -> str:
    try:
        text = store.read("metrics.json").decode()
        json.loads(text)
    except (StoreError, ValueError) as error:
        raise Unavailable(f"DONE is in the store and metrics.json cannot be read: {error}") from error
    return text


def report_failure(run: Run, error: BaseException) -> None:
    """Leave the traceback and the reason in the local files and in the store, whatever else fails."""
    mode = run.identity.mode
    run.publisher.stop_pings()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    header = f"{now} run {run.identity.prefix}, attempt {run.attempt}\n"
    text = header + "".join(traceback.format_exception(error))
    run.publisher.offer(f"error_{mode}.txt", {f"error_{mode}.txt": run.redact(text).encode()})
    try:
        run.local("metrics.json").unlink(missing_ok=True)
        run.keep(f"error_{mode}.txt", text)
    except OSError as problem:
        log.warning("error_%s.txt not written here: %s", mode, problem)
    run.publisher.beat(
        f"error_{mode}",
        error=run.redact(f"{type(error).__name__}: {error}")[:500],
        diag=gpu.diagnostics(),
        retriable=isinstance(error, RETRIABLE_ERRORS),
        oom=gpu.is_out_of_memory(error),
    )
    run.publisher.flush()
    time.sleep(run.identity.log_flush_s)


def check(env: MutableMapping[str, str], out: TextIO) -> None:
    """Do all of a run that needs no GPU and no weights, and write what everything resolves to."""
    identity, problem = identify(env)
    if problem is not None:
        raise problem
    settings = rules.resolve(env, identity)
    export_token(env, identity)
    job, settings = inputs.load(settings, redactor(identity.secrets))
    if settings.mode == "sft":
        _, rows, batch = inputs.for_sft(settings, job)
        lengths = [len(row.ids) for row in rows]
    else:
        talk, prompts, batch, _ = inputs.for_rl(settings, job)
        lengths = [len(talk.encode(text)) for text in prompts.texts]
    cli.print_table(settings, out)
    cli.print_facts(job.metrics.notes, batch, sorted(lengths), out)


def command(arguments: Sequence[str], env: MutableMapping[str, str]) -> int:
    """Do what the command line asks; returns the exit code."""
    cli.set_up_logging(env, redactor(secret_values(env)))
    asked = {"--help": cli.print_help, "-h": cli.print_help, "--schema": cli.print_schema}
    try:
        if not arguments:
            main(env)
        elif list(arguments) == ["--check"]:
            check(env, sys.stdout)
        elif len(arguments) == 1 and arguments[0] in asked:
            asked[arguments[0]](sys.stdout)
        else:
            raise ValueError(f"unknown arguments {' '.join(arguments)!r}: see python worker.py --help")
    except (
        BaseException
    ) as error:  # the process ends here: everything was reported, the exit code is what is left
        known = isinstance(error, ONE_LINE_ERRORS)
        log.error("%s: %s", type(error).__name__, error, exc_info=None if known else error)
        return 1
    return 0


def hard_exit(code: int) -> None:
    """Leave at once: a colocated vLLM engine may never finish an orderly shutdown."""
    with suppress(OSError, ValueError):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    hard_exit(command(sys.argv[1:], os.environ))
