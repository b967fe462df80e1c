"""``sms upgrade``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, open_site, print_result, seconds, verb
from appliance.errors import ConfigError, SmsError

if TYPE_CHECKING:
    from appliance.operations.upgrade.state import UpgradeResult

EXAMPLES = """\
  sms upgrade --host host-a           build, rehearse, switch; rolls back automatically on failure
  sms upgrade --image new.sif         switch to an existing image
  sms upgrade -n                      print the steps and the predicted outage
  sms upgrade --undo                  return to the previous image, with the present overlay
  sms upgrade --undo --with-snapshot  also restore the previous state: newer changes are lost"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "upgrade",
        "switch to another image with the same overlay and jobs",
        "Build an image or use an existing one, rehearse it on a new snapshot, then start a second instance with it\n"
        "on a copy of the overlay, which takes over as in a migration. If it fails, the running instance goes on:\n"
        "exit status 5. An interrupted upgrade is resumed by the next run.",
        EXAMPLES,
    )
    add_host(parser)
    parser.add_argument("--image", type=Path, metavar="FILE", help="an existing image (default: build one)")
    parser.add_argument("--no-rehearsal", action="store_true", help="skip the rehearsal")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="compute nodes of the rehearsal (2)")
    parser.add_argument("--user", default="root", metavar="NAME", help="user of the rehearsal's job (root)")
    parser.add_argument("--wait", type=seconds, default=60, metavar="SECONDS", help="timeout of the services (60)")
    parser.add_argument("--undo", action="store_true", help="return to the image before the last upgrade")
    parser.add_argument("--with-snapshot", action="store_true", help="with --undo: also restore the state before it")
    parser.add_argument("--force", action="store_true", help="even if the site file or --with-snapshot loses jobs")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Upgrade."""
    from appliance.operations.image.build import build
    from appliance.operations.site.locate import find_site
    from appliance.operations.upgrade.rehearse import find_source
    from appliance.operations.upgrade.state import UpgradeOptions
    from appliance.operations.upgrade.upgrade import plan_upgrade, upgrade

    if arguments.with_snapshot and not arguments.undo:
        raise ConfigError("--with-snapshot requires --undo", hint="sms upgrade --undo --with-snapshot")
    if arguments.undo and arguments.image:
        raise ConfigError("--undo and --image exclude each other", hint="omit one of them")
    cluster = open_site(arguments)
    # Without --host, the host that runs the container; an admin host acts on itself.
    host = cluster.target(arguments.host or find_source(cluster, "").name)

    def build_one() -> Path:
        lock = find_site(arguments.site).with_name("sms.lock")
        try:
            return Path(build(cluster, lock=lock, current=False).image)
        except SmsError as error:
            error.hint = "; ".join(filter(None, [error.hint, "or use an image that exists: --image FILE"]))
            raise

    options = UpgradeOptions(
        arguments.image,
        build_one,
        rehearsal=not arguments.no_rehearsal,
        nodes=arguments.nodes,
        user=arguments.user,
        wait_s=arguments.wait,
        undo=arguments.undo,
        with_snapshot=arguments.with_snapshot,
        force=arguments.force,
    )
    if arguments.dry_run:
        steps = plan_upgrade(cluster, host, options)
        print_result(arguments, steps, steps)
        return 0
    done = upgrade(cluster, host, options)
    print_result(arguments, done, _lines(done))
    return 0


def _lines(done: UpgradeResult) -> list[str]:
    """Return the summary of an upgrade."""
    if done.same:
        return [f"{done.after.key[:12]} already runs on {done.host}: nothing to do; `sms status` shows it"]
    from appliance.operations.migration.here import shown_outages

    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in done.parts.items() if seconds >= 0.05)
    outages = [f"  {line}" for line in shown_outages(done.away, done.outage)] if done.outage else []
    if not outages and done.outage_s:
        outages = [f"  outage of services {done.outage_s:.1f} s" + (f" ({parts})" if parts else "")]
    return [
        f"{done.after.key[:12]} replaced {done.before.key[:12]} on {done.host}: {done.jobs}",
        *outages,
        *([f"  stopped and started: {done.stopped}"] if done.stopped else []),
        *(f"  WARNING: longer than predicted: {one}" for one in done.exceeded),
        *(f"  note: {one}" for one in done.notes),
        f"  the previous overlay is snapshot {done.kept}; to return: sms upgrade --undo --host {done.host}",
    ]
