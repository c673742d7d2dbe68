"""Rendering, ends of turns and supervised rows, with the chat templates that published models have."""

from __future__ import annotations

import json
import logging
from itertools import groupby
from typing import Any

import pytest

from job import chat as chats
from job import dataset
from job.chat import IGNORE, Chat, Row, TemplateProblem, truncate
from job.environment import Environment
from job.settings import Settings, identify
from tests import harness

pytestmark = pytest.mark.slow

TEMPLATES = ["qwen3", "qwen3_5", "chatml", "inconsistent", "llama3"]
END = {"llama3": "<|eot_id|>"}
HELLO = [{"role": "user", "content": "Hello?"}]
LED = [{"role": "system", "content": "Be kind."}, *HELLO]
TALK = [*LED, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And now?"}]
THOUGHT = "<think>\nhm\n</think>\n\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLED_IN_XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Any]:
    from demo.tiny_model import make_tokenizer

    found = {name: make_tokenizer() for name in [*TEMPLATES, "inconsistent_tools"] if name != "llama3"}
    for name, tokenizer in found.items():
        tokenizer.chat_template = harness.template(name)
    return {**found, "llama3": harness.llama_tokenizer()}


@pytest.fixture
def make(tokenizers: dict[str, Any]) -> Any:
    return lambda name, thinking=False: Chat(tokenizers[name], thinking)


def bare(**settings: object) -> Any:
    """A tokenizer of its own to spoil."""
    from demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def decoded(chat: Chat, ids: list[int]) -> str:
    return chat.tokenizer.decode(ids, skip_special_tokens=False)


def trained(chat: Chat, row: Row) -> list[str]:
    """The texts that a row trains on, span by span."""
    spans = groupby(zip(row.ids, row.labels, strict=True), key=lambda pair: pair[1] != IGNORE)
    return [decoded(chat, [token for token, _ in span]) for is_trained, span in spans if is_trained]


def sound(row: Row) -> bool:
    """Whether every label is its token's id or none."""
    return len(row.ids) == len(row.labels) and all(
        label in (token, IGNORE) for token, label in zip(row.ids, row.labels, strict=True)
    )


# --- rendering ---


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("messages", [HELLO, LED, TALK], ids=["hello", "led", "talk"])
def test_prompt_ids_are_the_rendered_prompt_and_nothing_else(
    make: Any, name: str, thinking: bool, messages: list[dict]
) -> None:
    chat = make(name, thinking)
    rendered = chat.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
    )
    assert chat.render(messages) == rendered
    assert decoded(chat, chat.prompt_ids(messages)) == rendered


def test_a_start_token_is_not_added_a_second_time(make: Any) -> None:
    chat = make("llama3")
    begin = chat.tokenizer.bos_token_id
    assert chat.tokenizer(chat.render(HELLO))["input_ids"].count(begin) == 2  # the trap
    assert chat.prompt_ids(HELLO).count(begin) == 1


