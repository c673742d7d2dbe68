"""What W&B wrote to its offline files: LevelDB's log format, with its own protocol's records in it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness import TRACKERS

FILE_HEADER, BLOCK = 7, 32768
PART = struct.Struct("<IHB")  # checksum, length, kind
WHOLE, LAST = 1, 4


def find_packages(patch: pytest.MonkeyPatch) -> None:
    """Let this process import the trackers, which are not where other tests' packages are."""
    patch.syspath_prepend(str(TRACKERS))
    import wandb
    from trl.trainer import base_trainer, grpo_trainer

    # TRL binds the name if it finds the package when imported, and uses it if it finds the package later.
    vars(base_trainer)["wandb"] = vars(grpo_trainer)["wandb"] = wandb


@dataclass
class OfflineRun:
    """One attempt's file."""

    id: str = ""
    name: str = ""
    project: str = ""
    exit_code: int | None = None
    logs: list[dict[str, Any]] = field(default_factory=list)

    def series(self, name: str) -> dict[int, float]:
        """A metric by the trainer's step."""
        return {one["train/global_step"]: one[name] for one in self.logs if name in one}


def runs(folder: Path) -> list[OfflineRun]:
    """All offline runs below a folder, in order of their start."""
    return [read(path) for path in sorted(folder.rglob("*.wandb"))]


def read(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for data in chunks(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.name, run.project = record.run.run_id, record.run.display_name, record.run.project
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
        elif kind == "history":
            items = [("/".join(one.nested_key) or one.key, one.value_json) for one in record.history.item]
            run.logs.append({name: json.loads(value) for name, value in items})
    return run


def chunks(data: bytes) -> Iterator[bytes]:
    at, found = FILE_HEADER, b""
    while at + PART.size <= len(data):
        if BLOCK - at % BLOCK < PART.size:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = PART.unpack_from(data, at)
        found += data[at + PART.size : at + PART.size + length]
        at += PART.size + length
        if kind in (WHOLE, LAST):
            yield found
            found = b""
