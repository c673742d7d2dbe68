"""The test Hub, as the real huggingface_hub client sees it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _detect_agent, disable_progress_bars

from tests.hub_server import Fault, HubServer

pytestmark = pytest.mark.slow

TOKEN = "hf_test"
RUNS = {"repo_id": "acme/runs", "repo_type": "dataset"}
NOWHERE = "0" * 40
WEIGHTS = bytes(range(256)) * 40
COMMIT = "POST .*/commit/"


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the client online, quiet, out of the user's home, away from its default endpoint and off xet."""
    disable_progress_bars()
    monkeypatch.setattr(_detect_agent, "_registry", {"standardEnvVars": [], "harnesses": {}})
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp()))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A Hub with the private dataset acme/runs and the public model acme/tiny."""
    with HubServer(outsiders={"hf_outsider"}) as hub:
        hub.create_repo("acme/runs", kind="dataset", private=True)
        hub.create_repo("acme/tiny")
        yield hub


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


@pytest.fixture
def web(hub: HubServer) -> Iterator[httpx2.Client]:
    """A bare HTTP client, for what the real one never asks."""
    with httpx2.Client(base_url=hub.url, verify=False) as web:
        yield web


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's pauses between retries, which do not happen."""
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    return naps


def asked(hub: HubServer, start: str) -> int:
    """How many requests began with a method and a path."""
    return sum(f"{request.method} {request.path}".startswith(start) for request in hub.requests)


def fetch(hub: HubServer, cache: Path, filename: str, repo: str = "acme/tiny", **options: object) -> Path:
    """Download one file with the real client."""
    options = {"endpoint": hub.url, "token": TOKEN, "cache_dir": cache, **options}
    return Path(hf_hub_download(repo, filename, **options))


def test_whoami(hub: HubServer, api: HfApi) -> None:
    assert api.whoami()["name"] == "tester"
    with pytest.raises(HfHubHTTPError) as caught:
        api.whoami(token="hf_wrong")
    assert caught.value.response.status_code == 401


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_create_and_delete_repo(hub: HubServer, api: HfApi, kind: str) -> None:
    url = api.create_repo("acme/new", repo_type=kind, private=True)
    assert (url.repo_id, url.repo_type) == ("acme/new", kind)
    assert api.create_repo("acme/new", repo_type=kind, exist_ok=True) == url
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo("acme/new", repo_type=kind)
    info = api.repo_info("acme/new", repo_type=kind)
    assert info.private and info.sha == hub.commits("acme/new")[-1].id
    api.delete_repo("acme/new", repo_type=kind)
    assert not api.repo_exists("acme/new", repo_type=kind)
    api.delete_repo("acme/new", repo_type=kind, missing_ok=True)


def test_create_repo_without_an_owner_belongs_to_the_caller(api: HfApi) -> None:
    assert api.create_repo("mine").repo_id == "tester/mine"


def test_one_name_may_be_both_kinds(hub: HubServer, api: HfApi) -> None:
    api.create_repo("acme/runs", repo_type="model")
    assert not api.repo_info("acme/runs").private
    assert api.repo_info(**RUNS).private
    hub.delete_repo("acme/runs", kind="model")
    assert api.repo_exists(**RUNS) and not api.repo_exists("acme/runs")


def test_repo_info_by_revision(hub: HubServer, api: HfApi) -> None:
    first = hub.push("acme/runs", {"a.txt": b"one"})
    hub.push("acme/runs", {"b.safetensors": WEIGHTS})
    old = api.dataset_info("acme/runs", revision=first.id)
    assert [sibling.rfilename for sibling in old.siblings or ()] == [".gitattributes", "a.txt"]
    new = api.dataset_info("acme/runs", revision="main", files_metadata=True)
    weights = (new.siblings or [])[-1]
    assert weights.size == len(WEIGHTS) and weights.lfs and weights.lfs.size == len(WEIGHTS)
    assert api.model_info("acme/tiny").sha == hub.commits("acme/tiny")[-1].id
    with pytest.raises(RevisionNotFoundError):
        api.dataset_info("acme/runs", revision=NOWHERE)


