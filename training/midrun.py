"""Trainer callbacks: what happens between two optimizer steps.

The classes are mixins: inheriting from `TrainerCallback` here would import torch with this module.
`as_callback` joins the two when training begins.
"""

import logging
import math
from typing import Any

from accounting import Tally
from delivery.markdown import is_number
from delivery.publisher import Publisher
from training.history import MetricsStream
from training.rewards import SCORE, check_scored

log = logging.getLogger(__name__)

NONFINITE_LIMIT = 10


class GradientFailure(RuntimeError):
    """Training that cannot go anywhere: gradients that are never finite, or never anything but zero."""


def as_callback(listener: type, *args: Any) -> Any:
    """Return a `TrainerCallback` that reacts with the methods of `listener(*args)`."""
    from transformers import TrainerCallback

    return type(listener.__name__, (listener, TrainerCallback), {})(*args)


class MicroSteps:
    """Counts forward and backward passes: what pings watch while training."""

    micro_steps = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.micro_steps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.micro_steps += 1


class Losses(MicroSteps):
    """A beat at every log with a loss."""

    def __init__(self, publisher: Publisher, stream: MetricsStream):
        self.publisher, self.stream = publisher, stream

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            files = self.stream.file(state.log_history)
            facts = {"step": state.global_step, "steps": state.max_steps, "loss": logs["loss"]}
            self.publisher.beat("sft_step", files, **facts)


class Rewards(MicroSteps):
    """A beat at every log with a reward."""

    def __init__(self, publisher: Publisher, stream: MetricsStream, tally: Tally):
        self.publisher, self.stream, self.tally = publisher, stream, tally

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if not is_number(logs.get("reward")):
            return
        self.publisher.beat(
            "rl_step",
            self.stream.file(state.log_history),
            step=state.global_step,
            steps=state.max_steps,
            reward=float(logs["reward"]),
            reward_last=reward_history(state)[-8:],
            rewards={
                name.removeprefix(SCORE): value for name, value in logs.items() if name.startswith(SCORE)
            },
            unscorable=self.tally.unscorable,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Why there was no gradient, before the guard says that there was none.
        check_scored(self.tally)


def reward_history(state: Any) -> list[float]:
    """The mean rewards of all attempts: a resumed trainer's log goes on from its checkpoint's."""
    return [float(one["reward"]) for one in state.log_history if is_number(one.get("reward"))]


class GradientGuard:
    """Drops an update whose gradients are not finite, and knows whether any gradient was ever non-zero.

    Dropped gradients are None, so the optimizer and its moments stay as they were.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally, self.nonfinite_in_a_row = tally, 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        import torch

        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1)
        largest = norms.max().item()
        if math.isfinite(largest):
            self.tally.has_gradient |= largest > 0
            self.nonfinite_in_a_row = 0
            return
        self.tally.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        log.warning("step %d: gradients are not finite, the update is skipped", state.global_step + 1)
        for parameter in model.parameters():
            parameter.grad = None
        if self.nonfinite_in_a_row >= NONFINITE_LIMIT:
            raise GradientFailure(
                f"gradients were not finite in {NONFINITE_LIMIT} updates in a row; lower train.learning_rate"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step and not self.tally.has_gradient:
            raise GradientFailure(
                "no gradient was ever non-zero: nothing was learnt (SFT_LIGER, LORA_TARGETS, rewards)"
            )
