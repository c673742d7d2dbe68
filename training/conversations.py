"""How a run's completions come about: sampled by TRL, played by verifiers, or by TRL's own tool loop."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accounting import Tally
from job.chat import Chat
from job.dataset import Prompts
from job.environment import Environment, Row
from job.scoring import Scorer
from job.settings import Settings
from training import tool_loop
from training.glue import renderer_for
from training.rewards import EnvironmentReward, RolloutReward
from training.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Way:
    """What TRL is given besides the model: the reward, who plays, and what that needs."""

    tally: Tally
    scorer: Scorer
    reward: Any
    rollout: Rollout | None = None
    tools: Sequence[Any] = ()
    tool_schemas: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def plan(
    settings: Settings, env: Environment, chat: Chat, prompts: Prompts, scorer: Scorer, tally: Tally
) -> Way:
    """Choose the way for this environment; raises SettingsError or NoExactGlue when there is none."""
    if settings.rl_tool_loop == "trl":
        return trl_way(settings, env, chat, prompts, scorer, tally)
    if not is_played(env):
        return Way(tally, scorer, EnvironmentReward(settings, chat, prompts, scorer, tally))
    has_tools = shows_tools(env, prompts.rows)
    if env.is_tool_env and not has_tools:
        log.warning("%s is a tool environment without tools: played as a conversation", env.id)
    if settings.thinking_length_penalty_coef:
        log.warning("thinking_length_penalty_coef is not applied: %s plays conversations", env.id)
    rollout = Rollout(settings, env, chat, prompts, scorer, renderer_for(chat, has_tools))
    return Way(tally, scorer, RolloutReward(rollout, tally), rollout)


def shows_tools(env: Environment, rows: Sequence[Row]) -> bool:
    """Whether any row has tools: a group's members and single rows may bring their own."""
    return any(env.tools(row) for row in rows)


def is_played(env: Environment) -> bool:
    """Whether conversations need verifiers' own loop; else one reply to the row's prompt is all there is."""
    return env.multi_turn or shapes_conversations(env)


def shapes_conversations(env: Environment) -> bool:
    """Whether a hook of a single-turn environment may show the model something else than its row's prompt."""
    import verifiers as vf

    return any(
        getattr(type(one), hook) is not getattr(vf.SingleTurnEnv, hook)
        for one in env.members()
        for hook in ("setup_state", "get_prompt_messages", "env_response")
    )


def trl_way(
    settings: Settings, env: Environment, chat: Chat, prompts: Prompts, scorer: Scorer, tally: Tally
) -> Way:
    """TRL's own loop, which renders messages itself and calls the tools directly."""
    tool_loop.check(env, chat)
    return Way(
        tally,
        scorer,
        tool_loop.TranscriptReward(settings, env, prompts, scorer, tally),
        tools=env.loaded.tools,
        tool_schemas=env.tools({}),
        columns={"prompt": [env.prompt(row) for row in prompts.rows]},
        arguments={
            "max_tool_calling_iterations": env.max_turns,
            "chat_template_kwargs": {"enable_thinking": settings.thinking},
        },
    )
