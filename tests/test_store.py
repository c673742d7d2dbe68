"""Both stores behind one interface: the Hub through its real client, and the folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub.utils import _http

from delivery import hub_client
from delivery.errors import NotFound, StoreError, Unavailable, Unreachable
from delivery.hub_client import hub_errors, retry_after_s, set_hub_timeouts
from delivery.store import Commit, FolderStore, HubStore, Store, folder_files, open_store
from tests.hub_server import Fault, HubServer

PREFIX = "sft/run/seed0"
REPO = "acme/runs"
WEIGHTS = bytes(range(256)) * 8
PUT = Commit("a beat", {"heartbeat.json": b"{}"})
CALLS: dict[str, Callable[[Store], object]] = {
    "open": lambda store: store.open(),
    "exists": lambda store: store.exists("DONE"),
    "read": lambda store: store.read("DONE"),
    "list": lambda store: store.list(),
    "put": lambda store: store.put(PUT),
    "put weights": lambda store: store.put(Commit("adapter/", {"adapter/model.safetensors": WEIGHTS})),
}


pytestmark = pytest.mark.usefixtures("client_at_home", "default_client_after")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(tokens={"hf_test"}, outsiders={"hf_outsider"}) as server:
        yield server


@pytest.fixture
def hub_store(hub: HubServer) -> HubStore:
    """A store that is open."""
    opened = HubStore(REPO, PREFIX, "hf_test", hub.url)
    opened.open()
    return opened


@pytest.fixture(params=["hub", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Either store, open."""
    if request.param == "hub":
        return request.getfixturevalue("hub_store")
    opened = FolderStore(tmp_path / "artifacts", PREFIX)
    opened.open()
    return opened


# --- the interface ---


def test_an_empty_store(store):
    assert store.list() == store.list("checkpoint") == []
    assert not store.exists("DONE")
    with pytest.raises(NotFound, match="DONE is not in"):
        store.read("DONE")


def test_opening_twice_changes_nothing(store):
    store.put(PUT)
    store.open()
    assert store.list() == ["heartbeat.json"]


