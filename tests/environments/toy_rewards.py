"""Single-turn, for GRPO: a reward that any sampled text earns some of, in every form a rubric can give it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import verifiers as vf
from datasets import Dataset

QUESTIONS = [f"What is {number} + {97 - number}?" for number in range(10, 34)]


def load_environment(kind: str = "plain", rows: int = len(QUESTIONS)) -> vf.SingleTurnEnv:
    """`kind` names a rubric of RUBRICS, or one of the row variations below."""
    data: list[dict[str, Any]] = [{"question": one, "answer": one[8:10]} for one in QUESTIONS[:rows]]
    if kind == "mixed_info":
        infos = [json.dumps({"index": index, "note": note(index)}) for index in range(rows)]
        data = [{**row, "info": info} for row, info in zip(data, infos, strict=True)]
    if kind == "duplicates":
        data = [{"question": "What is 10 + 5?", "answer": str(index % 10)} for index in range(rows)]
    if kind == "some_long":
        data[1::2] = [{**row, "question": "What is " + "7" * 400} for row in data[1::2]]
    if kind == "all_long":
        data = [{**row, "question": "What is " + "7" * 400} for row in data]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(data), rubric=RUBRICS.get(kind, plain)())


def ones(completion: vf.Messages) -> float:
    """The share of ones among the first two characters; a long reply, near its budget, earns nothing."""
    text = completion[-1].content
    return text[:2].count("1") / 2 if len(text) < 6 else 0.0


def length(completion: vf.Messages) -> float:
    """The number of characters."""
    return float(len(completion[-1].content))


async def slow_ones(completion: vf.Messages) -> float:
    await asyncio.sleep(0.01)
    return ones(completion)


def rank(states: list[vf.State]) -> list[float]:
    """A group reward: the share of the group that has no more ones."""
    counts = [state["completion"][-1].content.count("1") for state in states]
    return [sum(other <= count for other in counts) / len(counts) for count in counts]


def brittle(completion: vf.Messages) -> float:
    """Raises on a reply with a seven in it."""
    if "7" in completion[-1].content:
        raise LookupError("no score for this one")
    return ones(completion)


def hopeless(completion: vf.Messages) -> float:
    raise ConnectionError("the judge is gone")


def own_answer(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1].content.startswith(answer))


def note(index: int) -> Any:
    """Something of another type for every neighbour, which no one Arrow column could hold."""
    return [index, f"n{index}", [index, "two"], {"at": index}, None, index / 2][index % 6]


def noted(completion: vf.Messages, info: dict[str, Any]) -> float:
    """Raises unless `info` is what the row was made with."""
    if info != {"index": info["index"], "note": note(info["index"])}:
        raise TypeError(f"{info} is not what the row holds")
    return ones(completion)


def plain() -> vf.Rubric:
    return vf.Rubric(funcs=[ones, length], weights=[1.0, 0.0])


RUBRICS = {
    "plain": plain,
    "async": lambda: vf.Rubric(funcs=[slow_ones]),
    "group": lambda: vf.Rubric(funcs=[rank, ones], weights=[1.0, 0.5]),
    "two_rubrics": lambda: vf.RubricGroup(
        [vf.Rubric(funcs=[ones]), vf.Rubric(funcs=[own_answer], weights=[0.5])]
    ),
    "brittle": lambda: vf.Rubric(funcs=[brittle, length], weights=[1.0, 0.0]),
    "hopeless": lambda: vf.Rubric(funcs=[hopeless]),
    "mixed_info": lambda: vf.Rubric(funcs=[noted]),
    "duplicates": lambda: vf.Rubric(funcs=[own_answer]),
    "unweighted": lambda: vf.Rubric(funcs=[length], weights=[0.0]),
}
