"""A model on the Hub, over HTTP: what is not there is told from what could not be asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from job import repository
from job.repository import ModelUnreachable, Origin, RepoFile, weights_bytes
from job.settings import Settings, SettingsError
from spec import JobSpec
from tests import harness
from tests.hub_server import Fault, HubServer

NOWHERE = "0" * 40
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"\0" * 1000, "a.onnx": b"\0"}
COMMIT, TREE, FILE = r"GET /api/models/acme/tiny", r"/acme/tiny/tree/", r"/acme/tiny/resolve/.*/config\.json"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between the times a question is asked."""
    monkeypatch.setattr(repository, "PAUSES_S", (0.0, 0.0))


@pytest.fixture
def tiny(hub: HubServer, client_at_home: None, default_client_after: None) -> HubServer:
    hub.create_repo("acme/tiny")
    hub.push("acme/tiny", FILES)
    return hub


def settings(hub: HubServer, model: str = "acme/tiny", **more: str) -> Settings:
    spec = JobSpec.parse({"environment": {"id": "x"}, "model": model})
    return Settings.read({"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", **more}, spec)


def described(hub: HubServer, **more: str) -> set[str]:
    """The names of the files that the model's description is read from."""
    asked = settings(hub, **more)
    origin = repository.locate(asked)
    folder = repository.description(asked, origin.base, origin.base_commit)
    return {one.name for one in Path(folder).iterdir()}


@pytest.mark.parametrize(
    ("where", "how"),
    [
        (COMMIT, {"status": 429}),
        (COMMIT, {"drop": True}),
        (TREE, {"status": 503}),
        (FILE, {"status": 500}),
        (FILE, {"drop": True}),
    ],
    ids=str,
)
def test_a_hub_that_fails_twice_is_asked_again(tiny: HubServer, where: str, how: dict[str, Any]) -> None:
    tiny.faults.append(Fault(where, times=2, **how))
    assert described(tiny) >= {"config.json", "tokenizer.json"}
    assert tiny.faults[0].fired == 2


@pytest.mark.parametrize(
    ("where", "how"), [(COMMIT, {"drop": True}), (TREE, {"status": 500}), (FILE, {"status": 500})], ids=str
)
def test_a_hub_that_goes_on_failing_is_no_refusal(tiny: HubServer, where: str, how: dict[str, Any]) -> None:
    tiny.faults.append(Fault(where, **how))
    with pytest.raises(ModelUnreachable) as caught:
        described(tiny)
    text = str(caught.value)
    assert text.startswith("JobSpec model='acme/tiny': the Hub cannot be asked for it (") and "\n" not in text


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(FILE, status=403, code="GatedRepo"), "its owner has to grant access"),
        (Fault(FILE, status=401, code="RepoNotFound"), "not on the Hub, or private"),
        (Fault(TREE, status=400), "the Hub answers 400"),
        (Fault(COMMIT, status=404, code="RepoNotFound"), "not on the Hub, or private"),
        (Fault(COMMIT, status=404, code="RevisionNotFound"), "the model has no such revision"),
    ],
    ids=["gated", "private", "bad request", "missing", "revision"],
)
def test_a_refusal_is_asked_for_once(tiny: HubServer, fault: Fault, message: str) -> None:
    tiny.faults.append(fault)
    with pytest.raises(SettingsError) as caught:
        described(tiny)
    assert str(caught.value).startswith("JobSpec model='acme/tiny': ") and message in str(caught.value)
    assert "\n" not in str(caught.value) and fault.fired == 1


def test_what_is_in_the_cache_is_not_asked_for(tiny: HubServer) -> None:
    asked = settings(tiny)
    origin = repository.locate(asked)
    folder = repository.description(asked, origin.base, origin.base_commit)
    tiny.faults.append(Fault(".", drop=True))
    assert repository.locate(asked, pinned=origin.commit) == origin
    assert repository.description(asked, origin.base, origin.base_commit) == folder


def test_weights_and_tokenizer_of_two_repositories_are_pinned_apart(tiny: HubServer) -> None:
    tiny.create_repo("acme/tiny-4bit")
    asked = settings(tiny, AUTOSLM_QUANT="4bit-qlora", AUTOSLM_QUANT_REPO="acme/tiny-4bit")
    first = repository.locate(asked)
    for name in ("acme/tiny", "acme/tiny-4bit"):
        tiny.push(name, {"more.json": b"{}"})
    assert repository.locate(asked, first.commit, first.base_commit) == first
    newest = repository.locate(asked)
    assert newest.commit != first.commit and newest.base_commit != first.base_commit


def test_the_files_that_are_wanted(tiny: HubServer, tmp_path: Path) -> None:
    asked = settings(tiny)
    found = {one.name: one.size for one in repository.files(asked, repository.locate(asked))}
    assert found["model.safetensors"] == 1000 and "a.onnx" not in found
    assert repository.files(asked, Origin("acme/gone", "acme/gone", NOWHERE, NOWHERE)) == []
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 7)
    here = repository.files(asked, Origin(str(tmp_path), str(tmp_path), None, None))
    assert weights_bytes(here) == 7


@pytest.mark.parametrize(
    ("names", "total"),
    [
        (["model.safetensors", "config.json"], 1),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], 2),
        (["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"], 2),
        (["model.safetensors", "pytorch_model.bin", "consolidated.safetensors"], 1),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"], 2),
        (["adapter_model.safetensors"], 0),
    ],
)
def test_the_files_that_a_model_is_loaded_from(names: list[str], total: int) -> None:
    assert weights_bytes([RepoFile(name, 1) for name in names]) == total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config", "tokenizer", "tokenizer_config"])
def test_a_run_that_cannot_ask_can_be_started_again(
    hub: HubServer, client_at_home: None, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    hub.add_folder("acme/tiny", tiny_model)
    hub.faults.append(Fault(rf"/acme/tiny/resolve/.*/{name}\.json", status=500))
    ended = harness.run_main(
        harness.variables(tmp_path, "acme/tiny", "toy-words", HF_ENDPOINT=hub.url, HF_TOKEN="hf_test")
    )
    assert isinstance(ended.error, ModelUnreachable)
    assert ended.beats[-1]["stage"] == "error_sft" and ended.beats[-1]["retriable"] is True
