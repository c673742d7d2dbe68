"""Messages, text and tokens: rendering with the model's chat template, supervised rows, thinking text.

What a model is trained on is what generation shows it: every supervised answer follows exactly the ids of the
prompt rendered with its generation prompt, whatever the template does to a finished conversation.
"""

import json
import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

log = logging.getLogger(__name__)

Message = dict[str, Any]
IGNORE = -100
THINK, END_THINK = "<think>", "</think>"
PROBE_REPLY = "slmworkerprobe"


class TemplateProblem(ValueError):
    """A chat template that is missing or cannot render a conversation."""


@dataclass(frozen=True)
class Row:
    """One supervised sequence: `ids` are tokens, `labels` the same or -100 where nothing is learnt."""

    ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        return sum(label != IGNORE for label in self.labels)


class Chat:
    """A tokenizer's chat template, with the thinking flag of the run."""

    def __init__(self, tokenizer: Any, thinking: bool):
        if not tokenizer.chat_template:
            raise TemplateProblem(
                f"{tokenizer.name_or_path} has no chat template; use an instruction-tuned model"
            )
        self.tokenizer, self.thinking = tokenizer, thinking
        self.end_of_turn_id = self._end_of_turn()
        self.end_of_turn: str = tokenizer.convert_ids_to_tokens(self.end_of_turn_id)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generate: bool = True) -> str:
        """Render messages to text, with the generation prompt when `generate`; raises TemplateProblem."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                [_with_nested_calls(one) for one in messages],
                tools=list(tools) or None,
                add_generation_prompt=generate,
                tokenize=False,
                enable_thinking=self.thinking,
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            roles = ", ".join(str(one.get("role")) for one in messages)
            raise TemplateProblem(
                f"the chat template cannot render a conversation of ({roles}):"
                f" {type(error).__name__}: {error}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text: the template wrote every special token there is."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Exactly the ids that generation is given."""
        return self.encode(self.render(messages, tools))

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a model turn: the template's own, and the tokenizer's end of sequence."""
        return sorted({self.end_of_turn_id, self.tokenizer.eos_token_id} - {None})

    def _end_of_turn(self) -> int:
        """The special token that the template writes after an assistant's text, else the end of sequence."""
        text = self.render(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE_REPLY}], generate=False
        )
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        for token_id in (
            self.encode(text[text.rindex(PROBE_REPLY) + len(PROBE_REPLY) :]) if PROBE_REPLY in text else []
        ):
            if token_id in special:
                return token_id
        if self.tokenizer.eos_token_id is None:
            raise TemplateProblem(
                f"{self.tokenizer.name_or_path} has no token that ends a turn: set its eos_token"
            )
        return self.tokenizer.eos_token_id

    def reply_text(self, ids: Sequence[int]) -> str:
        """Decode a sampled reply as a server would: no special tokens, but think tags stay."""
        tags = {self.tokenizer.convert_tokens_to_ids(tag) for tag in (THINK, END_THINK)}
        dropped = (set(self.tokenizer.all_special_ids) | set(self.stop_ids)) - tags
        return self.tokenizer.decode([one for one in ids if one not in dropped])

    def cut_at(self, ids: Sequence[int], stops: Sequence[str]) -> list[int]:
        """The shortest beginning of a reply whose text contains a stop string, or all of it."""
        ids = list(ids)

        def is_long_enough(length: int) -> bool:
            text = self.tokenizer.decode(ids[:length])
            return any(stop in text for stop in stops)

        return ids[: bisect_left(range(len(ids)), True, key=is_long_enough)] if stops else ids

    def opens_thinking(self, rendered_prompt: str) -> bool:
        """Whether a rendered prompt ends inside a think block."""
        return opens_thinking(rendered_prompt, self.end_of_turn)

    # --- supervised rows ---

    def rows(
        self, prompt: Sequence[Message], target: str | Sequence[Message], tools: Sequence[Any] = ()
    ) -> list[Row]:
        """Supervise a target text, or every assistant turn of a gold transcript and nothing else.

        A transcript gives one row a turn; a row that is a prefix of the next one is merged into it.
        """
        if isinstance(target, str):
            return (
                [self._row(prompt, self._answer(prompt, {"content": target}, tools), tools)] if target else []
            )
        rows: list[Row] = []
        for index, message in enumerate(target):
            if message["role"] != "assistant" or not _says_something(message):
                continue
            before = [*prompt, *target[:index]]
            row = self._row(before, self._answer(before, message, tools), tools)
            if rows and row.ids[: len(rows[-1].ids)] == rows[-1].ids:
                labels = [*rows[-1].labels, *row.labels[len(rows[-1].labels) :]]
                rows[-1] = Row(row.ids, labels)
            else:
                rows.append(row)
        return rows

    def _row(self, prompt: Sequence[Message], answer: str, tools: Sequence[Any]) -> Row:
        before = self.prompt_ids(prompt, tools)
        learnt = [*self.encode(answer), self.end_of_turn_id]
        return Row([*before, *learnt], [IGNORE] * len(before) + learnt)

    def _answer(self, prompt: Sequence[Message], message: Message, tools: Sequence[Any]) -> str:
        """The text that the model has to produce after the generation prompt."""
        text = _text(message.get("content"))
        if message.get("reasoning_content") and THINK not in text:
            text = f"{THINK}\n{message['reasoning_content']}\n{END_THINK}\n\n{text}"
        if message.get("tool_calls"):
            thought, tag, said = text.rpartition(END_THINK)
            spoken = {"role": "assistant", "content": said.lstrip("\n"), "tool_calls": message["tool_calls"]}
            text = thought + (f"{tag}\n\n" if tag else "") + self._as_rendered(prompt, spoken, tools)
        if not self.opens_thinking(self.render(prompt, tools)):
            return text
        # The generation prompt has opened a think block: open no second one, and do not answer inside it.
        text = text.removeprefix(THINK).removeprefix("\n") if text.startswith(THINK) else text
        return text if END_THINK in text else f"\n{END_THINK}\n\n{text}"

    def _as_rendered(self, prompt: Sequence[Message], message: Message, tools: Sequence[Any]) -> str:
        """A message as the template writes it, without the header and the end of the turn.

        The header is what a finished text turn has before its text: it may hold an empty think block, or lack
        the one of the generation prompt.
        """
        probe = {"role": "assistant", "content": PROBE_REPLY}
        header, found, _ = self.render([*prompt, probe], tools, generate=False).rpartition(PROBE_REPLY)
        turn = self.render([*prompt, message], tools, generate=False)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(header, turn, strict=False))
        shared = sum(1 for _ in same)
        if not found or header[shared:].strip():
            raise TemplateProblem("the chat template hides where an assistant's tool call begins")
        turn = turn[shared:]
        lost = [call["name"] for call in map(_function, message["tool_calls"]) if call["name"] not in turn]
        if lost:
            raise TemplateProblem(
                f"the chat template leaves out tool calls ({lost[0]}): use a model whose template writes them"
            )
        return turn[: turn.rindex(self.end_of_turn)] if self.end_of_turn in turn else turn