def test_file_exists(hub: HubServer, api: HfApi) -> None:
    first = hub.push("acme/runs", {"sub dir/a.txt": b"one"})
    hub.push("acme/runs", {}, deleted=["sub dir/a.txt"])
    assert api.file_exists("acme/runs", "sub dir/a.txt", repo_type="dataset", revision=first.id)
    assert not api.file_exists("acme/runs", "sub dir/a.txt", repo_type="dataset")
    assert not api.file_exists("acme/nothing", "a.txt")


def test_listings(hub: HubServer, api: HfApi) -> None:
    hub.push("acme/runs", {"r/1/a.txt": b"one", "r/1/w.pt": WEIGHTS, "r/b.txt": b"", "top": b"t"})
    paths = ["r/1/a.txt", "r/1/w.pt", "r/b.txt"]
    assert api.list_repo_files(**RUNS) == [".gitattributes", *paths, "top"]
    assert [item.path for item in api.list_repo_tree(**RUNS)] == ["r", ".gitattributes", "top"]
    assert [item.path for item in api.list_repo_tree(**RUNS, path_in_repo="r")] == ["r/1", "r/b.txt"]
    deep = api.list_repo_tree(**RUNS, path_in_repo="r", recursive=True)
    assert [item.path for item in deep] == ["r/1", *paths]
    assert [item.path for item in api.list_repo_tree(**RUNS, path_in_repo="r/1")] == paths[:2]


@pytest.mark.parametrize("path", ["gone", "to", "top"])
def test_listing_what_is_no_folder(hub: HubServer, api: HfApi, path: str) -> None:
    hub.push("acme/runs", {"top": b"t"})
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(**RUNS, path_in_repo=path))


def test_get_paths_info(hub: HubServer, api: HfApi) -> None:
    hub.push("acme/runs", {"r/w.pt": WEIGHTS, "a.txt": b"one"})
    text, weights, folder = api.get_paths_info(**RUNS, paths=["a.txt", "r", "missing", "r/w.pt"])
    assert (text.path, text.size, text.lfs) == ("a.txt", 3, None)
    assert (weights.path, weights.lfs.size) == ("r/w.pt", len(WEIGHTS))
    assert folder.path == "r" and not hasattr(folder, "size")
    with pytest.raises(RevisionNotFoundError):
        api.get_paths_info(**RUNS, paths="a.txt", revision="nope")


