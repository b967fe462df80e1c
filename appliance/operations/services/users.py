"""Users with jobs whom the running container knows, by its files or by a directory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.services.present import QUERY_S
from appliance.plan.machine import inside_argv
from appliance.plan.overlay.seed import SECRET_PLACES, secrets_of
from appliance.plan.services.effect import Fault
from appliance.text import one_line
from appliance.tools.scripts import script_argv

DIRECTORY = "sssd_conf"
"""The secret file of what asks a directory."""
DIRECTORY_CONF = SECRET_PLACES[DIRECTORY][0]


@dataclass(frozen=True)
class Known:
    """Names of users whom the container knows; ``files``: those in its own files."""

    names: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()


def query_known(cluster: Cluster, host: Host, users: Collection[str]) -> Known:
    """Return which of these users the running container knows. What sssd has cached with its present file counts.

    Raises:
        CommandError: it does not answer.
    """
    if not users:
        return Known()
    argv = script_argv("known-users", *sorted(users))
    lines = host.run(*inside_argv(cluster.site, cluster.services, *argv), timeout=QUERY_S).text.splitlines()
    files = frozenset(one[1:] for one in lines if one.startswith("="))
    return Known(frozenset(one for one in lines if not one.startswith("=")) & {*users}, files & {*users})


def find_without_directory(cluster: Cluster, host: Host, users: Set[str], *, differs: bool) -> Iterator[Fault]:
    """Yield users with jobs who would be lost with their directory by a new instance.

    Args:
        users: who has jobs.
        differs: how to reach the directory changes, too: an isolated instance cannot try that.
    """
    has = any(DIRECTORY in secrets_of(service) for service in cluster.services)
    if has and not differs:
        return
    known = query_known(cluster, host, users)
    if lost := sorted(known.names - known.files):
        shown = f"users with jobs whom only a directory knows ({len(lost)}): {one_line(', '.join(lost), 200)}"
        if has:
            yield Fault(
                f"secrets.{DIRECTORY} changes together with what needs a new instance, which cannot try it: {shown}",
                f"apply the change of secrets.{DIRECTORY} alone first",
            )
        else:
            yield Fault(
                f"`services` no longer has what asks the directory: {shown}",
                "add them to `accounts.passwd`, or remove it when their jobs have ended: `squeue --user NAME`",
            )
