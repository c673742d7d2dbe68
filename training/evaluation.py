"""Mid-run evaluation: held-out rows, answered greedily by the trainer's own model, scored by the environment.

Never the vLLM engine: called between two steps it would wait for itself. Whatever goes wrong here costs the
evaluation, not the run.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from delivery.publisher import Publisher
from job.chat import Chat
from job.environment import Environment, Row
from job.scoring import Conversation, Score, Scorer
from job.settings import Settings
from training.conversations import Way, is_played, shows_tools
from training.glue import renderer_for
from training.history import MetricsStream
from training.player import Player
from training.random_streams import kept_random_state
from training.rewards import reply
from training.sampler import ModelSampler, Request, Sample

log = logging.getLogger(__name__)

AT_ONCE = 16
LIMIT_S = 900.0
TOO_LONG = f"not finished within {LIMIT_S:g} s"


@dataclass(frozen=True)
class Exam:
    """The questions of all evaluations of a run, who judges the answers, and how long these may be."""

    env: Environment
    rows: Sequence[Row]
    split: str  # "eval", or "train" where nothing is held out
    turn_tokens: int
    length: int  # tokens of a prompt and all that follows


def set_exam(settings: Settings, env: Environment, chat: Chat, length: int) -> Exam:
    """The first rows of the held-out split that leave room for an answer; none when it cannot be read."""
    judge, turn_tokens = env.evaluator, settings.eval_tokens
    split = "train"
    try:
        split = "eval" if env.has_held_out_rows else "train"
        read = env.eval_rows()[: settings.eval_num]
        rows = [row for row in read if _prompt_length(judge, chat, row) + turn_tokens <= length]
    except Exception as error:  # noqa: BLE001 - the environment's own code: no reason not to train
        log.warning("no evaluation: the split cannot be read: %s: %s", type(error).__name__, error)
        return Exam(judge, [], split, turn_tokens, length)
    if len(rows) < len(read):
        log.warning("evaluation: %d of %d rows have no room for an answer", len(read) - len(rows), len(read))
    if not rows:
        log.warning("no evaluation: %s has no row for it", env.id)
    elif split == "train":
        log.warning("%s holds no rows out: evaluations are made on training rows", env.id)
    return Exam(judge, rows, split, turn_tokens, length)


def _prompt_length(env: Environment, chat: Chat, row: Row) -> int:
    return len(chat.prompt_ids(env.prompt(row), env.tools(row)))


def prepare(
    settings: Settings,
    env: Environment,
    chat: Chat,
    length: int,
    check: Callable[[], None],
    way: Way | None = None,
) -> "Examiner | None":
    """Who examines this run; None when there is nothing to evaluate. `way` is GRPO's, shared where it can be.

    Raises what makes the environment's conversations impossible, as training on them does.
    """
    if not settings.eval_every_steps:
        return None
    exam = set_exam(settings, env, chat, length)
    if not exam.rows:
        return None
    shared = way if exam.env is env else None
    scorer = shared.scorer if shared else Scorer(exam.env, check)
    player = shared.rollout.player if shared and shared.rollout else None
    if player is None and is_played(exam.env):
        renderer = renderer_for(chat, shows_tools(exam.env, exam.rows))
        player = Player(settings, exam.env, chat, scorer, renderer)
    return Examiner(settings, chat, exam, scorer, player)


class NothingEvaluated(RuntimeError):
    """Every row failed: that is no reward of 0, but no reward at all."""


class Examiner:
    """Has the trainer's model answer the questions, and the environment score the answers."""

    def __init__(self, settings: Settings, chat: Chat, exam: Exam, scorer: Scorer, player: Player | None):
        """`player` is for environments that play conversations; the scorer is the exam environment's."""
        self.settings, self.chat, self.exam = settings, chat, exam
        self.scorer, self.player = scorer, player
        threshold = settings.eval_pass_threshold
        self.pass_threshold = exam.env.pass_threshold if threshold is None else threshold

    def examine(self, trainer: Any) -> list[Conversation]:
        """One scored conversation a row; raises whatever goes wrong, and NothingEvaluated."""
        deadline = time.monotonic() + LIMIT_S

        def check() -> None:
            trainer.sampling_passes += 1
            self.scorer.check()
            if time.monotonic() > deadline:
                raise TimeoutError(TOO_LONG)

        sampler = ModelSampler(trainer, self.chat.cut_at, check)
        with resting(trainer.model), kept_random_state():
            conversations = self.scorer.run(self._within(deadline, sampler))
        failed = [one.score for one in conversations if one.score.reward is None]
        if len(failed) == len(conversations):
            raise NothingEvaluated(f"all {len(failed)} examples failed, such as: {failed[0].problem}")
        if failed:
            log.warning(
                "%d of %d evaluated rows count as 0: %s", len(failed), len(conversations), failed[0].problem
            )
        return conversations

    async def _within(self, deadline: float, sampler: ModelSampler) -> list[Conversation]:
        """Environments and judges, too, have only so long."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await (self._play(sampler) if self.player else self._answer(sampler))
        except TimeoutError as error:
            raise TimeoutError(TOO_LONG) from error

    async def _play(self, sampler: ModelSampler) -> list[Conversation]:
        exam, player = self.exam, self.player
        assert player is not None
        states = await player.play(
            exam.rows,
            sampler,
            max_tokens=exam.turn_tokens,
            temperature=0.0,
            length=exam.length,
            at_once=AT_ONCE,
        )
        pairs = [*zip(exam.rows, states, strict=True)]
        rated = await asyncio.gather(*(self.scorer.rate(row, [state]) for row, state in pairs))
        return [player.conversation(*pair, scores[0]) for pair, scores in zip(pairs, rated, strict=True)]

    async def _answer(self, sampler: ModelSampler) -> list[Conversation]:
        exam, env = self.exam, self.exam.env
        prompts = [self.chat.render(env.prompt(row), env.tools(row)) for row in exam.rows]
        samples = await self._sample(sampler, prompts)
        replies = [
            reply(self.settings, self.chat, prompt, sample.ids, exam.turn_tokens)
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
        groups = [(row, [one]) for row, one in zip(exam.rows, replies, strict=True)]
        scored = await self.scorer.score_all(groups)
        return [
            Conversation(env.prompt(row), [one.message], scores[0])
            for row, one, scores in zip(exam.rows, replies, scored, strict=True)
        ]

    async def _sample(self, sampler: ModelSampler, prompts: Sequence[str]) -> list[Sample]:
        requests = [
            Request(
                ids=self.chat.encode(prompt),
                max_tokens=self.exam.turn_tokens,
                temperature=0.0,
                top_p=1.0,
                stop=self.settings.stop_sequences,
                stop_ids=tuple(self.chat.stop_ids),
            )
            for prompt in prompts
        ]
        samples: list[Sample] = []
        async with sampler.session():
            for start in range(0, len(requests), AT_ONCE):
                part = requests[start : start + AT_ONCE]
                samples += await asyncio.gather(*map(sampler.sample, part))
        return samples


class Evaluations:
    """Evaluates between two steps, whenever it is time, and once more at the end."""

    def __init__(
        self, settings: Settings, examiner: Examiner | None, publisher: Publisher, stream: MetricsStream
    ):
        self.settings, self.examiner = settings, examiner
        self.publisher, self.stream = publisher, stream
        self.get_trainer: Callable[[], Any] = lambda: None
        self.conversations: list[Conversation] = []  # of the newest evaluation
        self.step, self.seconds = 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate the step before, when it has been logged and saved: stopping here loses nothing of it."""
        if is_due(state.global_step, self.settings.eval_every_steps):
            self._once(state)

    def finish(self, state: Any) -> None:
        """Evaluate the last step too."""
        if state.global_step:
            self._once(state)

    def _once(self, state: Any) -> None:
        if state.global_step not in [one["step"] for one in state.log_history if "eval_split" in one]:
            self.run(state)

    def run(self, state: Any) -> None:
        """Evaluate, and tell the beats, the log history and the trackers; training goes on in any case."""
        if self.examiner is None:
            return
        facts = {"eval_split": self.examiner.exam.split, **self._evaluate(self.examiner)}
        self.step = state.global_step
        self._log(state, facts)
        files = self.stream.file(state.log_history)
        self.publisher.beat(f"{self.settings.mode}_eval", files, step=state.global_step, **facts)

    def _evaluate(self, examiner: Examiner) -> dict[str, Any]:
        try:
            trainer = self.get_trainer()
        except Exception as error:  # noqa: BLE001 - see the module's text
            return self._skipped(f"model getter failed: {error}")
        if trainer is None:
            return self._skipped("no model available")
        began = time.monotonic()
        try:
            self.conversations = examiner.examine(trainer)
        except Exception as error:  # noqa: BLE001 - see the module's text
            return self._skipped(f"{type(error).__name__}: {error}")
        finally:
            self.seconds += time.monotonic() - began
            trainer.pause(time.monotonic() - began)
        scores = [one.score for one in self.conversations]
        return summary(scores, examiner.pass_threshold, with_metrics=examiner.player is None)

    def _skipped(self, reason: str) -> dict[str, Any]:
        """What is told instead of figures; the log history is part of every checkpoint, so no secrets."""
        reason = self.stream.redact(reason)
        log.warning("evaluation skipped: %s", reason)
        return {"eval_skipped": True, "eval_reason": reason}

    def _log(self, state: Any, facts: dict[str, Any]) -> None:
        from transformers import Trainer

        if "eval_skipped" in facts:
            state.log_history.append({"step": state.global_step, **facts})
            return
        numbers = {name: value for name, value in facts.items() if not isinstance(value, str)}
        # Not TRL's own, which would take what the next step is to report.
        Trainer.log(self.get_trainer(), numbers)
        state.log_history[-1].update(facts)


def is_due(step: int, every: int) -> bool:
    """Whether the cadence has come to an evaluation."""
    return every > 0 and step > 0 and step % every == 0


def summary(scores: Sequence[Score], pass_threshold: float, *, with_metrics: bool) -> dict[str, Any]:
    """Figures of an evaluation: rows without a reward count as 0; no rows give zeros."""
    rewards = [one.reward or 0.0 for one in scores]
    named: dict[str, list[float]] = {}
    for one in scores if with_metrics else ():
        for name, value in one.metrics.items():
            named.setdefault(name, []).append(value)
    return {
        "eval_n": len(rewards),
        "eval_reward": _mean(rewards),
        "eval_pass_rate": _mean([float(one >= pass_threshold) for one in rewards]),
        "eval_reward_min": min(rewards, default=0.0),
        "eval_reward_max": max(rewards, default=0.0),
        **{f"eval_metric_{name}": _mean(values) for name, values in named.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@contextmanager
def resting(model: Any) -> Iterator[None]:
    """Evaluation mode, and back to training mode if it was on."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()
