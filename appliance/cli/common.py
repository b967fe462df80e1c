"""Helpers shared by verbs that act on an admin host: options, value types, and opening the host."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from appliance.text import whole_number
from appliance.units import read_duration

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.host.base import Host
    from appliance.operations.context import Cluster
    from appliance.operations.services.unfinished import FailoverLoss

Verbs: TypeAlias = "argparse._SubParsersAction[Any]"
"""What ``add`` of a verb adds its parser to."""


INSET = " " * 6
RESUMES = "  correct what its reason says, then: sms exec -- scontrol update NodeName=NAME State=RESUME"
MOST_LINES = 20
"""Of nodes, and of jobs, that are shown."""


class HelpFormatter(argparse.HelpFormatter):
    """Fills a description to the width of the terminal, and keeps the lines of examples.

    An example that is too long has its comment on the line below.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in [*text.splitlines(), ""]:
            if line and not line.startswith(" ") and line != "examples:":
                paragraph.append(line)
                continue
            lines += textwrap.wrap(" ".join(paragraph), width)
            paragraph = []
            if len(line) > width and (example := re.fullmatch(r"( *\S.*?\S) {2,}(\S.*)", line)):
                lines += [example[1], *textwrap.wrap(example[2], width, initial_indent=INSET, subsequent_indent=INSET)]
            else:
                lines.append(line)
        return "\n".join(indent + line for line in lines[:-1])


def verb(verbs: Verbs, name: str, help: str, description: str, examples: str) -> Any:
    """Add the parser of a verb, with examples below its options."""
    return verbs.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=HelpFormatter,
    )


def add_actions(parser: argparse.ArgumentParser, modules: Iterable[str]) -> None:
    """Add the actions of a verb; each is a module of ``appliance.cli`` with a function ``add``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in modules:
        importlib.import_module(f"appliance.cli.{name}").add(actions)


def add_host(parser: argparse.ArgumentParser, *, serving: bool = False) -> None:
    """Add the option for the admin host to act on; ``serving``: that of ``open_serving``."""
    default = "this machine, or if it is none the host that serves" if serving else "this machine"
    parser.add_argument("--host", type=filled, metavar="NAME", help=f"the admin host to act on (default: {default})")


def this_host(cluster: Cluster) -> Host:
    """Return this machine, which has to be an admin host: for verbs without ``add_host``.

    Raises:
        Refused: it is not, or the caller is not root.
    """
    from appliance.errors import Refused

    try:
        cluster.host(None)
    except Refused as error:
        names = " or ".join(one.name for one in cluster.site.admin_hosts)
        raise Refused(error.message, hint=f"run this on {names}") from None
    return cluster.target(None)


def add_snapshot_name(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a snapshot in a repository or on another host."""
    parser.add_argument(
        "snapshot",
        nargs="?",
        default="latest",
        type=filled,
        metavar="NAME",
        help="its number there, an archive name, or latest (the default)",
    )