def test_commit_of_all_sorts(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    hub.regular_limit = 1000
    (tmp_path / "w.safetensors").write_bytes(WEIGHTS)
    hub.push("acme/runs", {"old/a": b"a", "old/b/c": b"c", "older": b"d", "gone": b"e", "kept": b"f"})
    added = {
        "small.txt": b"text",
        "small.pt": b"weights",
        "binary": b"\0\1",
        "empty.pt": b"",
        "long.txt": b"x" * 1001,
    }
    operations = [CommitOperationAdd(path, data) for path, data in added.items()]
    operations += [CommitOperationAdd("w.safetensors", tmp_path / "w.safetensors")]
    operations += [CommitOperationDelete("old/"), CommitOperationDelete("gone")]
    made = api.create_commit(**RUNS, operations=operations, commit_message="m", commit_description="why")
    commit = hub.commits("acme/runs")[-1]
    assert (made.oid, made.repo_url.repo_id, commit.message) == (commit.id, "acme/runs", "m\n\nwhy")
    assert commit.added == {**added, "w.safetensors": WEIGHTS}
    assert set(commit.deleted) == {"old/a", "old/b/c", "gone"}
    assert set(hub.files("acme/runs")) == {*commit.added, ".gitattributes", "older", "kept"}
    in_lfs = {item.path for item in api.list_repo_tree(**RUNS) if getattr(item, "lfs", None)}
    assert in_lfs == {"small.pt", "binary", "long.txt", "w.safetensors"}
    assert asked(hub, "PUT /datasets/acme/runs.git/lfs/") == 4


def test_lfs_objects_are_sent_once(hub: HubServer, api: HfApi) -> None:
    for name in ("a.pt", "b.pt"):
        api.upload_file(**RUNS, path_or_fileobj=WEIGHTS, path_in_repo=name)
    assert asked(hub, "PUT ") == 1
    assert hub.files("acme/runs")["b.pt"] == WEIGHTS


def test_an_unchanged_file_makes_no_commit(hub: HubServer, api: HfApi) -> None:
    for name, data in {"a.pt": WEIGHTS, "a.txt": b"text"}.items():
        first = api.upload_file(**RUNS, path_or_fileobj=data, path_in_repo=name)
        assert api.upload_file(**RUNS, path_or_fileobj=data, path_in_repo=name).oid == first.oid
    assert len(hub.commits("acme/runs")) == 3


def test_parent_commit(hub: HubServer, api: HfApi) -> None:
    parent = hub.commits("acme/runs")[-1].id

    def upload(data: bytes) -> str:
        return api.upload_file(**RUNS, path_or_fileobj=data, path_in_repo="a", parent_commit=parent).oid

    second = upload(b"one")
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as caught:
        upload(b"two")
    assert caught.value.response.status_code == 412
    assert hub.commits("acme/runs")[-1].id == second


@pytest.mark.parametrize("path", ["nope", "folder/"])
def test_deleting_what_is_not_there(hub: HubServer, api: HfApi, path: str) -> None:
    operations = [CommitOperationAdd("a", b"a"), CommitOperationDelete(path)]
    with pytest.raises(EntryNotFoundError, match="A file with this name doesn't exist"):
        api.create_commit(**RUNS, operations=operations, commit_message="m")
    assert "a" not in hub.files("acme/runs")


def test_a_branch_other_than_main_is_refused(api: HfApi) -> None:
    with pytest.raises(RevisionNotFoundError):
        api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a", revision="dev")


@pytest.mark.parametrize("all_regular", [False, True])
def test_upload_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_regular: bool) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not all_regular)
    (tmp_path / "sub").mkdir()
    contents = {"README.md": b"---\nlicense: mit\n---\n", "sub/w.safetensors": WEIGHTS}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    with HubServer(all_regular=all_regular) as hub:
        hub.create_repo("acme/tiny")
        hub.push("acme/tiny", {"run/stale.txt": b"old"})
        api = HfApi(endpoint=hub.url, token=TOKEN)
        options = {"repo_id": "acme/tiny", "folder_path": tmp_path, "path_in_repo": "run"}
        made = api.upload_folder(**options, delete_patterns="*.txt")
        commit = hub.commits("acme/tiny")[-1]
        assert (made.oid, commit.deleted) == (commit.id, ("run/stale.txt",))
        assert commit.added == {f"run/{name}": data for name, data in contents.items()}
        assert asked(hub, "PUT ") == (0 if all_regular else 1)
        assert api.upload_folder(**options).oid == commit.id


def test_a_card_is_validated(hub: HubServer, api: HfApi) -> None:
    api.upload_file(**RUNS, path_or_fileobj=b"# Runs", path_in_repo="README.md")
    assert asked(hub, "POST /api/validate-yaml") == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_download(hub: HubServer, tmp_path: Path, name: str) -> None:
    commit = hub.push("acme/tiny", {f"sub dir/{name}": WEIGHTS[1:200]})
    path = fetch(hub, tmp_path, f"sub dir/{name}")
    assert path.read_bytes() == WEIGHTS[1:200]
    assert path.parts[-3] == commit.id
    sent = hub.requests[-1]
    assert (sent.method, sent.token, sent.bytes_sent, sent.status) == ("GET", TOKEN, 199, 200)
    hub.requests.clear()
    assert fetch(hub, tmp_path, f"sub dir/{name}", revision=commit.id) == path
    assert hub.requests == []
    hub.push("acme/tiny", {"other": b"o"})
    assert fetch(hub, tmp_path, f"sub dir/{name}").samefile(path)
    assert [request.bytes_sent for request in hub.requests] == [0]


