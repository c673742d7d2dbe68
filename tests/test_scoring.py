"""Rewards from real verifiers rubrics: every kind of function, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from job.environment import Environment, EnvironmentProblem
from job.scoring import Reply, Score, Scorer

pytestmark = pytest.mark.slow

ROW = {"question": "What is 3 + 4?", "answer": "7"}


def environment(rubric: Any, rows: list[dict[str, Any]] | None = None, kind: Any = None) -> Environment:
    import verifiers as vf
    from datasets import Dataset

    made = (kind or vf.SingleTurnEnv)(dataset=Dataset.from_list(rows or [ROW]), rubric=rubric)
    return Environment("toy", made)


@pytest.fixture
def score() -> Callable[..., list[Score]]:
    """Score texts as replies to the first row of an environment with these reward functions."""
    import verifiers as vf

    def run(*funcs: Any, texts: Any = ("7",), weights: Any = None, **more: Any) -> list[Score]:
        rubric = more.pop("rubric", None) or vf.Rubric(funcs=list(funcs), weights=weights)
        env = environment(rubric, **more)
        row = env.train_rows()[0]
        [scores] = Scorer(env).score([(row, [Reply(text) for text in texts])])
        return scores

    return run


def rewards(scores: list[Score]) -> list[float | None]:
    return [one.reward for one in scores]


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def length(completion: Any) -> float:
    return float(len(completion[-1].content))


def sometimes(completion: Any) -> float:
    """Fails on replies that begin with an x."""
    if completion[-1].content.startswith("x"):
        raise LookupError("no such thing")
    return 1.0


def rank(states: list[Any]) -> list[float]:
    sizes = [len(state["completion"][-1].content) for state in states]
    return [float(sorted(sizes).index(size)) for size in sizes]


# --- what a function is given and how its score counts ---


def test_functions_sync_and_async_add_up_by_weight(score: Any) -> None:
    async def slow_length(completion: Any) -> float:
        await asyncio.sleep(0.01)
        return length(completion)

    scores = score(exact, slow_length, texts=["7", "12"], weights=[1.0, 0.25])
    assert rewards(scores) == [1.25, 0.5]
    assert scores[1].metrics.items() >= {("exact", 0.0), ("slow_length", 2.0)}


def test_a_negative_weight_and_a_score_that_is_no_float(score: Any) -> None:
    def right(completion: Any, answer: str) -> bool:
        return completion[-1].content == answer

    assert rewards(score(right, length, texts=["7", "123"], weights=[2.0, -0.5])) == [1.5, -1.5]


def test_functions_without_a_name_of_their_own_count(score: Any) -> None:
    class Bonus:
        def __call__(self, completion: Any) -> float:
            return 100.0

    def scaled(completion: Any, scale: float) -> float:
        return scale

    for func, name in ((Bonus(), "Bonus"), (functools.partial(scaled, scale=100.0), "scaled")):
        [one] = score(func)
        assert one.reward == 100.0 and one.metrics[name] == 100.0


def test_a_failure_is_noted_whatever_the_function_does_to_the_state(score: Any) -> None:
    def rude(state: Any) -> float:
        state["trajectory_id"] = "same"
        raise LookupError("no such thing")

    scores = score(rude, texts=("a", "b"))
    assert rewards(scores) == [None, None] and [one.kind for one in scores] == ["LookupError"] * 2


def test_a_function_of_weight_zero_is_only_a_metric(score: Any) -> None:
    [one] = score(exact, length, texts=["seven"], weights=[1.0, 0.0])
    assert one.reward == 0.0 and one.metrics["length"] == 5.0
    assert one.metrics["num_turns"] == 1.0  # the library's own


def test_a_null_result_is_zero(score: Any) -> None:
    def nothing(completion: Any) -> None: ...

    def nothings(states: Any) -> list[float | None]:
        return [None for _ in states]

    assert rewards(score(nothing, exact)) == [1.0]
    assert rewards(score(nothings, exact, texts=["7", "8"])) == [1.0, 0.0]


def test_arguments_are_what_the_contract_lists(score: Any) -> None:
    seen: dict[str, Any] = {}

    def look(
        prompt: Any, completion: Any, answer: str, info: Any, state: Any, parser: Any, task: Any
    ) -> float:
        seen.update(locals())
        return 1.0

    def everything(**objects: Any) -> float:
        seen["names"] = set(objects)
        return 0.0

    rows = [{**ROW, "info": '{"level": 3}', "hint": "a column of its own"}]
    assert rewards(score(look, everything, rows=rows)) == [1.0]
    assert [message.role for message in seen["completion"]] == ["assistant"]
    assert seen["completion"][0].content == "7" and seen["answer"] == "7"
    assert seen["prompt"][-1].content == ROW["question"] and seen["info"] == {"level": 3}
    assert seen["state"]["trajectory"] and seen["parser"] and seen["task"]["answer"] == "7"
    assert seen["names"] >= {"prompt", "completion", "answer", "info", "state", "parser", "task", "hint"}


@pytest.mark.parametrize("given", ["{not json", "[1]", "", None])
def test_info_that_is_no_object_is_empty(score: Any, given: str | None) -> None:
    def is_empty(info: Any) -> float:
        return float(info == {})

    assert rewards(score(is_empty, rows=[{**ROW, "info": given}])) == [1.0]


def test_the_reply_keeps_its_reasoning_apart(score: Any) -> None:
    import verifiers as vf

    def shown(completion: Any) -> float:
        return float((completion[-1].content, completion[-1].reasoning_content) == ("7", "hm"))

    def cut(state: Any) -> float:
        return float(state["trajectory"][-1]["is_truncated"])

    env = environment(vf.Rubric(funcs=[shown, cut]))
    row = env.train_rows()[0]
    replies = [Reply("7", "hm"), Reply("7"), Reply("7", "hm", truncated=True)]
    assert [one.reward for one in Scorer(env).score([(row, replies)])[0]] == [1.0, 0.0, 2.0]


def test_a_missing_argument_is_refused_by_name() -> None:
    import verifiers as vf

    def needs(completion: Any, colour: str) -> float:
        return 0.0

    with pytest.raises(EnvironmentProblem, match=r"'needs' requires the argument 'colour'"):
        environment(vf.Rubric(funcs=[needs]))
    assert environment(vf.Rubric(funcs=[needs], weights=[0.0]))


# --- rubrics in rubrics ---


def test_group_functions_see_the_group_and_no_other(score: Any) -> None:
    import verifiers as vf

    env = environment(vf.Rubric(funcs=[rank, exact], weights=[1.0, 0.5]))
    row = env.train_rows()[0]
    groups = [(row, [Reply("7"), Reply("long"), Reply("mid")]), (row, [Reply("1"), Reply("22")])]
    found = [rewards(group) for group in Scorer(env).score(groups)]
    assert found == [[0.5, 2.0, 1.0], [0.0, 1.0]]


def test_a_group_function_by_its_return_type(score: Any) -> None:
    def spread(completions) -> list[float]:  # type: ignore[no-untyped-def]
        return [float(index) for index, _ in enumerate(completions)]

    async def late(states: Any) -> list[float]:
        await asyncio.sleep(0.01)
        return [10.0 for _ in states]

    assert rewards(score(spread, late, texts=["a", "b"])) == [10.0, 11.0]


def test_nested_rubrics_add_up(score: Any) -> None:
    import verifiers as vf

    inner = vf.RubricGroup([vf.Rubric(funcs=[length], weights=[0.1]), vf.Rubric(funcs=[rank])])
    both = vf.RubricGroup([vf.Rubric(funcs=[exact]), inner])
    assert rewards(score(rubric=both, texts=["7", "seven"])) == pytest.approx([1.1, 1.5])


def test_a_judge_is_asked_with_its_class_objects(score: Any) -> None:
    import verifiers as vf

    class Judge(vf.Rubric):
        """What verifiers' JudgeRubric is, with a judge that needs no network."""

        def __init__(self) -> None:
            super().__init__(funcs=[self.verdict])
            self.class_objects |= {"judge": self.judge, "judge_model": "toy-judge"}

        async def judge(self, prompt: Any, completion: Any, answer: str, state: Any) -> str:
            await asyncio.sleep(0)
            return "yes" if answer in completion[-1].content else "no"

        async def verdict(
            self, judge: Any, judge_model: str, prompt: Any, completion: Any, answer: str, state: Any
        ) -> float:
            assert judge_model == "toy-judge"
            return float("yes" in await judge(prompt, completion, answer, state))

    assert rewards(score(rubric=Judge(), texts=["it is 7", "no idea"])) == [1.0, 0.0]
    group = vf.RubricGroup([vf.Rubric(funcs=[length], weights=[0.0]), Judge()])
    assert rewards(score(rubric=group, texts=["it is 7", "no idea"])) == [1.0, 0.0]


