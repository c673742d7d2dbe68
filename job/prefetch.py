"""Weights on their way into the Hub's cache while the rest of a start goes on, and room for them."""

import logging
import shutil
import threading
import time
from pathlib import Path

from job.settings import Settings, SettingsError
from job.weights import IGNORED_FILES, Origin

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
        import httpx2
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        origin, began = self.origin, time.monotonic()
        api = HfApi(endpoint=self.settings.endpoint or None, token=self.settings.token or None)
        try:
            api.snapshot_download(origin.source, revision=origin.commit, ignore_patterns=IGNORED_FILES)
        except (HfHubHTTPError, httpx2.HTTPError, LocalEntryNotFoundError, OSError) as error:
            log.warning("prefetch of %s failed, going on: %s", origin.source, error)
        self.seconds = time.monotonic() - began


def check_room(origin: Origin, settings: Settings) -> None:
    """Raise SettingsError when the weights that are not in the cache yet are more than its disk can take."""
    if origin.is_local:
        return
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    missing = missing_bytes(origin, settings, cache)
    folder = next(one for one in (cache, *cache.parents) if one.is_dir())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise SettingsError(
            f"HF_HOME: {free / 1e9:.1f} GB are free in {cache}, the weights of {origin.source!r} need"
            f" {missing / 1e9:.1f} GB more; set it to a larger volume, or raise JobSpec gpu.disk_gb"
        )


def missing_bytes(origin: Origin, settings: Settings, cache: Path) -> int:
    """Bytes of the weights' files that the cache lacks; 0 when the Hub cannot be asked."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects

    api = HfApi(endpoint=settings.endpoint or None, token=settings.token or None)
    try:
        about = api.model_info(origin.source, revision=origin.commit, files_metadata=True)
    except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled):
        return 0  # the commit was found, so the cache has something; loading decides
    blobs = cache / repo_folder_name(repo_id=origin.source, repo_type="model") / "blobs"
    wanted = filter_repo_objects(
        about.siblings or (), ignore_patterns=IGNORED_FILES, key=lambda one: one.rfilename
    )
    # The cache names a file by what is in it, so that commits share it.
    return sum(
        one.size or 0
        for one in wanted
        if not (blobs / str(one.lfs.sha256 if one.lfs else one.blob_id)).exists()
    )


def cache_bytes() -> int:
    """Bytes in the Hub cache, finished or not: what a download's pings count."""
    from huggingface_hub import constants

    return sum(path.lstat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*"))
