"""``sms user``: users and groups of the cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, print_result, verb
from appliance.cli.nodes.files_common import add_later, add_wait, finish, open_vm

if TYPE_CHECKING:
    from appliance.operations.nodes.users import Synced

EXAMPLES = """\
  sms user sync --sssd --group hpc                 members of a group of the directory
  sms user sync --from accounts/                   passwd and group in a folder
  sms user sync --from accounts/ --dry-run         only print who would be added, changed, removed"""

SHOWN = 20
BOUNDS = "the lowest and the highest id that is distributed"


def add(verbs: Verbs) -> None:
    """Add the verb and its action."""
    text = "Users and groups of the cluster: master files in the provisioning VM, which nodes and the container pull."
    parser = verb(verbs, "user", "users and groups, from a directory or a file", text, EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    long = (
        "Read users and groups from files or from this machine's SSSD (LDAP, Active Directory), and upload them as\n"
        "the master files passwd and group. Ids out of bounds are left out; invalid lines are an error. Passwords are\n"
        "only included with --shadow."
    )
    one = verb(actions, "sync", "distribute users and groups to all nodes", long, EXAMPLES)
    source = one.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="source", type=Path, metavar="PATH", help="a folder with passwd and group")
    source.add_argument("--sssd", action="store_true", help="query SSSD of this machine, with getent")
    one.add_argument("--shadow", type=Path, metavar="FILE", help="a shadow file that others cannot read")
    one.add_argument("--group", action="append", default=[], metavar="NAME", help="only members of these groups")
    one.add_argument("--uid-min", type=int, default=1000, metavar="N", help="the lowest id (default: 1000)")
    one.add_argument("--uid-max", type=int, default=2_000_000_000, metavar="N", help="the highest id")
    one.add_argument(
        "--most-removed",
        type=percent,
        default=10.0,
        metavar="PERCENT",
        help="refuse to remove more than this share of accounts (default: 10)",
    )
    one.add_argument("--force", action="store_true", help="remove any accounts, also of users with jobs")
    one.add_argument("-n", "--dry-run", action="store_true", help="only print what would change")
    add_later(one)
    add_wait(one)
    add_json(one)
    one.set_defaults(run=run_sync)


def percent(text: str) -> float:
    """Parse a percentage.

    Raises:
        argparse.ArgumentTypeError: not a number from 0 to 100.
    """
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage from 0 to 100")
    return found


def run_sync(arguments: argparse.Namespace) -> int:
    """Synchronise the accounts."""
    from appliance.errors import ConfigError
    from appliance.operations.nodes.users import SyncOptions, query_sssd, read_folder, sync, this_machine
    from appliance.operations.services.pushes import Pushes

    if arguments.uid_min < 1000:
        raise ConfigError(
            "--uid-min: ids below 1000 belong to the images of nodes and container",
            hint="--uid-min 1000 is the default",
        )
    if arguments.uid_min > arguments.uid_max:
        raise ConfigError(f"--uid-min {arguments.uid_min} is more than --uid-max {arguments.uid_max}", hint=BOUNDS)
    cluster, api = open_vm(arguments)
    if arguments.sssd:
        if arguments.shadow:
            raise ConfigError(
                "--shadow is only valid with --from: SSSD does not provide passwords", hint="omit one of them"
            )
        source = query_sssd(this_machine(), arguments.group)
    else:
        source = read_folder(arguments.source, arguments.shadow)
    options = SyncOptions(arguments.group, arguments.uid_min, arguments.uid_max)
    judge = Pushes(cluster, api, "user sync", arguments.force, arguments.most_removed)
    done = sync(api, source, cluster.env.progress, judge, options, dry_run=arguments.dry_run)
    print_result(arguments, done, _lines(done, forced=arguments.force))
    if arguments.dry_run or not done.changed:
        return 0
    return finish(arguments, cluster, api)


def _lines(done: Synced, *, forced: bool) -> Iterator[str]:
    for path, changes in done.changes.items():
        for sign, names in (("+", changes.added), ("~", changes.changed), ("-", changes.removed)):
            if names:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                yield f"{sign} {path}: {' '.join(names[:SHOWN])}{more}"
    accounts = done.accounts
    yield f"{len(accounts.users)} users, {len(accounts.groups)} groups; {accounts.left_out} out of bounds left out"
    if done.refusal and not forced:
        yield f"without --dry-run it would be refused: {done.refusal}; --force overrides this"
