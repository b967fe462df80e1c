"""The SSH keys of the other admin hosts, for the authorized_keys of one."""

from __future__ import annotations

import socket

from appliance.config.model import AdminHost
from appliance.errors import SmsError
from appliance.operations.context import Cluster
from appliance.plan.hosts.authorized import authorized_line, mark_of, peer_addresses, read_public
from appliance.tools.scripts import script_argv

MOST_SOURCES = 4
"""Addresses that a host may name as its own."""


def key_variables(cluster: Cluster, name: str) -> dict[str, object]:
    """Return the variables of the role `admin_keys` for the host ``name``.

    The other admin hosts are queried in parallel; the line of one that does not answer, or has no key, stays as it is.
    """
    hosts = {host.name: host for host in cluster.site.admin_hosts}
    target, others = hosts[name], [host for host in hosts.values() if host.name != name]
    with cluster.env.pool(8) as pool:
        found = list(pool.map(lambda other: _line(cluster, other, target), others))
    for each in found:
        if isinstance(each, str):
            cluster.env.progress.report(f"note: {each}")
    return {
        "sms_user": target.user,
        "sms_mark": mark_of(cluster.site.cluster),
        "sms_peers": [host.name for host in others],
        "sms_keys": [each for each in found if isinstance(each, dict)],
    }


def _line(cluster: Cluster, other: AdminHost, target: AdminHost) -> dict[str, str] | str:
    """Return the line for another host, or why there is none."""
    kept = f"the line of {other.name} in the authorized_keys of {target.name} stays as it is"
    try:
        argv = script_argv("admin-key", str(target.key or ""), target.address)
        said = [line.partition("=") for line in cluster.host(other.name).run(*argv).text.splitlines()]
    except SmsError as error:
        return f"{error.message}: {kept}"
    keys = [value for name, _, value in said if name == "key"]
    key = read_public(keys[0]) if keys else None
    if not key:
        return f"{other.name} has no SSH key {target.key or 'of root'} for {target.name}: {kept}"
    sources = [value for name, _, value in said if name == "source"][:MOST_SOURCES]
    addresses = peer_addresses([*_resolve(other.address), *sources])
    if not addresses:
        return f"no address of {other.name} is known: {kept}"
    mark = mark_of(cluster.site.cluster, other.name)
    return {"name": other.name, "key": key, "mark": mark, "line": authorized_line(key, addresses, mark)}


def _resolve(address: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(address, None)]
    except OSError:
        return []
