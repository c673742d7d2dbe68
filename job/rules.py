"""Combinations of settings that cannot be honoured, refused before anything is spent."""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

import recipe
from job import knobs
from job.settings import Identity, Settings, SettingsError
from spec import JobSpec

log = logging.getLogger(__name__)

OTHER_MODE = {
    "sft": "steps group_size temperature max_tokens kl_penalty_coef advantage_clip"
    " thinking_length_penalty_coef stop_sequences",
    "rl": "epochs max_length",
}


def resolve(env: Mapping[str, str], identity: Identity) -> Settings:
    """All settings of the run, checked; raises SettingsError."""
    settings = Settings.read(env, identity.spec)
    knobs.warn_unknown_names(Settings, env)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Raise SettingsError for the first thing that is wrong; warn about what is merely odd."""
    check_job(settings)
    check_thinking(settings)
    check_weights(settings)
    check_folders(settings)
    check_trackers(settings)
    check_processes(settings)
    check_sft(settings) if settings.mode == "sft" else check_rl(settings)
    warn_ignored(settings, settings.job)


def check_job(settings: Settings) -> None:
    spec = settings.spec
    if spec is None:
        raise SettingsError(
            "AUTOSLM_JOB_SPEC_JSON is empty and AUTOSLM_JOB_SPEC_PATH names no file: a run needs a JobSpec"
            ' that names an environment, such as {"algorithm": "sft", "environment": {"id": "owner/name"}}'
        )
    if settings.mode != spec.phase:
        raise SettingsError(
            f"RUN_MODE={settings.mode!r}: the JobSpec's algorithm is {spec.algorithm!r}, which is"
            f" RUN_MODE={spec.phase}; change one of them"
        )
    if not spec.environment.id:
        raise SettingsError(
            "JobSpec environment.id is empty: no environment specified; name one, such as 'owner/name'"
        )
    if spec.model_policy == "catalog":
        check_catalog(spec)


def check_catalog(spec: JobSpec) -> None:
    entry = recipe.CATALOG.get(spec.model.partition("@")[0])
    if entry is None:
        raise SettingsError(
            f"JobSpec model={spec.model!r}: not in the catalog ({', '.join(recipe.CATALOG)}); use one"
            " of these or set model_policy to 'allow'"
        )
    if spec.algorithm not in entry.algorithms:
        raise SettingsError(
            f"JobSpec algorithm={spec.algorithm!r}: the catalog has {entry.model_id} for"
            f" {', '.join(entry.algorithms)} only; use that or set model_policy to 'allow'"
        )


def check_thinking(settings: Settings) -> None:
    ability = recipe.catalog_model(settings.model).thinking
    if ability == "none" and settings.thinking:
        raise SettingsError(f"JobSpec thinking=true: {settings.model} cannot think; set it to false")
    if ability == "always" and not settings.thinking:
        raise SettingsError(f"JobSpec thinking=false: {settings.model} always thinks; set it to true")
    if ability == "unknown" and settings.thinking:
        log.warning("JobSpec thinking=true: whether %s can think is not known to the catalog", settings.model)


def check_weights(settings: Settings) -> None:
    if (
        settings.quant_repo
        and settings.quant == "bf16"
        and settings.origins.get("AUTOSLM_QUANT_REPO") == "variable"
    ):
        log.warning("AUTOSLM_QUANT_REPO=%s is not used: the tier is bf16", settings.quant_repo)
    if settings.quant == "4bit-qlora" and settings.mode == "rl" and settings.rl_use_vllm:
        if settings.device == "cpu":
            raise SettingsError(
                "RL_USE_VLLM=on: vLLM's CPU build has no 4-bit weights; set RL_USE_VLLM=0 with"
                " AUTOSLM_QUANT=4bit-qlora"
            )
        if settings.rl_adapter_sync == "merge":
            raise SettingsError(
                "RL_ADAPTER_SYNC=merge: an adapter cannot be added to 4-bit weights; use"
                " RL_ADAPTER_SYNC=adapter with AUTOSLM_QUANT=4bit-qlora"
            )


def check_folders(settings: Settings) -> None:
    """Refuse inputs inside the trainer's output folder, which every run begins by deleting."""
    output = settings.output_dir.resolve()
    inside = {"JobSpec model": Path(settings.model), "AUTOSLM_STORE_DIR": settings.store_dir}
    for knob, path in inside.items():
        if path.resolve().is_relative_to(output):
            raise SettingsError(f"{knob}={str(path)!r}: lies in {output}, which this run deletes; move it")


