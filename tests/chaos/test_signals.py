"""A machine that is about to be taken away: the worker says so, saves what it can and is gone in time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import grpo_trials, harness
from tests.chaos.chain import REPO, TOKEN, complete_steps
from tests.chaos.process import Worker
from tests.harness import ROOT, strict
from tests.hub_server import Fault, HubServer
from training.preemption import Preemption

GRACE_S, TOLD_WITHIN_S = 12.0, 2.0
EXIT_CODE = 143
SAVE_EVERY = 10

Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, hub: HubServer) -> Any:
    """Return a function that starts a worker: `start(mode, environment, train, NAME=value)`."""
    started: list[Worker] = []

    def begin(mode: str, environment: Any = None, train: Any = None, **more: object) -> Worker:
        folder = tmp_path / f"machine-{len(started)}"
        ours = {"HF_REPO": REPO, "HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, "AUTOSLM_GRACE_S": GRACE_S}
        merged: dict[str, Any] = {**ours, "AUTOSLM_HEARTBEAT_MIN_S": 0, **more}
        given = {"save_every": SAVE_EVERY, **(train or {})}
        if mode == "sft":
            merged = {"SFT_PER_DEVICE_BS": 1, "SFT_MAX_STEPS": 400, **merged}
            env = harness.variables(folder, tiny_model, "toy-words", {"train": given}, **merged)
        else:
            spec = {"environment": environment} if environment else {}
            env = grpo_trials.variables(folder, tiny_model, train=given, **spec, **merged)
        started.append(Worker(env, folder / "home"))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def work_of(worker: Worker) -> Path:
    return worker.folder.parent / "work"


def take_away(worker: Worker, number: signal.Signals = signal.SIGTERM, grace_s: float = GRACE_S) -> float:
    """Send a signal and check how the worker leaves; returns the seconds that it took."""
    file, told_in_file = work_of(worker) / "hb/heartbeat.json", False
    sent = worker.send(number)
    while not told_in_file and time.monotonic() - sent < TOLD_WITHIN_S:
        told_in_file = strict(file.read_bytes())["stage"] == "preempting"
        time.sleep(0.005)
    code = worker.wait(grace_s + 30)
    took_s = time.monotonic() - sent
    told = [beat for beat in worker.beats if beat.stage == "preempting"]
    assert len(told) == 1, f"{worker.stages[-5:]}: {worker.stderr[-3000:]}"
    assert told[0].at - sent < TOLD_WITHIN_S, f"told after {told[0].at - sent:.1f} s"
    assert told_in_file and told[0].payload["reason"] == number.name
    assert code == EXIT_CODE, worker.stderr[-3000:]
    assert took_s < grace_s, took_s
    assert not (work_of(worker) / "metrics.json").exists() and not (work_of(worker) / "DONE").exists()
    return took_s


def not_done(hub: HubServer, mode: str) -> set[int]:
    """The complete checkpoints of a run that is not done."""
    files = hub.files(REPO)
    assert f"{mode}/r1/seed0/DONE" not in files
    return complete_steps(f"{mode}/r1/seed0", files)


@pytest.mark.chaos
@pytest.mark.slow
def test_sft_goes_on_from_the_step_it_was_stopped_at(start: Start, hub: HubServer) -> None:
    first = start("sft")
    assert first.wait_for_stage("checkpoint_uploaded"), first.stderr
    assert first.wait_for_stage("sft_step", first.stages.count("sft_step") + 1)
    take_away(first)
    told = next(beat.payload["step"] for beat in first.beats if beat.stage == "preempting")
    saved = max(not_done(hub, "sft"))
    assert told <= saved <= told + 2
    stored = [strict(one.added["sft/r1/seed0/heartbeat.json"]) for one in hub.commits(REPO)[2:]]
    assert ("preempting", first.attempt) in {(one["stage"], one["attempt"]) for one in stored}
    second = start("sft")
    assert second.wait_for_stage("sft_step"), second.stderr
    second.kill()
    loaded = next(beat for beat in second.beats if beat.stage == "sft_model_load")
    steps = [beat.payload["step"] for beat in second.beats if beat.stage == "sft_step"]
    assert loaded.payload["resumed"] is True
    assert steps[0] == (saved // SAVE_EVERY + 1) * SAVE_EVERY


@pytest.mark.chaos
@pytest.mark.parametrize("vllm", [1, 0])
def test_a_rollout_is_left_between_two_tokens(start: Start, hub: HubServer, vllm: int) -> None:
    train = {"steps": 400, "save_every": 1, "max_tokens": 700}
    worker = start("rl", train=train, RL_USE_VLLM=vllm)
    assert worker.wait_for_stage("checkpoint_uploaded", 2), worker.stderr
    assert worker.wait_for_stage("rl_step", worker.stages.count("rl_step") + 1)
    time.sleep(0.4)
    assert take_away(worker) < GRACE_S
    told = next(beat.payload["step"] for beat in worker.beats if beat.stage == "preempting")
    assert told - 1 <= max(not_done(hub, "rl")) <= told + 1


@pytest.mark.chaos
@pytest.mark.parametrize("vllm", [1, 0])
def test_a_conversation_that_waits_is_left(start: Start, hub: HubServer, vllm: int) -> None:
    environment = {"id": "toy-sleepy", "params": {"seconds": 600.0}}
    worker = start("rl", environment, {"steps": 5, "save_every": 1}, RL_USE_VLLM=vllm)
    assert worker.wait_for(lambda one: "ASLEEP" in one.lines), worker.stderr
    time.sleep(1)
    assert take_away(worker) < GRACE_S - 5 + 2  # found by the main thread, not seen off
    assert not_done(hub, "rl") == set()


@pytest.mark.chaos
@pytest.mark.parametrize(("stage", "seconds"), [("boot", 1.0), ("sft_start", 0.0), ("sft_model_load", 0.0)])
def test_before_training_it_leaves_at_once(start: Start, hub: HubServer, stage: str, seconds: float) -> None:
    worker = start("sft")
    assert worker.wait_for_stage(stage), worker.stderr
    time.sleep(seconds)
    assert take_away(worker) < 6
    assert not_done(hub, "sft") == set()


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_slow_final_uploads_are_cut_off(start: Start, hub: HubServer, number: signal.Signals) -> None:
    worker = start("sft", SFT_MAX_STEPS=20)
    assert worker.wait_for_stage("checkpoint_uploaded"), worker.stderr
    hub.faults.append(Fault("POST .*/commit/", latency_s=6.0))
    assert worker.wait_for(lambda one: one.newest_step == 20)
    time.sleep(2)
    take_away(worker, number)
    time.sleep(8)  # whatever the Hub still works at
    assert max(not_done(hub, "sft")) in (10, 20)
    hub.faults.clear()
    last = start("sft", SFT_MAX_STEPS=20)
    assert last.wait() == 0, last.stderr[-3000:]
    assert last.stages[-1] == "done" and "sft/r1/seed0/DONE" in hub.files(REPO)


@pytest.mark.chaos
def test_a_second_signal_ends_it_at_once(start: Start, hub: HubServer) -> None:
    worker = start("sft")
    assert worker.wait_for_stage("checkpoint_uploaded"), worker.stderr
    hub.faults.append(Fault("POST .*/commit/", latency_s=60.0))
    worker.send(signal.SIGTERM)
    assert worker.wait_for_stage("preempting", patience_s=TOLD_WITHIN_S)
    second = worker.send(signal.SIGTERM)
    assert worker.wait(10) == EXIT_CODE
    assert time.monotonic() - second < 1.5
    assert not (work_of(worker) / "metrics.json").exists()


# --- Preemption alone, in a process that does nothing else ---

ALONE = """
import sys, time
from training import preemption
preemption.SHORTEST_WALL_S = 1.0
began = time.monotonic()
def say(what, *facts):
    print(what, round(time.monotonic() - began, 2), *facts, flush=True)
