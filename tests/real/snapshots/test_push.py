"""Snapshots into a Borg repository and back, with borg itself: in a folder, over SSH; killed, locked, full, damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any
from uuid import uuid4

import pytest

from appliance.agent.store import CHUNK, Snapshot, Store, chunk_path
from appliance.config.model import BorgRepository
from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.snapshots.list import list_snapshots
from appliance.operations.snapshots.pull import archive_name, list_remote, pull
from appliance.operations.snapshots.push import (
    FAILED,
    PRESENT,
    PUSHED,
    REMOVED,
    WOULD_PUSH,
    WOULD_REMOVE,
    Pushed,
    PushOptions,
    exit_status,
    plan_removals,
    push,
)
from appliance.operations.snapshots.repository import check_key, export_key, prune_repository, warn_about_key
from appliance.operations.snapshots.scheduled import push_to
from appliance.progress import Silent
from appliance.shared.lease import Lease
from tests import stores
from tests.conftest import find_tool
from tests.places import DEBIAN_SITE
from tests.real.overlays import file_system
from tests.real.sshd import Server
from tests.stores import keep_image, make_image, read_all

pytestmark = pytest.mark.real

CLUSTER = f"t-push-{token_hex(4)}"
"""Its lock is the machine's: other runs have other names."""


@dataclass
class Place:
    """A site whose state lies in a folder of the test's, with a Borg repository."""

    folder: Path
    cluster: Cluster
    host: Host

    @property
    def store(self) -> Store:
        return Store(str(self.cluster.places.snapshots))

    @property
    def passphrase(self) -> Path:
        return self.folder / "borg.pass"

    def settings(self) -> BorgRepository:
        found = self.cluster.site.snapshots.borg
        assert found
        return found

    def with_borg(self, **changes: Any) -> Place:
        """The same with other settings of the repository."""
        return self.changed("snapshots", borg=self.settings().model_copy(update=changes))

    def changed(self, section: str, **changes: Any) -> Place:
        site = self.cluster.site
        part = getattr(site, section).model_copy(update=changes)
        return replace(self, cluster=replace(self.cluster, site=site.model_copy(update={section: part})))

    def elsewhere(self) -> Place:
        """Another host of the site: the same repository, a state of its own."""
        site = self.cluster.site.model_copy(update={"state": self.folder / "other"})
        return replace(self, cluster=replace(self.cluster, site=site))

    def add(self, seed: int = 1, **facts: Any) -> Snapshot:
        image = make_image(self.folder / "ov.img", seed=seed)
        return keep_image(self.store, image, **{"cluster": self.cluster.site.cluster, **facts})

    def push(self, wanted: str = "latest", **more: Any) -> list[Pushed]:
        return push(self.cluster, self.host, PushOptions(wanted, **more), ["borg"], Silent())

    def pushed(self, wanted: str = "latest", **more: Any) -> Pushed:
        (one,) = self.push(wanted, **more)
        assert one.state == PUSHED, one
        return one

    def failed(self, wanted: str = "latest") -> Pushed:
        (one,) = self.push(wanted)
        assert one.state == FAILED, one
        return one

    def remote(self) -> list[dict[str, Any]]:
        identity = list_snapshots(self.cluster, self.host).identity
        return list_remote(self.cluster, self.host, "borg", identity).snapshots

    def name_cluster(self, uuid: str) -> None:
        """Write a lease with the cluster's UUID."""
        path = Path(str(self.cluster.places.lease))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Lease(self.cluster.site.cluster, 1, None, 1.0, "host-a", cluster_uuid=uuid).text())

    def numbers(self) -> list[int]:
        """What the repository has; nothing where there is none yet."""
        try:
            found = self.remote()
        except Refused as error:
            assert "there is no repository" in error.message, error
            return []
        return [one["number"] for one in found]

    def borg(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "BORG_PASSCOMMAND": f"cat {self.passphrase}",
            "BORG_BASE_DIR": str(self.folder / "base"),
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
            "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
        }
        return subprocess.run(["borg", *words], env=environment, text=True, capture_output=True, check=True, **more)

    def assert_comes_back(self, number: int) -> None:
        """To another host, whole."""
        other = self.elsewhere()
        done = pull(other.cluster, other.host, "borg", str(number), Silent())
        assert done.present is False
        stores.assert_whole(other.store)
        assert read_all(other.store, done.number) == read_all(self.store, number)


