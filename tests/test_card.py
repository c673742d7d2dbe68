"""Model cards, from plain facts: metadata that the Hub takes, tables, and code that is code."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import replace

import pytest

from delivery import card
from delivery.card import Facts
from tests.hub_server import card_problems

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FACTS = Facts(
    prefix="sft/r1/seed0",
    mode="sft",
    base="acme/tiny",
    revision=COMMIT,
    store="acme/runs",
    adapter="sft/r1/seed0/adapter",
    environment="acme/words",
    thinking=False,
    served_rank=32,
    license={"license": "apache-2.0"},
    training={"steps": 20, "environment": "acme/words (1.0|beta)"},
    versions={"torch": "2.13.0", "peft": "0.21.2"},
    history=[{"loss": 2.5, "step": 10}, {"loss": 0.25, "step": 20}, {"train_loss": 1.0}],
)
FOLDER = replace(
    FACTS, base="/models/my tiny", revision=None, store="", adapter="/runs/it's/adapter", license={}
)
REWARDED = replace(FACTS, mode="rl", history=[{"reward": 0.125}, {"reward": None}, {"reward": 1}])
MULTIMODAL = replace(FACTS, is_multimodal=True, thinking=True)
UNSERVED = replace(FACTS, served_rank=0)
ALL = {"hub": FACTS, "folder": FOLDER, "rl": REWARDED, "multimodal": MULTIMODAL, "unserved": UNSERVED}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", text, re.DOTALL)


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, its header first."""
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and "---" not in line]
    return [[one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("facts", ALL.values(), ids=ALL)
def test_the_hubs_client_reads_it_and_its_rules_hold(facts):
    from huggingface_hub import ModelCard

    text = card.render(facts)
    assert card_problems(text) == []
    data = ModelCard(text).data
    assert data.library_name == "peft" and data.pipeline_tag == "text-generation"
    assert data.tags == ["lora", "grpo" if facts.mode == "rl" else "sft", "trl", "verifiers"]
    assert data.base_model == (None if facts is FOLDER else "acme/tiny")
    assert data.license == (None if facts is FOLDER else "apache-2.0")


@pytest.mark.parametrize(
    "header",
    [
        "base_model: /models/tiny",
        "tags: [1]",
        "license: other",
        "license: {}",
        "tags: [",
        "- a list",
        "tags: ''",
    ],
)
def test_the_rules_refuse(header):
    assert card_problems(f"---\n{header}\n---\n\ntext")


def test_a_license_of_its_own_is_named():
    own = {"license": "other", "license_name": "tiny-1.0", "license_link": "https://x.y/LICENSE"}
    text = card.render(replace(FACTS, license=own))
    assert card_problems(text) == [] and "license is tiny-1.0." in text
    assert "license_link: https://x.y/LICENSE" in text


def test_a_folder_is_named_in_the_text_alone():
    text = card.render(FOLDER)
    assert "`/models/my tiny`" in text and "base_model" not in text and "huggingface.co" not in text


def test_training_says_how_the_loss_or_reward_moved():
    shown = dict(rows(card.render(FACTS), "Training")[1:])
    assert shown == {
        "steps": "20",
        "environment": r"acme/words (1.0\|beta)",
        "Loss": "2.5 → **0.25** (first and last of 2 logged values; newest 0.25)",
        "libraries": "torch 2.13.0, peft 0.21.2",
    }
    shown = dict(rows(card.render(REWARDED), "Training")[1:])
    assert shown["Mean reward"] == "0.125 → **1** (first and last of 2 logged values; newest 1)"
    assert "logged" not in card.render(replace(FACTS, history=[]))


def test_evaluations_are_a_table():
    first = {"step": 5, "eval_split": "eval", "eval_n": 64, "eval_reward": 0.25, "eval_pass_rate": 1 / 3}
    last = {**first, "step": 10, "eval_reward": 0.5, "eval_pass_rate": None, "eval_metric_num_turns": 2.0}
    skipped = {"step": 15, "eval_skipped": True}
    text = card.render(replace(FACTS, history=[*FACTS.history, first, skipped, last]))
    assert rows(text, "Evaluation") == [
        ["Step", "Rows from", "n", "Mean reward", "Pass rate", "Min", "Max", "`num_turns`"],
        ["5", "held-out", "64", "0.25", "0.3333", "-", "-", "-"],
        ["10", "held-out", "64", "0.5", "-", "-", "-", "2"],
    ]
    assert rows(card.render(FACTS), "Evaluation") == [] and "None was made." in card.render(FACTS)


@pytest.mark.parametrize("facts", ALL.values(), ids=ALL)
def test_its_code_is_code(facts):
    text = card.render(facts)
    python, shell = blocks(text, "python"), blocks(text, "sh")
    assert len(python) == 1 + bool(facts.served_rank) and len(shell) == bool(facts.served_rank)
    for code in python:
        names = {one.id for one in ast.walk(ast.parse(code)) if isinstance(one, ast.Name)}
        assert "adapter" in names and repr(facts.base) in code
        assert ("snapshot_download" in names) == bool(facts.store)
        assert (f"revision='{COMMIT}'" in code) == (facts.revision is not None)
    assert ("AutoModelForImageTextToText" in python[0]) == facts.is_multimodal
    for code in shell:
        words = shlex.split(code.replace("\\\n", "").rpartition("\n")[2])
        assert words[:3] == ["vllm", "serve", facts.base] and words[-1] == f"adapter={facts.adapter}"
        assert ("--language-model-only" in words) == facts.is_multimodal
        assert code.startswith("hf download acme/runs --repo-type dataset") == bool(facts.store)
