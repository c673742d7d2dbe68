"""A small verifiers environment with a tool: sums that `add` works out, each with a gold transcript."""

from __future__ import annotations

import json
from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def load_environment(below: int = 10, transcripts: int | None = None) -> vf.ToolEnv:
    """Every sum of two numbers below `below`; `transcripts` keeps only so many rows."""
    pairs = [(a, b) for a in range(below) for b in range(below)]
    return vf.ToolEnv(
        dataset=Dataset.from_list([row(a, b) for a, b in pairs][:: stride(len(pairs), transcripts)]),
        tools=[add],
        max_turns=2,
        rubric=vf.Rubric(funcs=[used_the_tool, exact_match], weights=[0.5, 0.5]),
    )


def stride(rows: int, kept: int | None) -> int:
    return max(1, rows // kept) if kept else 1


def row(a: int, b: int) -> dict[str, Any]:
    """A question, the sum, and the conversation that a supervised run learns."""
    call = {"id": "call_0", "name": "add", "arguments": json.dumps({"a": a, "b": b})}
    return {
        "question": f"What is {a} + {b}?",
        "info": {"sum": str(a + b)},  # an `answer` would be what a supervised run learns
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": str(a + b)},
            {"role": "assistant", "content": str(a + b)},
        ],
    }


def used_the_tool(completion: vf.Messages, info: dict[str, Any]) -> float:
    """1 when the tool was asked for the sum."""
    return float(any(one.role == "tool" and one.content == info["sum"] for one in completion))


def exact_match(completion: vf.Messages, info: dict[str, Any]) -> float:
    """1 when the last message is the sum and nothing else."""
    last = completion[-1]
    return float(last.role == "assistant" and (last.content or "").strip() == info["sum"])