def test_what_is_put_can_be_read(store, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    files = {
        "metrics.json": b'{"a": 1}\n',
        "adapter/adapter_config.json": b"{}",
        "adapter/model.safetensors": tmp_path / "model.safetensors",
        "adapter/deep/er/empty": b"",
    }
    store.put(Commit("everything", files))
    assert store.list() == sorted(files)
    assert store.list("adapter") == sorted(path for path in files if path.startswith("adapter/"))
    assert store.list("adapter/deep") == ["adapter/deep/er/empty"]
    assert [store.exists(path) for path in files] == [True] * 4
    assert store.read("metrics.json") == files["metrics.json"]
    assert store.read("adapter/model.safetensors") == WEIGHTS
    assert store.read("adapter/deep/er/empty") == b""


def test_a_folder_is_no_file(store):
    store.put(Commit("m", {"adapter/a": b"a", "DONE": b"1"}))
    for path in ("adapter", "DONE/a"):
        assert not store.exists(path)
        with pytest.raises(NotFound):
            store.read(path)
    assert store.list("DONE") == store.list("adapt") == []


def test_putting_again_replaces(store):
    for content in (b"one", b"two", b""):
        store.put(Commit("m", {"heartbeat.json": content}))
        assert store.read("heartbeat.json") == content
    assert store.list() == ["heartbeat.json"]


def test_delete_and_add_in_one_commit(store):
    store.put(
        Commit("m", {f"checkpoint/{step}/{name}": b"x" for step in (1, 2) for name in "ab"} | {"c": b"c"})
    )
    store.put(Commit("m", {"checkpoint/3/a": b"new"}, delete=("checkpoint/1/", "checkpoint/2/a", "c")))
    assert store.list() == ["checkpoint/2/b", "checkpoint/3/a"]


def test_another_prefix_is_another_run(store, tmp_path):
    store.put(PUT)
    beside = FolderStore(tmp_path / "artifacts", "sft/run/seed1")
    if isinstance(store, HubStore):
        beside = HubStore(REPO, "sft/run/seed1", "hf_test", store.endpoint)
    beside.open()
    assert beside.list() == [] and not beside.exists("heartbeat.json")


def test_a_file_that_is_gone_is_not_half_a_commit(store, tmp_path):
    with pytest.raises((OSError, ValueError)):
        store.put(Commit("m", {"a": b"a", "b": tmp_path / "gone"}))
    assert store.list() == []


def test_deleting_what_is_not_there_is_no_error(store):
    store.put(Commit("m", {"a": b"a"}, delete=("gone", "checkpoint/7/")))
    store.put(Commit("m", {}, delete=("gone", "a")))
    assert store.list() == []


def test_fetch(store, tmp_path):
    store.put(Commit("m", {"adapter/model.safetensors": WEIGHTS}))
    target = tmp_path / "here" / "model"
    target.parent.mkdir()
    store.fetch("adapter/model.safetensors", target)
    assert target.read_bytes() == WEIGHTS and [*target.parent.iterdir()] == [target]
    with pytest.raises(NotFound):
        store.fetch("adapter/gone", target)
    with pytest.raises(NotFound):
        store.fetch("adapter", target)


def test_a_commit_is_checked_against_what_is_there(store):
    """What the check raises comes out as it is, and nothing has changed."""
    store.put(PUT)
    seen = []

    def check(read: Callable[[str], bytes]) -> None:
        seen.append(read("heartbeat.json"))
        with pytest.raises(NotFound):
            read("DONE")
        if len(seen) > 1:
            raise StoreError("stop")

    store.put(Commit("m", {"heartbeat.json": b"2"}), check)
    with pytest.raises(StoreError, match=r"^stop$"):
        store.put(Commit("m", {"heartbeat.json": b"3", "a": b""}, delete=("heartbeat.json",)), check)
    assert seen == [b"{}", b"2"] and store.list() == ["heartbeat.json"]
    assert store.read("heartbeat.json") == b"2"


def test_a_commit_that_was_overtaken_is_checked_again(hub, hub_store):
    hub_store.put(PUT)
    seen = []

    def check(read: Callable[[str], bytes]) -> None:
        seen.append(read("heartbeat.json"))
        if len(seen) < 3:
            hub.push(REPO, {f"{PREFIX}/heartbeat.json": str(len(seen)).encode()})

    hub_store.put(Commit("mine", {"DONE": b"1"}), check)
    assert seen == [b"{}", b"1", b"2"] and hub.commits(REPO)[-1].message == "mine"


def test_open_store():
    folder = open_store("", Path("somewhere"), PREFIX, "")
    assert isinstance(folder, FolderStore) and folder.location.endswith(f"/somewhere/{PREFIX}")
    hub = open_store(REPO, Path("somewhere"), PREFIX, "hf_test", "http://127.0.0.1:1")
    assert isinstance(hub, HubStore) and hub.location == f"{REPO}/{PREFIX}"
    assert not Path("somewhere").exists()


def test_folder_files(tmp_path):
    for name in ("b", "a/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    kept = folder_files(tmp_path, "adapter")
    assert kept == {"adapter/a/c": tmp_path / "a/c", "adapter/b": tmp_path / "b"}


# --- the folder ---


def test_files_appear_in_the_order_given(tmp_path):
    """A reader who sees a later file sees every earlier one: here the third cannot be written."""
    store = FolderStore(tmp_path, PREFIX)
    store.put(Commit("m", {"marker/in the way": b""}))
    with pytest.raises(StoreError, match="AUTOSLM_STORE_DIR"):
        store.put(Commit("m", {"z": b"1", "b": b"2", "marker": b"3", "a": b"4"}))
    assert store.list() == ["b", "marker/in the way", "z"]


def test_nothing_temporary_is_left_in_the_folder(tmp_path):
    store = FolderStore(tmp_path, PREFIX)
    store.put(PUT)
    assert [path.name for path in store.folder.iterdir()] == ["heartbeat.json"]


def test_opening_the_folder_sweeps_away_what_a_killed_worker_left(tmp_path):
    store = FolderStore(tmp_path, PREFIX)
    store.put(PUT)
    (store.folder / ".incoming-x").mkdir()
    (store.folder / ".incoming-x" / "0").write_bytes(b"half")
    assert store.list() == ["heartbeat.json"]
    store.open()
    assert [path.name for path in store.folder.iterdir()] == ["heartbeat.json"]


def test_a_file_that_vanishes_while_it_is_read_is_not_found(tmp_path, monkeypatch):
    store = FolderStore(tmp_path, PREFIX)
    monkeypatch.setattr(store, "exists", lambda path: True)
    with pytest.raises(NotFound):
        store.read("checkpoint/checkpoint-5/manifest.json")


class Failing:
    """A file that cannot be read for a reason of its file system's."""

    def __init__(self, code: int):
        self.code = code

    def __fspath__(self) -> str:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *(
            (code, Unavailable)
            for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE)
        ),
        *((code, StoreError) for code in (errno.EROFS, errno.EACCES, errno.ENAMETOOLONG)),
    ],
)
def test_a_folder_in_trouble_that_may_pass_is_worth_another_try(tmp_path, code, kind):
    failing: Any = Failing(code)
    with pytest.raises(StoreError, match="AUTOSLM_STORE_DIR") as caught:
        FolderStore(tmp_path, PREFIX).put(Commit("m", {"a": failing}))
    assert type(caught.value) is kind


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "artifacts").write_text("a file")
    store = FolderStore(tmp_path / "artifacts", PREFIX)
    for call in ("open", "put"):
        with pytest.raises(StoreError, match="AUTOSLM_STORE_DIR") as caught:
            CALLS[call](store)
        assert not isinstance(caught.value, Unavailable)
    with pytest.raises(StoreError, match="AUTOSLM_STORE_DIR") as caught:
        FolderStore(tmp_path, "x" * 300).exists("DONE")  # "could not ask" is no "no"
    assert not isinstance(caught.value, NotFound)


