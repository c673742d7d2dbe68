"""Single-turn: rows are `prompt` message lists and carry `info` as JSON text."""

from __future__ import annotations

import json

import verifiers as vf
from datasets import Dataset


def load_environment(system_prompt: str | None = "Be brief.") -> vf.SingleTurnEnv:
    """Four rows; the messages have different keys, so Arrow fills the missing ones with nulls."""
    plain = [{"role": "user", "content": "Say one."}]
    named = [{"role": "user", "name": "ann", "content": "Say two."}]
    led = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say three."}]
    parts = [{"role": "user", "content": "Say four."}]
    rows = [
        {"prompt": plain, "answer": "one", "info": json.dumps({"level": 1})},
        {"prompt": named, "answer": "two", "info": "not JSON"},
        {"prompt": led, "answer": "three", "info": json.dumps([1, 2])},
        {"prompt": parts, "answer": "", "info": json.dumps({"level": 4})},
    ]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), system_prompt=system_prompt, rubric=vf.Rubric(funcs=[by_level])
    )


def by_level(completion: vf.Messages, answer: str, info: dict) -> float:
    """The level of the row, for an answer that is in the completion."""
    return float(info.get("level", 0)) if answer in completion[-1].content else 0.0
