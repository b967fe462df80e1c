"""What a change of the site costs: jobs and reservations that Slurm's controller would lose, nodes it would not use.

slurmctld ends a job at its next reload or start if a partition of the job, or a node that it runs on, requires or
excludes, is no longer defined (``_sync_jobs_to_conf`` and ``build_job_bitmaps`` of src/slurmctld: state NODE_FAIL). A
reservation of nodes that are gone is deleted (``load_all_resv_state``, ``_validate_resv_rec`` in reservation.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache

from appliance.config.hostlist import HostListError, expand, fold
from appliance.config.slurm_files import FOLDER
from appliance.plan.adopt.frames import Frames, Section
from appliance.plan.adopt.read_slurm import read_entries, single_setting
from appliance.plan.services.jobs import is_active, read_fields
from appliance.plan.services.nodes import NODES, TAKEN_OUT, NodeState, read_nodes
from appliance.text import one_line

JOB_FIELDS = "%i|%T|%u|%P|%N|%n|%x"
"""Of squeue(1): id, state, user, partitions, allocated, required and excluded nodes."""
PRESENT = (
    "sh",
    "-ec",
    # No pipes from them: their failure has to end it, or a controller that does not answer would have no jobs.
    f"jobs=$(squeue --all --noheader --states=all --format='job {JOB_FIELDS}')\n"
    "reservations=$(scontrol --oneliner show reservation)\n"
    'nodes=$("$@")\n'
    'printf "%s\\n" "$jobs"\n'
    'printf "%s\\n" "$reservations" | sed -n "s/^ReservationName=/reservation &/p"\n'
    'printf "%s\\n" "$nodes" | sed "s/^/node /"',
    "present",
    *NODES,
)
"""Prints what runs, waits and is reserved, and the nodes. An array's waiting tasks are one line."""
PRESENT_BYTES = 64 << 20
"""Maximum size of that: about half a million lines."""
SHOWN = 10
"""Losses that are listed; the others are counted."""
UNUSABLE = TAKEN_OUT | {"down", "not_responding"}
"""Parts of a node's state in which no job starts there."""
PROGRAMS = ("Prolog", "Epilog", "TaskProlog", "TaskEpilog", "HealthCheckProgram", "RebootProgram")
"""Settings of slurm.conf(5) that name a program which slurmd runs: one that lacks it drains its node, or fails jobs."""
OWN_PROGRAMS = (
    "MailProg",
    "PrologSlurmctld",
    "EpilogSlurmctld",
    "ResumeProgram",
    "SuspendProgram",
    "ResumeFailProgram",
)
"""Settings that name a program which slurmctld runs, in the container."""
NOT_DEFINED = {"(null)", "N/A", ""}


@dataclass(frozen=True)
class Job:
    """A job that runs or waits; an array's waiting tasks are one. One that completes has ended: it cannot be lost."""

    id: str
    state: str
    user: str
    partitions: tuple[str, ...]
    nodes: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reservation:
    """A reservation, also one that begins later. ``partition``: empty if it has none."""

    name: str
    nodes: frozenset[str] = frozenset()
    partition: str = ""


@dataclass(frozen=True)
class Present:
    """What the controller has; ``dynamic``: nodes that registered themselves, and are in no file."""

    jobs: tuple[Job, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    nodes: tuple[NodeState, ...] = ()

    @property
    def dynamic(self) -> set[str]:
        return {one.name for one in self.nodes if "dynamic_norm" in one.state.lower()}

    @property
    def usable(self) -> set[str]:
        """The nodes on which jobs start."""
        return {one.name for one in self.nodes if is_usable(one)}


@dataclass(frozen=True)
class Defined:
    """The nodes and partitions of a slurm.conf; ``described``: each node's settings, as text that can be compared.

    ``programs``: those that nodes run, by setting; ``own``: those that slurmctld runs.
    """

    nodes: frozenset[str]
    partitions: frozenset[str]
    described: Mapping[str, str]
    programs: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """Something that a change would end. ``kind``: job or reservation; ``who``: its user and state, or empty."""

    kind: str
    name: str
    why: str
    who: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" ({self.who})" if self.who else "") + f": {self.why}"


def is_usable(node: NodeState) -> bool:
    """Return whether jobs start on it."""
    return not set(re.split(r"[^a-z_]+", node.state.lower())) & UNUSABLE


@cache
def _names(text: str) -> frozenset[str]:
    try:
        return frozenset() if text in NOT_DEFINED else frozenset(expand(text))
    except HostListError:
        return frozenset()


def read_present(output: str, user: str) -> Present:
    """Parse the output of ``PRESENT``; what does not have its form is ignored. ``user``: that of the controller."""
    jobs: list[Job] = []
    reservations: list[Reservation] = []
    nodes: list[str] = []
    for line in output.split("\n"):
        kind, _, rest = line.partition(" ")
        if kind == "job":
            jobs += _read_job(rest)
        elif kind == "reservation":
            reservations += _read_reservation(rest)
        elif kind == "node":
            nodes.append(rest)
    return Present(tuple(jobs), tuple(reservations), read_nodes(nodes, user))


