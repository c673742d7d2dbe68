"""Rewards of sampled replies, from the environment's own rollout loop and rubric.

verifiers turns an exception in a reward function into a reward of 0, a false negative to be trained on.
Here every weighted function carries a recorder: the sample it fails on has no reward at all.
"""

import asyncio
import functools
import inspect
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from job.environment import Environment, Row, function_name, info, rubric_tree

log = logging.getLogger(__name__)

CHECK_EVERY_S, CANCEL_S = 0.2, 2.0
TIME_LIMIT_S = 900.0
T = TypeVar("T")
Note = Callable[[Any, str, BaseException], None]  # a state, the function that failed on it, and with what
Problems = dict[int, str]  # by the identity of the state that is spoilt: environments write its fields


@dataclass(frozen=True)
class Reply:
    """What the model answered, as the environment is to see it."""

    text: str
    reasoning: str = ""
    truncated: bool = False

    @property
    def message(self) -> dict[str, Any]:
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought}


@dataclass(frozen=True)
class Score:
    """A sample's reward, None when it could not be scored, and the raw score of every reward function."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def kind(self) -> str:
        """The problem's type: `<Type>: …`, or `<function>: <Type>: …`."""
        parts = self.problem.split(": ")
        return next((one for one in parts if one[:1].isupper()), parts[0])[:60]


@dataclass(frozen=True)
class Conversation:
    """A prompt, what was said after it, as plain messages, and its score."""

    prompt: Sequence[Mapping[str, Any]]
    completion: Sequence[Mapping[str, Any]]
    score: Score


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

    def __init__(self, env: Environment, check: Callable[[], None] = lambda: None):
        """`check` raises when the run has to stop, also while judges or conversations are waited for."""
        import verifiers as vf
        from verifiers.clients import Client

        Client.register(SampledReply)
        self.env, self.check, self.problems = env, check, Problems()
        self.unreported: dict[int, set[str]] = {}  # metrics that failed, by the identity of the state
        self.has_weighted = False
        for rubric in rubric_tree(env.loaded.rubric):
            self._record(rubric)
        for one in env.members():
            if isinstance(one, vf.MultiTurnEnv) and one.timeout_seconds is None:
                one.timeout_seconds = TIME_LIMIT_S
        # One loop for the whole run: judges keep connections that die with the loop they were opened on.
        self._loop = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run async work on the loop that the environment's connections belong to."""
        return self._loop.run(self._checked(work))

    async def _checked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=CHECK_EVERY_S)
                self.check()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_S)
        return task.result()

    def score(self, groups: Sequence[tuple[Row, Sequence[Reply]]]) -> list[list[Score]]:
        """Score groups of replies that were sampled already; one list of scores a group, in order."""
        return self.run(self.score_all(groups))

    async def score_all(self, groups: Sequence[tuple[Row, Sequence[Reply]]]) -> list[list[Score]]:
        """The same, for callers that are on the loop."""
        return await asyncio.gather(*(self._score_group(row, replies) for row, replies in groups))

    async def _score_group(self, row: Row, replies: Sequence[Reply]) -> list[Score]:
        played = (self._play(row, one) for one in replies)
        return await self.rate(row, await asyncio.gather(*played, return_exceptions=True))

    def score_transcripts(
        self, groups: Sequence[tuple[Row, Sequence[list[dict[str, Any]]]]]
    ) -> list[list[Score]]:
        """Score groups of finished conversations, given as the messages that came after the prompt."""
        return self.run(self._score_all_transcripts(groups))

    async def _score_all_transcripts(
        self, groups: Sequence[tuple[Row, Sequence[list[dict[str, Any]]]]]
    ) -> list[list[Score]]:
        async def one(row: Row, transcripts: Sequence[list[dict[str, Any]]]) -> list[Score]:
            fresh = (self._finished(row, messages) for messages in transcripts)
            return await self.rate(row, await asyncio.gather(*fresh, return_exceptions=True))

        return await asyncio.gather(*(one(row, transcripts) for row, transcripts in groups))

    async def _finished(self, row: Row, messages: list[dict[str, Any]]) -> Any:
        from verifiers.utils.message_utils import normalize_messages

        env = self.env.loaded
        state = await env.init_state(self.given(row), SampledReply(Reply("")), "policy", {})
        state["completion"] = normalize_messages(messages)
        return state

    async def _play(self, row: Row, reply: Reply) -> Any:
        """The library's own rollout, whose only model turn is the sampled reply."""
        return await self.env.loaded.rollout(self.given(row), SampledReply(reply), "policy", {})

    def given(self, row: Row) -> Row:
        """A row as the library's rollout takes it."""
        parsed = {"info": info(row)} if "info" in row else {}
        return {**row, "prompt": self.env.prompt(row), **parsed}

    async def rate(self, row: Row, states: Sequence[Any]) -> list[Score]:
        """Score the rollouts of one prompt together; a failed one has no reward."""
        played = [state for state in states if not isinstance(state, BaseException) and not state["error"]]
        ratings = [self._apply_rubric(played)] if played else []
        failed = await asyncio.gather(*ratings, return_exceptions=True)
        return [self._score(row, state, failed) for state in states]

    async def _apply_rubric(self, states: list[Any]) -> None:
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                await self.env.loaded.rubric.score_group(states)
                for state in states:
                    await self.env.loaded.rubric.cleanup(state)
        except TimeoutError as error:
            raise TimeoutError(f"not scored within {TIME_LIMIT_S:g} s") from error

    def _score(self, row: Row, state: Any, failed: Sequence[Any]) -> Score:
        problem, unreported = self.problems.pop(id(state), ""), self.unreported.pop(id(state), set())
        errors = [one for one in (state, *failed) if isinstance(one, BaseException)]
        if errors:
            return Score(None, problem=described(errors[0]))
        if state["error"]:
            return Score(None, problem=described(state["error"]))
        metrics = {name: one for name, one in (state["metrics"] or {}).items() if name not in unreported}
        if problem:
            return Score(None, metrics, problem)
        return Score(state["reward"] if self.has_weighted else contains_answer(row, state), metrics)

    # --- recorders ---

    def _record(self, rubric: Any) -> None:
        for index, (func, weight) in enumerate(zip(rubric.funcs, rubric.weights, strict=True)):
            self.has_weighted |= bool(weight)
            note = self._spoilt if weight else self._unreported
            recorded = _recorded_group if rubric._is_group_func(func) else _recorded
            rubric.funcs[index] = recorded(func, note)

    def _spoilt(self, state: Any, name: str, error: BaseException) -> None:
        self.problems[id(state)] = f"{name}: {type(error).__name__}: {error}"

    def _unreported(self, state: Any, name: str, error: BaseException) -> None:
        """A metric of weight zero costs no sample, and its failure is no 0."""
        self.unreported.setdefault(id(state), set()).add(name)


