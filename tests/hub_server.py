"""A small in-memory Hugging Face Hub that the real client can talk to over HTTP.

Three parts, each of which knows only those above it: the state (Hub), the protocol (one function for each
kind of request) and the server (HubServer), which adds the socket, the log of requests and the faults.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Json = dict[str, Any]

USER = "tester"
KINDS = ("model", "dataset")
LFS_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".parquet", ".arrow", ".gz", ".zip", ".zst")
GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


# --- the state ---


@dataclass(frozen=True)
class Commit:
    """One commit: what it did, and the whole tree after it."""

    id: str
    message: str
    added: dict[str, bytes]
    deleted: tuple[str, ...]
    files: dict[str, bytes]
    at: float = field(default_factory=time.monotonic)
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))


@dataclass
class Repo:
    """The history of one repository, all of it on the branch main."""

    name: str
    kind: str
    private: bool
    commits: list[Commit] = field(default_factory=list)
    lfs: dict[str, bytes] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where the repository lies on the server."""
        return f"/datasets/{self.name}" if self.kind == "dataset" else f"/{self.name}"

    def at(self, revision: str) -> Commit:
        """The commit that a revision names."""
        for commit in reversed(self.commits):
            if revision in ("main", commit.id):
                return commit
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def push(self, message: str, added: Mapping[str, bytes], deleted: Collection[str] = ()) -> Commit:
        """Append a commit: deletions first, then additions."""
        parent = self.commits[-1].files if self.commits else {}
        files = {path: data for path, data in parent.items() if path not in deleted} | dict(added)
        self.commits.append(Commit(secrets.token_hex(20), message, dict(added), tuple(deleted), files))
        return self.commits[-1]


class Hub:
    """The repositories, who may do what to them, and how files are kept."""

    def __init__(
        self,
        all_regular: bool = False,
        tokens: Collection[str] = ("hf_test",),
        outsiders: Collection[str] = (),
    ) -> None:
        """Tokens may do everything; outsiders are valid but see no private repo and write nothing."""
        self.url = ""
        self.tokens = set(tokens)
        self.outsiders = set(outsiders)
        self.read_only = False
        self.may_create = True
        self.all_regular = all_regular
        self.regular_limit = 10 * 1024 * 1024
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lock = threading.RLock()
        self._digest = functools.cache(digest)

    def create_repo(self, name: str, kind: str = "model", private: bool = False) -> Repo:
        """Create a repository that holds .gitattributes, as the Hub does."""
        with self.lock:
            if (kind, name) in self.repos:
                raise ValueError(f"there is a {kind} repo {name!r} already")
            repo = self.repos[kind, name] = Repo(name, kind, private)
            repo.push("initial commit", {".gitattributes": GIT_ATTRIBUTES})
            return repo

    def repo(self, name: str, kind: str | None = None) -> Repo:
        """The repository of a name, of whichever kind unless one is given."""
        with self.lock:
            found = [self.repos[key] for key in self.repos if key[1] == name and kind in (None, key[0])]
        if not found:
            raise KeyError(f"there is no repo {name!r}")
        return found[0]

    def delete_repo(self, name: str, kind: str | None = None) -> None:
        """Make a repository vanish."""
        with self.lock:
            del self.repos[self.repo(name, kind).kind, name]

    def push(self, name: str, added: Mapping[str, bytes], deleted: Collection[str] = ()) -> Commit:
        """Commit to a repository from the side of the test, as another writer would."""
        with self.lock:
            return self.repo(name).push("pushed by the test", added, deleted)

    def add_folder(self, name: str, folder: Path, kind: str = "model") -> Commit:
        """Publish a local folder as one commit, in a new public repository if need be."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        with self.lock:
            repo = self.repos.get((kind, name)) or self.create_repo(name, kind)
            return repo.push("publish a folder", files)

    def commits(self, name: str, kind: str | None = None) -> list[Commit]:
        """The commits of a repository, oldest first."""
        return list(self.repo(name, kind).commits)

    def files(self, name: str, kind: str | None = None) -> dict[str, bytes]:
        """The files at the head of a repository."""
        return dict(self.repo(name, kind).commits[-1].files)

    def find(self, kind: str, name: str, token: str | None, write: bool = False) -> Repo:
        """The repository, if the caller may see it and, where asked, write to it."""
        repo = self.repos.get((kind, name))
        if repo is None or (repo.private and token not in self.tokens):
            raise HubError(404 if token else 401, "Repository not found", "RepoNotFound")
        if write:
            self.require_write(token)
        return repo

    def require_write(self, token: str | None) -> None:
        """Refuse a caller who may not write."""
        if token is None:
            raise HubError(401, "Invalid username or password.")
        if self.read_only or token not in self.tokens:
            raise HubError(403, "Forbidden: you must use a write token to upload to a repository")

    def is_lfs(self, path: str, size: int, sample: bytes) -> bool:
        """Whether a file of this name, size and first bytes is kept in LFS."""
        binary = path.endswith(LFS_SUFFIXES) or size > self.regular_limit or b"\0" in sample[:512]
        return binary and size > 0 and not self.all_regular

    def etag(self, path: str, data: bytes) -> str:
        """The id under which the client caches a file: SHA-256 in LFS, the git blob id elsewhere."""
        return self._digest(data, self.is_lfs(path, len(data), data[:512]))

    def describe(self, path: str, data: bytes) -> Json:
        """A file's entry in a listing."""
        entry = {"type": "file", "path": path, "size": len(data), "oid": self.etag(path, data)}
        if not self.is_lfs(path, len(data), data[:512]):
            return entry
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{entry['oid']}\nsize {len(data)}\n"
        lfs = {"oid": entry["oid"], "size": len(data), "pointerSize": len(pointer)}
        return entry | {"oid": digest(pointer.encode()), "lfs": lfs}


