"""Checkpoints on their way to the store and back, in a folder and on the Hub."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accounting import Tally
from delivery.checkpoints import AnotherJob, Checkpoints, File, Manifest, stage, stale_steps
from delivery.errors import StoreError, Unavailable, Unreachable
from delivery.publisher import Publisher
from delivery.redaction import redactor
from delivery.store import Commit, FolderStore, HubStore, Store
from tests.harness import strict
from tests.hub_server import Fault
from tests.stores import COMMIT, PATIENCE_S, PREFIX, REPO, Clock, Recorder

JOB = {"model": "tiny", "lora_rank": 8, "environment.params": {"split": "train"}}
FILES = {"adapter.safetensors": b"\0weights" * 99, "optimizer.json": b"moments", "deep/state.json": b"{}"}


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_at_home", "default_client_after")]


@pytest.fixture(params=["hub", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(tmp_path / "artifacts", PREFIX)
    server = request.getfixturevalue("hub")
    return HubStore(REPO, PREFIX, "hf_test", server.url)


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "artifacts", PREFIX)


class Attempt:
    """One attempt at a run: its publisher, its checkpoints, and the trainer's folder."""

    def __init__(self, store: Store, folder: Path, name: str, **options: Any):
        self.folder, self.clock = folder / name, Clock()
        options = {"min_interval_s": 0, "clock": self.clock, "sleep": self.clock.sleep, **options}
        header = {"run_id": "run", "mode": "rl", "seed": 0, "attempt": name}
        self.publisher = Publisher(store, header, self.folder / "heartbeat.json", **options)
        self.publisher.start()
        self.checkpoints = Checkpoints(self.publisher, self.folder / "staging")

    def save(self, step: int, files: dict[str, bytes] = FILES) -> Path:
        """What the trainer writes."""
        saved = self.folder / f"checkpoint-{step}"
        for path, content in files.items():
            (saved / path).parent.mkdir(parents=True, exist_ok=True)
            (saved / path).write_bytes(content + str(step).encode())
        return saved

    def stream(self, *steps: int, totals: dict[str, Any] | None = None, job: dict[str, Any] = JOB) -> None:
        """Save, queue, and delete at once, as rotation may."""
        for step in steps:
            saved = self.save(step)
            self.checkpoints.stream(saved, step, job, "c0ffee", totals or {"step": step})
            shutil.rmtree(saved)

    def land(self, *steps: int) -> None:
        """Stream steps one after the other, each until it is in the store."""
        for step in steps:
            self.stream(step)
            self.drain()

    def drain(self) -> None:
        assert self.publisher.flush(PATIENCE_S)

    def find(self) -> list[int]:
        return [manifest.step for manifest in self.checkpoints.find()]

    def bring(self) -> tuple[int | None, Path]:
        folder = self.folder / "resume"
        manifest = self.checkpoints.bring(self.checkpoints.find(), folder)
        return manifest and manifest.step, folder


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[..., Attempt]]:
    """Return a function that begins an attempt; its publisher's threads do not outlive the test."""
    made: list[Attempt] = []

    def begin(store: Store, name: str = "a1", **more: Any) -> Attempt:
        made.append(Attempt(store, tmp_path, name, **more))
        return made[-1]

    yield begin
    for one in made:
        one.publisher.stop_pings()
        one.publisher.flush(PATIENCE_S)


on_folder = pytest.mark.parametrize("store", ["folder"], indirect=True)
on_hub = pytest.mark.parametrize("store", ["hub"], indirect=True)


def tamper(store: Store, path: str, change: Callable[[bytes], bytes]) -> None:
    store.put(Commit("tampered with", {path: change(store.read(path))}))


def test_totals_come_through_a_manifest_as_they_were_when_the_step_was_saved():
    before, after = Tally(step=3, train_wall=1.5, has_gradient=True), Tally()
    before.problems.update(["KeyError", "ValueError", "KeyError"])
    manifest = Manifest(3, "a1", JOB, None, before.totals(), {"weights": File(1, "0" * 64)})
    saved = before.totals()
    before.problems["TimeoutError"] += 1  # the run goes on while the checkpoint waits
    after.go_on_from(Manifest.from_json(manifest.to_json().encode()).totals)
    assert after.totals() == saved and after.problems.most_common() == [("KeyError", 2), ("ValueError", 1)]


# --- one commit ---


