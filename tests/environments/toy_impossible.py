"""Single-turn: a reward function that needs what the library cannot give it, alone or inside a group."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def load_environment(weight: float = 1.0, nested: bool = False, grouped: bool = False) -> vf.Environment:
    """`nested` hides the rubric in a group of rubrics, `grouped` in a group of environments."""
    rubric = vf.Rubric(funcs=[length, by_oracle], weights=[1.0, weight])
    one = vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "Say one.", "answer": "one"}]),
        rubric=vf.RubricGroup([vf.Rubric(funcs=[length]), rubric]) if nested else rubric,
    )
    return vf.EnvGroup([one], env_names=["one"]) if grouped else one


def length(completion: vf.Messages) -> float:
    """Characters of the reply."""
    return float(len(completion[-1].content))


def by_oracle(completion: vf.Messages, oracle: object) -> float:
    """Nothing hands over an oracle."""
    return 1.0
