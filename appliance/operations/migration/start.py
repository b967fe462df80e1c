"""Steps of a migration: the instance is started isolated on the target; its services and jobs are checked."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.errors import SmsError
from appliance.host.base import CommandError
from appliance.operations.migration.agents import QUICK_S
from appliance.operations.migration.state import Migration
from appliance.operations.preflight import check_instance
from appliance.plan.machine import PROBE, inside_argv, inside_second, start_argv
from appliance.plan.migration.here import GATE, gate_rules
from appliance.plan.migration.move import missing_jobs, needs_outside, stream_ports
from appliance.plan.services.jobs import JOBS, JOBS_BYTES, read_jobs
from appliance.plan.services.probes import read_probe

WAIT_S = 60.0
"""Seconds that the services may take to answer on the target before the migration fails."""
SETTLE_S = 10.0
"""Seconds that services with external probes may take to answer after the switch."""
GATE_S = 5.0
"""Seconds that services without state may take to answer after a switch until it is undone."""
SEED_S = 150.0
"""Timeout in seconds of the command that writes the site's files into the copy."""
START_S = 90.0
"""Timeout in seconds of the start of an instance."""


def list_jobs(migration: Migration) -> dict[str, str]:
    """Return the states of the jobs known to the source's controller; empty, with a note, if it does not answer."""
    cluster = migration.cluster
    if not cluster.find_role("controller"):
        return {}
    try:
        return read_jobs(
            migration.source.host.run(*inside_argv(cluster.site, cluster.services, *JOBS), limit=JOBS_BYTES).text
        )
    except CommandError as error:
        # It may be the reason for this migration, as it is for one back.
        migration.result.notes.append(f"jobs are not compared: {error.message.splitlines()[-1].strip()}")
        return {}


def start_isolated(migration: Migration, jobs: dict[str, str]) -> None:
    """Start the instance isolated on the target, and probe every service that can answer there.

    Args:
        jobs: their states on the source.

    Raises:
        SmsError: a service does not answer, or the controller does not know a job.
    """
    began = migration.cluster.env.clock.monotonic()
    cluster, target, result = migration.cluster, migration.target, migration.result
    with migration.cluster.env.progress.step(f"start isolated on {target.name}") as step:
        here = migration.inspected.here
        if here:
            step.detail("writing the site's files")
            target.send("seed", here.seed[1], argv=list(here.seed[0]))
            target.receive("seeded", patience_s=SEED_S)
        launch(migration)
        probe_isolated(migration, [one.name for one in cluster.services])
        compare_jobs(migration, jobs)
        result.measured("start", migration.cluster.env.clock.monotonic() - began)
        step.detail(f"{len(result.services)} services answer; {result.jobs} jobs known")


def launch(migration: Migration) -> None:
    """Start the instance isolated on the target."""
    inspected, target = migration.inspected, migration.target
    second = inspected.here.second if inspected.here else None
    argv = start_argv(migration.cluster.site, inspected.on_target, migration.image.path, isolated=True, second=second)
    target.send("start", argv=list(argv))
    reply, _ = target.receive("started", patience_s=START_S)
    migration.started, migration.unchecked = True, int(reply.get("pid", 0))


def probe_isolated(migration: Migration, names: Sequence[str]) -> None:
    """Probe those of some services that can answer without a network.

    Raises:
        SmsError: one does not answer, or the instance is not confined.
    """
    external, here = needs_outside(migration.cluster.services), migration.inspected.here
    inside = [name for name in names if name not in external]
    with migration.cluster.env.pool(1) as pool:
        confined = pool.submit(_check_confined, migration)
        failures = _probe(migration, inside, here.wait_s if here else WAIT_S)
        confined.result()
    if failures:
        raise SmsError(failures)


def _check_confined(migration: Migration) -> None:
    """Check how the instance on the target is confined, unless that was done."""
    inspected, cluster = migration.inspected, migration.cluster
    pid, migration.unchecked = migration.unchecked, 0
    if pid:
        here = inspected.here
        join = inside_second(here.second, cluster.services) if here else inside_argv(cluster.site, cluster.services)
        check_instance(cluster, inspected.target, pid, join, inspected.on_target)


