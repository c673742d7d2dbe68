"""Chains of attempts at one run: each killed at a random moment, the next started on an empty disk.

Whatever must hold is read off the Hub's log of commits and the lines that the worker printed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests import grpo_trials, harness
from tests.chaos.process import Worker
from tests.harness import strict
from tests.hub_server import Commit, Fault, HubServer

log = logging.getLogger(__name__)

REPO, TOKEN = "acme/runs", "hf_test"
COMMIT_SECONDS = 0.3  # long enough to be killed in
LANDS_WITHIN_S = 12.0  # on a busy machine: a commit that takes longer is stuck
STEP_FILE = re.compile(r"checkpoint/checkpoint-(\d+)/(.+)")
TOLD_ON_LANDING = frozenset({"checkpoint_uploaded", "sft_trained", "rl_trained", "done"})
ADAPTER = "adapter/adapter_model.safetensors"
REQUIRED = ("adapter/adapter_config.json", ADAPTER, "metrics.json")
THROTTLED = frozenset({"sft_step", "rl_step"})


@dataclass(frozen=True)
class Mode:
    """A job to be killed: its variables, its steps, and how many of these lie between two saves or logs."""

    name: str
    mode: str
    steps: int
    save_every: int
    log_every: int
    environment: Mapping[str, Any] = field(default_factory=lambda: {"id": "toy-words"})

    def variables(self, folder: Path, model: Path, run_id: str, url: str) -> dict[str, str]:
        hub = {"HF_REPO": REPO, "HF_TOKEN": TOKEN, "HF_ENDPOINT": url, "AUTOSLM_HEARTBEAT_MIN_S": 0}
        more: dict[str, Any] = {**hub, "RUN_ID": run_id}
        train = {"lora_rank": 8, "save_every": self.save_every}
        if self.mode == "sft":
            small = {"SFT_PER_DEVICE_BS": 1, "SFT_MAX_STEPS": self.steps}  # slow, and many epochs
            spec = {"environment": self.environment, "train": train}
            return harness.variables(folder, model, self.environment["id"], spec, **small, **more)
        more["RL_USE_VLLM"] = int(self.name == "vllm")
        return grpo_trials.variables(folder, model, train={**train, "steps": self.steps}, **more)


SFT = Mode("sft", "sft", steps=100, save_every=10, log_every=10)
GRPO = Mode("grpo", "rl", steps=24, save_every=3, log_every=1)
VLLM = Mode("vllm", "rl", steps=24, save_every=3, log_every=1)
MODES = {one.name: one for one in (SFT, GRPO, VLLM)}
SUMS = {"id": "demo-arithmetic", "params": {"train_size": 400}}
EPOCH_STEPS = 50  # a batch is of 8
TWO_EPOCHS = replace(SFT, environment=SUMS, steps=2 * EPOCH_STEPS)


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after the `count`-th beat of a stage, "" being the start."""

    stage: str
    count: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.stage or 'start'}#{self.count}+{self.delay_s:.1f}s"


def random_moment(chance: random.Random, mode: str) -> Moment:
    """One of all phases: boot, load, training, saving, uploading, finishing."""
    stage, last_count, delay_s = chance.choices(
        [
            ("", 1, 12.0),
            ("boot", 1, 12.0),
            (f"{mode}_start", 1, 2.0),
            ("sft_model_load" if mode == "sft" else "rl_train_start", 1, 25.0),
            (f"{mode}_step", 5, 2.0),
            ("checkpoint_uploaded", 4, 2.0),
            (f"{mode}_trained", 1, 0.5),
            (f"{mode}_train_done", 1, 0.7),
            ("done", 1, 0.1),
        ],
        weights=[2, 1, 1, 3, 10, 6, 2, 3, 1],
    )[0]
    return Moment(stage, chance.randint(1, last_count), chance.uniform(0, delay_s))


