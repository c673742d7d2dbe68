"""The report: figures that are those of the log, samples worth a look, texts that cannot break the page."""

from __future__ import annotations

import io
import json
import math
import re
import struct
import sys
import threading
import warnings
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from delivery import curves, report
from delivery.markdown import code, duration, fence, number, table
from delivery.redaction import redactor
from delivery.samples import Sample, described, select, shown, summary, wrapped
from tests import snapshots
from tests.harness import strict


def unchanged(text: str) -> str:
    return text


def page(snapshot: report.Snapshot) -> str:
    return report.report(snapshot, with_curves=True)


def rendered(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def blocks(text: str) -> list[str]:
    """What the page shows in blocks of plain text."""
    return [one.content.removesuffix("\n") for one in rendered(text) if one.type == "fence"]


def cells(text: str, section: str) -> list[list[str]]:
    """The rows of a section's table as a reader sees them, its header first."""
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0] if section else text.split("\n## ")[0]
    rows: list[list[str]] = []
    for one in rendered(body):
        if one.type == "tr_open":
            rows.append([])
        elif one.type == "inline" and rows:
            rows[-1].append("".join(part.content for part in one.children or ()))
    return rows


def headline(text: str) -> dict[str, str]:
    return {row[0]: row[1] for row in cells(text, "") if len(row) == 2}


# --- figures ---


def logged(snapshot: report.Snapshot) -> list[dict]:
    return [strict(line) for line in report.metrics_jsonl(snapshot.lines).splitlines()]


def averages(lines: list[dict], key: str) -> tuple[str, str]:
    values = [one[key] for one in lines if one.get(key) is not None]
    return f"{sum(values[:10]) / 10:.4g}", f"{sum(values[-10:]) / 10:.4g}"


@pytest.mark.parametrize(("made", "key"), [("sft", "loss"), ("rl", "reward")])
def test_the_headline_says_what_the_log_says(made, key):
    snapshot = getattr(snapshots, made)()
    lines = logged(snapshot)
    first, last = averages(lines, key)
    newest = [one[key] for one in lines if one.get(key) is not None][-1]
    steps = sum(one.get(key) is not None for one in lines)
    title = {"loss": "Loss", "reward": "Mean reward"}[key]
    assert headline(page(snapshot))[title] == (
        f"{first} → {last} (means of the first and the last 10 of {steps} logged values; newest {newest:.4g})"
    )


def test_the_newest_evaluation_is_in_the_headline():
    newest = [one for one in logged(snapshots.rl()) if "eval_reward" in one][-1]
    assert headline(page(snapshots.rl()))["Evaluation"] == (
        f"step {newest['step']}: mean reward {newest['eval_reward']:.4g},"
        f" pass rate {newest['eval_pass_rate']:.4g}, {newest['eval_n']} held-out rows"
    )


def test_an_evaluation_on_training_rows_says_so():
    line = {**snapshots.evaluation(10, 0.5), "eval_split": "train"}
    text = page(snapshots.snapshot("rl", lines=[line]))
    assert headline(text)["Evaluation"].endswith("64 training rows")
    assert cells(text, "Evaluation")[1][1] == "training"


def test_every_evaluation_of_the_log_has_its_row():
    lines = [one for one in logged(snapshots.rl()) if any(key.startswith("eval_") for key in one)]
    header, *rows = cells(page(snapshots.rl()), "Evaluation")
    assert header == [
        *("Step", "Rows from", "n", "Mean reward", "Pass rate", "Min", "Max", "num_turns", "Skipped because")
    ]
    keys = ["n", "reward", "pass_rate", "reward_min", "reward_max", "metric_num_turns"]
    for line, row in zip(lines, rows, strict=True):
        if line.get("eval_skipped"):
            assert row == [str(line["step"]), *["-"] * 7, line["eval_reason"]]
        else:
            figures = [f"{line[f'eval_{key}']:.4g}" for key in keys]
            assert row == [str(line["step"]), "held-out", *figures, ""]


