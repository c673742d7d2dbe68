"""Training with a Hub that takes 10 s for every commit, against a folder store: `bench/slow_hub.py [ROUNDS]`.

Both are the same supervised run, a process of its own, that saves every 5 steps; the figure is `train_wall`,
what an optimizer loop of this length took. The Hub is a process of its own too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parent.parent
COMMIT_S, STEPS, SAVE_EVERY, ROUNDS = 10, 600, 5, 3
TARGET_RATIO = 1.03
HUB = f"""
import sys, time
from tests.hub_server import Fault, HubServer
with HubServer() as hub:
    hub.create_repo("acme/runs", kind="dataset", private=True)
    hub.faults.append(Fault("POST .*/commit/", latency_s={COMMIT_S}))
    print(hub.url, flush=True)
    sys.stdin.read()
"""


def main() -> None:
    """Run both in turn, and print seconds and their ratio."""
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "demo")]
    import tiny_model

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    walls: dict[str, list[float]] = {"folder": [], "hub": []}
    hub = subprocess.Popen(
        [sys.executable, "-c", HUB], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert hub.stdout is not None
    url = hub.stdout.readline().strip()
    with tempfile.TemporaryDirectory() as scratch:
        tiny_model.build(Path(scratch) / "model")
        for number in range(rounds):
            for store in walls:
                folder = Path(scratch) / f"{store}-{number}"
                where = {"HF_REPO": "acme/runs", "HF_TOKEN": "hf_test", "HF_ENDPOINT": url}
                walls[store].append(train(folder, Path(scratch) / "model", where if store == "hub" else {}))
    hub.kill()
    ratio = median(walls["hub"]) / median(walls["folder"])
    print(f"{STEPS} steps, a save every {SAVE_EVERY}, {rounds} rounds, medians")
    print(f"folder store           {median(walls['folder']):7.2f} s")
    print(f"{COMMIT_S} s for every commit  {median(walls['hub']):7.2f} s")
    print(f"ratio                  {ratio:7.3f}   wanted <= {TARGET_RATIO}")
    sys.exit(0 if ratio <= TARGET_RATIO else 1)


def train(folder: Path, model: Path, where: dict[str, str]) -> float:
    """Seconds of training of one run, as its metrics say."""
    from tests import harness

    spec = {"run_id": folder.name, "train": {"batch_size": 4, "save_every": SAVE_EVERY}}
    how = {"SFT_MAX_STEPS": STEPS, "AUTOSLM_HEARTBEAT_MIN_S": 0, **where}  # every save is streamed
    env = harness.variables(folder, model, "demo-arithmetic", spec, **how)
    ended = harness.start_python(["worker.py"], env, folder / "home")
    assert ended.code == 0, ended.err[-2000:]
    return float(json.loads((folder / "work" / "metrics.json").read_text())["notes"]["train_wall"])


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    main()
