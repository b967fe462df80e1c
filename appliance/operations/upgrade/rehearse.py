"""``sms rehearse``: test an image on a copy of production's state, in isolated networks, and remove everything."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.lab import Lab, Layout, put_up_cables, up_planned
from appliance.lab.up import check_machine
from appliance.operations.context import Cluster, need_root
from appliance.operations.hosts.host import list_hosts
from appliance.operations.image.copy import HostFile
from appliance.operations.image.deliver import Image, fetch_image, image_name, trust
from appliance.operations.lab import demo
from appliance.operations.preflight import check_programs
from appliance.operations.services.start import Started, StartOptions, start
from appliance.operations.snapshots.list import Snapshot, find_snapshot, list_snapshots, store
from appliance.operations.snapshots.transfer import send
from appliance.operations.upgrade import rehearse_checks as checks
from appliance.operations.upgrade.rehearse_checks import Check, Checks, Inside
from appliance.operations.upgrade.rehearse_folders import (
    new_folder,
    read_record,
    refuse_if_running,
    remove,
    remove_leftovers,
    root,
    write_record,
)
from appliance.operations.upgrade.rehearse_plan import (
    CARRIER,
    OUTSIDE,
    choose_nodes,
    key_copy,
    make_plan,
    rehearsal_site,
    user_lines,
)
from appliance.operations.upgrade.rehearse_vm import need_polls, vm_off
from appliance.plan.overlay.names import read_hosts
from appliance.plan.snapshots.offsite import LATEST
from appliance.progress import Progress
from appliance.shared.identity import uuid_of
from appliance.shared.lease import Lease
from appliance.tools import ext3, files
from appliance.tools.sha256 import find_digest
from appliance.tools.space import query_space

ROOT = "root"
SPARE_MB = 256
"""Space that the copy may need while it is used."""


@dataclass(frozen=True)
class RehearsalOptions:
    """Options of a rehearsal.

    Attributes:
        image: a path, or the start of a key in the store; empty: the current image.
        host: the host of the snapshot; empty: where the container runs.
        user: submits the job.
        wait_s: timeout of the services, in seconds.
        without_vm: the provisioning VM is off, and only file synchronisation may try to reach it.
    """

    image: str = ""
    nodes: int = 2
    host: str = ""
    snapshot: str = LATEST
    user: str = ROOT
    keep: bool = False
    wait_s: float = 60
    without_vm: bool = False


Fetch = Callable[[Path], tuple[str, int]]
"""Provides a snapshot on this machine, for a rehearsal in this folder; returns its store, and its number there."""


@dataclass(frozen=True)
class Ready:
    """Inputs of a rehearsal.

    Attributes:
        image: a verified image.
        origin: where the snapshot is: a host, or ``borg``.
        user: lines of passwd and group.
        room_mb: free space that it needs, in MiB.
        fetch: provides the snapshot.
        production: ids of jobs that production knows and the snapshot must have; None if they are not compared.
    """

    image: Image
    origin: str
    snapshot: Snapshot
    user: tuple[str, str]
    room_mb: int
    fetch: Fetch
    production: frozenset[int] | None = None


@dataclass
class RehearsalResult:
    """Result of a rehearsal; ``parts`` of the start, in seconds."""

    name: str
    image: str
    key: str
    signer: str
    host: str
    snapshot: int
    nodes: list[str] = field(default_factory=list)
    kept: bool = False
    checks: list[Check] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        """The failed checks."""
        return [check for check in self.checks if not check.ok]


def rehearse(cluster: Cluster, options: RehearsalOptions) -> RehearsalResult:
    """Rehearse an image. Production is only read; failed checks are part of the result.

    Raises:
        ConfigError, Refused: it cannot be started; nothing was created.
        SmsError: the rehearsal could not be set up; everything was removed.
    """
    need_root()
    remove_leftovers(cluster)
    return run_rehearsal(cluster, options, prepare(cluster, options))


def run_rehearsal(cluster: Cluster, options: RehearsalOptions, ready: Ready) -> RehearsalResult:
    """Rehearse in a folder of its own, which is removed afterwards.

    Raises:
        SmsError: as ``rehearse``.
    """
    number = ready.snapshot["number"]
    with new_folder(cluster, ready.image.path, number) as (name, folder):
        done = RehearsalResult(name, ready.image.path, ready.image.key, ready.image.signer, ready.origin, number)
        try:
            _run(cluster, options, ready, folder, done)
            done.kept = options.keep
        finally:
            if done.kept:
                write_record(folder, replace(read_record(folder), kept=True))
            else:
                with cluster.env.progress.step("remove the rehearsal"):
                    remove(folder)
    return done


def plan_rehearsal(cluster: Cluster, options: RehearsalOptions) -> list[str]:
    """Run all checks before a rehearsal; return its steps.

    Raises:
        ConfigError, Refused: as ``rehearse``.
    """
    need_root()
    ready = prepare(cluster, options, dry_run=True)
    nodes, skipped = choose_nodes(cluster.site, options.nodes, {}, resolve)
    names = ", ".join(f"{name} ({address})" for name, address in nodes) or "none"
    networks = cluster.site.networks
    return [
        f"copy snapshot {ready.snapshot['number']} of {ready.origin}: "
        f"{ready.snapshot['used_bytes'] >> 20} MiB, {ready.room_mb} MiB are free for it; check it with e2fsck",
        f"create isolated networks for {networks.provisioning.address} and {networks.public.address}",
        f"start {ready.image.path} ({ready.image.signer}) on the copy, probe every service, check every job",
        f"compute nodes: {names}" + "".join(f"; not {why}" for why in skipped[:5]),
        "check a job, its mail, a page through NAT, a line of syslog, the time",
        *(["drop traffic to the provisioning VM, and report who sends any"] if options.without_vm else []),
        "keep everything running" if options.keep else "remove everything",
    ]


def tear_down(cluster: Cluster) -> list[str]:
    """Remove every rehearsal that is not running, including kept ones; return their names.

    Raises:
        Refused: there was none, but one is running.
    """
    need_root()
    removed = remove_leftovers(cluster, kept=True)
    if not removed:
        refuse_if_running(cluster)
    return removed


def prepare(cluster: Cluster, options: RehearsalOptions, *, dry_run: bool = False) -> Ready:
    """Check that a rehearsal is possible on this machine; without ``dry_run`` the image is fetched to it.

    Raises:
        ConfigError, Refused: it is not.
    """
    here = cluster.env.hosts.this
    check_machine()
    check_programs(here)
    if options.without_vm:
        need_polls(cluster)
    user = _user(cluster, options.user)
    # An unknown name may be in the container's hosts file, which is not available yet.
    placeholder = str(cluster.site.provisioning_network.broadcast_address)
    choose_nodes(cluster.site, options.nodes, {}, lambda name: resolve(name) or placeholder)
    source = find_source(cluster, options.host)
    path = find_image(cluster, source, options.image, dry_run=dry_run)
    with cluster.env.progress.step("verify the image") as step:
        image = trust(cluster, here, path)
        step.detail(image.signer)
    snapshot = find_snapshot(list_snapshots(cluster, source), options.snapshot)
    if not snapshot["health"].get("ok"):
        raise Refused(
            f"snapshot {snapshot['number']} of {source.name} is not verified",
            hint=f"sms overlay verify {snapshot['number']} --host {source.name}",
        )
    room = check_room(cluster, snapshot, image, copies=1 if isinstance(source, Local) else 2)
    return Ready(image, source.name, snapshot, user, room, fetch_from(cluster, source, snapshot))


def fetch_from(cluster: Cluster, source: Host, snapshot: Snapshot) -> Fetch:
    """Return what provides a snapshot of an admin host: where it is on this machine, else a copy in the folder."""

    def fetch(folder: Path) -> tuple[str, int]:
        if isinstance(source, Local):
            return store(cluster), snapshot["number"]
        here, into = cluster.env.hosts.this, str(folder / "snapshots")
        return into, int(send(cluster, source, snapshot["number"], here, into=into).name)

    return fetch


def find_source(cluster: Cluster, name: str) -> Host:
    """Return the host of the snapshots: the named one, else the one that runs the container, else this one.

    Raises:
        ConfigError: no admin host has that name.
        Refused: none was named, the container is not running on any host, and this machine is not an admin host.
    """
    if name:
        return cluster.host(name)
    lines = list_hosts(cluster)
    for line in (*(line for line in lines if line.running), *(line for line in lines if line.holds_lease)):
        return cluster.host(line.name)
    return cluster.host(None)


def resolve(name: str) -> str:
    """Resolve a name on this machine; empty if it is unknown."""
    try:
        return socket.gethostbyname(name) if name else ""
    except OSError:
        return ""


def _user(cluster: Cluster, name: str) -> tuple[str, str]:
    if name == ROOT:
        return "", ""
    accounts = cluster.site.accounts
    texts = [path.read_text() if path else "" for path in (accounts.passwd, accounts.group)]
    return user_lines(texts[0], texts[1], name)


def find_image(cluster: Cluster, source: Host, image: str, *, dry_run: bool = False) -> str:
    """Return the path of an image on this machine; one that only ``source`` has is fetched.

    Args:
        image: a path, or the start of a key in the store; empty for the current one.

    Raises:
        Refused: there is none, or more than one.
    """
    images = Path(cluster.places.images)
    path = Path(image or str(cluster.places.current))
    if path.is_file():
        return str(path.resolve())
    if "/" in str(path):
        return _fetch_image(cluster, source, str(path), dry_run)
    matches = [one for one in images.glob("*.sif") if one.name.startswith(image) and not one.is_symlink()]
    if len(matches) != 1:
        what = f"{len(matches)} images have a key that starts with {image}" if matches else f"there is no image {image}"
        raise Refused(what, hint="`sms image list` lists them, `sms build` creates one")
    return str(matches[0].resolve())


def _fetch_image(cluster: Cluster, source: Host, path: str, dry_run: bool) -> str:
    """Fetch an image of another host into this machine's store; it has no effect on which one is current here.

    Raises:
        Refused: there is none, or it cannot be trusted; nothing of it stays.
    """
    if isinstance(source, Local) or not source.works("test", "-f", path):
        raise Refused(f"there is no image {path}", hint="`sms build` creates one, `sms image list` lists them")
    there = source.run("readlink", "-f", path).text
    target = Path(cluster.places.images) / image_name(there)
    digest = find_digest(source, there)
    if find_digest(Local(), str(target), needed=False) == digest:
        return str(target)
    if dry_run:
        raise Refused(f"{path} is only on {source.name}", hint="without --dry-run it is fetched")
    if target.exists() or target.name == cluster.places.current.name:
        target = target.with_name(f"{target.stem}-{digest[:12]}.sif")
    return fetch_image(cluster, HostFile(source, there, digest), Local(), str(target)).path


def check_room(cluster: Cluster, snapshot: Snapshot, image: Image, *, copies: int) -> int:
    """Return the MiB that a rehearsal may need in the state folder, for ``copies`` of the snapshot and the image.

    Raises:
        Refused: there is not enough free space.
    """
    used = copies * snapshot["used_bytes"] + Path(image.path).stat().st_size
    need: int = (used >> 20) + SPARE_MB
    free = query_space(Local(), str(root(cluster))).free >> 20
    if free < need:
        raise Refused(
            f"a rehearsal needs {need} MiB in {cluster.site.state}, but only {free} MiB are free",
            hint="free some space, or run the rehearsal on another machine, with --host for the host of the snapshot",
        )
    return need


def _run(cluster: Cluster, options: RehearsalOptions, ready: Ready, folder: Path, done: RehearsalResult) -> None:
    """Set up the rehearsal and run all checks; setup errors are raised, failed checks recorded."""
    site = rehearsal_site(cluster.site, folder, without_vm=options.without_vm)
    mine = replace(cluster.reconnecting(), site=site)
    overlay = str(mine.places.overlay)
    tried = Checks(cluster.env.progress, cluster.env.clock, done.checks)
    _copy(mine, ready, folder, overlay, cluster.env.progress)
    _name_copy(mine, ready.snapshot)
    image = _place_image(cluster, mine, ready.image, folder)
    if not tried.try_out("the copy of the overlay is whole", lambda: checks.check_file_system(Local(), overlay)):
        return
    jobs = _jobs(mine, ready, folder)
    lab = _start_lab(mine, options, ready, folder, done, cluster.env.progress)
    with vm_off(lab, mine.site, tried) if options.without_vm else nullcontext():
        if _try_start(mine, lab, image, options, done, tried):
            inside = Inside(mine, lab.host(CARRIER))
            tried.try_out("no way out of its networks", lambda: checks.check_isolation(lab, mine))
            _try_jobs(inside, jobs, ready.production, tried)
            if lab.nodes:
                _use(lab, inside, tried, options.user)


def _try_start(
    mine: Cluster, lab: Lab, image: Path, options: RehearsalOptions, done: RehearsalResult, tried: Checks
) -> bool:
    """Start the container; return whether it runs, even if a service does not answer."""
    names = {service.name for service in mine.services}
    started: list[Started] = []

    def begin() -> str:
        start_options = StartOptions(image, options.wait_s, keep=options.keep, unit=False, judged=True)
        found = start(mine, lab.host(CARRIER), start_options)
        assert found
        started.append(found)
        done.parts = found.parts
        if missing := sorted(names - set(found.services)):
            raise SmsError(f"no answer from {', '.join(missing)}")
        slowest = max(found.services, key=lambda name: found.services[name])
        return f"{', '.join(found.services)}; the last, {slowest}, after {found.services[slowest]:.1f} s"

    what = "the image starts on it; every service answers"
    return tried.try_out(what, begin, own_progress=True) or bool(started)


def _try_jobs(inside: Inside, jobs: list[int], production: frozenset[int] | None, tried: Checks) -> None:
    """Compare the controller's jobs with those of the snapshot's state, and with production's."""
    if not inside.cluster.find_role("controller"):
        return
    known: set[int] = set()
    tried.try_out("the controller knows the same jobs", lambda: checks.check_jobs(inside, jobs, known))
    if production is not None:
        what = "it knows the jobs of production that are older than the snapshot"
        tried.try_out(what, lambda: checks.compare_production(known, production))


