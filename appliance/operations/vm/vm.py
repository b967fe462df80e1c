"""Shared by the verbs of the provisioning VM: where it runs, cleanup after interrupted runs, health checks, locks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.plan.vm.holder import HostView, has_disks, newest_holder, read_holder, running_host
from appliance.plan.vm.vm import PROGRAMS, VmPlaces, cards, machine_name, need_vm
from appliance.shared.records import RecordError
from appliance.text import printable
from appliance.tools.guest import open_guest
from appliance.tools.programs import find_missing
from appliance.tools.qemu import Process, find_machine, unplug
from appliance.tools.scripts import script_argv

HEALTH = "/usr/lib/sms/sms-vm-health"
DISKS = ("root", "state")
STARTUP_WAIT_S = 20
"""How long one health check waits in the VM: frequent checks would slow down services that start."""


@dataclass(frozen=True)
class Health:
    """Health of the VM, collected by a program in it.

    Attributes:
        services: state of each by name; ``ok``, or the problem.
        state_used_kib, state_kib: used and total space of its state disk.
        api: health document of its HTTP interface.
    """

    services: dict[str, str] = field(default_factory=dict)
    state_used_kib: int = 0
    state_kib: int = 0
    api: Mapping[str, object] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all services are healthy."""
        return bool(self.services) and all(state == "ok" for state in self.services.values())

    @property
    def failures(self) -> str:
        """The unhealthy services with their states, as text."""
        return ", ".join(f"{name}: {state}" for name, state in self.services.items() if state != "ok")


def read_health(text: str) -> Health:
    """Parse the output of ``sms-vm-health``. Pure."""
    services: dict[str, str] = {}
    used = size = 0
    disk = "not mounted"
    api: Mapping[str, object] = {}
    # The output is shown on a terminal: it must not contain control characters.
    for line in map(printable, text.split("\n")):
        kind, _, rest = line.partition(" ")
        if kind == "unit":
            name, _, state = rest.partition(" ")
            services[name] = "ok" if state == "active" else state or "unknown"
        elif kind == "state" and (sizes := re.fullmatch(r"([0-9]{1,15}) ([0-9]{1,15})( ro)?", rest.strip())):
            used, size = int(sizes[1]), int(sizes[2])
            disk = "read-only: its file system is damaged" if sizes[3] else "ok"
        elif kind == "https":
            services["https"] = "ok" if rest.strip() not in ("000", "502", "504", "") else f"no answer ({rest})"
        elif kind == "api":
            code, _, body = rest.partition(" ")
            services["api"] = "ok" if code == "200" else f"no answer ({code})"
            try:
                found = json.loads(body)
            except (ValueError, RecursionError):
                found = {}
            api = found if isinstance(found, dict) and code == "200" else {}
    services["disk"] = disk
    return Health(services, used, size, api)


def query_health(cluster: Cluster, host: Host, *, startup_wait_s: int = 0) -> Health:
    """Return the health of the VM.

    Args:
        startup_wait_s: how long to wait in the VM until its services have started.

    Raises:
        NotResponding: its guest agent does not answer.
    """
    with open_guest(host, str(VmPlaces(cluster.site).guest)) as guest:
        ran = guest.run([HEALTH, str(startup_wait_s)], timeout_s=startup_wait_s + 60)
        return read_health(ran.stdout.decode(errors="replace"))


def find_running(cluster: Cluster, host: Host) -> Process | None:
    """Return the VM's process on a host; None if it does not run there."""
    return find_machine(host, str(VmPlaces(cluster.site).pid), machine_name(cluster.site))


def view_host(cluster: Cluster, host: Host) -> HostView:
    """Return whether the VM runs on a host, and the host's record of who has the disks.

    Raises:
        Refused: that record is invalid.
    """
    where = VmPlaces(cluster.site)
    try:
        running = find_running(cluster, host) is not None
        holder = read_holder(host.read(str(where.holder)))
        return HostView(host.name, True, running, holder)
    except Unreachable:
        return HostView(host.name, reachable=False)
    except RecordError as error:
        raise Refused(
            f"the record of which host has the VM's disks, {where.holder} on {host.name}, is invalid: {error}",
            hint="write the one of another host there, or remove it where the VM's disks are old",
        ) from None


def all_hosts(cluster: Cluster, first: Host) -> list[Host]:
    """Return every admin host, ``first`` at the front."""
    names = [admin.name for admin in cluster.site.admin_hosts if admin.name != first.name]
    return [first, *(cluster.host(name) for name in names)]


