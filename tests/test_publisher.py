"""The publisher: what is written and committed when, in which order, and what happens when it fails."""

from __future__ import annotations

import io
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from delivery.errors import StoreError, Unavailable, Unreachable
from delivery.publisher import Publisher
from delivery.pulse import STILL_S, Pulse
from delivery.redaction import redactor
from delivery.store import Commit, FolderStore
from tests.harness import strict
from tests.stores import PATIENCE_S, Clock, Recorder

HEADER = {"run_id": "r", "mode": "rl", "seed": 3, "attempt": "a1"}


@pytest.fixture
def store() -> Recorder:
    return Recorder()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, store: Recorder, clock: Clock) -> Iterator[Callable[..., Publisher]]:
    """Return a function that starts a publisher over `store`; nothing it waits for outlives the test."""
    made: list[Publisher] = []

    def start(interval_s: float = 60.0, **more: Any) -> Publisher:
        options = {"store": store, "sleep": clock.sleep, "clock": clock, **more}
        publisher = Publisher(
            options.pop("store"),
            HEADER,
            tmp_path / "hb" / "heartbeat.json",
            min_interval_s=interval_s,
            **options,
        )
        publisher.start()
        made.append(publisher)
        return publisher

    yield start
    store.may_go_on.set()
    for publisher in made:
        publisher.stop_pings()
        publisher.flush(PATIENCE_S)


def drained(publisher: Publisher) -> None:
    assert publisher.flush(PATIENCE_S)


def lines(out: str) -> list[dict[str, Any]]:
    return [
        strict(line.removeprefix("HEARTBEAT ")) for line in out.splitlines() if line.startswith("HEARTBEAT ")
    ]


# --- beats under load ---


def test_the_file_always_parses_and_no_temporary_file_remains(make, tmp_path):
    publisher, file = make(9999), tmp_path / "hb" / "heartbeat.json"
    publisher.beat("boot")
    begun, done = threading.Barrier(9), threading.Event()

    def beat(worker: int) -> None:
        begun.wait(PATIENCE_S)
        for step in range(40):
            publisher.beat("rl_step", worker=worker, step=step, text="x" * 50 * step)

    def read() -> list[dict[str, Any]]:
        begun.wait(PATIENCE_S)
        seen = []
        while not done.is_set():
            seen.append(strict(file.read_text()))
        return seen

    with ThreadPoolExecutor(9) as pool:
        reader = pool.submit(read)
        for beating in [pool.submit(beat, worker) for worker in range(8)]:
            beating.result()
        done.set()
        seen = reader.result()
    assert all(beat.keys() >= {"stage", "ts", *HEADER} for beat in seen)
    assert [path.name for path in file.parent.iterdir()] == ["heartbeat.json"]
    assert strict(file.read_text())["step"] == 39


def test_a_milestone_commits_and_the_step_after_it_does_not(make, store, capsys):
    publisher = make(9999)
    publisher.beat("rl_start")
    publisher.beat("rl_step", step=1)
    drained(publisher)
    assert store.stages == ["rl_start"]
    assert [beat["stage"] for beat in lines(capsys.readouterr().out)] == ["rl_start", "rl_step"]


def test_interval_0_commits_every_milestone_one_at_a_time_with_its_own_content(make, store):
    publisher = make(0)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: publisher.beat(f"stage_{number}", number=number), range(120)))
    drained(publisher)
    assert len(store.commits) == 120 and store.most_at_once == 1
    assert sorted(beat["number"] for beat in store.beats) == list(range(120))
    assert all(beat["stage"] == f"stage_{beat['number']}" for beat in store.beats)
    assert store.stages == [beat["stage"] for beat in store.beats]


# --- what a beat is ---


def test_file_line_and_commit_hold_the_same(make, store, tmp_path, capsys):
    publisher = make()
    publisher.beat("model_prefetched", model="m", download_seconds=0.1)
    drained(publisher)
    (line,) = lines(capsys.readouterr().out)
    ts = line.pop("ts")
    assert line == {"stage": "model_prefetched", **HEADER, "model": "m", "download_seconds": 0.1}
    assert ts > 1.7e9
    assert strict((tmp_path / "hb" / "heartbeat.json").read_text()) == store.beats[0] == {**line, "ts": ts}
    assert [*store.commits[0].files] == ["heartbeat.json"]


