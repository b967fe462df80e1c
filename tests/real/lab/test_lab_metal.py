"""The lab's machines without a disk: switched by Redfish, seen on the switch, gone with the lab."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.lab import Extras, Lab, Metal
from appliance.operations.lab.lab import lab_down, lab_machines, lab_up
from appliance.progress import Silent
from tests.real.labs import console_text, fresh_lab, need_machine
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME = "t-metal"
WAIT_S = 60
# Given the address and what is to be done; prints the power state afterwards. It runs in the network of host-a.
CLIENT = """
import sys, sushy
from sushy import auth
address, password, ca, *orders = sys.argv[1:]
login = auth.BasicAuth(username="root", password=open(password).read())
there = sushy.Sushy(f"https://{address}/redfish/v1", auth=login, verify=ca)
(system,) = there.get_system_collection().get_members()
for order in orders:
    if order == "pxe":
        system.set_system_boot_source(sushy.BOOT_SOURCE_TARGET_PXE, enabled=sushy.BOOT_SOURCE_ENABLED_ONCE)
    else:
        system.reset_system(sushy.ResetType(order))
system.refresh(force=True)
nics = [nic.mac_address for nic in system.ethernet_interfaces.get_members()]
print(system.name, system.power_state.value, *nics)
"""


class Row:
    """A lab with two machines."""

    def __init__(self) -> None:
        self.lab = Lab.open(NAME)

    def network(self, host: str, *argv: str) -> list[str]:
        """A command of this machine in the network of a host."""
        return ["nsenter", f"--net=/run/netns/{self.lab.layout.namespace(host)}", "--", *argv]

    def redfish(self, name: str, *orders: str) -> list[str]:
        """Give orders to a machine's controller by sushy; name, power state, MACs."""
        import sys

        machine, etc = self.lab.metal(name).machine, self.lab.etc
        files = (str(etc / "keys/bmc.password"), str(etc / "tls/ca.pem"))
        argv = self.network("host-a", sys.executable, "-c", CLIENT, machine.bmc, *files, *orders)
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.split()

    def requests(self, mac: str) -> list[str]:
        """DHCP's requests of a machine, as the switch sees them; the first is waited for."""
        argv = ("timeout", str(WAIT_S), "tcpdump", "-lnn", "-c", "1", "-i", "br-prov")
        reported = self.network("switch", *argv, f"udp dst port 67 and ether src {mac}")
        done = subprocess.run(reported, check=False, capture_output=True, text=True, timeout=WAIT_S + 30)
        return done.stdout.splitlines()


@pytest.fixture(scope="module")
def row() -> Iterator[Row]:
    pytest.importorskip("sushy")
    need_machine(metal=True)
    with fresh_lab(NAME, 0, metal=2):
        yield Row()


def state(row: Row) -> list[bool]:
    return [one.on for one in row.lab.all_metal()]


def test_a_controller_that_answers_has_made_its_database(row: Row) -> None:
    """At the first request the emulator would make it; two at once find it locked, and one of them fails."""
    folder = Path(f"/proc/{row.lab.host('bmc').pid}/root/run/bmc")
    assert "fakedriver.sqlite" in [path.name for path in folder.glob("*.sqlite")]


def test_a_machine_that_is_switched_on_asks_for_an_address(row: Row) -> None:
    assert state(row) == [False, False]
    mac = row.lab.metal("metal1").machine.mac
    assert row.redfish("metal1") == ["metal1", "Off", mac]
    assert row.redfish("metal1", "pxe", "On") == ["metal1", "On", mac]
    assert state(row) == [True, False]
    assert [machine.pid is not None for machine in lab_machines(NAME)] == [True, False]
    assert "BOOTP/DHCP, Request from 02:00:0a:4d:00:97" in row.requests(mac)[0]
    assert "iPXE" in console_text(row.lab.metal("metal1"))
    assert row.redfish("metal1", "ForceOff")[1] == "Off"
    assert state(row) == [False, False]


def test_without_the_network_as_its_boot_device_it_has_none(row: Row) -> None:
    row.redfish("metal2", "On")
    wait_until(lambda: "No bootable device" in console_text(row.lab.metal("metal2")), "a word on the console", WAIT_S)
    assert "iPXE" not in console_text(row.lab.metal("metal2"))
    row.redfish("metal2", "ForceOff")


def test_each_controller_has_its_own_machine_and_requires_the_password(row: Row) -> None:
    ask = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", str(row.lab.etc / "tls/ca.pem"))
    password = (row.lab.etc / "keys/bmc.password").read_text()
    codes = []
    for login in ("root:wrong", f"root:{password}"):
        url = f"https://{row.lab.metal('metal2').machine.bmc}/redfish/v1/Systems"
        argv = row.network("host-a", *ask, "--config", "-", url)
        codes.append(
            subprocess.run(argv, input=f'user = "{login}"\n', capture_output=True, text=True, check=True).stdout
        )
    assert codes == ["401", "200"]
    assert (row.lab.etc / "keys/bmc.password").stat().st_mode & 0o777 == 0o600
    assert row.redfish("metal2")[0] == "metal2"


def test_power_that_fails_is_seen_and_a_controller_that_dies_leaves_the_machine_on(row: Row) -> None:
    row.redfish("metal1", "pxe", "On")
    found: Metal = row.lab.metal("metal1")
    assert found.pid
    for pid in controllers(row):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not row.lab.failing("bmc") and controllers(row), "the controller is back", WAIT_S)
    assert row.redfish("metal1")[1] == "On"
    os.kill(found.pid, signal.SIGKILL)
    wait_until(lambda: not row.lab.metal("metal1").on, "it is off", WAIT_S)
    assert row.redfish("metal1")[1] == "Off"


def controllers(row: Row) -> list[int]:
    """Processes of the program that plays them."""
    words = subprocess.run(
        ["ip", "netns", "pids", row.lab.layout.namespace("bmc")], check=True, capture_output=True, text=True
    ).stdout.split()
    return [int(pid) for pid in words if "/lab/bmc.py" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.parametrize("killed", ["nothing", "bmc"])
def test_down_leaves_nothing(row: Row, killed: str) -> None:
    assert lab_up(NAME, 0, Silent(), Extras(metal=2)) is (killed != "nothing")
    row.lab = Lab.open(NAME)
    row.redfish("metal1", "On")
    row.redfish("metal2", "pxe", "On")
    pids = [one.pid for one in row.lab.all_metal()]
    assert all(pids)
    if killed == "bmc":
        os.kill(row.lab.host("bmc").pid, signal.SIGKILL)
    lab_down(NAME, False, Silent())
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not Path(f"/run/sms-lab/{NAME}").exists()
    spaces = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-br", "link"], check=True, capture_output=True, text=True).stdout
    assert f"sms-{NAME}-" not in spaces
    assert "m-metal" not in links
