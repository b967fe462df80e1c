"""``sms adopt``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, cost_lines, duration_or_none, filled, open_site, print_result, verb
from appliance.units import format_size

if TYPE_CHECKING:
    from appliance.operations.adopt.adopt import AdoptResult
    from appliance.operations.adopt.capture import Traffic
    from appliance.operations.adopt.undo import UndoResult
    from appliance.plan.adopt.adoption import AdoptPlan
    from appliance.plan.adopt.traffic import Speaker

EXAMPLES = """\
  sms adopt sms-old --to host-a --dry-run   run all checks, show what moves, what stays, the predicted outages
  sms adopt sms-old --to host-a             take its services over, with the jobs running
  sms adopt --undo                          give them back, with the jobs accepted since
  sms adopt --finish                        end the adoption: it cannot be undone any more

The site file is that of `sms survey sms-old --write`. Name the old node by an address that stays on it.
Killed at any point, the same command again completes the adoption or undoes it."""

CAPTURE_S = 60.0
"""Seconds of each capture, without ``--capture``."""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "adopt",
        "take over a live management node, with the jobs running",
        "Copy the state of a management node while it serves, stop slurmctld and slurmdbd there, start everything\n"
        "isolated in the services container, and switch the addresses with their MAC addresses. Jobs keep running,\n"
        "connections through NAT are kept. The old node takes over again on any failure. Nothing is deleted there.",
        EXAMPLES,
    )
    add = parser.add_argument
    add("old", nargs="?", type=filled, metavar="[USER@]HOST[:PORT]", help="the old node")
    add("--to", type=filled, metavar="HOST", help="the admin host that gets the services")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="give the services back to the old node")
    what.add_argument("--finish", action="store_true", help="end the last adoption for good")
    what.add_argument("-n", "--dry-run", action="store_true", help="check both hosts and show the plan")
    add(
        "--capture",
        type=duration_or_none,
        metavar="SPAN",
        help="capture before and after it for this long, compare, and show who still uses the old node (default: 1m; "
        "0: do not)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Adopt, undo, finish, or show the plan."""
    from appliance.errors import ConfigError, Unverified
    from appliance.operations.adopt.survey import open_host
    from appliance.operations.context import need_root

    back = arguments.undo or arguments.finish
    if back and (arguments.old or arguments.to):
        raise ConfigError("--undo and --finish take no host", hint="they concern the last adoption of the site")
    if arguments.capture is not None and (back or arguments.dry_run):
        raise ConfigError("--capture concerns an adoption", hint="nothing is captured otherwise: leave it out")
    if not back and not (arguments.old and arguments.to):
        raise ConfigError("the old node and --to are needed", hint="sms adopt sms-old --to host-a")
    need_root()
    cluster = open_site(arguments)
    if arguments.undo:
        from appliance.operations.adopt.undo import undo

        undone = undo(cluster)
        print_result(arguments, undone, _undo_lines(cluster.site.cluster, undone))
        return 0
    if arguments.finish:
        from appliance.operations.adopt.undo import finish

        record = finish(cluster)
        print_result(arguments, record, _finish_lines(record.old, record.request.state))
        return 0
    from appliance.operations.adopt.adopt import adopt, refuse_doubtful, rehearse_adopt

    old = open_host(arguments.old)
    if arguments.dry_run:
        plan = rehearse_adopt(cluster, old, arguments.old, arguments.to)
        print_result(arguments, plan, _plan_lines(plan))
        refuse_doubtful(plan)
        return 0
    capture_s = CAPTURE_S if arguments.capture is None else arguments.capture
    result = adopt(cluster, old, arguments.old, arguments.to, capture_s=capture_s)
    print_result(arguments, result, _result_lines(cluster.site.cluster, result))
    return Unverified.status if result.silent or result.unusable or result.failed else 0