@pytest.mark.parametrize(
    ("name", "thinking", "ending"),
    [
        ("qwen3", True, "<|im_start|>assistant\n"),
        ("qwen3", False, f"<|im_start|>assistant\n{EMPTY_THOUGHT}"),
        ("qwen3_5", True, "<|im_start|>assistant\n<think>\n"),
        ("qwen3_5", False, f"<|im_start|>assistant\n{EMPTY_THOUGHT}"),
        ("inconsistent", True, f"<|im_start|>assistant\n{EMPTY_THOUGHT}"),
        ("chatml", True, "<|im_start|>assistant\n"),
        ("llama3", False, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
)
def test_the_thinking_flag_reaches_the_generation_prompt(
    make: Any, name: str, thinking: bool, ending: str
) -> None:
    assert make(name, thinking).render(HELLO).endswith(ending)


def test_tool_schemas_are_rendered(make: Any) -> None:
    text = make("qwen3").render(HELLO, [WEATHER])
    assert json.dumps(WEATHER) in text and "<tools>" in text


@pytest.mark.parametrize(
    "text", ["{{ raise_exception('only in June') }}", "{{ messages[0].content.nope.no }}", "{% if %}"]
)
def test_what_a_template_cannot_render_is_said_in_one_line(text: str) -> None:
    with pytest.raises(
        TemplateProblem, match=r"cannot render a conversation of \(user, assistant\)"
    ) as caught:
        Chat(bare(chat_template=text), False)
    assert "\n" not in str(caught.value)


# --- the end of a turn ---


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [False, True])
def test_the_end_of_a_turn_is_the_token_that_the_template_writes(
    make: Any, name: str, thinking: bool
) -> None:
    chat = make(name, thinking)
    assert chat.end_of_turn == END.get(name, "<|im_end|>")
    assert chat.tokenizer.decode([chat.end_of_turn_id]) == chat.end_of_turn


def test_the_end_of_a_turn_need_not_be_the_end_of_sequence() -> None:
    tokenizer = bare(chat_template=harness.template("chatml"), eos_token="<|endoftext|>")
    chat = Chat(tokenizer, False)
    assert chat.end_of_turn == "<|im_end|>"
    assert chat.stop_ids == sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


def test_a_template_without_end_tokens_ends_turns_with_the_end_of_sequence() -> None:
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert Chat(bare(chat_template=text), False).end_of_turn == "<|im_end|>"
    with pytest.raises(TemplateProblem, match="no token that ends a turn"):
        Chat(bare(chat_template=text, eos_token=None), False)


def test_a_template_that_hides_the_answer_ends_turns_with_the_end_of_sequence() -> None:
    text = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}<|endoftext|>"
    assert Chat(bare(chat_template=text), False).end_of_turn == "<|im_end|>"


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(TemplateProblem, match="no chat template"):
        Chat(bare(chat_template=None), False)


# --- rows of a text target ---


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("messages", [HELLO, LED, TALK], ids=["hello", "led", "talk"])
def test_what_comes_before_an_answer_is_what_generation_sees(
    make: Any, name: str, thinking: bool, messages: list[dict]
) -> None:
    chat = make(name, thinking)
    (row,) = chat.rows(messages, "Fine, thanks.")
    prompt = chat.prompt_ids(messages)
    assert row.ids[: len(prompt)] == prompt
    assert row.labels[: len(prompt)] == [IGNORE] * len(prompt)
    assert row.labels[len(prompt) :] == row.ids[len(prompt) :]
    assert row.ids[-1] == row.labels[-1] == chat.end_of_turn_id
    opened = "\n</think>\n\n" if (name, thinking) == ("qwen3_5", True) else ""
    assert trained(chat, row) == [f"{opened}Fine, thanks.{chat.end_of_turn}"]
    assert row.trained == len(row.ids) - len(prompt)


@pytest.mark.parametrize(
    ("name", "thinking", "learnt"),
    [
        ("qwen3", True, f"{THOUGHT}Yes."),
        ("chatml", True, f"{THOUGHT}Yes."),
        ("qwen3_5", True, "hm\n</think>\n\nYes."),  # the prompt has opened the block
        ("qwen3", False, f"{THOUGHT}Yes."),
    ],
)
def test_a_reasoning_target_is_learnt_as_it_stands_but_opens_no_second_block(
    make: Any, name: str, thinking: bool, learnt: str
) -> None:
    chat = make(name, thinking)
    (row,) = chat.rows(HELLO, f"{THOUGHT}Yes.")
    assert trained(chat, row) == [learnt + chat.end_of_turn]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "chatml", "llama3"])
def test_where_a_template_is_consistent_a_row_is_the_finished_conversation(make: Any, name: str) -> None:
    chat = make(name, thinking=False)
    (row,) = chat.rows(TALK, "Fine.")
    finished = chat.render([*TALK, {"role": "assistant", "content": "Fine."}], generate=False)
    assert decoded(chat, row.ids) == finished.rstrip("\n")


def test_an_empty_target_gives_no_row(make: Any) -> None:
    chat = make("chatml")
    assert chat.rows(HELLO, "") == []
    assert chat.rows(HELLO, []) == []
    assert chat.rows(HELLO, [{"role": "assistant", "content": ""}]) == []
    assert chat.rows(HELLO, [{"role": "user", "content": "never mind"}]) == []


