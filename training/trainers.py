"""TRL's trainers, configured from the settings, and what they lack.

What they lack is written as mixins: inheriting from TRL's classes here would import torch with this module.
"""

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import recipe
from job import repository
from job.chat import Chat, Row
from job.dataset import Prompts
from job.environment import Environment
from job.settings import Settings, SettingsError
from job.weights import EXPERT_TARGETS, WeightsPlan
from training import engine, gpu, trackers, warm_start
from training.conversations import Way
from training.fitting import FittingPolicy, FittingTrainer
from training.history import MeasuredTrainer
from training.midrun import GradientFailure
from training.policy import PolicyTrainer
from training.sampler import stop_arguments
from training.saving import SavingTrainer

log = logging.getLogger(__name__)


def import_stack(settings: Settings) -> None:
    """Import what building a trainer will: seconds that would otherwise come after the weights are there."""
    kinds = {"sft": ("trl.trainer.sft_trainer",), "rl": ("trl.trainer.grpo_trainer",)}
    served = ("vllm.entrypoints.llm",) if settings.mode == "rl" and settings.rl_use_vllm else ()
    for name in ("peft", *kinds[settings.mode], *served):
        importlib.import_module(name)


def sft_trainer(
    settings: Settings,
    plan: WeightsPlan,
    chat: Chat,
    rows: Sequence[Row],
    batch: recipe.Batch,
    callbacks: Sequence[Any],
    policy: Any = None,
) -> Any:
    """A TRL `SFTTrainer` over rows that are tokens and labels already: TRL neither renders nor cuts them.

    `policy` is a model that has its adapter already; None loads the base and gives it a fresh one.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = sft_arguments(settings, plan, batch, len(rows))
    columns = {"input_ids": [row.ids for row in rows], "labels": [row.labels for row in rows]}
    trainer = type("SupervisedTrainer", (FittingTrainer, SavingTrainer, MeasuredTrainer, SFTTrainer), {})(
        model=plan.load(settings) if policy is None else policy,
        args=SFTConfig(**arguments),
        train_dataset=Dataset.from_dict(columns),
        processing_class=chat.tokenizer,
        peft_config=plan.lora_config(settings) if policy is None else None,
        callbacks=list(callbacks),
    )
    # transformers 5.24 says that multimodal models cannot be told how many tokens a step has, and would weigh
    # every micro-batch alike; TRL's loss (1.16) is its own, and can. To be removed when TRL says so itself.
    trainer.model_accepts_loss_kwargs = True
    check_targets(settings, trainer.model)
    return plainly(trainer)


def check_targets(settings: Settings, model: Any) -> None:
    """Refuse a target that names no module: peft only complains when none of them does."""
    if isinstance(settings.lora_targets, str):
        return
    adapted = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    # An adapter on stacked experts is on the module that holds them, whichever of their weights was named.
    stacked = EXPERT_TARGETS if any(".experts" in name for name in adapted) else frozenset()
    unknown = [
        one
        for one in settings.lora_targets
        if one.rpartition(".")[2] not in stacked and not any(name.endswith(f".{one}") for name in adapted)
    ]
    if unknown:
        raise SettingsError(
            f"LORA_TARGETS={','.join(settings.lora_targets)}: the model has no module {unknown[0]!r};"
            " name its linear layers, such as q_proj,v_proj, or use all-linear"
        )


def sft_arguments(settings: Settings, plan: WeightsPlan, batch: recipe.Batch, rows: int) -> dict[str, Any]:
    """Keyword arguments of `SFTConfig`."""
    steps = recipe.sft_steps(rows, settings.sft_batch_size, settings.sft_epochs, settings.sft_max_steps)
    fraction = recipe.SFT.warmup_fraction
    return {
        **common_arguments(settings, plan, batch),
        "num_train_epochs": settings.sft_epochs,
        "max_steps": settings.sft_max_steps or -1,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "linear",
        # Below 1 it is a fraction of the steps, rounded up: a very short run would be all warm-up.
        "warmup_steps": fraction if steps * fraction >= 1 else 0,
        "logging_steps": 10,
        "include_num_input_tokens_seen": "non_padding",
        "max_length": settings.sft_max_length,
        "packing": settings.sft_packing,
        "use_liger_kernel": settings.sft_liger,
        "dataset_kwargs": None if settings.sft_packing else {"skip_prepare_dataset": True},
    }


def sft_batch(settings: Settings, plan: WeightsPlan) -> recipe.Batch:
    """Micro-batch and accumulation, after the logits of one micro-batch have been made to fit."""
    budget = recipe.sft_logits_budget(gpu.card_bytes(settings.device))
    ceiling = recipe.sft_micro_ceiling(
        settings.sft_per_device_bs, settings.sft_max_length, plan.vocab_size, budget
    )
    return recipe.sft_batch(settings.sft_batch_size, ceiling)


def rl_batch(settings: Settings, plan: WeightsPlan, env: Environment, prompts: int) -> recipe.Batch:
    """Micro-batch in completions and accumulation; no more prompts a step than there are."""
    if settings.rl_prompts_per_step > prompts:
        log.warning(
            "RL_PROMPTS_PER_STEP=%d: only %d prompts are left, using these",
            settings.rl_prompts_per_step,
            prompts,
        )
    length = settings.rl_vllm_max_len if env.multi_turn else settings.rl_max_completion
    ceiling = settings.rl_per_device_prompts or recipe.grpo_completions_ceiling(
        settings.thinking, length, plan.vocab_size, gpu.card_bytes(settings.device)
    )
    return recipe.grpo_batch(min(settings.rl_prompts_per_step, prompts), settings.rl_group_size, ceiling)


def common_arguments(settings: Settings, plan: WeightsPlan, batch: recipe.Batch) -> dict[str, Any]:
    """What both trainers are told."""
    on_gpu = settings.device == "cuda"
    return {
        "output_dir": str(settings.output_dir),
        "per_device_train_batch_size": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "save_steps": settings.save_steps,
        "save_total_limit": 1,
        "save_only_model": False,
        "seed": settings.seed,
        "bf16": plan.dtype == "bfloat16",
        "use_cpu": not on_gpu,
        **checkpointing(plan, on_gpu),
        **trackers.arguments(settings),
        "logging_nan_inf_filter": False,  # it would log the mean of earlier losses instead of the NaN
        "disable_tqdm": True,  # `delivery.terminal` draws the one bar of a run
    }


def checkpointing(plan: WeightsPlan, is_on: bool) -> dict[str, Any]:
    """Whether and how activations are computed again in the backward pass."""
    how = {"use_reentrant": plan.reentrant} if is_on else None
    return {"gradient_checkpointing": is_on, "gradient_checkpointing_kwargs": how}


def grpo_trainer(
    settings: Settings,
    plan: WeightsPlan,
    chat: Chat,
    prompts: Prompts,
    batch: recipe.Batch,
    way: Way,
    callbacks: Sequence[Any],
    policy: Any = None,
) -> Any:
    """A TRL `GRPOTrainer` that samples from our engine; `policy` is as for SFT."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    kind = type(
        "PolicyTrainer", (PolicyTrainer, FittingPolicy, SavingTrainer, MeasuredTrainer, GRPOTrainer), {}
    )
    arguments = {**grpo_arguments(settings, plan, batch), **way.arguments}
    with engine.in_place_of_trls(engine_options(settings, plan, chat)):
        trainer = kind(
            model=plan.load(settings) if policy is None else policy,
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({**prompts.columns, **way.columns}),
            processing_class=chat.tokenizer,
            reward_funcs=way.reward,
            peft_config=plan.lora_config(settings) if policy is None else None,
            callbacks=list(callbacks),
            rollout_func=way.rollout,
            tools=list(way.tools) or None,
        )
    check_targets(settings, trainer.model)
    if policy is not None and settings.kl_penalty_coef:
        warm_start.check_reference(settings, trainer.model)
    trainer.follow(settings, chat, way)
    return plainly(trainer)


