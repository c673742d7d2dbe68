"""Experiment trackers: the library's callbacks, none of which may end a run, closed before it ends."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from job.settings import Settings
from training.preemption import EXIT_CODE

log = logging.getLogger(__name__)

PROJECT = "slm-worker"
CLOSE_S = 15.0
MLFLOW_STATUS = {0: "FINISHED", 1: "FAILED"}

Close = Callable[[int], Any]  # given the run's exit code


def arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of a trainer's config; what a tracker puts on the Hub is private and nothing more."""
    if not settings.report_to:
        return {"report_to": []}
    return {
        "report_to": list(dict.fromkeys(settings.report_to)),
        "run_name": settings.prefix,
        "project": PROJECT,
        "hub_private_repo": True,
        "trackio_static_space_id": False,
    }


class Trackers:
    """The trackers of one attempt; without any it does nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Close] = {}
        self._closing: list[threading.Thread] = []

    def watch(self, trainer: Any, location: str, resumed: bool) -> None:
        """Make a trainer's trackers safe, and the run at `location` one run, however often it is resumed."""
        from transformers.integrations import INTEGRATION_TO_CALLBACK

        for name in trainer.args.report_to:
            [tracker] = [
                one
                for one in trainer.callback_handler.callbacks
                if type(one) is INTEGRATION_TO_CALLBACK[name]
            ]
            self._guard(name, tracker, location, resumed)

    def _guard(self, name: str, tracker: Any, location: str, resumed: bool) -> None:
        """Replace a callback's methods by ones that give up for good when the tracker fails."""
        lost, begun = False, False
        begin = tracker.on_train_begin

        def safely(event: Callable[..., Any]) -> Callable[..., None]:
            def call(*args: Any, **kwargs: Any) -> None:
                nonlocal lost
                try:
                    if not lost and (begun or event is opened):  # a run that is at its target never begins
                        event(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - a service's, of any of four libraries
                    lost = True
                    log.warning("%s cannot be reached, going on without it: %s", name, error)

            return call

        def opened(args: Any, *more: Any, **kwargs: Any) -> None:
            nonlocal begun
            begun = True
            OPENERS.get(name, _nothing)(args, location, resumed)
            begin(args, *more, **kwargs)
            self.open(name, CLOSERS[name](tracker))

        tracker.on_train_begin = safely(opened)
        tracker.on_log = safely(tracker.on_log)
        tracker.on_save = safely(tracker.on_save)
        tracker.on_train_end = _nothing  # it is closed when the run has ended

    def open(self, name: str, close: Close) -> None:
        """Have `close` called with the run's exit code when it ends."""
        with self._lock:
            self._open[name] = close

    def close(self, code: int) -> None:
        """Begin to tell every tracker that the run ended with this exit code; the first call counts."""
        with self._lock:
            for name, closer in self._open.items():
                thread = threading.Thread(target=_close, args=(name, closer, code), name=name, daemon=True)
                thread.start()
                self._closing.append(thread)
            self._open = {}

    def wait(self, limit_s: float = CLOSE_S) -> None:
        """Wait for that, `limit_s` at most."""
        until = time.monotonic() + limit_s
        for thread in self._closing:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("%s was not closed in time", thread.name)


def _close(name: str, closer: Close, code: int) -> None:
    try:
        closer(code)
    except Exception as error:  # noqa: BLE001 - a service's, of any of four libraries
        log.warning("%s is not closed: %s", name, error)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a step that there is not."""


def open_wandb(args: Any, location: str, resumed: bool) -> None:
    """Start W&B's run under an id of its own, which a resumed run goes on with; WANDB_* variables win."""
    import wandb

    given = wandb.setup().settings
    own_folder = Path(given.root_dir) != Path.cwd()
    wandb.init(
        project=given.project or PROJECT,
        name=given.run_name or args.run_name,
        id=given.run_id or hashlib.sha256(location.encode()).hexdigest()[:16],
        resume=given.resume or ("allow" if resumed else None),
        dir=given.root_dir if own_folder else args.output_dir,
        settings=wandb.Settings(console="off"),  # standard output is the launcher's
    )


def close_wandb(tracker: Any) -> Close:
    import wandb

    run: Any = wandb.run

    def close(code: int) -> None:
        if code == EXIT_CODE:
            run.mark_preempting()
        run.finish(code)
        wandb.teardown(code)

    return close


def quiet_trackio(*_: Any) -> None:
    """Keep what trackio says, some of it in colours, out of standard output, which is the launcher's.

    trackio 0.43 prints without asking; to be removed when it can be told not to.
    """
    import trackio
    from trackio import run, utils

    for module in (trackio, run, utils):
        vars(module)["print"] = lambda *said, **_: log.debug("trackio: %s", said)


def close_trackio(tracker: Any) -> Close:
    import trackio

    run: Any = trackio.context_vars.current_run.get()  # which other threads do not see
    return lambda code: run.finish()


def close_tensorboard(tracker: Any) -> Close:
    return lambda code: tracker.tb_writer.close()


def close_mlflow(tracker: Any) -> Close:
    import mlflow

    run_id = mlflow.active_run().info.run_id  # which other threads do not see

    def close(code: int) -> None:
        mlflow.flush_async_logging()
        mlflow.MlflowClient().set_terminated(run_id, MLFLOW_STATUS.get(code, "KILLED"))

    return close


OPENERS: dict[str, Callable[[Any, str, bool], None]] = {"wandb": open_wandb, "trackio": quiet_trackio}
CLOSERS = {
    "wandb": close_wandb,
    "trackio": close_trackio,
    "tensorboard": close_tensorboard,
    "mlflow": close_mlflow,
}
