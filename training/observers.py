"""Who watches a trainer: progress, evaluations, gradients, saves; and who reports what they saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from job.settings import Settings
from training.conversations import Way
from training.evaluation import Evaluations
from training.inputs import Job
from training.midrun import GradientGuard, Losses, Rewards, as_callback
from training.reporting import Reporter
from training.run import Run
from training.saving import Streaming


@dataclass(frozen=True)
class Observers:
    """The callbacks of a trainer, in order, by what each is asked for later."""

    progress: Any
    evaluations: Any
    guard: Any
    saves: Any
    reporter: Reporter

    @property
    def callbacks(self) -> Sequence[Any]:
        return [self.progress, self.evaluations, self.guard, self.saves]


def observe(settings: Settings, run: Run, job: Job, way: Way | None = None) -> Observers:
    """The observers of this run; `way` is GRPO's."""
    if settings.mode == "sft":
        progress = as_callback(Losses, run.publisher, run.stream)
    else:
        progress = as_callback(Rewards, run.publisher, run.stream, run.tally)
    evaluations = as_callback(Evaluations, settings, job.examiner, run.publisher, run.stream)
    reporter = Reporter(settings, run, job, evaluations, way)
    saves = as_callback(
        Streaming,
        run.checkpoints,
        job.determinants,
        job.plan.commit,
        run.tally,
        run.check,
        reporter.later,
    )
    return Observers(progress, evaluations, as_callback(GradientGuard, run.tally), saves, reporter)
