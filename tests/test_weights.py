"""Weights in 4 bits, made on loading or before, and weights that cannot be trained on."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accounting import Tally
from delivery.checkpoints import AnotherJob, Manifest
from job import experts, repository, rules
from job.repository import locate
from job.settings import SettingsError, identify
from job.weights import (
    EXCLUDED_MODULES,
    card_need,
    check_experts,
    check_precision,
    engine_bytes,
    plan_weights,
)
from tests import architectures, grpo_trials, harness, sft_trials
from tests.harness import strict
from tests.hub_server import HubServer
from tests.test_layout import PLAN
from training import inputs, trainers, warm_start

slow = pytest.mark.slow
FROM = "sft/r1/seed0"
LORA = {"lora_rank": 8, "lora_alpha": 16}
FOUR_BIT = {"AUTOSLM_QUANT": "4bit-qlora"}
TEACH = {"train": {**LORA, "learning_rate": 1e-2, "batch_size": 24}}
GROUPS = {**LORA, "temperature": 1.0, "group_size": 8, "kl_penalty_coef": 0.01}


# --- refused before anything is spent ---


@pytest.mark.parametrize(
    ("quant", "repo", "found", "message"),
    [
        ("bf16", "", {"load_in_4bit": True}, "its weights are quantised; set AUTOSLM_QUANT=4bit-qlora"),
        ("4bit-qlora", "a/q", None, "AUTOSLM_QUANT_REPO='a/m': its weights are not quantised"),
        ("4bit-qlora", "a/q", {"quant_method": "gptq"}, "quantised by 'gptq', and only bitsandbytes 4-bit"),
    ],
)
def test_a_precision_that_is_not_what_the_tier_says(
    quant: str, repo: str, found: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        check_precision(SimpleNamespace(quant=quant, quant_repo=repo), "a/m", found)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "fields", "refused"),
    [
        (("q_proj", "down_proj"), {}, True),
        (("q_proj", "mlp.gate"), {}, True),
        (("q_proj", "o_proj"), {}, False),
        ("all-linear", {}, False),
        (("q_proj", "down_proj"), {"rl_use_vllm": False}, False),
        (("q_proj", "down_proj"), {"mode": "sft"}, False),
        ("all-linear", {"device": "cpu"}, True),
        ("all-linear", {"rl_adapter_sync": "merge"}, True),
        ("all-linear", {"rl_adapter_sync": "merge", "rl_use_vllm": False}, False),
        ("all-linear", {"quant": "4bit-qlora"}, False),
    ],
)
def test_experts_that_vllm_cannot_serve(targets: Any, fields: dict[str, Any], refused: bool) -> None:
    plain = {"mode": "rl", "rl_use_vllm": True, "device": "cuda", "rl_adapter_sync": "adapter"}
    plain["quant"] = "bf16"
    settings: Any = SimpleNamespace(**{**plain, "lora_targets": targets, **fields})
    if not refused:
        check_experts(settings, has_experts=True, is_multimodal=False)
        return
    with pytest.raises(SettingsError, match="RL_USE_VLLM=0"):
        check_experts(settings, has_experts=True, is_multimodal=False)
    check_experts(settings, has_experts=False, is_multimodal=False)


def test_experts_in_4_bits_take_no_adapter() -> None:
    settings: Any = SimpleNamespace(mode="sft", quant="4bit-qlora", lora_targets=("q_proj", "down_proj"))
    with pytest.raises(SettingsError, match=r"^LORA_TARGETS=q_proj,down_proj: .* leave out down_proj,"):
        check_experts(settings, has_experts=True, is_multimodal=False)
    check_experts(settings, has_experts=True, is_multimodal=True)  # whose experts nobody means by it


def test_weights_that_cannot_be_had_are_told_by_the_variable_that_names_them(tmp_path: Path) -> None:
    for name in ("base", "quantised"):
        (tmp_path / name).mkdir()
    settings: Any = SimpleNamespace(
        model=str(tmp_path / "base"), quant="4bit-qlora", quant_repo=str(tmp_path / "quantised")
    )
    with pytest.raises(SettingsError, match=r"^JobSpec model=.*base': the folder has no config\.json"):
        locate(settings)
    (tmp_path / "base" / "config.json").touch()
    with pytest.raises(SettingsError, match=r"^AUTOSLM_QUANT_REPO=.*quantised': the folder has no config"):
        locate(settings)


@pytest.mark.parametrize(
    ("module", "excluded"),
    [
        ("visual.blocks.0.attn.qkv", True),
        ("model.visual.blocks.3.mlp.linear_fc1", True),
        ("vision_tower.layers.0.q_proj", True),
        ("model.multi_modal_projector.linear_1", True),
        ("mtp.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn.q_proj", False),
        ("model.language_model.layers.0.linear_attn.in_proj_qkv", False),
        ("model.layers.0.visual_gate", False),
    ],
)
def test_modules_that_never_get_an_adapter(module: str, excluded: bool) -> None:
    assert bool(re.fullmatch(EXCLUDED_MODULES, module)) is excluded


LAYER = "base_model.model.model.layers.0"
PLAIN = f"{LAYER}.self_attn.q_proj.lora_A.weight"
VISUAL = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (f"{LAYER}.mlp.experts.lora_A.weight", {}, "vLLM cannot serve an adapter on experts or router"),
        (f"{LAYER}.mlp.experts.base_layer.lora_B.weight", {}, "experts or router, and it has"),
        (f"{LAYER}.mlp.gate.lora_A.weight", {}, "set RL_USE_VLLM=0"),
        (f"{LAYER}.mlp.experts.3.up_proj.lora_A.weight", {}, "set RL_USE_VLLM=0"),
        (f"{LAYER}.mlp.experts.lora_A.weight", {"rl_use_vllm": False}, ""),
        (f"{LAYER}.mlp.experts.lora_A.weight", {"mode": "sft"}, ""),
        (f"{LAYER}.mlp.experts.lora_A.weight", {"mode": "sft", "four_bit": True}, "set AUTOSLM_QUANT=bf16"),
        (f"{LAYER}.mlp.up_proj.lora_A.weight", {"has_experts": False}, ""),
        (f"{LAYER}.mlp.shared_expert.up_proj.lora_A.weight", {"model_type": "qwen3_5_moe"}, ""),
        (VISUAL, {}, ""),
        (VISUAL, {"model_type": "qwen3_5", "mode": "sft"}, f"is trained as text, and it has {VISUAL}"),
    ],
)
def test_an_adapter_to_go_on_from_that_is_on_the_wrong_modules(
    name: str, fields: dict[str, Any], message: str
) -> None:
    about = {"has_experts": True, "model_type": "qwen3_moe", "four_bit": False}
    plan = replace(PLAN, **{name: fields.get(name, value) for name, value in about.items()})
    plain = {"mode": "rl", "rl_use_vllm": True, "init_from_adapter": FROM}
    settings: Any = SimpleNamespace(**{**plain, **fields})
    warm_start.check_modules(settings, plan, [PLAIN])
    if not message:
        warm_start.check_modules(settings, plan, [PLAIN, name])
        return
    with pytest.raises(warm_start.AdapterProblem) as caught:
        warm_start.check_modules(settings, plan, [PLAIN, name])
    text = str(caught.value)
    assert text.startswith(f"JobSpec train.init_from_adapter={FROM!r}: ") and "\n" not in text
    assert message in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, ""),
        ({"base_model_name_or_path": "."}, ""),
        ({"base_model_name_or_path": "acme/b"}, "it was trained on 'acme/b', this run's model is 'b'"),
        ({"base_model_name_or_path": ""}, "it was trained on ''"),
        ({"base_model_name_or_path": None}, "it was trained on None"),
        ({"r": 4}, "its rank is 4, train.lora_rank is 8; make them equal"),
        ({"init_lora_weights": "gaussian"}, ""),
        ({"init_lora_weights": "pissa_niter_4"}, "its init_lora_weights is 'pissa_niter_4'"),
    ],
)
def test_the_config_of_an_adapter_to_go_on_from(fields: dict[str, Any], message: str) -> None:
    settings: Any = SimpleNamespace(init_from_adapter=FROM, **LORA)
    plain = {"base_model_name_or_path": "b", "r": 8, "lora_alpha": 16, "init_lora_weights": True}
    config = {**plain, **fields}
    if not message:
        warm_start.check_config(settings, PLAN, config)
        return
    with pytest.raises(warm_start.AdapterProblem) as caught:
        warm_start.check_config(settings, PLAN, config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "adapted", "unknown"),
    [
        ("q_proj down_proj", ["self_attn.q_proj", "mlp.experts"], None),
        ("q_proj mlp.gate_proj", ["self_attn.q_proj", "mlp.experts.base_layer"], None),
        ("q_proj down_proj", ["self_attn.q_proj"], "down_proj"),
        ("q_proj query", ["self_attn.q_proj", "mlp.experts"], "query"),
        ("q_proj mlp.up_proj", ["self_attn.q_proj", "mlp.up_proj"], None),
    ],
)
def test_targets_that_the_model_does_not_have(targets: str, adapted: list[str], unknown: str | None) -> None:
    names = [(f"{LAYER}.{one}.lora_A.default.weight", None) for one in adapted]
    model, settings = SimpleNamespace(named_parameters=lambda: names), SimpleNamespace()
    settings.lora_targets = tuple(targets.split())
    if unknown is None:
        trainers.check_targets(settings, model)
        return
    with pytest.raises(SettingsError, match=f"the model has no module '{unknown}'"):
        trainers.check_targets(settings, model)


# --- what a config says ---


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"num_experts": 128}, 128),
        ({"num_local_experts": 8}, 8),
        ({"n_routed_experts": 256, "n_shared_experts": 1}, 256),
        ({"moe_num_experts": [64, 32]}, 64),
        ({"ffn_config": {"moe_num_experts": 16}}, 16),
        ({"num_experts": 0}, 0),
        ({"n_routed_experts": None, "num_experts_per_tok": 8}, 0),
        ({"n_shared_experts": 1}, 0),
        ({"hidden_size": 64}, 0),
    ],
)
def test_a_mixture_of_experts_by_any_name(facts: dict[str, Any], found: int) -> None:
    assert experts.count(facts) == found


def test_the_library_has_no_other_name_for_a_number_of_experts() -> None:
    package = find_spec("transformers")
    assert package is not None and package.origin
    found: set[str] = set()
    for path in Path(package.origin).parent.glob("models/*/configuration_*.py"):
        found |= {*re.findall(r"^    (\w*experts\w*) *:", path.read_text(encoding="utf-8"), re.MULTILINE)}
    others = {"num_experts_per_tok", "top_k_experts", "shared_experts_intermediate_size"}
    others |= {"n_shared_experts", "num_shared_experts", "moe_num_shared_experts"}
    assert found - others == {*experts.COUNTS}


DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
STATE = 4 * (8 * 16 * 32 + 4 * (2 * 2 * 16 + 8 * 32))  # the heads' matrices, the convolution's inputs


@pytest.mark.parametrize(
    ("facts", "per_token", "per_sequence"),
    [
        ({}, 4 * 2 * 8 * 8 * 2, 0),
        ({"num_key_value_heads": 2, "head_dim": 32}, 4 * 2 * 2 * 32 * 2, 0),
        ({"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}, 4 * 2 * 8 * 32 * 2, 0),
        (
            {"head_dim": 32, "layer_types": LAYERS},
            4 * 2 * 8 * 32 * 2,
            0,
        ),  # of a kind whose state is not known
        ({"head_dim": 32, "layer_types": LAYERS, **DELTA}, 1 * 2 * 8 * 32 * 2, 4 * STATE),
    ],
)
def test_what_the_engine_keeps_of_a_sequence(
    facts: dict[str, Any], per_token: int, per_sequence: int
) -> None:
    text = SimpleNamespace(num_hidden_layers=4, num_attention_heads=8, hidden_size=64, to_dict=lambda: facts)
    assert engine_bytes(text, 2) == (per_token, per_sequence)


# --- the card ---

GB = 10**9
CLASS = 0.9 * 2**30 / GB  # of what the catalog calls a gigabyte


@pytest.mark.parametrize(
    ("model", "fields", "weights_gb", "gb"),
    [
        ("Qwen/Qwen3.5-9B", {}, 19, 32 * CLASS),
        ("Qwen/Qwen3.5-9B", {"mode": "rl"}, 19, 80 * CLASS),
        ("Qwen/Qwen3.5-9B@main", {"mode": "rl", "rl_use_vllm": False}, 19, 20),
        ("Qwen/Qwen3.5-9B", {"quant": "4bit-qlora"}, 7, 8),
        ("Qwen/Qwen3.6-35B-A3B", {"quant": "4bit-qlora"}, 21, 32 * CLASS),
        ("Qwen/Qwen3.6-35B-A3B", {}, 70, 71),
        ("Qwen/Qwen3.6-35B-A3B", {"quant": "4bit-qlora", "quant_repo": "a/b"}, 40, 41),
        ("acme/b", {}, 4, 5),
        ("acme/b", {"mode": "rl"}, 4, 9),
        ("acme/b", {}, 0, 0),
    ],
)
def test_the_card_that_the_tier_in_use_needs(
    model: str, fields: dict[str, Any], weights_gb: int, gb: float
) -> None:
    plain = {"model": model, "mode": "sft", "quant": "bf16", "quant_repo": "", "rl_use_vllm": True}
    settings: Any = SimpleNamespace(**{**plain, **fields})
    settings.job = SimpleNamespace(algorithm="grpo" if settings.mode == "rl" else "sft")
    is_four_bit = settings.quant == "4bit-qlora"
    need = card_need(settings, replace(PLAN, four_bit=is_four_bit, weights_bytes=weights_gb * GB))
    assert need.card_bytes == pytest.approx(gb * GB)
    serves = settings.mode == "rl" and settings.rl_use_vllm
    assert ("RL_USE_VLLM=0" in need.knobs, "again for vLLM" in need.job) == (serves, serves)
    assert ("AUTOSLM_QUANT=4bit-qlora" in need.knobs) is not is_four_bit


# --- 4 bits ---


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, a Qwen3, mixtures of experts, and two of them with their weights quantised already."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "qwen3", "qwen3_moe", "qwen3_5_moe"):
        architectures.build(kind, folder / kind)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    for kind in ("qwen3", "qwen3_moe"):
        model = AutoModelForCausalLM.from_pretrained(folder / kind, quantization_config=how)
        model.save_pretrained(folder / f"{kind}-4bit")
        AutoTokenizer.from_pretrained(folder / kind).save_pretrained(folder / f"{kind}-4bit")
    return folder


def stacks(model: Any) -> dict[str, Any]:
    """The stacked experts by their names in a checkpoint, as they are stored."""
    named = {name.replace(".base_layer", ""): one for name, one in model.named_parameters()}
    return {
        name.replace("parametrizations.", "").removesuffix(".original"): one
        for name, one in named.items()
        if ".experts." in name and "lora_" not in name
    }


def is_four_bit(model: Any) -> bool:
    """Whether every linear layer but the output, and every stack of experts, is in 4 bits."""
    import bitsandbytes as bnb
    import torch

    base = {
        name: one
        for name, one in model.get_base_model().named_modules()
        if isinstance(one, torch.nn.Linear) and "lora_" not in name and not name.endswith("lm_head")
    }
    packed = {one.dtype for one in stacks(model.get_base_model()).values()} <= {torch.uint8}
    return packed and bool(base) and all(isinstance(one, bnb.nn.Linear4bit) for one in base.values())


@slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_5_moe"])
def test_both_modes_on_4_bit_weights(models: Path, tmp_path: Path, kind: str) -> None:
    import torch

    more = {"SFT_EPOCHS": 30, "SFT_PER_DEVICE_BS": 24}
    env = harness.variables(tmp_path, models / kind, "toy-rewards", TEACH, **FOUR_BIT, **more)
    sft = sft_trials.build(env)
    assert is_four_bit(sft.trainer.model)
    sft.trainer.train()
    first, *_, last = sft_trials.losses(sft.trainer)
    assert last < 0.7 * first
    sft_trials.check_base(sft)
    sft_trials.check_reload(sft, tmp_path / "store" / FROM / "adapter")
    sft_trials.check_merged(sft, tmp_path / "store" / FROM / "adapter", tmp_path / "merged")
    train = {**GROUPS, "init_from_adapter": FROM}
    env = grpo_trials.variables(tmp_path, models / kind, train=train, RL_USE_VLLM=0, **FOUR_BIT)
    rl = grpo_trials.build(env, policy=sft_trials.warm)
    assert is_four_bit(rl.trainer.model)
    assert torch.equal(sft_trials.logits(rl.trainer.model), sft_trials.logits(sft.trainer.model))
    rl.trainer.train()
    assert rl.tally.has_gradient and rl.logged("kl")[0] == pytest.approx(0, abs=1e-5)
    sft_trials.check_base(rl)
    sft_trials.check_reload(rl, tmp_path / "rl-adapter")
    state = next(one.quant_state for one in rl.base_weights().values() if hasattr(one, "quant_state"))
    state.absmax[0] += 1  # the scales are compared, too
    with pytest.raises(AssertionError):
        sft_trials.check_base(rl)


def load(folder: Path, model: Path, **more: str) -> tuple[Any, Any]:
    """The plan of a run with this model, and what it loads."""
    env = harness.variables(folder, model, "toy-words", **{**FOUR_BIT, **more})
    settings = rules.resolve(env, identify(env)[0])
    origin = repository.locate(settings)
    plan = plan_weights(settings, origin, repository.files(settings, origin))
    return plan, plan.load(settings)


@slow
def test_experts_take_4_bits_and_one_stack_more_while_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc

    import torch
    from bitsandbytes import functional

    model = architectures.build("qwen3_moe", tmp_path / "model", num_hidden_layers=6)
    plain = stacks(load(tmp_path, model, AUTOSLM_QUANT="bf16")[1])
    assert len(plain) == 12 and all(one.ndim == 3 for one in plain.values())
    quantise, at_once = functional.quantize_4bit, []
    shapes, before = {one.shape for one in plain.values()}, {one.data_ptr() for one in plain.values()}

    def watched(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Subclasses aside: other tests may leave some behind that cannot even say their shape.
        alive = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        whole = [one for one in alive if one.shape in shapes]
        at_once.append(len({one.data_ptr() for one in whole if one.device.type == "cpu"} - before))
        return quantise(tensor, *args, **kwargs)

    monkeypatch.setattr(functional, "quantize_4bit", watched)
    plan, loaded = load(tmp_path, model)
    packed = stacks(loaded)
    assert max(at_once) == 1 and len(at_once) >= len(plain)
    assert packed.keys() == plain.keys()
    assert all(one.numel() * 2 == plain[name].numel() for name, one in packed.items())
    for name, one in plain.items():
        path, _, stack = name.rpartition(".")
        seen = getattr(loaded.get_submodule(path), stack)
        assert seen.equal(
            functional.dequantize_4bit(*quantise(one, compress_statistics=True, quant_type="nf4"))
        )
    whole = sum(one.numel() * one.element_size() for one in loaded.parameters())
    assert plan.weights_bytes == pytest.approx(whole, rel=0.1)


@slow
def test_experts_that_a_4_bit_repository_has_in_16_bits(models: Path, tmp_path: Path) -> None:
    import torch

    (plan, before), (_, on_loading) = (
        load(tmp_path, models / name) for name in ("qwen3_moe-4bit", "qwen3_moe")
    )
    assert plan.is_quantised and {one.dtype for one in stacks(before).values()} == {torch.uint8}
    mine, theirs = before.state_dict(), on_loading.state_dict()
    assert mine.keys() == theirs.keys() and all(one.equal(theirs[name]) for name, one in mine.items())


def check_pins(hub: HubServer, env: dict[str, str], path: Path) -> None:
    """Going on from a checkpoint loads its commits of weights and tokenizer; without them it is refused."""
    manifest = Manifest.from_json(path.read_bytes())
    pins = (hub.commits("acme/tiny-4bit")[-1].id, hub.commits("acme/tiny")[-1].id)
    for name in ("acme/tiny", "acme/tiny-4bit"):
        hub.push(name, {"more.json": b"{}"})
    settings = rules.resolve(env, identify(env)[0])
    job, settings = inputs.load(settings, str, [manifest], download=False)
    assert (job.plan.commit, job.plan.base_commit) == pins
    inputs.for_rl(settings, job, Tally(), lambda: None)
    older = {name: value for name, value in manifest.job.items() if name != "tokenizer_commit"}
    job.found = [replace(manifest, job=older)]
    with pytest.raises(AnotherJob, match="tokenizer_commit was None, now it is"):
        inputs.determine(settings, job)


@slow
def test_a_pre_quantised_repository_is_what_both_modes_load(
    models: Path, tmp_path: Path, client_at_home: None
) -> None:
    more = {"SFT_EPOCHS": 30, "SFT_PER_DEVICE_BS": 24}
    with HubServer() as hub:
        for name, folder in (("acme/tiny", "qwen3"), ("acme/tiny-4bit", "qwen3-4bit")):
            hub.create_repo(name)
            hub.add_folder(name, models / folder)
        where = {"AUTOSLM_QUANT_REPO": "acme/tiny-4bit", "HF_ENDPOINT": hub.url, **FOUR_BIT}
        train = {**GROUPS, "init_from_adapter": FROM}
        for env in (
            harness.variables(tmp_path, "acme/tiny", "toy-rewards", TEACH, **where, **more),
            grpo_trials.variables(tmp_path, "acme/tiny", train=train, RL_USE_VLLM=0, **where),
        ):
            ended = harness.start_python(["worker.py"], env, tmp_path / "home")
            assert ended.code == 0, ended.err
            (prefetched,) = [one for one in ended.beats if one["stage"] == "model_prefetched"]
            assert prefetched["model"] == "acme/tiny-4bit"
        check_pins(hub, env, next((tmp_path / "store/rl/r1/seed0/checkpoint").glob("*/manifest.json")))
    size = (models / "qwen3-4bit" / "model.safetensors").stat().st_size
    cached = [path.stat().st_size for path in (tmp_path / "home").rglob("blobs/*")]
    assert [one for one in cached if one >= size] == [size]
    config = json.loads((tmp_path / "store/rl/r1/seed0/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "acme/tiny"


@slow
def test_weights_that_are_quantised_already_are_not_quantised_again(models: Path, tmp_path: Path) -> None:
    env = harness.variables(tmp_path, models / "qwen3-4bit", "toy-rewards", TEACH, **FOUR_BIT)
    made = sft_trials.build(env)
    assert made.plan.is_quantised and "quantization_config" not in made.plan.model_init_kwargs(made.settings)
    assert is_four_bit(made.trainer.model)
    sft_trials.check_base(made)


# --- weights that are not the whole model ---


def damaged(models: Path, folder: Path) -> Path:
    return Path(shutil.copytree(models / "llama", folder / "damaged"))


def refusal(folder: Path, model: Path) -> str:
    ended = harness.run_main(harness.variables(folder, model, "toy-words"))
    assert isinstance(ended.error, ValueError), ended.error
    assert "sft_trained" not in ended.stages and "\n" not in str(ended.error)
    return str(ended.error)


@slow
def test_a_checkpoint_that_lacks_a_tensor(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = damaged(models, tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    said = refusal(tmp_path, model)
    assert "its weights lack 1 of the model's tensors, one is model.layers.1.mlp.up_proj.weight" in said


@slow
def test_a_tokenizer_that_is_larger_than_the_embedding(models: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = damaged(models, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(model)
    assert f"its tokenizer has {len(tokenizer)} tokens, the weights of" in refusal(tmp_path, model)


@slow
def test_a_tokenizer_without_end_of_sequence_and_pad(models: Path, tmp_path: Path) -> None:
    model = damaged(models, tmp_path)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token": None, "pad_token": None}))
    assert "its tokenizer names no end-of-sequence token" in refusal(tmp_path, model)


@slow
def test_another_model_than_the_adapter_was_trained_on(models: Path, tmp_path: Path) -> None:
    spec = {"train": {**LORA, "batch_size": 8}}
    ended = harness.run_main(harness.variables(tmp_path, models / "llama", "toy-words", spec))
    assert ended.error is None, ended.error
    assert strict((tmp_path / "store" / FROM / "metrics.json").read_text())["notes"]["model_commit"] is None
    spec = {"train": {**LORA, "init_from_adapter": FROM}, "run_id": "r2"}
    model = architectures.build("qwen3", tmp_path / "other", hidden_size=128)
    ended = harness.run_main(harness.variables(tmp_path, model, "toy-words", spec))
    assert type(ended.error).__name__ == "AdapterProblem" and "\n" not in str(ended.error)
    assert "it does not fit" in str(ended.error)
