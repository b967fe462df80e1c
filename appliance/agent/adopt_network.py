"""Addresses, MAC addresses and routes of the old node of an adoption: saved, given away, restored.

Routes are lost in three ways, and are added again: with the address that is their source, with the last address of
their network, and, where a driver changes its MAC address only while the interface is down, all of them.
"""

import ipaddress
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Sequence, Set

from appliance.agent import arp
from appliance.agent.instance import LINKS
from appliance.agent.protocol import Problem
from appliance.agent.system import SYSTEM
from appliance.shared.adopt import OldInterface, SavedInterface

TARGET, NOBODY, UNKNOWN = "target", "nobody", "unknown"
"""Who answers for the addresses. It is unknown while a network of this node is down."""
SKIPPED = {"local", "broadcast", "multicast", "anycast"}
"""Types of routes that the kernel adds with each address."""
STATES = {"linkdown", "dead", "offload", "trap", "rt_offload", "rt_trap", "offload_failed"}
"""Words of a shown route that are its present state; ``ip route add`` does not take them."""


def check_interface(wanted: OldInterface) -> None:
    """Check that an interface is as the plan of the adoption has it.

    Raises:
        Problem: it is not.
    """
    link = _link(wanted.name)
    if link["address"].lower() != wanted.mac.lower():
        raise Problem("%s has the MAC address %s, not %s" % (wanted.name, link["address"], wanted.mac), "", 3)
    there = {_with_prefix(one) for one in link["addr_info"] if _is_kept(one)}
    missing = [address for address in (*wanted.moves, *wanted.keeps) if address not in there]
    if missing:
        raise Problem("%s has not the address %s" % (wanted.name, ", ".join(missing)), "sms survey", 3)
    if not arp.ipv4(wanted.moves):
        raise Problem("no IPv4 address of %s is to move" % wanted.name, "", 2)


def has_moved(wanted: OldInterface) -> bool:
    """Return whether an interface has all addresses that move, and its own MAC address."""
    try:
        link = _link(wanted.name)
    except Problem:
        return False
    there = {_with_prefix(one) for one in link["addr_info"]}
    return there.issuperset(wanted.moves) and str(link["address"]).lower() == wanted.mac.lower()


def has_any_moved(wanted: OldInterface) -> bool:
    """Return whether an interface has one of the addresses that move, or its own MAC address."""
    try:
        link = _link(wanted.name)
    except Problem:
        return False  # it is not there yet
    there = {_with_prefix(one) for one in link["addr_info"]}
    return bool(there & set(wanted.moves)) or str(link["address"]).lower() == wanted.mac.lower()


def lacks_kept(wanted: OldInterface) -> bool:
    """Return whether an interface lacks one of the addresses that stay."""
    try:
        return not {_with_prefix(one) for one in _link(wanted.name)["addr_info"]}.issuperset(wanted.keeps)
    except Problem:
        return False


def save_interface(wanted: OldInterface) -> SavedInterface:
    """Return an interface as it is now."""
    infos = [one for one in _link(wanted.name)["addr_info"] if _is_kept(one)]
    # The same request as when it is decided who serves: only who answers now can be expected to answer then.
    answers = arp.find_macs(wanted.name, arp.ipv4(wanted.witnesses), wanted.spare_mac)
    return SavedInterface(
        wanted.name,
        tuple(_words(one) for one in infos),
        tuple(_read_routes(wanted.name, False) + _read_routes(wanted.name, True)),
        tuple(one for one in wanted.witnesses if one in answers),
    )


def release(wanted: OldInterface, saved: SavedInterface) -> None:
    """Remove the addresses that move, and replace the MAC address; keep what else the interface has.

    Raises:
        Problem: one step failed.
    """
    remove_moved(wanted, saved)
    # The guard may be the one that sets it up, where the node's own configuration finds it by its MAC address.
    _batch(["link set dev %s up" % wanted.name])
    moving = set(wanted.moves)
    kept = [one for one in saved.addresses if one.split()[0] not in moving]
    there = _add_missing(wanted.name, kept, [one for one in (_without(route, wanted) for route in saved.routes) if one])
    if there & moving:
        raise Problem("%s has %s still" % (wanted.name, ", ".join(sorted(there & moving))))
    arp.announce(wanted.name, arp.ipv4(wanted.keeps), wanted.spare_mac)


def remove_moved(wanted: OldInterface, saved: SavedInterface) -> None:
    """Remove the addresses that move, and replace the MAC address, without a look at what gets lost.

    Raises:
        Problem: the interface does not take the MAC address.
    """
    lines = ["address del %s dev %s" % (one, wanted.name) for one in wanted.moves]
    with _Changing(wanted.name):
        # In one process, and the rest is looked at afterwards: until then nobody has the addresses.
        _batch([*lines, "link set dev %s address %s" % (wanted.name, wanted.spare_mac)])
        set_mac(wanted.name, wanted.spare_mac)


