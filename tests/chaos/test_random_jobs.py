"""Random jobs: each is refused in one line, or every value of it is inside its documented range."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from job import rules
from job.settings import Settings, identify
from spec import JobSpec

EXAMPLES = int(os.environ.get("CHAOS_EXAMPLES", "10000"))
MODELS = ["Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-35B-A3B", "openbmb/MiniCPM5-1B", "Qwen/Qwen3.5-4B@main"]
HUGE = 10**400


def count(value: Any) -> bool:
    return type(value) is int and value >= 1


def natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def number(low: float, high: float = math.inf, open_low: bool = False) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        inside = low < value if open_low else low <= value
        return type(value) is float and math.isfinite(value) and inside and value <= high

    return check


def one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: value in words


def maybe(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


# What may come out, by the setting's field.
RANGES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("lora_rank", "lora_alpha", "sft_epochs", "sft_batch_size", "sft_max_length", "sft_per_device_bs"),
        count,
    ),
    **dict.fromkeys(("sft_save_steps", "rl_save_steps", "rl_steps", "rl_prompts_per_step"), count),
    **dict.fromkeys(("rl_max_completion", "rl_vllm_max_len", "processes"), count),
    **dict.fromkeys(("sft_max_steps", "sft_max_examples", "eval_every_steps", "eval_num"), natural),
    **dict.fromkeys(("eval_max_new", "rl_per_device_prompts"), maybe(count)),
    **dict.fromkeys(
        ("sft_packing", "sft_liger", "sft_completion_only", "rl_vllm_sleep", "rl_vllm_eager", "rl_use_vllm"),
        lambda value: type(value) is bool,
    ),
    **dict.fromkeys(("thinking", "text_only", "merge"), lambda value: type(value) is bool),
    "seed": lambda value: natural(value) and value < 2**32,
    "mode": one_of("sft", "rl"),
    "device": one_of("cuda", "cpu"),
    "quant": one_of("bf16", "4bit-qlora"),
    "rl_adapter_sync": one_of("adapter", "merge"),
    "rl_tool_loop": one_of("env", "trl"),
    "heartbeat_min_s": number(0),
    "upload_deadline_s": number(0, open_low=True),
    "grace_s": number(0, open_low=True),
    "log_flush_s": number(0),
    "learning_rate": number(0, open_low=True),
    "temperature": number(0),
    "kl_penalty_coef": number(0),
    "advantage_clip": number(0),
    "thinking_length_penalty_coef": number(0, 1),
    "rl_vllm_gpu_util": maybe(number(0, 1, open_low=True)),
    "eval_pass_threshold": maybe(number(-math.inf)),
    "rl_group_size": count,
}
RL_ALONE: dict[str, Callable[[Any], bool]] = {
    "rl_group_size": lambda value: value >= 2,
    "temperature": number(0, open_low=True),
}


def nonsense() -> st.SearchStrategy[Any]:
    """What JSON can carry, and what it should not."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    plain |= st.sampled_from([HUGE, -1, 0, 1.5, 1e308, "\0", "\ud800", "\u0661", "1_0", "../x", "a" * 300])
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_leaves=4,
    )


def mostly(good: st.SearchStrategy[Any], odds: int = 12) -> st.SearchStrategy[Any]:
    """Good values, and one time in `odds` nonsense: jobs must often be accepted to be worth the look."""
    return st.integers(1, odds).flatmap(lambda draw: nonsense() if draw == 1 else good)


COUNTS = st.integers(1, 4096)
RATES = st.floats(0, 1, exclude_min=True)
TRAIN = {
    **dict.fromkeys(("steps", "epochs", "lora_rank", "lora_alpha", "batch_size", "max_length"), COUNTS),
    **dict.fromkeys(("save_every", "max_tokens"), COUNTS),
    "group_size": st.integers(2, 16),
    "seeds": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=2),
    **dict.fromkeys(("learning_rate", "temperature", "kl_penalty_coef", "advantage_clip"), RATES),
    "thinking_length_penalty_coef": st.floats(0, 1),
    "hf_repo": st.sampled_from(["", "me/runs"]),
    "init_from_adapter": st.sampled_from(["", "sft/a/seed0", "me/runs:sft/a/seed0"]),
    "stop_sequences": st.lists(st.text(max_size=3), max_size=2),
}
SPEC = {
    "model": st.sampled_from(MODELS),
    "model_policy": st.just("allow"),
    "algorithm": st.sampled_from(["sft", "grpo", "GRPO"]),
    "run_id": st.sampled_from(["r1", "local"]),
    "thinking": st.booleans(),
    "gpu": st.fixed_dictionaries({}, optional={"max_wall_seconds": mostly(st.integers(0, 90000))}),
}
ENVIRONMENT = {"id": st.sampled_from(["gsm8k", "owner/name"]), "params": st.just({"a": [1]})}


