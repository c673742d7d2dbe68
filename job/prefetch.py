"""Weights on their way into the Hub's cache while the rest of a start goes on, and room for them."""

import logging
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from job import repository
from job.repository import IGNORED_FILES, ModelUnreachable, Origin, RepoFile
from job.settings import Settings, SettingsError

log = logging.getLogger(__name__)


class Prefetch:
    """A download on a thread of its own; a failure only warns: loading decides."""

    def __init__(self, origin: Origin, settings: Settings):
        self.origin, self.settings, self.seconds = origin, settings, 0.0
        self._thread = threading.Thread(target=self._bring, name="prefetch", daemon=True)

    def start(self) -> None:
        """Begin, once; a local folder has nothing to bring."""
        if not self.origin.is_local:
            self._thread.start()

    def wait(self) -> float:
        """Return when the weights are there, or cannot be had: the download's own seconds, to 0.1."""
        if self._thread.ident is not None:
            self._thread.join()
        return round(self.seconds, 1)

    def _bring(self) -> None:
        origin, began = self.origin, time.monotonic()
        try:
            repository.snapshot(
                self.settings,
                origin.source,
                origin.commit,
                origin.source_knob,
                ignore_patterns=IGNORED_FILES,
            )
        except (ModelUnreachable, SettingsError, OSError) as error:
            log.warning("prefetch of %s failed, going on: %s", origin.source, error)
        self.seconds = time.monotonic() - began


def check_room(origin: Origin, files: Iterable[RepoFile]) -> None:
    """Raise SettingsError when the weights that are not in the cache yet are more than its disk can take."""
    if origin.is_local:
        return
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    missing = missing_bytes(origin, files, cache)
    folder = next(one for one in (cache, *cache.parents) if one.is_dir())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise SettingsError(
            f"HF_HOME: {free / 1e9:.1f} GB are free in {cache}, the weights of {origin.source!r} need"
            f" {missing / 1e9:.1f} GB more; set it to a larger volume, or raise JobSpec gpu.disk_gb"
        )


def missing_bytes(origin: Origin, files: Iterable[RepoFile], cache: Path) -> int:
    """Bytes of a repository's files that the cache lacks."""
    from huggingface_hub.file_download import repo_folder_name

    blobs = cache / repo_folder_name(repo_id=origin.source, repo_type="model") / "blobs"
    # The cache names a file by what is in it, so that commits share it.
    return sum(one.size for one in files if not (blobs / one.blob).exists())


def cache_bytes() -> int:
    """Bytes in the Hub cache, finished or not: what a download's pings count."""
    from huggingface_hub import constants

    return sum(path.lstat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*"))