def add_vm(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the snapshots of the VM's state; ``open_site`` handles it."""
    parser.add_argument(
        "--vm",
        dest="vm_state",
        action="store_true",
        help="snapshots of the provisioning VM's state, not of the overlay",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for machine-readable results."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def duration(text: str) -> float:
    """Parse a duration such as ``60s`` or ``1h30m`` into seconds; for argparse."""
    try:
        return read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def duration_or_none(text: str) -> float:
    """Parse a duration, or ``0`` for none; for argparse."""
    return 0.0 if text == "0" else duration(text)


def seconds(text: str) -> float:
    """Parse a positive number of seconds up to one day; for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 86400")
    return found


def positive(text: str) -> int:
    """Parse a positive whole number; for argparse."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return found


def filled(text: str) -> str:
    """Return the text unless it is empty, which usually comes from an unset shell variable.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: is a shell variable not set?")
    return text


def absolute(text: str) -> str:
    """Return an absolute path of another host, without a slash at its end; for argparse."""
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an absolute path")
    return text.rstrip("/") or "/"


def selector(text: str) -> str:
    """Return a snapshot's number, or ``latest``; for argparse."""
    if text != "latest" and whole_number(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a snapshot nor latest")
    return text


def cost_lines(unusable: Sequence[str], failed: Sequence[str], unknown: Sequence[str] = ()) -> list[str]:
    """Return lines for nodes that take no job since a change, jobs that failed, and users; the first ones of each."""
    found = (f"takes no job since: {one}" for one in unusable[:MOST_LINES])
    users = (f"no longer known, and has jobs: {one}" for one in unknown[:MOST_LINES])
    lines = [f"WARNING: {one}" for one in (*found, *failed[:MOST_LINES], *users)]
    return [*lines, *([RESUMES] if unusable else [])]


def print_result(arguments: argparse.Namespace, result: Any, lines: Iterable[str], *, markup: bool = False) -> None:
    """Print the result of a verb: as JSON with ``--json``, else as lines.

    Args:
        result: a dataclass or what JSON knows; also dataclasses in lists and dicts.
        lines: read only if they are printed; in rich markup with ``markup``.
    """
    from appliance.cli.screen import out, print_json

    if arguments.json:
        print_json(result)
        return
    for line in lines:
        out.print(line, markup=markup)


def loss_lines(loss: FailoverLoss) -> Iterator[str]:
    """Yield what a failover from a snapshot lost, as text for the user."""
    from appliance.units import format_time, format_uptime

    atmost = "" if loss.dead_s is not None else "at most "
    where = f" on {loss.taken_on}" if loss.taken_on else ""
    number = f" (snapshot {loss.snapshot})" if loss.snapshot else ""
    yield (
        f"lost: {atmost}{format_uptime(int(loss.lost_s))}. Restored as it was{where} at "
        f"{format_time(loss.taken)}{number}: jobs submitted, accounting and messages since then are lost"
    )
    yield from outage_lines(loss.old, loss.dead_s, max(loss.alive, loss.taken))


def outage_lines(old: Iterable[str], dead_s: float | None, alive: float) -> Iterator[str]:
    """Yield how long there was no service before a failover, as text; ``alive``: Unix time of the last sign."""
    from appliance.units import format_time, format_uptime

    hosts = " and ".join(old)
    if dead_s is not None:
        yield f"no service for {format_uptime(int(dead_s))}: {hosts} was last heard from at {format_time(alive)}"
    else:
        yield f"when {hosts} failed is not known: its guard has not been heard from"


@contextmanager
def standard_output() -> Iterator[TextIO]:
    """Yield standard output and flush it at the end; an error names it.

    Raises:
        OSError: it cannot be written to.
    """
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = error.filename or "standard output"
        raise


def open_site(arguments: argparse.Namespace, *, classification: Path | None = None) -> Cluster:
    """Return the site's cluster, with the services of a classification if given; verbs show their progress."""
    from appliance.cli.steps import progress
    from appliance.operations.context import open_cluster
    from appliance.operations.site.locate import find_site

    site, shown = find_site(arguments.site), progress(arguments.quiet)
    cluster = open_cluster(site, arguments.state, shown, classification=classification)
    return cluster.of_vm() if getattr(arguments, "vm_state", False) else cluster


def open_target(arguments: argparse.Namespace) -> tuple[Cluster, Host]:
    """Return the site's cluster, and the host that the verb acts on."""
    cluster = open_site(arguments)
    return cluster, cluster.target(arguments.host)


def open_serving(arguments: argparse.Namespace) -> tuple[Cluster, Host]:
    """Return the site's cluster, and the host to act on: without ``--host`` this machine, or the one that serves."""
    from appliance.operations.services.serving import find_serving

    cluster = open_site(arguments)
    return cluster, cluster.target(arguments.host or find_serving(cluster))
