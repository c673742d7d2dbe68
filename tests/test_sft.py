"""Supervised fine-tuning from end to end: a real model, a real environment, a real Hub client."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import harness, tracked
from tests.harness import Finished, strict
from tests.hub_server import HubServer

pytestmark = pytest.mark.slow

PREFIX = "sft/r1/seed0"
TOKEN = "hf_test"
ADAPTER_FILES = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
}
LICENSED = b"---\nlicense: apache-2.0\n---\n\n# Tiny\n"
TRACKER_KEY = "0123456789abcdef0123456789abcdef01234567"
UNUSED_FILES = ("model.gguf", "tf_model.h5", "original/consolidated.00.bin", "onnx/model.onnx")
EVERY_BEAT = {"stage", "ts", "run_id", "mode", "seed", "attempt"}
LANDED = ("checkpoint_uploaded", "sft_trained", "merged", "done")
EXTRAS = {
    "boot": set(),
    "sft_start": set(),
    "model_prefetched": {"model", "download_seconds", "hf_transfer"},
    "sft_model_load": {"setup_seconds", "resumed"},
    "sft_step": {"step", "steps", "loss"},
    "sft_eval": {
        *("step", "eval_split", "eval_n", "eval_reward", "eval_pass_rate", "eval_reward_min"),
        *("eval_reward_max", "eval_metric_exact", "eval_metric_num_turns"),
    },
    "checkpoint_uploaded": {"step"},
    "sft_trained": {"train_wall", "step"},
    "merged": {"step"},
    "sft_train_done": {"train_wall", "train_tokens", "generated_tokens", "step"},
    "done": {"step"},
}
# Twenty-one steps of eight rows: the trainer logs twice, each time before an evaluation. The checkpoint lands
# when it lands.
STORY = ["boot", "sft_start", "model_prefetched", "sft_model_load"]
STORY += ["sft_step", "sft_eval", "sft_step", "sft_eval", "sft_eval"]
STORY += ["sft_trained", "merged", "sft_train_done", "done"]


def run_dir(folder: Path) -> dict[str, Path]:
    """The files that a run left in its work directory, the trainer's own aside."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if not name.startswith("sft_seed0/")}


# --- one whole run against the Hub ---


@dataclass(frozen=True)
class HubRun:
    """A finished run whose model and store were both on a Hub."""

    hub: HubServer
    env: dict[str, str]
    home: Path
    model_commit: str
    ended: Finished

    @property
    def work(self) -> Path:
        return Path(self.env["AUTOSLM_WORK_DIR"])

    @property
    def stored(self) -> dict[str, bytes]:
        """Contents by path below the run's prefix."""
        files = self.hub.files("acme/runs")
        return {
            path.removeprefix(f"{PREFIX}/"): data for path, data in files.items() if path.startswith(PREFIX)
        }


@pytest.fixture(scope="module")
def hub_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubRun]:
    folder = tmp_path_factory.mktemp("hub-run")
    with HubServer() as hub:
        hub.create_repo("acme/runs", kind="dataset", private=True)
        hub.create_repo("acme/tiny", private=True)
        hub.push("acme/tiny", {**dict.fromkeys(UNUSED_FILES, b"not for us"), "README.md": LICENSED})
        model_commit = hub.add_folder("acme/tiny", tiny_model).id
        hub.push("acme/tiny", {"config.json": b"a later commit that nobody should load"})
        env = harness.variables(
            folder,
            f"acme/tiny@{model_commit}",
            "acme/toy-words",
            HF_REPO="acme/runs",
            HUGGINGFACE_TOKEN=TOKEN,
            HF_ENDPOINT=hub.url,
            AUTOSLM_HEARTBEAT_MIN_S=0,
            AUTOSLM_EVAL_EVERY_STEPS=10,
            AUTOSLM_EVAL_MAX_NEW=8,
            SFT_EPOCHS=7,
            AUTOSLM_MERGE=1,
            AUTOSLM_REPORT_TO="wandb,trackio,tensorboard",
            WANDB_MODE="offline",
            WANDB_API_KEY=TRACKER_KEY,
            TRACKIO_DIR=folder / "trackio",
            PYTHONPATH=f"{harness.PYTHONPATH}{os.pathsep}{harness.TRACKERS}",
        )
        ended = harness.start_python(["worker.py"], env, folder / "home")
        yield HubRun(hub, env, folder / "home", model_commit, ended)


def test_a_good_run_exits_0_and_ends_with_its_metrics(hub_run: HubRun) -> None:
    assert hub_run.ended.code == 0, hub_run.ended.err
    last = hub_run.ended.out.splitlines()[-1]
    assert strict(last.removeprefix("NODE DONE: ")) == strict(hub_run.stored["metrics.json"])
    assert "Traceback" not in hub_run.ended.err


