"""Keeps secrets out of everything that leaves the process."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

TOKEN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16})"
    r"|(?<=Bearer )[\w.~+/=-]+|(?<=://)[^/\s:@\"]+:[^/\s:@\"]+(?=@)"
)


def redactor(secrets: Sequence[str]) -> Callable[[str], str]:
    """Return a function that replaces the given texts, and whatever looks like a token, by `***`."""
    spellings = {*secrets, *(json.dumps(one)[1:-1] for one in secrets)}
    known = (
        re.compile("|".join(re.escape(one) for one in sorted(spellings, key=len, reverse=True)))
        if secrets
        else None
    )

    def redact(text: str) -> str:
        return TOKEN_SHAPES.sub("***", known.sub("***", text) if known else text)

    return redact


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """A copy without secrets in any text, at any depth; dataclasses stay what they are."""
    if isinstance(value, str):
        return redact(value)
    if is_dataclass(value) and not isinstance(value, type):
        inner = {one.name: redacted(getattr(value, one.name), redact) for one in fields(value)}
        return type(value)(**inner)
    if isinstance(value, Mapping):
        return {redacted(key, redact): redacted(one, redact) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(one, redact) for one in value]
    return value
