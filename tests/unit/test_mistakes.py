"""What an administrator does wrong: exit status, class of the error and a hint; nothing is changed."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from appliance import cli
from appliance.cli import main
from appliance.errors import SmsError
from tests.mistakes import EDITS, TABLES, Mistake, read_table
from tests.ownnet import own_network
from tests.places import ROOT

HERE = os.uname().nodename
ROWS = [(group, row) for group, text in TABLES.items() for row in read_table(text)]
VM = """\
provisioning:
  address: 10.77.0.2/24
  mac: "02:00:0a:4d:00:02"
  profiles: {compute: {}}
  bmc: {user: root, password_file: bmc.password, networks: [127.0.9.0/24]}
"""


def host_lines(name: str, address: str) -> str:
    return f"  - name: {name}\n    address: {address}\n    port: 1\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with site files, in a network without any other host."""
    if Path("/etc/sms/sms.yaml").exists():
        pytest.skip("this machine has a site file of its own")
    folder = tmp_path_factory.mktemp("mistakes")
    text = (ROOT / "definitions" / "profiles" / "lab.yaml").read_text() + f"state: {folder / 'state'}\n"
    before, _, after = text.partition("  - name: host-a\n")
    after = after[after.index("\nnetworks:") :]
    near, far = host_lines("host-b", "127.0.0.2"), host_lines("host-a", "127.0.0.3")
    site = before + host_lines(HERE, "127.0.0.1") + near + after
    (folder / "sms.yaml").write_text(site)
    (folder / "vm.yaml").write_text(site + VM)
    (folder / "engines.yaml").write_text(
        site + "engines: {nomad: {address: 10.77.0.9}, podman: {address: 10.77.0.9}}\n"
    )
    (folder / "away.yaml").write_text(before + far + near + after)
    (folder / "bmc.password").write_text("secret\n")
    (folder / "bmc.password").chmod(0o600)
    (folder / "text").write_text("hello\n")
    (folder / "empty").write_text("")
    with own_network([]) if os.geteuid() == 0 else nullcontext():
        os.environ.pop("SMS_SITE", None)
        assert main(["-q", "--site", str(folder / "sms.yaml"), "key", "create"]) == 0
        assert main(["-q", "--site", str(folder / "sms.yaml"), "key", "ca", "create"]) == 0
        yield folder


def contents(folder: Path) -> dict[str, bytes]:
    """Files below a folder; locks, which are empty, and caches are not changes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def run(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Exit status, class of the error, standard error."""
    kinds = []
    show = cli.show_error

    def record(arguments: argparse.Namespace, error: SmsError, status: int) -> int:
        kinds.append("Problem" if getattr(error, "problems", ()) else type(error).__name__)
        return show(arguments, error, status)

    monkeypatch.setattr(cli, "show_error", record)
    capsys.readouterr()
    try:
        status = main(words)
    except SystemExit as end:
        status, kinds = int(end.code or 0), ["usage"]
    return status, kinds[0] if kinds else "", capsys.readouterr().err


@pytest.mark.parametrize(("group", "row"), ROWS, ids=[f"{group}: {row.words}" for group, row in ROWS])
def test_mistakes(
    group: str,
    row: Mistake,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid() and row.kind not in ("usage", "Problem", "ConfigError"):
        pytest.skip("acts on this host: root only")
    monkeypatch.chdir(folder)
    before = contents(folder)
    status, kind, text = run(shlex.split(row.words.replace("HERE", HERE)), capsys, monkeypatch)
    assert (status, kind) == (row.status, row.kind), text
    assert re.search(r"^sms[^:\n]*: \S.*\n(.*\n)*  hint: \S", text, re.MULTILINE), text
    assert "Traceback" not in text
    assert contents(folder) == before


@pytest.mark.parametrize(("old", "new"), EDITS, ids=[f"{old} -> {new}" for old, new in EDITS])
def test_mistakes_of_the_site_file(
    old: str,
    new: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = (folder / "sms.yaml").read_text()
    assert site.count(old) >= 1
    (tmp_path / "edited.yaml").write_text(site.replace(old, new, 1))
    monkeypatch.chdir(tmp_path)
    status, kind, text = run(["config", "check", "edited.yaml"], capsys, monkeypatch)
    assert (status, kind) == (2, "Problem"), text
    assert re.search(r"^(sms: )?edited\.yaml(:\d+)?: \S.*\n  hint: \S", text, re.MULTILINE), text
    assert main(["-q", "config", "check", str(folder / "sms.yaml")]) == 0, "it is this that is wrong"


def test_each_group_of_verbs_has_its_mistakes() -> None:
    subjects = {path.parent.name for path in (ROOT / "appliance" / "cli").glob("*/__init__.py")}
    counts = {name: len(read_table(text)) for name, text in TABLES.items()}
    assert set(counts) == subjects
    assert {name: count for name, count in counts.items() if count < 10} == {}
    assert sum(counts.values()) >= 100
    assert len(set(ROWS)) == len(ROWS)
