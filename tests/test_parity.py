"""Decoding parity: what a model was trained on is what it says when it is asked.

A row that differs from the generation prompt by one token would train to a low loss too, and then fail here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import harness

pytestmark = pytest.mark.slow

RATE = {"llama3": 1e-2}


def answers(adapter: Path, base: Path, thinking: bool, questions: list[str]) -> list[str]:
    """Greedy replies of base + adapter, each from the ids of its generation prompt."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from job import chat

    talk = chat.Chat(chat.load_tokenizer(str(adapter)), thinking)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    replies = []
    for question in questions:
        prompt = talk.prompt_ids([{"role": "user", "content": question}])
        made = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=48,
            do_sample=False,
            eos_token_id=talk.stop_ids,
            pad_token_id=talk.tokenizer.pad_token_id,
        )
        replies.append(talk.tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=False))
    return replies


@pytest.mark.parametrize(
    ("name", "thinking"),
    [
        pytest.param("qwen3", False, marks=pytest.mark.proof),
        pytest.param("qwen3", True, marks=pytest.mark.proof),
        ("qwen3_5", True),  # the generation prompt opens the think block
        # only the generation prompt has an empty one
        pytest.param("inconsistent", False, marks=pytest.mark.proof),
        pytest.param("chatml", False, marks=pytest.mark.proof),
        ("llama3", False),
    ],
)
def test_greedy_decoding_reproduces_the_training_targets(
    job: Callable[..., dict[str, str]],
    run_in_process: Any,
    with_template: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    thinking: bool,
) -> None:
    model = harness.build_llama(tmp_path / "llama") if name == "llama3" else with_template(name)
    spec = {
        "thinking": thinking,
        "environment": {"id": "toy-words", "params": {"thoughts": thinking}},
        "train": {"batch_size": 11, "epochs": 100 if thinking else 40, "learning_rate": RATE.get(name, 5e-3)},
    }
    ended = run_in_process(job(spec=spec, model=model, SFT_PER_DEVICE_BS=11))
    assert ended.error is None
    losses = [beat["loss"] for beat in ended.beats if beat["stage"] == "sft_step"]
    assert losses[-1] < 0.1 < losses[0]

    from toy_words import WORDS

    said = answers(
        tmp_path / "store" / "sft" / "r1" / "seed0" / "adapter",
        model,
        thinking,
        [f"Spell {word} backwards." for word in WORDS],
    )
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    opened = "" if name == "qwen3_5" else "<think>\n"
    wanted = []
    for word in WORDS:
        answer = word[::-1]
        thought = f"{opened}{'-'.join(answer)}\n</think>\n\n" if thinking else ""
        wanted.append(f"{thought}{answer}{end}")
    right = sum(one == other for one, other in zip(said, wanted, strict=True))
    assert right >= 0.95 * len(WORDS), list(zip(said, wanted, strict=True))
