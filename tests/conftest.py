"""Fixtures of the slow tests: a tiny real model, a real local Hub, and runs of the worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.harness import Finished
from tests.hub_server import HubServer

# Read when torch, tokenizers and the Hub client are imported, which no fast test does.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_XET"] = "1"


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all processes of a parallel session see."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def tiny_model(shared_folder: Path) -> Path:
    """The demo's model, built once in a session, whichever process comes first."""
    from filelock import FileLock

    folder = shared_folder / "tiny-model"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            from demo import tiny_model

            part = folder.with_suffix(".part")
            tiny_model.build(part)
            part.rename(folder)
    return folder


@pytest.fixture
def with_template(tiny_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the tiny model with another chat template of tests/templates."""
    return lambda name: harness.with_template(tiny_model, tmp_path / f"model-{name}", name)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with the private dataset acme/runs; the client in this process asks no other host."""
    from huggingface_hub.utils import _detect_agent

    monkeypatch.setattr(_detect_agent, "_registry", {"standardEnvVars": [], "harnesses": {}})
    with HubServer() as server:
        server.create_repo("acme/runs", kind="dataset", private=True)
        yield server


@pytest.fixture
def client_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The Hub client of this process asks no other host, keeps its files at hand, and never pauses."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _detect_agent, disable_progress_bars

    disable_progress_bars()
    monkeypatch.setattr(_detect_agent, "_registry", {"standardEnvVars": [], "harnesses": {}})
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp()))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture(scope="module")
def default_client_after() -> Iterator[None]:
    """Leave the library as it was; a client of its own for each test would take most of the time."""
    from huggingface_hub.utils import _http

    yield
    _http.set_client_factory(_http.default_client_factory)


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Callable[..., dict[str, str]]:
    """Return a function that makes a run's variables: `job(environment, spec, NAME=value)`."""

    def make(
        environment: str = "toy-words",
        spec: Mapping[str, Any] | None = None,
        *,
        model: Path | str = tiny_model,
        folder: Path = tmp_path,
        **more: object,
    ) -> dict[str, str]:
        return harness.variables(folder, model, environment, spec, **more)

    return make


@pytest.fixture
def run_in_process() -> Callable[[Mapping[str, str]], Finished]:
    """Run `worker.main` here: no second import of torch and TRL."""
    return harness.run_main


@pytest.fixture
def run_worker(tmp_path: Path) -> Callable[[Mapping[str, str]], Finished]:
    """Run `python worker.py` as a process of its own, with these variables and no others of the person's."""
    return lambda env: harness.start_python(["worker.py"], env, home=tmp_path / "home")