def test_the_end_of_a_turn_is_trained_even_when_it_is_also_the_pad_token() -> None:
    tokenizer = bare()
    tokenizer.pad_token = tokenizer.eos_token
    chat = Chat(tokenizer, False)
    (row,) = chat.rows(HELLO, "Fine.")
    assert row.labels[-1] == tokenizer.pad_token_id == tokenizer.eos_token_id


# --- gold transcripts ---

GOLD = [
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "More."},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "More."},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "Enough."},
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [False, True])
def test_a_transcript_supervises_each_assistant_turn_once(make: Any, name: str, thinking: bool) -> None:
    chat = make(name, thinking)
    rows = chat.rows(LED, GOLD)
    assert all(sound(row) for row in rows)
    opened = "\n</think>\n\n" if (name, thinking) == ("qwen3_5", True) else ""
    spans = [span for row in rows for span in trained(chat, row)]
    assert spans == [f"{opened}{text}{chat.end_of_turn}" for text in ("One.", "Two.", "Three.")]
    assert all(chat.tokenizer.encode("Enough", add_special_tokens=False)[0] != row.ids[-1] for row in rows)


@pytest.mark.parametrize(
    ("name", "thinking", "rows"),
    [
        ("chatml", False, 1),
        ("llama3", False, 1),
        ("qwen3", True, 1),
        ("qwen3", False, 3),  # the generation prompt's empty block is gone once the turn is history
        ("inconsistent", False, 3),
        ("qwen3_5", True, 3),
    ],
)
def test_turns_share_a_row_where_the_template_leaves_history_alone(
    make: Any, name: str, thinking: bool, rows: int
) -> None:
    chat = make(name, thinking)
    made = chat.rows(LED, GOLD)
    assert len(made) == rows
    for row, last in zip(made, ([4] if rows == 1 else [0, 2, 4]), strict=True):
        prompt = chat.prompt_ids([*LED, *GOLD[:last]])
        assert row.ids[: len(prompt)] == prompt


def test_dropped_reasoning_makes_a_row_of_each_turn(make: Any) -> None:
    gold = [
        {**one, "content": THOUGHT + one["content"]} if one["role"] == "assistant" else one for one in GOLD
    ]
    qwen, chatml = make("qwen3", True), make("chatml", True)
    assert [trained(qwen, row) for row in qwen.rows(LED, gold)] == [
        [f"{THOUGHT}{text}<|im_end|>"] for text in ("One.", "Two.", "Three.")
    ]
    assert len(chatml.rows(LED, gold)) == 1
    assert chats.drops_reasoning(qwen) and not chats.drops_reasoning(chatml)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "chatml"])
