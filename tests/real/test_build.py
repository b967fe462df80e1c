"""Builds for real: not done twice, locked, signed, told; nothing left when they fail or are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.config.read import read_text
from appliance.flow.build import Built
from tests.real.conftest import Playground

pytestmark = pytest.mark.real

SMS = (sys.executable, "-m", "appliance")


class Site:
    """A site of its own on this machine, with its own state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "sms.yaml"
        self.images = folder / "state" / "images"
        self.sms("init", "--profile", "lab", "-o", str(self.file))
        self.change(lambda site: site.update(state="state"))
        self.change(lambda site: site.pop("accounts", None))
        self.change(lambda site: site.pop("secrets", None))
        self.sms("key", "create")

    def change(self, how: Any) -> None:
        document = yaml.safe_load(read_text(self.file))
        how(document)
        document["signing"] = document.get("signing") or {}
        document["signing"].setdefault("private_key", "keys/sign.pem")
        document["signing"].setdefault("public_keys", ["keys/sign.pub"])
        self.file.write_text(yaml.safe_dump(document))

    def sms(self, *words: str, ok: int | None = 0) -> subprocess.CompletedProcess[str]:
        argv = [*SMS, "--site", str(self.file), *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400, cwd=self.folder)
        assert ok is None or done.returncode == ok, done.stderr
        return done

    def build(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sms("-q", "build", "--json", *words).stdout)
        return found

    def adopt(self, image: Path) -> None:
        """Take over the files of an image that was built elsewhere, signed anew by this site."""
        self.images.mkdir(parents=True, exist_ok=True)
        for suffix in (".sif", ".json", ".cdx.json", ".packages"):
            shutil.copy(image.with_suffix(suffix), self.images)
        copy = str(self.images / image.name)
        listed = subprocess.run(["apptainer", "sif", "list", copy], capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            if "Signature" in line:
                subprocess.run(["apptainer", "sif", "del", line.split("|")[0].strip(), copy], check=True)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield Site(tmp_path)


@pytest.fixture
def adopted(site: Site, built: Built) -> Site:
    """A site whose store has the lab's image, signed by the site's own key."""
    site.adopt(Path(built.image))
    image = str(site.images / f"{built.key}.sif")
    subprocess.run(["apptainer", "sign", "--key", str(site.folder / "keys/sign.pem"), image], check=True)
    return site


def test_what_has_not_changed_is_not_built_again(adopted: Site, built: Built) -> None:
    first = adopted.build()
    assert first["key"] == built.key and not first["fresh"]
    before = Path(first["image"]).stat()
    assert adopted.build() == first
    after = Path(first["image"]).stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    current = adopted.images / "lab.sif"
    assert current.readlink() == Path(f"{built.key}.sif")


def test_locked_refuses_other_versions_and_takes_the_same(adopted: Site) -> None:
    adopted.build()
    lock = adopted.folder / "sms.lock"
    assert adopted.build("--locked")["fresh"] is False
    told = json.loads(lock.read_text())
    told["packages"]["munge"] = "0.1-1"
    lock.write_text(json.dumps(told))
    refused = adopted.sms("build", "--locked", ok=3).stderr
    assert "munge: 0.1-1 ->" in refused and "hint:" in refused
    lock.unlink()
    assert "there is no lock file" in adopted.sms("build", "--locked", ok=3).stderr
    lock.write_text("nonsense")
    assert "is no lock file" in adopted.sms("build", "--locked", ok=2).stderr


def test_manifest_and_bill_of_materials_tell_what_is_inside(adopted: Site) -> None:
    result = adopted.build()
    manifest = json.loads(adopted.sms("image", "manifest").stdout)
    assert manifest["key"] == result["key"] and "slurmctld" in manifest["packages"]
    inside = subprocess.run(
        ["apptainer", "exec", "--contain", result["image"], "cat", "/opt/sms/manifest.json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(inside) == manifest
    bill = json.loads(adopted.sms("image", "sbom").stdout)
    versions = {component["name"]: component["version"] for component in bill["components"]}
    assert versions["slurmctld"] == manifest["versions"]["slurmctld"]
    listed = subprocess.run(
        ["apptainer", "sif", "list", result["image"]], capture_output=True, text=True, check=True
    ).stdout
    assert "SBOM (cyclonedx-json)" in listed


def test_a_pgp_key_signs_in_place_of_pem(site: Site, built: Built) -> None:
    keyring = site.folder / "pgp"
    keyring.mkdir(mode=0o700)
    environment = {**os.environ, "APPTAINER_KEYSDIR": str(keyring)}
    words = [
        "apptainer",
        "key",
        "newpair",
        "--name",
        "t",
        "--email",
        "t@example.test",
        "--comment",
        "",
        "--password",
        "",
    ]
    subprocess.run([*words, "--push=false"], env=environment, check=True, capture_output=True)
    listed = subprocess.run(
        ["apptainer", "key", "list"], env=environment, check=True, capture_output=True, text=True
    ).stdout
    fingerprint = next(line.split()[-1] for line in listed.splitlines() if "Fingerprint" in line)
    site.change(
        lambda document: document.setdefault("signing", {}).update(pgp_fingerprint=fingerprint, pgp_keyring="pgp")
    )
    site.adopt(Path(built.image))
    image = site.images / f"{built.key}.sif"
    assert "it is not signed" in site.sms("verify", str(image), ok=3).stderr
    subprocess.run(["apptainer", "sign", "--keyidx", "0", str(image)], env=environment, check=True)
    assert site.build()["signer"] == f"PGP {fingerprint}"
    site.change(lambda document: document["signing"].update(pgp_fingerprint="A" * 40))
    assert site.sms("verify", str(image), ok=3).returncode == 3


def test_a_build_that_is_killed_leaves_the_current_image_and_the_next_one_cleans_up(adopted: Site) -> None:
    result = adopted.build()
    process = subprocess.Popen(
        [*SMS, "--site", str(adopted.file), "build", "--force"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(adopted.images.glob("build-*/services.def")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", str(adopted.images)], capture_output=True, check=False).stdout:
        assert time.monotonic() < deadline, "the build goes on without its parent"
        time.sleep(0.2)
    assert adopted.sms("verify").returncode == 0
    # A build that is begun and undone politely removes what the killed one left.
    process = subprocess.Popen([*SMS, "--site", str(adopted.file), "build", "--force"], stderr=subprocess.PIPE)
    time.sleep(8)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    assert list(adopted.images.glob("build-*")) == []
    assert adopted.build()["key"] == result["key"]


def test_what_is_missing_is_said_before_anything_is_built(site: Site) -> None:
    (site.folder / "keys" / "sign.pem").unlink()
    assert "there is no signing key" in site.sms("build", ok=3).stderr
    site.change(lambda document: document["base"].update(mirrors={"debian": "http://127.0.0.1:9/debian"}))
    (site.folder / "keys" / "sign.pub").unlink()
    site.sms("key", "create")
    told = site.sms("build", ok=1).stderr
    assert "cannot resolve packages" in told and "mirror" in told
    assert list(site.images.glob("*.sif")) == []


def test_all_optional_services_are_real_when_turned_on(playground: Playground) -> None:
    """slurmdbd with MariaDB, and slurmrestd: built, started, used."""
    from appliance.flow import demo

    def change(document: dict[str, Any]) -> None:
        names = ["slurmctld", "munge", "nat", "rsyslog", "chrony", "postfix", "cron", "filesync"]
        document["cluster"] = "full"  # an image, an overlay and a lease of its own
        document["services"] = [*names, "slurmdbd", "slurmrestd"]
        document["overlay"] = {"size_mb": 1024, "directory": "/var/lib/sms/full"}

    name = playground.variant("full.yaml", change)
    file = playground.lab.etc / "full.yaml"
    subprocess.run([*SMS, "--site", str(file), "-q", "build", "--lock", str(file) + ".lock"], check=True, timeout=500)
    for host in ("host-a", "host-b"):
        playground.sms("-q", "stop", on=host)
    words = ("--site", name, "start", "--host", "host-a")
    playground.sms("-q", *words, on="admin")
    try:
        status = json.loads(playground.sms("--site", name, "status", "--json").stdout)
        assert status["healthy"] and len(status["services"]) == 11
        node = playground.host("node1")
        demo.wait_idle(node, len(playground.lab.nodes))
        job = demo.run_job(node).split()[1]
        inside = ("--site", name, "exec", "--")
        account = ("sacct", "-X", "-n", "-P", "-j", job, "-o", "jobid,user,state")
        demo.wait_for(
            "the job's record",
            lambda: "yes" if f"{job}|alice|COMPLETED" in playground.sms(*inside, *account, ok=None).text else "",
        )
        unix = "/run/slurmrestd/slurmrestd.sock"
        ask = f"import socket; s=socket.socket(socket.AF_UNIX); s.connect({unix!r}); "
        ask += "s.sendall(b'GET /slurm/v0.0.38/nodes HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n'); "
        ask += "print(b''.join(iter(lambda: s.recv(65536), b'')).decode())"
        answer = playground.sms(*inside, "python3", "-c", ask).text
        assert "200 OK" in answer and '"node4"' in answer
    finally:
        playground.sms("--site", name, "-q", "stop")
