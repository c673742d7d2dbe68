"""Signs of life while a phase is quiet."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delivery.publisher import Publisher

PING_EVERY_S, STILL_S = 30.0, 900.0
JOIN_S = 10.0  # more than a ping takes; a counter that hangs longer finds pings stopped


class Pulse:
    """Pings while a phase is quiet, as long as its counter moves; a hang falls silent.

    It reads counters that cost nothing; it never calls torch, whose allocator locks a hung kernel can hold.
    """

    def __init__(self, publisher: "Publisher", every_s: float = PING_EVERY_S, still_s: float = STILL_S):
        self.publisher, self.every_s, self.still_s = publisher, every_s, still_s
        self._watched: list[tuple[str, Callable[[], float]]] = [("cpu_seconds", _cpu_seconds)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    @contextmanager
    def counting(self, name: str, counter: Callable[[], float]) -> Iterator[None]:
        self._watched.append((name, counter))
        try:
            yield
        finally:
            self._watched.pop()

    def _run(self) -> None:
        seen, moved_at = None, self.publisher.clock()
        while not self._stopping.wait(self.every_s):
            name, counter = self._watched[-1]
            try:
                value = counter()
            except OSError:  # a file vanished while it was counted: no movement seen
                continue
            if self._stopping.is_set():
                break
            now = self.publisher.clock()
            if (name, value) != seen:
                seen, moved_at = (name, value), now
            quiet = now - self.publisher.last_beat_at >= self.every_s
            if quiet and self.publisher.last_stage and now - moved_at < self.still_s:
                self.publisher.ping(**{name: value})


def _cpu_seconds() -> int:
    spent = os.times()
    return int(spent.user + spent.system + spent.children_user + spent.children_system)