def test_nan_becomes_null(make, store, tmp_path, capsys):
    publisher = make()
    publisher.beat("error_rl", reward=math.nan, rewards=[1.0, math.inf], nested={"kl": -math.inf})
    drained(publisher)
    (line,) = lines(capsys.readouterr().out)
    for beat in (line, store.beats[0], strict((tmp_path / "hb" / "heartbeat.json").read_text())):
        assert (beat["reward"], beat["rewards"], beat["nested"]) == (None, [1.0, None], {"kl": None})


SECRETS = ("hf_exampleexample", 'pass"word\\', "ключ-секрет")


def test_secrets_leave_by_no_way(make, store, tmp_path, capsys):
    publisher = make(redact=redactor(SECRETS))
    error = f"401 for {' and '.join(SECRETS)}, Authorization: Bearer abc.def-123/+="
    publisher.beat("error_rl", error=error, diag={"token": SECRETS[1]})
    drained(publisher)
    file = (tmp_path / "hb" / "heartbeat.json").read_text()
    for text in (file, capsys.readouterr().out, store.commits[0].files["heartbeat.json"].decode()):
        beat = strict(text.removeprefix("HEARTBEAT "))
        assert beat["error"] == "401 for *** and *** and ***, Authorization: Bearer ***"
        assert beat["diag"] == {"token": "***"}


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("nothing here", "nothing here"),
        ("hf_abcdefghijklmnop sk-abcdefghijklmnop_1 ghp_abcdefghijklmnop", "*** *** ***"),
        ("hf_short half_abcdefghijklmnop", "hf_short half_abcdefghijklmnop"),
        ('{"error": "Bearer hf.x", "next": 1}', '{"error": "Bearer ***", "next": 1}'),
        ("mysecret mysecret2", "*** ***"),
    ],
)
def test_redaction(text, redacted):
    assert redactor(("mysecret", "mysecret2"))(text) == redacted


BOTH_QUOTES, TWO_LINES = 'it\'s "both"\\ here', "-----BEGIN-----\n  abcd\n"
SPELLED = [
    (BOTH_QUOTES, json.dumps(BOTH_QUOTES)[1:-1]),
    (BOTH_QUOTES, repr(BOTH_QUOTES)[1:-1]),
    ("p@ss/w+rd=x yz", "p%40ss%2Fw%2Brd%3Dx%20yz"),
    (TWO_LINES.strip(), "-----BEGIN----- abcd"),
    (TWO_LINES.strip(), "-----BEGIN-----\\n abcd"),
    (TWO_LINES.strip(), "-----BEGIN-----\n      abcd"),
    ("12345678", "12345678"),
]


@pytest.mark.parametrize(("secret", "spelled"), SPELLED)
def test_a_secret_is_found_however_it_is_written(secret, spelled):
    assert redactor((secret,))(f"<{secret}> [{spelled}].") == "<***> [***]."


def test_a_secret_of_digits_leaves_every_number_a_number():
    redact = redactor(("12345678",))
    numbers = {"ts": 1712345678.5, "share": 0.12345678, "n": 123456789, "all": "12345678, 12345678."}
    assert strict(redact(json.dumps(numbers))) == {**numbers, "all": "***, ***."}


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("https://h/v1?x=1&X-Amz-Signature=0123456789ab&y=2", "https://h/v1?x=1***&y=2"),
        ('{"url": "https://h/v1?api_key=abcdefgh1234"}', '{"url": "https://h/v1***"}'),
        ("GET /v1?access_token=abcdefgh1234 failed", "GET /v1*** failed"),
        ("https://h/v1?max_tokens=12&x=1", "https://h/v1?max_tokens=12&x=1"),
        (
            "https://abcdefgh@github.com/o/r and https://me:pw@h",
            "https://***@github.com/o/r and https://***@h",
        ),
        ("https://h/a?q=me@home", "https://h/a?q=me@home"),
        ("Authorization: Basic bWU6cHc=", "Authorization: Basic ***"),
    ],
)
def test_credentials_in_addresses_and_headers_are_redacted(text, redacted):
    assert redactor(())(text) == redacted


def test_without_secrets_token_shapes_are_still_redacted():
    assert redactor(())("a hf_abcdefghijklmnop b") == "a *** b"


def test_a_file_that_cannot_be_written_does_not_stop_the_beat(make, store, tmp_path, capsys, caplog):
    publisher = make()
    (tmp_path / "hb").write_text("in the way")
    publisher.beat("boot")
    drained(publisher)
    assert store.stages == ["boot"] and len(lines(capsys.readouterr().out)) == 1
    assert "heartbeat not written" in caplog.text


