"""``sms lab capture``: what passes a lab's provisioning network, in a file."""

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
    """A capture that was made.

    Attributes:
        at, interface: where; the switch sees what all hosts send.
        received: what the kernel saw; more than ``packets`` where tcpdump ended before it had read the last second's.
        dropped: packets lost for want of room.
        interrupted: it ended before its time, by Ctrl-C or SIGTERM.
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
    """Capture for so long, or until Ctrl-C: of each frame as much as a network of 1500 bytes carries.

    Args:
        at: ``switch``, ``sms`` (the container's own interface), or a host on the provisioning network.
        output: the file; ``-`` is standard output; without one, lab and time (UTC) in the current folder.

    Raises:
        Refused: no tcpdump, or the file is there already and ``force`` is not given.
        ConfigError: there is no such place, or no file can be made there.
        SmsError: there is no such lab, or the capture ended by itself: the disk is full, the lab went down.
    """
    lab = Lab.open(name)
    host, interface = _container(lab) if at == CONTAINER else listener(lab.layout, at)
    if not has_program(Local(), "tcpdump"):
        raise Refused("this machine has no tcpdump", hint="apt-get install tcpdump")
    file = output or f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.pcap"
    began = time.monotonic()
    with _sink(file, force) as sink, progress.step(f"Capturing {interface} at {at}, {seconds:g} s") as step:
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
    """The network of the services container, on whichever host it runs; eth0 is its provisioning side."""
    name = instance_name(open_site(lab.etc / "sms.yaml").site)
    for carrier in (host.name for host in lab.layout.hosts if host.kind == "carrier"):
        host = lab.host(carrier)
        instance = apptainer.find_instance(host, name)
        if instance:
            # The pid is one of that host's: its own /proc knows it.
            return in_network(CONTAINER, f"/proc/{host.pid}/root/proc/{instance.pid}/ns/net"), "eth0"
    raise Refused(
        f"the services container does not run in lab {lab.name}",
        hint=f"sms lab exec --name {lab.name} admin -- sms start --host host-a",
    )


@contextmanager
def _sink(file: str, force: bool) -> Iterator[int]:
    """The descriptor to write to. A file that nothing came into is removed again."""
    if file == STANDARD_OUTPUT:
        if sys.stdout.isatty():
            raise ConfigError("a capture is nothing to read on a terminal", hint="-o FILE, or `| sms classify -`")
        yield sys.stdout.fileno()
        return
    path = Path(file)
    descriptor = _create(path, force)
    try:
        yield descriptor
    except OSError as error:
        kept = f"; its first {path.stat().st_size >> 10} KiB are kept"
        raise SmsError(f"{path}: {error.strerror}{kept}", hint=f"`df -h {path.parent}` tells where room is") from error
    except SmsError as error:
        kept = f"; what came before is in {path}" if path.stat().st_size else ""
        raise SmsError(f"{error.message}{kept}", hint=error.hint) from error
    finally:
        os.close(descriptor)
        if path.stat().st_size == 0:
            path.unlink()


def _create(path: Path, force: bool) -> int:
    """A new file that its user alone can read: there are credentials in what nodes send."""
    try:
        if force and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        hint = "name another file with -o" + (", or replace it with --force" if path.is_file() else "")
        raise Refused(f"{path} is there already", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name another file with -o") from None
    owner = [os.environ.get(name, "") for name in ("SUDO_UID", "SUDO_GID")]
    if os.geteuid() == 0 and all(number.isdecimal() for number in owner):
        os.chown(descriptor, *map(int, owner))  # who called sudo is its user
    return descriptor
