"""What the tests of conversations share: a sampler with a script, and rollouts of inline environments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from job import rules
from job.chat import Chat
from job.dataset import Prompts
from job.environment import Environment
from job.scoring import Scorer
from job.settings import identify
from tests import grpo_trials
from training.conversations import shows_tools
from training.glue import renderer_for
from training.rollout import Rollout
from training.sampler import Request, Sample

LOGPROB = -0.5
Script = Callable[[Request], str | list[int]]


@dataclass
class Scripted:
    """A sampler that says what its script says: text with the end of turn, or exactly these ids."""

    chat: Chat
    script: Script
    requests: list[Request] = field(default_factory=list)
    open_sessions: int = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        self.open_sessions += 1
        try:
            yield
        finally:
            self.open_sessions -= 1

    async def sample(self, request: Request) -> Sample:
        self.requests.append(request)
        reply = self.script(request)
        if isinstance(reply, str):
            reply = [*self.chat.encode(reply), self.chat.end_of_turn_id]
        kept = reply[: request.max_tokens]
        stopped = kept[-1] in request.stop_ids
        return Sample(list(kept), [LOGPROB] * len(kept), "stop" if stopped else "length")


def turns(chat: Chat, replies: Sequence[str | list[int]], header: str = "<|im_start|>assistant") -> Script:
    """A script with one reply a turn; the turn is told by the headers of model turns in the prompt."""
    return lambda request: replies[chat.tokenizer.decode(list(request.ids)).count(header) - 1]


@dataclass(frozen=True)
class Played:
    """What TRL was given, with the rollout and the sampler that made it."""

    rollout: Rollout
    sampler: Any
    given: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.given[name]

    @property
    def facts(self) -> Any:
        return self.rollout.statistics

    def text(self, index: int) -> str:
        """A conversation as text, from the prompt's first token to the last one sampled."""
        return self.rollout.chat.tokenizer.decode(self.prompt_ids[index] + self.completion_ids[index])


def make(
    folder: Path,
    chat: Chat,
    loaded: Any,
    *,
    group: int = 1,
    max_tokens: int = 16,
    engine_length: int = 1024,
    temperature: float = 1.0,
    **more: Any,
) -> Rollout:
    """The rollout of an environment, with the settings of a real run."""
    train = {"group_size": max(2, group), "max_tokens": max_tokens, "temperature": temperature}
    env = grpo_trials.variables(folder, "unused", train=train, RL_VLLM_MAX_LEN=engine_length, **more)
    identity, problem = identify(env)
    assert problem is None, problem
    settings = rules.resolve(env, identity).model_copy(update={"rl_group_size": group})
    environment = Environment("inline", loaded)
    rows = sorted(environment.train_rows(), key=lambda row: row["example_id"])  # as written, not shuffled
    texts = [chat.render(environment.prompt(row), environment.tools(row)) for row in rows]
    prompts = Prompts(texts, rows, 0)
    renderer = renderer_for(chat, shows_tools(environment, prompts.rows))
    return Rollout(settings, environment, chat, prompts, Scorer(environment), renderer)


def play(rollout: Rollout, sampler: Any, rows: Sequence[int] | None = None) -> Played:
    """Call a rollout as TRL does; `rows` are all rows, each `group` times, unless given."""
    if rows is None:
        size = rollout.settings.rl_group_size
        rows = [index for index in range(len(rollout.prompts.rows)) for _ in range(size)]
    trainer = SimpleNamespace(batch_rows=list(rows), sampler=sampler)
    given = rollout([rollout.prompts.texts[index] for index in rows], trainer)
    lengths = [len(one) for one in given["completion_ids"]]
    assert [len(one) for one in given["logprobs"]] == lengths
    assert [len(one) for one in given["env_mask"]] == lengths
    ends = zip(given["env_mask"], rollout.statistics.turns, strict=True)
    assert all(mask[-1] == bool(turns) for mask, turns in ends)  # never ends on environment tokens
    return Played(rollout, sampler, given)
