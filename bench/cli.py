"""Duration of `sms --help`, of `sms classify` with ten packets, and until `sms status` shows something: starts."""

from __future__ import annotations

import os
import pty
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.errors import SmsError
from bench.rig import Rig, find_program, result, wall, work_folder
from tests.captures import files
from tests.captures.cluster import Plan, simulate

SMS = str(Path(sys.prefix) / "bin" / "sms")
HELP_S, TEN_S, FIRST_S = 0.08, 0.15, 0.3
DHCP, NTP = 67, 123


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the bare interpreter, with the help of Apptainer, and with programs that read the same packets."""
    runs = max(rig.runs, 11)
    with work_folder() as folder:
        capture, site = Path(folder) / "ten.pcap", Path(folder) / "sms.yaml"
        capture.write_bytes(ten_packets())
        make_site(site)
        own = {
            "help": lambda: wall(SMS, "--help"),
            "ten": lambda: wall(SMS, "classify", str(capture)),
            "first": lambda: first_output(SMS, "--site", str(site), "status"),
        }
        peers = {
            "python": lambda: wall(sys.executable, "-c", "pass"),
            "apptainer": lambda: wall(find_program("apptainer", "apptainer"), "--help"),
            "tshark": lambda: wall(find_program("tshark", "tshark"), "-n", "-r", str(capture)),
            "capinfos": lambda: wall(find_program("capinfos", "wireshark-common"), str(capture)),
        }
        samples = rig.interleave(own, peers, runs)
    yield result("cli/python", samples["help"], "python -c pass", samples["python"], below=HELP_S)
    yield result("cli/apptainer", samples["help"], "apptainer --help", samples["apptainer"], below=HELP_S)
    yield result("cli/ten packets", samples["ten"], "tshark -r FILE", samples["tshark"], below=TEN_S)
    yield result("cli/ten packets, counted", samples["ten"], "capinfos FILE", samples["capinfos"], below=TEN_S)
    yield result("cli/status", samples["first"], "python -c pass", samples["python"], below=FIRST_S)


def ten_packets() -> bytes:
    """Return a capture of a node's DHCP and of NTP."""
    packets = list(simulate(Plan(nodes=2, services=("provisioning", "ntp"))).packets())
    dhcp, ntp = ([one for one in packets if port in struct.unpack_from("!HH", one[1], 34)] for port in (DHCP, NTP))
    return files.pcap([*dhcp[:4], *ntp[:6]])


def make_site(path: Path) -> None:
    """Write a site file with this machine as an admin host. Nothing runs here: the status says so."""
    wall(SMS, "init", "--profile", "lab", "-o", str(path))
    path.write_text(path.read_text().replace("name: host-a", f"name: {socket.gethostname()}"))


def first_output(*argv: str) -> float:
    """Run a command on a terminal; return the seconds until it writes something.

    Raises:
        SmsError: it wrote nothing.
    """
    began = time.monotonic()
    pid, terminal = pty.fork()
    if not pid:
        os.execv(argv[0], argv)
    shown = os.read(terminal, 4096)
    took = time.monotonic() - began
    os.close(terminal)  # which ends it
    os.waitpid(pid, 0)
    if not shown:
        raise SmsError(f"{argv[0]} wrote nothing")
    return took
