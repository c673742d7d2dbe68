"""Fine-tune a LoRA adapter on one rented GPU: `RUN_MODE=sft|rl python worker.py`.

Reads a JobSpec and environment variables, trains with TRL on a verifiers environment, and streams heartbeats,
checkpoints, the adapter, `metrics.json` and a `DONE` sentinel to a Hugging Face dataset repository or a
folder. A worker that starts where another was taken away goes on from its newest checkpoint.
"""

import json
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from delivery.errors import StoreError, Superseded, Unavailable
from delivery.hub_client import export_token
from delivery.patience import ask_again
from delivery.redaction import redactor
from delivery.store import Store
from delivery.terminal import say, set_up_logging
from job import cli, prefetch, repository, rules, weights
from job.given import secret_values
from job.knobs import early
from job.settings import Settings, identify
from training import (
    delivering,
    engine,
    gpu,
    inputs,
    midrun,
    rehearsal,
    rewards,
    saving,
    trainers,
    warm_start,
)
from training.observers import Observers, observe
from training.preemption import EXIT_CODE, Preempted, Signals
from training.reporting import Files
from training.run import Run

log = logging.getLogger("worker")

ONE_LINE_ERRORS = (
    ValueError,
    StoreError,
    gpu.GpuNotReady,
    repository.ModelUnreachable,
    midrun.GradientFailure,
    rewards.NothingScored,
    engine.EngineProblem,
)
FIRST_FLUSH_S = 10.0
RETRIABLE_ERRORS = (Unavailable, gpu.GpuNotReady, repository.ModelUnreachable)


def main(env: MutableMapping[str, str], signals: Signals | None = None) -> None:
    """Run one job from beginning to end; reports any failure, then raises it unchanged."""
    identity, problem = identify(env)
    run = Run(identity, signals)
    run.start()
    try:
        run.clear()
        if problem is not None:
            raise problem
        export_token(env, identity.token)
        if is_done(run.store):
            replay(run)
            return
        run.publisher.note_owner()
        run.publisher.beat("boot")
        settings = rules.resolve(env, identity)
        cli.announce(settings)
        {"sft": run_sft, "rl": run_rl}[settings.mode](settings, run)
    except Preempted:
        run.preemption.leave(run.preemption.left_s())
        raise
    except BaseException as error:
        if run.preemption.reason:  # its children may have got the signal too: what breaks now is no failure
            log.warning("while it was leaving: %s", said(error))
            run.preemption.leave(run.preemption.left_s())
            run.preemption.check()
        try:
            report_failure(run, error)
        except Exception:
            log.exception("the failure could not be told in full")
        raise
    finally:
        run.close()


# --- the two jobs ---


def run_sft(settings: Settings, run: Run) -> None:
    """Supervised fine-tuning."""
    job, settings = load(settings, run)
    talk, rows, batch = inputs.for_sft(settings, job, run.check)
    prepare(settings, run, job)
    policy, checkpoint = warm_start.policy(settings, job.plan, job.adapter), resume(run, job)
    announce_training(run, job, "sft_model_load")
    observers = observe(settings, run, job)
    trainer = trainers.sft_trainer(settings, job.plan, talk, rows, batch, observers.callbacks, policy)
    train(run, job, trainer, observers, checkpoint)
    job.note(epochs=settings.sft_epochs)
    delivering.deliver(settings, run, job, trainer, talk)
    finish(settings, run, job, observers.reporter.later(trainer.state, finished=True))


def run_rl(settings: Settings, run: Run) -> None:
    """Reinforcement learning with GRPO."""
    job, settings = load(settings, run)
    talk, prompts, batch, way = inputs.for_rl(settings, job, run.tally, run.check)
    prepare(settings, run, job)
    policy, checkpoint = warm_start.policy(settings, job.plan, job.adapter), resume(run, job)
    announce_training(run, job, "rl_train_start")
    observers = observe(settings, run, job, way)
    trainer = trainers.grpo_trainer(
        settings, job.plan, talk, prompts, batch, way, observers.callbacks, policy
    )
    train(run, job, trainer, observers, checkpoint)
    history = midrun.reward_history(trainer.state)
    rewards.check(settings, history, run.tally)
    job.note(**rewards.notes(settings, trainer.args, history, run.tally))
    delivering.deliver(settings, run, job, trainer, talk)
    finish(settings, run, job, observers.reporter.later(trainer.state, finished=True))


# --- the steps they share ---


def load(settings: Settings, run: Run) -> tuple[inputs.Job, Settings]:
    """Environment, model and the checkpoints of earlier attempts."""
    job, settings = inputs.load(settings, run.redact, run.checkpoints.find())
    run.preemption.take_signals()
    return job, settings


def prepare(settings: Settings, run: Run, job: inputs.Job) -> None:
    """Start the setup clock, wait for the device, and, all else being ready, for the weights."""
    run.publisher.beat(f"{settings.mode}_start")
    job.setup_began = time.monotonic()
    # Of an earlier run in this folder, whose checkpoints rotation would count.
    shutil.rmtree(settings.output_dir, ignore_errors=True)
    with run.publisher.counting("bytes", prefetch.cache_bytes):
        gpu.wait_for_gpu(settings.device, need=weights.card_need(settings, job.plan))
        trainers.import_stack(settings)
        job.adapter = warm_start.fetch(settings, job.plan)
        download_seconds = job.prefetch.wait()
    job.note(download_seconds=download_seconds)
    run.publisher.beat(
        "model_prefetched",
        model=job.plan.source,
        download_seconds=download_seconds,
        hf_transfer=settings.hf_transfer,
    )


