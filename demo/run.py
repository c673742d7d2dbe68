"""The demo, `make demo`: a base model, an adapter trained by the worker, and what the adapter learned.

`DEMO_MODEL=<Hub id or folder>` trains a real model for a few steps instead of the tiny one built here;
`DEMO_DIR` names the folder for everything written (default `demo-out`), `DEMO_SEED` the seed (default 0).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
# Set in the caller's shell, these would send the run, or its result, somewhere else.
NOT_INHERITED = ("AUTOSLM_JOB_SPEC_JSON", "HF_REPO", "PHASE", "RUN_ID")
# A real model is trained on a few gentle steps, which a laptop can do.
REAL_MODEL_TRAIN = {"batch_size": 8, "epochs": 1, "learning_rate": 2e-4}
REAL_MODEL_RL = {"batch_size": 2, "group_size": 4, "steps": 5, "learning_rate": 1e-5}
REAL_MODEL_STEPS = "30"
EVALUATE_EVERY = {"sft": "300", "rl": "20"}
# Of the libraries in this process; the worker sees to its own.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
PLAN = """\
Fine-tunes a tiny language model on this machine's CPU, with the same worker
that runs on a GPU. About five minutes on two free cores:

  1/5  build a base model that knows digits and chat turns, but no sums   30 s
  2/5  supervised: 7000 sums, two passes                                 2 min
  3/5  ask it held-out sums, without and with the trained adapter         20 s
  4/5  supervised, stopped early: it adds small numbers now and then     1 min
  5/5  GRPO from there: it samples answers, rewards alone make it better 2 min
"""
PLAN_REAL = """\
Fine-tunes {model} for a few steps, with the same worker that
runs on a GPU. How long that takes depends on the model's size and this machine:

  2/5  supervised, on sums
  3/5  ask it held-out sums, without and with the trained adapter
  4/5  supervised, on small sums
  5/5  GRPO from there, on rewards alone
"""
SHOWN_QUESTIONS = 6
ANSWER_TOKENS = 16

Row = dict[str, Any]


@dataclass(frozen=True)
class Demo:
    """Where the demo writes, on which model, and how many held-out questions it asks."""

    folder: Path
    model: str
    is_tiny: bool
    questions: int
    seed: str = "0"

    @classmethod
    def from_env(cls) -> Demo:
        """The demo the shell asks for: the tiny model unless `DEMO_MODEL` names another."""
        folder = Path(os.environ.get("DEMO_DIR") or REPOSITORY / "demo-out").resolve()
        named, seed = os.environ.get("DEMO_MODEL", ""), os.environ.get("DEMO_SEED") or "0"
        if not named:
            return cls(folder, str(folder / "model"), is_tiny=True, questions=100, seed=seed)
        model = str(Path(named).resolve()) if Path(named).is_dir() else named
        return cls(folder, model, is_tiny=False, questions=20, seed=seed)

    def prefix(self, mode: str) -> Path:
        """The folder where the worker's store keeps what a run of this mode leaves."""
        return self.folder / "artifacts" / mode / "demo" / f"seed{self.seed}"


def main() -> None:
    """Run the stages in order and report."""
    demo = Demo.from_env()
    be_quiet()
    print(PLAN if demo.is_tiny else PLAN_REAL.format(model=demo.model), flush=True)
    prepare_folder(demo)
    build_model(demo)
    write_result(demo, sft_stage(demo) | rl_stage(demo))


def be_quiet() -> None:
    """Keep the progress bars and warnings of libraries off the screen, unless asked for with the logs."""
    if os.environ.get("AUTOSLM_LOG_LEVEL", "").strip().lower() != "debug":
        os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
        warnings.simplefilter("ignore")


def sft_stage(demo: Demo) -> dict[str, Any]:
    """Train on sums, ask held-out ones, print and return what came of it."""
    spec = write_spec(demo, "sft")
    say("2/5", "supervised fine-tuning on sums")
    beats = run_worker(demo, "sft", spec)
    adapter = demo.prefix("sft") / "adapter"
    rows = held_out_rows(spec, demo.questions)
    base, tuned = ask_base_and_adapter(demo.model, adapter, rows)
    losses = [beat["loss"] for beat in beats if beat["stage"] == "sft_step" and beat.get("loss") is not None]
    result = {
        "model": demo.model,
        "artifacts": str(demo.prefix("sft")),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "questions": len(rows),
        "base_exact_match": exact_match(rows, base),
        "adapter_exact_match": exact_match(rows, tuned),
    }
    print_sft(result, rows, base, tuned)
    return result


