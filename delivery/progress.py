"""How far a run is and how it went, as its beats tell."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delivery.markdown import is_number

UPLOADING = "uploading"  # no beat: what the publisher says when a required upload begins
BEGINS = {
    "boot": "environment",
    "sft_start": "weights",
    "rl_start": "weights",
    "sft_model_load": "training",
    "rl_train_start": "training",
    UPLOADING: "upload",
}
PHASES = tuple(dict.fromkeys(BEGINS.values()))
MEASURES = {"sft_step": "loss", "rl_step": "reward"}
ENDINGS = {
    "done": "finished",
    "already_done": "finished before, nothing to do",
    "error_sft": "failed",
    "error_rl": "failed",
    "superseded": "stopped, a newer attempt has taken over",
}
SMOOTHED_STEPS = 5  # the reward of one step says little


@dataclass
class Progress:
    """What the beats of one attempt said; `seconds` are wall-clock, by phase, until the last beat."""

    prefix: str
    location: str
    phase: str = ""
    began: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    step: int = 0
    steps: int = 0
    measure: str = ""
    values: list[float] = field(default_factory=list)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    counted: Mapping[str, Any] = field(default_factory=dict)
    ending: str = ""
    is_over: bool = False

    def told(self, stage: str, extras: Mapping[str, Any], now: float) -> None:
        """Take in a beat; `now` is a monotonic clock's."""
        if extras.get("liveness"):
            return
        self._enter(BEGINS.get(stage, self.phase), now)
        self.step = extras.get("step") or self.step
        if stage in MEASURES:
            self.steps, self.measure = extras.get("steps") or 0, MEASURES[stage]
            value = extras.get(self.measure)
            if is_number(value):
                self.values.append(value)
        elif stage in ("sft_eval", "rl_eval"):
            self.evaluation = extras
        elif stage in ("sft_train_done", "rl_train_done"):
            self.counted = extras
        self._end(stage, extras)

    def _enter(self, phase: str, now: float) -> None:
        """Account for the time since the last beat, and go on to `phase`."""
        self.seconds = self.spent(now)
        self.phase, self.began = phase, now

    def spent(self, now: float) -> dict[str, float]:
        """Seconds by phase until `now`, those of the current one included; a finished run has no more."""
        found = dict(self.seconds)
        if self.phase and not self.is_over:
            found[self.phase] = found.get(self.phase, 0.0) + now - self.began
        return found

    def _end(self, stage: str, extras: Mapping[str, Any]) -> None:
        if stage == "preempting":
            self.ending = f"stopped by {extras.get('reason')}, to be resumed"
        self.ending = ENDINGS.get(stage, self.ending)
        self.is_over |= stage in ENDINGS

    @property
    def title(self) -> str:
        """The phase, and in training the newest loss or reward."""
        number = PHASES.index(self.phase) + 1
        newest = f" {self.measure} {self.values[-1]:.3f}" if self.values and self.phase == "training" else ""
        return f"{number}/{len(PHASES)} {self.phase}{newest}"

    @property
    def is_worth_telling(self) -> bool:
        """Whether the run came so far that there is more to say than why it did not begin."""
        return "weights" in self.seconds or self.ending.startswith("finished")

    def summary(self) -> str:
        """The table at the end of a run: a line for all that is known."""
        rows = {
            "run": f"{self.prefix}, {self.ending or 'unfinished'}",
            "artifacts": self.location,
            "steps": f"{self.step} of {self.steps}" if self.steps else "",
            self.measure: self._course(),
            "evaluation": self._evaluation(),
            "seconds": ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in self.seconds.items()),
            "speed": self._speed(),
        }
        return "\n".join(f"  {name:<11} {text}" for name, text in rows.items() if text)

    def _course(self) -> str:
        if not self.values:
            return ""
        few = max(1, min(SMOOTHED_STEPS, len(self.values) // 2)) if self.measure == "reward" else 1
        first, last = sum(self.values[:few]) / few, sum(self.values[-few:]) / few
        return f"{first:.3f} -> {last:.3f}" + (f" (means of {few} steps)" if few > 1 else "")

    def _evaluation(self) -> str:
        said = self.evaluation
        if not said:
            return ""
        if said.get("eval_skipped"):
            return f"skipped at step {said['step']}: {said['eval_reason']}"
        rows = f"{said['eval_n']} rows of the {said['eval_split']} split"
        figures = f"reward {said['eval_reward']:.3f}, pass rate {said['eval_pass_rate']:.3f}"
        return f"{figures} at step {said['step']} ({rows})"

    def _speed(self) -> str:
        wall = self.counted.get("train_wall")
        if not wall:
            return ""
        generated, trained = self.counted["generated_tokens"], self.counted["train_tokens"]
        tokens, what = (generated, "generated") if generated else (trained, "trained on")
        return f"{tokens / wall:,.0f} tokens/s ({tokens:,} {what} in {wall:.0f} s of training)"
