"""Where the services container runs, as seen from a machine that is not an admin host."""

from __future__ import annotations

from appliance.errors import Refused, SmsError
from appliance.host.base import Unreachable
from appliance.operations.context import Cluster
from appliance.operations.lease import query_lease
from appliance.plan.migration.lease import View, engine_error, find_holder, find_last


def find_serving(cluster: Cluster) -> str | None:
    """Return the name of the admin host that holds the lease; None if this machine is an admin host itself.

    Raises:
        Refused: no host holds it, as an engine has the services; or none answers.
    """
    names = [host.name for host in cluster.site.admin_hosts]
    if (here := cluster.env.hosts.here) in names:
        return None

    problems: dict[str, str] = {}

    def query(name: str) -> View:
        try:
            return View(query_lease(cluster.host(name), cluster))
        except SmsError as error:  # another host's lease may be whole
            problems[name] = "cannot be reached" if isinstance(error, Unreachable) else error.message
            return View(None)

    with cluster.env.pool(len(names)) as pool:
        views = dict(zip(names, pool.map(query, names), strict=True))
    if lease := find_holder(views):
        if lease.engine:
            raise engine_error(lease)
        return lease.holder
    why = "; ".join(f"{name}: {problems[name]}" for name in names if name in problems)
    why = why or "no admin host holds the lease"
    last = find_last(views)
    then = f"; it was stopped on {last}: sms start --host {last}" if last else ""
    raise Refused(
        f"this machine ({here}) is not an admin host of the site, and {why}",
        hint=f"name one: --host {', '.join(names)}{then}",
    )
