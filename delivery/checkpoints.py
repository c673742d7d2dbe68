"""Checkpoints in the store: staged when saved, one commit each, verified before a run goes on from one.

A step lies in `checkpoint/checkpoint-<step>/` and counts only with its manifest, the last file of its commit.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from accounting import strict_json
from delivery.errors import NotFound, Superseded
from delivery.patience import ask_again
from delivery.publisher import Publisher
from delivery.store import Commit, Content

log = logging.getLogger(__name__)

FOLDER, MANIFEST = "checkpoint", "manifest.json"
STEP_FILE = re.compile(rf"{FOLDER}/checkpoint-([1-9][0-9]*)/.+")


class AnotherJob(ValueError):
    """The store holds checkpoints of a job that is not this one."""


@dataclass(frozen=True)
class File:
    """Size in bytes and SHA-256 of a checkpoint's file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is: of which job, by which attempt, and what all attempts had done until then."""

    step: int
    attempt: str
    job: Mapping[str, Any]
    model_commit: str | None
    totals: Mapping[str, Any]
    files: Mapping[str, File] = field(default_factory=dict)

    @property
    def spec_hash(self) -> str:
        return hashlib.sha256(strict_json(dict(sorted(self.job.items()))).encode()).hexdigest()

    def to_json(self) -> str:
        """Strict JSON, indented."""
        return strict_json({**asdict(self), "spec_hash": self.spec_hash}, indent=2)

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Parse; raises ValueError when it is no manifest."""
        try:
            manifest = MANIFESTS.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"not a checkpoint's manifest: {first['loc']}: {first['msg']}") from error
        if not manifest.files or not all(map(_is_plain, manifest.files)):
            raise ValueError(f"a manifest of no files, or of files outside: {[*manifest.files][:9]}")
        return manifest

    def check(self, job: Mapping[str, Any]) -> None:
        """Raise AnotherJob unless the checkpoint was made by the same job."""
        plain = json.loads(strict_json(dict(job)))
        for name in sorted({*plain, *self.job}):
            if plain.get(name) != self.job.get(name):
                raise AnotherJob(
                    f"checkpoint-{self.step} in the store is of another job: {name} was"
                    f" {self.job.get(name)!r}, now it is {plain.get(name)!r}; use another RUN_ID, or delete"
                    f" {FOLDER}/"
                )


MANIFESTS = TypeAdapter(Manifest)


def _is_plain(name: str) -> bool:
    """Whether a path stays inside the folder it is taken from, and is spelled in the one way there is."""
    path = PurePosixPath(name)
    return (
        name == path.as_posix()
        and name != "."
        and ".." not in path.parts
        and not path.root
        and "\0" not in name
    )


class Checkpoints:
    """The checkpoints of one run, in its store and on their way there."""

    def __init__(self, publisher: Publisher, staging: Path):
        """`staging` is a folder on the file system of the trainer's output."""
        self.publisher, self.store, self.redact = publisher, publisher.store, publisher.redact
        self.staging = staging
        self._complete: set[int] = set()
        self._there: set[int] = set()
        self._staged = 0

    # --- going on ---

    @ask_again
    def find(self) -> list[Manifest]:
        """Return the manifests of complete steps, newest first; Unavailable when it cannot be asked."""
        paths = self.store.list(FOLDER)
        self._there = {int(match[1]) for match in map(STEP_FILE.fullmatch, paths) if match}
        found = []
        for step in sorted(self._there, reverse=True):
            try:
                found.append(self._manifest(step))
            except NotFound:
                log.warning("checkpoint-%d in the store is incomplete: passed over", step)
            except ValueError as error:
                log.warning("checkpoint-%d in the store is passed over: %s", step, error)
        self._complete = {one.step for one in found}
        return found

    def _manifest(self, step: int) -> Manifest:
        manifest = Manifest.from_json(self.store.read(f"{_folder(step)}{MANIFEST}"))
        if manifest.step != step:
            raise ValueError(f"it is step {manifest.step}")
        return manifest

    def bring(self, found: list[Manifest], folder: Path) -> Manifest | None:
        """Download the newest step whose files are what its manifest says, into an emptied folder."""
        for manifest in found:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            problem = self._download(manifest, folder)
            if problem is None:
                return manifest
            log.warning("checkpoint-%d in the store is damaged, passed over: %s", manifest.step, problem)
            self._complete.discard(manifest.step)
        shutil.rmtree(folder, ignore_errors=True)
        return None

    @ask_again
    def _download(self, manifest: Manifest, folder: Path) -> str | None:
        for name, promised in manifest.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.store.fetch(f"{_folder(manifest.step)}{name}", target)
            except NotFound as error:
                return str(error)
            if _file(target) != promised:
                return f"{name} is not what its manifest says"
        return None

    # --- streaming ---

    def stream(
        self,
        saved: Path,
        step: int,
        job: Mapping[str, Any],
        model_commit: str | None,
        totals: Mapping[str, Any],
        beside: Callable[[], Mapping[str, Content]] = dict,
    ) -> None:
        """Take a checkpoint out of the trainer's reach and queue it; a disk that is full costs no run.

        `beside` makes the files that go into the same commit, when that is made.
        """
        self._staged += 1
        staged = self.staging / f"{saved.name}.{self._staged}"  # a step can be saved again while it uploads
        try:
            stage(saved, staged)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            self.lost(step, f"it cannot be staged: {error}")
            return
        manifest = Manifest(step, self.publisher.header["attempt"], job, model_commit, totals)
        outcome = self.publisher.stream(step, lambda: self._commit(staged, manifest, beside()))
        outcome.add_done_callback(lambda outcome: self._settle(staged, step, outcome))

    def lost(self, step: int, why: str) -> None:
        """Say that a checkpoint will not come."""
        log.warning("checkpoint-%d is lost: %s", step, why)
        self.publisher.beat("checkpoint_upload_failed", step=step, error=self.redact(why)[:500])

    def _commit(self, staged: Path, manifest: Manifest, beside: Mapping[str, Content]) -> Commit:
        """Files, then the manifest; and away with all that is older than the complete step before it."""
        folder = _folder(manifest.step)
        names = [path.relative_to(staged).as_posix() for path in sorted(staged.rglob("*")) if path.is_file()]
        if not names:
            raise FileNotFoundError(f"{staged} has gone")
        described = replace(manifest, files={name: _file(staged / name) for name in names})
        files: dict[str, Content] = {**beside, **{f"{folder}{name}": staged / name for name in names}}
        files[f"{folder}{MANIFEST}"] = self.redact(described.to_json()).encode()
        stale = stale_steps(manifest.step, self._complete, self._there)
        return Commit(f"checkpoint-{manifest.step}", files, tuple(_folder(step) for step in stale))

    def _settle(self, staged: Path, step: int, outcome: Future[None]) -> None:
        shutil.rmtree(staged, ignore_errors=True)
        if outcome.cancelled():  # a newer one took its place
            return
        error = outcome.exception()
        if error is None:
            self._there -= set(stale_steps(step, self._complete, self._there))
            self._complete = self._complete & self._there | {step}
        elif not isinstance(error, Superseded):
            self.lost(step, str(error))
        self._there.add(step)  # all of it, some of it, or its answer was lost


def stale_steps(new: int, complete: set[int], there: set[int]) -> list[int]:
    """Return the steps that are deleted when `new` lands: two complete ones stay, and nothing newer goes."""
    before = max((one for one in complete if one < new), default=0)
    return sorted(one for one in there if one < new and one != before)


def stage(saved: Path, staged: Path) -> None:
    """Give a folder's files a second name that rotation does not know; a copy where that cannot be."""
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(saved, staged, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _folder(step: int) -> str:
    return f"{FOLDER}/checkpoint-{step}/"


def _file(path: Path) -> File:
    with path.open("rb") as opened:
        return File(path.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest())
