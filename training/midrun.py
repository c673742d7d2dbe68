"""Trainer callbacks: what happens between two optimizer steps.

The classes are mixins: inheriting from `TrainerCallback` here would import torch with this module.
`as_callback` joins the two when training begins.
"""

import logging
import math
from typing import Any

from delivery.publisher import Publisher
from training.rewards import SCORE, Tally

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

    def __init__(self, publisher: Publisher):
        self.publisher = publisher

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.publisher.beat("sft_step", step=state.global_step, loss=logs["loss"])


class Rewards(MicroSteps):
    """The history of mean rewards, and a beat at each."""

    def __init__(self, publisher: Publisher, tally: Tally):
        self.publisher, self.tally, self.history = publisher, tally, list[float]()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        reward = logs.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            return
        self.history.append(float(reward))
        self.publisher.beat(
            "rl_step",
            step=state.global_step,
            reward=float(reward),
            reward_last=self.history[-8:],
            rewards={
                name.removeprefix(SCORE): value for name, value in logs.items() if name.startswith(SCORE)
            },
            unscorable=self.tally.unscorable,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tally.check()  # the reason why there was no gradient, before the guard says that there was none


class GradientGuard:
    """Drops an update whose gradients are not finite, and knows whether any gradient was ever non-zero.

    Dropped gradients are None, so the optimizer and its moments stay as they were.
    """

    def __init__(self) -> None:
        self.nonfinite_steps, self.nonfinite_in_a_row, self.any_nonzero = 0, 0, False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        import torch

        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1)
        largest = norms.max().item()
        if math.isfinite(largest):
            self.any_nonzero |= largest > 0
            self.nonfinite_in_a_row = 0
            return
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        log.warning("step %d: gradients are not finite, the update is skipped", state.global_step + 1)
        for parameter in model.parameters():
            parameter.grad = None
        if self.nonfinite_in_a_row >= NONFINITE_LIMIT:
            raise GradientFailure(
                f"gradients were not finite in {NONFINITE_LIMIT} updates in a row; lower train.learning_rate"
            )

    def check(self, steps_made: int) -> None:
        """Raise GradientFailure when updates were made and none had a gradient."""
        if steps_made and not self.any_nonzero:
            raise GradientFailure(
                "no gradient was ever non-zero: nothing was learnt (SFT_LIGER, LORA_TARGETS, rewards)"
            )
