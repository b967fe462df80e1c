"""Secrets reach the container through its overlay only."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from appliance.operations.image.build import Built
from tests.real.conftest import Playground

pytestmark = pytest.mark.real


def test_the_munge_key_is_in_the_overlay_with_mode_0600(running: Playground) -> None:
    reported = running.sms("exec", "--", "stat", "-c", "%a %U %G %s", "/etc/munge/munge.key").text
    assert reported == "600 munge munge 1024"
    host = running.host("host-a")
    assert host.run("stat", "-c", "%a", "/var/lib/sms/overlays/lab.img").text == "600"
    assert host.run("stat", "-c", "%a", "/var/lib/sms/overlays").text == "700"


def test_no_secret_is_in_the_image_or_the_files_beside_it(running: Playground, built: Built, tmp_path: Path) -> None:
    key = (running.lab.etc / "keys" / "munge.key").read_bytes()
    private = (running.lab.etc / "keys" / "sign.pem").read_bytes().splitlines()[1]
    root = tmp_path / "root"
    number = next(
        line.split("|")[0]
        for line in subprocess.run(
            ["apptainer", "sif", "list", built.image], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if "Squashfs" in line
    )
    with (tmp_path / "squash").open("wb") as stream:
        subprocess.run(["apptainer", "sif", "dump", number.strip(), built.image], stdout=stream, check=True)
    subprocess.run(["unsquashfs", "-q", "-n", "-d", str(root), str(tmp_path / "squash")], check=True)
    assert not (root / "etc/munge/munge.key").exists()
    beside = [path for path in Path(built.image).parent.glob("*") if path.is_file() and path.suffix != ".sif"]
    for path in [*root.rglob("*"), *beside]:
        if path.is_file() and not path.is_symlink() and path.stat().st_size >= 64:
            data = path.read_bytes()
            assert key[:64] not in data and private not in data, path


def test_no_secret_is_in_an_argv_a_log_or_a_readable_file_of_the_host(running: Playground) -> None:
    key = (running.lab.etc / "keys" / "munge.key").read_bytes()[:33]
    shapes = (key, key.hex().encode(), base64.b64encode(key))
    host = running.host("host-a")
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes()
        except OSError:
            continue
        assert not any(shape in words for shape in shapes)
    # A snapshot is a copy of the overlay, which has the key; other tests of this lab take some.
    host.run("rm", "-rf", "/var/lib/sms/snapshots")
    folders = ("/var/lib/sms", "/run/sms", "/etc/apptainer", "/root/.apptainer")
    listed = host.run("find", *folders, "-type", "f", "-size", "-2M", "-print0").stdout
    for name in listed.decode().split("\0")[:-1]:
        data = host.read(name) or b""
        assert not any(shape in data for shape in shapes), name


def test_another_users_eyes_find_the_state_folder_closed(running: Playground) -> None:
    host = running.host("host-a")
    assert host.works("setpriv", "--reuid=65534", "--clear-groups", "ls", "/")
    assert not host.works("setpriv", "--reuid=65534", "--clear-groups", "ls", "/var/lib/sms/overlays")


def test_another_munge_key_with_sms_apply(running: Playground) -> None:
    """As docs/security.md describes it: the container answers with the new key; what the old one made is refused."""
    path, inside = running.lab.etc / "keys" / "munge.key", "/etc/munge/munge.key"
    old, new = path.read_bytes(), os.urandom(1024)
    credential = running.sms("exec", "--", "munge", "--no-input").text
    unmunge = ("exec", "--", "sh", "-c", 'echo "$1" | unmunge', "unmunge")
    running.sms(*unmunge, credential)
    try:
        path.write_bytes(new)
        assert b"munge key" in running.sms("apply", ok=(3,)).stderr, "every node would refuse the controller"
        running.sms("apply", "--force")
        digest = running.sms("exec", "--", "sha256sum", inside).text.split()[0]
        assert digest == hashlib.sha256(new).hexdigest()
        assert b"Invalid credential" in running.sms(*unmunge, credential, ok=None).stderr
        running.sms("exec", "--", "sh", "-c", "munge --no-input | unmunge")
    finally:
        path.write_bytes(old)
        running.sms("apply", "--force")
