"""The adapter merged into its base: a checkpoint of its own, made from fresh weights on the CPU.

The base in the trainer's memory is never touched; a 4-bit run's adapter goes into the weights that were
quantised, as they were before.
"""

import gc
import logging
import shutil
from pathlib import Path
from typing import Any

from job.settings import Settings, SettingsError
from job.weights import WeightsPlan

log = logging.getLogger(__name__)

PROCESSOR_FILES = "*processor*.json"  # loaders of multimodal checkpoints ask for them


def check(settings: Settings, plan: WeightsPlan) -> None:
    """Refuse a base that has no unquantised weights to merge into."""
    if settings.merge and plan.is_quantised and plan.source == plan.base:
        raise SettingsError(
            f"AUTOSLM_MERGE=on: the weights of {plan.base!r} are 4-bit and cannot take an adapter; turn it"
            " off, or name the model they were made from and put them into AUTOSLM_QUANT_REPO"
        )


def merge(settings: Settings, plan: WeightsPlan, tokenizer: Any, adapter: Path, folder: Path) -> None:
    """Write base + adapter in bfloat16 to `folder`, as a checkpoint that loads like the base did.

    It has the base's architecture, tensor names and generation config, and the tokenizer with its template.
    """
    from peft import PeftModel

    plan = plan.unquantised()
    shutil.rmtree(folder, ignore_errors=True)
    base = plan.load(settings.model_copy(update={"sft_packing": False}))  # its attention needs a GPU
    model = PeftModel.from_pretrained(base, str(adapter), torch_device="cpu")
    # Each sum is made in float32 and rounded once; `safe_merge` would round what is added first.
    model.merge_and_unload().save_pretrained(folder)
    del base, model
    gc.collect()
    tokenizer.save_pretrained(folder)
    for path in Path(plan.folder(settings)).glob(PROCESSOR_FILES):
        shutil.copyfile(path, folder / path.name)
    log.info("merged weights are in %s", folder)
