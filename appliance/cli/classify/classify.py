"""``sms classify``."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, duration, filled, standard_output, verb

if TYPE_CHECKING:
    from analysis.model import Classification
    from appliance.operations.classify.classify import Catalogue, ClassifyOptions

EXAMPLES = """\
  sms classify sms.pcap                      a table: what must never stop, what can wait
  sms classify sms.pcap0 sms.pcap1.zst       several files are one capture; pcap or pcapng, compressed or not
  sms classify sms.pcap --why nfs            the reasons and the evidence for one service
  sms classify sms.pcap -o report.html       a page with timelines and a diagram of who talks to whom
  sms classify sms.pcap -o found.yaml        for sms build --from found.yaml
  sms classify new.pcap --compare old.yaml   what moved since an earlier result
  sms classify --live br-prov --duration 1h  capture on an interface, then classify

tcpdump -i br-prov -s 400 -w - | sms classify - reads packets as they arrive; Ctrl-C ends it. Exit status:
0 classified, 1 the captures cannot be classified or the result cannot be written, 2 a file does not exist, or an
option or name is invalid."""

FORMS = ("table", "json", "yaml", "html")
STDOUT = ("-", "/dev/stdout")


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "classify",
        "classify services by captured traffic: what must never stop",
        "Read captures of the provisioning network, taken on the management node, and report for every service\n"
        "whether compute nodes need it at any time (time-critical) or whether it can wait (deferrable), its\n"
        "tolerated outage, and the reasons.",
        EXAMPLES,
    )
    files = "capture files; - is standard input"
    parser.add_argument("captures", nargs="*", type=filled, metavar="CAPTURE", help=files)
    add = parser.add_argument
    add("--sms", type=filled, metavar="ADDRESS|MAC", help="the management node (default: detected)")
    add("--node", type=filled, metavar="ADDRESS|MAC", help="use only the traffic of one compute node")
    networks = "a network whose addresses are compute nodes, for nodes behind a router (repeatable)"
    add("--nodes", type=filled, action="append", default=[], metavar="NET", help=networks)
    own = "the site's own services (default: services.d/ beside the site file)"
    add("--services", type=filled, metavar="DIR", help=own)
    verdict = "the site's own verdict on a service: time-critical or deferrable (repeatable)"
    add("--override", type=filled, action="append", default=[], metavar="NAME=VERDICT", help=verdict)
    add("--compare", type=filled, metavar="FILE", help="an earlier result (YAML or JSON): show what moved since")
    add("--format", choices=FORMS, help="default: by the name of -o, else table")
    add("--json", action="store_const", dest="format", const="json", help="the same as --format json")
    add("-o", "--output", type=filled, metavar="FILE", help="write to a file, atomically")
    reasons = "only the reasons for a service (repeatable)"
    add("--why", type=filled, action="append", default=[], metavar="NAME", help=reasons)
    add("-v", "--verbose", action="store_true", help="show all reasons and all read errors")
    add("-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="no progress, errors and results only")
    add("--live", type=filled, metavar="INTERFACE", help="capture on an interface instead; requires root")
    span = "duration: 90s, 10m (default), 1h30m, 2d; a plain number is seconds"
    add("--duration", type=duration, metavar="SPAN", help=span)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Classify."""
    # All objects are small and live to the end: garbage collection would take a tenth of the time.
    gc.disable()
    from appliance.cli.steps import progress
    from appliance.operations.classify.classify import (
        check_output,
        classify,
        open_catalogue,
        unused_overrides,
        write_output,
    )

    options, form, output = read_options(arguments), _form(arguments), _output(arguments)
    if output:
        check_output(output, options.captures)
    catalogue = open_catalogue(options.services)
    shown = progress(arguments.quiet)
    found = classify(options, shown, catalogue, _import_view if form == "table" else None)
    for message in unused_overrides(options, catalogue, found):
        sys.stderr.write(f"{message}\n")  # not progress, which --quiet suppresses: this concerns the result
    why = resolve_names(arguments.why, catalogue, found)
    if output:
        write_output(as_text(found, form, why, arguments.verbose), output)
        shown.report(summarize(found, output, form))
    elif form == "table" and sys.stdout.isatty():
        _draw(found, why, arguments.verbose)
    else:
        write_stdout(as_text(found, form, why, arguments.verbose), form)
    _check_found(found)
    return 0