@dataclass
class Report:
    """What a chain of attempts came to."""

    mode: str
    attempts: int = 0
    kills: list[str] = field(default_factory=list)
    killed_at: list[int] = field(default_factory=list)  # steps
    lost: list[int] = field(default_factory=list)
    unlanded_s: list[float] = field(default_factory=list)  # age of the newest save that had not landed
    finished: int = 0
    commits: int = 0
    resumed: int = 0
    adapters: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def __str__(self) -> str:
        phases = Counter(one.partition("#")[0] for one in self.kills)
        return (
            f"{self.mode}: {len(self.kills)} kills in {self.attempts} attempts at {self.finished} finished"
            f" runs, {self.resumed} resumed; most steps lost {max(self.lost, default=0)}"
            f" (save interval {MODES[self.mode].save_every}), a save not landed when killed was at most"
            f" {max(self.unlanded_s, default=0):.1f} s old; {self.commits} commits, {len(self.adapters)}"
            f" different adapters; {self.seconds:.0f} s; killed after {dict(phases)}"
        )


class Chain:
    """Kills and restarts until so many kills are spent and the run at work is done."""

    def __init__(self, mode: Mode, folder: Path, model: Path, hub: HubServer):
        self.mode, self.folder, self.model, self.hub = mode, folder, model, hub
        self.report = Report(mode.name)
        self._seen = 0  # commits that were checked
        self._has_checkpoint: dict[str, bool] = {}

    def run(self, kills: int, seed: int) -> Report:
        chance, began = random.Random(seed), time.monotonic()
        while len(self.report.kills) < kills:
            self._finish_one(chance, kills, f"r{seed}-{self.report.finished}")
        self.report.seconds = time.monotonic() - began
        return self.report

    def run_through(self, run_id: str, moments: Sequence[Moment]) -> Mapping[str, bytes]:
        """Kill at each of these moments, then let it finish: the files of the run."""
        for moment in moments:
            assert not self._attempt(f"{self.mode.mode}/{run_id}/seed0", run_id, moment), moment
        assert self._attempt(f"{self.mode.mode}/{run_id}/seed0", run_id, None)
        return self._check_end(f"{self.mode.mode}/{run_id}/seed0")

    def _finish_one(self, chance: random.Random, kills: int, run_id: str) -> None:
        prefix = f"{self.mode.mode}/{run_id}/seed0"
        finished = False
        while not finished:
            moment = random_moment(chance, self.mode.mode) if len(self.report.kills) < kills else None
            finished = self._attempt(prefix, run_id, moment)
        self._check_end(prefix)
        self.report.finished += 1

    def _attempt(self, prefix: str, run_id: str, moment: Moment | None) -> bool:
        """One process on an empty disk; returns whether it came to its own end."""
        shutil.rmtree(self.folder, ignore_errors=True)
        env = self.mode.variables(self.folder, self.model, run_id, self.hub.url)
        before = self._landed(prefix)
        done_before = f"{prefix}/DONE" in self.hub.files(REPO)
        worker = Worker(env, self.folder / "home")
        self.report.attempts += 1
        try:
            killed_at = self._kill_at(worker, moment) if moment else None
            code = None if killed_at else worker.wait()
        finally:
            worker.kill()
        took_s, newest = time.monotonic() - worker.started, worker.stages[-1:]
        log.info("%s %s: %s, %.0f s, from %d, at %s", self.mode.name, run_id, moment, took_s, before, newest)
        time.sleep(3 * COMMIT_SECONDS)  # what the Hub had already been given
        where = f"{self.mode.name} {run_id}, attempt {worker.attempt}, killed {moment}"
        self._check_commits(prefix)
        check_beats(prefix, worker, self.hub.commits(REPO), killed_at, where)
        if not done_before:
            self._check_steps(worker, before, where)
        if killed_at is None:
            assert code == 0, f"{where}: {worker.stderr[-4000:]}"
            metrics = self.folder / "work" / "metrics.json"
            assert metrics.read_bytes() == self.hub.files(REPO)[f"{prefix}/metrics.json"], where
            return True
        self.report.kills.append(str(moment))
        self._check_loss(prefix, worker, before, killed_at, where)
        return False

    def _kill_at(self, worker: Worker, moment: Moment) -> float | None:
        """Kill at that moment; None when the process had ended before."""
        if moment.stage:
            worker.wait_for_stage(moment.stage, moment.count)
        worker.wait_for(lambda one: one.process.poll() is not None, moment.delay_s)
        if worker.process.poll() is not None:
            return None
        return worker.kill()

    # --- what must hold ---

    def _landed(self, prefix: str) -> int:
        """The newest complete step in the store."""
        return max(complete_steps(prefix, self.hub.files(REPO)), default=0)

    def _check_commits(self, prefix: str) -> None:
        commits = self.hub.commits(REPO)
        for commit in commits[self._seen :]:
            there, complete = steps(prefix, commit.files), complete_steps(prefix, commit.files)
            assert len(there) <= 3, f"{commit.message}: {sorted(there)}"
            assert complete or not self._has_checkpoint.get(prefix), f"{commit.message}: none is complete"
            self._has_checkpoint[prefix] = bool(complete)
            done = f"{prefix}/DONE" in commit.files
            assert not done or all(f"{prefix}/{one}" in commit.files for one in REQUIRED), commit.message
        self.report.commits += len(commits) - self._seen
        self._seen = len(commits)

    def _check_steps(self, worker: Worker, before: int, where: str) -> None:
        """An attempt goes on from the newest complete step, and tells every step once."""
        told = [beat.payload["step"] for beat in worker.beats if beat.stage == f"{self.mode.mode}_step"]
        first, every = before + self.mode.log_every, self.mode.log_every
        assert told == list(range(first, first + every * len(told), every)), f"{where}: from {before}: {told}"
        for beat in worker.beats:
            if "resumed" in beat.payload:
                assert beat.payload["resumed"] == (before > 0), f"{where}: from {before}"
                self.report.resumed += before > 0

    def _check_loss(self, prefix: str, worker: Worker, before: int, killed_at: float, where: str) -> None:
        """Saves come in time and do not stay here: that bounds what a kill loses."""
        saved, age_s = newest_save(self.folder / "work", killed_at)
        landed = self._landed(prefix)
        last = max(worker.newest_step, saved, before)
        assert last - max(saved, before) < self.mode.save_every + self.mode.log_every, f"{where}: {saved=}"
        if saved > landed:
            assert age_s < LANDS_WITHIN_S, f"{where}: checkpoint-{saved} has been waiting for {age_s:.1f} s"
            self.report.unlanded_s.append(age_s)
        self.report.killed_at.append(last)
        self.report.lost.append(last - landed)

    def _check_end(self, prefix: str) -> Mapping[str, bytes]:
        """The files of a finished run: every artifact, step and figure, however often it was killed."""
        files = {
            path.removeprefix(f"{prefix}/"): data
            for path, data in self.hub.files(REPO).items()
            if path.startswith(f"{prefix}/")
        }
        missing = [one for one in (*REQUIRED, "train_meta.json", "heartbeat.json") if one not in files]
        assert not missing, missing
        assert 0 < time.time() - float(files["DONE"]) < 24 * 3600
        metrics, newest = strict(files["metrics.json"]), max(complete_steps("", files))
        assert newest == self.mode.steps
        assert metrics["phase"] == self.mode.mode and metrics["train_tokens"] >= 0
        assert metrics["wall_seconds"] > 0 and metrics["train_throughput_toks_per_s"] > 0
        state = strict(files[f"checkpoint/checkpoint-{newest}/trainer_state.json"])
        assert state["global_step"] == self.mode.steps
        name, every = ("loss" if self.mode.mode == "sft" else "reward"), self.mode.log_every
        logged = [entry["step"] for entry in state["log_history"] if name in entry]
        assert logged == list(range(every, self.mode.steps + 1, every)), logged
        if self.mode.mode == "rl":
            notes = metrics["notes"]
            assert notes["steps"] == len(notes["reward_history"]) == self.mode.steps
            assert metrics["generated_tokens"] > 0
        self.report.adapters.add(hashlib.sha256(files[ADAPTER]).hexdigest())
        return files


