"""What a run reports about itself: strict JSON, tokens and throughput."""

import json
import math
from pathlib import Path

import pytest

from accounting import RunMetrics, in_brief, strict_json
from tests.harness import strict

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "read_back"),
    [
        (NAN, None),
        ([INF, -INF, 1.5, 0.0], [None, None, 1.5, 0.0]),
        ({"a": {"b": [NAN, {"c": INF}]}}, {"a": {"b": [None, {"c": None}]}}),
        ((1, NAN), [1, None]),
        ({1: 2, None: 3, (4, 5): NAN}, {"1": 2, "None": 3, "(4, 5)": None}),
        (
            {"flag": True, "none": None, "text": "NaN é \ud800"},
            {"flag": True, "none": None, "text": "NaN é \ud800"},
        ),
        ({"path": Path("/a/b"), "error": ValueError("no")}, {"path": "/a/b", "error": "no"}),
        ({}, {}),
    ],
)
def test_strict_json(value, read_back):
    for indent in (None, 2):
        text = strict_json(value, indent=indent)
        assert text.isascii()
        assert strict(text) == read_back


def test_indentation():
    assert strict_json({"a": 1}) == '{"a": 1}'
    assert strict_json({"a": 1}, indent=2) == '{\n  "a": 1\n}'


@pytest.mark.parametrize(
    ("generated", "trained", "wall", "throughput"),
    [(300, 100, 2.0, 150.0), (0, 100, 4.0, 25.0), (300, 100, 0.0, 0.0), (0, 0, 5.0, 0.0), (0, 0, 0.0, 0.0)],
)
def test_throughput(generated, trained, wall, throughput):
    metrics = RunMetrics(wall_seconds=wall, train_tokens=trained, generated_tokens=generated)
    assert metrics.train_throughput_toks_per_s == throughput
    assert json.loads(metrics.to_json())["train_throughput_toks_per_s"] == throughput


def test_an_empty_run_has_every_field_of_the_contract():
    assert json.loads(RunMetrics().to_json()) == {
        "arm": "runpod",
        "phase": "",
        "seed": 0,
        "model_id": "",
        "wall_seconds": 0.0,
        "setup_seconds": 0.0,
        "train_throughput_toks_per_s": 0.0,
        "train_tokens": 0,
        "generated_tokens": 0,
        "notes": {},
    }


def test_metrics_are_strict_indented_json():
    text = RunMetrics(notes={"loss": NAN, "rewards": [0.5, INF]}).to_json()
    assert text.startswith('{\n  "')
    assert strict(text)["notes"] == {"loss": None, "rewards": [0.5, None]}


def test_train_meta():
    metrics = RunMetrics(
        phase="sft", model_id="m", wall_seconds=2.5, setup_seconds=1.0, train_tokens=7, notes={"loss": NAN}
    )
    assert strict(metrics.train_meta(Path("/w/adapter"))) == {
        "phase": "sft",
        "adapter_dir": "/w/adapter",
        "model_id": "m",
        "train_wall": 2.5,
        "setup_seconds": 1.0,
        "train_tokens": 7,
        "generated_tokens": 0,
        "notes": {"loss": None},
    }


def test_two_runs_share_no_notes():
    first, second = RunMetrics(), RunMetrics()
    first.notes["a"] = 1
    assert second.notes == {}


def test_an_error_in_brief_is_cut_between_words():
    assert in_brief(ValueError("a\n b")) == "a b"
    assert in_brief("x" * 290 + " my-secret-key", 300) == "x" * 290 + "..."
    assert in_brief("x" * 290 + " my-secret", 300) == "x" * 290 + " my-secret"