def _with_nested_calls(message: Message) -> Message:
    """Tool calls in the shape that templates are written for: below `function`, arguments as an object.

    verifiers keeps them flat, with arguments as JSON text, which many templates refuse or encode once more.
    """
    if not message.get("tool_calls"):
        return message
    calls = [{"type": "function", **call, "function": _function(call)} for call in message["tool_calls"]]
    return {**message, "content": message.get("content", ""), "tool_calls": calls}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    named = call.get("function", call)
    arguments = named.get("arguments", {})
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        log.debug("arguments of %s are no JSON: rendered as they are", named["name"])
    return {"name": named["name"], "arguments": arguments}


def _says_something(message: Message) -> bool:
    return any(message.get(key) for key in ("tool_calls", "content", "reasoning_content"))


def joined(content: Any) -> Any:
    """A message's content, parts of text joined to the one text that every template renders."""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def opens_thinking(rendered_prompt: str, end_of_turn: str) -> bool:
    """Whether a rendered prompt ends inside a think block; a tag that an earlier turn mentions opens none."""
    _, tag, tail = rendered_prompt.rpartition(THINK)
    return bool(tag) and END_THINK not in tail and end_of_turn not in tail


@dataclass(frozen=True)
class Thought:
    """A reply taken apart: the text that is graded, and the reasoning that is counted."""

    answer: str | None
    reasoning: str


def split_thinking(reply: str | None, opened: bool) -> Thought:
    """Separate a reply's answer from its reasoning; `opened` = the prompt ended inside a think block.

    Reasoning cut off by the budget leaves no answer, so that it is never graded as one.
    """
    if reply is None:
        return Thought(None, "")
    first_open, first_close = reply.find(THINK), reply.find(END_THINK)
    if first_close >= 0 and (first_open < 0 or first_close < first_open):
        opened = True  # a block that closes before any opens was opened by the prompt
    if opened and not 0 <= first_open < first_close:
        reasoning = reply if first_close < 0 else reply[:first_close]
    elif first_open >= 0:
        reasoning = reply[first_open + len(THINK) :].partition(END_THINK)[0]
    else:
        reasoning = ""
    if opened and first_close < 0:
        return Thought("", reasoning)
    after = reply.rpartition(END_THINK)[2]
    return Thought(
        after.partition(THINK)[0].lstrip("\n") if first_close >= 0 else after.partition(THINK)[0], reasoning
    )


def truncate(row: Row, max_length: int) -> Row:
    """Cut a row's end off at `max_length` tokens."""
    return Row(row.ids[:max_length], row.labels[:max_length])


def unlearns_thinking(targets: Iterable[str | Sequence[Message]]) -> bool:
    """Whether none of the targets reasons, judged by their own text: templates insert empty think blocks."""
    return not any(
        THINK in (one if isinstance(one, str) else " ".join(_text(m.get("content")) for m in one))
        or (not isinstance(one, str) and any(m.get("reasoning_content") for m in one))
        for one in targets
    )


def drops_reasoning(chat: Chat) -> bool:
    """Whether the template leaves the reasoning of earlier turns out of a conversation."""
    thought = f"{THINK}\n{PROBE_REPLY}\n{END_THINK}\n\nyes"
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": "y"},
    ]
    return PROBE_REPLY not in chat.render(history)


def load_tokenizer(folder: str, name: str | None = None) -> Any:
    """The tokenizer in a folder, of the model `name`; a missing pad token becomes the eos token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.name_or_path = name or folder
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
