"""``sms rehearse``: a candidate image on a copy of production's state, in networks of its own; then all of it goes."""

from __future__ import annotations

import socket
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
from appliance.operations.hosts.preflight import check_programs
from appliance.operations.image.deliver import Image, trust
from appliance.operations.lab import demo
from appliance.operations.services.start import Started, start
from appliance.operations.snapshots.list import (
    LATEST,
    Snapshot,
    find_snapshot,
    list_snapshots,
    state_heads,
    state_paths,
    store,
)
from appliance.operations.snapshots.transfer import connect
from appliance.operations.upgrade import rehearse_checks as checks
from appliance.operations.upgrade.rehearse_checks import Check, Checks, Inside
from appliance.operations.upgrade.rehearse_left import (
    clear_left,
    need_none_at_work,
    own_folder,
    read_record,
    remove,
    root,
    write_record,
)
from appliance.operations.upgrade.rehearse_plan import (
    CARRIER,
    OUTSIDE,
    choose_nodes,
    key_copy,
    make_plan,
    read_hosts,
    rehearsal_site,
    user_lines,
)
from appliance.operations.upgrade.rehearse_vm import need_polls, vm_off
from appliance.progress import Progress
from appliance.tools import agent, ext3
from appliance.tools.sha256 import find_digest
from appliance.tools.space import query_space

ROOT = "root"
SPARE_MB = 256
"""Room that the copy may take while it is used."""


@dataclass(frozen=True)
class Wanted:
    """What is to be rehearsed.

    ``image``: a path, or the beginning of a key in the store; empty: the current one. ``host``: whose snapshot, empty
    for where the appliance runs. ``user`` submits the job. ``wait_s``: seconds that services may take. ``without_vm``:
    the provisioning VM is off all the while, and nobody may ask for it but file synchronisation.
    """

    image: str = ""
    nodes: int = 2
    host: str = ""
    snapshot: str = LATEST
    user: str = ROOT
    keep: bool = False
    wait_s: float = 60
    without_vm: bool = False


@dataclass(frozen=True)
class Ready:
    """What a rehearsal is made from: a trusted image, and a snapshot on ``source``; ``user``: lines of accounts."""

    image: Image
    source: Host
    snapshot: Snapshot
    user: tuple[str, str]
    room_mb: int


@dataclass
class Rehearsed:
    """What a rehearsal has shown; ``parts`` are those of the start, in seconds."""

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
        """What does not work."""
        return [check for check in self.checks if not check.ok]


def rehearse(cluster: Cluster, wanted: Wanted, progress: Progress) -> Rehearsed:
    """Rehearse an image. Production is only read; a check that fails is in the result, and the others go on.

    Raises:
        ConfigError, Refused: it cannot be begun; nothing was made.
        SmsError: the rehearsal itself could not be made; nothing of it is left.
    """
    need_root()
    clear_left(cluster, progress)
    ready = prepare(cluster, wanted, progress)
    number = ready.snapshot["number"]
    with own_folder(cluster, ready.image.path, number) as (name, folder):
        done = Rehearsed(name, ready.image.path, ready.image.key, ready.image.signer, ready.source.name, number)
        try:
            _act(cluster, wanted, ready, folder, done, progress)
            done.kept = wanted.keep
        finally:
            if done.kept:
                write_record(folder, replace(read_record(folder), kept=True))
            else:
                with progress.step("remove the rehearsal"):
                    remove(folder)
    return done


def plan_rehearsal(cluster: Cluster, wanted: Wanted, progress: Progress) -> list[str]:
    """Check all that a rehearsal checks before it makes anything; give what it would do.

    Raises:
        ConfigError, Refused: as ``rehearse``.
    """
    need_root()
    ready = prepare(cluster, wanted, progress, dry_run=True)
    nodes, skipped = choose_nodes(cluster.site, wanted.nodes, {}, resolve)
    names = ", ".join(f"{name} ({address})" for name, address in nodes) or "none"
    networks = cluster.site.networks
    return [
        f"copy snapshot {ready.snapshot['number']} of {ready.source.name}: "
        f"{ready.snapshot['used_bytes'] >> 20} MiB, room for {ready.room_mb} MiB is there; check it with e2fsck",
        f"make networks of its own for {networks.provisioning.address} and {networks.public.address}, with no way out",
        f"start {ready.image.path} ({ready.image.signer}) on the copy, ask every service, look for every job",
        f"compute nodes: {names}" + "".join(f"; not {why}" for why in skipped[:5]),
        "run a job, send its mail, a page through NAT, a line of syslog, the time",
        *(["let nobody answer for the provisioning VM, and look who asks for it"] if wanted.without_vm else []),
        "leave all of it up" if wanted.keep else "remove all of it",
    ]


