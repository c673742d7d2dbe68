"""One attempt at a run: what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import worker
from delivery.errors import Unreachable
from job.settings import identify
from training.run import Run


def test_a_failure_after_the_local_files_were_written_leaves_nothing_that_looks_like_success(tmp_path: Path):
    work, store = tmp_path / "work", tmp_path / "store"
    env = {"AUTOSLM_WORK_DIR": work, "AUTOSLM_STORE_DIR": store, "AUTOSLM_LOG_FLUSH_S": 0}
    identity, problem = identify({name: str(value) for name, value in env.items()})
    assert problem is None
    run = Run(identity)
    run.start()
    run.clear()
    for name in ("train_meta.json", "metrics.json", "DONE"):
        run.keep(name, "{}")
    worker.report_failure(run, Unreachable("DONE: not uploaded within 1800 s"))
    assert {path.name for path in work.iterdir()} == {"hb", "train_meta.json", "error_sft.txt"}
    assert {path.name for path in (store / identity.prefix).iterdir()} == {"heartbeat.json", "error_sft.txt"}