def restore(wanted: OldInterface, saved: SavedInterface) -> None:
    """Make an interface as it was before ``release``; does nothing where it is.

    Raises:
        Problem: it could not be restored completely.
    """
    with _Changing(wanted.name):
        set_mac(wanted.name, wanted.mac)
        _restore_order(wanted.name, [one for one in saved.addresses if not _is_ipv6(one)])
    there = _add_missing(wanted.name, saved.addresses, saved.routes)
    missing = [one for one in wanted.moves if one not in there]
    if missing:
        raise Problem("%s has not %s again" % (wanted.name, ", ".join(missing)))
    arp.announce(wanted.name, arp.ipv4((*wanted.moves, *wanted.keeps)), wanted.mac)


def each_interface(
    work: Callable[[OldInterface, SavedInterface], None],
    interfaces: Sequence[OldInterface],
    saved: Sequence[SavedInterface],
) -> None:
    """Do something with all interfaces at once; go on with the others when one fails.

    Raises:
        Problem, OSError: one failed.
    """
    known = {one.name: one for one in saved}
    with ThreadPoolExecutor(len(interfaces)) as pool:
        futures = [pool.submit(work, one, known[one.name]) for one in interfaces]
    for future in futures:
        future.result()


def ask_who_serves(
    interfaces: Sequence[OldInterface], saved: Sequence[SavedInterface], *, anywhere: bool = False
) -> str:
    """Ask in all networks who answers for the addresses that move.

    Args:
        anywhere: one network of this node that works is enough to know that nobody does.

    Returns:
        ``TARGET`` if the machine with a moved MAC address answers in one of them; ``NOBODY`` if it does not, and in
        each network another machine answers that answered before; else ``UNKNOWN``: it may be a network of this node
        that is down.
    """
    known = {one.name: one.witnesses for one in saved}
    with ThreadPoolExecutor(len(interfaces)) as pool:
        found = set(pool.map(lambda one: _ask(one, known.get(one.name, ())), interfaces))
    if TARGET in found:
        return TARGET
    return NOBODY if NOBODY in found and (anywhere or UNKNOWN not in found) else UNKNOWN


def _ask(wanted: OldInterface, witnesses: Sequence[str]) -> str:
    """Return who answers in the network of one interface; empty if nobody is expected to."""
    moved = arp.ipv4(wanted.moves)
    try:
        # Not with the moved MAC address as the source: the switches would send its frames here.
        answers = arp.find_macs(wanted.name, [*moved, *witnesses], wanted.spare_mac)
    except OSError:  # the interface is down or gone
        return UNKNOWN if witnesses else ""
    if any(answers.get(one) == wanted.mac.lower() for one in moved):
        return TARGET
    if not witnesses:
        return ""
    return NOBODY if any(one in answers for one in witnesses) else UNKNOWN


def set_mac(name: str, mac: str) -> None:
    """Give an interface a MAC address, without setting it down where its driver can; does nothing where it has it.

    Raises:
        Problem: it has another one afterwards.
    """
    if arp.read_mac(name) == mac.lower():
        return
    _batch(["link set dev %s address %s" % (name, mac)])
    if arp.read_mac(name) != mac.lower():
        _batch(["link set dev %s %s" % (name, what) for what in ("down", "address " + mac, "up")])
    found = arp.read_mac(name)
    if found != mac.lower():
        raise Problem("%s has the MAC address %s, it does not take %s" % (name, found, mac))


def _restore_order(name: str, saved: Sequence[str]) -> None:
    """Add IPv4 addresses in their order: of one network, the first one is the source of packets and routes."""
    wanted = [one.split()[0] for one in saved]
    now = [_with_prefix(one) for one in _link(name)["addr_info"] if _with_prefix(one) in wanted]
    same = 0
    while same < len(now) and now[same] == wanted[same]:
        same += 1
    lines = ["address del %s dev %s" % (one, name) for one in now[same:]]
    lines += ["address add %s dev %s" % (one, name) for one in saved[same:]]
    _batch(lines)


def _add_missing(name: str, addresses: Sequence[str], routes: Sequence[str]) -> Set[str]:
    """Add what an interface lacks, as far as possible; return the addresses that it has then."""
    for ipv6 in (False, True):
        ours = [one for one in addresses if _is_ipv6(one) == ipv6]
        over = [one for one in routes if _is_ipv6(one) == ipv6]
        there = {_with_prefix(one) for one in _link(name)["addr_info"]}
        lines = ["address add %s dev %s" % (one, name) for one in ours if one.split()[0] not in there]
        present = set(_read_routes(name, ipv6)) if over else set()
        # Those of networks first: others lead over their gateways.
        missing = sorted((one for one in over if one not in present), key=lambda one: " via " in one)
        _batch([*lines, *("route add " + one for one in missing)], ipv6=ipv6)
    return {_with_prefix(one) for one in _link(name)["addr_info"]}


