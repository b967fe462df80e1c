"""Syslog messages over UDP that reach nobody during a switch are counted, each once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.places import ROOT

MAC = "02:73:6d:73:00:01"
SCRIPT = f"""
import socket, struct
from appliance.agent.migration_source import DatagramCounter

MAC = bytes.fromhex("{MAC.replace(":", "")}")

def frame(port, protocol=17, mac=MAC, fragment=0):
    packet = struct.pack(">HHHH", 40000, port, 13, 0) + b"hello"
    head = struct.pack(">BBHHHBBHII", 0x45, 0, 20 + len(packet), 1, fragment, 64, protocol, 0, 0x0A000002, 0x0A000001)
    return mac + bytes.fromhex("020000000002") + b"\\x08\\x00" + head + packet

def send(interface, frames):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as one:
        one.bind((interface, 0))
        for frame in frames:
            one.send(frame)

counter = DatagramCounter("br0", "own", "{MAC}")
others = [frame(515), frame(514, protocol=6), frame(514, mac=bytes(6)), frame(514, fragment=1)]
send("a1", [frame(514), *others])
send("b1", [frame(514)] * 30000)
print(len(counter.sockets), counter.count())
"""
NETWORK = """\
mount -t sysfs none /sys
ip link add br0 type bridge stp_state 0 forward_delay 0
for port in a b c own; do
    [ $port = own ] && name=own || name=${port}0
    ip link add $name type veth peer name ${port}1
    ip link set $name master br0 up
    ip link set ${port}1 up
done
ip link set br0 up
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="bridges need root")
def test_a_message_that_the_bridge_floods_is_counted_once() -> None:
    """Also if there are more than a socket's buffer has room for."""
    argv = ["unshare", "--net", "--mount", "sh", "-ec", NETWORK, "network", sys.executable, "-c", SCRIPT]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == "3 30001\n", done.stderr
