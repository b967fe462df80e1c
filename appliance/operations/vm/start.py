"""``sms vm start``: verify the image, prepare disks and seed, start QEMU, wait until all services are healthy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note, read_history
from appliance.operations.lease import query_lease
from appliance.operations.site import ca
from appliance.operations.site.issued import revoked_map
from appliance.operations.vm.client import tls_folder
from appliance.operations.vm.image import VmImage, deliver_vm, make_current
from appliance.operations.vm.interrupted import continue_paused
from appliance.operations.vm.revoked import merge_revoked
from appliance.operations.vm.snapshots import list_snapshots
from appliance.operations.vm.vm import (
    Health,
    all_hosts,
    check_programs,
    find_running,
    finish_restore,
    lock_vm_everywhere,
    tidy,
    tidy_run,
    view_hosts,
    wait_for_health,
)
from appliance.plan.vm.holder import Holder, HostView, follow_known, may_start, name_cluster, newest_holder
from appliance.plan.vm.vm import (
    FIRMWARE,
    QEMU_OVERHEAD_MB,
    REVOKED_MAP,
    VARIABLES,
    VmPlaces,
    cards,
    find_account,
    need_vm,
    qemu_machine,
    seed_archive,
)
from appliance.shared.lease import LAST_RAISING
from appliance.shared.records import RecordError, from_json, to_json
from appliance.shared.secret import SecretInput
from appliance.text import is_plain_name
from appliance.tools import bridge, files, qemu
from appliance.tools.guest import open_guest
from appliance.tools.space import query_space

NEEDED_BYTES = 256 << 20
"""Free space that a start requires: the machine's root and its journal grow."""
WAIT_S, WAIT_TCG_S = 180.0, 600.0
"""How long a start may take in seconds, with KVM and without."""
# sms-provd reads the issuer for each certificate that it signs.
UNPACK_TLS = (
    "/bin/tar",
    "-x",
    "-f",
    "-",
    "-C",
    "/",
    "--no-overwrite-dir",
    "--same-owner",
    "--same-permissions",
    "etc/sms/tls",
)


@dataclass(frozen=True)
class VmNote:
    """The record that a host keeps of the machine that it started; fields are empty if unknown.

    Attributes:
        key, digest, signer: key of the image, digest of its manifest, name of the key that verified it.
        why: why KVM is not used.
        at: time of the start, as Unix time in seconds.
        issuer_ends: when the certificate expires that signs those of nodes, as Unix time in seconds.
    """

    image: str = ""
    key: str = ""
    digest: str = ""
    signer: str = ""
    accel: str = ""
    why: str = ""
    generation: int = 0
    host: str = ""
    at: float = 0.0
    issuer_ends: float = 0.0


@dataclass
class StartedVm:
    """A started VM. ``parts``: how long each phase took, in seconds from the start."""

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
class StartOptions:
    """Options of a start.

    Attributes:
        wait_s: how long the services may take to become healthy, in seconds; 0: depends on the accelerator.
        keep: leave an unhealthy VM running.
        force: start although other hosts may have newer disks.
        image: key of another image than the current one.
    """

    wait_s: float = 0
    keep: bool = False
    force: bool = False
    image: str = ""


def start_vm(cluster: Cluster, host: Host, options: StartOptions) -> StartedVm:
    """Start the VM on ``host`` and wait until all its services are healthy.

    Raises:
        Refused: a precondition is not met; nothing was changed.
        RolledBack: a step failed, and the start was rolled back.
    """
    need_vm(cluster.site)
    check_programs(host)
    with lock_vm_everywhere(cluster, host) as others:
        if process := find_running(cluster, host):
            continue_paused(cluster, host)
            others.close()
            return _check_running(cluster, host, process, options)
        tidy_run(cluster, host)
        holder = _choose_holder(cluster, host, view_hosts(cluster, host), options)
        check_host(cluster, host)
        image = deliver_vm(cluster, host, chosen=options.image)
        written = make_note(host, image, holder, qemu.probe_accel(host), issuer_end(cluster))
        started = _describe(host, written)
        with _undo_on_failure(cluster, started) as undo:
            clock = cluster.env.clock.monotonic()
            _take_disks(cluster, host, holder, undo)
            others.close()
            _prepare(cluster, host, image, started, undo)
            started.parts["disks"] = round(cluster.env.clock.monotonic() - clock, 1)
            undo.callback(stop_and_clean, cluster, host)
            boot(cluster, host, written)
            undo.callback(keep_console, cluster, host)
            started.parts["boot"] = round(cluster.env.clock.monotonic() - clock, 1)
            started.services = _wait_for_services(cluster, host, options, started.accel)
            make_current(cluster, host, image.path)
            started.parts["serves"] = round(cluster.env.clock.monotonic() - clock, 1)
            facts = {"accel": started.accel, "digest": image.digest, "generation": holder.generation}
            note(cluster, host, "vm start", "started", **facts)
    return started


