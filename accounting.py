"""What a run used and produced, as measured."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON text in which NaN and infinities are null and unknown objects are their text."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


@dataclass
class RunMetrics:
    """The content of `metrics.json`: wall-clock seconds, tokens without padding or, generated, prompts."""

    arm: str = "runpod"
    phase: str = ""
    seed: int = 0
    model_id: str = ""
    wall_seconds: float = 0.0
    setup_seconds: float = 0.0
    train_tokens: int = 0
    generated_tokens: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def train_throughput_toks_per_s(self) -> float:
        """Tokens generated, or trained on when none were, per second of training; 0 without training time."""
        return (self.generated_tokens or self.train_tokens) / self.wall_seconds if self.wall_seconds else 0.0

    def to_json(self) -> str:
        """Strict JSON, indented by 2."""
        return strict_json(
            {**asdict(self), "train_throughput_toks_per_s": self.train_throughput_toks_per_s}, indent=2
        )