# --- throttle and slot ---


def test_who_asks_a_run_to_stop_whose_done_is_landing_does_not_have_the_last_word(make, store, clock):
    publisher = make(0)
    store.may_go_on.clear()
    store.entered.clear()
    ends = threading.Thread(target=publisher.upload, args=("DONE", {"DONE": b"1"}, "done"))
    ends.start()
    assert store.entered.wait(PATIENCE_S)
    publisher.beat("preempting", step=5, reason="SIGTERM")
    store.may_go_on.set()
    ends.join(PATIENCE_S)
    drained(publisher)
    assert [beat["stage"] for beat in store.beats] == ["done"]
    assert strict(publisher.heartbeat_file.read_bytes())["stage"] == "done"


def test_a_step_is_due_an_interval_after_the_last_commit_of_any_stage(make, store, clock):
    publisher = make(60)
    publisher.beat("rl_step", step=1)  # nothing committed yet: due
    drained(publisher)
    for seconds, step in ((119, 2), (1, 3), (239, 4)):  # each makes the next wait twice as long
        clock.now += seconds
        publisher.beat("rl_step", step=step)
        drained(publisher)
    publisher.beat("checkpoint_uploaded", step=4)
    drained(publisher)
    clock.now += 239
    publisher.beat("sft_step", step=5)
    publisher.ping(bytes=1)
    clock.now += 1
    publisher.ping(bytes=2)
    drained(publisher)
    assert [(beat["stage"], beat["step"]) for beat in store.beats] == [
        *(("rl_step", 1), ("rl_step", 3)),
        *(("checkpoint_uploaded", 4), ("sft_step", 5)),
    ]
    assert store.beats[-1] | {"ts": 0} == {
        "stage": "sft_step",
        "ts": 0,
        **HEADER,
        "step": 5,
        "liveness": True,
        "bytes": 2,
    }


def test_interval_0_throttles_nothing(make, store):
    publisher = make(0)
    for step in range(5):
        publisher.beat("rl_step", step=step)
        drained(publisher)
    assert [beat["step"] for beat in store.beats] == list(range(5))


def test_a_failed_commit_gives_its_slot_back(make, store, caplog):
    publisher = make(9999)
    store.failures = [Unavailable("no"), StoreError("no")]
    for step in (1, 2, 3, 4):
        publisher.beat("rl_step", step=step)
        drained(publisher)
    assert [beat["step"] for beat in store.beats] == [3]
    assert caplog.text.count("not uploaded: no") == 2


def test_a_failed_commit_does_not_take_back_the_slot_of_a_later_beat(make, store):
    publisher = make(9999)
    store.may_go_on.clear()
    store.fails = lambda commit: StoreError("no") if "rl_step" in commit.message else None
    publisher.beat("rl_step", step=1)
    assert store.entered.wait(PATIENCE_S)
    publisher.beat("rl_trained", step=1)
    store.may_go_on.set()
    drained(publisher)
    publisher.beat("rl_step", step=2)
    drained(publisher)
    assert store.stages == ["rl_trained"] and store.tries["heartbeat: rl_step"] == 1


def test_a_failed_milestone_gives_its_slot_back(make, store):
    publisher = make(9999)
    store.failures = [StoreError("no")] * 3
    publisher.beat("boot")
    drained(publisher)
    publisher.beat("rl_step", step=1)
    drained(publisher)
    assert store.stages == ["rl_step"]


# --- order ---


def test_throttled_beats_that_wait_are_replaced_by_the_newest(make, store):
    publisher = make(0)
    store.may_go_on.clear()
    publisher.beat("boot")
    assert store.entered.wait(PATIENCE_S)
    for step in range(5):
        publisher.beat("rl_step", step=step)
    publisher.ping(bytes=1)
    publisher.beat("rl_trained", step=5)
    publisher.beat("rl_step", step=6)
    publisher.beat("done", step=7)
    store.may_go_on.set()
    drained(publisher)
    assert store.stages == ["boot", "rl_trained", "rl_step", "done"]
    assert store.beats[2]["step"] == 6


def test_everything_is_committed_in_the_order_of_creation(make, store):
    publisher = make(0)
    store.may_go_on.clear()
    publisher.beat("boot")
    publisher.ping(bytes=1)
    publisher.beat("rl_train_done", {"train_meta.json": b"{}"})
    store.may_go_on.set()
    publisher.upload("metrics.json", {"metrics.json": b"{}"})
    publisher.beat("done")
    drained(publisher)
    assert store.stages == ["boot", "boot", "rl_train_done", "metrics.json", "done"]
    assert [*store.commits[2].files] == ["train_meta.json", "heartbeat.json"]


