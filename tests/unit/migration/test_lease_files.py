"""The lease in real files: hosts with a shared folder, hosts without one, and concurrent runs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandTimeout, Host, Result, Unreachable
from appliance.host.local import Local
from appliance.operations.history import note, read_history
from appliance.operations.lease import (
    Leases,
    check_lease,
    hold_taken_lease,
    query_lease,
    raise_lease,
    release_lease,
    take_lease,
)
from appliance.operations.migration import failover
from appliance.operations.services import start
from appliance.operations.services.guard import CURRENT_S, FAILED_S, Guard
from appliance.operations.services.unfinished import last_sign
from appliance.operations.under_way import mark_path
from appliance.shared.files import ALWAYS
from appliance.shared.lease import MAX_FILE, Lease, SwapLease, read_file
from appliance.shared.locks import hold_lock
from appliance.shared.migration import MoveMark
from appliance.shared.records import to_json
from appliance.shared.requests import Request
from appliance.tools.agent import Agents
from appliance.tools.apptainer import Instance
from tests.pairs import STATE, AgentsInFolders, HostInFolder, Pair
from tests.support.env import FakeHosts, Reports, clock_of, with_env


def test_created_folder_is_readable_by_root_only(apart: Pair, tmp_path: Path) -> None:
    """The overlay is created in the same folder."""
    apart.take("host-a")
    folders = [path.parent for path in tmp_path.rglob("*.lease")]
    assert len(folders) == 2 and {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.parametrize("holder", ["host-a", "host-b"])
def test_separate_folders_hold_a_copy_of_the_lease(apart: Pair, holder: str) -> None:
    apart.take(holder)
    assert apart.files() == {name: (holder, 1, name) for name in apart.hosts}
    apart.release(holder)
    assert apart.files() == {name: (None, 1, name) for name in apart.hosts}
    other = "host-b" if holder == "host-a" else "host-a"
    assert apart.take(other) == 2


@pytest.mark.parametrize("holder", ["host-a", "host-b"])
def test_shared_file_belongs_to_the_holder(together: Pair, holder: str) -> None:
    together.take(holder)
    assert together.files() == dict.fromkeys(together.hosts, (holder, 1, holder))
    together.release(holder)
    assert together.files() == dict.fromkeys(together.hosts, (None, 1, holder))


def test_unreachable_holder_keeps_the_lease(apart: Pair) -> None:
    apart.take("host-a")
    apart.hosts["host-a"].cut = True
    with pytest.raises(Refused, match="cannot be reached") as caught:
        apart.take("host-b")
    assert "sms failover host-b" in caught.value.hint
    leases = apart.leases("host-b", without=("host-a",))
    assert leases.take(generation_bump=1000).generation == 1001


def test_free_lease_is_taken_despite_an_unreachable_host(apart: Pair) -> None:
    apart.hosts["host-b"].cut = True
    leases = apart.leases("host-a")
    assert leases.unreachable == ["host-b"] and leases.take().generation == 1
    apart.hosts["host-b"].cut = False
    assert apart.files()["host-b"] == (None, 0, "")
    with pytest.raises(Refused, match="host-a holds"):
        apart.take("host-b")


@pytest.mark.parametrize("cut", [False, True])
def test_a_host_whose_file_cannot_be_written_is_named_with_the_reason(apart: Pair, *, cut: bool) -> None:
    """It answers, so it is not unreachable, unless its network fails as well."""
    host, reports = apart.hosts["host-b"], Reports()
    named = Lease(apart.cluster.site.cluster, cluster_uuid="11111111-0000-4000-8000-111111111111")
    for each in apart.hosts.values():
        each.write(str(apart.cluster.places.lease), named.text())
    host.remote = True

    class WithoutPython(Agents):
        def install(self, found: Host, time_left: Callable[[], float] = lambda: 60.0) -> tuple[str, ...]:
            host.cut = cut
            raise Refused(f"{found.name} has no Python 3.9 or newer", hint="install python3 there")

    apart.cluster = with_env(apart.cluster, agents=WithoutPython())
    leases = apart.leases("host-a")
    with ExitStack() as undo:
        assert start._take_lease(apart.hosts["host-a"], leases, reports, undo, start.StartOptions()).generation == 1
        undo.pop_all()
    why = "host-b has no Python 3.9 or newer; install python3 there"
    assert reports.lines == ([] if cut else [f"note: the lease file of host-b could not be written: {why}"])
    assert leases.unreachable == (["host-b"] if cut else [])


def test_unreachable_hosts_are_queried_again_before_the_own_file_is_written(apart: Pair) -> None:
    """host-b was unreachable during the query of host-a, and took the lease before host-a did."""
    apart.hosts["host-b"].cut = True
    late = apart.leases("host-a")
    apart.hosts["host-b"].cut = False
    apart.leases("host-b", without=("host-a",)).take()
    with pytest.raises(Refused, match="host-b took the lease first"):
        late.take()
    assert apart.files() == {"host-a": (None, 0, ""), "host-b": ("host-b", 1, "host-b")}


def test_stuck_host_may_hold_the_lease(apart: Pair) -> None:
    apart.hosts["host-b"].stuck = True
    with pytest.raises(Refused, match="alive and does not answer"):
        apart.take("host-a")
    assert apart.files()["host-a"] == (None, 0, "")
    assert apart.leases("host-a", without=("host-b",)).take().generation == 1


def test_loser_of_a_race_changes_nothing(apart: Pair) -> None:
    slow = apart.leases("host-b")
    apart.take("host-a")
    with pytest.raises(Refused, match="changed while it was taken"):
        slow.take()
    assert apart.files() == {name: ("host-a", 1, name) for name in apart.hosts}


def test_loser_of_a_race_corrects_its_own_file(apart: Pair) -> None:
    """host-b has written one of its two files when host-a queries, so that the lease looks free to host-a."""
    late = apart.leases("host-a")
    apart.take("host-b")
    late.views["host-a"] = late.query_host("host-a")
    with pytest.raises(Refused):
        late.take()
    assert apart.files() == {"host-a": ("host-b", 2, "host-a"), "host-b": ("host-b", 1, "host-b")}
    with pytest.raises(Refused, match="host-b holds"):
        apart.take("host-a")


def test_only_one_wins_when_the_other_file_cannot_be_written_for_a_moment(apart: Pair) -> None:
    """host-b has written one of its two files when host-a queries, and is unreachable only while host-a writes."""
    usual, won = apart.cluster, list[str]()

    def silent(host: Host, _: Request) -> None:
        if host.name == "host-b":
            raise Unreachable("host-b: interrupted")

    def take_a_first(host: Host, _: Request) -> None:
        if host.name == "host-b" and not won:
            apart.cluster = with_env(usual, agents=AgentsInFolders(instead=silent))
            apart.take("host-a")
            won.append("host-a")

    apart.cluster = with_env(usual, agents=AgentsInFolders(instead=take_a_first))
    late = apart.leases("host-b")
    with pytest.raises(Refused, match="host-a took the lease first"):
        late.take()
    assert won == ["host-a"]
    assert apart.files() == {"host-a": ("host-a", 2, "host-a"), "host-b": ("host-a", 1, "host-b")}


@dataclass(frozen=True)
class Followed(Agents):
    """Agents after whose requests something happens."""

    then: Callable[[], None] = lambda: None

    def perform(self, host: Host, request: Request, *, timeout: float = 60) -> Any:
        reply = super().perform(host, request, timeout=timeout)
        self.then()
        return reply


@pytest.mark.parametrize("held", [False, True])
def test_superseded_host_does_not_get_the_lease_of_a_start_that_withdraws(apart: Pair, held: bool) -> None:
    """host-a claims the lease of before a failover to host-b, and is unreachable until host-b has written its file."""
    apart.take("host-a")
    apart.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    if not held:
        release_lease(apart.hosts["host-b"], apart.cluster, leases=apart.leases("host-b", without=("host-a",)))
    apart.hosts["host-a"].cut = True

    def reconnect() -> None:
        apart.hosts["host-a"].cut = False

    apart.cluster = with_env(apart.cluster, agents=Followed(then=reconnect))
    with pytest.raises(Refused, match="host-a took the lease first"):
        apart.leases("host-b").take()
    assert apart.files()["host-b"] == ("host-b" if held else None, 1002, "host-b")


def test_own_file_names_its_host_only_after_all_others(apart: Pair) -> None:
    """A guard on host-b would step down for a start of host-a that is refused later."""
    holders = list[str | None]()
    agents = Followed(then=lambda: holders.append(apart.files()["host-a"][0]))
    apart.cluster = with_env(apart.cluster, agents=agents)
    apart.take("host-a")
    assert holders == [None, None, "host-a"]
    apart.take("host-a")
    assert holders[3:] == ["host-a", "host-a", "host-a"], "it had the lease already"


def test_lease_cannot_be_taken_while_the_instance_starts(apart: Pair) -> None:
    """host-a queried before: neither the lease nor an instance of host-b was there."""
    late = apart.leases("host-a")
    lease = take_lease(apart.hosts["host-b"], apart.cluster, leases=apart.leases("host-b"))
    late.views["host-a"] = late.query_host("host-a")
    late.query_host("host-b")
    with hold_taken_lease(apart.hosts["host-b"], apart.cluster, lease), pytest.raises(Refused, match="host-b took"):
        late.take()


def test_instance_is_not_started_without_the_lease(apart: Pair) -> None:
    """An interrupted start of host-a had left a higher generation there; it was run again while host-b started."""
    lease = take_lease(apart.hosts["host-b"], apart.cluster, leases=apart.leases("host-b"))
    path, newer = str(apart.cluster.places.lease), Lease(lease.cluster, 7, "host-a", 1.0, "host-a")
    apart.hosts["host-a"].write(path, newer.text())
    assert apart.take("host-a") == 8
    with (
        pytest.raises(Refused, match="host-a took the lease first"),
        hold_taken_lease(apart.hosts["host-b"], apart.cluster, lease),
    ):
        pytest.fail("it would be started")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_exactly_one_of_two_concurrent_runs_wins(tmp_path: Path, shared: bool) -> None:
    pair = Pair(tmp_path, shared=shared)
    for _ in range(8):
        both = {name: pair.leases(name) for name in pair.hosts}
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


def test_standby_may_change_its_own_overlay_but_not_a_shared_one(apart: Pair, together: Pair) -> None:
    apart.take("host-a")
    assert check_lease(apart.hosts["host-b"], apart.cluster).holder == "host-a"
    together.take("host-a")
    with pytest.raises(Refused, match="host-a holds"):
        check_lease(together.hosts["host-b"], together.cluster)
    assert check_lease(together.hosts["host-b"], together.cluster, fenced=["host-a"]).holder == "host-a"


@pytest.mark.parametrize("remote", [False, True])
def test_taken_above_the_generation_of_a_snapshot(apart: Pair, *, remote: bool) -> None:
    host = apart.hosts["host-b"]
    host.remote = remote
    raise_lease(host, apart.cluster, 6)
    assert query_lease(host, apart.cluster).floor == 6
    path = str(apart.cluster.places.lease)
    with hold_lock(str(host.folder / Path(path).relative_to(STATE)) + ".lock"):
        raise_lease(host, apart.cluster, 7, locked=True)  # as a restore does, which holds the lock
    assert query_lease(host, apart.cluster).floor == 7
    assert apart.take("host-a") == 8
    raise_lease(host, apart.cluster, 40)
    assert apart.files()["host-b"] == ("host-a", 8, "host-b"), "another host holds it"
    with pytest.raises(Refused):
        raise_lease(apart.hosts["host-a"], apart.cluster, 40)
    apart.release("host-a")
    assert apart.files() == {name: (None, 8, name) for name in apart.hosts}


def test_file_without_owner_may_be_shared(apart: Pair) -> None:
    """An older version wrote it, which did not record the owner."""
    host = apart.hosts["host-b"]
    text = {"cluster": apart.cluster.site.cluster, "generation": 3, "holder": "host-a", "since": 1.0}
    host.write(str(apart.cluster.places.lease), json.dumps(text).encode())
    with pytest.raises(Refused, match="host-a holds"):
        check_lease(host, apart.cluster)


def make_guard(pair: Pair, name: str, messages: list[str]) -> Guard:
    return Guard(pair.cluster, pair.hosts[name], messages.append)


def test_guard_updates_a_host_that_was_unreachable(apart: Pair) -> None:
    apart.hosts["host-b"].cut = True
    apart.take("host-a")
    messages: list[str] = []
    guard = make_guard(apart, "host-a", messages)
    for name in ("host-a", "host-b", "host-b"):
        guard.query(name)
    apart.hosts["host-b"].cut = False
    assert apart.files()["host-b"] == (None, 0, "")
    guard.query("host-b")
    assert apart.files()["host-b"] == ("host-a", 1, "host-b")
    assert guard.check() is None and messages == []


def test_guard_knows_whether_what_it_read_is_current(apart: Pair) -> None:
    apart.take("host-a")
    clock = clock_of(apart.cluster)
    watcher = make_guard(apart, "host-a", [])
    assert not watcher.is_current(), "it has read nothing"
    watcher.query("host-b")
    clock.now += CURRENT_S - 1
    assert watcher.is_current()
    clock.now += 1
    assert not watcher.is_current(), "its queries may hang"
    apart.hosts["host-b"].cut = True
    watcher.query("host-b")
    clock.now += FAILED_S - 1
    assert watcher.is_current(), "it is off"
    apart.hosts["host-b"].cut = False
    apart.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    watcher.query("host-a")
    watcher.query("host-b")
    assert not watcher.is_current(), "another host has taken over"


def test_guard_of_the_holder_leaves_a_sign_of_life_on_the_others(apart: Pair) -> None:
    """Only there: it shows others how long ago it was last heard from."""
    apart.take("host-a")
    signs = {name: host.folder / "run" / "sample.alive" for name, host in apart.hosts.items()}
    guards = {name: make_guard(apart, name, []) for name in apart.hosts}
    for guard in (guards["host-b"], guards["host-a"]):
        for name in apart.hosts:
            guard.query(name)
    assert {name: sign.exists() and sign.read_text() for name, sign in signs.items()} == {
        "host-a": False,
        "host-b": "host-a",
    }
    age = time.time() - last_sign(apart.cluster, apart.hosts["host-b"], ("host-a",))
    assert 0 <= age < 5
    for old in ((), ("host-c",)):
        assert last_sign(apart.cluster, apart.hosts["host-b"], old) == 0


def test_adopt_accepts_a_lease_written_by_its_holder_meanwhile(apart: Pair) -> None:
    """The new holder's guard writes it while the old holder stops, which takes seconds."""
    apart.take("host-a")
    seen = apart.leases("host-a")
    newer = apart.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    apart.leases("host-b").publish(newer)
    seen.adopt(newer)
    assert apart.files()["host-a"] == ("host-b", 1001, "host-a")


