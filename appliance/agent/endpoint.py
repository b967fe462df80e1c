"""What source and target of a migration share: the instance, its ports and connections, the lease, the history."""

import http.client
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import time
import xmlrpc.client
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, TypedDict

from appliance.agent.freeze import find_loops
from appliance.agent.in_root import by_descriptor, open_in_root
from appliance.agent.protocol import Problem
from appliance.shared.files import remove_state, replace_file
from appliance.shared.history import AppendLine, make_event
from appliance.shared.lease import WRITTEN, Lease, SwapLease, parse_lease, peek, read_file
from appliance.shared.locks import PORTS_WAIT_S, Locked, hold_lock, ports_lock
from appliance.shared.migration import MacvlanRequest, MigrationRequest, MoveMark
from appliance.shared.outputs import Outputs, Overflow, TooLate, begin, end_group
from appliance.shared.ports import (
    change_commands,
    enter,
    is_macvlan_attached,
    match_ports,
    replace_commands,
    split_macvlan,
)
from appliance.shared.records import RecordError, check_value, from_json, to_json
from appliance.shared.secret import redact, secrets_of
from appliance.text import one_line

Strings = Sequence[str]
CHANGED = "another run has migrated, started or stopped the services container meanwhile"
CHANGED_HINT = "`sms host list` shows where it runs; if it shall still be migrated, run this again"
SUPERVISOR_ERRORS = (OSError, http.client.HTTPException, xmlrpc.client.Error)
"""A supervisor does not answer, or refuses."""


MAX_ANSWER = 64 << 20
"""Maximum size of a program's output in bytes: that of squeue for a million jobs."""


def run(*argv: str, stdin: bytes = b"", ok: Sequence[int] = (0,), timeout: float = 60) -> bytes:
    """Run a program; return its standard output. Of the secrets of its input no error shows anything.

    Raises:
        Problem: it ended with a status not in ``ok``, or not within ``timeout`` seconds, or printed too much.
    """
    pipe = subprocess.PIPE
    # A session of its own: signals to our process group must not reach it.
    process = begin(subprocess.Popen, argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    outputs = Outputs(process, MAX_ANSWER)
    try:
        outputs.exchange(stdin, timeout)
    except BaseException as error:
        end_group(process)
        if isinstance(error, TooLate):
            raise Problem("`%s` did not end within %g s" % (shown(argv), timeout))
        if isinstance(error, Overflow):
            raise Problem("`%s` printed more than %d MiB and was ended" % (shown(argv), MAX_ANSWER >> 20))
        raise
    finally:
        outputs.close()
    if process.returncode not in ok:
        end = redact(outputs.of_stderr or outputs.of_stdout, secrets_of(stdin))[-4000:].decode(errors="replace")
        lines = end.strip().splitlines()[-4:]
        raise Problem("`%s` ended with status %d: %s" % (shown(argv), process.returncode, " / ".join(lines)))
    return outputs.of_stdout


def shown(argv: Strings) -> str:
    """Return a command for a message: its first words, without how it enters the instance."""
    words = list(argv)
    inside = [number for number, word in enumerate(words) if word.startswith("instance://")]
    if inside:
        words = words[inside[0] + 1 :]
    elif words[0] == "nsenter":
        words = [word for word in words[1:] if word[:2] != "--"]
    return " ".join(words[:4])


LINKS = List[Dict[str, Any]]
"""What ``ip -json`` prints."""


class _Running(TypedDict, total=False):
    instance: str
    pid: int
    logErrPath: str


class _Listed(TypedDict, total=False):
    """What ``apptainer instance list`` prints."""

    instances: Optional[List[_Running]]


def run_json(kind: Any, *argv: str) -> Any:
    """Run a program; return the JSON that it prints as ``kind``, empty where it prints nothing.

    Raises:
        Problem: it failed, or what it prints is of another type.
    """
    output = run(*argv).decode(errors="replace").strip()
    try:
        return check_value(kind, json.loads(output or ("{}" if hasattr(kind, "__total__") else "[]")))
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, RecordError) else "it is not JSON"
        raise Problem(
            "`%s` printed %r: %s" % (" ".join(argv)[:200], one_line(output, 100), why), "run it there"
        ) from None


