"""What happens when the user did not say: defaults, model catalog, batch arithmetic. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Quant = Literal["bf16", "4bit-qlora"]
ThinkingCapability = Literal["hybrid", "always", "none", "unknown"]

MODEL = "Qwen/Qwen3.5-4B"
QWEN_VOCAB = 248_320
RL_LOGITS_BUDGET_BYTES = 6_000_000_000  # a quarter of a 24 GB card
SFT_LOGITS_BUDGET_BYTES = 3_000_000_000  # half a 24 GB card, divided by the four copies that a step holds
BUDGETS_CARD_BYTES = 24_000_000_000
FLOAT32_BYTES = 4
ENGINE_SLACK_TOKENS = 256  # blocks are filled from the start of a sequence
ENGINE_FREE_SHARE = 0.6  # the rest is for the trainer's activations and logits
ENGINE_OVERHEAD_BYTES = 2_000_000_000
CARD_TOLERANCE = 0.9  # cards report a little less than their name says
CARD_OVERHEAD_BYTES = 1_000_000_000  # of CUDA and its libraries
ENGINE_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


# --- catalog ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CatalogModel:
    """What is known about a model; the defaults describe one nobody has looked at."""

    model_id: str
    params: str = ""
    min_vram_gb: int = 0
    gpu: str = ""
    grpo_min_vram_gb: int | None = None
    quant: Quant = "bf16"
    quant_repo: str = ""
    grpo_use_vllm: bool = True
    min_disk_gb: int | None = None
    thinking: ThinkingCapability = "unknown"
    algorithms: tuple[str, ...] = ("sft", "grpo")

    def required_vram_gb(self, algorithm: str) -> int:
        """GB of GPU memory the job needs; 0 when unknown."""
        return (self.grpo_min_vram_gb or self.min_vram_gb) if algorithm == "grpo" else self.min_vram_gb

    def required_vram_bytes(self, algorithm: str) -> int:
        """What a card of that class reports at least; 0 when unknown."""
        return int(self.required_vram_gb(algorithm) * CARD_TOLERANCE * 2**30)


_MODELS = (
    CatalogModel("openbmb/MiniCPM5-1B", "1.2B (Llama)", 12, "RTX 4090", thinking="hybrid"),
    CatalogModel("Qwen/Qwen3.5-0.8B", "0.9B", 12, "RTX 4090", thinking="hybrid"),
    CatalogModel("Qwen/Qwen3.5-2B", "2.3B", 16, "RTX 4090", thinking="hybrid"),
    CatalogModel("Qwen/Qwen3.5-4B", "4.7B", 32, "RTX 5090", thinking="hybrid"),
    CatalogModel("Qwen/Qwen3.5-9B", "9.7B", 32, "RTX 5090", grpo_min_vram_gb=80, thinking="hybrid"),
    CatalogModel(
        "Qwen/Qwen3.6-35B-A3B",
        "36B MoE, 3B active",
        32,
        "A100 80GB PCIe",
        grpo_min_vram_gb=80,
        quant="4bit-qlora",
        grpo_use_vllm=False,
        min_disk_gb=160,
        thinking="hybrid",
    ),
)
CATALOG: Mapping[str, CatalogModel] = MappingProxyType({model.model_id: model for model in _MODELS})


def catalog_model(model_id: str) -> CatalogModel:
    """The entry of `model_id` (any `@revision`), or the one of an unknown model."""
    return CATALOG.get(model_id.partition("@")[0], CatalogModel(model_id))


# --- machines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A card as the market names it; the price is a rough on-demand one, an estimate and never a bill.

    `tflops` are those of dense bf16 matrices with float32 accumulation, from the makers' data sheets.
    """

    type: str
    memory_gb: int
    usd_per_hour: float
    tflops: int
    also: tuple[str, ...] = ()  # other names, beyond spelling


