"""A machine that is about to be taken away: signals, the worker's own clock, and leaving in time.

A Python handler cannot run while the main thread is inside a long call of a library, so a thread is told of
signals through a socket. The main thread looks for a request wherever stopping is safe.
"""

import logging
import os
import signal
import socket
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


class Signals:
    """The process's termination signals, written to a socket the moment they come.

    They are not blocked: the children that an environment starts would inherit that, and outlive `terminate`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        os.register_at_fork(after_in_child=self._leave_to_child)

    def take(self) -> None:
        """Have them, or have them back from a library that took them; called on the main thread."""
        for one in SIGNALS:
            signal.signal(one, _nothing)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def wait(self) -> str:
        """Return the name of the next one."""
        while True:
            number = self._reader.recv(1)[0]
            if number in SIGNALS:
                return signal.Signals(number).name

    def _leave_to_child(self) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


def _nothing(number: int, frame: Any) -> None:
    """The socket has been written to already."""


class Preemption:
    """Takes requests to leave, and sees to it that the process is gone within its grace time."""

    def __init__(
        self,
        grace_s: float,
        announce: Callable[[str], None],
        leave: Callable[[float], Any],
        signals: Signals | None,
    ):
        """`announce(reason)` tells the world; `leave(seconds)` gives uploads that long, then cleans up.

        `signals` are None in a host that handles them itself, such as a test.
        """
        self.grace_s, self.announce, self.leave, self.signals = grace_s, announce, leave, signals
        self._first = threading.Lock()
        self.reason = ""
        self._looks = False  # whether the main thread looks for a request
        self._deadline = float("inf")
        self._stopped = threading.Event()
        self.is_finished = False
        self._clock: threading.Timer | None = None

    def watch(self, wall_s: float | None) -> None:
        """Begin to wait for signals, and for `wall_s` seconds to pass."""
        if self.signals is not None:
            self.take_signals()
            threading.Thread(
                target=self._wait_for_signals, args=(self.signals,), name="signals", daemon=True
            ).start()
        if wall_s is not None:
            wall_s = min(max(SHORTEST_WALL_S, wall_s), threading.TIMEOUT_MAX)
            # With a grace as long as that a run would stop when it begins, however often it is started.
            in_time_s = wall_s - min(self.grace_s, wall_s / 2)
            self._clock = threading.Timer(in_time_s, self.request, ["wall clock"])
            self._clock.daemon = True
            self._clock.start()

    def take_signals(self) -> None:
        """Have the signals back: verifiers keeps SIGTERM for itself once an environment is built."""
        if self.signals is not None:
            self.signals.take()

    def close(self) -> None:
        """The run has ended: its clock no longer matters."""
        if self._clock is not None:
            self._clock.cancel()

    def finished(self) -> None:
        """All is in the store: whoever asks the run to stop comes too late."""
        self.is_finished = True
        self.close()

    def request(self, reason: str) -> None:
        """Ask the run to stop, unless it was asked before or has finished."""
        if self.is_finished or not self._first.acquire(blocking=False):
            return
        self.reason, self._deadline = reason, time.monotonic() + self.grace_s
        last = threading.Timer(self.grace_s, self._end)  # whatever hangs: a pipe that nobody reads, a disk
        last.daemon = True
        last.start()
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

    def _wait_for_signals(self, signals: Signals) -> None:
        """The first signal is a request, the second ends the process at once."""
        self.request(signals.wait())
        signals.wait()
        self._exit(0.0)

    def _see_off(self) -> None:
        """End the process where the main thread does not: no safe point in time, or nothing to stop at."""
        if self._looks:
            last_call_s = LAST_CALL_S if self.grace_s > LAST_CALL_S else self.grace_s / 2
            self._stopped.wait(max(0.0, self.left_s() + MARGIN_S - last_call_s))
        if self._stopped.is_set():
            time.sleep(max(0.0, self.left_s()))
            self._exit(0.0)
        log.warning("preempted where nothing can be saved: leaving")
        self._exit(self.left_s())

    def _exit(self, upload_s: float) -> NoReturn:
        until = time.monotonic() + upload_s
        try:
            self.leave(max(0.0, upload_s))
            if self.is_finished:  # meanwhile: it leaves by itself
                time.sleep(max(0.0, until - time.monotonic()))
        finally:
            self._end()

    def _end(self) -> NoReturn:
        os._exit(0 if self.is_finished else EXIT_CODE)
