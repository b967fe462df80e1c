"""Snapshots into a Borg repository and back, with borg itself: in a folder, over SSH; killed, damaged, pruned."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from appliance.agent.store import CHUNK, chunk_path
from appliance.errors import Refused, SmsError
from appliance.host.local import Local
from appliance.operations.snapshots.list import list_snapshots
from appliance.operations.snapshots.pull import archive_name, pull
from appliance.operations.snapshots.push import (
    FAILED,
    PRESENT,
    PUSHED,
    REMOVED,
    WOULD_PUSH,
    WOULD_REMOVE,
    PushOptions,
    plan_removals,
    push,
)
from tests import stores
from tests.real.snapshots.conftest import Place, behind_ssh
from tests.real.sshd import Server
from tests.stores import keep_image, make_image
from tests.support.env import FakeHosts, with_env

pytestmark = pytest.mark.real


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.full), "SSH"])
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
    assert pull(other.cluster, other.host, "borg", "latest").present is True


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
        pull(other.cluster, other.host, "borg", "latest")
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
    pytest.param("SSH", "create", 1, id="SSH-create"),
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


def test_a_standby_is_pruned_on_request(place: Place) -> None:
    place = place.changed("retention", last=1, hourly=0, daily=0, weekly=0, monthly=0)
    site = place.cluster.site
    admins = (*site.admin_hosts, site.admin_hosts[0].model_copy(update={"name": "host-b"}))
    cluster = replace(place.cluster, site=site.model_copy(update={"admin_hosts": admins}))
    cluster = with_env(cluster, hosts=FakeHosts({"host-b": Local("host-b")}))
    for seed in (1, 2):
        place.add(seed=seed)
    listed = list_snapshots(place.cluster, place.host)
    assert plan_removals(place.cluster, listed, [{**listed.snapshots[-1], "number": 2}]) == [1, 2]
    # Both "hosts" are this one, and share its store here: all of it is there, and one is thinned out.
    done = push(cluster, place.host, PushOptions(prune=True, dry_run=True), ["host-b"])
    assert [(one.snapshot, one.state) for one in done] == [(2, PRESENT), (1, WOULD_REMOVE)]
    assert stores.numbers(place.store) == [1, 2]
    done = push(cluster, place.host, PushOptions(prune=True), ["host-b"])
    assert [(one.snapshot, one.state) for one in done] == [(2, PRESENT), (1, REMOVED)]
    assert stores.numbers(place.store) == [2]
    assert [one.state for one in push(cluster, place.host, PushOptions(prune=True), ["host-b"])] == [PRESENT]


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


@pytest.mark.full  # tests/unit/snapshots/test_identity.py has its rules
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
            pull(one.cluster, one.host, "borg", archive_name(foreign))


def test_what_is_pulled_is_named(with_one: Place) -> None:
    place = with_one
    one = place.store.find("1")
    other = place.elsewhere()
    with pytest.raises(Refused, match="borg has no snapshot 7") as caught:
        pull(other.cluster, other.host, "borg", "7")
    assert "the newest there: 1" in caught.value.hint
    assert pull(other.cluster, other.host, "borg", one.manifest.uuid[:8], dry_run=True).number == 0
    stores.add_snapshot(other.store, [b"x" * CHUNK], cluster=other.cluster.site.cluster, uuid="f" * 36)
    done = pull(other.cluster, other.host, "borg", "latest")
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


@pytest.mark.full
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
