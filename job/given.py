"""The JobSpec as it was given, and the secrets in it and among the variables."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from spec import JobSpec, SpecError

SECRET_NAME = re.compile(  # not a tokenizer's, nor that of a variable or a file which holds one
    r"^(?!.*_(?:VAR|PATH|FILE)$)"
    r".*(?:TOKEN(?!I)|SECRET|PASSW|(?:API|ACCESS|PRIVATE)[-_ ]?KEY|CREDENTIAL|AUTHORIZATION)",
    re.IGNORECASE | re.DOTALL,
)
NAMED_TEXT = re.compile(r'"([^"\\]{1,80})"\s*:\s*"((?:[^"\\]|\\.){8,4000})')


def read_spec(env: Mapping[str, str]) -> JobSpec | None:
    """Return the JobSpec of AUTOSLM_JOB_SPEC_JSON, else of the file AUTOSLM_JOB_SPEC_PATH, else None."""
    text = _spec_text(env)
    return JobSpec.from_json(text) if text else None


def _spec_text(env: Mapping[str, str]) -> str:
    """The JobSpec of AUTOSLM_JOB_SPEC_JSON, else of the file AUTOSLM_JOB_SPEC_PATH, else ""."""
    text = env.get("AUTOSLM_JOB_SPEC_JSON", "").strip()
    path = Path(env.get("AUTOSLM_JOB_SPEC_PATH", "").strip())
    try:
        return path.read_text(encoding="utf-8") if not text and path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"AUTOSLM_JOB_SPEC_PATH={str(path)[:80]!r}: cannot be read ({error})") from error


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Texts that may never leave the machine: those named like secrets, also in a JobSpec that is refused."""
    try:
        given = _spec_text(env)
    except SpecError:
        given = ""
    named = [*env.items(), *_named_texts(given)]
    return tuple(text.strip() for name, text in named if SECRET_NAME.search(name) and len(text.strip()) >= 8)


def _named_texts(text: str) -> Iterator[tuple[str, str]]:
    """Every text in a JSON with the names above it; of a broken one, or one in quotes, what can be seen."""
    try:
        inside = [("", json.loads(text))]
    except (ValueError, RecursionError):
        inside = []
    while inside:
        name, value = inside.pop()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, list):
            inside += [(name, one) for one in value]
        elif isinstance(value, dict):
            inside += [(f"{name}.{key}", one) for key, one in value.items()]
    yield from NAMED_TEXT.findall(text)
    yield from NAMED_TEXT.findall(text.replace('\\"', '"'))
