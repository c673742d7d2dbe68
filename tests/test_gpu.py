"""Readiness and diagnostics of the device, on a machine that has none."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe import CardNeed
from tests.harness import ROOT
from training import gpu
from training.gpu import GpuNotReady, diagnostics, is_out_of_memory, wait_for_gpu


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


class Card:
    """What the module asks of torch: one answer (None, "off" or an error) a try, the last one for ever."""

    def __init__(self, *answers: Any):
        self.answers, self.kernels = list(answers), 0
        self.cuda = SimpleNamespace(
            is_available=self.is_available,
            synchronize=self.synchronize,
            device_count=lambda: 2,
            get_device_name=lambda index: "NVIDIA H200",
        )
        self.version, self.__version__ = SimpleNamespace(cuda="13.0"), "2.13.0"
        self.OutOfMemoryError = OutOfMemoryError

    def is_available(self) -> bool:
        return self.answers[0] != "off"

    def ones(self, size: int, device: str) -> "Card":
        assert device == "cuda"
        return self

    def __mul__(self, factor: int) -> "Card":
        return self

    def sum(self) -> "Card":
        return self

    def item(self) -> float:
        self.kernels += 1
        return 16.0

    def synchronize(self) -> None:
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes `torch` a card with the given answers."""

    def plug(*answers: Any) -> Card:
        card = Card(*answers)
        monkeypatch.setitem(sys.modules, "torch", card)
        return card

    return plug


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a program of this name, with this body, first in the path."""

    def install(body: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def waited(card: Card) -> list[float]:
    """The pauses of a wait; each moves the card on to its next answer."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(card.answers) > 1:
            card.answers.pop(0)

    try:
        wait_for_gpu("cuda", sleep)
    finally:
        card.naps = naps  # type: ignore[attr-defined]
    return naps


def test_a_cpu_is_not_waited_for(plug_in):
    plug_in("off")
    wait_for_gpu("cpu", sleep=lambda seconds: pytest.fail("slept"))


def test_a_working_card_runs_a_kernel_and_nothing_else(plug_in):
    card = plug_in(None)
    assert waited(card) == [] and card.kernels == 1


def test_a_card_that_comes_up_late(plug_in, caplog):
    card = plug_in("off", RuntimeError("CUDA error:\n  busy"), None)
    assert waited(card) == [10.0, 10.0] and card.kernels == 2
    assert [record.getMessage() for record in caplog.records] == [
        "GPU not ready, try 1 of 12: cuda not available",
        "GPU not ready, try 2 of 12: CUDA error: busy",
    ]


@pytest.mark.parametrize(
    ("answer", "tries", "reason"),
    [
        ("off", 12, "cuda not available"),
        (
            RuntimeError("CUDA error: unspecified launch failure"),
            12,
            "CUDA error: unspecified launch failure",
        ),
        (RuntimeError("Found no NVIDIA driver on your system"), 3, "Found no NVIDIA driver"),
        (
            RuntimeError("The NVIDIA driver version is insufficient for CUDA"),
            3,
            "driver version is insufficient",
        ),
        (RuntimeError("Failed: Driver/library version mismatch"), 3, "Driver/library version mismatch"),
        (RuntimeError("libcuda.so.1: cannot open shared object file"), 3, "libcuda.so.1"),
        (RuntimeError("x " * 1000), 12, "x " * 78 + "x..."),
    ],
)
def test_a_card_that_never_works(plug_in, answer, tries, reason):
    card = plug_in(answer)
    with pytest.raises(GpuNotReady) as caught:
        waited(card)
    assert str(caught.value).startswith("GPU never became ready: ") and reason in str(caught.value)
    assert card.naps == [10.0] * (tries - 1)


def test_a_driver_that_recovers_in_time(plug_in):
    dead = RuntimeError("Found no NVIDIA driver on your system")
    card = plug_in(dead, dead, None)
    assert waited(card) == [10.0, 10.0]


# --- the driver ---


@pytest.mark.parametrize("answer", ["off", RuntimeError("The NVIDIA driver on your system is too old")])
def test_a_driver_that_is_too_old_is_told_at_once(plug_in, nvidia_smi, answer):
    card = plug_in(answer)
    nvidia_smi('printf "570.86.15\\n570.86.15\\n"')
    with pytest.raises(GpuNotReady) as caught:
        waited(card)
    assert str(caught.value) == (
        "GPU never became ready: the NVIDIA driver is 570.86.15, torch 2.13.0 with CUDA 13.0 needs 580 or"
        " newer; rent a machine with a newer driver"
    )
    assert card.naps == []


def test_an_old_driver_with_a_card_that_works_all_the_same_is_let_through(plug_in, nvidia_smi):
    nvidia_smi('echo "570.86.15"')
    assert waited(plug_in(None)) == []


