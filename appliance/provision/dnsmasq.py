"""DHCP and TFTP: dnsmasq's configuration, and the line of each node, written anew after each change.

The configuration is what the site says, and changes with a start of the VM; the nodes' lines lie in a file of their
own, which dnsmasq reads at SIGHUP (units of the VM see to both). Every value is held to a pattern here once more: no
name of whoever filled the inventory adds a line.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from appliance.errors import ConfigError
from appliance.provision import names
from appliance.provision.config import Config
from appliance.provision.model import Component, Inventory
from appliance.provision.world import World

CONFIGURATION, HOSTS, PID = "dnsmasq.conf", "dnsmasq.hosts", "dnsmasq.pid"
"""Files beside the socket."""
TFTP = "/usr/lib/sms/tftp"
BIOS, EFI = "undionly.kpxe", "ipxe.efi"
POOL_LEASE = "1h"
MOST_LEASES = 70000
_SIOCGIFADDR = 0x8915
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_PORT = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_FILE = re.compile(r"/[A-Za-z0-9_./-]{1,200}")

log = logging.getLogger("sms-provd")


def unique_local(address: str, prefix: int) -> tuple[str, str]:
    """The /64 that routers of this network announce, and this machine's address in it: they follow from the IPv4 ones.

    Without an announcement iPXE waits 13 seconds for one.
    """
    network = ipaddress.IPv4Network(f"{address}/{prefix}", strict=False)
    whole = int(network.network_address)
    base = ipaddress.IPv6Address((0xFD536D73 << 96) | (whole << 64))
    return f"{base}", f"{base + (int(ipaddress.IPv4Address(address)) - whole)}"


def check_range(config: Config) -> None:
    """Raise where the pool is no range of the provisioning network, or holds what is somebody's.

    Raises:
        ConfigError: with what is wrong.
    """
    if config.pool is None:
        return
    hint = "correct provisioning.pool in the site file, then `sms vm stop`, `sms vm start`"
    network = config.network
    first, last = (ipaddress.ip_address(each) for each in config.pool)
    outside = [each for each in (first, last) if each not in network or each in (network[0], network[-1])]
    if outside:
        raise ConfigError(f"pool: {outside[0]} is not an address of the provisioning network {network}", hint=hint)
    if int(last) < int(first):
        raise ConfigError(f"pool: {last} comes before {first}", hint=hint)
    for each in (config.address, config.services_address, config.gateway):
        if each and int(first) <= int(ipaddress.ip_address(each)) <= int(last):
            raise ConfigError(f"pool: {each} in it is taken", hint=hint)


def render_configuration(config: Config, port: str, folder: Path, *, tftp: str = TFTP) -> str:
    """dnsmasq.conf.

    Args:
        port: the network interface in the provisioning network.
        folder: where the hosts' file is.

    Raises:
        ConfigError: the pool does not fit, or a value would be a line of its own.
    """
    check_range(config)
    for value, pattern in ((port, _PORT), (str(folder), _FILE), (tftp, _FILE)):
        if not pattern.fullmatch(value):
            raise ConfigError(f"{value!r} cannot stand in dnsmasq's configuration")
    prefix, _ = unique_local(config.address, config.prefix)
    network = config.network
    lines = [
        "# Written by sms-provd.",
        "port=0",
        f"interface={port}",
        "except-interface=lo",
        "bind-interfaces",
        f"pid-file={folder / PID}",
        f"dhcp-leasefile={folder / 'dnsmasq.leases'}",
        f"dhcp-lease-max={MOST_LEASES}",
        "dhcp-authoritative",
        "quiet-dhcp6",
        "quiet-ra",
        # Nodes never ask again: their addresses outlive days without this machine.
        f"dhcp-range={network.network_address},static,{network.netmask},infinite",
        f"dhcp-hostsfile={folder / HOSTS}",
        *_pool(config),
        *_options(config),
        "enable-tftp",
        f"tftp-root={tftp}",
        "tftp-no-fail",
        # iPXE tells itself by option 175; firmware by its architecture (RFC 4578).
        "dhcp-match=set:ipxe,175",
        "dhcp-match=set:efi,option:client-arch,7",
        "dhcp-match=set:efi,option:client-arch,9",
        # There is no other server that names boot files: iPXE need not wait for one (its no-pxedhcp).
        "dhcp-option=tag:ipxe,encap:175,176,1b",
        f"dhcp-boot=tag:ipxe,http://{config.address}/boot.ipxe",
        f"dhcp-boot=tag:!ipxe,tag:efi,{EFI}",
        f"dhcp-boot=tag:!ipxe,tag:!efi,{BIOS}",
        "enable-ra",
        f"dhcp-range={prefix},ra-only,64,infinite",
        # Announced is the prefix alone: no node takes this machine for its router.
        f"ra-param={port},60,0",
    ]
    return "".join(f"{line}\n" for line in lines)


def _pool(config: Config) -> Iterator[str]:
    if config.pool is None:
        yield "dhcp-ignore=tag:!known"
        return
    first, last = config.pool
    yield f"dhcp-range=tag:!known,{first},{last},{config.network.netmask},{POOL_LEASE}"


def _options(config: Config) -> Iterator[str]:
    """Where nodes find their router, the time, and who keeps their messages: the services container."""
    services = config.services_address
    given = (config.raw or {}).get("dns") or []
    dns = [str(ipaddress.ip_address(each)) for each in given][:3]
    for name, value in (
        ("router", config.gateway or services),
        ("ntp-server", services),
        ("log-server", services),
        ("dns-server", ",".join(dns)),
    ):
        # One without a value keeps dnsmasq from naming itself.
        yield f"dhcp-option=option:{name}" + (f",{value}" if value else "")


def render_hosts(inventory: Inventory, config: Config) -> str:
    """A line for each node that boots: its MAC addresses, its address, its name. What is not written right has none."""
    return "".join(f"{line}\n" for node in inventory.nodes() if (line := _host(inventory, node, config)))


def _host(inventory: Inventory, node: Component, config: Config) -> str:
    # An interface with addresses of its own is in another network.
    macs = [each.mac for each in inventory.interfaces_of(node.id) if not each.addresses]
    name = node.name or node.id
    if not node.address or not macs:
        return ""
    right = _NAME.fullmatch(name) and not names.DHCP_WORD.fullmatch(name) and all(_MAC.fullmatch(mac) for mac in macs)
    try:
        right = right and ipaddress.ip_address(node.address) in config.network
    except ValueError:
        right = None
    if not right:
        log.warning("DHCP: %r at %r cannot be written down", name[:70], node.address[:70])
        return ""
    return ",".join([*macs[:8], node.address, name, "infinite"])


def find_port(address: str) -> str:
    """The network interface that has an address; empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