@on_hub
def test_a_checkpoint_is_one_commit_with_its_manifest_last_and_its_beat(attempt, store, hub):
    one = attempt(store)
    one.publisher.beat("boot")
    one.stream(5, totals={"step": 5, "train_tokens": 77})
    one.drain()
    _, _, made = hub.commits(REPO)
    folder = f"{PREFIX}/checkpoint/checkpoint-5"
    names = [f"{folder}/{name}" for name in (*sorted(FILES), "manifest.json")]
    assert [*made.added] == [*names, f"{PREFIX}/heartbeat.json"]
    manifest, beat = strict(made.added[names[-1]]), strict(made.added[f"{PREFIX}/heartbeat.json"])
    assert (beat["stage"], beat["step"], beat["attempt"]) == ("checkpoint_uploaded", 5, "a1")
    assert (manifest["step"], manifest["attempt"], manifest["model_commit"]) == (5, "a1", "c0ffee")
    assert (manifest["job"], manifest["totals"]) == (JOB, {"step": 5, "train_tokens": 77})
    assert len(manifest["spec_hash"]) == 64 and manifest["files"].keys() == FILES.keys()
    sizes = {name: len(content) + 1 for name, content in FILES.items()}
    assert {name: facts["size"] for name, facts in manifest["files"].items()} == sizes


def steps_at(files: dict[str, bytes]) -> dict[int, bool]:
    """The step folders of a tree, and whether each is what its manifest says."""
    begin = f"{PREFIX}/checkpoint/checkpoint-"
    steps = {int(path.removeprefix(begin).split("/")[0]) for path in files if path.startswith(begin)}

    def is_whole(step: int) -> bool:
        text = files.get(f"{begin}{step}/manifest.json")
        names = Manifest.from_json(text).files if text else {}
        return bool(names) and all(f"{begin}{step}/{name}" in files for name in names)

    return {step: is_whole(step) for step in steps}


@on_hub
def test_at_every_commit_a_whole_checkpoint_exists_and_at_most_three_step_folders(attempt, store, hub):
    first = attempt(store, "a1")
    first.land(2, 4, 6)
    hub.push(REPO, {f"{PREFIX}/checkpoint/checkpoint-9/optimizer.json": b"half"})
    second = attempt(store, "a2")
    assert second.find() == [6, 4]
    hub.faults = [
        Fault(COMMIT, drop_after=True, times=1, after=1),
        Fault(COMMIT, status=503, times=3, after=4),
    ]
    second.land(7, 8, 10, 12, 14, 16)
    log = [steps_at(commit.files) for commit in hub.commits(REPO)]
    landed = [steps for steps in log if any(steps.values())]
    assert len(landed) >= 9
    assert log[-len(landed) :] == landed  # once there is one, there always is
    assert all(len(steps) <= 3 for steps in log)
    assert log[-1] == {12: True, 16: True}
    assert [commit.message for commit in hub.commits(REPO)].count("checkpoint-8") == 1  # its answer was lost


def test_two_stay_and_a_newer_one_is_never_deleted(attempt, store):
    attempt(store, "a1").land(5, 10, 15)
    assert attempt(store, "a2").find() == [15, 10]
    third = attempt(store, "a3")
    third.checkpoints.find()
    third.land(12)
    assert third.find() == [15, 12, 10]
    third.land(20)
    assert third.find() == [20, 15]


@pytest.mark.parametrize(
    ("new", "complete", "there", "stale"),
    [
        (5, set(), set(), []),
        (10, {5}, {5}, []),
        (15, {5, 10}, {5, 10}, [5]),
        (15, {5}, {5, 10}, [10]),  # 10 is half a checkpoint
        (15, set(), {5, 10}, [5, 10]),
        (7, {5, 10}, {5, 10}, []),
        (10, {5, 10}, {5, 10}, []),  # saved again
        (30, {5, 20, 25}, {5, 10, 20, 25, 40}, [5, 10, 20]),
    ],
)
def test_stale_steps(new, complete, there, stale):
    assert stale_steps(new, complete, there) == stale


def test_a_commit_that_failed_and_yet_landed_is_pruned_later(attempt, tmp_path):
    """All three answers are lost: the step is in the store, and nobody knows."""
    store = FolderStore(tmp_path / "lost", PREFIX)
    one, put = attempt(store), store.put

    def lose(commit: Commit, check: Any = None) -> None:
        put(commit, check)
        if commit.message == "checkpoint-10":
            raise Unavailable("no answer")

    store.put = lose
    one.land(5, 10, 15, 20)
    assert one.find() == [20, 15]