def view_hosts(cluster: Cluster, first: Host) -> list[HostView]:
    """Return the view of every admin host, queried in parallel."""
    with cluster.env.pool(8) as pool:
        return list(pool.map(lambda host: view_host(cluster, host), all_hosts(cluster, first)))


def find_vm(cluster: Cluster, name: str | None) -> Host:
    """Return the admin host to act on: the named one, else the one that runs the VM, else the one that has its disks.

    Raises:
        Refused: no host was named, and no reachable admin host has the VM.
    """
    need_vm(cluster.site)
    if name is not None:
        return cluster.target(name)
    views = view_hosts(cluster, cluster.host(cluster.site.admin_hosts[0].name))
    if running := running_host(views):
        return cluster.target(running)
    newest = newest_holder(views)
    if newest and newest.holder in {view.name for view in views}:
        return cluster.target(newest.holder)
    silent = [view.name for view in views if not view.reachable]
    raise Refused(
        "the VM was never started on any admin host" + (f"; {', '.join(silent)} is unreachable" if silent else ""),
        hint="`sms vm start --host NAME`",
    )


@contextmanager
def lock_vm_everywhere(cluster: Cluster, here: Host) -> Iterator[ExitStack]:
    """Hold the VM's lock on every reachable admin host. Closing the yielded stack releases all but that of ``here``.

    Every run takes the locks in the same order: of two concurrent runs, one proceeds.

    Raises:
        Busy: another run holds a lock.
    """
    path = str(VmPlaces(cluster.site).lock)
    with ExitStack() as own, ExitStack() as others:
        for host in sorted(all_hosts(cluster, here), key=lambda one: one.name):
            try:
                lock = cluster.env.locks.hold(host, path, f"another sms is at work on the VM on {host.name}")
                (own if host.name == here.name else others).enter_context(lock)
            except Unreachable:
                if host.name == here.name:
                    raise
        yield others


def check_programs(host: Host, programs: Sequence[str] = PROGRAMS) -> None:
    """Check that the host has the programs that the VM needs.

    Raises:
        Refused: programs are missing; names all of them.
    """
    if missing := find_missing(host, *programs):
        raise Refused(
            f"{host.name} cannot run the VM: {', '.join(missing)} not found",
            hint=f"on {host.name}: apt-get install qemu-system-x86 qemu-utils ovmf iproute2 iputils-arping e2fsprogs",
        )


def tidy_run(cluster: Cluster, host: Host) -> None:
    """Remove the taps and the run folder of a machine that no longer runs on the host. Its disks are not touched."""
    for card in cards(cluster.site):
        unplug(host, card)
    host.run("rm", "-rf", "--one-file-system", "--", str(VmPlaces(cluster.site).run))


def finish_restore(host: Host, where: VmPlaces) -> str:
    """Complete an interrupted restore, and remove partial files. Returns the snapshot that keeps the old disks.

    Call it only on the host that has the disks, with every lock held and no machine running: other hosts may share the
    folder.
    """
    return host.run(*script_argv("vm-finish-restore", str(where.disks)), timeout=4 * 3600).text


def tidy(cluster: Cluster, host: Host) -> str:
    """Call ``tidy_run``, and ``finish_restore`` if this host has the disks and no host runs the VM."""
    tidy_run(cluster, host)
    return finish_restore(host, VmPlaces(cluster.site)) if has_disks(host.name, view_hosts(cluster, host)) else ""


def wait_for_health(cluster: Cluster, host: Host, process: Process, wait_s: float, on_detail: Any) -> Health:
    """Wait until all services in the VM are healthy.

    Raises:
        SmsError: the VM ended, or a service is not healthy in time.
    """
    deadline = cluster.env.clock.monotonic() + wait_s
    health = Health()
    why = "the guest agent does not answer"
    while True:
        try:
            health = query_health(cluster, host, startup_wait_s=STARTUP_WAIT_S)
            why = health.failures
        except SmsError as error:
            why = error.message.strip().rpartition("\n")[2] or "the guest agent"
        if health.ok:
            return health
        on_detail(f"waiting for {why}")
        found = find_running(cluster, host)
        if found is None or found.pid != process.pid:
            raise SmsError("the VM ended during its start", hint="`sms vm console --log` shows its last output")
        if cluster.env.clock.monotonic() > deadline:
            raise SmsError(
                f"the VM is not healthy after {wait_s:g} s: {why}",
                hint="--wait 20m waits longer; --keep leaves it running, for `sms vm exec -- journalctl -b`",
            )
        cluster.env.clock.sleep(0.5)