def test_named_rewards_are_those_of_the_log():
    lines = logged(snapshots.rl())
    for name, first, last, count in cells(page(snapshots.rl()), "Named rewards")[1:]:
        assert (first, last) == averages(lines, f"score/{name}")
        assert count == "10"


def test_the_log_is_strict_json_without_the_closing_summary():
    snapshot = snapshots.sft()
    lines = logged(snapshot)
    assert [one["step"] for one in lines] == list(range(1, 441))
    assert lines[100]["loss"] is None
    assert lines[7] == snapshot.lines[7]
    assert report.metrics_jsonl([]) == b""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "none yet"),
        ([0.5], "**0.5** (the only logged value)"),
        ([0.5, 1.5], "0.5 → **1.5** (first and last of 2 logged values; newest 1.5)"),
        (
            [1.0, 3.0, 9.0, 5.0, 7.0],
            "2 → **6** (means of the first and the last 2 of 5 logged values; newest 7)",
        ),
    ],
)
def test_trend(values, said):
    lines = [{"step": step, "loss": value} for step, value in enumerate([*values, math.nan], start=1)]
    assert f"| Loss | {said} |" in page(snapshots.snapshot("sft", lines=lines))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 7}, "step 7 of 150"),
        ({"step": 7, "resumed": True}, "step 7 of 150, resumed from a checkpoint"),
        ({"step": 150, "finished": True}, "finished, 150 steps"),
    ],
)
def test_state(changes, said):
    assert headline(page(snapshots.snapshot("rl", **changes)))["State"] == said


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("NVIDIA GeForce RTX 5090", "about $1.88 (RTX 5090 at roughly $0.94 per hour)"),
        ("TPU v9", "no figure: the price of TPU v9 is not known"),
        ("", "no figure: the price of the GPU is not known"),
    ],
)
def test_cost_is_an_estimate_or_nothing(card, said):
    found = headline(page(snapshots.snapshot("rl", gpu_type=card, seconds=7200.0)))
    assert found["Cost, estimated"] == said


def test_counts_and_phases():
    text = page(snapshots.rl())
    assert ["dropped: the prompt is longer than its budget", "12"] in cells(text, "Dataset")
    assert ["samples without a reward, by kind", "ToolError 2, RewardFunctionError 1"] in cells(
        text, "What went wrong"
    )
    assert len(cells(text, "What went wrong")) == 3  # what did not happen is not listed
    assert ["first step", "2 min 20 s"] in cells(text, "Time")
    assert ["dropped: the target lies beyond the length limit", "3"] in cells(
        page(snapshots.sft()), "Dataset"
    )


def test_a_run_without_trouble_says_so():
    text = page(snapshots.snapshot("rl", counters={"unscorable": 0, "rollout_errors": {}}))
    assert "## What went wrong\n\nNothing was skipped or left out.\n" in text


