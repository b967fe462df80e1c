"""What the running container knows of itself: its processes, its jobs, and its controller's view of the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from appliance.plan.services.discarded import Discarded, read_discarded
from appliance.plan.services.nodes import NodeState, NodesView, SilentNode, read_nodes, read_refused
from appliance.plan.services.probes import ProbeAnswer, read_probe
from appliance.text import one_line

MOST_NAMED = 10
"""Jobs and users named in a message."""
BACKLOG = 500
"""Messages to slurmdbd that do not wait for long: what begins and ends within seconds."""
HELD = re.compile(r"\d{1,10} (\d{1,10}(?:[_+][\d%,\[\]-]{1,200})?) ")
STAT = re.compile(r"^(\d{1,10}) \(((?s:.{0,64}?))\) ([A-Za-z]) (\d{1,10})((?: -?\d{1,20}){18,60})$", re.MULTILINE)
"""A line of /proc/PID/stat (proc(5)); the name may contain anything."""
TICKS = 100
"""USER_HZ of Linux on all architectures in use: the unit of times in /proc."""


@dataclass(frozen=True)
class Process:
    """A process of the container; ``pid`` is valid inside."""

    pid: int
    parent: int
    state: str
    age_s: float
    name: str


@dataclass(frozen=True)
class Inside:
    """What was collected inside the container. ``space``: size and use of its file system in bytes.

    ``problem``: why the nodes are not known; ``unwritable``: whether the overlay refuses changes.
    ``refusing``: nodes that cannot end a job, and refused the controller as an unknown user.
    ``held``: identifiers of jobs that wait for ``scontrol release`` as nodes could not launch them.
    ``strangers``: IDs of users who have jobs, and no account in the container.
    ``discarded``: log lines that its rsyslogd has discarded. ``unfit``: jobs that the controller holds as no node has
    what they ask for. ``backlog``: how many of its messages wait for slurmdbd. ``refused``: mails that postfix refused.
    ``unaccounted``: records that it has discarded meanwhile, by its log. ``answers``: those of services to probes;
    ``silence``: what has been printed instead.
    """

    space: dict[str, int] = field(default_factory=dict)
    processes: tuple[Process, ...] = ()
    nodes: tuple[NodeState, ...] = ()
    problem: str = ""
    unwritable: bool = False
    refusing: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    strangers: tuple[int, ...] = ()
    discarded: tuple[Discarded, ...] = ()
    unfit: tuple[str, ...] = ()
    backlog: int = 0
    refused: int = 0
    unaccounted: int = 0
    answers: tuple[ProbeAnswer, ...] = ()
    silence: str = ""

    def notices(self) -> list[str]:
        """Return what is not a fault of the services, and what users wait for or miss."""
        found = []
        if self.unfit:
            found.append(
                f"jobs that Slurm holds because no node has what they ask for: {len(self.unfit)}; once one has: "
                f"`sms exec -- scontrol release {','.join(self.unfit[:MOST_NAMED])}`"
            )
        if self.backlog >= BACKLOG:
            found.append(
                f"{self.backlog} messages of slurmctld wait for slurmdbd: is it up, and its database? At MaxDBDMsgs "
                "(slurm.conf) Slurm discards records of steps, then of jobs"
            )
        if self.unaccounted:
            found.append(
                f"slurmctld has discarded {self.unaccounted} records lately, as too many waited for slurmdbd: sacct "
                "lacks them; `sacctmgr show runawayjobs` ends jobs that it shows as running"
            )
        if self.refused:
            found.append(
                f"postfix has refused {self.refused} mails lately, as the overlay has too little space: nodes try again"
            )
        return found

    def job_problems(self) -> list[str]:
        """Return what jobs wait for until an administrator acts; of many, the first ``MOST_NAMED``."""
        found = []
        if self.held:
            found.append(
                f"jobs that Slurm holds because a node could not launch them: {len(self.held)}; slurmd's log there has "
                f"the reason; then `sms exec -- scontrol release {','.join(self.held[:MOST_NAMED])}`"
            )
        if self.strangers:
            found.append(
                f"users who have jobs, but no account in the services container: {len(self.strangers)}, with the ID "
                f"{', '.join(map(str, self.strangers[:MOST_NAMED]))}; their jobs do not start; complete the accounts "
                "of the site file, then `sms apply`; with a directory: is sssd up?"
            )
        return found

    def age_s(self, name: str) -> float:
        """Return since when the oldest process of that name runs, in seconds; 0 without one."""
        ages = (process.age_s for process in self.processes if process.name == name)
        return max(ages, default=0.0)

    def uptime_s(self) -> int:
        """Return since when the container runs, in seconds."""
        return int(next((process.age_s for process in self.processes if process.pid == 1), 0.0))


def read_inside(output: str, user: str) -> Inside:
    """Parse the output of ``definitions/scripts/inspect-inside``; what does not have its form is ignored.

    Args:
        user: the controller's user, which sets the reasons of nodes that stopped responding.
    """
    parts: dict[str, list[str]] = {}
    for line in output.split("\n"):
        name, _, rest = line.partition(" ")
        parts.setdefault(name, []).append(rest)
    space = re.fullmatch(r"\s*(\d{1,19})\s+(\d{1,19})\s*", next(iter(parts.get("space", ())), ""))
    uptime = re.match(r"\d{1,12}\.\d\d", next(iter(parts.get("uptime", ())), ""))
    lines = parts.get("node", ())
    nodes = read_nodes(lines, user)
    problem = "; ".join(parts.get("error", ())) or ("the output of sinfo has an unknown form" if lines else "")
    return Inside(
        {"size": int(space[1]), "used": int(space[2])} if space and int(space[2]) <= int(space[1]) > 0 else {},
        tuple(_read_processes("\n".join(parts.get("process", ())), float(uptime[0]) if uptime else 0.0)),
        nodes,
        "" if nodes else one_line(problem, 200),
        "unwritable" in parts,
        tuple(sorted(read_refused(parts.get("log", ())) & {node.name for node in nodes if node.completing})),
        tuple(one[1] for line in parts.get("held", ()) if (one := HELD.match(line))),
        tuple(int(line) for line in parts.get("stranger", ()) if re.fullmatch(r"\d{1,10}", line)),
        read_discarded(parts.get("discarded", ())),
        tuple(one[1] for line in parts.get("unfit", ()) if (one := HELD.match(line))),
        backlog=_read_number(parts.get("backlog", ())),
        refused=_read_number(parts.get("refused", ())),
        unaccounted=_read_number(parts.get("unaccounted", ())),
        answers=tuple(filter(None, map(read_probe, parts.get("answer", ())))),
        silence=" ".join(parts.get("answer", ())),
    )


def _read_number(lines: Sequence[str]) -> int:
    return next((int(one) for one in lines if re.fullmatch(r"\d{1,12}", one)), 0)


def _read_processes(text: str, uptime: float) -> Iterator[Process]:
    for pid, name, state, parent, rest in STAT.findall(text):
        age = max(0.0, uptime - int(rest.split()[17]) / TICKS)
        yield Process(int(pid), int(parent), state, age, one_line(name, 32))


def view_nodes(inside: Inside) -> NodesView:
    """Return the controller's view."""
    silent = tuple(
        SilentNode(one.name, one.state, one.reason, one.acknowledged, one.registered)
        for one in inside.nodes
        if one.silent
    )
    required = sum(one.registered and not one.acknowledged for one in inside.nodes)
    taken_out = tuple(
        SilentNode(one.name, one.state, one.reason, False) for one in inside.nodes if one.taken_out and not one.silent
    )
    return NodesView(len(inside.nodes), silent, inside.problem, required, inside.refusing, taken_out)


def choose_silent(inside: Inside) -> dict[str, list[NodeState]]:
    """Return the nodes, by name, that are tolerated if they are broken: to connect to, which shows whether they are."""
    view = view_nodes(inside)
    names = {node.name for node in view.faulty} if view.tolerates else set()
    return {node.name: [node] for node in inside.nodes if node.name in names}


def find_stopped(processes: Sequence[Process]) -> tuple[Process, ...]:
    """Return the processes below the first one, without those of `sms shell` or `exec`, that a signal has stopped."""
    parents = {process.pid: process.parent for process in processes}

    def is_service(pid: int) -> bool:
        seen: set[int] = set()
        while pid != 1 and pid in parents and pid not in seen:
            seen.add(pid)
            pid = parents[pid]
        return pid == 1

    return tuple(process for process in processes if process.state == "T" and is_service(process.pid))
