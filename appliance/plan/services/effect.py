"""What a change of the site costs: jobs and reservations that Slurm's controller would lose, nodes it would not use.

slurmctld ends a job at its next reload or start (state NODE_FAIL) if a partition of the job, or a node that it runs
on, requires or excludes, is no longer defined, or if the number of cores or of its generic resources on one of its
nodes changes (``_sync_jobs_to_conf``, ``valid_job_resources``, ``gres_job_revalidate2`` of Slurm's sources). A job that
waits for a feature, licence or resource that is gone is held, or starts without it (``select_nodes``,
``license_validate``, seen with Slurm 22.05). One whose partitions no longer admit it never starts (`admission`), nor
one that depends on a job that is lost. Where nodes
of a reservation are gone, it is deleted (``load_all_resv_state``, ``_validate_resv_rec``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache

from appliance.config.hostlist import fold
from appliance.plan.services.admission import UNLIMITED, Limits, find_limits, read_limit
from appliance.plan.services.defined import (
    NOT_DEFINED,
    Defined,
    Settings,
    count_cores,
    count_gres,
    count_licenses,
    read_names,
)
from appliance.plan.services.dependents import find_dependents
from appliance.plan.services.ending import count_allowed, find_ended, find_hurried, may_end
from appliance.plan.services.fitting import Needs, find_kinds, read_mb
from appliance.plan.services.jobs import LOST, Job, is_active, lost_jobs, read_fields
from appliance.plan.services.nodes import NODES, TAKEN_OUT, NodeState, read_nodes
from appliance.plan.services.preemption import Qos, find_preempted, preempts_more
from appliance.plan.services.topology import Topology, find_separated
from appliance.plan.services.used_up import begins_to_end
from appliance.text import one_line, whole_number

JOB_FIELDS = "%i %T %u %P %N %n %W %f %V %m %c %d %l %D %a %q %v %e %E %S %Q".replace(" ", "\t")
"""Of squeue(1): id, state, user, partitions, allocated and required nodes, licences, features, submission; memory,
processors and disk on each node; time limit, nodes, account, QOS, reservation, end, dependencies, start, priority.

No field contains a tab; features may contain `|`.
"""
MORE_FIELDS = (
    "JobArrayID:80,MaxNodes:12,MinTime:20,AllocNodes:80,BatchFlag:4,"
    "tres-alloc:1000,tres-per-job:200,tres-per-node:200,tres-per-socket:200,tres-per-task:200,Reason:40"
)
"""The most nodes, the least time, where it was submitted, whether it has a script, each a word; what it has and asks
for of generic resources, each a word; why it waits."""
PRESENT = (
    "sh",
    "-ec",
    # No pipes from them: their failure has to end it, or a controller that does not answer would have no jobs.
    "export SLURM_TIME_FORMAT=%s\n"
    f"jobs=$(squeue --all --noheader --states=all --format='job {JOB_FIELDS}')\n"
    "tasks=$(squeue --all --noheader --states=all --array --format=%T)\n"
    f"more=$({{ squeue --all --noheader --Format='{MORE_FIELDS}'; echo \"status $?\"; }} | "
    "sed -n 's/  */ /g; /^status 0$/d; /^status /q 1; p')\n"
    "reservations=$(scontrol --oneliner show reservation)\n"
    "partitions=$(scontrol --oneliner show partition)\n"
    "described=$(scontrol --oneliner show node)\n"
    'nodes=$("$@")\n'
    "date '+now %s'\n"
    'printf "%s\\n" "$jobs"\n'
    'printf "%s\\n" "$tasks" | sort | uniq -c | sed "s/^ */tasks /"\n'
    'printf "%s\\n" "$more" | sed "s/^/more /"\n'
    'printf "%s\\n" "$partitions" | sed -n "s/^PartitionName=/partition &/p"\n'
    'printf "%s\\n" "$reservations" | sed -n "s/^ReservationName=/reservation &/p"\n'
    'printf "%s\\n" "$described" | '
    "sed -n 's/^\\(NodeName=[^ ]*\\) .*\\( AvailableFeatures=[^ ]*\\) .*\\( Weight=[^ ]*\\) .*/described \\1\\2\\3/p'\n"
    'printf "%s\\n" "$nodes" | sed "s/^/node /"',
    "present",
    *NODES,
)
"""Prints what runs, waits and is reserved, and the nodes. An array's waiting tasks are one line, but each counts."""
PRESENT_BYTES = 64 << 20
"""Maximum size of that: about half a million lines."""
CORES = "cores"
SHARED_GRES = {"shard", "mps"}
"""Parts of a gpu: Slurm compares the number of these (``_get_node_gres_cnt``)."""
JOB_ID = re.compile(r"[0-9][0-9_+%,:\[\].-]*")
FEATURE = r"[A-Za-z_][A-Za-z0-9_.:=-]*"
"""In an expression of features, such as ``[rack1*2&rack2]&(gpu|ib)``."""
SHOWN = 10
"""Losses that are listed; the others are counted."""
SAVED_S = 10
"""Seconds within which slurmctld writes a new job to its state: 5 (SAVE_MAX_WAIT), and what a slow disk takes."""
CHOSEN_AGAIN = {"ALL_NODES", "PART_NODES"}
"""Flags of a reservation whose nodes follow those of the cluster, or of its partition (``_validate_resv_rec``)."""
AWAY = {"FUTURE", "DOWN", "FAIL"}
"""States in slurm.conf by which a node takes no job, and loses those that it has."""
Groups = Mapping[str, Set[str]]
UNUSABLE = TAKEN_OUT | {"down", "not_responding"}
"""Parts of a node's state in which no job starts there."""


