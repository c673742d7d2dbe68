"""A tiny Qwen3-shaped base model, made on the spot and offline: `python demo/tiny_model.py FOLDER [SEED]`."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", END_OF_TURN]
MARKER_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY_SIZE = 320
# The vocabulary has room for some forty merges: they go to the words the model meets.
WORDS = "user user assistant assistant What What is Repeat comes after Which larger, or\n\n\n\n"

PRETRAINING_STEPS = 400
PRETRAINING_BATCH = 32
PRETRAINING_RATE = 3e-3

# Renders what Qwen3's own template renders (hermes tools, empty think block when thinking is off).
CHAT_TEMPLATE = """\
{%- set lead = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (lead + '\\n\\n' if lead else '') }}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif lead %}
    {{- '<|im_start|>system\\n' + lead + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=messages | length) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.user and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {%- set content = content.lstrip('\\n') %}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false }}
{%- endif %}
"""


def build(folder: Path, seed: int = 0) -> None:
    """Write model, tokenizer and generation config to `folder`; the same seed gives the same weights."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    pretrain(model, tokenizer, seed)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer which keeps every digit a token of its own, as Qwen's does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARKER_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([WORDS], trainer)
    # Not "special": decoding with skip_special_tokens must keep reasoning and tool calls readable.
    raw.add_tokens([AddedToken(marker, normalized=False) for marker in MARKER_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END_OF_TURN, pad_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A random two-layer Qwen3 with the end-of-turn token as end of sequence."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.1,  # LoRA leaves the tied embeddings alone; 0.02 gives it little to steer
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    return model


def pretrain(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Teach the model digits and the end of a turn on number tasks which are not sums."""
    import torch

    rng = random.Random(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two are a third quicker, but may round to other weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PRETRAINING_RATE, total_steps=PRETRAINING_STEPS, pct_start=0.1
    )
    for _ in range(PRETRAINING_STEPS):
        rows = [make_row(tokenizer, *make_task(rng)) for _ in range(PRETRAINING_BATCH)]
        model(**collate(rows, tokenizer.pad_token_id)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)


def make_task(rng: random.Random) -> tuple[str, str]:
    """One question about numbers, and its answer: copy, successor or maximum."""
    a, b = rng.randrange(200), rng.randrange(200)
    return rng.choice(
        [
            (f"Repeat {a}.", f"{a}"),
            (f"What comes after {a}?", f"{a + 1}"),
            (f"Which is larger, {a} or {b}?", f"{max(a, b)}"),
        ]
    )


def make_row(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of the generation prompt, and of the answer with the end of its turn."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    return prompt, tokenizer.encode(answer + END_OF_TURN, add_special_tokens=False)


def collate(rows: list[tuple[list[int], list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids`, `attention_mask` and `labels` (-100 outside the answers)."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, mask, labels = [], [], []
    for prompt, answer in rows:
        padding = width - len(prompt) - len(answer)
        ids.append(prompt + answer + [pad_id] * padding)
        mask.append([1] * (width - padding) + [0] * padding)
        labels.append([-100] * len(prompt) + answer + [-100] * padding)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


def main() -> None:
    """Build the model at the folder named on the command line."""
    folder = Path(sys.argv[1])
    build(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"tiny model written to {folder}")


if __name__ == "__main__":
    main()
