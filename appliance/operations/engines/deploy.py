"""``sms deploy``: the services of the site on Nomad or Kubernetes, as `sms export` renders them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from appliance.engines.deploy import Bundle
from appliance.errors import Refused, SmsError, Unverified
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.deployed import APPLYING, DEPLOYED, STOPPED, STOPPING, Deployed
from appliance.operations.engines.bundles import (
    current_bundle,
    find_engine,
    find_left,
    need_deployed,
    previous_bundle,
    render_bundle,
)
from appliance.operations.engines.deployed import begin, find_deployed, set_phase
from appliance.operations.engines.engine import Difference, Engine
from appliance.operations.engines.gateway import find_stays, keep_gateway
from appliance.operations.engines.move_lock import lock_moves
from appliance.operations.engines.secret_files import compare_secrets, new_secrets, report_drift
from appliance.operations.engines.waiting import wait, wait_for_end
from appliance.operations.engines.writer import (
    refuse_interrupted,
    refuse_moved,
    refuse_other_writer,
    release_from_engine,
    release_unused,
    take_for_engine,
)
from appliance.operations.image.deliver import Image, trust
from appliance.operations.lease import Leases
from appliance.progress import Progress

RELOAD_S = 30


@dataclass(frozen=True)
class Outcome:
    """A deployment, a rollback or a stop.

    Attributes:
        changes: ``create``, ``change``, ``unchanged`` or ``stop`` by workload.
        created: namespaces and secrets that were created.
        seconds: of all of it; ``waited``: until each changed workload was ready, by name.
        silent: why what stays in the services container does not serve; empty if it does, or nothing stays.
    """

    engine: str
    cluster: str
    generation: int
    digest: str
    changes: dict[str, str]
    created: list[str] = field(default_factory=list)
    seconds: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)
    silent: str = ""


def deploy(cluster: Cluster, host: Host, engine: str, *, timeout_s: float) -> Outcome:
    """Run the services of the site on an engine, and wait until they are ready. A second run changes nothing.

    Args:
        host: admin host with the engine's programs.
        timeout_s: seconds that each group of workloads may take.

    Raises:
        Refused: the services run elsewhere, or the engine cannot run them; or a move is under way or was interrupted.
        Unverified: they are not ready in time.
    """
    with lock_moves(cluster, host, tolerant=True):
        refuse_interrupted(cluster, host)
        return deploy_locked(cluster, host, engine, timeout_s=timeout_s)


def deploy_locked(cluster: Cluster, host: Host, engine: str, *, timeout_s: float) -> Outcome:
    """Do what ``deploy`` does, under the lock of moves."""
    bundle, found = render_bundle(cluster, engine), find_engine(cluster, host, engine)
    record = find_deployed(cluster, host)
    with cluster.env.progress.step("check where the services run"):
        leases = refuse_other_writer(cluster, host, bundle, record)
        refuse_moved(cluster, bundle)
    with cluster.env.progress.step(f"check {engine}"):
        found.check(cluster, bundle)
        report_drift(compare_secrets(cluster, bundle, found), cluster.env.progress)
    with cluster.env.progress.step("compare") as step:
        differences = found.differences(bundle)
        step.detail(", ".join(f"{one.name}: {one.change}" for one in differences if one.change != "unchanged"))
    if left := find_left(cluster, bundle):
        cluster.env.progress.report(f"note: not run while {engine} has the other services: {', '.join(left)}")
    return apply_bundle(cluster, host, found, bundle, differences, Run(record, leases, timeout_s))


@dataclass(frozen=True)
class Run:
    """What a deployment starts from: the record, the leases as queried, and how long it waits."""

    record: Deployed | None
    leases: Leases
    timeout_s: float


def apply_bundle(
    cluster: Cluster, host: Host, engine: Engine, bundle: Bundle, differences: Sequence[Difference], run: Run
) -> Outcome:
    """Take the lease, record the deployment, apply what differs in order, and wait until all is ready; under the lock.

    What only the services container runs is started before: it may have what the engine is to get.

    Raises:
        Refused: an admin host has taken the lease since, or the image is not signed; nothing was changed.
        Unverified: the engine has the services, and one of them is not ready.
    """
    began, progress = cluster.env.clock.monotonic(), cluster.env.progress
    record = _next_record(cluster, host, bundle, run.record)
    take_for_engine(run.leases, bundle.engine, progress)
    begin(cluster, host, bundle, record)
    silent = keep_gateway(cluster, host, bundle)
    if silent:
        progress.report(f"warning: what stays in the services container does not serve: {silent}")
    changed = {one.name for one in differences if one.change != "unchanged"}
    waited: dict[str, float] = {}
    try:
        created = engine.prepare(bundle, new_secrets(cluster, bundle, engine))
        for wave in bundle.waves():
            for item in wave:
                if item.name in changed:
                    with progress.step(f"apply {item.name}"):
                        engine.apply(item)
            items = [one for one in wave if one.kind != "namespace"]
            waited |= wait(engine, bundle, items, clock=cluster.env.clock, progress=progress, timeout_s=run.timeout_s)
    except Refused as error:  # something may have been changed by now
        raise SmsError(error.message, hint=error.hint) from error
    _check_applied(engine, bundle, changed)
    if any(one.name == bundle.controller and one.change == "change" for one in differences):
        _reload_nodes(engine, bundle, progress)
    record = set_phase(cluster, host, record, DEPLOYED)
    return Outcome(
        bundle.engine,
        bundle.cluster,
        record.generation,
        record.digest,
        {one.name: one.change for one in differences},
        created,
        round(cluster.env.clock.monotonic() - began, 1),
        {name: seconds for name, seconds in waited.items() if name in changed},
        silent,
    )


def _check_applied(engine: Engine, bundle: Bundle, changed: Collection[str]) -> None:
    """Check that what runs is what was applied: Nomad reverts a job that was not healthy.

    Raises:
        Unverified: it is not.
    """
    part = replace(bundle, items=tuple(one for one in bundle.items if one.name in changed))
    if other := [one.name for one in engine.differences(part) if one.change != "unchanged"]:
        raise Unverified(
            f"{', '.join(other)} is not what was applied: the engine went back, or somebody has changed it",
            hint="`sms deploy status` shows the difference",
        )


def next_generation(record: Deployed | None, bundle: Bundle) -> int:
    if record is None:
        return 1
    return record.generation + (record.digest != bundle.digest or record.engine != bundle.engine)


def _next_record(cluster: Cluster, host: Host, bundle: Bundle, before: Deployed | None) -> Deployed:
    """Return the record of a deployment that begins; one of the same content has its generation."""
    image = find_signed(cluster, host)
    previous = before.previous if before else ""
    if before and before.engine != bundle.engine:
        previous = ""
    elif before and before.digest != bundle.digest and before.phase != APPLYING:
        previous = before.digest
    elif previous == bundle.digest:
        previous = ""  # what was never ready is not what a rollback goes back to
    return Deployed(
        bundle.engine,
        APPLYING,
        next_generation(before, bundle),
        bundle.digest,
        previous,
        cluster.env.clock.time(),
        host.name,
        bundle.image,
        image.sha256 if image else "",
        image.signer if image else "",
        tuple(sorted({unit for item in bundle.items if item.kind == "service" for unit in item.units})),
    )


def find_signed(cluster: Cluster, host: Host) -> Image | None:
    """Return the current image of a host, verified with the site's keys; None if it has none."""
    path = str(cluster.places.current)
    if not host.works("test", "-f", path):
        return None
    return trust(cluster, host, host.run("readlink", "-f", path).text)


