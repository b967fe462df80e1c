"""A host whose power failed returns, at each moment of a failover and after it: one host serves, with the newest state.

All cases, with their table:

    SMS_MATRIX_OUT=table.md tests/machine .venv/bin/python -m pytest tests/real/migration/test_return.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import give_image
from tests.real.labs import build_image, fresh_lab
from tests.real.moves import CARRIERS, Hosts, Watch
from tests.real.power import power_off, power_on
from tests.real.processes import begin, sms_pids, wait_for_step
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full]

OLD, NEW = CARRIERS
MARK = "/var/lib/this-was-there"
LOCK = "/run/sms/lab.guard.lock"
KINDS = {"own": "/var/lib/sms/overlays", "shared": "/srv/shared/overlays", "mirrored": "/var/lib/sms/overlays"}
DISKS = """
for number in 1 2; do
    disk=/var/lib/sms/disk$number.img
    [ -e $disk ] || { truncate -s 4G $disk; mkfs.ext4 -q $disk; }
    mkdir -p /mnt/disk$number; mount -o loop $disk /mnt/disk$number
done
"""
"""Shell: two disks, which outlive a power failure."""


@dataclass
class World:
    """The lab; the overlay of the case; what became of it."""

    hosts: Hosts
    watch: Watch
    kind: str = "own"
    said: list[str] = field(default_factory=list)
    """Verbs and their exit statuses."""

    def sms(self, *words: str, on: str, ok: tuple[int, ...] | None = (0,)) -> str:
        """Run sms, note its exit status; what it printed."""
        done = self.hosts.sms("-q", *words, on=on, ok=ok)
        self.said.append(f"{words[0]} {self.name(on)}: {done.status}")
        return (done.stdout + done.stderr).decode()

    def name(self, host: str) -> str:
        return "old" if host == OLD else "new"

    def boot(self, host: str, ok: tuple[int, ...] | None = (0,)) -> str:
        """As the unit does at boot."""
        return self.sms("start", "--boot", on=host, ok=ok)

    def boot_again(self, host: str) -> None:
        """As the unit does, which tries again."""
        wait_until(lambda: self.hosts.sms("-q", "start", "--boot", on=host, ok=None).status == 0, f"{host} boots", 90)

    def off(self, host: str) -> None:
        power_off(self.hosts.lab, host)

    def on(self, host: str) -> None:
        """Power, disks, and no sms yet."""
        power_on(self.hosts.lab, host)
        if self.kind == "mirrored" and host == OLD:
            self.hosts.host(host).run("sh", "-c", DISKS)

    def lease(self, host: str) -> dict[str, Any]:
        return self.hosts.lease(host) if self.kind != "shared" else {}

    def has(self, name: str, on: str) -> bool:
        """Whether a file is in the services container."""
        return self.hosts.sms("-q", "exec", "--", "test", "-e", MARK + name, on=on, ok=None).status == 0

    def serving(self) -> list[str]:
        return list(self.watch.serving())

    def fail_over(self) -> None:
        self.sms("failover", NEW, "--i-have-fenced", on=NEW)
        self.hosts.sms("-q", "exec", "--", "touch", f"{MARK}-since", on=NEW)

    def guarded(self, host: str) -> bool:
        there = self.hosts.host(host)
        return there.works("test", "-e", LOCK) and not there.works("flock", "-n", "-s", LOCK, "true")

    def end_guard(self, host: str) -> None:
        """It is killed, so that it writes nothing to the host that returns."""
        wait_until(lambda: self.guarded(host), "its guard")
        self.hosts.host(host).run("sh", "-c", f'kill -KILL "$(cat {LOCK})"')
        wait_until(lambda: not self.guarded(host), "its end")


@pytest.fixture(scope="module")
def lab() -> Iterator[World]:
    """A lab of two admin hosts that have the image."""
    with fresh_lab("t-return", 1) as made:
        hosts = Hosts(made)
        built = build_image(made)
        for host in CARRIERS:
            give_image(hosts, built, host)
        with Watch(made) as watch:
            yield World(hosts, watch)


@pytest.fixture
def world(lab: World, kind: str) -> Iterator[World]:
    """The old host serves; what it has written since the snapshot is on its disk alone. Its power has failed."""
    lab.kind, lab.said = kind, []

    def small(document: dict[str, Any]) -> None:
        document["services"] = ["munge", "chrony"]
        document["overlay"] = {"size_mb": 64, "directory": KINDS[kind]}

    lab.hosts.variant("sms.yaml", small)
    forget(lab)
    if kind == "mirrored":
        lab.hosts.host(OLD).run("sh", "-c", DISKS)
        lab.hosts.sms("-q", "overlay", "create", on=OLD)
        lab.hosts.sms("-q", "overlay", "mirror", "create", "--on", "/mnt/disk1", "--on", "/mnt/disk2", on=OLD)
    lab.hosts.sms("-q", "start", on=OLD)
    lab.hosts.sms("-q", "exec", "--", "touch", MARK, on=OLD)
    lab.hosts.sms("-q", "overlay", "snapshot", on=OLD)
    lab.hosts.sms("-q", "overlay", "push", "--to", NEW, on=OLD)
    lab.hosts.sms("-q", "exec", "--", "touch", f"{MARK}-late", on=OLD)
    lab.watch.twice.clear()
    lab.off(OLD)
    yield lab
    for host in CARRIERS:
        if not Path(f"/proc/{lab.hosts.lab.host(host).pid}").exists():
            lab.on(host)
        lab.hosts.sms("-q", "stop", on=host, ok=None)
    forget(lab)


def forget(world: World) -> None:
    """No state on any host."""
    script = """
    umount /var/lib/sms/overlays/lab.mirror /mnt/disk? 2>/dev/null
    cd /var/lib/sms && rm -rf overlays snapshots disk* journal/lab.* /srv/shared/overlays
    """
    for host in CARRIERS:
        world.hosts.host(host).run("sh", "-c", script)


Order = Callable[[World], str]
"""What happens after the power failure; the host that must serve in the end."""


def before(world: World) -> str:
    """It returns before the failover, which is refused."""
    world.on(OLD)
    world.boot(OLD)
    world.sms("failover", NEW, "--i-have-fenced", on=NEW, ok=(3,))
    assert world.has("-late", OLD)
    return OLD


def end_of(process: subprocess.Popen[bytes]) -> str:
    """What it wrote to stderr; nsenter, which stops when its child does, may do so only after it was continued."""
    for _ in range(120):
        process.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)[1].decode()
    process.kill()
    pytest.fail("the failover has not ended after 120 s")


def during(step: str) -> Order:
    """It returns when the failover has done this step, and is up before the next one."""

    def work(world: World) -> str:
        process = begin(world.hosts, "failover", NEW, "--i-have-fenced", on=NEW)
        wait_for_step(process, step)
        pids = [*sms_pids(process.pid), process.pid]  # nsenter stops when its child does
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        world.on(OLD)
        world.boot(OLD, ok=None)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        said = end_of(process)
        world.said.append(f"failover new: {process.returncode}")
        if process.returncode:
            # It has noticed: the host that was said to be off serves.
            assert process.returncode in (1, 5), said
            world.sms("failover", NEW, "--i-have-fenced", on=NEW, ok=(3,))
            assert world.has("-late", OLD)
            return OLD
        world.hosts.sms("-q", "exec", "--", "touch", f"{MARK}-since", on=NEW)
        return NEW

    return work


def after_unnoticed(world: World) -> str:
    """It returns after the failover; the guard there has not written its lease file."""
    world.fail_over()
    world.end_guard(NEW)
    world.on(OLD)
    assert world.kind == "shared" or world.lease(OLD)["holder"] == OLD
    world.boot(OLD)
    return NEW


def after_noticed(world: World) -> str:
    """It returns after the failover; the guard there writes its lease file before it has started anything."""
    world.fail_over()
    world.on(OLD)
    wait_until(lambda: world.kind == "shared" or world.lease(OLD)["holder"] == NEW, "the guard wrote the lease")
    world.boot(OLD)
    return NEW


def after_a_stop(world: World) -> str:
    """It returns when the new one has been stopped by an administrator."""
    world.fail_over()
    world.sms("stop", on=NEW)
    world.on(OLD)
    world.boot(OLD, ok=None)
    assert world.serving() == []
    world.sms("start", on=NEW)
    return NEW


def new_reboots_first(world: World) -> str:
    """Both were off; the new one boots first."""
    world.fail_over()
    world.off(NEW)
    world.on(NEW)
    world.boot(NEW)
    world.on(OLD)
    world.boot(OLD)
    return NEW


def old_reboots_first(world: World) -> str:
    """It has learned that the other one took over; both were off; it boots first."""
    world.fail_over()
    world.on(OLD)
    wait_until(lambda: world.kind == "shared" or world.lease(OLD)["holder"] == NEW, "the guard wrote the lease")
    world.off(NEW)
    world.off(OLD)
    world.on(OLD)
    world.boot(OLD)
    assert world.serving() == []
    world.on(NEW)
    world.boot(NEW)
    return NEW


def old_reboots_unnoticed(world: World) -> str:
    """It has not learned it; both were off; it boots first, reaches nobody and serves, until the new one is back."""
    world.fail_over()
    world.off(NEW)
    world.on(OLD)
    world.boot(OLD)
    assert world.serving() == ([] if world.kind == "shared" else [OLD])
    world.on(NEW)
    world.boot_again(NEW)
    return NEW


def both_boot(world: World) -> str:
    """It has not learned it; both were off, and boot at once."""
    world.fail_over()
    world.off(NEW)
    world.on(OLD)
    world.on(NEW)
    boots = [begin(world.hosts, "-q", "start", "--boot", on=host) for host in CARRIERS]
    world.said += [f"start {world.name(host)}: {run.wait(180)}" for host, run in zip(CARRIERS, boots, strict=True)]
    if NEW not in world.serving():
        world.boot_again(NEW)
    return NEW


ORDERS: dict[str, Order] = {
    "before the failover": before,
    "during it, snapshot restored": during("restore snapshot"),
    "during it, lease taken": during("take the lease"),
    "during it, instance started": during("start the instance"),
    "after it, before the guard has written the lease": after_unnoticed,
    "after it, the guard has written the lease": after_noticed,
    "after it, the new host was stopped": after_a_stop,
    "both off, the new host boots first": new_reboots_first,
    "both off, the old host boots first": old_reboots_first,
    "both off, the old host boots first, unaware": old_reboots_unnoticed,
    "both off, both boot at once": both_boot,
}
TWO = ("during it, snapshot restored", "both off, the old host boots first, unaware")
"""Here the old host serves before it can know; until its guard has read the other lease both may be on the network."""


def cases() -> Iterator[Any]:
    for kind in KINDS:
        for order in ORDERS:
            if kind == "shared" and "snapshot" in order:
                continue
            yield pytest.param(kind, order, id=f"{kind}, {order}".replace(" ", "_"))


@pytest.mark.parametrize(("kind", "order"), list(cases()))
def test_the_old_host_returns(world: World, kind: str, order: str) -> None:
    serves = ORDERS[order](world)
    wait_until(lambda: world.serving() == [serves] and world.hosts.instances(leaves(serves)) == [], "one serves", 60)
    assert world.watch.twice == [] or order in TWO, world.watch.twice[:3]
    overlap = len(world.watch.twice)
    assert world.has("", serves)
    if serves == NEW:
        assert world.has("-since", NEW) and world.has("-late", NEW) == (kind == "shared")
    became = check_old_overlay(world, serves)
    line = f"| {kind} | {order} | {world.name(serves)} | {', '.join(world.said)} | {became} |"
    print(line, "twice:", overlap)
    if out := os.environ.get("SMS_MATRIX_OUT"):
        with Path(out).open("a") as stream:
            stream.write(f"{line}\n")


def leaves(host: str) -> str:
    """The other one."""
    return OLD if host == NEW else NEW


def check_old_overlay(world: World, serves: str) -> str:
    """The stale overlay is not started; the old host can be used again. What became of it."""
    if serves == OLD:
        return "in use"
    if world.kind == "shared":
        world.hosts.sms("-q", "migrate", "--force", OLD, on=NEW)
        assert world.has("-since", OLD)
        return "in use by the new host"

    def names() -> list[str]:
        return world.hosts.host(OLD).run("sh", "-c", "cd /var/lib/sms/overlays && ls -d lab.img*").text.split()

    if world.kind == "mirrored":
        assert "lab.img" in names()
    else:
        wait_until(lambda: "lab.img" not in names(), "it is set aside", 30)
        assert any(name.startswith("lab.img.past-") for name in names()), names()
    world.hosts.sms("-q", "stop", on=NEW)
    said = world.hosts.sms("start", on=OLD, ok=(3,)).stderr.decode()
    assert f"sms start --host {NEW}" in said
    world.hosts.sms("-q", "start", on=NEW)
    assert world.has("-since", NEW)
    world.hosts.sms("-q", "migrate", "--force", OLD, on=NEW)
    assert world.has("-since", OLD)
    if world.kind == "mirrored":
        assert json.loads(world.hosts.sms("status", "--json", on=OLD, ok=(0, 4)).stdout)["mirror"]["open"]
        return "kept, not started"
    return "set aside"
