"""Weights on their way into the Hub's cache while the rest of a start goes on, and room for them."""

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from job import repository
from job.repository import IGNORED_FILES, ModelUnreachable, Origin, RepoFile
from job.settings import Settings, SettingsError

log = logging.getLogger(__name__)


class Prefetch:
    """A download on a thread of its own; a failure only warns: loading decides."""

    def __init__(self, origin: Origin, settings: Settings):
        self.wanted, self.settings, self.seconds = downloads(origin, settings), settings, 0.0
        self._thread = threading.Thread(target=self._bring, name="prefetch", daemon=True)

    def start(self) -> None:
        """Begin, once; a local folder has nothing to bring."""
        if self.wanted:
            self._thread.start()

    def wait(self) -> float:
        """Return when the weights are there, or cannot be had: the download's own seconds, to 0.1."""
        if self._thread.ident is not None:
            self._thread.join()
        return round(self.seconds, 1)

    def _bring(self) -> None:
        began = time.monotonic()
        for one in self.wanted:
            try:
                repository.snapshot(
                    self.settings, one.source, one.commit, one.source_knob, ignore_patterns=IGNORED_FILES
                )
            except (ModelUnreachable, SettingsError, OSError) as error:
                log.warning("prefetch of %s failed, going on: %s", one.source, error)
        self.seconds = time.monotonic() - began


def downloads(origin: Origin, settings: Settings) -> list[Origin]:
    """What the cache has to hold: `loaded`, folders aside."""
    return [one for one in loaded(origin, settings) if not one.is_local]


def loaded(origin: Origin, settings: Settings) -> list[Origin]:
    """The weights that are trained on and, to merge, the unquantised ones."""
    return [origin, *([origin.unquantised()] if settings.merge and origin.base != origin.source else [])]


def check_room(origin: Origin, settings: Settings, files: Sequence[RepoFile]) -> None:
    """Raise SettingsError when the disks cannot take what is still to come: weights, merged weights.

    `files` are those of the repository with the weights.
    """
    from huggingface_hub import constants

    cache, missing, found = Path(constants.HF_HUB_CACHE), 0, files
    for one in loaded(origin, settings):
        found = files if one is origin else repository.files(settings, one)
        missing += missing_bytes(one, found, cache)
    free = _free(cache)
    if missing > free:
        raise SettingsError(
            f"HF_HOME: {free / 1e9:.1f} GB are free in {cache}, the weights of {origin.source!r} need"
            f" {missing / 1e9:.1f} GB more; set it to a larger volume, or raise JobSpec gpu.disk_gb"
        )
    if settings.merge:
        check_room_to_merge(settings, cache, missing, repository.weights_bytes(found))


def check_room_to_merge(settings: Settings, cache: Path, missing: int, merged: int) -> None:
    """Raise SettingsError when `merged` bytes do not fit beside the `missing` ones that go to the cache."""
    needs = [(cache, missing), (settings.work_dir, merged)]
    if not settings.hf_repo:
        needs.append((settings.store_dir, merged))
    by_disk = Counter[int]()
    for folder, need in needs:
        by_disk[_existing(folder).stat().st_dev] += need
        free, total = _free(folder), by_disk[_existing(folder).stat().st_dev]
        if total > free:
            raise SettingsError(
                f"AUTOSLM_MERGE=on: {free / 1e9:.1f} GB are free in {folder}, weights and merged weights need"
                f" {total / 1e9:.1f} GB; raise JobSpec gpu.disk_gb, or turn it off"
            )


def _free(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.absolute().parents) if one.is_dir())


def missing_bytes(origin: Origin, files: Iterable[RepoFile], cache: Path) -> int:
    """Bytes of a repository's files that the cache lacks; a folder lacks none."""
    if origin.is_local:
        return 0
    from huggingface_hub.file_download import repo_folder_name

    blobs = cache / repo_folder_name(repo_id=origin.source, repo_type="model") / "blobs"
    # The cache names a file by what is in it, so that commits share it.
    return sum(one.size for one in files if not (blobs / one.blob).exists())


def cache_bytes() -> int:
    """Bytes in the Hub cache, finished or not: what a download's pings count."""
    from huggingface_hub import constants

    return sum(path.lstat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*"))
