"""What is read of a run: a page with curves, figures and samples, and the log as JSON lines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import recipe
from accounting import strict_json
from delivery import curves
from delivery.curves import EVALUATED, MEASURE, SCORE
from delivery.markdown import NOTHING, code, duration, is_number, number, table
from delivery.redaction import redacted
from delivery.samples import Sample, described, select, summary

CURVES = "report/curves.png"
LOG = "metrics.jsonl"
SUMMARY = "train_loss"  # only what transformers logs when training has ended has it
AVERAGED = 10  # logged values at either end of a run
CAPTION = "Faint lines are the logged values, strong ones the mean of those around."
SPLITS = {"eval": "held-out", "train": "training"}
ROWS = {
    "source": "source rows",
    "without_target": "dropped: no target to learn",
    "target_cut_off": "dropped: the target lies beyond the length limit",
    "kept": "rows trained on",
    "prompts": "prompts sampled from",
    "prompts_over_budget": "dropped: the prompt is longer than its budget",
}
COUNTERS = {
    "unscorable": "samples without a reward, left out of the loss",
    "bridge_breaks": "conversations whose environment rewrote history",
    "nonfinite_steps": "updates skipped, their gradients not being finite",
    "rollout_errors": "samples without a reward, by kind",
}


@dataclass(frozen=True)
class Snapshot:
    """All that a report is drawn from, taken between two optimizer steps.

    `lines` is the trainer's log history, `settings` (name, value, origin), `phases` (name, seconds).
    """

    prefix: str
    mode: str
    model: str
    environment: str
    attempt: str
    step: int
    target_steps: int
    finished: bool
    resumed: bool
    lines: Sequence[Mapping[str, Any]]
    samples: Sequence[Sample]
    samples_from: str
    settings: Sequence[tuple[str, str, str]]
    rows: Mapping[str, Any]
    counters: Mapping[str, Any]
    phases: Sequence[tuple[str, float]]
    gpu_type: str
    seconds: float  # of this machine so far


def metrics_jsonl(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """One strict JSON object a line; the summary that transformers logs last is left out."""
    kept = [dict(one) for one in lines if SUMMARY not in one]
    return "".join(f"{strict_json(one)}\n" for one in kept).encode()


def files(snapshot: Snapshot, redact: Callable[[str], str]) -> dict[str, bytes]:
    """Contents by path below the prefix: report.md and, once there is a figure, the curves."""
    # Before anything is cut or quoted: half a secret, or an escaped one, is no longer recognised.
    clean = redacted(snapshot, redact)
    panels = curves.panels(clean.lines, clean.mode)
    pictures = {CURVES: curves.picture(panels)} if panels else {}
    page = redact(report(clean, bool(panels)))
    return {"report.md": page.encode("utf-8", "replace"), **pictures}


# --- the page -----------------------------------------------------------------------------------------------


def report(snapshot: Snapshot, with_curves: bool) -> str:
    """The page as Markdown."""
    sections = [
        headline(snapshot),
        f"![Curves]({CURVES})\n\n{CAPTION}" if with_curves else "Nothing has been logged yet.",
        named_rewards(snapshot),
        evaluations(snapshot.lines),
        data(snapshot),
        time_spent(snapshot),
        settings(snapshot),
        samples(snapshot),
    ]
    return "\n\n".join(one for one in sections if one) + "\n"


def headline(snapshot: Snapshot) -> str:
    """What the run is, where it stands, and how well it does."""
    method = {"sft": "SFT", "rl": "GRPO"}[snapshot.mode]
    key, title = MEASURE[snapshot.mode]
    facts = [
        ("State", state(snapshot)),
        (title, trend(values(snapshot.lines, key)) or "none yet"),
        ("Evaluation", newest_evaluation(snapshot.lines)),
        ("Time on this machine", duration(snapshot.seconds)),
        ("Cost, estimated", cost(snapshot)),
        ("Run", code(snapshot.prefix) + f", attempt {code(snapshot.attempt)}"),
    ]
    title = f"# {method} of {code(snapshot.model)} on {code(snapshot.environment)}"
    body = table(facts[0], facts[1:])
    return f"{title}\n\n{body}\n\nEvery figure of the log: [{LOG}]({LOG})."


def state(snapshot: Snapshot) -> str:
    """How far the run is."""
    if snapshot.finished:
        text = f"**finished**, {snapshot.step} steps"
    else:
        text = f"**step {snapshot.step} of {snapshot.target_steps}**"
    return text + (", resumed from a checkpoint" if snapshot.resumed else "")


def values(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """All figures of one name, oldest first."""
    return [float(one[key]) for one in lines if is_number(one.get(key))]


def ends(found: Sequence[float]) -> tuple[float, float, int]:
    """The means of the first and the last values of a run, and how many each is of."""
    count = max(1, min(AVERAGED, len(found) // 2))
    return sum(found[:count]) / count, sum(found[-count:]) / count, count


def trend(found: Sequence[float]) -> str:
    """How a quantity moved; empty without any figure."""
    if not found:
        return ""
    first, last, count = ends(found)
    if len(found) == 1:
        return f"**{number(last)}** (the only logged value)"
    means = f"means of the first and the last {count}" if count > 1 else "first and last"
    about = f"{means} of {len(found)} logged values; newest {number(found[-1])}"
    return f"{number(first)} → **{number(last)}** ({about})"


def newest_evaluation(lines: Sequence[Mapping[str, Any]]) -> str:
    """The last evaluation that was not skipped, in a few words."""
    done = [one for one in lines if is_number(one.get("eval_reward"))]
    if not done:
        return "none yet"
    one = done[-1]
    return (
        f"step {one['step']}: mean reward **{number(one['eval_reward'])}**,"
        f" pass rate {number(one.get('eval_pass_rate'))}, {number(one.get('eval_n'))}"
        f" {split(one)} rows"
    )


def split(line: Mapping[str, Any]) -> str:
    name = str(line.get("eval_split", ""))
    return SPLITS.get(name, name)


def named_rewards(snapshot: Snapshot) -> str:
    """First and last means of every reward function."""
    keys = sorted({key for one in snapshot.lines for key in one if key.startswith(SCORE)})
    rows = []
    for key in keys:
        if found := values(snapshot.lines, key):
            first, last, count = ends(found)
            rows.append((code(key.removeprefix(SCORE)), number(first), number(last), str(count)))
    if not rows:
        return ""
    return "## Named rewards\n\n" + table(("Reward function", "First", "Last", "Values averaged"), rows)


def evaluations(history: Sequence[Mapping[str, Any]]) -> str:
    """One row an evaluation of the log, skipped ones with their reason; nothing without any."""
    lines = [one for one in history if any(key.startswith(EVALUATED) for key in one)]
    if not lines:
        return ""
    metric = f"{EVALUATED}metric_"
    names = sorted({key for one in lines for key in one if key.startswith(metric)})
    keys = [f"{EVALUATED}{name}" for name in ("n", "reward", "pass_rate", "reward_min", "reward_max")]
    skipped = any(one.get("eval_skipped") for one in lines)
    header = ["Step", "Rows from", "n", "Mean reward", "Pass rate", "Min", "Max"]
    header += [code(name.removeprefix(metric)) for name in names] + ["Skipped because"] * skipped
    rows = []
    for one in lines:
        cells = [number(one.get("step")), split(one) or NOTHING]
        cells += [number(one.get(key)) for key in [*keys, *names]]
        rows.append(cells + [code(str(one.get("eval_reason", "")))] * skipped)
    return "## Evaluation\n\n" + table(header, rows)


def samples(snapshot: Snapshot) -> str:
    """Up to ten samples, whole."""
    if not snapshot.samples:
        return ""
    chosen = select(snapshot.samples)
    about = f"From {snapshot.samples_from}. " if snapshot.samples_from else ""
    parts = [f"## Samples\n\n{about}{summary(snapshot.samples)} Long lines are wrapped."]
    parts += [described(label, place, one) for place, (label, one) in enumerate(chosen, start=1)]
    return "\n\n".join(parts)


def data(snapshot: Snapshot) -> str:
    """What became of the dataset's rows, and what went wrong with samples and updates."""
    rows = [(ROWS.get(name, code(name)), figure(value)) for name, value in snapshot.rows.items()]
    wrong = [
        (COUNTERS.get(name, code(name)), figure(value)) for name, value in snapshot.counters.items() if value
    ]
    what = table(("What", "Count"), wrong) if wrong else "Nothing was skipped or left out."
    return f"## Dataset\n\n{table(('Rows', 'Count'), rows)}\n\n## What went wrong\n\n{what}"


