"""Fencing: a real Redfish emulator, a simulated ipmitool, a command; an unverified host does not count as off."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.config.model import AdminHost
from appliance.errors import Refused, SmsError
from appliance.host import local
from appliance.host.local import Local
from appliance.operations.migration.fence import check_fence, describe_fence, fence
from appliance.tools import ipmi, redfish
from appliance.tools.redfish_power import switch
from tests.ownnet import own_network
from tests.redfish import PASSWORD, USER, UUID, Emulator, emulator
from tests.support.fake import Fake


@pytest.fixture
def bmc(tmp_path: Path) -> Iterator[Emulator]:
    with emulator(tmp_path) as made:
        yield made


def admin(**settings: Any) -> AdminHost:
    return AdminHost(name="host-a", address="192.0.2.1", fence=settings)


def by_redfish(bmc: Emulator, **more: Any) -> AdminHost:
    return admin(redfish={"url": bmc.url, "user": USER, "password_file": bmc.password_file, "ca": bmc.ca, **more})


@pytest.mark.slow
def test_redfish_powers_a_host_off(bmc: Emulator) -> None:
    assert bmc.power() == "On"
    fence(by_redfish(bmc), Local())
    assert bmc.power() == "Off"
    fence(by_redfish(bmc), Local())  # already off


@pytest.mark.slow
def test_redfish_path_of_a_system(bmc: Emulator) -> None:
    switch(bmc.controller(path=f"/redfish/v1/Systems/{UUID}/"), "off", timeout_s=30)
    assert bmc.power() == "Off"


@pytest.mark.slow
def test_redfish_requires_a_path_for_several_systems(tmp_path: Path) -> None:
    with emulator(tmp_path, systems=2) as bmc:
        with pytest.raises(SmsError, match="has 2 systems") as caught:
            switch(bmc.controller(), "off", timeout_s=30)
        assert "/redfish/v1/Systems/1" in caught.value.hint
        switch(bmc.controller(path=f"/redfish/v1/Systems/{UUID}"), "off", timeout_s=30)
        assert (bmc.power(), bmc.power(UUID[:-1] + "5")) == ("Off", "On")


@pytest.mark.slow
def test_wrong_password_and_unknown_certificate_are_refused(bmc: Emulator, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong\n")
    wrong.chmod(0o600)
    with pytest.raises(Refused, match=r"not known to be off.*401") as caught:
        fence(by_redfish(bmc, password_file=wrong), Local())
    assert "--i-have-fenced" in caught.value.hint
    with pytest.raises(Refused, match="certificate verification failed"):
        fence(by_redfish(bmc, ca=None), Local())
    assert bmc.power() == "On"
    fence(by_redfish(bmc, ca=None, insecure=True), Local())
    assert bmc.power() == "Off"


def test_unreachable_controller_is_an_error() -> None:
    controller = redfish.Controller("https://127.0.0.1:9", USER, PASSWORD, insecure=True)
    with pytest.raises(SmsError, match="does not answer") as caught:
        switch(controller, "off", timeout_s=1)
    assert PASSWORD not in caught.value.message


def test_password_file_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "password"
    host = admin(ipmi={"address": "bmc", "user": "ADMIN", "password_file": file})
    with pytest.raises(Refused, match="cannot read"):
        check_fence(host)
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.raises(Refused, match="others may read"):
        check_fence(host)
    file.chmod(0o600)
    check_fence(host)
    file.write_text("\n")
    with pytest.raises(Refused, match="one line"):
        check_fence(host)


def test_host_without_fencing_is_refused() -> None:
    with pytest.raises(Refused, match="no fencing is configured") as caught:
        check_fence(AdminHost(name="host-a", address="192.0.2.1"))
    assert "--i-have-fenced" in caught.value.hint


def test_command_reports_by_exit_status(tmp_path: Path) -> None:
    mark = tmp_path / "off"
    fence(admin(command=["touch", str(mark)]), Local())
    assert mark.exists()
    with pytest.raises(Refused, match="not known to be off"):
        fence(admin(command=["false"]), Local())
    with pytest.raises(Refused, match="not known to be off"):
        fence(admin(command=["sleep", "60"], timeout_s=1), Local())
    with pytest.raises(Refused, match="not known to be off"):
        fence(admin(command=["/nowhere/fence"]), Local())


POWER = ("ipmitool", "-I", "lanplus", "-H", "bmc", "-U", "ADMIN", "-f", "/etc/sms/bmc", "chassis", "power")


def ipmi_host(*states: str) -> Fake:
    """Return a host whose ipmitool reports one power state after the other."""
    left = list(states)

    def status(_: tuple[str, ...], __: bytes | None) -> tuple[int, str]:
        return 0, f"Chassis Power is {left.pop(0) if len(left) > 1 else left[0]}\n"

    found: dict[tuple[str, ...], Any] = {("sh", "-c"): (0, "")}
    return Fake({**found, (*POWER, "status"): status, (*POWER, "off"): (0, "Chassis Power Control: Down/Off")})


@pytest.mark.parametrize(
    ("states", "commands"),
    [
        (("off",), ["status", "status"]),
        (("on", "off"), ["status", "off", "status"]),
        (("on", "on", "off"), ["status", "off", "status", "status"]),
    ],
)
def test_ipmitool_is_polled_until_off(states: tuple[str, ...], commands: list[str]) -> None:
    host = ipmi_host(*states)
    ipmi.power_off(host, "bmc", "ADMIN", "/etc/sms/bmc", timeout_s=30)
    calls = [argv for argv in host.asked if argv[0] == "ipmitool"]
    assert calls == [(*POWER, command) for command in commands]


LAN = """\
name "bmc"
set_working_mc 0x20
startlan 1
  addr {address} 623
  priv_limit admin
  allowed_auths_callback md5
  allowed_auths_user md5
  allowed_auths_operator md5
  allowed_auths_admin md5
  guid a123456789abcdefa123456789abcdef
