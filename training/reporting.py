"""The report of a run at work: what it is drawn from is taken between two steps, and drawn elsewhere."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from delivery.report import Sample, Snapshot, files
from job.scoring import Conversation
from job.settings import Settings
from training.conversations import Way
from training.evaluation import Evaluations
from training.inputs import Job
from training.run import Run

log = logging.getLogger(__name__)

DRAWN_EVERY_S = 60.0  # saves may come faster, and would wait for their pictures
Files = Mapping[str, bytes]


class Reporter:
    """Knows where everything that a report shows is to be found."""

    def __init__(
        self, settings: Settings, run: Run, job: Job, evaluations: Evaluations, way: Way | None = None
    ):
        self.settings, self.run, self.job = settings, run, job
        self.evaluations, self.way = evaluations, way
        self._drawn_at = -DRAWN_EVERY_S

    def later(self, state: Any, *, finished: bool = False) -> Callable[[], Files]:
        """Take what there is now; the result draws it, on whatever thread, and never fails."""
        if self.run.preemption.reason:  # the seconds that are left are the checkpoint's
            return dict
        logged, now = self.run.stream.file(state.log_history), time.monotonic()
        if not finished and now - self._drawn_at < DRAWN_EVERY_S:
            return lambda: logged
        self._drawn_at = now
        return partial(draw, self.snapshot(state, finished), self.run.redact, logged)

    def snapshot(self, state: Any, finished: bool) -> Snapshot:
        settings, notes, tally = self.settings, self.job.metrics.notes, self.run.tally
        samples, samples_from = self._samples(state.global_step)
        return Snapshot(
            prefix=settings.prefix,
            mode=settings.mode,
            model=settings.model,
            environment=self.job.env.id,
            attempt=self.run.attempt,
            step=state.global_step,
            target_steps=state.max_steps,
            finished=finished,
            resumed=notes["resumed"],
            lines=[dict(one) for one in state.log_history],
            samples=samples,
            samples_from=samples_from,
            settings=settings.table(),
            rows=notes["rows"],
            counters={
                "unscorable": tally.unscorable,
                "bridge_breaks": tally.bridge_breaks,
                "nonfinite_steps": tally.nonfinite_steps,
                "rollout_errors": dict(tally.problems),
            },
            phases=self._phases(),
            gpu_type=settings.job.gpu.type if settings.device == "cuda" else "CPU",
            seconds=time.monotonic() - self.run.began,
        )

    def _samples(self, step: int) -> tuple[list[Sample], str]:
        if self.way is not None and self.way.reward.conversations:
            return list(map(_sample, self.way.reward.conversations)), f"training step {step}"
        source = f"evaluation at step {self.evaluations.step}" if self.evaluations.conversations else ""
        return list(map(_sample, self.evaluations.conversations)), source

    def _phases(self) -> list[tuple[str, float]]:
        """Seconds of this attempt."""
        spent = self.run.terminal.progress.spent(time.monotonic())
        examined = self.evaluations.seconds
        return [*spent.items(), *([("of these, evaluations", examined)] if examined else [])]


def draw(snapshot: Snapshot, redact: Callable[[str], str], logged: Files) -> Files:
    """The report's files and the log; that alone, and a warning, when they cannot be drawn.

    Nothing is raised, as a checkpoint comes with them.
    """
    try:
        return {**files(snapshot, redact), **logged}
    except Exception:
        log.warning("the report could not be drawn", exc_info=True)
        return logged


def _sample(one: Conversation) -> Sample:
    score = one.score
    return Sample(one.prompt, one.completion, score.reward, score.metrics, score.problem)
