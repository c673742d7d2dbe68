"""Ten completions or conversations that show what the model does."""

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from delivery.markdown import code, fence, is_number, number

SHOWN = 10
SHOWN_UNSCORED = 2
MOST_MESSAGES = 12
MOST_LINES, FIRST_LINES = 24, 16  # of one text
WIDEST_LINE = 100  # characters


@dataclass(frozen=True)
class Sample:
    """One completion or conversation, in plain messages; `reward` None is explained by `problem`.

    Messages have `role`, `content`, maybe `reasoning_content` and `tool_calls` (flat or nested as OpenAI's).
    """

    prompt: Sequence[Mapping[str, Any]]
    completion: Sequence[Mapping[str, Any]]
    reward: float | None
    scores: Mapping[str, float]
    problem: str = ""


def select(samples: Sequence[Sample]) -> list[tuple[str, Sample]]:
    """Up to ten labelled samples: best, median and worst by reward, and some that have none.

    Of equal ones those of different prompts come first; when all are equal there is no best one.
    """
    turn: Counter[str] = Counter()
    repeats = {}  # how many samples of the same prompt came before, by position
    for index, one in enumerate(samples):
        prompt = repr(one.prompt)
        repeats[index] = turn[prompt]
        turn[prompt] += 1
    rewards = {index: one.reward for index, one in enumerate(samples) if is_number(one.reward)}
    unscored = [index for index in repeats if index not in rewards]
    shown_unscored = unscored[: max(SHOWN_UNSCORED, SHOWN - len(rewards))]
    room = min(SHOWN - len(shown_unscored), len(rewards))
    middle = median(rewards.values()) if rewards else 0.0
    distances = {
        "best": {index: -reward for index, reward in rewards.items()},
        "worst": dict(rewards),
        "median": {index: abs(reward - middle) for index, reward in rewards.items()},
    }
    shares = dict(zip(distances, _shares(room), strict=True))
    chosen: dict[str, list[int]] = {}
    left = set(rewards)
    for label, distance in distances.items():
        order = sorted(left, key=lambda index: (distance[index], repeats[index], index))
        chosen[label] = order[: shares[label]]
        left -= {*chosen[label]}
    differ = len({*rewards.values()}) > 1
    return [
        *(
            (label if differ else "sample", samples[index])
            for label in ("best", "median", "worst")
            for index in chosen[label]
        ),
        *(("no reward", samples[index]) for index in shown_unscored),
    ]


def _shares(room: int) -> list[int]:
    """Split `room` over best, worst and median, the first two first."""
    return [(room + 2) // 3, (room + 1) // 3, room // 3]


def summary(samples: Sequence[Sample]) -> str:
    """One sentence on the rewards of all samples."""
    rewards = [one.reward for one in samples if is_number(one.reward)]
    without = len(samples) - len(rewards)
    parts = [f"{len(samples)} samples"]
    if rewards:
        figures = {
            "min": min(rewards),
            "median": median(rewards),
            "mean": sum(rewards) / len(rewards),
            "max": max(rewards),
        }
        parts.append("rewards: " + ", ".join(f"{name} {number(value)}" for name, value in figures.items()))
    if without:
        parts.append(f"{without} without a reward")
    return "; ".join(parts) + "."


def described(label: str, place: int, sample: Sample) -> str:
    """A sample as Markdown: its reward, its scores, and every message."""
    blocks = [f"### {place}. {label.capitalize()}"]
    if is_number(sample.reward):
        blocks[0] += f": reward {number(sample.reward)}"
    else:
        blocks.append(f"Could not be scored: {code(sample.problem) or 'no reason given'}.")
    if sample.scores:
        scores = ", ".join(f"{code(name)} {number(value)}" for name, value in sample.scores.items())
        blocks.append(f"Scores: {scores}.")
    blocks += _messages(sample.prompt, "prompt · ")
    return "\n\n".join([*blocks, *(_messages(sample.completion) or ["*Nothing was generated.*"])])


def _messages(messages: Sequence[Mapping[str, Any]], origin: str = "") -> list[str]:
    half = MOST_MESSAGES // 2
    left_out = max(0, len(messages) - 2 * half)
    return [
        *(block for one in messages[: half if left_out else None] for block in _message(one, origin)),
        *([f"*[… {left_out} messages left out …]*"] if left_out else []),
        *(block for one in messages[-half:] if left_out for block in _message(one, origin)),
    ]


def _message(message: Mapping[str, Any], origin: str) -> list[str]:
    speaker = f"**{origin}{message.get('role')}**"
    blocks = []
    if thought := plain(message.get("reasoning_content")):
        blocks += [f"{speaker} · thinking", fence(shown(thought))]
    if text := plain(message.get("content")):
        blocks += [speaker, fence(shown(text))]
    for call in message.get("tool_calls") or ():
        name, arguments = tool_call(call)
        blocks += [f"{speaker} · calls {code(name)}", fence(shown(arguments))]
    return blocks or [f"{speaker} · empty"]


def tool_call(call: Any) -> tuple[str, str]:
    """Name and arguments, as written, of a flat or nested call; any other thing is shown as it is."""
    if not isinstance(call, Mapping):
        return "", plain(call)
    function = call.get("function", call)
    return str(function.get("name", "")), plain(function.get("arguments"))


def plain(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and "type" in part for part in content
    ):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part['type']}]" for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def shown(text: str) -> str:
    """The text with long lines wrapped; of a long one the beginning, a mark, and the end."""
    lines = [part for line in text.split("\n") for part in wrapped(line)]
    left_out = len(lines) - MOST_LINES
    if left_out > 0:
        lines = [*lines[:FIRST_LINES], f"[… {left_out} lines left out …]", *lines[FIRST_LINES - MOST_LINES :]]
    return "\n".join(lines)


def wrapped(line: str) -> list[str]:
    """The line in parts that a page shows without scrolling; joined they are the line."""
    parts = textwrap.wrap(
        line,
        WIDEST_LINE,
        expand_tabs=False,
        replace_whitespace=False,
        drop_whitespace=False,
        break_on_hyphens=False,
    )
    return parts or [line]
