"""Every fault of the Hub, the disk and the clock, in both modes, before, during and after training."""

from __future__ import annotations

import faulthandler
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import grpo_trials, harness
from tests.chaos.chain import REPO, REQUIRED, TOKEN, steps
from tests.harness import Finished, strict
from tests.hub_server import Fault, HubServer

STEPS = {"sft": 20, "rl": 6}
HUNG_S = 240.0
DISK = "size=8m"


@dataclass(frozen=True)
class Stage:
    """Where a cell's fault strikes, and the machine it runs on."""

    hub: HubServer
    patch: pytest.MonkeyPatch
    work: Path


@dataclass(frozen=True)
class Trouble:
    """A fault, and how runs may end that it strikes (before, during, after training).

    "done", "retriable" and "final" are ways to end; a list of words, split at "/", allows several.
    """

    name: str
    strike: Callable[[Stage], None]
    before: str
    during: str
    after: str
    more: Mapping[str, object] = field(default_factory=dict)
    store_answers: bool = False  # so that the failure can be read there
    own_disk: bool = False

    def may_end(self, phase: str) -> list[str]:
        return str(getattr(self, phase)).split("/")


def commits(**how: Any) -> Callable[[Stage], None]:
    return requests("POST .*/commit/", **how)


def requests(match: str, **how: Any) -> Callable[[Stage], None]:
    return lambda stage: stage.hub.faults.append(Fault(match, **how))


def expire(stage: Stage) -> None:
    stage.hub.tokens.clear()


def delete(stage: Stage) -> None:
    stage.hub.delete_repo(REPO)


def lock(stage: Stage) -> None:
    stage.hub.read_only = True


def close(stage: Stage) -> None:
    stage.hub.__exit__()


def lose_name(stage: Stage) -> None:
    """The resolver is gone; connections that are open are, too."""
    ask = socket.getaddrinfo

    def refuse(host: Any, *args: Any, **more: Any) -> Any:
        if host == "localhost":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return ask(host, *args, **more)

    stage.patch.setattr(socket, "getaddrinfo", refuse)
    stage.hub._http.hang_up()


def fill_disk(stage: Stage) -> None:
    """Not a byte is left on the disk of the work directory."""
    with pytest.raises(OSError, match="No space left"), (stage.work / "filler").open("wb", 0) as filler:
        while True:
            filler.write(bytes(4096))


def jump(seconds: float) -> Callable[[Stage], None]:
    def strike(stage: Stage) -> None:
        now = time.time
        stage.patch.setattr(time, "time", lambda: now() + seconds)

    return strike


DOWN = ("retriable",) * 3
FINAL = ("final",) * 3
FINE = ("done",) * 3
PATIENT = {"AUTOSLM_UPLOAD_DEADLINE_S": 60}
TROUBLES = [
    Trouble("slow Hub, 3 s a commit", commits(latency_s=3.0), *FINE, PATIENT),
    Trouble("hanging commits", commits(hang=True), *DOWN),
    Trouble("hanging Hub", requests("", hang=True), *DOWN),
    Trouble("dropped connections", requests("", drop=True), *DOWN),
    Trouble("every 2nd commit dropped", requests("/commit/", drop=True, times=2, after=1), *FINE, PATIENT),
    Trouble("lost answers", commits(drop_after=True), *FINE, PATIENT),
    Trouble("500", requests("", status=500), *DOWN),
    Trouble("503 to commits", commits(status=503), *DOWN),
    Trouble("503 three times", commits(status=503, times=3), *FINE, PATIENT),
    Trouble("502 with a page", commits(status=502, body="<html>" * 1000), *DOWN),
    Trouble("429, Retry-After 1, three times", commits(status=429, retry_after=1, times=3), *FINE, PATIENT),
    Trouble("429 for ever", commits(status=429, retry_after=1), *DOWN),
    Trouble("429, Retry-After an hour", commits(status=429, retry_after=3600), *DOWN),
    Trouble("no large files", requests("PUT .*lfs", status=500), *DOWN, store_answers=True),
    Trouble("expired token", expire, *FINAL),
    # One that is missing at the start is made.
    Trouble("deleted repository", delete, "done", "final", "final"),
    Trouble("read-only repository", lock, *FINAL),
    Trouble("refused connections", close, *DOWN),
    Trouble("no name resolution", lose_name, *DOWN),
    Trouble("full disk", fill_disk, *("final/retriable",) * 3, store_answers=True, own_disk=True),
    Trouble("clock a day ahead", jump(86400.0), *FINE),
    Trouble("clock a day back", jump(-86400.0), *FINE),
]
BY_NAME = {one.name: one for one in TROUBLES}
PHASES = ("before", "during", "after")
SOME = [
    ("refused connections", "sft", "after"),
    ("429, Retry-After 1, three times", "sft", "during"),
    ("read-only repository", "rl", "before"),
    ("no large files", "sft", "during"),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Patience of seconds instead of minutes; what a fault patches is undone when the test ends."""
    from huggingface_hub.utils import _http

    from delivery import hub_client, patience
    from delivery.publisher import Publisher

    monkeypatch.setattr(patience, "PAUSE_S", 0.2)
    monkeypatch.setattr(hub_client, "REQUEST_TIMEOUT_S", 5.0)
    monkeypatch.setattr(patience, "COMMIT_LIMIT_S", 5.0)
    monkeypatch.setattr(Publisher.flush, "__defaults__", (4.0,))
    _http.close_session()  # built anew with these limits
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    with pytest.MonkeyPatch.context() as struck:
        yield struck
    faulthandler.cancel_dump_traceback_later()
    _http.close_session()


def variables(mode: str, folder: Path, model: Path, hub: HubServer, more: Mapping[str, object]) -> Any:
    hurry = {"AUTOSLM_UPLOAD_DEADLINE_S": 6, "AUTOSLM_HEARTBEAT_MIN_S": 0}
    ours: dict[str, Any] = {"HF_REPO": REPO, "HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, **hurry, **more}
    train = {"lora_rank": 8, "save_every": 5 if mode == "sft" else 2}
    if mode == "sft":
        ours |= {"SFT_MAX_STEPS": STEPS[mode], "SFT_PER_DEVICE_BS": 2}
        return harness.variables(folder, model, "toy-words", {"train": train}, **ours)
    return grpo_trials.variables(folder, model, train={**train, "steps": STEPS[mode]}, **ours, RL_USE_VLLM=0)


def strike_at(beat: Callable[[Mapping[str, Any]], bool], folder: Path, strike: Callable[[], None]) -> None:
    """Strike, from a thread, once the local heartbeat is this beat; waits for no more than a run's time."""

    def watch() -> None:
        deadline = time.monotonic() + HUNG_S
        while time.monotonic() < deadline:
            try:
                newest = strict((folder / "work/hb/heartbeat.json").read_bytes())
            except (OSError, ValueError):
                newest = {"stage": ""}
            if beat(newest):
                return strike()
            time.sleep(0.003)

    threading.Thread(target=watch, daemon=True).start()


def struck_when(phase: str, mode: str) -> Callable[[Mapping[str, Any]], bool]:
    least = 1 if phase == "during" else STEPS[mode]
    return lambda beat: beat.get("step") is not None and beat["step"] >= least


def outcome(ended: Finished, mode: str) -> str:
    if ended.error is None:
        return "done"
    errors = [beat for beat in ended.beats if beat["stage"] == f"error_{mode}"]
    assert len(errors) == 1, ended.stages
    return "retriable" if errors[0]["retriable"] else "final"


def run_cell(
    trouble: Trouble, mode: str, phase: str, model: Path, folder: Path, hub: HubServer, patch: Any
) -> str:
    """Run one cell of the matrix and check all that must hold; returns its line of the table."""
    hub.url = hub.url.replace("127.0.0.1", "localhost")  # a name, which can be lost
    stage = Stage(hub, patch, folder / "work")
    stage.work.mkdir()
    if not trouble.own_disk:
        return check_cell(trouble, mode, phase, model, folder, stage)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", stage.work], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode()[:200]}")
    try:
        return check_cell(trouble, mode, phase, model, folder, stage)
    finally:
        subprocess.run(["umount", "-l", stage.work], check=True)


