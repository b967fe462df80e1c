"""``sms deploy status``: what runs on the engine, whether it answers, and whether it is what was deployed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from appliance.engines.deploy import Bundle
from appliance.errors import ConfigError, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.deployed import APPLYING, STOPPED, Deployed
from appliance.operations.engines.bundles import find_engine, need_deployed, render_bundle
from appliance.operations.engines.deployed import read_bundle
from appliance.operations.engines.engine import Difference, Engine, WorkloadState
from appliance.operations.engines.gateway import missing_gateway
from appliance.operations.engines.secret_files import new_secrets
from appliance.operations.lease import query_lease
from appliance.shared.state_lease import LEASE_FILE, parse_state_lease


@dataclass(frozen=True)
class DeployStatus:
    """The services on an engine.

    Attributes:
        record: what is deployed.
        healthy: whether all workloads are ready, or all are stopped by ``sms deploy stop``, and nothing has drifted.
        drift: what differs from what was deployed: changed beside sms.
        pending: workloads that another `sms deploy` would change, because the site file was changed.
        lease: generation and holder of the lease on the state volume, if it has one.
        warnings: what is worth a look.
    """

    cluster: str
    record: Deployed
    healthy: bool
    workloads: tuple[WorkloadState, ...] = ()
    drift: tuple[Difference, ...] = ()
    pending: tuple[str, ...] = ()
    lease: str = ""
    warnings: tuple[str, ...] = ()


def deploy_status(cluster: Cluster, host: Host, *, record: Deployed | None = None) -> DeployStatus:
    """Collect the status; nothing is changed.

    Raises:
        Refused: nothing is deployed.
        SmsError: the engine does not answer.
    """
    record = record or need_deployed(cluster, host)
    engine = find_engine(cluster, host, record.engine)
    warnings: list[str] = []
    bundle, pending = _compare_site(cluster, host, record, warnings)
    states = engine.probe(bundle, engine.states(bundle))
    stopped = record.phase == STOPPED
    if stopped:  # as it is to be
        states = [replace(one, problem="") if one.kind == "service" else one for one in states]
        warnings += _elsewhere(cluster, host, record)
    drift = () if stopped else tuple(one for one in engine.differences(bundle) if one.change != "unchanged")
    if record.phase == APPLYING:
        warnings.append("a deployment is under way or was interrupted; `sms deploy` goes on")
    if stopped:
        running = [state.name for state in states if state.kind == "service" and state.instances]
        warnings += [f"`sms deploy stop` has stopped {name}, but it runs" for name in running]
        healthy = not running
    else:
        healthy = all(state.ready for state in states) and not drift
        warnings += [f"{state.name}: {state.why}" for state in states if not state.ready]
        warnings += [f"{one.name} was changed beside sms; `sms deploy` makes it as it was" for one in drift]
    warnings += [
        f"{name} is drained on {record.engine}: nothing starts there; `sms deploy drain {name} --undo` uses it again"
        for name in engine.drained()
    ]
    warnings += _image_warnings(record, states)
    warnings += [] if stopped else _secret_warnings(cluster, engine, bundle)
    warnings += [] if stopped else missing_gateway(cluster, host, bundle)
    lease = "" if stopped else read_state_lease(engine, bundle)
    return DeployStatus(cluster.site.cluster, record, healthy, tuple(states), drift, pending, lease, tuple(warnings))


def _elsewhere(cluster: Cluster, host: Host, record: Deployed) -> list[str]:
    """Return who has the services that are stopped on this engine."""
    lease = query_lease(host, cluster)
    if lease.engine == record.engine:
        return [f"{record.engine} still has the state: `sms deploy` starts the services again"]
    if lease.engine:
        return [f"{lease.engine} has the services of {cluster.site.cluster} by now"]
    if lease.holder:
        return [f"the services container of {lease.holder} has the services of {cluster.site.cluster}: `sms status`"]
    return []


def engine_status(cluster: Cluster, host: Host, record: Deployed) -> DeployStatus:
    """Return the status of the engine that has the services; unhealthy if it does not answer."""
    try:
        return deploy_status(cluster, host, record=record)
    except SmsError as error:
        return DeployStatus(cluster.site.cluster, record, False, warnings=(error.message,))


def _compare_site(
    cluster: Cluster, host: Host, record: Deployed, warnings: list[str]
) -> tuple[Bundle, tuple[str, ...]]:
    """Return what was deployed, and the workloads of which the site file has something else by now."""
    kept = read_bundle(cluster, host, record.digest)
    try:
        now: Bundle | None = render_bundle(cluster, record.engine)
    except ConfigError as error:
        if kept is None:
            raise
        now = None
        warnings.append(f"the site file cannot be deployed any more: {error.message}")
    if kept is None:
        assert now
        if now.digest != record.digest:
            warnings.append("what was deployed is not known here: compared with what the site file has now")
        return now, ()
    if now is None or now.digest == kept.digest:
        return kept, ()
    before, after = ({one.name: one for one in each.items} for each in (kept, now))
    changed = tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
    if changed:
        warnings.append(f"the site file has changes of {', '.join(changed)}: `sms deploy --dry-run` shows them")
    return kept, changed


def _secret_warnings(cluster: Cluster, engine: Engine, bundle: Bundle) -> list[str]:
    """Return warnings about secret files that another deployment would write."""
    try:
        changed = {state.name for state, _ in new_secrets(cluster, bundle, engine)}
    except SmsError:  # the account may not read them, or a file is missing here
        return []
    return [
        f"the site file has another {name} than {engine.name}: `sms deploy` replaces what reads it"
        for name in sorted(changed)
    ]


def _image_warnings(record: Deployed, states: Sequence[WorkloadState]) -> list[str]:
    """Return warnings about pods of different images, or of another one than a pinned digest."""
    images = {one.image for state in states for one in state.instances if one.image}
    found = []
    if len(images) > 1:
        found.append(f"pods run different images: {', '.join(sorted(images))}")
    _, at, digest = record.image.partition("@")
    if at and (other := sorted(image for image in images if digest not in image)):
        found.append(f"the site file names {digest}, but {', '.join(other)} runs")
    return found


def read_state_lease(engine: Engine, bundle: Bundle) -> str:
    """Return generation and holder of the lease of the controller's state; empty if it has none."""
    item = bundle.find(bundle.controller)
    if item is None or not item.lease:
        return ""
    try:
        result = engine.control(bundle, "cat", f"{item.lease}/{LEASE_FILE}", timeout=30)
        lease = parse_state_lease(result.stdout)
    except SmsError as error:
        return f"not known: {error.message}"
    except (ValueError, TypeError):
        return "" if result.status else "not readable"
    return f"generation {lease.generation}, {f'held by {lease.holder}' if lease.holder else 'free'}"
