"""``sms deploy drain``: a machine of the cluster is drained in Slurm first, and only then on its engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.engines.deploy import Bundle
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.deployed import STOPPED
from appliance.operations.engines.bundles import current_bundle, find_engine, need_deployed
from appliance.operations.engines.engine import Engine
from appliance.operations.engines.move_lock import lock_moves
from appliance.operations.env import Clock
from appliance.progress import Progress
from appliance.text import one_line

REASON = "sms deploy drain"
"""Slurm's reason of the drain; an undo resumes only nodes that have it."""
POLL_S = 2.0
UNDO_S = 180


@dataclass(frozen=True)
class Drained:
    """What was done with a machine.

    Attributes:
        slurm: state of the node in Slurm; empty if Slurm does not have it.
        engine: what the engine did; empty if it does not have the machine.
        waited_s: seconds until its jobs had ended.
    """

    node: str
    undone: bool
    slurm: str
    engine: list[str] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass(frozen=True)
class DrainPlan:
    """What a drain, or its undo, would do with a machine.

    Attributes:
        slurm: state of the node in Slurm; empty if Slurm does not have it, or does not answer.
        jobs: ids of the jobs that a drain would wait for.
        steps: what would be done, in this order.
    """

    node: str
    undo: bool
    slurm: str
    jobs: tuple[str, ...]
    steps: tuple[str, ...]


@dataclass(frozen=True)
class SlurmNode:
    """A node as Slurm has it."""

    state: str
    reason: str


def drain(cluster: Cluster, host: Host, node: str, *, timeout_s: float) -> Drained:
    """Drain a machine: no new job, wait for its jobs, then stop what the engine runs on it.

    Args:
        timeout_s: seconds that its jobs may take; then it stays drained in Slurm, and the engine is not touched.

    Raises:
        Refused: neither Slurm nor the engine has the machine, or nothing is deployed.
        SmsError: its jobs did not end in time.
    """
    with lock_moves(cluster, host, tolerant=True):
        bundle, engine = _running(cluster, host)
        known, here = find_slurm_node(engine, bundle, node), engine.has_node(node)
        _need_either(known, here, node, bundle)
        waited = 0.0
        if known is not None:
            with cluster.env.progress.step(f"drain {node} in Slurm"):
                if "drain" not in known.state:
                    _slurm(engine, bundle, "scontrol", "update", f"nodename={node}", "state=drain", f"reason={REASON}")
            waited = _wait_for_jobs(engine, bundle, node, cluster.env.clock, cluster.env.progress, timeout_s)
        done: list[str] = []
        if here:
            with cluster.env.progress.step(f"drain {node} on {bundle.engine}"):
                done = engine.drain_node(bundle, node, timeout_s)
        after = known and _state_after(engine, bundle, node, known)
        return Drained(node, False, after or "", done, waited)


def plan_drain(cluster: Cluster, host: Host, node: str) -> DrainPlan:
    """Return what ``drain`` would do; nothing is changed.

    Raises:
        Refused: as ``drain``.
        SmsError: the controller does not answer.
    """
    bundle, engine = _running(cluster, host)
    known, here = find_slurm_node(engine, bundle, node), engine.has_node(node)
    _need_either(known, here, node, bundle)
    steps, jobs = [], []
    if known is not None:
        jobs = _jobs(engine, bundle, node)
        if "drain" not in known.state:
            steps.append(f"drain {node} in Slurm")
        if jobs:
            steps.append(f"wait for {len(jobs)} jobs: {_some(jobs)}")
    if here:
        steps.append(f"drain {node} on {bundle.engine}")
        steps += [
            f"stop {one.name} there"
            for one in engine.states(bundle)
            if any(each.node == node for each in one.instances)
        ]
    return DrainPlan(node, False, known.state if known else "", tuple(jobs), tuple(steps))


def plan_undo(cluster: Cluster, host: Host, node: str) -> DrainPlan:
    """Return what ``undo`` would do; nothing is changed.

    Raises:
        Refused: as ``undo``.
        SmsError: the controller does not answer, and the engine does not have the machine.
    """
    bundle, engine = _running(cluster, host)
    here = engine.has_node(node)
    steps = [f"let {bundle.engine} use {node}"] if here else []
    try:
        known = find_slurm_node(engine, bundle, node)
    except SmsError:
        if not here:
            raise
        steps += ["wait for the controller, which does not answer", f"resume {node} in Slurm if this drained it"]
        return DrainPlan(node, True, "", (), tuple(steps))
    _need_either(known, here, node, bundle)
    if known and "drain" in known.state:
        mine = known.reason == REASON
        steps.append(f"resume {node} in Slurm" if mine else f"leave it drained in Slurm, for {known.reason}")
    return DrainPlan(node, True, known.state if known else "", (), tuple(steps))