def compare_jobs(migration: Migration, jobs: dict[str, str]) -> None:
    """Check that the controller on the target knows the jobs.

    Raises:
        SmsError: it does not know one.
    """
    migration.jobs = jobs
    if jobs and (controller := migration.cluster.find_role("controller")):
        if lost := _lost_jobs(migration):
            raise SmsError(
                f"the controller on {migration.target.name} lost or requeued job {', '.join(lost[:10])}",
                hint=f"see the log of {controller.name} there: sms journal",
            )
        migration.result.jobs = len(jobs)


def check_services(migration: Migration) -> str:
    """Probe every service again after the switch; return the messages about those that do not answer."""
    with migration.cluster.env.progress.step("probe every service"):
        failures = _probe(migration, [service.name for service in migration.cluster.services], SETTLE_S)
        # A controller that does not answer cannot report its jobs; the container then migrates back.
        if migration.jobs and not failures and (lost := _lost_jobs(migration)):
            note = f"job {', '.join(lost[:10])} was lost or requeued; see `scontrol show job`"
            migration.result.notes.append(note)
    return failures


def close_gate(migration: Migration) -> None:
    """Keep services with state from being reached on the target, and from reaching others, after the switch.

    Raises:
        SmsError: it failed.
    """
    if not _gated_by(migration):
        return
    live = [service for service in migration.cluster.services if service.live]
    rules = gate_rules(stream_ports(live))
    for argv in (("nft", rules), ("nft", "list", "table", "inet", GATE)):
        migration.target.send("ask", argv=list(argv))
        _, output = migration.target.receive("told", patience_s=QUICK_S)
    if GATE.encode() not in output:
        raise SmsError(f"the services with state on {migration.target.name} cannot be isolated by nft")
    migration.gated = True


def open_gate(migration: Migration) -> None:
    """Probe what the switch can have broken, and then let services with state be reached.

    Raises:
        SmsError: a service does not answer; nothing that others rely on has been received.
    """
    if not migration.gated:
        return
    with migration.cluster.env.progress.step("probe the way out") as step:
        began = migration.cluster.env.clock.monotonic()
        if failures := _probe(migration, _gated_by(migration), GATE_S):
            raise SmsError(failures)
        migration.gated = False  # from here on
        migration.target.send("ask", argv=["nft", "delete", "table", "inet", GATE])
        migration.target.receive("told", patience_s=QUICK_S)
        now = migration.cluster.env.clock.monotonic()
        migration.result.measured("start", migration.result.parts["start"] + now - began)
        migration.count_outage(now, now, live=False)
        step.detail("services with state can be reached")


def _gated_by(migration: Migration) -> list[str]:
    """Return the services without state whose probe needs another machine."""
    external = needs_outside(migration.cluster.services)
    return [service.name for service in migration.cluster.services if service.live and service.name in external]


def _probe(migration: Migration, names: Sequence[str], wait_s: float) -> str:
    """Probe services on the target until they answer; return the messages about those that do not."""
    target, services = migration.target, migration.result.services
    target.send("probe", argv=[PROBE, "--wait", f"{wait_s:g}", *names], limit_s=wait_s + 30)
    _, output = target.receive("probed", patience_s=wait_s + 60)
    failed = []
    for answer in filter(None, map(read_probe, output.decode(errors="replace").splitlines())):
        if answer.ok:
            services[answer.name] = answer.after_s
        else:
            failed.append(f"{answer.name} does not answer on {target.name}: {answer.detail}")
    if failed or not set(names) <= set(services):
        return "\n".join(failed) or f"the services on {target.name} cannot be probed"
    return ""


def _lost_jobs(migration: Migration) -> list[str]:
    """Return the jobs that the controller on the target has lost or requeued, with their states."""
    migration.target.send("ask", argv=list(JOBS))
    _, output = migration.target.receive("told", patience_s=QUICK_S)
    known = read_jobs(output.decode(errors="replace"))
    lost = missing_jobs(migration.jobs, known)
    return [f"{job} ({migration.jobs[job]} before, {known.get(job, 'unknown')} now)" for job in lost]