class Keeper:
    """Keeps dnsmasq's files as the inventory is, in a thread of its own: who changes it does not wait for them."""

    def __init__(self, world: World, folder: Path, *, tftp: str = TFTP) -> None:
        self.world, self.folder, self.tftp = world, folder, tftp
        self._due = threading.Event()
        self._ended = self._complete = False
        self._thread = threading.Thread(target=self._keep, name="dnsmasq", daemon=True)

    def start(self) -> None:
        """Write both files, then keep them.

        Raises:
            ConfigError: the pool does not fit into the network.
        """
        self.write()
        self.world.watchers.append(self._due.set)
        self._thread.start()

    def stop(self) -> None:
        """End the thread once it has written what is due."""
        self._ended = True
        self._due.set()
        self._thread.join(timeout=10)

    def write(self) -> bool:
        """Write what differs; say whether anything did. dnsmasq is told by its units, or by SIGHUP where it may be."""
        port = find_port(self.world.config.address)
        changed, self._complete = False, bool(port)
        if port:
            changed = replace(
                self.folder / CONFIGURATION, render_configuration(self.world.config, port, self.folder, tftp=self.tftp)
            )
        if replace(self.folder / HOSTS, render_hosts(self.world.inventory(), self.world.config)):
            changed = True
            self._tell()
        return changed

    def _keep(self) -> None:
        while not self._ended:
            # The port may get its address later than we start.
            self._due.wait(None if self._complete else 1)
            self._due.clear()
            try:
                self.write()
            except Exception as error:  # the next change is due all the same
                log.error("DHCP: its files cannot be written: %s", error)

    def _tell(self) -> None:
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / PID).read_text()), signal.SIGHUP)


def replace(path: Path, text: str) -> bool:
    """Make a file hold a text, by renaming; say whether it changed."""
    with suppress(FileNotFoundError):
        if path.read_text() == text:
            return False
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.chmod(0o644)
    beside.rename(path)
    return True
