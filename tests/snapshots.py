"""Runs as a report sees them: made-up logs with the keys that TRL 1.16 and the worker write."""

from __future__ import annotations

import math
import random
from typing import Any

from delivery.report import Snapshot
from delivery.samples import Sample

SETTINGS = [
    ("RUN_MODE", "rl", "environment"),
    ("RL_GROUP_SIZE", "8", "JobSpec train.group_size"),
    ("stop_sequences", "('|', '`')", "JobSpec"),
    ("HF_TOKEN", "***", "environment"),
]


def snapshot(mode: str, **changes: Any) -> Snapshot:
    """A run that has just begun, with whatever is changed."""
    start: dict[str, Any] = {
        "prefix": f"{mode}/gsm8k-1/seed0",
        "mode": mode,
        "model": "Qwen/Qwen3.5-4B",
        "environment": "primeintellect/gsm8k",
        "attempt": "3f9a1c",
        "step": 1,
        "target_steps": 150,
        "finished": False,
        "resumed": False,
        "lines": [],
        "samples": [],
        "samples_from": "",
        "settings": SETTINGS,
        "rows": {"source": 8, "kept": 8},
        "counters": {"nonfinite_steps": 0},
        "phases": [("environment", 2.0)],
        "gpu_type": "RTX 5090",
        "seconds": 200.0,
    }
    return Snapshot(**{**start, **changes})


def sft_line(step: int, rng: random.Random) -> dict[str, Any]:
    loss = 0.4 + 1.5 * math.exp(-step / 60) + rng.gauss(0, 0.06)
    return {
        "loss": loss,
        "grad_norm": abs(0.5 + rng.gauss(0, 0.1)),
        "learning_rate": 1e-4 * min(1, step / 10) * (1 - step / 440),
        "num_tokens": step * 12345.0,
        "num_input_tokens_seen": step * 12345,
        "train_runtime": step * 4.1,
        "train_tokens_per_second": 3011.0,
        "mean_token_accuracy": 1 - loss / 4,
        "entropy": loss * 0.9,
        "epoch": step / 220,
        "step": step,
        "tokens_per_second": 9000 + rng.gauss(0, 200),
        "memory_gb": 21.5,
    }


def rl_line(step: int, rng: random.Random, turns: bool) -> dict[str, Any]:
    progress = 1 - math.exp(-step / 50)
    reward = 0.15 + 0.7 * progress + rng.gauss(0, 0.07)
    line: dict[str, Any] = {
        "loss": rng.gauss(0, 0.01),
        "grad_norm": abs(0.1 + rng.gauss(0, 0.03)),
        "learning_rate": 1e-5,
        "num_tokens": step * 150_000.0,
        "completions/mean_length": 220 - 60 * progress + rng.gauss(0, 10),
        "completions/clipped_ratio": max(0.0, 0.2 - 0.2 * progress + rng.gauss(0, 0.02)),
        "score/correct": reward - 0.1,
        "score/_format": min(1.0, 0.3 + progress),
        "score/length_$\\penalty$": -0.1 * progress,
        "reward": reward,
        "reward_std": 0.3,
        "frac_reward_zero_std": min(1.0, 0.2 + 0.4 * progress),
        "kl": 0.002 * step**0.5 + abs(rng.gauss(0, 0.001)),
        "entropy": 0.6 - 0.3 * progress + rng.gauss(0, 0.02),
        "sampling/sampling_logp_difference/mean": 0.004,
        "epoch": step / 100,
        "step": step,
        "tokens_per_second": 3100 + rng.gauss(0, 150),
        "memory_gb": 27.9 + 0.2 * (step > 40),
    }
    if turns:
        line |= {
            "rollout/turns": 3 - progress,
            "rollout/tool_calls": 2.2 - progress,
            "rollout/truncated": 0.05 - 0.05 * progress,
        }
    return line


def evaluation(step: int, reward: float) -> dict[str, Any]:
    return {
        **{"step": step, "eval_split": "eval", "eval_n": 64, "eval_reward": reward},
        **{"eval_pass_rate": reward * 0.9, "eval_reward_min": 0.0, "eval_reward_max": 1.0},
        "eval_metric_num_turns": 2.5,
    }


