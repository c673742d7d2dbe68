"""Experiment trackers, the real ones: none ends a run, and all are told how it ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tracked
from tests.harness import Finished
from training.preemption import EXIT_CODE

pytestmark = pytest.mark.slow

Job = Callable[..., dict[str, str]]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked.find_packages(monkeypatch)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture
def trackers() -> Any:
    from training.trackers import Trackers

    return Trackers()


def test_a_failed_run_is_failed_there_too(
    offline: None, job: Job, tmp_path: Path, run_in_process: Callable[..., Finished]
) -> None:
    env = job(spec={"train": {"learning_rate": 1e30}}, AUTOSLM_REPORT_TO="wandb", SFT_MAX_STEPS=30)
    ended = run_in_process(env)
    assert "10 updates in a row" in str(ended.error)
    [run] = tracked.runs(tmp_path / "work")
    assert (run.name, run.exit_code) == ("sft/r1/seed0", 1)


def test_a_resumed_run_goes_on_with_its_own(
    offline: None, monkeypatch: pytest.MonkeyPatch, job: Job, tmp_path: Path, run_in_process: Any
) -> None:
    """The first attempt leaves when its checkpoint has landed, as a preempted one does."""
    import worker
    from training.run import Run

    class Leaving(Run):
        def check(self) -> None:
            if self.tally.step == 12:
                self.preemption.leave(30.0)
                raise RuntimeError("left")

    env = job(AUTOSLM_REPORT_TO="wandb", SFT_SAVE_STEPS=12, SFT_MAX_STEPS=21)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with pytest.MonkeyPatch.context() as first:
        first.setattr(worker, "Run", Leaving)
        assert "left" in str(run_in_process(env).error)
    ended = run_in_process(env)
    assert ended.error is None, ended.error
    one, two = tracked.runs(tmp_path)
    assert one.id == two.id and (one.exit_code, two.exit_code) == (EXIT_CODE, 0)
    assert [*one.series("train/loss")] == [10] and [*two.series("train/loss")] == [20]


def test_a_tracker_that_cannot_be_used_does_not_end_a_run(
    monkeypatch: pytest.MonkeyPatch, job: Job, tmp_path: Path, run_in_process: Any, caplog: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of the person's
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    ended = run_in_process(job(AUTOSLM_REPORT_TO="wandb,tensorboard", SFT_MAX_STEPS=10))
    assert ended.error is None, ended.error
    assert "wandb cannot be reached, going on without it" in caplog.text
    assert list((tmp_path / "work" / "sft_seed0").glob("runs/*/events.*"))


def test_closing_waits_so_long_and_no_longer(trackers: Any, caplog: pytest.LogCaptureFixture) -> None:
    told, forever = dict[str, int](), threading.Event()

    def refuse(code: int) -> None:
        raise ConnectionError("gone")

    trackers.open("good", lambda code: told.update(good=code))
    trackers.open("slow", lambda code: forever.wait(60))
    trackers.open("bad", refuse)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        trackers.close(1)
        trackers.close(0)
        trackers.wait(0.5)
    forever.set()
    assert 0.4 < time.monotonic() - began < 5 and told == {"good": 1}
    assert "slow was not closed in time" in caplog.text and "bad is not closed: gone" in caplog.text
