"""`sms lab`: a cluster on this machine, to try the product on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from appliance.cli.common import Verbs, add_json, duration, print_result, verb

EXAMPLES = """\
  sms lab demo                                     build, start and use the services container
  sms lab demo --nodes 2 --engine kubernetes       the services move to Kubernetes and back
  sms lab demo --nodes 2 --legacy                  a management node that serves is adopted, with the jobs running
  sms lab up --nodes 2                             only the cluster
  sms lab up --shape routed                        compute nodes behind a router
  sms lab up --nodes 0 --metal 2                   diskless machines, for the provisioning VM
  sms lab up --engine kubernetes --engine nomad    also the hosts of other engines
  sms lab up --legacy                              also a management node without sms, which serves the nodes
  sms lab exec admin -- sms status --host host-a   a command on a host
  sms lab exec node1                               a shell on a host
  sms lab power host-a off                         as if it had failed; `on` starts it again
  sms lab capture --duration 10m -o lab.pcap       capture the provisioning network, for `sms classify`
  sms lab status                                   hosts, addresses, and daemons that do not answer
  sms lab down                                     remove it
  sms lab down --all                               and its files"""

WIDE = 72
"""Characters of a command, whose explanation is not in the column of the others."""


def add(verbs: Verbs) -> None:
    """Add the verb and its subcommands."""
    lab = verb(
        verbs,
        "lab",
        "a test cluster on this machine",
        "Two admin hosts, compute nodes with real daemons, and an outside network, in namespaces of this machine.",
        EXAMPLES,
    )
    parts = lab.add_subparsers(dest="part", metavar="PART", required=True)
    _add_up(parts)
    _add_status(parts)
    _add_exec(parts)
    _add_power(parts)
    _add_capture(parts)
    _add_down(parts)
    _add_demo(parts)


def _part(parts: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a part; its examples are those of the verb."""
    examples = "\n".join(line for line in EXAMPLES.splitlines() if line.startswith(f"  sms lab {name} "))
    parser: argparse.ArgumentParser = verb(parts, name, text, f"{text[:1].upper()}{text[1:]}.", examples)
    parser.add_argument("--name", default="lab", help="which lab (default: %(default)s)")
    return parser


def _add_up(parts: Any) -> None:
    parser = _part(parts, "up", "create the lab, unless it is up and unchanged")
    parser.add_argument("--nodes", type=int, default=4, metavar="N", help="compute nodes (default: %(default)s)")
    parser.add_argument(
        "--metal", type=int, default=0, metavar="N", help="diskless machines, run by QEMU (default: none)"
    )
    parser.add_argument(
        "--shape",
        choices=("flat", "routed"),
        default="flat",
        help="compute nodes on the provisioning network (default), or in a network of their own behind a router",
    )
    _add_engine(parser)
    parser.add_argument(
        "--legacy",
        action="store_true",
        help="also sms-old, a management node without sms that serves the nodes, for `sms survey` and `sms adopt`",
    )
    parser.set_defaults(run=_up)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        dest="engines",
        action="append",
        choices=("nomad", "kubernetes"),
        default=[],
        help="also the hosts of this engine; may be given for both (`make engines` builds their programs)",
    )


def _up(arguments: argparse.Namespace) -> int:
    from appliance.cli import screen, steps
    from appliance.operations.lab import lab

    progress = steps.progress(arguments.quiet)
    extras = lab.Extras(arguments.metal, arguments.shape, arguments.engines, arguments.legacy)
    made = lab.lab_up(arguments.name, arguments.nodes, progress, extras)
    if not arguments.quiet:
        flag = "" if arguments.name == "lab" else f" --name {arguments.name}"
        following = {
            f"sms lab status{flag}": "hosts, addresses, and what is not ready",
            f"sms --site {lab.site_path(arguments.name)} build": "build the image here: lab hosts reach no mirror",
            **(_legacy_steps(flag) if arguments.legacy else _start_steps(flag)),
            **_engine_steps(arguments.engines, flag),
            f"sms lab down{flag}": "remove the lab",
        }
        width = max(len(words) for words in following if len(words) < WIDE)
        lines = [f"  {words:{width}}  {what}" for words, what in following.items()]
        screen.err.print(
            "\n".join([f"lab {arguments.name} is up{'' if made else ' already'}; next:", *lines]),
            markup=False,
        )
    return 0


def _start_steps(flag: str) -> dict[str, str]:
    return {f"sms lab exec{flag} admin -- sms start --host host-a": "start the services container"}


