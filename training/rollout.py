"""Conversations for GRPO: verifiers' own rollout loop on our sampler, flattened to what TRL trains on."""

import asyncio
import json
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import recipe
from job.chat import Chat
from job.dataset import Prompts
from job.environment import Environment, Row, schema
from job.scoring import Score, Scorer
from job.settings import Settings
from training.sampler import Request, Sampler

log = logging.getLogger(__name__)

RESERVED_TOKENS = 8
AT_ONCE = 512
CLEANUP_S = 120.0


class Transport:
    """Stands where verifiers' client expects an HTTP connection to vLLM's token endpoint."""

    def __init__(self, sampler: Sampler, max_length: int, stop_ids: Sequence[int]):
        """`max_length` is the engine's, in tokens."""
        self.sampler, self.stop_ids = sampler, tuple(stop_ids)
        self.room = max_length - RESERVED_TOKENS
        self.base_url = f"inprocess://{uuid.uuid4().hex}/v1"  # the library caches lengths by address

    async def get(self, path: str, cast_to: Any = None, **_: Any) -> Any:
        return {"data": [{"id": "policy", "max_model_len": self.room - 1}]}

    async def close(self) -> None: ...

    async def post(self, url: str, cast_to: Any = None, body: Any = None, **_: Any) -> Any:
        """Sample one turn; the answer is the JSON that vLLM's endpoint returns."""
        asked, ids = body["sampling_params"], body["token_ids"]
        sample = await self.sampler.sample(
            Request(
                ids=ids,
                max_tokens=max(1, min(asked["max_tokens"], self.room - len(ids))),
                temperature=asked["temperature"],
                top_p=asked["top_p"],
                stop=tuple(asked.get("stop") or ()),
                stop_ids=tuple({*self.stop_ids, *asked["stop_token_ids"]}),
            )
        )
        logprobs = [
            {"token": f"token_id:{token}", "logprob": value}
            for token, value in zip(sample.ids, sample.logprobs, strict=True)
        ]
        choice = {
            "token_ids": sample.ids,
            "finish_reason": sample.finish_reason,
            "logprobs": {"content": logprobs},
        }
        answer = {"request_id": uuid.uuid4().hex, "choices": [choice]}
        return SimpleNamespace(content=json.dumps(answer).encode())


class PolicyClient:
    """What verifiers' `RendererClient` becomes; a mixin, as importing verifiers is not free."""

    def __init__(self: Any, transport: Transport, renderer: Any):
        self._client, self._config, self._renderer, self._pool_size = transport, None, renderer, 1
        self.logger = log

    async def raise_from_native_response(self, response: Any) -> None:
        """An empty reply is a turn like any other, or a policy that says nothing would never be penalised."""

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        """A schema as SFT renders it too; the library's has a `strict` of its own."""
        return schema(tool)


def policy_client(transport: Transport, renderer: Any) -> Any:
    from verifiers.clients.renderer_client import RendererClient

    return type("PolicyClient", (PolicyClient, RendererClient), {})(transport, renderer)


@dataclass(frozen=True)
class Flat:
    """One rollout as TRL takes it: mask 1 and log-probability of model tokens, 0 and 0.0 of the others."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    breaks: int = 0


def flatten(trajectory: Sequence[Any]) -> Flat | None:
    """Join the turns of a rollout; None when there is none.

    Where the environment rewrote history the ids are no extension of what was sampled: only the last
    contiguous stretch is kept, and the breaks are counted.
    """
    stretch: Flat | None = None
    breaks = 0
    for step in trajectory:
        tokens = step["tokens"]
        if tokens is None or not tokens["completion_ids"]:
            continue
        prompt, sampled = list(tokens["prompt_ids"]), list(tokens["completion_ids"])
        logprobs = list(tokens["completion_logprobs"])
        before = [*stretch.prompt_ids, *stretch.completion_ids] if stretch else []
        if stretch and prompt[: len(before)] == before:
            glue = prompt[len(before) :]
            stretch = Flat(
                stretch.prompt_ids,
                [*stretch.completion_ids, *glue, *sampled],
                [*stretch.logprobs, *[0.0] * len(glue), *logprobs],
                [*stretch.env_mask, *[0] * len(glue), *[1] * len(sampled)],
            )
        else:
            breaks += stretch is not None
            stretch = Flat(prompt, sampled, logprobs, [1] * len(sampled))
    return replace(stretch, breaks=breaks) if stretch else None


@dataclass
class Statistics:
    """What the conversations of one step were like."""

    turns: list[int] = field(default_factory=list)
    model_tokens: int = 0
    env_tokens: int = 0
    truncated: int = 0
    breaks: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def means(self) -> dict[str, float]:
        """One number a name, for the trainer's log; errors also by type."""
        count = max(1, len(self.turns))
        facts = {
            "turns": sum(self.turns) / count,
            "model_tokens": self.model_tokens / count,
            "env_tokens": self.env_tokens / count,
            "truncated": self.truncated / count,
            "tool_calls": self.tool_calls / count,
            "tool_failures": self.tool_failures / count,
            "bridge_breaks": float(self.breaks),
            "errors": float(self.errors.total()),
            **{f"errors/{name}": float(number) for name, number in self.errors.items()},
        }
        return {f"rollout/{name}": value for name, value in facts.items()}


@dataclass(frozen=True)
class Conversation:
    """A played conversation as a report shows it: plain messages, with reasoning and tool calls."""

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    score: Score


