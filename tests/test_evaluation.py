"""Mid-run evaluation: when, on what, what is told, and that training does not notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from job import rules
from job.chat import Chat
from job.environment import Environment
from job.scoring import Score
from job.settings import identify
from tests import grpo_trials, harness
from tests.harness import Finished
from training import evaluation

pytestmark = pytest.mark.slow


# --- pure ---


@pytest.mark.parametrize(
    ("step", "every", "due"),
    [(10, 10, True), (20, 10, True), (0, 10, False), (5, 10, False), (15, 10, False), (10, 0, False)],
)
def test_the_cadence(step: int, every: int, due: bool) -> None:
    assert evaluation.is_due(step, every) is due


def test_rows_without_a_reward_count_as_zero_and_metrics_are_means_of_those_that_have_them() -> None:
    scores = [Score(1.0, {"exact": 1.0}), Score(None, problem="judge: Timeout"), Score(0.5, {"exact": 0.0})]
    assert evaluation.summary(scores, 0.5, with_metrics=True) == {
        "eval_n": 3,
        "eval_reward": 0.5,
        "eval_pass_rate": pytest.approx(2 / 3),
        "eval_reward_min": 0.0,
        "eval_reward_max": 1.0,
        "eval_metric_exact": 0.5,
    }


def test_a_summary_of_nothing_is_zeros() -> None:
    assert {*evaluation.summary([], 0.5, with_metrics=True).values()} == {0}


# --- the exam ---


@pytest.fixture(scope="module")
def chat(tiny_model: Path) -> Chat:
    from job.chat import load_tokenizer

    return Chat(load_tokenizer(str(tiny_model), None), False)


def settings_of(folder: Path, model: Path | str, **more: Any) -> Any:
    env = grpo_trials.variables(folder, model, **more)
    identity, problem = identify(env)
    assert problem is None
    return rules.resolve(env, identity)


@pytest.mark.parametrize(
    ("params", "knobs", "count", "split"),
    [
        ({}, {}, 10, "eval"),
        ({}, {"AUTOSLM_EVAL_NUM": 3}, 3, "eval"),
        ({}, {"AUTOSLM_EVAL_NUM": 0}, 0, "eval"),
        ({"evaluation": "empty"}, {}, 0, "eval"),
        ({"evaluation": "missing"}, {}, 20, "train"),
        ({"evaluation": "broken"}, {}, 0, "eval"),
    ],
)
def test_what_is_asked(
    chat: Chat, tmp_path: Path, params: dict[str, Any], knobs: dict[str, Any], count: int, split: str
) -> None:
    settings = settings_of(tmp_path, "unused", **{"AUTOSLM_EVAL_EVERY_STEPS": 5, **knobs})
    exam = evaluation.set_exam(settings, Environment.load("toy-splits", params), chat, 1024)
    assert (len(exam.rows), exam.split) == (count, split)


def test_nobody_is_examined_without_a_cadence(chat: Chat, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "unused", AUTOSLM_EVAL_EVERY_STEPS=0)
    assert evaluation.prepare(settings, Environment.load("toy-splits", {}), chat, 1024, print) is None


def test_questions_without_room_for_an_answer_are_left_out(chat: Chat, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "unused", AUTOSLM_EVAL_EVERY_STEPS=5, AUTOSLM_EVAL_MAX_NEW=100)
    env = Environment.load("toy-splits", {})
    longest = max(len(chat.prompt_ids(env.prompt(row))) for row in env.eval_rows())
    assert len(evaluation.set_exam(settings, env, chat, longest + 100).rows) == 10
    assert evaluation.set_exam(settings, env, chat, 100).rows == []


def test_another_environment_can_be_named_for_it(chat: Chat, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "unused", AUTOSLM_EVAL_EVERY_STEPS=5)
    env = Environment.load("toy-words", {"eval_env_id": "acme/toy-splits"})
    exam = evaluation.set_exam(settings, env, chat, 1024)
    assert exam.env.id == "acme/toy-splits" and exam.split == "eval" and len(exam.rows) == 10


# --- whole runs, SFT on the tiny model in this process ---


@dataclass(frozen=True)
class Run:
    """A finished run, its evaluations, and its files."""

    ended: Finished
    store: Path

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [beat for beat in self.ended.beats if beat["stage"] == "sft_eval"]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run a job of eight steps in this process."""

    def start(environment: str, params: dict[str, Any] | None = None, **more: Any) -> Run:
        folder = tmp_path_factory.mktemp("evaluated")
        spec = {"environment": {"id": environment, "params": params or {}}}
        given = {"SFT_MAX_STEPS": 8, "AUTOSLM_EVAL_MAX_NEW": 8, **more}
        env = harness.variables(folder, tiny_model, environment, spec, **given)
        ended = harness.run_main(env)
        assert ended.error is None, ended.error
        return Run(ended, folder / "store" / "sft" / "r1" / "seed0")

    return start


