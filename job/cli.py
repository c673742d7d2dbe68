"""What `--help`, `--schema` and `--check` print, and a run says of its settings."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import fill, wrap
from typing import Any, Self, TextIO

import recipe
from job.estimates import Data, Machine, Work
from job.knobs import Knob, declared
from job.settings import Settings
from recipe import Batch
from spec import JobSpec

log = logging.getLogger(__name__)

USAGE = """\
usage: RUN_MODE=sft|rl python worker.py [--check | --schema | --help]

Fine-tune a LoRA adapter as a JobSpec and these variables say.
An environment variable wins over the JobSpec, the JobSpec over the recipe; empty means unset.

  --check   resolve and validate everything that needs no GPU, print it, exit 0 or 1
  --schema  print the JobSpec's JSON schema

  AUTOSLM_JOB_SPEC_JSON
      the JobSpec as JSON text; wins over the path
  AUTOSLM_JOB_SPEC_PATH
      a file that holds the JobSpec
"""
WIDTH = 80


def print_help(out: TextIO) -> None:
    """Write the usage and the table of every variable."""
    out.write(USAGE)
    for one in declared(Settings):
        if one.is_variable:
            out.write(f"  {one.name}\n")
            out.write("".join(f"      {line}\n" for line in wrap(described(one), WIDTH - 6)))


def described(one: Knob) -> str:
    """A variable's meaning, type and range, default and JobSpec field in one sentence."""
    default = one.default or "empty"
    if one.spec and not one.spec_wins:
        default = f"JobSpec {one.spec}, else {default}"
    parts = [one.rule, f"default {default}", *([f"{one.mode} only"] if one.mode else [])]
    return f"{one.meaning} [{'; '.join(parts)}]"


def print_schema(out: TextIO) -> None:
    """Write the JSON schema of the JobSpec."""
    out.write(json.dumps(JobSpec.model_json_schema(), indent=2) + "\n")


def print_table(settings: Settings, out: TextIO) -> None:
    """Write one line per setting: name, value, origin."""
    for name, value, origin in settings.table():
        out.write(f"{name} = {value} ({origin})\n")


def announce(settings: Settings) -> None:
    """Log the resolved table, by origin; what is empty is left out."""
    said: dict[str, list[str]] = {}
    for name, value, origin in settings.table():
        if value:
            said.setdefault(origin, []).append(f"{name}={value}")
    lines = [
        fill(
            f"{origin}: {'  '.join(pairs)}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for origin, pairs in said.items()
    ]
    log.info("settings:\n%s", "\n".join(lines))


def print_facts(
    settings: Settings, notes: Mapping[str, Any], batch: Batch, rows: Data, todo: Work, out: TextIO
) -> None:
    """Write what environment, model and rows turned out to be, and what is to be done with them."""
    lengths = rows.lengths
    if settings.mode == "sft":
        counts = notes["rows"]
        what, kind, tokens = "rows", "row, prompt and answer", f"{todo.trained_tokens:,}"
        left_out = f"{counts['without_target']} without target, {counts['target_cut_off']} cut off"
    else:
        what, kind, left_out = "prompts", "prompt", f"{rows.over_budget} over the budget"
        tokens = f"at most {todo.trained_tokens:,}, of which {todo.generated_tokens:,} sampled"
    facts = {
        "environment": f"{notes['environment']} ({notes['environment_version']})",
        "model": f"{notes['model_id']} at {notes['model_commit'] or 'a local folder'}",
        "train on": f"{len(lengths)} {what}, {left_out}",
        f"tokens of a {kind}": f"median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
    }
    out.write("\n" + "".join(f"{fact}: {found}\n" for fact, found in facts.items()))
    out.write("".join(f"  {line}\n" for line in histogram(lengths)))
    out.write(f"batch: {batch.micro} x {batch.accumulation}\n")
    out.write(f"steps: {todo.steps}, {todo.passes:.1f} passes over the data\n")
    out.write(f"tokens: {tokens}\n")
    if todo.evaluated_tokens:
        out.write(f"evaluations: at most {todo.evaluated_tokens:,} tokens\n")


def histogram(lengths: Sequence[int], bins: int = 10, width: int = WIDTH - 2) -> list[str]:
    """Sorted counts of tokens as lines: from, to, a bar, how many."""
    low, high = lengths[0], lengths[-1]
    step = max(1, -(-(high - low + 1) // bins))
    starts = range(low, high + 1, step)
    found = Counter((length - low) // step for length in lengths)
    digits, most = len(str(starts[-1] + step - 1)), max(found.values())
    room = width - 2 * digits - len(f"- | {most}")
    return [
        f"{start:>{digits}}-{start + step - 1:<{digits}} |{'#' * -(-room * found[n] // most):<{room}}"
        f" {found[n]:>{len(str(most))}}"
        for n, start in enumerate(starts)
    ]


def print_machine(settings: Settings, needs: Machine | None, out: TextIO) -> None:
    """Write what the job will take of the machine that `gpu` asks for."""
    if needs is None:
        out.write("memory, disk, time: not estimated, the model's configuration says too little\n")
        return
    wanted = settings.job.gpu
    card = recipe.gpu(wanted.type) if settings.device == "cuda" else None
    of_card = f" of the {card.memory_gb} GB of {wanted.type}" if card else ""
    parts = ", ".join(f"{name} {size:.1f}" for name, size in needs.memory_gb.items())
    lines = [f"memory: {needs.total_gb:.1f} GB{of_card}: {parts}"]
    lines += [f"disk: {needs.disk_gb:.1f} GB of {wanted.disk_gb}, the image not counted"]
    if card and needs.hours is not None and needs.usd is not None:
        at_most = "at most " if settings.mode == "rl" else ""
        lines += [f"time: {at_most}{needs.hours:.1f} hours"]
        lines += [f"cost: {at_most}${needs.usd:.2f} at ${card.usd_per_hour:.2f} an hour"]
    out.write("\nrough estimates, for orientation:\n")
    for line in lines:
        out.write("".join(f"  {one}\n" for one in wrap(line, WIDTH - 2, subsequent_indent="  ")))


def print_warnings(warnings: Sequence[str], out: TextIO) -> None:
    """Write what deserves a second look."""
    out.write("\nwarnings:\n" if warnings else "\nno warnings\n")
    for warning in warnings:
        out.write(fill(warning, WIDTH, initial_indent="  - ", subsequent_indent="    ") + "\n")


class Heard(logging.Handler):
    """The warnings that are logged in its context."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
