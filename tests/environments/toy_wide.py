"""Single-turn: every way a row can name its target, and rewards for single replies and for groups."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.SingleTurnEnv:
    """Rows whose target is in another column each; the last one has none."""
    fields = ["answer", "completion", "target", "response"]
    rows = [
        {"question": f"Say {name}.", **{other: name if other == name else "" for other in fields}}
        for name in fields
    ]
    rows.append({"question": "Say nothing.", **dict.fromkeys(fields, "")})
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[spread, anything, one], weights=[1.0, 1.0, 0.5]),
    )


def spread(completions: list[vf.Messages], answers: list[str]) -> list[float]:
    """Group reward: how far each reply is from the shortest."""
    sizes = [len(one[-1].content) for one in completions]
    return [float(size - min(sizes)) for size in sizes]


def anything(**kwargs: object) -> float:
    """Takes whatever there is."""
    return float(len(kwargs))


async def one(completion: vf.Messages, bonus: float = 1.0) -> float:
    """Asynchronous, with an argument that has a default."""
    return bonus
