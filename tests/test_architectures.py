"""Every architecture of the catalog is trained for real, in both modes, and gives an adapter that is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import recipe
from job import chat, repository, rules
from job.model_size import model_size
from job.settings import identify
from job.weights import plan_weights
from tests import architectures, grpo_trials, harness, sft_trials
from tests.harness import strict
from tests.test_fitting import Gradients, check_same, found
from training import engine, trainers
from training.midrun import as_callback

pytestmark = pytest.mark.slow

FROM = "sft/r1/seed0"
LORA = {"lora_rank": 8, "lora_alpha": 16}
TEACH = {"train": {**LORA, "learning_rate": 1e-2, "batch_size": 24}}
GROUPS = {**LORA, "init_from_adapter": FROM, "temperature": 1.0, "group_size": 8}


@pytest.fixture(scope="module", params=architectures.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    return tmp_path_factory.mktemp(kind)


@pytest.fixture(scope="module")
def model(folder: Path, kind: str) -> Path:
    return architectures.build(kind, folder / "model")


@pytest.fixture(scope="module")
def taught(folder: Path, model: Path) -> Any:
    """A trial that has learnt to answer with a number and to end its turn; its adapter is in the store."""
    made = sft_trials.build(
        harness.variables(folder, model, "toy-rewards", TEACH, SFT_EPOCHS=40, SFT_PER_DEVICE_BS=24)
    )
    made.trainer.train()
    sft_trials.check_reload(made, folder / "store" / FROM / "adapter")
    return made


def test_its_size_is_counted_from_the_configuration_alone(model: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    size = model_size(AutoConfig.from_pretrained(model).get_text_config().to_dict())
    assert size is not None
    assert size.params == pytest.approx(sum(one.numel() for one in loaded.parameters()), rel=0.05)


def test_sft_learns_and_leaves_the_base_as_it_was(taught: Any) -> None:
    first, *_, last = sft_trials.losses(taught.trainer)
    assert last < 0.7 * first
    sft_trials.check_base(taught)


def test_its_adapter_can_be_merged(taught: Any, folder: Path) -> None:
    sft_trials.check_merged(taught, folder / "store" / FROM / "adapter", folder / "merged")
    sft_trials.check_base(taught)


def test_grpo_goes_on_from_it_with_the_trainers_model(taught: Any, folder: Path, model: Path) -> None:
    import torch

    train = {**GROUPS, "kl_penalty_coef": 0.01}
    env = grpo_trials.variables(folder, model, train=train, RL_USE_VLLM=0)
    made = grpo_trials.build(env, policy=sft_trials.warm)
    assert torch.equal(sft_trials.logits(made.trainer.model), sft_trials.logits(taught.trainer.model))
    start = {name: one.detach().clone() for name, one in made.adapter_weights().items()}
    made.trainer.train()
    assert made.tally.has_gradient and made.logged("kl")[0] == pytest.approx(0, abs=1e-6)
    assert any(not torch.equal(one, start[name]) for name, one in made.adapter_weights().items())
    sft_trials.check_base(made)
    sft_trials.check_reload(made, folder / "rl-adapter")


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"], indirect=True)
def test_every_supervised_token_counts_the_same_whatever_the_micro_batch(folder: Path, model: Path) -> None:
    def gradients(micro: int) -> dict[str, Any]:
        spec = {"train": {**LORA, "batch_size": 8}}
        more = {"SFT_MAX_STEPS": 1, "SFT_PER_DEVICE_BS": micro}
        env = harness.variables(folder / f"micro-{micro}", model, "toy-words", spec, **more)
        made = sft_trials.build(env, callbacks=[as_callback(Gradients)])
        made.trainer.train()
        assert made.trainer.args.gradient_accumulation_steps == 8 // micro
        return found(made.trainer)

    one, four = gradients(1), gradients(4)
    check_same(one, four, atol=1e-5)
    assert max(grad.abs().max() for grad in four.values()) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe"], indirect=True)
def test_gradients_are_the_same_with_checkpointing(
    folder: Path, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: reentrant for Gated DeltaNet and experts, not for others."""
    from accelerate.state import AcceleratorState

    # The colocated vLLM of another test leaves a process group behind, and the trainer would wrap the model.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    plain, asked = trainers.checkpointing, []

    def gradients(on: bool) -> dict[str, Any]:
        def checkpointing(plan: Any, on_gpu: bool) -> dict[str, Any]:
            asked.append(plain(plan, on))
            return asked[-1]

        monkeypatch.setattr(trainers, "checkpointing", checkpointing)
        spec = {"train": {**LORA, "batch_size": 4}}
        env = harness.variables(folder / f"checkpointing-{on}", model, "toy-words", spec, SFT_MAX_STEPS=1)
        made = sft_trials.build(env, callbacks=[as_callback(Gradients)])
        made.trainer.train()
        assert made.trainer.model.is_gradient_checkpointing is on
        return found(made.trainer)

    without, with_it = gradients(False), gradients(True)
    assert asked[1]["gradient_checkpointing_kwargs"] == {"use_reentrant": kind != "llama"}
    largest = max(float(grad.abs().max()) for grad in without.values())
    check_same(with_it, without, atol=1e-3 * largest if "moe" in kind else 1e-6)
    # of a first step only lora_B has one, as it begins at zero
    assert all(grad.abs().max() > 1e-5 for name, grad in with_it.items() if "lora_B" in name)


