"""A management controller that speaks Redfish: sushy-tools' emulator, with TLS, a password, and a system that is on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bcrypt

from appliance.errors import SmsError
from appliance.tools.redfish import Controller
from tests.servers import free_port, server_files

UUID = "27946b59-9e44-4fa7-8e91-f3527a1ef094"
USER, PASSWORD = "sms", "a secret: with a colon"
AT_ONCE = """
import random
from sushy_tools.emulator.main import main
random.randint = lambda low, high: low
main()
"""
"""The emulator, which would switch a system after 1 to 11 s, as it throws its dice."""


@dataclass(frozen=True)
class Emulator:
    """Where it answers, the CA that signed its certificate, and the password's file."""

    url: str
    ca: Path
    password_file: Path

    def controller(self, password: str = PASSWORD, *, path: str = "", ca: bool = True) -> Controller:
        """As the site file would have it."""
        return Controller(self.url + path, USER, password, self.ca if ca else None)

    def power(self, system: str = UUID) -> str:
        """What it says of the power now."""
        return str(self.controller().request("GET", f"/redfish/v1/Systems/{system}")["PowerState"])


def _configure(folder: Path, seen: Path, systems: int, macs: Sequence[str]) -> None:
    names = [UUID[:-1] + str(4 + number) for number in range(systems)]
    nics = {name: [{"mac": mac, "ip": ""}] for name, mac in zip(names, macs, strict=False)}
    fakes = [
        {"uuid": one, "name": f"s{one[-1]}", "power_state": "On", "external_notifier": False, "nics": nics.get(one, [])}
        for one in names
    ]
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    (folder / "users").write_text(f"{USER}:{hashed}\n")
    lines = {
        "SUSHY_EMULATOR_FAKE_SYSTEMS": fakes,
        "SUSHY_EMULATOR_AUTH_FILE": str(seen / "users"),
        "SUSHY_EMULATOR_STATE_DIR": str(seen),
    }
    (folder / "emulator.conf").write_text("".join(f"{key} = {value!r}\n" for key, value in lines.items()))


@contextmanager
def emulator(
    folder: Path, *, systems: int = 1, macs: Sequence[str] = (), prefix: Sequence[str] = (), seen: str = ""
) -> Iterator[Emulator]:
    """Run one on the loopback, at a free port.

    Args:
        systems: how many it has.
        macs: the MAC address of each.
        prefix: stands before its command, as that of a lab host does; the caller waits for it then.
        seen: the folder's path for that command.
    """
    port = free_port()
    inside = Path(seen or folder)
    certificate, key = server_files(folder, folder)
    _configure(folder, inside, systems, macs)
    (folder / "password").write_text(f"{PASSWORD}\n")
    (folder / "password").chmod(0o600)
    words = ["--config", str(inside / "emulator.conf"), "--fake", "-i", "127.0.0.1", "-p", str(port)]
    words += ["--ssl-certificate", str(inside / certificate.name), "--ssl-key", str(inside / key.name)]
    program = [sys.executable, "-c", AT_ONCE]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*prefix, *program, *words], stdout=log, stderr=log, cwd=folder)
    made = Emulator(f"https://127.0.0.1:{port}", folder / "ca.pem", folder / "password")
    try:
        if not prefix:
            _wait(made, process, folder)
        yield made
    finally:
        # Behind nsenter it is a child; that one ends with it.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() if prefix else []
        for pid in [*map(int, children), *([] if children else [process.pid])]:
            os.kill(pid, signal.SIGTERM)
        process.wait(10)


def _wait(made: Emulator, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            made.power()
        except SmsError:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        else:
            return
