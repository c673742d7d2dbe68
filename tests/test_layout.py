"""What the layout promises: who imports whom, what an import does, sizes and names; and a true README."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import recipe
from job import knobs
from job.settings import Settings
from job.weights import WeightsPlan
from spec import JobSpec
from tests.harness import ROOT, start_python

ROOMS = ("job", "training", "delivery")
FILES = sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))])
PURE = {"spec", "recipe", "accounting"}
MAY_IMPORT = {
    "spec": set(),
    "recipe": set(),
    "accounting": set(),
    "job": {*PURE, "job"},
    "delivery": {*PURE, "delivery"},
    "training": {*PURE, "job", "delivery", "training"},
    "worker": {*PURE, *ROOMS},
}
NOT_OURS_TO_IMPORT = {"demo", "bench", "tests", "demo_arithmetic", "tiny_model"}
HEAVY = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "verifiers",
    "renderers",
    "vllm",
    "huggingface_hub",
    "matplotlib",
)
LONGEST_FILE, LONGEST_FUNCTION = 350, 60


def named(path: Path) -> str:
    """A path as the README writes it."""
    return path.relative_to(ROOT).as_posix()


def module(path: Path) -> str:
    return named(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{named(path)} has a relative import"
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_who_imports_whom(path):
    room = module(path).partition(".")[0]
    ours = imported(path) & ({*MAY_IMPORT} | NOT_OURS_TO_IMPORT)
    assert ours <= MAY_IMPORT[room]


def test_nobody_else_imports_the_worker():
    others = [path for room in ("demo", "bench") for path in (ROOT / room).rglob("*.py")]
    assert [named(path) for path in others if "worker" in imported(path)] == []


# --- what an import does ---

PROGRAM = """
import importlib, json, os, sys
# What these do when they are imported, and when a first model is made, is theirs.
import difflib, ipaddress, logging, pydantic, pydantic_settings, tenacity
class First(pydantic.BaseModel):
    x: int = 0
class Second(pydantic_settings.BaseSettings):
    x: int = 0

read, done = [], []

class Watched(type(os.environ)):
    def __getitem__(self, name):
        read.append(name)
        return super().__getitem__(name)
    def __iter__(self):
        read.append("all of it")
        return super().__iter__()

os.environ.__class__ = Watched

def watch(event, arguments):
    if event == "open":
        path, mode, _ = arguments
        if not str(path).endswith((".py", ".pyc", ".so")) or set(mode or "r") & set("wxa+"):
            done.append(f"open {path}")
    elif event.startswith(("socket.", "subprocess.", "os.system", "os.mkdir", "os.remove", "shutil.")):
        done.append(event)

