"""How many commits a run spends: the rules one by one, then eight runs of one repository for hours."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from delivery.budget import HOUR_S, Budget
from delivery.publisher import Publisher
from delivery.store import Commit
from tests.stores import Clock, Recorder

pytestmark = pytest.mark.slow

HUB_LIMIT, RUNS = 128, 8
SILENCE_S = 900.0  # launchers take a run for dead after 1500
START = ("boot", "rl_start", "model_prefetched", "rl_train_start")
END = ("rl_trained", "rl_train_done", "metrics.json", "done")


def spent(floor_s: float = 60.0, *, beats: tuple[float, ...] = (), others: tuple[float, ...] = ()) -> Budget:
    """A budget with commits at these times."""
    budget = Budget(floor_s)
    for number, (at, can_wait) in enumerate(
        sorted([(at, True) for at in beats] + [(at, False) for at in others])
    ):
        budget.claim(number, at, can_wait)
    return budget


# --- the rules ---


@pytest.mark.parametrize(
    ("budget", "now", "due"),
    [
        (spent(), 0, True),
        (spent(others=(0,)), 59, False),
        (spent(others=(0,)), 60, True),
        (spent(others=(0, 50)), 109, False),  # of any stage
        (spent(beats=(0,)), 119, False),
        (spent(beats=(0,)), 120, True),
        (spent(beats=(0, 120)), 359, False),
        (spent(beats=(0, 120)), 360, True),
        (spent(beats=(0, 120, 360)), 839, False),
        (spent(beats=(0, 120, 360)), 840, True),
        (spent(beats=(0, 120, 360, 840)), 1739, False),  # 900 s is the longest
        (spent(beats=(0, 120, 360, 840)), 1740, True),
        (spent(beats=(0, 1, 2, 3, 4)), 3603.9, True),  # what is an hour old no longer counts
        (spent(9999, others=(0,)), 9998, False),
        (spent(9999, beats=(0,)), 9999, True),
        (spent(1000, beats=(0,)), 999, False),  # a floor above 900 s is kept, and not doubled
        (spent(1000, beats=(0,)), 1000, True),
        (spent(0, others=tuple(range(500))), 499, True),
    ],
)
def test_when_a_beat_is_due(budget, now, due):
    assert budget.beat_is_due(now) is due


@pytest.mark.parametrize(
    ("budget", "now", "room"),
    [
        (spent(), 0, True),
        (spent(others=(0, 1, 2, 3)), 4, True),  # after the start
        (spent(others=(0, 1, 2, 3, 4)), 5, False),  # four more are left, and fifty minutes to fill
        (spent(others=(0, 1, 2, 3, 4)), 604.1, True),
        (spent(others=tuple(range(10))), 601, False),  # ten an hour, five kept back
        (spent(beats=tuple(range(0, 3600, 360))), 3599, False),
        (spent(beats=tuple(range(0, 3600, 360))), 3600, True),
        (spent(beats=(0,), others=tuple(range(1, 900, 10))), 899, False),
        (spent(beats=(0,), others=tuple(range(1, 900, 10))), 900, True),  # silence would be worse
        (spent(others=tuple(range(0, 901, 10))), 899, False),
        (spent(others=tuple(range(0, 901, 10))), 900, True),
        (spent(0, others=tuple(range(500))), 499, True),
    ],
)
def test_when_a_commit_that_can_wait_may_go(budget, now, room):
    assert budget.has_room(now) is room


def test_a_failed_commit_gives_its_slot_back():
    budget = spent(beats=(0, 1000))
    assert not budget.beat_is_due(1060)
    budget.give_back(1)
    assert budget.beat_is_due(1060)


def test_a_commit_counts_from_when_it_landed():
    budget = spent(beats=(0,))
    budget.landed(0, 3000)
    assert not budget.beat_is_due(3119) and budget.beat_is_due(3120)


# --- eight runs ---


class Run:
    """A run whose publisher is worked off by hand, one commit at a time, by a clock all runs share."""

    def __init__(self, clock: Clock, folder: Path, number: int, interval_s: float):
        self.store, self.clock = Recorder(), clock
        self.landed: list[tuple[float, Commit]] = []
        self.publisher = Publisher(
            self.store,
            {"attempt": str(number)},
            folder / f"{number}.json",
            min_interval_s=interval_s,
            clock=clock,
            sleep=clock.sleep,
        )
        self.saved: list[int] = []

    def beat(self, stage: str, **extras: Any) -> None:
        self.publisher.beat(stage, **extras)
        self.work()

    def save(self, step: int) -> None:
        self.saved.append(step)
        self.publisher.stream(step, lambda: Commit(f"checkpoint-{step}", {}))
        self.work()

    def finish(self) -> None:
        self.publisher.hurry()
        for what in END:
            with self.publisher._changed:  # as `upload` does, which then waits
                self.publisher._enqueue("required", what, lambda what=what: Commit(what), (what, {}))
            self.work()

    def work(self) -> None:
        while self.publisher.work_off():
            pass
        self.landed += [(self.clock.now, commit) for commit in self.store.commits[len(self.landed) :]]

    @property
    def messages(self) -> list[str]:
        return [commit.message for _, commit in self.landed]


def simulate(
    clock: Clock,
    folder: Path,
    starts_s: list[float],
    length_s: float,
    save_s: float = 180.0,
    step_s: float = 10.0,
    eval_s: float = 0.0,
    interval_s: float = 60.0,
) -> list[Run]:
    """Runs that begin at these times and train for `length_s`, a step every `step_s`."""
    runs = [Run(clock, folder, number, interval_s) for number in range(len(starts_s))]

    def events(number: int, begin: float) -> Iterator[tuple[float, int, str, int]]:
        for order, stage in enumerate(START):
            yield begin + 20.0 * order, number, stage, 0
        for step in range(1, int((length_s - 80) / step_s)):
            at = begin + 80 + step * step_s
            yield at, number, "rl_step", step
            if eval_s and at % eval_s < step_s:
                yield at, number, "rl_eval", step
            if at % save_s < step_s:
                yield at, number, "save", step
        yield begin + length_s, number, "end", 0

    for at, number, what, step in heapq.merge(*(events(*one) for one in enumerate(starts_s))):
        clock.now = at
        run = runs[number]
        if what == "save":
            run.save(step)
        elif what == "end":
            run.finish()
        else:
            run.beat(what, step=step)
    return runs


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hours of beats that go neither to the disk nor to stdout."""
    monkeypatch.setattr(Publisher, "_write_locally", lambda *_: None)
    monkeypatch.setattr("delivery.publisher.say", lambda line: None)
    return tmp_path


