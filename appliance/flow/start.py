"""``sms start``: verified, leased, seeded, started, announced, probed; or nothing."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from appliance.errors import Refused, RolledBack, SmsError
from appliance.flow.boot import install_unit
from appliance.flow.context import Cluster
from appliance.flow.image import Image, deliver, trust
from appliance.flow.lease import look_at_lease, release_lease, take_lease
from appliance.flow.overlay import archive_for, prove_writable, ready_overlay
from appliance.host.base import CommandError, Host
from appliance.plan.lease import Lease, take
from appliance.plan.machine import inside_argv, instance_name, seed_argv, start_argv, stop_argv
from appliance.plan.network import conflists
from appliance.progress import Progress
from appliance.tools import apptainer, bridge

PROGRAMS = ("apptainer", "arping", "debugfs", "e2fsck", "flock", "losetup")
PROBE = "/opt/sms/bin/sms-probe"


@dataclass
class Started:
    """What a start did, and how long each part took, in seconds."""

    host: str
    image: str
    key: str
    signer: str
    generation: int
    already: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    services: dict[str, float] = field(default_factory=dict)


def start(
    cluster: Cluster,
    host: Host,
    progress: Progress,
    *,
    image: Path | None = None,
    wait_s: float = 60,
    keep: bool = False,
    boot: bool = False,
) -> Started | None:
    """Start the appliance on ``host`` and wait until every service answers.

    Args:
        image: another image than the current one.
        wait_s: seconds that the services may take.
        keep: leave it running although a service does not come up.
        boot: start only what ran here when the host went down; None when nothing did.

    Raises:
        Refused: something is missing or in the way; nothing was changed.
        RolledBack: a step failed, and all before it was undone.
    """
    if boot and look_at_lease(host, cluster).holder != host.name:
        return None
    try:
        with host.lock(str(cluster.places.lock)):
            return _start(cluster, host, progress, image, wait_s, keep)
    except CommandError as error:
        if error.result.status == 75:
            raise Refused(f"another sms is at work on {host.name}", hint="wait for it, then run this again") from error
        raise


def rehearse_start(cluster: Cluster, host: Host, progress: Progress, *, image: Path | None = None) -> list[str]:
    """Check all that a start checks; give the commands it would run. Sends the image, changes nothing else.

    Raises:
        Refused: as a start would.
    """
    with progress.step("check the host"):
        preflight(cluster, host)
        refuse_taken(cluster, host)
    trusted = trust(cluster, host, deliver(cluster, host, image, progress, before_sending=lambda: None))
    take(look_at_lease(host, cluster), host.name, now=time.time())
    archive_for(cluster)
    overlay = str(cluster.places.overlay)
    seed = shlex.join(seed_argv(cluster.site, trusted.path, overlay))
    make = (
        []
        if host.works("test", "-e", overlay)
        else [f"apptainer overlay create --size {cluster.site.overlay.size_mb} --sparse {overlay}"]
    )
    return [*make, f"{seed} <the site's files>", shlex.join(start_argv(cluster.site, trusted.path))]


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


def _start(cluster: Cluster, host: Host, progress: Progress, chosen: Path | None, wait_s: float, keep: bool) -> Started:
    parts: dict[str, float] = {}
    clock = Clock(parts)
    running = apptainer.find_instance(host, instance_name(cluster.site))
    if running:
        return _already(cluster, host, progress, running.image, wait_s)
    with progress.step("check the host"):
        preflight(cluster, host)
    clock.lap("preflight")
    where = cluster.places
    # Made only where missing: a shared folder keeps the mode its owner gave it.
    host.run(
        "mkdir",
        "-p",
        "-m",
        "0700",
        *(str(p) for p in (where.images, where.overlay.parent, where.journal, where.public_keys)),
    )
    with ThreadPoolExecutor(1) as pool:
        # An address that nobody has takes a second to ask for: the image is verified meanwhile.
        asked = pool.submit(refuse_taken, cluster, host)
        path = deliver(cluster, host, chosen, progress, before_sending=asked.result)
        clock.lap("deliver")
        with progress.step("verify the signature; ask for the addresses") as step:
            image = trust(cluster, host, path)
            asked.result()
            step.detail(image.signer)
    clock.lap("verify")
    with ExitStack() as undo:
        with progress.step("take the lease") as step:
            lease = take_lease(host, cluster)
            step.detail(f"generation {lease.generation}")
        undo.callback(_let_go, host, cluster)
        started = Started(host.name, image.path, image.key, image.signer, lease.generation, parts=parts)
        try:
            ready_overlay(cluster, host, image, progress)
            clock.lap("overlay")
            _run(cluster, host, progress, image, undo)
            clock.lap("instance")
            started.services = _wait(cluster, host, progress, wait_s, keep)
            clock.lap("probes")
            with progress.step("prove that the overlay can be written"):
                prove_writable(host, inside_argv(cluster.site))
            clock.lap("write")
            _record(cluster, host, image, lease)
        except Refused:
            raise
        except SmsError as error:
            raise RolledBack(f"{error.message}\n  what had been started is stopped again", hint=error.hint) from error
        undo.pop_all()
    install_unit(cluster, host, progress)
    clock.lap("record")
    return started


def _let_go(host: Host, cluster: Cluster) -> None:
    with suppress(SmsError):
        release_lease(host, cluster)


def _already(cluster: Cluster, host: Host, progress: Progress, image: str, wait_s: float) -> Started:
    lease = look_at_lease(host, cluster)
    if lease.holder != host.name:
        raise Refused(
            f"the appliance runs on {host.name}, but {lease.holder or 'nobody'} holds the lease",
            hint=f"two hosts must never run it: sms stop --host {host.name}",
        )
    services = _wait(cluster, host, progress, wait_s, True)
    note = json.loads(host.read(f"{cluster.places.journal}/{cluster.site.cluster}.json") or b"{}")
    return Started(
        host.name, image, note.get("key", ""), note.get("signer", ""), lease.generation, already=True, services=services
    )


def preflight(cluster: Cluster, host: Host) -> None:
    """Whether the host can carry the appliance.

    Raises:
        Refused: with everything that is missing or in the way.
    """
    site = cluster.site
    found = host.run("sh", "-c", 'for p; do command -v "$p" >/dev/null && echo "$p"; done', "find", *PROGRAMS, ok=None)
    problems = [f"{program} is not installed" for program in PROGRAMS if program not in found.text.split()]
    for network in (site.networks.provisioning, site.networks.public):
        ports = bridge.bridge_ports(host, network.bridge)
        if ports is None:
            problems.append(f"there is no bridge {network.bridge}")
        elif not ports:
            problems.append(f"bridge {network.bridge} has no port that is up: the container would stand alone")
    if problems:
        raise Refused(
            f"{host.name} cannot carry the appliance: " + "; ".join(problems),
            hint=f"`sms doctor --host {host.name}` tells what mends it; `sms host prepare {host.name}` does most of it",
        )


def refuse_taken(cluster: Cluster, host: Host) -> None:
    """Whether both addresses of the container are free on their networks.

    Raises:
        Refused: a machine answers for one of them.
    """
    networks = (cluster.site.networks.provisioning, cluster.site.networks.public)
    taken = bridge.taken(host, {network.bridge: str(network.address.ip) for network in networks})
    if any(mac.lower() in {network.mac.lower() for network in networks} for mac in taken.values()):
        raise Refused(
            "the appliance runs already, on another host: its own MAC address answers",
            hint="`sms host list` shows where",
        )
    if taken:
        who = "; ".join(f"{address} is taken, by {mac}" for address, mac in taken.items())
        raise Refused(who, hint="does the old management node still have it?")


def _run(cluster: Cluster, host: Host, progress: Progress, image: Image, undo: ExitStack) -> None:
    """Write the networks and start the instance."""
    for path, text in conflists(cluster.site).items():
        host.write(path, text.encode())
    with progress.step("start the instance"):
        # Before the command: killed in its middle, it may have started all the same.
        undo.callback(_stop_again, host, cluster)
        host.run(*start_argv(cluster.site, image.path), timeout=60)


def _stop_again(host: Host, cluster: Cluster) -> None:
    with suppress(SmsError):
        if apptainer.find_instance(host, instance_name(cluster.site)):
            host.run(*stop_argv(cluster.site), ok=None, timeout=300)


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
            step.detail(
                f"{len(took)} of {len(names)} answer" + (f"; waiting for {', '.join(missing)}" if missing else "")
            )

        _inside_lines(cluster, host, wait_s, names, on_line)
        if failed and not keep:
            raise SmsError(_story(cluster, host, failed), hint="`sms start --keep` leaves it running to look at")
    if failed:
        progress.say(_story(cluster, host, failed))
    return took


def _inside_lines(
    cluster: Cluster, host: Host, wait_s: float, names: list[str], on_line: Callable[[str], None]
) -> None:
    argv = inside_argv(cluster.site, PROBE, "--wait", f"{wait_s:g}", *names)
    host.run(*argv, ok=(0, 4), timeout=wait_s + 30, on_line=on_line)


def _story(cluster: Cluster, host: Host, failed: dict[str, str]) -> str:
    """Why services do not answer, each with the end of its log."""
    lines = []
    for name, detail in failed.items():
        lines.append(f"{name} does not answer: {detail}")
        log = host.run(*inside_argv(cluster.site, "tail", "-n", "8", f"/var/log/sms/{name}.log"), ok=None).text
        lines += [f"    {line}" for line in log.splitlines()]
    return "\n".join(lines)


def _record(cluster: Cluster, host: Host, image: Image, lease: Lease) -> None:
    """Write down what runs, for status and for the next verb."""
    note = {
        "image": image.path,
        "key": image.key,
        "sha256": image.sha256,
        "signer": image.signer,
        "generation": lease.generation,
        "host": host.name,
        "started": time.time(),
    }
    host.write(f"{cluster.places.journal}/{cluster.site.cluster}.json", json.dumps(note, indent=1).encode())
    current, (folder, _, name) = str(cluster.places.current), image.path.rpartition("/")
    if folder == str(cluster.places.images) and f"{folder}/{name}" != current:
        # What runs is what this host starts again, after a reboot above all.
        host.run("sh", "-c", 'ln -sfn "$1" "$2.new" && mv -fT "$2.new" "$2"', "current", name, current)
