"""A single-turn environment whose hook decides what the model is asked."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

ASKED = "Repeat 7."


class Hooked(vf.SingleTurnEnv):
    """Asks something else than its rows say."""

    async def setup_state(self, state: vf.State) -> vf.State:
        state["prompt"] = [vf.UserMessage(role="user", content=ASKED)]
        return state


def long(completion: vf.Messages) -> float:
    return float(len(completion[-1].content or ""))


def load_environment(rows: int = 8) -> vf.SingleTurnEnv:
    data = [{"question": f"What is {number}?", "answer": ""} for number in range(rows)]
    return Hooked(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[long]))
