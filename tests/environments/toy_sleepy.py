"""Multi-turn: an environment that takes its time to answer, as a sandbox or a judge may."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset


class Sleepy(vf.MultiTurnEnv):
    """Says that it falls asleep, and answers once it has slept."""

    seconds = 0.0

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        sys.stdout.write("ASLEEP\n")
        sys.stdout.flush()
        await asyncio.sleep(self.seconds)
        return [vf.UserMessage(role="user", content="Go on.")]


def ones(completion: vf.Messages) -> float:
    """The number of ones in what the model said."""
    said = [one.content or "" for one in completion if one.role == "assistant"]
    return float("".join(said).count("1"))


def load_environment(seconds: float = 60.0, rows: int = 16) -> vf.MultiTurnEnv:
    data = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(rows)]
    env = Sleepy(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[ones]), max_turns=2)
    env.seconds = seconds
    return env
