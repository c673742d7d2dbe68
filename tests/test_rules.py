"""Combinations of settings that are refused or warned about before anything is spent."""

import logging
import sys
from types import MappingProxyType
from typing import Any

import pytest

import recipe
from job import cli, rules
from job.knobs import SettingsError
from job.settings import Settings, identify
from recipe import CatalogModel
from spec import JobSpec

BIG_MODEL = "Qwen/Qwen3.6-35B-A3B"
RL: dict[str, Any] = {"environment": {"id": "owner/name"}}
SFT: dict[str, Any] = {**RL, "algorithm": "sft"}
CATALOG = (
    CatalogModel("t/never", thinking="none"),
    CatalogModel("t/always", thinking="always"),
    CatalogModel("t/hybrid", thinking="hybrid"),
    CatalogModel("t/sft-only", thinking="hybrid", algorithms=("sft",)),
)


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real catalog and models of every ability."""
    more = {entry.model_id: entry for entry in CATALOG}
    monkeypatch.setattr(recipe, "CATALOG", MappingProxyType({**recipe.CATALOG, **more}))


def read(env: dict[str, str], spec: dict | None) -> Settings:
    return Settings.read(env, None if spec is None else JobSpec.parse(spec))


def train(spec: dict, **values: Any) -> dict:
    return {**spec, "train": values}


@pytest.mark.parametrize("spec", [RL, SFT], ids=["rl", "sft"])
def test_a_plain_job_is_accepted_without_a_warning(spec, caplog):
    with caplog.at_level(logging.WARNING):
        rules.check(read({}, spec))
    assert caplog.messages == []


REFUSALS: list[tuple[dict[str, str], dict | None, str]] = [
    ({}, None, "AUTOSLM_JOB_SPEC_JSON is empty and AUTOSLM_JOB_SPEC_PATH names no file"),
    ({"RUN_MODE": "sft"}, RL, "RUN_MODE='sft': the JobSpec's algorithm is 'grpo'"),
    ({"RUN_MODE": "rl"}, SFT, "RUN_MODE='rl': the JobSpec's algorithm is 'sft'"),
    ({}, {"algorithm": "sft"}, "JobSpec environment.id is empty"),
    ({}, {**RL, "model": "some/model"}, "JobSpec model='some/model': not in the catalog"),
    ({}, {**RL, "model": "t/sft-only"}, "JobSpec algorithm='grpo': the catalog has t/sft-only for sft only"),
    ({}, {**RL, "model": "t/never"}, "JobSpec thinking=true: t/never cannot think"),
    ({}, {**RL, "model": "t/never@v1"}, "JobSpec thinking=true: t/never@v1 cannot think"),
    ({}, {**SFT, "model": "t/always", "thinking": False}, "JobSpec thinking=false: t/always always thinks"),
    (
        {"AUTOSLM_QUANT": "4bit-qlora", "RL_USE_VLLM": "1", "AUTOSLM_DEVICE": "cpu"},
        RL,
        "RL_USE_VLLM=on: vLLM's CPU build has no 4-bit weights; set RL_USE_VLLM=0",
    ),
    (
        {"AUTOSLM_QUANT": "4bit-qlora", "RL_USE_VLLM": "1", "RL_ADAPTER_SYNC": "merge"},
        RL,
        "RL_ADAPTER_SYNC=merge: an adapter cannot be added to 4-bit weights",
    ),
    (
        {"AUTOSLM_REPORT_TO": "mlflow"},
        SFT,
        "AUTOSLM_REPORT_TO=mlflow: the package is missing; pip install mlflow, or leave it out",
    ),
    ({"WORLD_SIZE": "2"}, SFT, "WORLD_SIZE=2: not supported by this version"),
    ({"SFT_PACKING": "1"}, SFT, "SFT_PACKING=on: without flash attention"),
    ({"SFT_LIGER": "1"}, SFT, "SFT_LIGER=on: the package is missing"),
    ({"RL_GROUP_SIZE": "1"}, RL, "RL_GROUP_SIZE=1: a group of one has no advantage"),
    ({}, train(RL, group_size=1), "RL_GROUP_SIZE=1: a group of one has no advantage"),
    ({}, train(RL, temperature=0), "JobSpec train.temperature=0: identical samples carry no advantage"),
    ({"RL_VLLM_MAX_LEN": "1536"}, RL, "RL_VLLM_MAX_LEN=1536: must exceed the completion budget 1536"),
    (
        {"RL_VLLM_MAX_LEN": "99"},
        train(RL, max_tokens=100),
        "RL_VLLM_MAX_LEN=99: must exceed the completion budget",
    ),
]


@pytest.mark.parametrize(("env", "spec", "message"), REFUSALS)
def test_refused_in_one_line_that_says_what_to_do(env, spec, message, monkeypatch):
    for package in ("flash_attn", "liger_kernel"):
        monkeypatch.setitem(sys.modules, package, None)  # as when it is not installed
    with pytest.raises(SettingsError) as caught:
        rules.check(read(env, spec))
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_an_engine_that_is_not_installed_is_refused_only_when_it_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SettingsError, match="RL_USE_VLLM=on: the package is missing"):
        rules.check(read({}, RL))
    rules.check(read({"RL_USE_VLLM": "off"}, RL))
    rules.check(read({}, SFT))


@pytest.mark.parametrize(
    ("env", "spec"),
    [
        ({}, {**RL, "model": "some/model", "model_policy": "allow", "thinking": False}),
        ({}, {**RL, "model": "t/sft-only", "model_policy": "allow"}),
        ({}, {**RL, "model": f"{recipe.MODEL}@v1"}),
        ({}, {**RL, "model": "t/never", "thinking": False}),
        ({}, {**SFT, "model": "t/always", "thinking": True}),
        ({}, {**SFT, "model": "t/sft-only"}),
        ({}, {**RL, "model": "t/hybrid", "thinking": False}),
        ({"RUN_MODE": "SFT"}, SFT),
        ({"RL_VLLM_MAX_LEN": "1537", "RL_GROUP_SIZE": "2"}, RL),
        ({}, train(RL, temperature=0.01)),
    ],
)
def test_accepted(env, spec, caplog):
    with caplog.at_level(logging.WARNING):
        rules.check(read(env, spec))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("env", "spec"), [({"RL_GROUP_SIZE": "1", "RL_VLLM_MAX_LEN": "1"}, train(SFT, temperature=0))]
)
def test_what_only_rl_uses_does_not_stop_sft(env, spec):
    rules.check(read(env, spec))


def test_packages_that_are_there_are_accepted(tmp_path, monkeypatch):
    for package in ("flash_attn", "liger_kernel"):
        (tmp_path / f"{package}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    rules.check(read({"SFT_PACKING": "on", "SFT_LIGER": "on"}, SFT))
    with pytest.raises(SettingsError, match="SFT_PACKING=on"):
        rules.check(read({"SFT_PACKING": "on", "AUTOSLM_DEVICE": "cpu"}, SFT))


@pytest.mark.parametrize(
    ("env", "spec", "warning"),
    [
        (
            {},
            {**SFT, "model": "some/model", "model_policy": "allow"},
            "JobSpec thinking=true: whether some/model can think is not known to the catalog",
        ),
        ({"AUTOSLM_QUANT_REPO": "a/b"}, SFT, "AUTOSLM_QUANT_REPO=a/b is not used: the tier is bf16"),
        ({"PHASE": "warm"}, SFT, "PHASE=warm differs from the mode sft: files go under warm/local/seed0"),
        (
            {},
            train(
                SFT,
                **{"steps": 5, "group_size": 4, "temperature": 0.5, "max_tokens": 9, "kl_penalty_coef": 0.0},
                **{"advantage_clip": 1.0, "thinking_length_penalty_coef": 0.1, "stop_sequences": ["x"]},
            ),
            "the JobSpec sets what sft does not use, ignored: train.steps, train.group_size,"
            " train.temperature, train.max_tokens, train.kl_penalty_coef, train.advantage_clip,"
            " train.thinking_length_penalty_coef, train.stop_sequences",
        ),
        (
            {},
            train(RL, epochs=1, max_length=64),
            "the JobSpec sets what rl does not use, ignored: train.epochs, train.max_length",
        ),
    ],
)
def test_warnings(env, spec, warning, caplog):
    with caplog.at_level(logging.WARNING):
        rules.check(read(env, spec))
    assert caplog.messages == [warning]


@pytest.mark.parametrize("spec", [SFT, RL], ids=["sft", "rl"])
def test_fields_of_both_modes_give_no_warning(spec, caplog):
    both = {
        **{"learning_rate": 0.1, "batch_size": 8, "save_every": 3, "lora_rank": 8, "lora_alpha": 8},
        **{"seeds": [1], "hf_repo": "a/b", "init_from_adapter": "sft/r/seed0"},
    }
    with caplog.at_level(logging.WARNING):
        rules.warn_ignored(read({}, train(spec, **both)), JobSpec.parse(train(spec, **both)))
    assert caplog.messages == []


def test_resolve_checks_and_warns_and_what_was_said_is_logged_without_secrets(caplog):
    env = {"AUTOSLM_JOB_SPEC_JSON": JobSpec.parse(SFT).to_json(), "RL_STEP": "5", "SFT_EPOCHS": "3"}
    env |= {"HF_TOKEN": "hf_not_for_logs"}
    identity, problem = identify(env)
    assert problem is None
    with caplog.at_level(logging.INFO):
        settings = rules.resolve(env, identity)
        cli.announce(settings)
    assert settings.sft_epochs == 3
    unknown, table = caplog.messages
    assert unknown == "unknown variables, ignored: RL_STEP (did you mean RL_STEPS?)"
    assert table.startswith("settings:\n")
    assert "\n  variable: HF_TOKEN=***  SFT_EPOCHS=3\n" in table and "SFT_PACKING=off" in table
    assert "hf_not_for_logs" not in caplog.text
    with pytest.raises(SettingsError, match="RUN_MODE"):
        rules.resolve({**env, "RUN_MODE": "rl"}, identity)


# --- what the model allows ---


@pytest.mark.parametrize(
    ("env", "context", "length"),
    [({}, 8192, 3584), ({}, 3584, 3584), ({}, 2000, 2000), ({"RL_VLLM_MAX_LEN": "1600"}, 1600, 1600)],
)
def test_the_engine_fits_the_models_context(env, context, length):
    settings = read(env, RL)
    fitted = rules.fit_context(settings, context)
    assert fitted.rl_vllm_max_len == length
    assert fitted == settings.model_copy(update={"rl_vllm_max_len": length})


@pytest.mark.parametrize(
    ("env", "context", "message"),
    [
        ({"RL_VLLM_MAX_LEN": "4000"}, 3999, "RL_VLLM_MAX_LEN=4000: the model's context is 3999 tokens"),
        ({}, 1536, "RL_MAX_COMPLETION=1536: the model's context is 1536 tokens"),
    ],
)
def test_a_context_that_is_too_short_is_refused(env, context, message):
    with pytest.raises(SettingsError) as caught:
        rules.fit_context(read(env, RL), context)
    assert str(caught.value).startswith(message)
