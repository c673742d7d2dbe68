"""Settings: where each value comes from, what is refused and in which words, and who a broken run is."""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

import recipe
from delivery.redaction import redactor
from job import knobs
from job.given import read_spec, secret_values
from job.knobs import SettingsError
from job.settings import Identity, Settings, identify
from spec import BOOLEAN_WORDS, JobSpec, SpecError

BLANK = ("", " ", "\t\n")
BIG_MODEL = "Qwen/Qwen3.6-35B-A3B"
FIELDS = {one.name: one.field for one in knobs.declared(Settings)}
VARIABLES = [one.name for one in knobs.declared(Settings) if one.is_variable]
BOOLEANS = [one.name for one in knobs.declared(Settings) if one.rule.startswith("on | off")]


def at(path: str, value: object) -> dict:
    """A spec object holding `value` at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def resolve(variable: str, env: Mapping[str, str] | None = None, spec: dict | None = None) -> Any:
    """What one variable's setting turns out to be."""
    read = Settings.read(env or {}, None if spec is None else JobSpec.parse(spec))
    return getattr(read, FIELDS[variable])


def refusal(env: Mapping[str, str], spec: dict | None = None) -> str:
    """The message that these variables are refused with."""
    with pytest.raises(SettingsError) as caught:
        Settings.read(env, None if spec is None else JobSpec.parse(spec))
    message = str(caught.value)
    assert message == message.strip() != "" and len(message.splitlines()) == 1
    return message


# --- defaults ---

# Without a JobSpec: mode sft, thinking on. None: decided later, by what the run finds.
DEFAULTS = {
    "RUN_MODE": "sft",
    "PHASE": "sft",
    "RUN_ID": "local",
    "SEED": 0,
    "HF_REPO": "",
    "HF_TOKEN": "",
    "HF_ENDPOINT": "",
    "HF_HUB_ENABLE_HF_TRANSFER": "",
    "BENCH_HF_MODEL": "Qwen/Qwen3.5-4B",
    "LORA_TARGETS": "all-linear",
    "WORLD_SIZE": 1,
    "AUTOSLM_ARM": "runpod",
    "AUTOSLM_DEVICE": "cuda",
    "AUTOSLM_EVAL_EVERY_STEPS": 0,
    "AUTOSLM_EVAL_MAX_NEW": None,
    "AUTOSLM_EVAL_NUM": 64,
    "AUTOSLM_EVAL_PASS_THRESHOLD": None,
    "AUTOSLM_GRACE_S": 25.0,
    "AUTOSLM_HEARTBEAT_MIN_S": 60.0,
    "AUTOSLM_LOG_FLUSH_S": 10.0,
    "AUTOSLM_LOG_LEVEL": "info",
    "AUTOSLM_MERGE": False,
    "AUTOSLM_QUANT": "bf16",
    "AUTOSLM_QUANT_REPO": "",
    "AUTOSLM_REPORT_TO": (),
    "AUTOSLM_STORE_DIR": Path("artifacts"),
    "AUTOSLM_TEXT_ONLY": True,
    "AUTOSLM_THINKING": True,
    "AUTOSLM_UPLOAD_DEADLINE_S": 1800.0,
    "AUTOSLM_WORK_DIR": Path("/tmp"),
    "SFT_COMPLETION_ONLY": True,
    "SFT_EPOCHS": 2,
    "SFT_LIGER": False,
    "SFT_MAX_EXAMPLES": 0,
    "SFT_MAX_STEPS": 0,
    "SFT_PACKING": False,
    "SFT_PER_DEVICE_BS": 4,
    "SFT_SAVE_STEPS": 50,
    "RL_ADAPTER_SYNC": "adapter",
    "RL_GROUP_SIZE": 8,
    "RL_MAX_COMPLETION": 1536,
    "RL_PER_DEVICE_PROMPTS": None,
    "RL_PROMPTS_PER_STEP": 64,
    "RL_SAVE_STEPS": 20,
    "RL_STEPS": 150,
    "RL_TOOL_LOOP": "env",
    "RL_USE_VLLM": True,
    "RL_VLLM_EAGER": False,
    "RL_VLLM_GPU_UTIL": None,
    "RL_VLLM_MAX_LEN": 2048 + 1536,
    "RL_VLLM_SLEEP": True,
}


