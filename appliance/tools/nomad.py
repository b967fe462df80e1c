"""Nomad, by its own program ``nomad``, and by ``nomad operator api`` where that has no output for programs.

The servers are those of a setting, or of the caller's environment (``NOMAD_ADDR``, ``NOMAD_TOKEN``, ``NOMAD_CACERT``).
A token of a file gets into the environment of the program; it is never an argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any
from urllib.parse import quote

from appliance.errors import ConfigError, SmsError
from appliance.host.base import CommandError, Host, Result, Unreachable
from appliance.shared.secret import READS_SECRET, SecretInput
from appliance.tools.engine import (
    NOT_PERMITTED,
    SILENT,
    Forbidden,
    Server,
    at,
    last_line,
    list_at,
    number_at,
    read_json,
    run_program,
    text_at,
    word_at,
)
from appliance.tools.held import hold_argv, new_mark

COMMAND_S = 60
"""Time limit of a command, in seconds."""
HINT = "`engines.nomad.api` and `token_file` of the site file, or NOMAD_ADDR and NOMAD_TOKEN, name servers and account"
READ_FILE = 'NOMAD_TOKEN=$(cat -- "$1") && export NOMAD_TOKEN && shift && exec "$@"'
"""Shell: run $2... with the content of file $1 as NOMAD_TOKEN."""
NO_JOB = re.compile(r"job not found|No job\(s\) with prefix|not found", re.IGNORECASE)
OTHER_SERVER = re.compile(r"<|404 page not found$")
"""What another web server replies."""
NO_CLIENT = "No path to node"
"""What the servers answer about a client that is not connected."""
NO_SERVERS = re.compile(r"No path to region|\bno (?:known )?servers\b|rpc error: lead thread|failed to get conn:")
"""What an agent answers whose servers do not: besides ``SILENT``."""
DEFAULT = "127.0.0.1:4646"
"""Where `nomad` looks for an agent without an address."""
NOT_SKIPPED = ("", "0", "f", "false")
"""Values of NOMAD_SKIP_VERIFY with which certificates are verified."""
PLANNED = (0, 1)
"""Statuses of `nomad job plan`: 1 where it would start or stop something; 255 is an error."""
ADVICE = re.compile(r"^Job Modify Index: ", re.MULTILINE)
"""Where the advice of a plan begins."""
FIELD = re.compile(
    r'(\s*(?:\+/-\s|([+-])\s)?\s*[A-Za-z][\w.]*:\s+)("(?:[^"\\]|\\.)*")(?: => ("(?:[^"\\]|\\.)*"))?(\s\(.*\))?$'
)
"""A field of a plan: its name, its mark, its value, or the one before and the one after, and what Nomad says of it."""
JOB_LINE = re.compile(r"^(\+/- |\+ |- |)Job: ", re.MULTILINE)
"""The first line of a plan; without a mark the job is as it was."""


@dataclass(frozen=True)
class Plan:
    """What running a job would do.

    Attributes:
        change: ``create``, ``change`` or ``unchanged``.
        text: the difference, and what the scheduler would do.
        restarts: whether it would start or stop something.
    """

    change: str
    text: str
    restarts: bool


@dataclass(frozen=True)
class Job:
    """A job. ``stopped``: somebody has stopped it. ``counts``: wanted number of each group."""

    name: str
    kind: str
    status: str
    stopped: bool
    version: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Task:
    """A task of an allocation. ``message``: its last event."""

    name: str
    state: str
    failed: bool
    restarts: int
    message: str


@dataclass(frozen=True)
class Check:
    """Result of a service's check: ``success``, ``failure`` or ``pending``."""

    name: str
    status: str
    output: str


@dataclass(frozen=True)
class Allocation:
    """An allocation. ``state`` is that of the client, ``desired`` that of the servers."""

    id: str
    job: str
    version: int
    node: str
    state: str
    desired: str
    tasks: tuple[Task, ...] = ()
    message: str = ""

    @property
    def runs(self) -> bool:
        """Whether it runs and is to run."""
        return self.state == "running" and self.desired == "run"


@dataclass(frozen=True)
class Client:
    """A client: a machine that runs tasks."""

    id: str
    name: str
    status: str
    eligible: bool
    draining: bool
    pool: str
    address: str