def test_each_member_of_an_environment_group_scores_its_own_rows() -> None:
    import verifiers as vf

    members = [environment(vf.Rubric(funcs=[func])).loaded for func in (exact, sometimes)]
    env = Environment("toy", vf.EnvGroup(envs=members, env_names=["sums", "words"]))
    first, second = env.train_rows()
    replies = [Reply("7"), Reply("x")]
    scores = Scorer(env).score([(first, replies), (second, replies)])
    assert [rewards(group) for group in scores] == [[1.0, 0.0], [1.0, None]]


def test_connections_survive_from_one_batch_to_the_next() -> None:
    import verifiers as vf

    loops = set[int]()

    async def on_loop(completion: Any) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 1.0

    env = environment(vf.Rubric(funcs=[on_loop]))
    scorer, row = Scorer(env), env.train_rows()[0]
    for _ in range(3):
        scorer.score([(row, [Reply("7")])])
    assert len(loops) == 1


# --- no weighted function ---


def test_without_a_weight_the_answer_has_to_be_in_the_reply(score: Any) -> None:
    texts = ["it is 7.", "eight", ""]
    assert rewards(score(texts=texts)) == [1.0, 0.0, 0.0]
    assert rewards(score(length, texts=texts, weights=[0.0])) == [1.0, 0.0, 0.0]
    assert rewards(score(texts=["anything"], rows=[{"question": "?", "answer": ""}])) == [0.0]


