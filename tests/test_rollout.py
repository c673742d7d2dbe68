"""Conversations and tools through verifiers' own loop: what TRL is handed, whatever the environment does."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from job import scoring
from job.chat import Chat
from tests import grpo_trials, rollouts
from tests.rollouts import LOGPROB, Played, Scripted, turns

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chat() -> Chat:
    from demo.tiny_model import make_tokenizer

    return Chat(make_tokenizer(), thinking=False)


@pytest.fixture
def play(chat: Chat, tmp_path: Path) -> Callable[..., Played]:
    """Return a function that plays an environment against a script."""

    def run(loaded: Any, script: Any, rows: list[int] | None = None, **how: Any) -> Played:
        rollout = rollouts.make(tmp_path, chat, loaded, **how)
        script = script if callable(script) else turns(chat, script)
        return rollouts.play(rollout, Scripted(chat, script), rows)

    return run


@pytest.fixture(scope="module", params=["vllm", "model"])
def sampling(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Any:
    """A trainer that has made no step, with vLLM and without; its `sampler` is the real one."""
    folder = tmp_path_factory.mktemp(request.param)
    env = grpo_trials.variables(folder, tiny_model, RL_USE_VLLM=int(request.param == "vllm"))
    made = grpo_trials.build(env)
    if request.param == "vllm":
        made.engine.sync_weights()
    return made


def data(*questions: str) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"question": one, "answer": str(i)} for i, one in enumerate(questions)])


def talker(
    answer: Callable[..., Any] = lambda messages, state: "go on",
    questions: tuple[str, ...] = ("start",),
    rewards: Any = None,
    max_turns: int = 2,
    **more: Any,
) -> Any:
    """A conversation whose environment says what `answer(messages, state)` gives: text or messages."""
    import verifiers as vf

    class Talker(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            said = answer(messages, state)
            said = await said if asyncio.iscoroutine(said) else said
            return [vf.UserMessage(role="user", content=said)] if isinstance(said, str) else said

    def length(state: Any) -> float:
        return float(len(state["trajectory"]))

    rubric = vf.Rubric(funcs=rewards or [length])
    return Talker(dataset=data(*questions), rubric=rubric, max_turns=max_turns, **more)


# --- turns and budgets ---


def test_two_turns_are_model_glue_model(play: Callable[..., Played], chat: Chat) -> None:
    played = play(talker(), ["a", "b"])
    glue = chat.encode("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    a, b, end = chat.encode("a"), chat.encode("b"), chat.end_of_turn_id
    assert played.env_mask == [[1, 1, *[0] * len(glue), 1, 1]]
    assert played.completion_ids == [[*a, end, *glue, *b, end]]
    assert played.logprobs == [[LOGPROB, LOGPROB, *[0.0] * len(glue), LOGPROB, LOGPROB]]
    assert played.prompt_ids == [chat.prompt_ids([{"role": "user", "content": "start"}])]
    assert played.reward == [2.0]
    assert (played.facts.turns, played.facts.model_tokens, played.facts.env_tokens) == ([2], 4, len(glue))
    assert played.facts.means()["rollout/turns"] == 2.0


@pytest.mark.parametrize(
    ("max_turns", "expected"), [(1, 1), (3, 3), (-1, 10), (0, 10)], ids=["one", "three", "none", "zero"]
)
def test_turn_limits(play: Callable[..., Played], max_turns: int, expected: int) -> None:
    played = play(talker(max_turns=max_turns), lambda request: "a")
    assert played.facts.turns == [expected]
    assert sum(played.env_mask[0]) == 2 * expected
    assert played.env_mask[0][:2] == [1, 1] and played.env_mask[0][-2:] == [1, 1]


def test_one_turn_limit_has_no_glue(play: Callable[..., Played]) -> None:
    assert play(talker(max_turns=1), ["a"]).env_mask == [[1, 1]]


def test_a_reply_at_its_budget_is_ended_once(play: Callable[..., Played], chat: Chat) -> None:
    long = chat.encode("abcdefgh")
    played = play(talker(), [long, "b"], max_tokens=4)
    text = played.text(0)
    assert long[:4] == played.completion_ids[0][:4]
    assert played.completion_ids[0][4] == chat.end_of_turn_id and played.env_mask[0][:5] == [1, 1, 1, 1, 0]
    assert "<|im_end|><|im_end|>" not in text and "<|im_end|>\n<|im_end|>" not in text
    assert text.count("<|im_end|>") == 4
    assert played.sampler.requests[0].max_tokens == 4


def test_the_engine_length_stops_before_turn_two(play: Callable[..., Played], chat: Chat) -> None:
    """Budget: engine length - prompt - 8; a turn is sampled only if a token of it fits."""
    whole = play(talker(), ["a", "b"])
    second = len(whole.sampler.requests[1].ids)
    for room, turns_played in ((second + 8, 1), (second + 9, 2)):
        played = play(talker(), ["a", "b"], engine_length=room, max_tokens=2)
        assert played.facts.turns == [turns_played]
        assert played.reward == [float(turns_played)]
        assert played.facts.truncated == 1  # stopped, or cut at its only token
        longest = max(len(one.ids) + one.max_tokens for one in played.sampler.requests)
        assert longest <= room - 8
    assert played.env_mask[0][-1:] == [1] and played.completion_ids[0][-1:] == chat.encode("b")


def test_a_prompt_that_is_too_long_is_left_out(play: Callable[..., Played], chat: Chat) -> None:
    played = play(talker(questions=("start", "x" * 80)), ["a", "b"], engine_length=100, max_tokens=2)
    assert played.reward[0] is not None and played.reward[1] is None
    assert played.completion_ids[1] == [chat.end_of_turn_id] and played.env_mask[1] == [0]
    assert played.prompt_ids[1] == chat.prompt_ids([{"role": "user", "content": "x" * 80}])
    assert played.facts.turns[1] == 0


@pytest.mark.parametrize("replies", [["", "b"], ["a", ""], ["", ""]])
def test_an_empty_reply_is_a_scored_turn(play: Callable[..., Played], chat: Chat, replies: list[str]) -> None:
    played = play(talker(), replies)
    assert played.reward == [2.0] and played.facts.turns == [2]
    assert sum(played.env_mask[0]) == sum(len(one) for one in replies) + 2
    assert not played.facts.errors


def silent(messages: Any, state: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("answer", [lambda *_: [], lambda *_: None, silent], ids=["empty", "none", "no-hook"])
def test_an_empty_answer_of_the_environment_ends_it(play: Callable[..., Played], answer: Any) -> None:
    played = play(talker(answer, max_turns=5), lambda request: "a")
    assert played.env_mask == [[1, 1]] and played.reward == [1.0]
    assert played.facts.breaks == 0


def test_the_environments_last_word_is_scored_and_not_trained(play: Callable[..., Played]) -> None:
    """`final_env_response` ends a conversation: the rubric reads it, TRL never sees its tokens."""
    import verifiers as vf

    def last(messages: Any, state: Any) -> Any:
        state["final_env_response"] = [vf.UserMessage(role="user", content="well done")]
        return state["final_env_response"]

    def praised(completion: Any) -> float:
        return float(completion[-1].content == "well done")

    played = play(talker(last, rewards=[praised], max_turns=5), ["a"])
    assert played.env_mask == [[1, 1]] and played.reward == [1.0]


# --- history ---


def test_rewritten_history_keeps_the_last_stretch(play: Callable[..., Played], chat: Chat) -> None:
    import verifiers as vf

    class Forgetful(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [vf.UserMessage(role="user", content="go on")]

        async def get_prompt_messages(self, state: Any) -> Any:
            if len(state["trajectory"]) == 1:
                return [vf.UserMessage(role="user", content="forget all that")]
            return await super().get_prompt_messages(state)

    def count(state: Any) -> float:
        return float(len(state["trajectory"]))

    env = Forgetful(dataset=data("start"), rubric=vf.Rubric(funcs=[count]), max_turns=3)
    played = play(env, lambda request: "abc")
    assert played.facts.breaks == 1 and played.facts.means()["rollout/bridge_breaks"] == 1.0
    assert played.prompt_ids == [chat.prompt_ids([{"role": "user", "content": "forget all that"}])]
    assert sum(played.env_mask[0]) == 2 * len([*chat.encode("abc"), 0])  # turns two and three
    assert played.reward == [3.0]


# --- errors ---


@pytest.mark.parametrize("kind", ["vf.Error", "LookupError"])
def test_one_broken_conversation_of_eight_is_left_out(play: Callable[..., Played], kind: str) -> None:
    import verifiers as vf

    def answer(messages: Any, state: Any) -> str:
        if state["answer"] == "5":
            raise vf.ToolError("broken") if kind == "vf.Error" else LookupError("broken")
        return "go on"

    played = play(talker(answer, questions=tuple("abcdefgh")), ["a", "b"])
    assert played.reward == [2.0] * 5 + [None] + [2.0] * 2
    assert "broken" in played.rollout.scores[5].problem
    assert played.facts.errors.total() == 1
    logged = {name for name in played.facts.means() if name.startswith("rollout/errors/")}
    assert logged == {"rollout/errors/ToolError" if kind == "vf.Error" else "rollout/errors/LookupError"}
    assert played.sampler.open_sessions == 0


def test_a_failure_inside_a_group_leaves_the_others_scored(play: Callable[..., Played]) -> None:
    calls: list[Any] = []

    def answer(messages: Any, state: Any) -> str:
        calls.append(state)
        if len(calls) == 2:
            raise LookupError("broken")
        return "go on"

    played = play(talker(answer), ["a", "b"], group=4)
    assert sorted(played.reward, key=str) == [2.0, 2.0, 2.0, None]


@pytest.mark.parametrize("kind", ["vf.Error", "LookupError"])
def test_an_error_before_the_first_turn_is_a_placeholder(
    play: Callable[..., Played], chat: Chat, kind: str
) -> None:
    import verifiers as vf

    class Unready(vf.MultiTurnEnv):
        async def setup_state(self, state: Any) -> Any:
            raise vf.InfraError("no room") if kind == "vf.Error" else LookupError("no room")

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return []

    def one() -> float:
        return 1.0

    played = play(Unready(dataset=data("start"), rubric=vf.Rubric(funcs=[one]), max_turns=2), ["a"])
    assert played.reward == [None]
    assert "no room" in played.rollout.scores[0].problem
    assert (played.completion_ids, played.env_mask) == ([[chat.end_of_turn_id]], [[0]])
    assert not played.sampler.requests


def test_a_reward_function_that_fails_spoils_its_own_sample(play: Callable[..., Played]) -> None:
    def picky(answer: str) -> float:
        return 1.0 / int(answer)

    played = play(talker(questions=("a", "b", "c"), rewards=[picky]), ["a", "b"])
    assert played.reward == [None, 1.0, 0.5]


# --- tools ---


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def told(completion: Any) -> float:
    """1 when a tool said 42."""
    return float(any(one.role == "tool" and one.content == "42" for one in completion))


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: which
    """
    if number < 0:
        raise ValueError("only positive numbers")
    return 2 * number


