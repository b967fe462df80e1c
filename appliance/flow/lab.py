"""`sms lab`: the one-machine cluster, made, asked and removed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from appliance import lab
from appliance.flow.keys import create_pair
from appliance.host.local import Local
from appliance.lab.layout import DISK
from appliance.progress import Progress


@dataclass(frozen=True)
class HostState:
    """A lab host as it is now; ``failing`` names the daemons that do not answer."""

    name: str
    kind: str
    pid: int
    addresses: dict[str, str]
    failing: str


SIGNING = DISK / ".signing"
"""One pair of keys for all labs of this machine, so that they share the image that it signs."""


def lab_up(name: str, nodes: int, progress: Progress) -> bool:
    """Make the lab; say whether anything had to be done."""
    made = lab.up(name, nodes, progress)
    private, public = SIGNING / "sign.pem", SIGNING / "sign.pub"
    if not private.exists():
        create_pair(private, public)
    for key, mode in ((private, 0o600), (public, 0o644)):
        Local().write(str(lab.Lab.open(name).etc / "keys" / key.name), key.read_bytes(), mode=mode)
    return made


def lab_down(name: str, everything: bool, progress: Progress) -> None:
    """Remove the lab, and with ``everything`` what it keeps on disk."""
    with progress.step(f"Taking lab {name} down"):
        lab.down(name, everything)


def lab_status(name: str) -> list[HostState]:
    """Every host of the lab."""
    opened = lab.Lab.open(name)
    hosts = opened.layout.hosts
    with ThreadPoolExecutor(max_workers=8) as pool:
        failing = pool.map(opened.failing, [host.name for host in hosts])
        return [
            HostState(host.name, host.kind, opened.host(host.name).pid, host.addresses, missing)
            for host, missing in zip(hosts, failing, strict=True)
        ]


def lab_exec(name: str, host: str, command: list[str]) -> int:
    """Run a command on a host with the caller's terminal; give its exit status."""
    return lab.Lab.open(name).host(host).interact(*(command or ["bash", "-l"]))
