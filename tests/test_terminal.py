"""What a person sees of a run: the bar on a terminal, plain lines elsewhere, the table at the end."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delivery.progress import PHASES, UPLOADING, Progress
from delivery.terminal import NO_BARS, QUIET_LOGGERS, QUIET_VARIABLES, set_up_logging
from job.knobs import early
from job.settings import Settings
from tests import harness

SFT_STORY: list[tuple[float, str, dict[str, Any]]] = [
    (0, "boot", {}),
    (20, "sft_start", {}),
    (25, "model_prefetched", {"model": "m"}),
    (30, "sft_model_load", {"setup_seconds": 10.0}),
    (35, "sft_step", {"step": 10, "steps": 25, "loss": 2.5}),
    (36, "sft_step", {"step": 10, "steps": 25, "loss": 2.5, "liveness": True, "passes": 3}),
    (40, "checkpoint_uploaded", {"step": 20}),
    (40, "sft_step", {"step": 20, "steps": 25, "loss": 0.5}),
    (45, UPLOADING, {}),
    (46, "sft_trained", {"train_wall": 15.0, "step": 25}),
    (46, "sft_train_done", {"train_wall": 15.0, "train_tokens": 3000, "generated_tokens": 0, "step": 25}),
    (47, UPLOADING, {}),
    (48, "done", {"step": 25}),
]


def after(story: list[tuple[float, str, dict[str, Any]]]) -> Progress:
    progress = Progress("sft/r1/seed0", "artifacts/sft/r1/seed0")
    for now, stage, extras in story:
        progress.told(stage, extras, now)
    return progress


def test_a_good_run_in_a_table():
    assert after(SFT_STORY).summary().splitlines() == [
        "  run         sft/r1/seed0, finished",
        "  artifacts   artifacts/sft/r1/seed0",
        "  steps       25 of 25",
        "  loss        2.500 -> 0.500",
        "  seconds     environment 20, weights 10, training 15, upload 3",
        "  speed       200 tokens/s (3,000 trained on in 15 s of training)",
    ]


@pytest.mark.parametrize(
    ("seen", "title"),
    [
        (1, "1/4 environment"),
        (2, "2/4 weights"),
        (3, "2/4 weights"),
        (4, "3/4 training"),
        (5, "3/4 training loss 2.500"),
        (8, "3/4 training loss 0.500"),
        (9, "4/4 upload"),
    ],
)
def test_the_bar_names_the_phase_and_the_newest_figure(seen, title):
    assert after(SFT_STORY[:seen]).title == title


@pytest.mark.parametrize(
    ("stage", "extras", "ending"),
    [
        ("preempting", {"reason": "SIGTERM", "step": 20}, "stopped by SIGTERM, to be resumed"),
        ("error_sft", {"error": "ValueError: no"}, "failed"),
        ("superseded", {"error": "Superseded: a2"}, "stopped, a newer attempt has taken over"),
        ("sft_step", {"step": 22, "steps": 25, "loss": None}, "unfinished"),
    ],
)
def test_every_other_ending_is_told_too(stage, extras, ending):
    progress = after([*SFT_STORY[:8], (50, stage, extras)])
    assert progress.is_worth_telling
    assert progress.summary().splitlines()[0] == f"  run         sft/r1/seed0, {ending}"
    assert "loss        2.500 -> 0.500" in progress.summary()


def test_a_refused_job_has_no_table_and_a_replayed_one_has():
    refused = after([(0, "boot", {}), (1, "error_sft", {"error": "no"})])
    assert not refused.is_worth_telling
    replayed = after([(0, "already_done", {})])
    assert replayed.is_worth_telling and "finished before" in replayed.summary()


def test_rewards_are_smoothed_and_the_newest_evaluation_is_told():
    steps = [(n, "rl_step", {"step": n, "steps": 20, "reward": n / 20}) for n in range(1, 21)]
    evaluation = {"step": 20, "eval_n": 8, "eval_reward": 0.5, "eval_pass_rate": 0.25, "eval_split": "train"}
    progress = after([(0, "rl_train_start", {}), *steps, (21, "rl_eval", evaluation)])
    assert "reward      0.150 -> 0.900 (means of 5 steps)" in progress.summary()
    assert "reward 0.500, pass rate 0.250 at step 20 (8 rows of the train split)" in progress.summary()
    skipped = {"step": 30, "eval_skipped": True, "eval_reason": "no model available"}
    progress.told("rl_eval", skipped, 22)
    assert "evaluation  skipped at step 30: no model available" in progress.summary()


def test_a_reward_that_is_no_number_leaves_the_course_alone():
    progress = after([(0, "rl_train_start", {}), (1, "rl_step", {"step": 1, "steps": 2, "reward": None})])
    assert progress.title == "3/4 training" and "reward" not in progress.summary()


@pytest.mark.parametrize(
    ("text", "level"),
    [("", "info"), (" Debug ", "debug"), ("ERROR", "error"), ("loud", "info"), ("0", "info")],
)
def test_the_log_level_before_settings_are_read(text, level):
    assert early(Settings, "log_level", {"AUTOSLM_LOG_LEVEL": text}) == level


# --- a process with and without a terminal ---


@pytest.mark.parametrize(
    ("level", "given", "expected"),
    [
        ("info", {}, {**QUIET_VARIABLES, **NO_BARS}),
        ("error", {"TQDM_DISABLE": "0"}, {**QUIET_VARIABLES, **NO_BARS, "TQDM_DISABLE": "0"}),
        ("debug", {}, {"VLLM_LOGGING_LEVEL": "INFO", **NO_BARS}),
    ],
)
def test_what_the_libraries_are_told(level, given, expected, plain_logging):
    env = dict(given)
    set_up_logging(level, env, str)
    assert env == expected


def test_a_log_configuration_of_vllms_own_is_left_alone(plain_logging):
    env = {"VLLM_LOGGING_CONFIG_PATH": "mine.json"}
    set_up_logging("info", env, str)
    assert "VLLM_CONFIGURE_LOGGING" not in env


@pytest.fixture
def plain_logging() -> Iterator[None]:
    """Leave the loggers of this process as they were."""
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in QUIET_LOGGERS}
    level, handlers = root.level, root.handlers[:]
    yield
    logging.captureWarnings(False)
    threading.excepthook = threading.__excepthook__
    root.setLevel(level)
    root.handlers[:] = handlers
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)


SECRET = "open-sesame"
PROGRAM = f"""
import json, logging, os, sys, time, warnings
from delivery.progress import Progress
from delivery.terminal import Terminal, say, set_up_logging
set_up_logging(os.environ.get("LEVEL", "info"), os.environ, lambda text: text.replace({SECRET!r}, "***"))
terminal = Terminal(Progress("sft/r1/seed0", "artifacts/sft/r1/seed0"))
for now, stage, extras in json.loads(sys.argv[1]):
    terminal.told(stage, extras)
    if stage != "uploading":
        say("HEARTBEAT " + json.dumps({{"stage": stage, **extras, "long": "x" * 200}}))
    logging.getLogger("worker").info("at %s with %s", stage, {SECRET!r})
    logging.getLogger("vllm.engine").warning("a wall")
    warnings.warn("a wall of {SECRET}", FutureWarning)
    time.sleep(float(os.environ.get("REST", "0")))
