"""ARP (RFC 826, 5227) by packet sockets: who has an address, and gratuitous announcements.

For hosts that may lack arping(8): the old node of an adoption.
"""

import fcntl
import os
import select
import socket
import struct
import time
from typing import Dict, Iterable, List, Sequence, Tuple

from appliance.agent.protocol import Problem

ETH_P_ARP = 0x0806
BROADCAST = b"\xff" * 6
REQUEST, REPLY = 1, 2
SIOCGIFHWADDR = 0x8927
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC = 263, 1, 1
"""linux/sockios.h, linux/if_packet.h."""
PACKET = struct.Struct("!6s6sHHHBBH6s4s6s4s")
"""Ethernet header and ARP packet."""
QUERY_S = 1.0
"""Seconds that ``find_macs`` waits for answers."""
REPEAT_S = 0.3
"""Seconds between its requests."""
AGAIN_S = (0.2, 1.0, 2.0, 3.0)
"""Seconds after an announcement when it is repeated: a switch or a host may have missed it."""


def ipv4(addresses: Iterable[str]) -> List[str]:
    """Return the IPv4 addresses of a list, without their prefixes."""
    return [address.partition("/")[0] for address in addresses if ":" not in address]


def read_mac(interface: str) -> str:
    """Return the present MAC address of an interface.

    Raises:
        OSError: there is none of that name.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        found = fcntl.ioctl(one, SIOCGIFHWADDR, struct.pack("16s24x", interface.encode()))
    return ":".join("%02x" % byte for byte in found[18:24])


def find_macs(interface: str, addresses: Sequence[str], mac: str, wait_s: float = QUERY_S) -> Dict[str, str]:
    """Return the MAC address of each IPv4 address for which another machine answers in the network of an interface.

    Addresses of this host itself are not answered: packet sockets are below its IP.

    Args:
        mac: source of the requests, where switches then expect it. It need not be that of the interface.

    Raises:
        OSError: the interface is down or gone.
    """
    found: Dict[str, str] = {}
    wanted = {socket.inet_aton(address): address for address in addresses}
    source = _bytes(mac)
    with _open(interface) as one:
        promiscuous = struct.pack("iHH8s", socket.if_nametoindex(interface), PACKET_MR_PROMISC, 0, b"")
        one.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, promiscuous)
        end = again = time.monotonic()
        end += wait_s
        while len(found) < len(wanted):
            now = time.monotonic()
            if now >= end:
                break
            if now >= again:
                for raw, address in wanted.items():
                    if address not in found:
                        one.send(_frame(source, REQUEST, bytes(4), bytes(6), raw))
                again = now + REPEAT_S
            if select.select([one], [], [], max(0.0, min(again, end) - now))[0]:
                sender, raw = _parse_reply(one.recv(2048))
                if raw in wanted:
                    found.setdefault(wanted[raw], sender)
    return found


def announce(interface: str, addresses: Sequence[str], mac: str) -> None:
    """Announce IPv4 addresses by gratuitous ARP: at once, and again for some seconds while the interface has the MAC.

    Raises:
        OSError: the interface is down or gone.
    """
    if not addresses:
        return
    _announce(interface, addresses, mac)
    # The caller may end before, and the repetitions must outlive it.
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        # Pipes of the caller would stay open.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, 1024)
        began = time.monotonic()
        for after in AGAIN_S:
            time.sleep(max(0.0, began + after - time.monotonic()))
            if read_mac(interface) != mac.lower():
                break
            _announce(interface, addresses, mac)
    finally:
        os._exit(0)


def _announce(interface: str, addresses: Sequence[str], mac: str) -> None:
    source = _bytes(mac)
    with _open(interface) as one:
        for address in addresses:
            raw = socket.inet_aton(address)
            # Some machines heed only requests, others only replies.
            one.send(_frame(source, REQUEST, raw, bytes(6), raw))
            one.send(_frame(source, REPLY, raw, BROADCAST, raw))


def _open(interface: str) -> socket.socket:
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        one.bind((interface, ETH_P_ARP))
    except OSError:
        one.close()
        raise
    return one


def _frame(mac: bytes, operation: int, sender: bytes, target_mac: bytes, target: bytes) -> bytes:
    return PACKET.pack(BROADCAST, mac, ETH_P_ARP, 1, 0x0800, 6, 4, operation, mac, sender, target_mac, target)


def _parse_reply(frame: bytes) -> Tuple[str, bytes]:
    """Return the MAC and IPv4 address of a frame's sender; empty ones if it is not an ARP reply."""
    if len(frame) < PACKET.size:
        return "", b""
    _, _, kind, hardware, protocol, _, _, operation, mac, sender, _, _ = PACKET.unpack_from(frame)
    if (kind, hardware, protocol, operation) != (ETH_P_ARP, 1, 0x0800, REPLY):
        return "", b""
    return ":".join("%02x" % byte for byte in mac), sender


def _bytes(mac: str) -> bytes:
    try:
        data = bytes(int(byte, 16) for byte in mac.split(":"))
    except ValueError:
        data = b""
    if len(data) != 6:
        raise Problem("invalid MAC address %s" % mac[:40], status=2)
    return data