def _reload_nodes(engine: Engine, bundle: Bundle, progress: Progress) -> None:
    """Make nodes fetch the configuration with which the controller has started."""
    item = bundle.find(bundle.controller)
    for argv in item.reload if item else ():
        with progress.step("send the configuration to nodes") as step:
            try:
                result = engine.control(bundle, *argv, timeout=RELOAD_S)
                why = "" if not result.status else result.stderr.decode(errors="replace").strip()[-200:]
            except SmsError as error:
                why = error.message
            if why:
                step.detail(f"failed: {why}; nodes get it later")


def rollback(cluster: Cluster, host: Host, *, timeout_s: float) -> Outcome:
    """Apply what was deployed before; the state is not rolled back.

    Raises:
        Refused: nothing is deployed, or what was before is not known; or as ``deploy``.
    """
    with lock_moves(cluster, host, tolerant=True):
        record = need_deployed(cluster, host)
        bundle = previous_bundle(cluster, host, record)
        engine = find_engine(cluster, host, record.engine)
        refuse_interrupted(cluster, host)
        leases = refuse_other_writer(cluster, host, bundle, record)
        refuse_moved(cluster, bundle)
        cluster.env.progress.report("note: configuration and image are rolled back; the state of the services is not")
        with cluster.env.progress.step("compare"):
            engine.check(cluster, bundle)
            report_drift(compare_secrets(cluster, bundle, engine), cluster.env.progress)
            differences = engine.differences(bundle)
        return apply_bundle(cluster, host, engine, bundle, differences, Run(record, leases, timeout_s))


def stop(cluster: Cluster, host: Host) -> Outcome:
    """Stop the services on their engine in the reverse order. Volumes stay; munge and slurmd of compute nodes run on.

    Raises:
        Refused: nothing is deployed, or another run is at work.
        Unverified: they did not end in time.
    """
    with lock_moves(cluster, host, tolerant=True):
        record = find_deployed(cluster, host)
        if record is None:
            release_unused(cluster, host)
        record = record or need_deployed(cluster, host)
        stays = find_stays(cluster, host, current_bundle(cluster, host, record))
        done = stop_locked(cluster, host, record)
        if not release_from_engine(cluster, host, done.engine):
            cluster.env.progress.report(
                f"note: {done.engine} keeps the lease, as it has the state: `sms migrate --to container` moves it"
            )
        for line in stays.lines:
            cluster.env.progress.report(f"note: {line}")
    return done


def stop_locked(cluster: Cluster, host: Host, record: Deployed) -> Outcome:
    """Stop the services under the lock of moves; the engine keeps the lease.

    Raises:
        Unverified: some did not end in time, as on a client that is off: the engine has been asked to stop all of them.
    """
    began, late = cluster.env.clock.monotonic(), None
    bundle, engine = current_bundle(cluster, host, record), find_engine(cluster, host, record.engine)
    stopped: dict[str, str] = {}
    if record.phase != STOPPED:
        record = set_phase(cluster, host, record, STOPPING)
    for wave in reversed(bundle.waves()):
        items = [one for one in wave if one.kind == "service"]
        part = replace(bundle, items=tuple(items))
        running = {one.name for one in engine.states(part) if one.instances} if items else set()
        for item in items:
            engine.stop(item)
            stopped[item.name] = "stop" if item.name in running else "unchanged"
        if running and not late:
            try:
                wait_for_end(engine, part, cluster.env.clock, cluster.env.progress)
            except Unverified as error:
                late = error
    if late:
        raise late
    record = set_phase(cluster, host, record, STOPPED)
    took = round(cluster.env.clock.monotonic() - began, 1)
    return Outcome(record.engine, bundle.cluster, record.generation, record.digest, stopped, [], took)
