"""What of a reply is graded, and what is counted as thinking."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from job.chat import END_THINK, THINK, Thought, opens_thinking, split_thinking
from tests import harness

TABLE = [
    # reply, whether the prompt opened the block, graded text, counted text
    (None, False, None, ""),
    (None, True, None, ""),
    # no tags
    ("42", False, "42", ""),
    ("", False, "", ""),
    (" \n42 \n", False, " \n42 \n", ""),
    ("42", True, "", "42"),
    ("", True, "", ""),
    # one block
    ("<think>r</think>X", False, "X", "r"),
    ("<think>\nr\n</think>\n\nX", False, "X", "\nr\n"),
    ("a<think>r</think>X", False, "X", "r"),
    ("<think>r</think>", False, "", "r"),
    ("<think></think>X", False, "X", ""),
    ("<think>r</think> X \n", False, " X \n", "r"),
    # several blocks: graded after the last, counted in the first
    ("<think>r</think>X<think>s</think>Y", False, "Y", "r"),
    ("<think>r</think>X</think>Y", False, "Y", "r"),
    # only a close: the prompt opened the block, whoever says what
    ("r</think>X", False, "X", "r"),
    ("r</think>X", True, "X", "r"),
    ("\nr\n</think>\n\nX", True, "X", "\nr\n"),
    ("</think>X", True, "X", ""),
    # a close before the first open
    ("r</think>X<think>s</think>Y", False, "Y", "r"),
    ("r</think>X<think>s</think>Y", True, "Y", "r"),
    ("r</think>X<think>s", True, "X", "r"),
    # never closed
    ("<think>r", False, "", "r"),
    ("X<think>r", False, "X", "r"),
    ("<think>", False, "", ""),
    ("<think>r</think>X<think>s", False, "X", "r"),
    # the prompt opened a block, and so does the reply
    ("<think>r</think>X", True, "X", "r"),
    ("<think>r", True, "", "<think>r"),
]


@pytest.mark.parametrize(("reply", "opened", "answer", "reasoning"), TABLE)
def test_the_table(reply: str | None, opened: bool, answer: str | None, reasoning: str) -> None:
    assert split_thinking(reply, opened) == Thought(answer, reasoning)


@given(st.lists(st.sampled_from([THINK, END_THINK, "a", "\n", "b "])).map("".join), st.booleans())
def test_nothing_is_graded_that_may_be_reasoning(reply: str, opened: bool) -> None:
    thought = split_thinking(reply, opened)
    assert thought.answer is not None
    assert THINK not in thought.answer and END_THINK not in thought.answer
    assert thought.reasoning in reply and thought.answer in reply
    if opened and END_THINK not in reply:
        assert thought == Thought("", reply)
    if THINK not in reply and END_THINK not in reply and not opened:
        assert thought == Thought(reply, "")


# --- whether the prompt opened the block ---

CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        (CHATML.format("Hi"), False),
        (CHATML.format("Hi") + "<think>\n", True),
        (CHATML.format("Hi") + "<think>", True),
        (CHATML.format("Hi") + "<think>\nFirst, ", True),
        (CHATML.format("Hi") + "<think>\n\n</think>\n\n", False),
        (CHATML.format("Write <think> before you answer."), False),
        (CHATML.format("Reason in <think>...</think>."), False),
        (CHATML.format("Never write </think>.") + "<think>\n", True),
        (CHATML.format("Write <think>.") + "<think>\n", True),
        (CHATML.format("Write <think>.") + "<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes<|im_end|>\n" + CHATML.format("Hi"), False),
        ("<|im_start|>assistant\n<think>\ncut off<|im_end|>\n" + CHATML.format("Hi"), False),
        ("", False),
    ],
)
def test_a_tag_that_the_prompt_only_mentions_opens_nothing(prompt: str, opened: bool) -> None:
    assert opens_thinking(prompt, "<|im_end|>") is opened


@cache
def compiled(template: str) -> Template:
    """A chat template as the tokenizer's `apply_chat_template` compiles it, without the tokenizer."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    ).from_string(harness.template(template))


def rendered(template: str, content: str, thinking: bool) -> str:
    context: dict[str, Any] = {"bos_token": "", "eos_token": "", "enable_thinking": thinking}
    messages = [{"role": "user", "content": content}]
    return compiled(template).render(messages=messages, add_generation_prompt=True, **context)


@pytest.mark.parametrize("content", ["Hi", "Write <think> first.", "No </think>!", "<think>a</think>"])
@pytest.mark.parametrize(
    ("template", "thinking", "opened"),
    [
        ("qwen3_5", True, True),
        ("qwen3_5", False, False),
        ("qwen3", True, False),
        ("qwen3", False, False),
        ("chatml", True, False),
        ("llama3", True, False),
    ],
)
def test_published_templates(template: str, thinking: bool, opened: bool, content: str) -> None:
    end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
    assert opens_thinking(rendered(template, content, thinking), end) is opened