class Instance:
    """A running instance, identified by its first process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def root(self) -> str:
        """Path of its root file system on this host. Paths below it are opened by ``open_in_root`` only."""
        return "/proc/%d/root" % self.pid

    def network(self, *argv: str) -> List[str]:
        """Return the command line that runs a program of this host in its network namespace."""
        return ["nsenter", "--net=/proc/%d/ns/net" % self.pid, *argv]

    def supervisor(self) -> Any:
        """Return a client of its supervisor (http://supervisord.org/api.html)."""
        return xmlrpc.client.ServerProxy("http://localhost", transport=_Transport(self.root)).supervisor

    def file_size(self, path: str) -> int:
        """Return the size of a regular file inside; 0 where there is none."""
        try:
            with open_in_root(self.root, path) as descriptor:
                state = os.fstat(descriptor)
                return state.st_size if stat.S_ISREG(state.st_mode) else 0
        except OSError:
            return 0

    def read_from(self, path: str, offset: int, limit: int) -> Tuple[bytes, bool]:
        """Return the lines of a regular file inside from an offset on, none where there is none; and whether some lack.

        Processes inside can make it as long as they like: of one with more than ``limit`` bytes, the first whole lines
        within that limit are returned.
        """
        try:
            with open_in_root(self.root, path) as descriptor:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return b"", False
                with open(by_descriptor(descriptor), "rb") as stream:
                    stream.seek(offset)
                    data = stream.read(limit + 1)
        except OSError:
            return b"", False
        return (data, False) if len(data) <= limit else (data[: data.rfind(b"\n", 0, limit) + 1], True)

    def stop_services(self, names: Strings, patience_s: float) -> None:
        """Stop services in parallel, and wait until all have ended.

        Raises:
            Problem: one did not end within ``patience_s`` seconds.
        """
        supervisor = self.supervisor()
        states = {one["name"]: one["statename"] for one in supervisor.getAllProcessInfo()}
        pending = [name for name in names if states.get(name) not in (None, "STOPPED", "FATAL", "EXITED")]
        for name in pending:
            _quietly(supervisor.stopProcess, name, False)
        end = time.monotonic() + patience_s
        while pending:
            states = {one["name"]: one["statename"] for one in supervisor.getAllProcessInfo()}
            pending = [name for name in pending if states.get(name) not in ("STOPPED", "FATAL", "EXITED")]
            if pending and time.monotonic() > end:
                raise Problem(
                    "%s did not end within %g s" % (", ".join(pending), patience_s), "sms logs %s" % pending[0]
                )
            if pending:
                time.sleep(0.005)

    def start_services(self, names: Strings) -> None:
        """Start the services that are not running; each one waits for those that it needs."""
        supervisor = self.supervisor()
        states = {one["name"]: one["statename"] for one in supervisor.getAllProcessInfo()}
        for name in names:
            if states.get(name) in ("STOPPED", "FATAL", "EXITED", "STOPPING"):
                _quietly(supervisor.startProcess, name, False)

    def ports(self, interfaces: Strings) -> Dict[str, str]:
        """Return the port of each interface (``appliance.shared.ports``), by the interface's name inside.

        Raises:
            Problem: one is not on this host.
        """
        query = ("ip", "-json", "-details", "link", "show")
        inside, links = (run_json(LINKS, *argv) for argv in (self.network(*query), query))
        found = match_ports(inside, links, self.pid)
        missing = [name for name in interfaces if not found.get(name)]
        if missing:
            raise Problem("the other end of %s is not on this host" % ", ".join(missing))
        return {name: found[name] for name in interfaces}

    def replace_interfaces(self, interfaces: Sequence[MacvlanRequest]) -> None:
        """Replace interfaces by macvlan interfaces that are detached.

        Raises:
            Problem: one could not be created or replaced.
        """
        for interface in interfaces:
            for argv, text in replace_commands(interface, self.pid):
                run(*argv, stdin=text.encode())

    def announce(self, addresses: Dict[str, str]) -> None:
        """Announce the addresses by gratuitous ARP: at once, and again for some seconds."""
        for interface, address in addresses.items():
            # arping sends the first request at once, the others one second apart.
            argv = self.network("arping", "-q", "-U", "-c", "5", "-I", interface, address)
            null = subprocess.DEVNULL
            subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)