# --- failures ---


def test_a_sample_that_cannot_be_scored_has_no_reward_and_spoils_no_other(score: Any) -> None:
    scores = score(exact, sometimes, texts=["7", "x", "8"])
    assert rewards(scores) == [2.0, None, 1.0]
    assert scores[1].problem == "sometimes: LookupError: no such thing"
    assert not scores[0].problem and not scores[2].problem


def test_a_failure_of_an_async_function(score: Any) -> None:
    async def broken(completion: Any) -> float:
        await asyncio.sleep(0)
        raise TimeoutError("the judge sleeps")

    [one] = score(broken, exact)
    assert one.reward is None and one.problem == "broken: TimeoutError: the judge sleeps"


def test_a_score_that_is_no_number_is_a_failure(score: Any) -> None:
    def text(completion: Any) -> Any:
        return "good"

    [one] = score(text)
    assert one.reward is None and "ValueError" in one.problem


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_a_failure(score: Any, value: float) -> None:
    def odd(completion: Any) -> float:
        return value if completion[-1].content == "x" else 1.0

    scores = score(odd, texts=["7", "x"])
    assert rewards(scores) == [1.0, None]
    assert "odd" in scores[1].problem and str(value) in scores[1].problem


def test_a_failing_group_function_leaves_the_group_unscored(score: Any) -> None:
    def broken(states: Any) -> list[float]:
        raise ValueError("no")

    def short(states: Any) -> list[float]:
        return [1.0]

    for func in (broken, short):
        scores = score(exact, func, texts=["7", "8"])
        assert rewards(scores) == [None, None]
        assert all(one.problem.startswith(f"{func.__name__}: ValueError") for one in scores)


