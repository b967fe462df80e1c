"""Dry runs of ``sms deploy``: what a deployment, a rollback or a stop would do."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.engines.deploy import Bundle
from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.engines.bundles import (
    current_bundle,
    find_engine,
    find_left,
    need_deployed,
    previous_bundle,
    render_bundle,
)
from appliance.operations.engines.deploy import next_generation
from appliance.operations.engines.deployed import find_deployed
from appliance.operations.engines.engine import Difference
from appliance.operations.engines.gateway import Stays, find_stays
from appliance.operations.engines.secret_files import compare_secrets, report_drift
from appliance.operations.engines.writer import refuse_interrupted, refuse_moved, refuse_other_writer


@dataclass(frozen=True)
class DeployPlan:
    """What a deployment would do: ``create``, ``change`` or ``unchanged`` for each workload.

    Attributes:
        refusal: why it would be refused, and ``hint``; then differences may be missing.
        left: services that do not run meanwhile, and why.
    """

    engine: str
    cluster: str
    generation: int
    differences: tuple[Difference, ...]
    refusal: str = ""
    hint: str = ""
    left: dict[str, str] = field(default_factory=dict)

    @property
    def unchanged(self) -> bool:
        """Whether it would change nothing."""
        return not self.refusal and all(one.change == "unchanged" for one in self.differences)


def plan_deploy(cluster: Cluster, host: Host, engine: str, *, before: Bundle | None = None) -> DeployPlan:
    """Return what ``deploy`` would do; nothing is changed. ``before``: what was deployed before, for a rollback."""
    bundle, found = before or render_bundle(cluster, engine), find_engine(cluster, host, engine)
    record = find_deployed(cluster, host)
    refusal, hint = "", ""
    try:
        refuse_interrupted(cluster, host)
        refuse_other_writer(cluster, host, bundle, record)
        refuse_moved(cluster, bundle)
        found.check(cluster, bundle, send=False)
        report_drift(compare_secrets(cluster, bundle, found), cluster.env.progress)
    except Refused as error:
        refusal, hint = error.message, error.hint
    try:
        differences = found.differences(bundle)
    except Refused:
        if not refusal:
            raise
        differences = []
    generation = next_generation(record, bundle)
    left = find_left(cluster, bundle)
    return DeployPlan(engine, cluster.site.cluster, generation, tuple(differences), refusal, hint, left)


def plan_rollback(cluster: Cluster, host: Host) -> DeployPlan:
    """Return what ``rollback`` would do; nothing is changed.

    Raises:
        Refused: as ``rollback``.
    """
    record = need_deployed(cluster, host)
    before = previous_bundle(cluster, host, record)
    return plan_deploy(cluster, host, record.engine, before=before)


@dataclass(frozen=True)
class StopPlan:
    """What a stop would do: ``stop`` or ``unchanged`` for each workload, in its order.

    ``stays``: what it leaves running.
    """

    engine: str
    changes: dict[str, str]
    stays: Stays


def plan_stop(cluster: Cluster, host: Host) -> StopPlan:
    """Return what ``stop`` would do; nothing is changed.

    Raises:
        Refused: nothing is deployed.
    """
    record = need_deployed(cluster, host)
    bundle, engine = current_bundle(cluster, host, record), find_engine(cluster, host, record.engine)
    running = {one.name for one in engine.states(bundle) if one.instances}
    order = [one.name for wave in reversed(bundle.waves()) for one in wave if one.kind == "service"]
    changes = {name: "stop" if name in running else "unchanged" for name in order}
    return StopPlan(record.engine, changes, find_stays(cluster, host, bundle))