def texts(name: str) -> st.SearchStrategy[str]:
    """Texts of one variable, most of which it takes."""
    rule = RANGES.get(FIELD_OF.get(name, ""))
    words = {"device": ["cpu", "CUDA"], "quant": ["bf16"], "mode": ["sft", "rl"]}.get(FIELD_OF.get(name, ""))
    if words:
        good: st.SearchStrategy[str] = st.sampled_from(words)
    elif rule is not None and rule(True):
        good = st.sampled_from(["on", "OFF", "1", "no"])
    elif rule is not None and rule(0.5):
        good = st.floats(0.01, 0.99).map(str)
    elif rule is not None and rule(7):
        good = st.integers(1, 4096).map(str)
    else:
        good = st.sampled_from(["", "a", "me/runs", "x.y"])
    odd = st.sampled_from(
        ["", " ", "nan", "-inf", "1e999", "-1", "0", "0x10", "1_000", "on", "\u0663", "9" * 5000]
    )
    return st.integers(1, 10).flatmap(lambda draw: odd | st.text(max_size=8) if draw == 1 else good)


FIELD_OF = {str(one.validation_alias): name for name, one in Settings.model_fields.items()}
VARIABLES = sorted(
    {name for name in FIELD_OF if name.isupper()}
    | {"AUTOSLM_JOB_SPEC_PATH", "AUTOSLM_UNHEARD_OF", "RL_STEP", "OPENAI_API_KEY"}
)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, str]:
    """A set of variables with a JobSpec among them."""
    chosen = {
        name: draw(mostly(good, 40))
        for name, good in SPEC.items()
        if name in ("model_policy", "algorithm") or draw(st.integers(0, 2))
    }
    chosen["environment"] = {name: draw(mostly(good, 40)) for name, good in ENVIRONMENT.items()}
    names = draw(st.sets(st.sampled_from(sorted(TRAIN)), max_size=5))
    chosen["train"] = {name: draw(mostly(TRAIN[name], 20)) for name in sorted(names)}
    spec = draw(mostly(st.just(chosen), 60))
    names = draw(st.sets(st.sampled_from(VARIABLES), max_size=5))
    env = {name: draw(texts(name)) for name in sorted(names)}
    try:
        text = json.dumps(spec)
    except ValueError:
        text = repr(spec)
    if draw(st.integers(1, 60)) == 1:
        text = draw(st.text(max_size=20))
    return {**env, "AUTOSLM_JOB_SPEC_JSON": text}


def look(env: dict[str, str]) -> str:
    """What came of a job: how it was refused, or "accepted" when all of it is in range."""
    identity, problem = identify(env)
    assert all(part not in ("", ".", "..") for part in identity.prefix.split("/")), identity.prefix
    assert identity.prefix.count("/") == 2 and identity.prefix.isascii()
    if problem is not None:
        return refused(problem)
    try:
        read = rules.resolve(env, identity)
    except ValueError as error:
        return refused(error)
    checks = RANGES | (RL_ALONE if read.mode == "rl" else {})
    wrong = {name: getattr(read, name) for name, check in checks.items() if not check(getattr(read, name))}
    assert not wrong, wrong
    assert read.rl_vllm_max_len > read.rl_max_completion or read.mode == "sft"
    assert JobSpec.from_json(read.job.to_json()) == read.job
    assert read.output_dir.resolve().is_relative_to(read.work_dir.resolve())
    return "accepted"


def refused(error: ValueError) -> str:
    text = str(error)
    assert text.strip() == text != "" and len(text.splitlines()) == 1, text
    assert not isinstance(error, ValidationError | UnicodeError | json.JSONDecodeError), repr(error)
    return type(error).__name__


def go_through(examples: int) -> Counter[str]:
    """Look at so many random jobs."""
    came_of: Counter[str] = Counter()
    for name in ("spec", "job"):  # thousands of warnings
        logging.getLogger(name).setLevel(logging.ERROR)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(env=jobs())
    def each(env: dict[str, str]) -> None:
        came_of[look(env)] += 1

    try:
        each()
    finally:
        for name in ("spec", "job"):
            logging.getLogger(name).setLevel(logging.NOTSET)
    assert came_of["accepted"] > examples / 10, came_of
    return came_of


def test_a_few_random_jobs_are_refused_in_one_line_or_in_range() -> None:
    go_through(30)


@pytest.mark.chaos
def test_random_jobs_are_refused_in_one_line_or_in_range(tell: Callable[[object], None]) -> None:
    tell(f"random jobs: {dict(go_through(EXAMPLES))}")
