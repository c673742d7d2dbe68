"""An adapter that a run goes on from: fetched, loaded as the trainable one, and proven to be what it says.

Anything wrong with it is an error: a run that quietly began from the base would be paid for, worth nothing.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import recipe
from accounting import in_brief
from delivery.patience import ask_again
from delivery.store import Store, open_store
from job.settings import Settings, SettingsError
from job.weights import EXCLUDED_MODULES, EXPERT_MODULES, WeightsPlan

log = logging.getLogger(__name__)

SOURCE = re.compile(r"(?:(?P<repo>[\w.-]+/[\w.-]+):)?(?P<prefix>[\w-][\w.-]*(?:/[\w-][\w.-]*)*)")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class AdapterProblem(ValueError):
    """An adapter that cannot be gone on from."""


def policy(settings: Settings, plan: WeightsPlan, folder: Path | None) -> Any:
    """The model that has the fetched adapter already, None for a fresh run."""
    if folder is None:
        return None
    model = load(settings, plan, folder)
    shutil.rmtree(folder)
    return model


def adapter_store(settings: Settings) -> Store | None:
    """The store that holds the adapter of `train.init_from_adapter`, None when the run starts afresh."""
    text = settings.init_from_adapter
    if not text:
        return None
    parts = SOURCE.fullmatch(text)
    if parts is None:
        raise SettingsError(
            f"JobSpec train.init_from_adapter={text!r}: must be a prefix in the store, such as"
            " 'sft/my-run/seed0', or 'owner/repo:prefix'"
        )
    repo = parts["repo"] or settings.hf_repo
    return open_store(repo, settings.store_dir, parts["prefix"], settings.token, settings.endpoint)


def fetch(settings: Settings, plan: WeightsPlan) -> Path | None:
    """Bring the adapter's files into the work folder; AdapterProblem when they cannot be this run's.

    All that shows without the base model is refused here.
    """
    store = adapter_store(settings)
    if store is None:
        return None
    names = ask_again(store.list)("adapter")
    missing = [name for name in (CONFIG, WEIGHTS) if f"adapter/{name}" not in names]
    if missing:
        raise _problem(settings, f"{store.location}/adapter has no {' and no '.join(missing)}")
    folder = settings.work_dir / "evdl"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        ask_again(store.fetch)(f"adapter/{name}", folder / name)
    check(settings, plan, folder)
    return folder


def check(settings: Settings, plan: WeightsPlan, folder: Path) -> None:
    """Refuse what cannot be gone on from, as far as its two files tell."""
    config, saved = _read(settings, folder)
    check_config(settings, plan, config)
    check_modules(settings, plan, saved)
    _check_tensors(settings, config["r"], saved)


def check_config(settings: Settings, plan: WeightsPlan, config: Mapping[str, Any]) -> None:
    """Refuse another base (of folders only shapes can tell) and another rank; warn about another alpha."""
    base_id, rank = config.get("base_model_name_or_path"), config.get("r")
    is_folder = base_id and Path(base_id).is_dir()
    if base_id != plan.base and not plan.is_local and not is_folder:
        raise _problem(settings, f"it was trained on {base_id!r}, this run's model is {plan.base!r}")
    if rank != settings.lora_rank:
        raise _problem(
            settings, f"its rank is {rank}, train.lora_rank is {settings.lora_rank}; make them equal"
        )
    start = config.get("init_lora_weights")  # loading an adapter of pissa or its like changes the base
    if isinstance(start, str) and start != "gaussian":
        raise _problem(settings, f"its init_lora_weights is {start!r}; convert it to a plain LoRA first")
    if config.get("lora_alpha") != settings.lora_alpha:
        log.warning(
            "train.lora_alpha=%d is not used: the adapter of train.init_from_adapter has %s",
            settings.lora_alpha,
            config.get("lora_alpha"),
        )
    if config.get("lora_dropout"):
        log.warning(
            "the adapter of train.init_from_adapter was trained with a dropout of %s; this run has none",
            config["lora_dropout"],
        )


def check_modules(settings: Settings, plan: WeightsPlan, names: Iterable[str]) -> None:
    """Refuse tensors of modules that are not trained, or that vLLM cannot serve an adapter on."""
    excluded = [name for name in names if plan.is_multimodal and re.fullmatch(EXCLUDED_MODULES, name)]
    if excluded:
        raise _problem(settings, f"the model is trained as text, and it has {min(excluded)}")
    experts = [name for name in names if not EXPERT_MODULES.isdisjoint(name.split("."))]
    if not experts or not plan.has_experts or plan.is_multimodal:
        return
    if plan.four_bit:
        raise _problem(
            settings,
            f"experts in 4 bits cannot be given an adapter, and it has {min(experts)};"
            " set AUTOSLM_QUANT=bf16",
        )
    if settings.mode == "rl" and settings.rl_use_vllm:
        raise _problem(
            settings,
            f"vLLM cannot serve an adapter on experts or router, and it has {min(experts)};"
            " set RL_USE_VLLM=0",
        )


def load(settings: Settings, plan: WeightsPlan, folder: Path) -> Any:
    """Return the base model with the adapter as its one trainable part, proven to be really there."""
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict

    _, saved = _read(settings, folder)
    config = LoraConfig.from_pretrained(str(folder))
    config.lora_dropout = recipe.LORA.dropout
    base = plan.load(settings)
    try:
        model = PeftModel.from_pretrained(base, str(folder), is_trainable=True, config=config)
    except (RuntimeError, ValueError) as error:
        raise _problem(settings, f"it does not fit {plan.base}: {in_brief(error)}") from error
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    unmatched = set(saved) ^ set(loaded)
    if unmatched or not loaded:
        raise _problem(
            settings, f"{len(unmatched)} of its tensors match nothing in {plan.base}, one is {min(unmatched)}"
        )
    if not any(tensor.any() for name, tensor in loaded.items() if "lora_B" in name):
        raise _problem(settings, "every lora_B in it is zero: it was never trained")
    log.info("going on from %s, %d tensors", settings.init_from_adapter, len(loaded))
    return model


def check_reference(settings: Settings, model: Any) -> None:
    """Raise unless the trainer keeps a frozen copy of the loaded adapter: KL would pull to the bare base."""
    named = dict(model.named_parameters())
    for name, mine in named.items():
        if ".default." not in name:
            continue
        copy = named.get(name.replace(".default.", ".ref."))
        if copy is None or copy.requires_grad or not copy.to(mine.dtype).equal(mine):
            raise _problem(settings, f"TRL keeps no frozen copy of {name} for the KL term; pin trl==1.16.0")


def _check_tensors(settings: Settings, rank: int, saved: dict[str, Any]) -> None:
    for name, tensor in saved.items():
        # The experts of a layer are stacked, each with a multiple of the rank.
        found = tensor.shape[0] % rank or rank if ".experts." in name else tensor.shape[0]
        if "lora_A" in name and found != rank:
            raise _problem(settings, f"its config says rank {rank}, but {name} has rank {tensor.shape[0]}")
        if not tensor.isfinite().all():
            raise _problem(settings, f"{name} holds NaN or infinity: its training failed")


def _read(settings: Settings, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _problem(settings, f"{CONFIG} cannot be read: {error}") from error
    try:
        return config, load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise _problem(settings, f"{WEIGHTS} cannot be read: {error}") from error


def _problem(settings: Settings, what: str) -> AdapterProblem:
    return AdapterProblem(f"JobSpec train.init_from_adapter={settings.init_from_adapter!r}: {what}")
