"""TRL's trainers, configured from the settings."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import recipe
from job.chat import Row
from job.settings import Settings
from job.weights import WeightsPlan


def sft_trainer(
    settings: Settings,
    plan: WeightsPlan,
    tokenizer: Any,
    rows: Sequence[Row],
    batch: recipe.Batch,
    callbacks: Sequence[Any],
) -> Any:
    """A TRL `SFTTrainer` over rows that are already tokens and labels: TRL neither renders nor cuts them."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    columns = {"input_ids": [row.ids for row in rows], "labels": [row.labels for row in rows]}
    trainer = SFTTrainer(
        model=plan.source,
        args=SFTConfig(**sft_arguments(settings, plan, batch)),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        peft_config=plan.lora_config(settings),
        callbacks=list(callbacks),
    )
    return plainly(trainer)


def sft_arguments(settings: Settings, plan: WeightsPlan, batch: recipe.Batch) -> dict[str, Any]:
    """Keyword arguments of `SFTConfig`."""
    return {
        **common_arguments(settings, plan, batch),
        "num_train_epochs": settings.sft_epochs,
        "max_steps": settings.sft_max_steps or -1,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": recipe.SFT.warmup_fraction,  # below 1 it is a fraction of the steps
        "logging_steps": 10,
        "max_length": settings.sft_max_length,
        "packing": settings.sft_packing,
        "use_liger_kernel": settings.sft_liger,
        "dataset_kwargs": None if settings.sft_packing else {"skip_prepare_dataset": True},
    }


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
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": on_gpu,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if on_gpu else None,
        "model_init_kwargs": model_init_kwargs(settings, plan),
        "report_to": [],
        "include_num_input_tokens_seen": "non_padding",
        "logging_nan_inf_filter": False,  # it would log the mean of earlier losses instead of the NaN
        "disable_tqdm": not sys.stderr.isatty(),
    }


def model_init_kwargs(settings: Settings, plan: WeightsPlan) -> dict[str, Any]:
    """Keyword arguments that TRL loads the model with."""
    attention = {"attn_implementation": "flash_attention_2"} if settings.sft_packing else {}
    return {**plan.model_init_kwargs(), **attention}


def plainly(trainer: Any) -> Any:
    """Take out the callback that prints raw log dictionaries where there is no terminal."""
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def save_adapter(trainer: Any, tokenizer: Any, plan: WeightsPlan, folder: Path) -> None:
    """Write the adapter, naming the base model as the user did, and the tokenizer."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    for config in model.peft_config.values():
        config.base_model_name_or_path = plan.source
    model.save_pretrained(folder, selected_adapters=["default"])
    tokenizer.save_pretrained(folder)