def test_reasoning_in_a_field_of_its_own_is_learnt_like_reasoning_in_the_text(make: Any, name: str) -> None:
    chat = make(name, True)
    apart = [{"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}]
    assert chat.rows(HELLO, apart) == chat.rows(HELLO, f"{THOUGHT}Yes.")


def test_content_in_parts_is_joined(make: Any) -> None:
    chat = make("chatml")
    parts = [{"type": "text", "text": "Fine, "}, {"type": "text", "text": "thanks."}]
    assert chat.rows(HELLO, [{"role": "assistant", "content": parts}]) == chat.rows(HELLO, "Fine, thanks.")


# --- tool calls ---


def tool_talk(content: str = "", **extras: object) -> list[dict]:
    return [
        {"role": "assistant", "content": content, "tool_calls": [CALL], **extras},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "inconsistent_tools"])
def test_tool_calls_are_learnt_as_the_template_writes_them(make: Any, name: str, thinking: bool) -> None:
    chat = make(name, thinking)
    rows = chat.rows(HELLO, tool_talk(), [WEATHER])
    assert [span for row in rows for span in trained(chat, row)] == [
        f"{CALLED}<|im_end|>",
        "It rains.<|im_end|>",
    ]
    before = chat.prompt_ids(HELLO, [WEATHER])
    assert rows[0].ids[: len(before)] == before


def test_a_tool_call_after_text_keeps_the_text(make: Any) -> None:
    chat = make("qwen3")
    rows = chat.rows(HELLO, tool_talk("Let me look."), [WEATHER])
    assert trained(chat, rows[0])[0] == f"Let me look.\n{CALLED}<|im_end|>"


@pytest.mark.parametrize(
    "talk", [tool_talk(THOUGHT), tool_talk("", reasoning_content="hm")], ids=["inline", "field"]
)
@pytest.mark.parametrize(
    ("name", "opened"), [("qwen3", THOUGHT), ("qwen3_5", THOUGHT.removeprefix("<think>\n"))]
)
def test_reasoning_before_a_tool_call_is_learnt(make: Any, name: str, opened: str, talk: list[dict]) -> None:
    chat = make(name, True)
    learnt = trained(chat, chat.rows(HELLO, talk, [WEATHER])[0])[0]
    assert learnt == f"{opened}{CALLED if name == 'qwen3' else CALLED_IN_XML}<|im_end|>"


def test_both_shapes_of_a_call_are_rendered_alike(make: Any) -> None:
    """verifiers' own, flat with arguments as text, and the nested one that templates are written for."""
    nested = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    for name in ("qwen3", "qwen3_5"):
        chat = make(name)
        flat_rows, nested_rows = (
            chat.rows(HELLO, [{**tool_talk()[0], "tool_calls": [call]}], [WEATHER]) for call in (CALL, nested)
        )
        assert flat_rows == nested_rows


def test_arguments_that_are_no_json_are_rendered_as_they_are(make: Any) -> None:
    spoilt = [{"role": "assistant", "tool_calls": [{**CALL, "arguments": "{city"}]}]
    (row,) = make("qwen3").rows(HELLO, spoilt, [WEATHER])
    assert '"arguments": {city}' in trained(make("qwen3"), row)[0]


def test_a_template_that_leaves_calls_out_is_refused(make: Any) -> None:
    with pytest.raises(TemplateProblem, match=r"leaves out tool calls \(weather\)"):
        make("chatml").rows(HELLO, tool_talk(), [WEATHER])


def test_where_a_tool_call_stays_as_it_was_the_turns_share_a_row(make: Any) -> None:
    chat = make("qwen3", True)
    (row,) = chat.rows(HELLO, tool_talk(), [WEATHER])
    assert decoded(chat, row.ids).count("<tool_response>") == 1


# --- cutting, dropping, all tokens ---


def test_truncation_cuts_the_end_off() -> None:
    row = Row([1, 2, 3, 4], [IGNORE, IGNORE, 3, 4])
    assert truncate(row, 9) == row
    assert truncate(row, 3) == Row([1, 2, 3], [IGNORE, IGNORE, 3])
    assert truncate(row, 2).trained == 0


def settings(length: int = 1024, thinking: bool = False, **more: str) -> Settings:
    spec = {
        **{"algorithm": "sft", "model": "x", "model_policy": "allow", "thinking": thinking},
        **{"environment": {"id": "toy"}, "train": {"max_length": length}},
    }
    env = {"AUTOSLM_JOB_SPEC_JSON": json.dumps(spec), **more}
    identity, problem = identify(env)
    assert problem is None
    return Settings.read(env, identity.spec)


def sft_rows(chat: Chat, env: Environment, **asked: Any) -> tuple[list[Row], dataset.Counts]:
    rows, _, counts = dataset.sft_rows(settings(**asked), env, chat)
    return rows, counts


def test_rows_are_the_first_n_then_shuffled_by_the_seed(make: Any) -> None:
    chat, env = make("chatml"), Environment.load("toy-words", {})

    def texts(**asked: str) -> list[str]:
        return [decoded(chat, row.ids) for row in sft_rows(chat, env, **asked)[0]]

    everything = texts()
    assert len(everything) == 22
    first, again, other = (texts(SFT_MAX_EXAMPLES="6", SEED=seed) for seed in ("0", "0", "1"))
    assert first == again != other
    assert sorted(first) == sorted(other)
    wanted = [row["answer"] for row in env.train_rows()[:6]]
    assert sorted(text.rsplit("assistant\n")[1] for text in first) == sorted(
        f"{one}<|im_end|>" for one in wanted
    )


def test_rows_without_a_target_and_targets_cut_away_are_dropped_and_counted(make: Any) -> None:
    chat = make("chatml")
    env = Environment.load("toy-words", {"size": 4, "answers": ["", "x" * 60, "", "y"]})
    prompt = max(len(chat.prompt_ids(env.prompt(row))) for row in env.train_rows())
    rows, counts = sft_rows(chat, env, length=prompt + 20)
    assert (counts.source, counts.without_target, counts.target_cut_off, counts.kept) == (4, 2, 0, 2)
    assert max(len(row.ids) for row in rows) == prompt + 20
    long, short = sorted(rows, key=lambda row: row.trained, reverse=True)
    assert (
        chat.end_of_turn_id not in long.labels
    )  # its end was cut off: the model is not taught to stop there
    assert short.labels[-1] == chat.end_of_turn_id


def test_nothing_left_is_an_error_that_says_why(make: Any) -> None:
    chat = make("chatml")
    with pytest.raises(dataset.NoRows, match=r"left of 22: 0 have no target, 22 lose it.*max_length=5"):
        sft_rows(chat, Environment.load("toy-words", {}), length=5)
    with pytest.raises(dataset.NoRows, match=r"left of 2: 2 have no target"):
        sft_rows(chat, Environment.load("toy-words", {"size": 2, "answers": ["", ""]}))
    with pytest.raises(dataset.NoRows, match=r"left of 0.*environment\.id='toy-words'"):
        sft_rows(chat, Environment.load("toy-words", {"size": 0}))


def test_completion_only_off_trains_every_token(make: Any) -> None:
    chat, env = make("chatml"), Environment.load("toy-words", {"size": 3})
    rows, _ = sft_rows(chat, env, SFT_COMPLETION_ONLY="0")
    assert all(row.labels == row.ids for row in rows)
    assert [row.ids for row in rows] == [row.ids for row in sft_rows(chat, env)[0]]


def test_tools_are_part_of_the_prompts_of_a_tool_environment(make: Any) -> None:
    chat, env = make("qwen3"), Environment.load("toy-tools", {})
    rows, counts = sft_rows(chat, env, length=4096)
    assert counts.source == 3 and len(rows) == 6
    for row in rows:
        text = decoded(chat, row.ids)
        assert "You may call one or more functions" in text and '"name": "price"' in text


# --- warnings ---


@pytest.mark.parametrize(
    ("reference", "params", "thinking", "warned"),
    [
        ("toy-words", {}, True, ["unlearn reasoning"]),
        ("toy-words", {}, False, []),
        ("toy-words", {"thoughts": True}, True, []),
        ("toy-dialogue", {}, False, ["only first answers"]),
        ("toy-dialogue", {"transcripts": True}, False, []),
        ("toy-dialogue", {"transcripts": True, "thoughts": True}, True, ["drops the reasoning"]),
        ("toy-tools", {}, True, ["unlearn reasoning", "drops the reasoning"]),
    ],
)
def test_what_a_run_will_probably_not_mean_to_teach_is_said(
    make: Any,
    caplog: pytest.LogCaptureFixture,
    reference: str,
    params: dict[str, Any],
    thinking: bool,
    warned: list[str],
) -> None:
    sft_rows(make("qwen3", thinking), Environment.load(reference, params), thinking=thinking)
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == len(warned)
    assert all(word in text for word, text in zip(warned, warnings, strict=True))


# --- the tokenizer ---


def test_a_missing_pad_token_becomes_the_end_of_sequence(tmp_path: Any) -> None:
    tokenizer = harness.llama_tokenizer()
    assert tokenizer.pad_token is None
    tokenizer.save_pretrained(tmp_path)
    loaded = chats.load_tokenizer(str(tmp_path))
    assert loaded.pad_token == loaded.eos_token == "<|eot_id|>"
    assert loaded.chat_template == harness.template("llama3")