def test_an_urgent_beat_goes_before_what_waits(make, store):
    publisher = make(0)
    store.may_go_on.clear()
    publisher.beat("boot")
    assert store.entered.wait(PATIENCE_S)
    publisher.beat("rl_eval")
    publisher.beat("rl_step", step=5)  # older: it may not land after what is newer
    publisher.stream(5, lambda: Commit("checkpoint-5", {}))
    publisher.beat("preempting", step=5, reason="SIGTERM")
    store.may_go_on.set()
    drained(publisher)
    assert store.stages == ["boot", "preempting", "rl_eval", "checkpoint-5"]


def test_an_urgent_beat_ends_a_long_pause(tmp_path, store, monkeypatch):
    """The Hub asked for a quarter of an hour, and the machine is gone in 25 s."""
    monkeypatch.setattr("delivery.publisher.URGENT_PAUSE_S", 0.01)
    publisher = Publisher(store, HEADER, tmp_path / "heartbeat.json", min_interval_s=0)
    store.failures = [Unreachable("429", retry_after_s=900)]
    publisher.start()
    publisher.beat("boot")
    assert store.entered.wait(PATIENCE_S)
    publisher.beat("preempting")
    drained(publisher)
    publisher.stop_pings()
    assert store.stages == ["boot", "preempting"]


def test_a_ping_before_a_milestone_lands_before_it(make, store):
    publisher = make(0)
    store.may_go_on.clear()
    publisher.beat("rl_start")
    publisher.ping(bytes=1)
    publisher.beat("done")
    store.may_go_on.set()
    drained(publisher)
    assert store.beats[-1]["stage"] == "done" and "liveness" not in store.beats[-1]


def test_the_real_folder_store_gets_the_newest_beat(make, tmp_path):
    folder = FolderStore(tmp_path / "artifacts", "rl/r/seed3")
    publisher = make(0, store=folder)
    for stage in ("boot", "rl_start", "done"):
        publisher.beat(stage)
    publisher.upload("adapter/", {"adapter/a": b"a"})
    drained(publisher)
    assert folder.list() == ["adapter/a", "heartbeat.json"]
    assert strict(folder.read("heartbeat.json"))["stage"] == "done"


# --- uploads ---


def test_a_required_upload_is_in_the_store_when_it_returns(make, store):
    publisher = make()
    publisher.upload("adapter/", {"adapter/a": b"a"})
    assert store.commits == [Commit("adapter/", {"adapter/a": b"a"})]


BUSY, GONE = Unavailable("500"), StoreError("403")


@pytest.mark.parametrize(
    ("failures", "naps"),
    [
        ([], []),
        ([BUSY], [5]),
        ([GONE, BUSY], [5, 10]),
        ([Unreachable("429", retry_after_s=37)], [37]),
        ([Unreachable("429", retry_after_s=0)], [1]),
        ([Unreachable("down")] * 6, [5, 10, 20, 40, 60, 60]),
        ([Unreachable("503", retry_after_s=100)] * 17, [100] * 17),
    ],
)
def test_pauses_of_a_required_upload_that_succeeds(make, store, clock, failures, naps):
    store.failures = list(failures)
    make().upload("metrics.json", {"metrics.json": b"{}"})
    assert clock.naps == naps
    assert store.stages == ["metrics.json"]


@pytest.mark.parametrize(
    ("failure", "tries"),
    [
        (BUSY, 3),
        (GONE, 3),
        (Unreachable("429", retry_after_s=900), 3),  # at 0, 900 and 1800 s
        (Unreachable("429", retry_after_s=1000), 2),
        (Unreachable("429", retry_after_s=1801), 1),
        (Unreachable("down"), 33),  # at 0, 5, 15, 35, 75, then every 60 s up to 1755
    ],
)
def test_a_required_upload_that_fails_makes_no_try_past_the_deadline(make, store, clock, failure, tries):
    began = clock.now
    store.fails = lambda commit: failure
    publisher = make(deadline_s=1800.0)
    with pytest.raises(StoreError) as caught:
        publisher.upload("metrics.json", {"metrics.json": b"{}"})
    assert caught.value is failure
    assert store.tries["metrics.json"] == tries == len(clock.naps) + 1
    assert clock.now - began <= 1800