def read_options(arguments: argparse.Namespace) -> ClassifyOptions:
    """Convert the command line arguments into options.

    Raises:
        ConfigError: arguments are invalid or contradict each other.
    """
    from appliance.errors import ConfigError
    from appliance.operations.classify.classify import STDIN, ClassifyOptions, check_port, parse_overrides
    from appliance.operations.site.locate import services_folder

    if arguments.duration and not arguments.live:
        raise ConfigError("--duration requires --live", hint="sms classify --live br-prov --duration 10m")
    if arguments.why and _form(arguments) != "table":
        raise ConfigError(
            "--why requires the table format", hint="json, yaml and html have the reasons of all services"
        )
    if STDIN in arguments.captures and sys.stdin.isatty():
        raise ConfigError("standard input is a terminal", hint="tcpdump -i br-prov -w - | sms classify -")
    for name in arguments.why:
        check_port("--why", name)
    return ClassifyOptions(
        captures=tuple(arguments.captures),
        live=arguments.live or "",
        duration_s=arguments.duration or 600,
        sms=arguments.sms or "",
        node=arguments.node or "",
        nodes=tuple(arguments.nodes),
        services=Path(arguments.services) if arguments.services else services_folder(arguments.site),
        overrides=parse_overrides(arguments.override),
        compare=arguments.compare or "",
    )


def _output(arguments: argparse.Namespace) -> Path | None:
    """Return the file to write; None for standard output."""
    return Path(arguments.output) if arguments.output and arguments.output not in STDOUT else None


def _form(arguments: argparse.Namespace) -> str:
    """Return the output format: --format, else by the suffix of the output's name."""
    from appliance.operations.classify.classify import SUFFIXES

    ending = Path(arguments.output).suffix.lower() if arguments.output else ""
    return str(arguments.format or SUFFIXES.get(ending, "table"))


def resolve_names(names: Sequence[str], catalogue: Catalogue, found: Classification) -> tuple[str, ...]:
    """Resolve names of services by the result or the catalogue.

    Raises:
        ConfigError: neither has the name.
    """
    from appliance.errors import ConfigError

    seen = {service.name for service in found.services}
    known = [name if name in seen else catalogue.find(name) for name in names]
    for name, given in zip(known, names, strict=True):
        if name not in seen and not catalogue.has(name):
            message = f"--why: {given!r} is neither in the captures nor in the catalogue"
            raise ConfigError(message, hint=catalogue.nearest(given, seen))
    return tuple(dict.fromkeys(known))


def _check_found(found: Classification) -> None:
    """Fail if there is no service, after the other results were shown.

    Raises:
        SmsError: no service was seen.
    """
    from appliance.errors import SmsError

    if not found.services:
        nodes = "no compute node was seen" if not found.nodes.count else "no traffic between nodes and management node"
        hint = "is it of the provisioning network? --sms names the management node, --nodes the networks of nodes"
        raise SmsError(f"there is nothing to classify: {nodes}", hint=hint)


def as_text(found: Classification, form: str, why: Sequence[str] = (), verbose: bool = False) -> str:
    """Format the classification for a file or a pipe."""
    from appliance.operations.classify.classify import render

    if form != "table":
        return render(found, form)
    from appliance.cli.classify.view import view_text

    return view_text(found, why=why, verbose=verbose)


def _import_view() -> None:
    """Import what draws the table: rich takes as long as the core takes for 100 MB."""
    import appliance.cli.classify.view  # noqa: F401


def _draw(found: Classification, why: Sequence[str], verbose: bool) -> None:
    """Print the table on a terminal."""
    from appliance.cli.classify.view import console_for, view
    from appliance.cli.screen import out

    console = console_for(out.width)
    with standard_output():
        console.print(view(found, console, why=why, verbose=verbose))


def write_stdout(text: str, form: str) -> None:
    """Write to standard output; machine-readable formats in UTF-8, whatever the locale."""
    with standard_output() as stream:
        if form == "table":
            stream.write(text)
        else:
            stream.flush()
            stream.buffer.write(text.encode())


def summarize(found: Classification, path: Path, form: str) -> str:
    """Summarize the result in a few lines, with the next command for the file."""
    lines = [f"wrote {path}"]
    for verdict in ("time-critical", "deferrable"):
        names = [service.name for service in found.services if service.verdict == verdict]
        lines.append(f"  {verdict + ':':14} {', '.join(names) or 'none'}")
    if found.compared:
        moved = [one.name for one in found.compared.changes if one.kind != "changed"]
        lines.append(f"  {'moved:':14} {', '.join(moved) or 'none'}, compared with {found.compared.file}")
    if form in ("yaml", "json"):
        lines.append(f"  next:          sms build --from {path}")
    return "\n".join(lines)
