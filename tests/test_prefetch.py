"""Weights that are on their way while the rest of a start goes on, from a real local Hub."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from job import prefetch, repository
from job.prefetch import Prefetch, missing_bytes
from job.repository import Origin
from job.settings import Settings, SettingsError
from spec import JobSpec
from tests.harness import Finished
from tests.hub_server import Fault, HubServer

pytestmark = pytest.mark.slow

WEIGHTS = 300_000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this process's Hub client."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def origin(hub: HubServer) -> Origin:
    hub.create_repo("acme/tiny")
    files = {"config.json": b"{}", "model.safetensors": os.urandom(WEIGHTS), "model.onnx": os.urandom(5000)}
    commit = hub.push("acme/tiny", files).id
    return Origin("acme/tiny", "acme/tiny", commit, commit)


@pytest.fixture
def settings(hub: HubServer) -> Settings:
    spec = JobSpec.parse({"environment": {"id": "x"}, "model": "acme/tiny"})
    return Settings.read({"HF_ENDPOINT": hub.url, "AUTOSLM_DEVICE": "cpu"}, spec)


def test_a_download_is_timed_by_itself_however_late_it_is_waited_for(hub, cache, origin, settings):
    coming, began = Prefetch(origin, settings), time.monotonic()
    coming.start()
    coming.wait()
    took = time.monotonic() - began
    time.sleep(0.2)
    assert 0 < coming.seconds <= took and coming.wait() == round(coming.seconds, 1)
    assert (cache / "models--acme--tiny" / "snapshots" / origin.commit / "model.safetensors").is_file()
    assert WEIGHTS <= prefetch.cache_bytes() < WEIGHTS + 5000


def test_a_slow_download_is_waited_for(hub, cache, origin, settings):
    hub.bytes_per_second = WEIGHTS
    coming = Prefetch(origin, settings)
    coming.start()
    assert coming.wait() >= 0.9  # what its 300 kB take at the least
    assert (cache / "models--acme--tiny" / "snapshots" / origin.commit / "model.safetensors").is_file()


def test_a_download_that_was_never_begun_and_one_of_a_folder_take_no_time(cache, origin, settings, tmp_path):
    assert Prefetch(origin, settings).wait() == 0.0
    here = Prefetch(Origin(str(tmp_path), str(tmp_path), None, None), settings)
    here.start()
    assert here.wait() == 0.0


def test_a_failed_download_only_warns(hub, cache, origin, settings, caplog):
    hub.faults.append(Fault("model.safetensors", status=403))
    refused = Prefetch(origin, settings)
    refused.start()
    refused.wait()
    assert "prefetch of acme/tiny failed, going on" in caplog.text
    gone = Prefetch(Origin("acme/tiny", "acme/gone", None, "0" * 40), settings)
    gone.start()
    gone.wait()
    assert "prefetch of acme/gone failed, going on" in caplog.text


def test_only_what_the_cache_lacks_has_to_fit(hub, cache, origin, settings):
    attributes = len(hub.files("acme/tiny").get(".gitattributes", b""))
    everything = WEIGHTS + len(b"{}") + attributes
    files = repository.files(settings, origin)
    assert missing_bytes(origin, files, cache) == everything  # and no model.onnx
    coming = Prefetch(origin, settings)
    coming.start()
    coming.wait()
    assert missing_bytes(origin, files, cache) == 0
    newer = hub.push("acme/tiny", {"more.safetensors": os.urandom(7000)}).id
    newest = Origin("acme/tiny", "acme/tiny", newer, newer)
    assert missing_bytes(newest, repository.files(settings, newest), cache) == 7000


def test_to_merge_the_unquantised_weights_come_too(hub, cache, origin, settings):
    hub.create_repo("acme/tiny-4bit")
    commit = hub.push("acme/tiny-4bit", {"model.safetensors": os.urandom(9000)}).id
    quantised = dataclasses.replace(origin, source="acme/tiny-4bit", commit=commit)
    merging = settings.model_copy(update={"merge": True})
    prefetch.check_room(quantised, merging, repository.files(settings, quantised))
    for how, names in ((settings, {"tiny-4bit"}), (merging, {"tiny-4bit", "tiny"})):
        coming = Prefetch(quantised, how)
        coming.start()
        coming.wait()
        assert {path.name.split("--")[2] for path in cache.glob("models--*")} == names


def test_merged_weights_have_to_fit_wherever_they_go(hub, cache, origin, settings, tmp_path):
    assert repository.weights_bytes(repository.files(settings, origin)) == WEIGHTS
    free = shutil.disk_usage(tmp_path).free
    here = settings.model_copy(update={"work_dir": tmp_path / "work", "store_dir": tmp_path / "store"})
    prefetch.check_room_to_merge(here, cache, 0, int(0.4 * free))
    prefetch.check_room_to_merge(here.model_copy(update={"hf_repo": "acme/runs"}), cache, 0, int(0.6 * free))
    for missing, merged in ((0, int(0.6 * free)), (int(0.6 * free), int(0.3 * free))):
        with pytest.raises(
            SettingsError, match=r"AUTOSLM_MERGE=on: [\d.]+ GB are free in .*gpu\.disk_gb, or turn"
        ):
            prefetch.check_room_to_merge(here, cache, missing, merged)


def test_a_run_goes_through_its_imports_while_the_weights_come(
    hub: HubServer,
    tiny_model: Path,
    tmp_path: Path,
    job: Callable[..., dict[str, str]],
    run_worker: Callable[[dict[str, str]], Finished],
) -> None:
    hub.add_folder("acme/tiny", tiny_model)
    seconds = 8.0
    hub.bytes_per_second = (tiny_model / "model.safetensors").stat().st_size / seconds
    more: dict[str, Any] = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "SFT_MAX_STEPS": 1}
    ended = run_worker(job(model="acme/tiny", **more))
    assert ended.code == 0, ended.err[-2000:]
    assert ended.stages[:4] == ["boot", "sft_start", "model_prefetched", "sft_model_load"]
    told = {beat["stage"]: beat for beat in ended.beats if not beat.get("liveness")}
    boot, start, fetched = told["boot"], told["sft_start"], told["model_prefetched"]
    since = time.time() - time.monotonic()
    asked_at = next(one.at + since for one in hub.requests if one.path.endswith("/model.safetensors"))
    assert boot["ts"] < asked_at < start["ts"]  # while the environment was being loaded
    assert fetched["ts"] - asked_at >= 0.9 * seconds and fetched["download_seconds"] >= 0.9 * seconds