# --- the queue ---


def test_the_newest_save_replaces_the_one_that_waits(attempt):
    recorder = Recorder()
    one = attempt(recorder)
    recorder.may_go_on.clear()
    one.publisher.beat("boot")
    assert recorder.entered.wait(PATIENCE_S)
    one.stream(1, 2, 3)
    assert [path.name for path in (one.folder / "staging").iterdir()] == ["checkpoint-3.3"]
    recorder.may_go_on.set()
    one.drain()
    assert recorder.stages == ["boot", "checkpoint-3"]
    assert [*(one.folder / "staging").iterdir()] == []


def test_a_step_saved_again_while_it_uploads_lands_again(attempt):
    recorder = Recorder()
    one = attempt(recorder)
    recorder.may_go_on.clear()
    one.stream(4)
    assert recorder.entered.wait(PATIENCE_S)
    one.stream(4)
    recorder.may_go_on.set()
    one.drain()
    assert recorder.stages == ["checkpoint-4", "checkpoint-4"]


def test_a_newer_save_ends_the_retries_of_an_older_one(attempt):
    recorder = Recorder()
    one = attempt(recorder)
    recorder.may_go_on.clear()
    recorder.failures = [Unavailable("500")]
    one.stream(4)
    assert recorder.entered.wait(PATIENCE_S)
    one.stream(6)
    recorder.may_go_on.set()
    one.drain()
    assert recorder.tries["checkpoint-4"] == 1
    assert recorder.stages == ["checkpoint-6", "checkpoint_upload_failed"]


def test_three_failed_tries_and_life_goes_on(attempt):
    recorder = Recorder(fails=lambda commit: Unreachable("down") if "point-4" in commit.message else None)
    one = attempt(recorder, redact=redactor(("secret-host",)))
    recorder.failures = [Unreachable("down"), Unreachable("down"), StoreError("refused by secret-host")]
    one.land(4, 6)
    assert (recorder.tries["checkpoint-4"], one.clock.naps) == (3, [5, 10])
    assert recorder.stages == ["checkpoint_upload_failed", "checkpoint-6"]
    failed, uploaded = recorder.beats
    assert (failed["step"], failed["error"]) == (4, "refused by ***")
    assert (uploaded["stage"], uploaded["step"]) == ("checkpoint_uploaded", 6)
    assert [*(one.folder / "staging").iterdir()] == []


def test_after_a_newer_attempt_was_found_saves_go_nowhere_and_nothing_hangs(attempt, folder_store):
    older, newer = attempt(folder_store, "a1"), attempt(folder_store, "a2")
    older.publisher.beat("boot")
    older.drain()
    newer.publisher.beat("boot")
    newer.drain()
    older.land(5, 6, 7)
    assert folder_store.list() == ["heartbeat.json"]
    assert [*(older.folder / "staging").iterdir()] == []
    newer.land(5)
    assert newer.find() == [5]


# --- staging ---


def test_a_staged_file_is_the_same_file(tmp_path):
    (tmp_path / "saved" / "deep").mkdir(parents=True)
    (tmp_path / "saved" / "deep" / "a").write_bytes(b"a")
    stage(tmp_path / "saved", tmp_path / "staged")
    assert (tmp_path / "staged" / "deep" / "a").samefile(tmp_path / "saved" / "deep" / "a")


def test_staging_on_another_device_copies(tmp_path, monkeypatch):
    def refuse(self: Path, target: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "a").write_bytes(b"a")
    stage(tmp_path / "saved", tmp_path / "staged")
    shutil.rmtree(tmp_path / "saved")
    assert (tmp_path / "staged" / "a").read_bytes() == b"a"


def test_staging_on_a_full_disk_costs_a_checkpoint_and_no_run(attempt, monkeypatch):
    recorder = Recorder()
    one = attempt(recorder)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "hardlink_to", full)
        patched.setattr(shutil, "copyfile", full)
        one.stream(4)
    one.land(6)
    assert recorder.stages == ["checkpoint_upload_failed", "checkpoint-6"]
    assert recorder.beats[0]["error"].startswith("it cannot be staged")
    assert [*(one.folder / "staging").iterdir()] == []


