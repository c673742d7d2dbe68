"""How the Hub's client waits and fails: timeouts it lacks, and its exceptions told apart."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from accounting import in_brief
from delivery.errors import Conflict, StoreError, Unavailable, Unreachable

CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 15.0, 120.0
BUSY_STATUS = frozenset({408, 425, 429, 502, 503, 504})
CONFLICT_STATUS = frozenset({409, 412})  # another commit was in the way


def set_hub_timeouts() -> None:
    """Give the Hub client timeouts: its own default is to wait for ever."""
    from huggingface_hub.utils import _http

    # Setting a factory closes the client that the publisher's thread may be using.
    if _http._GLOBAL_CLIENT_FACTORY is not _hub_client:
        _http.set_client_factory(_hub_client)


def _hub_client() -> Any:
    import httpx2
    from huggingface_hub.utils._http import hf_request_event_hook

    timeout = httpx2.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)

    def limit(request: Any) -> None:  # several calls of the library ask for no timeout explicitly
        asked = request.extensions["timeout"]
        request.extensions["timeout"] = {
            phase: seconds if asked[phase] is None else asked[phase]
            for phase, seconds in timeout.as_dict().items()
        }

    return httpx2.Client(
        event_hooks={"request": [hf_request_event_hook, limit]}, follow_redirects=True, timeout=timeout
    )


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn the Hub client's exceptions into ours, telling "could not ask" from "no"."""
    import httpx2
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except StoreError:
        raise
    except (LocalEntryNotFoundError, RuntimeError) as error:
        raise _store_error(what, error.__cause__ or error) from error  # both are wrapped around the cause
    except HFValidationError as error:
        raise StoreError(f"{what}: {in_brief(error)}") from error
    except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise _store_error(what, error) from error
    except (ValueError, KeyError, TypeError) as error:  # an answer in no known form
        raise _store_error(what, error) from error
    except OSError as error:
        if error.errno is not None:  # of this machine, not of the Hub's
            raise
        raise _store_error(what, error) from error  # a download that is not as long as it should be


def _store_error(what: str, error: BaseException) -> StoreError:
    """Ours for one of the Hub client's."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else None
        message = f"{what}: the Hub answered {status} ({in_brief(error)})"
        if status is None or status in BUSY_STATUS:
            return Unreachable(message, retry_after_s(error.response))
        if status in CONFLICT_STATUS:
            return Conflict(message)
        if status >= 500:
            return Unavailable(message)
        return StoreError(
            f"{message}; check the repository's name and the token's rights (HF_REPO, HF_TOKEN)"
        )
    described = f"{type(error).__name__}: {in_brief(error)}"
    if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError):
        return Unreachable(f"{what}: the Hub cannot be reached ({described})")
    return Unavailable(f"{what}: the Hub client failed ({described})")


def retry_after_s(response: Any) -> float | None:
    """Seconds that the Hub asks to wait: a number, a date by its own clock, or the end of a rate limit."""
    from huggingface_hub.utils import parse_ratelimit_headers

    if response is None:
        return None
    text = response.headers.get("Retry-After", "")
    try:
        return float(text)
    except ValueError:
        pass
    try:
        then, now = (parsedate_to_datetime(one) for one in (text, response.headers.get("Date", "")))
        return (then - now).total_seconds()
    except (ValueError, TypeError):
        pass
    limit = parse_ratelimit_headers(response.headers)
    return limit.reset_in_seconds if limit is not None and limit.remaining == 0 else None


def export_token(env: MutableMapping[str, str], token: str) -> None:
    """Let plain library downloads see the token: they do not read HUGGINGFACE_TOKEN."""
    if token:
        env["HF_TOKEN"] = token
