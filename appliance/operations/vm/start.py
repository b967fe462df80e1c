"""``sms vm start``: image checked, disks made, seed handed over, machine started, and everything in it serves."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.site import ca
from appliance.operations.vm.client import tls_folder
from appliance.operations.vm.image import VmImage, deliver_vm
from appliance.operations.vm.vm import (
    Health,
    at_work_everywhere,
    check_programs,
    find_running,
    look_everywhere,
    tidy,
    tidy_disks,
    tidy_run,
    wait_for_health,
)
from appliance.plan.vm.holder import Holder, HostView, may_start
from appliance.plan.vm.note import VmNote
from appliance.plan.vm.vm import (
    BESIDE_MB,
    FIRMWARE,
    VARIABLES,
    Launch,
    cards,
    need_vm,
    qemu_argv,
    seed_archive,
    vm_places,
)
from appliance.progress import Progress
from appliance.shared.records import RecordError, from_json, to_json
from appliance.tools import bridge, qemu
from appliance.tools.guest import open_guest
from appliance.tools.space import query_space

ROOM_BYTES = 256 << 20
"""Free space that a start wants to see: the machine's root and its journal grow."""
WAIT_S, WAIT_TCG_S = 180.0, 600.0
"""How long a start may take, with KVM and without."""
NUMBERS = """
awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo
stat -f -c %T /run
"""
# In the VM, the seed on standard input. sms-provd reads the issuer each time that it vouches for a node.
TAKE_TLS = """
set -e
umask 077
tar -x -f - -C / --no-overwrite-dir --same-owner --same-permissions etc/sms/tls
systemctl reload nginx
"""


@dataclass
class StartedVm:
    """What a start did, and how long each part took, in seconds."""

    host: str
    accel: str
    why_no_kvm: str
    image: str
    digest: str
    signer: str
    generation: int
    already: bool = False
    fresh_state: bool = False
    fresh_root: bool = False
    issuer_ends: float = 0
    services: dict[str, str] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class How:
    """How to start, as the caller wants it.

    Attributes:
        wait_s: how long it may take to serve; by what runs it where that is 0.
        image: the key of another image than the current one.
    """

    wait_s: float = 0
    keep: bool = False
    force: bool = False
    image: str = ""


def start_vm(cluster: Cluster, host: Host, progress: Progress, how: How | None = None) -> StartedVm:
    """Start the VM on ``host`` and wait until everything in it serves.

    Raises:
        Refused: something is missing or in the way; nothing was changed.
        RolledBack: a step failed, and all before it was undone.
    """
    how = how or How()
    need_vm(cluster.site)
    check_programs(host)
    with at_work_everywhere(cluster, host) as others:
        if process := find_running(cluster, host):
            others.close()
            return _already(cluster, host, progress, process, how)
        tidy_run(cluster, host)
        views = look_everywhere(cluster, host)
        holder = _decide(cluster, host, views, how)
        check_host(cluster, host, progress)
        image = deliver_vm(cluster, host, progress, chosen=how.image)
        started = StartedVm(host.name, "", "", image.path, image.digest, image.signer, holder.generation)
        started.accel, started.why_no_kvm = qemu.probe_accel(host)
        with ExitStack() as undo:
            try:
                _run(cluster, host, progress, how, image, holder, started, undo, others)
            except BaseException as error:
                console = f"{host.name}:{vm_places(cluster.site).console_failed}" if "boot" in started.parts else ""
                raise _undone(error, undo, console) from error
            undo.pop_all()
    return started


def rehearse_start_vm(cluster: Cluster, host: Host, progress: Progress, how: How | None = None) -> list[str]:
    """Check all that a start checks, but the image of another host that would be sent first; say what it would do.

    Raises:
        Refused: as a start would.
    """
    how = how or How()
    check_programs(host)
    if find_running(cluster, host):
        return [f"the VM runs on {host.name} already: nothing"]
    holder = _decide(cluster, host, look_everywhere(cluster, host), how)
    check_host(cluster, host, progress)
    accel, why = qemu.probe_accel(host)
    where, wanted = vm_places(cluster.site), need_vm(cluster.site)
    steps = [f"write down that {host.name} has the disks, generation {holder.generation}"]
    if not host.works("test", "-e", str(where.state)):
        steps.append(f"make the state's disk of {wanted.disk_mb} MiB")
    steps += [f"plug {card.tap} into {card.bridge}" for card in cards(cluster.site)]
    return [*steps, f"start QEMU with {accel}" + (f" ({why})" if why else "")]


