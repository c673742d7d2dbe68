"""`JobSpec`: what the user asked for. Its doors are `JobSpec.parse` and `JobSpec.from_json`."""

import difflib
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

log = logging.getLogger(__name__)

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "none")
BOOLEAN_WORDS = {word: word in _ON for word in (*_ON, *_OFF)}
# No lookahead in pydantic's regex dialect, so "no two dots in a row" is spelled out.
_NAME = r"\.?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?"
_REPO_RULE = "owner/name, both made of letters, digits, '.', '_' and '-', without '..'"
_SHOWN_CHARS = 80


class SpecError(ValueError):
    """A JobSpec that cannot be honoured: one line that names the field, the value and the rule."""


class SpecTypeError(SpecError, TypeError):
    """A JobSpec holding a value of the wrong type."""


# --- rules --------------------------------------------------------------------------------------------------


def _refusal(rule: str, *, wrong_type: bool, key: str = "") -> PydanticCustomError:
    kind = "wrong_type" if wrong_type else "wrong_value"
    return PydanticCustomError(kind, "must be {rule}", {"rule": rule, "key": key})


def _must_be(rule: str, *types: type) -> WrapValidator:
    """Outermost validator of a field: whatever refuses the value, the message is `rule`."""

    def validate(value: object, handler: Callable[[object], object]) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            if _ruled(error):
                raise  # an item of the list, or something more precise
            stray_bool = isinstance(value, bool) and bool not in types
            raise _refusal(rule, wrong_type=stray_bool or not isinstance(value, types)) from None

    return WrapValidator(validate)


def _ruled(error: ValidationError) -> list[ErrorDetails]:
    return [problem for problem in error.errors(include_url=False) if "rule" in problem.get("ctx", {})]


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: object) -> object:
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    return BOOLEAN_WORDS.get(word, value) if word else False


def _algorithm(value: object) -> object:
    return value.lower() if isinstance(value, str) and value else value or "grpo"


def _run_id(value: object) -> object:
    return "local" if isinstance(value, str) and not value.strip() else value


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    return tuple(stop for stop in stops if stop != "") if isinstance(stops, list | tuple) else stops


def _params(value: object) -> object:
    """A private copy of what JSON can carry, evaluation references checked."""
    if not isinstance(value, Mapping):
        return value
    try:
        params = json.loads(json.dumps(dict(value), ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError):
        rule = "JSON with finite numbers, no loops and not nested too deeply"
        raise _refusal(rule, wrong_type=False) from None
    for key in ("eval_env_id", "eval_env"):
        reference = params.get(key)
        if reference is not None and not (isinstance(reference, str) and is_repo_id(reference)):
            raise _refusal(_REPO_RULE, wrong_type=not isinstance(reference, str), key=key)
    return params


def _no_path(value: object) -> None:
    if value:
        rule = "absent: local environment paths are not supported; publish it and set environment.id"
        raise _refusal(rule, wrong_type=False)


def is_repo_id(text: str) -> bool:
    """Whether `text` is `owner/name`."""
    return re.fullmatch(f"{_NAME}/{_NAME}", text) is not None


Text = Annotated[str, _must_be("a string", str)]
_MODEL_RULE = "a non-empty string: owner/name, owner/name@revision or a local path"
ModelId = Annotated[str, Field(pattern=r"\S"), _must_be(_MODEL_RULE, str)]
RunId = Annotated[str, BeforeValidator(_run_id), _must_be("a string", str)]
RepoId = Annotated[str, Field(pattern=f"^(?:{_NAME}/{_NAME})?$"), _must_be(_REPO_RULE, str)]
_ENV_RULE = f"a bare name or {_REPO_RULE}"
EnvironmentId = Annotated[str, Field(pattern=f"^(?:{_NAME}(?:/{_NAME})?)?$"), _must_be(_ENV_RULE, str)]
_ADAPTER_RULE = "a prefix in the store or owner/repo:prefix"
AdapterRef = Annotated[str, Field(pattern=f"^(?:[^:]*|{_NAME}/{_NAME}:.+)$"), _must_be(_ADAPTER_RULE, str)]
Algorithm = Annotated[Literal["sft", "grpo"], BeforeValidator(_algorithm), _must_be("'sft' or 'grpo'", str)]
Policy = Annotated[Literal["catalog", "allow"], _must_be("'catalog' or 'allow'", str)]
_as_flag = BeforeValidator(_flag, json_schema_input_type=bool | str)
Flag = Annotated[bool, _as_flag, _must_be(f"true, false or a word of {' '.join(BOOLEAN_WORDS)}", bool, str)]
Integer = Annotated[int, BeforeValidator(_integral), _must_be("an integer", int, float)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_integral), _must_be("an integer >= 1", int, float)]
Positive = Annotated[float, Field(gt=0), _must_be("a finite number > 0", int, float)]
NonNegative = Annotated[float, Field(ge=0), _must_be("a finite number >= 0", int, float)]
Fraction = Annotated[float, Field(ge=0, le=1), _must_be("a finite number from 0 to 1", int, float)]
_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
_SEEDS_RULE = "a non-empty list of integers"
Texts = Annotated[tuple[Text, ...], _as_tuple, _must_be("a list of strings", list, tuple)]
Seeds = Annotated[tuple[Integer, ...], Field(min_length=1), _as_tuple, _must_be(_SEEDS_RULE, list, tuple)]
Stops = Annotated[
    tuple[Text, ...],
    BeforeValidator(_stops, json_schema_input_type=str | list[str]),
    _must_be("a string or a list of strings", str, list, tuple),
]
Params = Annotated[dict[str, Any], BeforeValidator(_params), _must_be("a JSON object", dict)]
NoPath = Annotated[None, BeforeValidator(_no_path)]


