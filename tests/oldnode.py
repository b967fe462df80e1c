"""An old node of an adoption with its networks, in network namespaces, and the agent on it.

Its units are real processes; a small systemctl(1) starts and stops them, and heeds the condition that prevents a start.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from appliance.shared.wire import count_bytes, pack_message, read_message
from appliance.tools.agent import build_zipapp
from tests.waiting import alive, wait_until

PYTHON = sys.executable
MACS = {"prov": "02:00:00:00:00:01", "pub": "02:00:00:00:00:02"}
SPARE = {"prov": "02:00:00:00:00:f1", "pub": "02:00:00:00:00:f2"}
MOVES = {"prov": ["10.1.0.1/16"], "pub": ["192.0.2.1/24", "192.0.2.2/24"]}
KEEPS = {"prov": ["10.1.0.9/16"], "pub": ["192.0.2.9/24"]}
GATEWAY = {"prov": "10.1.0.254", "pub": "192.0.2.254"}
GUARD = "sms-adopted.service"
UNITS = ("slurmdbd.service", "slurmctld.service")
SYSTEMCTL = f"""#!{PYTHON}
import os, re, shlex, signal, subprocess, sys, time
FOLDER = os.environ["UNITS"]
command, words = sys.argv[1], sys.argv[2:]
units = [word for word in words if not word.startswith("-")]

def pid(unit):
    try:
        found = int(open(FOLDER + "/" + unit + ".pid").read())
        return found if open("/proc/%d/stat" % found).read().rpartition(")")[2].split()[0] not in "ZX" else 0
    except (OSError, ValueError):
        return 0

def prevented(unit):
    try:
        text = open("/etc/systemd/system/%s.d/sms-adopt.conf" % unit).read()
    except OSError:
        return False
    return any(os.path.exists(path) for path in re.findall("ConditionPathExists=!(.*)", text))

print(time.time(), *sys.argv[1:], file=open(FOLDER + "/log", "a"))
if os.path.exists(FOLDER + "/fails-" + command):
    sys.exit("it fails")
steps = ("stop", "start") if command == "restart" else (command,)
for command, (number, unit) in [(step, each) for step in steps for each in enumerate(units)]:
    there = os.path.exists(FOLDER + "/" + unit)
    if command == "show":
        facts = dict(LoadState="loaded" if there else "not-found", ActiveState="active" if pid(unit) else "inactive",
                     MainPID=pid(unit))
        names = [word[11:] for word in words if word.startswith("--property=")]
        print("\\n" * bool(number) + "\\n".join("%s=%s" % (name, facts[name]) for name in names))
    elif command == "start" and not pid(unit) and not prevented(unit):
        if there:
            run = open(FOLDER + "/" + unit).read().split("\\0")
        else:
            text = open("/etc/systemd/system/" + unit).read()
            run = shlex.split(re.search("^ExecStart=(.*)", text, re.MULTILINE).group(1))
        null = subprocess.DEVNULL
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent ignores it
        one = subprocess.Popen(run, stdin=null, stdout=null, stderr=null, start_new_session=True)
        open(FOLDER + "/" + unit + ".pid", "w").write(str(one.pid))
    elif command == "stop":
        while found := pid(unit):  # asked once: signal 15 to "no process" would go to the group of the whole run
            os.kill(found, signal.SIGTERM)
            time.sleep(0.02)
"""
ACCOUNTING = """
import signal, socket, time
time.sleep(0.1)
server = socket.create_server(("127.0.0.1", 6819))
signal.pause()
"""
CONTROLLER = """
import os, signal, sys, time
folder, number, ended = sys.argv[1], 0, []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
while not ended:
    number += 1
    with open(folder + "/job_state.new", "w") as stream:
        stream.write("job %d" % number)
    os.rename(folder + "/job_state.new", folder + "/job_state")
    time.sleep(0.02)
with open(folder + "/last", "w") as stream:
    stream.write("job %d" % number)