def test_download_of_what_is_not_there(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(RemoteEntryNotFoundError) as caught:
        fetch(hub, tmp_path, "config.json")
    assert caught.value.response.headers["X-Repo-Commit"] == hub.commits("acme/tiny")[-1].id
    with pytest.raises(RevisionNotFoundError):
        fetch(hub, tmp_path, ".gitattributes", revision="nope")
    with pytest.raises(RepositoryNotFoundError):
        fetch(hub, tmp_path, "config.json", "acme/nothing")


@pytest.mark.parametrize("data", [b"", WEIGHTS], ids=["empty", "lfs"])
def test_headers_of_a_file(hub: HubServer, web: httpx2.Client, data: bytes) -> None:
    commit = hub.push("acme/tiny", {"w.pt": data})
    answer = web.head("/acme/tiny/resolve/main/w.pt")
    assert answer.headers["X-Repo-Commit"] == commit.id
    assert answer.headers["Content-Length"] == str(len(data))
    linked = (answer.headers.get("X-Linked-Etag"), answer.headers.get("X-Linked-Size"))
    assert linked == ((answer.headers["ETag"], str(len(data))) if data else (None, None))


@pytest.mark.parametrize(
    ("wanted", "status", "body"),
    [
        ("bytes=2-4", 206, b"cde"),
        ("bytes=7-", 206, b"hij"),
        ("bytes=-2", 206, b"ij"),
        ("bytes=8-99", 206, b"ij"),
        ("bytes=10-", 416, b""),
        ("bytes=-", 200, b"abcdefghij"),
        ("lines=1-2", 200, b"abcdefghij"),
    ],
)
def test_ranges(hub: HubServer, web: httpx2.Client, wanted: str, status: int, body: bytes) -> None:
    hub.push("acme/tiny", {"a.txt": b"abcdefghij"})
    answer = web.get("/acme/tiny/resolve/main/a.txt", headers={"Range": wanted})
    assert (answer.status_code, answer.content) == (status, body)
    assert answer.headers.get("Content-Range", "/10").endswith("/10")


def test_a_cut_download_is_resumed(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float]
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.push("acme/tiny", {"w.pt": WEIGHTS})
    hub.faults.append(Fault("GET .*/resolve/", cut_at=4000, times=1))
    assert fetch(hub, tmp_path, "w.pt").read_bytes() == WEIGHTS
    sent = [(request.status, request.bytes_sent) for request in hub.requests if request.method == "GET"]
    assert sent[0] == (200, 4000)
    assert sent[1][0] == 206 and sent[1][1] < len(WEIGHTS)
    assert naps == [1]


@pytest.mark.parametrize("by_hash", [False, True])
def test_snapshot(hub: HubServer, tmp_path: Path, by_hash: bool) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "config.json").write_bytes(b"{}")
    (source / "sub" / "w.safetensors").write_bytes(WEIGHTS)
    commit = hub.add_folder("acme/fresh", source)
    hub.add_folder("acme/fresh", source / "sub")
    assert set(hub.files("acme/fresh")) == {
        ".gitattributes",
        "config.json",
        "sub/w.safetensors",
        "w.safetensors",
    }
    revision = commit.id if by_hash else "main"
    options = {"endpoint": hub.url, "token": TOKEN, "cache_dir": tmp_path / "cache", "max_workers": 2}
    path = Path(snapshot_download("acme/fresh", revision=revision, **options))
    assert path.name == (commit.id if by_hash else hub.commits("acme/fresh")[-1].id)
    found = {
        item.relative_to(path).as_posix(): item.read_bytes() for item in path.rglob("*") if item.is_file()
    }
    assert found == (commit.files if by_hash else hub.files("acme/fresh"))
    hub.requests.clear()
    snapshot_download("acme/fresh", revision=path.name, **options)
    assert hub.requests == []


