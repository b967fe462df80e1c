"""``sms survey``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, duration, filled, verb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from appliance.plan.adopt.model import Survey

EXAMPLES = """\
  sms survey sms-old                           what the management node sms-old has, as a table
  sms survey admin@sms-old:2222                by sudo, on another port
  sms survey                                   this machine
  sms survey sms-old --write site              a site for it: sms.yaml, files/, REPORT.md
  sms survey sms-old --write site --munge-key  with its munge key in secrets/
  sms survey sms-old --classification found.yaml   and what a capture shows of it
  sms survey sms-old --write site --live 10m   and what ten minutes of its traffic show, captured there
  sms survey sms-old -o survey.json            for programs; --schema prints its schema

It changes nothing there and installs nothing: a POSIX shell is enough, with --live also tcpdump. Exit status: 0 read,
1 not reachable, 2 an option is invalid, 3 not permitted there, or the folder has a site file."""

MARKS = {"carried": "[green]in the site[/]", "check": "[yellow]check[/]", "left": "[red]not in it[/]"}


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "survey",
        "read what a live management node has; change nothing",
        "Read a live management node over SSH, as root or with sudo without a password, and report what it has:\n"
        "system, networks, Slurm, other services, accounts, node tables. With --write, make a site of it.",
        EXAMPLES,
    )
    add = parser.add_argument
    add("host", nargs="?", type=filled, metavar="[USER@]HOST[:PORT]", help="the node (default: this machine)")
    add("--write", type=filled, metavar="DIR", help="write a site: sms.yaml, files/, REPORT.md, survey.json")
    add("--munge-key", action="store_true", help="with --write: fetch the munge key, too")
    add("--slurm-folder", type=filled, metavar="DIR", help="folder of slurm.conf on the node (default: searched)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--classification", type=filled, metavar="FILE", help="result of sms classify (YAML or JSON): compare with it"
    )
    shown.add_argument(
        "--live",
        type=duration,
        metavar="SPAN",
        help="capture the nodes' network there for 10m or 1h, classify it, compare; SSH is not captured",
    )
    add("-o", "--output", type=filled, metavar="FILE", help="write survey.json")
    add("--schema", action="store_true", help="print the JSON Schema of survey.json")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the node, write what was requested, print the table."""
    from appliance.cli.screen import out
    from appliance.cli.steps import progress
    from appliance.errors import ConfigError
    from appliance.operations.adopt.survey import (
        SurveyOptions,
        check_folder,
        check_output,
        schema_text,
        survey,
        survey_json,
        write_json,
        write_site,
    )
    from appliance.operations.site.locate import services_folder

    if arguments.schema:
        sys.stdout.write(schema_text())
        return 0
    if arguments.munge_key and not arguments.write:
        raise ConfigError("--munge-key requires --write", hint="--write DIR is where the key is stored")
    folder = Path(arguments.write) if arguments.write else None
    if folder:
        check_folder(folder)
    if arguments.output:
        check_output(Path(arguments.output))
    options = SurveyOptions(
        target=arguments.host or "",
        folder=arguments.slurm_folder or "",
        munge_key=arguments.munge_key,
        classification=Path(arguments.classification) if arguments.classification else None,
        live_s=arguments.live or 0,
        services=services_folder(arguments.site),
    )
    found, draft = survey(options, progress(arguments.quiet))
    if arguments.output:
        write_json(found, Path(arguments.output))
    written = write_site(found, draft, folder) if folder else None
    if arguments.json:
        sys.stdout.write(survey_json(found))
    elif not arguments.output or written:
        out.print(view(found))
    if written and not arguments.json:
        out.print(f"wrote {folder}: {', '.join(written.files)}", markup=False)
        for problem in written.problems:
            out.print(f"  sms.yaml is not accepted yet: {problem}", markup=False)
        out.print(f"next: read {folder}/REPORT.md, edit {folder}/sms.yaml, then: ", markup=False, end="")
        out.print(f"sms --site {folder}/sms.yaml config check", markup=False)
    return 0


def view(found: Survey) -> RenderableType:
    """Return the survey as two tables: what the node is, and the findings."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in facts_of(found):
        facts.add_row(f"[bold]{escape(name)}[/]", escape(value))
    table = Table("area", "found", "site", "to do", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for one in sorted(found.findings, key=lambda one: tuple(MARKS).index(one.carried)):
        table.add_row(escape(one.area), escape(one.what), MARKS[one.carried], escape(one.todo))
    return Group(facts, "", table)


def facts_of(found: Survey) -> list[tuple[str, str]]:
    """Return the main facts: name and value."""
    slurm, system = found.slurm, found.system
    rows = [
        ("host", f"{found.host} ({system.hostname})"),
        ("system", f"{system.name}, Linux {system.kernel} {system.machine}"),
        ("nodes' network", _network(found, found.provisioning)),
        ("public network", _network(found, found.public)),
    ]
    if slurm:
        rows.append(("Slurm", f"{slurm.version or 'version unknown'}, cluster {slurm.cluster or 'without a name'}"))
    verdicts = {one.service: f" ({one.evidence})" for one in found.listeners if one.evidence}
    services = [f"{name}{verdicts.get(name, '')}" for name in found.services]
    rows.append(("services", ", ".join(services) or "none that the catalogue knows"))
    rows += [("provisioning", f"{one.name}, {len(one.nodes)} nodes") for one in found.provisioners]
    return rows


def _network(found: Survey, name: str) -> str:
    link = next((one for one in found.links if one.name == name), None)
    return f"{link.name}: {', '.join(link.addresses)}" if link else "not found"
