"""Turn-by-turn rendering for verifiers' client, on any chat template.

A conversation is never rendered again: the sampled ids stay as they are, and only what the template adds
between the end of a model turn and the next generation prompt is rendered, once, with the new messages in it.
"""

import logging
from collections.abc import Sequence
from typing import Any

from job.chat import END_THINK, THINK, Chat, joined, split_thinking

log = logging.getLogger(__name__)

MARK = "slmworkerglue"
# What a template's own text says of the tool format it teaches, and the library's parser for it.
TOOL_FORMATS = (
    ("<function=", "qwen3.5"),
    ("<arg_key>", "glm"),
    ("<｜tool▁call▁begin｜>", "deepseek-v3"),  # noqa: RUF001
    ("<tool_call>", "qwen3"),
)


class NoExactGlue(ValueError):
    """A template between whose turns nothing exact can be put."""


class GlueRenderer:
    """The part of `renderers.Renderer` that verifiers' client uses, for one template and flag."""

    def __init__(self, chat: Chat, tool_parser: Any = None):
        self.chat, self.tool_parser = chat, tool_parser
        self.opened = begins_in_thought(chat)

    @property
    def supports_tools(self) -> bool:
        return self.tool_parser is not None

    def render(
        self, messages: Sequence[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> Any:
        from renderers.base import RenderedTokens

        text = self.chat.render(plain(messages), tools or (), generate=add_generation_prompt)
        return RenderedTokens(token_ids=self.chat.encode(text))

    def render_ids(self, messages: Sequence[Any], **how: Any) -> list[int]:
        return self.render(messages, **how).token_ids

    def parse_response(self, token_ids: list[int], *, tools: Any = None) -> Any:
        """Take a sampled turn apart into text, reasoning and tool calls; drafts in its thought are none."""
        ids, thought = list(token_ids), 0
        if self.tool_parser is None:
            return take_apart(self.chat, self.opened, ids, [])
        if self.chat.thinking and END_THINK in self.chat.tokenizer.decode(ids):
            thought = len(self.chat.cut_at(ids, [END_THINK]))
        said, calls = self.tool_parser.extract(ids[thought:])
        return take_apart(self.chat, self.opened, ids[:thought] + said, calls)

    def get_stop_token_ids(self) -> list[int]:
        return self.chat.stop_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Any],
        *,
        tools: Any = None,
    ) -> Any:
        """The ids so far, the end of the turn once, and the new messages up to the model's turn."""
        from renderers.base import RenderedTokens

        ids = [*previous_prompt_ids, *previous_completion_ids]
        if ids[-1] not in self.chat.stop_ids:  # the turn was cut at its budget
            ids.append(self.chat.end_of_turn_id)
        return RenderedTokens(token_ids=ids + self.chat.encode(self.glue(new_messages, tools)))

    def glue(self, new_messages: Sequence[Any], tools: Any = None) -> str:
        """What stands between the end of a model turn and the model's next token; raises NoExactGlue."""
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
        text = self.chat.render([*probe, *plain(new_messages)], tools or ())
        _, mark, after = text.partition(MARK)
        if not mark or not after.startswith(self.chat.end_of_turn):
            raise NoExactGlue(
                "the chat template is not prefix-preserving: it does not end an earlier assistant turn with"
                f" {self.chat.end_of_turn!r}, so conversations cannot be sampled token by token"
            )
        return after.removeprefix(self.chat.end_of_turn)


def begins_in_thought(chat: Chat) -> bool:
    return chat.opens_thinking(chat.render([{"role": "user", "content": "x"}]))


def take_apart(chat: Chat, opened: bool, ids: Sequence[int], calls: Sequence[Any]) -> Any:
    """A turn without its tool calls as text and reasoning, by the one thinking parser, and the calls.

    `opened` is as for `split_thinking`. A turn that was cut off in thought has called nothing yet.
    """
    from renderers.base import ParsedResponse

    text = chat.reply_text(ids)
    if not chat.thinking:
        return ParsedResponse(content=text, reasoning_content=None, tool_calls=list(calls))
    thought = split_thinking(text, opened)
    unfinished = END_THINK not in text and (opened or THINK in text)
    return ParsedResponse(
        content=thought.answer or "",
        reasoning_content=thought.reasoning or None,
        tool_calls=[] if unfinished else list(calls),
    )


def with_our_thinking(own: Any, chat: Chat) -> Any:
    """A registered renderer that leaves reasoning to `take_apart`.

    The library's own (0.1.10) cut at a tag with thinking off too, and take thought that was cut off by the
    budget for an answer.
    """
    parse, opened = own.parse_response, begins_in_thought(chat)

    def parse_response(token_ids: list[int], *, tools: Any = None) -> Any:
        calls = parse(token_ids, tools=tools).tool_calls
        begin = min((one.token_span[0] for one in calls), default=len(token_ids))
        return take_apart(chat, opened, token_ids[:begin], calls)

    own.parse_response = parse_response
    return own


def plain(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as plain dictionaries, their parts of text joined, which every template renders."""
    return [{**message, "content": joined(message.get("content"))} for message in messages]


def tool_parser(chat: Chat) -> Any:
    """The library's parser for the tool format that the template teaches, None when that is unknown."""
    from renderers.parsers import get_tool_parser

    template = str(chat.tokenizer.chat_template)
    for sign, name in TOOL_FORMATS:
        if sign in template:
            return get_tool_parser(name, chat.tokenizer)
    return None


def renderer_for(chat: Chat, with_tools: bool) -> Any:
    """A model-specific renderer for the ids it is registered for, else the generic one; raises NoExactGlue.

    A registered renderer is taken only when it renders probe conversations exactly as the template does.
    """
    from renderers.base import MODEL_RENDERER_MAP, create_renderer

    if chat.tokenizer.name_or_path in MODEL_RENDERER_MAP:
        own = create_renderer(chat.tokenizer, chat_template_kwargs={"enable_thinking": chat.thinking})
        tools = [PROBE_TOOL] if with_tools else []
        if all(
            own.render_ids(one, tools=tools or None, add_generation_prompt=True)
            == chat.prompt_ids(one, tools)
            for one in PROBES
        ):
            return with_our_thinking(own, chat) if END_THINK in str(chat.tokenizer.chat_template) else own
        log.warning(
            "the renderer of %s differs from its template: using the generic one", chat.tokenizer.name_or_path
        )
    generic = GlueRenderer(chat, tool_parser(chat) if with_tools else None)
    if with_tools and generic.tool_parser is None:
        raise NoExactGlue(
            f"the chat template of {chat.tokenizer.name_or_path} teaches no tool format that is known"
            f" ({', '.join(name for _, name in TOOL_FORMATS)}): a tool environment cannot be rolled out on it"
        )
    for role in ("user", "tool") if with_tools else ("user",):
        generic.glue([{"role": role, "content": "y"}])
    return generic


PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hi."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " two  spaces\n"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2 + 2?"},
    ],
)
