"""The wheel, installed into an empty environment and used far from the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.captures import files
from tests.captures.cluster import Plan, simulate
from tests.places import ROOT

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, by way of the source distribution, as those build it who have that alone."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    subprocess.run([sys.executable, str(ROOT / "scripts" / "lock-wheel"), str(folder)], check=True, timeout=60)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def sms(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed `sms` in an empty folder with an empty environment."""
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "venv" / "bin" / "python"
    subprocess.run(["/usr/bin/python3", "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    # What is used is compiled then: to compile all of Ansible takes longer than to use it.
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    # Where packages come from is the machine's own configuration; PYTHON* would lead back here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    (lock,) = wheel.parent.glob("sms_appliance-*.lock")
    # Anything else than what the lock file names is refused.
    other = folder / lock.name
    altered = re.sub(r"(sms-appliance==\S+ --hash=sha256:).{8}", rf"\g<1>{'0' * 8}", lock.read_text())
    other.write_text(altered.replace("--find-links .", f"--find-links {wheel.parent}"))
    for path, status in ((other, 1), (lock, 0)):
        done = subprocess.run(
            [*pip, "--require-hashes", "-r", str(path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == status, done.stderr
        assert status == 0 or "DO NOT MATCH THE HASHES" in done.stderr
    work = folder / "work"
    work.mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(folder / "venv" / "bin" / "sms"), *words],
            cwd=work,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(work), "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


Sms = Callable[..., subprocess.CompletedProcess[str]]


def test_it_holds_the_data_and_nothing_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = {name: archive.read(name) for name in names}
    held = {name.split("_share/")[1] for name in names if "_share/" in name}
    for folder in ("definitions", "overlays", "playbooks"):
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", folder], capture_output=True, text=True).stdout
        assert [name for name in listed.splitlines() if (ROOT / name).is_file() and name not in held] == []
    assert [name for name in names if name.startswith(("tests/", "docs/"))] == []
    assert [name for name in names if name.endswith("man1/sms.1")]
    assert [name for name in names if name.endswith((".c", ".h")) and "_share/definitions/" not in name] == []
    assert [name for name, text in texts.items() if str(ROOT).encode() + b"/" in text] == []


def test_it_prints_its_version_and_its_help(sms: Sms) -> None:
    assert re.fullmatch(r"sms \d+\.\d+\.\d+\n", sms("--version").stdout)
    assert "exit status: 0 success" in sms("--help").stdout


@pytest.mark.parametrize("profile", ["openhpc", "cray-ex", "lab"])
def test_a_profile_is_written_and_fine(sms: Sms, profile: str) -> None:
    assert sms("init", "--profile", profile, "-o", f"{profile}.yaml").returncode == 0
    done = sms("config", "check", f"{profile}.yaml")
    if profile != "lab":  # the others have addresses for documentation, which nobody may use
        assert done.returncode == 2 and "is an address for documentation" in done.stderr
        text = Path(sms("config", "schema").args[0]).parents[2] / "work" / f"{profile}.yaml"
        edited = text.read_text().replace("192.0.2.", "172.30.2.").replace("198.51.100.", "172.30.3.")
        text.write_text(edited.replace("# (CHANGE) ", "# "))
        done = sms("config", "check", f"{profile}.yaml")
    # The catalogue and the bases are read for it.
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r": valid: cluster \S+, 2 admin hosts, 8 services on ", done.stdout)
    values = json.loads(sms("--site", f"{profile}.yaml", "config", "show", "--json").stdout)
    assert values["cluster"]


def test_a_service_that_is_not_in_the_catalogue(sms: Sms) -> None:
    text = sms("init", "--profile", "lab", "-o", "-").stdout
    work = Path(sms("config", "schema").args[0]).parents[2] / "work"
    (work / "odd.yaml").write_text(text.replace("munge, nat", "mungee, nat"))
    done = sms("config", "check", "odd.yaml")
    assert done.returncode == 2
    assert "mungee" in done.stderr
    assert "did you mean munge" in done.stderr


def test_keys_and_an_image_list(sms: Sms) -> None:
    assert sms("init", "--profile", "lab", "-o", "own.yaml").returncode == 0
    assert sms("--site", "own.yaml", "key", "create").returncode == 0
    assert "no images" in sms("--site", "own.yaml", "--state", "state", "image", "list").stdout


def test_schema_and_completion(sms: Sms) -> None:
    assert json.loads(sms("config", "schema").stdout) == json.loads((ROOT / "docs" / "sms.schema.json").read_text())
    assert "complete" in sms("completion", "bash").stdout
    assert sms("completion", "zsh").stdout.startswith("#compdef sms")


def test_the_definition_is_rendered_from_its_own_files(sms: Sms) -> None:
    """A dry build reads the base, the templates and the programs of the container."""
    if subprocess.run(["sh", "-c", "command -v apt-get"], capture_output=True).returncode:
        pytest.skip("apt-get is not installed")
    assert sms("init", "--profile", "lab", "-o", "dry.yaml").returncode == 0
    done = sms("--site", "dry.yaml", "--state", "dry", "build", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "/opt/sms/bin/sms-init" in done.stdout


def test_a_capture_is_classified(sms: Sms) -> None:
    """The native core, the catalogue and the page's template are in the wheel."""
    work = Path(sms("config", "schema").args[0]).parents[2] / "work"
    (work / "some.pcap").write_bytes(files.pcap(simulate(Plan(nodes=3, duration_s=600)).packets()))
    found = json.loads(sms("classify", "some.pcap", "--json").stdout)
    assert {"slurmctld", "rsyslog"} <= {one["name"] for one in found["services"] if one["verdict"] == "time-critical"}
    done = sms("classify", "some.pcap", "-o", "some.html")
    assert done.returncode == 0, done.stderr
    assert (work / "some.html").read_text().startswith("<!DOCTYPE html>")


def test_the_playbook_is_found(sms: Sms) -> None:
    """`sms host prepare` reaches no host here, but gets as far as reporting it."""
    text = sms("init", "--profile", "lab", "-o", "-").stdout
    work = Path(sms("config", "schema").args[0]).parents[2] / "work"
    (work / "far.yaml").write_text(text.replace("10.78.0.11", "127.0.0.1\n    port: 1"))
    done = sms("--site", "far.yaml", "host", "prepare", "host-a")
    assert done.returncode == 1
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
