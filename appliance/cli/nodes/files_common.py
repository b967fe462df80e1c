"""What the actions of ``sms files`` and ``sms user`` share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from appliance.cli.common import duration

if TYPE_CHECKING:
    from appliance.operations.context import Cluster
    from appliance.operations.nodes.files import Told
    from appliance.progress import Progress
    from appliance.tools.provision import Api

UNHEALTHY = 4
SIGNS = {"add": "+", "change": "~", "remove": "-", "same": " ", "held": "="}


def open_vm(arguments: argparse.Namespace) -> tuple[Cluster, Api, Progress]:
    """The site's cluster, its VM's interface, and where progress is shown."""
    from appliance.cli.screen import progress
    from appliance.operations.context import open_cluster
    from appliance.operations.site.find import find_site
    from appliance.operations.vm.client import open_api

    shown = progress(arguments.quiet)
    cluster = open_cluster(find_site(arguments.site), arguments.state, shown)
    return cluster, open_api(cluster), shown


def add_wait(parser: Any) -> None:
    """How long to wait for the clients."""
    parser.add_argument(
        "--wait", type=duration, default=30.0, metavar="TIME", help="how long to wait until all have it (default: 30s)"
    )


def add_later(parser: Any) -> None:
    """Leave the clients alone."""
    parser.add_argument("--later", action="store_true", help="wake nobody: clients have it after their next look")


def audience(master: Mapping[str, Any]) -> str:
    """Who has it."""
    from appliance.config.hostlist import fold

    parts = [fold(master["nodes"])] if master["nodes"] else []
    parts += [f"@{group}" for group in master["groups"]]
    whole = ",".join(parts) or "all nodes"
    return whole + (", services" if master["services"] else "") + (" (template)" if master["template"] else "")


def finish(arguments: argparse.Namespace, cluster: Cluster, api: Api, shown: Progress) -> int:
    """Wake the clients, where that is wanted, and show who has not all yet; the exit status."""
    from appliance.cli.screen import out
    from appliance.operations.nodes.files import find_lacking, wake

    if arguments.later:
        return 0
    told = wake(cluster, api, shown, arguments.wait)
    if not getattr(arguments, "json", False):
        for line in lines(told):
            out.print(line, markup=False)
    return UNHEALTHY if find_lacking(told) else 0


def lines(told: Sequence[Told]) -> Iterator[str]:
    """How many have all, and each that has not with what it lacks."""
    from appliance.config.hostlist import fold
    from appliance.text import printable

    for state, words in (("has all", "have all"), ("silent", "were not heard lately, and are not waited for")):
        names = [one.client for one in told if one.state == state]
        if names:
            yield f"{len(names):>5} {words}: {fold(names)}"
    for one in told:
        if one.state in ("waits", "lacks"):
            lacks = ", ".join(one.missing) or "its answer"
            yield f"{one.client} has not yet: {printable(lacks)}"
        for path, why in sorted(one.failed.items()):
            yield f"{one.client}: {printable(path)}: {printable(why)}"
        for path in one.held:
            yield f"{one.client}: the template {printable(path)} fails for it; it keeps what it has"
