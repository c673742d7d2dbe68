"""The trainer's log history: what the libraries do not measure is added, and all of it is `metrics.jsonl`."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delivery.report import LOG, SUMMARY, metrics_jsonl

GB = 1e9


class MeasuredTrainer:
    """Adds tokens per second and memory to what a trainer logs. A mixin, as importing TRL is not free."""

    sampling_passes = 0  # forward passes, or steps of the engine, that made tokens
    measured_at: tuple[float, int] | None = None  # seconds, tokens

    @property
    def tokens_so_far(self: Any) -> int:
        """Tokens trained on, without padding."""
        return self.state.num_input_tokens_seen

    def pause(self: Any, seconds: float) -> None:
        """Do not count these seconds as training."""
        if self.measured_at is not None:
            began, tokens = self.measured_at
            self.measured_at = began + seconds, tokens

    def log(self: Any, logs: dict[str, Any], start_time: float | None = None) -> None:
        if SUMMARY not in logs:
            now, tokens = time.monotonic(), self.tokens_so_far
            if self.measured_at is not None:
                began, before = self.measured_at
                logs["tokens_per_second"] = (tokens - before) / (now - began)
            self.measured_at = now, tokens
            logs["memory_gb"] = memory_bytes(self.args.device) / GB
        super().log(logs, start_time)  # type: ignore[misc]


def memory_bytes(device: Any) -> int:
    """Bytes in use on the card, by whatever uses it; without a card the most this process ever had."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


class MetricsStream:
    """`metrics.jsonl` as it grows."""

    def __init__(self, redact: Callable[[str], str]):
        self.redact, self._content, self._count = redact, b"", 0

    def file(self, history: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """The file with all that the trainer has logged, earlier attempts' steps included."""
        new = metrics_jsonl(history[self._count :]).decode()
        self._content, self._count = self._content + self.redact(new).encode(), len(history)
        return {LOG: self._content}
