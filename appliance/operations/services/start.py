"""``sms start``: verified, leased, seeded, started, announced, probed; or nothing."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster, runtime_files
from appliance.operations.history import note
from appliance.operations.hosts.preflight import check_bridges, check_programs, only_one, refuse_taken
from appliance.operations.image.deliver import Image, deliver, trust
from appliance.operations.migration.lease import Leases, look_around, look_at_lease, put_lease_back, take_lease
from appliance.operations.migration.unfinished import take_up
from appliance.operations.overlay.mirrored import open_mirror
from appliance.operations.overlay.overlay import (
    archive_for,
    check_overlay,
    overlay_commands,
    overlay_mark,
    prove_writable,
    put_aside,
    ready_overlay,
    running_mark,
)
from appliance.operations.services.boot import install_unit
from appliance.operations.services.guarded import start_guard
from appliance.operations.services.stop import take_down
from appliance.operations.upgrade.note import image_of_unfinished
from appliance.plan.image.definition import runtime_digest
from appliance.plan.machine import inside_argv, instance_name, start_argv
from appliance.plan.migration.lease import Lease, find_newer
from appliance.plan.services.network import conflists
from appliance.plan.services.note import StartNote
from appliance.progress import Progress
from appliance.shared.records import RecordError, from_json, to_json
from appliance.tools import apptainer

SETTLED_S = 10
"""Seconds that services of an appliance that runs already may take to answer."""
BOOT_PATIENCE_S = 30
"""Seconds that a start after a boot waits for the other admin hosts to tell who holds the lease."""
FRESH_S = 5
"""Age in seconds of what other hosts said of the lease from which on they are asked again."""
DISKS_S = 60
"""Seconds that the disks of a mirror may come late after a boot; then a start does without."""
PROBE = "/opt/sms/bin/sms-probe"


@dataclass
class Started:
    """What a start did, and how long each part took, in seconds.

    ``stale``: it ran already, and the site file or the image has changed since it was started.
    """

    host: str
    image: str
    key: str
    signer: str
    generation: int
    already: bool = False
    stale: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    services: dict[str, float] = field(default_factory=dict)


class Clock:
    """Measures the parts of a start."""

    def __init__(self, parts: dict[str, float]) -> None:
        self.parts = parts
        self.last = time.monotonic()

    def lap(self, name: str) -> None:
        """The part that ends now."""
        now = time.monotonic()
        self.parts[name] = round(now - self.last, 3)
        self.last = now


def start(
    cluster: Cluster,
    host: Host,
    progress: Progress,
    *,
    image: Path | None = None,
    wait_s: float = 60,
    keep: bool = False,
    boot: bool = False,
    unit: bool = True,
    fenced: Collection[str] = (),
    leap: int = 1,
) -> Started | None:
    """Start the appliance on ``host`` and wait until every service answers.

    Args:
        image: another image than the current one.
        wait_s: seconds that the services may take.
        keep: leave it running although a service does not come up.
        boot: start only what ran here when the host went down; None when nothing did, or another host took over.
        unit: have it started again after a reboot of the host, and guarded until then.
        fenced: admin hosts that are surely off: the lease is taken although they hold it.
        leap: how much the lease's generation grows.

    Raises:
        Refused: something is missing or in the way; nothing was changed.
        RolledBack: a step failed, and all before it was undone.
        SmsError: a step failed, and what it had started could not be stopped; the lease is kept.
    """
    check_programs(host)
    take_up(cluster, host, progress)
    if boot and not _is_still_held(cluster, host, progress):
        return None
    image = image or image_of_unfinished(cluster, host, progress)
    with only_one(host, str(cluster.places.lock), f"another sms is at work on {host.name}"):
        running = apptainer.find_instance(host, instance_name(cluster.site))
        if running:
            started = _already(cluster, host, progress, running.image, wait_s)
        else:
            how = How(image, wait_s, keep, DISKS_S if boot else 0, tuple(fenced), leap)
            started = _start(cluster, host, progress, how)
    # After the lock: starting the unit runs `sms start --boot`, which takes it.
    if unit:
        install_unit(cluster, host, progress)
        start_guard(cluster, host, progress)
    return started


def _is_still_held(cluster: Cluster, host: Host, progress: Progress) -> bool:
    """Whether the appliance ran here when the host went down, and nobody has taken over since."""
    if look_at_lease(host, cluster).holder != host.name:
        return False
    leases = Leases(host, cluster)
    newer = find_newer(host.name, leases.look(patience_s=BOOT_PATIENCE_S))
    if not newer:
        return True
    try:
        leases.adopt(newer)
    except Refused:  # the other host may have told it just now
        if look_at_lease(host, cluster).holder == host.name:
            raise
    kept = put_aside(cluster, host, newer.generation)
    note(cluster, host, "start", "gave way", holder=newer.holder, generation=newer.generation, kept=kept)
    progress.say(f"{newer.holder} has taken over (generation {newer.generation}): nothing is started on {host.name}")
    return False


def rehearse_start(cluster: Cluster, host: Host, progress: Progress, *, image: Path | None = None) -> list[str]:
    """Check all that a start checks; give the commands it would run. Sends the image, changes nothing else.

    Raises:
        Refused: as a start would.
    """
    check_programs(host)
    if apptainer.find_instance(host, instance_name(cluster.site)):
        raise Refused(f"the appliance runs on {host.name} already", hint="`sms status` asks every service")
    with progress.step("check the host"):
        check_bridges(cluster, host)
        refuse_taken(cluster, host)
    trusted = trust(cluster, host, deliver(cluster, host, image, progress, before_sending=lambda: None))
    look_around(host, cluster).check()
    exists = check_overlay(cluster, host)
    mark = overlay_mark(archive_for(cluster), trusted)
    return [*overlay_commands(cluster, trusted, mark, exists), shlex.join(start_argv(cluster.site, trusted.path))]


def _already(cluster: Cluster, host: Host, progress: Progress, path: str, wait_s: float) -> Started:
    """It runs on this host: wait until it serves, and say whether it is what the site file says now."""
    lease = look_at_lease(host, cluster)
    if lease.holder != host.name:
        raise Refused(
            f"the appliance runs on {host.name}, but {lease.holder or 'nobody'} holds the lease",
            hint=f"two hosts must never run it: sms stop --host {host.name}",
        )
    newer = find_newer(host.name, look_around(host, cluster).views)
    if newer:
        raise Refused(
            f"the appliance runs on {host.name}, but {newer.holder} has taken over (generation {newer.generation})",
            hint=f"two hosts must never run it: sms stop --host {host.name}",
        )
    written = read_note(cluster, host)
    services = _wait(cluster, host, progress, min(wait_s, SETTLED_S), True)
    if written and written.image == path:
        image = Image(path, written.key, written.sha256, written.signer)
    else:
        # The start that made it was killed before it could write that down.
        image = trust(cluster, host, path)
        record_start(cluster, host, image, lease)
    stale = running_mark(cluster, host) != overlay_mark(archive_for(cluster), image)
    if stale:
        progress.say("note: the site file has changed since it was started; `sms stop` and `sms start` apply it")
    return Started(
        host.name, path, image.key, image.signer, lease.generation, already=True, stale=stale, services=services
    )


@dataclass(frozen=True)
class How:
    """How to start, as the caller wants it."""

    image: Path | None
    wait_s: float
    keep: bool
    disks_s: float
    fenced: tuple[str, ...]
    leap: int


def _start(cluster: Cluster, host: Host, progress: Progress, how: How) -> Started:
    parts: dict[str, float] = {}
    clock = Clock(parts)
    leases = Leases(host, cluster, without=how.fenced)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(leases.look)  # the others answer while the image is verified
        with progress.step("check the host"):
            check_bridges(cluster, host)
            check_overlay(cluster, host)
        clock.lap("preflight")
        image = _verified(cluster, host, progress, how.image, clock)
        asked.result()
    before = look_at_lease(host, cluster)
    began = False
    try:
        with progress.step("take the lease") as step:
            if time.monotonic() - leases.looked > FRESH_S:
                leases.look()
            leases.check()  # refuses before anything is changed
            began = True  # before the swap, whose answer may be lost
            try:
                lease = take_lease(host, cluster, leases=leases, leap=how.leap)
            except Refused:
                began = False  # somebody else was faster; it is theirs
                raise
            silent = ", ".join(leases.silent)
            step.detail(f"generation {lease.generation}" + (f"; {silent} cannot be asked" if silent else ""))
        started = Started(host.name, image.path, image.key, image.signer, lease.generation, parts=parts)
        open_mirror(cluster, host, progress, patience_s=how.disks_s)
        ready_overlay(cluster, host, image, progress)
        clock.lap("overlay")
        for path, text in conflists(cluster.site).items():
            host.write(path, text.encode())
        with progress.step("start the instance"):
            apptainer.run_container(host, *start_argv(cluster.site, image.path), timeout=60)
            # A read-only overlay only warns and goes on; services would fail one by one.
            prove_writable(host, inside_argv(cluster.site))
        clock.lap("instance")
        started.services = _wait(cluster, host, progress, how.wait_s, how.keep)
        clock.lap("probes")
        record_start(cluster, host, image, lease)
        note(cluster, host, "start", "started", generation=lease.generation, image=image.key)
        clock.lap("record")
    except BaseException as error:
        if began:
            _undo(cluster, host, before, error)
        if isinstance(error, Refused) or not isinstance(error, SmsError):
            raise
        raise RolledBack(f"{error.message}\n  what had been started is stopped again", hint=error.hint) from error
    return started


def _verified(cluster: Cluster, host: Host, progress: Progress, chosen: Path | None, clock: Clock) -> Image:
    """The image on the host, trusted; the addresses are asked for meanwhile."""
    where = cluster.places
    folders = (where.images, where.overlay.parent, where.journal, where.public_keys)
    # Made only where missing: a shared folder keeps the mode its owner gave it.
    host.run("mkdir", "-p", "-m", "0700", *(str(path) for path in folders))
    with ThreadPoolExecutor(1) as pool:
        # An address that nobody has takes a second to ask for.
        asked = pool.submit(refuse_taken, cluster, host)
        path = deliver(cluster, host, chosen, progress, before_sending=asked.result)
        clock.lap("deliver")
        with progress.step("verify the signature; ask for the addresses") as step:
            image = trust(cluster, host, path)
            asked.result()
            step.detail(image.signer)
    if image.runtime != runtime_digest(runtime_files()):
        progress.say("note: the image was built by another version of sms; `sms build` makes one that fits this one")
    clock.lap("verify")
    return image


def _undo(cluster: Cluster, host: Host, before: Lease, cause: BaseException) -> None:
    """Stop what was started and put the lease back; keep it unless the overlay is surely free.

    Raises:
        SmsError: it could not be stopped.
    """
    try:
        take_down(cluster, host)
        put_lease_back(host, cluster, before)
    except SmsError as error:
        raise SmsError(
            f"{cause}\n  and what had been started could not be stopped: {error.message}",
            hint=f"{host.name} keeps the lease; `sms stop --host {host.name}` finishes it",
        ) from cause


def _wait(cluster: Cluster, host: Host, progress: Progress, wait_s: float, keep: bool) -> dict[str, float]:
    """Wait until every service answers; give the seconds that each took.

    Raises:
        SmsError: one did not come up; its last log lines are in the message.
    """
    took: dict[str, float] = {}
    failed: dict[str, str] = {}
    names = [service.name for service in cluster.services]
    with progress.step("wait for the services") as step:

        def on_line(line: str) -> None:
            answer = json.loads(line)
            if answer["ok"]:
                took[answer["name"]] = answer["after_s"]
            else:
                failed[answer["name"]] = answer["detail"]
            missing = [name for name in names if name not in took]
            waiting = f"; waiting for {', '.join(missing)}" if missing else ""
            step.detail(f"{len(took)} of {len(names)} answer{waiting}")

        argv = inside_argv(cluster.site, PROBE, "--wait", f"{wait_s:g}", *names)
        host.run(*argv, ok=(0, 4), timeout=wait_s + 30, on_line=on_line)
        if failed and not keep:
            raise SmsError(_story(cluster, host, failed), hint="`sms start --keep` leaves it running to look at")
    if failed:
        progress.say(_story(cluster, host, failed))
    return took


def _story(cluster: Cluster, host: Host, failed: dict[str, str]) -> str:
    """Why services do not answer, each with the end of its log."""
    lines = []
    for name, detail in failed.items():
        lines.append(f"{name} does not answer: {detail}")
        log = host.run(*inside_argv(cluster.site, "tail", "-n", "8", f"/var/log/sms/{name}.log"), ok=None).text
        lines += [f"    {line}" for line in log.splitlines()]
    return "\n".join(lines)


def read_note(cluster: Cluster, host: Host) -> StartNote | None:
    """What was written down at the last start; None where nothing readable is: the next start writes it anew."""
    data = host.read(f"{cluster.places.journal}/{cluster.site.cluster}.json")
    try:
        return from_json(StartNote, data) if data is not None else None
    except RecordError:
        return None


def record_start(cluster: Cluster, host: Host, image: Image, lease: Lease) -> None:
    """Write down what runs, for status and for the next verb."""
    note = StartNote(image.path, image.key, image.sha256, image.signer, lease.generation, host.name, time.time())
    host.write(f"{cluster.places.journal}/{cluster.site.cluster}.json", to_json(note))
    current, (folder, _, name) = str(cluster.places.current), image.path.rpartition("/")
    if folder == str(cluster.places.images) and f"{folder}/{name}" != current:
        # What runs is what this host starts again, after a reboot above all.
        host.run("sh", "-c", 'ln -sfn "$1" "$2.new" && mv -fT "$2.new" "$2"', "current", name, current)