"""


@dataclass
class Space:
    """A network namespace, with a process that holds it."""

    process: subprocess.Popen[bytes]

    @property
    def prefix(self) -> tuple[str, ...]:
        pid = str(self.process.pid)
        return ("nsenter", "-t", pid, "-n", "-m", "--")

    def run(self, *argv: str, ok: bool = True) -> str:
        done = subprocess.run([*self.prefix, *argv], capture_output=True, text=True, check=False)
        assert not ok or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def ip(self, *lines: str) -> None:
        text = "".join(line + "\n" for line in lines)
        subprocess.run([*self.prefix, "ip", "-batch", "-"], input=text, text=True, check=True)


def make_space(stack: ExitStack) -> Space:
    argv = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep infinity"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout and process.stdout.readline() == b"\n"
    space = Space(process)
    space.ip("link set lo up")
    return space


@dataclass
class Agent:
    """The agent, driven over its channel."""

    process: subprocess.Popen[bytes]
    said: list[dict[str, Any]] = field(default_factory=list)

    def send(self, do: str, data: bytes = b"", **facts: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(pack_message({**facts, "do": do}, len(data)) + data)
        self.process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self.process.stdout
        parts = b""
        while len(parts) < size:
            if not select.select([self.process.stdout], [], [], 0.5)[0]:
                self.send("ping")
                continue
            block = os.read(self.process.stdout.fileno(), size - len(parts))
            if not block:
                raise EOFError(self.end())
            parts += block
        return parts

    def receive(self, kind: str) -> tuple[dict[str, Any], bytes]:
        message = read_message(self._read, "kind")
        assert message["kind"] == kind, message
        return message, self._read(count_bytes(message))

    def ask(self, do: str, kind: str, data: bytes = b"", **facts: Any) -> tuple[dict[str, Any], bytes]:
        self.send(do, data, **facts)
        return self.receive(kind)

    def lose(self) -> None:
        """The coordinator is gone."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> dict[str, Any]:
        """Its last message: the result, or the problem."""
        self.lose()
        assert self.process.stderr
        lines = self.process.stderr.read().decode().splitlines()
        self.process.wait()
        assert not any("Traceback" in line for line in lines), "\n".join(lines)
        found: dict[str, Any] = json.loads(lines[-1])
        return found