def _quietly(call: Any, *arguments: Any) -> None:
    """Ignore faults of services that are already in the wanted state (NOT_RUNNING, ALREADY_STARTED, BAD_NAME)."""
    try:
        call(*arguments)
    except xmlrpc.client.Fault:
        pass


SUPERVISOR = "/run/sms/supervisor.sock"


class _Connection(http.client.HTTPConnection):
    def __init__(self, root: str) -> None:
        http.client.HTTPConnection.__init__(self, "localhost", timeout=30)
        self.root = root

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with open_in_root(self.root, SUPERVISOR) as descriptor:
            self.sock.connect(by_descriptor(descriptor))


class _Transport(xmlrpc.client.Transport):
    def __init__(self, root: str) -> None:
        xmlrpc.client.Transport.__init__(self)
        self.root = root

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _Connection(self.root)


def find_instance(name: str) -> Optional[Instance]:
    """Return the running instance of a name, or None."""
    return next((Instance(one["pid"]) for one in _list_instances(name)), None)


def _list_instances(name: str) -> List["_Running"]:
    listed = run_json(_Listed, "apptainer", "instance", "list", "--json", name)
    return [one for one in listed.get("instances") or [] if one.get("instance") == name and one.get("pid")]


def record_path(name: str) -> str:
    """Return the file in which Apptainer keeps a running instance.

    Raises:
        Problem: it is not where Apptainer 1.0 to 1.4 have it.
    """
    for one in _list_instances(name):
        # .apptainer/instances/logs/HOST/USER/NAME.err, beside app/HOST/USER/NAME/NAME.json
        logs, found, user = os.path.dirname(str(one.get("logErrPath"))).partition("/instances/logs/")
        path = "%s/instances/app/%s/%s/%s.json" % (logs, user, name, name)
        if found and os.path.isfile(path):
            return path
    raise Problem("Apptainer's record of instance %s was not found" % name, "apptainer instance list --logs", 3)


