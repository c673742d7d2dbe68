"""Keeps secrets out of everything that leaves the process."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import quote

TOKEN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16})"
    r"|(?<=Bearer )[\w.~+/=-]+|(?<=Authorization: Basic )[\w+/=-]+"
    r"|(?<=://)[^/\s?#@\"]+(?=@)"
    r"|[?&](?i:[\w-]*(?:signature|credential|secret|password|token|api[_-]?key)|sig|key)=[^&\s\"'\\<>]{8,}"
)
GAP = r"(?:\s|\\[nrt])+"  # a line break is written as \n, or made a space


def redactor(secrets: Sequence[str]) -> Callable[[str], str]:
    """Return a function that replaces the given texts, and whatever looks like a token, by `***`."""
    patterns = sorted({one for secret in secrets for one in _patterns(secret)}, key=len, reverse=True)
    known = re.compile("|".join(patterns)) if patterns else None

    def redact(text: str) -> str:
        return TOKEN_SHAPES.sub("***", known.sub("***", text) if known else text)

    return redact


def _patterns(secret: str) -> Iterator[str]:
    """How a secret may be found in a text: as it is, as JSON and Python write it, and in an address."""
    for spelled in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe="")):
        found = GAP.join(map(re.escape, re.split(GAP, spelled)))
        # Digits inside a number are no secret, and the number would be none any more.
        yield rf"(?<!\d)(?<!\d\.){found}(?!\.?\d)" if secret.isdigit() else found


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
