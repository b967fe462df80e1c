"""When the guard takes the container's port off a bridge without an uplink, and when it puts it back."""

from __future__ import annotations

import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.host.fake import Fake
from appliance.operations.context import open_cluster
from appliance.operations.services import uplink
from appliance.operations.services.uplink import PATIENCE_S, UplinkWatch
from appliance.plan.migration.lease import View
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.tools import carrier
from appliance.tools.apptainer import Instance
from tests.ownnet import own_network
from tests.places import DEBIAN_SITE

PORT = "veth1"


@dataclass
class World:
    """A host's bridge, the other host's lease, and the time. ``live``: ports of the bridge that have a carrier."""

    bridge: str
    live: set[str] = field(default_factory=lambda: {PORT, "ens1"})
    attached: bool = True
    instance: bool = True
    generation: int = 1
    reachable: bool = True
    now: float = 100.0
    queries: int = 0
    events: list[str] = field(default_factory=list)
    learnt: dict[str, View] = field(default_factory=dict)

    @property
    def unreachable(self) -> list[str]:
        return [] if self.reachable else ["host-b"]

    def query(self) -> dict[str, View]:
        self.queries += 1
        mine = View(Lease("c", 1, "host-a", 1.0, "host-a"))
        other = Lease("c", self.generation, "host-a" if self.generation == 1 else "host-b", 1.0, "host-b")
        return {"host-a": mine, "host-b": View(other if self.reachable else None)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(open_cluster(DEBIAN_SITE, tmp_path, Silent()).site.networks.provisioning.bridge)

    def change(_: object, ports: object) -> None:
        found.attached = isinstance(ports, dict)

    def live(bridge: str) -> set[str]:
        return found.live - (set() if found.attached else {PORT}) if bridge == found.bridge else {"ens2"}

    monkeypatch.setattr(uplink, "Leases", lambda *_: found)
    monkeypatch.setattr(uplink, "lock_host", lambda *_: nullcontext())
    monkeypatch.setattr(uplink, "find_instance", lambda *_: Instance("sms", 7, "/i.sif") if found.instance else None)
    monkeypatch.setattr(uplink.ports, "find_ports", lambda *_: {"eth0": PORT})
    monkeypatch.setattr(uplink.ports, "detach", change)
    monkeypatch.setattr(uplink.ports, "attach", change)
    monkeypatch.setattr(uplink.carrier, "live_ports", live)
    monkeypatch.setattr(uplink.carrier, "is_port", lambda *_: found.attached)
    monkeypatch.setattr(uplink.carrier, "exists", lambda _: found.instance)
    monkeypatch.setattr(uplink.time, "monotonic", lambda: found.now)
    return found


def watch(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UplinkWatch:
    cluster = open_cluster(DEBIAN_SITE, tmp_path, Silent())
    monkeypatch.setattr(type(cluster), "places", _Places(str(tmp_path / "uplink")))
    return UplinkWatch(
        cluster,
        Fake({}, name="host-a"),
        lambda event, *_: world.events.append(event),
        lambda name, view: world.learnt.update({name: view}),
    )


@dataclass(frozen=True)
class _Places:
    uplink_mark: str


def lose(world: World, seen: UplinkWatch) -> None:
    seen.check()
    assert world.attached and world.events == []
    world.live = {PORT, "smsvm-p0a1b2c"}
    seen.check()
    assert not world.attached and world.events == ["uplink lost"]
    world.now += 1
    seen.check()
    assert world.events == ["uplink lost"] and world.queries == 0, "it waits for the carrier"


def test_it_is_back_after_the_lease_was_read(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(world, tmp_path, monkeypatch)
    lose(world, seen)
    world.live |= {"ens1"}
    seen.check()
    assert world.attached and world.events == ["uplink lost", "uplink back"] and world.queries == 1
    assert watch(world, tmp_path, monkeypatch).kept_off == {}


def test_it_stays_off_if_another_host_took_over(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(world, tmp_path, monkeypatch)
    lose(world, seen)
    world.live, world.generation = world.live | {"ens1"}, 1002
    for _ in range(3):
        world.now += PATIENCE_S
        seen.check()
    assert not world.attached and world.events == ["uplink lost"]
    assert world.learnt["host-b"].lease == Lease("c", 1002, "host-b", 1.0, "host-b"), "the guard stops the instance"
    world.instance = False
    seen.check()
    assert watch(world, tmp_path, monkeypatch).kept_off == {}


def test_it_waits_for_a_host_that_does_not_answer(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(world, tmp_path, monkeypatch)
    lose(world, seen)
    world.live, world.reachable = world.live | {"ens1"}, False
    seen.check()
    world.now += PATIENCE_S - 1
    seen.check()
    assert not world.attached
    world.live -= {"ens1"}
    seen.check()
    world.live |= {"ens1"}
    world.now += 2
    seen.check()
    assert not world.attached, "the carrier was lost again"
    world.now += PATIENCE_S + 1
    seen.check()
    assert world.attached and world.events[-1] == "uplink back"


def test_a_guard_that_is_started_again_goes_on(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(world, watch(world, tmp_path, monkeypatch))
    seen = watch(world, tmp_path, monkeypatch)
    seen.check()
    assert seen.kept_off == {PORT: world.bridge} and not world.attached
    world.attached = True  # as a migration that was rolled back does
    seen._had_uplink = {world.bridge}
    seen.check()
    assert not world.attached
    (tmp_path / "uplink").write_text('{"veth1"')
    with pytest.raises(SmsError, match="cannot be read"):
        watch(world, tmp_path, monkeypatch)


def test_a_bridge_that_never_had_an_uplink_is_left_alone(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.live = {PORT}
    seen = watch(world, tmp_path, monkeypatch)
    seen.check()
    seen.check()
    assert world.attached and world.events == []


def test_ports_with_a_carrier(tmp_path: Path) -> None:
    for name, state in {"ens1": "1\n", "ens2": "0\n", "ens3": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / "br0" / "brif" / name).mkdir(parents=True)
        if state:
            (tmp_path / name / "carrier").write_text(state)
    assert carrier.live_ports("br0", network=tmp_path) == {"ens1"}
    assert carrier.live_ports("br1", network=tmp_path) == set()
    assert carrier.is_port("br0", "ens3", network=tmp_path) and not carrier.is_port("br0", "x", network=tmp_path)
    assert carrier.exists("ens2", network=tmp_path) and not carrier.exists("x", network=tmp_path)


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