@contextmanager
def _undo_on_failure(cluster: Cluster, started: StartedVm) -> Iterator[ExitStack]:
    with ExitStack() as undo:
        try:
            yield undo
        except BaseException as error:
            console = f"{started.host}:{VmPlaces(cluster.site).console_failed}" if "boot" in started.parts else ""
            raise _rolled_back(error, undo, console) from error
        undo.pop_all()


def rehearse_start_vm(cluster: Cluster, host: Host, options: StartOptions) -> list[str]:
    """Return the steps of a start without running them. Checks everything but the image.

    Raises:
        Refused: a start would be refused.
    """
    check_programs(host)
    if find_running(cluster, host):
        return [f"the VM runs on {host.name} already: nothing to do"]
    holder = _choose_holder(cluster, host, view_hosts(cluster, host), options)
    check_host(cluster, host)
    accel, why = qemu.probe_accel(host)
    where, settings = VmPlaces(cluster.site), need_vm(cluster.site)
    steps = [f"record that {host.name} has the disks, generation {holder.generation}"]
    if not host.works("test", "-e", str(where.state)):
        steps.append(f"create the state disk of {settings.disk_mb} MiB")
    account = find_account(cluster.site)
    if not host.works("id", "-u", account):
        steps.append(f"create the system account {account}")
    steps += [f"attach {card.tap} to {card.bridge}" for card in cards(cluster.site)]
    return [*steps, f"start QEMU with {accel}" + (f" ({why})" if why else "")]


def _choose_holder(cluster: Cluster, host: Host, views: list[HostView], options: StartOptions) -> Holder:
    """Return the holder record to write; raises Refused if the disks are on another host."""
    newest = newest_holder(views)
    shared = newest is not None and newest.holder != host.name and shares_disks(cluster, host, newest.holder)
    chosen = may_start(host.name, views, shared=shared, force=options.force)
    reachable = {view.name for view in views if view.reachable}
    lost = newest is None
    known = [_known_generation(cluster, one, lost=lost) for one in all_hosts(cluster, host) if one.name in reachable]
    chosen = follow_known(chosen, newest, max(known))
    return name_cluster(chosen, newest, query_lease(host, cluster).cluster_uuid)


def _known_generation(cluster: Cluster, host: Host, *, lost: bool) -> int:
    """Return the highest generation of the disks in a host's snapshots and history.

    Args:
        lost: no record of who has the disks is left: snapshots of the state are queried, too.
    """
    events = [one for one in read_history(cluster, host) if str(one.get("verb")).startswith("vm ")]
    numbers = [one.get("generation") for one in events]
    known = [one.generation for one in list_snapshots(cluster, host)]
    if lost:
        store = {"store": str(cluster.of_vm().places.snapshots)}
        known += [one for one in cluster.env.agents.call(host, "brief", store)["generations"] if one <= LAST_RAISING]
    return max([0, *known, *(one for one in numbers if type(one) is int)])


def shares_disks(cluster: Cluster, host: Host, other: str) -> bool:
    """Return whether both hosts share the disks' folder: a file written by one is visible to the other."""
    path = f"{VmPlaces(cluster.site).disks}/.sms-shared-{time.time_ns()}"
    try:
        there = cluster.host(other)
        there.write(path, path.encode(), mode=0o600)
    except SmsError:
        return False
    try:
        return host.works("test", "-e", path)
    finally:
        there.remove(path)


def check_host(cluster: Cluster, host: Host) -> None:
    """Check that the host can run the VM and that the VM's addresses are free.

    Raises:
        Refused: it cannot, or an address is in use; names all problems.
    """
    check_target(cluster, host)
    taken = bridge.taken(host, {card.address: card.bridge for card in cards(cluster.site)}, cluster.env.pool)
    if taken:
        problems = "; ".join(f"{address} is already used by {mac}" for address, mac in taken.items())
        raise Refused(problems, hint="another machine has it, or the VM runs on a host that is not in the site file")


