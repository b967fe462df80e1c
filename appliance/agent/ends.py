"""What both ends of a move do with their host: the instance, its ports and connections, the lease, the history."""

import http.client
import json
import os
import re
import socket
import subprocess
import time
import xmlrpc.client
from typing import Any, Dict, List, Optional, Sequence

from appliance.agent.freeze import find_loops
from appliance.agent.words import Problem, field
from appliance.shared.files import replace_file
from appliance.shared.locks import hold_lock

Words = Sequence[str]


def run(*argv: str, given: bytes = b"", ok: Sequence[int] = (0,), timeout: float = 60) -> bytes:
    """Standard output of a program.

    Raises:
        Problem: it ended with another status, or did not end in time.
    """
    # Its own session: what is sent to our group is not meant for it.
    done = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=os.setsid,
    )
    try:
        said, complained = done.communicate(given, timeout)
    except subprocess.TimeoutExpired:
        done.kill()
        done.communicate()
        raise Problem("`%s` did not end within %g s" % (" ".join(argv[:4]), timeout))
    if done.returncode not in ok:
        words = (complained or said).decode(errors="replace").strip().splitlines()[-4:]
        raise Problem("`%s` ended with status %d: %s" % (" ".join(argv[:6]), done.returncode, " / ".join(words)))
    return said


class Instance:
    """A running instance, by its first process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def root(self) -> str:
        """Its root file system, as this host sees it."""
        return "/proc/%d/root" % self.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return os.path.exists(self.root + "/run")

    def argv(self, *argv: str) -> List[str]:
        """A command that runs inside."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "env", "-i", PATH, *argv]

    def network(self, *argv: str) -> List[str]:
        """A command of this host's that runs in its network."""
        return ["nsenter", "--net=/proc/%d/ns/net" % self.pid, *argv]

    def supervisor(self) -> Any:
        """Its supervisor (http://supervisord.org/api.html)."""
        transport = _Transport(self.root + "/run/sms/supervisor.sock")
        return xmlrpc.client.ServerProxy("http://localhost", transport=transport).supervisor

    def stop_services(self, names: Words, patience_s: float) -> None:
        """End services, all at once, and wait until they have.

        Raises:
            Problem: one does not end.
        """
        supervisor = self.supervisor()
        states = {one["name"]: one["statename"] for one in supervisor.getAllProcessInfo()}
        going = [name for name in names if states.get(name) not in (None, "STOPPED", "FATAL", "EXITED")]
        for name in going:
            _quietly(supervisor.stopProcess, name, False)
        end = time.monotonic() + patience_s
        while going:
            states = {one["name"]: one["statename"] for one in supervisor.getAllProcessInfo()}
            going = [name for name in going if states.get(name) not in ("STOPPED", "FATAL", "EXITED")]
            if going and time.monotonic() > end:
                raise Problem("%s did not end within %g s" % (", ".join(going), patience_s), "sms logs %s" % going[0])
            if going:
                time.sleep(0.005)

    def start_services(self, names: Words) -> None:
        """Start what does not run; each waits itself for what it needs."""
        supervisor = self.supervisor()
        states = {one["name"]: one["statename"] for one in supervisor.getAllProcessInfo()}
        for name in names:
            if states.get(name) in ("STOPPED", "FATAL", "EXITED", "STOPPING"):
                _quietly(supervisor.startProcess, name, False)

    def ports(self, interfaces: Words) -> Dict[str, str]:
        """The host's ends of its interfaces, by their names inside."""
        inside = json.loads(run(*self.network("ip", "-json", "link", "show")).decode())
        # The two ends name each other: a number alone may be that of a cable to somewhere else.
        links = json.loads(run("ip", "-json", "link", "show").decode())
        here = {(one["ifindex"], one.get("link_index")): one["ifname"] for one in links}
        found = {one["ifname"]: here.get((one.get("link_index"), one["ifindex"]), "") for one in inside}
        missing = [name for name in interfaces if not found.get(name)]
        if missing:
            raise Problem("the other end of %s is not on this host" % ", ".join(missing))
        return {name: found[name] for name in interfaces}

    def announce(self, addresses: Dict[str, str]) -> None:
        """Tell switches and neighbours where the addresses are now: at once, and again for some seconds."""
        for interface, address in addresses.items():
            # arping's first goes out at once; it sends the others by the second.
            argv = self.network("arping", "-q", "-U", "-c", "5", "-I", interface, address)
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=os.setsid,
            )


PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/libexec"


def _quietly(call: Any, *arguments: Any) -> None:
    """A service that is what it should be by now is no fault (NOT_RUNNING, ALREADY_STARTED, BAD_NAME)."""
    try:
        call(*arguments)
    except xmlrpc.client.Fault:
        pass


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        http.client.HTTPConnection.__init__(self, "localhost", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str) -> None:
        xmlrpc.client.Transport.__init__(self)
        self.path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _Connection(self.path)


def find_instance(name: str) -> Optional[Instance]:
    """The running instance of that name; None where there is none."""
    listed = json.loads(run("apptainer", "instance", "list", "--json", name).decode() or "{}")
    for one in listed.get("instances") or []:
        if one["instance"] == name:
            return Instance(int(one["pid"]))
    return None


def wait_free(overlay: str, patience_s: float) -> None:
    """Wait until no loop device has the overlay open.

    Raises:
        Problem: one still has.
    """
    end = time.monotonic() + patience_s
    while True:
        loops = find_loops(overlay)
        if not loops:
            return
        if time.monotonic() > end:
            raise Problem("%s still has %s open" % (", ".join(loops), overlay), "losetup -l; fuser -v %s" % loops[0])
        time.sleep(0.02)


def set_bridges(ports: Dict[str, Optional[str]], *, timeout: float = 60) -> None:
    """Put ports into bridges, or take them off theirs; each of them, even if another cannot be.

    Raises:
        Problem: one cannot be, or it takes longer than ``timeout`` seconds.
    """
    lines = ["link set %s %s" % (port, "master " + one if one else "nomaster") for port, one in sorted(ports.items())]
    run("ip", "-force", "-batch", "-", given=("\n".join(lines) + "\n").encode(), timeout=timeout)


def is_port(port: str, bridge: str) -> bool:
    """Whether a port is on a bridge now."""
    return os.path.exists("/sys/class/net/%s/brif/%s" % (bridge, port))


MAPPED = re.compile(r" -n (\S+)")
ORIGINAL = re.compile(r" --sport (\d+)")
LEFT = re.compile(r" -t \d+")
REPLIED = re.compile(r" --reply-port-dst (\d+)")


def translated(saved: str) -> List[str]:
    """Those connections of ``conntrack -o save`` whose source is translated, as ``conntrack -R`` makes them again.

    What it saves says the new address alone: where the port is another as well, the kernel would choose one anew.
    """
    found = []
    for line in saved.splitlines():
        if " -n " not in line:
            continue
        before, after = ORIGINAL.search(line), REPLIED.search(line)
        if before and after and before.group(1) != after.group(1):
            line = MAPPED.sub(r" -n \1:" + after.group(1), line, count=1)
        found.append(line)
    return found


def read_connections(instance: Instance) -> List[str]:
    """The translated connections of an instance."""
    return translated(run(*instance.network("conntrack", "-L", "-o", "save")).decode(errors="replace"))


def lasting(line: str) -> str:
    """A connection without the seconds that it has left: those differ at each look."""
    return LEFT.sub("", line)


def load_connections(instance: Instance, lines: Words) -> str:
    """Make connections known to an instance; those that it knows are left. Say what could not be."""
    if not lines:
        return ""
    text = "".join(line + "\n" for line in lines).encode()
    try:
        run(*instance.network("conntrack", "-R", "-"), given=text)
        return ""
    except Problem as problem:
        return problem.message


NEIGHBOUR = re.compile(r"^[0-9a-fA-F.:]+ eth[0-9]+ [0-9a-f:]+\Z")