from tqdm import tqdm
list(tqdm(range(3), desc="a library's bar"))
terminal.close()
terminal.close()
terminal.told("sft_step", {{"step": 1, "steps": 2, "loss": 1.0}})
say("NODE DONE: {{}}")
"""


def start(env: dict[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    whole = harness.process_environment(Path("/nonexistent"), {"COLUMNS": "", "TERM": "xterm", **env})
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(SFT_STORY)]
    return subprocess.Popen(arguments, env=whole, cwd=harness.ROOT, **streams)


def on_a_terminal(*, stdout: bool, **env: str) -> tuple[str, str]:
    """What the program wrote to a terminal of 80 columns, and what to a pipe, if that is its stdout."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with start(env, stdout=theirs if stdout else subprocess.PIPE, stderr=theirs) as child:
        os.close(theirs)
        ends = {ours: b"", **({} if stdout else {child.stdout.fileno(): b""})}  # type: ignore[union-attr]
        waiting = set(ends)
        while waiting:
            for end in select.select(waiting, [], [], 60)[0]:
                try:
                    data = os.read(end, 65536)
                except OSError:  # a terminal that nobody holds any more
                    data = b""
                ends[end] += data
                if not data:
                    waiting.discard(end)
    os.close(ours)
    assert child.returncode == 0, ends
    texts = [text.decode().replace("\r\n", "\n") for text in ends.values()]
    return texts[0], texts[1] if len(texts) > 1 else ""