def _use(lab: Lab, inside: Inside, tried: Checks, user: str) -> None:
    """Run the checks from compute nodes."""
    find_role = inside.cluster.find_role
    found: dict[str, str] = {}
    if find_role("controller"):
        if tried.try_out("compute nodes register", lambda: checks.check_nodes(lab, inside, user)):
            tried.try_out("a Slurm job from a compute node", lambda: checks.check_job(lab, inside, user, found))
    else:
        put_up_cables(lab.layout)
    if "job" in found and find_role("mail") and inside.cluster.site.mail.relay:
        tried.try_out("its mail arrives outside", lambda: demo.mail_arrives(lab.host(OUTSIDE), found["job"]))
    if find_role("routing"):
        tried.try_out("the outside, through the container's NAT", lambda: checks.check_nat(lab))
    if find_role("logging"):
        tried.try_out("a node's syslog arrives in the container", lambda: checks.check_syslog(lab, inside))
    if find_role("clock"):
        tried.try_out("a node's clock follows the container", lambda: demo.clock_follows(lab.host(lab.nodes[0])))


def _copy(mine: Cluster, ready: Ready, folder: Path, overlay: str, progress: Progress) -> None:
    """Restore the snapshot as the rehearsal's overlay."""
    here = mine.env.hosts.this
    here.run("mkdir", "-p", "-m", "0700", str(Path(overlay).parent))
    where, number = ready.fetch(folder)
    mine.env.agents.call(here, "restore", {"store": where, "snapshot": str(number), "target": overlay}, progress)


