"""A GPU that runs out of memory: the micro-batch is halved, and nothing else about the run changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import grpo_trials, harness, sft_trials
from tests.harness import Finished, strict
from training.midrun import as_callback

pytestmark = pytest.mark.slow

SPEC = {"train": {"lora_rank": 4, "lora_alpha": 8, "batch_size": 8}}
STEPS = {"SFT_MAX_STEPS": 3}


def overflow(monkeypatch: pytest.MonkeyPatch, kind: str, when: Callable[[int, int], bool]) -> list[int]:
    """Let the backward pass of a micro-batch run out of memory, after some of it is done, when asked to.

    `when` gets the number of the call and the sequences in it; returns the sizes of all calls.
    """
    import torch
    import trl

    trainer, sizes = getattr(trl, kind), []
    plain = trainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(inputs["input_ids"] if "input_ids" in inputs else inputs["completion_ids"])
        sizes.append(rows)
        loss = plain(self, model, inputs, *args, **kwargs)
        if when(len(sizes), rows):
            loss.backward()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    monkeypatch.setattr(trainer, "compute_loss", compute_loss)
    return sizes


def adapter(store: Path, mode: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(store / mode / "r1" / "seed0" / "adapter" / "adapter_model.safetensors")


def check_same(one: dict[str, Any], other: dict[str, Any], atol: float = 2e-4) -> None:
    assert one.keys() == other.keys()
    apart = {name: float((one[name] - other[name]).abs().max()) for name in one}
    assert {
        name: gap for name, gap in apart.items() if gap > atol + 1e-5 * float(one[name].abs().max())
    } == {}


class Gradients:
    """Keeps the gradients of the first optimizer step."""

    first: dict[str, Any] | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        self.first = self.first or {name: grad.clone() for name, grad in trained.items()}


def found(trainer: Any) -> dict[str, Any]:
    (one,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, Gradients)]
    assert one.first
    return one.first


def facts(ended: Finished) -> list[tuple[int, int, int]]:
    beats = [one for one in ended.beats if one["stage"] == "micro_batch_halved" and not one.get("liveness")]
    return [(one["step"], one["micro"], one["accumulation"]) for one in beats]


def notes(folder: Path, mode: str) -> dict[str, Any]:
    return strict((folder / "store" / mode / "r1" / "seed0" / "metrics.json").read_text())["notes"]


@pytest.fixture
def plain_sft(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    ended = harness.run_main(harness.variables(folder, tiny_model, "toy-words", SPEC, **STEPS))
    assert ended.error is None, ended.error
    assert notes(folder, "sft")["micro_batch"] == {"micro": 4, "accumulation": 2}
    return folder / "store"


def test_sft_ends_with_the_same_adapter(
    plain_sft: Path, job: Callable[..., dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second call: one micro-batch has left its gradients already. Then a part of one does not fit.
    sizes = overflow(monkeypatch, "SFTTrainer", lambda call, rows: (call == 2 and rows == 4) or call == 4)
    ended = harness.run_main(job(spec=SPEC, **STEPS))
    assert ended.error is None, ended.error
    assert sizes[:4] == [4, 4, 2, 2] and set(sizes[4:]) == {1}
    assert facts(ended) == [(0, 2, 4), (0, 1, 8)]
    assert notes(tmp_path, "sft")["micro_batch"] == {"micro": 1, "accumulation": 8}
    check_same(adapter(tmp_path / "store", "sft"), adapter(plain_sft, "sft"))


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_grpo_ends_with_the_same_adapter_and_samples_no_more_often(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kl: float
) -> None:
    train = {"kl_penalty_coef": kl, "steps": 2}

    def trained(name: str) -> Any:
        env = grpo_trials.variables(tmp_path / name, tiny_model, train=train, RL_USE_VLLM=0)
        made = grpo_trials.build(env)
        made.trainer.add_callback(as_callback(Gradients))
        made.trainer.train()
        return made

    expected = trained("plain")
    overflow(monkeypatch, "GRPOTrainer", lambda call, rows: call in (1, 4))
    halved = trained("halved")
    assert [one.ids for one in halved.batches] == [one.ids for one in expected.batches]
    assert (halved.trainer.parts, halved.trainer.micro_batch) == (4, {"micro": 2, "accumulation": 8})
    assert halved.trainer._step == expected.trainer._step
    assert halved.tally.generated_tokens == expected.tally.generated_tokens
    # Of the first step: Adam makes a step of full size of a rounding error, so the weights tell less.
    mine, theirs = (found(one.trainer) for one in (halved, expected))
    check_same(mine, theirs, atol=1e-6)
    assert max(one.abs().max() for one in theirs.values()) > 1e-3


def test_scoring_without_gradients_is_halved_as_well(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import trl

    plain, sizes = trl.GRPOTrainer._get_per_token_logps_and_entropies, []

    def score(self: Any, model: Any, ids: Any, mask: Any, kept: Any, size: Any = None, **more: Any) -> Any:
        sizes.append(size)
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, model, ids, mask, kept, size, **more)

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", score)
    env = grpo_trials.variables(tmp_path, tiny_model, train={"kl_penalty_coef": 0.1}, RL_USE_VLLM=0)
    made = grpo_trials.build(env)
    batch = made.sample([0, 1])
    assert sizes == [8, 4] and len(made.batches) == 1
    assert batch["ref_per_token_logps"].shape == batch["completion_ids"].shape


@pytest.mark.parametrize(
    ("when", "halvings"),
    [(lambda call, rows: True, 2), (lambda call, rows: call == 8, 0)],  # always; only in the fourth step
    ids=["nothing fits", "late"],
)
def test_it_gives_up(
    job: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[[int, int], bool],
    halvings: int,
) -> None:
    overflow(monkeypatch, "SFTTrainer", when)
    ended = harness.run_main(job(spec=SPEC, SFT_MAX_STEPS=6))
    assert type(ended.error).__name__ == "OutOfMemoryError" and len(facts(ended)) == halvings
    assert (ended.beats[-1]["stage"], ended.beats[-1]["oom"]) == ("error_sft", True)
    assert ended.beats[-1]["retriable"] is False


def test_a_micro_batch_of_three_is_weighted_by_its_parts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import recipe

    spec = {"train": {**SPEC["train"], "batch_size": 3}}

    def trained(name: str) -> Any:
        env = harness.variables(tmp_path / name, tiny_model, "toy-words", spec, SFT_MAX_STEPS=2)
        made = sft_trials.build(env, batch=recipe.Batch(3, 1))
        made.trainer.train()
        return dict(made.trainer.model.named_parameters())

    expected = trained("plain")
    sizes = overflow(monkeypatch, "SFTTrainer", lambda call, rows: call == 1)
    check_same(trained("halved"), expected)
    assert sizes == [3, 2, 1, 2, 1]


# --- what is sampled at once ---


def full_above(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[list[list[int]]]:
    """Let the trainer's model run out of memory above so many sequences; returns those it sampled."""
    import peft
    import torch

    plain, sampled = peft.PeftModelForCausalLM.generate, []

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs["input_ids"].tolist()
        if len(asked) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        sampled.append(asked)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(peft.PeftModelForCausalLM, "generate", generate)
    return sampled