def test_a_tool_is_called_and_answers(play: Callable[..., Played]) -> None:
    import verifiers as vf

    env = vf.ToolEnv(dataset=data("start"), tools=[double], rubric=vf.Rubric(funcs=[told]))
    played = play(env, [call("double", number=21), "42"], max_tokens=64)
    assert played.reward == [1.0] and played.facts.tool_calls == 1 and played.facts.tool_failures == 0
    assert "<tool_response>\n42\n</tool_response>" in played.text(0)
    assert played.facts.turns == [2]
    rollout = played.rollout  # the prompt is what a supervised run shows, and what the budget counts
    assert played.prompt_ids == [rollout.chat.encode(rollout.prompts.texts[0])]


def test_hidden_arguments_are_injected(play: Callable[..., Played]) -> None:
    import verifiers as vf

    class Vault(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name: str, tool_args: dict, messages: Any, state: Any, **_: Any):
            return {**tool_args, "secret": int(state["answer"]) + 41}

    def peek(times: int, secret: int) -> int:
        """Look.

        Args:
            times: how often
        """
        return times * secret

    env = Vault(dataset=data("a", "b"), rubric=vf.Rubric(funcs=[told]))
    env.add_tool(peek, args_to_skip=["secret"])
    played = play(env, [call("peek", times=1), "done"], max_tokens=64)
    assert played.reward == [0.0, 1.0]  # the second row's secret is 42
    assert "secret" not in played.text(0)


