"""A machine that is about to be taken away: signals, the worker's own clock, and leaving in time.

Signals are waited for on a thread (`sigwait`): a Python handler cannot run while the main thread is inside a
long call of a library. The main thread looks for a request wherever stopping is safe.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_CODE = 143
LAST_CALL_S, MARGIN_S = 5.0, 1.0
SHORTEST_WALL_S = 60.0  # launchers wait at least as long before they kill


class Preempted(BaseException):
    """The run stops here, to be resumed elsewhere: no failure, and no `except Exception` may eat it."""


def block_signals() -> None:
    """Leave the signals to `Preemption`; called before any other thread exists, as threads inherit it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class Preemption:
    """Takes requests to leave, and sees to it that the process is gone within its grace time."""

    def __init__(self, grace_s: float, announce: Callable[[str], None], leave: Callable[[float], Any]):
        """`announce(reason)` tells the world; `leave(seconds)` gives uploads that long, then cleans up."""
        self.grace_s, self.announce, self.leave = grace_s, announce, leave
        self.reason = ""
        self._looks = False  # whether the main thread looks for a request
        self._deadline = float("inf")
        self._stopped = threading.Event()
        self._clock: threading.Timer | None = None

    def watch(self, wall_s: float | None) -> None:
        """Begin to wait for signals, when they are blocked, and for `wall_s` seconds to pass."""
        # In a host that handles signals itself (tests, a notebook) they stay the host's.
        if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            threading.Thread(target=self._wait_for_signals, name="signals", daemon=True).start()
        if wall_s is not None:
            in_time_s = max(0.0, max(SHORTEST_WALL_S, wall_s) - self.grace_s)
            self._clock = threading.Timer(in_time_s, self.request, ["wall clock"])
            self._clock.daemon = True
            self._clock.start()

    def close(self) -> None:
        """The run has ended: its clock no longer matters."""
        if self._clock is not None:
            self._clock.cancel()

    def request(self, reason: str) -> None:
        """Ask the run to stop; a second request ends the process at once."""
        if self.reason:
            self._exit(0.0)
        self.reason, self._deadline = reason, time.monotonic() + self.grace_s
        try:
            self.announce(reason)
        finally:
            threading.Thread(target=self._see_off, name="grace", daemon=True).start()

    def check(self) -> None:
        """Raise Preempted once the run has been asked to stop: called where that loses nothing."""
        if self.reason:
            self._stopped.set()
            raise Preempted(f"stopped by {self.reason}")

    def left_s(self) -> float:
        """Seconds until the process is ended, with a margin."""
        return self._deadline - MARGIN_S - time.monotonic()

    @contextmanager
    def can_stop(self) -> Iterator[None]:
        """A context in which the main thread looks for a request, and then leaves by itself."""
        self._looks = True
        try:
            yield
        finally:
            self._looks = False

    def _wait_for_signals(self) -> None:
        while True:
            self.request(signal.Signals(signal.sigwait(SIGNALS)).name)

    def _see_off(self) -> None:
        """End the process where the main thread does not: no safe point in time, or nothing to stop at."""
        if self._looks:
            last_call_s = min(LAST_CALL_S, self.grace_s / 2)
            self._stopped.wait(max(0.0, self.left_s() + MARGIN_S - last_call_s))
        if self._stopped.is_set():
            time.sleep(max(0.0, self.left_s()))
            self._exit(0.0)
        log.warning("preempted where nothing can be saved: leaving")
        self._exit(self.left_s())

    def _exit(self, upload_s: float) -> NoReturn:
        try:
            self.leave(max(0.0, upload_s))
        finally:
            os._exit(EXIT_CODE)


@contextmanager
def interruptible(model: Any, check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before every forward pass, which is before every token of a generation."""
    hook = model.register_forward_pre_hook(lambda *_: check())
    try:
        yield
    finally:
        hook.remove()