def test_a_failing_metric_of_weight_zero_changes_nothing(score: Any) -> None:
    def broken(completion: Any) -> float:
        raise RuntimeError("only a metric")

    def nothing(completion: Any) -> None: ...

    def not_a_number(completion: Any) -> float:
        return math.nan

    def broken_group(states: Any) -> list[float]:
        raise RuntimeError("only a metric")

    def short_group(states: Any) -> list[float]:
        return []

    def null_group(states: Any) -> list[float | None]:
        return [None for _ in states]

    for func in (broken, nothing, not_a_number, broken_group, short_group, null_group):
        scores = score(exact, func, texts=["7", "8"], weights=[1.0, 0.0])
        assert rewards(scores) == [1.0, 0.0], func.__name__
        assert not any(one.problem for one in scores)


def test_a_metric_may_change_the_state_for_the_next_function(score: Any) -> None:
    def prepares(state: Any) -> float:
        state["bonus"] = 2.0
        return 0.0

    def uses(state: Any) -> float:
        return state["bonus"]

    assert rewards(score(prepares, uses, weights=[0.0, 1.0])) == [2.0]


# --- rows and states ---


def test_rows_are_not_touched_and_states_are_not_shared(score: Any) -> None:
    import verifiers as vf

    def spoils(prompt: Any, completion: Any, info: Any, state: Any) -> float:
        prompt.clear(), completion.clear()
        info["seen"] = info.get("seen", 0) + 1
        state["answer"] = "spoilt"
        return float(info["seen"])

    env = environment(vf.Rubric(funcs=[spoils]), [{**ROW, "info": {"seen": 0, "deep": [1]}}])
    row = env.train_rows()[0]
    before = copy.deepcopy(row)
    scores = Scorer(env).score([(row, [Reply("a"), Reply("b")]), (row, [Reply("c")])])
    assert [rewards(group) for group in scores] == [[1.0, 1.0], [1.0]]
    assert row == before


def test_one_prompt_twice_keeps_its_own_answers() -> None:
    import verifiers as vf

    env = environment(vf.Rubric(funcs=[exact]), [ROW, {**ROW, "answer": "8"}])
    first, second = env.train_rows()
    replies = [Reply("7"), Reply("8")]
    scores = Scorer(env).score([(first, replies), (second, replies)])
    assert [rewards(group) for group in scores] == [[1.0, 0.0], [0.0, 1.0]]


def test_hooks_of_the_environment_run() -> None:
    import verifiers as vf

    class Hooked(vf.SingleTurnEnv):
        async def setup_state(self, state: Any) -> Any:
            state["bonus"] = 0.5
            return state

        async def render_completion(self, state: Any) -> None:
            await super().render_completion(state)
            state["completion"][-1].content = state["completion"][-1].content.strip()

    def with_bonus(completion: Any, answer: str, state: Any) -> float:
        return exact(completion, answer) + state["bonus"]

    env = environment(vf.Rubric(funcs=[with_bonus]), kind=Hooked)
    [scores] = Scorer(env).score([(env.train_rows()[0], [Reply(" 7 "), Reply("8")])])
    assert rewards(scores) == [1.5, 0.5]


def test_a_rollout_that_fails_has_no_reward() -> None:
    import verifiers as vf

    class Fragile(vf.SingleTurnEnv):
        async def add_model_response(self, state: Any, prompt_messages: Any, response: Any) -> None:
            if response.message.content == "boom":
                raise OSError("the sandbox is gone")
            if response.message.content == "soft":
                raise vf.InfraError("no sandbox left")
            await super().add_model_response(state, prompt_messages, response)

    env = environment(vf.Rubric(funcs=[exact]), kind=Fragile)
    replies = [Reply("7"), Reply("boom"), Reply("soft"), Reply("8")]
    [scores] = Scorer(env).score([(env.train_rows()[0], replies)])
    assert rewards(scores) == [1.0, None, None, 0.0]
    assert scores[1].problem == "OSError: the sandbox is gone"
    assert "InfraError" in scores[2].problem