def test_list_repo_commits(hub: HubServer, api: HfApi) -> None:
    api.create_commit(**RUNS, operations=[CommitOperationAdd("a", b"a")], commit_message="first")
    second = hub.push("acme/runs", {"b": b"b"})
    hub.push("acme/runs", {"c": b"c"})
    listed = api.list_repo_commits(**RUNS, revision=second.id)
    assert [item.title for item in listed] == ["pushed by the test", "first", "initial commit"]
    assert listed[0].commit_id == second.id
    assert len(api.list_repo_commits(**RUNS)) == 4


READS: dict[str, Callable[[HfApi], object]] = {
    "info": lambda api: api.repo_info(**RUNS),
    "files": lambda api: api.list_repo_files(**RUNS),
    "paths": lambda api: api.get_paths_info(**RUNS, paths="a"),
    "commits": lambda api: api.list_repo_commits(**RUNS),
    "auth": lambda api: api.auth_check(**RUNS),
}
WRITES: dict[str, Callable[[HfApi], object]] = {
    "create": lambda api: api.create_repo("acme/new"),
    "upload": lambda api: api.upload_file(repo_id="acme/tiny", path_or_fileobj=b"a", path_in_repo="a"),
    "delete": lambda api: api.delete_repo("acme/tiny"),
    "auth": lambda api: api.auth_check("acme/tiny", write=True),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize(
    ("token", "status", "error"),
    [
        ("hf_wrong", 401, HfHubHTTPError),
        (False, 401, RepositoryNotFoundError),
        ("hf_outsider", 404, RepositoryNotFoundError),
    ],
)
def test_who_may_not_read(
    hub: HubServer,
    read: Callable[[HfApi], object],
    token: str | bool,
    status: int,
    error: type[HfHubHTTPError],
) -> None:
    with pytest.raises(error) as caught:
        read(HfApi(endpoint=hub.url, token=token))
    assert caught.value.response.status_code == status


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_may_read(api: HfApi, read: Callable[[HfApi], object]) -> None:
    read(api)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    ("token", "status"), [("hf_wrong", 401), (False, 401), ("hf_outsider", 403), (TOKEN, 403)]
)
def test_who_may_not_write(
    hub: HubServer, write: Callable[[HfApi], object], token: str | bool, status: int
) -> None:
    hub.read_only = token == TOKEN
    with pytest.raises(HfHubHTTPError) as caught:
        write(HfApi(endpoint=hub.url, token=token))
    assert caught.value.response.status_code == status
    assert len(hub.commits("acme/tiny")) == 1


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_who_may_write(api: HfApi, write: Callable[[HfApi], object]) -> None:
    write(api)


def test_a_public_repo_is_open_to_all(hub: HubServer, tmp_path: Path) -> None:
    hub.push("acme/tiny", {"a.txt": b"a"})
    assert HfApi(endpoint=hub.url, token=False).repo_exists("acme/tiny")
    assert fetch(hub, tmp_path, "a.txt", token="hf_outsider").read_bytes() == b"a"


def test_a_token_that_may_not_create_repos(hub: HubServer, api: HfApi) -> None:
    hub.may_create = False
    with pytest.raises(HfHubHTTPError, match="rights to create") as caught:
        api.create_repo("acme/new", exist_ok=True)
    assert caught.value.response.status_code == 403
    api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a")


def test_a_repo_deleted_mid_run(hub: HubServer, api: HfApi) -> None:
    hub.delete_repo("acme/runs")
    with pytest.raises(RepositoryNotFoundError):
        api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a")
    with pytest.raises(KeyError):
        hub.commits("acme/runs")


def test_malformed_requests_are_refused(web: httpx2.Client) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = web.post("/api/repos/create", headers=headers, json={})
    assert answer.status_code == 400 and "Malformed" in answer.json()["error"]
    assert web.get("/api/nonsense").status_code == 404
    assert web.put(f"/acme/tiny.git/lfs/{'0' * 64}", content=b"not that").status_code == 400


