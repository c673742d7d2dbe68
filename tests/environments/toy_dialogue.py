"""Multi-turn: a guessing game with no turn limit of its own; the target is plain text or a transcript."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


class Guessing(vf.MultiTurnEnv):
    """Says higher or lower until the number is guessed."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: object) -> vf.Messages:
        secret, guess = int(state["answer"]), messages[-1].content
        hint = "lower" if guess.isdigit() and int(guess) > secret else "higher"
        return [{"role": "user", "content": hint}]

    @vf.stop
    async def guessed(self, state: vf.State) -> bool:
        """Whether the newest guess is right."""
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1].content == state["answer"]


def load_environment(max_turns: int = -1, transcripts: bool = False, thoughts: bool = False) -> Guessing:
    """Nine secrets; `transcripts` adds gold conversations in the column `completion`."""
    rows = [{"question": "Guess my number, 1 to 9.", "answer": str(secret)} for secret in range(1, 10)]
    if transcripts:
        rows = [
            {"question": row["question"], "completion": transcript(int(row["answer"]), thoughts)}
            for row in rows
        ]
    return Guessing(
        dataset=Dataset.from_list(rows),
        max_turns=max_turns,
        rubric=vf.Rubric(funcs=[won]),
        pass_threshold=0.9,
    )


def transcript(secret: int, thoughts: bool) -> list[dict[str, str]]:
    """Bisection, ending with the right guess."""
    low, high, turns = 1, 9, list[dict[str, str]]()
    while True:
        guess = (low + high) // 2
        thought = f"<think>\n{low} to {high}\n</think>\n\n" if thoughts else ""
        turns.append({"role": "assistant", "content": f"{thought}{guess}"})
        if guess == secret:
            return turns
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        turns.append({"role": "user", "content": "higher" if guess < secret else "lower"})


def won(state: vf.State) -> float:
    """1 when the last turn has the number."""
    return float(state["trajectory"][-1]["completion"][-1].content == state["answer"])
