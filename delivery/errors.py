"""What a store says when it does not do as it is asked.

"Not found" is an answer. "Could not ask" is `Unavailable`.
"""


class StoreError(RuntimeError):
    """The store answered, and the answer was no: trying again later will not help by itself."""


class Unavailable(StoreError):
    """The store failed to answer properly: the same request may work later."""


class Unreachable(Unavailable):
    """The store could not be asked, or is too busy: worth waiting for."""

    def __init__(self, message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotFound(StoreError):
    """There is no such file."""


class Conflict(Unavailable):
    """Another commit landed first."""


class Superseded(StoreError):
    """A newer attempt of the same run is at work: this one may write nothing any more."""