def bring_down(cluster: Cluster, progress: Progress) -> list[str]:
    """Remove every rehearsal that nobody is at work on, those that were kept too; give their names.

    Raises:
        Refused: there was none, but one is under way.
    """
    need_root()
    removed = clear_left(cluster, progress, kept=True)
    if not removed:
        need_none_at_work(cluster)
    return removed


def prepare(cluster: Cluster, wanted: Wanted, progress: Progress, *, dry_run: bool = False) -> Ready:
    """Look whether it can be rehearsed, on this machine and now; without ``dry_run`` the image is brought here.

    Raises:
        ConfigError, Refused: why not.
    """
    here = Local(socket.gethostname())
    check_machine()
    check_programs(here)
    if wanted.without_vm:
        need_polls(cluster)
    user = _user(cluster, wanted.user)
    choose_nodes(cluster.site, wanted.nodes, {}, lambda name: resolve(name) or _unknown(cluster))
    source = find_source(cluster, wanted.host)
    path = find_image(cluster, source, wanted.image, progress, dry_run=dry_run)
    with progress.step("verify the image") as step:
        image = trust(cluster, here, path)
        step.detail(image.signer)
    snapshot = find_snapshot(list_snapshots(cluster, source), wanted.snapshot)
    if not snapshot["health"].get("ok"):
        raise Refused(
            f"snapshot {snapshot['number']} of {source.name} is not verified",
            hint=f"sms overlay verify {snapshot['number']} --host {source.name}",
        )
    return Ready(image, source, snapshot, user, _check_room(cluster, source, snapshot, image))


def _unknown(cluster: Cluster) -> str:
    """An address for a name that may be in the container's own hosts file, which is not at hand yet."""
    network = cluster.site.provisioning_network
    return str(network.broadcast_address)


def find_source(cluster: Cluster, name: str) -> Host:
    """Where snapshots are taken from: the host named, else the one that carries the appliance, else this one.

    Raises:
        ConfigError: no admin host has that name.
        Refused: none was named, it runs nowhere, and this machine is no admin host.
    """
    if name:
        return cluster.host(name)
    lines = list_hosts(cluster)
    for line in (*(line for line in lines if line.running), *(line for line in lines if line.holds_lease)):
        return cluster.host(line.name)
    return cluster.host(None)


def resolve(name: str) -> str:
    """The address of a name as this machine knows it; empty where it does not."""
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


def find_image(cluster: Cluster, source: Host, wanted: str, progress: Progress, *, dry_run: bool = False) -> str:
    """The path of an image on this machine; one that only ``source`` has is brought here.

    Args:
        wanted: a path, or the beginning of a key in the store; empty for the current one.

    Raises:
        Refused: there is none, or more than one.
    """
    images = Path(cluster.places.images)
    path = Path(wanted or str(cluster.places.current))
    if path.is_file():
        return str(path.resolve())
    if "/" in str(path):
        return _fetch_image(cluster, source, str(path), progress, dry_run)
    fits = [one for one in images.glob("*.sif") if one.name.startswith(wanted) and not one.is_symlink()]
    if len(fits) != 1:
        what = f"{len(fits)} images have a key that begins with {wanted}" if fits else f"there is no image {wanted}"
        raise Refused(what, hint="`sms image list` shows them, `sms build` makes one")
    return str(fits[0].resolve())


