"""GRPO learns the demo's conversations, a two-turn guessing game and a calculator, with both samplers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import grpo_trials, harness

FIRST, LAST = 3, 10  # steps; the first few learn most
GAIN = 0.2
GUESSING = {"steps": 25, "batch_size": 8, "group_size": 8, "max_tokens": 4, "learning_rate": 5e-3}
CALCULATOR = {"steps": 20, "batch_size": 4, "group_size": 8, "max_tokens": 64, "learning_rate": 2e-3}
SUMS = {"below": 2}
TEACHING_STEPS, GIVEN_UP, SHRUGS = 200, "?", 2


@pytest.fixture(scope="module")
def taught(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after seconds of supervised training, all weights, on the calculator's transcripts.

    It knows how to call the tool, and to say what comes back; but more often it gives up at once.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from job.chat import IGNORE, Chat, load_tokenizer
    from job.environment import Environment

    folder = harness.with_template(tiny_model, tmp_path_factory.mktemp("taught") / "model", "compact")
    chat, env = (
        Chat(load_tokenizer(str(folder)), thinking=False),
        Environment.load("demo-calculator", SUMS),
    )
    rows = [
        one
        for row in env.train_rows()
        for target in (env.target(row), *[GIVEN_UP] * SHRUGS)
        for one in chat.rows(env.prompt(row), target, env.tools(row))
    ]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(TEACHING_STEPS):
        batch = [rows[index] for index in torch.randperm(len(rows))[:8]]
        width = max(len(one.ids) for one in batch)
        ids = torch.tensor([one.ids + [chat.end_of_turn_id] * (width - len(one.ids)) for one in batch])
        labels = torch.tensor([one.labels + [IGNORE] * (width - len(one.ids)) for one in batch])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def check_learning(tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function that trains and compares the mean rewards of the first and the last steps."""

    def check(model: Path, environment: str, train: dict[str, Any], vllm: int, seed: int) -> None:
        env = grpo_trials.variables(
            tmp_path,
            model,
            train={"temperature": 1.0, **train},
            environment={"id": environment, "params": SUMS if environment == "demo-calculator" else {}},
            RL_USE_VLLM=vllm,
            RL_VLLM_MAX_LEN=1024,
            SEED=seed,
        )
        ended = harness.run_main(env)
        assert ended.error is None, ended.error
        steps = [beat for beat in ended.beats if beat["stage"] == "rl_step" and not beat.get("liveness")]
        rewards = [beat["reward"] for beat in steps]
        assert len(rewards) == train["steps"]
        first, last = sum(rewards[:FIRST]) / FIRST, sum(rewards[-LAST:]) / LAST
        record_property("rewards", f"{first:.2f} -> {last:.2f}")  # `--junitxml FILE` shows them
        assert last - first >= GAIN, (first, last)

    return check


@pytest.mark.proof
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("vllm", [0, 1], ids=["model", "vllm"])
def test_guessing_is_learned(check_learning: Any, tiny_model: Path, vllm: int, seed: int) -> None:
    check_learning(tiny_model, "demo-guessing", GUESSING, vllm, seed)


@pytest.mark.slow
def test_the_calculator_is_learned_with_the_trainers_model(check_learning: Any, taught: Path) -> None:
    check_learning(taught, "demo-calculator", CALCULATOR, vllm=0, seed=0)


@pytest.mark.proof
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("vllm", [0, 1], ids=["model", "vllm"])
def test_the_calculator_is_learned(check_learning: Any, taught: Path, vllm: int, seed: int) -> None:
    check_learning(taught, "demo-calculator", CALCULATOR, vllm, seed)
