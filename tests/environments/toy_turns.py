"""Two turns: the environment answers a wrong guess with the number, the second turn can copy it."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guessing(vf.MultiTurnEnv):
    """Its first `unready` conversations never begin, and after them every `fail_every`th answer raises."""

    unready, fail_every = 0, 0
    begun, answered = 0, 0

    async def setup_state(self, state: vf.State) -> vf.State:
        self.begun += 1
        if self.begun <= self.unready:
            raise vf.InfraError("the game is closed")
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        self.answered += 1
        if self.fail_every and self.answered % self.fail_every == 0:
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


def wordy(completion: vf.Messages) -> float:
    """Longer is better: what an untrained model can learn something from."""
    return len(said([one for one in completion if one.role == "assistant"])) / 100


def load_environment(unready: int = 0, fail_every: int = 0, rows: int = 64) -> vf.MultiTurnEnv:
    data = [{"question": "Which number?", "answer": str(10 + number)} for number in range(rows)]
    env = Guessing(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[right, wordy]), max_turns=2)
    env.unready, env.fail_every = unready, fail_every
    return env
