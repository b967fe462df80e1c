"""``sms deploy``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from appliance.cli.common import Verbs, add_json, duration, filled, open_site, print_result, this_host, verb

if TYPE_CHECKING:
    from appliance.host.base import Host
    from appliance.operations.context import Cluster
    from appliance.operations.engines.deploy import Outcome
    from appliance.operations.engines.deploy_plan import DeployPlan, StopPlan
    from appliance.operations.engines.drain import Drained, DrainPlan

EXAMPLES = """\
  sms deploy --engine kubernetes --dry-run   what would be created or changed
  sms deploy --engine kubernetes             apply it and wait until every service is ready
  sms deploy                                 again, on the engine that has the services
  sms deploy status                          exit status 4 if it is not healthy, or was changed beside sms
  sms deploy drain node1                     drain it in Slurm, wait for its jobs, then drain it on the engine
  sms deploy drain node1 --undo              use it again
  sms deploy rollback                        what was deployed before; the state is not rolled back
  sms deploy stop                            stop the services and keep their volumes"""

ACTION_EXAMPLES = {
    "status": (
        "  sms deploy status          exit status 4 if a service is not ready, or was changed beside sms",
        "  sms deploy status --json   the same for scripts",
    ),
    "drain": (
        "  sms deploy drain node1 -n              its jobs, and what would be stopped",
        "  sms deploy drain node1                 status 1 if its jobs did not end: the engine was not touched",
        "  sms deploy drain node1 --timeout 10m   wait no longer for them",
        "  sms deploy drain node1 --undo          use it again",
    ),
    "rollback": (
        "  sms deploy rollback -n   what would be changed",
        "  sms deploy rollback      twice, and it is as before",
    ),
    "stop": (
        "  sms deploy stop -n               what would be stopped, in its order",
        "  sms deploy stop                  jobs run on; volumes are kept",
        "  sms deploy --engine kubernetes   start them again",
    ),
}
"""Examples of each action."""

READY_S, DRAIN_S = 300, 3600
"""Default time limits: of each group of workloads, and of the jobs of a node."""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "deploy",
        "run the services on Nomad or Kubernetes",
        "Run the services of the site on another engine, as `sms export` renders them, by the engine's own program\n"
        "(`kubectl`, `nomad`) on this admin host. A second run changes nothing.\n\n"
        "The section `engines` of the site file has the engine's settings. Cluster and account: KUBECONFIG, or\n"
        "NOMAD_ADDR, NOMAD_TOKEN, NOMAD_CACERT and so on, or `kubeconfig`, `context`, `api` and `token_file` there.\n\n"
        "Exit status 3: refused, such as while a services container has the services (`sms migrate --to` moves them\n"
        "with their state). 4: they are not ready in time, or what stays in the services container does not\n"
        "serve; the same command goes on. 1: a step failed.",
        EXAMPLES,
    )
    parser.add_argument(
        "--engine", choices=("kubernetes", "nomad"), help="the engine (default: the one that has the services)"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="show the differences, change nothing")
    _add_timeout(parser, READY_S, "time limit of each group of workloads")
    add_json(parser)
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    status = _action(
        actions,
        "status",
        "what runs there, whether it answers, and what was changed beside sms",
    )
    status.set_defaults(run=run_status)
    drain = _action(actions, "drain", "drain a machine in Slurm, wait for its jobs, then drain it on the engine")
    drain.add_argument("node", metavar="NODE", type=filled, help="name of the machine")
    drain.add_argument("--undo", action="store_true", help="let the engine and Slurm use it again")
    _add_timeout(drain, DRAIN_S, "time limit of its jobs")
    drain.set_defaults(run=run_drain)
    rollback = _action(actions, "rollback", "apply what was deployed before; the state is not rolled back")
    _add_timeout(rollback, READY_S, "time limit of each group of workloads")
    rollback.set_defaults(run=run_rollback)
    stop = _action(actions, "stop", "stop the services in reverse order and keep their volumes")
    stop.set_defaults(run=run_stop)
    for action in (drain, rollback, stop):
        action.add_argument(
            "-n", "--dry-run", action="store_true", default=argparse.SUPPRESS, help="show what it would do"
        )
    for action in (status, drain, rollback, stop):
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the result as JSON")


def _action(actions: Any, name: str, what: str) -> Any:
    return verb(actions, name, what, f"{what[:1].upper()}{what[1:]}.", "\n".join(ACTION_EXAMPLES[name]))


def _add_timeout(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    parser.add_argument(
        "--timeout",
        type=duration,
        default=default,
        metavar="TIME",
        help=f"{what}, such as 90s or 1h (default: {default}s)",
    )


def _open(arguments: argparse.Namespace) -> tuple[Cluster, Host]:
    cluster = open_site(arguments)
    return cluster, this_host(cluster)


def run(arguments: argparse.Namespace) -> int:
    """Deploy, or show what that would do."""
    from appliance.errors import ConfigError
    from appliance.operations.engines.deploy import deploy
    from appliance.operations.engines.deploy_plan import plan_deploy
    from appliance.operations.engines.deployed import find_deployed

    cluster, host = _open(arguments)
    record = None if arguments.engine else find_deployed(cluster, host)
    engine = arguments.engine or (record.engine if record else "")
    if not engine:
        raise ConfigError("no engine has the services yet", hint="name one: --engine kubernetes, or --engine nomad")
    if arguments.dry_run:
        return _show_plan(arguments, plan_deploy(cluster, host, engine))
    return _show_outcome(arguments, deploy(cluster, host, engine, timeout_s=arguments.timeout))


def _show_outcome(arguments: argparse.Namespace, done: Outcome) -> int:
    from appliance.errors import Unverified

    print_result(arguments, done, _outcome_lines(done))
    return Unverified.status if done.silent else 0


def _show_plan(arguments: argparse.Namespace, plan: DeployPlan) -> int:
    from appliance.errors import Refused

    print_result(arguments, plan, _plan_lines(plan))
    return Refused.status if plan.refusal else 0


def _plan_lines(plan: DeployPlan) -> Iterator[str]:
    if plan.refusal:
        yield f"it would be refused: {plan.refusal}"
        if plan.hint:
            yield f"  hint: {plan.hint}"
    yield f"{plan.cluster} on {plan.engine}, deployment {plan.generation}" + ("; nothing to do" * plan.unchanged)
    for one in plan.differences:
        yield f"{one.name}: {one.change}"
        if one.change == "change":
            yield from (f"    {line}" for line in one.text.rstrip().splitlines())
    for name, why in plan.left.items():
        yield f"{name} does not run meanwhile: {why}"


def _outcome_lines(done: Outcome) -> Iterator[str]:
    yield from (f"created: {what}" for what in done.created)
    changed = {name: change for name, change in done.changes.items() if change != "unchanged"}
    for name, change in changed.items():
        seconds = f", ready after {done.waited[name]:g} s" if name in done.waited else ""
        yield f"{name}: {change}{seconds}"
    if done.silent:
        yield f"what stays in the services container does not serve: {done.silent}"
    what = "" if changed else "; nothing was changed"
    yield f"{done.cluster} on {done.engine}, deployment {done.generation}: {done.seconds:g} s{what}"


def run_status(arguments: argparse.Namespace) -> int:
    """Show what runs on the engine."""
    from appliance.cli.engine_facts import status_lines
    from appliance.operations.engines.deploy_status import deploy_status

    cluster, host = _open(arguments)
    found = deploy_status(cluster, host)
    print_result(arguments, found, status_lines(found))
    return 0 if found.healthy else 4


def run_drain(arguments: argparse.Namespace) -> int:
    """Drain a machine, or use it again."""
    from appliance.operations.engines.drain import drain, plan_drain, plan_undo, undo

    cluster, host = _open(arguments)
    if arguments.dry_run:
        plan = (plan_undo if arguments.undo else plan_drain)(cluster, host, arguments.node)
        print_result(arguments, plan, _drain_plan_lines(plan))
        return 0
    if arguments.undo:
        done = undo(cluster, host, arguments.node)
    else:
        done = drain(cluster, host, arguments.node, timeout_s=arguments.timeout)
    print_result(arguments, done, _drained_lines(done))
    return 0


def _drain_plan_lines(plan: DrainPlan) -> Iterator[str]:
    state = f"{plan.slurm} in Slurm" if plan.slurm else "no state in Slurm"
    yield f"{plan.node}: {state}" + "; nothing to do" * (not plan.steps)
    yield from plan.steps


def _drained_lines(done: Drained) -> Iterator[str]:
    yield from done.engine
    waited = f", its jobs had ended after {done.waited_s:g} s" if done.waited_s else ""
    state = done.slurm.rstrip("*")  # which Slurm appends if the node's slurmd does not answer
    silent = "" if state == done.slurm else "; its slurmd does not answer" + " yet" * done.undone
    yield f"{done.node}: {f'{state} in Slurm' if state else 'not a node of Slurm'}{waited}{silent}"


def run_rollback(arguments: argparse.Namespace) -> int:
    """Apply what was deployed before."""
    from appliance.operations.engines.deploy import rollback
    from appliance.operations.engines.deploy_plan import plan_rollback

    cluster, host = _open(arguments)
    if arguments.dry_run:
        return _show_plan(arguments, plan_rollback(cluster, host))
    return _show_outcome(arguments, rollback(cluster, host, timeout_s=arguments.timeout))


def _stop_plan_lines(plan: StopPlan) -> Iterator[str]:
    yield from (f"{name}: {change}" for name, change in plan.changes.items())
    yield from plan.stays.lines


def run_stop(arguments: argparse.Namespace) -> int:
    """Stop the services on the engine."""
    from appliance.operations.engines.deploy import stop
    from appliance.operations.engines.deploy_plan import plan_stop

    cluster, host = _open(arguments)
    if arguments.dry_run:
        plan = plan_stop(cluster, host)
        print_result(arguments, plan, _stop_plan_lines(plan))
        return 0
    done = stop(cluster, host)
    print_result(arguments, done, _outcome_lines(done))
    return 0
