"""Whole GRPO runs in this process: every kind of reward, and what is refused before it costs anything."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import grpo_trials, harness
from tests.harness import Finished, strict

pytestmark = pytest.mark.slow

PREFIX = "rl/r1/seed0"


@dataclass(frozen=True)
class Run:
    """A run that has ended, and the folder it wrote to."""

    ended: Finished
    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "store" / PREFIX

    @property
    def notes(self) -> dict[str, Any]:
        assert self.ended.error is None, self.ended.error
        return strict((self.store / "metrics.json").read_text())["notes"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [beat for beat in self.ended.beats if beat["stage"] == "rl_step" and not beat.get("liveness")]


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that runs a job; without vLLM unless it says so."""

    def make(*args: Any, model: Path = tiny_model, **more: Any) -> Run:
        env = grpo_trials.variables(tmp_path, model, *args, **{"RL_USE_VLLM": 0, **more})
        return Run(harness.run_main(env), tmp_path)

    return make


def environment(kind: str, **params: Any) -> dict[str, Any]:
    return {"id": "toy-rewards", "params": {"kind": kind, **params}}


# --- every kind of reward ---


@pytest.mark.parametrize(
    ("kind", "weights", "vllm"),
    [
        ("plain", {"ones": 1.0, "length": 0.0}, 0),
        ("group", {"rank": 1.0, "ones": 0.5}, 1),
        ("async", {"slow_ones": 1.0}, 1),
        ("two_rubrics", {"ones": 1.0, "own_answer": 0.5}, 0),
        ("mixed_info", {"noted": 1.0}, 0),
    ],
)
def test_every_kind_of_reward_trains(
    run: Callable[..., Run], kind: str, weights: dict[str, float], vllm: int
) -> None:
    done = run(kind, RL_USE_VLLM=vllm)
    notes, steps = done.notes, done.steps
    assert notes["steps"] == len(steps) == len(notes["reward_history"]) == 3
    assert notes["unscorable"] == 0 and notes["rollout_errors"] == {}
    for beat, reward in zip(steps, notes["reward_history"], strict=True):
        assert beat["reward"] == reward
        assert beat["rewards"].keys() == {*weights, "num_turns"}
        assert reward == pytest.approx(sum(beat["rewards"][name] * one for name, one in weights.items()))
    assert any(beat["reward"] for beat in steps)


def test_rows_that_share_a_prompt_keep_their_own_answers(tiny_model: Path, tmp_path: Path) -> None:
    made = grpo_trials.build(grpo_trials.variables(tmp_path, tiny_model, "duplicates", RL_USE_VLLM=0))
    assert len(set(made.prompts.texts)) == 1
    made.sample(range(10))
    [batch] = made.batches
    answers = [made.prompts.rows[row]["answer"] for row in batch.rows]
    assert len(set(answers)) > 5
    expected = [
        float(reply.text.startswith(answer)) for reply, answer in zip(batch.replies, answers, strict=True)
    ]
    assert batch.rewards == expected and len(set(expected)) == 2


def test_without_a_weighted_function_the_answer_counts(run: Callable[..., Run]) -> None:
    done = run("unweighted", train={"batch_size": 16, "steps": 1})
    assert done.notes["reward_history"][0] > 0
    assert done.steps[0]["rewards"]["length"] > 0


def test_some_samples_without_a_reward(run: Callable[..., Run]) -> None:
    done = run("brittle", train={"steps": 4}, RL_USE_VLLM=1)
    notes = done.notes
    assert 0 < notes["unscorable"] < 4 * notes["generations_per_step"]
    assert notes["rollout_errors"] == {"LookupError": notes["unscorable"]}
    counts = [beat["unscorable"] for beat in done.steps]
    assert counts == sorted(counts) and counts[-1] == notes["unscorable"]
    assert done.ended.stages[-1] == "done"


@pytest.mark.parametrize("steps", [1, 5])
def test_a_reward_that_always_raises_fails_the_run_and_says_so(run: Callable[..., Run], steps: int) -> None:
    done = run("hopeless", train={"steps": steps})
    message = str(done.ended.error)
    assert type(done.ended.error).__name__ == "NothingScored"
    assert message.startswith("none of ") and "hopeless: ConnectionError: the judge is gone" in message
    assert "\n" not in message
    assert done.ended.stages[-1] == "error_rl"
    assert done.ended.beats[-1]["error"] == f"NothingScored: {message}"
    assert not (done.folder / "work" / "metrics.json").exists()
    assert not (done.store / "metrics.json").exists()
    assert "the judge is gone" in (done.store / "error_rl.txt").read_text()


