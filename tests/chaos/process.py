"""A worker as a process of its own whose lines are read, with their times, while it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import ROOT, process_environment, strict

PATIENCE_S = 300.0


@dataclass(frozen=True)
class Beat:
    """A HEARTBEAT line, and when it was read (monotonic seconds)."""

    at: float
    stage: str
    payload: Mapping[str, Any]


class Worker:
    """`python worker.py`, started at once; `folder` is its home, and gets its standard error."""

    def __init__(self, env: Mapping[str, str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.beats: list[Beat] = []
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "worker.py"],
            env=process_environment(folder, env),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr.txt").open("w"),
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            now, text = time.monotonic(), line.rstrip("\n")
            with self._changed:
                self.lines.append(text)
                # A killed process may leave half a line.
                if text.startswith("HEARTBEAT {") and line.endswith("\n"):
                    payload = strict(text.removeprefix("HEARTBEAT "))
                    if not payload.get("liveness"):
                        self.beats.append(Beat(now, payload["stage"], payload))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, seen: Callable[[Worker], bool], patience_s: float = PATIENCE_S) -> bool:
        """Whether `seen(self)` came true before the process ended."""
        deadline = time.monotonic() + patience_s
        with self._changed:
            while not seen(self):
                if not self._reader.is_alive() or time.monotonic() > deadline:
                    return seen(self)
                self._changed.wait(0.2)
        return True

    def wait_for_stage(self, stage: str, count: int = 1, patience_s: float = PATIENCE_S) -> bool:
        """Whether that many beats of a stage came before the process ended."""
        return self.wait_for(lambda one: one.stages.count(stage) >= count, patience_s)

    def send(self, number: signal.Signals) -> float:
        """Send a signal; returns the time."""
        at = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return at

    def kill(self) -> float:
        """SIGKILL to the process and whatever it started; returns the time once it is gone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        at = time.monotonic()
        self._reader.join(10)
        return at

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code; a worker that does not end is killed and an error."""
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"hung after {self.stages[-3:]}: {self.stderr[-2000:]}") from None
        self._reader.join(10)
        return code

    @property
    def stages(self) -> list[str]:
        return [beat.stage for beat in self.beats]

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text(errors="replace")

    @property
    def attempt(self) -> str:
        """The attempt's id, empty before the first beat."""
        return self.beats[0].payload["attempt"] if self.beats else ""

    @property
    def newest_step(self) -> int:
        """The newest step that was told."""
        return max((beat.payload.get("step") or 0 for beat in self.beats), default=0)
