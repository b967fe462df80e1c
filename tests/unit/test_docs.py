"""The documents: links lead somewhere, verbs exist, examples are right, messages are those of the code."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from appliance.catalog import Service
from appliance.cli import VERBS, make_parser
from appliance.cli.classify.view import view_text
from appliance.config.check import check_site
from appliance.config.read import read_site_text
from appliance.operations.classify.classify import ClassifyOptions, classify
from appliance.progress import Silent
from tests.captures import files
from tests.captures.cluster import Plan, simulate
from tests.places import ROOT

DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_links_lead_somewhere() -> None:
    """Links between the documents, and to headings of theirs."""
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            other = (page.parent / name) if name else page
            if not other.exists() or (anchor and anchor not in headings(other)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as Git hosts make them."""
    lines = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_documents_name_verbs_that_exist() -> None:
    """`sms migrate` and the like are documented when they are there."""
    verbs = set(VERBS)
    said = re.compile(r"(?:`|^ *(?:[$#] )?)sms (?:(?:-q|--\w+(?: [^-\s]+)?) )*([a-z]+)\b", re.MULTILINE)
    pages = {path: set(said.findall(path.read_text())) for path in PAGES}
    assert {str(page.relative_to(ROOT)): found - verbs for page, found in pages.items() if found - verbs} == {}


SUBJECTS = {
    "site": ("site-file", ("init", "config check", "config show", "config schema", "key create", "key show")),
    "hosts": ("hosts", ("doctor", "host prepare", "host list")),
    "engines": (
        "engines",
        (
            *("export kubernetes", "export nomad", "export terraform", "export quadlet", "export compose"),
            *("deploy", "deploy status", "deploy drain", "deploy rollback", "deploy stop"),
        ),
    ),
    "image": ("build", ("build", "verify", "image list", "image sbom", "image manifest", "image prune")),
    "services": (
        "running",
        ("start", "stop", "apply", "restart", "status", "logs", "exec", "shell", "guard", "journal"),
    ),
    "overlay": ("overlay", ("overlay create", "overlay grow", "overlay mirror create", "overlay mirror rebuild")),
    "snapshots": ("snapshots", ("overlay snapshot", "overlay list", "overlay restore", "overlay schedule install")),
    "migration": ("migrate", ("migrate", "failover")),
    "upgrade": ("upgrade", ("rehearse", "upgrade")),
    "vm": ("vm", ("vm build", "vm start", "vm stop", "vm status", "vm migrate")),
    "nodes": ("nodes", ("node discover", "node list", "node add", "node power", "node boot", "node import")),
    "classify": ("classify", ("classify",)),
    "adopt": ("adopt", ("survey", "adopt")),
    "lab": ("lab", ("lab up", "lab status", "lab exec", "lab power", "lab capture", "lab down", "lab demo")),
}
"""Subject, as in `appliance/cli`, to its page in docs/ and the commands that the page explains."""


