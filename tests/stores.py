"""What the tests of delivery share: a store in memory, a clock, a Hub that waits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivery.errors import NotFound
from delivery.store import Check, Commit
from tests.harness import strict
from tests.hub_server import Fault, HubServer

REPO, PREFIX = "acme/runs", "rl/run/seed0"
COMMIT = "POST .*/commit/"
PATIENCE_S = 20.0  # for what happens at once; only a broken publisher uses it up


@dataclass
class Recorder:
    """A store in memory that notes commits, and fails or hangs as it is told."""

    location: str = "memory"
    failures: list[Exception] = field(default_factory=list)  # one for each of the next tries
    fails: Callable[[Commit], Exception | None] = lambda commit: None
    may_go_on: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    commits: list[Commit] = field(default_factory=list)
    tries: Counter[str] = field(default_factory=Counter)
    at_once: int = 0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.may_go_on.set()

    def put(self, commit: Commit, check: Check | None = None) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.tries[commit.message] += 1
        self.entered.set()
        try:
            if check is not None:
                check(self.read)
            assert self.may_go_on.wait(PATIENCE_S)
            error = self.failures.pop(0) if self.failures else self.fails(commit)
            if error is not None:
                raise error
            self.commits.append(commit)
        finally:
            self.at_once -= 1

    def open(self) -> None: ...
    def exists(self, path: str) -> bool:
        return False

    def read(self, path: str) -> bytes:
        for commit in reversed(self.commits):
            if path in commit.files:
                content = commit.files[path]
                assert isinstance(content, bytes)
                return content
        raise NotFound(path)

    def fetch(self, path: str, target: Path) -> None:
        target.write_bytes(self.read(path))

    def list(self, folder: str = "") -> list[str]:
        return []

    @property
    def stages(self) -> list[str]:
        return [commit.message.removeprefix("heartbeat: ") for commit in self.commits]

    @property
    def beats(self) -> list[dict[str, Any]]:
        return [
            strict(commit.files["heartbeat.json"])
            for commit in self.commits
            if "heartbeat.json" in commit.files
        ]


class Clock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.naps = 1000.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def messages(hub: HubServer) -> list[str]:
    """What was committed since the repository was made: the stages of beats, the names of the rest."""
    return [commit.message.removeprefix("heartbeat: ") for commit in hub.commits(REPO)][1:]


class Held(Fault):
    """Holds the first request that it matches until `go_on` is set."""

    def __init__(self, match: str) -> None:
        self.go_on = threading.Event()
        super().__init__(match, times=1)

    @property
    def latency_s(self) -> float:
        assert self.go_on.wait(PATIENCE_S)
        return 0.0

    @latency_s.setter
    def latency_s(self, seconds: float) -> None: ...


def until(condition: Callable[[], Any]) -> None:
    """Wait for something another thread does; `time.sleep` is patched away."""
    pause, end = threading.Event(), time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.002)