def digest(data: bytes, lfs: bool = False) -> str:
    """The id of a blob, in LFS or in git."""
    if lfs:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


# --- the protocol ---


@dataclass
class Answer:
    """What goes back to the client."""

    status: int
    body: bytes | memoryview
    headers: dict[str, str] = field(default_factory=dict)


class HubError(Exception):
    """A refusal, worded as the Hub words it."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        coded = {"X-Error-Code": code} if code else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answer = as_json({"error": message}, status, {"X-Error-Message": message, **coded, **named})


@dataclass
class Call:
    """A request as a handler sees it; args holds what its path says."""

    args: dict[str, str]
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    token: str | None
    body: bytes

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    def repo(self, hub: Hub, write: bool = False) -> Repo:
        """The repository that the path names, on the terms of Hub.find."""
        return hub.find(self.args["kind"] or "model", self.args["name"], self.token, write)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON answer."""
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


def whoami(hub: Hub, call: Call) -> Answer:
    if call.token is None:
        raise HubError(401, "Invalid username or password.")
    role = "write" if call.token in hub.tokens else "read"
    access = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
    return as_json({"type": "user", "id": USER, "name": USER, "fullname": USER, "orgs": [], "auth": access})


def validate_yaml(hub: Hub, call: Call) -> Answer:
    problems = card_problems(call.json()["content"]) if call.json()["repoType"] == "model" else []
    errors = [{"message": one} for one in problems]
    return as_json({"errors": errors, "warnings": []}, 400 if errors else 200)


REPO_ID = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?")
RELATIONS = ("adapter", "finetune", "merge", "quantized")


