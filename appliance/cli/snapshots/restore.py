"""``sms overlay restore``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, filled, open_target, print_result, verb
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.host.base import Host
    from appliance.operations.context import Cluster
    from appliance.operations.snapshots.restore import Judge

EXAMPLES = """\
  sms overlay restore latest              replace the overlay by the newest verified one, after `sms stop`
  sms overlay restore 42 -n               show what would be done
  sms overlay restore 42 --as tuesday     write a second overlay tuesday.img; no stop needed
  sms overlay restore 42 --path /var/spool/slurmctld              restore this path only
  sms overlay restore 42 --path /etc/slurm --to /root/etc-of-42   extract into a new folder here; no stop needed"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "restore",
        "replace the overlay by a snapshot",
        "Replace the overlay of the stopped services container by a snapshot. The old overlay is taken as a snapshot\n"
        "first; the command to undo the restore is printed at the end.",
        EXAMPLES,
    )
    parser.add_argument("snapshot", metavar="NUMBER", help="its number, or latest: the newest verified one")
    parser.add_argument(
        "--as",
        dest="name",
        type=filled,
        metavar="NAME",
        help="write to a new file instead: a name, or an absolute path",
    )
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        type=filled,
        metavar="PATH",
        help="only this file or folder, by its path in the container; repeatable",
    )
    parser.add_argument("--to", type=filled, metavar="DIR", help="extract PATH into a new folder of the host")
    add_host(parser)
    parser.add_argument("--force", action="store_true", help="also if Slurm forgets jobs that the last stop had")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    if arguments.path and arguments.name:
        raise ConfigError("--as restores the whole snapshot", hint="leave --path out, or give --to DIR")
    if arguments.to and not arguments.path:
        raise ConfigError(
            "--to needs --path", hint="give the paths to extract; --as NAME restores the whole snapshot to a new file"
        )
    return run_paths(arguments) if arguments.path else run_whole(arguments)


def run_whole(arguments: argparse.Namespace) -> int:
    """Restore the whole snapshot."""
    from appliance.cli.snapshots.view import restored_lines
    from appliance.operations.snapshots.restore import rehearse_restore, restore

    cluster, host = open_target(arguments)
    judge = _judge(arguments, cluster, host)
    if arguments.dry_run:
        steps = rehearse_restore(cluster, host, arguments.snapshot, name=arguments.name or "", judge=judge)
        print_result(arguments, steps, steps)
        return 0
    done = restore(cluster, host, arguments.snapshot, name=arguments.name or "", judge=judge)
    print_result(arguments, done, restored_lines(cluster.site.cluster, done))
    return 0


def _judge(arguments: argparse.Namespace, cluster: Cluster, host: Host) -> Judge:
    """Return what judges the restore of Slurm's state. It reports costs, unless a dry run shows them as steps."""
    from appliance.operations.services.present import judge_restore

    def judge(taken: float) -> list[str]:
        costs = judge_restore(cluster, host, taken, force=arguments.force)
        if costs and (arguments.path or not arguments.dry_run):
            cluster.env.progress.warn("\n  ".join(costs))
        return costs

    return judge


def run_paths(arguments: argparse.Namespace) -> int:
    """Restore or extract single paths."""
    from appliance.cli.snapshots.diff import print_diff
    from appliance.cli.snapshots.paths_view import restored_paths_lines
    from appliance.operations.snapshots.paths import ExtractOptions, extract_paths, rehearse_paths, restore_paths

    cluster, host = open_target(arguments)
    selector, paths, judge = arguments.snapshot, arguments.path, _judge(arguments, cluster, host)
    if arguments.to:
        done = extract_paths(cluster, host, ExtractOptions(selector, paths, arguments.to), dry_run=arguments.dry_run)
    elif arguments.dry_run:
        print_diff(rehearse_paths(cluster, host, selector, paths, judge=judge), as_json=arguments.json)
        return 0
    else:
        done = restore_paths(cluster, host, selector, paths, judge=judge)
    print_result(arguments, done, restored_paths_lines(cluster.site.cluster, done, dry_run=arguments.dry_run))
    return 0
