"""The publisher while the Hub is slow, silent, busy, gone, or says no."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delivery.errors import StoreError, Unavailable, Unreachable
from delivery.publisher import Publisher
from delivery.store import Commit, HubStore, Store
from tests.harness import strict
from tests.hub_server import Fault, HubServer
from tests.stores import COMMIT, PATIENCE_S, PREFIX, REPO, Clock, Held, Recorder, messages, until

DEADLINE_S, LIMIT_S = 0.15, 0.03


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client_at_home", "default_client_after")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivery.patience.PAUSE_S", 0.01)
    monkeypatch.setattr("delivery.patience.LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    """Return a function that starts a publisher over a store, or a Hub; it tries again at once."""
    made: list[Publisher] = []
    hubs: list[HubServer] = []

    def begin(over: Store | HubServer, **more: Any) -> Publisher:
        store = over
        if isinstance(over, HubServer):
            hubs.append(over)
            store = HubStore(REPO, PREFIX, "hf_test", over.url)
        options = {"min_interval_s": 0, "deadline_s": DEADLINE_S, "sleep": rest, **more}
        publisher = Publisher(store, {"run_id": "r", "attempt": "a1"}, tmp_path / "heartbeat.json", **options)
        publisher.start()
        made.append(publisher)
        return publisher

    yield begin
    for publisher in made:  # what still waits lands in memory: no thread goes on trying
        publisher.stop_pings()
        publisher._persistence.store = Recorder()
        for hub in hubs:
            hub.closing.set()
        assert publisher.flush(PATIENCE_S)


def rest(seconds: float) -> None:
    """Let other threads go on for a moment."""
    threading.Event().wait(min(seconds, 0.002))


def take_away(hub: HubServer) -> None:
    hub.delete_repo(REPO)


def let_the_token_expire(hub: HubServer) -> None:
    hub.tokens = {"hf_another"}


def close(hub: HubServer) -> None:
    hub.__exit__()


def misbehave(**fault: Any) -> Callable[[HubServer], None]:
    return lambda hub: hub.faults.append(Fault(".", **fault))


HANGING = {"every request hangs", "commits hang", "slower than a commit may be"}
TROUBLES: dict[str, tuple[Callable[[HubServer], None], type[StoreError]]] = {
    "every request hangs": (misbehave(hang=True), Unreachable),
    "commits hang": (lambda hub: hub.faults.append(Fault(COMMIT, hang=True)), Unreachable),
    "slower than a commit may be": (misbehave(latency_s=LIMIT_S), Unreachable),
    "drops": (misbehave(drop=True), Unreachable),
    "500": (misbehave(status=500), Unavailable),
    "503": (misbehave(status=503), Unreachable),
    "429": (misbehave(status=429), Unreachable),
    "429 for an hour": (misbehave(status=429, retry_after=3600), Unreachable),
    "refuses connections": (close, Unreachable),
    "401": (misbehave(status=401), StoreError),
    "403": (misbehave(status=403), StoreError),
    "read only": (lambda hub: setattr(hub, "read_only", True), StoreError),
    "expired token": (let_the_token_expire, StoreError),
    "deleted repository": (take_away, StoreError),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_required_upload_ends_within_its_deadline_saying_whether_to_try_again(
    start, hub, name, monkeypatch
):
    trouble, kind = TROUBLES[name]
    if name in HANGING:
        clock, options = time.monotonic, {"deadline_s": DEADLINE_S}
        monkeypatch.setattr("delivery.patience.COMMIT_LIMIT_S", LIMIT_S)
    else:
        clock = Clock()
        options = {"clock": clock, "sleep": clock.sleep, "deadline_s": 60.0}
        monkeypatch.setattr("delivery.patience.PAUSE_S", 5.0)
        monkeypatch.setattr("delivery.patience.LONGEST_PAUSE_S", 60.0)
    publisher = start(hub, **options)
    trouble(hub)
    began = clock()
    with pytest.raises(StoreError) as caught:
        publisher.upload("metrics.json", {"metrics.json": b"{}"}, "done", step=1)
    assert type(caught.value) is kind
    assert clock() - began < (DEADLINE_S + PATIENCE_S / 4 if name in HANGING else 60)  # a busy machine
    if kind is not StoreError:
        assert isinstance(caught.value, Unavailable)  # which is what makes a failure retriable
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"latency_s": 0.02, "times": 8},
        {"drop": True, "times": 6},
        {"drop_after": True, "times": 6},
        {"status": 500, "times": 6},
        {"status": 503, "times": 6},
        {"status": 429, "retry_after": 30, "times": 6},
        {"status": 200, "body": "<html>log in</html>", "times": 6},
        {"hang": True, "times": 2},
    ],
    ids=lambda fault: "-".join(map(str, fault)) + str(fault.get("status", "")),
)
def test_milestones_land_in_order_each_once_when_the_hub_is_back(start, hub, fault, monkeypatch):
    hub.faults = [Fault(".", **fault)]
    monkeypatch.setattr("delivery.patience.COMMIT_LIMIT_S", 0.2)
    publisher = start(hub)
    stages = [f"stage_{number}" for number in range(3)]
    for stage in stages:
        publisher.beat(stage)
    publisher.stream(5, lambda: Commit("checkpoint-5", {"checkpoint/checkpoint-5/a": b"a"}))
    publisher.beat("last")
    assert publisher.flush(PATIENCE_S)
    assert hub.faults[0].fired == fault["times"]
    assert messages(hub) == [*stages, "checkpoint-5", "last"]


def test_a_hub_that_was_gone_and_comes_back(start, hub):
    publisher = start(hub, deadline_s=PATIENCE_S)
    publisher.beat("boot")
    assert publisher.flush(PATIENCE_S)
    close(hub)
    publisher.beat("rl_start")
    publisher.beat("rl_train_start")
    with HubServer(port=int(hub.url.rsplit(":", 1)[1])) as again:
        again.repos = hub.repos
        publisher.upload("adapter/", {"adapter/a": b"a"})
        assert messages(again) == ["boot", "rl_start", "rl_train_start", "adapter/"]


def test_nothing_waits_for_a_hub_that_hangs(start, hub, capsys):
    hub.faults = [Fault(".", hang=True)]
    publisher = start(hub)
    publisher.beat("boot")
    until(lambda: hub.requests)
    began = time.monotonic()
    for step in range(100):
        publisher.beat("rl_step", step=step)
        publisher.ping(bytes=step)
    publisher.beat("rl_eval", step=99)
    saved = publisher.stream(100, lambda: Commit("checkpoint-100", {}))
    publisher.check()
    assert not publisher.flush(0.0) and not saved.done()
    assert time.monotonic() - began < PATIENCE_S / 4
    assert capsys.readouterr().out.count("HEARTBEAT") == 202
    assert len([job for job in publisher._queue if job.kind == "throttled"]) == 1  # however long it lasts


def test_an_upload_behind_a_milestone_that_waits_for_ever_ends_and_never_lands(start):
    store = Recorder(fails=lambda commit: Unreachable("down"))
    publisher = start(store, deadline_s=0.1)
    publisher.beat("boot")
    with pytest.raises(Unreachable, match="DONE: not uploaded within"):
        publisher.upload("DONE", {"DONE": b"1"}, "done")
    publisher.beat("error_rl")
    store.fails = lambda commit: None
    assert publisher.flush(PATIENCE_S)
    assert store.stages == ["boot", "error_rl"]


def test_an_upload_that_hangs_at_its_deadline_does_not_land_after_the_failure_was_told(start, hub):
    publisher = start(hub, deadline_s=0.3)
    publisher.beat("boot")
    assert publisher.flush(PATIENCE_S)
    hub.faults = [held := Held(COMMIT)]
    with pytest.raises(Unreachable, match="DONE"):
        publisher.upload("DONE", {"DONE": b"1"}, "done")
    publisher.beat("error_rl", retriable=True)
    assert publisher.flush(PATIENCE_S)
    held.go_on.set()
    late = next(request for request in hub.requests if "/commit/" in request.path and request.status != 200)
    until(lambda: late.status is not None)
    assert late.status == 412 and messages(hub) == ["boot", "error_rl"]


def test_a_clock_that_jumps_changes_no_order_and_no_spacing(start, monkeypatch):
    store, seconds = Recorder(), itertools.count()
    publisher = start(store, min_interval_s=3600.0)
    monkeypatch.setattr(time, "time", lambda: 1e9 - next(seconds))
    for stage in ("boot", "rl_start", "rl_step", "rl_step", "rl_trained", "done"):
        publisher.beat(stage)
    assert publisher.flush(PATIENCE_S)
    assert store.stages == ["boot", "rl_start", "rl_trained", "done"]
    times = [beat["ts"] for beat in store.beats]
    assert times == sorted(times, reverse=True)


def test_a_full_local_disk_stops_no_commit(start, hub, monkeypatch):
    """Checking who owns the prefix needs no disk, nor does a beat."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    publisher = start(hub)
    publisher.beat("boot")
    assert publisher.flush(PATIENCE_S)
    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("tempfile.mkdtemp", full)
    monkeypatch.setattr("tempfile.mkstemp", full)
    publisher.beat("rl_start")
    publisher.upload("metrics.json", {"metrics.json": b"{}"}, "done")
    assert publisher.flush(PATIENCE_S)
    assert messages(hub) == ["boot", "rl_start", "metrics.json"]
    assert strict(hub.files(REPO)[f"{PREFIX}/heartbeat.json"])["stage"] == "done"
