"""A small verifiers environment: sums of one- and two-digit numbers, answered with the number alone."""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset


def load_environment(
    train_size: int = 4000, eval_size: int = 200, seed: int = 0, below: int = 100
) -> vf.SingleTurnEnv:
    """Questions like `What is 12 + 34?`; no held-out pair of numbers is trained on, in either order."""
    train, held_out = split_sums(train_size, eval_size, seed, below)
    parser = vf.Parser()
    return vf.SingleTurnEnv(
        dataset=make_dataset(train),
        eval_dataset=make_dataset(held_out),
        parser=parser,
        rubric=vf.Rubric(funcs=[exact_match, is_number], weights=[1.0, 0.0], parser=parser),
    )


def split_sums(
    train_size: int, eval_size: int, seed: int, below: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Disjoint training and held-out pairs; a ValueError when there are not enough of them."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(below) for b in range(a, below)]
    rng.shuffle(pairs)
    held_out = [rng.choice([(a, b), (b, a)]) for a, b in pairs[:eval_size]]
    train = sorted({pair for a, b in pairs[eval_size:] for pair in [(a, b), (b, a)]})
    rng.shuffle(train)
    if len(held_out) < eval_size or len(train) < train_size:
        raise ValueError(f"demo-arithmetic: {train_size} training and {eval_size} held-out sums do not exist")
    return train[:train_size], held_out


def make_dataset(pairs: list[tuple[int, int]]) -> Dataset:
    """One row per pair: `question` and `answer`."""
    return Dataset.from_list([{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs])


def exact_match(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """1 when the reply is the sum and nothing else."""
    return float((parser.parse_answer(completion) or "").strip() == answer)


def is_number(parser: vf.Parser, completion: vf.Messages) -> float:
    """1 when the reply is a number, right or wrong."""
    return float((parser.parse_answer(completion) or "").strip().isdigit())