def screen(text: str) -> list[str]:
    """The lines that are left on a terminal: `\\r` goes back to where a line begins, and is written over."""
    lines = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return [re.sub(r"\x1b\[A", "", line) for line in lines]


@pytest.mark.slow
def test_without_a_terminal_there_are_plain_lines_and_nothing_of_the_libraries():
    with start({}, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        out, err = (text.decode() for text in child.communicate())
    assert child.returncode == 0, err
    assert [*filter(lambda one: ord(one) < 32 and one != "\n", out + err)] == []
    assert len(out.splitlines()) == len([one for one in SFT_STORY if one[1] != UPLOADING]) + 1
    assert [json.loads(line.removeprefix("HEARTBEAT ")) for line in out.splitlines()[:-1]]
    assert "a wall" not in err and "library's bar" not in err and SECRET not in err
    assert err.count("INFO delivery.terminal: summary:\n  run         sft/r1/seed0, finished\n") == 1


@pytest.mark.slow
def test_at_debug_the_libraries_are_heard_and_redacted():
    with start({"LEVEL": "debug"}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        err = child.communicate()[1].decode()
    assert "WARNING vllm.engine: a wall" in err and "FutureWarning: a wall of ***" in err
    assert SECRET not in err and "\r" not in err


@pytest.mark.slow
def test_what_ends_a_thread_is_logged_without_secrets():
    program = f"""
import os, threading
from delivery.terminal import set_up_logging
set_up_logging("info", os.environ, lambda text: text.replace({SECRET!r}, "***"))
def fail():
    raise ValueError("refused for " + {SECRET!r}) from KeyError({SECRET!r})
threading.Thread(target=fail, name="judge").start()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert "ERROR delivery.terminal: thread judge has ended: ValueError" in ended.stderr
    assert "ValueError: refused for ***" in ended.stderr and SECRET not in ended.stderr.replace(program, "")


@pytest.mark.slow
def test_on_a_terminal_protocol_and_log_lines_are_whole_and_the_bar_is_gone_at_the_end():
    text, _ = on_a_terminal(stdout=True)
    lines = screen(text)
    beats = [line for line in lines if line.startswith("HEARTBEAT ")]
    assert [json.loads(line.removeprefix("HEARTBEAT "))["stage"] for line in beats] == [
        stage for _, stage, _ in SFT_STORY if stage != UPLOADING
    ]
    assert len([line for line in lines if re.fullmatch(r"\d\d:\d\d:\d\d INFO worker: at .*", line)]) == 13
    assert lines[-2:] == ["NODE DONE: {}", ""]
    left = [line for line in lines if re.search(rf"[1-4]/4 ({'|'.join(PHASES)})", line)]
    assert left == []
    assert "a wall" not in text and "library's bar" not in text


@pytest.mark.slow
def test_the_bar_shows_every_phase_in_one_line_of_80_columns():
    text, out = on_a_terminal(stdout=False, REST="0.1")
    drawn = [part.strip() for part in re.split(r"[\r\n]", text)]
    bars = [part for part in drawn if part[1:3] == "/4"]
    assert max(map(len, bars)) <= 80
    for shown in (r"1/4 environment \[", r"2/4 weights \[", r"3/4 training \[", r"4/4 upload \["):
        assert any(re.match(shown, bar) for bar in bars), bars
    assert any(re.match(r"3/4 training loss 0\.500  80% \|.*\| 20/25 \[\d\d:\d\d<", bar) for bar in bars), (
        bars
    )
    assert "\r" not in out and out.endswith("NODE DONE: {}\n")
