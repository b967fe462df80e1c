"""``sms upgrade``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_host, add_json, seconds, verb
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.operations.upgrade.upgrade import Upgraded

EXAMPLES = """\
  sms upgrade --host host-a           build, rehearse, switch; back by itself when it does not do
  sms upgrade --image new.sif         an image that is there
  sms upgrade -n                      say what would be done, and how long services would be away
  sms upgrade --undo                  back to the image before, on the overlay as it is
  sms upgrade --undo --with-snapshot  and to the state of before: what came since is lost"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "upgrade",
        "another image on the same overlay, with the same jobs",
        "Build or take an image, rehearse it on a snapshot of now, then stop the appliance and start the image on the\n"
        "same overlay. On any failure the image and the overlay of before serve again: exit status 5.\n"
        "One that was cut off goes on when it is run again.",
        EXAMPLES,
    )
    add_host(parser)
    parser.add_argument("--image", type=Path, metavar="FILE", help="an image that is there (default: build one)")
    parser.add_argument("--no-rehearsal", action="store_true", help="do not try it beside production first")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="compute nodes of the rehearsal (2)")
    parser.add_argument("--user", default="root", metavar="NAME", help="whose job the rehearsal runs (root)")
    parser.add_argument("--wait", type=seconds, default=60, metavar="SECONDS", help="how long services may take (60)")
    parser.add_argument("--undo", action="store_true", help="back to the image of before the last upgrade")
    parser.add_argument("--with-snapshot", action="store_true", help="with --undo: the state of before it as well")
    parser.add_argument("--force", action="store_true", help="with --with-snapshot: although jobs are lost by that")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Upgrade."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.operations.context import open_cluster
    from appliance.operations.image.build import build
    from appliance.operations.site.find import find_site
    from appliance.operations.upgrade.rehearse import find_source
    from appliance.operations.upgrade.upgrade import How, plan_upgrade, upgrade

    if arguments.with_snapshot and not arguments.undo:
        raise ConfigError("--with-snapshot goes with --undo", hint="sms upgrade --undo --with-snapshot")
    if arguments.undo and arguments.image:
        raise ConfigError("--undo takes the image of before", hint="leave one of --undo and --image out")
    path = find_site(arguments.site)
    shown = progress(arguments.quiet)
    cluster = open_cluster(path, arguments.state, shown)
    # Without a name, wherever it runs; an admin host acts on itself.
    host = cluster.target(arguments.host or find_source(cluster, "").name)

    def build_one() -> Path:
        return Path(build(cluster, shown, lock=path.with_name("sms.lock"), current=False).image)

    how = How(
        arguments.image,
        build_one,
        not arguments.no_rehearsal,
        arguments.nodes,
        arguments.user,
        arguments.wait,
        arguments.undo,
        arguments.with_snapshot,
        arguments.force,
    )
    if arguments.dry_run:
        steps = plan_upgrade(cluster, host, how)
        print_json(steps) if arguments.json else out.print("\n".join(steps), markup=False)
        return 0
    done = upgrade(cluster, host, shown, how)
    print_json(asdict(done)) if arguments.json else out.print("\n".join(_lines(done)), markup=False)
    return 0


def _lines(done: Upgraded) -> list[str]:
    """What a person wants to know of it."""
    if done.same:
        return [f"{done.after.key[:12]} runs on {done.host} already: nothing is done; `sms status` shows it"]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in done.parts.items() if seconds >= 0.05)
    return [
        f"{done.after.key[:12]} serves on {done.host} in the place of {done.before.key[:12]}: {done.jobs}",
        f"  services were away for {done.outage_s:.1f} s" + (f" ({parts})" if parts else ""),
        f"  the overlay of before is snapshot {done.kept}; back again: sms upgrade --undo --host {done.host}",
    ]
