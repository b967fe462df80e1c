"""``sms lab capture``: capture a lab's provisioning network to a file."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.local import Local
from appliance.lab import Lab
from appliance.lab.capture import SWITCH, in_network, listener
from appliance.operations.site.find import open_site
from appliance.plan.machine import instance_name
from appliance.progress import Progress
from appliance.tools import apptainer, tcpdump
from appliance.tools.programs import has_program

CONTAINER = "sms"
STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class Captured:
    """Result of a capture.

    Attributes:
        at, interface: the capture point; the switch sees the traffic of all hosts.
        received: packets seen by the kernel; more than ``packets`` if tcpdump ended before it had read the last second.
        dropped: packets lost because buffers were full.
        interrupted: ended early by Ctrl-C or SIGTERM.
    """

    lab: str
    at: str
    interface: str
    file: str
    packets: int
    bytes: int
    seconds: float
    received: int
    dropped: int
    interrupted: bool


def lab_capture(
    name: str,
    progress: Progress,
    *,
    seconds: float = 60,
    at: str = SWITCH,
    output: str | None = None,
    force: bool = False,
) -> Captured:
    """Capture for ``seconds``, or until Ctrl-C, with a snap length that covers an MTU of 1500 bytes.

    Args:
        at: ``switch``, ``sms`` (the container's interface), or a host on the provisioning network.
        output: the file; ``-`` is standard output (default: LAB-TIME.pcap in the current folder, in UTC).

    Raises:
        Refused: no tcpdump, or the file exists and ``force`` is not set.
        ConfigError: there is no such capture point, or the file cannot be created.
        SmsError: there is no such lab, or the capture failed: the disk is full, the lab went down.
    """
    lab = Lab.open(name)
    host, interface = _container(lab) if at == CONTAINER else listener(lab.layout, at)
    if not has_program(Local(), "tcpdump"):
        raise Refused("tcpdump is not installed", hint="apt-get install tcpdump")
    file = output or f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.pcap"
    began = time.monotonic()
    with _sink(file, force) as sink, progress.step(f"capture {interface} at {at}, {seconds:g} s") as step:
        recorded = tcpdump.record(
            host, interface, sink, seconds=seconds, moved=lambda total: step.detail(f"{total >> 10} KiB")
        )
    counts = recorded.counts
    took = round(time.monotonic() - began, 1)
    return Captured(
        *(name, at, interface, file, counts.packets, recorded.bytes, took),
        *(counts.received, counts.dropped, recorded.interrupted),
    )


def _container(lab: Lab) -> tuple[Local, str]:
    """Return the network of the running services container; eth0 is its provisioning interface."""
    name = instance_name(open_site(lab.etc / "sms.yaml").site)
    off = lab.off()
    for carrier in (host.name for host in lab.layout.hosts if host.kind == "carrier" and host.name not in off):
        host = lab.host(carrier)
        instance = apptainer.find_instance(host, name)
        if instance:
            # The pid is in that host's PID namespace.
            return in_network(CONTAINER, f"/proc/{host.pid}/root/proc/{instance.pid}/ns/net"), "eth0"
    raise Refused(
        f"the services container is not running in lab {lab.name}",
        hint=f"sms lab exec --name {lab.name} admin -- sms start --host host-a",
    )


@contextmanager
def _sink(file: str, force: bool) -> Iterator[int]:
    """Open the output; an empty file is removed at the end."""
    if file == STANDARD_OUTPUT:
        if sys.stdout.isatty():
            raise ConfigError("will not write a capture to a terminal", hint="-o FILE, or `| sms classify -`")
        yield sys.stdout.fileno()
        return
    path = Path(file)
    descriptor = _create(path, force)
    try:
        yield descriptor
    except OSError as error:
        kept = f"; its first {path.stat().st_size >> 10} KiB are kept"
        raise SmsError(f"{path}: {error.strerror}{kept}", hint=f"check the space: df -h {path.parent}") from error
    except SmsError as error:
        kept = f"; the packets before are in {path}" if path.stat().st_size else ""
        raise SmsError(f"{error.message}{kept}", hint=error.hint) from error
    finally:
        os.close(descriptor)
        if path.stat().st_size == 0:
            path.unlink()


def _create(path: Path, force: bool) -> int:
    """Create a file of mode 0600: the traffic of nodes contains credentials."""
    try:
        if force and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        hint = "choose another file with -o" + (", or replace it with --force" if path.is_file() else "")
        raise Refused(f"{path} already exists", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="choose another file with -o") from None
    owner = [os.environ.get(name, "") for name in ("SUDO_UID", "SUDO_GID")]
    if os.geteuid() == 0 and all(number.isdecimal() for number in owner):
        os.chown(descriptor, *map(int, owner))  # the user who called sudo
    return descriptor
