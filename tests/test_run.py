"""One attempt at a run: what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import worker
from delivery.errors import Unreachable
from job.settings import identify
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


def test_a_failure_after_the_local_files_were_written_leaves_nothing_that_looks_like_success(run: Run):
    for name in ("train_meta.json", "metrics.json", "DONE"):
        run.keep(name, "{}")
    worker.report_failure(run, Unreachable("DONE: not uploaded within 1800 s"))
    work, store = run.identity.work_dir, run.identity.store_dir / run.identity.prefix
    assert {path.name for path in work.iterdir()} == {"hb", "train_meta.json", "error_sft.txt"}
    assert {path.name for path in store.iterdir()} == {"heartbeat.json", "error_sft.txt"}


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
    store = run.identity.store_dir / run.identity.prefix
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