def test_every_default():
    read = Settings.read({}, None)
    assert {name: getattr(read, FIELDS[name]) for name in VARIABLES} == DEFAULTS


def test_fields_without_a_variable_have_the_recipe_as_default():
    read = Settings.read({}, None)
    found = {one.name: getattr(read, one.field) for one in knobs.declared(Settings) if not one.is_variable}
    assert found == {
        "train.lora_rank": 32,
        "train.lora_alpha": 64,
        "train.init_from_adapter": "",
        "train.learning_rate": 1e-4,
        "train.batch_size": 32,
        "train.max_length": 2048,
        "train.temperature": 1.0,
        "train.kl_penalty_coef": 0.0,
        "train.advantage_clip": 0.0,
        "train.thinking_length_penalty_coef": 0.0,
        "train.stop_sequences": (),
    }


@pytest.mark.parametrize(
    ("env", "spec", "expected"),
    [
        ({}, {"algorithm": "sft"}, {"mode": "sft", "phase": "sft", "learning_rate": 1e-4}),
        ({}, {"algorithm": "grpo"}, {"mode": "rl", "phase": "rl", "learning_rate": 1e-5}),
        ({"RUN_MODE": "rl"}, None, {"mode": "rl", "phase": "rl", "learning_rate": 1e-5}),
        ({"RUN_MODE": "sft"}, {"algorithm": "grpo"}, {"mode": "sft", "phase": "rl"}),
        (
            {},
            {"thinking": True},
            {"rl_max_completion": 1536, "rl_vllm_max_len": 3584, "sft_max_length": 2048},
        ),
        (
            {},
            {"thinking": False},
            {"rl_max_completion": 320, "rl_vllm_max_len": 2368, "sft_max_length": 1024},
        ),
        ({"RL_MAX_COMPLETION": "100"}, None, {"rl_vllm_max_len": 2148}),
        ({}, {"train": {"max_tokens": 50, "max_length": 7}}, {"rl_vllm_max_len": 2098, "sft_max_length": 7}),
        ({"AUTOSLM_DEVICE": "cpu"}, None, {"rl_vllm_eager": True}),
        ({"AUTOSLM_DEVICE": "cpu", "RL_VLLM_EAGER": "off"}, None, {"rl_vllm_eager": False}),
        ({}, {"train": {"seeds": [5, 6]}}, {"seed": 5}),
    ],
)
def test_defaults_that_depend_on_other_settings(env, spec, expected):
    read = Settings.read(env, None if spec is None else JobSpec.parse(spec))
    assert {name: getattr(read, name) for name in expected} == expected


def test_the_micro_batch_ceiling_is_decided_by_thinking():
    assert [recipe.RL.completions_per_device(thinking) for thinking in (True, False)] == [2, 8]


def test_documented_defaults_are_the_real_ones():
    read = Settings.read({}, None)
    for one in knobs.declared(Settings):
        field = Settings.model_fields[one.field]
        if field.default_factory is None and one.default == knobs.plain(field.default):
            assert one.default == knobs.plain(getattr(read, one.field)), one.name


# --- precedence ---

