"""``sms classify``."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli.common import duration, filled, standard_output, verb

if TYPE_CHECKING:
    from analysis.model import Classification
    from appliance.operations.classify.classify import Catalogue, Question

EXAMPLES = """\
  sms classify sms.pcap                      a table: what must never stop, what can wait
  sms classify sms.pcap0 sms.pcap1.zst       several files are one capture; pcap or pcapng, compressed or not
  sms classify sms.pcap --why nfs            the reasons and the evidence for one service
  sms classify sms.pcap -o report.html       a page with timelines and a picture of who talks to whom
  sms classify sms.pcap -o found.yaml        for sms build --from found.yaml
  sms classify --live br-prov --duration 1h  capture on an interface, then classify

tcpdump -i br-prov -s 400 -w - | sms classify - reads it as it comes; Ctrl-C ends it. Exit status: 0 classified,
1 nothing in it that can be, 2 a file is not there, or an option or name makes no sense."""

FORMS = ("table", "json", "yaml", "html")
STDOUT = ("-", "/dev/stdout")


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "classify",
        "tell from captured traffic what must never stop",
        "Read captures of the provisioning network, taken on the management node, and say of every service whether\n"
        "compute nodes need it at every moment (time-critical) or whether it can wait (deferrable), for how long it\n"
        "can be away, and why.",
        EXAMPLES,
    )
    parser.add_argument("captures", nargs="*", metavar="CAPTURE", help="capture files; - is standard input")
    add = parser.add_argument
    add("--sms", type=filled, metavar="ADDRESS|MAC", help="the management node (default: found)")
    add("--node", type=filled, metavar="ADDRESS|MAC", help="look at one compute node alone")
    networks = "a network whose addresses are compute nodes, where they are behind a router (repeatable)"
    add("--nodes", type=filled, action="append", default=[], metavar="NET", help=networks)
    add("--services", type=filled, metavar="DIR", help="the site's own services, besides the catalogue")
    verdict = "the site's own verdict on a service: time-critical or deferrable (repeatable)"
    add("--override", action="append", default=[], metavar="NAME=VERDICT", help=verdict)
    add("--format", choices=FORMS, help="default: by the name of -o, else table")
    add("--json", action="store_const", dest="format", const="json", help="the same as --format json")
    add("-o", "--output", type=filled, metavar="FILE", help="write to a file, whole or not at all")
    add("--why", action="append", default=[], metavar="NAME", help="the reasons for a service, alone (repeatable)")
    add("-v", "--verbose", action="store_true", help="show all reasons and every problem of reading")
    add("-q", "--quiet", action="store_true", default=argparse.SUPPRESS, help="no progress, errors and results only")
    add("--live", type=filled, metavar="INTERFACE", help="capture on an interface instead; takes root")
    span = "for how long: 90s, 10m (default), 1h30m, 2d; a number alone is seconds"
    add("--duration", type=duration, metavar="SPAN", help=span)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Classify."""
    # What Python holds here is small and lives to the end: looking for garbage in it takes a tenth of the time.
    gc.disable()
    from appliance.cli.screen import progress
    from appliance.operations.classify.classify import (
        check_output,
        classify,
        open_catalogue,
        unused_overrides,
        write_output,
    )

    question, form, output = ask(arguments), _form(arguments), _output(arguments)
    if output:
        check_output(output, question.captures)
    catalogue = open_catalogue(question.services)
    shown = progress(arguments.quiet)
    found = classify(question, shown, catalogue)
    for words in unused_overrides(question, catalogue, found):
        sys.stderr.write(f"{words}\n")  # not progress: --quiet asks for none of that, and this is about the result
    why = wanted(arguments.why, catalogue, found)
    if output:
        write_output(as_text(found, form, why, arguments.verbose), output)
        shown.say(told(found, output, form))
    elif form == "table" and sys.stdout.isatty():
        _draw(found, why, arguments.verbose)
    else:
        show(as_text(found, form, why, arguments.verbose), form)
    _check_found(found)
    return 0