def check_trackers(settings: Settings) -> None:
    missing = [name for name in settings.report_to if not _installed(name)]
    if missing:
        raise SettingsError(
            f"AUTOSLM_REPORT_TO={','.join(settings.report_to)}: the package is missing; pip install"
            f" {' '.join(missing)}, or leave it out"
        )


def check_processes(settings: Settings) -> None:
    if settings.processes > 1:
        raise SettingsError(
            f"WORLD_SIZE={settings.processes}: not supported by this version; start one process on one GPU"
        )


def check_sft(settings: Settings) -> None:
    if settings.sft_packing and (settings.device == "cpu" or not _installed("flash_attn")):
        raise SettingsError(
            "SFT_PACKING=on: without flash attention packed rows attend to each other; install"
            " flash-attn on a GPU or turn it off"
        )
    if settings.sft_liger and not _installed("liger_kernel"):
        raise SettingsError("SFT_LIGER=on: the package is missing; pip install liger-kernel or turn it off")


def check_rl(settings: Settings) -> None:
    if settings.rl_group_size < 2:
        raise SettingsError(
            f"RL_GROUP_SIZE={settings.rl_group_size}: a group of one has no advantage; use 2 or more"
        )
    if settings.temperature == 0:
        raise SettingsError(
            "JobSpec train.temperature=0: identical samples carry no advantage; use a value > 0, such as 1.0"
        )
    if settings.rl_vllm_max_len <= settings.rl_max_completion:
        raise SettingsError(
            f"RL_VLLM_MAX_LEN={settings.rl_vllm_max_len}: must exceed the completion budget"
            f" {settings.rl_max_completion} (RL_MAX_COMPLETION or train.max_tokens); raise the"
            " first or lower the second"
        )
    if settings.rl_use_vllm and not _installed("vllm"):
        raise SettingsError("RL_USE_VLLM=on: the package is missing; pip install vllm==0.29.0 or turn it off")
    if settings.rl_use_vllm and settings.rl_adapter_sync == "adapter":
        recipe.served_rank(settings.lora_rank)


def fit_context(settings: Settings, context_length: int) -> Settings:
    """Settings whose lengths fit the model's context; SettingsError when that leaves no room for a prompt."""
    if settings.mode == "sft":
        if settings.sft_max_length > context_length:
            log.warning(
                "train.max_length=%d: cut to the model's context, %d", settings.sft_max_length, context_length
            )
        return settings.model_copy(update={"sft_max_length": min(settings.sft_max_length, context_length)})
    if settings.rl_vllm_max_len <= context_length:
        return settings
    if settings.origins.get("RL_VLLM_MAX_LEN") == "variable":
        raise SettingsError(
            f"RL_VLLM_MAX_LEN={settings.rl_vllm_max_len}: the model's context is {context_length} tokens;"
            " lower it"
        )
    if context_length <= settings.rl_max_completion:
        raise SettingsError(
            f"RL_MAX_COMPLETION={settings.rl_max_completion}: the model's context is {context_length} tokens,"
            " prompt included; lower it (or train.max_tokens)"
        )
    log.info("engine length: %d tokens, the model's context", context_length)
    return settings.model_copy(update={"rl_vllm_max_len": context_length})


def warn_ignored(settings: Settings, spec: JobSpec) -> None:
    if settings.phase != settings.mode:
        log.warning(
            "PHASE=%s differs from the mode %s: files go under %s",
            settings.phase,
            settings.mode,
            settings.prefix,
        )
    defaults = type(spec.train)()
    ignored = [
        f"train.{name}"
        for name in OTHER_MODE[settings.mode].split()
        if getattr(spec.train, name) != getattr(defaults, name)
    ]
    if ignored:
        log.warning("the JobSpec sets what %s does not use, ignored: %s", settings.mode, ", ".join(ignored))


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
