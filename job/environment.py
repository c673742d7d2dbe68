"""The verifiers environment of a run: its rows, prompts, targets and tools.

Written for the classic environments of verifiers 0.3.1 (`vf.SingleTurnEnv`, `vf.ToolEnv`, …).
"""

import copy
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from accounting import in_brief
from job.chat import Message, joined

log = logging.getLogger(__name__)

Row = dict[str, Any]

RESERVED_PARAMS = frozenset(
    {"eval_env_id", "eval_env", "eval_examples", "eval_seed", "grpo_config", "sft_config", "mode", "records"}
    | {"eval_records", "reward_command"}
)
EVAL_SEED = 12345
DEFAULT_MAX_TURNS = 10
TARGET_FIELDS = ("answer", "completion", "target", "response")
SCORABLE = frozenset(
    {"completion", "prompt", "answer", "info", "state", "parser", "task"}
    | {"judge", "judge_client", "judge_model", "judge_prompt"}
)
GROUP_SCORABLE = frozenset(["prompts", "completions", "answers", "states", "tasks", "infos"])


class EnvironmentProblem(ValueError):
    """An environment that cannot be loaded or used; one line with the cause."""


class Environment:
    """One loaded verifiers environment, and the one that evaluates when another is named."""

    def __init__(
        self,
        reference: str,
        loaded: Any,
        evaluator: "Environment | None" = None,
        params: Mapping[str, Any] | None = None,
    ):
        import verifiers as vf

        params = params or {}
        self.id, self.loaded = reference, loaded
        self.evaluator = evaluator or self
        self.is_tool_env = isinstance(loaded, vf.ToolEnv)
        self.multi_turn = any(
            isinstance(one, vf.MultiTurnEnv) and not isinstance(one, vf.SingleTurnEnv)
            for one in self.members()
        )
        self.pass_threshold: float = loaded.pass_threshold
        self.eval_examples = int(params.get("eval_examples") or 0)
        self.eval_seed = EVAL_SEED if params.get("eval_seed") is None else int(params["eval_seed"])
        rows = loaded.build_dataset()  # a training split may be a function that has not run yet
        check_rubric(loaded.rubric, columns=() if rows is None else rows.column_names)

    @classmethod
    def load(cls, reference: str, params: Mapping[str, Any]) -> "Environment":
        """Load `owner/name` or `name` with the loader's parameters; raises EnvironmentProblem."""
        reserved = sorted(RESERVED_PARAMS & set(params))
        dropped = [name for name in reserved if not name.startswith("eval_") or name == "eval_records"]
        if dropped:
            log.info("environment.params not passed to the loader: %s", ", ".join(dropped))
        passed = {name: copy.deepcopy(value) for name, value in params.items() if name not in RESERVED_PARAMS}
        evaluator_id = params.get("eval_env_id") or params.get("eval_env") or ""
        return cls(
            reference,
            _load(reference, passed),
            cls(evaluator_id, _load(evaluator_id, {})) if evaluator_id else None,
            params,
        )

    @property
    def max_turns(self) -> int:
        """Model turns per conversation; the library's "no limit" becomes 10."""
        turns = [one.max_turns if self.multi_turn else 1 for one in self.members()]
        return max(one if one and one > 0 else DEFAULT_MAX_TURNS for one in turns)

    def members(self) -> list[Any]:
        """The environments that play conversations: those of a group, however deep, else the loaded one."""

        def inner(env: Any) -> list[Any]:
            grouped = vars(env).get("env_map")
            return [one for member in grouped.values() for one in inner(member)] if grouped else [env]

        return inner(self.loaded)

    @property
    def version(self) -> str:
        """Version of the installed distribution, else a digest of the module's file."""
        module = _module_name(self.id)
        owners = importlib.metadata.packages_distributions().get(module)
        if owners:
            return f"{owners[0]} {importlib.metadata.version(owners[0])}"
        source = inspect.getfile(importlib.import_module(module))
        return f"{module} sha256:{hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]}"

    # --- rows ---

    def train_rows(self) -> list[Row]:
        """All training rows, in the environment's order under seed 0."""
        getter = self.loaded.get_dataset if self._has(self.loaded, "dataset") else None
        return _rows(getter, 0)

    def eval_rows(self) -> list[Row]:
        """Held-out rows of `evaluator`, else its training rows; errors of the getter propagate."""
        source = self.evaluator.loaded
        if self._has(source, "eval_dataset"):
            rows = _rows(source.get_eval_dataset, self.eval_seed)
        else:
            rows = _rows(source.get_dataset if self._has(source, "dataset") else None, 0)
        if 0 < self.eval_examples < len(rows):
            chosen = random.Random(self.eval_seed).sample(range(len(rows)), self.eval_examples)
            rows = [rows[index] for index in sorted(chosen)]
        return rows

    @property
    def has_held_out_rows(self) -> bool:
        """Whether `eval_rows` are others than the training rows."""
        return self.evaluator is not self or self._has(self.loaded, "eval_dataset")

    @staticmethod
    def _has(env: Any, split: str) -> bool:
        built, source = (
            (env.dataset, env.dataset_source)
            if split == "dataset"
            else (env.eval_dataset, env.eval_dataset_source)
        )
        return built is not None or source is not None

    # --- one row ---

    def prompt(self, row: Row) -> list[Message]:
        """The messages a conversation begins with; the row is not touched."""
        given = row.get("prompt")
        if isinstance(given, list) and given:
            messages = [_message(one) for one in given]
        else:
            messages = [{"role": "user", "content": row.get("question") or given or ""}]
        system = self.loaded.system_prompt
        if system and all(one["role"] != "system" for one in messages):
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def target(self, row: Row) -> str | list[Message]:
        """What to learn: text, or a gold transcript as messages; "" when the row has none."""
        for name in TARGET_FIELDS:
            value = row.get(name)
            if isinstance(value, list) and value:
                return [_message(one) for one in value]
            if value not in (None, "", []):
                return str(value)
        return ""

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """The tool schemas shown to the model, in the form chat templates take."""
        env, own = self._member(row), info(row).get("tool_defs")
        tools = env.tool_defs if own is None else type(env)._normalize_tool_defs(own)
        return [schema(one) for one in tools or []]

    def _member(self, row: Row) -> Any:
        """The environment that a row belongs to: in a group the member that `info` names, however deep."""
        env, route = self.loaded, info(row).get("env_id") or []
        for name in [route] if isinstance(route, str) else route:
            env = vars(env).get("env_map", {}).get(name, env)
        return env