def check_beats(
    prefix: str, worker: Worker, commits: Sequence[Commit], killed_at: float | None, where: str
) -> None:
    """No milestone of an attempt is missing from the store, there twice or out of order."""
    stored = [strict(one.added[f"{prefix}/heartbeat.json"]) for one in commits if _beats(prefix, one)]
    own = [beat for beat in stored if beat["attempt"] == worker.attempt and not beat.get("liveness")]
    landed = [_key(beat) for beat in own if beat["stage"] not in THROTTLED]
    twice = [key for key, count in Counter(landed).items() if count > 1]
    assert not twice, f"{where}: committed twice: {twice}"
    printed = [beat for beat in worker.beats if beat.stage not in THROTTLED]
    repeated = [key for key, count in Counter(_key(beat.payload) for beat in printed).items() if count > 1]
    assert not repeated, f"{where}: printed twice: {repeated}"
    end = float("inf") if killed_at is None else killed_at - LANDS_WITHIN_S
    for beat in printed:
        due = beat.stage in TOLD_ON_LANDING or beat.at < end
        assert not due or _key(beat.payload) in landed, f"{where}: {_key(beat.payload)} is not in {landed}"
    for kind in (True, False):  # what is told on landing may overtake what is told before
        lines = [_key(beat.payload) for beat in printed if (beat.stage in TOLD_ON_LANDING) == kind]
        kept = [key for key in landed if (key[0] in TOLD_ON_LANDING) == kind]
        assert kept[: len(lines)] == lines[: len(kept)], f"{where}: printed {lines}, committed {kept}"


