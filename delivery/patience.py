"""How long a store is asked: a hung commit is left behind, a busy Hub waited for, a refusal is not."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tenacity import RetryCallState, Retrying, retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from delivery.errors import StoreError, Superseded, Unavailable, Unreachable
from delivery.store import Check, Commit, Read, Store

log = logging.getLogger(__name__)

TRIES, PAUSE_S, LONGEST_PAUSE_S = 3, 5.0, 60.0
LONGEST_ASKED_PAUSE_S = 3600.0
# A commit that takes longer has hung; the last flush outlasts it, so that what waits behind it is still told.
COMMIT_LIMIT_S, SLOWEST_BYTES_PER_S = 100.0, 500_000


# For questions that a run cannot go on without: a decorator.
ask_again = retry(
    retry=retry_if_exception_type(Unavailable), stop=stop_after_attempt(3), wait=wait_fixed(2), reraise=True
)


class _LeftBehind(StoreError):
    """This try was given up as hung: it may change nothing any more."""


@dataclass(frozen=True)
class Patience:
    """`tries` that end in other errors than those `worth_waiting` for, and no try past the time `until`."""

    tries: int = TRIES
    worth_waiting: tuple[type[StoreError], ...] = ()
    until: float = float("inf")
    overtaken: Callable[[], bool] = lambda: False  # by a commit that is worth more


class Persistence:
    """Puts commits into a store with patience."""

    def __init__(
        self, store: Store, check: Check, clock: Callable[[], float], sleep: Callable[[float], None]
    ):
        self.store, self.check, self.clock, self.sleep = store, check, clock, sleep

    def put(self, commit: Commit, patience: Patience) -> None:
        """Commit; raises the last StoreError when patience has run out."""
        refusals = 0

        def is_over(state: RetryCallState) -> bool:
            nonlocal refusals
            error = _error_of(state)
            if isinstance(error, Superseded) or patience.overtaken():
                return True
            if self.clock() + state.upcoming_sleep > patience.until:
                return True
            refusals += not isinstance(error, patience.worth_waiting)
            return refusals >= patience.tries

        Retrying(
            retry=retry_if_exception_type(StoreError),
            stop=is_over,
            wait=_pause_s,
            sleep=self.sleep,
            before_sleep=lambda state: log.warning(
                "%s; next try in %.0f s", _error_of(state), state.upcoming_sleep
            ),
            reraise=True,
        )(self._try, commit, patience.until)

    def _try(self, commit: Commit, until: float) -> None:
        """Commit, on a thread of its own: one that hangs in the Hub's client is left behind."""
        outcome: Future[None] = Future()
        left_behind = threading.Event()

        def check(read: Read) -> None:
            self.check(read)
            # After what it is to be put on top of was read: whatever comes later stands in its way.
            if left_behind.is_set():
                raise _LeftBehind(commit.message)

        def put() -> None:
            try:
                self.store.put(commit, check)
            except Exception as error:  # noqa: BLE001 - handed over, to be raised below
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        limit_s = COMMIT_LIMIT_S + commit.size_bytes / SLOWEST_BYTES_PER_S
        limit_s = max(0.0, min(limit_s, until - self.clock()))
        threading.Thread(target=put, name="commit", daemon=True).start()
        try:
            outcome.result(limit_s)
        except TimeoutError:
            left_behind.set()
            raise Unreachable(f"{commit.message}: no answer within {limit_s:.0f} s") from None


def _error_of(state: RetryCallState) -> Any:
    return state.outcome.exception() if state.outcome else None


def _pause_s(state: RetryCallState) -> float:
    """What a busy Hub asks for, else 5 s, 10 s and so on."""
    error = _error_of(state)
    if isinstance(error, Unreachable) and error.retry_after_s is not None:
        return min(LONGEST_ASKED_PAUSE_S, max(1.0, error.retry_after_s))
    return min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (state.attempt_number - 1))