# variable: its text and value; JobSpec field: its value and what comes of it; what the recipe says
PRECEDENCE: dict[str, tuple[str, Any, str, Any, Any, Any]] = {
    "RUN_MODE": ("rl", "rl", "algorithm", "sft", "sft", "sft"),
    "PHASE": ("warm", "warm", "algorithm", "grpo", "rl", "sft"),
    "RUN_ID": ("mine", "mine", "run_id", "theirs", "theirs", "local"),
    "SEED": ("7", 7, "train.seeds", [3, 4], 3, 0),
    "HF_REPO": ("a/mine", "a/mine", "train.hf_repo", "a/theirs", "a/theirs", ""),
    "SFT_EPOCHS": ("5", 5, "train.epochs", 4, 4, 2),
    "SFT_SAVE_STEPS": ("5", 5, "train.save_every", 4, 4, 50),
    "RL_STEPS": ("5", 5, "train.steps", 4, 4, 150),
    "RL_PROMPTS_PER_STEP": ("5", 5, "train.batch_size", 4, 4, 64),
    "RL_GROUP_SIZE": ("5", 5, "train.group_size", 4, 4, 8),
    "RL_MAX_COMPLETION": ("5", 5, "train.max_tokens", 4, 4, 1536),
    "RL_SAVE_STEPS": ("5", 5, "train.save_every", 4, 4, 20),
    "AUTOSLM_QUANT": ("bf16", "bf16", "model", BIG_MODEL, "4bit-qlora", "bf16"),
    "RL_USE_VLLM": ("on", True, "model", BIG_MODEL, False, True),
}
ROWS = [(name, *row) for name, row in PRECEDENCE.items()]


@pytest.mark.parametrize(("name", "text", "set_to", "path", "said", "from_spec", "from_recipe"), ROWS)
def test_variable_then_spec_or_catalog_then_recipe(name, text, set_to, path, said, from_spec, from_recipe):
    spec = at(path, said)
    assert resolve(name, {name: text}, spec) == set_to
    assert resolve(name, {name: f" {text}\n"}) == set_to
    assert resolve(name, {}, spec) == from_spec
    assert [resolve(name, {name: blank}, spec) for blank in BLANK] == [from_spec] * 3
    assert resolve(name, {}) == from_recipe
    if path != "algorithm":  # absent means grpo there
        assert resolve(name, {}, at(path, None) | {"algorithm": "sft"}) == from_recipe


def test_every_spec_field_is_honoured_on_its_own():
    spec = {
        **{"learning_rate": 0.5, "lora_rank": 3, "lora_alpha": 5, "batch_size": 6, "max_length": 9},
        **{"init_from_adapter": "sft/a/seed0", "temperature": 0.0, "kl_penalty_coef": 0.25},
        **{"advantage_clip": 2.0, "thinking_length_penalty_coef": 1.0, "stop_sequences": ("END",)},
    }
    read = Settings.read({}, JobSpec.parse({"train": spec}))
    found = {one.name: getattr(read, one.field) for one in knobs.declared(Settings) if not one.is_variable}
    assert found == {f"train.{name}": value for name, value in spec.items()}


@pytest.mark.parametrize(
    ("env", "spec", "field", "value"),
    [
        ({"SEED": "0"}, {"train": {"seeds": [5]}}, "seed", 0),
        ({"SFT_MAX_STEPS": "0"}, None, "sft_max_steps", 0),
        ({"AUTOSLM_HEARTBEAT_MIN_S": "0"}, None, "heartbeat_min_s", 0.0),
        ({"AUTOSLM_LOG_FLUSH_S": "0"}, None, "log_flush_s", 0.0),
        ({"AUTOSLM_EVAL_NUM": "0"}, None, "eval_num", 0),
        ({"AUTOSLM_EVAL_PASS_THRESHOLD": "0"}, None, "eval_pass_threshold", 0.0),
        ({"RL_VLLM_SLEEP": "0"}, None, "rl_vllm_sleep", False),
        ({}, {"train": {"temperature": 0}}, "temperature", 0.0),
    ],
)
def test_zero_is_a_value(env, spec, field, value):
    read = Settings.read(env, None if spec is None else JobSpec.parse(spec))
    assert getattr(read, field) == value and type(getattr(read, field)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "spec", "value"),
    [
        ("BENCH_HF_MODEL", "a/mine", None, "a/mine"),
        ("BENCH_HF_MODEL", "a/mine", {"model": "a/theirs"}, "a/theirs"),
        ("BENCH_HF_MODEL", "a/mine", {}, recipe.MODEL),
        ("AUTOSLM_THINKING", "off", None, False),
        ("AUTOSLM_THINKING", "off", {}, True),
        ("AUTOSLM_THINKING", "on", {"thinking": False}, False),
    ],
)
def test_what_only_counts_without_a_job_spec(name, text, spec, value):
    assert resolve(name, {name: text}, spec) == value


