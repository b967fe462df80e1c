"""What an apply keeps jobs from until it has removed it; where its run was killed, the next verb or the guard ends it.

A run that does so has a lock on the host: what is held without it is that of a dead one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from appliance.config.hostlist import fold
from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note, read_history
from appliance.operations.services.present import QUERY_S, last_line, query_present
from appliance.plan.machine import inside_argv
from appliance.plan.migration.here import SWITCHED
from appliance.plan.services.effect import PRESENT_BYTES
from appliance.plan.services.nodes import NodeState
from appliance.text import one_line
from appliance.tools import files

REASON = "sms: is removed from the site"
"""Of nodes that are drained before they are removed."""
HELD, RELEASED = "held", "released"
ENDS = ("applied", SWITCHED)
"""Events of the history after which what was held is removed."""


@dataclass(frozen=True)
class Hold:
    """What a run keeps jobs from. ``partitions``: their states of before; ``nodes``: as a host list.

    ``written``: its files are in the container, and what they remove goes when the controller reads them.
    """

    verb: str
    partitions: Mapping[str, str]
    nodes: str
    written: bool


def lock_path(cluster: Cluster) -> str:
    """Return the path of the lock of a run that keeps jobs from something."""
    return f"{cluster.places.lock}.held"


@contextmanager
def hold(cluster: Cluster, host: Host, verb: str, partitions: Mapping[str, str], nodes: str) -> Iterator[None]:
    """Let no job start in these partitions, or on these nodes. If it fails, all is as before.

    Raises:
        Busy: another run does so.
    """
    with _lock(cluster, host):
        note(cluster, host, verb, HELD, partitions=dict(partitions), nodes=nodes)
        try:
            for name in partitions:
                update(cluster, host, f"PartitionName={name}", "State=INACTIVE")
            if nodes:
                update(cluster, host, f"NodeName={nodes}", "State=DRAIN", f"Reason={REASON}")
            yield
        except BaseException:
            release(cluster, host, written=True, own=True)
            raise


def _lock(cluster: Cluster, host: Host) -> AbstractContextManager[None]:
    return cluster.env.locks.hold(host, lock_path(cluster), f"another sms keeps jobs from partitions on {host.name}")


def find_hold(cluster: Cluster, host: Host) -> Hold | None:
    """Return what the last run on the host that kept jobs from something still keeps them from; None if nothing."""
    found: Hold | None = None
    for one in read_history(cluster, host):
        event = one.get("event")
        if event == HELD:
            states = one.get("partitions")
            found = Hold(str(one.get("verb")), states if isinstance(states, dict) else {}, str(one.get("nodes")), False)
        elif event in (RELEASED, *ENDS):
            found = None
        elif found and (event == "undone" or "files" in one):
            found = replace(found, written=event != "undone")
    return found


def describe_lost(cluster: Cluster, host: Host, nodes: Sequence[NodeState]) -> str:
    """Return what a killed run still keeps jobs from, and the command that ends it; empty if nothing.

    Args:
        nodes: as the controller reports them. After a failover, only their reasons are left of it.
    """
    found, drained = find_hold(cluster, host), sorted(one.name for one in nodes if one.reason == REASON)
    if not (found or drained) or files.is_locked(host, lock_path(cluster)):
        return ""
    what = [f"partition {name}" for name in found.partitions] if found else []
    what += [f"nodes {fold(drained)}"] if drained else []
    verb = "sms apply" if found and found.written else "sms start"
    killed = found.verb if found else "apply"
    return (
        f"no job starts in {one_line(', '.join(what) or 'what it removes', 200)}: `sms {killed}` was killed; "
        f"`{verb} --host {host.name}` ends that"
    )


def release(cluster: Cluster, host: Host, *, written: bool = False, own: bool = False, any_node: bool = False) -> bool:
    """Let jobs start again where a run that failed or was killed kept them from it; return whether one did.

    What was removed since is left out. If the controller does not answer, it is reported, and the next run repeats it.

    Args:
        written: also if that run has written its files.
        own: that run is the caller, which has the lock.
        any_node: also nodes of which only their reason shows it, as after a failover.

    Raises:
        Busy: another run is at work.
    """
    found = find_hold(cluster, host) if cluster.find_role("controller") else None
    if not (found or any_node) or (found and found.written and not written):
        return False
    with nullcontext() if own else _lock(cluster, host):
        found, states = find_hold(cluster, host), found.partitions if found else {}
        try:
            there = query_present(cluster, host).partitions if states else {}
            for name, state in states.items():
                if name in there:
                    update(cluster, host, f"PartitionName={name}", f"State={state}")
            drained = _find_drained(cluster, host) if any_node or (found and found.nodes) else []
            if drained:
                update(cluster, host, f"NodeName={fold(drained)}", "State=RESUME")
            if found:
                note(cluster, host, found.verb, RELEASED)
        except SmsError as error:
            if found:
                what = one_line(", ".join(filter(None, [*map(str, states), found.nodes])), 200)
                cluster.env.progress.warn(f"no job starts in {what} yet: {last_line(error)}")
            return False
    return bool(found or drained)


def _find_drained(cluster: Cluster, host: Host) -> list[str]:
    """Return the nodes that a run has drained before it would have removed them."""
    argv = inside_argv(cluster.site, cluster.services, "sinfo", "--noheader", "--all", "--Node", "--format=%N %E")
    lines = host.run(*argv, timeout=QUERY_S, limit=PRESENT_BYTES).text.splitlines()
    found = (line.partition(" ") for line in lines)
    return sorted({name for name, _, reason in found if reason.strip() == REASON})


def update(cluster: Cluster, host: Host, *words: str, ok: tuple[int, ...] | None = (0,)) -> None:
    """Change something in the running controller, which its next start forgets."""
    argv = inside_argv(cluster.site, cluster.services, "scontrol", "update", *words)
    host.run(*argv, timeout=QUERY_S, ok=ok)
