"""GitHub-flavoured Markdown from texts that may hold any markup."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

NOTHING = "-"
LONGEST_CODE = 500  # characters


def fence(text: str) -> str:
    """A block that shows the text as it is, whatever it holds."""
    ticks = "`" * max(3, 1 + _longest_run(text))
    return f"{ticks}\n{text}\n{ticks}"


def code(text: str) -> str:
    """The text on one line in code style; cut when long, nothing for an empty one."""
    line = " ".join(text.split())
    line = line if len(line) <= LONGEST_CODE else line[: LONGEST_CODE - 1] + "…"
    if not line:
        return ""
    ticks = "`" * (1 + _longest_run(line))
    room = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{room}{line}{room}{ticks}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already, but for their bars."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_without_bars, cells))} |" for cells in lines)


def _without_bars(cell: str) -> str:
    # A backslash before the bar would undo ours; a space of no width parts the two.
    return cell.replace("\\|", "\\\u200b|").replace("|", "\\|")


def number(value: Any) -> str:
    """A figure in four significant digits; a dash for none, NaN and infinities."""
    if not is_number(value):
        return NOTHING
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether the value is a finite figure."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
