"""``python -m bench [NAME...]``: one JSON line a result on stdout, a table for people on stderr."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from contextlib import ExitStack
from typing import Any

from rich.markup import escape
from rich.table import Table

import bench
from appliance.cli import screen
from appliance.errors import SmsError
from bench.rig import Rig, Skip, traffic


def benchmarks() -> dict[str, str]:
    """Every benchmark's name, and the first line of what it says of itself."""
    names = sorted(found.name for found in pkgutil.iter_modules(bench.__path__) if not found.ispkg)
    modules = {name: importlib.import_module(f"bench.{name}") for name in names if name != "__main__"}
    return {name: (module.__doc__ or "").partition("\n")[0] for name, module in modules.items()}


def run_one(name: str, rig: Rig) -> list[dict[str, Any]]:
    """Run a benchmark and print its results as they come; one that cannot run here says so."""
    results: list[dict[str, Any]] = []

    def tell(result: dict[str, Any]) -> None:
        results.append(result)
        print(json.dumps(result), flush=True)

    screen.err.print(f"[bold]{name}[/]", highlight=False)
    try:
        for result in importlib.import_module(f"bench.{name}").measure(rig):
            tell(result)
    except Skip as reason:
        tell({"name": name, "skipped": str(reason)})
    except SmsError as error:
        tell({"name": name, "failed": error.message})
    return results


def table(results: list[dict[str, Any]]) -> Table:
    """The results as a person reads them."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("result", "value", "peer", "its value", "ratio", "goal", ""):
        number = title in ("value", "its value", "ratio")
        shown.add_column(title, justify="right" if number else "left", no_wrap=title != "peer")
    for one in results:
        if "value" not in one:
            why, words = next((key, one[key]) for key in ("skipped", "failed") if key in one)
            # The first line of it; all of it is in the JSON.
            shown.add_row(one["name"], "", escape(f"{why}: {words.splitlines()[0]}"), style="yellow")
            continue
        value, peer_value = (f"{one[key]:.3g} {one['unit']}" for key in ("value", "peer_value"))
        mark = "[green]holds[/]" if one["holds"] else "[red]missed[/]"
        shown.add_row(one["name"], value, escape(one["peer"]), peer_value, f"{one['ratio']:.2f}", one["goal"], mark)
    return shown


def main() -> int:
    """Run what was asked for; status 1 when a benchmark failed, never for a goal that was missed."""
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; all without a name")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs a median is of (default: %(default)s)")
    parser.add_argument("--install", action="store_true", help="install the Debian packages that a peer needs (QEMU)")
    parser.add_argument("--clean", action="store_true", help="remove the captures that benchmarks keep, and end")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    if arguments.clean:
        traffic.clean()
        return 0
    if arguments.list:
        print("\n".join(f"{name:18} {text}" for name, text in known.items()))
        return 0
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        rig = Rig(max(1, arguments.runs), install=arguments.install, stack=stack, progress=screen.progress(False))
        for name in arguments.names or known:
            results += run_one(name, rig)
    screen.err.print(table(results))
    return 1 if any("failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