def test_the_deadline_counts_time_spent_trying(make, store, clock):
    def slow(commit: Commit) -> Exception:
        clock.now += 700
        return Unreachable("timed out")

    store.fails = slow
    with pytest.raises(Unreachable):
        make(deadline_s=1800.0).upload("adapter/", {})
    assert (store.tries["adapter/"], clock.naps) == (3, [5, 10])


def test_a_beat_that_waits_has_one_try(make, store, caplog):
    publisher = make(0)
    store.failures = [Unreachable("the Hub is down")]
    publisher.beat("rl_step", step=1)
    publisher.beat("rl_train_done")
    drained(publisher)
    assert store.tries["heartbeat: rl_step"] == 1 and store.stages == ["rl_train_done"]
    assert "not uploaded: the Hub is down" in caplog.text


@pytest.mark.parametrize("failure", [BUSY, Unreachable("down"), Unreachable("429", retry_after_s=60)])
def test_a_milestone_waits_for_the_hub_however_long(make, store, clock, failure):
    publisher = make(deadline_s=1800.0)
    store.failures = [failure] * 60
    publisher.beat("boot")
    publisher.beat("rl_start")
    drained(publisher)
    assert store.stages == ["boot", "rl_start"] and clock.now > 3000


def test_a_milestone_that_is_refused_has_three_tries(make, store, clock):
    publisher = make()
    store.failures = [GONE] * 3
    publisher.beat("boot")
    publisher.beat("rl_start")
    drained(publisher)
    assert store.stages == ["rl_start"] and clock.naps == [5, 10]


def test_a_pause_that_is_asked_for_is_an_hour_at_most(make, store, clock):
    store.failures = [Unreachable("429", retry_after_s=1e9)]
    publisher = make()
    publisher.beat("boot")
    drained(publisher)
    assert clock.naps == [3600]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("vanished"), ValueError("no such file"), RuntimeError("a bug")]
)
def test_no_error_of_a_store_ends_the_thread(make, store, error, caplog):
    """`upload` would wait for ever for a thread that is gone."""
    publisher = make()
    store.failures = [error, error]
    publisher.beat("rl_train_done", {"train_meta.json": b"{}"})
    with pytest.raises(StoreError, match=str(error)):
        publisher.upload("adapter/", {})
    publisher.beat("done")
    drained(publisher)
    assert store.stages == ["done"]
    assert f"{error}" in caplog.text


# --- a commit that hangs ---


def test_nothing_waits_for_a_commit_that_hangs(make, store, tmp_path, capsys):
    publisher = make(0)
    store.may_go_on.clear()
    publisher.beat("boot")
    assert store.entered.wait(PATIENCE_S)
    for step in range(50):
        publisher.beat("rl_step", step=step)
    publisher.stream(50, lambda: Commit("checkpoint-50", {}))
    publisher.ping(bytes=1)
    assert not store.may_go_on.is_set() and store.commits == []  # and yet we are here
    assert strict((tmp_path / "hb" / "heartbeat.json").read_text())["step"] == 49
    assert len(lines(capsys.readouterr().out)) == 52


def test_a_flush_is_bounded_and_says_what_it_abandons(make, store, caplog):
    publisher = make(0)
    assert publisher.flush(0.0)
    store.may_go_on.clear()
    publisher.beat("boot")
    publisher.beat("error_rl", {"error_rl.txt": b""})
    assert store.entered.wait(PATIENCE_S)
    assert not publisher.flush(0.01)
    assert "heartbeat: boot, heartbeat: error_rl" in caplog.text
    store.may_go_on.set()
    drained(publisher)


# --- pings ---


class Meter:
    """A counter with these values; between two samples `every_s` seconds of `clock` pass."""

    def __init__(self, clock: Clock, values: Sequence[float | Exception], every_s: float):
        self.clock, self.values, self.every_s = clock, list(values), every_s
        self.used_up = threading.Event()

    def __call__(self) -> float:
        if not self.values:
            self.used_up.set()
            raise OSError("nothing more to count")
        self.clock.now += self.every_s
        value = self.values.pop(0)
        if isinstance(value, Exception):
            raise value
        return value