def card_problems(text: str) -> list[str]:
    """What the Hub's specification of model cards does not allow in a card's metadata."""
    from yaml import YAMLError, safe_load

    header = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        found = safe_load(header[1]) if header else {}
    except YAMLError as error:
        return [f"YAML: {error}"]
    if not isinstance(found, dict):
        return ["metadata must be a mapping"]

    def texts(name: str) -> list[Any]:
        value = found.get(name, [])
        return value if isinstance(value, list) else [value]

    names = ("tags", "license", "license_name", "library_name", "pipeline_tag", "base_model", "datasets")
    wrong = [name for name in names if not all(isinstance(one, str) and one for one in texts(name))]
    ids = [one for name in ("base_model", "datasets") for one in texts(name)]
    wrong += [repr(one) for one in ids if not REPO_ID.fullmatch(str(one)) or ".." in str(one)]
    wrong += [one for one in texts("base_model_relation") if one not in RELATIONS]
    wrong += [one for one in texts("license") if not re.fullmatch(r"[a-z0-9.-]+", str(one))]
    if found.get("license") == "other" and "license_name" not in found:
        wrong.append("license_name")
    return [f"{one} is not valid" for one in wrong]


def create_repo(hub: Hub, call: Call) -> Answer:
    kind, owner, name = _asked_repo(call)
    hub.require_write(call.token)
    if not hub.may_create:
        raise HubError(403, f'You don\'t have the rights to create a {kind} under the namespace "{owner}"')
    if kind not in KINDS:
        raise HubError(400, f"This Hub has no {kind} repos")
    if (kind, name) in hub.repos:
        url = hub.url + hub.repo(name, kind).path
        return as_json({"error": f"You already created this {kind} repo", "url": url}, 409)
    repo = hub.create_repo(name, kind, private=call.json().get("visibility") == "private")
    return as_json({"url": hub.url + repo.path, "name": name})


def delete_repo(hub: Hub, call: Call) -> Answer:
    kind, _, name = _asked_repo(call)
    hub.find(kind, name, call.token, write=True)
    hub.delete_repo(name, kind)
    return as_json({})


def _asked_repo(call: Call) -> tuple[str, str, str]:
    asked = call.json()
    owner = asked.get("organization") or USER
    return asked.get("type") or "model", owner, f"{owner}/{asked['name']}"


def auth_check(hub: Hub, call: Call) -> Answer:
    call.repo(hub, write=bool(call.args["write"]))
    return as_json({})