def check_target(cluster: Cluster, host: Host) -> None:
    """Check that the host has bridges, memory, disk space and firmware.

    Raises:
        Refused: something is missing; names all problems.
    """
    settings, where = need_vm(cluster.site), VmPlaces(cluster.site)
    with cluster.env.progress.step(f"check {host.name}"):
        problems = []
        for card in cards(cluster.site):
            ports = bridge.bridge_ports(host, card.bridge)
            if ports is None:
                problems.append(f"bridge {card.bridge} does not exist or is down (`sms host prepare {host.name}`)")
            elif not ports:
                problems.append(f"bridge {card.bridge} has no port that is up: the VM would be isolated")
        memory, kind = files.free_memory_mb(host), host.run("stat", "-f", "-c", "%T", "/run").text
        free = query_space(host, str(where.disks)).free
        if memory < settings.memory_mb + QEMU_OVERHEAD_MB:
            problems.append(f"{memory} MiB of memory are free, {settings.memory_mb + QEMU_OVERHEAD_MB} are needed")
        if free < NEEDED_BYTES:
            problems.append(f"{free >> 20} MiB are free for its disks, {NEEDED_BYTES >> 20} are needed")
        if kind not in ("tmpfs", "ramfs"):
            problems.append(f"/run is on {kind}: keys would be written to a disk")
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
        return f"`sms doctor --host {name}` shows how to fix it"
    return "free space, or set provisioning.directory to another folder" if "free for" in text else ""


def _check_running(cluster: Cluster, host: Host, process: qemu.Process, options: StartOptions) -> StartedVm:
    """Wait for a VM that already runs here: resumes an interrupted start; renews certificates that end soon."""
    where = VmPlaces(cluster.site)
    host.remove(str(where.seed))
    with cluster.env.progress.step("check the running VM") as step:
        written = read_note(cluster, host)
        health = _wait(cluster, host, process, options, written.accel, step.detail)
    if health.ok and issuer_days(written, cluster.env.clock.time()) < ca.ISSUER_SOON_DAYS:
        with cluster.env.progress.step("renew its certificates"):
            written = replace(written, issuer_ends=renew_certificates(cluster, host))
            host.write(str(where.note), to_json(written), mode=0o600)
    return replace(_describe(host, written), already=True, services=health.services)


def _describe(host: Host, written: VmNote) -> StartedVm:
    """Return the result of a start from its record."""
    image = (written.image, written.digest, written.signer)
    return StartedVm(host.name, written.accel, written.why, *image, written.generation, issuer_ends=written.issuer_ends)


def make_note(host: Host, image: VmImage, holder: Holder, accel: tuple[str, str], issuer_ends: float) -> VmNote:
    """Return the record of a start of ``image`` on ``host``. ``accel``: the accelerator, and why it is not KVM."""
    about = (image.path, image.key, image.digest, image.signer)
    return VmNote(*about, *accel, holder.generation, host.name, issuer_ends=issuer_ends)


def read_note(cluster: Cluster, host: Host) -> VmNote:
    """Return the record of the last start; an empty one if there is none or it cannot be read."""
    try:
        found = from_json(VmNote, host.read(str(VmPlaces(cluster.site).note)) or b"{}")
    except RecordError:
        return VmNote()
    return found if not found.key or is_plain_name(found.key) else VmNote()  # the key is the name of a folder