def test_a_raising_tool_answers_with_the_formatted_error(play: Callable[..., Played]) -> None:
    import verifiers as vf

    env = vf.ToolEnv(
        dataset=data("start"),
        tools=[double],
        rubric=vf.Rubric(funcs=[told]),
        error_formatter=lambda error: f"oops, {type(error).__name__}: {error}",
    )
    replies = [call("double", number=-1), call("double", number=21), "42"]
    played = play(env, replies, max_tokens=64)
    assert "oops, ValueError: only positive numbers" in played.text(0)
    assert played.reward == [1.0]
    assert (played.facts.tool_calls, played.facts.tool_failures) == (2, 1)
    assert played.facts.means()["rollout/tool_failures"] == 1.0
    assert rollouts.play(played.rollout, played.sampler).facts.tool_failures == 1  # per step


def test_a_stop_error_ends_the_conversation(play: Callable[..., Played]) -> None:
    import verifiers as vf

    env = vf.ToolEnv(
        dataset=data("start"), tools=[double], rubric=vf.Rubric(funcs=[told]), stop_errors=[ValueError]
    )
    played = play(env, [call("double", number=-1), "never said"], max_tokens=64)
    assert played.facts.turns == [1] and played.reward == [None]
    assert played.facts.errors == {"ToolCallError": 1} and "ToolCallError" in played.rollout.scores[0].problem
    assert 0 not in played.env_mask[0]


