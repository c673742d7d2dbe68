"""What a person at the terminal sees of a run: log lines, protocol lines, a progress bar, a summary."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TextIO

from delivery.progress import Progress

log = logging.getLogger(__name__)

# Their own logs, and what Python's `warnings` say of them, are shown at debug only.
QUIET_LOGGERS = {
    **dict.fromkeys(
        ("httpx", "httpx2", "verifiers", "datasets", "trl", "accelerate", "matplotlib"), "WARNING"
    ),
    **dict.fromkeys(("transformers", "vllm", "py.warnings"), "ERROR"),
}
# The libraries read these when they are imported; vLLM then logs through us, not to stdout.
QUIET_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_CONFIGURE_LOGGING": "0",
}
LOUD_VARIABLES = {"VLLM_LOGGING_LEVEL": "INFO"}  # TRL would make it ERROR
NO_BARS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
REDRAW_S = 1.0
WAITING = "{desc} [{elapsed}]"
COUNTING = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"


# --- lines --------------------------------------------------------------------------------------------------


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches; a stream that is closed already has nobody."""
    return not stream.closed and stream.isatty()


def beside_bar(stream: TextIO) -> AbstractContextManager[None]:
    """A context in which a line may be written to `stream`: the bar steps aside where both are terminals."""
    if not is_terminal(stream):
        return nullcontext()
    from tqdm import tqdm

    return tqdm.external_write_mode(file=stream)


def say(line: str) -> None:
    """Print a protocol line; a reader that has gone away is no reason to lose the run."""
    try:
        with beside_bar(sys.stdout):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        log.warning("stdout cannot be written: %s", error)


class RedactedFormatter(logging.Formatter):
    """One log record as a line of text, tracebacks included, with every secret taken out."""

    def __init__(self, redact: Callable[[str], str]):
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        self.redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self.redact(super().format(record))


class LineHandler(logging.StreamHandler):
    """Log records on the error stream, above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError), beside_bar(self.stream):  # a bar that cannot be drawn is no reason to fail
            super().emit(record)


def set_up_logging(level: str, env: MutableMapping[str, str], redact: Callable[[str], str]) -> None:
    """Log to the terminal's error stream; below debug the libraries are kept quiet, also through `env`."""
    handler = LineHandler(sys.stderr)
    handler.setFormatter(RedactedFormatter(redact))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed
    is_debug = level == "debug"
    if not is_debug:
        for name, quiet in QUIET_LOGGERS.items():
            logging.getLogger(name).setLevel(quiet)
    shows_bars = is_debug and is_terminal(sys.stderr)
    wanted = {**(LOUD_VARIABLES if is_debug else QUIET_VARIABLES), **({} if shows_bars else NO_BARS)}
    if env.get("VLLM_LOGGING_CONFIG_PATH"):  # vLLM refuses both at once
        wanted.pop("VLLM_CONFIGURE_LOGGING", None)
    for name, value in wanted.items():
        env.setdefault(name, value)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Log what ends a thread: Python would print it as it is, secrets included."""
    if issubclass(failed.exc_type, SystemExit):
        return
    name = failed.thread.name if failed.thread else "?"
    log.error("thread %s has ended: %s", name, failed.exc_type.__name__, exc_info=failed.exc_value)


# --- the run ------------------------------------------------------------------------------------------------


class Terminal:
    """Follows a run by its beats; draws a bar where the error stream is a terminal, and nothing elsewhere."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self._bar: Any = None
        self._shown = ("", False)  # what the bar is about: its phase, and whether it counts steps
        self._lock, self._close_once = threading.Lock(), threading.Lock()
        self._closing = threading.Event()

    def told(self, stage: str, extras: Mapping[str, Any]) -> None:
        """Take in a beat, and redraw."""
        self.progress.told(stage, extras, time.monotonic())
        if self.progress.is_over:
            self._clear()
        elif is_terminal(sys.stderr):
            with suppress(OSError, ValueError):
                self._draw()

    def close(self) -> None:
        """Take the bar away and say how the run went; only the first call does."""
        self._clear()
        if self._close_once.acquire(blocking=False) and self.progress.is_worth_telling:
            log.info("summary:\n%s", self.progress.summary())

    def _draw(self) -> None:
        from tqdm import tqdm

        progress = self.progress
        counts = progress.phase == "training" and progress.steps > 0
        with self._lock:
            if self._closing.is_set() or not progress.phase:
                return
            if self._bar is None:
                threading.Thread(target=self._tick, name="bar", daemon=True).start()
            if self._shown != (progress.phase, counts):
                if self._bar is not None:
                    self._bar.close()
                self._shown = (progress.phase, counts)
                self._bar = tqdm(
                    desc=progress.title,
                    total=progress.steps if counts else None,
                    initial=progress.step if counts else 0,
                    file=sys.stderr,
                    disable=False,  # whatever NO_BARS says
                    leave=False,
                    dynamic_ncols=True,
                    smoothing=0,
                    bar_format=COUNTING if counts else WAITING,
                )
            self._bar.n = progress.step if counts else 0
            self._bar.set_description_str(progress.title)

    def _tick(self) -> None:
        """Let the clock of the bar run on between two beats."""
        while not self._closing.wait(REDRAW_S):
            with self._lock:
                self._bar.refresh()

    def _clear(self) -> None:
        with self._lock:
            self._closing.set()
            if self._bar is not None:
                self._bar.close()