def issuer_days(written: VmNote, now: float) -> int:
    """Return for how many whole days the VM can still sign certificates of nodes, from its start record."""
    return int((written.issuer_ends - now) // 86400) if written.issuer_ends else 0


def renew_certificates(cluster: Cluster, host: Host) -> float:
    """Install a new server certificate and a new issuer in the running VM. Certificates of nodes stay valid.

    Returns:
        When the new issuer expires, as Unix time.

    Raises:
        SmsError: the VM did not accept them.
    """
    ends = issuer_end(cluster, renew=True)
    install_tls(cluster, host, make_seed(cluster))
    return ends


def issuer_end(cluster: Cluster, *, renew: bool = False) -> float:
    """Return when the certificates of the VM expire, as Unix time; issue them if that is necessary, or with ``renew``.

    Raises:
        SmsError: they must be issued, and the site's CA or its key is not on this machine.
    """
    return ca.first_end(_vm_pairs(cluster, renew=renew))


def _vm_pairs(cluster: Cluster, *, renew: bool = False) -> tuple[ca.Pair, ca.Pair]:
    hostname, addresses = vm_names(cluster)
    return ca.vm_pairs(tls_folder(cluster), hostname=hostname, addresses=addresses, renew=renew)


def vm_names(cluster: Cluster) -> tuple[str, list[str]]:
    """Return the host name and the addresses of the VM, which its certificate has."""
    return need_vm(cluster.site).hostname, [card.address for card in cards(cluster.site)]


def install_tls(cluster: Cluster, host: Host, archive: bytes) -> None:
    """Unpack the files of ``etc/sms/tls`` of an archive in the running VM; nginx and the service use them at once."""
    with open_guest(host, str(VmPlaces(cluster.site).guest)) as guest:
        ran = guest.run(UNPACK_TLS, input=archive)
        if not ran.status:
            ran = guest.run(("/bin/systemctl", "reload", "nginx"))
    if ran.status:
        output = ran.stderr.decode(errors="replace").strip()[-300:]
        raise SmsError(f"the VM rejected new certificates: {output}", hint="`sms vm stop`, then `sms vm start`")


def _take_disks(cluster: Cluster, host: Host, holder: Holder, undo: ExitStack) -> None:
    where = VmPlaces(cluster.site)
    files.make_folders(host, str(where.disks), str(where.snapshots))
    before = host.read(str(where.holder))
    _claim(cluster, host, holder, undo)
    if before and holder.cluster_uuid.encode() not in before:
        cluster.env.progress.report(f"note: the VM's disks are those of cluster {holder.cluster_uuid} from now on")
    if kept := finish_restore(host, VmPlaces(cluster.site)):
        cluster.env.progress.report(f"completed an interrupted restore; the old disks are kept as snapshot {kept}")


def _prepare(cluster: Cluster, host: Host, image: VmImage, started: StartedVm, undo: ExitStack) -> None:
    with cluster.env.progress.step("prepare the disks") as step:
        prepare_disks(cluster, host, image, started, undo)
        words = [name for name, fresh in (("state", started.fresh_state), ("root", started.fresh_root)) if fresh]
        step.detail(f"new: {', '.join(words)}" if words else "unchanged")


def _wait_for_services(cluster: Cluster, host: Host, options: StartOptions, accel: str) -> dict[str, str]:
    process = find_running(cluster, host)
    if process is None:
        raise SmsError("the VM ended right after its start", hint="`sms vm console --log` shows its last output")
    with cluster.env.progress.step("wait for the VM") as step:
        health = _wait(cluster, host, process, options, accel, step.detail)
        step.detail(f"{len(health.services)} of {len(health.services)} healthy" if health.ok else health.failures)
    return health.services


def _wait(
    cluster: Cluster, host: Host, process: qemu.Process, options: StartOptions, accel: str, on_detail: Any
) -> Health:
    wait_s = options.wait_s or (WAIT_S if accel == "kvm" else WAIT_TCG_S)
    try:
        return wait_for_health(cluster, host, process, wait_s, on_detail)
    except SmsError as error:
        if options.keep and find_running(cluster, host):
            return Health({"vm": error.message})
        raise


def _claim(cluster: Cluster, host: Host, holder: Holder, undo: ExitStack) -> None:
    """Write the record that this host has the disks."""
    path = str(VmPlaces(cluster.site).holder)
    before = host.read(path)
    if before == to_json(holder):
        return
    host.write(path, to_json(holder), mode=0o600)
    if before is None:
        undo.callback(host.remove, path)
    else:
        undo.callback(host.write, path, before, mode=0o600)


def prepare_disks(cluster: Cluster, host: Host, image: VmImage, started: StartedVm, undo: ExitStack) -> None:
    """Create or grow the state disk to the configured size; create a new root overlay if the image is another one."""
    where, settings = VmPlaces(cluster.site), need_vm(cluster.site)
    state = qemu.image_info(host, str(where.state))
    if state is None:
        # Registered before the disk is created, so that a partly created one is removed as well.
        undo.callback(host.remove, str(where.state))
        qemu.make_state(host, str(where.state), settings.disk_mb)
        started.fresh_state = True
    elif state["virtual-size"] < settings.disk_mb << 20:
        qemu.grow(host, str(where.state), settings.disk_mb)
    root = qemu.image_info(host, str(where.root))
    # A build can replace the image under the same path: the digest tells whether the root belongs to it.
    same = (host.read(str(where.root_image)) or b"").decode(errors="replace").strip() == image.digest
    if not same or root is None or root.get("full-backing-filename", root.get("backing-filename")) != image.path:
        host.remove(str(where.root_image))
        qemu.make_root(host, str(where.root), image.path)
        host.write(str(where.root_image), image.digest.encode(), mode=0o600)
        started.fresh_root = True


def boot(cluster: Cluster, host: Host, written: VmNote, *, incoming: bool = False) -> None:
    """Write the seed and the record of the start, attach the network cards, start QEMU.

    ``stop_and_clean`` undoes it, even a part of it.
    """
    where = VmPlaces(cluster.site)
    account = find_account(cluster.site)
    if qemu.create_user(host, account, f"QEMU of cluster {cluster.site.cluster}"):
        cluster.env.progress.report(f"created the system account {account} on {host.name}, which runs QEMU")
    with cluster.env.progress.step("start the machine") as step:
        host.run("mkdir", "-p", "-m", "0700", str(where.run))
        # In memory, readable by root only, and removed once QEMU has it open.
        host.write(str(where.seed), make_seed(cluster), mode=0o600)
        host.run("cp", "--", VARIABLES, str(where.variables))
        for card in cards(cluster.site):
            qemu.plug(host, card)
        host.write(str(where.note), to_json(replace(written, at=round(cluster.env.clock.time(), 1))), mode=0o600)
        machine = qemu_machine(cluster.site, written.image, written.accel, incoming=incoming)
        qemu.launch(host, machine, qemu.Run(account, str(where.pid), str(where.qmp), str(where.run / "qemu.log")))
        host.remove(str(where.seed))
        step.detail(written.accel + (f": {written.why}" if written.why else ""))


def keep_console(cluster: Cluster, host: Host) -> None:
    """Keep the console log of a failed start; QEMU may still run and write to it."""
    where = VmPlaces(cluster.site)
    host.run("mv", "-fT", "--", str(where.console_log), str(where.console_failed), ok=None)


def stop_and_clean(cluster: Cluster, host: Host) -> None:
    """Stop the machine if it runs, and remove its taps and its run folder."""
    if process := find_running(cluster, host):
        qemu.end_machine(host, process)
    tidy(cluster, host)


def make_seed(cluster: Cluster) -> SecretInput:
    """Return the seed archive: the VM's configuration, and its certificates.

    Raises:
        SmsError: the site's CA is not on this machine, or the database file cannot be read.
    """
    settings, folder = need_vm(cluster.site), tls_folder(cluster)
    if ca.has_key(folder):
        ca.renew_due_clients(folder)
    server, issuer = _vm_pairs(cluster)
    merge_revoked(cluster)  # what another admin host revoked while this one, or the VM, was off
    authority = (folder / "ca.pem").read_bytes()
    tls = {
        "ca.pem": authority,
        # iPXE knows an authority by its digest only, and verifies nothing without its certificate.
        "server.pem": server.certificate + authority,
        "server.key": server.key,
        "issuer.pem": issuer.certificate,
        "issuer.key": issuer.key,
        REVOKED_MAP: revoked_map(folder),
    }
    database = ""
    if settings.database:
        database = _read_secret(settings.database)
    archive = seed_archive(cluster.site, tls, database=database)
    return SecretInput(archive, server.key, issuer.key, database.encode())


def _read_secret(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise Refused(f"others can read {path}", hint=f"chmod 600 {path}")
        return path.read_text().strip()
    except OSError as error:
        raise Refused(
            f"cannot read {path}: {error.strerror}", hint="it is set as provisioning.database in the site file"
        ) from error


def _rolled_back(error: BaseException, undo: ExitStack, console: str) -> BaseException:
    """Roll back and return the error to raise. ``console``: where the console log is kept, if there is one."""
    try:
        undo.close()
    except SmsError as second:
        return SmsError(
            f"{error}\n  the start could not be rolled back: {second.message}",
            hint="`sms vm stop` completes the rollback",
        )
    if isinstance(error, Refused) or not isinstance(error, SmsError):
        return error
    log = f"; `sms vm console --log` shows its last output: {console}" if console else ""
    return RolledBack(f"{error.message}\n  the start was rolled back{log}", hint=error.hint)