def test_without_a_terminal_a_run_prints_plain_lines_and_a_summary(hub_run: HubRun) -> None:
    printed = hub_run.ended.out + hub_run.ended.err
    assert [*filter(lambda one: ord(one) < 32 and one != "\n", printed)] == []
    protocol = ("HEARTBEAT {", "NODE DONE: {", "[INFO] Running in WANDB offline mode")  # transformers'
    assert [line for line in hub_run.ended.out.splitlines() if not line.startswith(protocol)] == []
    assert "Warning" not in hub_run.ended.err and "it/s" not in printed and "examples/s" not in printed
    summary = hub_run.ended.err.partition("summary:\n")[2]
    assert f"run         {PREFIX}, finished" in summary and f"artifacts   acme/runs/{PREFIX}" in summary
    assert "loss " in summary and "seconds     environment " in summary and "tokens/s" in summary


def test_every_file_of_the_contract_is_under_the_prefix(hub_run: HubRun) -> None:
    stored = hub_run.stored
    assert {"heartbeat.json", "train_meta.json", "metrics.json", "DONE"} <= stored.keys()
    assert {f"adapter/{name}" for name in ADAPTER_FILES} <= stored.keys()
    assert not [name for name in stored if name.startswith("error")]
    outside = [path for path in hub_run.hub.files("acme/runs") if not path.startswith(PREFIX)]
    assert outside == [".gitattributes"]


def test_artifacts_are_committed_in_order_each_whole(hub_run: HubRun) -> None:
    commits = [commit.added.keys() for commit in hub_run.hub.commits("acme/runs")]
    order = []
    files = ("adapter/adapter_model.safetensors", "merged/model.safetensors", "train_meta.json")
    for name in (*files, "metrics.json", "DONE"):
        holding = [index for index, added in enumerate(commits) if f"{PREFIX}/{name}" in added]
        assert len(holding) == 1
        order += holding
    assert order == sorted(set(order))
    adapter = {path.removeprefix(f"{PREFIX}/adapter/") for path in commits[order[0]]}
    assert adapter >= ADAPTER_FILES
    assert [len(commits[index]) for index in order[2:]] == [4, 1, 2]  # report and picture, and beats


def test_stages_come_in_order_with_their_fields(hub_run: HubRun) -> None:
    beats = [beat for beat in hub_run.ended.beats if not beat.get("liveness")]
    stages = [beat["stage"] for beat in beats]
    assert stages.count("checkpoint_uploaded") == 1
    assert [one for one in stages if one != "checkpoint_uploaded"] == STORY
    for beat in beats:
        assert beat.keys() == EVERY_BEAT | EXTRAS[beat["stage"]]
        assert (beat["run_id"], beat["mode"], beat["seed"]) == ("r1", "sft", 0)
    made = [beat["ts"] for beat in beats if beat["stage"] not in LANDED]  # those are older when they are told
    assert made == sorted(made)
    assert len({beat["attempt"] for beat in beats}) == 1
    steps = sorted(beat["step"] for beat in beats if "step" in beat)
    assert steps == [10, 10, 20, 20, 21, 21, 21, 21, 21, 21]
    first, second = (beat["loss"] for beat in beats if beat["stage"] == "sft_step")
    assert second < first