def rl_stage(demo: Demo) -> dict[str, Any]:
    """From a deliberately short SFT adapter on small sums, on with GRPO; print and return the rewards."""
    say("4/5", "a short supervised run on small sums, for GRPO to start from")
    run_worker(demo, "sft", write_spec(demo, "short"))
    say("5/5", "GRPO on small sums")
    beats = run_worker(demo, "rl", write_spec(demo, "rl"))
    rewards = [beat["reward"] for beat in beats if beat["stage"] == "rl_step" and not beat.get("liveness")]
    few = max(1, min(5, len(rewards) // 2))
    result = {
        "rl_artifacts": str(demo.prefix("rl")),
        "rl_rewards": rewards,
        "rl_first_reward": sum(rewards[:few]) / few,
        "rl_last_reward": sum(rewards[-few:]) / few,
    }
    print_rl(result, few)
    return result


def print_rl(result: dict[str, Any], few: int) -> None:
    """Where the artifacts are, and the mean reward as training went on."""
    rewards = result["rl_rewards"]
    print()
    print_places(Path(result["rl_artifacts"]))
    print(f"  mean reward   first {few} steps {result['rl_first_reward']:.2f}")
    print(f"                last {few} steps  {result['rl_last_reward']:.2f}")
    print()
    width = max(1, -(-len(rewards) // 10))
    for start in range(0, len(rewards), width):
        part = rewards[start : start + width]
        mean = sum(part) / len(part)
        print(f"  steps {start + 1:>3}-{start + len(part):<3} {mean:4.2f} {'#' * round(40 * mean)}")


def prepare_folder(demo: Demo) -> None:
    """Remove what an earlier demo wrote, and nothing else the folder may hold."""
    for name in ("model", "work", "artifacts"):
        shutil.rmtree(demo.folder / name, ignore_errors=True)
    for path in demo.folder.glob("*.json"):
        path.unlink()
    demo.folder.mkdir(parents=True, exist_ok=True)


def build_model(demo: Demo) -> None:
    """Build the tiny base model, unless the demo runs on a real one."""
    if demo.is_tiny:
        say("1/5", "building the base model")
        tiny_model.build(Path(demo.model))


def write_spec(demo: Demo, name: str) -> Path:
    """The ready JobSpec of this folder with the demo's model and seed in it."""
    spec = json.loads((HERE / f"{name}.json").read_text())
    spec["model"] = demo.model
    if name == "rl":
        spec["train"]["init_from_adapter"] = f"sft/demo-short/seed{demo.seed}"
    if not demo.is_tiny:
        spec["train"].update(REAL_MODEL_RL if name == "rl" else REAL_MODEL_TRAIN)
    path = demo.folder / f"{name}.json"
    path.write_text(json.dumps(spec, indent=2, sort_keys=True) + "\n")
    return path


def run_worker(demo: Demo, mode: str, spec: Path) -> list[dict[str, Any]]:
    """Run `worker.py` and return its heartbeats; what it says to people is shown, what to launchers is not.

    Leaves with one line if it failed.
    """
    print(f"     RUN_MODE={mode} AUTOSLM_JOB_SPEC_PATH={shown(spec)} python worker.py", flush=True)
    beats = []
    with subprocess.Popen(
        [sys.executable, "worker.py"],
        cwd=REPOSITORY,
        env=worker_env(demo, mode, spec),
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as worker:
        for line in worker.stdout or ():
            if line.startswith("HEARTBEAT "):
                beats.append(json.loads(line.removeprefix("HEARTBEAT ")))
            elif not line.startswith("NODE DONE: "):
                print(line, end="", flush=True)
    if worker.returncode != 0:
        errors = [beat.get("error", "") for beat in beats if beat["stage"] == f"error_{mode}"]
        reason = " ".join(str(errors[-1]).split()) if errors else f"see {shown(demo.folder / 'work')}"
        sys.exit(f"demo: the {mode} worker failed (exit code {worker.returncode}): {reason}")
    return beats


def worker_env(demo: Demo, mode: str, spec: Path) -> dict[str, str]:
    """The shell's variables with the demo's own on top."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    defaults = {"AUTOSLM_DEVICE": "cpu"}
    if demo.is_tiny:
        # One micro-batch a step. A second thread gains a fifth, but can stall on busy cores.
        defaults |= {"SFT_PER_DEVICE_BS": "32", "RL_PER_DEVICE_PROMPTS": "128", "OMP_NUM_THREADS": "1"}
        defaults |= {
            "AUTOSLM_EVAL_EVERY_STEPS": EVALUATE_EVERY[mode],
            "AUTOSLM_EVAL_MAX_NEW": str(ANSWER_TOKENS),
        }
    else:
        defaults |= {"SFT_MAX_STEPS": REAL_MODEL_STEPS}
    python_path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return (
        defaults
        | inherited
        | {
            "RUN_MODE": mode,
            "SEED": demo.seed,
            "AUTOSLM_JOB_SPEC_PATH": str(spec),
            "AUTOSLM_WORK_DIR": str(demo.folder / "work"),
            "AUTOSLM_STORE_DIR": str(demo.folder / "artifacts"),
            "PYTHONPATH": os.pathsep.join(python_path),
            "PYTHONUNBUFFERED": "1",
        }
    )


def held_out_rows(spec: Path, limit: int) -> list[Row]:
    """The first held-out rows of the environment, loaded as the worker loads it."""
    import verifiers as vf

    environment = json.loads(spec.read_text())["environment"]
    return vf.load_environment(environment["id"], **environment["params"]).get_eval_dataset(n=limit).to_list()


def ask_base_and_adapter(model_id: str, adapter: Path, rows: list[Row]) -> tuple[list[str], list[str]]:
    """The base model's replies, and those of the same model with the adapter on it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("3/5", f"asking {len(rows)} held-out questions, without and with the adapter")
    device = os.environ.get("AUTOSLM_DEVICE") or "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(model_id, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype).to(device).eval()
    base_replies = ask(base, tokenizer, rows)
    tuned = PeftModel.from_pretrained(base, str(adapter)).eval()
    return base_replies, ask(tuned, tokenizer, rows)


def ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], batch_size: int = 50
) -> list[str]:
    """Greedy replies, in the order of the rows."""
    import torch

    replies = []
    for start in range(0, len(rows), batch_size):
        batch = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows[start : start + batch_size]],
            add_generation_prompt=True,
            enable_thinking=False,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(
                **batch,
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
            )
        replies += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


def exact_match(rows: list[Row], replies: list[str]) -> float:
    """The share of replies that are the answer and nothing else."""
    return sum(reply.strip() == row["answer"] for row, reply in zip(rows, replies, strict=True)) / len(rows)


def print_sft(result: dict[str, Any], rows: list[Row], base: list[str], tuned: list[str]) -> None:
    """The figures, and a few held-out questions with both answers."""
    print()
    print_places(Path(result["artifacts"]))
    if result["last_loss"] is not None:
        print(f"  loss          {result['first_loss']:.3f} -> {result['last_loss']:.3f}")
    print(f"  exact match   base         {result['base_exact_match']:4.0%}")
    print(f"                with adapter {result['adapter_exact_match']:4.0%}")
    print(f"                ({result['questions']} held-out questions, greedy)")
    print()
    print(f"  {'held-out question':<20}{'answer':<9}{'base':<22}{'base + adapter':<22}")
    for row, before, after in list(zip(rows, base, tuned, strict=True))[:SHOWN_QUESTIONS]:
        print(f"  {row['question']:<20}{row['answer']:<9}{cell(before):<22}{cell(after):<22}".rstrip())


def cell(text: str, width: int = 20) -> str:
    """A reply as one short line of ASCII."""
    line = " ".join(text.split()).encode("ascii", "replace").decode()
    return line if len(line) <= width else line[: width - 3] + "..."


def write_result(demo: Demo, result: dict[str, Any]) -> None:
    """`result.json`, for machines."""
    path = demo.folder / "result.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n  {shown(path)} holds these figures; README.md, 'Run a job', has the way to your own.")


def shown(path: Path) -> str:
    """A path as people read it: relative where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_places(artifacts: Path) -> None:
    """Where a run's files are, and its report, if it wrote one."""
    print(f"  artifacts     {shown(artifacts)}")
    if (artifacts / "report.md").is_file():
        print(f"  report        {shown(artifacts / 'report.md')}")


def say(number: str, stage: str) -> None:
    """One line that tells which stage begins."""
    print(f"\n{number}  {stage}", flush=True)


if __name__ == "__main__":
    main()