def test_the_process_environment_is_not_read(monkeypatch):
    for name in ("SFT_EPOCHS", "sft_epochs", "AUTOSLM_ARM"):
        monkeypatch.setenv(name, "9")
    read = Settings.read({}, None)
    assert (read.sft_epochs, read.arm) == (2, "runpod")


def test_origins_and_table():
    env = {"SFT_EPOCHS": "3", "HF_TOKEN": "hf_secret", "RUN_ID": " "}
    spec = JobSpec.parse({"algorithm": "sft", "run_id": "r", "train": {"save_every": 7}})
    table = {name: (value, origin) for name, value, origin in Settings.read(env, spec).table()}
    assert table["SFT_EPOCHS"] == ("3", "variable")
    assert table["RUN_ID"] == ("r", "JobSpec")
    assert table["SFT_SAVE_STEPS"] == ("7", "JobSpec")
    assert table["AUTOSLM_QUANT"] == ("bf16", "catalog")
    assert table["SFT_PACKING"] == ("off", "default")
    assert table["HF_TOKEN"] == ("***", "variable")
    assert not any(name.startswith("RL_") for name in table)


# --- types ---


@pytest.mark.parametrize("name", BOOLEANS)
def test_boolean_words(name):
    for word, value in BOOLEAN_WORDS.items():
        assert [resolve(name, {name: text}) for text in (word, word.upper(), f" {word.title()} ")] == [
            value
        ] * 3
    for text in ("maybe", "2", "y", "onn", "enabled", "-1"):
        message = refusal({name: text})
        assert message.startswith(f"{name}={text!r}: must be on | off")


def test_there_are_booleans():
    assert {"SFT_PACKING", "RL_USE_VLLM", "AUTOSLM_TEXT_ONLY", "AUTOSLM_THINKING", "AUTOSLM_MERGE"} < {
        *BOOLEANS
    }


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("SEED", "one", "whole number >= 0 and < 4294967296"),
        ("SEED", "-1", "whole number >= 0"),
        ("SEED", "4294967296", "whole number >= 0"),
        ("SEED", "1e3", "whole number >= 0"),
        ("SFT_EPOCHS", "two", "whole number >= 1"),
        ("SFT_EPOCHS", "1.5", "whole number >= 1"),
        ("SFT_EPOCHS", "0", "whole number >= 1"),
        ("SFT_MAX_EXAMPLES", "-3", "whole number >= 0"),
        ("RL_STEPS", "nan", "whole number >= 1"),
        ("RL_PER_DEVICE_PROMPTS", "0", "whole number >= 1"),
        ("RL_VLLM_GPU_UTIL", "1.5", "number > 0 and < 1"),
        ("RL_VLLM_GPU_UTIL", "nan", "number > 0 and < 1"),
        ("RL_VLLM_GPU_UTIL", "half", "number > 0 and < 1"),
        ("AUTOSLM_UPLOAD_DEADLINE_S", "0", "number > 0"),
        ("AUTOSLM_UPLOAD_DEADLINE_S", "inf", "number > 0"),
        ("AUTOSLM_GRACE_S", "soon", "number > 0"),
        ("AUTOSLM_LOG_FLUSH_S", "-1", "number >= 0"),
        ("RUN_MODE", "ppo", "sft | rl"),
        ("AUTOSLM_QUANT", "int8", "bf16 | 4bit-qlora"),
        ("AUTOSLM_DEVICE", "tpu", "cuda | cpu"),
        ("AUTOSLM_LOG_LEVEL", "loud", "debug | info"),
        ("RL_ADAPTER_SYNC", "copy", "adapter | merge"),
        ("RL_TOOL_LOOP", "both", "env | trl"),
        ("HF_REPO", "nobody", "owner/name"),
        ("HF_REPO", "a/b/c", "owner/name"),
        ("AUTOSLM_QUANT_REPO", "a b/c", "owner/name"),
        ("AUTOSLM_REPORT_TO", "excel", "comma list"),
    ],
)
def test_a_malformed_variable_is_refused_in_one_line(name, text, rule):
    message = refusal({name: text})
    assert message.startswith(f"{name}={text!r}: must be {rule}"), message


