"""Where a model comes from: a folder, or the Hub, whose "not there" is told from "could not ask"."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from accounting import in_brief
from job.settings import Settings, SettingsError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

IGNORED_FILES = ["*.pth", "*.gguf", "original/*", "*.onnx", "*.msgpack", "*.h5"]
# What a repository says about its model: license, configuration, tokenizer, template.
DESCRIPTION_FILES = ["README.md", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.py"]
PAUSES_S = (2.0, 4.0)  # between the three times a question is asked
BUSY_STATUS = frozenset({408, 425, 429})


class ModelUnreachable(RuntimeError):
    """The Hub could not be asked for a model, or for what is not in the cache of it."""


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: one repository or two, at resolved commits; None for a folder.

    `base` is the model id that names tokenizer and template, `source` holds the weights.
    """

    base: str
    source: str
    base_commit: str | None
    commit: str | None

    @property
    def is_local(self) -> bool:
        return Path(self.source).is_dir()

    @property
    def source_knob(self) -> str:
        """The setting that names the weights."""
        return "JobSpec model" if self.source == self.base else "AUTOSLM_QUANT_REPO"

    def unquantised(self) -> Self:
        """Where the weights come from that an adapter is merged into: the model's own."""
        return replace(self, source=self.base, commit=self.base_commit)


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository: its size in bytes, and the name that the Hub's cache gives to what is in it."""

    name: str
    size: int
    blob: str = ""


def locate(settings: Settings, pinned: str | None = None, pinned_base: str | None = None) -> Origin:
    """Resolve the model to a commit; raises SettingsError when it cannot be had.

    `pinned` is the commit of an earlier attempt's weights, `pinned_base` that of its tokenizer where that is
    in another repository: a resumed run loads the same ones.
    """
    base, _, revision = settings.model.partition("@")
    source = settings.quant_repo if settings.quant == "4bit-qlora" and settings.quant_repo else base
    base_commit = _commit(settings, base, (pinned if source == base else pinned_base) or revision or None)
    commit = base_commit if source == base else _commit(settings, source, pinned, "AUTOSLM_QUANT_REPO")
    return Origin(base, source, base_commit, commit)


def files(settings: Settings, origin: Origin) -> list[RepoFile]:
    """The files of the repository with the weights that anybody needs; [] when it cannot be asked."""
    if origin.is_local:
        folder = Path(origin.source)
        return [RepoFile(one.name, one.stat().st_size) for one in sorted(folder.iterdir()) if one.is_file()]
    from huggingface_hub.utils import filter_repo_objects

    def question() -> Any:
        return hub(settings).model_info(origin.source, revision=origin.commit, files_metadata=True)

    try:
        about = ask(origin.source_knob, origin.source, question)
    except (ModelUnreachable, SettingsError):
        return []  # the commit was found, so the cache has something; loading decides
    wanted = filter_repo_objects(
        about.siblings or (), ignore_patterns=IGNORED_FILES, key=lambda one: one.rfilename
    )
    return [
        RepoFile(one.rfilename, one.size or 0, str(one.lfs.sha256 if one.lfs else one.blob_id))
        for one in wanted
    ]


def description(settings: Settings, repo: str, commit: str | None, knob: str = "JobSpec model") -> str:
    """A folder with all that a repository, named by `knob`, says about its model: all but the weights."""
    return snapshot(settings, repo, commit, knob, allow_patterns=DESCRIPTION_FILES)


def snapshot(settings: Settings, repo: str, commit: str | None, knob: str, **patterns: Sequence[str]) -> str:
    """The folder that holds a repository's files at a commit; a local folder is itself."""
    if Path(repo).is_dir():
        return repo
    api = hub(settings)
    return ask(knob, repo, lambda: api.snapshot_download(repo, revision=commit, **patterns))


def hub(settings: Settings) -> Any:
    """The Hub's client."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=settings.endpoint or None, token=settings.token or None)


def ask(knob: str, repo: str, question: Callable[[], Answer]) -> Answer:
    """The Hub's answer about `repo`, which `knob` names.

    Asked three times while it cannot be had, then ModelUnreachable; SettingsError when the answer is no.
    """
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for pause in (*PAUSES_S, None):
        try:
            return question()
        except HFValidationError as error:
            raise SettingsError(
                f"{knob}={repo!r}: no folder of that name, and no Hub id (owner/name)"
            ) from error
        except (
            *(HfHubHTTPError, HTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError),
            RuntimeError,  # what hf_xet raises
        ) as error:
            reason = _refusal(knob, repo, error)
            if reason is not None:
                raise SettingsError(reason) from error
            if pause is None or _is_offline(error):
                raise ModelUnreachable(
                    f"{knob}={repo!r}: the Hub cannot be asked for it ({in_brief(error)})"
                ) from error
            log.warning("the Hub cannot be asked for %s, trying again: %s", repo, in_brief(error))
            time.sleep(pause)
    raise AssertionError("the last pause is None")


def _refusal(knob: str, repo: str, error: BaseException) -> str | None:
    """What is wrong, in one line, when asking again would not help."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    error = _cause(error)
    if isinstance(error, GatedRepoError):
        return (
            f"{knob}={repo!r}: its owner has to grant access; ask for it on the model's page, and use a token"
            " of that account (HF_TOKEN)"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{knob}={repo!r}: the model has no such revision; leave it out, or name a branch, tag or commit"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{knob}={repo!r}: not on the Hub, or private and not visible to this token (HF_TOKEN);"
            " check the name and the token"
        )
    if not isinstance(error, HfHubHTTPError) or error.response is None:
        return None
    status = error.response.status_code
    if status >= 500 or status in BUSY_STATUS:
        return None
    return f"{knob}={repo!r}: the Hub answers {status} ({in_brief(error)}); check name and token (HF_TOKEN)"


def _is_offline(error: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(_cause(error), OfflineModeIsEnabled)


def _cause(error: BaseException) -> BaseException:
    """Why a file is not there: the library says first of all that it is not in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return error.__cause__ or error if isinstance(error, LocalEntryNotFoundError) else error


def _commit(settings: Settings, repo: str, revision: str | None, knob: str = "JobSpec model") -> str | None:
    """The Hub commit that `repo`, named by `knob`, stands for now; None for a local folder."""
    if Path(repo).is_dir():
        if not (Path(repo) / "config.json").is_file():
            raise SettingsError(f"{knob}={repo!r}: the folder has no config.json; name a model's folder")
        return None
    named = f"{repo}@{revision}" if revision else repo
    try:
        return ask(knob, named, lambda: hub(settings).model_info(repo, revision=revision)).sha
    except ModelUnreachable as problem:
        return _cached_commit(repo, revision, problem)


def _cached_commit(repo: str, revision: str | None, problem: ModelUnreachable) -> str:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise problem
    commit = Path(cached).parent.name
    log.warning("%s: using the cached commit %s", problem, commit)
    return commit


def weights_bytes(found: Iterable[RepoFile]) -> int:
    """Bytes of the files that the library loads a model from; 0 when there are none of them."""
    for name in (r"model(\.safetensors)?(-\d+-of-\d+)?\.safetensors", r"pytorch_model(-\d+-of-\d+)?\.bin"):
        total = sum(one.size for one in found if re.fullmatch(name, one.name))
        if total:
            return total
    return 0