endlan
chassis_control "{folder}/chassis"
user 2 true "ADMIN" "{password}" admin 10 md5
"""
CHASSIS = """\
#!/bin/sh
# get power, set power VALUE
if [ "$1" = set ]; then echo "$3" >"$(dirname "$0")/power"; else echo "power:$(cat "$(dirname "$0")/power")"; fi
"""
MC = "mc_setbmc 0x20\nmc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02 persist_sdr\nmc_enable 0x20\n"


@pytest.mark.slow
def test_ipmi_powers_a_host_off(tmp_path: Path, need: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With OpenIPMI's simulator, which lists no cipher suites: ipmitool waits 10 s for them unless given one."""
    program = tmp_path / "bin" / "ipmitool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {need("ipmitool")} -C 3 "$@"\n')
    program.chmod(0o755)
    monkeypatch.setitem(local.ENVIRONMENT, "PATH", f"{program.parent}:{local.ENVIRONMENT['PATH']}")
    address = "192.0.2.62"
    files = {
        "lan.conf": LAN.format(address=address, folder=tmp_path, password="a-secret"),
        "commands": MC,
        "chassis": CHASSIS,
        "power": "1\n",
        "password": "a-secret\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700 if name == "chassis" else 0o600)
    words = ["-c", str(tmp_path / "lan.conf"), "-f", str(tmp_path / "commands"), "-n", "-s", str(tmp_path / "state")]
    (tmp_path / "state").mkdir()
    quiet = subprocess.DEVNULL
    # The simulator's port is fixed.
    with own_network([f"{address}/32"]):
        simulator = subprocess.Popen([need("ipmi_sim"), *words], stdin=quiet, stdout=quiet, stderr=quiet)
        try:
            settings = {"address": address, "user": "ADMIN", "password_file": tmp_path / "password"}
            fence(admin(ipmi=settings), Local())
        finally:
            simulator.terminate()
            simulator.wait(10)
    assert (tmp_path / "power").read_text().strip() == "0"


def test_ipmi_reports_a_host_that_stays_on() -> None:
    with pytest.raises(SmsError, match="Chassis Power is on"):
        ipmi.power_off(ipmi_host("on"), "bmc", "ADMIN", "/etc/sms/bmc", timeout_s=0)


def test_ipmi_errors() -> None:
    host = ipmi_host("on")
    host.answers[(*POWER, "status")] = (1, "Error: Unable to establish IPMI v2 / RMCP+ session")
    with pytest.raises(SmsError, match="Unable to establish"):
        ipmi.power_off(host, "bmc", "ADMIN", "/etc/sms/bmc", timeout_s=0)
    with pytest.raises(SmsError, match="ipmitool is not installed"):
        ipmi.power_off(Fake({("sh", "-c"): (0, "ipmitool")}), "bmc", "ADMIN", "/etc/sms/bmc", timeout_s=0)


def test_describe_fence() -> None:
    texts = [
        describe_fence(one)
        for one in (
            admin(redfish={"url": "https://bmc-a", "user": "sms", "password_file": "/x"}),
            admin(command=["/usr/local/sbin/fence", "host-a"]),
            admin(ipmi={"address": "bmc-a", "user": "ADMIN", "password_file": "/x"}),
        )
    ]
    assert "Redfish" in texts[0] and "/usr/local/sbin/fence" in texts[1] and "bmc-a" in texts[2]
    assert describe_fence(AdminHost(name="host-a", address="192.0.2.1")) == ""
