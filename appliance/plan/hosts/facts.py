"""What is known of a machine, out of the words of its own programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from appliance.plan.hosts.distro import family

CAPABILITIES = """CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT
SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP
MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"""
"""By number, as in linux/capability.h."""


@dataclass(frozen=True)
class Bridge:
    """A bridge as it is; ``ports`` are those that are up."""

    ports: tuple[str, ...] = ()
    stp: bool = False


@dataclass(frozen=True)
class Facts:
    """A machine. ``said`` holds what flow.doctor's script printed, a line each."""

    host: str
    os_release: str
    filesystems: frozenset[str]
    said: Mapping[str, str]
    bridges: Mapping[str, Bridge] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """debian, redhat, suse, or nothing."""
        return family(self.os_release)

    @property
    def lacking_capabilities(self) -> list[str] | None:
        """What the kernel knows and root does not have; None where it cannot be read."""
        held, last = self.number("caps", 16), self.number("last_cap")
        if held is None or last is None:
            return None
        return [f"CAP_{name}" for bit, name in enumerate(CAPABILITIES.split()[: last + 1]) if not held >> bit & 1]

    def words(self, name: str) -> list[str]:
        """A line's words."""
        return self.said.get(name, "").split()

    def number(self, name: str, base: int = 10) -> int | None:
        """A line as a number; None where it is none."""
        try:
            return int(self.said.get(name, ""), base)
        except ValueError:
            return None


def read_said(text: str) -> dict[str, str]:
    """The lines ``name=value`` of the script."""
    return {
        name: value.strip() for name, equals, value in (line.partition("=") for line in text.splitlines()) if equals
    }


def read_bridges(links: list[dict[str, object]]) -> Iterator[tuple[str, Bridge]]:
    """Bridges in the answer of ``ip -json -details link show``."""
    for link in links:
        info = link.get("linkinfo")
        if not isinstance(info, dict) or info.get("info_kind") != "bridge":
            continue
        name = str(link["ifname"])
        ports = [other for other in links if other.get("master") == name]
        up = tuple(str(port["ifname"]) for port in ports if "UP" in _flags(port))
        yield name, Bridge(up, stp=bool((info.get("info_data") or {}).get("stp_state")))


def _flags(link: Mapping[str, object]) -> list[object]:
    flags = link.get("flags")
    return flags if isinstance(flags, list) else []