def test_all_that_is_wrong_is_named_at_once():
    message = refusal({"SFT_EPOCHS": "x", "RL_STEPS": "y", "SFT_PACKING": "z"})
    assert [part.partition("=")[0] for part in message.split("; ")] == [
        "SFT_EPOCHS",
        "SFT_PACKING",
        "RL_STEPS",
    ]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("AUTOSLM_HEARTBEAT_MIN_S", ("soon", "-1", "nan", "inf")),
        ("AUTOSLM_EVAL_EVERY_STEPS", ("x", "-1", "1.5")),
        ("AUTOSLM_EVAL_NUM", ("many", "-1", "nan")),
        ("AUTOSLM_EVAL_MAX_NEW", ("0", "-5", "x")),
        ("AUTOSLM_EVAL_PASS_THRESHOLD", ("high", "nan", "inf")),
    ],
)
@pytest.mark.filterwarnings("error")
def test_lenient_variables_warn_and_fall_back(name, texts, caplog):
    for text in texts:
        caplog.clear()
        assert resolve(name, {name: text}) == DEFAULTS[name]
        assert [f"{name}={text!r}" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("all-linear", "all-linear"),
        (" ,all-linear, ,", "all-linear"),
        ("q_proj", ("q_proj",)),
        (" q_proj , v_proj,,", ("q_proj", "v_proj")),
    ],
)
def test_lora_targets(text, targets):
    assert resolve("LORA_TARGETS", {"LORA_TARGETS": text}) == targets


def test_lora_targets_that_name_nothing_are_refused():
    assert refusal({"LORA_TARGETS": " , "}).startswith("LORA_TARGETS=")


@pytest.mark.parametrize(
    ("env", "token"),
    [
        ({"HF_TOKEN": "hf_one"}, "hf_one"),
        ({"HUGGINGFACE_TOKEN": " hf_two "}, "hf_two"),
        ({"HF_TOKEN": " ", "HUGGINGFACE_TOKEN": "hf_two"}, "hf_two"),
        ({"HF_TOKEN": "hf_one", "HUGGINGFACE_TOKEN": "hf_one"}, "hf_one"),
    ],
)
def test_both_names_of_the_token(env, token):
    assert Settings.read(env, None).token == token


def test_settings_are_frozen():
    for read in (Settings.read({}, None), Identity.read({}, None)):
        with pytest.raises(ValidationError, match="frozen"):
            read.run_id = "other"  # type: ignore[misc]


# --- names nobody knows ---


def test_unknown_names_give_one_warning_with_suggestions(caplog):
    env = {"RL_STEP": "5", "AUTOSLM_ZZZZ": "1", "SFT_EPOCS": "2", "SFT_EPOCHS": "2", "FOO_BAR": "1"}
    knobs.warn_unknown_names(Settings, env)
    (record,) = caplog.records
    message = record.getMessage()
    assert "RL_STEP (did you mean RL_STEPS?)" in message and "SFT_EPOCS (did you mean SFT_EPOCHS?)" in message
    assert "AUTOSLM_ZZZZ" in message and "FOO_BAR" not in message


def test_known_names_give_no_warning(caplog):
    launchers = {
        *("AUTOSLM_ENVS_MANIFEST", "AUTOSLM_WORKER_EXTRA_DEPS", "AUTOSLM_SETUP_GRACE_S"),
        *("AUTOSLM_STALL_AFTER_S", "AUTOSLM_VAST_LOAD_TIMEOUT_S"),
    }
    known = {*VARIABLES, *launchers, "AUTOSLM_JOB_SPEC_JSON", "AUTOSLM_JOB_SPEC_PATH"}
    knobs.warn_unknown_names(Settings, {**dict.fromkeys(known, "1"), "RL_STEP": " ", "autoslm_x": "1"})
    assert not caplog.records


