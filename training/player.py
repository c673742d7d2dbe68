"""Conversations, played by verifiers' own rollout loop on any sampler."""

import asyncio
import json
import logging
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import recipe
from job.chat import Chat
from job.environment import Environment, Row, schema
from job.scoring import Conversation, Score, Scorer
from job.settings import Settings
from training.sampler import Request, Sampler, stop_arguments

log = logging.getLogger(__name__)

RESERVED_TOKENS = 8
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


class Player:
    """Plays the conversations of one environment, all at once; failed ones are exceptions in their places."""

    def __init__(self, settings: Settings, env: Environment, chat: Chat, scorer: Scorer, renderer: Any):
        self.settings, self.env, self.chat = settings, env, chat
        self.scorer, self.renderer = scorer, renderer
        self.tool_failures = 0
        for one in env.members():
            self._count_failures(one)
            end_on_silence(one)
            if not one.max_turns or one.max_turns <= 0:
                one.max_turns = env.max_turns

    async def play(
        self,
        rows: Sequence[Row],
        sampler: Sampler,
        *,
        max_tokens: int,
        temperature: float,
        length: int,
        at_once: int,
    ) -> list[Any]:
        """The final states, in order; `max_tokens` are those of a turn, `length` those of a conversation."""
        client = policy_client(Transport(sampler, length, self.chat.stop_ids), self.renderer)
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": recipe.RL.top_p,
            "extra_body": stop_arguments(self.settings),  # the client drops `stop` anywhere else
        }
        slots = asyncio.Semaphore(at_once)
        self.tool_failures = 0
        async with sampler.session():
            playing = (self._play(row, client, sampling, slots) for row in rows)
            return await asyncio.gather(*playing, return_exceptions=True)

    async def _play(self, row: Row, client: Any, sampling: dict[str, Any], slots: asyncio.Semaphore) -> Any:
        async with slots:
            # The library limits the turns, not the environment's own cleaning up after them.
            longest_s = max(one.timeout_seconds for one in self.env.members())
            async with asyncio.timeout(longest_s + CLEANUP_S):
                return await self.env.loaded.rollout(self.scorer.given(row), client, "policy", sampling)

    def conversation(self, row: Row, state: Any, score: Score) -> Conversation:
        """What was said, as plain messages."""
        if isinstance(state, BaseException):
            return Conversation(self.env.prompt(row), [], score)
        return Conversation(messages(state["prompt"]), messages(state["completion"]), score)

    def _count_failures(self, member: Any) -> None:
        """Count the tool calls whose error the environment formats for the model."""
        plain = vars(member).get("error_formatter")
        if plain is None:
            return

        def counted(error: Exception) -> str:
            self.tool_failures += 1
            return plain(error)

        member.error_formatter = counted


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
