"""Curves of a run as one picture, from the lines of its log."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delivery.markdown import is_number

SCORE, EVALUATED = "score/", "eval_"
MOST_CURVES = 8  # in one panel
FEW_POINTS = 40  # up to here every point is marked
SMOOTHED_FROM = 20  # points
WIDTH_IN, ROW_IN, DPI = 9.0, 2.3, 130
FAINT = 0.3


@dataclass(frozen=True)
class Curve:
    """One quantity: its values at steps; NaN where a log line has no number."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """Curves that share axes."""

    title: str
    curves: tuple[Curve, ...]
    smooth: bool = False
    points: bool = False


def curve(lines: Sequence[Mapping[str, Any]], key: str, name: str = "") -> Curve | None:
    """The values of one key; None when there is not a single number."""
    found = [(int(one["step"]), one[key]) for one in lines if key in one and is_number(one.get("step"))]
    if not any(is_number(value) for _, value in found):
        return None
    values = tuple(float(value) if is_number(value) else math.nan for _, value in found)
    return Curve(name or key, tuple(step for step, _ in found), values)


def panels(lines: Sequence[Mapping[str, Any]], mode: str) -> list[Panel]:
    """What there is to draw, most important first."""
    scores = sorted({key for one in lines for key in one if key.startswith(SCORE)})
    keys = {key for one in lines for key in one}
    truncated = "rollout/truncated" if "rollout/truncated" in keys else "completions/clipped_ratio"
    main = {"loss": "Loss"} if mode == "sft" else {"reward": "Mean reward"}
    wanted = [
        *(Panel(title, _curves(lines, {key: ""}), smooth=True) for key, title in main.items()),
        Panel(
            "Evaluation",
            _curves(lines, {"eval_reward": "mean reward", "eval_pass_rate": "pass rate"}),
            points=True,
        ),
        Panel("Named rewards", _curves(lines, {key: key.removeprefix(SCORE) for key in scores}), smooth=True),
        Panel("Token accuracy", _curves(lines, {"mean_token_accuracy": ""}), smooth=True),
        Panel("KL to the reference", _curves(lines, {"kl": ""}), smooth=True),
        Panel("Completion length, tokens", _curves(lines, {"completions/mean_length": ""}), smooth=True),
        Panel("Truncated share", _curves(lines, {truncated: ""}), smooth=True),
        Panel("Groups without a signal, share", _curves(lines, {"frac_reward_zero_std": ""}), smooth=True),
        Panel(
            "Per conversation",
            _curves(lines, {"rollout/turns": "turns", "rollout/tool_calls": "tool calls"}),
            smooth=True,
        ),
        Panel("Entropy, nats per token", _curves(lines, {"entropy": ""}), smooth=True),
        Panel("Gradient norm", _curves(lines, {"grad_norm": ""}), smooth=True),
        Panel("Learning rate", _changing(_curves(lines, {"learning_rate": ""}))),
        Panel("Tokens per second", _curves(lines, {"tokens_per_second": ""}), smooth=True),
        Panel("GPU memory, GB", _curves(lines, {"memory_gb": ""})),
    ]
    return [one for one in wanted if one.curves]


def _curves(lines: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> tuple[Curve, ...]:
    found = (curve(lines, key, name) for key, name in names.items())
    return tuple(one for one in found if one)[:MOST_CURVES]


def _changing(curves: tuple[Curve, ...]) -> tuple[Curve, ...]:
    return tuple(one for one in curves if len({value for value in one.values if value == value}) > 1)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of the newest `window` values at each place, NaN left out."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if value == value]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def window(points: int) -> int:
    """How many values the smooth line of so many points averages."""
    return min(50, max(5, points // 20))


def picture(drawn: Sequence[Panel]) -> bytes:
    """A PNG of all panels, two in a row; safe on any thread, as pyplot is not involved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(WIDTH_IN, ROW_IN * rows), dpi=DPI, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, panel in zip(axes, drawn, strict=False):
        _draw(place, panel)
    for place in axes[len(drawn) :]:
        place.set_axis_off()
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()


def _draw(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    handles = []
    for index, one in enumerate(panel.curves):
        marked = panel.points or len(one.steps) <= FEW_POINTS
        style = {"color": f"C{index}", "marker": "o" if marked else "", "markersize": 3, "linewidth": 1.2}
        smooth = panel.smooth and len(one.steps) >= SMOOTHED_FROM
        handles += axes.plot(one.steps, one.values, **style, alpha=FAINT if smooth else 1)
        if smooth:
            values = smoothed(one.values, window(len(one.values)))
            handles[-1] = axes.plot(one.steps, values, color=f"C{index}", linewidth=1.6)[0]
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if len(panel.curves) > 1:
        legend = axes.legend(handles, [one.name for one in panel.curves], fontsize=7.5, framealpha=0.7)
        for text in legend.get_texts():
            text.set_parse_math(False)