one = preemption.Preemption(
    GRACE, lambda reason: say("told", reason), lambda left: say("left", left), preemption.Signals()
)
one.watch(WALL_CLOCK)
BODY
"""
POLITE = """
try:
    with one.can_stop():
        say("ready")
        while True:
            time.sleep(0.05); one.check()
except preemption.Preempted as stop:
    say("stopped", stop)
    one.leave(one.left_s())
    sys.exit(143)
"""
BUSY = """
import hashlib
with one.can_stop():
    say("ready")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # one long call of a library
"""
ELSEWHERE = """
say("ready")
time.sleep(60)
"""


CLOCK_MEANWHILE = """
with one.can_stop():
    say("ready")
    time.sleep(2.5)
    try:
        one.check()
    except preemption.Preempted as stop:
        say("stopped", stop)
        sys.exit(143)
"""
FINISHED = """
one.finished()
say("ready")
time.sleep(0.5)
say("over")
"""
FINISHES_MEANWHILE = """
one.leave = lambda left: time.sleep(0.5)
say("ready")
while not one.reason:
    time.sleep(0.01)
one.finished()
time.sleep(1.0)
say("over")
"""
CHILDREN = """
import multiprocessing, subprocess
say("ready")
command = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
forked.start()
time.sleep(0.5)
command.terminate()
forked.terminate()
say("ended", command.wait(10), forked.join(10), forked.exitcode)
say("reason", repr(one.reason))
"""


@pytest.fixture
def alone() -> Iterator[Callable[..., Any]]:
    """Return a function that starts such a process: `alone(body)`."""
    started: list[Any] = []

    def start(*args: Any, **more: Any) -> Any:
        started.append(preempted(*args, **more))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def preempted(body: str, grace_s: float = 7.0, wall_s: float | None = None) -> Any:
    text = ALONE.replace("GRACE", str(grace_s)).replace("WALL_CLOCK", str(wall_s)).replace("BODY", body)
    return subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told(process: Any) -> dict[str, list[str]]:
    """The lines a process says until it ends, by their first word."""
    lines = [line.split() for line in process.communicate(timeout=60)[0].splitlines()]
    return {words[0]: words[1:] for words in lines}


@pytest.mark.slow
def test_children_of_the_worker_can_be_terminated(alone: Callable[..., Any]) -> None:
    said = told(alone(CHILDREN))
    assert said["ended"][1:] == [str(-signal.SIGTERM), "None", str(-signal.SIGTERM)]
    assert said["reason"][1:] == ["''"]  # and their end is not taken for the worker's


@pytest.mark.chaos
@pytest.mark.slow
def test_the_own_wall_clock_asks_in_time(alone: Callable[..., Any]) -> None:
    process = alone(POLITE, grace_s=4.0, wall_s=8.0)
    said = told(process)
    assert process.returncode == EXIT_CODE
    assert said["told"][1:] == ["wall", "clock"]
    assert 3.9 <= float(said["told"][0]) < 5.0  # 8 s less the grace
    assert float(said["stopped"][0]) < 6.0 and "left" in said


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_long_call_is_ended_within_the_grace(alone: Callable[..., Any], number: signal.Signals) -> None:
    process = alone(BUSY, grace_s=7.0)
    assert process.stdout.readline().startswith("ready")
    sent = time.monotonic()
    process.send_signal(number)
    said = told(process)
    assert process.returncode == EXIT_CODE
    assert said["told"][1] == number.name
    assert 1.0 < time.monotonic() - sent < 7.0
    assert 3.0 < float(said["left"][1]) <= 5.0  # what uploads are given


@pytest.mark.chaos
@pytest.mark.slow
def test_outside_training_nobody_waits_for_the_main_thread(alone: Callable[..., Any]) -> None:
    process = alone(ELSEWHERE)
    assert process.stdout.readline().startswith("ready")
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said = told(process)
    assert process.returncode == EXIT_CODE and time.monotonic() - sent < 1.5
    assert float(said["left"][1]) > 5.0


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("hung", ["announce", "leave"])
def test_the_grace_is_kept_whatever_hangs(alone: Callable[..., Any], hung: str) -> None:
    process = alone(f"one.{hung} = lambda _: time.sleep(60)\nsay('ready')\ntime.sleep(60)", grace_s=1.5)
    assert process.stdout.readline().startswith("ready")
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == EXIT_CODE
    assert time.monotonic() - sent < 2.5


@pytest.mark.chaos
@pytest.mark.slow
def test_a_second_signal_waits_for_nothing(alone: Callable[..., Any]) -> None:
    process = alone(BUSY)
    assert process.stdout.readline().startswith("ready")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline().startswith("told")
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert told(process)["left"][1] == "0.0"
    assert process.returncode == EXIT_CODE and time.monotonic() - sent < 1.0


@pytest.mark.chaos
@pytest.mark.slow
def test_the_own_clock_is_no_second_signal(alone: Callable[..., Any]) -> None:
    process = alone(CLOCK_MEANWHILE, grace_s=8.0, wall_s=9.0)
    assert process.stdout.readline().startswith("ready")
    process.send_signal(signal.SIGTERM)
    said = told(process)
    assert said["told"][1] == "SIGTERM" and said["stopped"][-1] == "SIGTERM"
    assert float(said["stopped"][0]) > 2.0  # the clock came at 1 s
    assert process.returncode == EXIT_CODE


@pytest.mark.slow
@pytest.mark.parametrize("body", [FINISHED, FINISHES_MEANWHILE])
def test_a_run_that_finishes_is_not_told_to_have_been_stopped(alone: Callable[..., Any], body: str) -> None:
    process = alone(body)
    assert process.stdout.readline().startswith("ready")
    process.send_signal(signal.SIGTERM)
    said = told(process)
    assert "over" in said and process.returncode == 0
    assert ("told" in said) == (body is FINISHES_MEANWHILE)


@pytest.mark.parametrize("wall_s", [10**400, 10**12, -(10**400)])
def test_a_wall_clock_may_be_any_number(wall_s: int) -> None:
    one = Preemption(25.0, print, print, None)
    one.watch(wall_s)
    clock = one._clock
    assert clock is not None
    clock.join(0.1)
    assert clock.is_alive()  # 35 s from now, or much later
    one.close()


@pytest.mark.parametrize(
    ("grace_s", "wall_s", "seconds"),
    [(25.0, 600, 575.0), (25.0, 0, 35.0), (30.0, 60, 30.0), (60.0, 60, 30.0), (86_400.0, 600, 300.0)],
)
def test_a_long_grace_leaves_time_to_train(grace_s: float, wall_s: int, seconds: float) -> None:
    one = Preemption(grace_s, print, print, None)
    one.watch(wall_s)
    assert one._clock is not None and one._clock.interval == seconds
    one.close()


BREAKS_MEANWHILE = """
import os, signal, sys, time
import worker
from training.preemption import Signals

