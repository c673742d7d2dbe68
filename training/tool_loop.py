"""TRL's own tool loop (`RL_TOOL_LOOP=trl`) for a plain `ToolEnv`, on the templates that TRL can parse.

It knows neither hidden tool arguments, nor error formatters, nor stop errors: an environment that has any of
these is refused. The default loop, verifiers' own, serves them all.
"""

import inspect
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from accounting import Tally
from job.chat import Chat
from job.dataset import Prompts
from job.environment import Environment
from job.scoring import Conversation, Scorer
from job.settings import Settings, SettingsError
from training.rewards import count


def check(env: Environment, chat: Chat) -> None:
    """Raise SettingsError when TRL's loop would not do what the environment's own loop does."""
    import verifiers as vf
    from trl.chat_template_utils import add_response_schema

    loaded = env.loaded
    if not isinstance(loaded, vf.ToolEnv) or not loaded.tools:
        raise SettingsError(f"RL_TOOL_LOOP=trl: {env.id} has no tools to call; use RL_TOOL_LOOP=env")
    lost = own_members(type(loaded), vf.ToolEnv)
    plain_formatter = inspect.signature(vf.ToolEnv).parameters["error_formatter"].default
    lost += ["error_formatter"] if loaded.error_formatter is not plain_formatter else []
    lost += ["stop_errors"] if loaded.stop_errors else []
    if lost:
        raise SettingsError(
            f"RL_TOOL_LOOP=trl: TRL's loop would leave out what {env.id} has of its own ({', '.join(lost)});"
            " use RL_TOOL_LOOP=env"
        )
    try:
        add_response_schema(chat.tokenizer)
    except ValueError as error:
        raise SettingsError(
            f"RL_TOOL_LOOP=trl: TRL does not know the chat template of {chat.tokenizer.name_or_path}; use"
            " RL_TOOL_LOOP=env"
        ) from error


def own_members(kind: type, plain: type) -> list[str]:
    """What a class has that a plain one has not or has differently: hooks, stop conditions, helpers."""
    added = [one for one in kind.__mro__ if one not in plain.__mro__]
    names = {name for one in added for name in vars(one)}
    return sorted(name for name in names if not name.startswith(("__", "_abc_")))


class TranscriptReward:
    """Scores the transcripts that TRL's tool loop made with the environment's own rubric."""

    __name__ = "environment"

    def __init__(self, settings: Settings, env: Environment, prompts: Prompts, scorer: Scorer, tally: Tally):
        self.settings, self.env, self.prompts, self.scorer, self.tally = settings, env, prompts, scorer, tally
        self.conversations: list[Conversation] = []  # of the newest batch

    def __call__(
        self,
        completions: Sequence[Sequence[dict[str, Any]]],
        row: Sequence[int],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        """One reward per transcript, None where it could not be scored."""
        transcripts = [as_verifiers(one) for one in completions]
        groups = self.prompts.groups(row, transcripts, self.settings.rl_group_size)
        scores = [one for group in self.scorer.score_transcripts(groups) for one in group]
        count(self.tally, scores, log_metric)
        self.conversations = [
            Conversation(self.env.prompt(self.prompts.rows[index]), transcript, score)
            for index, transcript, score in zip(row, transcripts, scores, strict=True)
        ]
        return [one.reward for one in scores]


def as_verifiers(transcript: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL's messages as verifiers takes them: tool calls flat, each with an id that its answer names."""
    messages, ids = list[dict[str, Any]](), itertools.count()
    unanswered: list[str] = []
    for message in transcript:
        plain: dict[str, Any] = {
            "content": "",
            **{key: message[key] for key in ("role", "content") if key in message},
        }
        if message.get("tool_calls"):
            functions = [one["function"] for one in message["tool_calls"]]
            unanswered = [f"call_{next(ids)}" for _ in functions]
            plain["tool_calls"] = [
                {"id": call, "name": one["name"], "arguments": json.dumps(one["arguments"])}
                for call, one in zip(unanswered, functions, strict=True)
            ]
        if message["role"] == "tool":
            plain["tool_call_id"] = unanswered.pop(0)
        messages.append(plain)
    return messages