def make_place(folder: Path) -> Place:
    find_tool("borg")
    cluster = open_cluster(DEBIAN_SITE, folder / "state", Silent())
    (folder / "borg.pass").write_text("a passphrase of the test\n")
    (folder / "borg.pass").chmod(0o600)
    borg = BorgRepository(repository=str(folder / "repo"), passphrase=folder / "borg.pass")
    site = cluster.site
    site = site.model_copy(update={"cluster": CLUSTER, "snapshots": site.snapshots.model_copy(update={"borg": borg})})
    hosts = (site.admin_hosts[0].model_copy(update={"name": "host-a"}),)  # an archive of another host is not removed
    site = site.model_copy(update={"admin_hosts": hosts})
    return Place(folder, replace(cluster, site=site), Local("host-a"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with snapshot 1, and a repository that has it."""
    made = make_place(tmp_path_factory.mktemp("template"))
    made.add()
    made.pushed()
    return made.folder


@pytest.fixture
def with_one(tmp_path: Path, template: Path) -> Place:
    """A place whose repository has its snapshot 1: a copy, which takes borg no time."""
    shutil.copytree(template, tmp_path, symlinks=True, dirs_exist_ok=True)
    return make_place(tmp_path)


def behind_ssh(place: Place, server: Server) -> Place:
    url = f"ssh://root@127.0.0.1:{server.port}{place.folder}/repo"
    return place.with_borg(repository=url, ssh_key=server.folder / "user", known_hosts=server.folder / "known_hosts")


@pytest.fixture
def far(place: Place, server: Server) -> Place:
    """The repository behind SSH."""
    return behind_ssh(place, server)


@pytest.fixture(params=["folder", "SSH"])
def either(request: pytest.FixtureRequest, place: Place, far: Place) -> Place:
    return place if request.param == "folder" else far


def test_there_and_back(either: Place) -> None:
    one = either.add()
    assert [found.state for found in either.push(dry_run=True)] == [WOULD_PUSH]
    assert not (either.folder / "repo").exists()
    done = either.pushed()
    assert done.name == f"sms-{either.cluster.site.cluster}-000001-{one.manifest.uuid}"
    assert done.bytes > 100_000
    assert [found.state for found in either.push()] == [PRESENT]
    config = (either.folder / "repo" / "config").read_text()
    assert "key = " in config
    assert json.loads(either.borg("info", "--json", str(either.folder / "repo")).stdout)["encryption"]["mode"] == (
        "repokey-blake2"
    )
    (there,) = either.remote()
    assert there == one.manifest.to_dict()
    either.assert_comes_back(1)
    other = either.elsewhere()
    assert pull(other.cluster, other.host, "borg", "latest", Silent()).present is True


def test_what_is_the_same_is_stored_once(with_one: Place) -> None:
    place = with_one
    first = repository_bytes(place)
    image = place.folder / "ov.img"
    with image.open("r+b") as stream:
        stream.seek(image.read_bytes().index(b"the same again") + 1000)
        stream.write(b"changed")
    keep_image(place.store, image, cluster=place.cluster.site.cluster)
    second = place.pushed()
    assert second.bytes < CHUNK < first
    place.assert_comes_back(2)


def test_nothing_secret_is_seen(place: Place) -> None:
    """Not in an argument, not in an environment, not in what is said."""
    place.passphrase.write_text("Rumpelstilzchen\n")
    place.add()
    seen: list[bytes] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    seen.append((path / "cmdline").read_bytes() + (path / "environ").read_bytes())
                except OSError:
                    continue
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        place.pushed()
    finally:
        stop.set()
        thread.join()
    assert any(b"BORG_PASSCOMMAND" in one and b"borg.pass" in one for one in seen)
    assert not any(b"Rumpelstilzchen" in one for one in seen)
    assert b"Rumpelstilzchen" not in b"".join(
        path.read_bytes() for path in (place.folder / "state" / "borg").rglob("*") if path.is_file()
    )


def break_passphrase(place: Place) -> Place:
    place.passphrase.write_text("another one\n")
    return place


def open_passphrase(place: Place) -> Place:
    place.passphrase.chmod(0o640)
    return place


def lose_passphrase(place: Place) -> Place:
    place.passphrase.unlink()
    return place


def empty_passphrase(place: Place) -> Place:
    place.passphrase.write_text("")
    return place


def other_files(place: Place) -> Place:
    (place.folder / "files").mkdir()
    (place.folder / "files" / "x").touch()
    return place.with_borg(repository=f"{place.folder}/files")


def no_disk(place: Place) -> Place:
    return place.with_borg(repository=f"{place.folder}/not/mounted")


def keyfile(place: Place) -> Place:
    place.borg("init", "--encryption=keyfile-blake2", f"{place.folder}/theirs")
    return place.with_borg(repository=f"{place.folder}/theirs")


def unencrypted(place: Place) -> Place:
    place.borg("init", "--encryption=none", f"{place.folder}/theirs")
    return place.with_borg(repository=f"{place.folder}/theirs")


def emptied(place: Place) -> Place:
    """Not one that we were making: nothing is deleted."""
    subprocess.run(
        ["sh", "-c", 'rm -r "$1"/data/* "$1"/index* "$1"/hints* "$1"/integrity*', "x", place.folder / "repo"]
    )
    return place


REFUSED: dict[str, tuple[Callable[[Place], Place], str, str]] = {
    "wrong passphrase": (break_passphrase, "does not open", "copy"),
    "passphrase for all to read": (open_passphrase, "must be readable only by root", "chmod 600"),
    "no passphrase": (lose_passphrase, "no passphrase file", "umask 077"),
    "empty passphrase": (empty_passphrase, "is empty", "write the passphrase"),
    "a folder of other files": (other_files, "is not a Borg repository", "another path"),
    "a disk that is not mounted": (no_disk, "does not exist", "mounted"),
    "somebody's with a key file": (keyfile, "was not created by this site", "used by nothing else"),
    "somebody's without encryption": (unencrypted, "was not created by this site", "used by nothing else"),
    "an emptied one": (emptied, "was not created by this site", "used by nothing else"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(with_one: Place, name: str) -> None:
    with_one.add(seed=2)
    spoil, words, hint = REFUSED[name]
    spoilt = spoil(with_one)
    before = sorted(str(path) for path in with_one.folder.rglob("*") if "/borg/" not in str(path))
    failed = spoilt.failed()
    assert words in failed.error
    assert hint in failed.hint
    assert exit_status([failed]) == 3, "as a pull has it"
    with pytest.raises(Refused, match=f"{words}|there is no repository"):
        spoilt.remote()
    after = sorted(str(path) for path in with_one.folder.rglob("*") if "/borg/" not in str(path))
    assert before == after


SSH: dict[str, tuple[dict[str, str], str, str]] = {
    "unknown host key": ({"known_hosts": "no_hosts"}, "host key is not in known_hosts", "ssh-keyscan -p"),
    "other host key": ({"known_hosts": "wrong_hosts"}, "host key does not match", "fingerprint"),
    "refused": ({"ssh_key": "other_user"}, "authentication failed", "authorized_keys"),
}


@pytest.mark.parametrize("name", SSH)
def test_what_ssh_refuses(with_one: Place, server: Server, name: str) -> None:
    far = behind_ssh(with_one, server)
    far.add(seed=2)
    changes, words, hint = SSH[name]
    spoilt = far.with_borg(**{key: server.folder / value for key, value in changes.items()})
    failed = spoilt.failed()
    assert words in failed.error, failed
    assert hint in failed.hint


def test_a_closed_port(with_one: Place, server: Server) -> None:
    far = behind_ssh(with_one, server)
    far.add(seed=2)
    closed = far.with_borg(repository=f"ssh://root@127.0.0.1:1{far.folder}/repo").failed()
    # borg does not always wait for ssh's own words.
    assert "Connection refused" in closed.error or "Connection closed" in closed.error
    assert "run the command again" in closed.hint
    assert far.pushed()


def test_borg_is_not_there(place: Place, tmp_path: Path) -> None:
    place.add()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (
        "sh",
        "env",
        "python3",
        "stat",
        "cat",
        "flock",
        "mkdir",
        "dirname",
        "chmod",
        "rm",
        "sync",
        "mv",
        "find",
    ):
        (programs / name).symlink_to(find_tool(name))

    class Poor(Local):
        def run(self, *argv: str, **more: Any) -> Any:
            return super().run("env", f"PATH={programs}", *argv, **more)

    failed = replace(place, host=Poor("host-a")).failed()
    assert "borg is not installed on host-a" in failed.error
    assert "apt-get install borgbackup" in failed.hint


def test_somebody_else_is_at_work_on_it(with_one: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.tools.borg.LOCK_WAIT_S", 1)
    place = with_one
    place.add(seed=2)
    environment = {**os.environ, "BORG_PASSCOMMAND": f"cat {place.passphrase}"}
    with subprocess.Popen(
        ["borg", "with-lock", str(place.folder / "repo"), "sh", "-c", "echo on; read x"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == b"on\n"
        failed = place.failed()
        assert "is locked by another borg" in failed.error
        assert "borg break-lock" in failed.hint
        other.stdin.write(b"\n")
        other.stdin.close()
    place.pushed()


def test_a_second_run_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.operations.preflight.LOCK_WAIT_S", 0.1)
    place.add()
    with place.host.lock(str(place.cluster.places.borg_lock)):
        assert "another push or pull is at work" in place.failed().error
        with pytest.raises(Busy):
            pull(place.cluster, place.host, "borg", "latest", Silent())
        assert [one.state for one in place.push(dry_run=True)] == [WOULD_PUSH]
    place.pushed()


def test_no_room_in_the_repository(place: Place, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with file_system(tmp_path / "disk", "ext4", 8) as disk:
        small = place.with_borg(repository=f"{disk}/repo")
        small.add()
        small.pushed()
        big = make_image(tmp_path / "big.img", seed=3, size_mb=32, files=60)
        keep_image(small.store, big, cluster=small.cluster.site.cluster)
        failed = small.failed()
        assert "no space left" in failed.error, failed
        assert "earlier ones are intact" in failed.error
        assert small.numbers() == [1]
        small.assert_comes_back(1)


def test_no_room_where_it_comes_back_to(place: Place, tmp_path: Path) -> None:
    keep_image(
        place.store, make_image(tmp_path / "big.img", seed=3, size_mb=32, files=60), cluster=place.cluster.site.cluster
    )
    place.pushed()
    (tmp_path / "disk").mkdir()
    with file_system(tmp_path / "disk", "ext4", 6) as disk:
        other = place.elsewhere().changed("snapshots", directory=disk)
        with pytest.raises(SmsError, match="is full"):
            pull(other.cluster, other.host, "borg", "latest", Silent())
        assert stores.numbers(other.store) == []


def test_a_snapshot_that_is_damaged_is_never_archived(place: Place) -> None:
    one = place.add()
    data = one.digests()
    digest = next(data[at : at + 32] for at in range(len(data) - 32, 0, -32) if any(data[at : at + 32]))
    path = Path(chunk_path(place.store.root, digest))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    failed = place.failed()
    assert "snapshot 1 is damaged: chunk" in failed.error
    assert place.numbers() == []
    with pytest.raises(Refused, match="is damaged"):
        place.push("1")


def test_damage_in_the_repository_does_not_come_back(with_one: Place) -> None:
    place = with_one
    segments = [path for path in (place.folder / "repo" / "data").rglob("*") if path.is_file()]
    largest = max(segments, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as stream:
        stream.seek(largest.stat().st_size // 2)
        data = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([data[0] ^ 1]))
    other = place.elsewhere()
    with pytest.raises(SmsError) as caught:
        pull(other.cluster, other.host, "borg", "latest", Silent())
    assert re.search(r"is damaged: .*(integrity|checksum|mismatch)", caught.value.message), caught.value.message
    assert "SSH_ORIGINAL_COMMAND" not in caught.value.message
    repository = place.folder / "repo"
    assert f"borg check --repair {repository}; then: sms overlay push --all-missing" in caught.value.hint
    command = caught.value.hint.partition(";")[0].replace("check --repair", "list --short")
    listed = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert listed.stdout.startswith("sms-"), listed.stderr
    assert stores.numbers(other.store) == []


class Watched(Local):
    """This machine; its borg is killed so many seconds after it has begun a command, with or without its group."""

    def __init__(self, word: str, delay_s: float) -> None:
        super().__init__("host-a")
        self.word = word
        self.delay_s = delay_s
        self.killed = 0

    def _spawn(self, argv: tuple[str, ...], *rest: Any, **more: Any) -> subprocess.Popen[bytes]:
        process = super()._spawn(argv, *rest, **more)
        if "borg" in argv and self.word in argv and not self.killed:
            threading.Timer(self.delay_s, self._kill, (process,)).start()
        return process

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            self.killed += 1


FIRST_S, STEP_S, MOMENTS = 0.15, 0.07, 8
"""When borg is killed in a command: after these seconds, so much later each time, and so often."""
KILLED = [
    pytest.param("folder", "create", 2, id="folder-create"),
    pytest.param("SSH", "create", 1, id="SSH-create"),
    pytest.param("folder", "delete", 1, id="folder-delete"),
    *(
        pytest.param(where, word, MOMENTS, id=f"{where}-{word}-{MOMENTS}", marks=pytest.mark.full)
        for where in ("folder", "SSH")
        for word in ("list", "init", "create", "delete", "compact")
    ),
]


@pytest.mark.parametrize("where, word, moments", KILLED)
def test_borg_is_killed_and_the_next_run_resumes(
    place: Place,
    server: Server,
    where: str,
    word: str,
    moments: int,
) -> None:
    """At many moments of each of its commands; what counts can be read, and no lock is in the way."""
    either = place if where == "folder" else behind_ssh(place, server)
    either = either.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    either.add()
    if word in ("delete", "compact"):
        either.pushed()
        either.add(seed=2)
    seen = 0
    delay_s, step_s = FIRST_S, STEP_S * MOMENTS / moments
    while seen < moments:
        watched = Watched(word, delay_s)
        for one in replace(either, host=watched).push(prune=True):
            assert one.state in (PUSHED, PRESENT, REMOVED, FAILED)
        if not watched.killed:
            break
        seen += 1
        delay_s += step_s
        assert set(either.numbers()) <= {1, 2}
        if seen % 2 and (either.folder / "repo" / "data" / "0").exists():
            either.borg("check", str(either.folder / "repo"))
        if word in ("delete", "compact"):
            either.add(seed=seen + 2)
            break
    assert seen, "it was killed at least once"
    done = either.push(prune=True)
    assert done[0].state in (PUSHED, PRESENT), done
    assert len(either.numbers()) == 1
    assert either.numbers()[-1] == stores.numbers(either.store)[-1]
    either.assert_comes_back(either.numbers()[-1])
    either.borg("check", "--verify-data", str(either.folder / "repo"))


def test_what_feeds_borg_is_killed(with_one: Place) -> None:
    """Its end looks like the end of an image: borg must not take it for one."""
    place = with_one
    keep_image(
        place.store,
        make_image(place.folder / "big.img", seed=7, size_mb=64, files=200),
        cluster=place.cluster.site.cluster,
    )
    stop = threading.Event()

    def kill() -> None:
        while not stop.is_set():
            found = subprocess.run(
                ["pgrep", "-f", f"agent-.*pyz image .*{place.folder}"], capture_output=True, text=True
            )
            # borg's own command line has these words as well: the agent's begins with an interpreter.
            for pid in map(int, found.stdout.split()):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if Path(os.fsdecode(words[0])).name.startswith("python3"):
                    os.kill(pid, signal.SIGKILL)
                    stop.set()
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        (done,) = place.push("2")
    finally:
        stop.set()
        thread.join()
    assert done.state == FAILED
    assert place.numbers() == [1]
    place.pushed("2")
    assert place.numbers() == [1, 2]


def test_an_incomplete_repository_is_recreated_only_if_sms_was_creating_it(place: Place) -> None:
    place.add()
    repository = place.folder / "repo"
    mark = Path(str(place.cluster.places.borg)) / "making"
    mark.parent.mkdir(parents=True)
    for state in ("", "README", "data", "config"):
        mark.write_text(str(repository))
        repository.mkdir()
        if state:
            (repository / "README").touch()
        if state in ("data", "config"):
            (repository / "data").mkdir()
        if state == "config":
            (repository / "config-0a1b2c3d.tmp").touch()
        place.pushed()
        assert not mark.exists()
        subprocess.run(["rm", "-r", str(repository)], check=True)
    mark.write_text(str(repository))
    repository.mkdir()
    (repository / "mine").touch()
    assert "is not a Borg repository" in place.failed().error
    assert (repository / "mine").exists()


def test_the_repository_is_thinned_out_by_the_retention(with_one: Place) -> None:
    place = with_one.changed("retention", last=2, hourly=0, daily=0, weekly=0, monthly=0)
    for seed in (2, 3):
        place.add(seed=seed)
        place.pushed()
    assert place.numbers() == [1, 2, 3], "who pushes one by hand removes none"
    named = [(1, f"sms-{place.cluster.site.cluster}-000001-{place.store.find('1').manifest.uuid}")]
    for dry_run, state in ((True, WOULD_REMOVE), (False, REMOVED)):
        done = place.push(all_missing=True, prune=True, dry_run=dry_run)
        assert [one.state for one in done] == [state]
        assert [(one.snapshot, one.name) for one in done] == named
        assert place.numbers() == ([1, 2, 3] if dry_run else [2, 3])
    assert place.push(all_missing=True, prune=True) == []
    assert place.push(all_missing=True) == [], "what it would remove again is not sent again"
    before = sum(path.stat().st_size for path in (place.folder / "repo" / "data").rglob("*") if path.is_file())
    assert before < 3 * 1_000_000, "the room was given back"


def test_a_clock_that_was_set_back_prunes_nothing_new(with_one: Place) -> None:
    place = with_one.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    place.add(seed=2, sequence=1, taken=1_000_000_000.0)
    assert [one.state for one in place.push(prune=True)] == [PUSHED, REMOVED]
    assert place.numbers() == [2]


def test_what_a_restore_kept_stays_there_as_long_as_here(place: Place) -> None:
    """It was sent and removed in turns, forever."""
    place = place.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    day, now = 86400, time.time()
    place.add(seed=1, taken=now - 40 * day, reason="before restore of 8")
    place.add(seed=2, taken=now - 2 * day, reason="before restore of 9")
    place.add(seed=3, taken=now - day)
    place.add(seed=4, taken=now)
    assert [(one.snapshot, one.state) for one in place.push(all_missing=True, prune=True)] == [(2, PUSHED), (4, PUSHED)]
    for _ in range(2):
        assert place.push(all_missing=True, prune=True) == []
        assert place.numbers() == [2, 4]


def test_a_standby_is_pruned_on_request(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    standby = replace(place.elsewhere(), host=Local("host-b"))
    monkeypatch.setattr(Cluster, "host", lambda *_: standby.host)
    monkeypatch.setattr("appliance.operations.snapshots.push.choose_targets", lambda *_: ["host-b"])
    for seed in (1, 2):
        place.add(seed=seed)
    listed = list_snapshots(place.cluster, place.host)
    assert plan_removals(place.cluster, listed, [{**listed.snapshots[-1], "number": 2}]) == [1, 2]
    # Both "hosts" are this one, and share its store here: all of it is there, and one is thinned out.
    done = push(place.cluster, place.host, PushOptions(prune=True, dry_run=True), [], Silent())
    assert [(one.snapshot, one.state) for one in done] == [(2, PRESENT), (1, WOULD_REMOVE)]
    assert stores.numbers(place.store) == [1, 2]
    done = push(place.cluster, place.host, PushOptions(prune=True), [], Silent())
    assert [(one.snapshot, one.state) for one in done] == [(2, PRESENT), (1, REMOVED)]
    assert stores.numbers(place.store) == [2]
    assert [one.state for one in push(place.cluster, place.host, PushOptions(prune=True), [], Silent())] == [PRESENT]


def test_all_that_is_missing_goes_the_oldest_first(place: Place) -> None:
    for seed in (1, 2, 3, 4):
        place.add(seed=seed)
    place.pushed("2")
    stores.damage(place.store, 3)
    assert [(one.snapshot, one.state) for one in place.push(all_missing=True, dry_run=True)] == [
        (1, WOULD_PUSH),
        (4, WOULD_PUSH),
    ]
    assert [(one.snapshot, one.state) for one in place.push(all_missing=True)] == [(1, PUSHED), (4, PUSHED)]
    assert place.numbers() == [1, 2, 4]
    assert place.push(all_missing=True) == []


def test_archives_of_others_are_left_alone(with_one: Place) -> None:
    """A cluster whose name begins like ours, a checkpoint, an unrelated file."""
    place = with_one.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    one = place.store.find("1")
    name, uuid = place.cluster.site.cluster, one.manifest.uuid
    others = [f"sms-{name}-000001-000002-{uuid}", f"sms-{name}-2-000001-{uuid}", "mine"]
    for other in others:
        place.borg("create", f"{place.folder}/repo::{other}", str(place.passphrase))
    place.borg("create", f"{place.folder}/repo::sms-{name}-000009-{uuid}.checkpoint", str(place.passphrase))
    assert place.numbers() == [1]
    place.add(seed=2)
    assert [one.state for one in place.push(prune=True)] == [PUSHED, REMOVED]
    listed = place.borg("list", "--short", f"{place.folder}/repo").stdout.split()
    assert sorted(listed) == sorted([*others, f"sms-{name}-000002-{place.store.find('2').manifest.uuid}"])


def test_two_clusters_of_one_name_in_one_repository(with_one: Place) -> None:
    """Each prunes its own archives, and restores none of the other's. The archive of an earlier version is nobody's."""
    uuids = [str(uuid4()) for _ in range(2)]
    both = [one.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0) for one in (with_one, with_one)]
    both[1] = both[1].elsewhere()
    for at, (one, uuid) in enumerate(zip(both, uuids, strict=True)):
        one.name_cluster(uuid)
        for seed in (2, 3, 4):
            one.add(seed=seed, generation=90 - at, sequence=seed, cluster_uuid=uuid)
            assert PUSHED in [done.state for done in one.push(prune=True)]
    listed = with_one.borg("list", "--short", f"{with_one.folder}/repo").stdout.split()
    assert [sum(uuid in name for name in listed) for uuid in uuids] == [1, 1] and len(listed) == 3
    for one, other in (both, both[::-1]):
        assert one.numbers() == [stores.numbers(one.store)[-1]]
        (foreign,) = other.remote()
        with pytest.raises(Refused, match=foreign["cluster_uuid"]):
            pull(one.cluster, one.host, "borg", archive_name(foreign), Silent())


def test_what_is_pulled_is_named(with_one: Place) -> None:
    place = with_one
    one = place.store.find("1")
    other = place.elsewhere()
    with pytest.raises(Refused, match="borg has no snapshot 7") as caught:
        pull(other.cluster, other.host, "borg", "7", Silent())
    assert "the newest there: 1" in caught.value.hint
    assert pull(other.cluster, other.host, "borg", one.manifest.uuid[:8], Silent(), dry_run=True).number == 0
    stores.add_snapshot(other.store, [b"x" * CHUNK], cluster=other.cluster.site.cluster, uuid="f" * 36)
    done = pull(other.cluster, other.host, "borg", "latest", Silent())
    assert (done.snapshot, done.number) == (1, 2)
    assert done.bytes == one.manifest.used_bytes < one.manifest.size


def repository_bytes(place: Place) -> int:
    """What its segments take; borg may remove one meanwhile."""
    total = 0
    for path in (place.folder / "repo" / "data").rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def test_over_ssh_the_connection_is_cut(with_one: Place, server: Server) -> None:
    far = behind_ssh(with_one, server)
    keep_image(
        far.store, make_image(far.folder / "big.img", seed=7, size_mb=64, files=200), cluster=far.cluster.site.cluster
    )
    before = repository_bytes(far)

    def cut() -> None:
        while repository_bytes(far) < before + 4_000_000:
            time.sleep(0.02)
        server.signal(signal.SIGKILL)

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    failed = far.failed()
    thread.join()
    assert "broke" in failed.error, failed
    assert far.numbers() == [1]
    far.pushed()
    far.assert_comes_back(2)


@dataclass
class AppendOnly:
    """A repository behind SSH to which ``place`` may only append, and which ``pruner``, with its own key, may prune."""

    place: Place
    pruner: Place
    repository: Path

    def prune(self, **more: Any) -> tuple[str, ...]:
        return prune_repository(self.pruner.cluster, self.pruner.host, Silent(), **more).removed

    def attack(self, *words: str) -> None:
        """Borg with the key of the admin host, which an attacker there has."""
        settings = self.place.settings()
        ssh = f"ssh -o BatchMode=yes -i {settings.ssh_key} -o UserKnownHostsFile={settings.known_hosts}"
        self.place.borg("--rsh", ssh, *words)

    def roll_back(self, moment: str) -> None:
        """The steps of docs/snapshots-elsewhere.md."""
        script = 'find data -type f -newermt "$1" -delete\nrm -f index.* hints.* integrity.*'
        subprocess.run(["sh", "-euc", script, "roll-back", moment], cwd=self.repository, check=True)
        for each in (self.place, self.pruner):
            shutil.rmtree(str(each.cluster.places.borg))


@pytest.fixture
def append_only(far: Place, server: Server) -> AppendOnly:
    repository = far.folder / "repo"
    serve = f"borg serve --restrict-to-repository {repository}"
    keys = (("user", f"{serve} --append-only"), ("other_user", serve))
    lines = [f'command="{command}",restrict {(server.folder / f"{key}.pub").read_text()}' for key, command in keys]
    (server.folder / "authorized").write_text("".join(lines))
    place = far.with_borg(append_only=True).changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    pruner = place.with_borg(ssh_key=server.folder / "other_user").elsewhere()
    return AppendOnly(place, pruner, repository)


def test_a_key_that_may_only_append(append_only: AppendOnly) -> None:
    place = append_only.place
    for seed in (1, 2, 3):
        place.add(seed)
        push_to(place.cluster, place.host, "borg", Silent())
    assert place.numbers() == [1, 2, 3], "a scheduled run prunes nothing there"
    (failed,) = place.push(prune=True)
    assert failed.state == FAILED and "may only append" in failed.error and failed.status == 3
    with pytest.raises(Refused, match="may only append"):
        prune_repository(place.cluster, place.host, Silent())
    assert place.numbers() == [1, 2, 3], "what looks removed there would be hidden"
    size = size_of(append_only.repository)
    assert len(append_only.prune(dry_run=True)) == 2 and place.numbers() == [1, 2, 3]
    removed = append_only.prune()
    assert [name.split("-")[-6] for name in removed] == ["000001", "000002"]
    assert place.numbers() == [3] and size_of(append_only.repository) < size / 2
    assert append_only.prune() == ()
    place.add(4)
    push_to(place.cluster, place.host, "borg", Silent())
    assert len(append_only.prune()) == 1 and place.numbers() == [4]
    place.assert_comes_back(4)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_a_stolen_key_hides_is_noticed_and_comes_back(append_only: AppendOnly) -> None:
    place = append_only.place
    one = place.add(1)
    name = place.pushed().name
    append_only.prune()
    time.sleep(1)
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    time.sleep(1)
    append_only.attack("delete", f"{place.settings().repository}::{name}")
    append_only.attack("compact", place.settings().repository)
    assert place.numbers() == []
    with pytest.raises(Refused, match=f"missing or were replaced.*{name}.*nothing is removed"):
        append_only.prune()
    # Another archive of the same name is not the same.
    image = make_image(place.folder / "forged.img", seed=9)
    append_only.attack("create", f"{place.settings().repository}::{name}", str(image))
    with pytest.raises(Refused, match="missing or were replaced"):
        append_only.prune()
    assert "transaction" in (append_only.repository / "transactions").read_text()
    append_only.roll_back(moment)
    assert [found["uuid"] for found in place.remote()] == [one.manifest.uuid]
    shutil.rmtree(append_only.pruner.store.root, ignore_errors=True)
    place.assert_comes_back(1)
    assert append_only.prune() == ()


@pytest.mark.full
def test_another_machine_may_prune_what_hosts_prune_themselves(with_one: Place) -> None:
    place = with_one.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    assert prune_repository(place.cluster, place.host, Silent()).removed == ()
    place.add(seed=2)
    push_to(place.cluster, place.host, "borg", Silent())
    assert place.numbers() == [2]
    assert prune_repository(place.cluster, place.host, Silent()).removed == (), "1 was removed by the host itself"


@pytest.mark.full
def test_a_machine_without_a_lease_prunes_one_cluster(append_only: AppendOnly) -> None:
    """The one that it has pruned before, or the only one; of several it does not choose."""
    ours, other = (f"{at:08}-0000-4000-8000-000000000000" for at in (1, 2))
    place = append_only.place
    for seed in (1, 2):
        place.name_cluster(ours)
        place.add(seed, cluster_uuid=ours)
        place.pushed()
    assert len(append_only.prune()) == 1
    for seed in (3, 4):
        place.name_cluster(other)
        place.add(seed, cluster_uuid=other)
        place.pushed()
    assert append_only.prune() == (), "the other's are left alone"
    assert place.numbers() == [3, 4]
    Path(append_only.pruner.cluster.places.borg_archives).unlink()
    with pytest.raises(Refused, match=r"not of this cluster, but of cluster.*and cluster"):
        append_only.prune()


@pytest.mark.full
def test_a_record_of_archives_that_cannot_be_read_stops_a_prune(append_only: AppendOnly) -> None:
    append_only.place.add(1)
    append_only.place.pushed()
    append_only.prune()
    record = Path(append_only.pruner.cluster.places.borg_archives)
    record.write_bytes(record.read_bytes()[:20])
    with pytest.raises(SmsError, match="cannot be read"):
        append_only.prune()


@pytest.mark.full
def test_the_key_of_the_repository_is_exported_and_compared(with_one: Place) -> None:
    place, copy = with_one, with_one.folder / "copy.key"

    def export(path: Path = copy) -> bool:
        return export_key(place.cluster, place.host, path).written

    assert "was never exported" in warn_about_key(place.cluster, place.host)
    with pytest.raises(Refused, match="cannot read"):
        check_key(place.cluster, place.host, copy)
    assert export() and not export(), "a second run only compares"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert warn_about_key(place.cluster, place.host) == ""
    check_key(place.cluster, place.host, copy)
    # The repository loses its key; copy and passphrase open it again.
    config = place.folder / "repo" / "config"
    config.write_text(re.sub(r"(?ms)^key = .*?(?=^\S|\Z)", "", config.read_text()))
    failed = place.failed()
    assert "has lost its key" in failed.error and "key import" in failed.hint
    place.borg("key", "import", str(place.folder / "repo"), str(copy))
    place.assert_comes_back(1)
    other = place.folder / "other.key"
    other.write_text("BORG_KEY 00\nAAAA\n")
    with pytest.raises(Refused, match="not its key"):
        check_key(place.cluster, place.host, other)
    with pytest.raises(Refused, match="not its key"):
        export(other)
    environment = {"BORG_NEW_PASSPHRASE": "another one"}
    subprocess.run(
        ["borg", "key", "change-passphrase", str(place.folder / "repo")],
        env={**os.environ, "BORG_PASSCOMMAND": f"cat {place.passphrase}", **environment},
        check=True,
        capture_output=True,
    )
    place.passphrase.write_text("another one\n")
    with pytest.raises(Refused, match="an earlier key of it"):
        check_key(place.cluster, place.host, copy)
    assert "is not the one in" in warn_about_key(place.cluster, place.host)
