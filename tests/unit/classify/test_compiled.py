"""The compiled form of the catalogue: equal to the files, never stale, never of others' making."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.operations.classify import compiled, convert, signatures
from appliance.share import PACKAGE, share
from tests.captures import cluster, files
from tests.places import ROOT

SHIPPED = convert.read_services()[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "signatures.json"
    compiled.write(SHIPPED, made)
    return made


def test_it_equals_the_files(file: Path) -> None:
    found = compiled.read(file)
    assert found == SHIPPED
    assert list(found) == list(SHIPPED), "the order decides between services of one port"
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_changed_file_is_noticed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is changed, added or removed; and a program that converts them."""
    copy = tmp_path / "services"
    shutil.copytree(share("definitions", "services"), copy)
    monkeypatch.setattr(compiled, "share", lambda *parts: copy)
    assert compiled.read(file)
    nfs, text = copy / "nfs.yaml", (copy / "nfs.yaml").read_text()
    nfs.write_text(text + "\n")
    assert compiled.read(file) is None
    nfs.write_text(text)
    assert compiled.read(file)
    (copy / "other.yaml").write_text(text)
    assert compiled.read(file) is None
    (copy / "other.yaml").unlink()
    nfs.rename(copy / "nfs2.yaml")
    assert compiled.read(file) is None
    (copy / "nfs2.yaml").rename(nfs)
    monkeypatch.setattr(compiled, "SOURCES", compiled.SOURCES[1:])
    assert compiled.read(file) is None


@pytest.mark.parametrize("name", ["signatures.json", "."])
def test_what_anybody_can_write_is_not_used(file: Path, name: str) -> None:
    place = file.parent / name
    place.chmod(place.stat().st_mode | 0o002)
    assert compiled.read(file) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "1", '{"digest": 1}', "[" * 100_000, '{"digest": "DIGEST"}', "\xff"])
def test_a_damaged_file_is_not_used(file: Path, text: str) -> None:
    file.write_text(text.replace("DIGEST", compiled.digest()), encoding="latin-1")
    assert compiled.read(file) is None


def test_fields_of_another_version_are_not_used(file: Path) -> None:
    data = json.loads(file.read_text())
    data["services"][0]["signature"]["other"] = 1
    file.write_text(json.dumps(data))
    assert compiled.read(file) is None


def test_without_it_the_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FILE", tmp_path / "none")
    assert compiled.read() is None
    assert signatures.open_catalogue(None).shipped == SHIPPED


def test_every_program_that_it_depends_on_is_there() -> None:
    assert all((PACKAGE.parent / name).is_file() for name in compiled.SOURCES)


HEAVY = (
    "ansible_runner",
    "cryptography",
    "difflib",
    "jinja2",
    "logging",
    "paramiko",
    "pydantic",
    "scapy",
    "traceback",
    "yaml",
)


@pytest.mark.parametrize(("options", "more"), [((), ()), (("--json",), ("rich",))], ids=["table", "json"])
def test_a_capture_is_classified_without_what_is_slow_to_import(
    file: Path, tmp_path: Path, options: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Their import would take longer than all else; rich is for what it draws."""
    capture = tmp_path / "sms.pcap"
    capture.write_bytes(files.pcap(cluster.simulate(cluster.Plan(nodes=2, duration_s=600)).packets()))
    code = (
        "import sys; from pathlib import Path; from appliance.cli import main;"
        "from appliance.operations.classify import compiled;"
        f"compiled.FILE = Path({str(file)!r});"
        f"assert main(['classify', {str(capture)!r}, *{options}]) == 0;"
        f"print('imported:', *(name for name in {HEAVY + more} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "imported:"
    assert "read the captures" in done.stderr