SKIPPED = {"step": 20, "eval_skipped": True, "eval_reason": "RuntimeError: out | of memory"}


def sft() -> Snapshot:
    rng = random.Random(0)
    lines = [sft_line(step, rng) for step in range(1, 441)]
    lines[100]["loss"] = math.nan
    lines += [{"train_runtime": 1812.0, "total_flos": 1e15, "train_loss": 0.6, "step": 440, "epoch": 2.0}]
    return snapshot(
        "sft",
        step=440,
        target_steps=440,
        finished=True,
        lines=lines,
        rows={"source": 7000, "without_target": 0, "target_cut_off": 3, "kept": 6997},
        counters={"nonfinite_steps": 1},
        phases=[("set-up", 61.5), ("model load", 40.0), ("training", 1811.9), ("uploads", 9.25)],
        seconds=1925.0,
    )


def rl(turns: bool = False) -> Snapshot:
    rng = random.Random(1)
    lines: list[dict[str, Any]] = []
    for step in range(1, 101):
        lines.append(rl_line(step, rng, turns))
        if step % 10 == 0:
            lines.append(SKIPPED if step == 20 else evaluation(step, 0.2 + 0.006 * step))
    lines[30]["kl"] = None
    lines[31]["score/correct"] = math.nan
    samples = [conversation(index) if turns else answer(index) for index in range(64)]
    return snapshot(
        "rl",
        environment="acme/calculator" if turns else "primeintellect/gsm8k",
        step=100,
        resumed=True,
        lines=lines,
        samples=samples,
        samples_from="training step 100",
        rows={"prompts": 7400, "prompts_over_budget": 12},
        counters={
            "unscorable": 3,
            "bridge_breaks": 0,
            "nonfinite_steps": 0,
            "rollout_errors": {"ToolError": 2, "RewardFunctionError": 1},
        },
        phases=[("set-up", 75.0), ("first step", 140.0), ("training", 5400.0), ("evaluation", 612.0)],
        seconds=6300.0,
    )


def answer(index: int) -> Sample:
    """A single completion, thinking and all; every 21st could not be scored."""
    total = 40 + index // 8
    prompt = [
        {"role": "system", "content": "Solve the problem. End with the number alone."},
        {"role": "user", "content": f"Anna has {total} apples and gives 7 away. How many are left?"},
    ]
    right = index % 3 > 0
    reply = {
        "role": "assistant",
        "content": f"{total} - 7 is {total - 7 if right else total + 7}.\n\n```\n{total - 7}\n```",
        "reasoning_content": f"Let me see. {total} minus 7. " * (120 if index == 2 else 3),
    }
    if index % 21 == 20:
        return Sample(prompt, [reply], None, {}, "ValueError: judge answered `maybe`")
    scores = {"correct": float(right), "_format": 0.5}
    return Sample(prompt, [reply], right + 0.1 * (index % 5), scores)


def conversation(index: int) -> Sample:
    """Two turns with a tool; flat and nested calls."""
    call = {"name": "calculate", "arguments": f'{{"expression": "{index} * 17"}}'}
    nested = {"id": "c1", "type": "function", "function": call}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [nested if index % 2 else call]},
        {"role": "tool", "content": str(index * 17), "tool_call_id": "c1"},
        {"role": "assistant", "content": f"The answer is {index * 17}."},
    ]
    prompt = [{"role": "user", "content": f"What is {index} times 17?"}]
    if index == 5:
        return Sample(prompt, completion[:1], None, {}, "ToolError: no such tool: calcuate")
    if index == 6:
        return Sample(prompt, [], 0.0, {"correct": 0.0})
    return Sample(prompt, completion, float(index % 4 != 0), {"correct": float(index % 4 != 0)})


def first_step() -> Snapshot:
    return snapshot("rl", lines=[rl_line(1, random.Random(2), False)], gpu_type="Some New Card")
