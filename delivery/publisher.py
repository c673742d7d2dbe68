"""One thread owns everything that leaves the machine; nothing that trains ever waits for the network."""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tenacity import RetryCallState, Retrying, retry_if_exception_type

from accounting import strict_json
from delivery.store import Commit, Content, Store, StoreError, Unreachable

log = logging.getLogger(__name__)

THROTTLED_STAGES = frozenset({"sft_step", "rl_step"})
ORDINARY_TRIES, ORDINARY_PAUSE_S, LONGEST_PAUSE_S = 3, 5.0, 60.0
FLUSH_S = 120.0
PING_EVERY_S, STILL_S = 30.0, 900.0

Kind = Literal["throttled", "milestone", "best_effort", "required"]


@dataclass(frozen=True)
class Job:
    """One commit on its way to the store."""

    number: int
    kind: Kind
    commit: Commit
    outcome: Future[None] = field(default_factory=Future)


class Publisher:
    """Beats, artifacts and pings of one run, committed in the order they were created, one at a time."""

    def __init__(
        self,
        store: Store,
        header: Mapping[str, Any],
        heartbeat_file: Path,
        *,
        redact: Callable[[str], str] = str,
        min_interval_s: float = 60.0,
        deadline_s: float = 1800.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`header` (run_id, mode, seed, attempt) is part of every beat; seconds are wall-clock."""
        self.store, self.header, self.heartbeat_file, self.redact = (
            store,
            dict(header),
            heartbeat_file,
            redact,
        )
        self.min_interval_s, self.deadline_s = min_interval_s, deadline_s
        self.sleep, self.clock = sleep, clock
        self.last_stage, self.last_extras, self.last_beat_at = "", dict[str, Any](), clock()
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._in_flight: Job | None = None
        self._jobs = 0
        self._slot: tuple[int, float] = (0, float("-inf"))  # the beat that last claimed a commit, and when
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._pulse = Pulse(self)

    def start(self) -> None:
        """Begin to work off the queue, and to ping."""
        self._thread.start()
        self._pulse.start()

    # --- what the run calls ---

    def beat(self, stage: str, **extras: Any) -> None:
        """Write the local heartbeat, print its line, queue its commit when due; never raises, never waits."""
        with self._changed:
            self.last_stage, self.last_extras, self.last_beat_at = stage, extras, self.clock()
            self._beat(stage, extras, throttled=stage in THROTTLED_STAGES)

    def ping(self, **counter: Any) -> None:
        """Repeat the newest beat as a sign of life."""
        with self._changed:
            self._beat(self.last_stage, {**self.last_extras, "liveness": True, **counter}, throttled=True)

    def upload(self, what: str, files: Mapping[str, Content]) -> None:
        """Commit a required artifact and wait; raises StoreError when tries or deadline are used up."""
        with self._changed:
            job = self._enqueue("required", Commit(what, files))
        job.outcome.result()

    def offer(self, what: str, files: Mapping[str, Content]) -> None:
        """Queue a best-effort artifact: one try, a warning when it fails."""
        with self._changed:
            self._enqueue("best_effort", Commit(what, files))

    def counting(self, name: str, counter: Callable[[], float]) -> Any:
        """A context in which pings carry and watch `counter` instead of the process's CPU seconds."""
        return self._pulse.counting(name, counter)

    def stop_pings(self) -> None:
        """Return when no further ping can come."""
        self._pulse.stop()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until the queue is empty, bounded; says what was abandoned."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._queue and self._in_flight is None, timeout_s)
            left = [
                job.commit.message
                for job in ([self._in_flight] if self._in_flight else []) + list(self._queue)
            ]
        if not done:
            log.warning("uploads abandoned after %.0f s: %s", timeout_s, ", ".join(left))
        return done

    # --- under the lock ---

    def _beat(self, stage: str, extras: Mapping[str, Any], throttled: bool) -> None:
        payload = {"stage": stage, "ts": time.time(), **self.header, **extras}
        text = self.redact(strict_json(payload))
        self._write_locally(text)
        now = self.clock()
        if not throttled or now - self._slot[1] >= self.min_interval_s:
            if throttled:
                self._queue = deque(job for job in self._queue if job.kind != "throttled")
            job = self._enqueue(
                "throttled" if throttled else "milestone",
                Commit(f"heartbeat: {stage}", {"heartbeat.json": text.encode()}),
            )
            self._slot, previous = (job.number, now), self._slot
            job.outcome.add_done_callback(lambda outcome: self._give_back(job, previous, outcome))
        say(f"HEARTBEAT {text}")

    def _write_locally(self, text: str) -> None:
        part = self.heartbeat_file.with_suffix(".part")
        try:
            self.heartbeat_file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(self.heartbeat_file)
        except OSError as error:
            log.warning("heartbeat not written to %s: %s", self.heartbeat_file, error)

    def _enqueue(self, kind: Kind, commit: Commit) -> Job:
        self._jobs += 1
        job = Job(self._jobs, kind, commit)
        self._queue.append(job)
        self._changed.notify_all()
        return job

    def _give_back(self, job: Job, previous: tuple[int, float], outcome: Future[None]) -> None:
        with self._changed:
            if outcome.exception() is not None and self._slot[0] == job.number:
                self._slot = previous

    # --- the thread ---

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                job = self._in_flight = self._queue.popleft()
            try:
                self._put(job)
            except StoreError as error:
                self._give_up(job, error)
            except (OSError, ValueError) as error:  # a file that vanished or cannot be read
                self._give_up(job, StoreError(f"{job.commit.message}: {error}"))
            except Exception as error:  # the thread must outlive it: `upload` would wait for ever
                log.exception("upload of %s", job.commit.message)
                self._give_up(job, error)
            else:
                job.outcome.set_result(None)
            with self._changed:
                self._in_flight = None
                self._changed.notify_all()

    def _give_up(self, job: Job, error: Exception) -> None:
        if job.kind != "required":
            log.warning("not uploaded: %s", error)
        job.outcome.set_exception(error)

    def _put(self, job: Job) -> None:
        if job.kind in ("throttled", "best_effort"):
            self.store.put(job.commit)
            return
        last_try_by = self.clock() + self.deadline_s
        patience = Retrying(
            retry=retry_if_exception_type(StoreError),
            stop=lambda state: (
                _ordinary_tries_used(state) or self.clock() + state.upcoming_sleep > last_try_by
            ),
            wait=_pause_s,
            sleep=self.sleep,
            before_sleep=lambda state: log.warning(
                "upload of %s: %s; next try in %.0f s",
                job.commit.message,
                _error_of(state),
                state.upcoming_sleep,
            ),
            reraise=True,
        )
        patience(self.store.put, job.commit)


def say(line: str) -> None:
    """Print a protocol line; a reader that has gone away is no reason to lose the run."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        log.warning("stdout cannot be written: %s", error)


def _error_of(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _ordinary_tries_used(state: RetryCallState) -> bool:
    return not isinstance(_error_of(state), Unreachable) and state.attempt_number >= ORDINARY_TRIES


def _pause_s(state: RetryCallState) -> float:
    error = _error_of(state)
    if isinstance(error, Unreachable) and error.retry_after_s is not None:
        return max(1.0, error.retry_after_s)
    return min(LONGEST_PAUSE_S, ORDINARY_PAUSE_S * 2 ** (state.attempt_number - 1))


class Pulse:
    """Pings while a phase is quiet, as long as its counter moves; a hang falls silent.

    It reads counters that cost nothing; it never calls torch, whose allocator locks a hung kernel can hold.
    """

    def __init__(self, publisher: Publisher, every_s: float = PING_EVERY_S, still_s: float = STILL_S):
        self.publisher, self.every_s, self.still_s = publisher, every_s, still_s
        self._watched: list[tuple[str, Callable[[], float]]] = [("cpu_seconds", _cpu_seconds)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

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
            now = self.publisher.clock()
            if (name, value) != seen:
                seen, moved_at = (name, value), now
            quiet = now - self.publisher.last_beat_at >= self.every_s
            if quiet and self.publisher.last_stage and now - moved_at < self.still_s:
                self.publisher.ping(**{name: value})


def _cpu_seconds() -> int:
    spent = os.times()
    return int(spent.user + spent.system + spent.children_user + spent.children_system)
