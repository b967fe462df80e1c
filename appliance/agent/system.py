"""What the agents of migrations and adoptions do to their own host: each has one object for it."""

import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, TypedDict, Union

from appliance.agent import arp, protocol
from appliance.agent.connections import CONNECTION, NEIGHBOUR, parse_translated
from appliance.agent.datagrams import DatagramCounter
from appliance.agent.freeze import find_loops, private_mounts
from appliance.agent.instance import LINKS, Instance, Strings
from appliance.agent.log_sessions import LogSessions
from appliance.agent.protocol import Problem
from appliance.agent.take import host_locked
from appliance.shared.files import remove_state, replace_file, sync_folder
from appliance.shared.lease import read_file
from appliance.shared.locks import PORTS_WAIT_S, Locked, hold_lock, ports_lock
from appliance.shared.outputs import Outputs, Overflow, TooLate, begin, end_group
from appliance.shared.ports import change_commands, enter, is_macvlan_attached, split_macvlan
from appliance.shared.records import RecordError, check_value
from appliance.shared.requests import Request
from appliance.shared.secret import redact, secrets_of
from appliance.text import one_line

MAX_ANSWER = 64 << 20
"""Maximum size of a program's output in bytes: that of squeue for a million jobs."""


def shown(argv: Strings) -> str:
    """Return a command for a message: its first words, without how it enters the instance."""
    words = list(argv)
    inside = [number for number, word in enumerate(words) if word.startswith("instance://")]
    if inside:
        words = words[inside[0] + 1 :]
    elif words[0] == "nsenter":
        words = [word for word in words[1:] if word[:2] != "--"]
    return " ".join(words[:4])


class _Running(TypedDict, total=False):
    instance: str
    pid: int
    logErrPath: str


class _Listed(TypedDict, total=False):
    """What ``apptainer instance list`` prints."""

    instances: Optional[List[_Running]]


