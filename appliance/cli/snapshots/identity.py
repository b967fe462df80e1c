"""``sms overlay identity``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, open_target, print_result, verb

if TYPE_CHECKING:
    from appliance.operations.snapshots.identity import ClusterIdentity

EXAMPLES = """\
  sms overlay identity            the UUID of this cluster, and other clusters of its name
  sms overlay identity new        this is a copy of another cluster: it gets a UUID of its own
  sms overlay identity 5d6e71c0   this continues the cluster of that UUID, whose snapshots are its own"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "identity",
        "show or set the UUID of the cluster",
        "Snapshots have the UUID of their cluster. Those with another one, in a folder or repository that clusters of\n"
        "one name share, are never restored, pulled or removed. The first start creates it; to set it, the services\n"
        "container must be stopped, and all admin hosts must answer, except with --without-remote.",
        EXAMPLES,
    )
    parser.add_argument("uuid", nargs="?", metavar="UUID", help="new, or at least 4 digits of a known UUID")
    parser.add_argument(
        "--without-remote",
        action="store_true",
        help="set it although an admin host does not answer, which keeps its UUID until this is run again",
    )
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.errors import ConfigError
    from appliance.operations.snapshots.identity import is_valid, set_identity, show_identity

    if arguments.uuid is not None and not is_valid(arguments.uuid):
        raise ConfigError(f"invalid UUID {arguments.uuid!r}", hint="give `new`, or at least 4 digits of a UUID")
    if arguments.without_remote and arguments.uuid is None:
        raise ConfigError("--without-remote needs a UUID", hint="hosts that do not answer are shown as such without it")
    cluster, host = open_target(arguments)
    if arguments.uuid is None:
        found = show_identity(cluster, host)
    else:
        found = set_identity(cluster, host, arguments.uuid, without_remote=arguments.without_remote)
    print_result(arguments, found, lines(found))
    return 0


def lines(found: ClusterIdentity) -> Iterator[str]:
    """Format the UUIDs that were found."""
    from appliance.text import printable
    from appliance.units import format_time

    yield f"cluster {found.cluster}: {found.uuid or 'no UUID yet; the next start creates it'}"
    for name, uuid in found.leases.items():
        yield f"  {printable(name)}: {'the same' if uuid == found.uuid else uuid or 'none in its lease'}"
    if found.adopted:
        yield f"  snapshots without a UUID, up to generation {found.adopted}, are its own"
    for uuid, one in found.found.items():
        yield printable(
            f"{uuid or 'without a UUID'}: {one.snapshots} snapshot{'s' * (one.snapshots != 1)} of "
            f"{', '.join(one.hosts)}, the last of {format_time(one.taken)[:16]}, on {', '.join(one.where)}"
        )
    for name, why in found.unread.items():
        yield printable(f"{name} does not answer: {why}")
