"""`--check` of whole jobs: everything that needs no GPU and no weights, on real environments and models."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from training import rehearsal

pytestmark = pytest.mark.slow

CARD = {"gpu": {"type": "RTX 4090"}}


def check(env: dict[str, str]) -> str:
    out = io.StringIO()
    rehearsal.rehearse(env, out)
    return out.getvalue()


def test_a_supervised_job(job: Callable[..., dict[str, str]]) -> None:
    more: dict[str, Any] = {"AUTOSLM_DEVICE": "cuda", "SFT_EPOCHS": 3, "HF_TOKEN": "hf_not_for_eyes"}
    out = check(job("toy-words", CARD, **more))
    assert "SFT_EPOCHS = 3 (variable)" in out and "\nenvironment: toy-words (" in out
    assert "\nsteps: " in out and "3.0 passes over the data" in out and " |####" in out
    assert " GB of the 24 GB of RTX 4090: weights " in out and "\n  cost: $" in out
    assert "\nwarnings:\n" in out and "no checkpoint before the end" in out and "hf_not_for_eyes" not in out


def test_a_grpo_job_with_too_little_of_everything(job: Callable[..., dict[str, str]]) -> None:
    train = {"batch_size": 1000, "group_size": 2, "steps": 3, "max_tokens": 8}
    spec = {"algorithm": "grpo", "thinking": True, "train": train}
    out = check(job("toy-rewards", spec, RUN_MODE="rl", RL_USE_VLLM=0))
    assert "\nsteps: 3, 3.0 passes over the data" in out and "tokens: at most " in out
    for warning in (
        "RL_PROMPTS_PER_STEP=1000: only",
        "RL_GROUP_SIZE=2",
        "reasoning will be cut",
        "only 3 opti",
    ):
        assert warning in " ".join(out.split()), warning
    assert "cost:" not in out