def test_adopt_refuses_another_concurrent_change(apart: Pair) -> None:
    apart.take("host-a")
    seen = apart.leases("host-a")
    newer = apart.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    apart.release("host-a")
    with pytest.raises(Refused):
        seen.adopt(newer)
    assert apart.files()["host-a"][1] == 1


class Serving(HostInFolder):
    """A host on which an instance runs until it is stopped. ``down``: ports taken off their bridges, and the stop."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.instances.append(Instance("sms-sample", 7, "/i.sif"))
        self.down: list[str] = []

    def run(self, *argv: str, **options: Any) -> Result:
        links: list[dict[str, Any]] = []
        if argv[-1] == "link":
            inside = argv[0] == "nsenter"
            name, index, end = ("eth0", 2, 9) if inside else ("veth0", 9, 2)
            links.append({"ifname": name, "ifindex": index, "link_index": end})
        elif argv[:2] == ("ip", "-force"):
            self.down.append(options["input"].decode().split()[3])
        elif argv[:3] == ("apptainer", "instance", "stop"):
            self.down.append("stopped")
            self.instances.clear()
        elif argv[0] != "logger":
            return super().run(*argv, **options)
        return Result(self.name, argv, 0, json.dumps(links).encode(), b"")


@pytest.mark.parametrize(
    ("side", "state", "disconnected"),
    [("", "", True), ("leave", "read", True), ("leave", "released", False), ("arrive", "up", False)],
)
def test_guard_disconnects_a_superseded_instance_while_another_sms_has_the_lock(
    apart: Pair, side: str, state: str, disconnected: bool
) -> None:
    """`sms restart` waits for a service; a migration copies, but moves ports itself later."""
    apart.take("host-a")
    apart.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    host = Serving("host-a", apart.hosts["host-a"].folder)
    apart.hosts["host-a"] = host
    apart.cluster = with_env(apart.cluster, hosts=FakeHosts(apart.hosts))
    if side:
        host.write(mark_path(apart.cluster), to_json(MoveMark(side, state, 7, {})))
    messages: list[str] = []
    watcher = make_guard(apart, "host-a", messages)
    for name in apart.hosts:
        watcher.query(name)
    with hold_lock(host.path(str(apart.cluster.places.lock))):
        assert watcher.check() is None and watcher.check() is None
    assert host.down == ["veth0", "veth0"] * disconnected
    assert len(messages) == disconnected
    done = watcher.check()
    assert done and done.ran and host.down[-2:] == ["veth0", "stopped"]
    assert apart.files()["host-a"] == ("host-b", 1001, "host-a")


def test_guard_keeps_the_last_view_of_an_unreachable_host(apart: Pair) -> None:
    apart.take("host-a")
    messages: list[str] = []
    guard = make_guard(apart, "host-a", messages)
    guard.query("host-a")
    apart.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    guard.query("host-b")
    apart.hosts["host-b"].cut = True
    guard.query("host-b")
    newer = guard.newer()
    assert newer and (newer.holder, newer.generation) == ("host-b", 1001)


def test_guard_reports_an_unreadable_file_once(apart: Pair) -> None:
    apart.hosts["host-b"].write(str(apart.cluster.places.lease), b"{")
    messages: list[str] = []
    guard = make_guard(apart, "host-a", messages)
    for _ in range(3):
        guard.query("host-b")
    assert len(messages) == 1 and "cannot be read" in messages[0]


def test_the_agent_writes_leases_and_history_as_this_process_does(apart: Pair) -> None:
    stale = apart.leases("host-b")
    for host in apart.hosts.values():
        host.remote = True
    apart.take("host-a")
    assert apart.files() == {name: ("host-a", 1, name) for name in apart.hosts}
    with pytest.raises(Refused, match="changed while it was taken"):
        stale.take()
    note(apart.cluster, apart.hosts["host-b"], "test", "event", more='"ä\n')
    (line,) = read_history(apart.cluster, apart.hosts["host-b"])
    assert (line["host"], line["verb"], line["event"], line["more"]) == ("host-b", "test", "event", '"ä\n')


def test_a_folder_that_cannot_be_made_is_reported(apart: Pair, tmp_path: Path) -> None:
    leases = apart.leases("host-a")
    (tmp_path / "host-a").write_bytes(b"")
    for apart.hosts["host-a"].remote in (False, True):
        with pytest.raises(SmsError, match=r"^host-a: .*host-a.*: (file exists|not a directory)$"):
            leases.take()


def test_a_request_that_blocks_is_given_up() -> None:
    """The disk of this host hangs."""

    class Hanging(Local):
        def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
            threading.Event().wait()

    with pytest.raises(CommandTimeout, match="SwapLease /x"):
        Agents().perform(Hanging("host-a"), SwapLease("/x", ""), timeout=0.1)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_request_that_was_given_up_changes_nothing_later(tmp_path: Path, interrupted: bool) -> None:
    """By its time limit, or by Ctrl-C: what undoes the caller's work must not be overtaken by it."""
    path, ended = tmp_path / "lease", threading.Event()

    class Here(Local):
        def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
            try:
                return super().perform(request, may_commit)
            finally:
                ended.set()

    with hold_lock(f"{path}.lock"):
        if interrupted:
            timer = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
            timer.start()
        with pytest.raises(KeyboardInterrupt if interrupted else CommandTimeout):
            Agents().perform(Here("host-a"), SwapLease(str(path), "{}", wait_s=10), timeout=10 if interrupted else 0.3)
    assert ended.wait(10)
    assert not path.exists() and not path.with_name(".lease.new~").exists()
    Agents().perform(Here("host-a"), SwapLease(str(path), "{}"))
    assert path.read_text() == "{}"


