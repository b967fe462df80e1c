"""Words that the project does not use: the field has standard terms for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATTERNS = (
    *("appliance/**/*.py", "analysis/**/*.py", "analysis/core/*.[ch]", "bench/*.py", "tests/**/*.py", "scripts/*"),
    *("definitions/**/*", "overlays/**/*", "playbooks/**/*", "docs/*.md", "docs/*.json", "*.md"),
)
FILES = [
    path
    for pattern in PATTERNS
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and path != Path(__file__) and path.suffix != ".pyc" and "vendor" not in path.parts
]
FORBIDDEN = {
    r"(?<!there )(?<!There )\bis no (?!longer|such)[a-z]": "is not a ...; invalid ...",
    r"\b(can|may) be away\b": "tolerated outage",
    r"\baway for\b": "an outage of",
    r"\b(take|takes|took|taken)_up\b|\b(take|takes|took) up a\b": "recover, resume",
    r"\bcut off\b": "interrupted",
    r"\blet(s|ting)? (it )?count\b": "commit",
    r"\b(give|gives|gave|given) way\b(?!`)": "step down, supersede",
    r"\bheld against|\bhold(s|ing)? [a-z ]{1,20} against\b": "verified against",
    r"\banew\b": "again",
    r"\bruns nowhere\b": "is not running on any host",
    r"\bnobody reads\b": "output pipe closed",
    r"\bof the past\b": "stale",
    r"\bby itself\b": "automatically, on its own",
    r"\b([Tt]old|TOLD)\b": "reported, requested, notified, given",
    r"\b[Ww]hoever\b": "who is meant: a machine that, a caller that",
    r"\bare root's alone\b": "readable by root only",
    r"\bthe way back\b": "undo, rollback",
    r"\b[Tt]he appliance\b": "the services container",
    r"\b[Tt]he paper\b": 'the title: "Decoupled management nodes" (2018)',
    r"\b(look_around|add_wishes|[Ww]ishes|[Cc]asting|hand_lease|put_aside)\b": "the names of HACKING.md",
}
"""Pattern, and what to write instead."""
DATA = re.compile(r'"(gave way|cut off|anew|told|cut off in its headers)"|\banew=')
"""Data that keeps its name: events in history files, keys on the wire, text of the C core."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_standard_terms(path: Path) -> None:
    found = [
        f"{number}: {match.group()!r}: {instead}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for pattern, instead in FORBIDDEN.items()
        if (match := re.search(pattern, DATA.sub("", line)))
    ]
    assert found == []


SERVICES = {path.stem for path in (ROOT / "definitions" / "services").glob("*.yaml")}
OTHER_MEANINGS = {
    "cron": "the daemon of an admin host, and a kind of schedule",
    "dns": "a key of the site file and of the VM's configuration",
    "filesync": "a section of the site file",
    "http": "a URL scheme, a kind of probe, a boot target",
    "https": "a URL scheme",
    "provisioning": "a network and a section of the site file",
    "ssh": "the client",
}
"""Names of services that mean something else in the code."""
LITERALS = {
    "appliance/config/model.py": {"munge"},
    "appliance/lab/legacy.py": {"chrony", "mariadb", "munge", "postfix", "rsyslog", "slurmctld", "slurmdbd"},
    "appliance/lab/render.py": {"munge", "postfix", "slurmd"},
    "appliance/lab/root.py": {"chrony", "munge", "postfix", "rsyslog", "slurmctld", "slurmd", "slurmdbd"},
    "appliance/operations/services/node_files.py": {"slurmd"},
    "appliance/plan/adopt/read_tables.py": {"ipmi"},
    "appliance/plan/adopt/survey.py": {"munge"},
    "appliance/plan/hosts/distro.py": {"chrony"},
    "appliance/plan/hosts/doctor.py": {"chrony"},
    "appliance/plan/overlay/seed.py": {"munge"},
    "appliance/plan/services/runs.py": {"slurmd"},
}
"""Daemons of the lab's own machines, packages of an admin host, the user that the munge key belongs to, whose ids
are a setting, and a key in node tables of other systems."""


def service_literals(text: str) -> Iterator[str]:
    """Yield the strings of a program that are the name of a service."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SERVICES:
            yield node.value


def test_only_the_catalogue_names_services() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for folder in ("appliance", "analysis")
        for path in (ROOT / folder).rglob("*.py")
        if (names := set(service_literals(path.read_text())) - set(OTHER_MEANINGS))
    }
    assert found == LITERALS, "use a role (find_role) or a field of definitions/services/"


def test_service_literals_are_found() -> None:
    assert list(service_literals('a = "nat"; b = f"{a} munged"; c = ("slurmctld", "x")')) == ["nat", "slurmctld"]
