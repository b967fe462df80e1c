"""``sms restart``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_host, add_json, open_serving, print_result, seconds, verb

EXAMPLES = """\
  sms restart postfix            restart it, and wait until it answers
  sms restart munge slurmctld    several, one after the other in the order of their start
  sms restart --dry-run munge    show what its users notice meanwhile; change nothing"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "restart",
        "restart single services",
        "Restart services of the running services container, and wait until they answer. The others keep running.",
        EXAMPLES,
    )
    parser.add_argument("services", nargs="+", metavar="SERVICE", help="services of the site")
    parser.add_argument(
        "--wait", type=seconds, default=60, metavar="SECONDS", help="how long each may take to answer (60)"
    )
    add_host(parser, serving=True)
    parser.add_argument("-n", "--dry-run", action="store_true", help="show what would be restarted, change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Restart; status 4 if a service does not answer afterwards."""
    from appliance.operations.services.restart import plan_restart, restart

    cluster, host = open_serving(arguments)
    if arguments.dry_run:
        plan = plan_restart(cluster, host, arguments.services)
        lines = [f"would restart {one.service}; tolerated: {one.tolerated_s:g} s: {one.why}" for one in plan]
        print_result(arguments, plan, lines)
        return 0
    done = list(restart(cluster, host, arguments.services, wait_s=arguments.wait))
    print_result(
        arguments,
        done,
        (
            f"{one.service} answers after {one.seconds:.1f} s: {one.detail}"
            if one.ok
            else f"{one.service} does not answer: {one.detail}; `sms logs {one.service}` shows its log"
            for one in done
        ),
    )
    return 0 if all(one.ok for one in done) else 4
