"""What `--help`, `--schema` and `--check` print."""

import json
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, TextIO

from job.knobs import Knob, declared
from job.settings import Settings
from recipe import Batch
from spec import JobSpec

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


def print_facts(notes: Mapping[str, Any], batch: Batch, lengths: Sequence[int], out: TextIO) -> None:
    """Write what environment, model and rows turned out to be; `lengths` are sorted token counts."""
    facts = {
        "environment": f"{notes['environment']} ({notes['environment_version']})",
        "model": f"{notes['model_id']} at {notes['model_commit'] or 'a local folder'}",
        "train on": f"{len(lengths)} rows, median {lengths[len(lengths) // 2]} tokens, longest {lengths[-1]}",
        "batch": f"{batch.micro} x {batch.accumulation}",
    }
    for fact, found in facts.items():
        out.write(f"{fact}: {found}\n")