# --- the Hub ---


def test_a_missing_repository_is_created_private(hub):
    HubStore(REPO, PREFIX, "hf_test", hub.url).open()
    repo = hub.repo(REPO, "dataset")
    assert repo.private and len(repo.commits) == 1


def test_an_existing_repository_is_left_as_it_is(hub):
    hub.create_repo(REPO, "dataset", private=False)
    HubStore(REPO, PREFIX, "hf_test", hub.url).open()
    assert not hub.repo(REPO).private


def test_one_put_is_one_commit(hub, hub_store):
    files = {f"adapter/{name}": name.encode() * 9 for name in ("a.json", "b.safetensors", "c")}
    hub_store.put(Commit("adapter/", files))
    hub_store.put(Commit("x" * 300, {"DONE": b"1"}, delete=("adapter/",)))
    first, second = hub.commits(REPO)[1:]
    assert (first.message, first.deleted) == ("adapter/", ())
    assert first.added == {f"{PREFIX}/{path}": content for path, content in files.items()}
    assert second.message == "x" * 200
    assert set(second.deleted) == set(first.added) and set(second.added) == {f"{PREFIX}/DONE"}


def test_a_commit_whose_answer_was_lost_is_made_once(hub, hub_store):
    hub.faults.append(Fault("POST .*/commit/", drop_after=True, times=1))
    with pytest.raises(Unreachable):
        hub_store.put(PUT)
    hub_store.put(PUT)
    assert [commit.message for commit in hub.commits(REPO)[1:]] == ["a beat"]


COULD_NOT_ASK: list[tuple[dict, type[StoreError], float | None]] = [
    ({"status": 500}, Unavailable, None),
    ({"status": 501}, Unavailable, None),
    ({"status": 502}, Unreachable, None),
    ({"status": 503}, Unreachable, None),
    ({"status": 504}, Unreachable, None),
    ({"status": 408}, Unreachable, None),
    ({"status": 429}, Unreachable, None),
    ({"status": 429, "retry_after": 37}, Unreachable, 37.0),
    ({"status": 503, "retry_after": 0.5}, Unreachable, 0.5),
    ({"drop": True}, Unreachable, None),
    ({"status": 200, "body": "<html>Please log in to the airport's network</html>"}, Unavailable, None),
    ({"status": 200, "body": "null"}, Unavailable, None),
    ({"status": 200, "body": '[{"error": "not here"}]'}, Unavailable, None),
]


@pytest.mark.parametrize(("fault", "kind", "retry_after_s"), COULD_NOT_ASK)
def test_could_not_ask(hub, hub_store, fault, kind, retry_after_s):
    hub_store.put(Commit("m", {"DONE": b"1"}))
    for name, call in CALLS.items():
        hub.faults[:] = [Fault(".", **fault)]
        with pytest.raises(StoreError) as caught:
            call(hub_store)
        assert type(caught.value) is kind, name
        assert getattr(caught.value, "retry_after_s", None) == retry_after_s, name
        assert len(str(caught.value).splitlines()) == 1
        hub.faults.clear()
        call(hub_store)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_no_is_an_answer(hub, hub_store, status):
    hub.faults.append(Fault(".", status=status))
    for name, call in CALLS.items():
        with pytest.raises(StoreError, match=f"{status}.*HF_REPO, HF_TOKEN") as caught:
            call(hub_store)
        assert type(caught.value) is StoreError, name


@pytest.mark.parametrize(("fault", "kind"), [({"drop": True}, Unreachable), ({"status": 403}, StoreError)])
def test_an_upload_to_the_weights_storage_fails_like_any_other(hub, hub_store, fault, kind):
    hub.faults.append(Fault("^PUT ", **fault))
    with pytest.raises(StoreError) as caught:
        CALLS["put weights"](hub_store)
    assert type(caught.value) is kind


def test_a_download_that_breaks_off(hub, hub_store):
    hub_store.put(Commit("m", {"metrics.json": b"x" * 1000}))
    hub.faults.append(Fault("GET .*/resolve/", cut_at=100))
    with pytest.raises(Unreachable):
        hub_store.read("metrics.json")


