"""Interfaces, addresses, routes, sockets and address translation in a survey."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface

from appliance.catalog.model import Service
from appliance.plan.adopt.frames import Frames
from appliance.plan.adopt.model import Link, Listener, Translation
from appliance.text import printable, whole_number

KINDS = ("bond", "vlan", "bridge", "team", "macvlan", "veth", "tun", "dummy", "ipoib", "vxlan", "wireguard")
INNER = ("lo", "docker", "virbr", "podman", "cni", "veth", "flannel", "cali")
"""How names of interfaces begin that no other machine can reach."""
INTERPRETERS = ("sh", "bash", "env", "perl", "python3", "sshd")
"""Programs that run more than one service."""
SEVERAL = ("dnsmasq", "systemd", "xinetd", "inetd", "docker-proxy")
"""Programs that serve several services: the port decides."""
MOST = 500
MOST_ADDRESSES = 20
"""Of an interface."""
LONGEST_LINE = 4096
"""Characters of a line of output that are read: what is searched in one takes the square of its length."""


def read_links(frames: Frames) -> tuple[Link, ...]:
    """Return the interfaces with their addresses, in the order of the kernel."""
    addresses: dict[tuple[str, str], list[str]] = {}
    for line in frames.output("addresses"):
        if found := re.match(r"[0-9]+: ([^\s@]+)(?:@\S+)?\s+(inet6?) (\S+)(.*)", line):
            if "scope link" in found[4] and found[2] == "inet6":
                continue
            addresses.setdefault((found[1], found[2]), []).append(found[3])
    links = []
    for line in frames.output("links")[:MOST]:
        if found := re.match(r"[0-9]+: ([^\s:@]+)(?:@([^\s:]+))?: <([^>]*)>(.*)", line):
            rest = found[4].replace("\\", " ")
            kind = next((one for one in KINDS if re.search(rf"(?<![\w-]){one}(?![\w-])", rest)), "")
            vlan = re.search(r"vlan protocol \S+ id ([0-9]{1,4})", rest)
            own = [one for family in ("inet", "inet6") for one in addresses.get((found[1], family), [])]
            links.append(
                Link(
                    name=printable(found[1], 15),
                    kind=kind,
                    mac=_first(r"link/ether ([0-9a-f:]{17})", rest),
                    mtu=int(_first(r"mtu ([0-9]{1,6})", rest) or 0),
                    up="LOWER_UP" in found[3].split(","),
                    master=_first(r"master (\S{1,15})", rest),
                    parent=found[2] if found[2] and kind != "veth" else "",
                    vlan=int(vlan[1]) if vlan else None,
                    addresses=tuple(printable(one, 60) for one in own[:MOST_ADDRESSES]),
                )
            )
    return tuple(links)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def find_default(frames: Frames) -> tuple[str, str]:
    """Return the interface and the gateway of the default route; empty without one."""
    for line in frames.output("routes"):
        if found := re.match(r"default via ([0-9.]+) dev (\S+)", line):
            return found[2], found[1]
    return "", ""


def addresses_of(link: Link) -> list[IPv4Interface]:
    """Return the IPv4 addresses of an interface."""
    found = []
    for one in link.addresses:
        try:
            found.append(IPv4Interface(one))
        except ValueError:
            continue
    return found


def find_inner(links: Sequence[Link], public: str, hints: Sequence[str]) -> str:
    """Return the interface of the network with compute nodes; empty if none can be.

    Args:
        hints: addresses that are in it: of the controller, of nodes.
    """
    known = sorted(int(one) for one in map(_address_of, hints) if one)
    able = [link for link in links if link.name != public and not link.name.startswith(INNER) and addresses_of(link)]

    def score(link: Link) -> tuple[int, int]:
        networks = {one.network for one in addresses_of(link)}
        # Not a comparison of each address with each network: the node chooses how many there are.
        inside = sum(
            bisect_left(known, int(network.broadcast_address) + 1) - bisect_left(known, int(network.network_address))
            for network in networks
        )
        return inside, max(network.num_addresses for network in networks)

    return max(able, key=score).name if able else ""


def _address_of(hint: str) -> IPv4Address | None:
    try:
        return IPv4Interface(hint).ip
    except ValueError:
        return None


def read_processes(frames: Frames) -> dict[str, str]:
    """Return the names of processes with their units."""
    found: dict[str, str] = {}
    for line in frames.output("processes"):
        words = line.split()
        if len(words) >= 3:
            found.setdefault(printable(words[1], 40), "" if words[2] == "-" else printable(words[2], 80))
    return found


def read_listeners(frames: Frames, services: Mapping[str, Service]) -> tuple[Listener, ...]:
    """Return the sockets that wait for clients of other machines or of this one."""
    units = read_processes(frames)
    found: dict[tuple[str, str], Listener] = {}
    for whole in frames.output("sockets") or frames.output("netstat"):
        line = whole[:LONGEST_LINE]
        words = line.split()
        if not words or not re.match(r"(tcp|udp)", words[0]) or len(words) < 5:
            continue
        local = words[4] if words[1].isalpha() else words[3]
        address, _, number = local.rpartition(":")
        process = _first(r'users:\(\("([^"]{1,40})"', line) or _first(r"[0-9]+/([^\s:]{1,40})", line)
        if whole_number(number) is None or len(found) >= MOST:
            continue
        port, place = f"{words[0][:3]}/{number}", printable(re.sub(r"%.*", "", address).strip("[]"), 60) or "*"
        service = name_service(services, process, port)
        one = Listener(
            port=port, address=place, process=printable(process), unit=units.get(process, ""), service=service
        )
        found.setdefault((port, place), one)
    return tuple(sorted(found.values(), key=lambda one: (one.port[:3], int(one.port[4:]), one.address)))


def name_service(services: Mapping[str, Service], process: str, port: str = "") -> str:
    """Return the catalogue's name for a process or a port; empty if it has none."""
    if not process and not port:
        return ""
    if process in SEVERAL and (served := name_service(services, "", port)):
        return served
    named = (name for name, one in services.items() if process in {name, f"{name}d", *one.known_as})
    listens = (name for name, one in services.items() if port in one.ports)
    runs = (name for name, one in services.items() if one.run and one.run[0].rpartition("/")[2] == process)
    return next(named, "") or next(listens, "") or ("" if process in INTERPRETERS else next(runs, ""))


def read_translation(frames: Frames) -> Translation:
    """Return how packets between networks are forwarded and rewritten, of nft and of iptables."""
    rules: list[str] = []
    redirects: list[str] = []
    filters = 0
    for line in (*frames.output("nft"), *frames.output("iptables")):
        text = printable(" ".join(line.split()), 300)
        if re.search(r"\b(masquerade|MASQUERADE|SNAT)\b|\bsnat\b", text):
            rules.append(text)
        elif re.search(r"\bDNAT\b|\bdnat\b|\bREDIRECT\b|\bredirect\b", text):
            redirects.append(text)
        elif re.search(r"^-A .* -j |\b(accept|drop|reject)$", text):
            filters += 1
    forwards = frames.text("/proc/sys/net/ipv4/ip_forward").strip() == "1"
    return Translation(forwards=forwards, rules=tuple(rules[:100]), redirects=tuple(redirects[:100]), filters=filters)