def _load(reference: str, params: Mapping[str, Any]) -> Any:
    if not reference:
        raise EnvironmentProblem("JobSpec environment.id is empty: no environment specified")
    try:
        import verifiers as vf
    except ImportError as error:
        raise EnvironmentProblem(
            f"the package verifiers is missing ({error}); pip install verifiers==0.3.1"
        ) from error
    name, load = reference.rpartition("/")[2], vf.load_environment
    # That look-up cut verifiers' logger off (0.3): Python would print its warnings bare, secrets included.
    logging.getLogger("verifiers").propagate = True
    try:
        return load(name, **params)
    except (ValueError, RuntimeError) as error:
        cause = error.__cause__ or error
        reason = in_brief(cause)
        raise EnvironmentProblem(
            f"JobSpec environment.id={reference!r} cannot be loaded: {type(cause).__name__}: {reason};"
            f" is the package that provides the module {_module_name(reference)!r} installed, and are"
            " environment.params right?"
        ) from error


def _module_name(reference: str) -> str:
    return reference.rpartition("/")[2].replace("-", "_")


def _rows(getter: Callable[..., Any] | None, seed: int) -> list[Row]:
    if getter is None:
        return []
    wanted = {"n": -1, "seed": seed}
    accepted = inspect.signature(getter).parameters
    return [
        dict(row) for row in getter(**{name: value for name, value in wanted.items() if name in accepted})
    ]


def _message(one: Any) -> Message:
    """A plain copy of a message; raises EnvironmentProblem for anything else."""
    plain = one.model_dump() if isinstance(one, BaseModel) else one
    if not isinstance(plain, Mapping) or not isinstance(plain.get("role"), str):
        raise EnvironmentProblem(
            f"{repr(one)[:80]} is no message: a list in a row's prompt or target holds messages with a role"
        )
    message = _without_nulls(plain)
    return {**message, "content": joined(message["content"])} if message.get("content") else message


def _without_nulls(value: Any) -> Any:
    """A copy without the null keys that Arrow adds, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list | tuple) else value


def schema(tool: Any) -> dict[str, Any]:
    """A tool of the library in the form that chat templates take."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def info(row: Row) -> dict[str, Any]:
    """The row's `info`; JSON text is parsed, anything unusable is empty."""
    value = row.get("info")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = None
    return dict(value) if isinstance(value, Mapping) else {}


def fingerprint(rows: Sequence[Row]) -> str:
    """Digest of the rows' content and order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


# --- rubric ---------------------------------------------------------------------------------------


def rubric_tree(rubric: Any) -> list[Any]:
    """The rubric and all rubrics nested in it (groups, and the members of an EnvGroup), outermost first."""
    nested = [
        *vars(rubric).get("rubrics", ()),
        *(env.rubric for env in vars(rubric).get("env_map", {}).values()),
    ]
    return [rubric, *(inner for one in nested for inner in rubric_tree(one))]


def check_rubric(rubric: Any, columns: Sequence[str]) -> None:
    """Refuse a weighted reward function that requires an argument which the library will not pass.

    verifiers passes the names of SCORABLE (plural for a group), the rubric's class objects and
    the row's columns.
    """
    for one in rubric_tree(rubric):
        if one.score_object_providers or one.group_score_object_providers:
            continue  # what these add is only known when they run
        known = SCORABLE | GROUP_SCORABLE | set(one.class_objects) | set(columns)
        for func, weight in zip(one.funcs, one.weights, strict=True):
            missing = [name for name in _required_arguments(func) if weight and name not in known]
            if missing:
                raise EnvironmentProblem(
                    f"reward function {function_name(func)!r} requires the argument {missing[0]!r}, which"
                    f" is none of {', '.join(sorted(SCORABLE))} and no column of the rows"
                )


def function_name(func: Any) -> str:
    """A reward function's name; a partial or an object with `__call__` has none of its own."""
    inner = func.func if isinstance(func, functools.partial) else func
    return inner.__name__ if hasattr(inner, "__name__") else type(inner).__name__


def _required_arguments(func: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(func).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.kind in named and one.default is inspect.Parameter.empty]