def figure(value: Any) -> str:
    """A count, or counts by name, as a cell."""
    if isinstance(value, Mapping):
        return ", ".join(f"{code(str(name))} {figure(one)}" for name, one in value.items()) or "none"
    return number(value) if is_number(value) else code(str(value))


def cost(snapshot: Snapshot) -> str:
    """A rough price of the time on this machine."""
    card = recipe.gpu(snapshot.gpu_type)
    if card is None:
        return f"no figure: the price of {code(snapshot.gpu_type) or 'the GPU'} is not known"
    dollars = card.usd_per_hour * snapshot.seconds / 3600
    return f"about ${dollars:.2f} ({card.type} at roughly ${card.usd_per_hour:.2f} per hour)"


def time_spent(snapshot: Snapshot) -> str:
    """How long each phase took."""
    rows = [(name, duration(seconds)) for name, seconds in snapshot.phases]
    note = "\n\nAttempts before, on other machines, are not counted." if snapshot.resumed else ""
    return f"## Time\n\n{table(('Phase', 'Time'), rows)}{note}"


def settings(snapshot: Snapshot) -> str:
    """Every setting and where it came from, folded."""
    rows = [(code(name), code(value), origin) for name, value, origin in snapshot.settings]
    body = table(("Setting", "Value", "From"), rows)
    return f"## Settings\n\n<details>\n<summary>All {len(rows)} settings</summary>\n\n{body}\n\n</details>"