def _decide(cluster: Cluster, host: Host, views: list[HostView], how: How) -> Holder:
    """The record to write down; Refused where the disks are elsewhere."""
    known = [view.holder for view in views if view.holder]
    newest = max(known, key=lambda one: one.generation, default=None)
    shared = False
    if newest and newest.host != host.name:
        shared = shares_disks(cluster, host, newest.host)
    return may_start(host.name, views, shared=shared, force=how.force)


def shares_disks(cluster: Cluster, host: Host, other: str) -> bool:
    """Whether both hosts see one folder of disks: what one writes there the other reads."""

    path = f"{vm_places(cluster.site).disks}/.sms-shared-{time.time_ns()}"
    try:
        there = cluster.host(other)
        there.run("sh", "-c", 'umask 077; mkdir -p "$(dirname "$1")"; echo "$1" >"$1"', "probe", path)
    except SmsError:
        return False
    try:
        return host.works("test", "-e", path)
    finally:
        there.remove(path)


def check_host(cluster: Cluster, host: Host, progress: Progress) -> None:
    """Whether the host can run the VM, and nobody has its addresses.

    Raises:
        Refused: with all that is in the way.
    """
    check_target(cluster, host, progress)
    taken = bridge.taken(host, {card.bridge: card.address for card in cards(cluster.site)})
    if taken:
        who = "; ".join(f"{address} is taken, by {mac}" for address, mac in taken.items())
        raise Refused(who, hint="does another machine have it, or does the VM run on a host that is not asked?")


def check_target(cluster: Cluster, host: Host, progress: Progress) -> None:
    """Whether the host has bridges, memory, room and firmware.

    Raises:
        Refused: with all that is in the way.
    """
    wanted, where = need_vm(cluster.site), vm_places(cluster.site)
    with progress.step(f"check {host.name}"):
        problems = []
        for card in cards(cluster.site):
            ports = bridge.bridge_ports(host, card.bridge)
            if ports is None:
                problems.append(f"there is no bridge {card.bridge} that is up (`sms host prepare {host.name}`)")
            elif not ports:
                problems.append(f"bridge {card.bridge} has no port that is up: the VM would stand alone")
        memory, kind = host.run("sh", "-c", NUMBERS).text.split()
        free = query_space(host, str(where.disks)).free
        if int(memory) < wanted.memory_mb + BESIDE_MB:
            problems.append(f"{memory} MiB of memory are free, {wanted.memory_mb + BESIDE_MB} are needed")
        if free < ROOM_BYTES:
            problems.append(f"{free >> 20} MiB are free where its disks lie, {ROOM_BYTES >> 20} are needed")
        if kind not in ("tmpfs", "ramfs"):
            problems.append(f"/run is on {kind}: keys would come onto a disk")
        problems += [
            f"there is no firmware {path} (package ovmf)"
            for path in (FIRMWARE, VARIABLES)
            if not host.works("test", "-f", path)
        ]
        if problems:
            raise Refused(f"{host.name} cannot run the VM: {'; '.join(problems)}", hint=_hint(problems, host.name))


def _hint(problems: list[str], name: str) -> str:
    text = " ".join(problems)
    if "memory" in text:
        return "lower provisioning.memory_mb, or start it on another admin host"
    if "bridge" in text:
        return f"`sms doctor --host {name}` tells what mends it"
    return "make room, or name another folder as provisioning.directory" if "free where" in text else ""


def _already(cluster: Cluster, host: Host, progress: Progress, process: qemu.Process, how: How) -> StartedVm:
    """It runs here: a start that was cut off goes on, one that ended well is only asked."""
    where = vm_places(cluster.site)
    host.remove(str(where.seed))
    with progress.step("ask the VM that runs already") as step:
        written = read_note(cluster, host)
        health = _wait(cluster, host, process, how, written.accel, step.detail)
    if health.ok and issuer_days(written) < ca.ISSUER_SOON_DAYS:
        with progress.step("give it new certificates"):
            written = replace(written, issuer_ends=renew_certificates(cluster, host))
            host.write(str(where.note), to_json(written), mode=0o600)
    return StartedVm(
        host.name,
        written.accel,
        written.why,
        written.image,
        written.digest,
        written.signer,
        written.generation,
        already=True,
        issuer_ends=written.issuer_ends,
        services=health.services,
    )


