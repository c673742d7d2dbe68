"""What SFT cannot honour is refused: one clear line, reported, with nothing fetched and no metrics left."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delivery import patience
from tests import harness
from tests.harness import Finished, strict
from tests.hub_server import HubServer
from training import gpu

pytestmark = pytest.mark.slow

TOKEN = "hf_test_of_refusals"
NOWHERE = "0" * 40


def train(**fields: object) -> dict[str, Any]:
    return {"train": fields}


def environment(reference: str, **params: object) -> dict[str, Any]:
    return {"environment": {"id": reference, "params": params}}


SPEC: dict[str, tuple[dict[str, Any], str]] = {
    "model-empty": ({"model": " "}, r"JobSpec model = ' '.*non-empty"),
    "model-number": ({"model": 7}, r"JobSpec model = 7.*non-empty string"),
    "model-unknown": ({"model_policy": "catalog"}, r"JobSpec model='acme/tiny': not in the catalog"),
    "policy": ({"model_policy": "any"}, r"JobSpec model_policy = 'any'.*'catalog' or 'allow'"),
    "algorithm": ({"algorithm": "dpo"}, r"JobSpec algorithm = 'dpo'.*'sft' or 'grpo'"),
    "thinking": ({"thinking": "maybe"}, r"JobSpec thinking = 'maybe'.*true, false"),
    "environment-none": (environment(""), r"environment\.id.*no environment specified"),
    "environment-slashes": (environment("a/b/c"), r"JobSpec environment\.id = 'a/b/c'"),
    "environment-half": (environment("owner/"), r"JobSpec environment\.id = 'owner/'"),
    "environment-path": ({"environment": {"id": "x", "path": "./x"}}, r"environment\.path.*not supported"),
    "eval-env": (
        environment("toy-words", eval_env="bare"),
        r"environment\.params\.eval_env = 'bare'.*owner/name",
    ),
    "store": (train(hf_repo="runs"), r"JobSpec train\.hf_repo = 'runs'.*owner/name"),
    "epochs-zero": (train(epochs=0), r"JobSpec train\.epochs = 0.*integer >= 1"),
    "epochs-fraction": (train(epochs=1.5), r"JobSpec train\.epochs = 1\.5.*integer >= 1"),
    "rank-zero": (train(lora_rank=0), r"JobSpec train\.lora_rank = 0"),
    "rank-bool": (train(lora_rank=True), r"JobSpec train\.lora_rank = True.*integer"),
    "alpha-text": (train(lora_alpha="64"), r"JobSpec train\.lora_alpha = '64'.*integer"),
    "seeds-none": (train(seeds=[]), r"JobSpec train\.seeds = \[\].*non-empty"),
    "seeds-text": (train(seeds=["one"]), r"JobSpec train\.seeds\[0\] = 'one'"),
    "seeds-negative": (train(seeds=[-1]), r"train\.seeds=-1.*>= 0"),
    "rate-zero": (train(learning_rate=0), r"JobSpec train\.learning_rate = 0.*> 0"),
    "rate-nan": (train(learning_rate=float("nan")), r"JobSpec train\.learning_rate = nan.*finite"),
    "rate-infinite": (train(learning_rate=float("inf")), r"JobSpec train\.learning_rate = inf.*finite"),
    "batch": (train(batch_size=-8), r"JobSpec train\.batch_size = -8"),
    "length": (train(max_length=0), r"JobSpec train\.max_length = 0"),
    "save": (train(save_every=0), r"JobSpec train\.save_every = 0"),
    "warm-start": (
        train(init_from_adapter="runs:x"),
        r"JobSpec train\.init_from_adapter = 'runs:x'.*owner/repo",
    ),
    "disk": ({"gpu": {"disk_gb": 1.5}}, r"JobSpec gpu\.disk_gb = 1\.5.*integer"),
}

VARIABLES: dict[str, tuple[dict[str, str], str]] = {
    "mode": ({"RUN_MODE": "dpo"}, r"RUN_MODE='dpo'.*sft \| rl"),
    "mode-of-the-spec": ({"RUN_MODE": "rl"}, r"RUN_MODE='rl'.*'sft'"),
    "seed": ({"SEED": "one"}, r"SEED='one'.*whole number"),
    "seed-negative": ({"SEED": "-1"}, r"SEED='-1'.*>= 0"),
    "run-id": ({"RUN_ID": "../../etc"}, r"RUN_ID='\.\./\.\./etc'.*letters, digits"),
    "phase": ({"PHASE": "a/b"}, r"PHASE='a/b'.*letters, digits"),
    "quant": ({"AUTOSLM_QUANT": "int8"}, r"AUTOSLM_QUANT='int8'.*bf16 \| 4bit-qlora"),
    "quant-repo": ({"AUTOSLM_QUANT_REPO": "no-owner"}, r"AUTOSLM_QUANT_REPO='no-owner'.*owner/name"),
    "device": ({"AUTOSLM_DEVICE": "tpu"}, r"AUTOSLM_DEVICE='tpu'.*cuda \| cpu"),
    "epochs": ({"SFT_EPOCHS": "two"}, r"SFT_EPOCHS='two'.*whole number >= 1"),
    "steps": ({"SFT_MAX_STEPS": "-1"}, r"SFT_MAX_STEPS='-1'.*>= 0"),
    "examples": ({"SFT_MAX_EXAMPLES": "1.5"}, r"SFT_MAX_EXAMPLES='1\.5'.*whole number"),
    "micro-batch": ({"SFT_PER_DEVICE_BS": "0"}, r"SFT_PER_DEVICE_BS='0'.*>= 1"),
    "save-steps": ({"SFT_SAVE_STEPS": "often"}, r"SFT_SAVE_STEPS='often'"),
    "packing-word": ({"SFT_PACKING": "maybe"}, r"SFT_PACKING='maybe'.*on \| off"),
    "packing": ({"SFT_PACKING": "YES"}, r"SFT_PACKING=on.*flash attention"),
    "liger-word": ({"SFT_LIGER": "2"}, r"SFT_LIGER='2'.*on \| off"),
    "liger": ({"SFT_LIGER": "1"}, r"SFT_LIGER=on.*liger-kernel"),
    "completion-only": ({"SFT_COMPLETION_ONLY": "y"}, r"SFT_COMPLETION_ONLY='y'.*on \| off"),
    "text-only": ({"AUTOSLM_TEXT_ONLY": "nope"}, r"AUTOSLM_TEXT_ONLY='nope'.*on \| off"),
    "targets": ({"LORA_TARGETS": " , "}, r"LORA_TARGETS"),
    "deadline": ({"AUTOSLM_UPLOAD_DEADLINE_S": "0"}, r"AUTOSLM_UPLOAD_DEADLINE_S='0'.*> 0"),
    "grace": ({"AUTOSLM_GRACE_S": "nan"}, r"AUTOSLM_GRACE_S='nan'.*number"),
    "log-level": ({"AUTOSLM_LOG_LEVEL": "loud"}, r"AUTOSLM_LOG_LEVEL='loud'.*debug"),
    "tracker": ({"AUTOSLM_REPORT_TO": "excel"}, r"AUTOSLM_REPORT_TO.*wandb"),
    "merge": ({"AUTOSLM_MERGE": "please"}, r"AUTOSLM_MERGE='please'.*on \| off"),
    "store": ({"HF_REPO": "runs"}, r"HF_REPO='runs'.*owner/name"),
    "several-at-once": ({"SFT_EPOCHS": "x", "SFT_LIGER": "y"}, r"SFT_EPOCHS='x'.*; SFT_LIGER='y'"),
    "no-json": ({"AUTOSLM_JOB_SPEC_JSON": "{'model': 1}"}, r"JobSpec = .*valid JSON"),
    "no-object": ({"AUTOSLM_JOB_SPEC_JSON": "[1]"}, r"JobSpec = \[1\].*JSON object"),
    "section": ({"AUTOSLM_JOB_SPEC_JSON": '{"train": [1]}'}, r"JobSpec train = \[1\].*JSON object"),
    "twice": ({"AUTOSLM_JOB_SPEC_JSON": '{"model": "a", "model": "b"}'}, r"JobSpec.*'model' is given twice"),
    "no-spec": ({"AUTOSLM_JOB_SPEC_JSON": " "}, r"AUTOSLM_JOB_SPEC_JSON is empty.*needs a JobSpec"),
}

ENVIRONMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (environment("acme/nowhere-at-all"), r"'acme/nowhere-at-all' cannot be loaded.*installed"),
    "none": (environment("toy-blank"), r"'toy-blank' cannot be loaded.*load_environment"),
    "raises": (environment("toy-broken"), r"'toy-broken' cannot be loaded: OSError: the corpus"),
    "key": (environment("toy-broken", how="key"), r"'toy-broken' cannot be loaded.*TOY_BROKEN_API_KEY"),
    "params": (environment("toy-words", sise=3), r"'toy-words' cannot be loaded.*sise.*environment\.params"),
    "reward": (environment("toy-impossible"), r"'by_oracle' requires the argument 'oracle'"),
    "evaluator": (environment("toy-words", eval_env_id="acme/nowhere-at-all"), r"'acme/nowhere-at-all'"),
}

MODELS: dict[str, tuple[str, str]] = {
    "missing": ("acme/missing", r"JobSpec model='acme/missing': not on the Hub, or private"),
    "revision": (
        f"acme/tiny@{NOWHERE}",
        rf"JobSpec model='acme/tiny@{NOWHERE}': the model has no such revision",
    ),
    "no-id": ("./not/a/folder", r"JobSpec model='\./not/a/folder': no folder of that name, and no Hub id"),
}


def cases() -> list[Any]:
    """(spec, variables, regex) of every refusal that comes before anything is spent."""
    told = [
        *((f"spec-{name}", spec, {}, rule) for name, (spec, rule) in SPEC.items()),
        *((f"variable-{name}", {}, env, rule) for name, (env, rule) in VARIABLES.items()),
        *((f"environment-{name}", spec, {}, rule) for name, (spec, rule) in ENVIRONMENTS.items()),
        *((f"model-{name}", {"model": model}, {}, rule) for name, (model, rule) in MODELS.items()),
    ]
    return [pytest.param(*case, id=name) for name, *case in told]


@pytest.fixture
def hub() -> Any:
    """A Hub with the private dataset acme/runs and a model without files."""
    with HubServer(tokens={TOKEN}, outsiders={"hf_reader_of_refusals"}) as server:
        server.create_repo("acme/runs", kind="dataset", private=True)
        server.create_repo("acme/tiny")
        yield server


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import _detect_agent

    monkeypatch.setattr(_detect_agent, "_registry", {"standardEnvVars": [], "harnesses": {}})


def asked(hub: HubServer, folder: Path, spec: dict[str, Any], more: dict[str, str]) -> dict[str, str]:
    """The variables of a run whose store and model are on the Hub."""
    whole = {"model": "acme/tiny", **spec}
    env = harness.variables(folder, whole["model"], "toy-words", whole, HF_TOKEN=TOKEN, HF_ENDPOINT=hub.url)
    if "hf_repo" not in whole.get("train", {}):
        env["HF_REPO"] = "acme/runs"
    return env | more


def stored(hub: HubServer, env: dict[str, str]) -> dict[str, bytes]:
    """Whatever the run left in its store, by path; a run without a usable repository has a folder."""
    root = Path(env["AUTOSLM_STORE_DIR"])
    local = {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
    return {**local, **hub.files("acme/runs")}


def check_reported(
    env: dict[str, str], files: dict[str, bytes], pattern: str, stage: str = "error_sft"
) -> dict[str, Any]:
    """Check error file and error beat, here and in the store; return the beat."""
    errors = [path for path in files if path.rpartition("/")[2] == f"{stage}.txt"]
    assert len(errors) == 1
    prefix = errors[0].rpartition("/")[0]
    beat = strict(files[f"{prefix}/heartbeat.json"])
    assert beat["stage"] == stage and re.search(pattern, beat["error"])
    assert len(beat["error"]) <= 500 and isinstance(beat["diag"], str)
    assert (beat["retriable"], beat["oom"]) == (False, False)
    work = Path(env["AUTOSLM_WORK_DIR"])
    text = files[errors[0]].decode()
    assert re.search(pattern, text) and prefix in text.splitlines()[0] and TOKEN not in text
    assert (work / f"{stage}.txt").read_text() == text
    assert strict((work / "hb" / "heartbeat.json").read_text()) == beat
    assert not [path for path in files if path.endswith(("metrics.json", "DONE"))]
    assert not (work / "metrics.json").exists()
    return beat


def nothing_fetched(hub: HubServer) -> bool:
    """Nothing of the model, that is: the store is asked for DONE, the prefetch finds a bare repository."""
    files = [one.path for one in hub.requests if "/resolve/" in one.path]
    return all(path.startswith("/datasets/") or path.endswith("/.gitattributes") for path in files)


@pytest.mark.parametrize(("spec", "more", "pattern"), cases())
def test_what_cannot_be_honoured_is_refused_in_one_line(
    hub: HubServer, tmp_path: Path, spec: dict[str, Any], more: dict[str, str], pattern: str
) -> None:
    env = asked(hub, tmp_path, spec, more)
    work = tmp_path / "work"
    work.mkdir()
    (work / "metrics.json").write_text("{}")  # a stale one would count as success
    ended = harness.run_main(env)
    assert isinstance(ended.error, ValueError)
    assert re.search(pattern, str(ended.error)) and "\n" not in str(ended.error)
    stage = "error_rl" if more.get("RUN_MODE") == "rl" else "error_sft"
    assert ended.stages in ([stage], ["boot", stage])
    check_reported(env, stored(hub, env), pattern, stage)
    assert nothing_fetched(hub)


def test_there_are_at_least_forty_of_them() -> None:
    assert len(cases()) >= 40


# --- what only shows once the model is at hand ---


def without_template(model: Path) -> str:
    (model / "chat_template.jinja").unlink()
    return r"has no chat template; use an instruction-tuned model"


def with_a_strict_template(model: Path) -> str:
    (model / "chat_template.jinja").write_text("{{ raise_exception('only in June') }}")
    return r"the chat template cannot render a conversation of \(user, assistant\).*only in June"


def without_a_config(model: Path) -> str:
    (model / "config.json").unlink()
    return r"JobSpec model=.*the folder has no config\.json"


def of_an_unknown_kind(model: Path) -> str:
    (model / "config.json").write_text(json.dumps({"model_type": "perceptron"}))
    return r"JobSpec model=.*its configuration cannot be read.*perceptron"


@pytest.mark.parametrize(
    "spoil", [without_template, with_a_strict_template, without_a_config, of_an_unknown_kind]
)
def test_a_model_that_cannot_be_used_is_refused(
    hub: HubServer, tiny_model: Path, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    pattern = spoil(model)
    env = asked(hub, tmp_path, {"model": str(model)}, {})
    ended = harness.run_main(env)
    assert isinstance(ended.error, ValueError) and "\n" not in str(ended.error)
    assert re.search(pattern, str(ended.error))
    check_reported(env, stored(hub, env), pattern)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (environment("toy-words", size=0), r"no training row is left of 0.*environment\.id='toy-words'"),
        (environment("toy-words", size=2, answers=["", ""]), r"left of 2: 2 have no target"),
        (train(max_length=3), r"left of 22: 0 have no target, 22 lose it.*train\.max_length=3"),
    ],
    ids=["no-rows", "no-targets", "too-short"],
)
def test_a_run_without_rows_is_refused(
    hub: HubServer, tiny_model: Path, tmp_path: Path, spec: dict[str, Any], pattern: str
) -> None:
    env = asked(hub, tmp_path, {"model": str(tiny_model), **spec}, {})
    ended = harness.run_main(env)
    assert isinstance(ended.error, ValueError) and "\n" not in str(ended.error)
    assert re.search(pattern, str(ended.error))
    assert ended.stages == ["boot", "error_sft"]
    check_reported(env, stored(hub, env), pattern)


# --- stores that do not take the run ---


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between the tries of an upload."""
    monkeypatch.setattr(patience, "PAUSE_S", 0.0)