def test_an_lfs_pointer_needs_its_object(hub: HubServer, api: HfApi) -> None:
    operation = CommitOperationAdd("w.pt", WEIGHTS)
    operation._is_uploaded, operation._upload_mode = True, "lfs"
    with pytest.raises(BadRequestError, match="not uploaded"):
        api.create_commit(**RUNS, operations=[operation], commit_message="m")


def test_concurrent_commits_all_land(hub: HubServer, api: HfApi) -> None:
    def upload(number: int) -> str:
        return api.upload_file(**RUNS, path_or_fileobj=b"%d" % number, path_in_repo=f"f{number}").oid

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(upload, range(24)))
    assert sorted(ids) == sorted(commit.id for commit in hub.commits("acme/runs")[1:])
    assert [len(commit.files) for commit in hub.commits("acme/runs")] == list(range(1, 26))


def test_a_snapshot_shares_its_bytes(hub: HubServer) -> None:
    first = hub.push("acme/runs", {"a": WEIGHTS})
    second = hub.push("acme/runs", {"b": b"b"})
    assert second.files["a"] is first.files["a"] and "b" not in first.files
    assert first.at <= second.at


def test_a_status_fault_is_retried_by_upload_but_not_by_commit(
    hub: HubServer, api: HfApi, naps: list[float]
) -> None:
    hub.faults += [Fault("preupload", status=503, times=2), Fault(COMMIT, status=500, times=1, body="sorry")]
    with pytest.raises(HfHubHTTPError, match="sorry") as caught:
        api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a")
    assert caught.value.response.status_code == 500
    assert (asked(hub, "POST /api/datasets/acme/runs/preupload"), naps) == (3, [1, 2])
    assert [fault.fired for fault in hub.faults] == [2, 1]
    assert len(hub.commits("acme/runs")) == 1
    api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a")


def test_retry_after(hub: HubServer, api: HfApi, naps: list[float]) -> None:
    hub.faults.append(Fault("preupload", status=429, retry_after=7, times=1))
    api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a")
    assert naps == [8]


def test_after_and_times(hub: HubServer, web: httpx2.Client) -> None:
    fault = Fault("GET /api/whoami", status=418, after=1, times=2)
    hub.faults.append(fault)
    outcomes = [web.get("/api/whoami-v2").status_code for _ in range(5)]
    assert outcomes == [401, 418, 418, 401, 401]
    assert (fault.seen, fault.fired) == (5, 2)


def test_faults_are_consumed_once_each(hub: HubServer, web: httpx2.Client) -> None:
    hub.faults += [Fault("whoami", status=418, times=5), Fault("whoami", status=419, times=5)]
    with ThreadPoolExecutor(8) as pool:
        outcomes = pool.map(lambda _: web.get("/api/whoami-v2").status_code, range(20))
    assert sorted(outcomes) == [401] * 10 + [418] * 5 + [419] * 5


def test_a_dropped_commit_does_not_land(hub: HubServer, api: HfApi) -> None:
    hub.faults.append(Fault(COMMIT, drop=True, times=1))
    with pytest.raises(httpx2.RemoteProtocolError):
        api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a")
    assert len(hub.commits("acme/runs")) == 1
    assert hub.requests[-1].status is None