def resolve(env, identity):
    while not os.path.exists("STORE"):  # boot has landed
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    raise KINDS  # as verifiers does where it has taken the signal, or as a library whose child is gone

worker.rules.resolve = resolve
worker.hard_exit(worker.command([], os.environ))
"""


@pytest.mark.slow
@pytest.mark.parametrize("error", ["SystemExit(143)", "RuntimeError('a child was killed')"])
def test_what_breaks_while_it_is_leaving_is_no_failure(tmp_path: Path, error: str) -> None:
    ours = {"AUTOSLM_WORK_DIR": tmp_path / "work", "AUTOSLM_STORE_DIR": tmp_path / "store"}
    beat = tmp_path / "store/sft/local/seed0/heartbeat.json"
    env = {**os.environ, **{name: str(value) for name, value in ours.items()}}
    command = [sys.executable, "-c", BREAKS_MEANWHILE.replace("KINDS", error).replace("STORE", str(beat))]
    ended = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == EXIT_CODE, ended.stderr
    stages = [strict(line.partition(" ")[2])["stage"] for line in ended.stdout.splitlines()]
    assert stages == ["boot", "preempting"]
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"hb"}
    assert strict(beat.read_bytes())["stage"] == "preempting"


def test_the_image_starts_python_itself() -> None:
    """A shell in between would be the one to get the signal, and would keep it."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line]
    entries = [line for line in lines if re.match(r"(ENTRYPOINT|CMD)\b", line)]
    assert len(entries) == 1
    command = json.loads(entries[0].partition(" ")[2])
    assert command[0] == "python" and command[1:] == ["worker.py"]
    assert not [line for line in lines if line.startswith("STOPSIGNAL") and "SIGTERM" not in line]
