"""What is checked before an adoption changes anything, and its plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.adopt.record import find_record
from appliance.operations.adopt.survey import SurveyOptions, not_permitted, survey
from appliance.operations.context import Cluster, runtime_files
from appliance.operations.engines.container_owner import ContainerOwner
from appliance.operations.history import read_history
from appliance.operations.lease import query_all_leases
from appliance.operations.migration.inspection import clock_offset, find_lacking
from appliance.operations.preflight import check_programs, find_instance, find_taken
from appliance.operations.services.effect import judge_old
from appliance.plan.adopt.adoption import (
    FOLDER,
    AdoptPlan,
    OldFacts,
    TargetFacts,
    plan_adoption,
)
from appliance.plan.adopt.model import Survey
from appliance.plan.image.definition import runtime_digest
from appliance.plan.migration.lease import engine_error, find_holder, refuse_other_cluster
from appliance.plan.migration.state import moved_paths
from appliance.plan.services.inside import Inside, view_nodes
from appliance.plan.services.nodes import NODES, NodesView, read_nodes
from appliance.shared.lease import Lease
from appliance.text import whole_number
from appliance.tools.scripts import script_argv

VERB = "adopt"
GAVE_BACK = {"released": ("backed out",), "up": ("given", "gone")}
"""States in which an old node waits until it sees who serves: events of the container by which it does not."""
NOTES = ("begun", "failed", "undo begun", "trouble")
"""Events that say nothing of who serves."""


def mark_on_old(cluster: Cluster) -> str:
    """Return the path of the adoption's state on the old node."""
    return f"{FOLDER}/{cluster.site.cluster}.json"


def lock_on_old(cluster: Cluster) -> str:
    """Return the path of the lock of the agent on the old node."""
    return f"/run/sms/adopt-{cluster.site.cluster}.lock"


@dataclass(frozen=True)
class Inspected:
    """Both hosts after the checks, and the plan. ``lease``: that nobody holds; ``owner``: the target's container."""

    old: Host
    target: Host
    survey: Survey
    plan: AdoptPlan
    lease: Lease
    owner: ContainerOwner


def inspect(cluster: Cluster, old: Host, named: str, name: str) -> Inspected:
    """Survey the old node, query the target, and return the plan with all doubts.

    Args:
        named: the old node as [USER@]HOST[:PORT].
        name: of the admin host that gets the services.

    Raises:
        ConfigError: no admin host has that name.
        Refused: the services run already, or a host cannot be queried.
    """
    target = cluster.host(name)
    check_programs(target)
    lease = find_free_lease(cluster, target)
    found, _ = survey(SurveyOptions(target=named), cluster.env.progress)
    paths = moved_paths(cluster.services)
    owner = ContainerOwner(cluster, target, paths)
    with cluster.env.progress.step(f"check {old.name} and {name}"), cluster.env.pool(2) as pool:
        there = pool.submit(query_old, cluster, old, found)
        here = pool.submit(query_target, cluster, owner)
        facts = there.result(), here.result()
    plan = plan_adoption(cluster.site, cluster.services, found, *facts, list(_measured(cluster, target)))
    return Inspected(old, target, found, plan, lease, owner)


def find_free_lease(cluster: Cluster, target: Host) -> Lease:
    """Return the lease that nobody holds, with the highest generation.

    Raises:
        Refused: a host or an engine has the services, or a host cannot be queried.
    """
    leases = query_all_leases(target, cluster)
    views = leases.views
    refuse_other_cluster(views)
    holder = find_holder(views)
    if holder and holder.engine:
        raise engine_error(holder)
    if holder:
        raise Refused(
            f"{holder.holder} has the services of {cluster.site.cluster} already",
            hint=f"`sms status --host {holder.holder}` shows them; `sms adopt --undo` gives them back to the old node",
        )
    if leases.unreachable:
        raise Refused(
            f"{', '.join(leases.unreachable)} cannot be reached", hint="an admin host there may have the services"
        )
    if running := [one.name for one in map(cluster.host, leases.hosts) if find_instance(cluster, one)]:
        raise Refused(f"an instance runs on {running[0]}", hint=f"sms stop --host {running[0]}")
    own = views[target.name].lease
    return Lease(cluster.site.cluster, leases.top, None, own.since if own else 0.0, file=target.name)


def query_old(cluster: Cluster, old: Host, found: Survey) -> OldFacts:
    """Query the old node for what its survey does not have."""
    state = found.slurm.state if found.slurm else ""
    offset = clock_offset(old, cluster.env.clock)
    output = old.run(*script_argv("adopt-facts", mark_on_old(cluster), state or "/nonexistent"), timeout=60).text
    rows = [words for line in output.splitlines() if len(words := line.split(None, 1)) == 2]
    values: dict[str, list[str]] = {}
    for key, value in rows:
        values.setdefault(key, []).append(value.strip()[:300])
    ports = [number for one in values.get("used", []) if (number := whole_number(one)) is not None]
    return OldFacts(
        old.name,
        _connected_to(old),
        frozenset(values.get("program", [])),
        values.get("key", [""])[0],
        offset,
        frozenset(values.get("unit", [])),
        tuple(ports),
        values.get("mark", [""])[0],
        values.get("cluster", [""])[0],
        query_nodes(old, (), found.slurm.user if found.slurm else ""),
        judge_old(cluster, old, found.slurm.file, found.slurm.user) if found.slurm else (),
    )


