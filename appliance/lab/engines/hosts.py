"""Hosts for engines: own network, mounts, processes and host name; the disk stays when the power fails.

Unlike hosts of a lab they have this machine's root. To be used inside `tests/machine`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.base import Result
from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.layout import PROVISIONING
from appliance.lab.waiting import wait_until

FOLDER = Path("/run/sms-engines")
"""A folder for each host: logs of what runs on it."""
DISK = Path("/var/lib/sms-lab/engines")
"""A folder for each host, which stays while it is off."""
SWITCH = "sms-engines-switch"
NETWORK = "10.79.0"

# $1 host name, $2 more commands. The shell stays: the first process of a pid namespace waits for orphans.
BOOT = """
hostname "$1"
mount -t tmpfs -o mode=755 tmpfs /run
mount --make-rshared /run
ip link set lo up
eval "$2"
echo entered
while :; do sleep 3600; done
"""


class Daemon:
    """A program that runs on a host; ``log`` has what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Of the program itself, seen from this machine; 0 where it has ended."""
        with suppress(FileNotFoundError):
            # nsenter has entered a pid namespace by a child.
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return int(children[0]) if children else 0
        return 0

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait for the end."""
        if pid := self.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        self.process.wait(60)

    def last_lines(self, count: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class Runner:
    """A host on which engines run: programs are started on it, and log into ``folder``, which is on this machine.

    ``address``: other hosts reach it there. ``disk``: a folder for what stays, as the host sees it.
    """

    name: str
    address: str
    disk: Path
    folder: Path

    def __init__(self) -> None:
        self.folder = FOLDER / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.daemons: list[Daemon] = []

    @property
    def host(self) -> Netns:
        """To run commands on it."""
        raise NotImplementedError

    def install(self, program: Path) -> str:
        """Return the path of a program of this machine there."""
        return str(program)

    def run(self, *argv: str, ok: tuple[int, ...] | None = (0,), input: bytes | None = None) -> Result:
        """Run a command on it to its end."""
        return self.host.run(*argv, ok=ok, input=input, timeout=120)

    def start(self, name: str, *argv: str) -> Daemon:
        """Start a program on it."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.host.prefix, *argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        daemon = Daemon(process, log)
        self.daemons.append(daemon)
        return daemon

    def check(self) -> None:
        """Check that every program runs that was started here.

        Raises:
            SmsError: one has ended; with the end of its log.
        """
        for daemon in self.daemons:
            if daemon.process.poll() is not None:
                raise SmsError(f"a program on {self.name} ended; {daemon.log}:\n{daemon.last_lines()}")

    def remove(self) -> None:
        """End what was started here."""
        for daemon in self.daemons:
            daemon.end()
        self.daemons.clear()


class EngineHost(Runner):
    """A host of its own. ``prepare``: shell commands at each boot, such as mounts; ``disk`` stays while it is off."""

    def __init__(self, name: str, number: int, prepare: str = "") -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.prepare = prepare
        self.space = f"sms-engines-{name}"
        self.disk = DISK / name
        self._init: subprocess.Popen[bytes] | None = None
        self._pid = 0
        super().__init__()
        self.disk.mkdir(parents=True, exist_ok=True)
        _make_switch()
        _ip(f"netns add {self.space}")
        self.port = f"p-{number}"
        _ip(f"-n {SWITCH} link add {self.port} type veth peer name eth0 netns {self.space}")
        _ip(f"-n {SWITCH} link set {self.port} master br0 up")
        _ip(f"-n {self.space} addr add {self.address}/24 dev eth0")
        _ip(f"-n {self.space} link set eth0 up")
        self.on()

    def on(self) -> None:
        """Boot; nothing of what ran before is there, but the disk."""
        log = self.folder / "boot.log"
        argv = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self.space}", "unshare", "--mount"]
        argv += ["--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        with log.open("wb") as output:
            script = ["sh", "-euc", BOOT, "boot", self.name, self.prepare]
            self._init = init = subprocess.Popen(
                [*argv, *script], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        wait_until(lambda: init.poll() is not None or "entered" in log.read_text().split(), f"{self.name} is on", 20)
        if init.poll() is not None:
            raise SmsError(f"{self.name} does not boot: {log.read_text()}")
        self._pid = int(Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()[0])

    def off(self) -> None:
        """A power failure: all its processes are killed at once."""
        if not self._init:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._init.wait(60)
        for daemon in self.daemons:
            daemon.process.wait(60)
        self.daemons.clear()

    @property
    def host(self) -> Netns:
        """To run commands on it."""
        return Netns(self.name, self._pid)

    def join(self, lab: Lab, address: str) -> None:
        """Connect it to the provisioning network of a lab, until that is removed."""
        port, switch = f"k-{self.name}", lab.layout.namespace("switch")
        _ip(f"-n {switch} link add {port} type veth peer name prov0 netns {self.space}")
        _ip(f"-n {switch} link set {port} master {lab.layout.plan.bridges[PROVISIONING]} up")
        _ip(f"-n {self.space} addr add {address}/{lab.layout.plan.prefixes[PROVISIONING]} dev prov0")
        _ip(f"-n {self.space} link set prov0 up")

    def remove(self) -> None:
        """Off, and without a network; its logs stay until the machine ends."""
        self.off()
        # A network namespace goes, with its cables, only when nothing has it open.
        _ip(f"-n {SWITCH} link delete {self.port}")
        _ip(f"netns delete {self.space}")
        subprocess.run(["rm", "-rf", "--one-file-system", str(self.disk)], check=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *shlex.split(words)], check=True)


def _make_switch() -> None:
    """The bridge to which all hosts are connected, unless it is there."""
    if Path(f"/run/netns/{SWITCH}").exists():
        return
    _ip(f"netns add {SWITCH}")
    _ip(f"-n {SWITCH} link add br0 type bridge")
    _ip(f"-n {SWITCH} link set br0 up")
