"""Checkpoints of a trainer at work: saved, streamed, and gone on from.

The trainer classes are mixins: inheriting from the library's here would import torch with this module.
"""

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accounting import Tally
from delivery.checkpoints import Checkpoints
from delivery.store import Content

log = logging.getLogger(__name__)

FULL_DISK_BYTES = 64 << 20


class SavingTrainer:
    """What the library's trainers lack: a full disk costs a checkpoint, not the run; saves are timed."""

    save_seconds = 0.0
    saved_step = 0

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        from safetensors import SafetensorError

        folder, began = Path(self.args.output_dir), time.monotonic()
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(folder / f"checkpoint-{self.state.global_step}", ignore_errors=True)
            if shutil.disk_usage(folder).free > FULL_DISK_BYTES:
                raise
            log.warning("checkpoint-%d is not saved, the disk is full: %s", self.state.global_step, error)
            return
        self.save_seconds, self.saved_step = time.monotonic() - began, self.state.global_step


class Streaming:
    """Streams every save, keeps the totals current, and looks where stopping is safe whether to stop."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        job: Mapping[str, Any],
        model_commit: str | None,
        tally: Tally,
        check: Callable[[], None],
        report: Callable[[Any], Callable[[], Mapping[str, Content]]],
    ):
        """`job` says what is trained, on what; `check` raises when the run has to stop.

        `report` takes the trainer's state and returns what will make the files that go with a checkpoint.
        """
        self.checkpoints, self.job, self.model_commit = checkpoints, job, model_commit
        self.tally, self.check, self.report = tally, check, report

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._wall_before, self._began = self.tally.train_wall, time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tally.step = state.global_step
        self.check()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._account(args, state)
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if saved.is_dir():
            self.checkpoints.stream(
                saved,
                state.global_step,
                self.job,
                self.model_commit,
                self.tally.totals(),
                self.report(state),
            )
        else:
            self.checkpoints.lost(state.global_step, "the disk is full")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._account(args, state)

    def _account(self, args: Any, state: Any) -> None:
        self.tally.step = state.global_step
        self.tally.train_wall = round(self._wall_before + time.monotonic() - self._began, 3)
        if args.include_num_input_tokens_seen != "no":
            self.tally.train_tokens = state.num_input_tokens_seen


def train(trainer: Any, checkpoint: Path | None) -> None:
    """Train, going on from a checkpoint; one that is at the target already is only loaded."""
    if checkpoint is None:
        trainer.train()
        return
    from transformers import TrainerState
    from transformers.trainer import TRAINER_STATE_NAME

    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    trainer.saved_step = state.global_step  # what is in the store already needs no second save
    if state.global_step < state.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    else:  # the library would make one step more
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = state


def save_now(trainer: Any, left_s: float) -> None:
    """Save and stream between two steps, when that was not done already and its time fits."""
    step = trainer.state.global_step
    if step in (0, trainer.saved_step):
        return
    if trainer.save_seconds > left_s:
        log.warning(
            "step %d is not saved: that took %.0f s, %.0f s are left", step, trainer.save_seconds, left_s
        )
        return
    trainer._save_checkpoint(trainer.model, trial=None)
    trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
