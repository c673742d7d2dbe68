"""Estimates of size, work, memory, time and cost, as tables; and what is warned about."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import recipe
from job import estimates
from job.estimates import Data, Machine, Work
from job.model_size import model_size
from job.settings import Settings
from job.weights import WeightsPlan
from recipe import Batch
from spec import JobSpec

SMOL = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
}
LLAMA_1B = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
}
QWEN_4B = {
    **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
}
EXPERTS_30B = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32},
    **{"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
DELTA_NET_35B = {
    **{"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2},
    **{"head_dim": 256, "vocab_size": 248320, "tie_word_embeddings": False},
    **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
}


def settings(spec: dict[str, Any] | None = None, **env: object) -> Settings:
    whole = {"algorithm": "sft", "environment": {"id": "x"}, "thinking": False, **(spec or {})}
    return Settings.read({name: str(value) for name, value in env.items()}, JobSpec.parse(whole))


def rl(spec: dict[str, Any] | None = None, **env: object) -> Settings:
    return settings({"algorithm": "grpo", **(spec or {})}, **env)


def plan(facts: dict[str, Any], **more: Any) -> WeightsPlan:
    fields = {
        **{"base": "b", "source": "b", "commit": None, "base_commit": None, "dtype": "bfloat16"},
        **{"model_type": "qwen3", "vocab_size": facts["vocab_size"], "context_length": 4096},
        **{"kv_bytes_per_token": 147_456, "facts": facts, **more},
    }
    return WeightsPlan(**fields)


# --- size ---


@pytest.mark.parametrize(
    ("facts", "billions", "active"),
    [
        (SMOL, 0.1345, 0.1345),
        (LLAMA_1B, 1.236, 1.236),
        (QWEN_4B, 4.02, 4.02),
        (EXPERTS_30B, 30.5, 3.0),
        (DELTA_NET_35B, 35.0, 3.0),
    ],
)
def test_parameters_are_those_of_the_model_cards(facts, billions, active):
    size = model_size(facts)
    assert size is not None
    assert size.params / 1e9 == pytest.approx(billions, rel=0.02)
    assert size.active / 1e9 == pytest.approx(active, rel=0.05)


def test_an_adapter_is_rank_times_both_sides_of_every_target():
    size = model_size(LLAMA_1B)
    assert size is not None
    assert size.lora(16, "all-linear") == 11_272_192  # what peft says of Llama 3.2 1B at rank 16
    assert size.lora(8, ("q_proj", "self_attn.v_proj")) == 16 * 8 * (2 * 2048 + 2048 + 512)
    assert size.lora(8, ("nothing",)) == 0


def test_experts_get_no_adapter_unless_named_and_are_small_in_four_bits():
    size = model_size(EXPERTS_30B)
    assert size is not None
    attention = 48 * 8 * ((2048 + 4096) * 2 + (2048 + 512) * 2)
    assert size.lora(8, "all-linear") == attention
    assert size.lora(8, ("down_proj",)) == 48 * 128 * 8 * (768 + 2048)
    assert size.weights_bytes(2, four_bit=False) / 1e9 > 57
    assert 15 < size.weights_bytes(2, four_bit=True) / 1e9 < 18


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_configuration_that_says_too_little_gives_no_estimate(missing):
    facts = {**SMOL, missing: None}
    assert model_size(facts) is None
    todo = Work(10, 1000, 0, 1.0)
    assert (
        estimates.machine(settings(), dataclasses.replace(plan(SMOL), facts=facts), Batch(4, 8), ROWS, todo)
        is None
    )


# --- work ---

ROWS = Data(tuple(range(50, 150)), 0, 0)


@pytest.mark.parametrize(
    ("env", "steps", "tokens", "passes"),
    [
        ({}, 2 * 4, 2 * sum(range(50, 150)), 2.0),
        ({"SFT_EPOCHS": 1}, 4, sum(range(50, 150)), 1.0),
        ({"SFT_MAX_STEPS": 3}, 3, round(3 * 32 * 99.5), 0.96),
    ],
)
def test_supervised_work_is_the_rows_own_tokens(env, steps, tokens, passes):
    todo = estimates.work(settings(**env), Batch(4, 8), ROWS)
    assert todo == Work(steps, tokens, 0, pytest.approx(passes))


def test_work_of_grpo_is_an_upper_bound():
    job = rl(RL_STEPS=10, RL_GROUP_SIZE=4, RL_MAX_COMPLETION=100)
    found = estimates.data(job, [60, 40, 50], 1, multi_turn=False)
    assert found == Data((40, 50, 60), 1, 100)
    # 2 prompts x 4 completions a step
    assert estimates.work(job, Batch(4, 2), found) == Work(10, 80 * 150, 80 * 100, pytest.approx(20 / 3))


def test_evaluations_are_counted_with_the_last_step() -> None:
    job = settings(AUTOSLM_EVAL_EVERY_STEPS="10", AUTOSLM_EVAL_MAX_NEW="5")
    todo = estimates.with_evaluations(job, Work(25, 100, 0, 1.0), 8)
    assert todo == Work(25, 100, 0, 1.0, evaluated_tokens=3 * 8 * 5)


def test_a_conversation_may_fill_the_engine():
    job = rl(RL_MAX_COMPLETION=100, RL_VLLM_MAX_LEN=1000)
    assert estimates.data(job, [60, 40, 50], 0, multi_turn=True).answer == 950


# --- machine ---


def test_supervised_memory_is_the_formula():
    size = model_size(SMOL)
    assert size is not None
    job = settings({"train": {"lora_rank": 8}})
    found = estimates.memory_gb(job, plan(SMOL), size, Batch(4, 8), Data((10, 500), 0, 0))
    assert found == {
        "weights": size.params * 2 / 1e9,
        "adapter": 16 * size.lora(8, "all-linear") / 1e9,
        "logits": 4 * 4 * 4 * 500 * 49152 / 1e9,
        "activations": 2 * 4 * 500 * 576 * 62 / 1e9,
        "CUDA": 1.5,
    }


def test_an_engine_that_sleeps_needs_no_room_beside_training():
    size = model_size(QWEN_4B)
    assert size is not None
    found = Data((100,), 0, 320)
    asleep, awake, without = (
        estimates.memory_gb(rl(**env), plan(QWEN_4B), size, Batch(8, 64), found)
        for env in ({}, {"RL_VLLM_SLEEP": 0}, {"RL_USE_VLLM": 0})
    )
    training = sum(asleep[name] for name in ("adapter", "logits", "activations"))
    assert awake["vLLM"] == pytest.approx((size.params * 2 + 2e9 + 2368 * 147_456) / 1e9)
    assert asleep["vLLM"] == pytest.approx(awake["vLLM"] - training)
    assert "vLLM" not in without
    assert {"sampling"} == without.keys() - asleep.keys()


def test_weights_of_known_size_are_taken_as_they_are():
    size = model_size(QWEN_4B)
    assert size is not None
    known = plan(QWEN_4B, weights_bytes=5_000_000_000)
    assert estimates.memory_gb(settings(), known, size, Batch(4, 8), ROWS)["weights"] == 5.0


def test_four_bits_and_a_cpu_change_the_weights():
    size = model_size(QWEN_4B)
    assert size is not None
    bits = settings(AUTOSLM_QUANT="4bit-qlora")
    small = estimates.memory_gb(bits, plan(QWEN_4B, four_bit=True), size, Batch(4, 8), ROWS)["weights"]
    on_cpu = settings(AUTOSLM_DEVICE="cpu")
    large = estimates.memory_gb(on_cpu, plan(QWEN_4B, dtype="float32"), size, Batch(4, 8), ROWS)
    assert small < 0.4 * size.params * 2 / 1e9 and large["weights"] == pytest.approx(4 * size.params / 1e9)
    assert "CUDA" not in large


def test_disk_is_weights_checkpoints_and_what_is_merged(tmp_path):
    size = model_size(QWEN_4B)
    assert size is not None
    checkpoints = 4 * 12 * size.lora(32, "all-linear") / 1e9
    whole = size.params * 2 / 1e9
    assert estimates.disk_gb(settings(), plan(QWEN_4B), size) == pytest.approx(whole + checkpoints)
    local = plan(QWEN_4B, base=str(tmp_path), source=str(tmp_path))
    assert estimates.disk_gb(settings(), local, size) == pytest.approx(checkpoints)
    hub = {"HF_REPO": "a/b", "AUTOSLM_MERGE": 1}
    assert estimates.disk_gb(settings(**hub), local, size) == pytest.approx(checkpoints + whole)
    in_folder = estimates.disk_gb(settings(AUTOSLM_MERGE=1), local, size)
    assert in_folder == pytest.approx(checkpoints + 2 * whole)
    small = size.weights_bytes(2, four_bit=True) / 1e9
    quantised = plan(QWEN_4B, source="q", four_bit=True, is_quantised=True)
    found = estimates.disk_gb(settings(**hub), quantised, size)
    assert found == pytest.approx(checkpoints + small + 2 * whole)


def test_hours_and_cost_are_the_formula_and_unknown_for_unknown_cards():
    size = model_size(QWEN_4B)
    assert size is not None
    card = recipe.gpu("RTX 5090")
    assert card is not None
    todo = Work(100, 10_000_000, 4_000_000, 1.0)
    seconds = size.active * (6 * 1e7 / 0.3 + 2 * 4e6 / 0.1) / 209e12
    assert estimates.hours(size, todo, card, 1) == pytest.approx(0.15 + seconds / 3600)
    assert estimates.hours(size, todo, card, 2) == pytest.approx(0.15 + seconds / 7200)
    assert estimates.hours(size, todo, None, 1) is None
    job = rl({"gpu": {"type": "RTX 5090"}})
    needs = estimates.machine(job, plan(QWEN_4B), Batch(8, 64), Data((100,), 0, 320), todo)
    assert needs is not None and needs.hours is not None
    assert needs.usd == pytest.approx(needs.hours * card.usd_per_hour)
    for other in (rl({"gpu": {"type": "Abacus"}}), rl(AUTOSLM_DEVICE="cpu")):
        needs = estimates.machine(other, plan(QWEN_4B), Batch(8, 64), Data((100,), 0, 320), todo)
        assert needs is not None and needs.hours is None and needs.usd is None


# --- warnings ---

PLENTY = Data((100,) * 1000, 0, 0)
LONG = Work(100, 1, 1, 2.0)


@pytest.mark.parametrize(
    ("job", "rows", "todo", "said"),
    [
        (settings(), PLENTY, LONG, None),
        (rl(), PLENTY, LONG, None),
        (
            settings(),
            Data((100,) * 90 + (1024,) * 10, 0, 0),
            LONG,
            "10% of the rows reach train.max_length=1024",
        ),
        (settings(), Data((100,) * 98 + (1024,) * 2, 0, 0), LONG, None),
        (settings(), Data((100,) * 31, 0, 0), LONG, "train.batch_size=32 is more than the 31 rows"),
        (rl(), Data((100,) * 900, 100, 320), LONG, "10% of the prompts are over the budget"),
        (rl(RL_GROUP_SIZE=3), PLENTY, LONG, "RL_GROUP_SIZE=3"),
        (rl({"thinking": True}, RL_MAX_COMPLETION=512), PLENTY, LONG, "reasoning will be cut off"),
        (settings(SFT_SAVE_STEPS=5), PLENTY, Work(9, 1, 0, 1.0), "only 9 optimizer steps"),
        (settings(), PLENTY, Work(100, 1, 0, 21.0), "21 passes over its 1000 rows"),
        (settings(), PLENTY, Work(50, 1, 0, 1.0), "no checkpoint before the end (train.save_every is 50)"),
    ],
)
def test_data_that_deserves_a_second_look(job, rows, todo, said):
    found = estimates.data_warnings(job, rows, todo)
    assert len(found) == (said is not None) and (said is None or said in found[0])


FITS = Machine({"weights": 10.0}, 20.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("gpu", "changes", "said"),
    [
        ({"type": "RTX 5090"}, {}, None),
        ({"type": "RTX 5090"}, {"memory_gb": {"weights": 40.0}}, "has 32 GB, the job needs about 40"),
        ({"type": "RTX 4090"}, {}, "has 24.0 GiB of memory, b in bf16 needs 28.8 GiB"),
        ({"type": "A100 80GB PCIe"}, {"memory_gb": {"weights": 77.0}}, "or set AUTOSLM_QUANT=4bit-qlora"),
        ({"type": "RTX 5090", "disk_gb": 15}, {}, "gpu.disk_gb=15: the job needs about 20 GB"),
        ({"type": "RTX 5090", "max_wall_seconds": 1800}, {}, "is 0.5 hours, the job may need 1.0"),
        ({"type": "Abacus"}, {}, "gpu.type='Abacus' is not a card known here"),
    ],
)
def test_a_machine_that_does_not_fit(gpu, changes, said):
    found = estimates.machine_warnings(
        settings({"gpu": gpu}), plan(QWEN_4B), dataclasses.replace(FITS, **changes)
    )
    assert len(found) == (said is not None) and (said is None or said in found[0])
    assert estimates.machine_warnings(settings({"gpu": gpu}, AUTOSLM_DEVICE="cpu"), plan(QWEN_4B), FITS) == []