def test_a_staging_folder_that_vanished_is_no_empty_checkpoint(attempt):
    recorder = Recorder()
    one = attempt(recorder)
    recorder.may_go_on.clear()
    one.publisher.beat("boot")
    assert recorder.entered.wait(PATIENCE_S)
    one.stream(4)
    shutil.rmtree(one.folder / "staging")
    recorder.may_go_on.set()
    one.drain()
    assert recorder.stages == ["boot", "checkpoint_upload_failed"]


# --- find ---


def test_nothing_there(attempt, store):
    one = attempt(store)
    assert one.find() == [] and one.bring() == (None, one.folder / "resume")
    assert not (one.folder / "resume").exists()


def test_find_passes_over_what_is_no_checkpoint(attempt, store, caplog):
    one = attempt(store)
    one.land(5)
    manifest = store.read("checkpoint/checkpoint-5/manifest.json")
    garbage = [b"", b"{}", b"[]", b"\xff\xfe", b"null", b"[" * 5000, manifest[:-20], manifest]
    odd = {
        **{
            f"checkpoint/checkpoint-{name}/manifest.json": manifest
            for name in ("x", "007", "0", "-9", "1e3", "")
        },
        **{f"checkpoint/checkpoint-{30 + number}/manifest.json": text for number, text in enumerate(garbage)},
        "checkpoint/checkpoint-20/optimizer.json": b"half",
        "checkpoint/checkpoint-21": b"a file",
        "checkpoint/old/checkpoint-22/manifest.json": manifest,
        "checkpoint/manifest.json": manifest,
    }
    store.put(Commit("odd", odd))
    assert one.find() == [5]
    assert caplog.text.count("passed over") == len(garbage) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": {"a": {"size": 1}}},
        {"files": {"a": {"size": "1", "sha256": "x"}}},
        {"files": {"../a": {"size": 1, "sha256": "x"}}},
        {"files": {"b/../../a": {"size": 1, "sha256": "x"}}},
        {"files": {"/etc/a": {"size": 1, "sha256": "x"}}},
        {"files": {"a//b": {"size": 1, "sha256": "x"}}},
        {"files": {"": {"size": 1, "sha256": "x"}}},
        {"files": {"a\0b": {"size": 1, "sha256": "x"}}},
        {"files": ["a"]},
        {"step": "5"},
        {"step": True},
        {"job": None},
        {"totals": []},
        {"attempt": None},
        {"model_commit": 5},
    ],
)
def test_what_no_manifest_may_say(change):
    plain = Manifest(5, "a1", JOB, None, {}, {"a": File(1, "x")})
    text = strict(plain.to_json())
    assert Manifest.from_json(json.dumps(text).encode()) == plain
    assert Manifest.from_json(json.dumps({**text, "new": 1}).encode()) == plain
    with pytest.raises(ValueError, match="manifest"):
        Manifest.from_json(json.dumps({**text, **change}).encode())


@on_hub
@pytest.mark.parametrize(("call", "fault"), [("find", {"drop": True}), ("bring", {"status": 503})])
def test_could_not_ask_is_not_nothing_there(attempt, store, hub, fault, call):
    one = attempt(store)
    one.land(5)
    found = one.checkpoints.find()
    where = "/tree/" if call == "find" else "GET .*/resolve/.*/optimizer.json"
    hub.faults = [Fault(where, **fault, times=2)]
    assert [one.step for one in one.checkpoints.find()] == [5]
    assert one.bring()[0] == 5
    hub.faults = [Fault(where, **fault)]
    with pytest.raises(Unavailable):
        one.checkpoints.bring(found, one.folder / "resume") if call == "bring" else one.checkpoints.find()


@on_hub
def test_a_repository_that_may_not_be_read_is_no_fresh_start(attempt, store, hub):
    one = attempt(store)
    hub.faults = [Fault("/tree/", status=403)]
    with pytest.raises(StoreError):
        one.checkpoints.find()


# --- bring ---


def test_the_newest_is_brought_as_it_was_saved_into_an_emptied_folder(attempt, store):
    attempt(store, "a1").land(5, 10)
    two = attempt(store, "a2")
    (two.folder / "resume" / "checkpoint-3").mkdir(parents=True)
    step, folder = two.bring()
    assert step == 10
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    assert found == {name: content + b"10" for name, content in FILES.items()}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-3],
    "emptied": lambda content: b"",
    "a bit flipped": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "grown": lambda content: content + b"x",
}