@pytest.fixture(scope="module")
def examined(run: Callable[..., Run]) -> Run:
    """A run that was evaluated at 3, at 6 and at its end."""
    return run("toy-splits", AUTOSLM_EVAL_EVERY_STEPS=3)


def test_training_does_not_notice(run: Callable[..., Run], examined: Run) -> None:
    plain = run("toy-splits", {"evaluation": "broken"}, AUTOSLM_EVAL_EVERY_STEPS=3)
    assert not plain.evaluations
    adapters = [one.store / "adapter" / "adapter_model.safetensors" for one in (plain, examined)]
    weights = [one.read_bytes() for one in adapters]
    assert weights[0] == weights[1]
    beats = examined.evaluations
    assert [beat["step"] for beat in beats] == [3, 6, 8]
    assert all(beat["eval_n"] == 10 and beat["eval_split"] == "eval" for beat in beats)
    assert all("eval_metric_weighted_by_size" in beat for beat in beats)


def test_what_is_logged_is_what_is_told_and_reported(examined: Run) -> None:
    lines = [json.loads(line) for line in (examined.store / "metrics.jsonl").read_text().splitlines()]
    logged = [one for one in lines if "eval_split" in one]
    for line, beat in zip(logged, examined.evaluations, strict=True):
        assert {name: line[name] for name in beat if name.startswith("eval_")} == {
            name: value for name, value in beat.items() if name.startswith("eval_")
        }
        assert line["step"] == beat["step"]
    page = (examined.store / "report.md").read_text()
    assert "Say 100." in page and "| 8 | held-out | 10 |" in page
    assert (examined.store / "report" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_when_every_row_fails_it_is_skipped_with_the_reason(run: Callable[..., Run]) -> None:
    (beat,) = run("toy-rewards", {"kind": "hopeless"}, AUTOSLM_EVAL_EVERY_STEPS=8).evaluations
    assert beat["eval_skipped"] is True and "eval_reward" not in beat
    assert beat["eval_reason"].startswith("NothingEvaluated: all 24 examples failed, such as: ")
    assert beat["eval_split"] == "train"  # this environment holds nothing out


def test_conversations_are_played_without_metrics(run: Callable[..., Run]) -> None:
    (beat,) = run("toy-turns", AUTOSLM_EVAL_EVERY_STEPS=8, AUTOSLM_EVAL_NUM=4).evaluations
    assert beat["eval_n"] == 4 and "eval_skipped" not in beat
    assert not [name for name in beat if name.startswith("eval_metric_")]


@pytest.mark.parametrize(
    ("getter", "reason"),
    [
        (lambda: None, "no model available"),
        (lambda: {}["model"], "model getter failed: 'model'"),
    ],
)
def test_without_a_model_it_is_skipped(getter: Callable[[], Any], reason: str, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from training.history import MetricsStream

    settings = settings_of(tmp_path, "unused", AUTOSLM_EVAL_EVERY_STEPS=5)
    publisher = grpo_trials.Silent()
    exam = SimpleNamespace(exam=SimpleNamespace(split="eval"))
    listener = evaluation.Evaluations(settings, exam, publisher, MetricsStream(str))
    listener.get_trainer = getter
    state = SimpleNamespace(global_step=5, log_history=[])
    listener.on_step_begin(None, state, None)
    assert publisher.beats == [
        {"stage": "rl_eval", "step": 5, "eval_split": "eval", "eval_skipped": True, "eval_reason": reason}
    ]
    assert state.log_history[0]["eval_reason"] == reason


@pytest.mark.parametrize("environment", ["toy-splits", "toy-turns"])
def test_an_evaluation_that_fails_or_takes_too_long_costs_itself_only(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    def overflow(*_: Any) -> Any:
        raise RuntimeError("the card fell off")

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "LIMIT_S", 0.0)
        (late,) = run(environment, AUTOSLM_EVAL_EVERY_STEPS=8).evaluations
    monkeypatch.setattr("training.sampler.ModelSampler._sample", overflow)
    (failed,) = run(environment, AUTOSLM_EVAL_EVERY_STEPS=8).evaluations
    assert late["eval_reason"].startswith("TimeoutError: not finished within")
    assert "the card fell off" in failed["eval_reason"]


def test_sampling_with_an_adapter_can_stop_before_every_token(tiny_model: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from training.sampler import interruptible

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    calls: list[int] = []
    with interruptible(model, lambda: calls.append(1)):
        model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4)
    assert len(calls) == 4