def read_neighbours(instance: Instance) -> List[str]:
    """Who an instance knows on its networks: address, interface and MAC address of each."""
    told = json.loads(run(*instance.network("ip", "-json", "neigh", "show")).decode() or "[]")
    lines = ["%s %s %s" % (one["dst"], one["dev"], one["lladdr"]) for one in told if one.get("lladdr")]
    return [line for line in lines if NEIGHBOUR.match(line)]


def load_neighbours(instance: Instance, lines: Words) -> None:
    """Have an instance know them as well; it asks anew whether they are still there.

    What asked for one while nobody was to be seen would wait for the second that the next question is sent in.
    """
    words = [line.split() for line in lines if NEIGHBOUR.match(line)]
    text = "".join("neigh replace %s dev %s lladdr %s nud stale\n" % tuple(one) for one in words)
    run(*instance.network("ip", "-force", "-batch", "-"), given=text.encode(), ok=range(256))


def neighbour(bridge: str, address: str) -> str:
    """The MAC address of who answers for ``address`` on a bridge of this host (RFC 5227); empty where nobody does."""
    argv = ("arping", "-D", "-c", "2", "-w", "1", "-I", bridge, address)
    said = run(*argv, ok=range(256)).decode(errors="replace")
    found = re.search(r"^Unicast reply from .*\[(.*)\]", said, re.MULTILINE)
    return found.group(1).lower() if found else ""


class Place:
    """Where an end writes down what it does: the lease, the history, how far it is."""

    def __init__(self, request: Dict[str, Any], side: str) -> None:
        self.cluster: str = field(request, "cluster", str)
        self.host: str = field(request, "host", str)
        self.peer: str = field(request, "peer", str)
        self.verb: str = field(request, "verb", str, "migrate")
        self.lease: str = field(request, "lease", str)
        self.history: str = field(request, "history", str)
        self.mark: str = field(request, "mark", str)
        self.shared: bool = field(request, "shared", bool, False)
        self.side = side
        self.request = request

    def note(self, event: str, **facts: Any) -> None:
        """A line of the history."""
        told = dict(facts, at=time.time(), host=self.host, verb=self.verb, event=event, peer=self.peer)
        try:
            os.makedirs(os.path.dirname(self.history), 0o700, exist_ok=True)
            descriptor = os.open(self.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, (json.dumps(told) + "\n").encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            pass  # a full disk must not keep services from coming back

    def reached(self, state: str, **facts: Any) -> None:
        """Write down how far it is, before that is begun: a run that is killed is taken up again from there."""
        told = dict(facts, side=self.side, state=state, pid=os.getpid(), request=self.request)
        replace_file(self.mark, json.dumps(told).encode())

    def over(self) -> None:
        """There is nothing to take up again."""
        if os.path.exists(self.mark):
            os.unlink(self.mark)

    def generation(self) -> int:
        """That of the lease as it lies here; 0 where there is none."""
        return int(self._lease().get("generation", 0))

    def _lease(self) -> Dict[str, Any]:
        try:
            with open(self.lease) as stream:
                found = json.load(stream)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def hand_lease(self, holder: str, generation: int, *, only_from: Optional[int] = None) -> bool:
        """Have the lease say who holds it, and whether it does now; a generation never falls.

        Args:
            only_from: the generation that it must have until then.
        """
        with hold_lock(self.lease + ".lock", wait_s=float("inf")):
            now = self.generation()
            if now > generation or (only_from is not None and now != only_from):
                return False
            told = {"cluster": self.cluster, "generation": generation, "holder": holder, "since": time.time()}
            # Whose own file this is (plan/lease.py).
            told["file"] = holder if self.shared else self.host
            replace_file(self.lease, (json.dumps(told, indent=1) + "\n").encode())
            return True

    def holder(self) -> str:
        """Who holds the lease as it lies here; empty where nobody does."""
        return str(self._lease().get("holder") or "")