def test_text_parts_of_a_tools_answer_are_shown(play: Callable[..., Played]) -> None:
    """Many templates render text only, and leave a list of parts out."""
    import verifiers as vf

    def look(number: int) -> list[dict[str, str]]:
        """Look.

        Args:
            number: which
        """
        return [{"type": "text", "text": f"see {number}"}, {"type": "text", "text": "!"}]

    env = vf.ToolEnv(dataset=data("start"), tools=[look], rubric=vf.Rubric(funcs=[told]))
    played = play(env, [call("look", number=7), "done"], max_tokens=64)
    assert "<tool_response>\nsee 7!\n</tool_response>" in played.text(0)


# --- kinds of environments ---


def test_a_group_plays_each_member_by_its_own_rules(play: Callable[..., Played], chat: Chat) -> None:
    import verifiers as vf

    tools = vf.ToolEnv(dataset=data("tools"), tools=[double], rubric=vf.Rubric(funcs=[told]))
    group = vf.EnvGroup([talker(questions=("talk",), max_turns=3), tools], env_names=["talk", "tools"])

    def script(request: Any) -> str:
        text = chat.tokenizer.decode(list(request.ids))
        return "42" if "<tool_response>" in text or "talk" in text else call("double", number=21)

    played = play(group, script, max_tokens=64, group=2)
    assert played.reward == [3.0, 3.0, 1.0, 1.0]
    assert played.facts.turns == [3, 3, 2, 2]
    assert "double" not in played.text(0) and "double" in played.text(2)  # only its own tools


def test_a_single_turn_environment_keeps_its_setup_hook(play: Callable[..., Played]) -> None:
    import verifiers as vf

    class Prepared(vf.SingleTurnEnv):
        async def setup_state(self, state: Any) -> Any:
            return type(state)({**state, "wanted": "b"})  # what it returns replaces the state

    def matches(completion: Any, state: Any) -> float:
        return float(completion[-1].content == state["wanted"])

    env = Prepared(dataset=data("start"), rubric=vf.Rubric(funcs=[matches]))
    assert play(env, ["b"]).reward == [1.0]
    assert play(env, ["b"]).env_mask == [[1, 1]]


def test_an_environment_whose_sandbox_cannot_be_made(play: Callable[..., Played]) -> None:
    """Nothing is reachable here: every conversation is left out, with the cause, and nothing hangs."""
    import verifiers as vf

    # Its own default command, a text, is refused by every prime-sandboxes that verifiers 0.3.1 allows.
    command = {"executable": "sleep", "args": ["infinity"]}
    env = vf.SandboxEnv(
        dataset=data("start"), rubric=vf.Rubric(funcs=[told]), max_retries=1, start_command=command
    )
    played = play(env, [call("bash", command="echo 42"), "42"], max_tokens=64)
    assert played.reward == [None] and played.facts.turns == [0]
    assert played.facts.errors == {"SandboxCreationError": 1}
    assert '"command"' in played.text(0) and "sandbox_id" not in played.text(0)  # what is hidden stays so