@dataclass(frozen=True)
class Reservation:
    """A reservation, also one that begins later. ``partition``: empty if it has none.

    ``nodes``: none if Slurm chooses them again: all of the cluster, or of its partition. ``licenses``: as a list.
    ``users``, ``groups``: who may use it, or may not.
    ``ends``: Unix time; 0 if its jobs may stay, and use other nodes, too (flag FLEX).
    """

    name: str
    nodes: frozenset[str] = frozenset()
    partition: str = ""
    licenses: str = ""
    ends: int = 0
    users: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()

    def loses_all(self, gone: Set[str], before: Groups, after: Groups) -> bool:
        """Return whether none of its users, or of the members of its groups, is left: slurmctld deletes it then.

        The rules are those of ``_build_uid_list`` and ``_validate_one_reservation`` (src/slurmctld/reservation.c).

        Args:
            gone: users who are removed.
            before, after: members of groups.
        """
        left = any(after.get(one) or not before.get(one) for one in self.groups)
        return bool((self.users and self.users <= gone) or (self.groups and not left))


@dataclass(frozen=True)
class Present:
    """What the controller has; ``dynamic``: nodes that registered themselves, and are in no file.

    ``partitions``: fields of ``scontrol show partition`` by name. ``states``: of jobs by id, also of those that ended.
    ``tasks``: how many jobs there are in each state, with each task of an array.
    ``unread``: how many lines of jobs could not be read. ``described``: features and weight of nodes, as
    ``scontrol show node`` prints them. ``now``: when that was, Unix time; 0 if it is not known. ``qos``: None if they
    are not known.
    """

    jobs: tuple[Job, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    nodes: tuple[NodeState, ...] = ()
    partitions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    unread: int = 0
    described: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    now: float = 0
    tasks: Mapping[str, int] = field(default_factory=dict)
    qos: Mapping[str, Qos] | None = None

    @property
    def dynamic(self) -> set[str]:
        return {one.name for one in self.nodes if "dynamic_norm" in one.state.lower()}

    @property
    def users(self) -> set[str]:
        """Who has jobs."""
        return {one.user for one in self.jobs}

    @property
    def usable(self) -> set[str]:
        """The nodes on which jobs start."""
        return {one.name for one in self.nodes if is_usable(one)}


@dataclass(frozen=True)
class Fault:
    """Something that a change breaks, and what to do about it."""

    why: str
    hint: str


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


def read_present(output: str, user: str) -> Present:
    """Parse the output of ``PRESENT``; what does not have its form is ignored. ``user``: that of the controller."""
    jobs: list[Job] = []
    reservations: list[Reservation] = []
    nodes: list[str] = []
    partitions: dict[str, Mapping[str, str]] = {}
    more: dict[str, str] = {}
    described: dict[str, Mapping[str, str]] = {}
    states: dict[str, str] = {}
    tasks: dict[str, int] = {}
    unread = now = 0
    for line in output.split("\n"):
        kind, _, rest = line.partition(" ")
        if kind == "job":
            found = rest.split("\t")
            if len(found) != JOB_FIELDS.count("\t") + 1 or not JOB_ID.fullmatch(found[0]):
                unread += bool(rest)
                continue
            states[found[0]] = found[1]
            jobs += _read_job(found)
        elif kind == "reservation":
            reservations += _read_reservation(rest)
        elif kind == "partition" and (name := (fields := read_fields(rest)).get("PartitionName")):
            partitions[name] = fields
        elif kind == "described" and (name := (fields := read_fields(rest)).get("NodeName")):
            described[name] = fields
        elif kind == "more":
            more[rest.partition(" ")[0]] = rest
        elif kind == "node":
            nodes.append(rest)
        elif kind == "tasks":
            number, _, state = rest.partition(" ")
            tasks[state] = whole_number(number) or 0
        elif kind == "now":
            now = whole_number(rest) or 0
    both = (_add_more(one, more[one.id]) if one.id in more else one for one in jobs)
    known = read_nodes(nodes, user)
    return Present(tuple(both), tuple(reservations), known, partitions, states, unread, described, now, tasks)


def _add_more(job: Job, line: str) -> Job:
    """Return a job with what a line of ``MORE_FIELDS`` says."""
    words = [*line.split(" ")[1:], *[""] * 10]
    most, least_time, host, batch, shown, total, *each, reason = words[:10]
    minutes = read_limit(least_time, 0) or job.minutes  # with a least time it accepts less than its limit
    counts = _count_gres(" ".join(each))
    gres = frozenset(_count_gres(" ".join((shown, total, *each))))
    cpus = re.search(r"\bcpu=(\d{1,9})\b", shown) if job.waits else None  # of one that runs: what it has
    return replace(
        job,
        gres=gres,
        host=host,
        batch=batch != "0",
        prolog=reason == "Prolog",
        most_nodes=whole_number(most) or 0,
        minutes=minutes,
        gres_counts=frozenset((name, counts.get(name, 1)) for name in gres),
        gres_total=frozenset((_count_gres(f"{shown} {total}" if job.waits else total)).items()),
        total_cpus=int(cpus[1]) if cpus else 0,
    )


@cache
def _count_gres(text: str) -> Mapping[str, int]:
    """Return how many of each generic resource a job asks for, also of those of a type; the largest of several numbers.

    Versions of Slurm print ``gres:gpu:a100:2``, ``gres/gpu:2``, ``gres/gpu:a100=2``; without a number it is 1.
    """
    found: dict[str, int] = {}
    number = r"(?:[:=](\d{1,12}[KMGTP]?)(?=[,\s]|$))?"
    for name, kind, count in re.findall(r"gres[:/]([A-Za-z0-9_.-]+)(?::([A-Za-z_][\w.-]*))?" + number, text):
        each = count_gres(f"{name}:{count or 1}")[name]
        for one in [name, f"{name}:{kind}"] if kind else [name]:
            found[one] = max(found.get(one, 0), each)
    return found


def _read_job(fields: Sequence[str]) -> Iterator[Job]:
    number, state, user, partitions, nodes, required, licenses, features, submitted, memory, cpus, disk = fields[:12]
    limit, least, account, qos, reservation, end, depends, began, priority = fields[12:]
    if not is_active(state) or state == "COMPLETING":
        return
    names = tuple(one for one in partitions.split(",") if one)
    sets = (read_names(nodes), read_names(required))
    # With an alternative, it may start without one of them.
    named = "" if features in NOT_DEFINED or "|" in features else features
    wanted = frozenset(re.findall(FEATURE, named))
    yield Job(
        one_line(number, 60),
        state,
        one_line(user, 64),
        names,
        *sets,
        licenses=frozenset(count_licenses(licenses)),
        license_counts=frozenset() if "|" in licenses else frozenset(count_licenses(licenses).items()),
        features=wanted,
        submitted=whole_number(submitted) or 0,
        memory_mb=read_mb(memory),
        cpus=whole_number(cpus) or 0,
        disk_mb=read_mb(disk),
        minutes=read_limit(limit, 0),
        least_nodes=whole_number(least) or 0,
        account="" if account in NOT_DEFINED else account,
        qos="" if qos in NOT_DEFINED else qos,
        reservation="" if reservation in NOT_DEFINED else reservation,
        depends=depends,
        ends=0 if limit.upper() in UNLIMITED else whole_number(end) or 0,
        began=whole_number(began) or 0,
        priority=0 if priority == "0" else whole_number(priority) or 1,
    )


def _read_reservation(line: str) -> Iterator[Reservation]:
    found = {key: "" if value in NOT_DEFINED else value for key, value in read_fields(line).items()}
    if name := found.get("ReservationName"):
        flags = {*found.get("Flags", "").split(",")}
        ends = 0 if "FLEX" in flags else whole_number(found.get("EndTime", "")) or 0
        nodes = frozenset[str]() if CHOSEN_AGAIN & flags else read_names(found.get("Nodes", ""))
        # With a minus, all others may use it.
        users, groups = (
            frozenset(one.lstrip("-") for one in found.get(key, "").split(",") if one) for key in ("Users", "Groups")
        )
        partition, licenses = found.get("PartitionName", ""), found.get("Licenses", "")
        yield Reservation(one_line(name, 60), nodes, partition, licenses, ends, users, groups)


def can_cost(old: Defined, new: Defined) -> bool:
    """Return whether a change can cost a job or a reservation, whatever there is."""
    gone = (old.partitions.keys() - new.partitions.keys(), old.nodes.keys() - new.nodes.keys())
    fewer = any(count > new.licenses.get(name, 0) for name, count in old.licenses.items())
    lacking = (old.features - new.features, old.gres - new.gres, old.gres_types - new.gres_types)
    other = any(_other_resources(old, new, name) for name in new.nodes)
    limits = (find_limits(old), find_limits(new))
    narrower = any(now.narrower(limits[0][name]) for name, now in limits[1].items() if name in limits[0])
    ends = fewer or (old.gang and not new.gang) or narrower or _any_shrinks(old, new)
    ends = ends or may_end(old, new) or begins_to_end(old, new) or preempts_more(old, new)
    ends = ends or any(find_separated(old.connected, new.connected, old.nodes.keys() & new.nodes.keys()))
    return any((*gone, *lacking)) or other or ends or bool(find_away(old, new)) or _any_leaves(old, new)


def _any_leaves(old: Defined, new: Defined) -> bool:
    """Return whether a node, which stays, leaves a partition, or it is not known which nodes one has."""
    before = old.members
    for name, names in new.members.items():
        had = before.get(name)
        if name in before and had != names and (had is None or names is None or had - names):
            return True
    return False


def _any_shrinks(old: Defined, new: Defined) -> bool:
    """Return whether a partition loses nodes of a kind, and has none that is at least as large."""
    after = find_kinds(new)
    pairs = ((kinds, after[name]) for name, kinds in find_kinds(old).items() if name in after)
    return any(not one.fit(now) for had, now in pairs if had is not None and now is not None for one in had)


def find_away(old: Defined, new: Defined) -> dict[str, str]:
    """Return the nodes that a change makes unusable by their ``State``, with that."""

    def state(settings: Settings) -> str:
        return settings.get("state", "").upper()

    away = {name: state(settings) for name, settings in new.nodes.items() if state(settings) in AWAY}
    return {name: one for name, one in away.items() if state(old.nodes.get(name, {})) != one}


def find_moved(old: Defined, new: Defined) -> dict[str, str]:
    """Return the nodes that get the address of another one, with that: messages for one would reach the other."""
    before = {name: settings.get("nodeaddr", "") for name, settings in old.nodes.items()}
    owners = {address: name for name, address in before.items() if address and name in new.nodes}
    changed = {name: settings.get("nodeaddr", "") for name, settings in new.nodes.items() if name in before}
    return {name: owners[one] for name, one in changed.items() if one != before[name] and one in owners}


@dataclass(frozen=True)
class _Change:
    """What a change takes away, computed once for all jobs. Pairs: before and after."""

    old: Defined
    new: Defined
    lacking: Mapping[str, Set[str]]
    away: Mapping[str, str]
    members: tuple[Mapping[str, Set[str] | None], Mapping[str, Set[str] | None]]
    kinds: tuple[Mapping[str, Set[Needs] | None], Mapping[str, Set[Needs] | None]]
    limits: tuple[Mapping[str, Limits], Mapping[str, Limits]]
    topology: tuple[Topology, Topology]


def _find_change(old: Defined, new: Defined) -> _Change:
    dropped = old.gres_types - new.gres_types
    lacking = {
        "licence": old.licenses.keys() - new.licenses.keys(),
        "feature": old.features - new.features,
        "resource": (old.gres - new.gres) | {one for one in old.gres if one.partition(":")[0] in dropped},
    }
    kinds = (find_kinds(old), find_kinds(new))
    limits = (find_limits(old), find_limits(new))
    members = (old.members, new.members)
    topology = (Topology(old.connected, members[0]), Topology(new.connected, members[1]))
    return _Change(old, new, lacking, find_away(old, new), members, kinds, limits, topology)


def find_losses(present: Present, old: Defined, new: Defined) -> tuple[Loss, ...]:
    """Return what the controller would end when it reads ``new``: running jobs first."""
    nodes, change = new.nodes.keys() | present.dynamic, _find_change(old, new)
    ends = {one.name: one.ends for one in present.reservations if one.ends}
    active = {name for name, end in ends.items() if end > present.now}
    whys = dict(find_preempted(present.jobs, active, present.qos, present.now, old, new))
    whys |= find_ended(present.jobs, present.nodes, ends, present.now, old, new)
    whys |= {job.id: why for job in present.jobs if (why := _why_lost(job, nodes, new.partitions.keys(), change))}
    whys |= find_dependents(present.jobs, whys.keys())
    losses = [
        Loss("job", job.id, whys[job.id], f"{job.user}, {job.state}")
        for job in sorted(present.jobs, key=lambda one: one.state == "PENDING")
        if job.id in whys
    ]
    for one in present.reservations:
        gone = one.nodes - nodes
        if gone or (one.partition and one.partition not in new.partitions):
            why = _removed(gone) or f"partition {one.partition} is removed"
            losses.append(Loss("reservation", one_line(one.name, 60), why))
        elif fewer := [name for name, count in count_licenses(one.licenses).items()
                       if old.licenses.get(name, 0) >= count > new.licenses.get(name, 0)]:  # fmt: skip
            why = f"fewer licences {one_line(fewer[0], 60)} than it has"
            losses.append(Loss("reservation", one_line(one.name, 60), why))
    return tuple(losses)


def find_lowered(present: Present, old: Defined, new: Defined) -> Iterator[Fault]:
    """Yield that Slurm has more jobs than it may have from now on, and that nodes which boot get less time for it."""
    allowed, there = count_allowed(new), sum(present.tasks.values())
    if allowed < count_allowed(old) and there + 1 >= allowed:
        why = f"MaxJobCount={allowed}: Slurm has {there} jobs, with those that ended in the last minutes"
        yield Fault(f"{why}: nobody could submit one", "set a larger one in `slurm.extra`")
    if hurried := find_hurried(present.nodes, old, new):
        some = one_line(fold(sorted(hurried)), 120)
        why = f"ResumeTimeout is lowered to {min(hurried.values()):.0f} s, and nodes boot ({len(hurried)}): {some}"
        yield Fault(f"{why}: those that need longer become DOWN, and stay so", "apply when they have booted")


def find_forgotten(present: Present, taken: float) -> tuple[Loss, ...]:
    """Return the jobs that a state of the Unix time ``taken`` does not have: nodes end what runs of them."""
    return tuple(
        Loss("job", job.id, "it was submitted since the snapshot", f"{job.user}, {job.state}")
        for job in sorted(present.jobs, key=lambda one: one.waits)
        if job.submitted > taken - SAVED_S
    )


def _why_lost(job: Job, nodes: Set[str], partitions: Set[str], change: _Change) -> str:
    if gone := [one_line(one, 60) for one in job.partitions if one not in partitions]:
        return f"partition {', '.join(gone)} is removed"
    # A node that it excludes may go (``list_nodename2bitmap`` with best effort).
    uses = {"runs on": job.nodes, "requires": job.required}
    lost = next((f"it {how} {_removed(names - nodes)}" for how, names in uses.items() if names - nodes), "")
    return lost or _why_changed(job, change)


def _why_changed(job: Job, change: _Change) -> str:
    """Return why a job ends, or never starts, although its partitions and nodes stay; empty if it does not."""
    for name in sorted((job.required if job.waits else job.nodes) & change.away.keys()):
        return f"it {'requires' if job.waits else 'runs on'} {one_line(name, 60)}, which becomes {change.away[name]}"
    if not job.waits:
        for name in sorted(job.nodes):
            other = _other_resources(change.old, change.new, name)
            if lost := sorted(other & ({CORES} | job.gres)):
                return f"the number of {lost[0]} of {one_line(name, 60)}, on which it runs, changes"
        if dropped := sorted(job.gres & (change.old.gres_types - change.new.gres_types)):
            return f"GresTypes no longer has {dropped[0]}: what it has is given to others"
        if job.state == "SUSPENDED" and change.old.gang and not change.new.gang:
            return "jobs no longer take turns: it stays suspended until `scontrol resume`"
        return ""
    if job.required and (left := _left(job, *change.members)):
        return f"it requires {one_line(fold(sorted(left)), 120)}, no longer in its partition: it would be held"
    wants = {"licence": job.licenses, "feature": job.features, "resource": job.gres}
    lacking = {kind: sorted(names & change.lacking[kind]) for kind, names in wants.items()}
    found = (f"{kind} {one_line(names[0], 60)}" for kind, names in lacking.items() if names)
    removed = (f"it waits for {one}, which is removed: it would be held, or start without it" for one in found)
    before, after = change.old.licenses, change.new.licenses
    fewer = (
        f"it asks for {count} of licence {one_line(name, 60)}, and there would be {after.get(name, 0)}: it never starts"
        for name, count in sorted(job.license_counts)
        if before.get(name, 0) >= count > after.get(name, 0)
    )
    why = next(removed, "") or next(fewer, "") or _why_unfit(job, *change.kinds) or _why_barred(job, *change.limits)
    if not why and not change.topology[1].fits(job) and change.topology[0].fits(job):
        why = "no switch connects as many nodes as it asks for, or those that it requires: it never starts"
    return why


def _why_unfit(job: Job, before: Mapping[str, Set[Needs] | None], after: Mapping[str, Set[Needs] | None]) -> str:
    """Return that no node of a waiting job's partitions fits it any more; empty if one does, or none did before."""
    needs = Needs(job.memory_mb, job.cpus, job.disk_mb, job.features, job.gres_counts)

    def fits(partitions: Mapping[str, Set[Needs] | None]) -> bool | None:
        known = [partitions.get(name) for name in job.partitions]
        return None if None in known else any(needs.fit(kinds) for kinds in known if kinds is not None)

    if fits(before) and fits(after) is False:
        return f"no node of its partitions would have {one_line(str(needs), 120)}: it would be held"
    return ""


def _why_barred(job: Job, before: Mapping[str, Limits], after: Mapping[str, Limits]) -> str:
    """Return why none of a waiting job's partitions admits it any more; empty if one does, or none did before."""
    if any(job.minutes == before[name].minutes for name in job.partitions if name in before):
        job = replace(job, minutes=0)  # of a job without a limit squeue prints that of its partition
    whys = [(name, after[name].why_barred(job)) for name in job.partitions if name in after]
    if not whys or not all(why for _, why in whys):
        return ""
    if all(before[name].why_barred(job) for name in job.partitions if name in before):
        return ""
    return f"it {whys[0][1]} of partition {one_line(whys[0][0], 60)}: it would never start"


def _left(job: Job, before: Mapping[str, Set[str] | None], after: Mapping[str, Set[str] | None]) -> Set[str]:
    """Return the nodes that a waiting job requires and that none of its partitions has any more."""
    lacking: Set[str] = job.required
    for name in job.partitions:
        names, had = after.get(name), before.get(name)
        if names is None:
            return frozenset()
        lacking = lacking - names if had is None else (lacking & had) - names
    return lacking


def _other_resources(old: Defined, new: Defined, node: str) -> set[str]:
    """Return which resources of a node in both are others: ``CORES``, and names of generic ones."""
    before, after = old.nodes.get(node), new.nodes.get(node)
    if before is None or after is None or before == after:
        return set()
    counts = [count_gres(settings.get("gres", "")) for settings in (before, after)]
    gres = {name for name in counts[0].keys() | counts[1].keys() if counts[0].get(name) != counts[1].get(name)}
    gres &= old.by_file | new.by_file  # of others, Slurm knows only how many are used
    gres = gres - SHARED_GRES | (SHARED_GRES if "gpu" in gres else set())
    return gres | ({CORES} if old.by_cores and new.by_cores and count_cores(before) != count_cores(after) else set())


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


def find_failed(before: Present, after: Present, foreseen: Set[str], changed: Set[str]) -> list[str]:
    """Describe each job that Slurm has ended since; waiting tasks of an array are left out.

    Args:
        foreseen: jobs that are not to be named.
        changed: nodes whose settings have changed: a job of theirs that waits again was requeued by that. Others are
            requeued by preemption, by their users, or by nodes that do not boot.
    """
    others = {one.id for one in before.jobs if not one.nodes & changed}
    states = {name: state for name, state in after.states.items() if name not in others or state in LOST}
    known = {
        name: state
        for name, state in before.states.items()
        if name in states.keys() - foreseen and state != "COMPLETING"
    }
    return [one_line(line, 120) for line in lost_jobs(known, states)]
