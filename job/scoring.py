"""Rewards of sampled replies, from the environment's own rollout loop and rubric.

verifiers turns an exception in a reward function into a reward of 0, a false negative to be trained on.
Here every weighted function carries a recorder: the sample it fails on has no reward at all.
"""

import asyncio
import functools
import inspect
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from job.environment import Environment, Row, info, rubric_tree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """What the model answered, as the environment is to see it."""

    text: str
    reasoning: str = ""
    truncated: bool = False


@dataclass(frozen=True)
class Score:
    """A sample's reward, None when it could not be scored, and the raw score of every reward function."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


class SampledReply:
    """Stands where verifiers expects a client: its one response is a reply that was sampled already."""

    def __init__(self, reply: Reply):
        self.reply = reply

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        from verifiers.types import Response, ResponseMessage

        message = ResponseMessage(
            content=self.reply.text,
            reasoning_content=self.reply.reasoning or None,
            finish_reason="length" if self.reply.truncated else "stop",
            is_truncated=self.reply.truncated,
        )
        return Response(id=uuid.uuid4().hex, created=int(time.time()), model=model, message=message)


class Scorer:
    """Scores groups of replies to one prompt with the environment's rubric."""

    def __init__(self, env: Environment):
        from verifiers.clients import Client

        Client.register(SampledReply)
        self.env, self.problems = env, dict[str, str]()
        self.has_weighted = False
        for rubric in rubric_tree(env.loaded.rubric):
            self._record(rubric)
        # One loop for the whole run: judges keep connections that die with the loop they were opened on.
        self._loop = asyncio.Runner()

    def score(self, groups: Sequence[tuple[Row, Sequence[Reply]]]) -> list[list[Score]]:
        """Score every group, all at once; one list of scores a group, in order."""
        return self._loop.run(self._score_all(groups))

    async def _score_all(self, groups: Sequence[tuple[Row, Sequence[Reply]]]) -> list[list[Score]]:
        return await asyncio.gather(*(self._score_group(row, replies) for row, replies in groups))

    async def _score_group(self, row: Row, replies: Sequence[Reply]) -> list[Score]:
        states = await asyncio.gather(*(self._play(row, one) for one in replies), return_exceptions=True)
        played = [state for state in states if not isinstance(state, BaseException) and not state["error"]]
        ratings = [self._rate(played)] if played else []
        failed = await asyncio.gather(*ratings, return_exceptions=True)
        return [self._score(state, reply, row, failed) for state, reply in zip(states, replies, strict=True)]

    async def _play(self, row: Row, reply: Reply) -> Any:
        """The library's own rollout, whose only model turn is the sampled reply."""
        given = {**row, "prompt": self.env.prompt(row)}
        if "info" in row:
            given["info"] = info(row)
        return await self.env.loaded.rollout(given, SampledReply(reply), "policy", {})

    async def _rate(self, states: list[Any]) -> None:
        await self.env.loaded.rubric.score_group(states)
        for state in states:
            await self.env.loaded.rubric.cleanup(state)

    def _score(self, state: Any, reply: Reply, row: Row, failed: Sequence[Any]) -> Score:
        errors = [one for one in (state, *failed) if isinstance(one, BaseException)]
        if errors:
            return Score(None, problem=f"{type(errors[0]).__name__}: {errors[0]}")
        if state["error"]:
            return Score(None, problem=repr(state["error"]))
        metrics = dict(state["metrics"] or {})
        problem = self.problems.pop(state["trajectory_id"], "")
        if problem:
            return Score(None, metrics, problem)
        return Score(state["reward"] if self.has_weighted else contains_answer(row, reply.text), metrics)

    # --- recorders ---

    def _record(self, rubric: Any) -> None:
        for index, (func, weight) in enumerate(zip(rubric.funcs, rubric.weights, strict=True)):
            if weight:
                self.has_weighted = True
                rubric.funcs[index] = (
                    self._recorded_group(func) if rubric._is_group_func(func) else self._recorded(func)
                )

    def _recorded(self, func: Callable[..., Any]) -> Callable[..., Awaitable[float]]:
        @functools.wraps(func)
        async def recorded(**objects: Any) -> float:
            with self._noted([objects["state"]], func):
                score = await _awaited(func(**_accepted(func, objects)))
                return 0.0 if score is None else float(score)

        return _with_signature(recorded, ())

    def _recorded_group(self, func: Callable[..., Any]) -> Callable[..., Awaitable[list[float]]]:
        @functools.wraps(func)
        async def recorded(**objects: Any) -> list[float]:
            with self._noted(objects["states"], func):
                scores = await _awaited(func(**_accepted(func, objects)))
                pairs = zip(scores, objects["states"], strict=True)
                return [0.0 if score is None else float(score) for score, _ in pairs]

        return _with_signature(recorded, ("states",))

    def _noted(self, states: Sequence[Any], func: Callable[..., Any]) -> "_Noting":
        return _Noting(self.problems, [state["trajectory_id"] for state in states], func.__name__)


@dataclass
class _Noting:
    """Writes an exception down under the samples it spoils, and lets it pass."""

    problems: dict[str, str]
    keys: Sequence[str]
    name: str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.problems |= dict.fromkeys(self.keys, f"{self.name}: {type(error).__name__}: {error}")


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _accepted(func: Callable[..., Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments a function declares, or all when it takes arbitrary keywords."""
    parameters = inspect.signature(func).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(objects)
    return {name: value for name, value in objects.items() if name in parameters}


def _with_signature(recorded: Any, names: Sequence[str]) -> Any:
    """Make the library pass everything: it looks at signatures, and knows group functions by plural names."""
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    rest = inspect.Parameter("objects", inspect.Parameter.VAR_KEYWORD)
    recorded.__signature__ = inspect.Signature([*named, rest])
    return recorded


def contains_answer(row: Row, text: str) -> float:
    """The reward where no function has a weight: 1 when the answer's text is in the reply."""
    answer = str(row.get("answer") or "")
    return float(bool(answer) and answer in text)