@dataclass
class OldNode:
    """The old node ``old``, other machines of its networks in ``others``, the services container in ``target``."""

    folder: Path
    stack: ExitStack

    def __post_init__(self) -> None:
        self.old, self.others, self.target = (make_space(self.stack) for _ in range(3))
        for net in MACS:
            self.others.ip(f"link add br-{net} type bridge", f"link set br-{net} up")
            for name, space in (("old", self.old), ("tgt", self.target)):
                pid = space.process.pid
                self.others.ip(
                    f"link add {name}-{net} type veth peer name {net} netns {pid}",
                    f"link set {name}-{net} master br-{net} up",
                )
            self.others.ip(f"address add {GATEWAY[net]}/{MOVES[net][0].partition('/')[2]} dev br-{net}")
            addresses = [f"address add {one} dev {net}" for one in (*MOVES[net], *KEEPS[net])]
            self.old.ip(f"link set {net} address {MACS[net]} up", *addresses)
        self.old.ip(
            "route add default via 192.0.2.254 src 192.0.2.1",
            "route add 10.9.0.0/16 via 10.1.0.254",
            "route add 10.8.0.0/16 dev prov src 10.1.0.1 table 77",
        )
        self.old.run("mount", "-t", "tmpfs", "tmpfs", "/etc/systemd/system")
        (self.folder / "agent.pyz").write_bytes(build_zipapp())
        self.state = self.folder / "state"
        (self.state / "hash.1").mkdir(parents=True)
        (self.state / "hash.1" / "script").write_text("#!/bin/sh\n")
        self.units, self.bin = self.folder / "units", self.folder / "bin"
        for folder in (self.units, self.bin):
            folder.mkdir()
        (self.bin / "systemctl").write_text(SYSTEMCTL)
        (self.bin / "systemctl").chmod(0o755)
        (self.units / UNITS[0]).write_text(f"{PYTHON}\0-c\0{ACCOUNTING}")
        (self.units / UNITS[1]).write_text(f"{PYTHON}\0-c\0{CONTROLLER}\0{self.state}")
        self.environment = {**os.environ, "UNITS": str(self.units), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.systemctl("start", *UNITS)
        self.stack.callback(self.systemctl, "stop", *UNITS)
        self.stack.callback(self.stop_guard)
        self.request: dict[str, Any] = {
            "cluster": "c",
            "host": "old",
            "peer": "host-a",
            **{name: str(self.folder / "adopt" / f"c.{name}") for name in ("away", "lock")},
            "mark": str(self.folder / "adopt" / "c.json"),
            "interfaces": [
                {
                    "name": net,
                    "inside": inside,
                    "mac": MACS[net],
                    "spare_mac": SPARE[net],
                    "moves": MOVES[net],
                    "keeps": KEEPS[net],
                    "witnesses": [GATEWAY[net]],
                }
                for net, inside in (("prov", "eth0"), ("pub", "eth1"))
            ],
            "controller": [UNITS[1]],
            "accounting": [UNITS[0]],
            "stop_wait_s": 20,
            "state": str(self.state),
            "state_inside": "/var/lib/slurm/state",
        }

    def systemctl(self, *words: str) -> None:
        subprocess.run([*self.old.prefix, str(self.bin / "systemctl"), *words], env=self.environment, check=True)

    def start_guard(self) -> None:
        """What systemd does at a boot."""
        self.systemctl("start", GUARD)

    def guard_runs(self) -> bool:
        path = self.units / f"{GUARD}.pid"
        return path.exists() and alive(int(path.read_text()))

    def stop_guard(self) -> None:
        """As a power failure does."""
        # More than once: a systemctl of the agent may be starting it right now.
        while self.guard_runs():
            os.kill(int((self.units / f"{GUARD}.pid").read_text()), signal.SIGKILL)
            time.sleep(0.2)

    def runs(self) -> list[str]:
        """The units that run."""
        found = {unit: self.units / f"{unit}.pid" for unit in UNITS}
        return [unit for unit, path in found.items() if path.exists() and alive(int(path.read_text()))]

    def argv(self, command: str, request: dict[str, Any]) -> list[str]:
        return [*self.old.prefix, PYTHON, "-I", str(self.folder / "agent.pyz"), command, json.dumps(request)]

    def start(self, command: str = "adopt_leave", **fields: Any) -> Agent:
        """The agent, at work until the test ends."""
        pipe = subprocess.PIPE
        argv = self.argv(command, {**self.request, **fields})
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=self.environment)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return Agent(process)

    def call(self, command: str, **fields: Any) -> dict[str, Any]:
        """The result of a command, or the problem."""
        places = {name: self.request[name] for name in ("mark", "lock")}
        argv = self.argv(command, {**places, **fields})
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def mark(self) -> dict[str, Any]:
        """The stored state; empty without one."""
        path = Path(self.request["mark"])
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def network(self) -> dict[str, Any]:
        """MAC addresses, addresses and routes of the node."""
        links = json.loads(self.old.run("ip", "-json", "-4", "address", "show"))
        routes = self.old.run("ip", "-4", "-o", "route", "show", "table", "all").splitlines()
        macs = json.loads(self.old.run("ip", "-json", "link", "show"))
        return {
            "macs": {one["ifname"]: one["address"] for one in macs},
            "addresses": {
                one["ifname"]: [f"{info['local']}/{info['prefixlen']}" for info in one["addr_info"]] for one in links
            },
            "routes": sorted(" ".join(line.split()) for line in routes),
        }

    def serve(self) -> None:
        """The target takes the addresses."""
        for net in MACS:
            addresses = [f"address add {one} dev {net}" for one in MOVES[net]]
            self.target.ip(f"link set {net} address {MACS[net]} up", *addresses)

    def stop_serving(self) -> None:
        """The target gives the addresses back."""
        for net in MACS:
            self.target.ip(f"address flush dev {net}", f"link set {net} down address {SPARE[net][:-2]}99")

    def reaches(self, address: str) -> bool:
        """Whether another machine of the networks reaches it."""
        return bool(self.others.run("ping", "-n", "-c", "1", "-W", "1", address, ok=False).count(" 1 received"))

    def cut(self, cut: bool = True) -> None:
        """The network of the old node is down, or up again."""
        for net in MACS:
            self.others.ip(f"link set old-{net} {'down' if cut else 'up'}")
            # The kernel tells the other end a moment later.
            wait_until(partial(self._has_no_carrier, net, cut), "the carrier")

    def _has_no_carrier(self, net: str, wanted: bool) -> bool:
        return ("NO-CARRIER" in self.old.run("ip", "link", "show", net)) == wanted


@contextmanager
def old_node(folder: Path) -> Iterator[OldNode]:
    """An old node whose services run."""
    with ExitStack() as stack:
        made = OldNode(folder, stack)
        yield made


def wait_for(seconds: float) -> None:
    """Let the services run for a moment."""
    time.sleep(seconds)
