"""Datagrams of log senders that come in while no host has the addresses: they are lost, and counted."""

import os
import socket
import struct
from typing import List

from appliance.agent.log_sessions import attach_filter

SOL_PACKET, PACKET_STATISTICS, PACKET_IGNORE_OUTGOING = 263, 6, 23
"""linux/if_packet.h."""
ETH_P_ALL = 3


class DatagramCounter:
    """Counts syslog messages over UDP (RFC 5426) that come in for a MAC address that no host has during the switch."""

    def __init__(self, bridge: str, port: str, mac: str) -> None:
        self.sockets: List[socket.socket] = []
        if not mac:
            return
        folder = "/sys/class/net/%s/brif" % bridge
        for name in os.listdir(folder) if os.path.isdir(folder) else [bridge]:  # the parent of a macvlan interface
            if name == port:
                continue
            try:
                one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
                self._filter(one, mac)
                # The bridge floods a frame to an unknown address: as outgoing ones it would count at every other port.
                one.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
                one.bind((name, ETH_P_ALL))
                self.sockets.append(one)
            except OSError:
                continue  # an incomplete count must not stop the migration

    def _filter(self, one: socket.socket, mac: str) -> None:
        """Set the filter: ether dst MAC and ip and udp dst port 514, first fragments only (bpf(4))."""
        data = bytes(int(byte, 16) for byte in mac.split(":"))
        high, low = struct.unpack(">I", data[2:])[0], struct.unpack(">H", data[:2])[0]
        program = [
            (0x20, 0, 0, 2),  # ld [2]
            (0x15, 0, 11, high),
            (0x28, 0, 0, 0),  # ldh [0]
            (0x15, 0, 9, low),
            (0x28, 0, 0, 12),  # ldh [12]
            (0x15, 0, 7, 0x0800),
            (0x30, 0, 0, 23),  # ldb [23]
            (0x15, 0, 5, 17),
            (0x28, 0, 0, 20),  # ldh [20]
            (0x45, 3, 0, 0x1FFF),  # a later fragment
            (0xB1, 0, 0, 14),  # ldxb 4*([14]&0xf)
            (0x48, 0, 0, 16),  # ldh [x + 16]
            (0x15, 0, 1, 514),
            (0x06, 0, 0, 64),
            (0x06, 0, 0, 0),
        ]
        # Jumps are relative to the next instruction: all of them lead to the last one.
        last = len(program) - 1
        fixed = []
        for at, (code, true, false, value) in enumerate(program):
            if code == 0x15:
                false = last - at - 1
            if code == 0x45:
                true = last - at - 1
            fixed.append((code, true, false, value))
        attach_filter(one, fixed)

    def count(self) -> int:
        """Close the sockets; return the number of messages, including those that their buffers had no room for."""
        found = 0
        for one in self.sockets:
            found += int(struct.unpack("II", one.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[0])
            one.close()
        return found