def _beats(prefix: str, commit: Commit) -> bool:
    return f"{prefix}/heartbeat.json" in commit.added


def _key(beat: Mapping[str, Any]) -> tuple[str, Any]:
    return beat["stage"], beat.get("step")


def steps(prefix: str, files: Mapping[str, bytes]) -> dict[int, dict[str, bytes]]:
    """The checkpoint folders of a run and what is in them, by step."""
    found: dict[int, dict[str, bytes]] = {}
    for path, data in files.items():
        match = STEP_FILE.fullmatch(path.removeprefix(f"{prefix}/"))
        if match and path.startswith(prefix):
            found.setdefault(int(match[1]), {})[match[2]] = data
    return found


def complete_steps(prefix: str, files: Mapping[str, bytes]) -> set[int]:
    """The steps whose manifest tells the sizes and digests of exactly the files beside it."""
    return {step for step, content in steps(prefix, files).items() if _is_complete(step, content)}


def _is_complete(step: int, content: Mapping[str, bytes]) -> bool:
    if "manifest.json" not in content:
        return False
    manifest = json.loads(content["manifest.json"])
    promised = {name: (one["size"], one["sha256"]) for name, one in manifest["files"].items()}
    there = {name: (len(data), _sha256(data)) for name, data in content.items() if name != "manifest.json"}
    return bool(manifest["step"] == step and promised == there and "optimizer.pt" in there)


@functools.lru_cache(4096)
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def newest_save(work: Path, killed_at: float) -> tuple[int, float]:
    """The newest step that the trainer had saved whole, and its age in seconds when it was killed."""
    began_s = time.time() - time.monotonic()  # of the monotonic clock
    saved = {}
    for path in work.glob("*_seed0/checkpoint-*/trainer_state.json"):
        saved[int(path.parent.name.rpartition("-")[2])] = killed_at + began_s - path.stat().st_mtime
    newest = max(saved, default=0)
    return newest, saved.get(newest, 0.0)


def start_hub() -> HubServer:
    """A Hub whose commits take a moment."""
    hub = HubServer()
    hub.create_repo(REPO, kind="dataset", private=True)
    hub.faults.append(Fault("POST .*/commit/", latency_s=COMMIT_SECONDS))
    return hub