def find_parent(pid: int) -> int:
    """Return the parent of a process: of an instance's first one, Apptainer, which removes the instance's record."""
    try:
        with open("/proc/%d/stat" % pid) as stream:
            return int(stream.read().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


def wait_until_ended(pid: int, patience_s: float) -> None:
    """Wait until a process has ended.

    Raises:
        Problem: it runs after ``patience_s`` seconds.
    """
    end = time.monotonic() + patience_s
    while pid > 1 and os.path.exists("/proc/%d" % pid):
        if time.monotonic() > end:
            raise Problem("process %d did not end within %g s" % (pid, patience_s), "ps %d" % pid)
        time.sleep(0.02)


def rename_instance(name: str, to: str) -> None:
    """Give a running instance another name, which no other has; does nothing if none has the old name.

    Apptainer has no command for it. When the instance ends, it removes the record of the old name only; it removes that
    of an ended instance whenever it lists them.
    """
    if not find_instance(name):
        return
    old = record_path(name)
    folder = os.path.dirname(old)
    with open(old, "rb") as stream:
        record = json.loads(stream.read().decode())
    new = os.path.join(os.path.dirname(folder), to)
    replace_file(os.path.join(new, to + ".json"), json.dumps(dict(record, name=to)).encode())
    shutil.rmtree(folder)


def wait_until_unused(overlay: str, patience_s: float) -> None:
    """Wait until no loop device has the overlay open.

    Raises:
        Problem: one still has after ``patience_s`` seconds.
    """
    end = time.monotonic() + patience_s
    while True:
        loops = find_loops(overlay)
        if not loops:
            return
        if time.monotonic() > end:
            raise Problem("%s still has %s open" % (", ".join(loops), overlay), "losetup -l; fuser -v %s" % loops[0])
        time.sleep(0.02)


def is_mounted(folder: str) -> bool:
    """Whether a file system is mounted at a folder."""
    return os.path.ismount(folder)


def set_bridges(ports: Dict[str, Optional[str]], *, timeout: float = 60) -> None:
    """Attach ports to bridges or parents, or detach them (None); go on with the others when one fails.

    Raises:
        Problem: one failed, or a command took longer than ``timeout`` seconds.
    """
    failed = []
    for argv, text in change_commands(ports):
        try:
            run(*argv, stdin=text.encode(), timeout=timeout)
        except Problem as problem:
            failed.append(problem)
    if failed:
        raise failed[0]


@contextmanager
def ports_locked(lock: str) -> Iterator[None]:
    """Hold the lock of the ports while they are moved; the guard of this host moves them, too.

    Args:
        lock: that of the host.

    Raises:
        Problem: another process holds it.
    """
    try:
        with hold_lock(ports_lock(lock), wait_s=PORTS_WAIT_S):
            yield
    except Locked:
        raise Problem("another process moves the ports of the services container", "run it again")


def is_attached(port: str, bridge: str) -> bool:
    """Return whether a port is attached to a bridge, or to the parent of that name."""
    macvlan = split_macvlan(port)
    if not macvlan:
        return os.path.exists("/sys/class/net/%s/brif/%s" % (bridge, port))
    name, pid = macvlan
    try:
        shown = run_json(LINKS, *enter(pid), "ip", "-json", "-details", "link", "show", "dev", name)
        with open("/sys/class/net/%s/ifindex" % bridge) as file:
            parent = int(file.read())
    except (OSError, Problem):
        return False  # the instance or the parent is gone
    return any(is_macvlan_attached(link, parent) for link in shown)


MAPPED = re.compile(r" -n (\S+)")
ORIGINAL = re.compile(r" --sport (\d+)")
LEFT = re.compile(r" -t \d+")
REPLIED = re.compile(r" --reply-port-dst (\d+)")


def parse_translated(saved: str) -> List[str]:
    """Return the source-translated connections of ``conntrack -o save``, in the form for ``conntrack -R``.

    The output has the translated address only: where the port was translated too, the kernel would choose another one.
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
    """Return the translated connections of an instance."""
    return parse_translated(run(*instance.network("conntrack", "-L", "-o", "save")).decode(errors="replace"))


def translated_to(line: str) -> str:
    """Return the address that a connection of ``read_connections`` is translated to."""
    found = MAPPED.search(line)
    return found.group(1).partition(":")[0] if found else ""


def without_timeout(line: str) -> str:
    """Return a connection without its remaining seconds, which differ in every query."""
    return LEFT.sub("", line)


CONNECTION = re.compile(
    r"-A(?: (?:-[a-z]|--[sd]port|--(?:orig|reply)-[a-z-]+|--icmp-[a-z]+|--(?:src|dst)key|--state)"
    r" [A-Za-z0-9.:,_\[\]]+)+\s*"
)
"""A line of ``conntrack -o save``. Another one could be any command of conntrack(8), such as to forget all."""


def load_connections(instance: Instance, lines: Strings) -> str:
    """Add connections to an instance; existing ones stay. Return the error message, empty when all were added."""
    known = [line for line in lines if CONNECTION.fullmatch(line)]
    try:
        if known:
            run(*instance.network("conntrack", "-R", "-"), stdin="".join(line + "\n" for line in known).encode())
    except Problem as problem:
        return problem.message
    return "" if len(known) == len(lines) else "%d are of no form that is known" % (len(lines) - len(known))


NEIGHBOUR = re.compile(r"^[0-9a-fA-F.:]+ eth[0-9]+ [0-9a-f:]+\Z")


def read_neighbours(instance: Instance) -> List[str]:
    """Return the neighbours of an instance: address, interface and MAC address of each."""
    entries = run_json(LINKS, *instance.network("ip", "-json", "neigh", "show"))
    lines = ["%s %s %s" % (one.get("dst"), one.get("dev"), one["lladdr"]) for one in entries if one.get("lladdr")]
    return [line for line in lines if NEIGHBOUR.match(line)]


def load_neighbours(instance: Instance, lines: Strings) -> None:
    """Add neighbours to an instance as stale entries, which the kernel verifies when they are used.

    An ARP request sent while the ports were detached got no answer, and the kernel repeats it only after a second.
    """
    entries = [line.split() for line in lines if NEIGHBOUR.match(line)]
    text = "".join("neigh replace %s dev %s lladdr %s nud stale\n" % tuple(one) for one in entries)
    run(*instance.network("ip", "-force", "-batch", "-"), stdin=text.encode(), ok=range(256))


def find_mac(bridge: str, address: str) -> str:
    """Return the MAC address that answers for ``address`` on a bridge of this host (RFC 5227), or an empty string.

    On the parent of a macvlan interface: the instances of this host do not answer there.
    """
    argv = ("arping", "-D", "-c", "2", "-w", "1", "-I", bridge, address)
    output = run(*argv, ok=range(256)).decode(errors="replace")
    found = re.search(r"^Unicast reply from .*\[(.*)\]", output, re.MULTILINE)
    return found.group(1).lower() if found else ""


def read_mark(path: str) -> Optional[MoveMark]:
    """Return the stored state of a migration; None where there is none.

    Raises:
        OSError: it cannot be read.
        Problem: it is invalid. The ports of an instance may be detached: it must not count as none.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except FileNotFoundError:
        return None
    try:
        return from_json(MoveMark, data)
    except RecordError as error:
        raise Problem(
            "the state of an interrupted migration is invalid: %s" % error,
            "`sms status` shows which host serves; then remove %s" % path,
        ) from None


class HostState:
    """What a migration stores on a host: the lease, the history, the state to recover from."""

    def __init__(self, request: MigrationRequest, side: str) -> None:
        self.request = request
        self.side = side

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the history."""
        line = make_event(self.request.host, self.request.verb, event, dict(facts, peer=self.request.peer))
        try:
            AppendLine(self.request.history, line).perform()
        except OSError:
            pass  # a full disk must not prevent services from starting again

    def save_state(self, state: str, *, ports: Optional[Dict[str, str]] = None, inode: int = 0) -> None:
        """Store the state that is about to be entered: ``resume`` recovers a killed run from there."""
        mark = MoveMark(self.side, state, os.getpid(), asdict(self.request), ports or {}, inode)
        replace_file(self.request.mark, to_json(mark))

    def clear_state(self) -> None:
        """Remove the stored state: there is nothing to recover."""
        remove_state(self.request.mark)

    def generation(self) -> int:
        """Return the generation of the lease stored here; 0 where there is none."""
        return self._lease()[0]

    def _lease(self) -> Tuple[int, str]:
        try:
            return peek(read_file(self.request.lease))
        except OSError:
            return 0, ""

    def was_served_by(self, peer: str) -> bool:
        """Return whether a host has taken the lease since the migration was planned, and has released it here."""
        try:
            lease = parse_lease(read_file(self.request.lease) or b"")
        except (OSError, ValueError, TypeError):
            return False
        return lease.holder is None and lease.last == peer and lease.generation > self.request.generation

    def check_plan(self, *, holds: bool) -> None:
        """Check, under the lock of the host, that nothing has changed here since the migration was planned.

        Args:
            holds: this host must hold the lease.

        Raises:
            Problem: another run has migrated, started or stopped the services container meanwhile.
        """
        generation, holder = self._lease()
        ours = holder == self.request.host or not holds
        if ours and generation <= self.request.generation and read_mark(self.request.mark) is None:
            return
        raise Problem(CHANGED, CHANGED_HINT, 3)

    def write_lease(self, holder: str, generation: int, *, only_from: Optional[int] = None) -> bool:
        """Write the lease unless that would lower its generation; return whether it was written.

        Args:
            only_from: the generation that the stored lease must have.
        """
        owner = holder if self.request.shared else self.request.host
        return self._write(Lease(self.request.cluster, generation, holder, time.time(), file=owner), only_from)

    def free_lease(self, generation: int) -> bool:
        """Write a lease that no host holds, and that this host released, as ``write_lease``."""
        host = self.request.host
        return self._write(Lease(self.request.cluster, generation, None, time.time(), file=host, last=host), None)

    def _write(self, lease: Lease, only_from: Optional[int]) -> bool:
        swap = SwapLease(self.request.lease, lease.text().decode(), generation=only_from, wait_s=float("inf"))
        return swap.perform() == WRITTEN

    def holder(self) -> str:
        """Return the holder of the lease stored here; empty where there is none."""
        return self._lease()[1]