def _fetch_image(cluster: Cluster, source: Host, path: str, progress: Progress, dry_run: bool) -> str:
    """An image of another host, brought into this machine's store."""
    if isinstance(source, Local) or not source.works("test", "-f", path):
        raise Refused(f"there is no image {path}", hint="`sms build` makes one, `sms image list` shows those there are")
    there = source.run("readlink", "-f", path).text
    target = Path(cluster.places.images) / Path(there).name
    digest = find_digest(source, there)
    if find_digest(Local(), str(target), needed=False) == digest:
        return str(target)
    if dry_run:
        raise Refused(f"{path} is on {source.name} alone", hint="without --dry-run it is brought here")
    if target.exists():
        target = target.with_name(f"{target.stem}-{digest[:12]}.sif")
    size = int(source.run("stat", "-c", "%s", there).text)
    with progress.step(f"bring the image of {source.name}") as step:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = target.with_name(target.name + ".new")
        with beside.open("wb") as sink:
            beside.chmod(0o600)
            source.fetch(there, sink, progress=lambda done: step.moved(done, size))
        beside.rename(target)
    return str(target)


def _check_room(cluster: Cluster, source: Host, snapshot: Snapshot, image: Image) -> int:
    """MiB that a rehearsal may take below the state folder.

    Raises:
        Refused: they are not there.
    """
    copies = 1 if isinstance(source, Local) else 2
    used = copies * snapshot["used_bytes"] + Path(image.path).stat().st_size
    need: int = (used >> 20) + SPARE_MB
    free = query_space(Local(), str(root(cluster))).free >> 20
    if free < need:
        raise Refused(
            f"a rehearsal takes {need} MiB below {cluster.site.state}, and {free} MiB are free",
            hint="make room, or rehearse on another machine: --host names whose snapshot it is",
        )
    return need


def _act(cluster: Cluster, wanted: Wanted, ready: Ready, folder: Path, done: Rehearsed, progress: Progress) -> None:
    """Make it and try everything; what fails to be made is raised, what does not work is noted."""
    mine = replace(cluster, site=rehearsal_site(cluster.site, folder, without_vm=wanted.without_vm))
    overlay = str(mine.places.overlay)
    tried = Checks(progress, done.checks)
    _copy(cluster, ready, folder, overlay, progress)
    image = _place_image(cluster, mine, ready.image, folder)
    if not tried.try_out("the copy of the overlay is whole", lambda: checks.check_file_system(Local(), overlay)):
        return
    jobs = _jobs(mine, ready, folder)
    lab = _raise_lab(mine, wanted, ready, folder, done, progress)
    with vm_off(lab, mine.site, tried) if wanted.without_vm else nullcontext():
        _try_all(mine, lab, image, jobs, wanted, done, tried)


def _try_all(
    mine: Cluster, lab: Lab, image: Path, jobs: list[int], wanted: Wanted, done: Rehearsed, tried: Checks
) -> None:
    """Start the appliance and use it."""
    names = {service.name for service in mine.services}
    inside = Inside(mine, lab.host(CARRIER))
    started: list[Started] = []

    def begin() -> str:
        found = start(
            mine, lab.host(CARRIER), tried.progress, image=image, wait_s=wanted.wait_s, keep=wanted.keep, unit=False
        )
        assert found
        started.append(found)
        done.parts = found.parts
        if missing := sorted(names - set(found.services)):
            raise SmsError(f"no answer from {', '.join(missing)}")
        slowest = max(found.services, key=lambda name: found.services[name])
        return f"{', '.join(found.services)}; the last, {slowest}, after {found.services[slowest]:.1f} s"

    what = "the image starts on it; every service answers"
    if not tried.try_out(what, begin, own_progress=True) and not started:
        return
    tried.try_out("no way out of its networks", lambda: checks.check_isolation(lab, mine))
    if mine.find_role("controller"):
        tried.try_out("the controller knows the same jobs", lambda: checks.check_jobs(inside, jobs))
    if lab.nodes:
        _use(lab, inside, tried, wanted.user)


