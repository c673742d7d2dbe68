"""A small verifiers environment of two turns: guess a number from 1 to 3, and once more after a hint."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

NUMBERS = (1, 2, 3)


class Guessing(vf.MultiTurnEnv):
    """Answers a wrong guess with a hint; whoever begins in the middle knows the number after one."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [vf.UserMessage(role="user", content=hint(said(messages[-1]), int(state["answer"])))]

    @vf.stop
    async def guessed(self, state: vf.State) -> bool:
        """Whether the newest guess is the number."""
        turns = state["trajectory"]
        return bool(turns) and said(turns[-1]["completion"][-1]) == state["answer"]


def load_environment(rows: int = 300) -> vf.MultiTurnEnv:
    """The same question in every row, with each number equally often."""
    numbers = [NUMBERS[row % len(NUMBERS)] for row in range(rows)]
    data = [{"question": "Guess 1, 2 or 3.", "answer": str(number)} for number in numbers]
    return Guessing(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[won]), max_turns=2)


def hint(guess: str, number: int) -> str:
    """What the environment says to a guess."""
    if not guess.isdecimal():
        return "A number."
    return "Higher." if int(guess) < number else "Lower."


def said(message: Any) -> str:
    return (message.content or "").strip()


def won(completion: vf.Messages, answer: str) -> float:
    """1 when the last guess is the number."""
    guesses = [said(one) for one in completion if one.role == "assistant"]
    return float(bool(guesses) and guesses[-1] == answer)
