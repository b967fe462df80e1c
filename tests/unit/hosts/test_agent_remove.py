"""The agent removes snapshots: what is removed, what stays, and what is left when it is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.main import COMMANDS, find_command
from appliance.agent.protocol import Busy, Problem
from appliance.agent.remove import remove
from appliance.agent.status import brief
from appliance.agent.store import Store
from tests import stores
from tests.places import ROOT


def ask(store: Store, *numbers: int, sweep: bool = True) -> dict[str, Any]:
    return remove({"store": store.root, "numbers": list(numbers), "sweep": sweep})


def test_unused_chunks_are_removed(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 4)
    said = ask(store, 1, 3)
    assert (said["removed"], said["swept"], said["chunks"]) == ([1, 3], True, 6)
    assert said["freed_bytes"] >= 6 << 16
    assert stores.numbers(store) == [2, 4]
    assert stores.stored_chunks(tmp_path / "s") == stores.named_chunks(store)
    stores.assert_whole(store)
    again = ask(store)
    assert (again["removed"], again["chunks"], again["freed_bytes"]) == ([], 0, 0)


def test_without_a_sweep_chunks_stay(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 2)
    before = stores.stored_chunks(tmp_path / "s")
    assert ask(store, 1, sweep=False)["swept"] is False
    assert stores.stored_chunks(tmp_path / "s") == before
    assert ask(store)["chunks"] == 3


def test_numbers_are_never_reused(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 2)
    stores.damage(store, 2)
    ask(store, 2)
    assert stores.add_snapshot(store, [b"x" * 65536]).number == 3


@pytest.mark.parametrize(
    ("numbers", "damaged", "words"),
    [
        ((1, 3), (), "snapshot 3 is the newest verified one, which is never removed"),
        ((1, 2), (3,), "snapshot 2 is the newest verified one, which is never removed"),
        ((1, 9), (), "there is no snapshot 9"),
    ],
)
def test_an_invalid_request_removes_nothing(
    tmp_path: Path, numbers: tuple[int, ...], damaged: tuple[int, ...], words: str
) -> None:
    store = stores.fill(tmp_path / "s", 3)
    for number in damaged:
        stores.damage(store, number)
    with pytest.raises(Problem, match=words) as caught:
        ask(store, *numbers)
    assert caught.value.status == 3
    assert stores.numbers(store) == [1, 2, 3]


def test_all_damaged_snapshots_can_be_removed(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 2)
    stores.damage(store, 1)
    stores.damage(store, 2)
    ask(store, 1, 2)
    assert stores.numbers(store) == [] == sorted(stores.stored_chunks(tmp_path / "s"))


def test_no_chunk_is_removed_if_a_manifest_is_damaged(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 4)
    stores.tear_manifest(store, 2)
    before = stores.stored_chunks(tmp_path / "s")
    assert ask(store, 1)["swept"] is False
    assert stores.stored_chunks(tmp_path / "s") == before
    said = ask(store, 2)
    assert (said["removed"], said["swept"], said["chunks"]) == ([2], True, 6)
    stores.assert_whole(store)


def test_no_chunk_is_removed_if_a_list_of_digests_is_damaged(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 3)
    (tmp_path / "s" / "000002" / "digests").write_bytes(b"0" * 64)
    before = stores.stored_chunks(tmp_path / "s")
    assert ask(store, 1)["swept"] is False
    assert stores.stored_chunks(tmp_path / "s") == before


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 2)
    for held in (store.writing, store.reading):
        with held(), pytest.raises(Busy):
            ask(store, 1)
    assert stores.numbers(store) == [1, 2]
    with pytest.raises(Problem, match="there are no snapshots"):
        ask(Store(str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


# Ends the process, as kill -9 does, at its N-th change of the file system.
KILLED = """
import os, signal, sys
left = [int(sys.argv[1])]
def hook(event, arguments):
    if event in ("os.rename", "os.remove", "os.rmdir"):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from appliance.agent.main import main
sys.exit(main(sys.argv[2:]))
"""


def test_killed_at_every_change_it_leaves_a_consistent_store(tmp_path: Path) -> None:
    request = '{"store": "%s", "numbers": [1, 3], "sweep": true}'
    for moment in range(100):
        root = tmp_path / str(moment)
        store = stores.fill(root, 4, chunks=3, shared=1)
        argv = [sys.executable, "-c", KILLED, str(moment), "remove", request % root]
        status = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False).returncode
        left = stores.numbers(store)
        assert set(left) >= {2, 4}
        stores.assert_whole(store)
        ask(store, *({1, 3} & set(left)))
        assert stores.numbers(store) == [2, 4]
        stores.assert_whole(store)
        assert stores.stored_chunks(root) == stores.named_chunks(store)
        assert not list(root.glob("*.partial"))
        if status == 0:
            break
        assert status == -9
    assert moment > 12, "two renames, their files and folders, four chunks"


def test_every_command_exists_and_imports_only_its_module() -> None:
    for name in COMMANDS:
        assert callable(find_command(name))
    code = "import sys; from appliance.agent.main import find_command; find_command('brief'); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours = {name for name in said.split() if name.startswith("appliance.agent.")}
    modules = ("identity", "main", "manifest", "protocol", "status", "store")
    assert ours == {f"appliance.agent.{name}" for name in modules}


def test_brief(tmp_path: Path) -> None:
    store = stores.fill(tmp_path / "s", 4, start=1000.0)
    stores.damage(store, 4)
    stores.tear_manifest(store, 1)
    (tmp_path / "run.json").write_text("{}")
    said = brief({"store": store.root, "files": [str(tmp_path / "run.json"), str(tmp_path / "none")]})
    assert (said["count"], said["damaged"], said["broken"]) == (3, [4], [1])
    assert said["newest"]["number"] == 3
    assert said["newest"]["taken"] == 1000.0 - 900
    assert said["newest"]["method"] == "delta"
    assert [path for path, found in said["texts"].items() if found["text"] == "{}"] == [str(tmp_path / "run.json")]
    empty = brief({"store": str(tmp_path / "nowhere"), "files": []})
    assert (empty["count"], empty["newest"]) == (0, None)
    assert not (tmp_path / "nowhere").exists()