# --- the spec ---


def test_json_wins_over_the_path(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text('{"run_id": "from-file"}')
    in_file = {"AUTOSLM_JOB_SPEC_PATH": str(path)}
    found = [
        read_spec({**in_file, "AUTOSLM_JOB_SPEC_JSON": '{"run_id": "from-text"}'}),
        *(read_spec({**in_file, "AUTOSLM_JOB_SPEC_JSON": blank}) for blank in BLANK),
    ]
    assert [spec and spec.run_id for spec in found] == ["from-text", *["from-file"] * 3]


def test_no_spec(tmp_path):
    assert read_spec({}) is None
    assert [read_spec({"AUTOSLM_JOB_SPEC_PATH": str(path)}) for path in (tmp_path, tmp_path / "no")] == [
        None
    ] * 2


def test_a_spec_that_cannot_be_read(tmp_path):
    path = tmp_path / "spec.json"
    path.write_bytes(b"\xff{}")
    for name in (str(path), "x" * 5000):
        with pytest.raises(SpecError, match=r"AUTOSLM_JOB_SPEC_PATH=.*cannot be read"):
            read_spec({"AUTOSLM_JOB_SPEC_PATH": name})
    path.write_text("{")
    with pytest.raises(SpecError):
        read_spec({"AUTOSLM_JOB_SPEC_PATH": str(path)})


# --- who a run is ---


def test_a_good_identity():
    env = {"RUN_MODE": "rl", "PHASE": "warm_up", "RUN_ID": "v1.2-a", "SEED": "007"}
    identity, problem = identify(env)
    assert (problem, identity.prefix, identity.mode) == (None, "warm_up/v1.2-a/seed7", "rl")


UNREADABLE = {"AUTOSLM_JOB_SPEC_JSON": "{"}
RL_SPEC = {"AUTOSLM_JOB_SPEC_JSON": '{"algorithm": "grpo", "run_id": "r", "train": {"seeds": [4]}}'}


@pytest.mark.parametrize(
    ("env", "prefix", "mode"),
    [
        (UNREADABLE, "sft/local/seed0", "sft"),
        (UNREADABLE | {"RUN_MODE": "rl"}, "rl/local/seed0", "rl"),
        (UNREADABLE | {"RUN_MODE": "rl", "PHASE": " "}, "rl/local/seed0", "rl"),
        (
            UNREADABLE | {"RUN_MODE": "rl", "PHASE": "warm", "RUN_ID": "r9", "SEED": "3"},
            "warm/r9/seed3",
            "rl",
        ),
        (UNREADABLE | {"RUN_MODE": "ppo"}, "ppo/local/seed0", "sft"),
        (UNREADABLE | {"RUN_ID": "../../etc", "SEED": "../7"}, "sft/_.._etc/seed.._7", "sft"),
        ({"AUTOSLM_JOB_SPEC_PATH": "x" * 5000, "RUN_MODE": "rl"}, "rl/local/seed0", "rl"),
        ({"RUN_MODE": "ppo"}, "ppo/local/seed0", "sft"),
        ({"SEED": "one"}, "sft/local/seedone", "sft"),
        ({"SEED": "-1"}, "sft/local/seed-1", "sft"),
        ({"PHASE": "a/b"}, "a_b/local/seed0", "sft"),
        ({"PHASE": ".."}, "_/local/seed0", "sft"),
        ({"RUN_ID": "-rf /"}, "sft/rf__/seed0", "sft"),
        ({"RUN_ID": "x" * 300}, f"sft/{'x' * 128}/seed0", "sft"),
        ({"RUN_ID": "a\udcff"}, "sft/a_/seed0", "sft"),
        (RL_SPEC | {"SEED": "x"}, "rl/r/seedx", "rl"),
        (RL_SPEC | {"SEED": "x", "RUN_MODE": "sft"}, "rl/r/seedx", "sft"),
        (RL_SPEC | {"RUN_ID": "a b"}, "rl/a_b/seed4", "rl"),
        ({"AUTOSLM_JOB_SPEC_JSON": '{"run_id": "../odd"}'}, "rl/_odd/seed0", "rl"),
        ({"AUTOSLM_JOB_SPEC_JSON": '{"train": {"seeds": [-1]}}'}, "rl/local/seed-1", "rl"),
        ({"HF_REPO": "nobody", "AUTOSLM_UPLOAD_DEADLINE_S": "x"}, "sft/local/seed0", "sft"),
    ],
)
def test_a_broken_identity_is_still_somebody(env, prefix, mode):
    identity, problem = identify(env)
    assert isinstance(problem, ValueError) and len(str(problem).splitlines()) == 1
    assert (identity.prefix, identity.mode) == (prefix, mode)


def test_a_broken_identity_keeps_what_could_be_read():
    env = {"SEED": "x", "HF_REPO": "a/b", "HF_TOKEN": "hf_12345", "AUTOSLM_WORK_DIR": "/w", "RUN_ID": "r"}
    identity, problem = identify({**env, "AUTOSLM_LOG_FLUSH_S": "0"})
    assert problem is not None and "SEED='x'" in str(problem)
    assert (identity.hf_repo, identity.token, identity.work_dir) == ("a/b", "hf_12345", Path("/w"))
    assert (identity.log_flush_s, identity.secrets, identity.seed) == (0.0, ("hf_12345",), "x")


def test_a_seed_that_can_be_read_stays_a_number():
    identity, problem = identify({"RUN_ID": "a b", "SEED": "5"})
    assert problem is not None and identity.seed == 5


@pytest.mark.parametrize("repo", ["-a/b", ".a/b", "_/_", "a/b.", "é/b"])
def test_a_repository_is_the_same_thing_in_spec_and_variable(repo):
    """What the JobSpec lets pass the settings must not refuse: that would be outside every error boundary."""
    outcomes = []
    for env in ({"HF_REPO": repo}, {"AUTOSLM_JOB_SPEC_JSON": json.dumps(at("train.hf_repo", repo))}):
        identity, problem = identify(env)
        outcomes.append((problem is None, identity.hf_repo))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"HF_TOKEN": "hf_tök12345"}, "HF_TOKEN=***: must be text without spaces"),
        ({"HUGGINGFACE_TOKEN": "hf_a b12345"}, "HF_TOKEN=***: must be text without spaces"),
        ({"HF_ENDPOINT": "hub.example"}, "HF_ENDPOINT='hub.example': must be http"),
        ({"HF_ENDPOINT": "ftp://hub.example"}, "HF_ENDPOINT='ftp://hub.example': must be http"),
    ],
)
def test_a_token_or_an_address_that_cannot_be_one_is_no_trouble_with_the_hub(env, said):
    identity, problem = identify({"RUN_ID": "r", **env})
    assert isinstance(problem, SettingsError) and str(problem).startswith(said)
    assert (identity.run_id, identity.token, identity.endpoint) == ("r", "", "")