def test_each_commit_of_a_beat_is_the_beat_that_was_printed(hub_run: HubRun) -> None:
    committed = [
        strict(commit.added[f"{PREFIX}/heartbeat.json"])
        for commit in hub_run.hub.commits("acme/runs")
        if f"{PREFIX}/heartbeat.json" in commit.added
    ]
    printed = hub_run.ended.beats
    assert [beat for beat in committed if beat not in printed] == []

    def told_at_once(beats: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [beat for beat in beats if beat["stage"] not in LANDED]

    in_order = [beat for beat in told_at_once(printed) if beat in committed]
    assert in_order == told_at_once(committed)
    assert [beat["stage"] for beat in committed if not beat.get("liveness")][-3:] == STORY[-3:]


def test_metrics_say_what_was_run(hub_run: HubRun) -> None:
    metrics = strict(hub_run.stored["metrics.json"])
    assert hub_run.stored["metrics.json"].startswith(b'{\n  "arm": "runpod"')
    assert (metrics["phase"], metrics["seed"]) == ("sft", 0)
    assert metrics["model_id"] == f"acme/tiny@{hub_run.model_commit}"
    assert metrics["wall_seconds"] > 0 and metrics["setup_seconds"] > 0
    assert metrics["generated_tokens"] == 0 and metrics["train_tokens"] > 0
    throughput = metrics["train_tokens"] / metrics["wall_seconds"]
    assert metrics["train_throughput_toks_per_s"] == pytest.approx(throughput)
    notes = metrics["notes"]
    assert notes["renderer"] == "verifiers" and notes["thinking"] is False
    assert notes["train_wall"] == metrics["wall_seconds"]
    assert notes["environment"] == "acme/toy-words" and notes["epochs"] == 7
    assert notes["job_spec"]["run_id"] == "r1" and notes["resumed"] is False
    assert notes["download_seconds"] >= 0 and notes["hf_transfer"] == ""
    assert notes["model_commit"] == hub_run.model_commit
    assert notes["environment_version"].startswith("toy_words sha256:")
    assert notes["dataset_fingerprint"] and notes["versions"]["trl"]
    assert TOKEN not in hub_run.stored["metrics.json"].decode()


def test_train_meta_says_the_same(hub_run: HubRun) -> None:
    meta, metrics = strict(hub_run.stored["train_meta.json"]), strict(hub_run.stored["metrics.json"])
    assert meta.keys() == {
        *("phase", "adapter_dir", "model_id", "train_wall", "setup_seconds", "train_tokens"),
        *("generated_tokens", "notes"),
    }
    assert meta["train_wall"] == metrics["wall_seconds"] and meta["notes"] == metrics["notes"]
    assert Path(meta["adapter_dir"]) == hub_run.work / "sft_seed0" / "adapter"


def test_local_files_equal_the_uploaded_ones_and_nothing_else_is_left(hub_run: HubRun) -> None:
    found = run_dir(hub_run.work)
    assert found.keys() == {"metrics.json", "train_meta.json", "DONE", "hb/heartbeat.json"}
    for name in ("metrics.json", "train_meta.json", "DONE"):
        assert found[name].read_bytes() == hub_run.stored[name]
    assert strict(found["hb/heartbeat.json"].read_text())["stage"] == "done"
    assert float(hub_run.stored["DONE"]) > hub_run.ended.beats[0]["ts"]


def test_the_model_is_fetched_at_the_commit_that_was_asked_for(hub_run: HubRun) -> None:
    fetched = [one.path for one in hub_run.hub.requests if one.path.startswith("/acme/tiny/resolve/")]
    assert {path.split("/")[4] for path in fetched} == {hub_run.model_commit}
    assert any(path.endswith("/model.safetensors") for path in fetched)
    assert not [path for path in fetched if path.endswith(UNUSED_FILES)]
    beat = next(beat for beat in hub_run.ended.beats if beat["stage"] == "model_prefetched")
    assert beat["model"] == "acme/tiny"


def test_the_store_is_reached_with_the_token_and_nobody_is_told(hub_run: HubRun) -> None:
    writes = [one for one in hub_run.hub.requests if one.method == "POST" and "/api/datasets/" in one.path]
    assert writes and {one.token for one in writes} == {TOKEN}
    assert TOKEN not in hub_run.ended.out + hub_run.ended.err


def test_the_adapter_loads_on_the_base_and_changes_what_it_says(
    hub_run: HubRun, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ADAPTER_FILES:
        (tmp_path / name).write_bytes(hub_run.stored[f"adapter/{name}"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "acme/tiny"
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (32, 64, 0.0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer.encode("Spell emu backwards.")])
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, tmp_path)(ids).logits
    assert not torch.allclose(before, after, atol=0.1)


# --- what its artifacts are good for ---


def test_the_card_is_one_that_a_hub_takes(hub_run: HubRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import ModelCard, constants

    card = ModelCard(hub_run.stored["adapter/README.md"].decode())
    monkeypatch.setattr(constants, "ENDPOINT", hub_run.hub.url)
    asked = len(hub_run.hub.requests)
    card.validate()
    assert [one.path for one in hub_run.hub.requests[asked:]] == ["/api/validate-yaml"]
    assert (card.data.base_model, card.data.license) == ("acme/tiny", "apache-2.0")
    text, losses = card.text, [beat["loss"] for beat in hub_run.ended.beats if beat["stage"] == "sft_step"]
    metrics = strict(hub_run.stored["metrics.json"])
    facts = {"steps": 21, "seconds": metrics["wall_seconds"], "tokens trained on": metrics["train_tokens"]}
    facts |= {"learning rate": 0.003, "LoRA rank, alpha": "32, 64", "seed": 0}
    first, last = (f"{one:.4g}" for one in losses)
    facts |= {"Loss": f"{first} → **{last}** (first and last of 2 logged values; newest {last})"}
    for name, value in facts.items():
        assert f"| {name} | {value} |" in text
    assert metrics["notes"]["dataset_fingerprint"] in text and "acme/toy-words" in text


# Run as the card says it. Compiling takes minutes on a CPU, and vLLM's "auto" halves float32.
AS_THE_CARD_SAYS = """
import json, re, sys
from pathlib import Path
card, merged = sys.argv[1:]
with_peft, with_vllm = re.findall(r"```python\\n(.*?)\\n```", Path(card).read_text(), re.DOTALL)
peft, vllm = {}, {}
exec(with_peft, peft)
on_a_cpu = {"enforce_eager": True, "dtype": "float32"}
exec(re.sub(r"(max_lora_rank=\\d+,)", r"\\1 **on_a_cpu,", with_vllm), vllm := {"on_a_cpu": on_a_cpu})
from vllm import LLM
whole = LLM(merged, **on_a_cpu)
ids = peft["inputs"]["input_ids"]
greedy = vllm["SamplingParams"](temperature=0.0, max_tokens=64)
[served] = whole.generate({"prompt_token_ids": ids[0].tolist()}, greedy)
model = peft["AutoModelForCausalLM"].from_pretrained(merged)
loaded = model.float().generate(**peft["inputs"], max_new_tokens=64)
found = {
    "dtype": str(peft["AutoModelForCausalLM"].from_pretrained(merged, dtype="auto").dtype),
    "adapter": [peft["output"][0, ids.shape[1] :].tolist(), list(vllm["output"].outputs[0].token_ids)],
    "merged": [loaded[0, ids.shape[1] :].tolist(), list(served.outputs[0].token_ids)],
}
print("FOUND", json.dumps(found))
"""


def test_adapter_and_merged_weights_are_used_as_the_card_says(hub_run: HubRun) -> None:
    """In transformers and in vLLM, downloaded from the Hub: the same greedy answers."""
    card, merged = (hub_run.work / "sft_seed0" / name for name in ("adapter/README.md", "merged"))
    assert card.read_bytes() == hub_run.stored["adapter/README.md"]
    env = {"HF_ENDPOINT": hub_run.hub.url, "HF_TOKEN": TOKEN, "VLLM_CPU_KVCACHE_SPACE": "1"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ended = harness.start_python(["-c", AS_THE_CARD_SAYS, str(card), str(merged)], env, hub_run.home)
    assert ended.code == 0, ended.err[-3000:]
    found = strict(next(line for line in ended.out.splitlines() if line.startswith("FOUND "))[6:])
    assert found["dtype"] == "torch.bfloat16"
    for name in ("adapter", "merged"):
        from_transformers, from_vllm = found[name]
        assert from_transformers and from_transformers == from_vllm


def test_merged_weights_are_the_base_plus_the_adapter_rounded_once(
    hub_run: HubRun, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from safetensors.torch import load
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    for name in ADAPTER_FILES:
        (tmp_path / name).write_bytes(hub_run.stored[f"adapter/{name}"])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="bfloat16").float()
    exact = PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    merged = load(hub_run.stored["merged/model.safetensors"])
    assert {one.dtype for one in merged.values()} == {torch.bfloat16}
    assert merged.keys() == exact.keys() - {"lm_head.weight"}  # tied
    assert [name for name, one in merged.items() if not torch.equal(one, exact[name].bfloat16())] == []
    folder = hub_run.work / "sft_seed0" / "merged"
    mine, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tiny_model)
    assert mine.get_chat_template() == theirs.get_chat_template()
    assert GenerationConfig.from_pretrained(folder) == GenerationConfig.from_pretrained(tiny_model)
    assert {f"merged/{one.name}" for one in folder.iterdir()} == {
        name for name in hub_run.stored if name.startswith("merged/")
    }


def test_trackers_have_every_log_under_the_runs_name(
    hub_run: HubRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    tracked.find_packages(monkeypatch)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = {beat["step"]: beat["loss"] for beat in hub_run.ended.beats if beat["stage"] == "sft_step"}
    [wandb] = tracked.runs(hub_run.work / "sft_seed0")
    assert (wandb.name, wandb.project, wandb.exit_code) == (PREFIX, "slm-worker", 0)
    assert wandb.series("train/loss") == losses
    [database] = (hub_run.home.parent / "trackio").glob("*.db")
    with sqlite3.connect(database) as opened:
        logged = opened.execute("select run_name, metrics from metrics order by id").fetchall()
    assert {name for name, _ in logged} == {PREFIX}
    in_trackio = [strict(metrics) for _, metrics in logged]
    assert {
        one["train/global_step"]: one["train/loss"] for one in in_trackio if "train/loss" in one
    } == losses
    events = EventAccumulator(str(next((hub_run.work / "sft_seed0").glob("runs/*")))).Reload()
    assert {one.step: pytest.approx(one.value) for one in events.Scalars("train/loss")} == losses
    told = [hub_run.ended.out.encode(), hub_run.ended.err.encode(), *hub_run.stored.values()]
    told += [path.read_bytes() for path in hub_run.work.rglob("*") if path.is_file()]
    assert not [one for one in told if TRACKER_KEY.encode() in one]


REPLAY = """
import json, os, sys
import worker
code = worker.command([], os.environ)
heavy = ("torch", "transformers", "verifiers", "datasets", "trl", "peft")
print("MODULES", json.dumps([name for name in heavy if name in sys.modules]))
sys.exit(code)
"""


def test_a_second_start_replays_without_the_heavy_libraries(hub_run: HubRun) -> None:
    hub, commits = hub_run.hub, len(hub_run.hub.commits("acme/runs"))
    before, seen = hub_run.stored, len(hub.requests)
    (hub_run.work / "metrics.json").write_text("stale")
    again = harness.start_python(["-c", REPLAY], hub_run.env, hub_run.home)
    assert again.code == 0, again.err
    assert again.stages == ["already_done"]
    assert "MODULES []" in again.out
    assert (hub_run.work / "metrics.json").read_bytes() == before["metrics.json"]
    made = hub.commits("acme/runs")[commits:]
    assert [list(commit.added) for commit in made] == [[f"{PREFIX}/heartbeat.json"]]
    assert not [one for one in hub.requests[seen:] if "acme/tiny" in one.path]
    assert {name: data for name, data in hub_run.stored.items() if name != "heartbeat.json"} == {
        name: data for name, data in before.items() if name != "heartbeat.json"
    }


def test_a_smoke_run_of_two_steps_with_xet_on(tiny_model: Path, tmp_path: Path) -> None:
    """A Hub that keeps every file out of LFS: the client then has nothing to hand to xet."""
    with HubServer(all_regular=True) as hub:
        env = harness.variables(
            tmp_path,
            tiny_model,
            "toy-words",
            {"train": {"hf_repo": "acme/fresh"}},
            HF_TOKEN=TOKEN,
            HF_ENDPOINT=hub.url,
            HF_HUB_DISABLE_XET=0,
            SFT_MAX_STEPS=2,
        )
        ended = harness.start_python(["worker.py"], env, tmp_path / "home")
        assert ended.code == 0, ended.err
        assert ended.beats[-1]["stage"] == "done" and ended.beats[-1]["step"] == 2
        assert hub.repo("acme/fresh").private
        assert f"{PREFIX}/adapter/adapter_model.safetensors" in hub.files("acme/fresh")
        assert not [one for one in hub.requests if "xet" in one.path or "lfs" in one.path]


# --- runs in this process, into a folder ---


@dataclass(frozen=True)
class Trained:
    """A finished run in this process."""

    ended: Finished
    store: Path

    @property
    def metrics(self) -> dict[str, Any]:
        return strict((self.store / "metrics.json").read_text())

    @property
    def weights(self) -> bytes:
        return (self.store / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def train(job: Callable[..., dict[str, str]], tmp_path: Path, run_in_process: Any) -> Callable[..., Trained]:
    """Run a job in a folder of its own; everything but `name` goes to `job`."""

    def run(name: str = "run", *args: Any, **more: Any) -> Trained:
        folder = tmp_path / name
        env = job(*args, folder=folder, **more)
        ended = run_in_process(env)
        if ended.error is not None:
            raise ended.error
        seed = env.get("SEED", "0")
        return Trained(ended, folder / "store" / "sft" / "r1" / f"seed{seed}")

    return run


def test_the_folder_store_has_the_same_layout_and_replays(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    first = train(SFT_MAX_STEPS=1)
    files = {path.relative_to(first.store).as_posix() for path in first.store.rglob("*") if path.is_file()}
    assert {"heartbeat.json", "train_meta.json", "metrics.json", "DONE"} <= files
    assert {f"adapter/{name}" for name in ADAPTER_FILES} <= files
    assert run_dir(tmp_path / "run" / "work").keys() == {
        "metrics.json",
        "train_meta.json",
        "DONE",
        "hb/heartbeat.json",
    }
    metrics, work = first.metrics, tmp_path / "run" / "work"
    shutil.rmtree(work)
    again = train(SFT_MAX_STEPS=1)
    assert again.ended.stages == ["already_done"]
    assert strict((work / "metrics.json").read_text()) == metrics
    assert run_dir(work).keys() == {"metrics.json", "hb/heartbeat.json"}


def test_done_without_metrics_is_worth_another_try(
    job: Callable[..., dict[str, str]], tmp_path: Path, run_in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import worker

    naps: list[float] = []
    monkeypatch.setattr(worker.read_metrics.retry, "sleep", naps.append)
    done = tmp_path / "store" / PREFIX / "DONE"
    done.parent.mkdir(parents=True)
    done.write_text("1.0")
    ended = run_in_process(job())
    assert "metrics.json" in str(ended.error) and len(naps) == 2
    assert ended.stages == ["already_done", "error_sft"] and ended.beats[-1]["retriable"] is True
    assert not (tmp_path / "work" / "metrics.json").exists()


def test_nothing_of_an_earlier_run_in_the_same_folder_is_taken_for_this_ones(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    stale = tmp_path / "run" / "work" / "sft_seed0"
    for name in ("checkpoint-900", "adapter"):
        (stale / name).mkdir(parents=True)
        (stale / name / "adapter_model.bin").write_text("of another run")
    ran = train(SFT_MAX_STEPS=2)
    assert {path.name for path in stale.iterdir() if path.is_dir()} == {"checkpoint-2", "adapter"}
    assert not (ran.store / "adapter" / "adapter_model.bin").exists()


def test_the_same_seed_gives_the_same_adapter_bit_for_bit(train: Callable[..., Trained]) -> None:
    one, two, other = (
        train(name, SFT_MAX_STEPS=4, SEED=seed) for name, seed in [("a", 3), ("b", 3), ("c", 4)]
    )
    assert one.weights == two.weights
    assert one.weights != other.weights
    assert one.metrics["notes"]["dataset_fingerprint"] == two.metrics["notes"]["dataset_fingerprint"]
    assert one.metrics["train_tokens"] == two.metrics["train_tokens"]


def test_a_model_of_another_architecture_trains_too(train: Callable[..., Trained], tmp_path: Path) -> None:
    """Llama-shaped, untied, with its own template, a start token, and no pad token."""
    model = harness.build_llama(tmp_path / "llama")
    ran = train(spec={"train": {"learning_rate": 0.01}}, model=model, SFT_MAX_STEPS=21)
    first, second = (beat["loss"] for beat in ran.ended.beats if beat["stage"] == "sft_step")
    assert second < first
    config = json.loads((ran.store / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model)
    assert "q_proj" in str(config["target_modules"]) and "lm_head" not in str(config["target_modules"])


def test_chosen_modules_get_the_adapter_and_no_others(train: Callable[..., Trained]) -> None:
    from safetensors.torch import load

    spec = {"train": {"lora_rank": 4, "lora_alpha": 8}}
    ran = train(spec=spec, SFT_MAX_STEPS=1, LORA_TARGETS="q_proj, v_proj")
    tensors = load(ran.weights)
    assert {name.split(".")[-3] for name in tensors} == {"q_proj", "v_proj"}
    assert {min(tensor.shape) for tensor in tensors.values()} == {4}


def test_conversations_and_tool_transcripts_train(train: Callable[..., Trained]) -> None:
    talk = train(
        "talk",
        "toy-dialogue",
        {"environment": {"id": "toy-dialogue", "params": {"transcripts": True}}},
        SFT_MAX_STEPS=1,
    )
    assert talk.metrics["notes"]["rows"]["source"] == 9
    assert talk.metrics["notes"]["rows"]["kept"] > 9  # a row for each turn
    tools = train("tools", "toy-tools", {"train": {"max_length": 2048, "batch_size": 2}}, SFT_MAX_STEPS=1)
    assert tools.metrics["notes"]["rows"] == {
        "source": 3,
        "without_target": 0,
        "target_cut_off": 0,
        "kept": 6,
    }


def test_prompt_lists_with_info_as_text_train(train: Callable[..., Trained]) -> None:
    ran = train("run", "toy-prompts", SFT_MAX_STEPS=1)
    assert ran.metrics["notes"]["rows"] == {"source": 4, "without_target": 1, "target_cut_off": 0, "kept": 3}


# --- what the trainer is fed ---


@dataclass
class Bench:
    """A run just before its trainer is built, in this process."""

    settings: Any
    run: Any
    job: Any
    talk: Any
    rows: list[Any]
    batch: Any
    callbacks: list[Any] = field(default_factory=list)

    def trainer(self) -> Any:
        from training import trainers
        from training.observers import observe

        self.job.note(resumed=False)
        self.observers = observe(self.settings, self.run, self.job)
        callbacks = [*self.observers.callbacks, *self.callbacks]
        return trainers.sft_trainer(self.settings, self.job.plan, self.talk, self.rows, self.batch, callbacks)

    def train(self, trainer: Any) -> None:
        import worker

        worker.train(self.run, self.job, trainer, self.observers, None)


@pytest.fixture
def bench(job: Callable[..., dict[str, str]]) -> Callable[..., Bench]:
    """Do what the worker does up to the trainer; arguments are those of `job`."""
    from job import rules
    from job.settings import identify
    from training import inputs
    from training.run import Run

    def make(*args: Any, callbacks: Sequence[Any] = (), **more: Any) -> Bench:
        env = job(*args, **more)
        identity, problem = identify(env)
        assert problem is None
        run = Run(identity)
        run.start()
        found, settings = inputs.load(rules.resolve(env, identity), run.redact, [])
        talk, rows, batch = inputs.for_sft(settings, found, lambda: None)
        return Bench(settings, run, found, talk, rows, batch, list(callbacks))

    return make


def without_pad_token(model: Path, folder: Path) -> Path:
    """A copy of the tiny model whose pad token has to be its end of turn."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("pad_is_end", [False, True])
def test_the_collated_batch_learns_answers_and_their_ends_only(
    bench: Callable[..., Bench], tiny_model: Path, tmp_path: Path, pad_is_end: bool
) -> None:
    model = without_pad_token(tiny_model, tmp_path / "padless") if pad_is_end else tiny_model
    it = bench(model=model)
    end, pad = it.talk.end_of_turn_id, it.talk.tokenizer.pad_token_id
    assert (end == pad) == pad_is_end
    known = {tuple(row.ids): row for row in it.rows}
    rows_seen = padded = 0
    for batch in it.trainer().get_train_dataloader():
        for ids, labels, mask in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        ):
            length = int(mask.sum())
            row = known[tuple(ids[:length].tolist())]
            assert labels[:length].tolist() == row.labels
            assert set(labels[length:].tolist()) <= {-100} and set(ids[length:].tolist()) <= {pad}
            answer = [label for label in row.labels if label != -100]
            assert answer[-1] == end and end not in answer[:-1]
            prompt = len(row.ids) - len(answer)
            assert labels[:prompt].tolist() == [-100] * prompt
            rows_seen, padded = rows_seen + 1, padded + len(ids) - length
    assert rows_seen == len(it.rows) == 22
    assert padded > 0


def test_with_completion_only_off_everything_but_padding_is_learnt(bench: Callable[..., Bench]) -> None:
    for batch in bench(SFT_COMPLETION_ONLY="no").trainer().get_train_dataloader():
        real = batch["attention_mask"].bool()
        assert batch["labels"][real].equal(batch["input_ids"][real])
        assert set(batch["labels"][~real].tolist()) <= {-100}


class Counting:
    """A collator that counts the tokens and rows of each micro-batch it makes."""

    def __init__(self, collator: Any):
        self.collator, self.tokens, self.rows = collator, list[int](), list[int]()

    def __call__(self, features: list[Any]) -> Any:
        batch = self.collator(features)
        self.tokens.append(int(batch["attention_mask"].sum()))
        self.rows.append(len(features))
        return batch


@pytest.mark.parametrize(
    ("batch_size", "ceiling", "micro", "accumulation"),
    [(8, 4, 4, 2), (6, 4, 3, 2), (7, 4, 1, 7), (2, 4, 2, 1)],
)
def test_the_batch_is_the_one_asked_for_and_tokens_are_counted_as_fed(
    bench: Callable[..., Bench], batch_size: int, ceiling: int, micro: int, accumulation: int
) -> None:
    it = bench(spec={"train": {"batch_size": batch_size}}, SFT_PER_DEVICE_BS=ceiling, SFT_MAX_STEPS=2)
    assert (it.batch.micro, it.batch.accumulation) == (micro, accumulation)
    trainer = it.trainer()
    trainer.data_collator = counting = Counting(trainer.data_collator)
    it.train(trainer)
    fed = 2 * accumulation  # a data loader may have looked one batch ahead
    assert counting.rows[:fed] == [micro] * fed
    assert trainer.state.global_step == it.run.tally.step == 2
    assert trainer.state.num_input_tokens_seen == sum(counting.tokens[:fed])


def test_train_tokens_of_whole_epochs_are_the_rows_lengths(
    train: Callable[..., Trained], bench: Callable[..., Bench]
) -> None:
    lengths = [len(row.ids) for row in bench().rows]
    metrics = train(SFT_EPOCHS=2).metrics
    assert metrics["train_tokens"] == 2 * sum(lengths)
    assert metrics["notes"]["batch"] == {"micro": 4, "accumulation": 2}


def test_train_tokens_count_truncated_rows_as_they_are(
    train: Callable[..., Trained], bench: Callable[..., Bench]
) -> None:
    longest = max(len(row.ids) for row in bench().rows)
    metrics = train(spec={"train": {"max_length": longest - 2}}, SFT_EPOCHS=1).metrics
    cut = bench(spec={"train": {"max_length": longest - 2}}).rows
    assert metrics["train_tokens"] == sum(len(row.ids) for row in cut)
    assert max(len(row.ids) for row in cut) == longest - 2


# --- gradients that are not finite, or nothing ---


class Spoiler:
    """Multiplies every gradient of the given steps, and notes which steps moved the parameters."""

    def __init__(self, factor: float, steps: Sequence[int]):
        self.factor, self.steps, self.moved = factor, steps, list[int]()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.watched = [one for one in model.parameters() if one.requires_grad]
        for parameter in self.watched:
            parameter.register_hook(
                lambda grad: grad * (self.factor if state.global_step in self.steps else 1.0)
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.before = [one.detach().clone() for one in self.watched]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pairs = zip(self.before, self.watched, strict=True)
        if any(not was.equal(now) for was, now in pairs):
            self.moved.append(state.global_step - 1)


def spoiler(factor: float, steps: Sequence[int]) -> Any:
    from training.midrun import as_callback

    return as_callback(Spoiler, factor, steps)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_updates_with_bad_gradients_are_skipped_and_counted(
    bench: Callable[..., Bench], factor: float
) -> None:
    spoilt = spoiler(factor, [1, 3])
    it = bench(callbacks=[spoilt], SFT_MAX_STEPS=6)
    trainer = it.trainer()
    it.train(trainer)
    assert spoilt.moved == [0, 2, 4, 5]
    assert it.job.metrics.notes["nonfinite_steps"] == 2
    assert all(bool(one.isfinite().all()) for one in spoilt.watched)


def test_ten_bad_updates_in_a_row_fail_the_run(bench: Callable[..., Bench]) -> None:
    from training.midrun import GradientFailure

    spoilt = spoiler(math.nan, range(2, 99))
    it = bench(callbacks=[spoilt], SFT_MAX_STEPS=15)
    trainer = it.trainer()
    with pytest.raises(GradientFailure, match=r"10 updates in a row.*train\.learning_rate"):
        it.train(trainer)
    assert spoilt.moved == [0, 1] and trainer.state.global_step == 11


def test_gradients_that_are_always_zero_fail_the_run(bench: Callable[..., Bench]) -> None:
    from training.midrun import GradientFailure

    it = bench(callbacks=[spoiler(0.0, range(99))], SFT_MAX_STEPS=2)
    trainer = it.trainer()
    with pytest.raises(GradientFailure, match="no gradient was ever non-zero"):
        it.train(trainer)


# --- what the trainer is told ---


def test_every_keyword_is_one_of_the_installed_trainers(bench: Callable[..., Bench]) -> None:
    from dataclasses import fields

    from trl import SFTConfig

    from training import trainers

    it = bench()
    told = trainers.sft_arguments(it.settings, it.job.plan, it.batch, 3200)
    assert told.keys() <= {one.name for one in fields(SFTConfig)}


def test_a_run_too_short_to_warm_up_still_learns(bench: Callable[..., Bench]) -> None:
    it = bench(SFT_MAX_STEPS=1)
    trainer = it.trainer()
    it.train(trainer)
    assert any(one.any() for name, one in trainer.model.named_parameters() if "lora_B" in name)


def test_settings_reach_the_trainer(bench: Callable[..., Bench]) -> None:
    import torch

    spec = {"train": {"epochs": 20, "learning_rate": 2e-3, "save_every": 7, "max_length": 96}}
    it = bench(spec=spec, SEED=5, SFT_MAX_EXAMPLES=16)
    trainer = it.trainer()
    args = trainer.args
    assert (args.num_train_epochs, args.max_steps, args.learning_rate) == (20, -1, 2e-3)
    assert (args.save_steps, args.save_total_limit, args.save_only_model) == (7, 1, False)
    assert (args.logging_steps, args.seed, args.report_to, args.max_length) == (10, 5, [], 96)
    assert args.lr_scheduler_type == "linear" and args.get_warmup_steps(100) == 3
    assert not args.bf16 and not args.gradient_checkpointing and len(trainer.train_dataset) == 16
    assert {one.dtype for one in trainer.model.parameters()} == {torch.float32}
    assert args.disable_tqdm
