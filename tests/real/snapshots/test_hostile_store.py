"""A hostile store of snapshots against the verbs of an admin host: a standby host's agent, a backup machine's borg."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.store import Store
from appliance.host.base import Result
from appliance.host.netns import Netns
from appliance.lab import Lab
from tests import stores
from tests.cases import sample
from tests.conftest import find_tool
from tests.hostile import far
from tests.hostile import store as hostile
from tests.hostile.host_state import HostState, differences, read_state
from tests.hostile.verbs import run_safely
from tests.real.labs import fresh_lab
from tests.stores import keep_image, make_image, write_site

pytestmark = pytest.mark.real

FULL = pytest.mark.full
NAME = "t-hastore"
SITE = "/etc/sms/hostile.yaml"
CONTENT = "never to be read by a store"
MEMORY_MB = 400
"""More than any of these commands needs, and less than what is sent to them."""
IMPATIENT = """
import sys
from appliance.cli import main
from appliance.operations.snapshots import list
list.LIST_BOUNDS = type(list.LIST_BOUNDS)(3.0)
sys.exit(main(sys.argv[1:]))
"""
"""`sms` that waits seconds for a list of snapshots, where it waits minutes."""
EXAMPLE: dict[str, Any] = {}
"""Only the names of attacks are needed."""
STATUSES = (0, 1, 2, 3, 4)
"""Those that are documented."""
OWN = ("/var/lib/sms/", "/run/", "/tmp/", "/var/tmp/", "/var/log/", "/root/.cache/", "/lab/")


@dataclass
class Hosts:
    """host-a, which runs the verbs, and host-b, which is hostile. No services container is needed."""

    lab: Lab
    folder: Path
    before: HostState

    @property
    def here(self) -> Netns:
        return self.lab.host("host-a")

    @property
    def far(self) -> Netns:
        return self.lab.host("host-b")

    def store(self, host: str) -> Store:
        return Store(str(self.lab.layout.disk / host / "snapshots" / "lab"))

    def verb(self, *words: str, ok: tuple[int, ...] = STATUSES, timeout: float = 120) -> Result:
        argv = ("sms", "--site", SITE, *words)
        return run_safely(self.here, *argv, ok=ok, secret=CONTENT, memory_mb=MEMORY_MB, timeout=timeout)

    def assert_unchanged(self) -> None:
        """Of the host that runs the verbs; nothing has come into its store."""
        assert differences(self.before, read_state(self.here, OWN)) == []


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    find_tool("borg")
    with fresh_lab(NAME, 0) as opened:
        folder = tmp_path_factory.mktemp("store")
        write_site(opened, "hostile.yaml")
        make_image(folder / "one.img", seed=1)
        for name in ("host-a", "host-b"):
            opened.host(name).write(hostile.CANARY, f"{CONTENT}\n".encode(), mode=0o600)
        found = Hosts(opened, folder, read_state(opened.host("host-a"), OWN))
        far.take_over(found.far, "python3", "borg")
        yield found


@pytest.fixture
def hosts(lab: Hosts) -> Iterator[Hosts]:
    """host-b has one snapshot, host-a none."""
    for host in ("host-a", "host-b"):
        for name in ("snapshots", "repo", "borg", "leases"):
            subprocess.run(["rm", "-rf", str(lab.lab.layout.disk / host / name)], check=True)
    keep_image(lab.store("host-b"), lab.folder / "one.img")
    yield lab
    far.be_honest(lab.far)
    lab.assert_unchanged()


def manifest_of(hosts: Hosts) -> dict[str, Any]:
    """The honest snapshot of host-b, as a list has it."""
    return hosts.store("host-b").find("1").to_dict()


LISTED = (
    ("overlay", "pull", "--from", "host-b", "--list", "--json"),
    ("overlay", "pull", "--from", "host-b", "--list"),
    ("-q", "overlay", "pull", "--from", "host-b", "-n"),
    ("-q", "overlay", "pull", "--from", "host-b"),
    ("-q", "overlay", "push", "--to", "host-b", "-n"),
    ("overlay", "list", "--host", "host-b"),
)


@pytest.mark.parametrize("name", sample(hostile.lists(EXAMPLE), "null"))
def test_a_list_of_snapshots_is_data(hosts: Hosts, name: str) -> None:
    keep_image(hosts.store("host-a"), hosts.folder / "one.img")
    far.attack(hosts.far, "python3", "list", [("out", hostile.lists(manifest_of(hosts))[name])])
    for words in LISTED:
        done = hosts.verb(*words)
        assert far.taken(hosts.far) == ["out"], words
        hosts.far.remove(far.TAKEN)
        if "--json" in words and done.stdout:
            json.loads(done.stdout)
    assert sorted(stores.numbers(hosts.store("host-a"))) in ([1], [1, 2])


ENDLESS: dict[str, list[far.Step]] = {
    "output": [("endless", b"x" * 65536)],
    "lines": [("endless", b"x\n" * 32768)],
    "errors": [("endless error", b"x" * 65536)],
    "messages": [("endless error", b'{"kind":"detail","text":"x"}\n' * 2000)],
}


@pytest.mark.parametrize("name", sample(ENDLESS))
def test_an_agent_that_prints_without_end_is_ended(hosts: Hosts, name: str) -> None:
    far.attack(hosts.far, "python3", "list", ENDLESS[name])
    hosts.verb("-q", "overlay", "pull", "--from", "host-b", "--list", ok=(1,))
    assert len(far.taken(hosts.far)) > 8, "much was read of it"


@FULL
def test_an_agent_that_never_answers_is_ended(hosts: Hosts) -> None:
    """By the time of this side: here it has seconds."""
    far.attack(hosts.far, "python3", "list", [("out", b'{"kind":"note","text":"x"}\n'), ("silent", 0)])
    found = hosts.here.run(sys.executable, "-c", IMPATIENT, "--site", SITE, *LISTED[0], ok=(1,), timeout=60)
    assert far.taken(hosts.far) == ["out", "silent"] and b"did not end within 3 s" in found.stderr


@pytest.mark.parametrize("name", sample(hostile.streams(EXAMPLE), "chunks with other contents"))
def test_a_snapshot_that_is_none_is_not_stored(hosts: Hosts, name: str) -> None:
    far.attack(hosts.far, "python3", "export", hostile.streams(manifest_of(hosts))[name])
    hosts.verb("-q", "overlay", "pull", "--from", "host-b", "1", ok=(1, 3))
    assert far.taken(hosts.far)
    assert stores.numbers(hosts.store("host-a")) == []
    assert not [path for path in (hosts.lab.layout.disk / "host-a" / "snapshots").rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("name", sample(("out", "error", "request"), "request"))
def test_a_target_of_a_push_that_lies(hosts: Hosts, name: str) -> None:
    """What it requests of a snapshot is data; the store of this host stays as it is, and the next push works."""
    keep_image(hosts.store("host-a"), hosts.folder / "one.img")
    steps: dict[str, list[far.Step]] = {
        "out": [("endless", b"\xff" * 65536)],
        "error": [("endless error", b"x" * 65536)],
        "request": [("out", struct.pack(">I", 0xFFFFFFFF) + b"\xff" * 65536)],
    }
    far.attack(hosts.far, "python3", "import", steps[name])
    (failed,) = json.loads(hosts.verb("-q", "overlay", "push", "--json", "--to", "host-b", "1", ok=(1, 3)).stdout)
    assert failed["state"] == "failed" and far.taken(hosts.far)
    stores.assert_whole(hosts.store("host-a"))


@pytest.mark.parametrize("name", sample(hostile.borgs(), "messages without end"))
def test_a_borg_that_lies(hosts: Hosts, name: str) -> None:
    keep_image(hosts.store("host-a"), hosts.folder / "one.img")
    far.attack(hosts.far, "borg", "serve", hostile.borgs()[name])
    for words in (("pull", "--from", "borg", "--list"), ("push", "--json", "--to", "borg", "1")):
        hosts.verb("-q", "overlay", *words, ok=(1, 3))
        assert far.taken(hosts.far) or name == "nothing", words
        hosts.far.remove(far.TAKEN)
    stores.assert_whole(hosts.store("host-a"))


@FULL
def test_a_repository_of_earlier_is_noticed(hosts: Hosts) -> None:
    """A backup machine goes back to what it had: borg on this host has seen a later state."""
    for seed in (1, 2):
        keep_image(hosts.store("host-a"), make_image(hosts.folder / "next.img", seed=seed))
        hosts.verb("-q", "overlay", "push", "--to", "borg", str(seed), ok=(0,))
        hosts.far.run("cp", "-a", "/var/lib/sms/repo", f"/var/lib/sms/repo-{seed}")
    hosts.far.run("rm", "-rf", "/var/lib/sms/repo")
    hosts.far.run("mv", "/var/lib/sms/repo-1", "/var/lib/sms/repo")
    for words in (("pull", "--from", "borg", "--list"), ("pull", "--from", "borg"), ("push", "--to", "borg", "2")):
        found = hosts.verb("-q", "overlay", *words, ok=(1, 3))
        assert b"was not created by this site, or was replaced" in found.stdout + found.stderr, words
    hosts.far.run("rm", "-rf", "/var/lib/sms/repo", "/var/lib/sms/repo-2")


@pytest.mark.parametrize("name", sample(hostile.FAULTS, "more blocks than it has"))
def test_a_file_system_that_is_none_is_not_stored(hosts: Hosts, name: str) -> None:
    at, data = hostile.FAULTS[name]
    image = bytearray((hosts.folder / "one.img").read_bytes())
    image[at : at + len(data)] = data
    (hosts.folder / "spoiled.img").write_bytes(image)
    keep_image(hosts.store("host-b"), hosts.folder / "spoiled.img")
    hosts.verb("-q", "overlay", "pull", "--from", "host-b", "2", ok=(1,))
    assert stores.numbers(hosts.store("host-a")) == []


def test_a_hostile_overlay_in_a_snapshot_stays_in_its_folder(hosts: Hosts) -> None:
    """Links out of it, programs of root, devices, pipes, overlayfs's own attributes, and holes of gigabytes."""
    keep_image(hosts.store("host-b"), hostile.make_hostile_image(hosts.folder / "hostile.img"))
    hosts.verb("-q", "overlay", "pull", "--from", "host-b", "2", ok=(0,))
    assert stores.numbers(hosts.store("host-a")) == [2]
    folder = "/var/tmp/restored"
    hosts.verb("-q", "overlay", "restore", "2", "--path", "/h", "--to", folder, ok=(0,))
    for path in ("/h/to a folder/shadow", "/h/to itself/x", "/h/to the host's processes"):
        hosts.verb("-q", "overlay", "restore", "2", "--path", path, "--to", f"{folder}-2")
    assert hosts.here.works("sh", "-c", 'test -u "$1" && test -p "$2"', "x", f"{folder}/h/setuid", f"{folder}/h/pipe")
    # What runs as root or with a right of it, and devices, are in a folder of root's only.
    assert hosts.here.run("stat", "-c", "%a %u", folder).text == "700 0"
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    for name in ("setuid", "inner/file", "memory"):
        assert not hosts.here.works(*user, "test", "-e", f"{folder}/h/{name}")
    assert not hosts.here.works("grep", "-rs", "--devices=skip", CONTENT, folder, f"{folder}-2")
    assert not hosts.here.works("test", "-e", "/PWNED")
    hosts.here.run("rm", "-rf", folder, f"{folder}-2")


