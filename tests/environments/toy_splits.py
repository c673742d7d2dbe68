"""Single-turn: a training split, and an evaluation split that is whole, lazy, empty, missing or broken."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def load_environment(evaluation: str = "whole", lazy: bool = False) -> vf.SingleTurnEnv:
    """Twenty training rows; `lazy` hands the library a function that builds them."""
    train, held_out = numbers(range(20)), numbers(range(100, 110))
    splits = {
        "whole": held_out,
        "lazy": lambda: held_out,
        "empty": numbers(range(0)),
        "missing": None,
        "broken": broken,
    }
    return vf.SingleTurnEnv(
        dataset=(lambda: train) if lazy else train,
        eval_dataset=splits[evaluation],
        rubric=vf.Rubric(funcs=[weighted_by_size, ignored], weights=[0.5, 0.0]),
        pass_threshold=0.25,
    )


def numbers(values: range) -> Dataset:
    """One row a number, with a column of the environment's own."""
    return Dataset.from_dict(
        {
            "question": [f"Say {value}." for value in values],
            "answer": [str(value) for value in values],
            "size": list(values),
        }
    )


def broken() -> Dataset:
    """A split whose source is gone."""
    raise FileNotFoundError("held-out.parquet")


def weighted_by_size(completion: vf.Messages, answer: str, size: int) -> float:
    """Needs a column of the rows."""
    return float(answer in completion[-1].content) * size


def ignored(nonsense: object) -> float:
    """Needs what nobody has, but weighs nothing."""
    return 0.0
