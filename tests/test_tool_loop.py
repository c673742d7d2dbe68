"""TRL's own tool loop, `RL_TOOL_LOOP=trl`: a plain ToolEnv on Qwen3's own template, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from job.chat import Chat
from job.environment import Environment
from job.settings import SettingsError
from tests import grpo_trials, harness
from training import tool_loop

pytestmark = pytest.mark.slow


def talk(template: str = "qwen3") -> Chat:
    from demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = harness.template(template)
    return Chat(tokenizer, thinking=False)


def environment(kind: str = "ToolEnv", **options: Any) -> Environment:
    import verifiers as vf
    from datasets import Dataset

    def look(at: str) -> str:
        """Look.

        Args:
            at: what
        """
        return at

    class Stateful(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name: str, tool_args: dict, messages: Any, state: Any, **_: Any):
            return tool_args

    def one() -> float:
        return 1.0

    class Stopping(vf.ToolEnv):
        @vf.stop
        async def solved(self, state: Any) -> bool:
            return False

    class Plain(vf.ToolEnv):
        """Nothing of its own but how it is made."""

        def __init__(self, **more: Any):
            super().__init__(**more)

    rows = Dataset.from_list([{"question": "x", "answer": "y"}])
    kinds = {one.__name__: one for one in (vf.ToolEnv, vf.SingleTurnEnv, Stopping, Plain)}
    made = {**kinds, "StatefulToolEnv": Stateful}[kind]
    tools = {} if kind == "SingleTurnEnv" else {"tools": [look]}
    return Environment("inline", made(dataset=rows, rubric=vf.Rubric(funcs=[one]), **{**tools, **options}))


# --- refusals ---


REFUSED = {
    "stateful": ("StatefulToolEnv", {}, "env_response"),
    "formatter": ("ToolEnv", {"error_formatter": lambda error: "oops"}, "error_formatter"),
    "stop-errors": ("ToolEnv", {"stop_errors": [ValueError]}, "stop_errors"),
    "own-stop": ("Stopping", {}, "solved"),
    "single-turn": ("SingleTurnEnv", {}, "has no tools to call"),
    "no-tools": ("ToolEnv", {"tools": []}, "has no tools to call"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_would_lose_is_refused(kind: str) -> None:
    name, options, message = REFUSED[kind]
    with pytest.raises(SettingsError, match=message) as refused:
        tool_loop.check(environment(name, **options), talk())
    text = str(refused.value)
    assert text.startswith("RL_TOOL_LOOP=trl: ") and "RL_TOOL_LOOP=env" in text and "\n" not in text


def test_a_template_that_trl_does_not_know_is_refused() -> None:
    with pytest.raises(SettingsError, match="does not know the chat template") as refused:
        tool_loop.check(environment(), talk("chatml"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["ToolEnv", "Plain"])
def test_a_plain_tool_environment_on_qwen3_is_taken(kind: str) -> None:
    tool_loop.check(environment(kind), talk())


# --- transcripts ---


def test_transcripts_are_given_to_the_rubric_as_the_library_makes_them() -> None:
    called = {"type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}
    given = [
        {"role": "assistant", "content": "so", "tool_calls": [called]},
        {"role": "tool", "name": "look", "content": "a"},
        {"role": "assistant", "content": "a"},
    ]
    first, second, third = tool_loop.as_verifiers(given)
    assert first == {
        "role": "assistant",
        "content": "so",
        "tool_calls": [{"id": "call_0", "name": "look", "arguments": json.dumps({"at": "a"})}],
    }
    assert second == {"role": "tool", "content": "a", "tool_call_id": "call_0"}
    assert third == {"role": "assistant", "content": "a"}


def test_every_answer_names_its_own_call() -> None:
    def called(at: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "look", "arguments": {"at": at}}}

    given = [
        {"role": "assistant", "tool_calls": [called("a"), called("b")]},
        {"role": "tool", "name": "look", "content": "a"},
        {"role": "tool", "name": "look", "content": "b"},
        {"role": "assistant", "tool_calls": [called("c")]},
        {"role": "tool", "name": "look", "content": "c"},
    ]
    answers = [one["tool_call_id"] for one in tool_loop.as_verifiers(given) if one["role"] == "tool"]
    assert answers == ["call_0", "call_1", "call_2"]


# --- a run ---


def test_a_run_on_qwen3s_own_template(with_template: Callable[[str], Path], tmp_path: Path) -> None:
    """Two steps through TRL's loop: prompts show the tools, and the rubric gets every transcript."""
    from accounting import Tally
    from job import dataset, repository, rules, weights
    from job.chat import load_tokenizer
    from job.scoring import Scorer
    from job.settings import identify
    from training import conversations, trainers

    env = grpo_trials.variables(
        tmp_path,
        with_template("qwen3"),
        train={"steps": 2, "max_tokens": 8},
        environment={"id": "toy-tools"},
        RL_TOOL_LOOP="trl",
        RL_USE_VLLM=0,
        RL_VLLM_MAX_LEN=2048,
    )
    settings = rules.resolve(env, identify(env)[0])
    plan = weights.plan_weights(settings, repository.locate(settings), ())
    settings = rules.fit_context(settings, plan.context_length)
    loaded = Environment.load("toy-tools", {})
    chat = Chat(load_tokenizer(plan.base), settings.thinking)
    prompts = dataset.rl_prompts(settings, loaded, chat)
    way = conversations.plan(settings, loaded, chat, prompts, Scorer(loaded), Tally())
    assert way.rollout is None and [one.__name__ for one in way.tools] == ["price", "stock"]
    batch = trainers.rl_batch(settings, plan, loaded, len(prompts.rows))
    trainer = trainers.grpo_trainer(settings, plan, chat, prompts, batch, way, [])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 2 and all("tools/call_frequency" in entry for entry in logged)
    assert (way.tally.scored, way.tally.unscorable) == (2 * batch.sequences, 0)
    assert way.tally.generated_tokens > 0
