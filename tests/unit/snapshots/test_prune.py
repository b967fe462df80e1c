"""`sms overlay prune` on this machine, with the real agent: by retention, by number, and repeated."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.store import Store
from appliance.cli import main
from appliance.config.model import Retention
from appliance.errors import Busy, Refused
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.env import Env
from appliance.operations.snapshots.prune import Pruned, prune
from appliance.tools.agent import Agents
from tests import stores
from tests.places import DEBIAN_SITE
from tests.sites import open_debian

HOST = Local("admin-1")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A cluster whose retention keeps the last two and one a day."""
    opened = open_debian(tmp_path / "state")
    rule = Retention(last=2, hourly=0, daily=1, weekly=0, monthly=0)
    env = Env(agents=Agents(str(tmp_path / "run")))
    return Cluster(opened.site.model_copy(update={"retention": rule}), opened.services, opened.base, env=env)


def root(cluster: Cluster) -> Path:
    return Path(cluster.places.snapshots)


def run(cluster: Cluster, *numbers: int, dry_run: bool = False) -> Pruned:
    return prune(cluster, HOST, numbers, dry_run=dry_run)


def test_by_the_rule(cluster: Cluster) -> None:
    # A day apart, the newest now: 5 and 4 are the last, 3 is the newest of another day.
    store = stores.fill(root(cluster), 5, every_s=86400)
    said = run(cluster, dry_run=True)
    assert [(one.number, one.keep) for one in said.decisions] == [
        (1, False),
        (2, False),
        (3, True),
        (4, True),
        (5, True),
    ]
    assert (said.removed, stores.numbers(store)) == ((), [1, 2, 3, 4, 5])
    done = run(cluster)
    assert (done.removed, done.chunks, done.swept) == ((1, 2), 6, True)
    assert done.freed_bytes >= 6 << 16
    assert stores.numbers(store) == [3, 4, 5]
    stores.assert_whole(store)
    assert abs(done.stored_bytes - store.stored_bytes()) < 1 << 16
    again = run(cluster)
    assert (again.removed, again.freed_bytes) == ((), 0)


def test_by_number(cluster: Cluster) -> None:
    store = stores.fill(root(cluster), 4)
    stores.add_snapshot(store, [b"y" * 65536], reason="before restore of 2")
    stores.add_snapshot(store, [b"z" * 65536])
    said = run(cluster, 2, 5)
    assert said.removed == (2, 5), "also what a restore kept, when it is named"
    assert {one.number: one.why for one in said.decisions} == {
        1: ("not named",),
        2: ("named",),
        3: ("not named",),
        4: ("not named",),
        5: ("named",),
        6: ("newest verified",),
    }
    assert stores.numbers(store) == [1, 3, 4, 6]
    with pytest.raises(Refused, match="there is no snapshot 2 on admin-1"):
        run(cluster, 2)


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_newest_verified_one_is_never_removed(cluster: Cluster, dry_run: bool) -> None:
    store = stores.fill(root(cluster), 3)
    stores.damage(store, 3)
    with pytest.raises(Refused, match="snapshot 2 is the newest verified one on admin-1 and is not removed") as caught:
        run(cluster, 1, 2, dry_run=dry_run)
    assert "sms overlay snapshot --host admin-1" in caught.value.hint
    assert run(cluster, 3).removed == (3,), "a damaged one that is newer may go"


def test_the_newest_verified_one_of_each_host_is_never_removed(cluster: Cluster) -> None:
    store = Store(str(root(cluster)))
    for host in ("admin-1", "gone", "admin-1", "other", "other"):
        stores.add_snapshot(store, [b"x"], generation=9 if host == "other" else 1, host=host)
    assert run(cluster, 2).removed == (2,), "that of a host that the site no longer has may go when it is named"
    with pytest.raises(Refused, match="snapshot 3 is the newest verified one of admin-1") as caught:
        run(cluster, 3)
    assert "sms overlay snapshot --host admin-1" in caught.value.hint
    assert run(cluster, 1).removed == (1,)


def test_broken_ones_are_removed_by_number_only_and_prevent_the_sweep(cluster: Cluster) -> None:
    store = stores.fill(root(cluster), 5, every_s=86400)
    stores.tear_manifest(store, 3)
    before = stores.stored_chunks(root(cluster))
    done = run(cluster)
    assert (done.removed, done.swept, list(done.broken)) == ((1,), False, [3])
    assert stores.stored_chunks(root(cluster)) == before
    done = run(cluster, 3)
    assert (done.removed, done.swept, done.broken) == ((3,), True, {})
    assert stores.stored_chunks(root(cluster)) == stores.named_chunks(store)
    stores.assert_whole(store)


def test_remains_of_a_killed_run_are_swept(cluster: Cluster) -> None:
    store = stores.fill(root(cluster), 2)
    with store.writing():
        store.put(b"of a snapshot that never was" * 9)
    assert run(cluster).chunks == 1


def test_without_a_store_nothing_is_created(cluster: Cluster) -> None:
    assert run(cluster).decisions == ()
    assert not root(cluster).exists()


def test_readers_block_a_prune(cluster: Cluster) -> None:
    store = stores.fill(root(cluster), 3)
    with store.reading(), pytest.raises(Busy, match="are being read"):
        run(cluster, 1)
    assert stores.numbers(store) == [1, 2, 3]


def test_text_and_json_output(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "admin-1")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    store = stores.fill(root(cluster), 5, start=time.time() - 60)
    stores.tear_manifest(store, 1)

    def sms(*words: str) -> str:
        capsys.readouterr()
        status = main(
            ["-q", "--site", str(DEBIAN_SITE), "--state", str(tmp_path / "state"), "overlay", "prune", *words]
        )
        assert status == 0
        return capsys.readouterr().out

    shown = sms("2", "-n").splitlines()
    assert shown[0].split()[0] == "2" and shown[0].endswith("would remove  named")
    assert shown[-2].endswith("its manifest has changed: `sms overlay prune 1` removes it")
    assert shown[-1] == "3 would be kept on admin-1, 1 removed"
    done: dict[str, Any] = json.loads(sms("2", "1", "--json"))
    assert (done["removed"], done["swept"], done["broken"]) == ([1, 2], True, {})
    assert {one["number"]: one["keep"] for one in done["decisions"]} == {1: False, 2: False, 3: True, 4: True, 5: True}
    assert sms().splitlines()[-1].startswith("3 kept on admin-1, 0 removed; 0 B freed, ")