@pytest.fixture(scope="module")
def policy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> grpo_trials.Trial:
    """A trainer that samples with its own model, 8 sequences at a time."""
    return grpo_trials.build(
        grpo_trials.variables(tmp_path_factory.mktemp("policy"), tiny_model, RL_USE_VLLM=0)
    )


def test_what_is_sampled_at_once_is_halved_too(
    policy: grpo_trials.Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = policy.sample([0, 1])
    sampled = full_above(monkeypatch, 2)
    parts = policy.sample([0, 1])
    assert [len(one) for one in sampled] == [2, 2, 2, 2] and policy.trainer.sampler.in_parts.parts == 4
    assert parts["prompt_ids"].equal(whole["prompt_ids"])
    assert len(parts["completion_ids"]) == 8
    policy.sample([0, 1])
    assert len(sampled) == 8  # and it stays so


def test_so_are_the_turns_of_conversations(
    policy: grpo_trials.Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    from training.sampler import ModelSampler, Request, Sample

    sampled = full_above(monkeypatch, 3)
    sampler = ModelSampler(policy.trainer, policy.chat.cut_at, lambda: None)
    policy.trainer.model.eval()
    asked = [Request([20 + one] * 5, 4, 1.0, 1.0, (), tuple(policy.chat.stop_ids)) for one in range(6)]

    async def play() -> list[Sample]:
        async with sampler.session():
            return await asyncio.gather(*map(sampler.sample, asked))

    samples = asyncio.run(play())
    assert [row for part in sampled for row in part] == [list(one.ids) for one in asked]
    assert [len(one) for one in sampled] == [3, 3] and all(1 <= len(one.ids) <= 4 for one in samples)


def test_sampling_gives_up_at_a_quarter(policy: grpo_trials.Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    full_above(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        policy.sample([0, 1])
