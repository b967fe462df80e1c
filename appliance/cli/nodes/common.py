"""Shared by the actions of ``sms node``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from appliance.errors import Refused

if TYPE_CHECKING:
    from appliance.operations.context import Cluster
    from appliance.operations.nodes.power import Outcome
    from appliance.provision.payloads import Node

WIDE = 240
NODES = "host lists, @GROUP, @all, or xnames"


def add_nodes(parser: Any, *, needed: bool = True) -> None:
    """Add the argument for the nodes to act on."""
    parser.add_argument("nodes", nargs="+" if needed else "*", metavar="NODES", help=NODES)


def add_yes(parser: Any) -> None:
    """Add ``--yes``."""
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def show_table(table: Any) -> None:
    """Print a table; without wrapping at the edge if the output is not a terminal."""
    from appliance.cli.screen import out

    out.print(table, width=None if out.is_terminal else WIDE)


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation on the terminal.

    Raises:
        Refused: the answer is no, or standard input is not a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refused(f"{question} standard input is not a terminal", hint="confirm with --yes")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was changed")


def confirm_controllers(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Ask on the terminal, `--yes` or not, whether controllers are right that differ from those confirmed before.

    Without a terminal this does nothing, and the nodes are refused.
    """
    from appliance.operations.nodes import controllers

    changed = controllers.changed_controllers(cluster, nodes)
    if changed and sys.stdin.isatty():
        text = controllers.describe_changes(changed)
        confirm(f"The inventory has another controller for {text}. Send the password there?", yes=False)
        controllers.confirm_controllers(cluster, {name: now for name, (_, now) in changed.items()})


def print_outcomes(arguments: argparse.Namespace, done: Sequence[Outcome]) -> int:
    """Print the outcomes: JSON, or a line per state, then a line per failed node. Returns the exit status."""
    from appliance.cli.screen import out, print_json
    from appliance.config.hostlist import fold

    failed = [one for one in done if one.error]
    if arguments.json:
        print_json(done)
        return 1 if failed else 0
    states: dict[str, list[str]] = {}
    for one in done:
        if not one.error:
            states.setdefault(one.state, []).append(one.name)
    for state, names in sorted(states.items()):
        out.print(f"{state:<8} {len(names):>5}  {fold(names)}", markup=False)
    hints = []
    for one in failed:
        out.print(f"failed   {one.name}: {one.error}", markup=False, style="red")
        if one.hint and one.hint not in hints:
            hints.append(one.hint)
    for hint in hints[:3]:
        out.print(f"  hint: {hint}", markup=False)
    return 1 if failed else 0