@pytest.mark.parametrize("kind", ["qwen3_5_moe"], indirect=True)
def test_whole_runs_of_a_multimodal_mixture_of_experts(folder: Path, model: Path, taught: Any) -> None:
    spec = {"train": {**LORA, "init_from_adapter": FROM}}
    ended = harness.run_main(harness.variables(folder, model, "toy-rewards", spec, RUN_ID="r2"))
    assert ended.error is None, ended.error
    env = grpo_trials.variables(folder, model, train=GROUPS, RL_USE_VLLM=0)
    ended = harness.run_main(env)
    assert ended.error is None, ended.error
    notes = strict((folder / "store/rl/r1/seed0/metrics.json").read_text())["notes"]
    assert len(notes["reward_history"]) == 3


# --- what is not served ---


@pytest.mark.parametrize("kind", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize("sync", ["adapter", "merge"])
def test_a_mixture_of_experts_with_vllm_on_a_cpu_is_refused(folder: Path, model: Path, sync: str) -> None:
    ended = harness.run_main(
        grpo_trials.variables(folder, model, run_id=f"refused-{sync}", RL_ADAPTER_SYNC=sync)
    )
    assert type(ended.error).__name__ == "SettingsError" and "rl_start" not in ended.stages
    assert "vLLM's CPU build" in str(ended.error) and "set RL_USE_VLLM=0" in str(ended.error)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_moe"], indirect=True)
@pytest.mark.parametrize("asked", [True, False])
def test_a_multimodal_checkpoint_is_served_as_text(folder: Path, model: Path, kind: str, asked: bool) -> None:
    env = grpo_trials.variables(folder, model, AUTOSLM_DEVICE="cuda", AUTOSLM_TEXT_ONLY=int(asked))
    settings = rules.resolve(env, identify(env)[0])
    plan = plan_weights(settings, repository.locate(settings), ())
    talk = chat.Chat(chat.load_tokenizer(plan.base), thinking=False)
    options = trainers.engine_options(settings, plan, talk)
    arguments = engine.engine_arguments(options, 0, 4, recipe.EngineMemory(1 << 20, 0.5))
    assert arguments.get("language_model_only", False) is (asked and plan.is_multimodal)
    assert plan.is_multimodal is kind.startswith("qwen3_5") and plan.reentrant
    attention = 1 if plan.is_multimodal else 2  # of two layers
    assert (
        plan.kv_bytes_per_token == attention * 2 * 2 * 32 * 2 and bool(plan.state_bytes) is plan.is_multimodal
    )
