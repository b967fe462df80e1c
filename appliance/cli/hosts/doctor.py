"""``sms doctor``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, open_site, verb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from appliance.operations.hosts.doctor import Finding

EXAMPLES = """\
  sms doctor                  this machine
  sms doctor --host host-a    an admin host, over SSH
  sms doctor --json           the same as JSON"""

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "missing": "[red]missing[/]"}


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "doctor",
        "list what a host lacks, and how to fix it",
        "Check all requirements of the services container on a host; changes none of its settings. If an admin host "
        "has an image, a confined process of it is run. Exit status 4 if any is missing.",
        EXAMPLES,
    )
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print the findings."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.hosts.doctor import diagnose, worst

    cluster = open_site(arguments)
    findings = diagnose(cluster, arguments.host)
    state = worst(findings)
    if arguments.json:
        print_json({"state": state, "checks": findings})
    else:
        out.print(view(findings))
    return 4 if state == "missing" else 0


def view(findings: list[Finding]) -> RenderableType:
    """Return the findings as a table, followed by the commands that fix them."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "state", "details", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(escape(finding.what), MARKS[finding.state], escape(finding.detail))
    fixes = [f"  [bold]{escape(finding.what)}[/]: {escape(finding.mend)}" for finding in findings if finding.mend]
    return Group(table, *(["", "to fix:", *fixes] if fixes else []))
