"""One thread owns everything that leaves the machine; nothing that trains ever waits for the network."""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from accounting import strict_json
from delivery.budget import Budget
from delivery.errors import NotFound, StoreError, Superseded, Unavailable, Unreachable
from delivery.patience import Patience, Persistence, ask_again
from delivery.progress import UPLOADING
from delivery.pulse import Pulse
from delivery.store import Commit, Content, Read, Store
from delivery.terminal import say

log = logging.getLogger(__name__)

HEARTBEAT = "heartbeat.json"
FLUSH_S, URGENT_PAUSE_S, UPLOAD_BYTES_PER_S = 120.0, 1.0, 5_000_000

Kind = Literal["throttled", "milestone", "urgent", "required", "checkpoint"]
KINDS: Mapping[str, Kind] = {"sft_step": "throttled", "rl_step": "throttled", "preempting": "urgent"}
Beat = tuple[str, Mapping[str, Any]]  # stage and extras


@dataclass(frozen=True)
class Parcel:
    """One commit on its way to the store; `then` is a beat that its landing makes true, and goes with it."""

    number: int
    kind: Kind
    what: str
    make: Callable[[], Commit]
    created: float
    then: Beat | None = None
    outcome: Future[None] = field(default_factory=Future)


class Publisher:
    """Beats, artifacts and checkpoints of one run, committed in order of creation, one at a time."""

    def __init__(
        self,
        store: Store,
        header: Mapping[str, Any],
        heartbeat_file: Path,
        *,
        told: Callable[[str, Mapping[str, Any]], None] = lambda stage, extras: None,
        redact: Callable[[str], str] = str,
        min_interval_s: float = 60.0,
        deadline_s: float = 1800.0,
        sleep: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`header` (run_id, mode, seed, attempt) is in every beat; `told` is called with each."""
        self.store, self.header, self.heartbeat_file = store, dict(header), heartbeat_file
        self.told, self.redact, self.clock = told, redact, clock
        self.deadline_s = deadline_s
        self.last_stage, self.last_extras, self.last_beat_at = "", dict[str, Any](), clock()
        self._budget = Budget(min_interval_s)
        self._changed = threading.Condition()
        self._queue: deque[Parcel] = deque()
        self._checkpoint: Parcel | None = None
        self._in_flight: Parcel | None = None
        self._count = 0
        self._hurry = False  # the budget no longer holds the waiting checkpoint back
        self._known: tuple[Any, ...] | None = None  # attempts whose beat in the store is no newer one's
        self._superseded: Superseded | None = None
        self._persistence = Persistence(store, self._check_owner, clock, sleep or self._pause)
        self._pulse = Pulse(self)

    def start(self) -> None:
        """Begin to work off the queue, and to ping."""
        threading.Thread(target=self._work, name="publisher", daemon=True).start()
        self._pulse.start()

    # --- what the run calls ---

    @ask_again
    def note_owner(self) -> None:
        """Remember whose beat is in the store: whoever's comes later is a newer attempt's."""
        self._check_owner(self.store.read)

    def beat(self, stage: str, files: Mapping[str, Content] | None = None, **extras: Any) -> None:
        """Write the local heartbeat, print its line, queue its commit when due; never raises, never waits.

        `files` go to the store in the same commit.
        """
        with self._changed:
            self._remember(stage, extras)
            self._beat(KINDS.get(stage, "milestone"), stage, extras, files or {})

    def ping(self, **counter: Any) -> None:
        """Repeat the newest beat as a sign of life."""
        with self._changed:
            self._beat("throttled", self.last_stage, {**self.last_extras, "liveness": True, **counter}, {})

    def upload(
        self, what: str, files: Mapping[str, Content], stage: str | None = None, **extras: Any
    ) -> None:
        """Commit a required artifact, with the beat that says so, and wait; raises StoreError."""
        with self._changed:
            self.told(UPLOADING, {})
            then = (stage, extras) if stage else None
            parcel = self._enqueue("required", what, lambda: Commit(what, files), then)
        patience_s = self._required_s(parcel)
        try:
            parcel.outcome.result(patience_s)
        except TimeoutError:
            if parcel.outcome.cancel():  # or else it would land when everybody thinks that it has not
                raise Unreachable(f"{what}: not uploaded within {patience_s:.0f} s") from None
            parcel.outcome.result()  # its last try ends at the deadline too

    def stream(self, step: int, make: Callable[[], Commit]) -> Future[None]:
        """Queue a checkpoint, in place of one that still waits: the future of that one is cancelled."""
        with self._changed:
            if self._checkpoint is not None:
                self._checkpoint.outcome.cancel()
            then = ("checkpoint_uploaded", {"step": step})
            parcel = self._new("checkpoint", f"checkpoint-{step}", make, then)
            self._checkpoint = None if parcel.outcome.done() else parcel
        return parcel.outcome

    def check(self) -> None:
        """Raise Superseded when a newer attempt has been found at work."""
        if self._superseded is not None:
            raise self._superseded

    def counting(self, name: str, counter: Callable[[], float]) -> Any:
        """A context in which pings carry and watch `counter` instead of the process's CPU seconds."""
        return self._pulse.counting(name, counter)

    def stop_pings(self) -> None:
        """Return when no further ping can come."""
        self._pulse.stop()

    def hurry(self) -> None:
        """Let the waiting checkpoint go, whatever the budget says."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until everything has left, bounded; says what was abandoned."""
        self.hurry()
        with self._changed:
            done = self._changed.wait_for(lambda: not self._left(), timeout_s)
            left = self._left()
        if not done:
            log.warning("uploads abandoned after %.0f s: %s", timeout_s, ", ".join(one.what for one in left))
        return done

    # --- under the lock ---

    def _remember(self, stage: str, extras: Mapping[str, Any]) -> None:
        self.last_stage, self.last_extras, self.last_beat_at = stage, dict(extras), self.clock()

    def _payload(self, stage: str, extras: Mapping[str, Any]) -> str:
        return self.redact(strict_json({"stage": stage, "ts": time.time(), **self.header, **extras}))

    def _beat(self, kind: Kind, stage: str, extras: Mapping[str, Any], files: Mapping[str, Content]) -> None:
        text = self._payload(stage, extras)
        self._write_locally(text)
        if kind != "throttled" or self._is_due():
            if kind != "milestone":  # what waits is older, and would land later or for nothing
                self._drop("throttled")
            commit = Commit(f"heartbeat: {stage}", {**files, HEARTBEAT: text.encode()})
            self._enqueue(kind, commit.message, lambda: commit)
        self._tell(stage, extras, text)

    def _tell(self, stage: str, extras: Mapping[str, Any], text: str) -> None:
        self.told(stage, extras)
        say(f"HEARTBEAT {text}")

    def _is_due(self) -> bool:
        """Whether a throttled beat may be committed: a waiting checkpoint brings one with it."""
        is_free = self._checkpoint is None or self._budget.floor_s == 0
        return is_free and self._budget.beat_is_due(self.clock())

    def _drop(self, kind: Kind) -> None:
        for parcel in self._queue:
            if parcel.kind == kind:
                parcel.outcome.cancel()
        self._queue = deque(parcel for parcel in self._queue if not parcel.outcome.cancelled())

    def _write_locally(self, text: str) -> None:
        part = self.heartbeat_file.with_suffix(".part")
        try:
            self.heartbeat_file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(self.heartbeat_file)
        except OSError as error:
            log.warning("heartbeat not written to %s: %s", self.heartbeat_file, error)

    def _new(self, kind: Kind, what: str, make: Callable[[], Commit], then: Beat | None = None) -> Parcel:
        self._count += 1
        parcel = Parcel(self._count, kind, what, make, self.clock(), then)
        if self._superseded is not None:
            parcel.outcome.set_exception(self._superseded)
        self._changed.notify_all()
        return parcel

    def _enqueue(self, kind: Kind, what: str, make: Callable[[], Commit], then: Beat | None = None) -> Parcel:
        parcel = self._new(kind, what, make, then)
        self._claim(parcel)
        if not parcel.outcome.done():
            (self._queue.appendleft if kind == "urgent" else self._queue.append)(parcel)
        return parcel

    def _claim(self, parcel: Parcel) -> None:
        self._budget.claim(parcel.number, self.clock(), can_wait=parcel.kind in ("throttled", "checkpoint"))
        parcel.outcome.add_done_callback(lambda outcome: self._account(parcel, outcome))

    def _account(self, parcel: Parcel, outcome: Future[None]) -> None:
        with self._changed:
            if outcome.cancelled() or outcome.exception() is not None:
                self._budget.give_back(parcel.number)
            else:
                self._budget.landed(parcel.number, self.clock())

    def _left(self) -> list[Parcel]:
        waiting = [self._in_flight, self._checkpoint, *self._queue]
        return [one for one in waiting if one is not None and not one.outcome.cancelled()]

    def _due_checkpoint(self) -> Parcel | None:
        return self._checkpoint if self._hurry or self._budget.has_room(self.clock()) else None

    def _next(self) -> Parcel | None:
        held, first = self._due_checkpoint(), self._queue[0] if self._queue else None
        if held and (first is None or (first.kind != "urgent" and held.number < first.number)):
            self._checkpoint = None
            self._claim(held)
            return held
        return self._queue.popleft() if first else None

    # --- the thread ---

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._due_checkpoint():
                    # A checkpoint that the budget holds back becomes due without anybody's doing.
                    self._changed.wait(1.0 if self._checkpoint else None)
            self.work_off()

    def work_off(self) -> bool:
        """Put the next thing that may go into the store; False when there is none."""
        with self._changed:
            parcel = self._in_flight = self._next()
        if parcel is None:
            return False
        if parcel.outcome.set_running_or_notify_cancel():
            self._settle(parcel)
        with self._changed:
            self._in_flight = None
            self._changed.notify_all()
        return True

    def _pause(self, seconds: float) -> None:
        """Sleep between two tries; one that keeps an urgent beat waiting is made again soon."""
        with self._changed:
            is_urgent = self._changed.wait_for(self._is_urgent, seconds)
        if is_urgent:
            time.sleep(min(seconds, URGENT_PAUSE_S))

    def _is_urgent(self) -> bool:
        return any(one.kind == "urgent" for one in self._left())

    def _settle(self, parcel: Parcel) -> None:
        """Put a parcel into the store; whatever happens, its outcome is set: `upload` waits for it."""
        try:
            self._put(parcel)
        except Superseded as error:
            self._stand_down(error)
            parcel.outcome.set_exception(error)
        except StoreError as error:
            if parcel.kind != "required":
                log.warning("not uploaded: %s", error)
            parcel.outcome.set_exception(error)
        except Exception as error:  # a file that vanished, or a defect
            log.exception("upload of %s", parcel.what)
            parcel.outcome.set_exception(StoreError(f"{parcel.what}: {type(error).__name__}: {error}"))
        else:
            parcel.outcome.set_result(None)

    def _stand_down(self, error: Superseded) -> None:
        log.error("%s", error)
        with self._changed:
            self._superseded = error
            waiting = [one for one in self._left() if one is not self._in_flight]
            self._queue.clear()
            self._checkpoint = None
        for one in waiting:
            if one.outcome.set_running_or_notify_cancel():
                one.outcome.set_exception(error)

    def _put(self, parcel: Parcel) -> None:
        text = self._payload(*parcel.then) if parcel.then else ""  # before `make`, which may take its time
        commit = parcel.make()
        if text:
            commit = replace(commit, files={**commit.files, HEARTBEAT: text.encode()})
        self._persistence.put(commit, self._patience(parcel))
        if HEARTBEAT in commit.files:
            self._known = (None, self.header["attempt"])
        if parcel.then:
            with self._changed:
                if parcel.then[0] == "done":
                    self._drop("urgent")  # who asked the run to stop came too late
                self._remember(*parcel.then)
                self._write_locally(text)
                self._tell(*parcel.then, text)

    def _patience(self, parcel: Parcel) -> Patience:
        if parcel.kind == "throttled":
            return Patience(tries=1)
        if parcel.kind == "checkpoint":
            return Patience(overtaken=self._is_overtaken)
        if parcel.kind == "required":
            return Patience(worth_waiting=(Unreachable,), until=parcel.created + self._required_s(parcel))
        return Patience(worth_waiting=(Unavailable,))

    def _required_s(self, parcel: Parcel) -> float:
        """Seconds that a required upload may keep trying: merged weights take longer than a sentinel."""
        return self.deadline_s + parcel.make().size_bytes / UPLOAD_BYTES_PER_S

    def _is_overtaken(self) -> bool:
        """Whether a checkpoint that failed once holds up what is worth more: a newer one, a milestone."""
        return self._checkpoint is not None or any(one.kind != "throttled" for one in self._queue)

    def _check_owner(self, read: Read) -> None:
        """Raise Superseded when somebody's beat has come into the store since we first looked or beat."""
        try:
            owner = json.loads(read(HEARTBEAT)).get("attempt")
        except (NotFound, ValueError, AttributeError):
            owner = None
        if self._known is None:
            self._known = (None, self.header["attempt"], owner)
        if owner not in self._known:
            raise Superseded(f"attempt {owner} has taken over {self.store.location}: this one stops")
