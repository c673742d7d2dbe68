"""Two turns: the environment answers a wrong guess with the number, the second turn can copy it."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guessing(vf.MultiTurnEnv):
    """`fail_on` names a number at which the environment itself raises."""

    fail_on = ""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        if state["answer"] == self.fail_on:
            raise LookupError("the game is broken")
        return [vf.UserMessage(role="user", content=f"Repeat {state['answer']}.")]

    @vf.stop
    async def guessed(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and said(state["trajectory"][-1]["completion"]) == state["answer"]


def said(messages: vf.Messages) -> str:
    return (messages[-1].content or "").strip()


def right(completion: vf.Messages, answer: str) -> float:
    """1 when the last thing the model said is the number."""
    return float(said([one for one in completion if one.role == "assistant"]) == answer)


def load_environment(fail_on: str = "", rows: int = 64) -> vf.MultiTurnEnv:
    data = [{"question": "Which number?", "answer": str(10 + number)} for number in range(rows)]
    env = Guessing(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[right]), max_turns=2)
    env.fail_on = fail_on
    return env