sys.addaudithook(watch)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"read": read, "done": done, "modules": sorted(sys.modules)}))
"""


@pytest.mark.slow
def test_importing_everything_does_nothing(tmp_path):
    env = {"AUTOSLM_JOB_SPEC_JSON": "{", "SEED": "x", "RUN_MODE": "x", "HF_TOKEN": "x"}
    ended = start_python(["-B", "-c", PROGRAM, *map(module, FILES)], env, tmp_path)
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert {*map(module, FILES)} <= {*found["modules"]}
    assert {name.partition(".")[0] for name in found["modules"]} & {*HEAVY} == set()
    ours = {one.name for one in knobs.declared(Settings)} | knobs.SPEC_VARIABLES | knobs.LAUNCHER_ONLY
    assert {*found["read"]} & {*ours, "HUGGINGFACE_TOKEN", "all of it"} == set()
    assert found["done"] == []


# Variables that are set for a library which takes them from nowhere else.
EXPORTERS = {"training/engine.py"}


def environment_uses(code: ast.AST) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and node.attr in (
            "environ",
            "environb",
            "getenv",
            "getenvb",
            "putenv",
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (alias.name for alias in node.names if "env" in alias.name)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_who_touches_the_process_environment(path):
    whole = tree(path)
    uses = [*environment_uses(whole)]
    if named(path) == "worker.py":
        assert (
            isinstance(whole.body[-1], ast.If)
            and ast.unparse(whole.body[-1].test) == "__name__ == '__main__'"
        )
        assert uses == [*environment_uses(whole.body[-1])] == ["os.environ"]
    elif named(path) in EXPORTERS:
        updates = [node for node in ast.walk(whole) if isinstance(node, ast.Call)]
        assert len(uses) == sum(ast.unparse(call.func) == "os.environ.update" for call in updates)
    elif named(path) not in ("job/settings.py", "job/knobs.py"):
        assert uses == []


# --- names and sizes ---


def test_no_name_of_ours_shadows_another():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    on_the_path = [ROOT, ROOT / "demo", ROOT / "tests" / "environments"]
    ours = (folders - {"artifacts"}) | {path.stem for folder in on_the_path for path in folder.glob("*.py")}
    elsewhere = [
        entry
        for entry in sys.path
        if entry and Path(entry) not in on_the_path and "__editable__" not in entry
    ]
    assert ours & sys.stdlib_module_names == set()
    assert {name: spec for name in ours if (spec := PathFinder.find_spec(name, elsewhere)) is not None} == {}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_sizes(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


# --- the README ---


@cache
def rows(*header: str) -> list[list[str]]:
    """The rows of all README tables whose header begins with these cells."""
    found: list[list[str]] = []
    inside = False
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|"):
            inside = False
        elif cells[: len(header)] == [*header]:
            inside = True
        elif inside and not set(line) <= set("|-: "):
            found.append(cells)
    return found


def test_the_readme_names_every_variable_and_no_other():
    in_readme = [cells[0].strip("`") for cells in rows("Variable")]
    declared = [one.name for one in knobs.declared(Settings) if one.is_variable]
    assert sorted(in_readme) == sorted(declared)


def test_every_table_of_the_readme_that_begins_with_a_variable_is_one_of_variables():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    anywhere = re.findall(r"^\| *`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`", text, flags=re.MULTILINE)
    assert {*anywhere} <= {cells[0].strip("`") for cells in rows("Variable")}


@pytest.mark.parametrize(
    "one", [one for one in knobs.declared(Settings) if one.is_variable], ids=lambda one: one.name
)
def test_the_readme_says_what_the_table_of_settings_says(one):
    default = one.default or "empty"
    if one.spec and not one.spec_wins:
        default = f"`{one.spec}`, else {default}"
    assert [f"`{one.name}`", one.meaning, one.rule, default] in rows(
        "Variable", "Meaning", "Value", "Default"
    )


def test_the_readme_names_every_file_and_no_other():
    in_readme = {cells[0].strip("`") for cells in rows("File", "Holds")}
    files = {named(path) for path in FILES if path.stat().st_size}
    assert in_readme == files | {"demo/", "bench/", "tests/"}


@pytest.mark.parametrize("mode", ["sft", "rl"])
def test_the_readme_names_every_stage_the_code_beats(mode):
    in_readme = {stage for cells in rows("Stage", "When") for stage in re.findall(r"`(\w+)`", cells[0])}
    assert {stage for stage in in_readme if stage.startswith(mode) or stage == f"error_{mode}"} == {
        stage for stage in stages(mode) if stage.startswith(mode) or stage == f"error_{mode}"
    }
    assert stages(mode) <= in_readme


@cache
def stages(mode: str) -> set[str]:
    """Stages of all beats, and of those that go with an upload or a checkpoint."""
    nodes = [node for path in FILES for node in ast.walk(tree(path))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    beats = [call.args[0] for call in calls if ast.unparse(call.func).endswith(".beat") and call.args]
    beats += [call.args[2] for call in calls if ast.unparse(call.func).endswith(".upload") and call.args[2:]]
    beats += [call.args[-1] for call in calls if ast.unparse(call.func) == "announce_training"]
    beats += [
        node.elts[0] for node in nodes if isinstance(node, ast.Tuple) and "_uploaded" in ast.unparse(node)
    ]
    choices = [one for one in beats if isinstance(one, ast.IfExp)]
    found = set()
    for argument in [*beats, *(branch for one in choices for branch in (one.body, one.orelse))]:
        if isinstance(argument, ast.Constant):
            found.add(argument.value)
        elif isinstance(argument, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else mode for part in argument.values]
            found.add("".join(parts))
    other = {"sft": "rl", "rl": "sft"}[mode]
    return {stage for stage in found if not stage.startswith(f"{other}_")}


# --- the libraries ---

PLAN = WeightsPlan(
    base="b",
    source="b",
    commit=None,
    base_commit=None,
    dtype="float32",
    model_type="qwen3",
    vocab_size=320,
    context_length=512,
    kv_bytes_per_token=1024,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "env", [{"AUTOSLM_DEVICE": "cpu"}, {"SFT_PACKING": "1", "SFT_LIGER": "1"}, {"RL_USE_VLLM": "0"}]
)
def test_every_keyword_exists_in_the_installed_trl(env):
    import dataclasses

    import trl

    from training import trainers

    settings = Settings.read(env, JobSpec.parse({"environment": {"id": "x"}}))
    for arguments, config in (
        (trainers.sft_arguments(settings, PLAN, recipe.Batch(1, 2), 640), trl.SFTConfig),
        (trainers.grpo_arguments(settings, PLAN, recipe.Batch(1, 2)), trl.GRPOConfig),
    ):
        assert arguments.keys() <= {field.name for field in dataclasses.fields(config)}
