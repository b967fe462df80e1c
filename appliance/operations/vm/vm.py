"""What the verbs of the provisioning VM share: where it runs, what is left of an unfinished run, how healthy it is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import only_one
from appliance.plan.vm.holder import HostView, has_disks, read_holder
from appliance.plan.vm.vm import PROGRAMS, cards, machine_name, need_vm, vm_places
from appliance.text import printable
from appliance.tools.guest import open_guest
from appliance.tools.programs import find_missing
from appliance.tools.qemu import Process, find_machine, unplug

HEALTH = "/usr/lib/sms/sms-vm-health"
DISKS = ("root", "state")
PATIENCE_S = 20
"""How long a machine that starts is left alone: each question takes its processor from what starts."""

# $1 disks' folder: goes on with a restore that was cut off. It was written down before it began, and at every moment
# the old disk is in its place or in the snapshot, whole.
FINISH_RESTORE = """
set -e
cd "$1" 2>/dev/null || exit 0
if [ -e restore.json ]; then
    kept=$(cat restore.json)
    case $kept in '' | .* | */*) echo "$1/restore.json names no snapshot" >&2; exit 1 ;; esac
    mkdir -p "snapshots/$kept"
    for disk in root state; do
        [ -e "$disk.restored" ] || continue
        old="snapshots/$kept/$disk.qcow2"
        if [ -e "$disk.qcow2" ] && [ ! -e "$old" ]; then
            ln -T "$disk.qcow2" "$old" 2>/dev/null || {
                cp --sparse=always -T "$disk.qcow2" "$old.new"
                sync "$old.new"
                mv -T "$old.new" "$old"
            }
        fi
        if [ "$disk" = root ] && [ -e root.image ]; then
            cp root.image "snapshots/$kept/root.image"
            rm -f root.image
        fi
        sync -f "snapshots/$kept"
        mv -fT "$disk.restored" "$disk.qcow2"
    done
    [ ! -e root.image.restored ] || mv -fT root.image.restored root.image
    sync -f .
    rm -f restore.json
    echo "$kept"
fi
rm -f -- *.restored *.new *.raw
rm -rf -- snapshots/*.part
"""


@dataclass(frozen=True)
class Health:
    """How the VM is, asked from inside.

    Attributes:
        services: state of each by name; ``ok``, or what is wrong.
        state_used_kib, state_kib: how full its disk is.
        api: what its interface says of itself.
    """

    services: dict[str, str] = field(default_factory=dict)
    state_used_kib: int = 0
    state_kib: int = 0
    api: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything serves."""
        return bool(self.services) and all(state == "ok" for state in self.services.values())

    @property
    def wrong(self) -> str:
        """What does not serve, in words."""
        return ", ".join(f"{name}: {state}" for name, state in self.services.items() if state != "ok")


def read_health(text: str) -> Health:
    """What ``sms-vm-health`` said, as a value. Pure."""
    services: dict[str, str] = {}
    used = size = 0
    api: dict[str, Any] = {}
    # What comes from a machine goes to a terminal: nothing that moves a cursor.
    for line in map(printable, text.split("\n")):
        kind, _, rest = line.partition(" ")
        if kind == "unit":
            name, _, state = rest.partition(" ")
            services[name] = "ok" if state == "active" else state or "unknown"
        elif kind == "state" and (sizes := re.fullmatch(r"([0-9]{1,15}) ([0-9]{1,15})", rest.strip())):
            used, size = int(sizes[1]), int(sizes[2])
        elif kind == "https":
            services["https"] = "ok" if rest.strip() not in ("000", "502", "504", "") else f"no answer ({rest})"
        elif kind == "api":
            code, _, said = rest.partition(" ")
            services["api"] = "ok" if code == "200" else f"no answer ({code})"
            try:
                found = json.loads(said)
            except (ValueError, RecursionError):
                found = {}
            api = found if isinstance(found, dict) and code == "200" else {}
    services["disk"] = "ok" if size else "not mounted"
    return Health(services, used, size, api)


def ask_health(cluster: Cluster, host: Host, *, patience_s: int = 0) -> Health:
    """How the VM is; NotThere where its guest agent does not answer.

    Args:
        patience_s: so long it may take until its services have started.
    """
    with open_guest(host, str(vm_places(cluster.site).guest)) as guest:
        ran = guest.run([HEALTH, str(patience_s)], timeout_s=patience_s + 60)
        return read_health(ran.stdout.decode(errors="replace"))


def find_running(cluster: Cluster, host: Host) -> Process | None:
    """The VM's process on a host; None where it does not run."""
    return find_machine(host, str(vm_places(cluster.site).pid), machine_name(cluster.site))


def view_host(cluster: Cluster, host: Host) -> HostView:
    """What a host knows of the VM."""
    where = vm_places(cluster.site)
    try:
        running = find_running(cluster, host) is not None
        holder = read_holder(host.read(str(where.holder)))
        return HostView(host.name, True, running, holder)
    except Unreachable:
        return HostView(host.name, reachable=False)


def all_hosts(cluster: Cluster, first: Host) -> list[Host]:
    """Every admin host, the one given first."""
    names = [admin.name for admin in cluster.site.admin_hosts if admin.name != first.name]
    return [first, *(cluster.host(name) for name in names)]


def look_everywhere(cluster: Cluster, first: Host) -> list[HostView]:
    """What every admin host knows of the VM, asked at the same time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda host: view_host(cluster, host), all_hosts(cluster, first)))


def find_vm(cluster: Cluster, wanted: str | None) -> Host:
    """The admin host to act on: the one named; else the one that runs the VM, else the one that has its disks.

    Raises:
        Refused: none was named, and no admin host that answers has it.
    """
    need_vm(cluster.site)
    if wanted is not None:
        return cluster.target(wanted)
    hosts = {admin.name: cluster.host(admin.name) for admin in cluster.site.admin_hosts}
    with ThreadPoolExecutor(8) as pool:
        views = list(pool.map(lambda host: view_host(cluster, host), hosts.values()))
    for view in views:
        if view.running:
            return cluster.target(view.name)
    known = [view.holder for view in views if view.holder]
    if known:
        newest = max(known, key=lambda holder: holder.generation).host
        if newest in hosts:
            return cluster.target(newest)
    silent = [view.name for view in views if not view.reachable]
    raise Refused(
        "the VM has not been started on any admin host" + (f"; {', '.join(silent)} cannot be asked" if silent else ""),
        hint="`sms vm start --host NAME`",
    )


@contextmanager
def at_work(cluster: Cluster, host: Host) -> Iterator[None]:
    """Be the only one at work on the VM of a host; Busy where another run is."""
    with only_one(host, str(vm_places(cluster.site).lock), f"another sms is at work on the VM on {host.name}"):
        yield


@contextmanager
def at_work_everywhere(cluster: Cluster, here: Host) -> Iterator[ExitStack]:
    """Be the only one at work on every admin host that answers; closing what is given lets go of all but ``here``.

    All take them in one order: of two that begin at once, one goes on.
    """
    with ExitStack() as own, ExitStack() as others:
        for host in sorted(all_hosts(cluster, here), key=lambda one: one.name):
            try:
                (own if host.name == here.name else others).enter_context(at_work(cluster, host))
            except Unreachable:
                if host.name == here.name:
                    raise
        yield others


def check_programs(host: Host, programs: Sequence[str] = PROGRAMS) -> None:
    """Whether the host has what a VM takes.

    Raises:
        Refused: with all that is missing.
    """
    if missing := find_missing(host, *programs):
        raise Refused(
            f"{host.name} cannot run the VM: it lacks {', '.join(missing)}",
            hint="apt-get install qemu-system-x86 qemu-utils ovmf iproute2 iputils-arping e2fsprogs there",
        )


def tidy_run(cluster: Cluster, host: Host) -> None:
    """Remove what a machine has left on the host that does not run there any more, but nothing of its disks."""
    for card in cards(cluster.site):
        unplug(host, card)
    host.run("rm", "-rf", "--one-file-system", "--", str(vm_places(cluster.site).run))


def tidy_disks(cluster: Cluster, host: Host) -> str:
    """Finish a restore that was cut off, and remove half files. Gives the name under which the old disks are kept.

    To be called by the one who has the disks, with every lock held and nothing running: others may see the folder.
    """
    disks = str(vm_places(cluster.site).disks)
    return host.run("sh", "-c", FINISH_RESTORE, "finish", disks, timeout=4 * 3600).text


def tidy(cluster: Cluster, host: Host) -> str:
    """As ``tidy_run``; and ``tidy_disks`` where this host has the disks and nobody runs the VM from them."""
    tidy_run(cluster, host)
    return tidy_disks(cluster, host) if has_disks(host.name, look_everywhere(cluster, host)) else ""


def wait_for_health(cluster: Cluster, host: Host, process: Process, wait_s: float, on_detail: Any) -> Health:
    """Wait until everything in the VM serves.

    Raises:
        SmsError: it ended, or something did not come up in time.
    """
    deadline = time.monotonic() + wait_s
    health = Health()
    why = "the guest agent does not answer"
    while True:
        try:
            health = ask_health(cluster, host, patience_s=PATIENCE_S)
            why = health.wrong
        except SmsError as error:
            why = error.message.strip().rpartition("\n")[2] or "the guest agent"
        if health.ok:
            return health
        on_detail(f"waiting for {why}")
        found = find_running(cluster, host)
        if found is None or found.pid != process.pid:
            raise SmsError("the VM has ended while it started", hint="`sms vm console --log` has its last words")
        if time.monotonic() > deadline:
            raise SmsError(
                f"the VM does not serve after {wait_s:g} s: {why}",
                hint="--wait 20m gives it longer; --keep leaves it running, for `sms vm exec -- journalctl -b`",
            )
        time.sleep(0.5)
