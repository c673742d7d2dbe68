"""Where a run's files go: a Hub dataset repository, or a folder with the same layout.

"Not found" is an answer. "Could not ask" raises `Unavailable`. Paths are relative to the run's prefix.
"""

import errno
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 15.0, 120.0
BUSY_STATUS = frozenset({408, 425, 429, 502, 503, 504})
CONFLICT_STATUS = frozenset({409, 412})  # another commit was in the way
Content = bytes | Path


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


@dataclass(frozen=True)
class Commit:
    """One atomic change: contents by path, in the order a reader may see them, and paths to delete.

    A deleted path that ends in `/` is a folder.
    """

    message: str
    files: Mapping[str, Content] = field(default_factory=dict)
    delete: tuple[str, ...] = ()


class Store(Protocol):
    """What the worker asks of a place that outlives the machine."""

    location: str

    def open(self) -> None:
        """Prove read and write access, creating the place when it is missing; raises StoreError."""
        ...

    def exists(self, path: str) -> bool: ...

    def read(self, path: str) -> bytes:
        """Return a file's content; raises NotFound."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Return the paths of all files below `folder`, sorted; a missing folder is empty."""
        ...

    def put(self, commit: Commit) -> None: ...


class FolderStore:
    """The layout of the Hub store in a local folder."""

    def __init__(self, root: Path, prefix: str):
        self.folder = root.resolve() / prefix
        self.location = str(self.folder)

    def open(self) -> None:
        with _named_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass

    def exists(self, path: str) -> bool:
        with _named_os_errors(self.folder):
            return (self.folder / path).is_file()

    def read(self, path: str) -> bytes:
        if not self.exists(path):
            raise NotFound(f"{path} is not in {self.location}")
        with _named_os_errors(self.folder):
            return (self.folder / path).read_bytes()

    def list(self, folder: str = "") -> list[str]:
        with _named_os_errors(self.folder):
            found = [path for path in (self.folder / folder).rglob("*") if path.is_file()]
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def put(self, commit: Commit) -> None:
        """Write everything beside the target, then move file by file: no reader sees half a file."""
        with _named_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".incoming-") as incoming:
                for number, content in enumerate(commit.files.values()):
                    _write(content, Path(incoming) / str(number))
                for number, path in enumerate(commit.files):
                    target = self.folder / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (Path(incoming) / str(number)).replace(target)
            for path in commit.delete:
                _remove(self.folder / path)


class HubStore:
    """A dataset repository on the Hub; every request has a timeout."""

    def __init__(self, repo: str, prefix: str, token: str, endpoint: str = ""):
        self.repo, self.prefix, self.token = repo, PurePosixPath(prefix), token
        self.endpoint = endpoint
        self.location = f"{repo}/{prefix}"

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint or None, token=self.token or False, library_name="slm-worker")

    def open(self) -> None:
        set_hub_timeouts()
        from huggingface_hub.errors import RepositoryNotFoundError

        api = self._api()
        with _hub_errors(f"store {self.repo}"):
            try:
                api.repo_info(self.repo, repo_type="dataset")
            except RepositoryNotFoundError:
                log.info("store %s is not there or not visible: creating it, private", self.repo)
                api.create_repo(self.repo, repo_type="dataset", private=True, exist_ok=True)
            api.auth_check(self.repo, repo_type="dataset", write=True)

    def exists(self, path: str) -> bool:
        from huggingface_hub.hf_api import RepoFile

        with _hub_errors(path):
            found = self._api().get_paths_info(self.repo, self._full(path), repo_type="dataset")
            return any(isinstance(one, RepoFile) for one in found)

    def read(self, path: str) -> bytes:
        from huggingface_hub.errors import RemoteEntryNotFoundError

        with _hub_errors(path), tempfile.TemporaryDirectory() as scratch:
            try:
                got = self._api().hf_hub_download(
                    self.repo, self._full(path), repo_type="dataset", local_dir=scratch
                )
            except RemoteEntryNotFoundError as error:
                raise NotFound(f"{path} is not in {self.location}") from error
            return Path(got).read_bytes()

    def list(self, folder: str = "") -> list[str]:
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        with _hub_errors(folder or self.location):
            try:
                tree = self._api().list_repo_tree(
                    self.repo, self._full(folder), repo_type="dataset", recursive=True
                )
                paths = [PurePosixPath(one.path) for one in tree if isinstance(one, RepoFile)]
            except EntryNotFoundError:
                return []
        return sorted(path.relative_to(self.prefix).as_posix() for path in paths)

    def put(self, commit: Commit) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations = [CommitOperationAdd(self._full(path), content) for path, content in commit.files.items()]
        operations += [
            CommitOperationDelete(self._full(path), is_folder=path.endswith("/")) for path in commit.delete
        ]
        with _hub_errors(commit.message):
            self._api().create_commit(
                self.repo, operations, repo_type="dataset", commit_message=commit.message[:200]
            )

    def _full(self, path: str) -> str:
        return (self.prefix / path).as_posix()


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
def _hub_errors(what: str) -> Iterator[None]:
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
        raise StoreError(f"{what}: {_brief(error)}") from error
    except (
        httpx2.HTTPError,
        ConnectionError,
        TimeoutError,
        ValueError,
    ) as error:  # or an answer in no known form
        raise _store_error(what, error) from error


def _store_error(what: str, error: BaseException) -> StoreError:
    """Ours for one of the Hub client's."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else None
        message = f"{what}: the Hub answered {status} ({_brief(error)})"
        if status is None or status in BUSY_STATUS:
            return Unreachable(message, _retry_after(error.response))
        if status >= 500 or status in CONFLICT_STATUS:
            return Unavailable(message)
        return StoreError(
            f"{message}; check the repository's name and the token's rights (HF_REPO, HF_TOKEN)"
        )
    described = f"{type(error).__name__}: {_brief(error)}"
    if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError):
        return Unreachable(f"{what}: the Hub cannot be reached ({described})")
    return Unavailable(f"{what}: the Hub client failed ({described})")


def _retry_after(response: Any) -> float | None:
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if text.replace(".", "", 1).isdigit() else None


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@contextmanager
def _named_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        kind = Unavailable if error.errno in (errno.ENOSPC, errno.EIO, errno.EAGAIN) else StoreError
        raise kind(f"store folder {folder}: {error.strerror or error} (AUTOSLM_STORE_DIR)") from error


def _write(content: Content, target: Path) -> None:
    if isinstance(content, bytes):
        target.write_bytes(content)
    else:
        shutil.copyfile(content, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def folder_files(folder: Path, under: str) -> dict[str, Content]:
    """Return the files of a local folder by the paths they get below `under`."""
    return {
        f"{under}/{path.relative_to(folder).as_posix()}": path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def open_store(repo: str, store_dir: Path, prefix: str, token: str, endpoint: str = "") -> Store:
    """Return the Hub store, or the folder store when no repository is named; talks to nobody yet."""
    return HubStore(repo, prefix, token, endpoint) if repo else FolderStore(store_dir, prefix)
