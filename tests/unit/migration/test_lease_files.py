"""The lease in real files: of hosts that share a folder and of hosts that do not; two runs at the same moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused
from appliance.host.base import Host, OnLine, Result, Stuck, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.migration.lease import Leases, check_lease, look_at_lease, release_lease, take_lease
from appliance.operations.services.guard import Guard
from appliance.progress import Silent
from tests.places import DEBIAN_SITE

STATE = "/state-of-this-host"


class Room(Local):
    """A host whose state folder is one of this test's; it may be cut off."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.folder = folder
        self.cut = False
        self.stuck = False

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
    ) -> Result:
        if self.cut:
            raise Unreachable(f"{self.name}: cut off")
        if self.stuck and "look" in argv:
            raise Stuck(f"{self.name}: no banner")
        words = (word.replace(STATE, str(self.folder)) for word in argv)
        return super().run(*words, input=input, ok=ok, timeout=timeout, on_line=on_line)


class Pair:
    """Two admin hosts."""

    def __init__(self, tmp_path: Path, *, shared: bool) -> None:
        opened = open_cluster(DEBIAN_SITE, Path(STATE), Silent())
        admins = opened.site.admin_hosts
        two = tuple(admins[0].model_copy(update={"name": name, "address": name}) for name in ("host-a", "host-b"))
        self.cluster = Cluster(opened.site.model_copy(update={"admin_hosts": two}), opened.services, opened.base)
        folders = {name: tmp_path / ("both" if shared else name) for name in ("host-a", "host-b")}
        self.rooms = {name: Room(name, folder) for name, folder in folders.items()}

    def leases(self, name: str, *, look: bool = True, without: tuple[str, ...] = ()) -> Leases:
        found = Leases(self.rooms[name], self.cluster, without=without)
        found.hosts |= {other: room for other, room in self.rooms.items() if other in found.hosts}
        if look:
            found.look()
        return found

    def take(self, name: str) -> int:
        return take_lease(self.rooms[name], self.cluster, leases=self.leases(name)).generation

    def release(self, name: str) -> None:
        release_lease(self.rooms[name], self.cluster, leases=self.leases(name))

    def files(self) -> dict[str, Any]:
        """Holder, generation and whose file it is, by host."""
        found = {name: look_at_lease(room, self.cluster) for name, room in self.rooms.items()}
        return {name: (lease.holder, lease.generation, lease.file) for name, lease in found.items()}


@pytest.fixture
def apart(tmp_path: Path) -> Pair:
    return Pair(tmp_path, shared=False)


@pytest.fixture
def together(tmp_path: Path) -> Pair:
    return Pair(tmp_path, shared=True)


