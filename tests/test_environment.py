"""The environment adapter, over real verifiers environments."""

from __future__ import annotations

import copy
import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

from job.environment import Environment, EnvironmentProblem, fingerprint, info

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def load(reference: str, **params: object) -> Environment:
    return Environment.load(reference, params)


def by_question(env: Environment) -> dict[str, dict[str, Any]]:
    return {row["question"]: row for row in env.train_rows()}


# --- loading ---


@pytest.mark.parametrize("reference", ["toy-words", "toy_words", "acme/toy-words", "acme/toy_words"])
def test_a_reference_loads_by_its_name_and_stays_the_id(reference: str) -> None:
    env = load(reference)
    assert env.id == reference
    assert len(env.train_rows()) == 22


def test_params_reach_the_loader_unchanged() -> None:
    params = {"size": 2, "answers": ["tna", "EEB"]}
    given = copy.deepcopy(params)
    env = Environment.load("toy-words", params)
    assert {env.target(row) for row in env.train_rows()} == {"tna", "EEB"}
    assert params == given


def test_reserved_params_are_not_passed_to_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    reserved = dict.fromkeys(
        ["grpo_config", "sft_config", "mode", "records", "eval_records", "reward_command"], "x"
    )
    with caplog.at_level(logging.INFO, logger="job.environment"):
        env = load("toy-words", size=3, eval_examples=0, eval_seed=1, **reserved)
    assert len(env.train_rows()) == 3
    assert all(name in caplog.text for name in reserved)
    assert "eval_seed" not in caplog.text