def _legacy_steps(flag: str) -> dict[str, str]:
    """Return what follows where sms-old serves the nodes."""
    return {
        f"sms lab exec{flag} node1 -- sinfo": "the cluster, from a compute node",
        f"sms lab exec{flag} admin -- sms survey sms-old": "what it runs",
    }


def _engine_steps(engines: Sequence[str], flag: str) -> dict[str, str]:
    """Return what follows once the services container runs, in its order."""
    steps = {}
    if "nomad" in engines:
        stop = "supervisorctl -c /lab/supervisord.conf stop slurmd munged"
        steps[f"sms lab exec{flag} admin -- nomad node status"] = "the clients of Nomad"
        steps[f"sms lab exec{flag} node1 -- {stop}"] = "and on each other node: Nomad starts its own"
    if "kubernetes" in engines:
        steps[f"sms lab exec{flag} admin -- kubectl get nodes"] = "cluster nodes: they need the image (docs/engines.md)"
    for name in engines:
        steps[f"sms lab exec{flag} host-a -- sms migrate --to {name} --force"] = (
            f"the services to {name}, with their state"
        )
    return steps


def _add_status(parts: Any) -> None:
    parser = _part(parts, "status", "list the hosts and the daemons that do not answer; exit status 4 if any")
    add_json(parser)
    parser.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from appliance.cli import screen
    from appliance.operations.lab import lab

    states = lab.lab_status(arguments.name)
    machines = lab.lab_machines(arguments.name)
    if arguments.json:
        screen.print_json({"name": arguments.name, "hosts": states, "metal": machines})
    else:
        routed = any("routed" in state.addresses for state in states)
        columns = ("provisioning", "public", *(("behind the router",) if routed else ()))
        table = Table("host", "kind", *columns, "pid", "state", box=None)
        for state in states:
            health = f"[red]not ready: {state.failing}[/]" if state.failing else "[green]ready[/]"
            health = health if state.pid else "[red]off[/]"
            networks = [state.addresses.get(network, "") for network in ("provisioning", "public")]
            networks += [state.addresses.get("routed", "")] if routed else []
            table.add_row(state.name, state.kind, *networks, str(state.pid or ""), health)
        for machine in machines:
            power = "[green]on[/]" if machine.pid else "off"
            more = ("",) * (len(columns) - 1)
            table.add_row(machine.name, "metal", machine.address, *more, str(machine.pid or ""), power)
        screen.out.print(table)
    return 4 if any(state.failing for state in states) else 0


def _add_exec(parts: Any) -> None:
    parser = _part(parts, "exec", "run a command on a host; without one, a shell")
    parser.add_argument("host", metavar="HOST", help="a host of the lab, as `sms lab status` names it")
    command = parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- CMD", help="a command, its arguments"
    )
    command.required = False  # argparse would name it as missing where HOST is
    parser.set_defaults(run=_exec)


def _exec(arguments: argparse.Namespace) -> int:
    from appliance.operations.lab import lab

    command: list[str] = arguments.command
    return lab.lab_exec(arguments.name, arguments.host, command[1:] if command[:1] == ["--"] else command)


def _add_power(parts: Any) -> None:
    parser = _part(parts, "power", "power a host off, as a failed power supply does, or on; its disk is kept")
    parser.add_argument("host", metavar="HOST", help="a host of the lab, as `sms lab status` names it")
    parser.add_argument("state", metavar="STATE", choices=("off", "on"), help="off or on")
    add_json(parser)
    parser.set_defaults(run=_power)


def _power(arguments: argparse.Namespace) -> int:
    from appliance.cli import steps
    from appliance.operations.lab import lab

    changed = lab.lab_power(arguments.name, arguments.host, arguments.state, steps.progress(arguments.quiet))
    shown = {"name": arguments.name, "host": arguments.host, "state": arguments.state, "changed": changed}
    print_result(arguments, shown, [f"{arguments.host} is {arguments.state}{'' if changed else ' already'}"])
    return 0