def _without(route: str, wanted: OldInterface) -> str:
    """Return a route without a moved address as its source; empty if it is of a network where no address stays."""
    words = route.split()
    if "src" in words:
        at = words.index("src")
        if words[at + 1] in {one.partition("/")[0] for one in wanted.moves}:
            del words[at : at + 2]
            kept = [ipaddress.ip_interface(one).ip for one in wanted.keeps]
            if "via" not in words and not any(one in _network(words[0]) for one in kept):
                return ""
    return " ".join(words)


def _network(text: str) -> Any:
    try:
        return ipaddress.ip_network(text)
    except ValueError:  # default, or a type of route
        return ipaddress.ip_network("0.0.0.0/0")


class _Changing:
    """While it lasts, other addresses of a network stay when the first one is removed; a new MAC address is announced.

    For IPv6 the kernel announces it (ip-sysctl); for IPv4 ``arp.announce`` does.
    """

    SETTINGS = ("ipv4/conf/%s/promote_secondaries", "ipv6/conf/%s/ndisc_notify")

    def __init__(self, name: str) -> None:
        paths = ["/proc/sys/net/" + one % name for one in self.SETTINGS]
        self.before = {path: "" for path in paths if os.path.exists(path)}

    def __enter__(self) -> None:
        for path in self.before:
            with open(path) as stream:
                self.before[path] = stream.read()
            self._write(path, "1")

    def __exit__(self, *_: object) -> None:
        for path, text in self.before.items():
            self._write(path, text)

    def _write(self, path: str, text: str) -> None:
        with open(path, "w") as stream:
            stream.write(text)


def _batch(lines: Sequence[str], *, ipv6: bool = False) -> None:
    """Run commands of ip(8) in one process, all of them, whatever fails: the caller looks at what is there then."""
    if lines:
        text = "".join(line + "\n" for line in lines).encode()
        SYSTEM.run("ip", *(["-6"] if ipv6 else []), "-force", "-batch", "-", stdin=text, ok=range(256))


def _link(name: str) -> Dict[str, Any]:
    """Return an interface as ``ip -json address show`` prints it.

    Raises:
        Problem: there is none of that name.
    """
    for link in SYSTEM.run_json(LINKS, "ip", "-json", "address", "show", "dev", name):
        if link and link.get("ifname") == name:
            found: Dict[str, Any] = link
            return found
    raise Problem("there is no interface %s" % name, status=3)


def _with_prefix(info: Dict[str, Any]) -> str:
    return "%s/%s" % (info.get("local"), info.get("prefixlen"))


def _is_kept(info: Dict[str, Any]) -> bool:
    """Whether an address is one to restore: not one that the kernel makes, or of a point-to-point link."""
    return not (info.get("scope") == "link" or info.get("temporary") or info.get("mngtmpaddr") or info.get("address"))


def _words(info: Dict[str, Any]) -> str:
    """Return an address as words of ``ip address add``."""
    words = [_with_prefix(info)]
    for key, word in (("broadcast", "brd"), ("scope", "scope"), ("label", "label"), ("metric", "metric")):
        if info.get(key):
            words += [word, str(info[key])]
    if info.get("noprefixroute"):
        words += ["noprefixroute"]
    if info.get("family") == "inet6":
        words += ["nodad"]
    return " ".join(words)


def _read_routes(name: str, ipv6: bool) -> List[str]:
    """Return the routes over an interface, as words of ``ip route add``."""
    shown = SYSTEM.run("ip", "-6" if ipv6 else "-4", "-o", "route", "show", "table", "all", ok=range(256))
    return parse_routes(shown.decode(errors="replace"), name)


def parse_routes(shown: str, name: str) -> List[str]:
    """Return the routes over an interface in ``ip -o route show table all``, as words of ``ip route add``.

    Without those that the kernel makes with each address, or that routers announce.
    """
    found = []
    for line in shown.splitlines():
        words = [word for word in line.replace("\\", " ").split() if word not in STATES]
        if not words or words[0] in SKIPPED or words[0].startswith(("fe80:", "ff00:")):
            continue
        if _has(words, "dev", name) and not _has(words, "table", "local") and not _has(words, "proto", "ra"):
            found.append(" ".join(words))
    return found


def _has(words: Sequence[str], key: str, value: str) -> bool:
    """Whether two words are in a list, one after the other."""
    return any(words[at : at + 2] == [key, value] for at in range(len(words)))


def _is_ipv6(words: str) -> bool:
    """Whether an address or route is of IPv6; a default route shows it by its gateway or its preference."""
    return ":" in words.partition(" label ")[0] or " pref " in words