@pytest.fixture
def pings(store: Recorder, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Return a function that lets a pulse sample some values, and returns what its pings counted."""

    def sample(
        values: Sequence[float | Exception],
        still_s: float = STILL_S,
        every_s: float = 30.0,
        begin: bool = True,
    ) -> list[float]:
        publisher = Publisher(store, HEADER, tmp_path / "heartbeat.json", min_interval_s=0, clock=clock)
        if begin:
            publisher.beat("rl_start", step=4)
        meter, pulse = Meter(clock, values, every_s), Pulse(publisher, every_s=0.0005, still_s=still_s)
        with pulse.counting("bytes", meter):
            pulse.start()
            assert meter.used_up.wait(PATIENCE_S)
            pulse.stop()
        return [beat["bytes"] for beat in lines(capsys.readouterr().out) if "liveness" in beat]

    return sample


def test_a_ping_repeats_the_newest_beat_with_a_flag_and_a_counter(make, store, capsys):
    publisher = make(0)
    publisher.beat("rl_train_start", setup_seconds=1.5, resumed=False)
    publisher.ping(bytes=7)
    drained(publisher)
    milestone, ping = lines(capsys.readouterr().out)
    assert ping == {**milestone, "ts": ping["ts"], "liveness": True, "bytes": 7}
    assert store.beats[-1] == ping


def test_pings_carry_the_counter_while_it_moves(pings):
    assert pings([10, 11, 12, 13]) == [10, 11, 12, 13]


def test_pings_fall_silent_when_the_counter_stands_still_and_come_back_when_it_moves(pings):
    # 30 s a sample: the baseline and two more, then 90 s have passed without movement
    assert pings([5, 5, 5, 5, 5, 6, 6, 6, 6], still_s=90) == [5, 5, 5, 6, 6, 6]


def test_a_hang_is_silent_after_15_minutes(pings):
    assert len(pings([0] * 60)) == 30


def test_nobody_pings_while_beats_come(pings):
    assert pings([1, 2, 3], every_s=0.0) == []


def test_there_is_nothing_to_repeat_before_the_first_beat(pings):
    assert pings([1, 2, 3], begin=False) == []


def test_a_counter_that_fails_once_does_not_end_the_pings(pings):
    assert pings([1, FileNotFoundError("vanished while it was counted"), 3]) == [1, 3]


def test_a_publisher_pings_every_30_seconds(make):
    pulse = make()._pulse
    assert (pulse.every_s, pulse.still_s) == (30.0, 900.0)


def test_no_ping_comes_after_stop_pings(store, tmp_path, capsys):
    """The counter hangs while pings are stopped: `stop_pings` returns only after that ping is out."""
    publisher = Publisher(store, HEADER, tmp_path / "heartbeat.json", min_interval_s=0)
    publisher._pulse = Pulse(publisher, every_s=0.0)
    asked, go_on = threading.Event(), threading.Event()

    def counter() -> float:
        asked.set()
        assert go_on.wait(PATIENCE_S)
        return 1

    with publisher.counting("bytes", counter):
        publisher.start()
        publisher.beat("rl_trained", step=1)
        assert asked.wait(PATIENCE_S)
        threading.Timer(0.02, go_on.set).start()
        publisher.stop_pings()
    assert not publisher._pulse._thread.is_alive()
    publisher.beat("done", step=1)
    drained(publisher)
    stages = [beat["stage"] for beat in lines(capsys.readouterr().out)]
    assert stages[-1] == "done" and store.beats[-1]["stage"] == "done"


def test_stopping_twice_and_before_the_start_is_fine(store, tmp_path):
    publisher = Publisher(store, HEADER, tmp_path / "heartbeat.json")
    publisher.stop_pings()
    publisher.start()
    publisher.stop_pings()


def test_a_process_without_a_counter_is_watched_by_its_cpu_seconds(make):
    name, counter = make()._pulse._watched[-1]
    assert name == "cpu_seconds"
    assert isinstance(counter(), int)


def test_the_inner_counter_is_watched_until_its_context_ends(make):
    publisher = make()
    with publisher.counting("bytes", lambda: 1):
        with publisher.counting("micro_steps", lambda: 2):
            assert publisher._pulse._watched[-1][0] == "micro_steps"
        assert publisher._pulse._watched[-1][0] == "bytes"
    assert publisher._pulse._watched[-1][0] == "cpu_seconds"


def test_a_reader_that_has_gone_away_costs_no_beat(make, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    publisher = make()
    monkeypatch.setattr(sys, "stdout", Gone())
    publisher.beat("boot")
    assert publisher.flush(10) and json.loads(publisher.heartbeat_file.read_text())["stage"] == "boot"
