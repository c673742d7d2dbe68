"""GRPO as the launcher sees it: processes of their own, a Hub, and how they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import grpo_trials, harness
from tests.harness import Finished, strict
from tests.hub_server import HubServer

pytestmark = pytest.mark.slow

PREFIX = "rl/r1/seed0"
TOKEN = "hf_test"
STEPS = 10
EVERY_BEAT = {"stage", "ts", "run_id", "mode", "seed", "attempt"}
LANDED = ("checkpoint_uploaded", "rl_trained", "done")
EXTRAS = {
    "boot": set(),
    "rl_start": set(),
    "model_prefetched": {"model", "download_seconds", "hf_transfer"},
    "rl_train_start": {"setup_seconds", "resumed"},
    "rl_step": {"step", "steps", "reward", "reward_last", "rewards", "unscorable"},
    "rl_eval": {
        *("step", "eval_split", "eval_n", "eval_reward", "eval_pass_rate", "eval_reward_min"),
        *("eval_reward_max", "eval_metric_ones", "eval_metric_length", "eval_metric_num_turns"),
    },
    "checkpoint_uploaded": {"step"},
    "rl_trained": {"train_wall", "step"},
    "rl_train_done": {"train_wall", "train_tokens", "generated_tokens", "step"},
    "done": {"step"},
}
STORY = ["boot", "rl_start", "model_prefetched", "rl_train_start"]
STORY += [
    *["rl_step"] * 4,
    "rl_eval",
    *["rl_step"] * 4,
    "rl_eval",
    *["rl_step"] * 2,
]  # at 4, at 8, at the end
STORY += ["rl_eval", "rl_trained", "rl_train_done", "done"]  # the one checkpoint lands when it lands
NOTES = {
    *("renderer", "thinking", "train_wall", "model_id", "environment", "job_spec", "resumed"),
    *("download_seconds", "hf_transfer"),
    *("steps", "reward_history", "gen_tokens_is_upper_bound", "max_completion_len", "prompts_per_step"),
    *("generations_per_step", "group_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("grpo_recipe", "unscorable", "rollout_errors", "nonfinite_steps", "attempt"),
}
RECIPE = {
    **{"lr_scheduler": "constant", "beta": 0.05, "scale_rewards": "none", "loss_type": "dr_grpo"},
    **{"temperature": 1.5, "advantage_clip": 0.4, "thinking_length_penalty_coef": 0.0},
    "init_from_adapter": "",
}
# The worker's own entry, with every batch of samples said aloud.
COUNTED = """
import runpy, time
from training import rewards
score = rewards.EnvironmentReward.__call__
def counted(self, completion_ids, **more):
    print("SAMPLED", sum(map(len, completion_ids)), time.time(), flush=True)
    return score(self, completion_ids=completion_ids, **more)
rewards.EnvironmentReward.__call__ = counted
runpy.run_path("worker.py", run_name="__main__")
"""


@dataclass(frozen=True)
class HubRun:
    """A run against the Hub that has ended, and when it did."""

    hub: HubServer
    work: Path
    ended: Finished
    ended_at: float

    @property
    def stored(self) -> dict[str, bytes]:
        """Contents by path below the run's prefix."""
        files = self.hub.files("acme/runs")
        return {
            path.removeprefix(f"{PREFIX}/"): data for path, data in files.items() if path.startswith(PREFIX)
        }

    @property
    def sampled(self) -> list[tuple[int, float]]:
        """Tokens and time of every batch of completions."""
        lines = [line.split() for line in self.ended.out.splitlines() if line.startswith("SAMPLED ")]
        return [(int(tokens), float(at)) for _, tokens, at in lines]


