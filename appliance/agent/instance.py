"""A running instance on this host: its services, its files and its ports."""

import os
import stat
import xmlrpc.client
from typing import TYPE_CHECKING, Any, Dict, List, Sequence, Tuple, TypedDict

from appliance.agent.in_root import by_descriptor, open_in_root
from appliance.agent.protocol import Problem
from appliance.agent.supervisor import CALL_S, Transport, invalid
from appliance.shared.migration import MacvlanRequest
from appliance.shared.ports import match_ports, replace_commands
from appliance.shared.records import RecordError, check_value

if TYPE_CHECKING:
    from appliance.agent.system import System

Strings = Sequence[str]
START_S = 120.0
"""Seconds in which the supervisor has to accept the starts of services: it is not waited for these."""
LINKS = List[Dict[str, Any]]
"""What ``ip -json`` prints."""


class Process(TypedDict):
    """What a supervisor replies about a service."""

    name: str
    statename: str


class Instance:
    """A running instance, identified by its first process."""

    def __init__(self, pid: int, system: "System") -> None:
        self.pid = pid
        self.system = system

    @property
    def root(self) -> str:
        """Path of its root file system on this host. Paths below it are opened by ``open_in_root`` only."""
        return "/proc/%d/root" % self.pid

    def network(self, *argv: str) -> List[str]:
        """Return the command line that runs a program of this host in its network namespace."""
        return ["nsenter", "--net=/proc/%d/ns/net" % self.pid, *argv]

    def supervisor(self, limit_s: float = CALL_S) -> Any:
        """Return a client of its supervisor, whose calls end within ``limit_s`` seconds (``Transport``)."""
        return xmlrpc.client.ServerProxy("http://localhost", transport=Transport(self.root, limit_s)).supervisor

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
            Problem, OSError: the supervisor does not reply.
        """
        supervisor = self.supervisor(patience_s + CALL_S)
        states = read_states(supervisor)
        pending = [name for name in names if states.get(name) not in (None, "STOPPED", "FATAL", "EXITED")]
        for name in pending:
            _quietly(supervisor.stopProcess, name, False)
        end = self.system.monotonic() + patience_s
        while pending:
            states = read_states(supervisor)
            pending = [name for name in pending if states.get(name) not in ("STOPPED", "FATAL", "EXITED")]
            if pending and self.system.monotonic() > end:
                raise Problem(
                    "%s did not end within %g s" % (", ".join(pending), patience_s), "sms logs %s" % pending[0]
                )
            if pending:
                self.system.sleep(0.005)

    def start_services(self, names: Strings) -> None:
        """Start the services that are not running; each one waits for those that it needs.

        Raises:
            Problem, OSError: the supervisor does not reply.
        """
        supervisor = self.supervisor(START_S)
        states = read_states(supervisor)
        for name in names:
            if states.get(name) in ("STOPPED", "FATAL", "EXITED", "STOPPING"):
                _quietly(supervisor.startProcess, name, False)

    def ports(self, interfaces: Strings) -> Dict[str, str]:
        """Return the port of each interface (``appliance.shared.ports``), by the interface's name inside.

        Raises:
            Problem: one is not on this host.
        """
        query = ("ip", "-json", "-details", "link", "show")
        inside, links = (self.system.run_json(LINKS, *argv) for argv in (self.network(*query), query))
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
                self.system.run(*argv, stdin=text.encode())

    def announce(self, addresses: Dict[str, str]) -> None:
        """Announce the addresses by gratuitous ARP: at once, and again for some seconds."""
        for interface, address in addresses.items():
            # arping sends the first request at once, the others one second apart.
            argv = self.network("arping", "-q", "-U", "-c", "5", "-I", interface, address)
            self.system.start(*argv)


def read_states(supervisor: Any) -> Dict[str, str]:
    """Return the state of each service.

    Raises:
        Problem, OSError: the supervisor does not reply.
    """
    try:
        found = check_value(List[Process], supervisor.getAllProcessInfo())
    except (RecordError, xmlrpc.client.Fault) as error:
        raise invalid(str(error)) from None
    return {one["name"]: one["statename"] for one in found}


def _quietly(call: Any, *arguments: Any) -> None:
    """Ignore faults of services that are already in the wanted state (NOT_RUNNING, ALREADY_STARTED, BAD_NAME)."""
    try:
        call(*arguments)
    except xmlrpc.client.Fault:
        pass