def grpo_arguments(settings: Settings, plan: WeightsPlan, batch: recipe.Batch) -> dict[str, Any]:
    """Keyword arguments of `GRPOConfig`."""
    return {
        **common_arguments(settings, plan, batch),
        "max_steps": settings.rl_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": 1,
        "num_generations": settings.rl_group_size,
        "max_completion_length": settings.rl_max_completion,
        "temperature": settings.temperature,
        "top_p": recipe.RL.top_p,
        "beta": settings.kl_penalty_coef,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        # a stop string leaves no end-of-turn token, so everything would count as truncated
        "mask_truncated_completions": not settings.stop_sequences,
        "generation_kwargs": stop_arguments(settings) if settings.rl_use_vllm else None,
        "use_vllm": settings.rl_use_vllm,
        "vllm_mode": "colocate",
        "vllm_max_model_length": settings.rl_vllm_max_len,
        "vllm_enable_sleep_mode": settings.engine_sleeps,
        "remove_unused_columns": False,
    }


def engine_options(settings: Settings, plan: WeightsPlan, chat: Chat) -> engine.EngineOptions:
    """How the colocated engine is built."""
    return engine.EngineOptions(
        weights=plan.folder(settings),
        tokenizer=repository.description(settings, plan.base, plan.base_commit),
        dtype=plan.dtype,
        sync=settings.rl_adapter_sync,
        lora_rank=settings.lora_rank,
        max_length=settings.rl_vllm_max_len,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        state_bytes=plan.state_bytes,
        memory_share=settings.rl_vllm_gpu_util,
        eager=settings.rl_vllm_eager,
        sleep=settings.engine_sleeps,
        text_only=settings.text_only and plan.is_multimodal,
        four_bit=plan.four_bit,
        stop_ids=tuple(chat.stop_ids),
        seed=settings.seed,
    )


def plainly(trainer: Any) -> Any:
    """Take out the callback that prints raw log dictionaries where there is no terminal."""
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def save_adapter(trainer: Any, tokenizer: Any, plan: WeightsPlan, folder: Path) -> None:
    """Write the adapter, naming the base model as the user did, and the tokenizer."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not any(weight.any() for name, weight in model.named_parameters() if "lora_B.default" in name):
        raise GradientFailure("the adapter is still zero: no step had a learning rate above 0 and a gradient")
    for config in model.peft_config.values():
        config.base_model_name_or_path = plan.base
    model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
