"""What the processes of the services container may do: capabilities, system calls, writable parts of /proc."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.catalog import Service
from appliance.catalog.model import Capability

NUMBERS: dict[Capability, int] = {
    "AUDIT_WRITE": 29,
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "KILL": 5,
    "NET_ADMIN": 12,
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
    "SETGID": 6,
    "SETPCAP": 8,
    "SETUID": 7,
    "SYS_CHROOT": 18,
}
"""Their bits (linux/capability.h)."""

SUPERVISOR: dict[Capability, str] = {
    "CHOWN": "sms-apply, sms-filesync and the preparation of services give files to their owners",
    "DAC_OVERRIDE": "the same write to folders of other users, such as the mark in slurmctld's",
    "FOWNER": "the same set the mode of files of other users",
    "KILL": "sms-supervise stops daemons of other users",
    "NET_RAW": "sms-init announces the addresses (arping), and sms-probe sends packets as a node would",
    "SETGID": "sms-run changes to the groups of a service",
    "SETPCAP": "sms-run removes the capabilities that a service does not have",
    "SETUID": "sms-run changes to the user of a service",
}
"""Capabilities of the programs that every container has, besides those of its services, and what needs each."""

NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")
"""Those that a process of the image does not share with the host (names of /proc/PID/ns)."""

HIDDEN_FOLDERS = ("/proc/acpi", "/proc/asound", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/scsi", "/proc/sys/fs")
HIDDEN_FILES = ("/proc/kcore", "/proc/keys", "/proc/sched_debug", "/proc/sysrq-trigger", "/proc/timer_list")
"""Parts of /proc that control or describe the host and that root can write or read by its user id alone.

