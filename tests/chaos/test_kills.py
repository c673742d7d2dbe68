"""Real workers, killed at random moments and started again on an empty disk until they are done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.chaos.chain import ADAPTER, EPOCH_STEPS, MODES, SFT, TWO_EPOCHS, Chain, Moment, start_hub

KILLS = int(os.environ.get("CHAOS_KILLS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
SHARES = {"sft": 0.5, "grpo": 0.3, "vllm": 0.2}
PARTS = 2  # chains that can run side by side


def shares() -> list[tuple[str, int, int]]:
    """(mode, number of the chain, kills) of all chains, the longest first."""
    chains = []
    for mode, share in SHARES.items():
        kills = round(KILLS * share)
        chains += [(mode, part, (kills + part) // PARTS) for part in range(PARTS)]
    return [one for one in chains if one[2]]


@pytest.mark.chaos
@pytest.mark.parametrize(("mode", "part", "kills"), shares())
def test_a_killed_run_always_finishes(
    mode: str, part: int, kills: int, tiny_model: Path, tmp_path: Path, tell: Callable[[object], None]
) -> None:
    with start_hub() as hub:
        chain = Chain(MODES[mode], tmp_path / "machine", tiny_model, hub)
        try:
            chain.run(kills, seed=SEED + part)
        finally:
            tell(chain.report)
    if mode == "sft":  # the same data, seed and steps: the same adapter, however often it was killed
        assert len(chain.report.adapters) == 1


@pytest.mark.chaos
def test_three_kills_change_neither_adapter_nor_losses(tiny_model: Path, tmp_path: Path) -> None:
    with start_hub() as hub:
        chain = Chain(TWO_EPOCHS, tmp_path / "machine", tiny_model, hub)
        whole = chain.run_through("whole", [])
        killed = chain.run_through("killed", [Moment("checkpoint_uploaded", 2, 0.0)] * 3)
    assert chain.report.resumed == 3 and EPOCH_STEPS < chain.report.killed_at[-1] < TWO_EPOCHS.steps
    assert killed[ADAPTER] == whole[ADAPTER]
    assert losses(killed) == losses(whole)


def losses(files: Mapping[str, bytes]) -> list[tuple[float, ...]]:
    """Step, epoch, loss, gradient norm and learning rate of every log."""
    state = json.loads(files[f"checkpoint/checkpoint-{TWO_EPOCHS.steps}/trainer_state.json"])
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    return [tuple(entry[name] for name in names) for entry in state["log_history"] if "loss" in entry]


@pytest.mark.slow
def test_a_killed_run_finishes(tiny_model: Path, tmp_path: Path, tell: Callable[[object], None]) -> None:
    with start_hub() as hub:
        chain = Chain(SFT, tmp_path / "machine", tiny_model, hub)
        try:
            chain.run(1, seed=11)  # in the middle of training
        finally:
            tell(chain.report)