def _read_job(line: str) -> Iterator[Job]:
    fields = line.split("|")
    if len(fields) == JOB_FIELDS.count("|") + 1 and re.fullmatch(r"[0-9][0-9_+%,\[\].-]*", fields[0]):
        number, state, user, partitions, nodes, required, excluded = fields
        if is_active(state) and state != "COMPLETING":
            names = tuple(one for one in partitions.split(",") if one)
            sets = (_names(nodes), _names(required), _names(excluded))
            yield Job(one_line(number, 60), state, one_line(user, 64), names, *sets)


def _read_reservation(line: str) -> Iterator[Reservation]:
    found = {key: "" if value in NOT_DEFINED else value for key, value in read_fields(line).items()}
    if name := found.get("ReservationName"):
        yield Reservation(one_line(name, 60), _names(found.get("Nodes", "")), found.get("PartitionName", ""))


def read_partition_states(output: str) -> dict[str, str]:
    """Return the state of each partition from the output of ``scontrol --oneliner show partition``."""
    rows = map(read_fields, output.splitlines())
    return {row["PartitionName"]: row["State"] for row in rows if "PartitionName" in row and "State" in row}


def read_defined(files: Mapping[str, bytes]) -> Defined:
    """Return what the slurm.conf among these files, by path, defines, with what it includes; nothing without one."""
    file = f"{FOLDER}/slurm.conf"
    if file not in files:
        return Defined(frozenset(), frozenset(), {})
    frames = Frames({path: Section(path, "read", body) for path, body in files.items()})
    nodes, partitions = read_entries(frames, file)
    described = {
        name: " ".join(f"{key.lower()}={value}" for key, value in sorted(entry.settings.items()))
        for entry in nodes
        for name in _names(entry.name)
    }
    values = [{key: single_setting(frames, file, key.lower()) for key in keys} for keys in (PROGRAMS, OWN_PROGRAMS)]
    programs = ({key: value for key, value in each.items() if value} for each in values)
    return Defined(frozenset(described), frozenset(entry.name for entry in partitions), described, *programs)


def find_losses(present: Present, new: Defined) -> tuple[Loss, ...]:
    """Return what the controller would end when it reads ``new``: running jobs first."""
    nodes = new.nodes | present.dynamic
    losses = [
        Loss("job", job.id, why, f"{job.user}, {job.state}")
        for job in sorted(present.jobs, key=lambda one: one.state == "PENDING")
        if (why := _why_lost(job, nodes, new.partitions))
    ]
    for one in present.reservations:
        gone = one.nodes - nodes
        if gone or (one.partition and one.partition not in new.partitions):
            losses.append(Loss("reservation", one.name, _removed(gone) or f"partition {one.partition} is removed"))
    return tuple(losses)


def _why_lost(job: Job, nodes: Set[str], partitions: Set[str]) -> str:
    if gone := [one_line(one, 60) for one in job.partitions if one not in partitions]:
        return f"partition {', '.join(gone)} is removed"
    uses = {"runs on": job.nodes, "requires": job.required, "excludes": job.excluded}
    return next((f"it {how} {_removed(names - nodes)}" for how, names in uses.items() if names - nodes), "")


def _removed(names: Iterable[str]) -> str:
    some = sorted(names)
    return f"{one_line(fold(some), 120)}, which {'is' if len(some) == 1 else 'are'} removed" if some else ""


def shown_losses(losses: Sequence[Loss]) -> list[str]:
    """Return a line for each of the first ``SHOWN``, and one with the number of the others."""
    more = [f"and {len(losses) - SHOWN} more"] if len(losses) > SHOWN else []
    return [*map(str, losses[:SHOWN]), *more]


def count_losses(losses: Sequence[Loss]) -> str:
    """Return how many they are, such as ``2 jobs and 1 reservation``."""
    numbers = [(sum(one.kind == kind for one in losses), kind) for kind in ("job", "reservation")]
    return " and ".join(f"{number} {kind}{'s' * (number > 1)}" for number, kind in numbers if number)


def find_unusable(before: Present, after: Present, new: Defined) -> tuple[NodeState, ...]:
    """Return the nodes of ``new`` that were usable before, and that a daemon of Slurm has taken out since.

    One that a person drains meanwhile, or that is switched off, was not taken out by the change.
    """
    return tuple(one for one in after.nodes if one.taken_out and one.name in before.usable and one.name in new.nodes)


def find_described(old: Defined, new: Defined) -> set[str]:
    """Return the nodes whose settings differ, without those that are added or removed."""
    return {name for name, text in new.described.items() if old.described.get(name, text) != text}


def find_new(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return the programs that only the new configuration names, by setting."""
    return {key: path for key, path in new.items() if old.get(key) != path}
