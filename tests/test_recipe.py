"""Defaults, catalog and batch arithmetic, as tables."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipe
from recipe import (
    CATALOG,
    LORA,
    MODEL,
    QWEN_VOCAB,
    RL,
    SFT,
    SFT_LOGITS_BUDGET_BYTES,
    Batch,
    catalog_model,
    engine_length,
    engine_memory,
    grpo_batch,
    grpo_completions_ceiling,
    largest_divisor,
    prompt_budget,
    sft_batch,
    sft_micro_ceiling,
)

SMALL = st.integers(1, 16)


@pytest.mark.parametrize(
    ("model_id", "params", "sft_vram", "rl_vram", "quant", "vllm", "gpu", "disk"),
    [
        ("openbmb/MiniCPM5-1B", "1.2B (Llama)", 12, 12, "bf16", True, "RTX 4090", None),
        ("Qwen/Qwen3.5-0.8B", "0.9B", 12, 12, "bf16", True, "RTX 4090", None),
        ("Qwen/Qwen3.5-2B", "2.3B", 16, 16, "bf16", True, "RTX 4090", None),
        ("Qwen/Qwen3.5-4B", "4.7B", 32, 32, "bf16", True, "RTX 5090", None),
        ("Qwen/Qwen3.5-9B", "9.7B", 32, 80, "bf16", True, "RTX 5090", None),
        ("Qwen/Qwen3.6-35B-A3B", "36B MoE, 3B active", 32, 80, "4bit-qlora", False, "A100 80GB PCIe", 160),
    ],
)
def test_catalog(model_id, params, sft_vram, rl_vram, quant, vllm, gpu, disk):
    for entry in (catalog_model(model_id), catalog_model(f"{model_id}@main"), CATALOG[model_id]):
        assert (entry.params, entry.quant, entry.quant_repo) == (params, quant, "")
        assert (entry.required_vram_gb("sft"), entry.required_vram_gb("grpo")) == (sft_vram, rl_vram)
        assert (entry.grpo_use_vllm, entry.gpu, entry.min_disk_gb) == (vllm, gpu, disk)
        assert (entry.thinking, entry.algorithms) == ("hybrid", ("sft", "grpo"))
    assert len(CATALOG) == 6


def test_a_model_outside_the_catalog():
    entry = catalog_model("me/mine@v1")
    assert (entry.quant, entry.quant_repo, entry.grpo_use_vllm, entry.thinking) == (
        "bf16",
        "",
        True,
        "unknown",
    )
    assert entry.required_vram_gb("grpo") == 0
    assert entry.model_id not in CATALOG
    assert MODEL in CATALOG


def test_recipe():
    assert dataclasses.asdict(LORA) == {"rank": 32, "alpha": 64, "dropout": 0.0}
    assert (SFT.learning_rate, SFT.warmup_fraction, SFT.batch_size, SFT.epochs) == (1e-4, 0.03, 32, 2)
    assert (SFT.per_device_batch_size, SFT.save_steps) == (4, 50)
    assert (SFT.max_length(thinking=False), SFT.max_length(thinking=True)) == (1024, 2048)
    assert (RL.learning_rate, RL.steps, RL.prompts_per_step, RL.group_size) == (1e-5, 150, 64, 8)
    assert (RL.max_prompt_length, RL.temperature, RL.top_p, RL.save_steps) == (2048, 1.0, 1.0, 20)
    assert (RL.max_completion(thinking=False), RL.max_completion(thinking=True)) == (320, 1536)
    assert (RL.completions_per_device(thinking=False), RL.completions_per_device(thinking=True)) == (8, 2)


@pytest.mark.parametrize("frozen", [LORA, SFT, RL, CATALOG[MODEL], Batch(1, 1)])
def test_constants_are_frozen(frozen):
    name = dataclasses.fields(frozen)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(frozen, name, getattr(frozen, name))


def test_catalog_is_read_only():
    with pytest.raises(TypeError):
        CATALOG["x"] = CATALOG[MODEL]  # type: ignore[index]


@pytest.mark.parametrize(
    ("n", "ceiling", "divisor"),
    [(32, 4, 4), (30, 4, 3), (7, 6, 1), (7, 7, 7), (7, 100, 7), (1, 1, 1), (12, 8, 6)],
)
def test_largest_divisor(n, ceiling, divisor):
    assert largest_divisor(n, ceiling) == divisor


@pytest.mark.parametrize(("n", "ceiling"), [(0, 4), (-4, 2), (4, 0), (4, -1)])
def test_largest_divisor_refuses(n, ceiling):
    with pytest.raises(ValueError, match=">= 1"):
        largest_divisor(n, ceiling)


@pytest.mark.parametrize(
    ("batch_size", "ceiling", "processes", "batch"),
    [
        (32, 4, 1, Batch(4, 8)),
        (32, 5, 1, Batch(4, 8)),
        (30, 4, 1, Batch(3, 10)),
        (7, 4, 1, Batch(1, 7)),
        (2, 4, 1, Batch(2, 1)),
        (32, 4, 8, Batch(4, 1)),
        (32, 4, 2, Batch(4, 4)),
        (30, 4, 3, Batch(2, 5)),
    ],
)
def test_sft_batch(batch_size, ceiling, processes, batch):
    assert sft_batch(batch_size, ceiling, processes) == batch


@given(st.integers(1, 64), SMALL, st.integers(1, 8))
def test_sft_batch_is_exact(share, ceiling, processes):
    batch = sft_batch(share * processes, ceiling, processes)
    assert batch.micro * batch.accumulation * processes == share * processes
    assert batch.micro <= ceiling
    assert not any(share % micro == 0 for micro in range(batch.micro + 1, ceiling + 1))


@pytest.mark.parametrize(
    ("batch_size", "processes", "fix"), [(32, 3, "use 30 or 33"), (2, 4, "use 4"), (33, 8, "use 32 or 40")]
)
def test_batches_that_do_not_divide_name_the_knob(batch_size, processes, fix):
    with pytest.raises(
        ValueError, match=f"^train.batch_size = {batch_size}: .*{processes} processes; {fix}$"
    ):
        sft_batch(batch_size, 4, processes)
    with pytest.raises(
        ValueError, match=rf"^train.batch_size \(RL_PROMPTS_PER_STEP\) = {batch_size}: .*{fix}$"
    ):
        grpo_batch(batch_size, 8, 4, processes)


@pytest.mark.parametrize(
    ("prompts", "group", "ceiling", "batch"),
    [
        (64, 8, 1, Batch(1, 512)),
        (64, 8, 2, Batch(2, 256)),
        (64, 8, 4, Batch(4, 128)),
        (64, 8, 8, Batch(8, 64)),
        (64, 8, 16, Batch(16, 32)),
        (3, 4, 8, Batch(6, 2)),
        (5, 8, 16, Batch(10, 4)),
        (1, 2, 8, Batch(2, 1)),
    ],
)
def test_grpo_batch(prompts, group, ceiling, batch):
    assert grpo_batch(prompts, group, ceiling) == batch


def test_grpo_batch_over_the_whole_range():
    for prompts in range(1, 17):
        for group in range(1, 17):
            for ceiling in range(1, 17):
                batch = grpo_batch(prompts, group, ceiling)
                assert batch.sequences % group == 0
                assert batch.sequences // group == prompts
                assert batch.micro <= ceiling


@given(SMALL, SMALL, SMALL, st.integers(1, 8))
def test_grpo_groups_never_span_two_processes(share, group, ceiling, processes):
    batch = grpo_batch(share * processes, group, ceiling, processes)
    assert batch.sequences % group == 0
    assert batch.sequences * processes == share * processes * group
    assert batch.micro <= ceiling


@pytest.mark.parametrize(
    ("ceiling", "length", "vocab", "budget", "lowered"),
    [
        (4, 1024, QWEN_VOCAB, 6e9, 4),
        (4, 1024, QWEN_VOCAB, SFT_LOGITS_BUDGET_BYTES, 2),
        (4, 2048, QWEN_VOCAB, 4e9, 1),
        (4, 100_000, QWEN_VOCAB, 4e9, 1),
        (4, 1024, 300, 4e9, 4),
        (4, 10, 100, 4 * 10 * 100 * 4, 4),
        (4, 10, 100, 4 * 10 * 100 * 4 - 1, 3),
    ],
)
def test_sft_micro_ceiling(ceiling, length, vocab, budget, lowered):
    assert sft_micro_ceiling(ceiling, length, vocab, budget) == lowered


@pytest.mark.parametrize(
    ("thinking", "length", "vocab", "ceiling"),
    [
        (True, 1536, QWEN_VOCAB, 2),
        (False, 320, QWEN_VOCAB, 8),
        (False, 1024, QWEN_VOCAB, 5),
        (False, 1536, QWEN_VOCAB, 3),
        (True, 8192, QWEN_VOCAB, 1),
        (False, 8192, 300, 8),
    ],
)
def test_grpo_completions_ceiling(thinking, length, vocab, ceiling):
    assert grpo_completions_ceiling(thinking, length, vocab) == ceiling


@pytest.mark.parametrize(
    ("max_prompt", "completion", "length"),
    [(2048, 320, 2368), (2048, 1536, 3584), (500, 100, 1024), (704, 320, 1024), (705, 320, 1025)],
)
def test_engine_length(max_prompt: int, completion: int, length: int) -> None:
    assert engine_length(max_prompt, completion) == length
    assert prompt_budget(length, completion) == length - completion > 0


def test_engine_memory_holds_the_batch_when_there_is_room_and_one_sequence_always() -> None:
    size = {"length": 1000, "kv_bytes_per_token": 1000, "weights_bytes": 10**9}
    card = 24 * 10**9
    whole = engine_memory(sequences=8, free_bytes=20 * 10**9, card_bytes=card, **size)
    assert whole.kv_cache_bytes == 8 * (1000 + 256) * 1000
    assert whole.share == pytest.approx((10**9 + whole.kv_cache_bytes + 2 * 10**9) / card)
    full = engine_memory(sequences=10**6, free_bytes=20 * 10**9, card_bytes=card, **size)
    assert full.kv_cache_bytes == 12 * 10**9 - 10**9
    starved = engine_memory(sequences=8, free_bytes=0, card_bytes=card, **size)
    assert starved.kv_cache_bytes == (1000 + 256) * 1000
    cardless = engine_memory(sequences=8, free_bytes=10**6, card_bytes=None, **size)
    assert (cardless.kv_cache_bytes, cardless.share) == (1_256_000, 0.45)


@pytest.mark.parametrize(("card_gb", "sft", "rl"), [(None, 2, 8), (24, 2, 8), (12, 1, 4), (80, 4, 8)])
def test_the_micro_batch_follows_the_card(card_gb, sft, rl):
    card = card_gb and int(card_gb * 1e9)
    budget = recipe.sft_logits_budget(card)
    assert recipe.sft_micro_ceiling(4, 1024, recipe.QWEN_VOCAB, budget) == sft
    assert recipe.grpo_completions_ceiling(False, 640, recipe.QWEN_VOCAB, card) == rl


@pytest.mark.parametrize(
    ("name", "type", "memory_gb"),
    [
        ("RTX 5090", "RTX 5090", 32),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 32),
        ("rtx_5090", "RTX 5090", 32),
        ("RTX4090", "RTX 4090", 24),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 96),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000", 96),
        ("NVIDIA L40S", "L40S", 48),
        ("NVIDIA L40", "L40", 48),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 80),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM", 80),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 80),
        ("NVIDIA H100 PCIe", "H100 PCIe", 80),
        ("NVIDIA H200", "H200", 141),
    ],
)
def test_a_card_is_known_by_any_spelling(name, type, memory_gb):
    found = recipe.gpu(name)
    assert found is recipe.GPUS[type]
    assert found.memory_gb == memory_gb
    assert found.usd_per_hour > 0


@pytest.mark.parametrize("name", ["", "A100", "NVIDIA A100-SXM4-40GB", "RTX", "GTX 1080", "TPU v5e"])
def test_an_unknown_card_has_no_price(name):
    assert recipe.gpu(name) is None


def test_no_two_cards_share_a_spelling():
    assert all(recipe.gpu(name) is one for one in recipe.GPUS.values() for name in (one.type, *one.also))


def test_every_card_of_the_catalog_is_large_enough_for_its_model():
    for model in recipe.CATALOG.values():
        assert recipe.GPUS[model.gpu].memory_gb >= model.min_vram_gb