def test_hardly_any_data_leaves_no_empty_sections():
    found = report.files(snapshots.snapshot("sft", step=0), unchanged)
    assert found.keys() == {"report.md"}
    text = found["report.md"].decode()
    assert re.findall(r"^## .*", text, flags=re.MULTILINE) == [
        *("## Dataset", "## What went wrong", "## Time", "## Settings")
    ]
    assert "Nothing has been logged yet." in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(None, "-"), (math.nan, "-"), (math.inf, "-"), (True, "-"), (0, "0"), (1.0, "1")],
        *[
            (-0.25, "-0.25"),
            (1 / 3, "0.3333"),
            (12345.678, "12346"),
            (1e-5, "1e-05"),
            (1e300, "1" + "0" * 300),
        ],
    ],
)
def test_number(value, text):
    shown = number(value)
    assert shown == text if value != 1e300 else float(shown) == value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.94, "59.9 s"), (61.4, "1 min 01 s"), (3599.6, "1 h 00 min"), (86400, "24 h 00 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


# --- samples ---


def sample(prompt: str, reward: float | None) -> Sample:
    return Sample(
        [{"role": "user", "content": prompt}], [{"role": "assistant", "content": "x"}], reward, {}, "why"
    )


def chosen(samples: list[Sample]) -> list[tuple[str, float | None]]:
    return [(label, one.reward) for label, one in select(samples)]


def test_ten_of_many_are_the_best_the_median_and_the_worst():
    samples = [sample(str(place), reward) for place, reward in enumerate([*range(101), None, None, None])]
    assert chosen(samples) == [
        *(("best", reward) for reward in (100, 99, 98)),
        *(("median", reward) for reward in (50, 49)),
        *(("worst", reward) for reward in (0, 1, 2)),
        *[("no reward", None)] * 2,
    ]


def test_of_equal_samples_those_of_other_prompts_come_first():
    samples = [sample(prompt, 1.0) for prompt in "abcde" for _ in range(8)]
    prompts = [one.prompt[0]["content"] for _, one in select(samples)]
    assert prompts[:4] == list("abcd")
    assert all(prompts.count(one) == 2 for one in "abcde")


@pytest.mark.parametrize(
    ("rewards", "labels"),
    [
        ([], []),
        ([1.0], ["sample"]),
        ([0.0, 1.0], ["best", "worst"]),
        ([0.0, 1.0, 0.4], ["best", "median", "worst"]),
        ([None, 1.0], ["sample", "no reward"]),
        ([math.nan, 0.0, 1.0], ["best", "worst", "no reward"]),
        ([None] * 12, ["no reward"] * 10),
        ([None] * 12 + [1.0] * 4, ["sample"] * 4 + ["no reward"] * 6),
        ([1.0] * 12, ["sample"] * 10),
    ],
)
def test_few_samples_are_all_shown_once(rewards, labels):
    found = select([sample(str(place), reward) for place, reward in enumerate(rewards)])
    assert [label for label, _ in found] == labels
    assert len({one.prompt[0]["content"] for _, one in found}) == len(found) == min(10, len(rewards))


def test_a_sample_shows_prompt_thinking_calls_answers_and_scores():
    sample = snapshots.conversation(3)
    thought = {**sample.completion[0], "reasoning_content": "A tool knows."}
    text = described("best", 1, replace(sample, completion=[thought, *sample.completion[1:]]))
    assert text.startswith("### 1. Best: reward 1\n\nScores: `correct` 1.\n")
    order = ["**prompt · user**", "**assistant** · thinking", "**assistant** · calls `calculate`", "**tool**"]
    assert sorted(order, key=text.index) == order
    assert blocks(text) == [
        "What is 3 times 17?",
        "A tool knows.",
        '{"expression": "3 * 17"}',
        "51",
        "The answer is 51.",
    ]


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        ({"name": "f", "arguments": '{"a": 1}'}, "`f`", '{"a": 1}'),
        ({"name": "f", "arguments": {"a": "ü"}}, "`f`", '{"a": "ü"}'),
        ({"type": "function", "function": {"name": "f", "arguments": "{broken"}}, "`f`", "{broken"),
        ('{"name": "f"}', "", '{"name": "f"}'),
    ],
)
def test_tool_calls_of_every_form(call, name, arguments):
    completion = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    text = described("best", 1, Sample([], completion, 1.0, {}))
    assert f"**assistant** · calls {name}\n" in text
    assert blocks(text) == [arguments]


def test_a_sample_without_a_reward_says_why_and_one_without_text_that_there_is_none():
    text = page(snapshots.snapshot("rl", samples=[sample("p", None)]))
    assert "### 1. No reward\n\nCould not be scored: `why`.\n" in text
    text = described("worst", 1, Sample([], [{"role": "assistant", "content": ""}], 0.0, {}))
    assert "**assistant** · empty" in text
    assert "Nothing was generated." in described("worst", 1, Sample([], [], 0.0, {}))


def test_content_may_come_in_parts():
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    assert blocks(described("best", 1, Sample([{"role": "user", "content": parts}], [], 1.0, {}))) == [
        "look\n[image_url]"
    ]


