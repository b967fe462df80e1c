"""``sms deploy``: the services of the site on Nomad or Kubernetes, as `sms export` renders them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from appliance.engines.deploy import Bundle, Item
from appliance.engines.render import make_bundle
from appliance.errors import ConfigError, Refused, SmsError, Unverified
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster, read_given
from appliance.operations.deployed import APPLYING, DEPLOYED, STOPPED, STOPPING, Deployed
from appliance.operations.engines.deployed import begin, find_deployed, lock_deployment, read_bundle, set_phase
from appliance.operations.engines.engine import Difference, Engine, SecretState, WorkloadState
from appliance.operations.engines.export import read_input
from appliance.operations.engines.kubernetes import find_kubernetes
from appliance.operations.engines.nomad import find_on_nomad
from appliance.operations.image.deliver import Image, trust
from appliance.operations.lease import Leases, give_lease, query_lease
from appliance.plan.migration.lease import find_holder, find_newest
from appliance.plan.migration.state import left_behind
from appliance.plan.overlay.seed import SECRET_PLACES
from appliance.progress import Progress
from appliance.shared.lease import ENGINE

ENGINES = ("kubernetes", "nomad")
POLL_S = 1.0
LOG_LINES = 8
"""Lines of a log that an error shows."""
RELOAD_S = 30
STEADY_S = 10
"""Seconds without a restart after which a job of compute nodes that was restarted is ready."""
REPORT_S = 15
"""Seconds after which a wait says what it waits for, and between such lines."""


@dataclass(frozen=True)
class Outcome:
    """A deployment, a rollback or a stop.

    Attributes:
        changes: ``create``, ``change``, ``unchanged`` or ``stop`` by workload.
        created: namespaces and secrets that were created.
        seconds: of all of it; ``waited``: until each changed workload was ready, by name.
    """

    engine: str
    cluster: str
    generation: int
    digest: str
    changes: dict[str, str]
    created: list[str] = field(default_factory=list)
    seconds: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)


def find_engine(cluster: Cluster, host: Host, name: str) -> Engine:
    """Return an engine of the site, with the programs of a host.

    Raises:
        ConfigError: there is no such engine, or it is not in the site file.
    """
    if name == "kubernetes":
        return find_kubernetes(cluster.site, host)
    if name == "nomad":
        return find_on_nomad(cluster.site, host)
    raise ConfigError(f"services cannot be deployed to {name}", hint=f"one of {', '.join(ENGINES)}")


def render_bundle(cluster: Cluster, engine: str) -> Bundle:
    """Return what the site file says that an engine is to run."""
    return make_bundle(engine, read_input(cluster, engine))


def find_left(cluster: Cluster, bundle: Bundle) -> dict[str, str]:
    """Return the services of the site that do not run while an engine has the others, and why."""
    has = {unit for item in bundle.items if item.kind == "service" for unit in item.units}
    return dict(left_behind(cluster.services, has))


def deploy(cluster: Cluster, host: Host, engine: str, progress: Progress, *, timeout_s: float) -> Outcome:
    """Run the services of the site on an engine, and wait until they are ready. A second run changes nothing.

    Args:
        host: admin host with the engine's programs.
        timeout_s: seconds that each group of workloads may take.

    Raises:
        Refused: the services run elsewhere, or the engine cannot run them.
        Unverified: they are not ready in time.
    """
    bundle, found = render_bundle(cluster, engine), find_engine(cluster, host, engine)
    with lock_deployment(cluster, host):
        record = find_deployed(cluster, host)
        with progress.step("check where the services run"):
            leases = refuse_other_writer(cluster, host, bundle, record)
        with progress.step(f"check {engine}"):
            found.check(cluster, bundle, progress)
            report_drift(compare_secrets(cluster, bundle, found), progress)
        with progress.step("compare") as step:
            differences = found.differences(bundle)
            step.detail(", ".join(f"{one.name}: {one.change}" for one in differences if one.change != "unchanged"))
        if left := find_left(cluster, bundle):
            progress.report(
                f"note: {', '.join(left)} run only in the services container, and not while {engine} has the others"
            )
        return apply_bundle(cluster, host, found, bundle, differences, Run(record, leases, progress, timeout_s))


@dataclass(frozen=True)
class Run:
    """What a deployment starts from: the record, the leases as queried, and how it reports and waits."""

    record: Deployed | None
    leases: Leases
    progress: Progress
    timeout_s: float


def apply_bundle(
    cluster: Cluster, host: Host, engine: Engine, bundle: Bundle, differences: Sequence[Difference], run: Run
) -> Outcome:
    """Take the lease, record the deployment, apply what differs in order, and wait until all is ready; under the lock.

    Raises:
        Refused: an admin host has taken the lease since; nothing was changed.
    """
    began, progress = time.monotonic(), run.progress
    take_for_engine(run.leases, bundle.engine, progress)
    record = _next_record(cluster, host, bundle, run.record)
    begin(cluster, host, bundle, record, progress)
    changed = {one.name for one in differences if one.change != "unchanged"}
    waited: dict[str, float] = {}
    try:
        created = engine.prepare(bundle, new_secrets(cluster, bundle, engine))
        for wave in bundle.waves():
            for item in wave:
                if item.name in changed:
                    with progress.step(f"apply {item.name}"):
                        engine.apply(item)
            waited |= _wait(engine, bundle, [one for one in wave if one.kind != "namespace"], run)
    except Refused as error:  # something may have been changed by now
        raise SmsError(error.message, hint=error.hint) from error
    _check_applied(engine, bundle, changed)
    if any(one.name == bundle.controller and one.change == "change" for one in differences):
        _reload_nodes(engine, bundle, progress)
    record = set_phase(cluster, host, record, DEPLOYED, progress)
    return Outcome(
        bundle.engine,
        bundle.cluster,
        record.generation,
        record.digest,
        {one.name: one.change for one in differences},
        created,
        round(time.monotonic() - began, 1),
        {name: seconds for name, seconds in waited.items() if name in changed},
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
    if before and before.engine == bundle.engine and before.digest != bundle.digest:
        previous = before.digest
    elif before and before.engine != bundle.engine:
        previous = ""
    return Deployed(
        bundle.engine,
        APPLYING,
        next_generation(before, bundle),
        bundle.digest,
        previous,
        time.time(),
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


def read_secret(cluster: Cluster, name: str) -> bytes:
    """Return a secret file of the site.

    Raises:
        Refused: the site file names none.
    """
    path = getattr(cluster.site.secrets, name)
    if path is None:
        where = f"; a services container that has run has one in {SECRET_PLACES[name][0]}"
        raise Refused(f"the site file has no `secrets.{name}`, which the engine needs", hint=f"set it{where}")
    return read_given([(name, path)])[name]


def compare_secrets(cluster: Cluster, bundle: Bundle, engine: Engine) -> list[str]:
    """Return the secrets on the engine that are not sms's own, and are not those of the site.

    Raises:
        Refused: one is neither on the engine nor in the site file.
    """
    different = []
    for one in engine.secrets(bundle):
        given = getattr(cluster.site.secrets, one.name) is not None
        value = read_secret(cluster, one.name) if given or one.value is None else one.value
        if not one.own and value != one.value:
            different.append(one.where)
    return different


def report_drift(different: Sequence[str], progress: Progress) -> None:
    """Report secrets that are not those of the site."""
    for where in different:
        progress.report(f"warning: {where} is not the secret of the site file, and sms did not create it: it stays")


def new_secrets(cluster: Cluster, bundle: Bundle, engine: Engine) -> list[tuple[SecretState, bytes]]:
    """Return the secrets to write: those that are missing, and those of sms that are not those of the site any more."""
    found = []
    for one in engine.secrets(bundle):
        if one.value is None or (one.own and getattr(cluster.site.secrets, one.name) is not None):
            value = read_secret(cluster, one.name)
            if value != one.value:
                found.append((one, value))
    return found


def take_for_engine(leases: Leases, engine: str, progress: Progress) -> None:
    """Give the lease of the admin hosts to an engine, unless it has that already.

    Args:
        leases: as queried; nobody else had it then.

    Raises:
        Refused: another run has changed it since.
    """
    holder, current = f"{ENGINE}{engine}", find_holder(leases.views)
    if current and current.holder == holder:
        leases.adopt(current)
        return
    floors = (view.lease.floor for view in leases.views.values() if view.lease)
    with progress.step("take the lease") as step:
        newest = find_newest(leases.views) or holder
        lease = give_lease(leases, holder, 1 + max(leases.top, *floors), newest)
        step.detail(f"generation {lease.generation}")
    for line in leases.notes:
        progress.report(line)


def release_from_engine(cluster: Cluster, host: Host, engine: str, progress: Progress) -> bool:
    """Release the lease that a deployment gave to an engine; return whether the engine has it no more.

    One that a move gave to it stays: no admin host has that state.

    Raises:
        Refused: another run changes it.
    """
    leases = Leases(host, cluster, tolerant=True)
    current = find_holder(leases.query())
    if current is None or current.engine != engine:
        return True
    if not current.last:
        return False
    leases.adopt(current)
    with progress.step("release the lease"):
        last = "" if current.last.startswith(ENGINE) else current.last
        give_lease(leases, None, 1 + leases.top, last)
    for line in leases.notes:
        progress.report(line)
    return True


def refuse_other_writer(cluster: Cluster, host: Host, bundle: Bundle, record: Deployed | None) -> Leases:
    """Check that no admin host and no other engine has the services, whether they run or not; return the leases.

    Raises:
        Refused: one has, or the host that has the lease cannot be queried.
    """
    engine = bundle.engine
    if record and record.has_services and record.engine != engine:
        raise Refused(
            f"{record.engine} has the services of {cluster.site.cluster}",
            hint=f"`sms deploy stop` stops them there; `sms migrate --to {engine}` moves them with their state",
        )
    leases = Leases(host, cluster, tolerant=True)
    views = leases.query()
    moves = f"`sms migrate --to {engine}` moves them with their state"
    for name, view in views.items():
        if view.runs:
            raise Refused(
                f"the services container runs on {name}", hint=f"{moves}; `sms stop --host {name}` stops them"
            )
        if view.stuck:
            raise Refused(f"{name} does not answer in time, and may run the services container", hint="check that host")
    holder = find_holder(views)
    if holder is None or holder.engine == engine:
        return leases
    if holder.engine:
        raise Refused(f"{holder.engine} has the services and their state", hint=moves)
    if holder.holder in leases.unreachable:
        raise Refused(
            f"{holder.holder} cannot be queried and has the lease: its services container may run the services",
            hint="switch it on; if it has failed: `sms failover` to another host",
        )
    raise Refused(
        f"{holder.holder} has the lease: its services container starts again with the host",
        hint=f"{moves}; `sms stop --host {holder.holder}` gives them up",
    )


def _wait(engine: Engine, bundle: Bundle, items: Sequence[Item], run: Run) -> dict[str, float]:
    """Wait until workloads are ready; return the seconds of each.

    Raises:
        Unverified: one is not in time, with the last lines of its log.
    """
    began, done = time.monotonic(), dict[str, float]()
    said, said_at, restarts = "", began, Restarts()
    names = [one.name for one in items]
    if not names:
        return {}
    part = Bundle(bundle.engine, bundle.cluster, bundle.namespace, bundle.image, bundle.controller, tuple(items))
    nodes = any(one.kind == "node" for one in items)
    with run.progress.step(f"wait for {', '.join(names)}") as step:
        while True:
            states = wait_silently(engine, part, probe=nodes)  # no check of the engine asks those of nodes
            states = [restarts.judge(state) for state in states]
            for state in states:
                if state.ready:
                    done.setdefault(state.name, round(time.monotonic() - began, 1))
                else:
                    done.pop(state.name, None)
                    engine.nudge(state)
            waiting = [state for state in states if not state.ready]
            if not waiting:
                step.detail("")
                return done
            why = "; ".join(f"{state.name}: {state.why}" for state in waiting)[:200]
            step.detail(why)
            if why != said and time.monotonic() - said_at > REPORT_S:  # without a terminal, no step shows its detail
                said, said_at = why, time.monotonic()
                run.progress.report(f"note: not ready after {said_at - began:.0f} s: {why}")
            if time.monotonic() - began > run.timeout_s:
                raise not_ready(engine, bundle, waiting, run.timeout_s)
            time.sleep(POLL_S)


@dataclass
class Restarts:
    """The restarts of jobs on compute nodes while one waits: no check of the engine holds those back.

    Two slurmd on one node stop each other in turn, and each of them answers now and then.
    """

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)

    def judge(self, state: WorkloadState) -> WorkloadState:
        """Return the state, which is not ready for a while after a restart that was seen."""
        if state.kind != "node":
            return state
        for one in state.instances:
            if one.restarts > self.counts.setdefault((state.name, one.name), one.restarts):
                self.counts[state.name, one.name] = one.restarts
                self.at[state.name] = time.monotonic()
        if state.name not in self.at or time.monotonic() - self.at[state.name] > STEADY_S or not state.ready:
            return state
        return replace(state, problem="it was restarted just now")


def wait_silently(engine: Engine, bundle: Bundle, *, probe: bool = False) -> list[WorkloadState]:
    """Return the states; an engine that does not answer for a moment is not an error while one waits.

    Args:
        probe: whether services are probed once all are ready.
    """
    try:
        states = engine.states(bundle)
        return engine.probe(bundle, states) if probe and all(state.ready for state in states) else states
    except Unreachable as error:
        return [WorkloadState(one.name, one.kind, False, 1, problem=error.message) for one in bundle.items]


def not_ready(engine: Engine, bundle: Bundle, waiting: Sequence[WorkloadState], seconds: float) -> Unverified:
    """Return the error of workloads that are not ready in time."""
    lines = []
    for state in waiting:
        lines.append(f"{state.name} is not ready after {seconds:g} s: {state.why}")
        try:
            lines += [f"    {line}" for line in engine.log(bundle, state, LOG_LINES).splitlines()[-LOG_LINES:]]
        except SmsError:
            lines.append("    its log cannot be read")
    return Unverified(
        "\n".join(lines),
        hint="`sms deploy status` shows more; `sms deploy` goes on, `sms deploy rollback` goes back",
    )


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


def rollback(cluster: Cluster, host: Host, progress: Progress, *, timeout_s: float) -> Outcome:
    """Apply what was deployed before; the state is not rolled back.

    Raises:
        Refused: nothing is deployed, or what was before is not known.
    """
    with lock_deployment(cluster, host):
        record = need_deployed(cluster, host)
        bundle = previous_bundle(cluster, host, record)
        engine = find_engine(cluster, host, record.engine)
        leases = refuse_other_writer(cluster, host, bundle, record)
        progress.report("note: configuration and image are rolled back; the state of the services is not")
        with progress.step("compare"):
            engine.check(cluster, bundle, progress)
            report_drift(compare_secrets(cluster, bundle, engine), progress)
            differences = engine.differences(bundle)
        return apply_bundle(cluster, host, engine, bundle, differences, Run(record, leases, progress, timeout_s))


def previous_bundle(cluster: Cluster, host: Host, record: Deployed) -> Bundle:
    """Return what was deployed before.

    Raises:
        Refused: nothing was, or it is not known.
    """
    bundle = read_bundle(cluster, host, record.previous)
    if bundle is None:
        raise Refused(
            "what was deployed before is not known" if record.previous else "nothing was deployed before",
            hint="change the site file, or check out an earlier one, and `sms deploy`",
        )
    return bundle


def need_deployed(cluster: Cluster, host: Host) -> Deployed:
    """Return the record.

    Raises:
        Refused: nothing is deployed.
    """
    record = find_deployed(cluster, host)
    if record is None:
        raise Refused(
            f"the services of {cluster.site.cluster} are on no engine", hint="`sms deploy --engine ENGINE` deploys them"
        )
    return record


def current_bundle(cluster: Cluster, host: Host, record: Deployed) -> Bundle:
    """Return what is deployed: as it was kept, else as the site file has it now."""
    return read_bundle(cluster, host, record.digest) or render_bundle(cluster, record.engine)


def stop(cluster: Cluster, host: Host, progress: Progress, *, keep_lease: bool = False) -> Outcome:
    """Stop the services on their engine in the reverse order. Volumes stay; munge and slurmd of compute nodes run on.

    Args:
        keep_lease: of a move, which gives it to the target.

    Raises:
        Refused: nothing is deployed.
        Unverified: they did not end in time.
    """
    began = time.monotonic()
    with lock_deployment(cluster, host):
        record = find_deployed(cluster, host)
        if record is None and not keep_lease:
            _release_unused(cluster, host, progress)
        record = record or need_deployed(cluster, host)
        bundle, engine = current_bundle(cluster, host, record), find_engine(cluster, host, record.engine)
        stopped: dict[str, str] = {}
        if record.phase != STOPPED:
            record = set_phase(cluster, host, record, STOPPING, progress)
        for wave in reversed(bundle.waves()):
            items = [one for one in wave if one.kind == "service"]
            part = replace(bundle, items=tuple(items))
            running = {one.name for one in engine.states(part) if one.instances} if items else set()
            for item in items:
                engine.stop(item)
                stopped[item.name] = "stop" if item.name in running else "unchanged"
            if running:
                _wait_for_end(engine, part, progress)
        record = set_phase(cluster, host, record, STOPPED, progress)
        if not keep_lease and not release_from_engine(cluster, host, record.engine, progress):
            progress.report(
                f"note: {record.engine} keeps the lease, as it has the state: `sms migrate --to container` moves it"
            )
    return Outcome(
        record.engine, bundle.cluster, record.generation, record.digest, stopped, [], round(time.monotonic() - began, 1)
    )


def _release_unused(cluster: Cluster, host: Host, progress: Progress) -> None:
    """Release the lease of a deployment that was killed before it could record anything."""
    lease = query_lease(host, cluster)
    if lease.engine:
        release_from_engine(cluster, host, lease.engine, progress)


def _wait_for_end(engine: Engine, bundle: Bundle, progress: Progress) -> None:
    limit = max(one.stop_s for one in bundle.items) + 30
    deadline = time.monotonic() + limit
    with progress.step(f"stop {', '.join(one.name for one in bundle.items)}"):
        while left := [one.name for state in wait_silently(engine, bundle) for one in state.instances]:
            if time.monotonic() > deadline:
                raise Unverified(
                    f"{', '.join(left)} did not end within {limit} s", hint="`sms deploy stop` waits again"
                )
            time.sleep(POLL_S)
