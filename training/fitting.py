"""A batch that overflows the card goes through the model in parts: same data and update, less memory.

Dataloader and accumulation of the library stay as they are, and so does the order of the data. The classes
are mixins: inheriting from the library's here would import torch with this module.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Row = TypeVar("Row")
Drawn = TypeVar("Drawn")

FIRST_STEPS = 3  # a later overflow is a leak, which smaller parts would only put off
MOST_PARTS = 4


class FittingTrainer:
    """Halves the micro-batch when the GPU runs out of memory in the first steps, at most twice."""

    parts = 1
    first_step: int | None = None
    is_prepared = False
    share = 1.0

    def announce(self, **facts: Any) -> None:
        """Called with step, micro-batch and accumulation when they change; the worker puts its own here."""

    @property
    def micro_batch(self: Any) -> dict[str, int]:
        """Sequences that are in the model at once, and how often per optimizer step."""
        micro, accumulation = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        return {"micro": -(-micro // self.parts), "accumulation": accumulation * self.parts}

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if self.first_step is None:
            self.first_step = self.state.global_step
        model.train()
        inputs = self._prepare_inputs(inputs)  # in GRPO this samples: once, however often a step is tried
        kept = gradients(self.model) if self._is_early() else []
        while True:
            try:
                return self._in_parts(model, inputs, *args, **kwargs)
            except torch.OutOfMemoryError as error:
                self._halve(error)
            for parameter, gradient in kept:  # without what the interrupted backward pass has added
                parameter.grad = None if gradient is None else gradient.clone()

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        return loss if self.share == 1.0 else loss * self.share

    def _prepare_inputs(self: Any, inputs: Any) -> Any:
        return inputs if self.is_prepared else super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _in_parts(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        total, calls = 0.0, vars(self).get("_step")
        self.is_prepared = True
        try:
            for part, share in split(inputs, self.parts):
                if calls is not None:
                    self._step = calls  # TRL counts how often it is called to know when to sample anew
                self.share = self._weight(share)
                total = total + super().training_step(model, part, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.is_prepared, self.share = False, 1.0
        return total

    def _weight(self, share: float) -> float:
        """SFT's loss is divided by the tokens of the whole step: that of the parts adds up."""
        return 1.0

    def _is_early(self: Any) -> bool:
        return self.first_step is None or self.state.global_step - self.first_step < FIRST_STEPS

    def _halve(self: Any, error: BaseException) -> None:
        """Go on with half the micro-batch; raises the error when there is none, or it is too late."""
        if self.parts == MOST_PARTS or self.micro_batch["micro"] == 1 or not self._is_early():
            raise error
        self.parts *= 2
        release_memory(error, f"with {self.micro_batch}")
        self.announce(step=self.state.global_step, **self.micro_batch)


class FittingPolicy(FittingTrainer):
    """The same for GRPO, whose loss is a mean over samples, and which also scores them without gradients."""

    def _weight(self, share: float) -> float:
        return share

    def _get_per_token_logps_and_entropies(
        self: Any, model: Any, ids: Any, mask: Any, kept: Any, batch_size: int | None = None, **more: Any
    ) -> Any:
        import torch

        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        while True:
            size = None if batch_size is None else -(-batch_size // self.parts)
            try:
                return score(model, ids, mask, kept, size, **more)
            except torch.OutOfMemoryError as error:
                if batch_size is None:
                    raise  # in a step, which is tried again as a whole
                self._halve(error)


class InParts:
    """Samples in parts, twice as many whenever the GPU runs out of memory, at most four; remembers how many.

    Sequences are sampled independently of each other: parts draw other samples, from the same distribution.
    """

    parts = 1

    def __call__(
        self, rows: Sequence[Row], sample: Callable[[Sequence[Row]], Iterable[Drawn]]
    ) -> list[Drawn]:
        """What `sample` makes of all rows, in their order."""
        import torch

        drawn: list[Drawn] = []
        while len(drawn) < len(rows):
            size = -(-len(rows) // self.parts)
            try:
                drawn += sample(rows[len(drawn) : len(drawn) + size])
            except torch.OutOfMemoryError as error:
                if self.parts == MOST_PARTS or size == 1:
                    raise
                self.parts *= 2
                release_memory(error, f"sampling {-(-len(rows) // self.parts)} sequences at once")
        return drawn


@contextmanager
def keeping_checkpointing(trainer: Any) -> Iterator[None]:
    """Leave gradient checkpointing as it was; TRL 1.16 leaves it off when sampling fails.

    To be removed when TRL's `unwrap_model_for_generation` restores it after an exception.
    """
    try:
        yield
    except BaseException:
        if trainer.args.gradient_checkpointing:
            trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        raise


def release_memory(error: BaseException, how: str) -> None:
    """Give what an interrupted pass has left back to the card, and say how the run goes on."""
    import torch

    log.warning("out of memory, going on %s: %s", how, str(error).partition("\n")[0][:200])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gradients(model: Any) -> list[tuple[Any, Any]]:
    """What is trained, and copies of what it has accumulated: adapters are small."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return [(one, None if one.grad is None else one.grad.clone()) for one in trained]


def split(inputs: Mapping[str, Any], parts: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the sequences of a batch in up to `parts` parts, each with its share of them (0 to 1)."""
    if parts == 1:
        yield dict(inputs), 1.0
        return
    rows = len(next(one for one in inputs.values() if has_rows(one)))
    size = -(-rows // parts)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        part = {name: one[first:last] if has_rows(one) else one for name, one in inputs.items()}
        yield part, (last - first) / rows


def has_rows(value: Any) -> bool:
    """Whether a batch's value has an entry per sequence; some are a number for all of them."""
    import torch

    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)