class System:
    """What agents of a migration, and the container's side of an adoption, do to their host; a test has another one.

    The state of the run, the bytes of the overlay and the channel to the coordinator do not belong here.
    """

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds since some moment, which no change of the time of day affects."""
    sleep: Callable[[float], None] = staticmethod(time.sleep)
    time: Callable[[], float] = staticmethod(time.time)
    """The Unix time in seconds."""
    pool: Callable[[int], Executor] = ThreadPoolExecutor
    """Makes a pool of that many threads."""
    note: Callable[[str], None] = staticmethod(protocol.note)
    """Reports a line for people that stays on the screen."""
    read: Callable[[str], Optional[bytes]] = staticmethod(read_file)
    """Returns the contents of a small file; None where there is none."""
    replace: Callable[[str, bytes], object] = staticmethod(replace_file)
    """Writes a file whole, or not at all; it is then on the disk."""
    remove: Callable[[str], None] = staticmethod(remove_state)
    """Removes a file that ``replace`` has written."""
    exists: Callable[[str], bool] = staticmethod(os.path.exists)
    """Whether there is a file; a link to nothing is none."""
    rename: Callable[[str, str], None] = staticmethod(os.rename)
    unlink: Callable[[str], None] = staticmethod(os.unlink)
    private_mounts: Callable[[], None] = staticmethod(private_mounts)
    locked: Callable[[str], ContextManager[None]] = staticmethod(host_locked)
    """Holds the host's lock, which prevents starts and stops."""

    def boot_time(self) -> float:
        """Return the seconds since the boot, including those spent suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def step(self, name: str) -> None:
        """Report that a step begins, to programs."""
        protocol.step(name, "")

    def perform(self, request: Request) -> Any:
        """Perform a request of ``shared/requests.py``; return its reply."""
        return request.perform()

    def inode(self, file: Union[str, int]) -> int:
        """Return the inode number of a file, given by its path or its descriptor."""
        return os.stat(file).st_ino

    def flush(self, path: str) -> None:
        """Write a file to the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def flush_folder(self, path: str) -> None:
        """Write the names in the folder of a file to the disk."""
        sync_folder(os.path.dirname(path))

    # Programs

    def run(self, *argv: str, stdin: bytes = b"", ok: Sequence[int] = (0,), timeout: float = 60) -> bytes:
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

    def run_json(self, kind: Any, *argv: str) -> Any:
        """Run a program; return the JSON that it prints as ``kind``, empty where it prints nothing.

        Raises:
            Problem: it failed, or what it prints is of another type.
        """
        output = self.run(*argv).decode(errors="replace").strip()
        try:
            return check_value(kind, json.loads(output or ("{}" if hasattr(kind, "__total__") else "[]")))
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, RecordError) else "it is not JSON"
            raise Problem(
                "`%s` printed %r: %s" % (" ".join(argv)[:200], one_line(output, 100), why), "run it there"
            ) from None

    def start(self, *argv: str) -> None:
        """Start a program that this process does not wait for, and whose output is discarded."""
        null = subprocess.DEVNULL
        subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)

    # Instances and their ports

    def instance(self, pid: int) -> Instance:
        """Return the instance with that first process."""
        return Instance(pid, self)

    def open_sessions(self, pid: int, ports: Sequence[int], reset_ports: Sequence[int]) -> LogSessions:
        """Return the sessions of log senders with an instance."""
        return LogSessions(pid, ports, reset_ports)

    def count_datagrams(self, bridge: str, port: str, mac: str) -> DatagramCounter:
        """Count the datagrams of log senders that come in for a MAC address from now on."""
        return DatagramCounter(bridge, port, mac)

    def find_instance(self, name: str) -> Optional[Instance]:
        """Return the running instance of a name, or None."""
        return next((self.instance(one["pid"]) for one in self._list_instances(name)), None)

    def _list_instances(self, name: str) -> List["_Running"]:
        listed = self.run_json(_Listed, "apptainer", "instance", "list", "--json", name)
        return [one for one in listed.get("instances") or [] if one.get("instance") == name and one.get("pid")]

    def record_path(self, name: str) -> str:
        """Return the file in which Apptainer keeps a running instance.

        Raises:
            Problem: it is not where Apptainer 1.0 to 1.4 have it.
        """
        for one in self._list_instances(name):
            # .apptainer/instances/logs/HOST/USER/NAME.err, beside app/HOST/USER/NAME/NAME.json
            logs, found, user = os.path.dirname(str(one.get("logErrPath"))).partition("/instances/logs/")
            path = "%s/instances/app/%s/%s/%s.json" % (logs, user, name, name)
            if found and os.path.isfile(path):
                return path
        raise Problem("Apptainer's record of instance %s was not found" % name, "apptainer instance list --logs", 3)

    def find_parent(self, pid: int) -> int:
        """Return the parent of a process: of an instance's first one, Apptainer, which removes its record."""
        try:
            with open("/proc/%d/stat" % pid) as stream:
                return int(stream.read().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            return 0

    def wait_until_ended(self, pid: int, patience_s: float) -> None:
        """Wait until a process has ended.

        Raises:
            Problem: it runs after ``patience_s`` seconds.
        """
        end = self.monotonic() + patience_s
        while pid > 1 and os.path.exists("/proc/%d" % pid):
            if self.monotonic() > end:
                raise Problem("process %d did not end within %g s" % (pid, patience_s), "ps %d" % pid)
            self.sleep(0.02)

    def rename_instance(self, name: str, to: str) -> None:
        """Give a running instance another name, which no other has; does nothing if none has the old name.

        Apptainer has no command for it. When the instance ends, it removes the record of the old name only; it removes
        that of an ended instance whenever it lists them.
        """
        if not self.find_instance(name):
            return
        old = self.record_path(name)
        folder = os.path.dirname(old)
        with open(old, "rb") as stream:
            record = json.loads(stream.read().decode())
        new = os.path.join(os.path.dirname(folder), to)
        self.replace(os.path.join(new, to + ".json"), json.dumps(dict(record, name=to)).encode())
        shutil.rmtree(folder)

    def wait_until_unused(self, overlay: str, patience_s: float) -> None:
        """Wait until no loop device has the overlay open.

        Raises:
            Problem: one still has after ``patience_s`` seconds.
        """
        end = self.monotonic() + patience_s
        while True:
            loops = find_loops(overlay)
            if not loops:
                return
            if self.monotonic() > end:
                hint = "losetup -l; fuser -v %s" % loops[0]
                raise Problem("%s still has %s open" % (", ".join(loops), overlay), hint)
            self.sleep(0.02)

    def is_mounted(self, folder: str) -> bool:
        """Whether a file system is mounted at a folder."""
        return os.path.ismount(folder)

    def set_bridges(self, ports: Dict[str, Optional[str]], *, timeout: float = 60) -> None:
        """Attach ports to bridges or parents, or detach them (None); go on with the others when one fails.

        Raises:
            Problem: one failed, or a command took longer than ``timeout`` seconds.
        """
        failed = []
        for argv, text in change_commands(ports):
            try:
                self.run(*argv, stdin=text.encode(), timeout=timeout)
            except Problem as problem:
                failed.append(problem)
        if failed:
            raise failed[0]

    @contextmanager
    def ports_locked(self, lock: str) -> Iterator[None]:
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

    def is_attached(self, port: str, bridge: str) -> bool:
        """Return whether a port is attached to a bridge, or to the parent of that name."""
        macvlan = split_macvlan(port)
        if not macvlan:
            return os.path.exists("/sys/class/net/%s/brif/%s" % (bridge, port))
        name, pid = macvlan
        try:
            shown = self.run_json(LINKS, *enter(pid), "ip", "-json", "-details", "link", "show", "dev", name)
            with open("/sys/class/net/%s/ifindex" % bridge) as file:
                parent = int(file.read())
        except (OSError, Problem):
            return False  # the instance or the parent is gone
        return any(is_macvlan_attached(link, parent) for link in shown)

    def read_connections(self, instance: Instance) -> List[str]:
        """Return the translated connections of an instance."""
        return parse_translated(self.run(*instance.network("conntrack", "-L", "-o", "save")).decode(errors="replace"))

    def load_connections(self, instance: Instance, lines: Strings) -> str:
        """Add connections to an instance; existing ones stay. Return the error message, empty when all were added."""
        known = [line for line in lines if CONNECTION.fullmatch(line)]
        try:
            if known:
                text = "".join(line + "\n" for line in known)
                self.run(*instance.network("conntrack", "-R", "-"), stdin=text.encode())
        except Problem as problem:
            return problem.message
        return "" if len(known) == len(lines) else "%d are of no form that is known" % (len(lines) - len(known))

    def read_neighbours(self, instance: Instance) -> List[str]:
        """Return the neighbours of an instance: address, interface and MAC address of each."""
        entries = self.run_json(LINKS, *instance.network("ip", "-json", "neigh", "show"))
        lines = ["%s %s %s" % (one.get("dst"), one.get("dev"), one["lladdr"]) for one in entries if one.get("lladdr")]
        return [line for line in lines if NEIGHBOUR.match(line)]

    def load_neighbours(self, instance: Instance, lines: Strings) -> None:
        """Add neighbours to an instance as stale entries, which the kernel verifies when they are used.

        An ARP request sent while the ports were detached got no answer, and the kernel repeats it only after a second.
        """
        entries = [line.split() for line in lines if NEIGHBOUR.match(line)]
        text = "".join("neigh replace %s dev %s lladdr %s nud stale\n" % tuple(one) for one in entries)
        self.run(*instance.network("ip", "-force", "-batch", "-"), stdin=text.encode(), ok=range(256))

    def find_mac(self, bridge: str, address: str) -> str:
        """Return the MAC address that answers for ``address`` on a bridge of this host (RFC 5227), or an empty string.

        On the parent of a macvlan interface: the instances of this host do not answer there.
        """
        argv = ("arping", "-D", "-c", "2", "-w", "1", "-I", bridge, address)
        output = self.run(*argv, ok=range(256)).decode(errors="replace")
        # A request is a machine that has just announced the address, or asked for another one.
        found = re.search(r"^(?:Unicast|Broadcast) (?:reply|request) from \S+ \[(\S+)\]", output, re.MULTILINE)
        return found.group(1).lower() if found else ""

    def find_macs(self, interface: str, addresses: Strings) -> Dict[str, str]:
        """Return the MAC address of each IPv4 address for which another machine answers, as ``arp.find_macs``."""
        return arp.find_macs(interface, addresses, arp.read_mac(interface))


SYSTEM = System()
"""The host that this process runs on."""