def _state_after(engine: Engine, bundle: Bundle, node: str, before: SlurmNode) -> str:
    """Return the node's state in Slurm; the one before if the controller was on the drained machine."""
    try:
        found = find_slurm_node(engine, bundle, node)
    except SmsError:
        found = None
    return found.state if found else before.state


def undo(cluster: Cluster, host: Host, node: str) -> Drained:
    """Let the engine, and then Slurm, use a machine again.

    Raises:
        Refused: neither has it, or nothing is deployed.
        SmsError: the controller does not answer in time.
    """
    with lock_moves(cluster, host, tolerant=True):
        bundle, engine = _running(cluster, host)
        here = engine.has_node(node)
        done = []
        if here:
            with cluster.env.progress.step(f"let {bundle.engine} use {node}"):
                engine.undo_drain(node)
                done.append(f"{node} is used again")
        # It may have been the machine of the controller.
        with cluster.env.progress.step("wait for the controller"):
            deadline = cluster.env.clock.monotonic() + UNDO_S
            while True:
                try:
                    known = find_slurm_node(engine, bundle, node)
                    break
                except SmsError:
                    if cluster.env.clock.monotonic() > deadline:
                        raise
                    cluster.env.clock.sleep(POLL_S)
        _need_either(known, here, node, bundle)
        if known is None:
            return Drained(node, True, "", done)
        if "drain" in known.state:
            if known.reason != REASON:
                cluster.env.progress.report(f"note: {node} stays drained in Slurm, for another reason: {known.reason}")
                return Drained(node, True, known.state, done)
            with cluster.env.progress.step(f"resume {node} in Slurm"):
                _slurm(engine, bundle, "scontrol", "update", f"nodename={node}", "state=resume")
                known = find_slurm_node(engine, bundle, node) or known
        return Drained(node, True, known.state, done)


def _running(cluster: Cluster, host: Host) -> tuple[Bundle, Engine]:
    record = need_deployed(cluster, host)
    if record.phase == STOPPED:
        raise Refused(
            f"the services on {record.engine} are stopped: Slurm cannot drain a node",
            hint=f"`sms deploy --engine {record.engine}` starts them",
        )
    return current_bundle(cluster, host, record), find_engine(cluster, host, record.engine)


def _need_either(known: SlurmNode | None, here: bool, node: str, bundle: Bundle) -> None:
    if known is None and not here:
        raise Refused(
            f"neither Slurm nor {bundle.engine} has a machine {node}",
            hint="`sinfo -N` lists nodes; `kubectl get nodes` or `nomad node status` the machines of the engine",
        )


def find_slurm_node(engine: Engine, bundle: Bundle, node: str) -> SlurmNode | None:
    """Return a node as Slurm has it; None if Slurm does not have it.

    Raises:
        SmsError: the controller does not answer.
    """
    if not bundle.controller:
        return None
    text = _slurm(engine, bundle, "sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%N|%T|%E")
    for line in text.splitlines():
        name, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        if name.strip() == node:
            return SlurmNode(state.strip().lower(), reason.strip())
    return None


def _slurm(engine: Engine, bundle: Bundle, *argv: str) -> str:
    """Return what a command of Slurm prints.

    Raises:
        SmsError: it failed.
    """
    result = engine.control(bundle, *argv)
    if result.status:
        why = one_line(result.stderr.decode(errors="replace") or result.text, 200)
        raise SmsError(f"`{' '.join(argv[:3])}` failed: {why}", hint="`sms deploy status` shows whether it answers")
    return result.stdout.decode(errors="replace")


def _wait_for_jobs(
    engine: Engine, bundle: Bundle, node: str, clock: Clock, progress: Progress, timeout_s: float
) -> float:
    """Wait until no job is on a node; return the seconds.

    Raises:
        SmsError: they did not end in time.
    """
    began = clock.monotonic()
    with progress.step(f"wait for the jobs of {node}") as step:
        while jobs := _jobs(engine, bundle, node):
            step.detail(f"{len(jobs)}: {_some(jobs)}")
            if clock.monotonic() - began > timeout_s:
                raise SmsError(
                    f"{len(jobs)} jobs still run on {node} after {timeout_s:g} s: {_some(jobs)}; "
                    f"it is drained in Slurm, {bundle.engine} was not touched",
                    hint=f"`sms deploy drain {node}` waits again; `sms deploy drain {node} --undo` undoes it",
                )
            clock.sleep(POLL_S)
    return round(clock.monotonic() - began, 1)


def _jobs(engine: Engine, bundle: Bundle, node: str) -> list[str]:
    """Return the ids of the jobs on a node."""
    listed = ("squeue", "--noheader", f"--nodelist={node}", "--states=R,CF,CG,S,ST,SO", "--format=%A")
    return sorted({*_slurm(engine, bundle, *listed).split()}, key=lambda one: (len(one), one))


def _some(jobs: Sequence[str]) -> str:
    return ", ".join(jobs[:8]) + ", ..." * (len(jobs) > 8)