@pytest.mark.parametrize(
    ("token", "repo"),
    [("hf_wrong_of_refusals", "acme/runs"), ("hf_reader_of_refusals", "acme/runs"), (TOKEN, "acme/new")],
    ids=["wrong-token", "reader", "may-not-create"],
)
def test_a_store_that_cannot_be_written_stops_the_run_before_anything_is_spent(
    hub: HubServer, tmp_path: Path, hasty: None, token: str, repo: str
) -> None:
    hub.may_create = False
    env = asked(hub, tmp_path, {}, {"HF_TOKEN": token, "HF_REPO": repo})
    ended = harness.run_main(env)
    assert "HF_REPO" in str(ended.error) and "HF_TOKEN" in str(ended.error) and "\n" not in str(ended.error)
    assert ended.stages == ["error_sft"]
    assert not ended.beats[-1]["retriable"]
    assert "HF_TOKEN" in (tmp_path / "work" / "error_sft.txt").read_text()
    assert token not in ended.out + (tmp_path / "work" / "error_sft.txt").read_text()
    assert nothing_fetched(hub) and not (tmp_path / "work" / "metrics.json").exists()


def test_a_folder_that_cannot_be_a_store_is_refused(hub: HubServer, tmp_path: Path, hasty: None) -> None:
    (tmp_path / "taken").write_text("a file")
    env = asked(hub, tmp_path, {}, {"HF_REPO": "", "AUTOSLM_STORE_DIR": str(tmp_path / "taken")})
    ended = harness.run_main(env)
    assert re.search(r"store folder .*/taken.*AUTOSLM_STORE_DIR", str(ended.error))
    assert ended.stages == ["error_sft"]