def repo_info(hub: Hub, call: Call) -> Answer:
    repo = call.repo(hub)
    commit = repo.at(call.args["revision"] or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    if "blobs" in call.query:
        siblings = [_sibling(hub.describe(path, data)) for path, data in sorted(commit.files.items())]
    about = {"id": repo.name, "author": repo.name.split("/")[0], "sha": commit.id, "private": repo.private}
    dates = {"createdAt": repo.commits[0].date, "lastModified": commit.date}
    return as_json({**about, **dates, "gated": False, "disabled": False, "tags": [], "siblings": siblings})


def _sibling(entry: Json) -> Json:
    lfs = {"lfs": {**entry["lfs"], "sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}
    return {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"], **lfs}


def _folder(path: str) -> Json:
    return {"type": "directory", "path": path, "size": 0, "oid": digest(path.encode())}


def _folders(files: Collection[str]) -> list[str]:
    return sorted({str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."})


def tree(hub: Hub, call: Call) -> Answer:
    files = call.repo(hub).at(call.args["revision"]).files
    root, folders = call.args["path"].strip("/") or ".", _folders(files)
    if root not in (".", *folders):
        raise HubError(404, f"{root} does not exist on this revision", "EntryNotFound")
    depth = None if call.query.get("recursive", [""])[0].lower() in ("true", "1") else 1

    def listed(path: str) -> bool:
        return root in map(str, list(PurePosixPath(path).parents)[:depth])

    found = [hub.describe(path, data) for path, data in sorted(files.items()) if listed(path)]
    return as_json([_folder(path) for path in folders if listed(path)] + found)


def paths_info(hub: Hub, call: Call) -> Answer:
    files = call.repo(hub).at(call.args["revision"]).files
    paths = [path.strip("/") for path in parse_qs(call.body.decode()).get("paths", [])]
    found = [hub.describe(path, files[path]) for path in paths if path in files]
    return as_json(found + [_folder(path) for path in _folders(files) if path in paths])


def list_commits(hub: Hub, call: Call) -> Answer:
    commits = call.repo(hub).commits
    last = commits.index(call.repo(hub).at(call.args["revision"]))
    return as_json([_logged(commit) for commit in reversed(commits[: last + 1])])


def _logged(commit: Commit) -> Json:
    title, _, text = commit.message.partition("\n\n")
    about = {"id": commit.id, "date": commit.date, "authors": [{"user": USER}]}
    return {**about, "title": title, "message": text}


def preupload(hub: Hub, call: Call) -> Answer:
    head = call.repo(hub, write=True).at(call.args["revision"]).files

    def mode(path: str, size: int, sample: str) -> Json:
        lfs = hub.is_lfs(path, size, base64.b64decode(sample))
        oid = hub.etag(path, head[path]) if path in head else None
        return {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    return as_json({"files": [mode(**asked) for asked in call.json()["files"]]})


def lfs_batch(hub: Hub, call: Call) -> Answer:
    repo = call.repo(hub, write=True)
    base = f"{hub.url}{repo.path}.git/lfs"

    def instruct(oid: str, size: int) -> Json:
        actions = {"upload": {"href": f"{base}/{oid}"}, "verify": {"href": f"{base}/verify"}}
        return {"oid": oid, "size": size} | ({} if oid in repo.lfs else {"actions": actions})

    return as_json({"transfer": "basic", "objects": [instruct(**asked) for asked in call.json()["objects"]]})


def lfs_put(hub: Hub, call: Call) -> Answer:
    """Stand for the storage behind a signed address, which is why no token is asked for."""
    if digest(call.body, lfs=True) != call.args["oid"]:
        raise HubError(400, "The content does not have the promised SHA-256")
    hub.repo(call.args["name"], call.args["kind"] or "model").lfs[call.args["oid"]] = call.body
    return as_json({})


def lfs_verify(hub: Hub, call: Call) -> Answer:
    asked = call.json()
    if len(call.repo(hub, write=True).lfs.get(asked["oid"], b"")) != asked["size"]:
        raise HubError(404, "The object was not uploaded", "EntryNotFound")
    return as_json({})


def commit(hub: Hub, call: Call) -> Answer:
    repo = call.repo(hub, write=True)
    head = repo.at("main")
    if call.args["revision"] != "main" or "create_pr" in call.query:
        raise HubError(400, "This Hub has the branch main and nothing else")
    header, *operations = [json.loads(line) for line in call.body.split(b"\n") if line]
    if not head.id.startswith(header["value"].get("parentCommit", "")):
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    added: dict[str, bytes] = {}
    deleted: list[str] = []
    for operation in operations:
        key, value = operation["key"], operation["value"]
        if key in ("file", "lfsFile"):
            added[value["path"]] = _content(repo, value)
        else:
            deleted += _doomed(head, value["path"], is_folder=key == "deletedFolder")
    message = f"{header['value']['summary']}\n\n{header['value'].get('description', '')}".strip()
    made = repo.push(message, added, deleted)
    url = f"{hub.url}{repo.path}/commit/{made.id}"
    return as_json({"success": True, "commitOid": made.id, "commitUrl": url})


def _content(repo: Repo, value: Json) -> bytes:
    if "content" in value:
        return base64.b64decode(value["content"])
    if value["oid"] not in repo.lfs:
        raise HubError(400, f"{value['path']} is an LFS pointer to an object that was not uploaded")
    return repo.lfs[value["oid"]]


def _doomed(head: Commit, path: str, is_folder: bool) -> list[str]:
    folder = path.rstrip("/") + "/"
    doomed = [name for name in head.files if (name.startswith(folder) if is_folder else name == path)]
    if not doomed:
        raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
    return doomed


def resolve(hub: Hub, call: Call) -> Answer:
    commit, path = call.repo(hub).at(call.args["revision"]), call.args["path"]
    if path not in commit.files:
        raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.id)
    data = commit.files[path]
    etag = f'"{hub.etag(path, data)}"'
    headers = {"ETag": etag, "X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
    if hub.is_lfs(path, len(data), data[:512]):
        headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
    return _ranged(data, call.headers.get("Range", ""), headers)


def _ranged(data: bytes, wanted: str, headers: dict[str, str]) -> Answer:
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
    if not match or wanted == "bytes=-":
        return Answer(200, data, headers)
    first, last = match.groups()
    start = int(first) if first else max(0, len(data) - int(last))
    stop = min(len(data), int(last) + 1) if first and last else len(data)
    if start >= stop:
        return Answer(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Answer(206, memoryview(data)[start:stop], headers)


API = r"/api/(?P<kind>model|dataset)s/(?P<name>[^/]+/[^/]+)"
WEB = r"/(?:(?P<kind>dataset)s/)?(?P<name>[^/]+/[^/]+?)"
REVISION = r"(?P<revision>[^/]+)"
Handler = Callable[[Hub, Call], Answer]
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", "/api/repos/create", create_repo),
    ("DELETE", "/api/repos/delete", delete_repo),
    ("GET", rf"{API}(?:/revision/{REVISION})?", repo_info),
    ("GET", rf"{API}/auth-check(?P<write>/write)?", auth_check),
    ("GET", rf"{API}/tree/{REVISION}(?:/(?P<path>.+))?", tree),
    ("GET", rf"{API}/commits/{REVISION}", list_commits),
    ("POST", rf"{API}/paths-info/{REVISION}", paths_info),
    ("POST", rf"{API}/preupload/{REVISION}", preupload),
    ("POST", rf"{API}/commit/{REVISION}", commit),
    ("POST", rf"{WEB}\.git/info/lfs/objects/batch", lfs_batch),
    ("POST", rf"{WEB}\.git/lfs/verify", lfs_verify),
    ("PUT", rf"{WEB}\.git/lfs/(?P<oid>[0-9a-f]{{64}})", lfs_put),
    ("GET", rf"{WEB}/resolve/{REVISION}/(?P<path>.+)", resolve),
)


def route(method: str, path: str) -> tuple[Handler, dict[str, str]]:
    """The handler of a request, and what its path says."""
    for verb, pattern, handler in ROUTES:
        match = re.fullmatch(pattern, path)
        if match and verb == ("GET" if method == "HEAD" else method):
            return handler, {name: unquote(value or "") for name, value in match.groupdict().items()}
    raise HubError(404, f"Sorry, we can't find {method} {path}")


def work(hub: Hub, method: str, path: str, call: Call) -> Answer:
    """Do what one request asks for, with no other at work meanwhile."""
    try:
        if call.token and call.token not in hub.tokens | hub.outsiders:
            raise HubError(401, "Invalid credentials in Authorization header")
        handler, call.args = route(method, path)
        with hub.lock:
            return handler(hub, call)
    except HubError as error:
        return error.answer
    except (KeyError, TypeError, ValueError) as error:
        return as_json({"error": f"Malformed request: {error!r}"}, 400)


# --- the server ---


@dataclass
class Request:
    """One request in the order of arrival; status stays None while it is unanswered."""

    method: str
    path: str
    token: str | None
    at: float = field(default_factory=time.monotonic)
    bytes_sent: int = 0
    status: int | None = None


@dataclass
class Fault:
    """A misbehaviour towards the requests whose "METHOD path" a regex is found in."""

    match: str
    status: int | None = None  # answer this and do no work
    latency_s: float = 0.0  # wait this long before anything else
    drop: bool = False  # close the socket without doing the work
    drop_after: bool = False  # do the work, then close the socket without an answer
    hang: bool = False  # never answer until the server closes
    cut_at: int | None = None  # close the socket after this many bytes of the body
    retry_after: float | None = None
    code: str = ""  # the Hub's own word for the error
    times: int | None = None  # None: always
    after: int = 0  # let this many matching requests through first
    body: str = ""
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def answer(self) -> Answer | None:
        """The answer to give instead of doing the work, if there is one."""
        if self.status is None:
            return None
        wait = {} if self.retry_after is None else {"Retry-After": f"{self.retry_after:g}"}
        coded = {"X-Error-Code": self.code} if self.code else {}
        return Answer(self.status, self.body.encode(), {"Content-Type": "text/plain", **wait, **coded})


class HubServer(Hub):
    """A Hub that listens on 127.0.0.1 for the length of a with block."""

    def __init__(
        self,
        all_regular: bool = False,
        tokens: Collection[str] = ("hf_test",),
        outsiders: Collection[str] = (),
        port: int = 0,
    ) -> None:
        """Take Hub's settings and a port, which is any free one by default."""
        super().__init__(all_regular, tokens, outsiders)
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.bytes_per_second: float | None = None
        self.closing = threading.Event()
        self._port = port

    def __enter__(self) -> HubServer:
        self._http = _Http(("127.0.0.1", self._port), _Exchange)
        self._http.hub = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.005,), name="hub", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._http.hang_up()

    def fault_for(self, request: Request) -> Fault:
        """Count a request against all faults and return the first that fires, else a harmless one."""
        with self.lock:
            named = f"{request.method} {request.path}"
            matching = [fault for fault in self.faults if re.search(fault.match, named)]
            for fault in matching:
                fault.seen += 1
            for fault in matching:
                if fault.seen > fault.after and (fault.times is None or fault.fired < fault.times):
                    fault.fired += 1
                    return fault
        return Fault("")


class _Http(ThreadingHTTPServer):
    hub: HubServer
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.sockets: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def hang_up(self) -> None:
        for connection in list(self.sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Exchange(BaseHTTPRequestHandler):
    server: _Http
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        request = Request(self.command, unquote(url.path), token)
        hub.requests.append(request)
        length = int(self.headers.get("Content-Length", 0))
        call = Call({}, parse_qs(url.query), self.headers, token, self.rfile.read(length))
        fault = hub.fault_for(request)
        hub.closing.wait(None if fault.hang else fault.latency_s)
        if fault.hang or fault.drop or len(call.body) < length:
            return self._hang_up()
        answer = fault.answer() or work(hub, self.command, url.path, call)
        if fault.drop_after:
            return self._hang_up()
        self._send(answer, request, fault.cut_at)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _send(self, answer: Answer, request: Request, cut_at: int | None) -> None:
        request.status = answer.status
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        body = memoryview(b"" if request.method == "HEAD" else answer.body)
        for piece in self._pieces(body[:cut_at], is_download="ETag" in answer.headers):
            request.bytes_sent += len(piece)
            self.wfile.write(piece)
        if cut_at is not None:
            self._hang_up()

    def _pieces(self, rest: memoryview, is_download: bool) -> Iterator[memoryview]:
        hub = self.server.hub
        while rest:
            rate = hub.bytes_per_second if is_download else None
            size = max(1, int(rate / 20)) if rate else 1 << 20
            hub.closing.wait(size / rate if rate else 0)
            yield rest[:size]
            rest = rest[size:]

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


def main(argv: list[str] | None = None) -> None:
    """Serve empty repositories until interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--repo", action="append", default=[], help="create this repo; may be repeated")
    parser.add_argument("--kind", choices=KINDS, default="dataset")
    parser.add_argument("--token", default="hf_test")
    parser.add_argument("--all-regular", action="store_true", help="keep every file out of LFS")
    args = parser.parse_args(argv)
    with HubServer(args.all_regular, {args.token}, port=args.port) as hub, suppress(KeyboardInterrupt):
        for name in args.repo:
            hub.create_repo(name, args.kind)
        sys.stdout.write(f"{hub.url}\n")
        sys.stdout.flush()
        hub.closing.wait()


if __name__ == "__main__":
    main()
