"""``sms classify``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli.common import verb

if TYPE_CHECKING:
    from analysis.model import Classification
    from appliance.flow.classify import Question

EXAMPLES = """\
  sms classify sms.pcap                      a table: what must never stop, what can wait
  sms classify sms.pcap0 sms.pcap1.zst       several files are one capture; pcap or pcapng, compressed or not
  sms classify sms.pcap --why nfs            the reasons and the evidence for one service
  sms classify sms.pcap -o report.html       a page with timelines and a picture of who talks to whom
  sms classify sms.pcap -o found.yaml        for sms build --from found.yaml
  sms classify --live br-prov --duration 1h  capture on an interface, then classify

tcpdump -i br-prov -s 128 -w - | sms classify - reads it as it comes."""

FORMS = ("table", "json", "yaml", "html")


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
    parser.add_argument("--sms", default="", metavar="ADDRESS|MAC", help="the management node (default: found)")
    parser.add_argument("--node", default="", metavar="ADDRESS|MAC", help="look at one compute node alone")
    parser.add_argument("--services", type=Path, metavar="DIR", help="the site's own services, besides the catalogue")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=VERDICT",
        help="the site's own verdict on a service: time-critical or deferrable (repeatable)",
    )
    parser.add_argument("--format", choices=FORMS, help="default: by the name of -o, else table")
    parser.add_argument("--json", action="store_const", dest="format", const="json", help="the same as --format json")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to a file, whole or not at all")
    parser.add_argument("--why", action="append", default=[], metavar="NAME", help="show the reasons for a service")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all reasons and every problem of reading")
    parser.add_argument("--live", default="", metavar="INTERFACE", help="capture on an interface instead; takes root")
    parser.add_argument("--duration", metavar="SPAN", help="for how long: 90s, 10m (default), 1h30m, 2d")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Classify."""
    from appliance.cli.screen import out, progress
    from appliance.flow.classify import check_output, classify, write_output

    question = ask(arguments)
    form = _form(arguments)
    if arguments.output:
        check_output(arguments.output, question.captures)
    shown = progress(arguments.quiet)
    found = classify(question, shown)
    if arguments.output:
        write_output(as_text(found, form, arguments), arguments.output)
        shown.say(told(found, arguments.output, form))
    elif form == "table":
        from appliance.cli.classify_view import view

        out.print(view(found, out, why=arguments.why, verbose=arguments.verbose), soft_wrap=False)
    else:
        sys.stdout.write(as_text(found, form, arguments))
    return 0


def ask(arguments: argparse.Namespace) -> Question:
    """What the command line asks for."""
    from appliance.errors import ConfigError
    from appliance.flow.classify import STDIN, Question, parse_duration, parse_overrides

    if arguments.duration and not arguments.live:
        raise ConfigError("--duration goes with --live", hint="sms classify --live br-prov --duration 10m")
    if STDIN in arguments.captures and sys.stdin.isatty():
        raise ConfigError("standard input is a terminal", hint="tcpdump -i br-prov -w - | sms classify -")
    return Question(
        captures=tuple(arguments.captures),
        live=arguments.live,
        duration_s=parse_duration(arguments.duration or "10m"),
        sms=arguments.sms,
        node=arguments.node,
        services=arguments.services,
        overrides=parse_overrides(arguments.override),
    )


def _form(arguments: argparse.Namespace) -> str:
    """The form asked for, by name or by the ending of the output's name."""
    from appliance.flow.classify import SUFFIXES

    ending = arguments.output.suffix.lower() if arguments.output else ""
    return str(arguments.format or SUFFIXES.get(ending, "table"))


def as_text(found: Classification, form: str, arguments: argparse.Namespace) -> str:
    """The classification in the form asked for."""
    from appliance.flow.classify import render

    if form != "table":
        return render(found, form)
    from io import StringIO

    from rich.console import Console

    from appliance.cli.classify_view import view

    console = Console(file=StringIO(), width=100, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(view(found, console, why=arguments.why, verbose=arguments.verbose))
    return captured.get()


def told(found: Classification, path: Path, form: str) -> str:
    """What was found, in a few lines, and what to do with the file."""
    lines = [f"wrote {path}"]
    for verdict in ("time-critical", "deferrable"):
        names = [service.name for service in found.services if service.verdict == verdict]
        lines.append(f"  {verdict + ':':14} {', '.join(names) or 'none'}")
    if form in ("yaml", "json"):
        lines.append(f"  next:          sms build --from {path}")
    return "\n".join(lines)