def test_docs_are_flat() -> None:
    folders = {path.name for path in (ROOT / "docs").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {"man"}, "one page per subject, directly in docs/"


def test_every_subject_is_in_the_table() -> None:
    folders = (path.parent.name for path in (ROOT / "appliance" / "cli").glob("*/__init__.py"))
    assert sorted(folders) == sorted(SUBJECTS)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_has_a_page(subject: str) -> None:
    page, commands = SUBJECTS[subject]
    assert page in DOCS, f"docs/{page}.md does not exist"
    linked = [path for path in PAGES if path.stem != page and re.search(rf"\]\((docs/)?{page}\.md", path.read_text())]
    assert linked, f"no page links to docs/{page}.md"
    assert [command for command in commands if not names_command(DOCS[page], command)] == []


def names_command(text: str, command: str) -> bool:
    return re.search(rf"\bsms {command}\b", text) is not None


def commands_below(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[str]:
    """Yield the commands of a verb, such as ``overlay mirror scrub``."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for name, part in (each for action in below for each in action.choices.items()):
        yield from commands_below(part, (*words, name))
    if not below:
        yield " ".join(words)


def test_every_command_is_explained() -> None:
    """On one of the pages, by its full name."""
    text = "\n".join(DOCS.values())
    commands = [command for verb in VERBS for command in commands_below(make_parser(verb), ())]
    assert len(commands) > 60
    assert [command for command in commands if not names_command(text, command)] == []


def shell(block: str) -> bool:
    """Whether a block shows a terminal, not a part of a site file."""
    return re.match(r" *(#|sms\b)", block) is not None


def test_examples_of_the_site_file_are_right(tmp_path: Path) -> None:
    """The blocks of docs/site-file.md, put together, are a site file without a mistake."""
    text = (ROOT / "docs" / "site-file.md").read_text()
    blocks = re.findall(r"^    \w.*\n(?:^(?:    .*)?\n)*", text, re.MULTILINE)
    parts = [yaml.safe_load(block) for block in blocks if not shell(block)]
    document = {key: value for part in parts for key, value in part.items()}
    assert {"cluster", "admin_hosts", "networks", "slurm", "secrets", "signing", "overlay"} <= set(document)
    document["services"] = ["munge", "slurmctld"]
    site, lines = read_site_text(yaml.safe_dump(document), "docs/site-file.md", folder=tmp_path)
    problems = check_site(site, lines, services={"munge", "slurmctld"}, bases={site.base.os}, controllers={"slurmctld"})
    assert [str(problem) for problem in problems if "for documentation" not in problem.message] == []


def test_the_example_of_a_service_is_one() -> None:
    found = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "services.md").read_text(), re.DOTALL)
    assert found
    Service.model_validate(yaml.safe_load(found[1]))


def test_every_service_and_base_is_described() -> None:
    names = {path.stem for path in (ROOT / "definitions" / "services").glob("*.yaml")}
    text = (ROOT / "docs" / "services.md").read_text()
    assert {name for name in names if f"| `{name}` |" not in text} == set()
    bases = {path.stem for path in (ROOT / "definitions" / "bases").glob("*.yaml")}
    text = (ROOT / "docs" / "build.md").read_text()
    assert {name for name in bases if f"| `{name}` |" not in text} == set()


def test_the_example_of_a_classification_is_what_comes_out(tmp_path: Path) -> None:
    """To the letter: docs/classify.md shows a simulated hour of eight nodes."""
    (tmp_path / "sms.pcap").write_bytes(files.pcap(simulate(Plan()).packets()))
    made = view_text(classify(ClassifyOptions((str(tmp_path / "sms.pcap"),)), Silent())).replace(f"{tmp_path}/", "")
    (shown,) = re.findall(r"(?<=^    sms classify sms\.pcap\n\n)(?:    .*\n|\n)+", DOCS["classify"], re.MULTILINE)
    assert [line.removeprefix("    ") for line in shown.splitlines()] == [*made.splitlines(), ""], "paste it again"


def test_refusals_are_those_of_the_code() -> None:
    """What docs/classify.md says that `sms classify` refuses."""
    folders = ("appliance", "analysis")
    paths = [path for name in folders for path in (ROOT / name).rglob("*.*") if path.suffix in (".c", ".py")]
    code = "\n".join(path.read_text() for path in paths)
    said = re.findall(r"^\| `(.*?)` \| ", DOCS["classify"].partition("## When it refuses")[2], re.MULTILINE)
    assert len(said) > 4
    assert [words for words in said if words.removeprefix("is ") not in code] == []


def test_messages_are_those_of_the_code() -> None:
    """What docs/troubleshooting.md says that `sms` says is in the code, but for what is put in."""
    folders = ("appliance", "definitions", "playbooks", "analysis")
    compiled = (".pyc", ".so")
    paths = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    files = [path for path in paths if path.suffix not in compiled]
    code = re.sub(r"\{[^{}\n]*\}", "\0", "\n".join(path.read_text() for path in files))
    pieces = []
    for row in re.findall(r"^\| (.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            if "FAILED" in message or "*" in message or " ok " in message or message in OTHERS:
                continue
            parts = [
                part.strip()
                for part in re.split(r"\b[A-Z]\b|\.\.\.|[;:(]|MAC$|CLUSTER|sms\.lock|sign\.pem|30|bookworm", message)
            ]
            pieces += [part for part in parts if len(part) > 4]
    assert len(pieces) > 40
    missing = [piece for piece in pieces if piece not in code]
    assert missing == []


OTHERS = {
    "Requesting capability set ... while permitted",
    "CLUSTER NAME MISMATCH",
    "Duplicate jobid",
    "Invalid user id",
    "slurmctld",
    "the image holds secrets",
}
"""Words of Apptainer and Slurm, and of the definition's %test."""


def test_tests_that_the_page_on_security_names_exist() -> None:
    """A sentence there is as true as its test."""
    folder = ROOT / "tests"
    files = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("test_*.py")}
    defined = set(re.findall(r"def (test_\w+)", "\n".join(files.values())))
    named = set(re.findall(r"`(test_\w+)`", DOCS["security"]))
    assert named and named - defined == set()
    paths = set(re.findall(r"`(?:tests/)?((?:unit|real)/[\w/]+\.py)`", DOCS["security"]))
    assert paths and paths - files.keys() == set()
