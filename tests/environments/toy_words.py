"""Single-turn: spell a word backwards. Rows have `question` and `answer`."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

WORDS = [
    "ant",
    "bee",
    "cat",
    "dog",
    "eel",
    "fox",
    "gnu",
    "hen",
    "ibex",
    "jay",
    "koi",
    "lynx",
    "mole",
    "newt",
    "owl",
    "pug",
    "rat",
    "seal",
    "toad",
    "wolf",
    "yak",
    "zebu",
]


def load_environment(
    size: int = len(WORDS), answers: list[str] | None = None, thoughts: bool = False
) -> vf.SingleTurnEnv:
    """The first `size` words; `answers` replace the right ones, `thoughts` put reasoning before them."""
    rows = [{"question": f"Spell {word} backwards.", "answer": word[::-1]} for word in WORDS[:size]]
    for row, answer in zip(rows, answers or [], strict=False):
        row["answer"] = answer
    if thoughts:
        for row in rows:
            row["answer"] = f"<think>\n{'-'.join(row['answer'])}\n</think>\n\n{row['answer']}"
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows) if rows else Dataset.from_dict({"question": [], "answer": []}),
        eval_dataset=Dataset.from_list([{"question": "Spell emu backwards.", "answer": "ume"}]),
        rubric=vf.Rubric(funcs=[exact], weights=[1.0]),
    )


def exact(completion: vf.Messages, answer: str) -> float:
    """1 for the reversed word and nothing else."""
    return float(completion[-1].content == answer)