def test_environments_go_on_with_their_own_random_numbers(sampling: Any, tmp_path: Path) -> None:
    """The sampler has a stream of its own, which is the same whenever a step is played again."""
    drawn: list[float] = []

    def answer(messages: Any, state: Any) -> str:
        drawn.append(random.random())
        return "go on"

    rollout = rollouts.make(tmp_path, sampling.chat, talker(answer, questions=("Repeat 1.",)))
    random.seed(0)
    first, second = (rollouts.play(rollout, sampling.trainer.sampler).completion_ids for _ in range(2))
    assert drawn == [random.Random(0).random(), drawn[1]] and drawn[0] != drawn[1]
    assert first[0][0] == second[0][0] or not sampling.settings.rl_use_vllm


def test_the_conversations_of_the_newest_step_are_kept(play: Callable[..., Played]) -> None:
    import verifiers as vf

    env = vf.ToolEnv(dataset=data("a", "b"), tools=[double], rubric=vf.Rubric(funcs=[told]))
    env.max_turns = 2
    played = play(env, [call("double", number=21), "42"], max_tokens=64)
    first, second = played.rollout.conversations
    assert first.prompt == [{"role": "user", "content": "a"}] and second.prompt[0]["content"] == "b"
    assert [one["role"] for one in first.completion] == ["assistant", "tool", "assistant"]
    assert first.completion[0]["tool_calls"][0]["name"] == "double"
    assert (first.score.reward, first.score.metrics["told"]) == (1.0, 1.0)
    json.dumps([first.prompt, first.completion])
    rollouts.play(played.rollout, played.sampler, [1])
    assert [one.prompt[0]["content"] for one in played.rollout.conversations] == ["b"]


def test_prompts_that_are_not_those_of_the_rows_are_refused(play: Callable[..., Played]) -> None:
    rollout = play(talker(), ["a", "b"]).rollout
    with pytest.raises(RuntimeError, match="not those of its row indices"):
        rollout(["another"], SimpleNamespace(batch_rows=[0], sampler=None))


def test_rows_with_one_prompt_keep_their_own_answers(play: Callable[..., Played]) -> None:
    def own(answer: str) -> float:
        return float(answer)

    played = play(talker(questions=("same", "same", "same"), rewards=[own]), ["a", "b"], rows=[2, 2, 0, 1])
    assert played.reward == [2.0, 2.0, 0.0, 1.0]


# --- time ---


def test_an_environment_that_never_answers_is_cut_off(play: Callable[..., Played]) -> None:
    gone = []

    async def never(messages: Any, state: Any) -> str:
        try:
            await asyncio.sleep(600 if state["answer"] == "0" else 0)
        except asyncio.CancelledError:
            gone.append(state["answer"])
            raise
        return "go on"

    began = time.monotonic()
    played = play(talker(never, questions=("a", "b"), timeout_seconds=0.5), ["a", "b"])
    assert time.monotonic() - began < 5
    assert played.facts.turns == [1, 2] and gone == ["0"]
    assert played.env_mask[0] == [1, 1]


def test_every_environment_has_a_time_limit(play: Callable[..., Played]) -> None:
    env = talker()
    play(env, ["a", "b"])
    assert env.timeout_seconds == scoring.TIME_LIMIT_S


def test_a_reward_that_never_comes_is_cut_off(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "TIME_LIMIT_S", 0.3)

    async def judged(answer: str) -> float:
        await asyncio.sleep(600 if answer == "0" else 0)
        return 1.0

    played = play(talker(questions=("a", "b"), rewards=[judged], timeout_seconds=60), ["a", "b"])
    assert played.reward == [None, 1.0]
    assert "not scored within 0.3 s" in played.rollout.scores[0].problem
    assert played.rollout.scorer.problems == {}