def _use(lab: Lab, inside: Inside, tried: Checks, user: str) -> None:
    """What compute nodes want of it."""
    find_role = inside.cluster.find_role
    told: dict[str, str] = {}
    if find_role("controller"):
        if tried.try_out("compute nodes register", lambda: checks.check_nodes(lab, inside, user)):
            tried.try_out("a Slurm job from a compute node", lambda: checks.check_job(lab, inside, user, told))
    else:
        put_up_cables(lab.layout)
    if "job" in told and find_role("mail") and inside.cluster.site.mail.relay:
        tried.try_out("its mail arrives outside", lambda: demo.mail_arrives(lab.host(OUTSIDE), told["job"]))
    if find_role("routing"):
        tried.try_out("the outside, through the container's NAT", lambda: checks.check_nat(lab, inside.cluster))
    if find_role("logging"):
        tried.try_out("a node's syslog arrives in the container", lambda: checks.check_syslog(lab, inside))
    if find_role("clock"):
        tried.try_out("a node's clock follows the container", lambda: demo.clock_follows(lab.host(lab.nodes[0])))


def _copy(cluster: Cluster, ready: Ready, folder: Path, overlay: str, progress: Progress) -> None:
    """Lay the snapshot out as the rehearsal's overlay; one of another host is brought here as data first."""
    here, number, where = Local(socket.gethostname()), ready.snapshot["number"], store(cluster)
    here.run("mkdir", "-p", "-m", "0700", str(Path(overlay).parent))
    if not isinstance(ready.source, Local):
        where = str(folder / "snapshots")
        number = _bring(cluster, ready.source, number, where, progress)
    agent.ask(here, "restore", {"store": where, "snapshot": str(number), "target": overlay}, progress)


def _bring(cluster: Cluster, source: Host, number: int, where: str, progress: Progress) -> int:
    taking_in = {
        "store": where,
        "cluster": cluster.site.cluster,
        "state": state_paths(cluster),
        "heads": state_heads(cluster),
        "origin": source.name,
        "what": f"bring snapshot {number} of {source.name}",
    }
    giving_out = {"store": store(cluster), "snapshot": number, "compress": True}
    with (
        agent.converse(source, "export", giving_out) as giving,
        agent.converse(Local(), "import", taking_in, progress) as taking,
    ):
        said = connect(giving, taking)
    return int(said["snapshot"]["number"])


def _place_image(cluster: Cluster, mine: Cluster, image: Image, folder: Path) -> Path:
    """The image and the keys it is held against, where the rehearsal sees them; it is verified there once more."""
    target = Path(mine.places.images) / f"{image.key}.sif"
    here = Local()
    here.run("mkdir", "-p", "-m", "0700", str(target.parent))
    # Not a second name for the same file: loop devices on it are looked for, and production's may be among them.
    script = 'umask 077; exec cp --reflink=auto -T "$1" "$2"'
    here.run("sh", "-c", script, "place", image.path, str(target), timeout=600)
    for number, key in enumerate(cluster.site.signing.public_keys):
        here.write(str(key_copy(folder, number, key)), key.read_bytes()) if key.is_file() else None
    return target


def _jobs(mine: Cluster, ready: Ready, folder: Path) -> list[int]:
    """Ids of the jobs that the snapshot's state has; none where there is no controller."""
    if not (controller := mine.find_role("controller")):
        return []
    overlay, taken = str(mine.places.overlay), ready.snapshot["taken"]
    return checks.jobs_in_state(overlay, str(folder / "look"), controller.state[0], taken)


def _raise_lab(mine: Cluster, wanted: Wanted, ready: Ready, folder: Path, done: Rehearsed, progress: Progress) -> Lab:
    overlay = str(mine.places.overlay)
    hosts = read_hosts(ext3.read_inside(Local(), overlay, "/upper/etc/hosts").decode(errors="replace"))
    nodes, skipped = choose_nodes(mine.site, wanted.nodes, hosts, resolve)
    done.nodes = [name for name, _ in nodes]
    if len(nodes) < wanted.nodes:
        progress.say(f"note: {len(nodes)} compute nodes instead of {wanted.nodes}: {'; '.join(skipped) or 'no more'}")
    given = mine.site.secrets.munge_key
    munge = given.read_bytes() if given else ext3.read_inside(Local(), overlay, "/upper/etc/munge/munge.key")
    plan = make_plan(mine.site, nodes, folder=folder, user=ready.user, without_vm=wanted.without_vm)
    layout = Layout(done.name, len(nodes), plan)
    up_planned(layout, munge, progress)
    return Lab.open(done.name)
