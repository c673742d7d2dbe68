"""Curves of a run as one picture, from the lines of its log."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delivery.markdown import is_number

SCORE, EVALUATED = "score/", "eval_"
MEASURE = {"sft": ("loss", "Loss"), "rl": ("reward", "Mean reward")}  # of a mode: key and title
EVALUATION = {"eval_reward": "mean reward", "eval_pass_rate": "pass rate"}
MOST_CURVES = 8  # in one panel
FEW_POINTS = 40  # up to here every point is marked
SMOOTHED_FROM = 20  # points
MOST_AROUND = 25  # values on either side of a smoothed one
WIDTH_IN, ROW_IN, DPI = 9.0, 1.95, 130
FAINT, COLORS = 0.3, 128


@dataclass(frozen=True)
class Curve:
    """One quantity: its values at steps; NaN where a log line has no number."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """Curves that share axes; smoothed ones also get a line of means, `from_zero` shows the whole size."""

    title: str
    curves: tuple[Curve, ...]
    smooth: bool = True
    from_zero: bool = False


def curve(lines: Sequence[Mapping[str, Any]], key: str, name: str) -> Curve | None:
    """The values of one key, under a name; None when there is not a single number."""
    found = [(int(one["step"]), one[key]) for one in lines if key in one and is_number(one.get("step"))]
    if not any(is_number(value) for _, value in found):
        return None
    values = tuple(float(value) if is_number(value) else math.nan for _, value in found)
    return Curve(name, tuple(step for step, _ in found), values)


def panels(lines: Sequence[Mapping[str, Any]], mode: str) -> list[Panel]:
    """What there is to draw, most important first."""
    keys = {key for one in lines for key in one}
    scores = {key: key.removeprefix(SCORE) for key in sorted(keys) if key.startswith(SCORE)}
    truncated = "rollout/truncated" if "rollout/truncated" in keys else "completions/clipped_ratio"
    main, title = MEASURE[mode]

    def of(title: str, *names: str, **style: bool) -> Panel:
        return Panel(
            title,
            _curves(lines, {name: name.rpartition("/")[2].replace("_", " ") for name in names}),
            **style,
        )

    wanted = [
        of(title, main),
        Panel("Evaluation", _curves(lines, EVALUATION), smooth=False, from_zero=True),
        Panel("Named rewards", _curves(lines, scores)),
        of("Token accuracy", "mean_token_accuracy"),
        of("KL to the reference", "kl", from_zero=True),
        of("Completion length, tokens", "completions/mean_length", from_zero=True),
        of("Truncated share", truncated, from_zero=True),
        of("Share of groups without a signal", "frac_reward_zero_std", from_zero=True),
        of("Turns and tool calls per conversation", "rollout/turns", "rollout/tool_calls", from_zero=True),
        of("Entropy, nats per token", "entropy", from_zero=True),
        of("Gradient norm", "grad_norm", from_zero=True),
        *([of("Learning rate", "learning_rate", smooth=False, from_zero=True)] if mode == "sft" else []),
        of("Tokens per second", "tokens_per_second", from_zero=True),
        of("Memory, GB", "memory_gb", smooth=False, from_zero=True),
    ]
    return [one for one in wanted if one.curves]


def _curves(lines: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> tuple[Curve, ...]:
    found = (curve(lines, key, name) for key, name in names.items())
    return tuple(one for one in found if one)[:MOST_CURVES]


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of the values around each place, NaN left out.

    Near the start it reaches as far on as back, so a steep start is not flattened; near the end only back.
    """
    most = min(MOST_AROUND, max(2, len(values) // 20))
    means = []
    for place in range(len(values)):
        back = min(most, place)
        known = [one for one in values[place - back : place + back + 1] if not math.isnan(one)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def picture(drawn: Sequence[Panel]) -> bytes:
    """A PNG of all panels, two in a row; safe on any thread, as pyplot is not involved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    columns = min(2, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    last = max(step for panel in drawn for one in panel.curves for step in one.steps)
    figure = Figure(figsize=(WIDTH_IN, ROW_IN * rows), dpi=DPI, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, panel in zip(axes, drawn, strict=False):
        _draw(place, panel)
        place.set_xlim(0, max(1, last) * 1.02)
    for place in axes[len(drawn) :]:
        place.set_axis_off()
    figure.supxlabel("optimizer step", fontsize=8)
    canvas.draw()
    out = io.BytesIO()
    pixels = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    # A palette makes the file three times smaller.
    pixels.convert("RGB").quantize(COLORS, Image.Quantize.FASTOCTREE).save(out, "PNG", optimize=True)
    return out.getvalue()


def _draw(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    handles = []
    for index, one in enumerate(panel.curves):
        marker = "o" if len(one.steps) <= FEW_POINTS else ""
        style = {"color": f"C{index}", "marker": marker, "markersize": 3}
        smooth = panel.smooth and len(one.steps) >= SMOOTHED_FROM
        handles += axes.plot(one.steps, one.values, **style, linewidth=1.2, alpha=FAINT if smooth else 1)
        if smooth:
            handles[-1:] = axes.plot(one.steps, smoothed(one.values), color=f"C{index}", linewidth=1.6)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_formatter("{x:g}")
    if panel.from_zero and axes.dataLim.y0 >= 0:
        top = axes.dataLim.y1 or 1
        axes.set_ylim(-0.02 * top, 1.08 * top)
    if len(panel.curves) > 1:
        legend = axes.legend(handles, [one.name for one in panel.curves], fontsize=7.5, framealpha=0.7)
        for text in legend.get_texts():
            text.set_parse_math(False)