def test_a_folder_that_the_lease_makes_is_readable_by_root_only(apart: Pair, tmp_path: Path) -> None:
    """The overlay comes into the same folder."""
    apart.take("host-a")
    folders = [path.parent for path in tmp_path.rglob("*.lease")]
    assert len(folders) == 2 and {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.parametrize("holder", ["host-a", "host-b"])
def test_hosts_that_do_not_share_have_a_copy_of_what_the_other_holds(apart: Pair, holder: str) -> None:
    apart.take(holder)
    assert apart.files() == {name: (holder, 1, name) for name in apart.rooms}
    apart.release(holder)
    assert apart.files() == {name: (None, 1, name) for name in apart.rooms}
    other = "host-b" if holder == "host-a" else "host-a"
    assert apart.take(other) == 2


@pytest.mark.parametrize("holder", ["host-a", "host-b"])
def test_a_shared_file_is_the_holders_own(together: Pair, holder: str) -> None:
    together.take(holder)
    assert together.files() == dict.fromkeys(together.rooms, (holder, 1, holder))
    together.release(holder)
    assert together.files() == dict.fromkeys(together.rooms, (None, 1, holder))


def test_a_holder_that_is_cut_off_is_not_passed_over(apart: Pair) -> None:
    apart.take("host-a")
    apart.rooms["host-a"].cut = True
    with pytest.raises(Refused, match="cannot be reached") as caught:
        apart.take("host-b")
    assert "sms failover host-b" in caught.value.hint
    leases = apart.leases("host-b", without=("host-a",))
    assert leases.take(leap=1000).generation == 1001


def test_a_free_lease_is_taken_although_a_host_is_cut_off(apart: Pair) -> None:
    apart.rooms["host-b"].cut = True
    leases = apart.leases("host-a")
    assert leases.silent == ["host-b"] and leases.take().generation == 1
    apart.rooms["host-b"].cut = False
    assert apart.files()["host-b"] == (None, 0, "")
    with pytest.raises(Refused, match="host-a holds"):
        apart.take("host-b")


def test_two_that_could_not_see_each_other_look_again_before_they_go_on(apart: Pair) -> None:
    """host-b was silent when host-a looked, and had taken the lease when host-a had."""
    apart.rooms["host-b"].cut = True
    late = apart.leases("host-a")
    apart.rooms["host-b"].cut = False
    apart.leases("host-b", without=("host-a",)).take()
    with pytest.raises(Refused, match="host-b was faster"):
        late.take()
    assert apart.files() == {"host-a": ("host-b", 1, "host-a"), "host-b": ("host-b", 1, "host-b")}


def test_a_host_that_is_alive_and_says_nothing_is_not_passed_over(apart: Pair) -> None:
    apart.rooms["host-b"].stuck = True
    with pytest.raises(Refused, match="alive and does not answer"):
        apart.take("host-a")
    assert apart.files()["host-a"] == (None, 0, "")
    assert apart.leases("host-a", without=("host-b",)).take().generation == 1


def test_who_was_slower_changes_nothing(apart: Pair) -> None:
    slow = apart.leases("host-b")
    apart.take("host-a")
    with pytest.raises(Refused, match="changed while it was taken"):
        slow.take()
    assert apart.files() == {name: ("host-a", 1, name) for name in apart.rooms}


def test_who_lost_half_way_says_who_won(apart: Pair) -> None:
    """host-b is between its two files when host-a looks, and host-a believes that nobody holds."""
    late = apart.leases("host-a")
    apart.take("host-b")
    late.views["host-a"] = late.ask("host-a")
    with pytest.raises(Refused):
        late.take()
    assert apart.files() == {"host-a": ("host-b", 2, "host-a"), "host-b": ("host-b", 1, "host-b")}
    with pytest.raises(Refused, match="host-b holds"):
        apart.take("host-a")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_of_two_at_the_same_moment_exactly_one_wins(tmp_path: Path, shared: bool) -> None:
    pair = Pair(tmp_path, shared=shared)
    for _ in range(8):
        both = {name: pair.leases(name) for name in pair.rooms}
        won: list[str] = []
        lost: list[Refused] = []
        gate = threading.Barrier(2)

        def take(name: str, leases: Leases, gate: threading.Barrier = gate, won: Any = won, lost: Any = lost) -> None:
            gate.wait()
            try:
                leases.take()
                won.append(name)
            except Refused as error:
                lost.append(error)

        threads = [threading.Thread(target=take, args=pair) for pair in both.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and len(lost) == 1
        assert {holder for holder, _, _ in pair.files().values()} == set(won)
        pair.release(won[0])


def test_a_standby_may_work_on_its_own_overlay_but_not_on_a_shared_one(apart: Pair, together: Pair) -> None:
    apart.take("host-a")
    assert check_lease(apart.rooms["host-b"], apart.cluster).holder == "host-a"
    together.take("host-a")
    with pytest.raises(Refused, match="host-a holds"):
        check_lease(together.rooms["host-b"], together.cluster)
    assert check_lease(together.rooms["host-b"], together.cluster, fenced=["host-a"]).holder == "host-a"


def test_a_file_of_before_is_nobodys_copy(apart: Pair) -> None:
    """Written by a version that knew of no copies: it may be a shared one."""
    room = apart.rooms["host-b"]
    text = {"cluster": apart.cluster.site.cluster, "generation": 3, "holder": "host-a", "since": 1.0}
    room.write(str(apart.cluster.places.lease), json.dumps(text).encode())
    with pytest.raises(Refused, match="host-a holds"):
        check_lease(room, apart.cluster)


def watching(pair: Pair, name: str, said: list[str]) -> Guard:
    guard = Guard(pair.cluster, pair.rooms[name], said.append)
    guard.leases = pair.leases(name, look=False)
    return guard


def test_a_guard_tells_a_host_that_was_away(apart: Pair) -> None:
    apart.rooms["host-b"].cut = True
    apart.take("host-a")
    said: list[str] = []
    guard = watching(apart, "host-a", said)
    for name in ("host-a", "host-b", "host-b"):
        guard.look(name)
    apart.rooms["host-b"].cut = False
    assert apart.files()["host-b"] == (None, 0, "")
    guard.look("host-b")
    assert apart.files()["host-b"] == ("host-a", 1, "host-b")
    assert guard.check() is None and said == []


def test_a_lease_that_its_holder_wrote_meanwhile_is_adopted(apart: Pair) -> None:
    """The guard of the new holder writes it while the old one stops, which takes seconds."""
    apart.take("host-a")
    seen = apart.leases("host-a")
    newer = apart.leases("host-b", without=("host-a",)).take(leap=1000)
    apart.leases("host-b").tell(newer)
    seen.adopt(newer)
    assert apart.files()["host-a"] == ("host-b", 1001, "host-a")


def test_a_lease_is_not_adopted_in_place_of_another_change(apart: Pair) -> None:
    apart.take("host-a")
    seen = apart.leases("host-a")
    newer = apart.leases("host-b", without=("host-a",)).take(leap=1000)
    apart.release("host-a")
    with pytest.raises(Refused):
        seen.adopt(newer)
    assert apart.files()["host-a"][1] == 1


def test_a_guard_believes_what_it_heard_of_a_host_that_is_silent_now(apart: Pair) -> None:
    apart.take("host-a")
    said: list[str] = []
    guard = watching(apart, "host-a", said)
    guard.look("host-a")
    apart.leases("host-b", without=("host-a",)).take(leap=1000)
    guard.look("host-b")
    apart.rooms["host-b"].cut = True
    guard.look("host-b")
    newer = guard.newer()
    assert newer and (newer.holder, newer.generation) == ("host-b", 1001)


def test_a_guard_says_once_what_is_wrong_with_a_file(apart: Pair) -> None:
    apart.rooms["host-b"].write(str(apart.cluster.places.lease), b"{")
    said: list[str] = []
    guard = watching(apart, "host-a", said)
    for _ in range(3):
        guard.look("host-b")
    assert len(said) == 1 and "cannot be read" in said[0]


def test_room_is_a_host(apart: Pair) -> None:
    room: Host = apart.rooms["host-a"]
    assert room.run("echo", STATE).text == str(apart.rooms["host-a"].folder)
