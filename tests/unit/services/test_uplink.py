"""When the guard takes the container's port off a bridge without an uplink, and when it puts it back."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.host.base import CommandError, Result, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.lease import QUERY
from appliance.operations.services.uplink import CALM_S, FLAP_S, INSTANCE_INTERVAL_S, PATIENCE_S, UplinkWatch
from appliance.operations.under_way import mark_path
from appliance.plan.machine import Places
from appliance.plan.migration.lease import View
from appliance.shared.lease import Lease
from appliance.shared.locks import hold_lock
from appliance.shared.migration import MoveMark
from appliance.shared.records import to_json
from appliance.tools import carrier
from appliance.tools.apptainer import Instance
from tests.ownnet import own_network
from tests.pairs import HostInFolder, Pair
from tests.sites import open_debian
from tests.support.env import FakeClock, FakeHosts
from tests.waiting import wait_until

PORT = "veth1"


@dataclass
class World:
    """A host's bridge, the other host's lease, and the time. ``live``: ports of the bridge that have a carrier.

    ``current``: whether the guard has just read the leases. ``superseded``: it knows that another host has taken over.
    ``elsewhere``: an admin host has the services beside which this is only what stays. ``gone``: the first process of
    the instance, ``pid``, has no network any more.
    """

    bridge: str
    live: set[str] = field(default_factory=lambda: {PORT, "ens1"})
    attached: bool = True
    instance: bool = True
    generation: int = 1
    reachable: bool = True
    current: bool = False
    superseded: bool = False
    elsewhere: bool = False
    clock: FakeClock = field(default_factory=lambda: FakeClock(100.0))
    pid: int = 7
    gone: bool = False
    queries: int = 0
    events: list[str] = field(default_factory=list)
    learnt: dict[str, View] = field(default_factory=dict)

    def learn(self, name: str, view: View) -> None:
        self.learnt[name] = view

    def is_current(self) -> bool:
        return self.current

    def newer(self) -> Lease | None:
        return Lease("sample", 1002, "host-b", 1.0, "host-b") if self.superseded else None

    def may_return(self) -> bool:
        return not self.elsewhere

    def lease(self, name: str) -> Lease:
        """Return the lease in the file of a host."""
        if name == "host-a":
            return Lease("sample", 1, "host-a", 1.0, "host-a")
        return Lease("sample", self.generation, "host-a" if self.generation == 1 else "host-b", 1.0, "host-b")


LINKS = {
    "inside": [{"ifname": "eth0", "ifindex": 2, "link_index": 5}],
    "host": [{"ifname": PORT, "ifindex": 5, "link_index": 2}],
}


class Watched(HostInFolder):
    """A host of the world; ``own``: its lease files are its own."""

    def __init__(self, name: str, folder: Path, world: World, *, own: bool) -> None:
        super().__init__(name, folder)
        self.world = world
        self.own = own

    def run(self, *argv: str, **options: Any) -> Result:
        world = self.world
        self.instances = [Instance("sms-sample", world.pid, "/i.sif")] if world.instance else []
        if argv[-1] == "link":
            if world.gone and argv[0] == "nsenter":
                raise CommandError(Result(self.name, argv, 1, b"", b"nsenter: cannot open /proc/7/ns/net"))
            shown = json.dumps(LINKS["inside" if argv[0] == "nsenter" else "host"])
        elif argv[:1] == ("ip",):
            world.attached, shown = b" nomaster" not in options["input"], ""
        elif argv[2:3] == (QUERY,) and not self.own:
            world.queries += self.name == "host-a"
            if self.name == "host-b" and not world.reachable:
                raise Unreachable("host-b: no route to host")
            shown = f"0 file\n{world.lease(self.name).text().decode()}"
        else:
            return super().run(*argv, **options)
        return Result(self.name, argv, 0, shown.encode(), b"")


@dataclass(frozen=True)
class AtHand(Cluster):
    """A cluster whose lock and mark are in a folder of the test."""

    folder: Path = Path()

    @property
    def places(self) -> Places:
        found = super().places
        found.uplink_mark, found.lock = PurePosixPath(self.folder / "uplink"), PurePosixPath(self.folder / "lock")
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(open_debian(tmp_path).site.networks.provisioning.bridge)

    def has_uplink(bridge: str, _: str) -> bool:
        return bridge != found.bridge or "ens1" in found.live

    # The interfaces of this machine, of which tests have none.
    monkeypatch.setattr(carrier, "has_uplink", has_uplink)
    monkeypatch.setattr(carrier, "is_port", lambda *_: found.attached)
    monkeypatch.setattr(carrier, "exists", lambda _: found.instance)
    return found


def watch(world: World, tmp_path: Path, *, own: bool = False) -> UplinkWatch:
    pair = Pair(tmp_path, shared=False, clock=world.clock)
    hosts = {name: Watched(name, host.folder, world, own=own) for name, host in pair.hosts.items()}
    made = pair.cluster
    env = replace(made.env, hosts=FakeHosts(hosts))
    cluster = AtHand(made.site, made.services, made.base, env=env, folder=tmp_path)
    return UplinkWatch(cluster, hosts["host-a"], lambda event, *_: world.events.append(event), world)


def lose(world: World, seen: UplinkWatch) -> None:
    seen.check()
    assert world.attached and world.events == []
    world.live = {PORT, "smsvm-p0a1b2c"}
    seen.check()
    assert not world.attached and world.events == ["uplink lost"]
    world.clock.now += 1
    seen.check()
    assert world.events == ["uplink lost"] and world.queries == 0, "it waits for the carrier"


def test_it_is_back_after_the_lease_was_read(world: World, tmp_path: Path) -> None:
    seen = watch(world, tmp_path)
    lose(world, seen)
    world.live |= {"ens1"}
    seen.check()
    assert world.attached and world.events == ["uplink lost", "uplink back"] and world.queries == 1
    assert watch(world, tmp_path).kept_off == {}


def test_it_stays_off_if_another_host_took_over(world: World, tmp_path: Path) -> None:
    seen = watch(world, tmp_path)
    lose(world, seen)
    world.live, world.generation = world.live | {"ens1"}, 1002
    for _ in range(3):
        world.clock.now += PATIENCE_S
        seen.check()
    assert not world.attached and world.events == ["uplink lost"]
    assert world.learnt["host-b"].lease == Lease("sample", 1002, "host-b", 1.0, "host-b"), (
        "the guard stops the instance"
    )
    world.instance = False
    seen.check()
    assert watch(world, tmp_path).kept_off == {}


def test_what_stays_is_kept_off_while_an_admin_host_has_all_services(world: World, tmp_path: Path) -> None:
    """Its own lease is as before: the lease of the whole is the one that was taken meanwhile."""
    seen = watch(world, tmp_path)
    lose(world, seen)
    world.live, world.elsewhere = world.live | {"ens1"}, True
    for _ in range(3):
        world.clock.now += PATIENCE_S
        seen.check()
    assert not world.attached and world.events == ["uplink lost"]


def test_another_hosts_file_that_is_no_lease_counts_as_unread(world: World, tmp_path: Path) -> None:
    pair = Pair(tmp_path, shared=False)
    pair.take("host-a")
    (lease,) = (tmp_path / "host-b").rglob("*.lease")
    lease.write_bytes(b"\0" * 200)
    seen = watch(world, tmp_path, own=True)
    lose(world, seen)
    world.live |= {"ens1"}
    seen.check()
    assert not world.attached and list(world.learnt) == ["host-a"]
    world.clock.now += PATIENCE_S + 1
    seen.check()
    assert world.attached and world.events[-1] == "uplink back"


def test_it_waits_for_a_host_that_does_not_answer(world: World, tmp_path: Path) -> None:
    seen = watch(world, tmp_path)
    lose(world, seen)
    world.live, world.reachable = world.live | {"ens1"}, False
    seen.check()
    world.clock.now += PATIENCE_S - 1
    seen.check()
    assert not world.attached
    world.live -= {"ens1"}
    seen.check()
    world.live |= {"ens1"}
    world.clock.now += 2
    seen.check()
    assert not world.attached, "the carrier was lost again"
    world.clock.now += PATIENCE_S + 1
    seen.check()
    assert world.attached and world.events[-1] == "uplink back"


def test_a_guard_that_is_started_again_goes_on(world: World, tmp_path: Path) -> None:
    lose(world, watch(world, tmp_path))
    seen = watch(world, tmp_path)
    seen.check()
    assert seen.kept_off == {PORT: world.bridge} and not world.attached
    world.attached = True  # as a migration that was rolled back does
    seen._seen = {world.bridge: world.clock.now}
    seen.check()
    assert not world.attached
    (tmp_path / "uplink").write_text('{"veth1"')
    with pytest.raises(SmsError, match="cannot be read"):
        watch(world, tmp_path)


def test_a_bridge_that_never_had_an_uplink_is_left_alone(world: World, tmp_path: Path) -> None:
    world.live = {PORT}
    seen = watch(world, tmp_path)
    seen.check()
    seen.check()
    assert world.attached and world.events == []


def test_ports_with_a_carrier(tmp_path: Path) -> None:
    for name, state in {"ens1": "1\n", "ens2": "0\n", "ens3": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / "br0" / "brif" / name).mkdir(parents=True)
        if state:
            (tmp_path / name / "carrier").write_text(state)
    assert carrier.has_uplink("br0", "ens3", network=tmp_path)
    assert not carrier.has_uplink("br0", "ens1", network=tmp_path) and not carrier.has_uplink(
        "br1", "", network=tmp_path
    )
    assert carrier.is_port("br0", "ens3", network=tmp_path) and not carrier.is_port("br0", "x", network=tmp_path)
    assert carrier.has_uplink("ens1", "eth0@7", network=tmp_path), "the parent of a macvlan interface"
    assert not carrier.has_uplink("ens2", "eth0@7", network=tmp_path)
    assert carrier.exists("ens2", network=tmp_path) and not carrier.exists("x", network=tmp_path)


@pytest.mark.parametrize("real", ["device", "bonding", "lower_ens9"])
def test_ports_of_guests_are_no_uplinks(tmp_path: Path, real: str) -> None:
    """A virtual machine's tap and another container's veth have a carrier when the cable is out."""

    def add(name: str, state: str, *marks: str) -> None:
        for path in (tmp_path / name, tmp_path / "br0" / "brif" / name, *(tmp_path / name / mark for mark in marks)):
            path.mkdir(parents=True)
        (tmp_path / name / "carrier").write_text(state)

    add("tap0", "1", "tun_flags")
    add(PORT, "1")
    assert not carrier.has_uplink("br0", PORT, network=tmp_path)
    add("veth9", "1")
    assert carrier.has_uplink("br0", PORT, network=tmp_path), "a bridge without a network card, as in a lab"
    add("up0", "0", real)
    assert not carrier.has_uplink("br0", PORT, network=tmp_path)
    (tmp_path / "up0" / "carrier").write_text("1")
    assert carrier.has_uplink("br0", PORT, network=tmp_path)


def flap(world: World, seen: UplinkWatch, *, seconds: float) -> None:
    """The carrier is lost 0.1 s after the last check, and back later; without the guard being woken in between."""
    seen.check()
    world.clock.now += 0.1
    world.live -= {"ens1"}
    seen.check()
    assert not world.attached
    world.clock.now += seconds
    world.live |= {"ens1"}
    seen.check()


def test_after_a_moment_it_is_back_at_once(world: World, tmp_path: Path) -> None:
    """Also while another admin host is off; the leases are read all the same."""
    seen = watch(world, tmp_path)
    world.current, world.reachable = True, False
    flap(world, seen, seconds=0.2)
    assert world.attached and world.events == ["uplink lost", "uplink back"]
    wait_until(lambda: "host-a" in world.learnt, "the reads", 5)
    world.clock.now += 10
    flap(world, seen, seconds=0.2)
    assert not world.attached, "the link is not calm"
    world.reachable = True
    seen.check()
    assert world.attached
    world.clock.now += CALM_S
    flap(world, seen, seconds=0.2)
    assert world.attached
    world.clock.now += CALM_S
    world.reachable = False
    flap(world, seen, seconds=FLAP_S)
    assert not world.attached, "long enough for a failover"


def test_a_moment_is_counted_from_when_the_uplink_was_seen(world: World, tmp_path: Path) -> None:
    """The guard could not take the port off for long."""
    seen = watch(world, tmp_path)
    world.current, world.reachable = True, False
    seen.check()
    world.clock.now += 10
    world.live -= {"ens1"}
    seen.check()
    world.live |= {"ens1"}
    seen.check()
    assert not world.attached


def test_it_does_not_wait_for_another_sms(world: World, tmp_path: Path) -> None:
    """`sms restart` has the lock of the host while it waits for a service; a migration, while it copies."""
    seen = watch(world, tmp_path)
    with hold_lock(str(tmp_path / "lock")):
        lose(world, seen)
        world.live |= {"ens1"}
        seen.check()
    assert world.attached and world.events == ["uplink lost", "uplink back"]


def test_a_port_that_is_not_on_the_bridge_is_not_put_there(world: World, tmp_path: Path) -> None:
    """A migration has taken it off, or it is that of an isolated instance."""
    seen = watch(world, tmp_path)
    seen.check()
    world.live, world.attached = {PORT}, False
    seen.check()
    world.live |= {"ens1"}
    seen.check()
    assert not world.attached and world.events == [] and seen.kept_off == {}


@pytest.mark.parametrize(
    ("side", "state", "at_work", "back"),
    [
        ("leave", "read", True, True),
        ("leave", "stopping", True, True),
        ("leave", "released", True, False),
        ("leave", "released", False, False),
        ("leave", "given", True, False),
        ("arrive", "started", False, False),
        ("arrive", "up", True, False),
        ("arrive", "up", False, True),
        ("", "", False, False),
    ],
)
def test_it_attaches_no_port_that_a_migration_moves(
    world: World, tmp_path: Path, side: str, state: str, at_work: bool, back: bool
) -> None:
    """``at_work``: its agent runs, and has the lock of the host; else it was killed."""
    seen = watch(world, tmp_path)
    lose(world, seen)
    world.live |= {"ens1"}
    assert isinstance(seen.host, Watched)
    mark = Path(seen.host.path(mark_path(seen.cluster)))
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_bytes(to_json(MoveMark(side, state, 7, {})) if side else b"{")
    with ExitStack() as stack:
        if at_work:
            stack.enter_context(hold_lock(str(tmp_path / "lock")))
        seen.check()
        assert world.attached == back
    mark.unlink()
    seen.check()
    assert world.attached


def test_it_stays_off_once_the_guard_knows_that_another_host_took_over(world: World, tmp_path: Path) -> None:
    """The guard has disconnected the instance, and stops it once it has the lock of the host."""
    seen = watch(world, tmp_path)
    world.current = True
    seen.check()
    world.live -= {"ens1"}
    seen.check()
    world.superseded = True
    world.live |= {"ens1"}
    seen.check()
    assert not world.attached


def test_a_moment_counts_only_if_the_leases_were_known(world: World, tmp_path: Path) -> None:
    seen = watch(world, tmp_path)
    world.reachable = False
    flap(world, seen, seconds=0.2)
    assert not world.attached


def test_an_instance_that_ended_meanwhile_is_not_an_error(world: World, tmp_path: Path) -> None:
    """At a stop, its first process is a zombie for a moment: it has no network any more."""
    with subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        seen = watch(world, tmp_path)
        world.gone, world.pid = True, zombie.pid
        seen.check()
    world.clock.now += INSTANCE_INTERVAL_S
    world.pid = os.getpid()
    with pytest.raises(CommandError):
        seen.check()


def test_a_change_of_an_interface_wakes_it() -> None:
    with own_network([]), carrier.link_events() as wait:
        wait(0.2)
        began = time.monotonic()
        wait(0.3)
        assert time.monotonic() - began > 0.25
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        began = time.monotonic()
        wait(30)
        assert time.monotonic() - began < 5