def run_against(hub: HubServer, folder: Path, model: Path, *args: Any, **more: Any) -> HubRun:
    env = grpo_trials.variables(
        folder,
        model,
        *args,
        **{"HF_REPO": "acme/runs", "HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, **more},
    )
    ended = harness.start_python(["-c", COUNTED], env, folder / "home")
    return HubRun(hub, folder / "work", ended, time.time())


@pytest.fixture(scope="module")
def good(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubRun]:
    train = {"steps": STEPS, "kl_penalty_coef": 0.05, "advantage_clip": 0.4}
    knobs = {"AUTOSLM_HEARTBEAT_MIN_S": 0, "AUTOSLM_EVAL_EVERY_STEPS": 4}
    with HubServer() as hub:
        hub.create_repo("acme/runs", kind="dataset", private=True)
        folder = tmp_path_factory.mktemp("rl-good")
        yield run_against(hub, folder, tiny_model, train=train, **knobs)


@pytest.fixture(scope="module")
def failed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubRun]:
    with HubServer() as hub:
        hub.create_repo("acme/runs", kind="dataset", private=True)
        folder = tmp_path_factory.mktemp("rl-failed")
        (folder / "work").mkdir()
        (folder / "work" / "metrics.json").write_text("of another run")
        yield run_against(hub, folder, tiny_model, "hopeless", train={"steps": 5}, AUTOSLM_LOG_FLUSH_S=10)


# --- a run that goes well ---


def test_a_good_run_exits_0_and_ends_with_its_metrics(good: HubRun) -> None:
    assert good.ended.code == 0, good.ended.err[-3000:]
    last = good.ended.out.splitlines()[-1]
    assert strict(last.removeprefix("NODE DONE: ")) == strict(good.stored["metrics.json"])
    assert "Traceback" not in good.ended.err


def test_every_file_is_stored_in_order(good: HubRun) -> None:
    assert not [name for name in good.stored if name.startswith("error")]
    commits = [commit.added.keys() for commit in good.hub.commits("acme/runs")]
    order = []
    for name in ("adapter/adapter_model.safetensors", "train_meta.json", "metrics.json", "DONE"):
        holding = [index for index, added in enumerate(commits) if f"{PREFIX}/{name}" in added]
        assert len(holding) == 1, name
        order += holding
    assert order == sorted(set(order))
    folder = f"{PREFIX}/adapter/"
    adapter = {path.removeprefix(folder) for path in commits[order[0]] if path.startswith(folder)}
    assert adapter >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {f"adapter/{name}" for name in adapter} <= good.stored.keys()
    for name in ("metrics.json", "train_meta.json", "DONE"):
        assert (good.work / name).read_bytes() == good.stored[name]


def test_stages_come_in_order_with_their_fields(good: HubRun) -> None:
    beats = [beat for beat in good.ended.beats if not beat.get("liveness")]
    stages = [beat["stage"] for beat in beats]
    assert stages.count("checkpoint_uploaded") == 1
    assert [one for one in stages if one != "checkpoint_uploaded"] == STORY
    for beat in beats:
        assert beat.keys() == EVERY_BEAT | EXTRAS[beat["stage"]]
        assert (beat["run_id"], beat["mode"], beat["seed"]) == ("r1", "rl", 0)
    made = [beat["ts"] for beat in beats if beat["stage"] not in LANDED]  # those are older when they are told
    assert made == sorted(made)
    assert beats[-1]["step"] == beats[-3]["step"] == STEPS
    committed = [
        strict(commit.added[f"{PREFIX}/heartbeat.json"])
        for commit in good.hub.commits("acme/runs")
        if f"{PREFIX}/heartbeat.json" in commit.added
    ]
    milestones = [beat["stage"] for beat in committed if not beat.get("liveness")]
    quiet = {"rl_step", "checkpoint_uploaded"}
    assert [one for one in milestones if one not in quiet] == [one for one in STORY if one not in quiet]


def test_a_beat_for_every_step(good: HubRun) -> None:
    history = strict(good.stored["metrics.json"])["notes"]["reward_history"]
    steps = [beat for beat in good.ended.beats if beat["stage"] == "rl_step" and not beat.get("liveness")]
    assert [beat["step"] for beat in steps] == list(range(1, STEPS + 1))
    assert [beat["reward"] for beat in steps] == history and len(history) == STEPS
    for number, beat in enumerate(steps, start=1):
        assert beat["reward_last"] == history[max(0, number - 8) : number]
        assert beat["rewards"].keys() == {"ones", "length", "num_turns"}
        assert beat["rewards"]["ones"] == pytest.approx(beat["reward"])
        assert beat["unscorable"] == 0