@pytest.mark.parametrize(
    ("reference", "params", "words"),
    [
        ("", {}, ["environment.id", "no environment specified"]),
        ("acme/nowhere-at-all", {}, ["acme/nowhere-at-all", "nowhere_at_all", "installed"]),
        ("toy-blank", {}, ["toy-blank", "load_environment"]),
        ("toy-broken", {}, ["toy-broken", "OSError", "the corpus is not there"]),
        ("toy-broken", {"how": "key"}, ["toy-broken", "TOY_BROKEN_API_KEY"]),
        ("toy-broken", {"how": "nothing"}, ["toy-broken", "dataset"]),
        ("toy-words", {"sise": 3}, ["toy-words", "sise", "environment.params"]),
        ("toy-words", {"eval_env": "acme/nowhere-at-all"}, ["acme/nowhere-at-all"]),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(
    reference: str, params: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        Environment.load(reference, params)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


# --- kinds ---


@pytest.mark.parametrize(
    ("reference", "params", "multi_turn", "is_tool_env", "max_turns", "threshold"),
    [
        ("toy-words", {}, False, False, 1, 0.5),
        ("toy-splits", {}, False, False, 1, 0.25),
        ("toy-dialogue", {}, True, False, 10, 0.9),  # the library's "no limit", -1
        ("toy-dialogue", {"max_turns": 0}, True, False, 10, 0.9),
        ("toy-dialogue", {"max_turns": 3}, True, False, 3, 0.9),
        ("toy-tools", {}, True, True, 4, 0.5),
        ("toy-tools", {"tools": False}, True, True, 4, 0.5),
    ],
)
def test_kind_turns_and_threshold(
    reference: str,
    params: dict[str, Any],
    multi_turn: bool,
    is_tool_env: bool,
    max_turns: int,
    threshold: float,
) -> None:
    env = load(reference, **params)
    assert (env.multi_turn, env.is_tool_env) == (multi_turn, is_tool_env)
    assert (env.max_turns, env.pass_threshold) == (max_turns, threshold)


# --- rows ---


def test_train_rows_are_the_librarys_in_its_order_under_seed_0() -> None:
    env = load("toy-splits")
    rows = env.train_rows()
    assert [row["size"] for row in rows] == list(env.loaded.get_dataset(n=-1, seed=0)["size"])
    assert [row["size"] for row in rows] != sorted(row["size"] for row in rows)
    rows[0]["answer"] = "spoilt"
    assert env.train_rows()[0]["answer"] != "spoilt"


def test_a_lazy_training_split_is_built_when_asked_for() -> None:
    assert len(load("toy-splits", lazy=True).train_rows()) == 20


@pytest.mark.parametrize("kind", ["whole", "lazy"])
def test_held_out_rows_come_from_the_evaluation_split(kind: str) -> None:
    env = load("toy-splits", evaluation=kind)
    assert env.has_held_out_rows
    assert [row["size"] for row in env.eval_rows()] == list(env.loaded.get_eval_dataset(seed=12345)["size"])


def test_an_evaluation_seed_of_ones_own_orders_the_rows() -> None:
    default, other = load("toy-splits").eval_rows(), load("toy-splits", eval_seed=7).eval_rows()
    assert default != other
    assert sorted(row["size"] for row in default) == sorted(row["size"] for row in other)
    assert load("toy-splits", eval_seed=0).eval_seed == 0


def test_an_empty_evaluation_split_stays_empty() -> None:
    env = load("toy-splits", evaluation="empty")
    assert env.eval_rows() == []
    assert env.has_held_out_rows


def test_without_an_evaluation_split_the_training_rows_stand_in() -> None:
    env = load("toy-splits", evaluation="missing")
    assert env.eval_rows() == env.train_rows()
    assert not env.has_held_out_rows


def test_a_broken_evaluation_split_raises_its_own_error() -> None:
    env = load("toy-splits", evaluation="broken")
    with pytest.raises(FileNotFoundError, match=r"held-out\.parquet"):
        env.eval_rows()
    assert len(env.train_rows()) == 20


def test_eval_examples_is_a_fixed_subset_in_the_splits_order() -> None:
    whole = load("toy-splits").eval_rows()
    some = load("toy-splits", eval_examples=4).eval_rows()
    assert len(some) == 4
    assert some == [row for row in whole if row in some]
    assert some == load("toy-splits", eval_examples=4).eval_rows()
    assert load("toy-splits", eval_examples=99).eval_rows() == whole
    assert load("toy-splits", eval_examples=0).eval_rows() == whole


@pytest.mark.parametrize("name", ["eval_env", "eval_env_id"])
def test_another_environment_can_hold_the_evaluation_rows(name: str) -> None:
    env = load("toy-words", **{name: "acme/toy-splits"})
    assert env.has_held_out_rows
    assert {row["size"] for row in env.eval_rows()} == set(range(100, 110))
    assert "size" not in env.train_rows()[0]


# --- one row ---


def test_a_question_becomes_one_user_message() -> None:
    env = load("toy-words", size=1)
    assert env.prompt(env.train_rows()[0]) == [{"role": "user", "content": "Spell ant backwards."}]
    assert env.prompt({"prompt": "only text"}) == [{"role": "user", "content": "only text"}]
    assert env.prompt({"question": "asked", "prompt": []}) == [{"role": "user", "content": "asked"}]
    assert env.prompt({}) == [{"role": "user", "content": ""}]


def prompts_of(env: Environment) -> dict[str, list[dict[str, Any]]]:
    prompts = [env.prompt(row) for row in env.train_rows()]
    return {messages[-1]["content"]: messages for messages in prompts}


def test_message_lists_are_copied_without_the_nulls_of_arrow() -> None:
    env = load("toy-prompts")
    prompts = prompts_of(env)
    brief = {"role": "system", "content": "Be brief."}
    assert prompts["Say one."] == [brief, {"role": "user", "content": "Say one."}]
    assert prompts["Say two."] == [brief, {"role": "user", "name": "ann", "content": "Say two."}]
    assert prompts["Say three."] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Say three."},
    ]
    row = env.train_rows()[0]
    before = copy.deepcopy(row)
    env.prompt(row)[0]["content"] = "spoilt"
    assert row == before


def test_a_system_prompt_of_the_environment_leads_unless_there_is_one() -> None:
    env = load("toy-prompts", system_prompt=None)
    assert [one["role"] for one in prompts_of(env)["Say one."]] == ["user"]
    env.loaded.system_prompt = "Set later."
    assert prompts_of(env)["Say one."][0] == {"role": "system", "content": "Set later."}
    assert prompts_of(env)["Say three."][0] == {"role": "system", "content": "Be kind."}


def test_info_is_a_mapping_whatever_the_row_holds() -> None:
    env = load("toy-prompts")
    found = {messages[-1]["content"]: info(row) for row in env.train_rows() for messages in [env.prompt(row)]}
    assert found == {"Say one.": {"level": 1}, "Say two.": {}, "Say three.": {}, "Say four.": {"level": 4}}
    assert info({}) == {} and info({"info": None}) == {} and info({"info": {"a": 1}}) == {"a": 1}


def test_the_target_is_the_first_column_that_says_something() -> None:
    env = load("toy-wide")
    targets = {question: env.target(row) for question, row in by_question(env).items()}
    names = ["answer", "completion", "target", "response"]
    assert targets == {**{f"Say {name}.": name for name in names}, "Say nothing.": ""}
    assert env.target({"answer": 12}) == "12"
    assert env.target({"answer": None, "completion": [], "target": "late"}) == "late"


def test_a_transcript_is_a_list_of_messages_without_nulls() -> None:
    env = load("toy-tools")
    target = env.target(by_question(env)["What does bread cost?"])
    call = {"id": "call_bread", "name": "price", "arguments": '{"item": "bread"}'}
    assert target == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_bread", "content": "5"},
        {"role": "assistant", "content": "5 coins"},
    ]


def test_nulls_inside_a_message_go_too() -> None:
    """Arrow gives all calls of a column the arguments of each, and all parts the keys of each."""
    call = {"function": {"name": "price", "arguments": {"item": "bread", "shop": None}}}
    parts = [{"type": "text", "text": "hello", "image_url": None}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert load("toy-words", size=1).prompt({"prompt": messages}) == [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "price", "arguments": {"item": "bread"}}}],
        },
    ]


