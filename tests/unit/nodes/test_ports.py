"""Which veth ends belong to an instance, and the commands for ip."""

from __future__ import annotations

import json

from appliance.shared.ports import port_address
from appliance.tools.ports import attach, detach, find_ports
from tests.support.fake import Fake

INSIDE = [
    {"ifname": "lo", "ifindex": 1},
    {"ifname": "eth0", "ifindex": 2, "link_index": 6, "link_netnsid": 0},
    {"ifname": "eth1", "ifindex": 3, "link_index": 7, "link_netnsid": 0},
    # A veth to another namespace whose index equals one of the host's by chance.
    {"ifname": "probe0", "ifindex": 4, "link_index": 2, "link_netnsid": 1},
]
OUTSIDE = [
    {"ifname": "lo", "ifindex": 1},
    {"ifname": "prov0", "ifindex": 2, "link_index": 5},
    {"ifname": "br-prov", "ifindex": 4},
    {"ifname": "vethaa", "ifindex": 6, "link_index": 2},
    {"ifname": "vethbb", "ifindex": 7, "link_index": 3},
]


def test_ports_are_matched_from_both_ends() -> None:
    inside = ("nsenter", "--net=/proc/42/ns/net", "ip", "-json", "-details", "link")
    host = Fake({inside: (0, json.dumps(INSIDE)), ("ip", "-json", "link"): (0, json.dumps(OUTSIDE))})
    assert find_ports(host, 42) == {"eth0": "vethaa", "eth1": "vethbb"}


def batch_of(change: str) -> str:
    batches = []

    def record(_: tuple[str, ...], given: bytes | None) -> tuple[int, str]:
        batches.append((given or b"").decode())
        return 0, ""

    host = Fake({("ip", "-force", "-batch", "-"): record})
    if change == "attach":
        attach(host, {"vethaa": "br-prov"})
        attach(host, {})
    else:
        detach(host, ["vethaa", "vethbb"], down=change == "down")
        detach(host, [])
    (text,) = batches
    return text


def test_ports_are_attached_and_detached() -> None:
    assert batch_of("attach") == f"link set dev vethaa address {port_address('vethaa')} master br-prov up\n"
    assert batch_of("detach") == "link set dev vethaa nomaster\nlink set dev vethbb nomaster\n"
    assert batch_of("down") == "link set dev vethaa nomaster down\nlink set dev vethbb nomaster down\n"