def _recorded(func: Callable[..., Any], note: Note) -> Callable[..., Awaitable[float]]:
    @functools.wraps(func)
    async def recorded(**objects: Any) -> float:
        with _Noting(note, [objects["state"]], function_name(func)):
            return _number(await _awaited(func(**_accepted(func, objects))))

    return _with_signature(recorded, func, ())


def _recorded_group(func: Callable[..., Any], note: Note) -> Callable[..., Awaitable[list[float]]]:
    @functools.wraps(func)
    async def recorded(**objects: Any) -> list[float]:
        with _Noting(note, objects["states"], function_name(func)):
            scores = await _awaited(func(**_accepted(func, objects)))
            return [_number(score) for score, _ in zip(scores, objects["states"], strict=True)]

    return _with_signature(recorded, func, ("states",))


@dataclass
class _Noting:
    """Writes an exception down under the samples it spoils, and lets it pass."""

    note: Note
    states: Sequence[Any]
    name: str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            for state in self.states:
                self.note(state, self.name, error)


def _number(score: Any) -> float:
    """A score as the library adds it up; a null is 0. ValueError when it is not finite."""
    number = 0.0 if score is None else float(score)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no score")
    return number


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _accepted(func: Callable[..., Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments a function declares, or all when it takes arbitrary keywords."""
    parameters = inspect.signature(func).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(objects)
    return {name: value for name, value in objects.items() if name in parameters}


def _with_signature(recorded: Any, func: Any, names: Sequence[str]) -> Any:
    """Make the library pass everything: it looks at signatures, and knows group functions by plural names."""
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    rest = inspect.Parameter("objects", inspect.Parameter.VAR_KEYWORD)
    recorded.__name__ = function_name(func)
    recorded.__signature__ = inspect.Signature([*named, rest])
    return recorded


def described(error: BaseException) -> str:
    """`<Type>: <message>`; an error that has none has its cause's."""
    return f"{type(error).__name__}: {str(error) or repr(error.__cause__)}"


def contains_answer(row: Row, state: Any) -> float:
    """The reward where no function has a weight: 1 when the answer's text is in the newest reply."""
    answer = str(row.get("answer") or "")
    replies = [one.content or "" for one in state["completion"] if one.role == "assistant"]
    return float(bool(answer and replies) and answer in replies[-1])