def test_long_texts_and_long_conversations_are_cut_with_a_mark():
    lines = [f"line {place}" for place in range(100)]
    assert shown("\n".join(lines)).split("\n") == [*lines[:16], "[… 76 lines left out …]", *lines[-8:]]
    assert shown("\n".join(lines[:24])) == "\n".join(lines[:24])
    assert len(shown("x" * 100_000)) < 2500
    turns = [{"role": "user", "content": f"<{turn}>"} for turn in range(100)]
    text = described("best", 1, Sample(turns, [], 1.0, {}))
    assert blocks(text) == [f"<{turn}>" for turn in (*range(6), *range(94, 100))]
    assert "88 messages left out" in text


@pytest.mark.parametrize("line", ["", " ", "word " * 100, "x" * 350, "a  b\t" * 60, "漢字" * 120])
def test_long_lines_are_wrapped_without_loss(line):
    parts = wrapped(line)
    assert "".join(parts) == line
    assert all(len(part) <= 100 for part in parts)


def test_summary():
    samples = [sample("a", 0.0), sample("b", 1.0), sample("c", 0.5), sample("d", None)]
    assert summary(samples) == ("4 samples; rewards: min 0, median 0.5, mean 0.5, max 1; 1 without a reward.")


# --- texts that try to break the page ---

NASTY = [
    "```\n# not a heading\n```",
    "``````` and ~~~~",
    "<script>alert(1)</script></details>",
    "| a | b |\n|---|---|",
    "line\r\nwith return",
    "    ````",
    "![x](http://evil)",
]


@pytest.mark.parametrize("text", NASTY)
def test_a_fence_shows_any_text_as_it_is(text):
    found = rendered(f"before\n\n{fence(text)}\n\nafter")
    assert [one.type for one in found if one.level == 0] == [
        *("paragraph_open", "paragraph_close", "fence", "paragraph_open", "paragraph_close")
    ]
    assert blocks(fence(text)) == [text.replace("\r\n", "\n")]


@pytest.mark.parametrize("text", [*NASTY, "`", "a|b", "a\\|b", "trailing\\", "``", "*x* _y_ $z$"])
def test_code_in_a_table_shows_any_text_on_one_line(text):
    rows = cells("\n## T\n" + table(("A", "B"), [(code(text), "kept")]), "T")
    assert [one.replace("\u200b", "") for one in rows[1]] == [" ".join(text.split()), "kept"]


def test_a_bar_in_a_table_has_one_backslash():
    # Some renderers take two for an escaped backslash, and then end the cell.
    assert table(("A",), [("a|b",), ("a\\|b",)]).split("\n")[2:] == ["| a\\|b |", "| a\\\u200b\\|b |"]


def test_nasty_samples_leave_the_page_whole():
    samples = [
        Sample(
            [{"role": "user", "content": text}],
            [{"role": "assistant", "content": text, "reasoning_content": text}],
            1.0,
            {text: 1.0},
            text,
        )
        for text in NASTY
    ]
    text = page(snapshots.snapshot("rl", samples=samples))
    assert text.count("\n### ") == len(NASTY)
    assert sorted(blocks(text)) == sorted(3 * [one.replace("\r\n", "\n") for one in NASTY])


def test_a_lone_surrogate_does_not_stop_a_report():
    found = report.files(snapshots.snapshot("rl", samples=[sample("\ud800", 1.0)]), unchanged)
    assert b"### 1. Sample" in found["report.md"]


def test_no_secret_leaves_in_a_report():
    secret = 'pa|ss"w\\o`rd' + "hf_" + "A1" * 12
    reason = f"ValueError: {secret}"
    call = {"name": "f", "arguments": json.dumps({"token": secret})}
    long = "x" * 95 + secret + "y" * 3000  # the end of a line goes through the secret
    snapshot = snapshots.snapshot(
        "rl",
        lines=[{"step": 1, "eval_skipped": True, "eval_reason": reason}],
        samples=[
            Sample([{"role": "user", "content": long}], [], None, {}, reason),
            Sample([], [{"role": "assistant", "tool_calls": [call]}], 1.0, {}),
        ],
        settings=[("X", secret, "environment")],
        phases=[(secret, 1.0)],
        samples_from=secret,
    )
    found = report.files(snapshot, redactor([secret]))
    everything = b"".join(found.values()).decode()
    assert "hf_" not in everything
    assert "pa|ss" not in everything
    assert "pa\\|ss" not in everything
    assert "ValueError: ***" in everything