def query_nodes(host: Host, inside: Sequence[str], user: str) -> NodesView:
    """Return the nodes as the controller on the host sees them; none if it does not answer.

    Args:
        inside: first words of a command in the container; empty on the old node.
        user: SlurmUser.
    """
    shown = host.run(*inside, *NODES, ok=None, timeout=60).stdout.decode(errors="replace")
    return view_nodes(Inside(nodes=read_nodes(shown.split("\n"), user)))


def _connected_to(old: Host) -> str:
    """Return the address of the old node to which this run is connected; empty if it is this machine."""
    return "" if isinstance(old, Local) else getattr(old, "peer", "")


def query_target(cluster: Cluster, owner: ContainerOwner) -> TargetFacts:
    """Query the admin host that gets the services. Sends the image."""
    target, site = owner.host, cluster.site
    problems = find_lacking(cluster, target)
    owner.check()
    answering = {} if problems else find_taken(cluster, target)
    key = site.secrets.munge_key
    shown = target.run("ip", "-o", "-4", "address", "show", "scope", "global").text
    return TargetFacts(
        target.name,
        tuple(line.split()[3].partition("/")[0] for line in shown.splitlines() if len(line.split()) > 3),
        hashlib.sha256(key.read_bytes()).hexdigest() if key and key.exists() else "",
        clock_offset(target, cluster.env.clock),
        owner.versions().slurm,
        _slurm_uid(cluster, owner),
        owner.free_bytes(),
        tuple(problems),
        answering,
        owner.image.runtime != runtime_digest(runtime_files()),
    )


def _slurm_uid(cluster: Cluster, owner: ContainerOwner) -> int | None:
    """Return the uid of SlurmUser in the image; None if it has none."""
    controller = cluster.find_role("controller")
    if controller is None:
        return None
    command = owner.inside(("id", "-u", controller.user), state=False)
    shown = command.run(ok=None, timeout=60).text.split()
    return whole_number(shown[-1]) if shown else None


def _measured(cluster: Cluster, target: Host) -> Iterator[dict[str, float]]:
    """Yield the parts of earlier adoptions by this host, in seconds."""
    for line in read_history(cluster, target):
        parts = line.get("parts")
        if line.get("verb") == VERB and line.get("event") == "adopted" and isinstance(parts, dict):
            yield {name: float(took) for name, took in parts.items() if isinstance(took, int | float)}


def query_mark(cluster: Cluster, old: Host) -> str:
    """Return the state of an adoption on the old node; empty without one.

    Raises:
        Refused: nothing can be run there as root.
    """
    shown = old.run(*script_argv("adopt-facts", mark_on_old(cluster), "/nonexistent"), ok=None, timeout=60)
    if shown.status:  # the script itself never fails
        raise not_permitted(old, shown.stderr.decode(errors="replace"))
    return next((line.partition(" ")[2] for line in shown.text.splitlines() if line.startswith("mark ")), "")


def resume_old(cluster: Cluster, old: Host) -> str:
    """Let the agent on the old node complete or undo what a killed one has left; return the state; empty if none.

    After a long time it does not decide alone (``adopt_state.UNDECIDED_S``): then it serves if the container cannot
    have served since.
    """
    state = query_mark(cluster, old)
    if state:
        state = _resume(cluster, old, sure=False)
    if state in GAVE_BACK and _has_given_back(cluster, old, GAVE_BACK[state]):
        state = _resume(cluster, old, sure=True)
    return state


def _has_given_back(cluster: Cluster, old: Host, events: Sequence[str]) -> bool:
    """Whether nobody has the lease, no instance runs, and one of these is the last event of its services there."""
    record = find_record(cluster)
    if record is None or record.old != old.name:
        return False
    host = cluster.host(record.host)
    holder = find_holder(query_all_leases(host, cluster).views)
    if (holder and (holder.holder or holder.engine)) or find_instance(cluster, host):
        return False
    last = [one for one in read_history(cluster, host) if one.get("verb") != "guard" and one.get("event") not in NOTES]
    return bool(last) and last[-1].get("event") in events and last[-1].get("peer") == old.name


def _resume(cluster: Cluster, old: Host, *, sure: bool) -> str:
    request = {"mark": mark_on_old(cluster), "lock": lock_on_old(cluster), "sure": sure}
    cluster.env.agents.call(old, "adopt_resume", request)
    return query_mark(cluster, old)
