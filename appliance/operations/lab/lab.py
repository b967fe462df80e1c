"""`sms lab`: create, inspect and remove a lab, a cluster on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from appliance import lab
from appliance.host.local import Local
from appliance.lab.etc import BMC_PAIR
from appliance.lab.layout import BMC, BMC_ADDRESS, DISK, MAX_METAL, STANDARD, Layout
from appliance.lab.power import power_off, power_on
from appliance.lab.up import check_machine
from appliance.operations.site.ca import ca_folder, issue_server, make_ca
from appliance.operations.site.keys import create_pair
from appliance.progress import Progress
from appliance.tools.scripts import script_argv

Extras = lab.Extras


@dataclass(frozen=True)
class HostState:
    """State of a lab host; ``pid`` is 0 while it is off, ``failing`` lists the daemons that do not answer."""

    name: str
    kind: str
    pid: int
    addresses: dict[str, str]
    failing: str


SIGNING = DISK / ".signing"
"""One key pair for all labs of this machine, so that they share the image."""


@dataclass(frozen=True)
class MachineState:
    """State of a diskless machine; ``pid`` is None while it is off."""

    name: str
    mac: str
    address: str
    bmc: str
    pid: int | None
    console: str


def lab_up(name: str, nodes: int, progress: Progress, extras: Extras = STANDARD) -> bool:
    """Create the lab; return whether anything had to be done."""
    if extras.metal:
        certify_controllers(Layout(name, nodes, metal=extras.metal))
    made = lab.up(name, nodes, progress, extras)
    private, public = SIGNING / "sign.pem", SIGNING / "sign.pub"
    if not private.exists():
        create_pair(private, public)
    for key, mode in ((private, 0o600), (public, 0o644)):
        Local().write(str(lab.Lab.open(name).etc / "keys" / key.name), key.read_bytes(), mode=mode)
    return made


def certify_controllers(layout: Layout) -> None:
    """Create the site's CA if there is none, and the certificate of the management controllers."""
    check_machine(metal=True)
    folder, authority = layout.disk / BMC, ca_folder(layout.etc / "sms.yaml")
    if not authority.exists():
        make_ca(authority)
    elif all((folder / name).exists() for name in BMC_PAIR):
        return
    row = Layout(layout.name, 0, metal=MAX_METAL).machines  # the certificate covers the maximum number of machines
    addresses = [BMC_ADDRESS, *(machine.bmc for machine in row)]
    pair = issue_server(authority, hostname=BMC, addresses=addresses, days=825)
    Local().run("mkdir", "-p", "-m", "0700", str(folder))
    for name, data in zip(BMC_PAIR, (pair.certificate, pair.key), strict=True):
        Local().write(str(folder / name), data, mode=0o600)


def lab_down(name: str, everything: bool, progress: Progress) -> bool:
    """Remove the lab, and with ``everything`` also its files on disk; return whether it was up."""
    with progress.step(f"remove lab {name}"):
        return lab.down(name, everything)


def site_path(name: str) -> Path:
    """Return the path of the lab's site file on this machine; on its hosts it is /etc/sms/sms.yaml."""
    return Layout(name, 0).etc / "sms.yaml"


def lab_power(name: str, host: str, state: str, progress: Progress) -> bool:
    """Power a host of the lab ``off`` or ``on``; return whether its state changed."""
    was_off = host in lab.Lab.open(name).off()
    with progress.step(f"power {host} {state}"):
        if state == "off":
            return power_off(name, host)
        power_on(name, host)
        return was_off


def lab_status(name: str) -> list[HostState]:
    """Return the state of every host of the lab."""
    opened = lab.Lab.open(name)
    hosts, off = opened.layout.hosts, opened.off()
    with ThreadPoolExecutor(max_workers=8) as pool:
        failing = pool.map(lambda host: "it is off" if host.name in off else opened.failing(host.name), hosts)
        return [
            HostState(
                host.name, host.kind, 0 if host.name in off else opened.host(host.name).pid, host.addresses, missing
            )
            for host, missing in zip(hosts, failing, strict=True)
        ]


def lab_machines(name: str) -> list[MachineState]:
    """Return the state of every diskless machine of the lab."""
    return [
        MachineState(
            *(one.machine.name, one.machine.mac, one.machine.address, one.machine.bmc, one.pid, str(one.console))
        )
        for one in lab.Lab.open(name).all_metal()
    ]


def lab_exec(name: str, host: str, command: list[str]) -> int:
    """Run a command on a host with the caller's terminal; return its exit status."""
    there = lab.Lab.open(name).running_host(host)
    if not is_build(command):
        return there.interact(*(command or ["bash", "-l"]))
    names = Path("/etc/resolv.conf").read_text()
    return Local(host, there.without_network).interact(
        "unshare", "--mount", *script_argv("use-resolver", names, *command)
    )


def is_build(command: Sequence[str]) -> bool:
    """Whether a command is a build of sms: it needs mirrors, which this machine reaches and a lab host does not."""
    words = list(command[1:])
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in ("--site", "--state") else 1 :]
    named = bool(command) and PurePosixPath(command[0]).name == "sms"
    return named and (words[:1] == ["build"] or words[:2] in (["vm", "build"], ["image", "build"]))
