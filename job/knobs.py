"""How one setting is declared, where its value is looked for, and how a wrong one is refused."""

import difflib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

import recipe
from job.given import SECRET_NAME
from spec import BOOLEAN_WORDS, JobSpec

log = logging.getLogger(__name__)

OURS = ("AUTOSLM_", "RL_", "SFT_")
LAUNCHER_ONLY = frozenset(
    {"AUTOSLM_ENVS_MANIFEST", "AUTOSLM_WORKER_EXTRA_DEPS", "AUTOSLM_SETUP_GRACE_S", "AUTOSLM_STALL_AFTER_S"}
    | {"AUTOSLM_VAST_LOAD_TIMEOUT_S"}
)
SPEC_VARIABLES = frozenset({"AUTOSLM_JOB_SPEC_JSON", "AUTOSLM_JOB_SPEC_PATH"})
TOKEN, ADDRESS = r"^[!-~]*$", r"^(https?://[!-~]+)?$"
PATTERNS = {TOKEN: "text without spaces, ASCII", ADDRESS: "http(s)://host"}


class SettingsError(ValueError):
    """A setting that cannot be honoured: one line that names the knob, the value and the fix."""


# --- types ----------------------------------------------------------------------------------------


def boolean_word(value: object) -> object:
    """Turn a boolean word (any case) into a bool; anything else is left for pydantic to refuse."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[word]
    raise ValueError("must be a boolean word")


def name_list(value: object) -> object:
    """Turn a comma list into trimmed names; `all-linear`, even with stray commas, stays that one string."""
    names = comma_list(value)
    return names[0] if names == ("all-linear",) else names


def comma_list(value: object) -> object:
    """Turn a comma list into a tuple of trimmed names."""
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


def lower(value: object) -> object:
    """Fold a word's case."""
    return value.strip().lower() if isinstance(value, str) else value


Bool = Annotated[bool, BeforeValidator(boolean_word)]
Float = Annotated[float, Field(allow_inf_nan=False)]


# --- declaration ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Knob:
    """One setting as declared."""

    field: str
    name: str  # the environment variable, or the JobSpec field when no variable sets it
    meaning: str
    rule: str
    default: str
    spec: str = ""
    catalog: str = ""
    mode: str = ""
    spec_wins: bool = False
    lenient: bool = False

    @property
    def is_variable(self) -> bool:
        return self.name != self.spec

    @property
    def secret(self) -> bool:
        return bool(SECRET_NAME.search(self.name))

    def shown(self, value: Any) -> str:
        """A value as it may be logged."""
        return "***" if self.secret and value else plain(value)


def knob(
    variable: str,
    meaning: str,
    default: Any = None,
    *,
    spec: str = "",
    catalog: str = "",
    mode: str = "",
    shown: str = "",
    spec_wins: bool = False,
    lenient: bool = False,
    **rules: Any,
) -> Any:
    """Declare one setting.

    `variable` is its environment variable, or "" when only the JobSpec sets it; `spec` and `catalog` name the
    fields it falls back to; `default` is a value, or a function of the settings declared above it which
    `shown` describes; a bad value of a `lenient` one warns and falls back instead of stopping the run.
    """
    computed = {"default_factory": default} if callable(default) else {"default": default}
    extra: dict[str, Any] = {
        "spec": spec,
        "catalog": catalog,
        "mode": mode,
        "spec_wins": spec_wins,
        "lenient": lenient,
    }
    extra["default"] = shown or plain(default)
    return Field(
        validation_alias=variable or spec, description=meaning, json_schema_extra=extra, **computed, **rules
    )


@cache
def declared(table: type[BaseSettings]) -> tuple[Knob, ...]:
    """Every setting of `table`, in declaration order."""
    schemas = table.model_json_schema()["properties"]
    return tuple(
        Knob(
            name,
            str(field.validation_alias),
            field.description or "",
            _rule(schemas[field.validation_alias]),
            **cast(dict[str, Any], extra),
        )
        for name, field in table.model_fields.items()
        if isinstance(extra := field.json_schema_extra, dict)
    )