def _plan_lines(plan: AdoptPlan) -> Iterator[str]:
    yield f"{plan.old} to {plan.target}: cluster {plan.cluster}"
    for inside, what in plan.moves.items():
        yield f"  {inside} gets {what}"
    yield f"  {plan.old} keeps {', '.join(plan.keeps) or 'no address in these networks'}"
    if plan.state:
        database = f", and a database of {format_size(plan.database_bytes)}" if plan.database else ""
        yield f"copied: {format_size(plan.state_bytes)} of {plan.state}{database}"
    yield f"stopped there: {', '.join(plan.stops)}"
    if plan.stays:
        yield f"go on running there: {', '.join(plan.stays)}"
    basis = f"median of {plan.measured} earlier adoptions" if plan.measured else "defaults: nothing measured yet"
    if plan.rehearsed:
        basis = "rehearsed with a copy of its state"
    yield f"predicted ({basis}):"
    yield from (f"  {line}" for line in _outage_lines({one.name: one.predicted_s for one in plan.outages}))
    for doubt in plan.doubts:
        if doubt.severity == "warning":
            yield f"warning: {doubt.what}"
            yield f"  hint: {doubt.todo}"


def _outage_lines(outage: dict[str, float]) -> Iterator[str]:
    by_time: dict[float, list[str]] = {}
    for name, seconds in outage.items():
        by_time.setdefault(seconds, []).append(name)
    for seconds, names in sorted(by_time.items()):
        yield f"outage {seconds:.2f} s: {', '.join(names)}"


def _result_lines(cluster: str, result: AdoptResult) -> Iterator[str]:
    from appliance.config.hostlist import fold
    from appliance.text import one_line

    yield from _outage_lines(result.outage)
    if not result.resumed:
        before, last = format_size(result.state_bytes), format_size(result.last_bytes)
        yield f"{before} of state copied before, {last} during the outage of slurmctld"
        yield f"connections through NAT transferred: {result.connections}; jobs known: {result.jobs}"
    if result.stays:
        yield f"on {result.old} go on running: {', '.join(result.stays)}"
    if result.silent:
        names = one_line(fold(result.silent), 120)
        yield f"warning: {len(result.silent)} nodes do not respond: {names}; `sms status` shows why"
    yield from cost_lines(result.unusable, result.failed)
    if result.traffic:
        yield from _traffic_lines(result.old, result.target, result.traffic)
    yield from (f"note: {note}" for note in result.notes)
    took = "" if result.resumed else f", after {result.seconds:.1f} s"
    yield f"{cluster} serves on {result.target}, generation {result.generation}{took}"
    yield "`sms adopt --undo` gives it back; `sms adopt --finish` ends the adoption"


def _traffic_lines(old: str, target: str, traffic: Traffic) -> Iterator[str]:
    """Yield what captures have shown; names and addresses come from packets."""
    from appliance.text import printable

    span = f"{traffic.seconds:g} s"
    if traffic.services:
        yield f"seen on {target} within {span}: {printable(', '.join(traffic.services), 300)}"
    if traffic.compared:
        compared = traffic.compared
        yield f"compared with {compared.file}: {compared.same} services with the same verdict and similar numbers"
        for one in compared.changes:
            yield f"  {one.title}: {printable(one.text, 240)}"
    planned = [f"{_use(speaker)} by {speaker.count}" for speaker in traffic.speakers if speaker.planned]
    if planned:
        yield f"machines that use {old}, as planned: {', '.join(planned)}"
    for speaker in traffic.speakers:
        if not speaker.planned:
            names = f"{', '.join(speaker.addresses)}{' and others' if speaker.count > len(speaker.addresses) else ''}"
            what = f"use {_use(speaker)} at {old}, which the plan does not name"
            through = f"send packets to other machines through {old}: is it their router?"
            yield f"warning: {names} {what if speaker.port else through}"
    yield from (f"warning: {printable(one, 200)}" for one in traffic.problems)


def _use(one: Speaker) -> str:
    from appliance.text import printable

    return printable(f"{one.service or 'an unknown service'}{f' ({one.port})' if one.port else ''}", 60)


def _undo_lines(cluster: str, result: UndoResult) -> Iterator[str]:
    yield from _outage_lines(result.outage)
    yield f"connections through NAT transferred: {result.connections}; jobs known: {result.jobs}"
    yield from (f"note: {note}" for note in result.notes)
    yield f"{cluster} serves on {result.old} again, after {result.seconds:.1f} s"


def _finish_lines(old: str, state: str) -> Iterator[str]:
    yield f"the adoption of {old} is finished; its services are disabled there, its data is unchanged"
    yield f"remove {state}* there, and databases *_before_sms_*, when they are not needed any more"