def test_a_commit_cut_off_on_its_way_does_not_land(hub: HubServer) -> None:
    head = f"POST /api/models/acme/tiny/commit/main HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    body = b'{"key": "header", "value": {"summary": "m"}}\n'
    with socket.create_connection(("127.0.0.1", int(hub.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body) + 1}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert len(hub.commits("acme/tiny")) == 1


def test_a_commit_whose_reply_is_lost_lands(hub: HubServer, api: HfApi) -> None:
    hub.faults.append(Fault(COMMIT, drop_after=True, times=1))
    with pytest.raises(httpx2.RemoteProtocolError):
        api.upload_file(**RUNS, path_or_fileobj=b"a", path_in_repo="a")
    assert hub.files("acme/runs")["a"] == b"a"


@pytest.mark.parametrize("with_parent", [False, True])
def test_upload_folder_repeats_a_commit_whose_reply_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float], with_parent: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    (tmp_path / "a").write_bytes(b"a")
    with HubServer(all_regular=True) as hub:
        hub.create_repo("acme/tiny")
        hub.faults.append(Fault(COMMIT, drop_after=True, times=1))
        options = {"parent_commit": hub.commits("acme/tiny")[0].id} if with_parent else {}
        try:
            HfApi(endpoint=hub.url, token=TOKEN).upload_folder(
                repo_id="acme/tiny", folder_path=tmp_path, **options
            )
            outcome = 200
        except HfHubHTTPError as error:
            outcome = error.response.status_code
        assert (outcome, len(hub.commits("acme/tiny"))) == ((412, 2) if with_parent else (200, 3))


def test_a_lost_lfs_upload_is_repeated(hub: HubServer, api: HfApi, naps: list[float]) -> None:
    hub.faults.append(Fault("PUT .*/lfs/", drop=True, times=1))
    api.upload_file(**RUNS, path_or_fileobj=WEIGHTS, path_in_repo="w.pt")
    assert (asked(hub, "PUT "), naps) == (2, [1])


def test_a_hanging_request(hub: HubServer, api: HfApi) -> None:
    hub.faults.append(Fault("GET /api/models/acme/tiny", hang=True))
    with pytest.raises(httpx2.ReadTimeout):
        api.model_info("acme/tiny", timeout=0.1)
    assert api.repo_exists(**RUNS)


def test_closing_ends_what_hangs_and_what_is_idle() -> None:
    def ask() -> None:
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{hub.url}/api/hang", timeout=None)

    with (
        HubServer() as hub,
        httpx2.Client(base_url=hub.url, verify=False) as idle,
        ThreadPoolExecutor() as pool,
    ):
        idle.get("/api/whoami-v2")
        hub.faults.append(Fault("hang", hang=True))
        asking = pool.submit(ask)
        while not asked(hub, "GET /api/hang"):
            hub.closing.wait(0.01)
        hub.__exit__()
        asking.result()
        with pytest.raises(httpx2.TransportError):
            idle.get("/api/whoami-v2")


@pytest.mark.parametrize("slow", ["fault", "bytes_per_second"])
def test_slowness(hub: HubServer, web: httpx2.Client, slow: str) -> None:
    hub.push("acme/tiny", {"a.txt": b"x" * 100})
    if slow == "fault":
        hub.faults.append(Fault("resolve", latency_s=0.2))
    else:
        hub.bytes_per_second = 500
    start = time.monotonic()
    assert web.get("/acme/tiny/resolve/main/a.txt").content == b"x" * 100
    assert time.monotonic() - start >= 0.19


def test_an_unreachable_hub_leaves_the_cache(hub: HubServer, tmp_path: Path) -> None:
    hub.push("acme/tiny", {"a.txt": b"a", "b.txt": b"b"})
    path = fetch(hub, tmp_path, "a.txt")
    hub.faults.append(Fault("HEAD", status=503))
    assert fetch(hub, tmp_path, "a.txt") == path


def test_a_head_fault_without_cache(hub: HubServer, tmp_path: Path, naps: list[float]) -> None:
    hub.push("acme/tiny", {"a.txt": b"a"})
    hub.faults.append(Fault("HEAD", status=503))
    with pytest.raises(LocalEntryNotFoundError):
        fetch(hub, tmp_path, "a.txt")
    assert (asked(hub, "HEAD "), naps) == (7, [1, 2, 4, 8, 8])


def test_by_hand() -> None:
    command = [sys.executable, "-m", "tests.hub_server", "--repo", "acme/runs"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}/api/datasets/acme/runs") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
