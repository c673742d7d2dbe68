"""A start whose weights come meanwhile, against its parts one after the other: `bench/startup.py [ROUNDS]`.

The Hub is throttled so that the model's weights take 20 s. The parts are the download alone, by the Hub's
client, and the worker with all of it in the cache, from process start to the end of the first optimizer step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parent.parent
DOWNLOAD_S, ROUNDS = 20.0, 1
TARGET_RATIO = 0.75
DOWNLOAD = "from huggingface_hub import snapshot_download; snapshot_download('acme/tiny')"


def main() -> None:
    """Measure the parts and the whole in turn, after a warm-up, and print seconds and their ratio."""
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "demo")]
    import tiny_model

    from tests.hub_server import HubServer

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    seconds: dict[str, list[float]] = {"download": [], "cached": [], "overlapped": []}
    with tempfile.TemporaryDirectory() as scratch, HubServer() as hub:
        tiny_model.build(Path(scratch) / "model")
        hub.create_repo("acme/tiny")
        hub.add_folder("acme/tiny", Path(scratch) / "model")
        begin(Path(scratch) / "warm-up", hub.url)
        hub.bytes_per_second = (Path(scratch) / "model" / "model.safetensors").stat().st_size / DOWNLOAD_S
        for number in range(rounds):
            cached, cold = Path(scratch) / f"cached-{number}", Path(scratch) / f"cold-{number}"
            seconds["download"].append(download(cached, hub.url))
            seconds["cached"].append(begin(cached, hub.url))
            seconds["overlapped"].append(begin(cold, hub.url))
    report({name: median(values) for name, values in seconds.items()}, rounds)


def report(seconds: dict[str, float], rounds: int) -> None:
    """Print, and leave with 1 when the ratio is not what is wanted."""
    parts = seconds["download"] + seconds["cached"]
    ratio = seconds["overlapped"] / parts
    print(f"process start to first optimizer step, {rounds} round(s), medians")
    print(f"download alone              {seconds['download']:7.2f} s")
    print(f"all the rest, cached        {seconds['cached']:7.2f} s")
    print(f"one after the other         {parts:7.2f} s")
    print(f"overlapped                  {seconds['overlapped']:7.2f} s")
    print(f"ratio                       {ratio:7.3f}   wanted <= {TARGET_RATIO}")
    sys.exit(0 if ratio <= TARGET_RATIO else 1)


def download(home: Path, url: str) -> float:
    """Seconds the Hub's client takes for the model alone, its own start left out."""
    from tests import harness

    timed = (
        f"import time; import huggingface_hub; t = time.monotonic(); {DOWNLOAD}; print(time.monotonic() - t)"
    )
    ended = harness.start_python(["-c", timed], {"HF_ENDPOINT": url}, home)
    assert ended.code == 0, ended.err[-2000:]
    return float(ended.out)


def begin(home: Path, url: str) -> float:
    """Seconds from the start of a worker's process to the end of the one step it is given."""
    from tests import harness

    how = {"SFT_MAX_STEPS": 1, "HF_ENDPOINT": url, "HF_TOKEN": "hf_test"}
    env = harness.variables(home, "acme/tiny", "demo-arithmetic", {"run_id": home.name}, **how)
    env["AUTOSLM_WORK_DIR"] = str(home / f"work-{time.monotonic_ns()}")
    began = time.time()
    ended = harness.start_python(["worker.py"], env, home)
    assert ended.code == 0, ended.err[-2000:]
    trained = next(beat["ts"] for beat in ended.beats if beat["stage"] == "sft_trained")
    metrics = json.loads((Path(env["AUTOSLM_WORK_DIR"]) / "metrics.json").read_text())
    print(f"{home.name:12} download_seconds {metrics['notes']['download_seconds']}", flush=True)
    return trained - began


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    main()
