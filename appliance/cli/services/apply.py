"""``sms apply``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, cost_lines, open_serving, print_result, seconds, verb

if TYPE_CHECKING:
    from appliance.operations.services.apply import Applied, ApplyPlan, Step

EXAMPLES = """\
  sms apply --dry-run    show the changed lines, what reloads and what restarts
  sms apply              apply the site file to the running services container
  sms apply -n --json >cost; sms apply --judged cost    although jobs are lost, if no others are
  sms apply --force      also if jobs are lost: of a partition that is removed, on nodes that are"""
MOST_BYTES = 64 << 20
LINES = 20
"""Changed lines of a file that are shown at most."""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "apply",
        "apply a changed site file",
        "Apply changes of the site file to the running services container: services read changed files again, or are "
        "restarted one by one; the others keep running. Other addresses, names or services need a new instance: it is "
        "started beside the running one on a copy of the overlay, and takes over as in a migration. If a service "
        "fails, or nodes take no job since, the services run as before (status 5). What would end jobs or reservations "
        "is refused (status 3).",
        EXAMPLES,
    )
    parser.add_argument(
        "--wait", type=seconds, default=60, metavar="SECONDS", help="how long each service may take to answer (60)"
    )
    add_host(parser, serving=True)
    parser.add_argument("-n", "--dry-run", action="store_true", help="show what would be done, change nothing")
    parser.add_argument(
        "--judged",
        type=Path,
        metavar="FILE",
        help="the output of `--dry-run --json`: apply if it costs no more than this says, as seen by a person",
    )
    parser.add_argument("--force", action="store_true", help="apply although jobs, reservations or nodes are lost")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Apply, or show the plan."""
    from appliance.config.slurm_files import FOLDER
    from appliance.errors import Refused, Unverified
    from appliance.operations.migration.here import apply, plan_switch, shown_outages
    from appliance.operations.services.apply import plan_apply

    cluster, host = open_serving(arguments)
    accepted = _read_judged(arguments.judged, host.name) if arguments.judged else frozenset()
    if arguments.dry_run:
        plan = plan_apply(cluster, host)
        switching = plan_switch(cluster, host, plan.image) if plan.switch else None
        outages = [f"    {line}" for line in shown_outages(switching.away)] if switching else []
        shown_plan = {**asdict(plan), "switching": asdict(switching) if switching else None}
        lines = [*_plan_lines(plan), *outages, *_notes((), [plan.newer, _rebuild_note(plan.rebuild)])]
        print_result(arguments, shown_plan, lines)
        return Refused.status if plan.refused and not arguments.force else 0
    done, switched = apply(cluster, host, wait_s=arguments.wait, force=arguments.force, accepted=accepted)
    if switched:
        lines = [*shown_outages(switched.away, switched.outage), *_notes(switched.exceeded, switched.notes)]
        lines += [
            f"{host.name} serves with a new instance, generation {switched.generation}",
            *_cost_lines(done),
            *_notes((), [done.newer, _rebuild_note(done.rebuild)]),
        ]
        print_result(arguments, {**asdict(done), "switched": asdict(switched)}, lines)
    else:
        behind = cluster.site.provisioning and f"{FOLDER}/slurm.conf" in done.changed
        notes = ["the provisioning VM has the slurm.conf of before: `sms files push`"] if behind else []
        print_result(arguments, {**asdict(done), "switched": None}, [*_applied_lines(done), *_notes((), notes)])
    return Unverified.status if done.unusable or done.failed or done.unknown else 0


def _read_judged(path: Path, host: str) -> frozenset[str]:
    """Return what a person has seen that an apply costs.

    Raises:
        ConfigError: the file is not one of `--dry-run --json`, or of another host.
    """
    from appliance.errors import ConfigError

    try:
        found = json.loads(path.read_bytes()[:MOST_BYTES])
        if found["host"] == host and all(isinstance(one, str) for one in found["costs"]):
            return frozenset(found["costs"])
        why = f"it is of another host than {host}"
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    except (ValueError, KeyError, TypeError):
        why = "it is not an output of `sms apply --dry-run --json`"
    raise ConfigError(f"{path}: {why}", hint=f"sms apply --host {host} --dry-run --json >{path}")


def _applied_lines(done: Applied) -> list[str]:
    lines = [f"nothing to do: {done.host} runs with this site file"] if done.current else []
    lines += [f"the MTU of the container's {name} is {mtu} now" for name, mtu in done.mtus.items()]
    lines += [f"wrote {path}" for path in done.changed if not path.startswith("/etc/sms/seed")]
    lines += [f"a file was changed inside the container; the changed text is kept as {path}" for path in done.kept]
    for step in done.steps:
        predicted = f"predicted at most {step.predicted_s:g} s"
        took = f"restarted, outage {done.seconds[step.service]:.2f} s; {predicted}"
        lines.append(f"{step.service}: {took if step.kind == 'restart' else 'reloaded, outage 0 s'}")
    return [*lines, *_cost_lines(done), *_notes(done.exceeded, [done.newer, _rebuild_note(done.rebuild)])]


def _cost_lines(done: Applied) -> list[str]:
    return [*_refused("done, although", done.refused), *cost_lines(done.unusable, done.failed, done.unknown)]


def _rebuild_note(settings: Sequence[str]) -> str:
    if not settings:
        return ""
    return f"the running image was built of other settings: {', '.join(settings)}; `sms build`, then `sms upgrade`"


def _notes(exceeded: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    warnings = [f"WARNING: longer than predicted: {one}" for one in exceeded]
    return [*warnings, *(f"note: {one}" for one in others if one)]


def _plan_lines(plan: ApplyPlan) -> list[str]:
    if plan.current:
        return [f"nothing to do: {plan.host} runs with this site file"]
    lines = []
    for change in plan.changes:
        lines.append(f"would change {change.path}" + (" (it was edited in the container)" if change.edited else ""))
        lines += [f"    {line}" for line in change.lines[:LINES]]
        if len(change.lines) > LINES:
            lines.append(f"    and {len(change.lines) - LINES} more lines")
    lines += [_step_line(step) for step in plan.steps]
    lines += [f"would set the MTU of the container's {name} to {mtu}" for name, mtu in plan.mtus.items()]
    lines += [f"would switch to a new instance: {why}" for why in plan.switch]
    if not plan.steps and not plan.switch:
        lines.append("no service needs a reload or a restart")
    return [*lines, *_refused("would be refused without --force:", plan.refused)]


def _refused(what: str, refused: Sequence[str]) -> list[str]:
    return [what, *(f"  {line}" for line in refused)] if refused else []


def _step_line(step: Step) -> str:
    if step.kind == "reload":
        return f"would reload {step.service}: predicted outage 0 s"
    predicted = f"predicted outage at most {step.predicted_s:g} s"
    return f"would restart {step.service}: {predicted}; tolerated: {step.tolerated_s:g} s"