def most_in_an_hour(runs: list[Run]) -> int:
    times = sorted(at for run in runs for at, _ in run.landed)
    return max(sum(at <= other < at + HOUR_S for other in times) for at in times)


def longest_silence_s(run: Run) -> float:
    beats = [at for at, commit in run.landed if "heartbeat.json" in commit.files]
    return max(later - before for before, later in pairwise(beats))


HOURS = {
    "all start together": ([0.0] * RUNS, 1.1 * HOUR_S),
    "all end together": ([300.0 * number for number in range(RUNS)], 0),
    "all start and end within an hour": ([10.0 * number for number in range(RUNS)], 3400.0),
    "short ones": ([10.0 * number for number in range(RUNS)], 900.0),
}


@pytest.mark.parametrize("name", HOURS)
def test_eight_runs_of_one_repository(folder, clock, name):
    starts_s, length_s = HOURS[name]
    if name == "all end together":
        runs = [run for begin in starts_s for run in simulate(clock, folder, [begin], 1.3 * HOUR_S - begin)]
    else:
        runs = simulate(clock, folder, starts_s, length_s)
    assert most_in_an_hour(runs) < HUB_LIMIT
    for run in runs:
        milestones = [one.removeprefix("heartbeat: ") for one in run.messages if "step" not in one]
        assert [one for one in milestones if not one.startswith("checkpoint")] == [*START, *END]
        assert run.messages[-len(END) - 1] == f"checkpoint-{run.saved[-1]}"  # the newest is never left out
        assert longest_silence_s(run) < SILENCE_S
        landed = [commit for _, commit in run.landed if commit.message.startswith("checkpoint")]
        assert len(landed) >= (length_s or HOUR_S) / 900


@pytest.mark.parametrize(("save_s", "eval_s"), [(30, 0), (180, 300), (1e9, 0), (700, 120)])
def test_no_cadence_silences_a_run_or_its_checkpoints(folder, clock, save_s, eval_s):
    (run,) = simulate(clock, folder, [0.0], 3 * HOUR_S, save_s, eval_s=eval_s)
    evaluations = [at for at, commit in run.landed if "eval" in commit.message]
    assert most_in_an_hour([run]) <= 15 + (eval_s and HOUR_S / eval_s)
    assert len(evaluations) == (int(3 * HOUR_S / eval_s) - 1 if eval_s else 0)
    assert longest_silence_s(run) <= 920
    saved = [at for at, commit in run.landed if commit.message.startswith("checkpoint")]
    if save_s < HOUR_S:
        assert max(later - before for before, later in pairwise([80.0, *saved])) <= 900 + save_s


def test_spacing_of_beats_grows_to_900_s(folder, clock):
    (run,) = simulate(clock, folder, [0.0], 3 * HOUR_S, save_s=1e9)
    steps = [at for at, commit in run.landed if "rl_step" in commit.message]
    gaps = [later - before for before, later in pairwise(steps)]
    assert gaps[:4] == [480, 600, 600, 900] and max(gaps) == 900  # the start took its share


def test_interval_0_switches_the_budget_off(folder, clock):
    (run,) = simulate(clock, folder, [0.0], 0.3 * HOUR_S, save_s=30, interval_s=0)
    steps = [one for one in run.messages if "rl_step" in one]
    assert len(steps) == int((0.3 * HOUR_S - 80) / 10) - 1
    assert len([one for one in run.messages if one.startswith("checkpoint")]) == len(run.saved)


def test_what_an_outage_held_back_does_not_burst_the_hour_after_it(folder, clock):
    """The Hub is down for most of an hour: commits count when it takes them."""
    run = Run(clock, folder, 0, 60.0)
    for stage in START:
        run.beat(stage)
    run.store.may_go_on.clear()
    for step in range(300):
        clock.now += 10
        run.publisher.beat("rl_step", step=step)  # nobody works off the queue
        if step % 60 == 59:
            run.publisher.beat("rl_eval", step=step)
    run.store.may_go_on.set()
    run.work()
    back = clock.now
    for step in range(300, 660):
        clock.now += 10
        run.beat("rl_step", step=step)
    evaluations = [commit for _, commit in run.landed if "rl_eval" in commit.message]
    assert len(evaluations) == 5
    assert sum(back <= at < back + HOUR_S for at, _ in run.landed) <= 10 + 1
