"""What an engine is to run: by the site file, by the record of a deployment, and by that of the one before."""

from __future__ import annotations

from appliance.engines.deploy import Bundle
from appliance.engines.render import make_bundle
from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.deployed import Deployed
from appliance.operations.engines.deployed import find_deployed, read_bundle
from appliance.operations.engines.engine import Engine
from appliance.operations.engines.export import read_input
from appliance.operations.engines.kubernetes import find_kubernetes
from appliance.operations.engines.nomad import find_on_nomad
from appliance.plan.services.gateway import find_stopping

ENGINES = ("kubernetes", "nomad")


def find_engine(cluster: Cluster, host: Host, name: str) -> Engine:
    """Return an engine of the site, with the programs of a host.

    Raises:
        ConfigError: there is no such engine, or it is not in the site file.
    """
    if name == "kubernetes":
        return find_kubernetes(cluster, host)
    if name == "nomad":
        return find_on_nomad(cluster, host)
    raise ConfigError(f"services cannot be deployed to {name}", hint=f"one of {', '.join(ENGINES)}")


def render_bundle(cluster: Cluster, engine: str) -> Bundle:
    """Return what the site file says that an engine is to run."""
    return make_bundle(engine, read_input(cluster, engine))


def units_of(bundle: Bundle) -> set[str]:
    """Return the services that an engine has."""
    return {unit for item in bundle.items if item.kind == "service" for unit in item.units}


def find_left(cluster: Cluster, bundle: Bundle) -> dict[str, str]:
    """Return the services of the site that do not run while an engine has the others, and why."""
    return dict(find_stopping(cluster.services, units_of(bundle)))


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