def test_an_environment_that_never_cleans_up_is_cut_off(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    import verifiers as vf

    class Untidy(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return []

        @vf.cleanup
        async def forever(self, state: Any) -> None:
            await asyncio.sleep(600 if state["answer"] == "0" else 0)

    def one() -> float:
        return 1.0

    monkeypatch.setattr("training.player.CLEANUP_S", 0.2)
    env = Untidy(dataset=data("a", "b"), rubric=vf.Rubric(funcs=[one]), timeout_seconds=0.2)
    assert play(env, ["a"]).reward == [None, 1.0]


def test_slow_environments_wait_side_by_side(play: Callable[..., Played]) -> None:
    async def slowly(messages: Any, state: Any) -> str:
        await asyncio.sleep(0.2)
        return "go on"

    questions = tuple(f"row {number}" for number in range(32))
    began = time.monotonic()
    played = play(talker(slowly, questions=questions, max_turns=3), lambda request: "a")
    assert played.facts.turns == [3] * 32
    assert time.monotonic() - began < 32 * 0.2  # 12.8 s one after the other


# --- nothing is left behind ---


def left_behind(sampling: Any, rollout: Any) -> list[Any]:
    """Requests, tasks and futures that are still there."""
    waiting = sampling.trainer.sampler.waiting
    left = [*waiting.futures, *asyncio.all_tasks(rollout.scorer._loop.get_loop())]
    if sampling.settings.rl_use_vllm and sampling.engine.llm.llm_engine.has_unfinished_requests():
        left.append("engine")
    return [*left, waiting.task] if waiting.task else left


def own_threads() -> set[threading.Thread]:
    """Threads that are not idle ones of the loop's pool."""
    return {one for one in threading.enumerate() if not one.name.startswith("asyncio_")}


def test_a_rollout_with_failures_leaves_nothing_behind(sampling: Any, tmp_path: Path) -> None:
    async def answer(messages: Any, state: Any) -> str:
        if state["answer"] == "1":
            raise LookupError("broken")
        await asyncio.sleep(600 if state["answer"] == "2" else 0)
        return "go on"

    env = talker(answer, questions=("Repeat 1.", "Repeat 2.", "Repeat 3.", "Repeat 4."))
    rollout = rollouts.make(tmp_path, sampling.chat, env, engine_length=256)
    # An engine's first turns may take half a minute.
    rollouts.play(rollout, sampling.trainer.sampler, [0, 3, 0, 3])
    env.timeout_seconds, before = 5, own_threads()
    played = rollouts.play(rollout, sampling.trainer.sampler)
    assert played.facts.turns == [2, 0, 1, 2]  # an exception that is no vf.Error takes its state along
    assert [one is None for one in played.reward] == [False, True, False, False]
    assert left_behind(sampling, rollout) == []
    assert own_threads() == before


def test_a_conversation_cut_off_while_it_is_sampled(sampling: Any, tmp_path: Path) -> None:
    """Its request is taken back; the others never notice."""
    env = talker(questions=("Repeat 1.", "Repeat 2."), timeout_seconds=1e-3)
    rollout = rollouts.make(tmp_path, sampling.chat, env, engine_length=256)
    played = rollouts.play(rollout, sampling.trainer.sampler)
    assert all(turns in (0, 1) for turns in played.facts.turns)
    assert left_behind(sampling, rollout) == []
    env.timeout_seconds = 60
    assert rollouts.play(rollout, sampling.trainer.sampler).facts.turns == [2, 2]


def test_an_engine_that_fails_fails_the_rollout(sampling: Any, tmp_path: Path) -> None:
    """Its conversations are no unscorable samples of a run that goes on."""
    sampler = sampling.trainer.sampler
    env = talker(questions=("Repeat 1.", "Repeat 2.", "Repeat 3."))
    rollout = rollouts.make(tmp_path, sampling.chat, env, engine_length=256)
    serve, served = sampler.waiting.serve, []

    def out_of_memory() -> None:
        if len(served) == 1:
            raise MemoryError("no room")
        served.append(serve())

    sampler.waiting.serve = out_of_memory
    try:
        with pytest.raises(MemoryError, match="no room"):
            rollouts.play(rollout, sampler)
    finally:
        sampler.waiting.serve = serve
    assert left_behind(sampling, rollout) == []
    assert rollouts.play(rollout, sampler).facts.turns == [2, 2, 2]


def test_a_request_that_the_engine_refuses_is_not_waited_for(sampling: Any, tmp_path: Path) -> None:
    """vLLM takes no temperature above 2; the trainer's model takes any."""
    env = talker(questions=("Repeat 1.", "Repeat 2."))
    rollout = rollouts.make(tmp_path, sampling.chat, env, engine_length=256, temperature=3.0)
    played = rollouts.play(rollout, sampling.trainer.sampler)
    refused = bool(sampling.settings.rl_use_vllm)
    assert [one is None for one in played.reward] == [refused, refused]
    assert left_behind(sampling, rollout) == []