@pytest.mark.parametrize(
    "said", ["580.65.06", "595.10", "NVIDIA-SMI has failed because it could not communicate", ""]
)
def test_a_driver_that_may_do_is_waited_for(plug_in, nvidia_smi, said):
    nvidia_smi(f'echo "{said}"')
    assert waited(plug_in("off", "off", None)) == [10.0, 10.0]


def test_skypilots_setup_tells_a_driver_that_is_too_old(plug_in, nvidia_smi):
    import yaml

    setup = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text(encoding="utf-8"))["setup"]
    (code,) = re.findall(r"/opt/venv/bin/python -c '(.+)' 2>&1 \| tail -n 1$", setup, re.MULTILINE)
    assert setup.startswith("set -o pipefail")  # or the line would hide the failure
    plug_in("off")
    nvidia_smi('echo "570.86.15"')
    with pytest.raises(GpuNotReady, match=r"^GPU never became ready: the NVIDIA driver is 570"):
        exec(code)


# --- out of memory ---

FULL = (
    ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ValueError("Free memory on device (3.1/24.0 GiB) on startup is less than desired GPU memory utilization"),
)


@pytest.mark.parametrize("error", FULL, ids=["no cache blocks", "less than desired"])
@pytest.mark.parametrize("torch_is_there", [True, False])
def test_vllms_words_are_out_of_memory(plug_in, monkeypatch, error, torch_is_there):
    plug_in(None) if torch_is_there else monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert is_out_of_memory(error)


def test_torchs_own_type_is_out_of_memory(plug_in):
    plug_in(None)
    assert is_out_of_memory(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("DataLoader worker is killed by signal: Killed."),
        ValueError("Free memory on device is what you make of it"),
    ],
)
def test_host_memory_is_not(plug_in, error):
    plug_in(None)
    assert is_out_of_memory(error) is False


def test_without_torch_nothing_is_torchs(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert is_out_of_memory(OutOfMemoryError("CUDA out of memory")) is False


# --- diagnostics ---


def test_diagnostics_name_versions_device_and_driver(plug_in, nvidia_smi):
    plug_in(None)
    nvidia_smi('echo "580.65.06, NVIDIA H200, 10 MiB, 143771 MiB"')
    assert diagnostics() == (
        "torch 2.13.0, cuda 13.0, available True, 2 x NVIDIA H200; 580.65.06, NVIDIA H200, 10 MiB, 143771 MiB"
    )


def test_diagnostics_import_nothing(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert diagnostics() == "torch not imported; no nvidia-smi"
    assert "torch" not in sys.modules


def test_no_part_of_the_diagnostics_can_fail(plug_in, nvidia_smi, tmp_path):
    card = plug_in("off")
    assert diagnostics().startswith("torch 2.13.0, cuda 13.0, available False")
    card.cuda.is_available = lambda: (_ for _ in ()).throw(RuntimeError("x " * 1000))
    nvidia_smi(f"echo '{'driver ' * 100}' >&2; exit 9")
    torch_facts, driver = diagnostics().split("; ")
    assert torch_facts == f"torch failed: {'x ' * 71}x..."
    assert driver == "driver " * 27 + "driver..."
    (tmp_path / "nvidia-smi").write_text("no program")
    assert len(gpu._nvidia_smi()) <= 160


@pytest.mark.parametrize(("needed_gib", "fits"), [(0, True), (23.5, True), (32, False)])
def test_a_card_that_is_too_small_for_the_job_is_refused(plug_in, needed_gib, fits):
    need = CardNeed(int(needed_gib * 2**30), "acme/b in bf16", ("AUTOSLM_QUANT=4bit-qlora", "RL_USE_VLLM=0"))
    card = SimpleNamespace(name="NVIDIA L4", total_memory=int(23.6 * 2**30))
    plug_in(None).cuda.get_device_properties = lambda index: card
    if fits:
        wait_for_gpu("cuda", need=need)
        return
    with pytest.raises(GpuNotReady) as caught:
        wait_for_gpu("cuda", need=need)
    assert str(caught.value) == (
        "GPU never became ready: NVIDIA L4 has 23.6 GiB of memory, acme/b in bf16 needs 32.0 GiB;"
        " rent a larger card, or set AUTOSLM_QUANT=4bit-qlora, or set RL_USE_VLLM=0"
    )
    wait_for_gpu("cpu", need=need)


@pytest.mark.parametrize(
    ("body", "expected"),
    [("echo 24564; echo 24564", 24564 << 20), ("echo '[N/A]'", None), ("exit 9", None)],
)
def test_the_memory_of_the_first_card(nvidia_smi, body, expected):
    nvidia_smi(body)
    assert gpu.card_bytes("cuda") == expected
    assert gpu.card_bytes("cpu") is None