def test_a_work_directory_that_cannot_be_used_is_refused_and_told(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    env = asked(hub, tmp_path, {}, {"AUTOSLM_WORK_DIR": str(tmp_path / "taken")})
    ended = harness.run_main(env)
    assert re.search(r"AUTOSLM_WORK_DIR='.*/taken': cannot be used", str(ended.error))
    files = stored(hub, env)
    assert strict(files["sft/r1/seed0/heartbeat.json"])["stage"] == "error_sft"
    assert b"AUTOSLM_WORK_DIR" in files["sft/r1/seed0/error_sft.txt"]


def test_a_spec_file_that_is_no_text_is_refused(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_bytes(b"\xff\xfe{}")
    path = str(tmp_path / "spec.json")
    env = asked(hub, tmp_path, {}, {"AUTOSLM_JOB_SPEC_JSON": "", "AUTOSLM_JOB_SPEC_PATH": path})
    ended = harness.run_main(env)
    pattern = r"AUTOSLM_JOB_SPEC_PATH='/.*': cannot be read"
    assert re.search(pattern, str(ended.error)) and "\n" not in str(ended.error)
    check_reported(env, stored(hub, env), pattern)


def test_an_environment_that_exits_is_reported_like_any_failure(hub: HubServer, tmp_path: Path) -> None:
    env = asked(hub, tmp_path, environment("toy-broken", how="exits"), {})
    ended = harness.run_main(env)
    assert ended.code == 1
    check_reported(env, stored(hub, env), "no licence")


def test_a_missing_gpu_is_an_infrastructure_fault(
    hub: HubServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(gpu, "PAUSE_S", 0.0)
    env = asked(hub, tmp_path, {"model": str(tiny_model)}, {"AUTOSLM_DEVICE": "cuda"})
    ended = harness.run_main(env)
    words = r"GPU never became ready: cuda not available.*AUTOSLM_DEVICE"
    assert re.search(words, str(ended.error)) and "\n" not in str(ended.error)
    assert ended.stages == ["boot", "sft_start", "error_sft"]
    assert ended.beats[-1]["retriable"] is True


# --- as a process ---


def test_a_token_in_an_error_is_told_to_nobody(
    hub: HubServer, tmp_path: Path, run_worker: Callable[[dict[str, str]], Finished]
) -> None:
    env = asked(hub, tmp_path, environment("toy-broken", how=TOKEN), {})
    ended = run_worker(env)
    assert ended.code == 1
    check_reported(env, stored(hub, env), r"PermissionError: no entry with \*\*\*")
    assert TOKEN not in ended.out + ended.err


@pytest.mark.parametrize(
    ("spec", "more", "pattern"),
    [
        ({}, {"SFT_EPOCHS": "two"}, r"SFT_EPOCHS='two'"),
        (train(learning_rate=0), {}, r"JobSpec train\.learning_rate = 0"),
        (environment("toy-broken"), {}, r"'toy-broken' cannot be loaded: OSError"),
    ],
    ids=["variable", "spec", "environment"],
)
def test_the_process_exits_with_1_after_one_line(
    hub: HubServer,
    tmp_path: Path,
    run_worker: Callable[[dict[str, str]], Finished],
    spec: dict[str, Any],
    more: dict[str, str],
    pattern: str,
) -> None:
    env = asked(hub, tmp_path, spec, more)
    ended = run_worker(env)
    assert ended.code == 1
    lines = [line for line in ended.err.splitlines() if " ERROR worker: " in line]
    assert len(lines) == 1 and re.search(pattern, lines[0])
    assert "Traceback" not in ended.err
    beat = check_reported(env, stored(hub, env), pattern)
    assert ended.beats[-1] == beat
    assert nothing_fetched(hub)


def test_an_environment_is_refused_while_the_weights_are_on_their_way(
    hub: HubServer, tmp_path: Path, run_worker: Callable[[dict[str, str]], Finished]
) -> None:
    hub.push("acme/tiny", {"model.safetensors": os.urandom(6_000_000)})
    hub.bytes_per_second = 10_000  # ten minutes
    env = asked(hub, tmp_path, environment("toy-broken"), {})
    began = time.monotonic()
    ended = run_worker(env)
    assert ended.code == 1 and ended.stages == ["boot", "error_sft"]
    check_reported(env, stored(hub, env), r"'toy-broken' cannot be loaded")
    assert any(one.path.endswith("/model.safetensors") for one in hub.requests)
    assert time.monotonic() - began < 120


def test_weights_that_do_not_fit_the_disk_are_refused_before_they_are_fetched(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("acme/tiny", {"model.safetensors": os.urandom(1_200_000), "model.onnx": os.urandom(900_000)})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=200_000))
    env = asked(hub, tmp_path, {}, {})
    ended = harness.run_main(env)
    assert isinstance(ended.error, ValueError) and "\n" not in str(ended.error)
    pattern = r"HF_HOME: 0\.0 GB are free in /.*'acme/tiny' need 0\.0 GB more; .*larger volume.*gpu\.disk_gb"
    check_reported(env, stored(hub, env), pattern)
    assert nothing_fetched(hub)