def check_cell(trouble: Trouble, mode: str, phase: str, model: Path, folder: Path, stage: Stage) -> str:
    env, hub, began = variables(mode, folder, model, stage.hub, trouble.more), stage.hub, time.monotonic()
    if phase == "before":
        trouble.strike(stage)
    else:
        strike_at(struck_when(phase, mode), folder, lambda: trouble.strike(stage))
    ended = harness.run_main(env)
    seconds = time.monotonic() - began
    stage.patch.undo()
    came = outcome(ended, mode)
    line = f"{trouble.name:34} {mode:4} {phase:7} {came:10} {seconds:5.1f} s  {ended.error or ''!s:.90}"
    assert came in trouble.may_end(phase), f"{line}\n{ended.out[-2000:]}"
    check_local(stage.work, ended, came, None if trouble.own_disk else mode)
    check_store(hub, f"{mode}/r1/seed0", mode, came, trouble.store_answers)
    return line


def check_local(work: Path, ended: Finished, came: str, mode: str | None) -> None:
    """`mode` is None where no error file can be expected."""
    assert (work / "metrics.json").exists() == (came == "done")
    if came == "done":
        assert strict((work / "metrics.json").read_bytes())["wall_seconds"] > 0
        assert ended.stages[-1] == "done"
        return
    if mode is None:
        return
    assert f"{type(ended.error).__name__}" in (work / f"error_{mode}.txt").read_text()
    newest = strict((work / "hb/heartbeat.json").read_bytes())
    assert newest["stage"] == f"error_{mode}" and newest["error"]


def check_store(hub: HubServer, prefix: str, mode: str, came: str, answers: bool) -> None:
    repositories = [repo for (_, name), repo in hub.repos.items() if name == REPO]
    for commit in [commit for repo in repositories for commit in repo.commits]:
        assert len(steps(prefix, commit.files)) <= 3
        if f"{prefix}/DONE" in commit.files:
            assert [one for one in REQUIRED if f"{prefix}/{one}" not in commit.files] == []
    if not repositories:
        assert came == "final"
        return
    files = hub.files(REPO)
    assert (f"{prefix}/DONE" in files) == (came == "done")
    if answers and came != "done":
        assert f"{prefix}/error_{mode}.txt" in files
        assert strict(files[f"{prefix}/heartbeat.json"])["stage"] == f"error_{mode}"


@pytest.mark.chaos
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["sft", "rl"])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_fault_matrix(
    name: str,
    mode: str,
    phase: str,
    tiny_model: Path,
    tmp_path: Path,
    hub: HubServer,
    quick: pytest.MonkeyPatch,
    tell: Callable[[object], None],
) -> None:
    tell(run_cell(BY_NAME[name], mode, phase, tiny_model, tmp_path, hub, quick))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "phase"), SOME)
def test_some_faults(
    name: str,
    mode: str,
    phase: str,
    tiny_model: Path,
    tmp_path: Path,
    hub: HubServer,
    quick: pytest.MonkeyPatch,
) -> None:
    run_cell(BY_NAME[name], mode, phase, tiny_model, tmp_path, hub, quick)
