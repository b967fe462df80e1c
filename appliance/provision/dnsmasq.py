"""DHCP and TFTP: dnsmasq's configuration and its hosts file, rewritten after each change.

The configuration depends on the site and changes only when the VM starts. The hosts file has a line for each node;
dnsmasq reads it at SIGHUP. Units of the VM handle both. Every value is checked against a pattern again, so that no
name in the inventory can inject a line.
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
"""Files in the folder of the socket."""
TFTP = "/usr/lib/sms/tftp"
BIOS, EFI = "undionly.kpxe", "ipxe.efi"
POOL_LEASE = "1h"
MAX_LEASES = 70000
_SIOCGIFADDR = 0x8915
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_PORT = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_FILE = re.compile(r"/[A-Za-z0-9_./-]{1,200}")

log = logging.getLogger("sms-provd")


def unique_local(address: str, prefix: int) -> tuple[str, str]:
    """Return the /64 prefix to advertise and this machine's address in it, derived from the IPv4 address.

    Without a router advertisement iPXE waits for one for 13 seconds.
    """
    network = ipaddress.IPv4Network(f"{address}/{prefix}", strict=False)
    whole = int(network.network_address)
    base = ipaddress.IPv6Address((0xFD536D73 << 96) | (whole << 64))
    return f"{base}", f"{base + (int(ipaddress.IPv4Address(address)) - whole)}"


def check_range(config: Config) -> None:
    """Check that the pool is a range of the provisioning network and contains no address in use.

    Raises:
        ConfigError: the pool is invalid.
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
            raise ConfigError(f"pool: it contains {each}, which is in use", hint=hint)


def render_configuration(config: Config, port: str, folder: Path) -> str:
    """Render dnsmasq.conf.

    Args:
        port: the network interface in the provisioning network.
        folder: the folder of the hosts file.

    Raises:
        ConfigError: the pool is invalid, or a value contains characters that dnsmasq's syntax does not allow.
    """
    check_range(config)
    for value, pattern in ((port, _PORT), (str(folder), _FILE)):
        if not pattern.fullmatch(value):
            raise ConfigError(f"{value!r} is not allowed in dnsmasq's configuration")
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
        f"dhcp-lease-max={MAX_LEASES}",
        "dhcp-authoritative",
        "quiet-dhcp6",
        "quiet-ra",
        # Infinite leases: nodes keep their addresses while this machine is down.
        f"dhcp-range={network.network_address},static,{network.netmask},infinite",
        f"dhcp-hostsfile={folder / HOSTS}",
        *_pool(config),
        *_options(config),
        "enable-tftp",
        f"tftp-root={TFTP}",
        "tftp-no-fail",
        # iPXE is recognized by option 175; firmware by its architecture (RFC 4578).
        "dhcp-match=set:ipxe,175",
        "dhcp-match=set:efi,option:client-arch,7",
        "dhcp-match=set:efi,option:client-arch,9",
        # No other server offers boot files: iPXE need not wait for ProxyDHCP (no-pxedhcp).
        "dhcp-option=tag:ipxe,encap:175,176,1b",
        f"dhcp-boot=tag:ipxe,http://{config.address}/boot.ipxe",
        f"dhcp-boot=tag:!ipxe,tag:efi,{EFI}",
        f"dhcp-boot=tag:!ipxe,tag:!efi,{BIOS}",
        "enable-ra",
        f"dhcp-range={prefix},ra-only,64,infinite",
        # Advertise only the prefix: a router lifetime of 0 keeps nodes from using this machine as a router.
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
    """Yield the DHCP options: router, NTP, syslog and DNS servers."""
    services = config.services_address
    dns = [str(ipaddress.ip_address(each)) for each in config.dns][:3]
    for name, value in (
        ("router", config.gateway or services),
        ("ntp-server", services),
        ("log-server", services),
        ("dns-server", ",".join(dns)),
    ):
        # An option without a value keeps dnsmasq from announcing itself.
        yield f"dhcp-option=option:{name}" + (f",{value}" if value else "")


def render_hosts(inventory: Inventory, config: Config) -> str:
    """Render a line for each node that boots: MAC addresses, address, name. Nodes with invalid values are left out."""
    return "".join(f"{line}\n" for node in inventory.nodes() if (line := _host(inventory, node, config)))


def _host(inventory: Inventory, node: Component, config: Config) -> str:
    # An interface that has addresses itself is in another network.
    macs = [each.mac for each in inventory.interfaces_of(node.id) if not each.addresses]
    name = node.name or node.id
    if not node.address or not macs:
        return ""
    valid = (
        names.NAME.fullmatch(name) and not names.DHCP_WORD.fullmatch(name) and all(_MAC.fullmatch(mac) for mac in macs)
    )
    try:
        valid = valid and ipaddress.ip_address(node.address) in config.network
    except ValueError:
        valid = None
    if not valid:
        log.warning("DHCP: invalid name or address: %r at %r", name[:70], node.address[:70])
        return ""
    return ",".join([*macs[:8], node.address, name, "infinite"])


def find_port(address: str) -> str:
    """Return the network interface that has an address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


class ConfigWriter:
    """Updates dnsmasq's files after each change of the inventory, in its own thread so that changes do not block."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self._pending = threading.Event()
        self._complete = False
        self._thread = threading.Thread(target=self._run, name="dnsmasq", daemon=True)

    def start(self) -> None:
        """Write both files, then keep them up to date.

        Raises:
            ConfigError: the pool is invalid.
        """
        self.write()
        self.world.watchers.append(self._pending.set)
        self._thread.start()

    def write(self) -> bool:
        """Write the files that differ; return whether any did. Units restart dnsmasq; SIGHUP is sent if permitted."""
        port = find_port(self.world.config.address)
        changed, self._complete = False, bool(port)
        if port:
            text = render_configuration(self.world.config, port, self.folder)
            changed = replace(self.folder / CONFIGURATION, text)
        if replace(self.folder / HOSTS, render_hosts(self.world.inventory(), self.world.config)):
            changed = True
            self._reload_dnsmasq()
        return changed

    def _run(self) -> None:
        while True:
            # The interface may get its address only after this service starts.
            self._pending.wait(None if self._complete else 1)
            self._pending.clear()
            try:
                self.write()
            except Exception as error:  # the next change must still be written
                log.error("DHCP: cannot write dnsmasq's files: %s", error)

    def _reload_dnsmasq(self) -> None:
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / PID).read_text()), signal.SIGHUP)


def replace(path: Path, text: str) -> bool:
    """Write a text file atomically; return whether it changed."""
    with suppress(FileNotFoundError):
        if path.read_text() == text:
            return False
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.chmod(0o644)
    beside.rename(path)
    return True