_GPUS = (
    Gpu("RTX 3090", 24, 0.46, 71),
    Gpu("RTX 4090", 24, 0.69, 165),
    Gpu("RTX 5090", 32, 0.94, 209),
    Gpu("RTX A4000", 16, 0.25, 77),
    Gpu("RTX A4500", 20, 0.25, 95),
    Gpu("RTX A5000", 24, 0.27, 111),
    Gpu("RTX A6000", 48, 0.49, 155, ("A6000",)),
    Gpu("RTX 6000 Ada", 48, 0.77, 364),
    Gpu("RTX PRO 6000", 96, 1.84, 504, ("RTX PRO 6000 WK", "RTX PRO 6000 MaxQ")),
    Gpu("L4", 24, 0.43, 121),
    Gpu("L40", 48, 0.99, 181),
    Gpu("L40S", 48, 0.86, 362),
    Gpu("A40", 48, 0.40, 150),
    Gpu("A100 80GB PCIe", 80, 1.39, 312, ("A100 PCIe",)),
    Gpu("A100 SXM", 80, 1.49, 312, ("A100 80GB", "A100 80GB SXM", "A100 SXM4 80GB")),
    Gpu("H100 PCIe", 80, 2.39, 756, ("H100 80GB PCIe",)),
    Gpu("H100 SXM", 80, 2.99, 989, ("H100", "H100 80GB", "H100 80GB HBM3", "H100 SXM5", "H100 80GB SXM")),
    Gpu("H100 NVL", 94, 3.07, 835),
    Gpu("H200", 141, 3.99, 989, ("H200 SXM",)),
    Gpu("B200", 180, 5.98, 2250),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({one.type: one for one in _GPUS})
_GPU_NOISE = re.compile(
    r"nvidia|geforce|tesla|generation|blackwell|(?:server|workstation|max-?q workstation) edition"
    r"|[^a-z0-9]"
)


def gpu(type: str) -> Gpu | None:
    """The card of this name, however it is spelt ("NVIDIA GeForce RTX 5090"); None when it is not known."""
    return _GPUS_BY_SPELLING.get(_spelling(type))


def _spelling(name: str) -> str:
    return _GPU_NOISE.sub("", name.lower())


_GPUS_BY_SPELLING = {_spelling(name): one for one in _GPUS for name in (one.type, *one.also)}


# --- recipe -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoraRecipe:
    rank: int = 32
    alpha: int = 64
    dropout: float = 0.0


@dataclass(frozen=True)
class SftRecipe:
    learning_rate: float = 1e-4
    warmup_fraction: float = 0.03
    batch_size: int = 32
    epochs: int = 2
    per_device_batch_size: int = 4
    save_steps: int = 50

    def max_length(self, thinking: bool) -> int:
        """Tokens per row."""
        return 2048 if thinking else 1024


@dataclass(frozen=True)
class RlRecipe:
    learning_rate: float = 1e-5
    steps: int = 150
    prompts_per_step: int = 64
    group_size: int = 8
    max_prompt_length: int = 2048
    min_engine_length: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    save_steps: int = 20
    fallback_gpu_utilization: float = 0.45

    def max_completion(self, thinking: bool) -> int:
        """Tokens per completion."""
        return 1536 if thinking else 320

    def completions_per_device(self, thinking: bool) -> int:
        """Micro-batch ceiling before logits memory is looked at."""
        return 2 if thinking else 8


LORA, SFT, RL = LoraRecipe(), SftRecipe(), RlRecipe()


# --- batches ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Sequences one process puts through the model at once, and how often per optimizer step."""

    micro: int
    accumulation: int

    @property
    def sequences(self) -> int:
        """Sequences of one process per optimizer step."""
        return self.micro * self.accumulation


def largest_divisor(n: int, ceiling: int) -> int:
    """The largest divisor of `n` not above `ceiling`."""
    if n < 1 or ceiling < 1:
        raise ValueError(f"largest_divisor({n}, {ceiling}): both must be >= 1")
    return next(divisor for divisor in range(min(n, ceiling), 0, -1) if n % divisor == 0)


def sft_batch(batch_size: int, ceiling: int, processes: int = 1) -> Batch:
    """Split `batch_size` into micro x accumulation x processes exactly; ValueError when it cannot be."""
    return _split(_share("train.batch_size", batch_size, processes), ceiling)


def sft_micro_ceiling(ceiling: int, length: int, vocab: int, budget_bytes: float) -> int:
    """Lower a micro-batch ceiling until float32 logits fit `budget_bytes`, but not below 1."""
    return max(1, min(ceiling, int(budget_bytes // (length * vocab * FLOAT32_BYTES))))


def sft_steps(rows: int, batch_size: int, epochs: int, cap: int = 0) -> int:
    """Optimizer steps of a supervised run; the last one of an epoch may be smaller. `cap` 0 is none."""
    return cap or epochs * -(-rows // batch_size)


def grpo_batch(prompts: int, group: int, ceiling: int, processes: int = 1) -> Batch:
    """Split `prompts` whole groups per step over the processes exactly; ValueError when it cannot be.

    Sizes are in completions, as TRL counts. No group spans two processes.
    """
    return _split(_share("train.batch_size (RL_PROMPTS_PER_STEP)", prompts, processes) * group, ceiling)


def sft_logits_budget(card_bytes: int | None) -> float:
    """Bytes that the logits of a micro-batch may take, in proportion to the card; None: a 24 GB card."""
    return SFT_LOGITS_BUDGET_BYTES * (card_bytes or BUDGETS_CARD_BYTES) / BUDGETS_CARD_BYTES


def grpo_completions_ceiling(thinking: bool, length: int, vocab: int, card_bytes: int | None = None) -> int:
    """Micro-batch ceiling in completions when none is set; a card below 24 GB lowers it.

    `length` is the completion budget, or the whole transcript of a multi-turn rollout, in tokens.
    """
    share = min(1.0, (card_bytes or BUDGETS_CARD_BYTES) / BUDGETS_CARD_BYTES)
    ceiling = RL.completions_per_device(thinking)
    return sft_micro_ceiling(ceiling, length, vocab, RL_LOGITS_BUDGET_BYTES * share)


def _share(knob: str, batch_size: int, processes: int) -> int:
    share, rest = divmod(batch_size, processes)
    if rest:
        choices = [n for n in (batch_size - rest, batch_size - rest + processes) if n]
        raise ValueError(
            f"{knob} = {batch_size}: must be a multiple of the {processes} processes;"
            f" use {' or '.join(map(str, choices))}"
        )
    return share


def _split(total: int, ceiling: int) -> Batch:
    micro = largest_divisor(total, ceiling)
    return Batch(micro, total // micro)


# --- lengths ------------------------------------------------------------------------------------------------


def engine_length(max_prompt: int, completion: int) -> int:
    """Tokens one sequence of the engine may hold when nobody says."""
    return max(RL.min_engine_length, max_prompt + completion)


def prompt_budget(engine_length: int, completion: int) -> int:
    """Tokens a prompt may have so that a full completion still fits."""
    return engine_length - completion


# --- adapter ------------------------------------------------------------------------------------------------


def served_rank(rank: int) -> int:
    """The smallest rank that vLLM allocates for and that holds `rank`; ValueError above the largest."""
    for served in ENGINE_LORA_RANKS:
        if rank <= served:
            return served
    raise ValueError(
        f"JobSpec train.lora_rank={rank}: vLLM serves ranks up to {ENGINE_LORA_RANKS[-1]}; lower it, or set"
        " RL_ADAPTER_SYNC=merge"
    )


# --- memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardNeed:
    """Bytes of GPU memory below which a job cannot work, what needs them, and settings that need less."""

    card_bytes: int
    job: str
    knobs: tuple[str, ...] = ()

    def refusal(self, card: str, found_bytes: int) -> str | None:
        """Why `card` will not do, in one line; None when it may."""
        if found_bytes >= self.card_bytes:
            return None
        choices = ", or ".join(("rent a larger card", *(f"set {one}" for one in self.knobs)))
        return (
            f"{card} has {found_bytes / 2**30:.1f} GiB of memory, {self.job} needs"
            f" {self.card_bytes / 2**30:.1f} GiB; {choices}"
        )


def least_card_bytes(weights_bytes: int, serves: bool) -> int:
    """Bytes that no run works without: the weights, a second set in a colocated engine; 0 when not known."""
    return weights_bytes * (2 if serves else 1) + CARD_OVERHEAD_BYTES if weights_bytes else 0


@dataclass(frozen=True)
class EngineMemory:
    """What the colocated engine is given: bytes of KV cache, and its share of the card (0 to 1)."""

    kv_cache_bytes: int
    share: float


def engine_memory(
    *,
    sequences: int,
    length: int,
    kv_bytes_per_token: int,
    state_bytes: int = 0,
    weights_bytes: int,
    free_bytes: int,
    card_bytes: int | None,
) -> EngineMemory:
    """Size the KV cache for the whole batch at full length, or what is free beside a second set of weights.

    Never less than one sequence, or the engine could not start at all. `state_bytes` are those of a sequence
    of any length. `card_bytes` is None without a card.
    """
    one = (length + ENGINE_SLACK_TOKENS) * kv_bytes_per_token + state_bytes
    room = free_bytes if card_bytes is None else int(free_bytes * ENGINE_FREE_SHARE) - weights_bytes
    kv = max(one, min(sequences * one, room))
    if card_bytes is None:
        return EngineMemory(kv, RL.fallback_gpu_utilization)
    return EngineMemory(kv, min(0.9, (weights_bytes + kv + ENGINE_OVERHEAD_BYTES) / card_bytes))
