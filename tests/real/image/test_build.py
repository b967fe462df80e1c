"""Real builds: not repeated, locked, signed, reported; nothing is left when they fail or are killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.config.read import read_text
from appliance.operations.image.build import Built
from tests.real.conftest import processes
from tests.waiting import wait_until

pytestmark = pytest.mark.real

SMS = (sys.executable, "-m", "appliance")


class Site:
    """A site of its own on this machine, with its own state folder; ``first`` is what its first build said."""

    first: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "sms.yaml"
        self.images = folder / "state" / "images"
        self.sms("init", "--profile", "lab", "-o", str(self.file))
        self.change(lambda site: site.update(state="state"))
        self.change(lambda site: site.pop("accounts", None))
        self.change(lambda site: site.pop("secrets", None))
        self.sms("key", "create")
        # apt's lists as the lab's build has read them: an update sees that they are new enough.
        lists = Path("/var/lib/sms/cache/apt-debian-12")
        if lists.is_dir():
            shutil.copytree(lists, folder / "state" / "cache" / lists.name, symlinks=True)

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
        """Take over the files of an image that was built elsewhere, signed again by this site."""
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


@pytest.fixture(scope="module")
def adopted(tmp_path_factory: pytest.TempPathFactory, built: Built) -> Site:
    """A site whose store has the lab's image, signed by the site's own key."""
    site = Site(tmp_path_factory.mktemp("adopted"))
    site.adopt(Path(built.image))
    image = str(site.images / f"{built.key}.sif")
    subprocess.run(["apptainer", "sign", "--key", str(site.folder / "keys/sign.pem"), image], check=True)
    site.first = site.build()
    return site


def test_what_has_not_changed_is_not_built_again(adopted: Site, built: Built) -> None:
    first = adopted.first
    assert first["key"] == built.key and not first["fresh"]
    before = Path(first["image"]).stat()
    assert adopted.build() == first
    after = Path(first["image"]).stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    current = adopted.images / "lab.sif"
    assert current.readlink() == Path(f"{built.key}.sif")


def test_locked_refuses_other_versions_and_takes_the_same(adopted: Site) -> None:
    lock = adopted.folder / "sms.lock"
    assert adopted.build("--locked")["fresh"] is False
    reported = json.loads(lock.read_text())
    reported["packages"]["munge"] = "0.1-1"
    lock.write_text(json.dumps(reported))
    refused = adopted.sms("build", "--locked", ok=3).stderr
    assert "munge: 0.1-1 ->" in refused and "hint:" in refused
    lock.unlink()
    assert "there is no lock file" in adopted.sms("build", "--locked", ok=3).stderr
    lock.write_text("nonsense")
    assert "is not a lock file" in adopted.sms("build", "--locked", ok=2).stderr


def test_manifest_and_bill_of_materials_tell_what_is_inside(adopted: Site) -> None:
    result = adopted.first
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


def read_tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Type, owner, mode, size or target, extended attributes and digest of everything below a folder."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        state = path.lstat()
        attributes = {
            name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)
        }
        regular = stat.S_ISREG(state.st_mode)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if regular else ""
        target = str(path.readlink()) if path.is_symlink() else ""
        found[str(path.relative_to(root))] = (state.st_mode, state.st_uid, state.st_gid, digest, target, attributes)
    return found


def test_the_oci_form_is_the_sif(adopted: Site, tmp_path: Path, need: Callable[[str], str]) -> None:
    need("sqfs2tar")
    need("skopeo")
    folder = tmp_path / "lab.oci"
    made = json.loads(adopted.sms("image", "oci", "-o", str(folder), "--json").stdout)
    index = json.loads((folder / "index.json").read_text())
    assert [entry["digest"] for entry in index["manifests"]] == [made["digest"]]
    again = json.loads(adopted.sms("image", "oci", "-o", str(tmp_path / "again"), "--json").stdout)
    assert (again["digest"], again["fresh"]) == (made["digest"], True)
    shutil.rmtree(tmp_path / "again")
    assert json.loads(adopted.sms("image", "oci", "-o", str(folder), "--json").stdout) == {**made, "fresh": False}
    inspected = subprocess.run(["skopeo", "inspect", f"oci:{folder}"], capture_output=True, check=True).stdout
    found = json.loads(inspected)
    assert found["Digest"] == made["digest"] and found["Labels"]["sms.sif"] == f"sha256:{made['sif']}"

    layer = folder / "blobs" / found["Layers"][0].replace(":", "/")
    tree, original = tmp_path / "tree", tmp_path / "original"
    tree.mkdir()
    subprocess.run(["tar", "-C", tree, "--xattrs", "--xattrs-include=*", "-xpf", layer], check=True)
    squashfs = tmp_path / "root.squashfs"
    with squashfs.open("wb") as file:
        subprocess.run(["apptainer", "sif", "dump", "3", adopted.first["image"]], stdout=file, check=True)
    subprocess.run(["unsquashfs", "-q", "-n", "-d", original, squashfs], check=True)
    assert read_tree(tree) == read_tree(original)
    shutil.rmtree(tree)
    shutil.rmtree(original)

    assert json.loads(adopted.sms("verify", str(folder), "--json").stdout)["signer"].startswith("sign.pub ")
    with layer.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"changed")
    assert adopted.sms("verify", str(folder), ok=3).returncode == 3
    assert adopted.sms("image", "oci", "-o", str(folder), ok=3).returncode == 3


def test_an_unsigned_image_has_no_oci_form(site: Site, built: Built) -> None:
    site.adopt(Path(built.image))
    folder = site.folder / "lab.oci"
    assert site.sms("image", "oci", built.key, "-o", str(folder), ok=3).returncode == 3
    assert not folder.exists() and not list(site.folder.glob(".*.new"))


@pytest.mark.full
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


def wait_for_build(site: Site, process: subprocess.Popen[Any], before: set[Path]) -> set[Path]:
    """Until Apptainer fills a root file system for it that is not one of those before; give those there are."""

    def filled() -> set[Path]:
        assert process.poll() is None, "the build has ended"
        roots = {file.parent for file in (site.folder / "tmp").glob("build-temp-*/rootfs/*")}
        return roots if list(site.images.glob("build-*/services.def")) and roots - before else set()

    return wait_until(filled, "a root file system is filled", 120)


def test_a_build_that_is_killed_leaves_the_current_image_and_the_next_one_cleans_up(adopted: Site) -> None:
    (adopted.folder / "tmp").mkdir()
    # Others build in /tmp at the same time.
    environment = {**os.environ, "APPTAINER_TMPDIR": str(adopted.folder / "tmp")}
    argv = [*SMS, "--site", str(adopted.file), "build", "--force"]
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = wait_for_build(adopted, process, set())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not processes(str(adopted.images)), "the build ends with its parent", 60)
    assert adopted.sms("verify").returncode == 0
    # A build that is begun and undone politely removes what the killed one left.
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE)
    wait_for_build(adopted, process, first)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    assert list(adopted.images.glob("build-*")) == []
    assert adopted.build()["key"] == adopted.first["key"]


def test_what_is_missing_is_said_before_anything_is_built(site: Site) -> None:
    (site.folder / "keys" / "sign.pem").unlink()
    assert "there is no signing key" in site.sms("build", ok=3).stderr
    site.change(lambda document: document["base"].update(mirrors={"debian": "http://127.0.0.1:9/debian"}))
    (site.folder / "keys" / "sign.pub").unlink()
    site.sms("key", "create")
    reported = site.sms("build", ok=1).stderr
    assert "cannot resolve packages" in reported and "mirror" in reported
    assert list(site.images.glob("*.sif")) == []
