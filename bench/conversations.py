"""Conversations at once against one after the other: `python bench/conversations.py [CONVERSATIONS]`.

Both play the same four-turn conversations through verifiers' own loop on the colocated vLLM, with a
random model of the demo's size; nearly all replies are as long as they may be.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
CONVERSATIONS, TURNS, TOKENS = 64, 4, 24
PAUSE_S = 0.2
TARGET_RATIO = 8.0


def main() -> None:
    """Play both ways after a warm-up, then with slow environments among them, and print seconds."""
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "demo"), str(REPOSITORY / "tests" / "environments")]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else CONVERSATIONS
    with tempfile.TemporaryDirectory() as folder:
        sampler, rollout = prepare(Path(folder), count)
        play(rollout, sampler, [[0, 1]])  # warm up
        together = play(rollout, sampler, [list(range(count))])
        alone = play(rollout, sampler, [[row] for row in range(count)])
        rollout.env.loaded.pause_s = PAUSE_S
        with_slow_ones = play(rollout, sampler, [list(range(count))])
    ratio = alone / together
    print(f"{count} conversations of {TURNS} turns")
    print(f"one after the other  {alone:7.2f} s")
    print(f"at once              {together:7.2f} s")
    print(f"ratio                {ratio:7.1f}   wanted >= {TARGET_RATIO:.0f}")
    print(f"every other environment takes {PAUSE_S} s per reply")
    print(f"at once              {with_slow_ones:7.2f} s")
    sys.stdout.flush()
    os._exit(0 if ratio >= TARGET_RATIO else 1)  # vLLM may never finish an orderly shutdown


def prepare(folder: Path, count: int) -> tuple[Any, Any]:
    """An engine that has the policy's weights, and the rollout of a talkative environment."""
    import tiny_model
    import torch

    from tests import grpo_trials, rollouts

    torch.set_num_threads(1)
    tokenizer = tiny_model.make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_model.make_model(tokenizer, seed=0).save_pretrained(folder / "model")
    train = {"batch_size": count, "group_size": 4}
    trial = grpo_trials.build(grpo_trials.variables(folder, folder / "model", train=train))
    trial.engine.sync_weights()
    rollout = rollouts.make(folder, trial.chat, chatter(count), max_tokens=TOKENS, engine_length=512)
    return trial.trainer.sampler, rollout


def chatter(count: int) -> Any:
    """A conversation of a fixed number of turns, one row for every conversation."""
    import verifiers as vf
    from datasets import Dataset

    class Chatter(vf.MultiTurnEnv):
        pause_s = 0.0

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            await asyncio.sleep(self.pause_s if int(state["answer"]) % 2 else 0)
            return [vf.UserMessage(role="user", content=f"Repeat {len(state['trajectory'])}.")]

    def one() -> float:
        return 1.0

    rows = Dataset.from_list([{"question": f"Repeat {row}.", "answer": str(row)} for row in range(count)])
    return Chatter(dataset=rows, rubric=vf.Rubric(funcs=[one]), max_turns=TURNS)


def play(rollout: Any, sampler: Any, batches: list[list[int]]) -> float:
    """Seconds to play batches of conversations, each batch at once."""
    from tests import rollouts

    began = time.perf_counter()
    for rows in batches:
        played = rollouts.play(rollout, sampler, rows)
        assert played.facts.turns == [TURNS] * len(rows), played.facts.errors
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