def test_host_in_folder_is_a_host(apart: Pair) -> None:
    host: Host = apart.hosts["host-a"]
    assert host.run("echo", STATE).text == str(apart.hosts["host-a"].folder)


GOES_ON = "host-. cannot run the services container: bridge"
"""The host to start on is checked, which has no bridges."""


def test_a_failover_with_the_damaged_lease_of_another_host(apart: Pair) -> None:
    """It may be the newest one: nothing is fenced, and the message has the way out, which works."""
    apart.take("host-a")
    path = Path(str(apart.cluster.places.lease).replace(STATE, str(apart.hosts["host-a"].folder)))
    path.write_text("{")

    def plan() -> None:
        failover.plan_failover(apart.cluster, apart.hosts["host-b"], failover.FailoverOptions())

    with pytest.raises(Refused, match=r"host-a: .*cannot be read.*host-a answers, and may have the newest") as caught:
        plan()
    assert f"mv {apart.cluster.places.lease} " in caught.value.hint
    path.rename(f"{path}.damaged")
    with pytest.raises(Refused, match="the lease is free, and all hosts answer"):
        plan()


@pytest.mark.parametrize("state", ["alive, and its disk or sshd hangs", "off, and only its old connection timed out"])
def test_a_host_that_the_user_has_powered_off_and_that_does_not_answer(apart: Pair, state: str) -> None:
    """One that accepts a new connection is not off, which refuses the failover before anything is changed."""
    apart.take("host-b")
    apart.hosts["host-b"].stuck = True
    apart.hosts["host-b"].accepts = state.startswith("alive")
    before = apart.files()

    def plan(*, shown: bool = False) -> None:
        options = failover.FailoverOptions(fenced=True)
        failover.plan_failover(apart.cluster, apart.hosts["host-a"], options, shown=shown)

    if state.startswith("alive"):
        with pytest.raises(Refused, match="host-b accepts connections"):
            plan()
        with pytest.raises(Refused, match=GOES_ON):  # who only looks learns what would be lost as well
            plan(shown=True)
    else:
        with pytest.raises(Refused, match=GOES_ON):
            plan()
    assert apart.files() == before


def test_a_lease_that_is_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Root of another admin host may have put it there: a pipe, a device, or a file without an end."""
    assert read_file(str(tmp_path / "none")) is None
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "link", "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(str(tmp_path / name))
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(OSError, match=f"more than {MAX_FILE} bytes"):
        read_file(str(tmp_path / "sparse"))