def _add_capture(parts: Any) -> None:
    parser = _part(parts, "capture", "capture the provisioning network into a file; Ctrl-C ends it and keeps it")
    parser.add_argument("--duration", type=duration, default=60, metavar="TIME", help="60s, 10m, 1h30m (default: 60s)")
    parser.add_argument("--at", default="switch", metavar="PLACE", help="switch (default), sms, or a host's name")
    parser.add_argument("-o", "--output", metavar="FILE", help="- is standard output (default: LAB-TIME.pcap)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    add_json(parser)
    parser.set_defaults(run=_capture)


def _capture(arguments: argparse.Namespace) -> int:
    from appliance.cli import screen, steps
    from appliance.errors import ConfigError
    from appliance.operations.lab.capture import STANDARD_OUTPUT, lab_capture

    piped = arguments.output == STANDARD_OUTPUT
    if piped and arguments.json:
        raise ConfigError("the capture and a JSON document cannot both be standard output", hint="-o FILE --json")
    captured = lab_capture(
        arguments.name,
        steps.progress(arguments.quiet),
        seconds=arguments.duration,
        at=arguments.at,
        output=arguments.output,
        force=arguments.force,
    )
    if captured.dropped:
        screen.err.print(f"note: {captured.dropped} packets were lost: this machine was too busy to capture them")
    what = f"{captured.packets} packets in {captured.seconds:g} s, {captured.bytes >> 10} KiB"
    if piped:
        screen.err.print(what)
    else:
        print_result(arguments, captured, [f"{what}: {captured.file}", f"  sms classify {captured.file}"])
    return 0


def _add_down(parts: Any) -> None:
    parser = _part(parts, "down", "remove the lab; files of its admin hosts on disk are kept")
    parser.add_argument("--all", action="store_true", help="remove these too, and the cached root of the compute nodes")
    add_json(parser)
    parser.set_defaults(run=_down)


def _down(arguments: argparse.Namespace) -> int:
    from appliance.cli import screen, steps
    from appliance.operations.lab import lab

    there = lab.lab_down(arguments.name, arguments.all, steps.progress(arguments.quiet))
    if arguments.json:
        screen.print_json({"name": arguments.name, "was_up": there, "files_removed": arguments.all})
    return 0


def _add_demo(parts: Any) -> None:
    parser = _part(parts, "demo", "demonstration: build, start, a job from a node, the outside through NAT")
    parser.add_argument("--nodes", type=int, default=4, metavar="N", help="compute nodes (default: %(default)s)")
    parser.add_argument(
        "--metal",
        type=int,
        default=0,
        metavar="N",
        help="demonstrate the provisioning VM instead: N diskless machines boot from it, then it is switched off",
    )
    _add_engine(parser)
    parser.add_argument(
        "--legacy",
        action="store_true",
        help="demonstrate `sms adopt` instead, of a node that serves",
    )
    add_json(parser)
    parser.set_defaults(run=_demo)


def _from_a_node(arguments: argparse.Namespace, flag: str) -> str:
    if arguments.metal:
        return f"  sms lab exec{flag} admin -- sms vm start --host host-a       the VM again\n"
    return f"  sms lab exec{flag} node1 -- sinfo                      the cluster, from a compute node\n"


def _demo(arguments: argparse.Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    from appliance.cli import screen, steps
    from appliance.errors import ConfigError
    from appliance.operations.lab.demo import demo

    if sum(map(bool, (arguments.metal, arguments.engines, arguments.legacy))) > 1:
        raise ConfigError("--metal, --engine and --legacy are demonstrations of their own", hint="give one of them")
    progress = steps.progress(arguments.quiet)
    if arguments.metal:
        from appliance.operations.lab.demo_vm import demo_vm

        shown = demo_vm(arguments.name, arguments.metal, progress, quiet=arguments.quiet)
    elif arguments.legacy:
        from appliance.operations.lab.demo_adopt import demo_adopt

        shown = demo_adopt(arguments.name, arguments.nodes, progress)
    elif arguments.engines:
        from appliance.operations.lab.demo_engines import demo_engines

        shown = demo_engines(arguments.name, arguments.nodes, arguments.engines, progress, quiet=arguments.quiet)
    else:
        shown = demo(arguments.name, arguments.nodes, progress, quiet=arguments.quiet)
    if arguments.json:
        screen.print_json(shown)
        return 0
    table = Table("check", "evidence", "s", box=None, header_style="bold", pad_edge=False)
    for check in shown.checks:
        table.add_row(escape(check.what), escape(check.seen), f"{check.seconds:.1f}")
    screen.out.print("", table, "", sep="\n")
    flag = "" if arguments.name == "lab" else f" --name {arguments.name}"
    screen.out.print(
        f"All checks passed. The lab stays up:\n"
        f"  sms lab exec{flag} admin -- sms status --host host-a   probe every service\n"
        f"{_from_a_node(arguments, flag)}"
        f"  sms lab exec{flag} host-a                              a shell on the admin host\n"
        f"  sms lab down{flag}                                     remove it",
        markup=False,
    )
    return 0