class Rollout:
    """TRL's `rollout_func`: one conversation for every prompt it is given, all of them at once."""

    def __init__(
        self,
        settings: Settings,
        env: Environment,
        chat: Chat,
        prompts: Prompts,
        scorer: Scorer,
        renderer: Any,
    ):
        self.settings, self.env, self.chat, self.prompts = settings, env, chat, prompts
        self.scorer, self.renderer = scorer, renderer
        self.conversations: list[Conversation] = []  # of the newest step, in order
        self.statistics = Statistics()
        self.tool_failures = 0
        for one in env.members():
            self._count_failures(one)
            end_on_silence(one)
            if not one.max_turns or one.max_turns <= 0:
                one.max_turns = env.max_turns

    @property
    def scores(self) -> list[Score]:
        return [one.score for one in self.conversations]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Play one conversation per entry, in order: the samples of a group are entries already."""
        if [self.prompts.texts[index] for index in trainer.batch_rows] != list(prompts):
            raise RuntimeError("the prompts that TRL asks for are not those of its row indices")
        flats = self.scorer.run(self._play_all(trainer.batch_rows, trainer.sampler))
        return {
            "prompt_ids": [one.prompt_ids for one in flats],
            "completion_ids": [one.completion_ids for one in flats],
            "logprobs": [one.logprobs for one in flats],
            "env_mask": [one.env_mask for one in flats],
            "reward": [one.reward for one in self.scores],
        }

    async def _play_all(self, indices: Sequence[int], sampler: Sampler) -> list[Flat]:
        rows = [self.prompts.rows[index] for index in indices]
        transport = Transport(sampler, self.settings.rl_vllm_max_len, self.chat.stop_ids)
        client = policy_client(transport, self.renderer)
        slots = asyncio.Semaphore(AT_ONCE)
        self.tool_failures = 0
        async with sampler.session():
            playing = (self._play(row, client, slots) for row in rows)
            states = await asyncio.gather(*playing, return_exceptions=True)
        groups = self.prompts.groups(indices, states, self.settings.rl_group_size)
        scored = await asyncio.gather(*(self.scorer.rate(row, group) for row, group in groups))
        scores = [one for group in scored for one in group]
        flats = [flatten(_trajectory(state)) for state in states]
        self.statistics = replace(statistics(states, flats), tool_failures=self.tool_failures)
        placed = [
            self._placeholder(row) if flat is None else flat for row, flat in zip(rows, flats, strict=True)
        ]
        unscored = [
            Score(None, problem=score.problem or "no model turn") if flat is None else score
            for score, flat in zip(scores, flats, strict=True)
        ]
        played = zip(rows, states, unscored, strict=True)
        self.conversations = [self._conversation(row, state, score) for row, state, score in played]
        return placed

    async def _play(self, row: Row, client: Any, slots: asyncio.Semaphore) -> Any:
        async with slots:
            # The library limits the turns, not the environment's own cleaning up after them.
            longest_s = max(one.timeout_seconds for one in self.env.members())
            async with asyncio.timeout(longest_s + CLEANUP_S):
                return await self.env.loaded.rollout(
                    self.scorer.given(row), client, "policy", self._sampling()
                )

    def _sampling(self) -> dict[str, Any]:
        stop = {"stop": list(self.settings.stop_sequences)} if self.settings.stop_sequences else {}
        return {
            "max_tokens": self.settings.rl_max_completion,
            "temperature": self.settings.temperature,
            "top_p": recipe.RL.top_p,
            "extra_body": stop,  # the client drops `stop` anywhere else
        }

    def _count_failures(self, member: Any) -> None:
        """Count the tool calls whose error the environment formats for the model."""
        plain = vars(member).get("error_formatter")
        if plain is None:
            return

        def counted(error: Exception) -> str:
            self.tool_failures += 1
            return plain(error)

        member.error_formatter = counted

    def _placeholder(self, row: Row) -> Flat:
        """Tokens for a rollout without a model turn: TRL needs some, but nobody sampled these."""
        prompt = self.chat.prompt_ids(self.env.prompt(row), self.env.tools(row))
        return Flat(prompt, [self.chat.end_of_turn_id], [0.0], [0])

    def _conversation(self, row: Row, state: Any, score: Score) -> Conversation:
        if isinstance(state, BaseException):
            return Conversation(self.env.prompt(row), [], score)
        return Conversation(messages(state["prompt"]), messages(state["completion"]), score)


def end_on_silence(member: Any) -> None:
    """End a conversation whose environment answers nothing; the library would ask the model once more."""
    plain = member.env_response

    async def answered(messages: Any, state: Any, **more: Any) -> Any:
        try:
            answer = await plain(messages, state, **more) or []
        except NotImplementedError:
            answer = []
        if not answer and state.get("final_env_response") is None:
            state["final_env_response"] = []
        return answer

    member.env_response = answered


def messages(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Typed messages as plain ones."""
    return [one.model_dump(exclude_none=True) for one in given]


def _trajectory(state: Any) -> Sequence[Any]:
    return [] if isinstance(state, BaseException) else state["trajectory"]


def statistics(states: Sequence[Any], flats: Sequence[Flat | None]) -> Statistics:
    """Count what happened in the conversations of one step."""
    facts = Statistics()
    for state, flat in zip(states, flats, strict=True):
        facts.turns.append(len(_trajectory(state)))
        if flat is not None:
            facts.model_tokens += sum(flat.env_mask)
            facts.env_tokens += len(flat.env_mask) - sum(flat.env_mask)
            facts.breaks += flat.breaks
        error = state if isinstance(state, BaseException) else state["error"]
        if error:
            facts.errors[type(error).__name__] += 1
        if not isinstance(state, BaseException):
            facts.truncated += bool(state["is_truncated"])
            _count_tools(state, facts)
    return facts


def _count_tools(state: Any, facts: Statistics) -> None:
    for step in state["trajectory"]:
        for message in step["completion"]:
            facts.tool_calls += len(message.tool_calls or [])
