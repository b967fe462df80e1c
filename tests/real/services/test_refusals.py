"""Bad input and bad hosts: a clear refusal, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.host.base import Host
from appliance.operations.image.build import Built
from appliance.operations.site.keys import create_pair
from tests.copies import give
from tests.real.conftest import Playground
from tests.real.processes import begin, wait_for_step

pytestmark = pytest.mark.real


def spoilt(kind: str, image: Path, folder: Path) -> None:
    """Make a copy of an image into one that must never start."""
    if kind == "tampered":
        with image.open("r+b") as stream:
            stream.seek(image.stat().st_size // 2)
            byte = stream.read(1)
            stream.seek(-1, 1)
            stream.write(bytes([byte[0] ^ 1]))
        return
    listed = subprocess.run(["apptainer", "sif", "list", str(image)], capture_output=True, text=True, check=True).stdout
    signature = next(line.split("|")[0].strip() for line in listed.splitlines() if "Signature" in line)
    subprocess.run(["apptainer", "sif", "del", signature, str(image)], check=True)
    if kind == "foreign":
        create_pair(folder / "foreign.pem", folder / "foreign.pub")
        subprocess.run(["apptainer", "sign", "--key", str(folder / "foreign.pem"), str(image)], check=True)


@pytest.mark.parametrize(
    "kind, words",
    [
        ("tampered", "it was changed after it was signed"),
        # Upgrades and rehearsals refuse it in every run.
        pytest.param("unsigned", "it is not signed", marks=pytest.mark.full),
        ("foreign", "it was signed with another key"),
    ],
)
def test_an_image_that_is_not_to_be_trusted_never_starts(
    stopped: Playground, built: Built, tmp_path: Path, kind: str, words: str
) -> None:
    copy = tmp_path / "image.sif"
    copy.write_bytes(Path(built.image).read_bytes())
    spoilt(kind, copy, tmp_path)
    give(stopped.host("host-a"), copy, "/var/lib/sms/images/spoilt.sif")
    generation = stopped.lease().get("generation")
    reported = stopped.sms("start", "--image", "/var/lib/sms/images/spoilt.sif", ok=(3,))
    assert words in reported.stderr.decode()
    stopped.assert_nothing_runs()
    assert stopped.lease().get("generation") == generation


@contextmanager
def without_bridge(playground: Playground) -> Iterator[str]:
    host = playground.host("host-a")
    host.run("ip", "link", "set", "br-pub", "down")
    host.run("ip", "link", "set", "br-pub", "name", "br-away")
    try:
        yield "bridge br-pub does not exist or is down"
    finally:
        host.run("ip", "link", "set", "br-away", "name", "br-pub")
        host.run("ip", "link", "set", "br-pub", "up")


@contextmanager
def without_port(playground: Playground) -> Iterator[str]:
    host = playground.host("host-a")
    host.run("ip", "link", "set", "prov0", "nomaster")
    try:
        yield "bridge br-prov has no port that is up"
    finally:
        host.run("ip", "link", "set", "prov0", "master", "br-prov")


@contextmanager
def address_taken(playground: Playground) -> Iterator[str]:
    node = playground.host("node1")
    node.run("ip", "address", "add", "10.77.0.1/24", "dev", "eth0")
    try:
        yield "10.77.0.1 is already used by"
    finally:
        node.run("ip", "address", "del", "10.77.0.1/24", "dev", "eth0")


@contextmanager
def lease_elsewhere(playground: Playground) -> Iterator[str]:
    """As host-b wrote it: into its own file, and into that of host-a."""
    path = "/var/lib/sms/overlays/lab.lease"
    hosts = {name: playground.host(name) for name in ("host-a", "host-b")}
    before = {name: host.read(path) for name, host in hosts.items()}
    for name, host in hosts.items():
        lease = {"cluster": "lab", "generation": 41, "holder": "host-b", "since": 1.0, "file": name}
        host.write(path, json.dumps(lease).encode(), mode=0o600)
    try:
        yield "host-b holds the lease (generation 41)"
    finally:
        for name, host in hosts.items():
            data = before[name]
            host.write(path, data, mode=0o600) if data else host.remove(path)


@contextmanager
def overlay_in_use(playground: Playground) -> Iterator[str]:
    host = playground.host("host-a")
    host.run("sh", "-c", "test -e /var/lib/sms/overlays/lab.img || sms -q start && sms -q stop")
    loop = host.run("losetup", "--find", "--show", "/var/lib/sms/overlays/lab.img").text
    try:
        yield "is in use on host-a"
    finally:
        host.run("losetup", "--detach", loop)


TROUBLES = (
    without_bridge,
    pytest.param(without_port, marks=pytest.mark.full),  # a move refuses it in every run
    address_taken,
    pytest.param(lease_elsewhere, marks=pytest.mark.full),  # one of the model's states
    overlay_in_use,
)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_host_that_cannot_carry_it_is_refused_and_nothing_is_changed(stopped: Playground, trouble: Any) -> None:
    with trouble(stopped) as words:
        reported = stopped.sms("start", ok=(3,))
        assert words in reported.stderr.decode()
        assert "hint:" in reported.stderr.decode()
        assert stopped.instances() == []
        assert stopped.sms("start", "--dry-run", ok=None).status in (3, 0)
    stopped.assert_nothing_runs()
    # Only this was refused: the next start succeeds.
    if trouble in (lease_elsewhere, overlay_in_use):
        stopped.sms("-q", "start")
        stopped.sms("-q", "stop")
    else:
        stopped.sms("-q", "start", "--dry-run")


@pytest.mark.full
def test_a_damaged_overlay_is_named_and_not_started(stopped: Playground) -> None:
    host = stopped.host("host-a")
    overlay = "/var/lib/sms/overlays/lab.img"
    stopped.sms("-q", "start")
    stopped.sms("-q", "stop")
    host.run("cp", "--sparse=always", overlay, f"{overlay}.kept")
    try:
        host.run("sh", "-c", f"dd if=/dev/urandom of={overlay} bs=4096 count=2000 seek=0 conv=notrunc status=none")
        reported = stopped.sms("start", ok=(5,)).stderr.decode()
        assert "is damaged" in reported and "sms overlay restore latest" in reported
        stopped.assert_nothing_runs()
    finally:
        host.run("mv", "-f", f"{overlay}.kept", overlay)


def test_a_service_that_cannot_start_is_named_with_its_log_and_all_is_undone(stopped: Playground) -> None:
    def change(document: dict[str, Any]) -> None:
        document["slurm"]["extra"] = ["ThisIsNoSetting=1"]

    site = stopped.variant("bad-slurm.yaml", change)
    reported = stopped.sms("--site", site, "start", "--wait", "6", ok=(5,)).stderr.decode()
    assert "slurmctld does not answer" in reported
    assert "ThisIsNoSetting" in reported, "the end of its log says why"
    assert "stopped again" in reported
    stopped.assert_nothing_runs()
    # The overlay has got the bad file; the good site file puts it right.
    stopped.sms("-q", "start")
    assert stopped.status()["healthy"]


@pytest.fixture
def small(stopped: Playground) -> Iterator[Host]:
    """The host, with a disk of 68 MiB at /mnt/small."""
    host = stopped.host("host-a")
    host.run("mkdir", "-p", "/mnt/small")
    host.run("mount", "-t", "tmpfs", "-o", "size=68m,mode=755", "tmpfs", "/mnt/small")
    yield host
    host.run("umount", "/mnt/small")


def on_small(stopped: Playground, size_mb: int) -> str:
    """A site file whose overlay is there."""

    def change(document: dict[str, Any]) -> None:
        document["overlay"] = {"size_mb": size_mb, "directory": "/mnt/small"}

    return stopped.variant("small.yaml", change)


def test_a_full_disk_is_said_before_an_overlay_is_made(stopped: Playground, small: Host) -> None:
    reported = stopped.sms("--site", on_small(stopped, 2048), "start", ok=(3,)).stderr.decode()
    assert "MiB free" in reported
    stopped.assert_nothing_runs()
    assert "lab.img" not in small.run("ls", "/mnt/small").text.split()


def test_a_disk_that_fills_while_the_overlay_is_made_leaves_no_half_overlay(stopped: Playground, small: Host) -> None:
    site = on_small(stopped, 64)
    process = begin(stopped, "--site", site, "start")
    wait_for_step(process, "take the lease")
    # There was space when it was queried; now it is used up.
    small.run("sh", "-c", "dd if=/dev/zero of=/mnt/small/rest bs=64k status=none", ok=(1,))
    reported = process.communicate()[1].decode()
    assert process.returncode in (1, 5) and "hint" in reported, reported
    assert stopped.instances() == []
    assert "lab.img.new" not in small.run("ls", "/mnt/small").text.split()
    small.remove("/mnt/small/rest")
    # The lease is on the same disk: it is released now at the latest, and the next start succeeds.
    stopped.sms("--site", site, "-q", "stop")
    stopped.sms("--site", site, "-q", "start")
    stopped.sms("--site", site, "-q", "stop")


def test_an_image_without_a_service_that_the_site_wants_is_refused(stopped: Playground) -> None:
    def change(document: dict[str, Any]) -> None:
        document["services"] = ["munge", "slurmctld", "slurmrestd"]

    reported = stopped.sms("--site", stopped.variant("more.yaml", change), "start", ok=(3,)).stderr.decode()
    assert "the image lacks slurmrestd" in reported and "sms build" in reported
    stopped.assert_nothing_runs()


def test_missing_programs_are_all_named(stopped: Playground) -> None:
    host = stopped.host("host-a")
    paths = [host.run("sh", "-c", f"command -v {name}").text for name in ("arping", "debugfs")]
    for path in paths:
        host.run("mv", path, f"{path}.away")
    try:
        reported = stopped.sms("start", ok=(3,)).stderr.decode()
        assert (
            "arping is not installed" in reported
            and "debugfs is not installed" in reported
            and "sms doctor" in reported
        )
    finally:
        for path in paths:
            host.run("mv", f"{path}.away", path)


CASES: list[tuple[Callable[[Playground], tuple[str, ...]], int, str]] = [
    (lambda _: ("start", "--host", "nowhere"), 2, "no admin host named nowhere"),
    (lambda _: ("exec", "hostname"), 3, "does not run on host-a"),
    (lambda _: ("logs", "-f", "munge"), 3, "does not run on host-a"),
    (lambda _: ("--site", "/etc/sms/none.yaml", "status"), 2, "none.yaml"),
    (lambda _: ("start", "--image", "/nowhere.sif"), 3, "there is no image /nowhere.sif"),
]


@pytest.mark.parametrize("make, status, words", CASES)
def test_what_cannot_be_done_is_said(
    stopped: Playground, make: Callable[[Playground], tuple[str, ...]], status: int, words: str
) -> None:
    reported = stopped.sms(*make(stopped), ok=(status,))
    assert words in reported.stderr.decode()


def test_a_host_whose_key_is_not_known_is_refused(stopped: Playground) -> None:
    admin = stopped.host("admin")
    known = stopped.lab.etc / "known_hosts"
    before = known.read_bytes()
    wrong = [line for line in before.decode().splitlines() if "host-b" in line or "10.78.0.12" in line]
    known.write_text(
        "\n".join(line.replace("10.78.0.12", "10.78.0.11").replace("host-b", "host-a") for line in wrong) + "\n"
    )
    try:
        reported = admin.run("sms", "start", "--host", "host-a", ok=None)
        assert reported.status == 1 and b"host key does not match" in reported.stderr
        known.write_text("")
        reported = admin.run("sms", "start", "--host", "host-a", ok=None)
        assert reported.status == 1 and b"not found in known_hosts" in reported.stderr
    finally:
        known.write_bytes(before)
    stopped.assert_nothing_runs()