HARMS = {
    "a link to a secret": "ln -s /etc/sms-canary {}",
    "a pipe": "mkfifo {}",
    "a device": "mknod {} c 1 5",
    "a folder": "mkdir {}",
    "holes of terabytes": "truncate -s 4T {}",
}
PLACES = ("manifest.json", "manifest.sha256", "digests", "health.json", "chunk", "counter")


VERBS = (("list", "--json"), ("verify", "--all"), ("restore", "latest", "--path", "/f0", "--to", "/var/tmp/r"))


@pytest.mark.parametrize("place", sample(PLACES, "chunk"))
@pytest.mark.parametrize("name", sample(HARMS, "a pipe"))
def test_what_is_no_file_in_a_store_is_damage(hosts: Hosts, name: str, place: str) -> None:
    """The disk of a store is another machine's: a verb reads no other file, and waits for none."""
    keep_image(hosts.store("host-a"), hosts.folder / "one.img")
    root = Path(hosts.store("host-a").root)
    chunk = next((root / "chunks").rglob("?" * 62))
    path = {"chunk": chunk, "counter": root / place}.get(place, root / "000001" / place)
    path.unlink()
    subprocess.run(["sh", "-c", HARMS[name].format(f"'{path}'")], check=True)
    for words in VERBS:
        hosts.verb("-q", "overlay", *words)
    hosts.here.run("rm", "-rf", "/var/tmp/r")