# --- the spec -----------------------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = {"frozen": True, "strict": True, "extra": "ignore", "allow_inf_nan": False}

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: object) -> object:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _refusal("a JSON object", wrong_type=True)
        return {key: item for key, item in value.items() if item is not None}


def _field(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


class EnvironmentSpec(_Section):
    """Where tasks and rewards come from."""

    id: EnvironmentId = _field("", "verifiers environment, name or owner/name; required to run")
    params: Params = Field(default_factory=dict, description="arguments of the environment's loader")
    pip: Texts = _field((), "packages the launcher installs; carried")
    path: NoPath = Field(default=None, exclude=True, description="not supported; use `id`")


class TrainSpec(_Section):
    """How to train. A field that is absent or null falls back to the recipe."""

    hf_repo: RepoId = _field("", "the store, a Hub dataset repository; empty = a local folder")
    steps: Count | None = _field(None, "optimizer steps (rl)")
    epochs: Count | None = _field(None, "passes over the training rows (sft)")
    lora_rank: Count = _field(32, "LoRA rank")
    lora_alpha: Count = _field(64, "LoRA alpha")
    seeds: Seeds = _field((0,), "one process per entry; a process without SEED takes the first")
    init_from_adapter: AdapterRef = _field(
        "", "adapter to go on from: prefix in the store or owner/repo:prefix"
    )
    learning_rate: Positive | None = _field(None, "peak learning rate")
    batch_size: Count | None = _field(None, "per optimizer step: sequences (sft), unique prompts (rl)")
    max_length: Count | None = _field(None, "tokens per row (sft)")
    save_every: Count | None = _field(None, "optimizer steps between checkpoints")
    group_size: Count | None = _field(None, "completions per prompt (rl); at least 2 to run")
    temperature: NonNegative | None = _field(None, "sampling temperature (rl); above 0 to run")
    max_tokens: Count | None = _field(None, "completion budget in tokens (rl)")
    kl_penalty_coef: NonNegative | None = _field(None, "KL beta (rl)")
    advantage_clip: NonNegative | None = _field(None, "clamp of the centred advantages (rl)")
    thinking_length_penalty_coef: Fraction | None = _field(None, "reward taken off for long thinking (rl)")
    stop_sequences: Stops = _field((), "strings that end a completion (rl)")


class GpuSpec(_Section):
    """The machine the launcher was asked for: carried and reported, not acted on."""

    type: Text = _field("RTX 5090", "card the job is sized for")
    provider: Text = _field("auto", "who rents the machine")
    requested: Text = _field("", "card the user asked for")
    allow_unvalidated: Flag | None = _field(None, "rent cards nobody has validated")
    disk_gb: Integer = _field(60, "disk, GB")
    max_wall_seconds: Integer = _field(86400, "wall clock of one attempt, seconds")
    max_retries: Integer = _field(2, "new attempts after an infrastructure fault")
    network_volume: Text | None = _field(None, "volume to mount")
    network_volume_gb: Integer = _field(100, "size of that volume, GB")
    datacenter: Text | None = _field(None, "where to rent")


class JobSpec(_Section):
    """One fine-tuning job. null anywhere means the default; unknown keys are ignored with a warning."""

    model: ModelId = _field("Qwen/Qwen3.5-4B", "Hub repo id, optionally with @revision, or local path")
    model_policy: Policy = _field("catalog", "allow = models outside the catalog too")
    algorithm: Algorithm = _field("grpo", "sft or grpo, any case")
    run_id: RunId = _field("local", "second part of the prefix in the store")
    thinking: Flag = _field(True, "whether the model reasons before it answers")
    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec, description="tasks and rewards")
    train: TrainSpec = Field(default_factory=TrainSpec, description="how to train")
    gpu: GpuSpec = Field(default_factory=GpuSpec, description="the machine; carried")

    @property
    def phase(self) -> Literal["sft", "rl"]:
        """The mode this job runs in, and the first part of its prefix."""
        return "rl" if self.algorithm == "grpo" else "sft"

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> Self:
        """Validate a decoded JSON object; raises SpecError."""
        if isinstance(obj, Mapping) and (unknown := _unknown_keys(obj)):
            log.warning("JobSpec: ignoring unknown keys: %s", ", ".join(map(_with_suggestion, unknown)))
        try:
            return cls.model_validate(obj)
        except ValidationError as error:
            problems = _ruled(error)
        wrong_type = any(problem["type"] == "wrong_type" for problem in problems)
        raise (SpecTypeError if wrong_type else SpecError)("; ".join(map(_one_line, problems)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Validate a JSON text; raises SpecError."""
        try:
            obj = json.loads(text, object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"JobSpec = {_shown(text)}: must be valid JSON ({error})") from None
        return cls.parse(obj)

    def to_json(self) -> str:
        """JSON with sorted keys, such that `from_json(to_json(x)) == x`."""
        return json.dumps(self.model_dump(), sort_keys=True)


# --- messages -----------------------------------------------------------------------------------------------

_SECTIONS: Mapping[str, type[_Section]] = {
    "": JobSpec,
    "environment": EnvironmentSpec,
    "train": TrainSpec,
    "gpu": GpuSpec,
}


def _shown(value: object) -> str:
    try:
        text = " ".join(repr(value).splitlines())
    except (RecursionError, ValueError):  # nested too deeply, or an integer too long to print
        text = f"<{type(value).__name__}>"
    if len(text) <= _SHOWN_CHARS:
        return text
    # A secret that the cut goes through would not be known as one.
    may_hide = isinstance(value, Mapping | list | tuple) or "{" in text
    return f"<{type(value).__name__}>" if may_hide else text[: _SHOWN_CHARS - 3] + "..."


def _one_line(problem: ErrorDetails) -> str:
    """`JobSpec train.seeds[1] = True: must be an integer`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
    value, key = problem["input"], problem.get("ctx", {})["key"]
    if key:
        path, value = f"{path}.{key}", value[key]
    return f"{f'JobSpec {path[1:]}'.strip()} = {_shown(value)}: {problem['msg']}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj: dict[str, Any] = {}
    for key, value in pairs:
        if key in obj:
            raise ValueError(f"the key {_shown(key)} is given twice in one object")
        obj[key] = value
    return obj


def _unknown_keys(obj: Mapping[Any, Any]) -> list[str]:
    paths = []
    for at, section in _SECTIONS.items():
        given = obj.get(at) if at else obj
        if isinstance(given, Mapping):
            paths += [f"{at}.{key}" if at else str(key) for key in given if key not in section.model_fields]
    return paths


def _with_suggestion(path: str) -> str:
    known = {
        name: f"{at}.{name}".strip(".") for at, section in _SECTIONS.items() for name in section.model_fields
    }
    close = difflib.get_close_matches(path.rpartition(".")[2], sorted(known.keys() - {"path"}), n=1)
    shown = path if path.isprintable() and len(path) <= _SHOWN_CHARS else _shown(path)
    return f"{shown} (did you mean {known[close[0]]}?)" if close else shown