def test_a_download_that_another_machine_answered(hub, hub_store, tmp_path):
    """The client says so by an OSError, like a disk that is full, which is none of the Hub's troubles."""
    hub_store.put(Commit("m", {"weights": WEIGHTS}))
    hub.faults.append(Fault("GET .*/resolve/", status=200, body="<html>Please log in</html>"))
    with pytest.raises(Unavailable, match="Consistency check failed"):
        hub_store.fetch("weights", tmp_path / "weights")
    with pytest.raises(OSError, match="No space left") as caught, hub_errors("weights"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not isinstance(caught.value, StoreError)


SENT_AT = {"Date": "Wed, 21 Oct 2015 07:28:00 GMT"}
ASKED_TO_WAIT: list[tuple[dict[str, str], float | None]] = [
    ({}, None),
    ({"Retry-After": "7"}, 7.0),
    ({"Retry-After": "0.5"}, 0.5),
    ({"Retry-After": "soon"}, None),
    ({**SENT_AT, "Retry-After": "Wed, 21 Oct 2015 07:29:30 GMT"}, 90.0),
    ({**SENT_AT, "Retry-After": "Wed, 21 Oct 2015 07:29:30 -0000"}, None),
    ({"Retry-After": "Wed, 21 Oct 2015 07:29:30 GMT"}, None),
    ({"RateLimit": '"api";r=0;t=55'}, 55.0),
    ({"RateLimit": '"api";r=3;t=55'}, None),
    ({"RateLimit": '"api";r=0;t=55', "Retry-After": "7"}, 7.0),
]


@pytest.mark.parametrize(("headers", "seconds"), ASKED_TO_WAIT)
def test_how_long_a_busy_hub_asks_to_wait(headers, seconds):
    assert retry_after_s(httpx2.Response(429, headers=headers)) == seconds


def test_nobody_there():
    with HubServer() as server:
        gone = HubStore(REPO, PREFIX, "hf_test", server.url)
    for call in ("open", "exists", "read"):
        with pytest.raises(Unreachable, match="cannot be reached"):
            CALLS[call](gone)


def test_a_deleted_repository_is_neither_empty_nor_worth_waiting_for(hub, hub_store):
    hub.delete_repo(REPO)
    for call in ("exists", "read", "list", "put"):
        with pytest.raises(StoreError, match="404") as caught:
            CALLS[call](hub_store)
        assert type(caught.value) is StoreError, call


@pytest.mark.parametrize("token", ["hf_wrong", "hf_outsider", ""])
def test_a_private_repository_that_the_token_may_not_see(hub, token):
    hub.create_repo(REPO, "dataset", private=True)
    hub.push(REPO, {f"{PREFIX}/DONE": b"1"})
    stranger = HubStore(REPO, PREFIX, token, hub.url)
    for call in ("open", "exists", "read", "put"):
        with pytest.raises(StoreError) as caught:
            CALLS[call](stranger)
        assert type(caught.value) is StoreError
    assert len(hub.commits(REPO)) == 2


def test_a_read_only_token_is_found_out_at_once(hub):
    hub.create_repo(REPO, "dataset", private=True)
    hub.read_only = True
    with pytest.raises(StoreError, match="403") as caught:
        HubStore(REPO, PREFIX, "hf_test", hub.url).open()
    assert not isinstance(caught.value, Unavailable)
    assert [commit.message for commit in hub.commits(REPO)] == ["initial commit"]


def test_a_token_that_may_not_create_the_repository(hub):
    hub.may_create = False
    with pytest.raises(StoreError, match="403") as caught:
        HubStore(REPO, PREFIX, "hf_test", hub.url).open()
    assert not isinstance(caught.value, Unavailable) and hub.repos == {}


def test_a_name_that_no_repository_can_have(hub):
    with pytest.raises(StoreError, match="repo_id") as caught:
        HubStore("a--b/c", PREFIX, "hf_test", hub.url).open()
    assert not isinstance(caught.value, Unavailable) and hub.requests == []


def test_a_hub_that_never_answers_is_given_up(hub, hub_store, monkeypatch):
    monkeypatch.setattr(hub_client, "REQUEST_TIMEOUT_S", 0.02)
    _http.set_client_factory(_http.default_client_factory)
    set_hub_timeouts()
    hub.faults.append(Fault(".", hang=True))
    for call in ("open", "exists", "list", "put"):
        with pytest.raises(Unreachable, match="ReadTimeout"):
            CALLS[call](hub_store)
    _http.set_client_factory(_http.default_client_factory)


def test_setting_timeouts_again_does_not_close_a_client_that_is_in_use(hub_store):
    client = _http.get_session()
    set_hub_timeouts()
    assert _http.get_session() is client and not client.is_closed
