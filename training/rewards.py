"""TRL's reward function: sampled token ids in, the environment's rewards out."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from accounting import Tally
from job.chat import Chat, split_thinking
from job.dataset import Prompts
from job.scoring import Conversation, Reply, Score, Scorer
from job.settings import Settings
from training.rollout import Rollout

log = logging.getLogger(__name__)

SCORE = "score/"  # prefix of the means of single reward functions in the trainer's log
HOPELESS_BATCHES = 3


class NothingScored(RuntimeError):
    """The reward functions failed on every sample."""


def check_scored(tally: Tally) -> None:
    """Raise NothingScored when no sample of the run so far has a reward."""
    if tally.unscorable and not tally.scored:
        raise NothingScored(f"none of {tally.unscorable} samples could be scored, such as: {tally.example}")


class EnvironmentReward:
    """Scores the completions of a generation batch, group by group."""

    __name__ = "environment"

    def __init__(self, settings: Settings, chat: Chat, prompts: Prompts, scorer: Scorer, tally: Tally):
        self.settings, self.chat, self.prompts = settings, chat, prompts
        self.scorer, self.tally = scorer, tally
        self.conversations: list[Conversation] = []  # of the newest batch

    def __call__(
        self,
        completion_ids: Sequence[Sequence[int]],
        row: Sequence[int],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        """One reward per completion, None where it could not be scored.

        `row` is the index of each completion's prompt; the samples of a prompt stand side by side.
        """
        replies = [
            reply(self.settings, self.chat, self.prompts.texts[index], ids, self.settings.rl_max_completion)
            for ids, index in zip(completion_ids, row, strict=True)
        ]
        groups = self.prompts.groups(row, replies, self.settings.rl_group_size)
        raw = [one for group in self.scorer.score(groups) for one in group]
        count(self.tally, raw, log_metric)
        scores = [self._penalised(*pair) for pair in zip(raw, replies, strict=True)]
        self.conversations = [
            Conversation(self.scorer.env.prompt(self.prompts.rows[index]), [one.message], score)
            for index, one, score in zip(row, replies, scores, strict=True)
        ]
        return [one.reward for one in scores]

    def _penalised(self, score: Score, reply: Reply) -> Score:
        coefficient = self.settings.thinking_length_penalty_coef
        if score.reward is None or not coefficient or not reply.reasoning:
            return score
        return replace(score, reward=score.reward - coefficient * len(self.chat.encode(reply.reasoning)))


def reply(settings: Settings, chat: Chat, prompt: str, ids: Sequence[int], budget: int) -> Reply:
    """Sampled ids as the environment is to see them; `prompt` is rendered text, `budget` tokens."""
    text = chat.reply_text(ids)
    for stop in settings.stop_sequences:
        text = text.partition(stop)[0]
    cut_off = len(ids) >= budget and ids[-1] not in chat.stop_ids
    if not settings.thinking:
        return Reply(text, truncated=cut_off)
    thought = split_thinking(text, chat.opens_thinking(prompt))
    return Reply(thought.answer or "", thought.reasoning, cut_off)


class RolloutReward:
    """Hands over the rewards that a rollout came with, and counts them."""

    __name__ = "environment"

    def __init__(self, rollout: Rollout, tally: Tally):
        self.rollout, self.tally = rollout, tally

    @property
    def conversations(self) -> list[Conversation]:
        return self.rollout.conversations

    def __call__(
        self, reward: Sequence[float | None], log_metric: Callable[[str, float], None], **_: Any
    ) -> list[float | None]:
        """One reward per conversation, None where it could not be scored."""
        count(self.tally, self.rollout.scores, log_metric)
        self.tally.bridge_breaks += self.rollout.statistics.breaks
        for name, value in self.rollout.statistics.means().items():
            log_metric(name, value)
        return list(reward)


def count(tally: Tally, scores: Sequence[Score], log_metric: Callable[[str, float], None]) -> None:
    """Account for a batch of scores, and log the mean of every reward function by name."""
    failed = [one for one in scores if one.reward is None]
    tally.unscorable += len(failed)
    tally.scored += len(scores) - len(failed)
    tally.batches += 1
    tally.problems.update(one.kind for one in failed)
    tally.example = failed[0].problem if failed else tally.example
    if failed:
        log.warning("%d of %d samples could not be scored: %s", len(failed), len(scores), failed[0].problem)
    if tally.batches >= HOPELESS_BATCHES:
        check_scored(tally)
    named: dict[str, list[float]] = {}
    for one in scores:
        if one.reward is not None:
            for name, value in one.metrics.items():
                named.setdefault(name, []).append(value)
    for name, values in named.items():
        log_metric(f"{SCORE}{name}", sum(values) / len(values))


def check(settings: Settings, history: Sequence[float], tally: Tally) -> None:
    """Refuse a run that stopped early, or whose samples never had a reward."""
    check_scored(tally)
    if not history:
        raise NothingScored("no step of the run has a reward")
    if tally.step < settings.rl_steps:
        raise RuntimeError(f"training ended after {tally.step} of {settings.rl_steps} steps")


def notes(settings: Settings, args: Any, history: Sequence[float], tally: Tally) -> dict[str, Any]:
    """What metrics.json says of a GRPO run; `args` are the trainer's own."""
    generations = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        "steps": args.max_steps,
        "reward_history": list(history),
        "gen_tokens_is_upper_bound": False,
        "max_completion_len": args.max_completion_length,
        "prompts_per_step": generations // args.num_generations,
        "generations_per_step": generations,
        "group_size": args.num_generations,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "unscorable": tally.unscorable,
        "bridge_breaks": tally.bridge_breaks,
        "rollout_errors": dict(tally.problems),
        "grpo_recipe": {
            "lr_scheduler": str(args.lr_scheduler_type.value),
            "beta": args.beta,
            "scale_rewards": args.scale_rewards,
            "loss_type": args.loss_type,
            "temperature": args.temperature,
            "advantage_clip": settings.advantage_clip,
            "thinking_length_penalty_coef": settings.thinking_length_penalty_coef,
            "init_from_adapter": settings.init_from_adapter,
        },
    }
