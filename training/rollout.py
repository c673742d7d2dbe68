"""Conversations for GRPO: verifiers' own rollout loop on our sampler, flattened to what TRL trains on."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from job.chat import Chat
from job.dataset import Prompts
from job.environment import Environment, Row
from job.scoring import Conversation, Score, Scorer
from job.settings import Settings
from training.player import Player
from training.sampler import Sampler

AT_ONCE = 512


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
        self.scorer, self.player = scorer, Player(settings, env, chat, scorer, renderer)
        self.conversations: list[Conversation] = []  # of the newest step, in order
        self.statistics = Statistics()

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
        states = await self.player.play(
            rows,
            sampler,
            max_tokens=self.settings.rl_max_completion,
            temperature=self.settings.temperature,
            length=self.settings.rl_vllm_max_len,
            at_once=AT_ONCE,
        )
        groups = self.prompts.groups(indices, states, self.settings.rl_group_size)
        scored = await asyncio.gather(*(self.scorer.rate(row, group) for row, group in groups))
        scores = [one for group in scored for one in group]
        flats = [flatten(_trajectory(state)) for state in states]
        self.statistics = replace(statistics(states, flats), tool_failures=self.player.tool_failures)
        placed = [
            self._placeholder(row) if flat is None else flat for row, flat in zip(rows, flats, strict=True)
        ]
        unscored = [
            Score(None, problem=score.problem or "no model turn") if flat is None else score
            for score, flat in zip(scores, flats, strict=True)
        ]
        played = zip(rows, states, unscored, strict=True)
        self.conversations = [self.player.conversation(*one) for one in played]
        return placed

    def _placeholder(self, row: Row) -> Flat:
        """Tokens for a rollout without a model turn: TRL needs some, but nobody sampled these."""
        prompt = self.chat.prompt_ids(self.env.prompt(row), self.env.tools(row))
        return Flat(prompt, [self.chat.end_of_turn_id], [0.0], [0])


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
