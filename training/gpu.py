"""Whether the device can be used, and what it was when something failed."""

import logging
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

from accounting import in_brief
from recipe import CardNeed

log = logging.getLogger(__name__)

TRIES, PAUSE_S, DEAD_DRIVER_TRIES = 12, 10.0, 3
DEAD_DRIVER_WORDS = (
    "driver/library version mismatch",
    "no nvidia driver",
    "driver version is insufficient",
    "libcuda",
)


# Major version of CUDA: the first major version of the Linux driver that runs it.
NEEDED_DRIVER = {"12": 525, "13": 580}


class GpuNotReady(RuntimeError):
    """No usable GPU on this machine: another machine may have one."""


def wait_for_gpu(
    device: str, sleep: Callable[[float], None] = time.sleep, *, need: CardNeed | None = None
) -> None:
    """Return once a real kernel has run on a card that is large enough; raises GpuNotReady. Not for a CPU."""
    if device == "cpu":
        return
    reason = ""
    for attempt in range(1, TRIES + 1):
        reason = _why_not()
        if not reason and need is not None:
            check_memory(need)
        if not reason:
            return
        log.warning("GPU not ready, try %d of %d: %s", attempt, TRIES, reason)
        check_driver()
        dead = any(word in reason.lower() for word in DEAD_DRIVER_WORDS)
        if dead and attempt >= DEAD_DRIVER_TRIES:
            break
        if attempt < TRIES:
            sleep(PAUSE_S)
    raise GpuNotReady(f"GPU never became ready: {reason} (AUTOSLM_DEVICE=cuda; use cpu to run without one)")


def check_memory(need: CardNeed) -> None:
    """Refuse a card on which the job cannot work."""
    import torch

    card = torch.cuda.get_device_properties(0)
    reason = need.refusal(card.name, card.total_memory)
    if reason is not None:
        raise GpuNotReady(f"GPU never became ready: {reason}")


def check_driver() -> None:
    """Refuse a driver that no wait makes new enough for torch's CUDA; silent where nobody names it.

    Only asked when the card does not work: data-centre cards can run newer CUDA on an older driver.
    """
    import torch

    cuda = torch.version.cuda or ""
    needed, found = NEEDED_DRIVER.get(cuda.partition(".")[0]), _ask_nvidia_smi("driver_version")
    major = found.partition(".")[0]
    if needed and major.isdigit() and int(major) < needed:
        raise GpuNotReady(
            f"GPU never became ready: the NVIDIA driver is {found.split()[0]}, torch {torch.__version__} with"
            f" CUDA {cuda} needs {needed} or newer; rent a machine with a newer driver"
        )


def card_bytes(device: str) -> int | None:
    """Memory of the first card, known without a driver context; None when there is no card to ask."""
    if device == "cpu":
        return None
    mebibytes = _ask_nvidia_smi("memory.total").partition(" ")[0]
    return int(mebibytes) << 20 if mebibytes.isdecimal() else None


def _why_not() -> str:
    import torch

    try:
        if not torch.cuda.is_available():
            return "cuda not available"
        (torch.ones(8, device="cuda") * 2).sum().item()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return in_brief(error, 160)
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU ran out of memory, by torch's own type or vLLM's words; host memory does not count."""
    torch = sys.modules.get("torch")
    text = "".join(traceback.format_exception_only(error))
    return (
        (torch is not None and isinstance(error, torch.OutOfMemoryError))
        or "No available memory for the cache blocks" in text
        or ("Free memory on device" in text and "less than desired" in text)
    )


def diagnostics() -> str:
    """Versions, device and driver in one short text; every part is guarded, it never raises."""
    return "; ".join(filter(None, (_torch_facts(), _nvidia_smi())))


def _torch_facts() -> str:
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch not imported"
    try:
        facts = f"torch {torch.__version__}, cuda {torch.version.cuda}, available {torch.cuda.is_available()}"
        if torch.cuda.is_available():
            facts += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    except (RuntimeError, AttributeError) as error:
        return in_brief(f"torch failed: {error}", 160)
    return facts


def _nvidia_smi() -> str:
    return _ask_nvidia_smi("driver_version,name,memory.used,memory.total")


def _ask_nvidia_smi(fields: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return in_brief(f"nvidia-smi failed: {error}", 160)
    return in_brief(answer.stdout or answer.stderr, 200)
