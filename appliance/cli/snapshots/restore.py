"""``sms overlay restore``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_host, add_json, filled, open_target, verb
from appliance.errors import ConfigError

EXAMPLES = """\
  sms overlay restore latest              the newest verified one becomes the overlay; stop the appliance first
  sms overlay restore 42 -n               say what would be done
  sms overlay restore 42 --as tuesday     a second overlay tuesday.img beside it; the appliance may run
  sms overlay restore 42 --path /var/spool/slurmctld              this alone goes back, all else stays
  sms overlay restore 42 --path /etc/slurm --to /root/etc-of-42   into a new folder here; the appliance may run"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "restore",
        "put a snapshot in the overlay's place",
        "Put a snapshot in the place of the overlay of a stopped appliance. What is replaced is taken as a snapshot\n"
        "before; the way back is said at the end.",
        EXAMPLES,
    )
    parser.add_argument("snapshot", metavar="NUMBER", help="its number, or latest: the newest verified one")
    parser.add_argument(
        "--as", dest="name", type=filled, metavar="NAME", help="a new file instead: a name, or a whole path"
    )
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        type=filled,
        metavar="PATH",
        help="only this file or folder, by its path in the container; more than once",
    )
    parser.add_argument("--to", type=filled, metavar="DIR", help="take PATH out into a new folder of the host")
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Restore."""
    if arguments.path and arguments.name:
        raise ConfigError("--as restores all of a snapshot", hint="leave --path out, or give --to DIR")
    if arguments.to and not arguments.path:
        raise ConfigError("--to needs --path", hint="name what is wanted; --as NAME restores all of it beside")
    return run_paths(arguments) if arguments.path else run_whole(arguments)


def run_whole(arguments: argparse.Namespace) -> int:
    """Restore all of it."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.cli.snapshots.view import restored_lines
    from appliance.operations.snapshots.restore import rehearse_restore, restore

    cluster, host = open_target(arguments)
    if arguments.dry_run:
        steps = rehearse_restore(cluster, host, arguments.snapshot, name=arguments.name or "")
        print_json(steps) if arguments.json else out.print("\n".join(steps), markup=False)
        return 0
    done = restore(cluster, host, arguments.snapshot, progress(arguments.quiet), name=arguments.name or "")
    if arguments.json:
        print_json(asdict(done))
    else:
        out.print("\n".join(restored_lines(cluster.site.cluster, done)), markup=False)
    return 0


def run_paths(arguments: argparse.Namespace) -> int:
    """Restore some of it."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.cli.snapshots.diff import print_diff
    from appliance.cli.snapshots.paths_view import brought_lines
    from appliance.operations.snapshots.paths import extract_paths, rehearse_paths, restore_paths

    cluster, host = open_target(arguments)
    said, wanted, paths = progress(arguments.quiet), arguments.snapshot, arguments.path
    if arguments.to:
        done = extract_paths(cluster, host, wanted, paths, arguments.to, said, dry_run=arguments.dry_run)
    elif arguments.dry_run:
        print_diff(rehearse_paths(cluster, host, wanted, paths), as_json=arguments.json)
        return 0
    else:
        done = restore_paths(cluster, host, wanted, paths, said)
    if arguments.json:
        print_json(asdict(done))
    else:
        lines = brought_lines(cluster.site.cluster, done, dry_run=arguments.dry_run)
        out.print("\n".join(lines), markup=False)
    return 0