def test_steps_without_any_gradient_fail_the_run(run: Callable[..., Run]) -> None:
    """Every sample is cut off by its budget, so every one is masked."""
    done = run(train={"max_tokens": 1, "temperature": 0.3})
    assert "no gradient was ever non-zero" in str(done.ended.error)
    assert done.ended.stages[-1] == "error_rl"


def test_stop_sequences_switch_the_mask_off(run: Callable[..., Run]) -> None:
    done = run(train={"max_tokens": 2, "stop_sequences": ["never said"]})
    assert done.ended.stages[-1] == "done" and done.notes["reward_history"]


# --- which prompts ---


def test_prompts_over_the_budget_are_dropped_and_counted(
    run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    done = run("some_long", train={"steps": 2}, RL_VLLM_MAX_LEN=128, RL_USE_VLLM=1)
    assert done.notes["rows"]["prompts_over_budget"] == 12
    assert "training prompts: 12 of 24, 12 over 120 tokens" in caplog.text


def test_no_prompt_left_is_refused(run: Callable[..., Run]) -> None:
    done = run("all_long", RL_VLLM_MAX_LEN=128)
    message = str(done.ended.error)
    assert "no training prompt of 24 fits the budget of 120 tokens" in message
    assert "RL_VLLM_MAX_LEN 128" in message and "RL_MAX_COMPLETION 8" in message
    assert done.ended.stages == ["boot", "error_rl"]


def test_more_prompts_a_step_than_there_are(
    run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    done = run(environment=environment("plain", rows=3), train={"batch_size": 8, "steps": 2})
    assert done.notes["prompts_per_step"] == 3 and done.notes["generations_per_step"] == 12
    assert "RL_PROMPTS_PER_STEP=8: only 3 prompts are left, using these" in caplog.text


def test_a_template_that_cannot_render_is_the_reason(
    run: Callable[..., Run], tiny_model: Path, tmp_path: Path
) -> None:
    model = harness.with_template(tiny_model, tmp_path / "model", "chatml")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if '22' in m.content %}{{ raise_exception('not this one') }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    done = run(model=model)
    assert "not this one" in str(done.ended.error) and "budget" not in str(done.ended.error)


# --- refused before anything is spent ---


@pytest.mark.parametrize(
    ("train", "variables", "message"),
    [
        ({"temperature": 0}, {}, "JobSpec train.temperature=0: identical samples carry no advantage"),
        ({"group_size": 1}, {}, "RL_GROUP_SIZE=1: a group of one has no advantage"),
        ({}, {"RL_GROUP_SIZE": 1}, "RL_GROUP_SIZE=1: a group of one has no advantage"),
        ({"max_tokens": 64}, {"RL_VLLM_MAX_LEN": 64}, "RL_VLLM_MAX_LEN=64: must exceed .* budget 64"),
        ({}, {"RL_VLLM_MAX_LEN": 5000}, "RL_VLLM_MAX_LEN=5000: the model's context is 4096 tokens"),
        ({"max_tokens": 4096}, {}, "RL_MAX_COMPLETION=4096: the model's context is 4096 tokens"),
        ({"lora_rank": 513}, {"RL_USE_VLLM": 1}, "train.lora_rank=513: vLLM serves ranks up to 512"),
        ({}, {"RL_ADAPTER_SYNC": "copy"}, "RL_ADAPTER_SYNC='copy'"),
    ],
)
def test_refused_before_anything_is_spent(
    run: Callable[..., Run], train: dict[str, Any], variables: dict[str, Any], message: str
) -> None:
    done = run(train=train, **variables)
    assert isinstance(done.ended.error, ValueError)
    assert done.ended.stages == ["boot", "error_rl"]
    with pytest.raises(ValueError, match=message):
        raise done.ended.error
    assert "\n" not in str(done.ended.error)
    assert not done.ended.beats[-1]["retriable"] and not done.ended.beats[-1]["oom"]


@pytest.mark.parametrize("variables", [{"RL_USE_VLLM": 0}, {"RL_USE_VLLM": 1, "RL_ADAPTER_SYNC": "merge"}])
def test_a_high_rank_is_fine_where_vllm_serves_no_adapter(
    run: Callable[..., Run], variables: dict[str, Any]
) -> None:
    done = run(train={"lora_rank": 513, "lora_alpha": 16, "learning_rate": 1e-3}, **variables)
    assert done.notes["reward_history"]


# --- what a run leaves ---


def test_a_run_without_vllm_leaves_the_same_files(run: Callable[..., Run]) -> None:
    done = run()
    files = {path.relative_to(done.store).as_posix() for path in done.store.rglob("*") if path.is_file()}
    assert {"heartbeat.json", "train_meta.json", "metrics.json", "DONE"} <= files
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= files
    config = json.loads((done.store / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    assert done.ended.out.splitlines()[-1].startswith("NODE DONE: ")