# --- curves ---


def titles(lines: list[dict], mode: str = "rl") -> dict[str, list[str]]:
    return {one.title: [curve.name for curve in one.curves] for one in curves.panels(lines, mode)}


def test_a_panel_only_where_there_is_data():
    assert titles([]) == {}
    assert titles([{"step": 1, "reward": math.nan, "kl": None, "epoch": 0.1}]) == {}
    assert titles([{"step": 1, "reward": 0.5}, {"step": 2, "reward": math.nan}]) == {
        "Mean reward": ["reward"]
    }
    assert titles([{"reward": 0.5}]) == {}


def test_what_is_drawn_of_each_kind_of_run():
    assert [*titles([*snapshots.sft().lines], "sft")] == [
        *("Loss", "Token accuracy", "Entropy, nats per token", "Gradient norm", "Learning rate"),
        *("Tokens per second", "Memory, GB"),
    ]
    found = titles([*snapshots.rl(turns=True).lines])
    assert [*found] == [
        *("Mean reward", "Evaluation", "Named rewards", "KL to the reference", "Completion length, tokens"),
        *("Truncated share", "Share of groups without a signal", "Turns and tool calls per conversation"),
        *("Entropy, nats per token", "Gradient norm", "Tokens per second", "Memory, GB"),
    ]
    assert found["Evaluation"] == ["mean reward", "pass rate"]
    assert found["Named rewards"] == ["_format", "correct", "length_$\\penalty$"]


def test_conversations_have_their_own_measure_of_truncation():
    line = {"step": 1, "completions/clipped_ratio": 0.9, "rollout/truncated": 0.1}
    assert [one.curves[0].values for one in curves.panels([line], "rl")] == [(0.1,)]
    del line["rollout/truncated"]
    assert [one.curves[0].values for one in curves.panels([line], "rl")] == [(0.9,)]


def test_a_curve_is_broken_where_there_is_no_number():
    lines = [{"step": 1, "kl": 1.0}, {"step": 2, "kl": None}, {"step": 3}, {"step": 4, "kl": 2.0}]
    found = curves.curve(lines, "kl", "KL")
    assert found is not None
    assert found.steps == (1, 2, 4)
    assert (found.values[0], math.isnan(found.values[1]), found.values[2]) == (1.0, True, 2.0)


def test_smoothing():
    assert curves.smoothed([3.0] * 100) == [3.0] * 100
    steep = [float(place) for place in range(100)]
    assert curves.smoothed(steep)[:90] == pytest.approx(steep[:90])
    assert curves.smoothed([1.0, math.nan, 3.0]) == pytest.approx([1.0, 2.0, 2.0])
    assert all(map(math.isnan, curves.smoothed([math.nan] * 3)))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Pictures of three runs, drawn as the worker draws them: not on the main thread."""
    runs = {
        "sft": snapshots.sft(),
        "tools": snapshots.rl(turns=True),
        "first": snapshots.first_step(),
    }
    drawn: dict[str, bytes] = {}

    def draw() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for name, run in runs.items():
                drawn[name] = report.files(run, unchanged)["report/curves.png"]

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "tools", "first"])
def test_the_picture_is_small_and_as_wide_as_the_page(pictures, name):
    png = pictures[name]
    width, height = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG")
    assert width == 1170
    assert 900 < height < 2000
    assert len(png) < 200_000
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize(("name", "curves_of_a_panel"), [("tools", 3), ("first", 3), ("sft", 1)])
def test_every_curve_is_in_the_picture_in_its_colour(pictures, name, curves_of_a_panel):
    from PIL import Image

    counts = Image.open(io.BytesIO(pictures[name])).convert("RGB").getcolors()
    pixels = [
        sum(count for count, colour in counts if math.dist(colour, wanted) < 50)
        for wanted in [(31, 119, 180), (255, 127, 14), (44, 160, 44)]
    ]
    assert [count > 20 for count in pixels] == [place < curves_of_a_panel for place in range(3)]
