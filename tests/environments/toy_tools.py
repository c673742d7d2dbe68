"""Tools: a shop's prices, with a gold transcript that calls them."""

from __future__ import annotations

import json

import verifiers as vf
from datasets import Dataset

PRICES = {"apple": 3, "bread": 5, "cheese": 9}


def price(item: str) -> int:
    """Price of an item in coins.

    Args:
        item: what to buy
    """
    return PRICES[item]


def stock(item: str, shop: str = "corner") -> str:
    """How many are left.

    Args:
        item: what to buy
        shop: where
    """
    return f"{len(item)} in {shop}"


def load_environment(max_turns: int = 4, tools: bool = True) -> vf.ToolEnv:
    """One question per item."""
    rows = [
        {"question": f"What does {item} cost?", "completion": transcript(item), "info": {"item": item}}
        for item in PRICES
    ]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[price, stock] if tools else [],
        max_turns=max_turns,
        rubric=vf.Rubric(funcs=[told]),
    )


def transcript(item: str) -> list[dict]:
    """Call, result, answer: in the library's own message shape."""
    call = {"id": f"call_{item}", "name": "price", "arguments": json.dumps({"item": item})}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(PRICES[item])},
        {"role": "assistant", "content": f"{PRICES[item]} coins"},
    ]


def told(completion: vf.Messages, info: dict) -> float:
    """1 when the price is in the last message."""
    return float(str(PRICES[info["item"]]) in str(completion[-1].content))
