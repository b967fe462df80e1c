"""``sms overlay schedule``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, open_target, print_result, verb

if TYPE_CHECKING:
    from appliance.operations.snapshots.schedule import Scheduled

EXAMPLES = """\
  sms overlay schedule install                every snapshots.every_minutes of the site file, on this admin host
  sms overlay schedule install --every 5      every five minutes
  sms overlay schedule show --host host-a     another host's schedule, and the result of its last run
  sms overlay schedule remove                 remove it; existing snapshots stay"""

INSTALL = """\
  sms overlay schedule install -n             show what would be written
  sms overlay schedule install --host host-b  on the standby host as well: runs do nothing there without the lease"""
REMOVE = """\
  sms overlay schedule remove                 remove it; existing snapshots stay"""
SHOW = """\
  sms overlay schedule show --json            for scripts"""


def add(actions: Verbs) -> None:
    """Add the action's parser, and those of its own actions."""
    parser = verb(
        actions,
        "schedule",
        "take snapshots by cron or systemd",
        "Install a schedule for snapshots on an admin host: a systemd timer where systemd runs, else a cron entry.\n"
        "A run takes a snapshot, prunes, and pushes to the site file's targets; on a host without the lease it does\n"
        "nothing. Where there are targets, a restore drill (`sms overlay drill`) runs every week. A failed run is\n"
        "reported in `sms status`, in syslog, and in a mail to `mail.root`. If the site has a VM, its state is\n"
        "scheduled likewise; runs do nothing on a host without the VM.",
        EXAMPLES,
    )
    own = parser.add_subparsers(dest="schedule", metavar="WHAT", required=True)
    install = verb(own, "install", "install or change it", "Install it; a second run changes nothing.", INSTALL)
    install.add_argument(
        "--every", type=int, metavar="MINUTES", help="minutes between two runs (default: snapshots.every_minutes)"
    )
    install.set_defaults(run=run_install)
    remove = verb(own, "remove", "remove it", "Remove it; existing snapshots stay.", REMOVE)
    remove.set_defaults(run=run_remove)
    show = verb(own, "show", "show it", "Show the schedule of a host, and the result of its last run.", SHOW)
    show.set_defaults(run=run_show)
    for each in (install, remove, show):
        add_host(each)
        if each is not show:
            each.add_argument("-n", "--dry-run", action="store_true", help="only show what would be done")
        add_json(each)


def run_install(arguments: argparse.Namespace) -> int:
    """Install it."""
    from appliance.operations.site.locate import find_site
    from appliance.operations.snapshots.schedule import install_schedule

    cluster, host = open_target(arguments)
    done = install_schedule(
        cluster,
        host,
        site_file=find_site(arguments.site),
        every=arguments.every,
        dry_run=arguments.dry_run,
    )
    return _print_schedule(arguments, done, files=arguments.dry_run)


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove it."""
    from appliance.operations.snapshots.schedule import remove_schedule

    cluster, host = open_target(arguments)
    done = remove_schedule(cluster, host, dry_run=arguments.dry_run)
    if arguments.dry_run and not arguments.json:
        from appliance.cli.screen import out

        out.print("\n".join(f"would remove {path}" for path in done.files) or "nothing to remove", markup=False)
        return 0
    return _print_schedule(arguments, done)


def run_show(arguments: argparse.Namespace) -> int:
    """Show it."""
    from appliance.operations.snapshots.schedule import show_schedule

    cluster, host = open_target(arguments)
    return _print_schedule(arguments, show_schedule(cluster, host))


def _print_schedule(arguments: argparse.Namespace, done: Scheduled, *, files: bool = False) -> int:
    every = {**done.files, **(done.vm.files if done.vm else {})}
    texts = (f"{path}:\n{text}" for path, text in every.items()) if files else ()
    print_result(arguments, done, [*texts, *lines(done)])
    return 0


def lines(done: Scheduled) -> Iterator[str]:
    """Format the schedule, and that of the VM's state."""
    yield from _lines(done)
    if done.vm:
        yield from (f"the VM's state: {line}" for line in _lines(done.vm))


def _lines(done: Scheduled) -> Iterator[str]:
    from appliance.units import format_time

    if not done.kind:
        yield f"no snapshots are scheduled on {done.host}"
        return
    yield f"every {done.every} min on {done.host}, by {done.kind}{'' if done.runs else ', which is not running'}"
    run = done.last_run
    if run:
        yield f"last run {format_time(run.started)}: " + (
            f"snapshot {run.number}" if run.ok else f"failed: {run.error}"
        )
        yield from (f"note: {note}" for note in (*run.notes, *run.foreign))
        if run.met_at:
            yield f"{format_time(run.met_at)} a run was skipped: {run.met}"
    drill = done.last_drill
    if done.drills and not drill:
        yield "a restore drill every week, none so far"
    elif drill:
        verdict = f"snapshot {drill.number} can be restored" if drill.ok else f"failed: {drill.error}"
        yield f"last restore drill {format_time(drill.started)}: {verdict}"
        yield from (f"note: {note}" for note in drill.notes)
