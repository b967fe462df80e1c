"""``python -m bench [NAME...]``: one JSON line per result on stdout, a table on stderr."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from rich.markup import escape
from rich.table import Table

from appliance.cli import screen, steps
from bench import BENCHMARKS
from bench.rig import Rig, traffic
from bench.rig.measure import explain

Measure = Callable[[Rig], Iterable[dict[str, Any]]]


def run_one(name: str, measure: Measure, rig: Rig) -> list[dict[str, Any]]:
    """Run a benchmark and print its results as they arrive; if it fails, a result without value but with a reason."""
    results: list[dict[str, Any]] = []

    def add(result: dict[str, Any]) -> None:
        results.append(result)
        print(json.dumps(result), flush=True)

    screen.err.print(f"[bold]{name}[/]", highlight=False)
    try:
        for result in measure(rig):
            add(result)
    except Exception as error:  # the other benchmarks must run
        add({"name": name, "value": None, "reason": explain(error)})
    return results


def table(results: list[dict[str, Any]]) -> Table:
    """Return the table of results."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("result", "ratio", "goal", "", "value", "peer", "its value"):
        number = title in ("value", "its value", "ratio")
        shown.add_column(title, justify="right" if number else "left", no_wrap=title != "peer")
    for one in results:
        if one["value"] is None:
            shown.add_row(one["name"], "[red]failed[/]")
            continue
        value, peer_value, ratio = f"{one['value']:.3g} {one['unit']}", "[yellow]failed[/]", ""
        if one["peer_value"] is not None:
            peer_value = f"{one['peer_value']:.3g} {one['unit']}"
        if one["ratio"] is not None:
            ratio = f"{one['ratio']:.2f}"
        mark = {True: "[green]met[/]", False: "[red]missed[/]", None: "[yellow]unknown[/]"}[one["holds"]]
        shown.add_row(one["name"], ratio, one["goal"], mark, value, escape(one["peer"]), peer_value)
    return shown


def reasons(results: list[dict[str, Any]]) -> list[str]:
    """Return the first line of each failure's reason; the JSON has the whole text."""
    return [f"{one['name']}: {one['reason'].splitlines()[0]}" for one in results if one["reason"]]


def exit_status(results: list[dict[str, Any]]) -> int:
    """Return 1 if a value of the product is missing; failed peers and missed goals do not count."""
    return int(any(result["value"] is None for result in results))


def listing() -> str:
    """Return a line for each benchmark: name, minutes, set, first line of its module's docstring."""
    lines = []
    for name, one in BENCHMARKS.items():
        text = (importlib.import_module(f"bench.{name}").__doc__ or "").partition("\n")[0]
        lines.append(f"{name:16} {one.minutes:4} min  {'full' if one.full else '':4}  {text}")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = f"one of {', '.join(BENCHMARKS)}; default: all but those of the full set"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--full", action="store_true", help="run the full set")
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        metavar="N",
        help="runs per median (default: %(default)s; short benchmarks do more)",
    )
    parser.add_argument("--clean", action="store_true", help="remove the cached captures and exit")
    parser.add_argument("--list", action="store_true", help="list the benchmarks with their durations in minutes")
    return parser


def main() -> int:
    """Run the selected benchmarks."""
    parser = make_parser()
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if arguments.runs < 1:
        parser.error(f"argument --runs: {arguments.runs} is less than 1")
    if not arguments.list and os.geteuid():
        parser.error("this needs root: labs are network namespaces")
    if arguments.clean:
        traffic.clean()
        return 0
    if arguments.list:
        print(listing())
        return 0
    names = arguments.names or [name for name, one in BENCHMARKS.items() if arguments.full or not one.full]
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        rig = Rig(arguments.runs, stack=stack, progress=steps.progress(False))
        for name in names:
            results += run_one(name, importlib.import_module(f"bench.{name}").measure, rig)
        screen.err.print(table(results), *map(escape, reasons(results)), sep="\n")
    return exit_status(results)


if __name__ == "__main__":
    sys.exit(main())