def test_secrets_are_collected_and_not_shown():
    env = {
        **{"HF_TOKEN": "hf_0123456789", "OPENAI_API_KEY": " key-of-somebody ", "MY_PASSWORD": "open sesame"},
        **{"SHORT_TOKEN": "abc", "AWS_SECRET_ACCESS_KEY": "", "RUN_ID": "not-a-secret"},
    }
    identity, problem = identify(env)
    assert problem is None
    assert {*identity.secrets} == {"hf_0123456789", "key-of-somebody", "open sesame"}
    for read in (identity, Settings.read(env, None)):
        assert not any(secret in repr(read) for secret in identity.secrets)


# --- anything at all ---

NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([2**32, 10**400, -0.0, 1e308]))
WORDS = st.sampled_from(
    [*BOOLEAN_WORDS, "sft", "rl", "cpu", "4bit-qlora", "a/b", "all-linear,", "wandb", "../x"]
)
TEXTS = st.one_of(st.text(st.characters()), NUMBERS.map(str), WORDS, WORDS.map(str.upper))
SPECS = st.sampled_from(
    ["", "{}", '{"algorithm": "sft"}', '{"train": {"seeds": [-3], "hf_repo": "-a/b"}}', "{"]
)
NAMES = [*VARIABLES, "HUGGINGFACE_TOKEN", "AUTOSLM_JOB_SPEC_PATH"]
BOUNDS = ((Ge, "ge", operator.ge), (Gt, "gt", operator.gt), (Le, "le", operator.le), (Lt, "lt", operator.lt))


