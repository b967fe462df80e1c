"""Shared by the actions of ``sms files`` and ``sms user``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from appliance.cli.common import duration, open_site

if TYPE_CHECKING:
    from appliance.operations.context import Cluster
    from appliance.operations.nodes.files import ClientReport
    from appliance.tools.provision import Api

UNHEALTHY = 4
SIGNS = {"add": "+", "change": "~", "remove": "-", "same": " ", "held": "="}


def open_vm(arguments: argparse.Namespace) -> tuple[Cluster, Api]:
    """Return the site's cluster and a client of its VM's interface."""
    from appliance.operations.vm.client import open_api

    cluster = open_site(arguments)
    return cluster, open_api(cluster)


def add_wait(parser: Any) -> None:
    """Add ``--wait``."""
    parser.add_argument(
        "--wait", type=duration, default=30.0, metavar="TIME", help="how long to wait for the clients (default: 30s)"
    )


def add_later(parser: Any) -> None:
    """Add ``--later``."""
    parser.add_argument("--later", action="store_true", help="do not notify clients: they find it at their next poll")


def audience(master: Mapping[str, Any]) -> str:
    """Return for which clients a master file is, as text."""
    from appliance.config.hostlist import fold

    parts = [fold(master["nodes"])] if master["nodes"] else []
    parts += [f"@{group}" for group in master["groups"]]
    whole = ",".join(parts) or "all nodes"
    return whole + (", services" if master["services"] else "") + (" (template)" if master["template"] else "")


def finish(arguments: argparse.Namespace, cluster: Cluster, api: Api) -> int:
    """Notify the clients unless ``--later`` is given, and print their state. Returns the exit status."""
    from appliance.cli.screen import out
    from appliance.operations.nodes.files import find_lacking, notify_clients

    if arguments.later:
        return 0
    reports = notify_clients(cluster, api, arguments.wait)
    if not getattr(arguments, "json", False):
        for line in lines(reports):
            out.print(line, markup=False)
    return UNHEALTHY if find_lacking(reports) else 0


def lines(reports: Sequence[ClientReport]) -> Iterator[str]:
    """Yield lines: counts of clients by state, then missing and failed files by client."""
    from appliance.config.hostlist import fold
    from appliance.text import printable

    for state, words in (("has all", "up to date"), ("silent", "offline, not waited for")):
        names = [one.client for one in reports if one.state == state]
        if names:
            yield f"{len(names):>5} {words}: {fold(names)}"
    for one in reports:
        if one.state in ("waits", "lacks"):
            pending = f"missing: {', '.join(one.missing)}" if one.missing else "report pending"
            yield f"{one.client}: {printable(pending)}"
        for path, why in sorted(one.failed.items()):
            yield f"{one.client}: {printable(path)}: {printable(why)}"
        for path in one.held:
            yield f"{one.client}: the template {printable(path)} fails for it; it keeps its version"
