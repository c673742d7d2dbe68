"""Where a run's files go: a Hub dataset repository, or a folder with the same layout.

Paths are relative to the run's prefix.
"""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random

from delivery.errors import Conflict, NotFound, StoreError, Unavailable
from delivery.hub_client import hub_errors, set_hub_timeouts

log = logging.getLogger(__name__)

CONFLICT_TRIES = 10
PASSING_TROUBLES = frozenset(  # of a disk or a network file system, which may have ended by the next try
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE}
)
Content = bytes | Path
Read = Callable[[str], bytes]
Check = Callable[[Read], None]


@dataclass(frozen=True)
class Commit:
    """One atomic change: contents by path, in the order a reader may see them, and paths to delete.

    A deleted path that ends in `/` is a folder; one that is not there is no error.
    """

    message: str
    files: Mapping[str, Content] = field(default_factory=dict)
    delete: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all contents."""
        contents = self.files.values()
        return sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in contents)


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

    def fetch(self, path: str, target: Path) -> None:
        """Copy a file to a local path; raises NotFound."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Return the paths of all files below `folder`, sorted; a missing folder is empty."""
        ...

    def put(self, commit: Commit, check: Check | None = None) -> None:
        """Commit on top of a state that `check`, given a reader of it, does not raise about."""
        ...


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
            for abandoned in self.folder.glob(".incoming-*"):  # by a worker that was killed
                shutil.rmtree(abandoned, ignore_errors=True)

    def exists(self, path: str) -> bool:
        with _named_os_errors(self.folder):
            return (self.folder / path).is_file()

    def read(self, path: str) -> bytes:
        with self._reading(path):
            return (self.folder / path).read_bytes()

    def fetch(self, path: str, target: Path) -> None:
        with self._reading(path):
            shutil.copyfile(self.folder / path, target)

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        if not self.exists(path):
            raise NotFound(f"{path} is not in {self.location}")
        try:
            with _named_os_errors(self.folder):
                yield
        except FileNotFoundError as error:  # deleted since, by a newer attempt
            raise NotFound(f"{path} is no longer in {self.location}") from error

    def list(self, folder: str = "") -> list[str]:
        try:
            with _named_os_errors(self.folder):
                found = [path for path in (self.folder / folder).rglob("*") if path.is_file()]
        except FileNotFoundError as error:
            raise Unavailable(f"{self.location} changed while it was listed") from error
        paths = sorted(path.relative_to(self.folder).as_posix() for path in found)
        return [path for path in paths if not path.startswith(".")]

    def put(self, commit: Commit, check: Check | None = None) -> None:
        """Write everything beside the target, then move file by file: no reader sees half a file."""
        with _named_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".incoming-") as incoming:
                for number, content in enumerate(commit.files.values()):
                    _write(content, Path(incoming) / str(number))
                with _locked(self.folder):
                    if check is not None:
                        check(self.read)
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
        with hub_errors(f"store {self.repo}"):
            try:
                api.repo_info(self.repo, repo_type="dataset")
            except RepositoryNotFoundError:
                log.info("store %s is not there or not visible: creating it, private", self.repo)
                api.create_repo(self.repo, repo_type="dataset", private=True, exist_ok=True)
            api.auth_check(self.repo, repo_type="dataset", write=True)

    def exists(self, path: str) -> bool:
        from huggingface_hub.hf_api import RepoFile

        with hub_errors(path):
            found = self._api().get_paths_info(self.repo, self._full(path), repo_type="dataset")
            return any(isinstance(one, RepoFile) for one in found)

    def read(self, path: str) -> bytes:
        return self._read_at(path, "main")

    def _read_at(self, path: str, revision: str) -> bytes:
        """Read without the client's download, which needs a disk: one that is full must not stop commits."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import RemoteEntryNotFoundError
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(
            self.repo,
            self._full(path),
            repo_type="dataset",
            revision=revision,
            endpoint=self.endpoint or None,
        )
        with hub_errors(path):
            answer = get_session().get(url, headers=build_hf_headers(token=self.token or False))
            try:
                hf_raise_for_status(answer)
            except RemoteEntryNotFoundError as error:
                raise NotFound(f"{path} is not in {self.location}") from error
            if not any("X-Repo-Commit" in one.headers for one in (answer, *answer.history)):
                raise Unavailable(f"{path}: what answered is not the Hub")
            return bytes(answer.content)

    def fetch(self, path: str, target: Path) -> None:
        from huggingface_hub.errors import RemoteEntryNotFoundError

        # Beside the target: a move inside one file system costs nothing.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch, hub_errors(path):
            try:
                got = self._api().hf_hub_download(
                    self.repo, self._full(path), repo_type="dataset", local_dir=scratch
                )
            except RemoteEntryNotFoundError as error:
                raise NotFound(f"{path} is not in {self.location}") from error
            Path(got).replace(target)

    def list(self, folder: str = "") -> list[str]:
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        with hub_errors(folder or self.location):
            try:
                tree = self._api().list_repo_tree(
                    self.repo, self._full(folder), repo_type="dataset", recursive=True
                )
                paths = [PurePosixPath(one.path) for one in tree if isinstance(one, RepoFile)]
            except EntryNotFoundError:
                return []
        return sorted(path.relative_to(self.prefix).as_posix() for path in paths)

    @retry(
        retry=retry_if_exception_type(Conflict),
        stop=stop_after_attempt(CONFLICT_TRIES),
        wait=wait_random(0.25, 0.75),
        reraise=True,
    )
    def put(self, commit: Commit, check: Check | None = None) -> None:
        """Commit only on top of the very state that was checked; what moved in between is checked again.

        A commit that hung and was given up can therefore never land after a later one. Of a commit whose
        answer was lost the client finds every file unchanged, and makes no second one.
        """
        additions = self._additions(commit)  # a file that has gone is no trouble with the Hub
        with hub_errors(commit.message):
            self._commit(commit, additions, check)

    def _additions(self, commit: Commit) -> tuple[Any, ...]:
        from huggingface_hub import CommitOperationAdd

        return tuple(CommitOperationAdd(self._full(path), content) for path, content in commit.files.items())

    def _commit(self, commit: Commit, additions: tuple[Any, ...], check: Check | None) -> None:
        from huggingface_hub import CommitOperationDelete

        api = self._api()
        head = api.repo_info(self.repo, repo_type="dataset").sha
        if check is not None:
            check(lambda path: self._read_at(path, head))
        doomed = {self._full(path): path.endswith("/") for path in commit.delete}
        if doomed:
            found = api.get_paths_info(self.repo, list(doomed), repo_type="dataset", revision=head)
            doomed = {one.path: doomed[one.path] for one in found}
        deletions = [CommitOperationDelete(path, is_folder) for path, is_folder in doomed.items()]
        api.create_commit(
            self.repo,
            [*additions, *deletions],
            repo_type="dataset",
            commit_message=commit.message[:200],
            parent_commit=head,
        )

    def _full(self, path: str) -> str:
        return (self.prefix / path).as_posix()


@contextmanager
def _named_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        kind = Unavailable if error.errno in PASSING_TROUBLES else StoreError
        raise kind(f"store folder {folder}: {error.strerror or error} (AUTOSLM_STORE_DIR)") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One worker at a time, so that nothing comes between a check and the moves that follow it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
