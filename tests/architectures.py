"""Tiny checkpoints of every architecture that the worker trains, made from the library's own configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
# One layer of Gated DeltaNet, one of attention.
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
KINDS = ("llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


def build(kind: str, folder: Path, **more: int) -> Path:
    """Write a checkpoint with the demo's tokenizer; two layers, about a hundred thousand parameters."""
    import torch

    from demo import tiny_model

    tokenizer = tiny_model.make_tokenizer()
    torch.manual_seed(0)
    model = make(kind, len(tokenizer), tokenizer.eos_token_id, **more)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make(kind: str, vocab_size: int, eos: int, **more: int) -> Any:
    import transformers as t

    ids = {"vocab_size": vocab_size, "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None, **more}
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**{**TEXT, **ids}))
    if kind == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**{**TEXT, **ids}))
    if kind == "qwen3_moe":
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**{**TEXT, **EXPERTS, **ids}))
    tokens = {
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
        "tie_word_embeddings": True,
    }
    if kind == "qwen3_5":
        text = {**TEXT, **DELTA_NET, **ids}
        config = t.Qwen3_5Config(text_config=text, vision_config=VISION, **tokens)
        return t.Qwen3_5ForConditionalGeneration(config)
    text = {**TEXT, **DELTA_NET, **EXPERTS, **SHARED_EXPERT, **ids}
    config = t.Qwen3_5MoeConfig(text_config=text, vision_config=VISION, **tokens)
    return t.Qwen3_5MoeForConditionalGeneration(config)