@dataclass(frozen=True)
class Nomad:
    """The program on a host, for the servers and one of their namespaces."""

    host: Host
    namespace: str = "default"
    api: str = ""
    token_file: str = ""

    def argv(self, *words: str) -> tuple[str, ...]:
        """Return the words of a command."""
        token = ("sh", "-c", READ_FILE, "token", self.token_file) if self.token_file else ()
        # Hints are for people.
        values = [f"NOMAD_NAMESPACE={self.namespace}", "NOMAD_CLI_SHOW_HINTS=false"]
        values += [f"NOMAD_ADDR={self.api}"] if self.api else []
        return (*token, "env", *values, "nomad", *words)

    def run(
        self,
        *words: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float = COMMAND_S,
    ) -> Result:
        """Run a command.

        Raises:
            Refused: there is no such program, or it is not permitted.
            Unreachable: the servers did not answer.
            CommandError: another error.
        """
        return run_program(self.host, self.argv(*words), input=input, ok=ok, timeout=timeout, hint=HINT)

    def server(self) -> Server:
        """Return the agent that it asks: of the setting, of the host's environment, or of the host; nothing is sent."""
        address, skip = (self.host.run("printenv", name, ok=None).text for name in ("NOMAD_ADDR", "NOMAD_SKIP_VERIFY"))
        where = "`engines.nomad.api`" if self.api else "NOMAD_ADDR"
        return Server(self.api or address or f"http://{DEFAULT}", where, skip.lower() in NOT_SKIPPED)

    def is_addressed(self) -> bool:
        """Return whether there is an address: without one the agent of the host is asked, which may be off alone."""
        return bool(self.api) or self.host.works("printenv", "NOMAD_ADDR")

    def get(self, path: str) -> Any:
        """Return what the API has for a path below ``/v1/``; None if there is nothing, or its client cannot be asked.

        Raises:
            Forbidden: it is not permitted.
            ConfigError: another server replies.
            Unreachable: the servers did not answer, or have no leader.
        """
        return self._request("GET", path)

    def _request(self, method: str, path: str, body: bytes | None = None) -> Any:
        """Send a request. The command ends with status 0 whatever the servers reply; errors are not JSON."""
        secret = path.startswith("var/")
        reply = self.run("operator", "api", "-X", method, f"/v1/{path}", input=READS_SECRET if secret else body).stdout
        text = reply.decode(errors="replace").strip()
        if text[:1] in ("{", "[", '"') or text in ("null", "true", "false"):
            return read_json(reply, f"nomad: {path}", secret=secret)
        why = last_line(text, secret=secret)
        if NOT_PERMITTED.search(text):
            raise Forbidden(f"{self.host.name}: Nomad does not permit {method} {path}: {why}", hint=HINT)
        if OTHER_SERVER.match(text):
            raise ConfigError(f"{self.host.name}: what replies to `nomad` is another server: {why}", hint=HINT)
        if NO_JOB.search(text) or NO_CLIENT in text:
            return None
        if SILENT.search(text) or NO_SERVERS.search(text):
            raise Unreachable(f"{self.host.name}: Nomad's servers do not answer: {why}", hint=HINT)
        raise SmsError(f"{self.host.name}: Nomad: {method} {path}: {why}")

    # Jobs

    def plan(self, job: str) -> Plan:
        """Return what running a job would do: its text is HCL.

        Raises:
            SmsError: the job is invalid, or there is no reply.
        """
        result = self.run("job", "plan", "-no-color", "-", input=job.encode(), ok=PLANNED)
        text = result.stdout.decode(errors="replace")
        found = JOB_LINE.search(text)
        if not found:
            raise CommandError(result)
        change = {"+/- ": "change", "+ ": "create", "": "unchanged"}.get(found[1], "change")
        return Plan(change, readable_plan(text), result.status == 1)

    def start(self, job: str) -> None:
        """Run a job, whose text is HCL; what it starts is not waited for."""
        self.run("job", "run", "-detach", "-", input=job.encode())

    def stop(self, name: str, *, purge: bool = False, timeout_s: float = COMMAND_S) -> None:
        """Stop a job, if there is one, and wait until the servers have planned that."""
        words = ("job", "stop", "-detach", "-yes", *(["-purge"] if purge else []), name)
        result = self.run(*words, ok=(0, 1), timeout=timeout_s)
        if result.status and not NO_JOB.search((result.stderr + result.stdout).decode(errors="replace")):
            raise CommandError(result)

    def job(self, name: str) -> Job | None:
        """Return a job; None if there is none."""
        found = self.get(f"job/{quote(name, safe='')}")
        return read_job(found) if isinstance(found, dict) else None

    def spec(self, name: str) -> dict[str, Any] | None:
        """Return a job as the API has it; None if there is none."""
        found = self.get(f"job/{quote(name, safe='')}")
        return found if isinstance(found, dict) else None

    def allocations(self, job: str) -> list[Allocation]:
        """Return the allocations of a job, the newest first."""
        found = self.get(f"job/{quote(job, safe='')}/allocations")
        listed = sorted(
            found if isinstance(found, list) else [], key=lambda one: number_at(one, "CreateTime"), reverse=True
        )
        return [one for one in map(read_allocation, listed) if one.id]

    def checks(self, allocation: str) -> list[Check]:
        """Return the results of the checks of an allocation; none if its client cannot be asked."""
        found = self.get(f"client/allocation/{quote(allocation, safe='')}/checks")
        values = found.values() if isinstance(found, dict) else ()
        return [Check(text_at(one, "Check"), text_at(one, "Status"), text_at(one, "Output")) for one in values]

    def put_variable(self, path: str, items: Mapping[str, str], marks: Mapping[str, str]) -> None:
        """Create or replace a variable. Its values are in standard input only; ``marks``: items that are not secret."""
        text = SecretInput(json.dumps({"Items": {**items, **marks}}).encode(), *map(str.encode, items.values()))
        self.run("var", "put", "-force", "-in", "json", "-out", "none", path, "-", input=text)

    def variable(self, path: str) -> dict[str, str]:
        """Return the items of a variable, which may be secret; none if there is no such variable."""
        found = self.get(f"var/{quote(path, safe='/')}")
        items = found.get("Items") if isinstance(found, dict) else None
        return {str(name): str(value) for name, value in items.items()} if isinstance(items, dict) else {}

    def logs(self, allocation: str, task: str, lines: int, *, errors: bool = True) -> str:
        """Return the last lines of a task's standard error or output; empty if there are none."""
        kind = "-stderr" if errors else "-stdout"
        result = self.run("alloc", "logs", kind, "-tail", "-n", str(lines), allocation, task, ok=None)
        return "" if result.status else result.stdout.decode(errors="replace")

    def exec(
        self, allocation: str, task: str, *argv: str, ok: Container[int] | None = (0,), timeout: float = 60
    ) -> Result:
        """Run a command in a task to its end.

        For raw_exec that is a command of the client itself, with the environment of the task.
        """
        mark = new_mark()
        inside = hold_argv(mark, *argv)
        words = self.argv("alloc", "exec", "-i=true", "-t=false", "-task", task, allocation, *inside)
        return run_program(self.host, words, input=mark, ok=ok, timeout=timeout, hint=HINT)

    def stop_allocation(self, allocation: str) -> None:
        """Stop an allocation, whose job gets another one; wait until the servers have planned that."""
        self.run("alloc", "stop", allocation)

    # Clients

    def clients(self) -> list[Client]:
        """Return the clients."""
        found = self.get("nodes")
        return [one for one in map(read_client, found if isinstance(found, list) else ()) if one.id]

    def drain(self, client: str, deadline_s: float) -> None:
        """Stop what a client runs, system jobs last, and start nothing there. ``client`` is its id."""
        words = ("node", "drain", "-enable", "-yes", "-detach", "-deadline", f"{deadline_s:g}s", client)
        self.run(*words)

    def undo_drain(self, client: str) -> None:
        """End a drain; the client runs what it is to run again."""
        self.run("node", "drain", "-disable", "-yes", "-detach", client)

    def set_eligible(self, client: str, eligible: bool) -> None:
        """Let the servers start something on a client, or nothing new."""
        self.run("node", "eligibility", "-enable" if eligible else "-disable", client)


