"""Facts about a machine, parsed from the output of its programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from appliance.plan.hosts.distro import family
from appliance.plan.services.links import is_guest

CAPABILITIES = """CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT
SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP
MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"""
"""By number, as in linux/capability.h."""


@dataclass(frozen=True)
class Bridge:
    """State of a bridge; ``ports`` are those that are up.

    ``mtu``; ``larger``: those of these ports that lead out of the host and have a larger one, each with it.
    """

    ports: tuple[str, ...] = ()
    stp: bool = False
    mtu: int = 0
    larger: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Facts:
    """A machine. ``values`` are the name=value lines of definitions/scripts/collect-facts, ``pins`` Apptainer's."""

    host: str
    os_release: str
    filesystems: frozenset[str]
    values: Mapping[str, str]
    bridges: Mapping[str, Bridge] = field(default_factory=dict)
    pins: str = ""
    masters: Mapping[str, str] = field(default_factory=dict)
    """By interface that is up: the bridge or bond that it is a port of, or empty."""
    veths: Mapping[str, str] = field(default_factory=dict)
    """By interface: the other end of its virtual cable, if that is on this host, too."""

    @property
    def family(self) -> str:
        """debian, redhat, suse, or empty."""
        return family(self.os_release)

    @property
    def lacking_capabilities(self) -> list[str] | None:
        """Capabilities of the kernel that root lacks; None if unknown."""
        held, last = self.number("caps", 16), self.number("last_cap")
        if held is None or last is None:
            return None
        return [f"CAP_{name}" for bit, name in enumerate(CAPABILITIES.split()[: last + 1]) if not held >> bit & 1]

    def words(self, name: str) -> list[str]:
        """Return the words of a value."""
        return self.values.get(name, "").split()

    def number(self, name: str, base: int = 10) -> int | None:
        """Return a value as a number; None if it is not one."""
        try:
            return int(self.values.get(name, ""), base)
        except ValueError:
            return None


def parse_values(text: str) -> dict[str, str]:
    """Parse the lines ``name=value`` of the script."""
    return {
        name: value.strip() for name, equals, value in (line.partition("=") for line in text.splitlines()) if equals
    }


def read_bridges(links: list[dict[str, object]]) -> Iterator[tuple[str, Bridge]]:
    """Yield the bridges in the output of ``ip -json -details link show``."""
    for link in links:
        info = link.get("linkinfo")
        if not isinstance(info, dict) or info.get("info_kind") != "bridge":
            continue
        name = str(link["ifname"])
        ports = [other for other in links if other.get("master") == name]
        up = {str(port["ifname"]): _mtu(port) for port in ports if "UP" in _flags(port)}
        kinds = {str(port["ifname"]): _kind(port) for port in ports}
        larger = tuple((port, mtu) for port, mtu in up.items() if mtu > _mtu(link) and not is_guest(port, kinds[port]))
        yield name, Bridge(tuple(up), bool((info.get("info_data") or {}).get("stp_state")), _mtu(link), larger)


def read_masters(links: list[dict[str, object]]) -> Iterator[tuple[str, str]]:
    """Yield each interface that is up, and its bridge or bond, in the output of ``ip -json -details link show``."""
    for link in links:
        if "UP" in _flags(link):
            yield str(link["ifname"]), str(link.get("master", ""))


def read_veths(links: list[dict[str, object]]) -> Iterator[tuple[str, str]]:
    """Yield the two ends of virtual cables within the host, in the output of ``ip -json -details link show``."""
    for link in links:
        info = link.get("linkinfo")
        if isinstance(info, dict) and info.get("info_kind") == "veth" and "link" in link and "link_netnsid" not in link:
            yield str(link["ifname"]), str(link["link"])


def _kind(link: Mapping[str, object]) -> str:
    info = link.get("linkinfo")
    return str(info.get("info_kind", "")) if isinstance(info, dict) else ""


def _mtu(link: Mapping[str, object]) -> int:
    mtu = link.get("mtu")
    return mtu if isinstance(mtu, int) else 0


def _flags(link: Mapping[str, object]) -> list[object]:
    flags = link.get("flags")
    return flags if isinstance(flags, list) else []
