"""One attempt at a run: what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import worker
from accounting import RunMetrics
from delivery.errors import Unreachable
from job.settings import Settings, identify
from training.preemption import Preempted
from training.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has begun, with a folder for a store."""
    work, store = tmp_path / "work", tmp_path / "store"
    env = {"AUTOSLM_WORK_DIR": work, "AUTOSLM_STORE_DIR": store, "AUTOSLM_LOG_FLUSH_S": 0}
    identity, problem = identify({name: str(value) for name, value in env.items()})
    assert problem is None
    run = Run(identity)
    run.start()
    run.clear()
    return run


def stored(run: Run) -> Path:
    return run.identity.store_dir / run.identity.prefix


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_failure_after_the_local_files_were_written_leaves_nothing_that_looks_like_success(run: Run):
    for name in ("train_meta.json", "metrics.json", "DONE"):
        run.keep(name, "{}")
    worker.report_failure(run, Unreachable("DONE: not uploaded within 1800 s"))
    assert files(run.identity.work_dir) == {"hb", "train_meta.json", "error_sft.txt"}
    assert files(stored(run)) == {"heartbeat.json", "error_sft.txt"}


class Mute(Exception):
    """An environment's error whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError("reason")


@pytest.mark.parametrize(
    ("error", "told", "written"),
    [
        (
            ValueError("no row \udcff\ud83d in é"),
            "ValueError: no row \udcff\ud83d in é",
            "\\udcff\\ud83d in é",
        ),
        (Mute(), "Mute", "test_run.Mute: <exception str() failed>"),
    ],
)
def test_an_error_whose_text_is_no_text_is_told_all_the_same(
    run: Run, error: Exception, told: str, written: str
):
    worker.report_failure(run, error)
    store = stored(run)
    assert json.loads((store / "heartbeat.json").read_text())["error"] == told
    assert written in (store / "error_sft.txt").read_text(encoding="utf-8")
    assert (store / "error_sft.txt").read_bytes() == run.local("error_sft.txt").read_bytes()


def test_a_failure_that_cannot_be_told_does_not_look_like_success(run: Run, monkeypatch: pytest.MonkeyPatch):
    """No thread can be had any more: whatever else is left out, the launcher must not find metrics."""

    def refuse(code: int) -> None:
        raise RuntimeError("can't start new thread")

    run.keep("metrics.json", "{}")
    monkeypatch.setattr(run.trackers, "close", refuse)
    with pytest.raises(RuntimeError):
        worker.report_failure(run, MemoryError())
    assert not run.local("metrics.json").exists()


# --- the end ---


def finish(run: Run) -> None:
    """Finish a run of no steps."""
    job: Any = SimpleNamespace(metrics=RunMetrics())
    worker.finish(Settings.read({}, None), run, job, dict)


def test_what_can_be_done_without_may_fail_to_be_written(run: Run, capsys: pytest.CaptureFixture[str]):
    run.local("train_meta.json").mkdir()
    finish(run)
    assert files(stored(run)) == {"heartbeat.json", "train_meta.json", "metrics.json", "DONE"}
    assert json.loads((stored(run) / "train_meta.json").read_text())["train_wall"] == 0.0
    assert run.local("metrics.json").is_file() and "NODE DONE: " in capsys.readouterr().out


def test_a_run_that_was_asked_to_stop_is_not_done(run: Run):
    run.preemption.reason = "SIGTERM"
    with pytest.raises(Preempted):
        finish(run)
    run.publisher.flush()
    assert files(stored(run)) == {"heartbeat.json", "train_meta.json"}
    assert files(run.identity.work_dir) == {"hb", "train_meta.json"}


def test_a_run_whose_sentinel_landed_is_left_its_files_when_it_is_asked_to_stop(run: Run):
    finish(run)
    run.preemption.request("SIGTERM")  # one that counted would end this process
    run.preemption.leave(0.0)
    assert {"metrics.json", "DONE"} <= files(run.identity.work_dir)
    assert json.loads((stored(run) / "heartbeat.json").read_text())["stage"] == "done"