def read_note(cluster: Cluster, host: Host) -> VmNote:
    """What was written down at the last start; empty where nothing readable is."""
    try:
        return from_json(VmNote, host.read(str(vm_places(cluster.site).note)) or b"{}")
    except RecordError:
        return VmNote()


def issuer_days(written: VmNote) -> int:
    """Whole days that the VM may still vouch for nodes, by what was written down at its start."""
    return int((written.issuer_ends - time.time()) // 86400) if written.issuer_ends else 0


def renew_certificates(cluster: Cluster, host: Host) -> float:
    """Give the running VM a new server's certificate and a new issuer; when that one ends. Nodes' own stay good."""
    ends = issuer_end()
    with open_guest(host, str(vm_places(cluster.site).guest)) as guest:
        ran = guest.run(["/bin/sh", "-c", TAKE_TLS], input=make_seed(cluster))
    if ran.status:
        said = ran.stderr.decode(errors="replace").strip()[-300:]
        raise SmsError(f"the VM does not take new certificates: {said}", hint="`sms vm stop`, then `sms vm start`")
    return ends


def issuer_end() -> float:
    """When an issuer ends that is made now."""
    return round(time.time()) + ca.ISSUER_DAYS * 86400.0


def _run(
    cluster: Cluster,
    host: Host,
    progress: Progress,
    how: How,
    image: VmImage,
    holder: Holder,
    started: StartedVm,
    undo: ExitStack,
    others: ExitStack,
) -> None:
    where = vm_places(cluster.site)
    clock = time.monotonic()
    host.run("mkdir", "-p", "-m", "0700", str(where.disks), str(where.snapshots))
    _claim(cluster, host, holder, undo)
    if kept := tidy_disks(cluster, host):
        progress.say(f"a restore that was cut off is finished; the disks before it are the snapshot {kept}")
    others.close()
    with progress.step("ready the disks") as step:
        ready_disks(cluster, host, image, started, undo)
        words = [name for name, fresh in (("state", started.fresh_state), ("root", started.fresh_root)) if fresh]
        step.detail(f"new: {', '.join(words)}" if words else "those of the last time")
    started.parts["disks"] = round(time.monotonic() - clock, 1)
    boot(cluster, host, progress, image, started, undo)
    undo.callback(keep_console, cluster, host)
    started.parts["boot"] = round(time.monotonic() - clock, 1)
    process = find_running(cluster, host)
    if process is None:
        raise SmsError("the VM ended at once", hint="`sms vm console --log` has its last words")
    with progress.step("wait for the VM") as step:
        health = _wait(cluster, host, process, how, started.accel, step.detail)
        step.detail(f"{len(health.services)} of {len(health.services)} serve" if health.ok else health.wrong)
    started.services = health.services
    started.parts["serves"] = round(time.monotonic() - clock, 1)
    note(cluster, host, "vm start", "started", accel=started.accel, digest=image.digest, generation=holder.generation)


def _wait(cluster: Cluster, host: Host, process: qemu.Process, how: How, accel: str, on_detail: Any) -> Health:
    wait_s = how.wait_s or (WAIT_S if accel == "kvm" else WAIT_TCG_S)
    try:
        return wait_for_health(cluster, host, process, wait_s, on_detail)
    except SmsError as error:
        if how.keep and find_running(cluster, host):
            return Health({"vm": error.message})
        raise


def _claim(cluster: Cluster, host: Host, holder: Holder, undo: ExitStack) -> None:
    """Write down that the disks are here."""
    path = str(vm_places(cluster.site).holder)
    before = host.read(path)
    if before == holder.text():
        return
    host.write(path, holder.text(), mode=0o600)
    if before is None:
        undo.callback(host.remove, path)
    else:
        undo.callback(host.write, path, before, mode=0o600)


def ready_disks(cluster: Cluster, host: Host, image: VmImage, started: StartedVm, undo: ExitStack) -> None:
    """Have the state's disk, as large as the site file says, and a root in front of this very image."""
    where, wanted = vm_places(cluster.site), need_vm(cluster.site)
    state = qemu.image_info(host, str(where.state))
    if state is None:
        # Before it is made: what is half made is removed by name, and the disk itself counts once it is whole.
        undo.callback(host.remove, str(where.state))
        qemu.make_state(host, str(where.state), wanted.disk_mb)
        started.fresh_state = True
    elif state["virtual-size"] < wanted.disk_mb << 20:
        qemu.grow(host, str(where.state), wanted.disk_mb)
    root = qemu.image_info(host, str(where.root))
    # A build may have put other bytes under the same path: what lies in front of them is told by their digest.
    same = (host.read(str(where.root_image)) or b"").decode(errors="replace").strip() == image.digest
    if not same or root is None or root.get("full-backing-filename", root.get("backing-filename")) != image.path:
        host.remove(str(where.root_image))
        qemu.make_root(host, str(where.root), image.path)
        host.write(str(where.root_image), image.digest.encode(), mode=0o600)
        started.fresh_root = True


def boot(
    cluster: Cluster,
    host: Host,
    progress: Progress,
    image: VmImage,
    started: StartedVm,
    undo: ExitStack,
    *,
    incoming: bool = False,
) -> None:
    """Hand over the seed, plug the cables, start QEMU. What was begun is undone by ``undo``."""
    where = vm_places(cluster.site)
    undo.callback(end_all, cluster, host)
    with progress.step("start the machine") as step:
        host.run("mkdir", "-p", "-m", "0700", str(where.run))
        # One that comes with its memory keeps the issuer that it has.
        started.issuer_ends = started.issuer_ends or issuer_end()
        # In memory, for root alone, and gone once QEMU has it open.
        host.write(str(where.seed), make_seed(cluster), mode=0o600)
        host.run("cp", "--", VARIABLES, str(where.variables))
        for card in cards(cluster.site):
            qemu.plug(host, card)
        how = Launch(
            image.path, started.accel, str(where.console_log), str(where.root), str(where.state), incoming=incoming
        )
        written = VmNote(
            image.path,
            image.key,
            image.digest,
            image.signer,
            started.accel,
            started.why_no_kvm,
            started.generation,
            host.name,
            at=round(time.time(), 1),
            issuer_ends=started.issuer_ends,
        )
        host.write(str(where.note), to_json(written), mode=0o600)
        qemu.launch(host, qemu_argv(cluster.site, how), qmp=str(where.qmp), log=str(where.run / "qemu.log"))
        host.remove(str(where.seed))
        step.detail(started.accel + (f": {started.why_no_kvm}" if started.why_no_kvm else ""))


def keep_console(cluster: Cluster, host: Host) -> None:
    """What a start that failed has said on its console stays; QEMU, which may still run, writes on to it."""
    where = vm_places(cluster.site)
    host.run("mv", "-fT", "--", str(where.console_log), str(where.console_failed), ok=None)


def end_all(cluster: Cluster, host: Host) -> None:
    """End the machine, if it runs, and remove its cables and its run folder."""
    if process := find_running(cluster, host):
        qemu.end_machine(host, process)
    tidy(cluster, host)


def make_seed(cluster: Cluster) -> bytes:
    """The archive that the VM gets: its configuration, and certificates made for this start.

    Raises:
        SmsError: the site's authority is not here, or the database's file cannot be read.
    """
    wanted, folder = need_vm(cluster.site), tls_folder(cluster)
    addresses = [card.address for card in cards(cluster.site)]
    server = ca.issue_server(folder, hostname=wanted.hostname, addresses=addresses)
    issuer = ca.issue_issuer(folder)
    tls = {
        "ca.pem": (folder / "ca.pem").read_bytes(),
        "server.pem": server.certificate,
        "server.key": server.key,
        "issuer.pem": issuer.certificate,
        "issuer.key": issuer.key,
    }
    database = ""
    if wanted.database:
        database = _read_secret(wanted.database)
    return seed_archive(cluster.site, tls, database=database)


def _read_secret(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise Refused(f"others can read {path}", hint=f"chmod 600 {path}")
        return path.read_text().strip()
    except OSError as error:
        raise Refused(
            f"cannot read {path}: {error.strerror}", hint="the site file names it as provisioning.database"
        ) from error


def _undone(error: BaseException, undo: ExitStack, console: str) -> BaseException:
    """Undo all; the error to raise then. ``console``: where what was said on the console is kept, if it came so far."""
    try:
        undo.close()
    except SmsError as second:
        return SmsError(
            f"{error}\n  and what had been started could not be undone: {second.message}",
            hint="`sms vm stop` finishes it",
        )
    if isinstance(error, Refused) or not isinstance(error, SmsError):
        return error
    said = f"; `sms vm console --log` shows its last words: {console}" if console else ""
    return RolledBack(f"{error.message}\n  what had been started is undone again{said}", hint=error.hint)
