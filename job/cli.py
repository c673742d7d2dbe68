"""What `--help`, `--schema` and `--check` print."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from textwrap import wrap
from typing import TextIO

from job import rules
from job.knobs import Knob, declared
from job.settings import Settings, identify
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
QUIET_LIBRARIES = (
    "httpx",
    "httpx2",
    "verifiers",
    "datasets",
    "transformers",
    "trl",
    "accelerate",
    "matplotlib",
)


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


def check(env: Mapping[str, str], out: TextIO) -> None:
    """Validate spec, variables, environment, model and rows; write what they resolve to."""
    identity, problem = identify(env)
    if problem is not None:
        raise problem
    settings = rules.resolve(env, identity)
    for name, value, origin in settings.table():
        out.write(f"{name} = {value} ({origin})\n")
    out.flush()
    for fact, found in facts(settings).items():
        out.write(f"{fact}: {found}\n")


def facts(settings: Settings) -> dict[str, object]:
    """What the environment, the model and the rows turn out to be."""
    from job import dataset
    from job.chat import Chat, load_tokenizer
    from job.environment import Environment
    from job.weights import plan_weights

    env = Environment.load(settings.job.environment.id, settings.job.environment.params)
    plan = plan_weights(settings)
    chat = Chat(load_tokenizer(plan.base, plan.base_commit), settings.thinking)
    settings = rules.fit_context(settings, plan.context_length)
    if settings.mode == "sft":
        rows, _, counts = dataset.sft_rows(settings, env, chat)
        lengths = sorted(len(row.ids) for row in rows)
        kept = f"{counts.kept} of {counts.source} rows"
    else:
        prompts = dataset.rl_prompts(settings, env, chat)
        lengths = sorted(len(chat.encode(text)) for text in prompts.texts)
        kept = f"{len(lengths)} of {len(lengths) + prompts.over_budget} prompts"
    return {
        "environment": f"{env.id} ({env.version}), {'conversations' if env.multi_turn else 'single turn'}",
        "model": f"{plan.source} at {plan.commit or 'local folder'}, {plan.model_type}, {plan.dtype}",
        "train on": f"{kept}; tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}",
    }


class RedactedFormatter(logging.Formatter):
    """One log record as a line of text, tracebacks included, with every secret taken out."""

    def __init__(self, redact: Callable[[str], str]):
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        self.redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self.redact(super().format(record))


def set_up_logging(env: Mapping[str, str], redact: Callable[[str], str]) -> None:
    """Log to the terminal's error stream; at debug the libraries' own logs are shown."""
    level = env.get("AUTOSLM_LOG_LEVEL", "").strip().upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactedFormatter(redact))
    logging.basicConfig(level=level if level in ("DEBUG", "WARNING", "ERROR") else "INFO", handlers=[handler])
    if level != "DEBUG":
        for library in QUIET_LIBRARIES:
            logging.getLogger(library).setLevel(logging.WARNING)