def test_metrics_say_what_was_run(good: HubRun) -> None:
    metrics = strict(good.stored["metrics.json"])
    assert (metrics["arm"], metrics["phase"], metrics["seed"]) == ("runpod", "rl", 0)
    assert metrics["train_tokens"] == 0
    assert metrics["train_throughput_toks_per_s"] == pytest.approx(
        metrics["generated_tokens"] / metrics["wall_seconds"]
    )
    notes = metrics["notes"]
    assert notes.keys() >= NOTES
    assert notes["grpo_recipe"] == RECIPE
    assert (notes["steps"], notes["max_completion_len"], notes["group_size"]) == (STEPS, 8, 4)
    assert (notes["prompts_per_step"], notes["generations_per_step"]) == (4, 16)
    assert notes["per_device_train_batch_size"] * notes["gradient_accumulation_steps"] == 16
    assert notes["gen_tokens_is_upper_bound"] is False and notes["thinking"] is False
    assert notes["renderer"] == "verifiers" and notes["environment"] == "toy-rewards"
    assert notes["train_wall"] == metrics["wall_seconds"] > 0
    assert notes["job_spec"]["train"]["advantage_clip"] == 0.4
    assert (notes["unscorable"], notes["rollout_errors"], notes["nonfinite_steps"]) == (0, {}, 0)
    meta = strict(good.stored["train_meta.json"])
    assert meta["notes"] == notes and meta["generated_tokens"] == metrics["generated_tokens"]


def test_generated_tokens_are_those_that_were_sampled(good: HubRun) -> None:
    sampled = [tokens for tokens, _ in good.sampled]
    assert len(sampled) == STEPS
    assert strict(good.stored["metrics.json"])["generated_tokens"] == sum(sampled)


# --- a run that fails with vLLM loaded ---


def test_a_failed_run_exits_1_within_30_seconds_of_the_error(failed: HubRun) -> None:
    assert failed.ended.code == 1
    assert len(failed.sampled) == 3  # it gives up after three batches without a single reward
    assert failed.ended_at - failed.sampled[-1][1] < 30


def test_a_failed_run_says_why(failed: HubRun) -> None:
    last = failed.ended.beats[-1]
    assert failed.ended.stages == ["boot", "rl_start", "model_prefetched", "rl_train_start", "error_rl"]
    assert last.keys() == EVERY_BEAT | {"error", "diag", "retriable", "oom"}
    assert last["error"].startswith("NothingScored: none of 48 samples could be scored")
    assert "hopeless: ConnectionError: the judge is gone" in last["error"]
    assert (last["retriable"], last["oom"]) == (False, False)
    assert strict(failed.stored["heartbeat.json"])["stage"] == "error_rl"
    text = failed.stored["error_rl.txt"].decode()
    assert (failed.work / "error_rl.txt").read_text() == text
    assert f"run {PREFIX}" in text.splitlines()[0] and "Traceback" in text
    assert "NothingScored: none of 48" in text.splitlines()[-1]
    assert "NothingScored: none of 48" in failed.ended.err
    assert "Traceback" not in failed.ended.err.partition("NothingScored: none of 48")[2]


def test_a_failed_run_leaves_no_result(failed: HubRun) -> None:
    assert not (failed.work / "metrics.json").exists() and not (failed.work / "DONE").exists()
    assert not {"metrics.json", "DONE", "train_meta.json"} & failed.stored.keys()
    assert not [name for name in failed.stored if name.startswith("adapter/")]


# --- without vLLM ---


def test_a_run_without_vllm(tiny_model: Path, tmp_path: Path) -> None:
    env = grpo_trials.variables(tmp_path, tiny_model, RL_USE_VLLM=0, SEED=3)
    ended = harness.start_python(["worker.py"], env, tmp_path / "home")
    assert ended.code == 0, ended.err[-3000:]
    assert ended.stages == [*STORY[:4], *["rl_step"] * 3, "checkpoint_uploaded", *STORY[-3:]]
    stored = tmp_path / "store" / "rl" / "r1" / "seed3"
    metrics = strict((stored / "metrics.json").read_text())
    assert metrics["seed"] == 3 and metrics["generated_tokens"] > 0
    assert (stored / "DONE").exists() and (stored / "adapter" / "adapter_model.safetensors").exists()
    assert "RL_USE_VLLM=off" in ended.err
