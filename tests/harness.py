"""What the slow tests share: a job's variables, runs of the worker, and models with other chat templates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEMPLATES = Path(__file__).parent / "templates"
PYTHONPATH = os.pathsep.join(str(ROOT / path) for path in (".", "demo", "tests/environments"))
TRACKERS = Path(sys.prefix) / "trackers"  # packages that no other test should spend the time to import
PATIENCE_S = 900


@dataclass(frozen=True)
class Finished:
    """How a run ended: exit code, both streams, and the exception of a run in this process."""

    code: int
    out: str
    err: str = ""
    error: BaseException | None = None

    @property
    def beats(self) -> list[dict[str, Any]]:
        """Every HEARTBEAT line, decoded as strict JSON."""
        lines = [line for line in self.out.splitlines() if line.startswith("HEARTBEAT ")]
        return [strict(line.removeprefix("HEARTBEAT ")) for line in lines]

    @property
    def stages(self) -> list[str]:
        return [beat["stage"] for beat in self.beats if not beat.get("liveness")]


def strict(text: str | bytes) -> Any:
    """Decode JSON that must hold no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def variables(
    folder: Path, model: Path | str, environment: str, spec: Mapping[str, Any] | None = None, **more: object
) -> dict[str, str]:
    """The environment of a quick SFT run on the CPU that writes below `folder`."""
    train = {"batch_size": 8, "learning_rate": 3e-3, **(spec or {}).get("train", {})}
    whole = {
        **{"model": str(model), "model_policy": "allow", "algorithm": "sft", "thinking": False},
        **{"run_id": "r1", "environment": {"id": environment}},
        **(spec or {}),
        "train": train,
    }
    return {
        "RUN_MODE": "sft",
        "AUTOSLM_DEVICE": "cpu",
        "AUTOSLM_LOG_FLUSH_S": "0",
        "AUTOSLM_WORK_DIR": str(folder / "work"),
        "AUTOSLM_STORE_DIR": str(folder / "store"),
        "AUTOSLM_JOB_SPEC_JSON": json.dumps(whole),
        **{name: str(value) for name, value in more.items()},
    }


def process_environment(home: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Everything a fresh process gets: nothing of the person's own settings, caches or tokens."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    ours = {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "HF_HUB_DISABLE_XET": "1"}
    ours["MPLCONFIGDIR"] = str(Path(tempfile.gettempdir(), "matplotlib-of-tests"))  # its fonts, listed once
    return {**kept, **ours, **env}


def start_python(arguments: list[str], env: Mapping[str, str], home: Path) -> Finished:
    """Run Python to its end, in the repository's root."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=process_environment(home, env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Finished(ended.returncode, ended.stdout, ended.stderr)


def run_main(env: Mapping[str, str]) -> Finished:
    """Run `worker.main` in this process."""
    import worker

    failure: BaseException | None = None
    # A real file: vLLM asks for its number.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        with redirect_stdout(out):
            try:
                worker.main(dict(env))
            except (Exception, SystemExit) as error:
                failure = error
        out.seek(0)
        return Finished(int(failure is not None), out.read(), error=failure)


def template(name: str) -> str:
    """The text of one of the chat templates in tests/templates."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def with_template(model: Path, folder: Path, name: str) -> Path:
    """A copy of a model that renders with another chat template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template(name), encoding="utf-8")
    return folder


def llama_tokenizer() -> Any:
    """A byte-level tokenizer with Llama 3's special tokens and template; all text gets a start token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    begin, end, turn = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=[begin, end, "<|start_header_id|>", "<|end_header_id|>", turn],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=280,
        show_progress=False,
    )
    raw.train_from_iterator(["user assistant system Spell backwards"], trainer)
    start = (begin, raw.token_to_id(begin))
    raw.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=begin, eos_token=turn, chat_template=template("llama3")
    )


def build_llama(folder: Path) -> Path:
    """Write a random two-layer Llama, untied, with a tokenizer that has no pad token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = llama_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,  # LoRA leaves the output layer alone; 0.02 gives it little to steer
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