def readable_plan(text: str) -> str:
    """Return a plan with the lines of files that differ, which `nomad` prints as one, and without its advice."""
    advice = ADVICE.search(text)
    return "\n".join(
        line for each in text[: advice.start() if advice else None].splitlines() for line in _field_lines(each)
    )


def _field_lines(line: str) -> list[str]:
    """Return the line of a field; of a text of several lines, the lines that differ."""
    found = FIELD.match(line)
    if not found or "\\n" not in line:
        return [line]
    head, mark, old, new, end = found.groups()
    try:
        before, after = (json.loads(each).splitlines() if each else [] for each in (old, new))
    except ValueError:  # an escape of Go that JSON does not have
        return [line]
    if new is not None:
        changed = list(unified_diff(before, after, lineterm="", n=1))[2:]
    elif mark:
        changed = [f"{mark}{each}" for each in before]
    else:
        return [f"{head.rstrip()} {len(before)} lines"]
    space = " " * (len(head) - len(head.lstrip()) + 4)
    return [f"{head.rstrip()}{end or ''}", *(space + each for each in changed)]


def read_job(given: Any) -> Job:
    """Return a job of its JSON. Fields that it does not have are empty."""
    return Job(
        text_at(given, "ID"),
        text_at(given, "Type"),
        text_at(given, "Status"),
        at(given, "Stop") is True,
        number_at(given, "Version"),
        {text_at(one, "Name"): number_at(one, "Count") for one in list_at(given, "TaskGroups")},
    )


def read_allocation(given: Any) -> Allocation:
    """Return an allocation of its JSON."""
    states = at(given, "TaskStates")
    tasks = [_task(str(name), each) for name, each in (states if isinstance(states, dict) else {}).items()]
    return Allocation(
        word_at(given, "ID"),
        text_at(given, "JobID"),
        number_at(given, "JobVersion"),
        text_at(given, "NodeName"),
        text_at(given, "ClientStatus"),
        text_at(given, "DesiredStatus"),
        tuple(tasks),
        text_at(given, "ClientDescription") or text_at(given, "DesiredDescription"),
    )


def _task(name: str, given: Any) -> Task:
    return Task(
        name,
        text_at(given, "State"),
        at(given, "Failed") is True,
        number_at(given, "Restarts"),
        text_at(given, "Events", -1, "DisplayMessage"),
    )


def read_client(given: Any) -> Client:
    """Return a client of its JSON."""
    return Client(
        word_at(given, "ID"),
        text_at(given, "Name"),
        text_at(given, "Status"),
        text_at(given, "SchedulingEligibility") == "eligible",
        at(given, "Drain") is True,
        text_at(given, "NodePool"),
        text_at(given, "Address"),
    )
