"""How a client gets an address (RFC 2131, 3.1)."""

from __future__ import annotations

import struct

from tests.captures import packets as p
from tests.captures.clusters.stage import Stage
from tests.captures.clusters.tape import Box

DAY_S = 86400
BROADCAST = Box(b"\xff" * 6, b"\xff" * 4)
NOBODY = bytes(4)


def terms(stage: Stage, lease_s: int) -> list[tuple[int, bytes]]:
    """The server, its lease, and T1: half of it."""
    return [(54, stage.sms.v4), (51, struct.pack("!I", lease_s)), (58, struct.pack("!I", lease_s // 2))]


def exchange(stage: Stage, number: int, time_s: float, vendor: bytes, lease_s: int) -> float:
    """DISCOVER, OFFER, REQUEST, ACK; return the time after it."""
    node, sms = stage.nodes[number], stage.sms
    own, mac = Box(node.mac, NOBODY, via=node.via), node.mac.hex(":")
    yours, lease = p.ip_text(node.v4), terms(stage, lease_s)
    asked = [(60, vendor), (97, b"\0" + node.mac.rjust(16, b"\0"))]
    for wait_s, message in ((0.0, 1), (0.4, 2), (0.7, 3), (0.71, 5)):
        options, at = (lease, time_s + wait_s) if message in (2, 5) else (asked, time_s + wait_s)
        if message in (2, 5):
            answer = p.bootp(message, mac=mac, xid=number, options=options, yours=yours)
            stage.tape.udp(at, sms, 67, BROADCAST, 68, answer)
        else:
            stage.tape.udp(at, own, 68, BROADCAST, 67, p.bootp(message, mac=mac, xid=number, options=options))
    return time_s + 1.0
