"""``sms apply``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, open_target, print_result, seconds, verb

if TYPE_CHECKING:
    from appliance.operations.services.apply import ApplyPlan, Step

EXAMPLES = """\
  sms apply --dry-run    show the changed lines, what reloads and what restarts
  sms apply              apply the site file to the running services container"""
LINES = 20
"""Changed lines of a file that are shown at most."""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "apply",
        "apply a changed site file",
        "Apply changes of the site file to the running services container: services read changed files again, or are "
        "restarted one by one; the others keep running. If a service fails, the files of before are restored "
        "(status 5). Other addresses, names or services need a new start or an upgrade, and are refused (status 3).",
        EXAMPLES,
    )
    parser.add_argument(
        "--wait", type=seconds, default=60, metavar="SECONDS", help="how long each service may take to answer (60)"
    )
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="show what would be done, change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Apply, or show the plan."""
    from appliance.operations.services.apply import apply, plan_apply

    cluster, host, shown = open_target(arguments)
    if arguments.dry_run:
        plan = plan_apply(cluster, host)
        print_result(arguments, plan, _plan_lines(plan))
        return 0
    done = apply(cluster, host, shown, wait_s=arguments.wait)
    lines = [f"nothing to do: {host.name} runs with this site file"] if done.current else []
    lines += [f"wrote {path}" for path in done.changed if not path.startswith("/etc/sms/seed")]
    lines += [f"a file was changed inside the container; the changed text is kept as {path}" for path in done.kept]
    for step in done.steps:
        took = f"restarted, answers after {done.seconds[step.service]:.1f} s" if step.kind == "restart" else "reloaded"
        lines.append(f"{step.service}: {took}")
    print_result(arguments, done, lines)
    return 0


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
    if not plan.steps:
        lines.append("no service needs a reload or a restart")
    return lines


def _step_line(step: Step) -> str:
    if step.kind == "reload":
        return f"would reload {step.service}: predicted outage 0 s"
    predicted = "not measured yet" if step.predicted_s is None else f"{step.predicted_s:g} s"
    return f"would restart {step.service}: predicted outage {predicted}; tolerated: {step.tolerated_s:g} s"
