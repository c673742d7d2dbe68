"""The JobSpec: what is accepted, what is refused, and in which words."""

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import recipe
from spec import BOOLEAN_WORDS, EnvironmentSpec, GpuSpec, JobSpec, SpecError, SpecTypeError, TrainSpec

ROOT = Path(__file__).parent.parent


def at(path: str, value: object) -> dict:
    """A spec object holding `value` at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def get(spec: object, path: str) -> object:
    for name in path.split("."):
        spec = getattr(spec, name)
    return spec


COUNTS = (
    *("steps", "epochs", "lora_rank", "lora_alpha", "batch_size", "max_length", "save_every"),
    *("group_size", "max_tokens"),
)
RATES = ("learning_rate", "temperature", "kl_penalty_coef", "advantage_clip", "thinking_length_penalty_coef")
GPU_INTEGERS = ("disk_gb", "max_wall_seconds", "max_retries", "network_volume_gb")
NAN, INF = math.nan, math.inf

DEFAULTS = {
    **{f"train.{name}": None for name in (*COUNTS, *RATES)},
    "model": "Qwen/Qwen3.5-4B",
    "model_policy": "catalog",
    "algorithm": "grpo",
    "run_id": "local",
    "thinking": True,
    "environment.id": "",
    "environment.params": {},
    "environment.pip": (),
    "train.hf_repo": "",
    "train.lora_rank": 32,
    "train.lora_alpha": 64,
    "train.seeds": (0,),
    "train.init_from_adapter": "",
    "train.stop_sequences": (),
    "gpu.type": "RTX 5090",
    "gpu.provider": "auto",
    "gpu.requested": "",
    "gpu.allow_unvalidated": None,
    "gpu.disk_gb": 60,
    "gpu.max_wall_seconds": 86400,
    "gpu.max_retries": 2,
    "gpu.network_volume": None,
    "gpu.network_volume_gb": 100,
    "gpu.datacenter": None,
}


@pytest.mark.parametrize(("path", "default"), DEFAULTS.items())
def test_absent_and_null_mean_the_default(path, default):
    for obj in ({}, at(path, None), {"environment": None, "train": None, "gpu": None}):
        assert get(JobSpec.parse(obj), path) == default


def test_every_field_has_a_tested_default():
    sections = {"": JobSpec, "environment.": EnvironmentSpec, "train.": TrainSpec, "gpu.": GpuSpec}
    names = {f"{prefix}{name}" for prefix, section in sections.items() for name in section.model_fields}
    assert names == {*DEFAULTS, "environment", "train", "gpu", "environment.path"}


def test_defaults_are_the_recipe():
    spec = JobSpec()
    assert (spec.model, spec.train.lora_rank, spec.train.lora_alpha) == (
        recipe.MODEL,
        recipe.LORA.rank,
        recipe.LORA.alpha,
    )


# path -> pairs of what is given and what is stored
ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "model": [("some/model@v1.0", "some/model@v1.0"), ("/models/tiny", "/models/tiny")],
    "model_policy": [("allow", "allow")],
    "algorithm": [("SFT", "sft"), ("Grpo", "grpo"), ("", "grpo"), (0, "grpo"), (False, "grpo"), ([], "grpo")],
    "run_id": [("", "local"), ("  ", "local"), ("../odd", "../odd")],
    "thinking": [(False, False), ("", False), ("  ", False), (" NO ", False)]
    + [(word.upper(), flag) for word, flag in BOOLEAN_WORDS.items()],
    "environment.id": [("gsm8k", "gsm8k"), ("prime/gsm8k-v1.2", "prime/gsm8k-v1.2")],
    "environment.params": [
        ({"a": [1, None, {"b": 2.5}]}, {"a": [1, None, {"b": 2.5}]}),
        ({"eval_env": "o/n", "eval_env_id": None}, {"eval_env": "o/n", "eval_env_id": None}),
    ],
    "environment.pip": [(["a", "b==1"], ("a", "b==1"))],
    "environment.path": [("", None), (False, None)],
    "train.hf_repo": [("", ""), ("Me_1/my.repo-2", "Me_1/my.repo-2")],
    "train.steps": [(1, 1), (3.0, 3)],
    "train.seeds": [([3.0, -1], (3, -1)), ((7,), (7,))],
    "train.init_from_adapter": [("sft/run/seed0", "sft/run/seed0"), ("o/r:sft/run/s0", "o/r:sft/run/s0")],
    "train.learning_rate": [(1, 1.0), (5e-324, 5e-324)],
    "train.temperature": [(0, 0.0)],
    "train.kl_penalty_coef": [(0.0, 0.0)],
    "train.advantage_clip": [(2, 2.0)],
    "train.thinking_length_penalty_coef": [(0, 0.0), (1, 1.0)],
    "train.stop_sequences": [
        ("END", ("END",)),
        ("", ()),
        ([], ()),
        (["", "a", ""], ("a",)),
        (("a",), ("a",)),
    ],
    "gpu.disk_gb": [(80.0, 80)],
    "gpu.max_retries": [(0, 0)],
    "gpu.allow_unvalidated": [("yes", True)],
    "gpu.datacenter": [("EU-1", "EU-1")],
}


@pytest.mark.parametrize(
    ("path", "value", "stored"), [(path, *pair) for path, pairs in ACCEPTED.items() for pair in pairs]
)
def test_accepted(path, value, stored):
    result = get(JobSpec.parse(at(path, value)), path)
    assert result == stored
    assert type(result) is type(stored)


WRONG_VALUES: dict[str, list[Any]] = {
    **{f"train.{name}": [0, -1, 1.5, NAN, INF] for name in COUNTS},
    **{f"train.{name}": [-1, NAN, INF, -INF, 10**400] for name in RATES},
    **{f"gpu.{name}": [0.5, NAN] for name in GPU_INTEGERS},
    "model": ["", " \n"],
    "model_policy": ["any"],
    "algorithm": ["ppo", " grpo"],
    "thinking": ["maybe"],
    "environment.id": ["a/b/c", "/b", "a/", "/", "a b", "../x", "./x", "a@1", "a\n"],
    "environment.params": [{"a": NAN}, {"a": {1, 2}}, {"a": "\ud800"}],
    "environment.params.eval_env_id": ["bare", "a/b/c"],
    "environment.params.eval_env": ["", "a/b\n"],
    "environment.path": ["./env", True],
    "train.hf_repo": ["repo", "a/b/c", "/b", "a/", "a/..", "a..b/c", "a b/c", " "],
    "train.seeds": [[]],
    "train.init_from_adapter": ["repo:prefix", "o/r:"],
    "train.learning_rate": [0, -1, NAN],
    "train.thinking_length_penalty_coef": [1.01, -0.1, INF],
}
WRONG_TYPES: dict[str, list[Any]] = {
    **{f"train.{name}": [True, "3", [1], {}] for name in COUNTS},
    **{f"train.{name}": [False, "0.1", [0.1]] for name in RATES},
    **{f"gpu.{name}": [True, "60"] for name in GPU_INTEGERS},
    "model": [5],
    "model_policy": [False],
    "algorithm": [True, ["sft"]],
    "run_id": [7],
    "thinking": [1, []],
    "environment": [[], "gsm8k"],
    "environment.id": [3],
    "environment.params": [[1], "x=1"],
    "environment.params.eval_env": [3],
    "environment.pip": ["one"],
    "train": [3, False],
    "train.hf_repo": [["a/b"]],
    "train.seeds": [3, "012"],
    "train.init_from_adapter": [True],
    "train.stop_sequences": [5, {"a": 1}],
    "gpu": ["RTX 5090"],
    "gpu.type": [5090],
    "gpu.network_volume": [1],
    "gpu.allow_unvalidated": [2],
}
REFUSED = [
    *[(path, value, SpecError) for path, values in WRONG_VALUES.items() for value in values],
    *[(path, value, SpecTypeError) for path, values in WRONG_TYPES.items() for value in values],
]


@pytest.mark.parametrize(("path", "value", "kind"), REFUSED)
def test_refused_with_field_value_and_rule_in_one_line(path, value, kind):
    with pytest.raises(ValueError, match=r"^JobSpec ") as caught:
        JobSpec.parse(at(path, value))
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message.startswith(f"JobSpec {path} = {repr(value)[:77]}")
    assert ": must be " in message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("path", "items", "culprit"),
    [
        ("train.seeds", [1, True], "train.seeds[1] = True: must be an integer"),
        ("train.seeds", ["1"], "train.seeds[0] = '1': must be an integer"),
        ("train.seeds", [None], "train.seeds[0] = None: must be an integer"),
        ("train.seeds", [2, [3]], "train.seeds[1] = [3]: must be an integer"),
        ("train.stop_sequences", ["a", 1], "train.stop_sequences[1] = 1: must be a string"),
        ("train.stop_sequences", [0], "train.stop_sequences[0] = 0: must be a string"),
        ("environment.pip", [["x"]], "environment.pip[0] = ['x']: must be a string"),
    ],
)
def test_a_bad_item_of_a_list_is_named(path, items, culprit):
    with pytest.raises(SpecTypeError) as caught:
        JobSpec.parse(at(path, items))
    assert str(caught.value) == f"JobSpec {culprit}"


def test_the_words_of_a_message():
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"train": {"learning_rate": -1, "steps": 0}, "model": ""})
    assert str(caught.value) == (
        "JobSpec model = '': must be a non-empty string: owner/name, owner/name@revision or a local path; "
        "JobSpec train.steps = 0: must be an integer >= 1; "
        "JobSpec train.learning_rate = -1: must be a finite number > 0"
    )


def test_one_wrong_type_among_errors_makes_it_a_type_error():
    with pytest.raises(TypeError, match=r"train.steps = 0.*train.epochs = True"):
        JobSpec.parse({"train": {"steps": 0, "epochs": True}})


def test_long_values_are_cut_at_80_characters():
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"train": {"hf_repo": "x" * 10_000}})
    shown = str(caught.value).split(" = ")[1].split(": must")[0]
    assert len(shown) == 80
    assert shown.endswith("...")


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("", "must be valid JSON"),
        ("{", "must be valid JSON"),
        ("null", "JobSpec = None: must be a JSON object"),
        ("[1]", "JobSpec = [1]: must be a JSON object"),
        ('"spec"', "JobSpec = 'spec': must be a JSON object"),
        ("NaN", "JobSpec = nan: must be a JSON object"),
        ('{"model": "a", "model": "b"}', "the key 'model' is given twice"),
        ('{"train": {"steps": 1, "steps": 1}}', "the key 'steps' is given twice"),
        ('{"train": {"learning_rate": NaN}}', "train.learning_rate = nan: must be a finite number > 0"),
        ('{"train": {"temperature": Infinity}}', "train.temperature = inf: must be a finite number >= 0"),
        ('{"train": {"temperature": 1e999}}', "train.temperature = inf: must be a finite number >= 0"),
        ('{"train": {"steps": -Infinity}}', "train.steps = -inf: must be an integer >= 1"),
        (
            '{"environment": {"params": {"x": NaN}}}',
            "environment.params = {'x': nan}: must be JSON with finite",
        ),
        ('{"train": {"steps": ' + "1" * 5000 + "}}", "must be valid JSON"),
        ("[" * 100_000, "must be valid JSON"),
        ('{"a":' * 100_000, "must be valid JSON"),
        ('{"train": {"seeds": ' + "[" * 900 + "]" * 900 + "}}", "train.seeds[0] = "),
    ],
)
def test_refused_json(text, culprit):
    with pytest.raises(SpecError) as caught:
        JobSpec.from_json(text)
    assert culprit in str(caught.value)
    assert str(caught.value).startswith("JobSpec ")
    assert str(caught.value).isprintable()


def test_python_objects_that_json_cannot_carry_are_refused():
    loop: dict = {}
    loop["loop"] = loop
    bomb: list = []
    for _ in range(100_000):
        bomb = [bomb]
    for value in (loop, {"bomb": bomb}):
        with pytest.raises(SpecError, match=r"^JobSpec environment\.params = .*: must be JSON"):
            JobSpec.parse({"environment": {"params": value}})
    with pytest.raises(SpecError, match=r"train\.steps = <list>"):
        JobSpec.parse({"train": {"steps": bomb}})


def warnings_of(caplog, obj: Any) -> list[str]:
    with caplog.at_level(logging.WARNING):
        JobSpec.parse(obj)
    return [record.getMessage() for record in caplog.records]


def test_unknown_keys_give_one_warning_with_paths_and_suggestions(caplog):
    obj = {
        "hf_repo": "a/b",
        "zzz": None,
        "train": {"lerning_rate": 1},
        "gpu": {"q": 0},
        "environment": {"ID": 1},
    }
    (message,) = warnings_of(caplog, obj)
    assert message.startswith("JobSpec: ignoring unknown keys: ")
    for part in (
        "hf_repo (did you mean train.hf_repo?)",
        "zzz",
        "train.lerning_rate (did you mean train.learning_rate?)",
        "gpu.q",
        "environment.ID",
    ):
        assert part in message


def test_unknown_keys_are_ignored(caplog):
    obj: dict[Any, Any] = {"zzz": 1, "train": {"zzz": [1]}, 5: 3}
    assert JobSpec.parse(obj) == JobSpec()
    assert len(caplog.records) == 1


def test_the_warning_stays_one_line(caplog):
    (message,) = warnings_of(caplog, {"a\nb": 1, "\ud800": 2, "x" * 500: 3})
    assert message.isprintable()
    assert len(message) < 250


def test_known_keys_give_no_warning(caplog):
    assert warnings_of(caplog, json.loads(JobSpec().to_json())) == []
    assert warnings_of(caplog, {"environment": {"path": None, "params": {"anything": {"goes": 1}}}}) == []


@pytest.mark.parametrize(
    ("spec", "field"),
    [(JobSpec(), "model"), (TrainSpec(), "steps"), (EnvironmentSpec(), "id"), (GpuSpec(), "type")],
)
def test_frozen(spec, field):
    with pytest.raises(ValidationError, match="frozen"):
        setattr(spec, field, getattr(spec, field))


def test_params_are_a_plain_dict_of_our_own():
    given_params = {"nested": {"list": [1]}}
    spec = JobSpec.parse({"environment": {"params": given_params}})
    given_params["nested"]["list"].append(2)
    assert spec.environment.params == {"nested": {"list": [1]}}
    assert type(spec.environment.params) is dict
    assert JobSpec().environment.params is not JobSpec().environment.params


@pytest.mark.parametrize(
    ("algorithm", "phase"), [("sft", "sft"), ("grpo", "rl"), ("GRPO", "rl"), (None, "rl")]
)
def test_phase(algorithm, phase):
    assert JobSpec.parse({"algorithm": algorithm}).phase == phase


NAMES = st.from_regex(r"[A-Za-z0-9_]{1,8}", fullmatch=True)
REPOS = st.builds("{}/{}".format, NAMES, NAMES)
TEXT = st.text(max_size=8)
INTEGERS = st.integers(1, 10**6)


def json_values(numbers):
    return st.recursive(
        st.none() | st.booleans() | numbers | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=6,
    )


ANY_JSON = json_values(st.integers() | st.floats())
FINITE_JSON = json_values(st.integers() | st.floats(allow_nan=False, allow_infinity=False))


def some(**fields):
    return st.fixed_dictionaries({}, optional={name: st.none() | value for name, value in fields.items()})


VALID = some(
    model=NAMES | REPOS,
    model_policy=st.sampled_from(["catalog", "allow"]),
    algorithm=st.sampled_from(["sft", "GRPO", "", 0]),
    run_id=TEXT,
    thinking=st.booleans() | st.sampled_from([*BOOLEAN_WORDS, ""]),
    environment=some(
        id=NAMES | REPOS, params=st.dictionaries(NAMES, FINITE_JSON, max_size=3), pip=st.lists(TEXT)
    ),
    train=some(
        hf_repo=REPOS,
        seeds=st.lists(st.integers(), min_size=1, max_size=3),
        learning_rate=st.floats(0, 1e9, exclude_min=True),
        temperature=st.floats(0, 1e9),
        thinking_length_penalty_coef=st.floats(0, 1),
        stop_sequences=TEXT | st.lists(TEXT, max_size=3),
        init_from_adapter=NAMES | st.builds("{}:{}".format, REPOS, NAMES),
        **dict.fromkeys(COUNTS, INTEGERS | INTEGERS.map(float)),
    ),
    gpu=some(type=TEXT, disk_gb=st.integers(), datacenter=TEXT, allow_unvalidated=st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(VALID)
def test_round_trip(obj):
    spec = JobSpec.parse(obj)
    text = spec.to_json()
    assert JobSpec.from_json(text) == spec
    assert JobSpec.from_json(json.dumps(obj)) == spec
    assert text == json.dumps(json.loads(text), sort_keys=True)


FIELDS = st.sampled_from([*DEFAULTS, "environment", "train", "gpu", "environment.path", "train.zzz"])


@settings(max_examples=150, deadline=None)
@given(FIELDS, ANY_JSON)
def test_anything_is_accepted_or_refused_in_one_line(path, value):
    try:
        spec = JobSpec.parse(at(path, value))
    except SpecError as error:
        assert str(error).startswith(f"JobSpec {path}")
        assert str(error).isprintable()
    else:
        assert JobSpec.from_json(spec.to_json()) == spec


def test_schema_describes_every_field():
    schema = JobSpec.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, field in section["properties"].items():
            assert field.get("description"), name
    train = schema["$defs"]["TrainSpec"]["properties"]
    assert train["lora_rank"]["minimum"] == 1
    assert train["learning_rate"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert train["thinking_length_penalty_coef"]["anyOf"][0]["maximum"] == 1
    assert train["seeds"]["minItems"] == 1
    assert schema["properties"]["algorithm"]["enum"] == ["sft", "grpo"]


@pytest.mark.slow
def test_import_brings_in_nothing_but_pydantic():
    heavy = "{'torch', 'numpy', 'verifiers', 'pydantic_settings', 'recipe', 'job'}"
    code = f"import sys, spec; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
