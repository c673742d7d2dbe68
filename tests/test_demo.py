"""The demo does what the README says, on its own tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import harness


def run_demo(folder: Path, seed: int) -> tuple[dict[str, Any], str]:
    """Run the demo as `make demo` does; returns result.json and what was printed."""
    env = {"DEMO_DIR": str(folder), "DEMO_SEED": str(seed), "AUTOSLM_LOG_FLUSH_S": "0"}
    ended = harness.start_python(["demo/run.py"], env, home=folder / "home")
    assert ended.code == 0, ended.err[-2000:]
    return json.loads((folder / "result.json").read_text(encoding="utf-8")), ended.out


def check(result: dict[str, Any]) -> None:
    assert result["base_exact_match"] <= 0.10
    assert result["adapter_exact_match"] >= 0.80
    assert result["last_loss"] < result["first_loss"]
    assert len(result["rl_rewards"]) == 60
    assert result["rl_last_reward"] >= result["rl_first_reward"] + 0.25


@pytest.mark.slow
def test_the_demo_learns_sums_and_shows_it(tmp_path: Path) -> None:
    result, out = run_demo(tmp_path, seed=0)
    check(result)
    assert Path(result["artifacts"], "DONE").is_file() and Path(result["rl_artifacts"], "DONE").is_file()
    assert result["artifacts"] in out and "held-out question" in out and "mean reward" in out
    for mode in ("artifacts", "rl_artifacts"):
        check_report(Path(result[mode]), out)


def check_report(folder: Path, out: str) -> None:
    """The page is where the demo says, with curves, samples, and the figures of the log."""
    assert str(folder / "report.md") in out
    page = (folder / "report.md").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval_reward" in line]
    assert evaluated and all(
        f"| {line['step']} | held-out | {line['eval_n']} |" in page for line in evaluated
    )
    shown = re.search(r"newest ([0-9.]+)\)", page)
    newest = [line.get("reward", line.get("loss")) for line in lines if "eval_reward" not in line][-1]
    assert shown and float(shown[1]) == pytest.approx(newest, rel=1e-3, abs=1e-3)
    assert "![Curves](report/curves.png)" in page and (folder / "report" / "curves.png").stat().st_size > 5000
    assert page.count("What is ") >= 10


@pytest.mark.proof
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_with_every_seed_and_twice_the_same(tmp_path: Path, seed: int) -> None:
    first, _ = run_demo(tmp_path / "first", seed)
    check(first)
    again, _ = run_demo(tmp_path / "again", seed)
    moving = {"artifacts", "rl_artifacts", "model"}
    assert {k: v for k, v in first.items() if k not in moving} == {
        k: v for k, v in again.items() if k not in moving
    }
