"""One attempt at a run: who it is, the places it writes to, and when it has to stop."""

import logging
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accounting import Tally
from delivery.checkpoints import Checkpoints
from delivery.progress import Progress
from delivery.publisher import Publisher
from delivery.redaction import redactor
from delivery.store import open_store
from delivery.terminal import Terminal
from job.settings import Identity, SettingsError
from training.history import MetricsStream
from training.preemption import EXIT_CODE, Preemption, Signals
from training.trackers import Trackers

log = logging.getLogger(__name__)


class Run:
    """What every step of a run shares; building one starts nothing."""

    def __init__(self, identity: Identity, signals: Signals | None = None):
        self.identity, self.redact = identity, redactor(identity.secrets)
        self.attempt, self.tally = uuid.uuid4().hex[:8], Tally()
        self.began = time.monotonic()
        self.stream = MetricsStream(self.redact)
        self.store = open_store(
            identity.hf_repo, identity.store_dir, identity.prefix, identity.token, identity.endpoint
        )
        self.terminal = Terminal(Progress(identity.prefix, self.store.location))
        who = {"run_id": identity.run_id, "mode": identity.mode, "seed": identity.seed}
        self.publisher = Publisher(
            self.store,
            {**who, "attempt": self.attempt},
            identity.work_dir / "hb" / "heartbeat.json",
            told=self._told,
            redact=self.redact,
            min_interval_s=identity.heartbeat_min_s,
            deadline_s=identity.upload_deadline_s,
        )
        self.checkpoints = Checkpoints(self.publisher, self.local("staging"))
        self.trackers = Trackers()
        self.preemption = Preemption(identity.grace_s, self._announce, self._leave, signals)

    def start(self) -> None:
        """Start the publisher, so that whatever happens next can be told, and listen for the end."""
        self.publisher.start()
        self.preemption.watch(self.identity.spec.gpu.max_wall_seconds if self.identity.spec else None)

    def close(self) -> None:
        """The run has ended: its clock no longer matters, and a person hears how it went."""
        self.preemption.close()
        self.terminal.close()

    def check(self) -> None:
        """Raise Superseded or Preempted when the run has to stop; called where that loses nothing."""
        self.publisher.check()
        self.preemption.check()

    def clear(self) -> None:
        """Delete what an earlier attempt left; raises SettingsError when the work directory is no good."""
        folder = self.identity.work_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.take_back("train_meta.json")
            self.clear_scratch()
        except OSError as error:
            raise SettingsError(
                f"AUTOSLM_WORK_DIR={str(folder)!r}: cannot be used: {error.strerror}"
            ) from error

    def clear_scratch(self) -> None:
        """Delete the folders that a run works in; its named files and the trainer's output stay."""
        for name in ("resume", "staging"):
            shutil.rmtree(self.local(name), ignore_errors=True)

    def local(self, name: str) -> Path:
        return self.identity.work_dir / name

    def keep(self, name: str, text: str) -> bytes:
        """Write a local file; returns its content."""
        content = self.content(text)
        self.local(name).parent.mkdir(parents=True, exist_ok=True)
        self.local(name).write_bytes(content)
        return content

    def keep_if_possible(self, name: str, text: str) -> bytes:
        """The same with a file that can be done without."""
        try:
            return self.keep(name, text)
        except OSError as error:
            log.warning("%s not written here: %s", name, error)
            return self.content(text)

    def content(self, text: str) -> bytes:
        """A file of this text: no secrets in it, and readable whatever an error has quoted."""
        return self.redact(text).encode(errors="backslashreplace")

    def take_back(self, *more: str) -> None:
        """Delete the local files that would look like success, and `more`."""
        for name in ("metrics.json", "DONE", *more):
            self.local(name).unlink(missing_ok=True)

    def _told(self, stage: str, extras: Mapping[str, Any]) -> None:
        if stage == "done":
            self.preemption.finished()
        self.terminal.told(stage, extras)

    def _announce(self, reason: str) -> None:
        self.publisher.beat("preempting", step=self.tally.step, reason=reason)

    def _leave(self, upload_s: float) -> None:
        """Give uploads and trackers that long; unless it finished, nothing may say that the run succeeded."""
        until = time.monotonic() + upload_s
        self.trackers.close(EXIT_CODE)
        self.publisher.flush(upload_s)
        self.trackers.wait(until - time.monotonic())
        self.terminal.close()
        if not self.preemption.is_finished:
            self.take_back()