A file system of the host may be mounted below /proc/fs (nfsd) and /proc/sys/fs (binfmt_misc), now or later.
"""
READ_ONLY = ("/proc/sys", "/etc/localtime")


@dataclass(frozen=True)
class Confinement:
    """What a container is given on one host; ``present``: those of the paths below that this host has.

    Attributes:
        seccomp: path of the profile on the host.
        empty: path of an empty folder on the host.
    """

    capabilities: tuple[Capability, ...]
    seccomp: str
    empty: str
    present: tuple[str, ...] = (*HIDDEN_FOLDERS, *HIDDEN_FILES, *READ_ONLY)

    def options(self) -> list[str]:
        """Return the options of every run of the image, also on engines.

        /sys is not mounted at all. A mount point is covered after those that contain it.
        """
        binds = [f"{path}:{path}:ro" for path in READ_ONLY if path in self.present]
        binds += [f"{self.empty}:{path}:ro" for path in HIDDEN_FOLDERS if path in self.present]
        binds += [f"/dev/null:{path}:ro" for path in HIDDEN_FILES if path in self.present]
        return [
            *privilege_options(self.capabilities),
            *("--security", f"seccomp:{self.seccomp}"),
            *("--no-mount", "sys", "--no-mount", "/etc/localtime", "--no-mount", "/etc/hosts"),
            *(f"--bind={bind}" for bind in binds),
        ]


def capabilities_for(services: Sequence[Service]) -> tuple[Capability, ...]:
    """Return the capabilities of a container with these services, sorted."""
    return tuple(sorted({*SUPERVISOR, *(name for service in services for name in service.capabilities)}))


def privilege_options(capabilities: Sequence[str]) -> list[str]:
    """Return the options by which a process has these capabilities and can gain no others (no_new_privs)."""
    added = ",".join(f"CAP_{name}" for name in capabilities)
    return ["--no-privs", *(("--add-caps", added) if added else ())]


def number_of(capabilities: Sequence[Capability]) -> int:
    """Return capabilities as the kernel shows them: a bit each."""
    return sum(1 << NUMBERS[name] for name in capabilities)


def is_unconfined(status: str) -> bool:
    """Return whether the process with this ``/proc/PID/status`` is not confined: an earlier version started it."""
    return bool(re.search(r"^(Seccomp|NoNewPrivs):\s*0$", status, re.MULTILINE))


def find_gaps(trial: str, confinement: Confinement) -> list[str]:
    """Return how a process is less confined than it should be.

    Args:
        trial: its ``/proc/PID/status``, then its ``/proc/PID/mountinfo``.
    """
    gaps = _find_process_gaps(trial, confinement)
    # Mount point and options; a later one covers an earlier one.
    mounts = dict(re.findall(r"^\d+ \d+ \d+:\d+ \S+ (\S+) (\S+) ", trial, re.MULTILINE))
    if not mounts:
        gaps.append("its mounts are not known")
    if any(path == "/sys" or path.startswith("/sys/") for path in mounts):
        gaps.append("/sys is mounted")
    # /etc/localtime is often a link, and what it points to is mounted over.
    covered = [path for path in confinement.present if path.startswith("/proc/")]
    gaps += [
        f"{path} is {'writable' if path in READ_ONLY else 'not hidden'}"
        for path in covered
        if "ro" not in mounts.get(path, "").split(",")
    ]
    return gaps


def _find_process_gaps(status: str, confinement: Confinement) -> list[str]:
    """Return what a process may do more than it should, by its ``/proc/PID/status``."""
    found = dict(re.findall(r"^(\w+):\s*(\w+)$", status, re.MULTILINE))
    allowed = number_of(confinement.capabilities)
    gaps = [f"{name} is {found.get(name)}" for name in ("CapBnd", "CapPrm", "CapInh") if _bits(found, name) & ~allowed]
    if found.get("Seccomp") != "2":
        gaps.append("system calls are not filtered (seccomp)")
    if found.get("NoNewPrivs") != "1":
        gaps.append("programs can gain privileges (no_new_privs)")
    return gaps


JOINED = "joined\n"


def find_instance_gaps(shown: str, confinement: Confinement) -> list[str]:
    """Return how a running instance, or a program that joins it, is less confined than it should be.

    Args:
        shown: output of ``definitions/scripts/inspect-confinement``, with a joined program.
    """
    first, _, joined = shown.partition(JOINED)
    gaps = [*find_gaps(first, confinement), *_find_reachable(first)]
    own = _find_process_gaps(joined, confinement) if joined else ["it is not known"]
    if joined and not re.search(r"^unshare refused$", joined, re.MULTILINE):
        own.append("its filter of system calls permits what it should not (seccomp)")
    return [*gaps, *(f"a program that joins it: {gap}" for gap in own)]


def find_age(shown: str, confinement: Confinement) -> list[str]:
    """Return as ``find_instance_gaps``, without a joined program: what an instance of an earlier version lacks."""
    return [*find_gaps(shown, confinement), *_find_reachable(shown)]


def _find_reachable(shown: str) -> list[str]:
    """Return what of the host an instance shares or can reach, by the lines of ``inspect-confinement``."""
    own, host = (dict(re.findall(rf"^{whose} (\w+) (\d+)$", shown, re.M)) for whose in ("own", "host"))
    gaps = [
        f"it is in the host's namespace: {name}" for name in NAMESPACES if own.get(name, "") in ("", host.get(name, ""))
    ]
    if not re.search(r"^executable read-only$", shown, re.M):
        gaps.append("it can change Apptainer's programs on the host")
    for number, system, kind in re.findall(r"^descriptor (\d+) (\S+) (\w+)$", shown, re.M):
        if (system, kind) != ("tmpfs", "file"):
            gaps.append(f"its first process has a file or device of the host open (descriptor {number}, {system})")
    devices = re.findall(r"^\d+ \d+ \d+:\d+ \S+ (/dev/\S+) (\S+) .*- devtmpfs ", shown, re.M)
    return gaps + [
        f"{path} is the host's, and can be changed" for path, options in devices if "ro" not in options.split(",")
    ]


def _bits(found: dict[str, str], name: str) -> int:
    return int(found.get(name, "ffffffffffffffff"), 16)