@pytest.mark.parametrize("items", [["yes", "no"], [{"content": "no role"}]])
def test_a_list_that_holds_no_messages_is_refused(items: list) -> None:
    env = load("toy-words", size=1)
    with pytest.raises(EnvironmentProblem, match="is no message"):
        env.target({"answer": items})
    with pytest.raises(EnvironmentProblem, match="is no message"):
        env.prompt({"prompt": items})


# --- tools ---


def test_tool_schemas_have_the_form_that_templates_take() -> None:
    env = load("toy-tools")
    tools = env.tools(env.train_rows()[0])
    assert [one["type"] for one in tools] == ["function", "function"]
    price, stock = (one["function"] for one in tools)
    assert (price["name"], stock["name"]) == ("price", "stock")
    assert price["description"].startswith("Price of an item")
    assert price["parameters"]["properties"]["item"]["description"] == "what to buy"
    assert stock["parameters"]["properties"].keys() == {"item", "shop"}
    assert load("toy-words").tools({}) == [] and load("toy-tools", tools=False).tools({}) == []


def test_a_row_may_bring_its_own_tools() -> None:
    own = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    row = {"info": {"tool_defs": [own]}}
    assert load("toy-tools").tools(row) == [{"type": "function", "function": own}]
    assert load("toy-words").tools(row) == [{"type": "function", "function": own}]


# --- what is recorded ---


def test_version_of_a_loose_module_is_the_digest_of_its_file() -> None:
    digest = hashlib.sha256((HERE / "environments" / "toy_words.py").read_bytes()).hexdigest()
    assert load("acme/toy-words").version == f"toy_words sha256:{digest[:16]}"


def test_version_of_an_installed_package_is_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    env = load("toy-words")
    env.id = "acme/pytest"
    assert env.version == f"pytest {pytest.__version__}"


def test_the_fingerprint_changes_with_content_and_order() -> None:
    rows = load("toy-words").train_rows()
    assert fingerprint(rows) == fingerprint(load("toy-words").train_rows())
    assert fingerprint(rows) != fingerprint(rows[::-1])
    assert fingerprint(rows) != fingerprint(rows[1:])
    assert fingerprint(rows) != fingerprint([{**rows[0], "answer": "x"}, *rows[1:]])


# --- rubrics ---


@pytest.mark.parametrize(
    "params", [{}, {"nested": True}, {"grouped": True}, {"nested": True, "grouped": True}]
)
def test_a_weighted_reward_function_with_an_impossible_argument_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"by_oracle.*'oracle'"):
        load("toy-impossible", **params)
    load("toy-impossible", weight=0.0, **params)


@pytest.mark.parametrize("lazy", [False, True])
def test_columns_of_the_rows_are_arguments_too(lazy: bool) -> None:
    load("toy-splits", lazy=lazy)


def test_group_rewards_keywords_and_defaults_are_accepted() -> None:
    load("toy-wide")


# --- groups of environments ---


@pytest.fixture(scope="module")
def mixture() -> Environment:
    return load("acme/toy-group")


def test_a_mixture_has_the_rows_of_all_its_members(mixture: Environment) -> None:
    kinds = {row["question"]: row["info"]["env_id"] for row in mixture.train_rows()}
    assert kinds["Spell ant backwards."] == "words"
    assert kinds["What does bread cost?"] == "shop"
    assert len(kinds) == 6


def test_each_row_of_a_mixture_has_the_tools_of_its_member(mixture: Environment) -> None:
    rows = by_question(mixture)
    assert mixture.tools(rows["Spell ant backwards."]) == []
    names = [one["function"]["name"] for one in mixture.tools(rows["What does bread cost?"])]
    assert names == ["price", "stock"]


def test_targets_of_a_mixture_are_those_of_its_members(mixture: Environment) -> None:
    rows = by_question(mixture)
    assert mixture.target(rows["Spell ant backwards."]) == "tna"
    assert mixture.target(rows["What does bread cost?"])[-1]["content"] == "5 coins"


# --- scored by the library ---


@pytest.mark.parametrize(
    ("reference", "count"), [("toy-words", 22), ("toy-prompts", 4), ("toy-dialogue", 9), ("toy-tools", 3)]
)
def test_every_row_has_a_prompt_of_plain_messages(reference: str, count: int) -> None:
    env = load(reference)
    prompts = [env.prompt(row) for row in env.train_rows()]
    assert len(prompts) == count
    assert all(type(one) is dict and None not in one.values() for prompt in prompts for one in prompt)