def resume(run: Run, job: inputs.Job) -> Path | None:
    """Bring the newest checkpoint that an earlier attempt streamed and that is whole; None starts afresh."""
    folder = run.local("resume")
    job.resumed_from = run.checkpoints.bring(job.found, folder)
    if job.resumed_from is None:
        return None
    log.info("going on from checkpoint-%d", job.resumed_from.step)
    run.tally.go_on_from(job.resumed_from.totals)
    return folder


def announce_training(run: Run, job: inputs.Job, stage: str) -> None:
    """Stop the setup clock and say that training is about to begin."""
    job.metrics.setup_seconds = round(time.monotonic() - job.setup_began, 3)
    resumed = job.resumed_from is not None
    job.note(resumed=resumed)
    run.publisher.beat(stage, setup_seconds=job.metrics.setup_seconds, resumed=resumed)


def train(run: Run, job: inputs.Job, trainer: Any, observers: Observers, checkpoint: Path | None) -> None:
    """Train, timed, until the target or until the machine is taken away."""
    observers.evaluations.get_trainer = lambda: trainer
    trainer.announce = partial(run.publisher.beat, "micro_batch_halved")
    run.trackers.watch(trainer, run.store.location, resumed=checkpoint is not None)

    def passes() -> int:
        return observers.progress.micro_steps + trainer.sampling_passes

    with run.publisher.counting("passes", passes), run.preemption.can_stop():
        try:
            saving.train(trainer, checkpoint)
            observers.evaluations.finish(trainer.state)
            run.check()
        except Preempted:
            saving.save_now(trainer, run.preemption.left_s())
            raise
    run.publisher.hurry()
    job.note(micro_batch=trainer.micro_batch)
    job.account(run.tally, run.attempt)


def finish(settings: Settings, run: Run, job: inputs.Job, report: Callable[[], Files]) -> None:
    """Account for the run: train_meta.json and the report, metrics.json, DONE, in this order."""
    metrics, step = job.metrics, run.tally.step
    run.trackers.close(0)
    run.trackers.wait()
    meta = run.keep_if_possible("train_meta.json", metrics.train_meta(settings.output_dir / "adapter"))
    run.publisher.beat(
        f"{settings.mode}_train_done",
        {"train_meta.json": meta, **report()},
        train_wall=metrics.wall_seconds,
        train_tokens=metrics.train_tokens,
        generated_tokens=metrics.generated_tokens,
        step=step,
    )
    run.check()  # of a run that was asked to stop there are no metrics
    run.publisher.upload("metrics.json", {"metrics.json": run.keep("metrics.json", metrics.to_json())})
    run.publisher.stop_pings()
    run.check()  # and it is not done
    run.publisher.upload("DONE", {"DONE": run.keep("DONE", f"{time.time():.3f}")}, "done", step=step)
    run.publisher.flush()
    run.clear_scratch()
    say(f"NODE DONE: {run.redact(metrics.to_json(indent=None))}")


# --- endings ---


def replay(run: Run) -> None:
    """The job is finished already: bring its metrics back."""
    run.publisher.beat("already_done")
    run.keep("metrics.json", read_metrics(run.store))
    run.publisher.stop_pings()
    run.publisher.flush()


@ask_again
def is_done(store: Store) -> bool:
    """Whether the job has finished; access is proven first, or no rights would look like no file."""
    store.open()
    return store.exists("DONE")


@ask_again
def read_metrics(store: Store) -> str:
    """The finished job's metrics; Unavailable when they cannot be had, whatever the reason."""
    try:
        text = store.read("metrics.json").decode()
        json.loads(text)
    except (StoreError, ValueError) as error:
        raise Unavailable(f"DONE is in the store and metrics.json cannot be read: {error}") from error
    return text


def report_failure(run: Run, error: BaseException) -> None:
    """Leave the traceback and the reason in the local files and in the store, whatever else fails."""
    mode = run.identity.mode
    with suppress(OSError):  # a work directory that is none
        run.take_back()  # first of all, lest a failure look like success
    run.trackers.close(1)
    run.publisher.stop_pings()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    header = f"{now} run {run.identity.prefix}, attempt {run.attempt}\n"
    text = header + "".join(traceback.format_exception(error))
    content = run.keep_if_possible(f"error_{mode}.txt", text)
    run.publisher.flush(FIRST_FLUSH_S)  # so that the failure is the newest thing that is told
    run.publisher.beat(
        "superseded" if isinstance(error, Superseded) else f"error_{mode}",
        {f"error_{mode}.txt": content},
        error=run.redact(said(error))[:500],
        diag=gpu.diagnostics(),
        retriable=isinstance(error, RETRIABLE_ERRORS),
        oom=gpu.is_out_of_memory(error),
    )
    run.publisher.flush()
    time.sleep(run.identity.log_flush_s)
    run.trackers.wait()


def said(error: BaseException) -> str:
    """An error in a line, also one that cannot say what it is."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def command(arguments: Sequence[str], env: MutableMapping[str, str]) -> int:
    """Do what the command line asks; returns the exit code."""
    set_up_logging(early(Settings, "log_level", env), env, redactor(secret_values(env)))
    asked = {"--help": cli.print_help, "-h": cli.print_help, "--schema": cli.print_schema}
    try:
        if not arguments:
            main(env, Signals())
        elif list(arguments) == ["--check"]:
            rehearsal.rehearse(env, sys.stdout)
        elif len(arguments) == 1 and arguments[0] in asked:
            asked[arguments[0]](sys.stdout)
        else:
            raise ValueError(f"unknown arguments {' '.join(arguments)!r}: see python worker.py --help")
    except Preempted as stop:
        log.warning("%s: unfinished, to be resumed", stop)
        return EXIT_CODE
    except BaseException as error:  # everything was reported: the exit code is what is left
        known = isinstance(error, ONE_LINE_ERRORS)
        log.error("%s", said(error), exc_info=None if known else error)
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