@pytest.mark.parametrize(
    ("store", "damage"),
    [*(("folder", damage) for damage in DAMAGES), ("hub", "truncated")],
    indirect=["store"],
)
def test_a_damaged_step_is_passed_over_for_the_one_before(attempt, store, damage, caplog):
    attempt(store, "a1").land(5, 10)
    tamper(store, "checkpoint/checkpoint-10/optimizer.json", DAMAGES[damage])
    two = attempt(store, "a2")
    step, folder = two.bring()
    assert step == 5 and (folder / "optimizer.json").read_bytes() == FILES["optimizer.json"] + b"5"
    assert "checkpoint-10 in the store is damaged" in caplog.text
    two.land(7)  # 10 is newer and stays, 5 is the whole one before
    assert steps_in(store) == {5, 7, 10}
    two.land(10, 15)
    assert two.bring()[0] == 15 and steps_in(store) == {10, 15}


def steps_in(store: Store) -> set[int]:
    return {int(path.split("/")[1].removeprefix("checkpoint-")) for path in store.list("checkpoint")}


@on_folder
def test_a_missing_file_is_a_damage(attempt, store):
    attempt(store, "a1").land(5, 10)
    store.put(Commit("gone", {"x": b""}, delete=("checkpoint/checkpoint-10/deep/",)))
    assert attempt(store, "a2").bring()[0] == 5


@on_folder
def test_nothing_whole_is_a_fresh_start(attempt, store):
    attempt(store, "a1").land(5)
    store.put(Commit("gone", {"x": b""}, delete=("checkpoint/checkpoint-5/optimizer.json",)))
    two = attempt(store, "a2")
    assert two.bring()[0] is None
    two.land(3, 5, 8)
    assert two.bring()[0] == 8


@on_folder
def test_a_manifest_reaches_nothing_outside_its_folder(attempt, store):
    one = attempt(store)
    one.land(5)
    (store.folder / "checkpoint" / "checkpoint-9").mkdir()
    (store.folder / "checkpoint" / "escaped").write_bytes(b"e")
    manifest = strict(store.read("checkpoint/checkpoint-5/manifest.json"))
    name = {
        "../escaped": {
            "size": 1,
            "sha256": "3f79bb7b435b05321651daefd374cdc681dc06faa65e374e38337b88ca046dea",
        }
    }
    manifest |= {"step": 9, "files": name}
    (store.folder / "checkpoint" / "checkpoint-9" / "manifest.json").write_text(json.dumps(manifest))
    assert one.bring()[0] == 5
    assert not (one.folder / "escaped").exists()


# --- whose ---


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_rank": 16}, "lora_rank was 8, now it is 16"),
        ({"model": "small"}, "model was 'tiny', now it is 'small'"),
        ({"environment.params": {"split": "test"}}, "environment.params was"),
        ({"new": 1}, "new was None, now it is 1"),
        ({"new": None}, ""),  # a setting that a newer worker knows, not given
        ({"lora_rank": 8.0}, ""),
        ({"environment.params": {"split": "train"}}, ""),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_name(change, said):
    manifest = Manifest.from_json(Manifest(5, "a1", JOB, None, {}, {"a": File(1, "x")}).to_json().encode())
    if not said:
        manifest.check({**JOB, **change})
        return
    with pytest.raises(AnotherJob, match=f"checkpoint-5 in the store is of another job: {said}"):
        manifest.check({**JOB, **change})


def test_the_hash_does_not_depend_on_the_order_of_the_job():
    one = Manifest(5, "a1", JOB, None, {})
    assert replace(one, job=dict(reversed(JOB.items()))).spec_hash == one.spec_hash
    assert replace(one, job={**JOB, "lora_rank": 9}).spec_hash != one.spec_hash


def test_no_secret_is_in_a_manifest(attempt, store):
    one = attempt(store, redact=redactor(("correct horse battery",)))
    secret = {"url": "https://me:correct horse battery@host", "key": "hf_abcdefghijklmnopq"}
    one.stream(5, job={**JOB, "environment.params": secret}, totals={"example": "said correct horse battery"})
    one.drain()
    text = store.read("checkpoint/checkpoint-5/manifest.json").decode()
    assert "horse" not in text and "hf_abc" not in text and one.find() == [5]