def plain(value: Any) -> str:
    """A value as a person would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _rule(schema: Mapping[str, Any]) -> str:
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    bounds = [f"{sign} {plain(one[key])}" for one in kinds for key, sign in BOUNDS.items() if key in one]
    return " ".join([" or ".join(map(_kind, kinds)), " and ".join(bounds)]).strip()


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if "pattern" in schema:
        return PATTERNS.get(schema["pattern"], "owner/name")
    if schema.get("type") == "array":
        return " of ".join(["comma list", *([_kind(schema["items"])] if "enum" in schema["items"] else [])])
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "on | off (1 true yes, 0 false no none)",
    }
    return words.get(schema.get("type", ""), "path" if schema.get("format") == "path" else "text")


# --- where values come from -----------------------------------------------------------------------


class Source(PydanticBaseSettingsSource):
    """Values of one origin, keyed by knob name."""

    def __init__(self, table: type[BaseSettings], origin: str, values: Mapping[str, Any]):
        super().__init__(table)
        self.origin, self.values = origin, dict(values)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        name = str(field.validation_alias)
        return self.values.get(name), name, False

    def __call__(self) -> dict[str, Any]:
        return self.values


def sources(table: type[BaseSettings], env: Mapping[str, str], spec: JobSpec | None) -> tuple[Source, ...]:
    """What was said about `table`, the most important first: spec-wins, variables, JobSpec, catalog."""
    knobs = declared(table)
    said = {} if spec is None else {one.name: _look_up(spec, one) for one in knobs if one.spec}
    said = {name: value for name, value in said.items() if value is not None}
    wins = {one.name for one in knobs if one.spec_wins}
    entry = recipe.catalog_model(spec.model) if spec is not None else None
    catalog = {one.name: getattr(entry, one.catalog) for one in knobs if one.catalog} if entry else {}
    return (
        Source(table, "JobSpec", {name: value for name, value in said.items() if name in wins}),
        Source(table, "variable", _variables(table, knobs, env)),
        Source(table, "JobSpec", said),
        Source(table, "catalog", catalog),
    )


def origins(found: Iterable[Source]) -> dict[str, str]:
    """Which source decided each knob; a knob that is missing has its default."""
    return {name: source.origin for source in reversed(list(found)) for name in source.values}


def _look_up(spec: JobSpec, one: Knob) -> Any:
    """What the JobSpec says, None where it is silent; its own defaults count for a field that always wins."""
    section, _, name = one.spec.rpartition(".")
    holder = getattr(spec, section) if section else spec
    return getattr(holder, name) if one.spec_wins or name in holder.model_fields_set else None


def _variables(table: type[BaseSettings], knobs: Iterable[Knob], env: Mapping[str, str]) -> dict[str, str]:
    texts = {one.name: env.get(one.name, "").strip() for one in knobs if one.is_variable}
    if "HF_TOKEN" in texts:
        texts["HF_TOKEN"] = texts["HF_TOKEN"] or env.get("HUGGINGFACE_TOKEN", "").strip()
    values = {name: text for name, text in texts.items() if text}
    for one in knobs:
        if (
            one.lenient
            and one.name in values
            and not accepts(table.model_fields[one.field], values[one.name])
        ):
            log.warning(
                "%s=%r is not a %s: using the default (%s)",
                one.name,
                values.pop(one.name),
                one.rule,
                one.default,
            )
    return values


def accepts(field: FieldInfo, text: str) -> bool:
    """Whether `text` is a valid value of `field`."""
    try:
        _adapter(field).validate_python(text)
    except ValidationError:
        return False
    return True


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    kind: Any = Annotated[field.annotation, Field(), *field.metadata]
    return TypeAdapter(kind)


def early(table: type[BaseSettings], field: str, env: Mapping[str, str]) -> Any:
    """What a variable says before its table can be read; the default where it says nothing that is valid."""
    info = table.model_fields[field]
    try:
        return _adapter(info).validate_python(env.get(str(info.validation_alias), "").strip())
    except ValidationError:
        return info.default


# --- refusals -------------------------------------------------------------------------------------


def one_line(table: type[BaseSettings], error: ValidationError, came_from: Mapping[str, str]) -> str:
    """All that is wrong with the settings, in one line: knob, value, rule and default."""
    by_name = {one.name: one for one in declared(table)}
    parts = {}
    for problem in error.errors(include_url=False):
        one = by_name.get(str(problem["loc"][0])) if problem["loc"] else None
        if one is None or problem["type"] == "default_factory_not_called":
            continue
        where = f"JobSpec {one.spec}" if came_from.get(one.name) == "JobSpec" else one.name
        value = "***" if one.secret else repr(problem["input"])[:80]
        parts[one.name] = f"{where}={value}: must be {one.rule} (default: {one.default or 'empty'})"
    return "; ".join(parts.values())


def check_overruled(table: type[BaseSettings], env: Mapping[str, str]) -> None:
    """Refuse a malformed variable even where the JobSpec wins over it."""
    for one in declared(table):
        text = env.get(one.name, "").strip()
        if one.spec_wins and text and not accepts(table.model_fields[one.field], text):
            raise SettingsError(f"{one.name}={text[:80]!r}: must be {one.rule} (default: {one.default})")


def warn_unknown_names(table: type[BaseSettings], env: Mapping[str, str]) -> None:
    """Warn once about set variables that look like ours and are not."""
    known = {one.name for one in declared(table)} | LAUNCHER_ONLY | SPEC_VARIABLES
    unknown = sorted(n for n, text in env.items() if n.startswith(OURS) and text.strip() and n not in known)
    if unknown:
        guesses = [(name, difflib.get_close_matches(name, known, 1)) for name in unknown]
        hints = [f"{name} (did you mean {close[0]}?)" if close else name for name, close in guesses]
        log.warning("unknown variables, ignored: %s", ", ".join(hints))
