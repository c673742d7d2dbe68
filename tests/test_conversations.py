"""Conversations in whole runs: who plays them, what is refused, and what a failure leaves of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from job.environment import Environment
from tests import grpo_trials, harness
from training import conversations

pytestmark = pytest.mark.slow

GROUP = 8


def run(folder: Path, model: Path, environment: dict[str, Any], **more: Any) -> tuple[Any, list[Any]]:
    """How a run of three steps with one group each ended, and the trainer's log of every step."""
    train = {"steps": 3, "batch_size": 1, "group_size": GROUP, **more.pop("train", {})}
    env = grpo_trials.variables(
        folder,
        model,
        environment=environment,
        train=train,
        **{"RL_SAVE_STEPS": 1, "RL_VLLM_MAX_LEN": 512, **more},
    )
    ended = harness.run_main(env)
    states = sorted((folder / "work").glob("rl_seed0/checkpoint-*/trainer_state.json"))
    logged = json.loads(states[-1].read_text())["log_history"] if states else []
    return ended, [entry for entry in logged if "loss" in entry]


def metrics(folder: Path) -> Any:
    return json.loads((folder / "work" / "metrics.json").read_text())


# --- failures ---


def test_conversations_that_fail_are_left_out_of_their_step(tiny_model: Path, tmp_path: Path) -> None:
    """A step in which none begins and two in which 1 of 8 breaks: 7 train, and the run goes on."""
    environment = {"id": "toy-turns", "params": {"unready": GROUP, "fail_every": GROUP}}
    ended, steps = run(tmp_path, tiny_model, environment)
    assert ended.error is None, ended.error
    assert [one["rollout/errors"] for one in steps] == [GROUP, 1, 1]
    assert steps[0]["rollout/errors/InfraError"] == GROUP and steps[0]["rollout/turns"] == 0
    assert steps[1]["rollout/errors/LookupError"] == 1 and "rollout/errors/InfraError" not in steps[1]
    assert steps[0]["grad_norm"] == 0 and steps[1]["grad_norm"] > 0
    # Seven conversations of two turns; an exception that is no vf.Error takes its own along.
    assert steps[1]["rollout/turns"] == 2 * 7 / GROUP
    assert steps[1]["rollout/model_tokens"] > 0 and steps[1]["rollout/env_tokens"] > 0
    notes = metrics(tmp_path)["notes"]
    assert notes["unscorable"] == GROUP + 2
    assert notes["rollout_errors"] == {"InfraError": GROUP, "LookupError": 2}


# --- who plays ---


def test_a_hook_of_a_single_turn_environment_is_obeyed(tiny_model: Path, tmp_path: Path) -> None:
    import toy_hooks

    ended, steps = run(tmp_path, tiny_model, {"id": "toy-hooks"}, RL_USE_VLLM=0)
    assert ended.error is None, ended.error
    assert [one["rollout/turns"] for one in steps] == [1, 1, 1]
    shown = Environment.load("toy-hooks", {})
    assert conversations.shapes_conversations(shown) and not shown.multi_turn
    assert toy_hooks.ASKED not in str(shown.train_rows())


def test_single_turn_environments_without_hooks_are_sampled_by_trl() -> None:
    for reference in ("toy-words", "toy-rewards", "demo-arithmetic"):
        assert not conversations.shapes_conversations(Environment.load(reference, {}))


def test_a_groups_tools_are_those_of_its_members() -> None:
    mixture = Environment.load("toy-group", {})
    rows = mixture.train_rows()
    assert conversations.shows_tools(mixture, rows)
    words = [row for row in rows if not mixture.tools(row)]
    assert words and not conversations.shows_tools(mixture, words)


# --- refusals ---


@pytest.mark.parametrize("environment", ["toy-rewards", "toy-turns"])
def test_trls_loop_without_tools_is_refused(tiny_model: Path, tmp_path: Path, environment: str) -> None:
    ended, _ = run(tmp_path, tiny_model, {"id": environment}, RL_TOOL_LOOP="trl")
    assert "has no tools to call" in str(ended.error)
    assert "model_prefetched" not in ended.stages