def _name_copy(mine: Cluster, snapshot: Snapshot) -> None:
    """Write the UUID of the snapshot's cluster to the rehearsal's lease: else its start would create and report one."""
    lease = Lease(mine.site.cluster, file=CARRIER, cluster_uuid=uuid_of(snapshot) or mine.env.new_uuid())
    Local().write(str(mine.places.lease), lease.text(), mode=0o600)


def _place_image(cluster: Cluster, mine: Cluster, image: Image, folder: Path) -> Path:
    """Copy the image and the public keys into the rehearsal's folder; return the path of the image."""
    target = Path(mine.places.images) / f"{image.key}.sif"
    here = Local()
    here.run("mkdir", "-p", "-m", "0700", str(target.parent))
    # A copy, not a link: the search for loop devices on it must not find production's.
    files.copy_sparse(here, image.path, str(target), timeout=600)
    for number, key in enumerate(cluster.site.signing.public_keys):
        here.write(str(key_copy(folder, number, key)), key.read_bytes()) if key.is_file() else None
    return target


def _jobs(mine: Cluster, ready: Ready, folder: Path) -> list[int]:
    """Return the ids of the jobs in the snapshot's state; none without a controller."""
    if not (controller := mine.find_role("controller")):
        return []
    overlay, taken = str(mine.places.overlay), ready.snapshot["taken"]
    return checks.jobs_in_state(overlay, str(folder / "look"), controller.state[0], taken)


def _start_lab(
    mine: Cluster, options: RehearsalOptions, ready: Ready, folder: Path, done: RehearsalResult, progress: Progress
) -> Lab:
    overlay = str(mine.places.overlay)
    hosts = read_hosts(ext3.read_inside(Local(), overlay, "/upper/etc/hosts").decode(errors="replace"))
    nodes, skipped = choose_nodes(mine.site, options.nodes, hosts, resolve)
    done.nodes = [name for name, _ in nodes]
    if len(nodes) < options.nodes:
        progress.report(
            f"note: {len(nodes)} compute nodes instead of {options.nodes}: {'; '.join(skipped) or 'no more'}"
        )
    given = mine.site.secrets.munge_key
    munge = given.read_bytes() if given else ext3.read_inside(Local(), overlay, "/upper/etc/munge/munge.key")
    plan = make_plan(mine.site, nodes, folder=folder, user=ready.user, without_vm=options.without_vm)
    layout = Layout(done.name, len(nodes), plan)
    up_planned(layout, munge, progress)
    return Lab.open(done.name)
