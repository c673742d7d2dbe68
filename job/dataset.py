"""The rows a trainer is given, made from the environment's rows."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import recipe
from job.chat import Chat, Row, drops_reasoning, truncate, unlearns_thinking
from job.environment import Environment
from job.environment import Row as SourceRow
from job.settings import Settings

log = logging.getLogger(__name__)

THINKING_SAMPLE = 256

Sample = TypeVar("Sample")


class NoRows(ValueError):
    """Nothing is left to train on."""


@dataclass(frozen=True)
class Counts:
    """What became of the source rows."""

    source: int
    without_target: int
    target_cut_off: int
    kept: int


def sft_rows(settings: Settings, env: Environment, chat: Chat) -> tuple[list[Row], list[SourceRow], Counts]:
    """Supervised rows in training order, the source rows they came from, and counts; raises NoRows."""
    source = env.train_rows()
    if settings.sft_max_examples:
        source = source[: settings.sft_max_examples]
    random.Random(settings.seed).shuffle(source)
    targets = [env.target(row) for row in source]
    warn_about_targets(settings, env, chat, targets)
    kept: list[Row] = []
    without_target = target_cut_off = 0
    for row, target in zip(source, targets, strict=True):
        whole = chat.rows(env.prompt(row), target, env.tools(row))
        without_target += not whole
        cut = [truncate(one, settings.sft_max_length) for one in whole]
        survivors = [one for one in cut if one.trained]
        target_cut_off += len(cut) - len(survivors)
        kept += survivors if settings.sft_completion_only else [Row(one.ids, one.ids) for one in survivors]
    counts = Counts(len(source), without_target, target_cut_off, len(kept))
    if not kept:
        raise NoRows(
            f"no training row is left of {counts.source}: {without_target} have no target,"
            f" {target_cut_off} lose it at train.max_length={settings.sft_max_length} tokens; check"
            f" environment.id={env.id!r} or raise the length"
        )
    log.info(
        "training rows: %d of %d, %d without target, %d cut off",
        counts.kept,
        counts.source,
        without_target,
        target_cut_off,
    )
    return kept, source, counts


def warn_about_targets(
    settings: Settings, env: Environment, chat: Chat, targets: Sequence[str | list]
) -> None:
    """Say what the run will teach that was probably not meant."""
    present = [one for one in targets[:THINKING_SAMPLE] if one]
    if settings.thinking and present and unlearns_thinking(present):
        log.warning(
            "thinking is on and none of the first %d targets contains <think>: the run will unlearn"
            " reasoning",
            len(present),
        )
    if env.multi_turn and any(isinstance(one, str) for one in present):
        log.warning(
            "%s is a conversation but its targets are plain text: only first answers are learnt", env.id
        )
    if settings.thinking and any(not isinstance(one, str) for one in present) and drops_reasoning(chat):
        log.warning(
            "the chat template drops the reasoning of earlier turns: each turn is trained as a row of its own"
        )


@dataclass(frozen=True)
class Prompts:
    """What GRPO samples from: rendered texts, and for each the index of its row.

    The rows stay in a list: Arrow would reject or coerce those of mixed types.
    """

    texts: list[str]
    rows: list[SourceRow]
    over_budget: int

    @property
    def columns(self) -> dict[str, list]:
        return {"prompt": self.texts, "row": list(range(len(self.texts)))}

    def groups(
        self, indices: Sequence[int], samples: Sequence[Sample], size: int
    ) -> list[tuple[SourceRow, list[Sample]]]:
        """The samples of each prompt with its row; they have to stand side by side, `size` of them.

        `indices` holds the row of every sample.
        """
        found = []
        for start in range(0, len(indices), size):
            own = set(indices[start : start + size])
            if len(own) != 1:
                raise RuntimeError(
                    f"completions {start} to {start + size} belong to the rows {sorted(own)}, not to one"
                )
            found.append((self.rows[own.pop()], list(samples[start : start + size])))
        return found


def rl_prompts(settings: Settings, env: Environment, chat: Chat) -> Prompts:
    """Training prompts in order, those over the budget dropped; raises NoRows when none is left.

    Prompts are counted by the ids that the rollout will use; TRL neither cuts nor checks them.
    """
    budget = recipe.prompt_budget(settings.rl_vllm_max_len, settings.rl_max_completion)
    source = env.train_rows()
    random.Random(settings.seed).shuffle(source)
    texts = [chat.render(env.prompt(row), env.tools(row)) for row in source]
    fits = [0 < len(chat.encode(text)) <= budget for text in texts]
    kept = [(text, row) for text, row, fit in zip(texts, source, fits, strict=True) if fit]
    if not kept:
        raise NoRows(
            f"no training prompt of {len(source)} fits the budget of {budget} tokens, which is"
            f" RL_VLLM_MAX_LEN {settings.rl_vllm_max_len} - RL_MAX_COMPLETION {settings.rl_max_completion};"
            f" raise the first or lower the second, or check environment.id={env.id!r}"
        )
    log.info(
        "training prompts: %d of %d, %d over %d tokens",
        len(kept),
        len(source),
        len(source) - len(kept),
        budget,
    )
    return Prompts([text for text, _ in kept], [row for _, row in kept], len(source) - len(kept))