def in_range(one: knobs.Knob, value: Any) -> bool:
    """Whether a resolved number keeps the bounds of its declaration."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    bounds = [
        compare(value, getattr(rule, attribute))
        for rule in Settings.model_fields[one.field].metadata
        for kind, attribute, compare in BOUNDS
        if isinstance(rule, kind)
    ]
    return all(bounds) and not (isinstance(value, float) and not math.isfinite(value))


@hypothesis_settings(max_examples=150, deadline=None)
@given(env=st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=6), spec=SPECS)
def test_anything_is_either_refused_in_one_line_or_in_range(env, spec):
    identity, problem = identify({**env, "AUTOSLM_JOB_SPEC_JSON": spec})
    assert re.fullmatch(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*/seed[\w.-]*", identity.prefix, re.ASCII)
    if problem is not None:
        assert isinstance(problem, SettingsError | SpecError) and len(str(problem).splitlines()) == 1
        return
    try:
        read = Settings.read(env, identity.spec)
    except SettingsError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert [one.name for one in knobs.declared(Settings) if not in_range(one, getattr(read, one.field))] == []


def test_secrets_among_the_loaders_parameters_are_known():
    params = {
        **{"api_key": "plainSecretValue", "judge": {"auth_token": "abcdefgh1234"}, "level": "not-a-secret"},
        **{"tokenizer": "acme/tokenizer", "judge_api_key_var": "OPENAI_API_KEY", "token_path": "/run/token"},
    }
    env = {"AUTOSLM_JOB_SPEC_JSON": json.dumps({"environment": {"id": "e", "params": params}})}
    identity, _ = identify(env)
    assert set(identity.secrets) == {"plainSecretValue", "abcdefgh1234"}


PARAMS = '{"judge_api_key": "plainSecretValue", "keys": {"auth_tokens": {"of the judge": ["abcdefgh1234"]}}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"environment": {{"params": {PARAMS}, "x": NaN}}}}}}',
        f'{{"environment": {{"params": {PARAMS}}}}}, "train": {{"steps": 0}}}}',
        json.dumps(f'{{"environment": {{"params": {PARAMS}}}}}}}'),
        '{"environment": {"params": {"judge_api_key": "plainSecretValue", "x": 1',
        '{"x": 1, "judge_api_key": "plainSecretValue", "' + "y" * 200,
        '{"x": "' + "y" * 38 + '", "judge_api_key": "plainSecretValue", "' + "y" * 200,
    ],
)
def test_a_jobspec_that_is_refused_gives_no_secret_away(text):
    identity, problem = identify({"AUTOSLM_JOB_SPEC_JSON": text})
    said = redactor(identity.secrets)(str(problem))
    assert problem is not None and "plainSecretValue" in identity.secrets
    assert "plain" not in said and "abcd" not in said
    assert command_redactor(text)("at plainSecretValue!") == "at ***!"


def command_redactor(text: str) -> Callable[[str], str]:
    """What takes secrets out of the log: it is made before the JobSpec has been judged."""
    return redactor(secret_values({"AUTOSLM_JOB_SPEC_JSON": text}))


def test_secrets_under_a_name_above_them_and_in_a_file_are_known(tmp_path):
    params = json.loads(PARAMS + "}")
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"environment": {"id": "e", "params": params}}))
    assert {*secret_values({"AUTOSLM_JOB_SPEC_PATH": str(path)})} == {
        "plainSecretValue",
        "abcdefgh1234",
    }
