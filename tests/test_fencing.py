"""Two attempts on one prefix, and commits whose fate is unknown: nothing old on top of something new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delivery.checkpoints import Checkpoints
from delivery.errors import Superseded
from delivery.patience import Patience, Persistence
from delivery.publisher import Publisher
from delivery.store import Commit, FolderStore, HubStore, Store
from tests.harness import strict
from tests.hub_server import Fault, HubServer
from tests.stores import COMMIT, PATIENCE_S, PREFIX, REPO, Held, Recorder, messages, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_at_home", "default_client_after")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivery.patience.PAUSE_S", 0.01)
    monkeypatch.setattr("delivery.patience.LONGEST_PAUSE_S", 0.02)


@pytest.fixture(params=["hub", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(tmp_path / "artifacts", PREFIX)
    return HubStore(REPO, PREFIX, "hf_test", request.getfixturevalue("hub").url)


@pytest.fixture
def hub_store(hub: HubServer) -> HubStore:
    return HubStore(REPO, PREFIX, "hf_test", hub.url)


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    """Return a function that starts the publisher of an attempt: `attempt(store, name)`."""
    made: list[Publisher] = []

    def begin(store: Store, name: str, **more: Any) -> Publisher:
        options = {"min_interval_s": 0, **more}
        publisher = Publisher(store, {"run_id": "r", "attempt": name}, tmp_path / f"{name}.json", **options)
        publisher.start()
        made.append(publisher)
        return publisher

    yield begin
    for publisher in made:
        publisher.stop_pings()
        publisher.flush(PATIENCE_S)


def drained(publisher: Publisher) -> None:
    assert publisher.flush(PATIENCE_S)


def beat(publisher: Publisher, stage: str, files: dict[str, bytes] | None = None) -> None:
    """Beat, and wait for the commit."""
    publisher.beat(stage, files)
    drained(publisher)


def authors(hub: HubServer) -> list[str]:
    """Whose beat each commit holds, in the order of the log."""
    beats = [commit.added.get(f"{PREFIX}/heartbeat.json") for commit in hub.commits(REPO)]
    return [strict(one)["attempt"] for one in beats if one]


# --- two attempts ---


def test_the_older_attempt_stops_and_every_file_is_the_newer_one_s(attempt, store):
    older, newer = attempt(store, "a1"), attempt(store, "a2")
    beat(older, "boot", {"adapter/a": b"a1", "error_rl.txt": b"a1"})
    older.upload("adapter/", {"adapter/a": b"a1"}, "rl_trained")
    beat(newer, "boot", {"adapter/a": b"a2", "error_rl.txt": b"a2"})
    newer.check()
    beat(older, "rl_step", {"error_rl.txt": b"a1"})
    with pytest.raises(Superseded, match="attempt a2 has taken over"):
        older.check()
    with pytest.raises(Superseded):
        older.upload("DONE", {"DONE": b"a1"})
    saved = older.stream(5, lambda: Commit("checkpoint-5", {"checkpoint/checkpoint-5/a": b"a1"}))
    assert isinstance(saved.exception(PATIENCE_S), Superseded)
    beat(older, "superseded", {"error_rl.txt": b"a1"})
    newer.upload("metrics.json", {"metrics.json": b"a2"})
    assert store.list() == ["adapter/a", "error_rl.txt", "heartbeat.json", "metrics.json"]
    assert {store.read(path) for path in store.list() if path != "heartbeat.json"} == {b"a2"}
    assert strict(store.read("heartbeat.json"))["attempt"] == "a2"
    newer.check()


def test_an_attempt_that_could_not_beat_before_a_newer_one_began_is_the_older_one(attempt, store):
    beat(attempt(store, "a0"), "boot")
    older, newer = attempt(store, "a1"), attempt(store, "a2")
    older.note_owner()
    newer.note_owner()
    beat(newer, "boot")
    beat(older, "boot")
    with pytest.raises(Superseded, match="attempt a2 has taken over"):
        older.check()
    beat(newer, "rl_start")
    newer.check()


def test_what_waits_in_the_older_attempt_is_dropped(attempt, store):
    older, newer = attempt(store, "a1"), attempt(store, "a2")
    beat(older, "boot")
    beat(newer, "boot")
    for number in range(20):
        older.beat(f"stage_{number}")
    drained(older)
    assert strict(store.read("heartbeat.json"))["attempt"] == "a2"


def test_both_at_full_speed(attempt, store, request):
    """The newer one begins while the older one is in the middle of its commits."""
    older, newer = attempt(store, "a1"), attempt(store, "a2")
    beat(older, "boot")
    for number in range(10):
        older.beat(f"stage_{number}", {"file": b"a1", f"older-{number}": b"a1"})
    for number in range(5):
        newer.beat(f"stage_{number}", {"file": b"a2"})
    drained(newer)
    drained(older)
    newer.check()
    assert strict(store.read("heartbeat.json"))["attempt"] == "a2" and store.read("file") == b"a2"
    if isinstance(store, HubStore):
        seen = authors(request.getfixturevalue("hub"))
        assert seen == sorted(seen) and seen.count("a2") == 5


@pytest.mark.parametrize(
    "leftover", [b'{"attempt": "a0", "stage": "rl_step"}', b"{}", b"", b"[]", b'{"attempt": []}']
)
def test_what_an_attempt_before_left_stops_nobody(attempt, tmp_path, leftover):
    store = FolderStore(tmp_path / "artifacts", PREFIX)
    store.put(Commit("left", {"heartbeat.json": leftover}))
    publisher = attempt(store, "a1")
    for stage in ("boot", "rl_start"):
        beat(publisher, stage)
    publisher.check()
    assert strict(store.read("heartbeat.json"))["stage"] == "rl_start"


def test_an_older_attempt_that_never_got_a_beat_through_does_not_take_over_again(attempt, hub, hub_store):
    """It looked, its commit failed, and another one came meanwhile: that one is the newer."""
    hub.push(REPO, {f"{PREFIX}/heartbeat.json": b'{"attempt": "a0"}'})
    hub.faults, newer_landed = [Fault(COMMIT, drop=True, times=1)], threading.Event()
    older = attempt(hub_store, "a1", sleep=lambda seconds: newer_landed.wait(PATIENCE_S))
    older.beat("boot")
    until(lambda: hub.faults[0].fired)
    newer = attempt(hub_store, "a2")
    beat(newer, "boot")
    newer_landed.set()
    drained(older)
    with pytest.raises(Superseded):
        older.check()
    newer.check()
    assert authors(hub)[1:] == ["a2"]


def test_runs_that_share_a_repository_lose_nothing_to_each_other(attempt, hub):
    runs = [attempt(HubStore(REPO, f"rl/run{number}/seed0", "hf_test", hub.url), "a1") for number in range(3)]
    stages = [f"stage_{number}" for number in range(3)]
    for stage in stages:
        for run in runs:
            run.beat(stage)
    for number, run in enumerate(runs):
        drained(run)
        path = f"rl/run{number}/seed0/heartbeat.json"
        beats = [commit.added[path] for commit in hub.commits(REPO) if path in commit.added]
        assert [strict(one)["stage"] for one in beats] == stages


# --- commits whose fate is unknown ---


def test_a_commit_of_the_older_attempt_that_lands_late_is_refused(attempt, hub, hub_store):
    older, newer = attempt(hub_store, "a1"), attempt(hub_store, "a2")
    beat(older, "boot")
    hub.faults = [held := Held(COMMIT)]
    older.beat("rl_start", {"DONE": b"a1"})
    until(lambda: held.fired)
    beat(newer, "boot")
    held.go_on.set()
    drained(older)
    assert authors(hub) == ["a1", "a2"] and "DONE" not in hub_store.list()
    with pytest.raises(Superseded):
        older.check()


def test_a_commit_that_was_given_up_never_lands_after_a_later_one(attempt, hub, hub_store, monkeypatch):
    """Its request reaches the Hub when two later beats are in: the parent it names is no longer the head."""
    monkeypatch.setattr("delivery.patience.COMMIT_LIMIT_S", 0.3)
    publisher = attempt(hub_store, "a1")
    hub.faults = [held := Held(COMMIT)]
    for stage in ("boot", "rl_start"):
        publisher.beat(stage)
    drained(publisher)
    held.go_on.set()
    late = next(request for request in hub.requests if "/commit/" in request.path)
    until(lambda: late.status == 412)
    for thread in [one for one in threading.enumerate() if one.name == "commit"]:
        thread.join(PATIENCE_S)
    assert messages(hub) == ["boot", "rl_start"]
    assert strict(hub_store.read("heartbeat.json"))["stage"] == "rl_start"


def test_a_commit_that_hung_before_it_looked_at_the_store_changes_nothing(tmp_path, monkeypatch):
    class Slow(FolderStore):
        go_on = threading.Event()
        tries = 0

        def put(self, commit: Commit, check: Any = None) -> None:
            self.tries += 1
            if self.tries == 1:
                assert self.go_on.wait(PATIENCE_S)
                super().put(Commit("late", {**commit.files, "late": b""}), check)
            else:
                super().put(commit, check)

    monkeypatch.setattr("delivery.patience.COMMIT_LIMIT_S", 0.05)
    store = Slow(tmp_path, PREFIX)
    persistence = Persistence(store, lambda read: None, time.monotonic, lambda seconds: None)
    persistence.put(Commit("m", {"a": b"1"}), Patience())
    before = threading.active_count()
    store.go_on.set()
    for thread in [one for one in threading.enumerate() if one.name == "commit"]:
        thread.join(PATIENCE_S)
    assert threading.active_count() < before
    assert store.list() == ["a"]


def test_a_commit_whose_answer_was_lost_is_not_made_twice(attempt, hub, hub_store, tmp_path):
    hub.push(REPO, {f"{PREFIX}/checkpoint/checkpoint-{step}/optimizer.json": b"x" for step in (1, 2)})
    publisher = attempt(hub_store, "a1")
    checkpoints = Checkpoints(publisher, tmp_path / "staging")
    checkpoints.find()
    saved = tmp_path / "checkpoint-5"
    saved.mkdir()
    (saved / "optimizer.json").write_bytes(b"weights")
    hub.faults = [Fault(COMMIT, drop_after=True)]
    publisher.beat("boot", {"error_rl.txt": b"e"})
    drained(publisher)
    publisher.upload("adapter/", {"adapter/a": b"a", "adapter/b.safetensors": b"\0b"}, "rl_trained")
    checkpoints.stream(saved, 5, {}, None, {})
    drained(publisher)
    assert messages(hub)[1:] == ["boot", "adapter/", "checkpoint-5"]
    assert hub.faults[0].fired == 3
    assert checkpoints.find()[0].step == 5 and len(hub_store.list("checkpoint")) == 2
    assert not [commit for commit in hub.commits(REPO)[2:] if not commit.added]


def test_a_superseded_attempt_is_not_tried_again():
    tries = Recorder(fails=lambda commit: Superseded("no"))
    with pytest.raises(Superseded):
        Persistence(tries, lambda read: None, time.monotonic, lambda seconds: None).put(
            Commit("m"), Patience()
        )
    assert tries.tries["m"] == 1