def ask(arguments: argparse.Namespace) -> Question:
    """What the command line asks for."""
    from appliance.errors import ConfigError
    from appliance.operations.classify.classify import STDIN, Question, check_port, parse_overrides

    if arguments.duration and not arguments.live:
        raise ConfigError("--duration goes with --live", hint="sms classify --live br-prov --duration 10m")
    if arguments.why and _form(arguments) != "table":
        raise ConfigError("--why goes with the table", hint="json, yaml and html have all reasons of all services")
    if STDIN in arguments.captures and sys.stdin.isatty():
        raise ConfigError("standard input is a terminal", hint="tcpdump -i br-prov -w - | sms classify -")
    for name in arguments.why:
        check_port("--why", name)
    return Question(
        captures=tuple(arguments.captures),
        live=arguments.live or "",
        duration_s=arguments.duration or 600,
        sms=arguments.sms or "",
        node=arguments.node or "",
        nodes=tuple(arguments.nodes),
        services=Path(arguments.services) if arguments.services else None,
        overrides=parse_overrides(arguments.override),
    )


def _output(arguments: argparse.Namespace) -> Path | None:
    """The file to write; None for standard output, however it is called."""
    return Path(arguments.output) if arguments.output and arguments.output not in STDOUT else None


def _form(arguments: argparse.Namespace) -> str:
    """The form asked for, by name or by the ending of the output's name."""
    from appliance.operations.classify.classify import SUFFIXES

    ending = Path(arguments.output).suffix.lower() if arguments.output else ""
    return str(arguments.format or SUFFIXES.get(ending, "table"))


def wanted(names: Sequence[str], catalogue: Catalogue, found: Classification) -> tuple[str, ...]:
    """Names of services as the catalogue or the result has them.

    Raises:
        ConfigError: neither has a name.
    """
    from appliance.errors import ConfigError

    seen = {service.name for service in found.services}
    known = [name if name in seen else catalogue.find(name) for name in names]
    for name, said in zip(known, names, strict=True):
        if name not in seen and not catalogue.has(name):
            shown = f"--why: {said!r} is neither in the captures nor in the catalogue"
            raise ConfigError(shown, hint=catalogue.nearest(said, seen))
    return tuple(dict.fromkeys(known))


def _check_found(found: Classification) -> None:
    """Fail where there is nothing to go by, after all that there is has been shown.

    Raises:
        SmsError: no service was seen.
    """
    from appliance.errors import SmsError

    if not found.services:
        nodes = "no compute node was seen" if not found.nodes.count else "nothing passed between nodes and it"
        hint = "is it of the provisioning network? --sms names the management node, --nodes the networks of nodes"
        raise SmsError(f"there is nothing to classify: {nodes}", hint=hint)


def as_text(found: Classification, form: str, why: Sequence[str] = (), verbose: bool = False) -> str:
    """The classification in the form asked for, for a file or a pipe."""
    from appliance.operations.classify.classify import render

    if form != "table":
        return render(found, form)
    from appliance.cli.classify.view import view_text

    return view_text(found, why=why, verbose=verbose)


def _draw(found: Classification, why: Sequence[str], verbose: bool) -> None:
    """The table on a terminal."""
    from appliance.cli.classify.view import console_for, view
    from appliance.cli.screen import out

    console = console_for(out.width)
    with standard_output():
        console.print(view(found, console, why=why, verbose=verbose))


def show(text: str, form: str) -> None:
    """Onto standard output: forms for programs in UTF-8, whatever the locale."""
    with standard_output() as stream:
        if form == "table":
            stream.write(text)
        else:
            stream.flush()
            stream.buffer.write(text.encode())


def told(found: Classification, path: Path, form: str) -> str:
    """What was found, in a few lines, and what to do with the file."""
    lines = [f"wrote {path}"]
    for verdict in ("time-critical", "deferrable"):
        names = [service.name for service in found.services if service.verdict == verdict]
        lines.append(f"  {verdict + ':':14} {', '.join(names) or 'none'}")
    if form in ("yaml", "json"):
        lines.append(f"  next:          sms build --from {path}")
    return "\n".join(lines)
