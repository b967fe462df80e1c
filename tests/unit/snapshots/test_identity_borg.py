"""Several clusters of one name in a Borg repository, and on a standby host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.snapshots.list import list_snapshots
from appliance.operations.snapshots.pull import list_remote, pull
from appliance.operations.snapshots.push import PushOptions, push
from appliance.operations.snapshots.repository import prune_repository
from appliance.plan.snapshots import offsite
from tests import stores
from tests.pairs import AgentsInFolders, Pair
from tests.support.borg import Archives, HostWithBorg, borg_settings
from tests.support.env import FakeHosts
from tests.unit.snapshots.clusters import MANIFEST, U1, U2, Reported, add, lease_path, name, start_on, store_of, uuid_in
from tests.unit.snapshots.conftest import START


class Pulling(AgentsInFolders):
    """Agents that receive what an archive contains."""

    @contextmanager
    def open_session(self, host: Host, command: str, request: dict[str, Any], *_: Any, **__: Any) -> Iterator[Any]:
        assert command == "import_image"
        reply = {"snapshot": {"number": request["manifest"]["number"]}, "present": False, "bytes": 0}
        yield SimpleNamespace(end=lambda: None, outcome=lambda: reply)


def cluster_in(archive: str) -> str:
    """Return the UUID of the cluster in an archive's name."""
    return archive[-36:] if archive.count("-") > 10 else ""


def with_borg(pair: Pair, repository: Archives) -> Pair:
    site = pair.cluster.site
    snapshots = site.snapshots.model_copy(update={"borg": borg_settings(), "standby": ()})
    update = {
        "snapshots": snapshots,
        "retention": site.retention.model_copy(update={"last": 1, "hourly": 0, "daily": 0}),
    }
    pair.hosts |= {name: HostWithBorg(host, repository) for name, host in pair.hosts.items()}
    env = replace(pair.cluster.env, agents=Pulling(), hosts=FakeHosts(pair.hosts))
    pair.cluster = replace(pair.cluster, site=site.model_copy(update=update), env=env)
    return pair


def test_two_clusters_of_one_name_in_one_repository(make_pair: Callable[[], Pair]) -> None:
    """Pushes and prunes of both, in turn; one has adopted archives of an earlier version, and the higher generation."""
    repository = Archives()
    one, other = with_borg(make_pair(), repository), with_borg(make_pair(), repository)
    name(one, "", generation=40)
    add(one, 2, generation=40, taken=START - 86400)
    work = PushOptions(all_missing=True, prune=True)
    push(one.cluster, one.hosts["host-a"], work, ["borg"])
    assert start_on(one) == 41 and start_on(other) == 1
    uuids = [uuid_in(lease_path(pair)) for pair in (one, other)]
    reported = Reported()
    for turn in range(4):
        for pair, known in zip((one, other), (("", uuids[0]), (uuids[1],)), strict=True):
            add(pair, 2, taken=START + turn * 60)
            foreign = {found for found in repository.archives if cluster_in(found) not in known}
            done = push(pair.cluster.showing(reported), pair.hosts["host-a"], work, ["borg"])
            assert not [found for found in done if found.error]
            assert foreign <= set(repository.archives), "one cluster has removed the archives of the other"
    assert any(uuids[1] in text for text in reported.notes) and any(uuids[0] in text for text in reported.notes)
    assert all(glob.endswith(tuple(uuids)) for glob in repository.globs[1:]), "checkpoints of the own cluster only"
    for pair, own in zip((one, other), uuids, strict=True):
        identity = list_snapshots(pair.cluster, pair.hosts["host-a"]).identity
        remote = list_remote(pair.cluster, pair.hosts["host-a"], "borg", identity)
        assert {found.get("cluster_uuid") or "" for found in remote.snapshots} <= {own, ""}
        newest = pull(pair.cluster, pair.hosts["host-a"], "borg", "latest", dry_run=True).snapshot
        assert newest == stores.numbers(store_of(pair))[-1]
        archive = offsite.archive_name(remote.foreign[-1])
        with pytest.raises(Refused, match=remote.foreign[-1].get("cluster_uuid") or "without a UUID"):
            pull(pair.cluster, pair.hosts["host-a"], "borg", archive)


def test_a_cluster_without_a_uuid_removes_only_archives_of_its_hosts(pair: Pair) -> None:
    """It was upgraded while one admin host is off; another cluster of its name has not been upgraded."""
    repository = Archives()
    with_borg(pair, repository)
    name(pair, "", generation=3)
    for number in range(1, 7):
        host = "host-a" if number % 2 else "host-x"
        found = {**MANIFEST, "cluster": pair.cluster.site.cluster, "number": number, "host": host, "uuid": str(uuid4())}
        found |= {"taken": START - 86400 * 900 + number, "sequence": number}
        repository.archives[offsite.archive_name(found)] = offsite.comment(found).format()
    foreign = {text for text in repository.archives if int(text.split("-")[-6]) % 2 == 0}
    reported = Reported()
    done = prune_repository(pair.cluster.showing(reported), pair.hosts["host-a"])
    assert done.removed and foreign <= set(repository.archives) and not foreign & {*done.kept, *done.removed}
    assert any("3 snapshots of a cluster without a UUID (taken on host-x)" in text for text in reported.notes)
    add(pair, 2, generation=3, taken=START)
    push(pair.cluster, pair.hosts["host-a"], PushOptions(all_missing=True, prune=True), ["borg"])
    assert foreign <= set(repository.archives)


def test_the_machine_that_prunes_is_given_the_uuid(pair: Pair) -> None:
    """It is not an admin host and has no lease; two clusters push to the repository."""
    repository = Archives()
    with_borg(pair, repository)
    for number in range(1, 7):
        found = {**MANIFEST, "cluster": pair.cluster.site.cluster, "number": number, "uuid": str(uuid4())}
        found |= {"cluster_uuid": (U1, U2)[number % 2], "taken": START - 86400 * 900 + number, "sequence": number}
        repository.archives[offsite.archive_name(found)] = offsite.comment(found).format()
    foreign = {text for text in repository.archives if cluster_in(text) == U2}
    with pytest.raises(Refused, match=f"{U1} and cluster {U2} .*which cluster is this one") as caught:
        prune_repository(pair.cluster, pair.hosts["host-a"])
    assert "--uuid UUID" in caught.value.hint
    with pytest.raises(Refused, match=f"{U1} and cluster {U2} .*begins with 3333"):
        prune_repository(pair.cluster, pair.hosts["host-a"], cluster_uuid="3333")
    done = prune_repository(pair.cluster, pair.hosts["host-a"], cluster_uuid=U1[:4])
    assert done.removed and {cluster_in(one) for one in (*done.kept, *done.removed)} == {U1}
    assert foreign <= set(repository.archives)
    name(pair, U1)
    with pytest.raises(Refused, match=f"prunes the archives of cluster {U1}, not of 2222"):
        prune_repository(pair.cluster, pair.hosts["host-a"], cluster_uuid="2222")


def test_a_new_host_pulls_the_only_cluster_of_a_repository(pair: Pair) -> None:
    repository = Archives()
    with_borg(pair, repository)
    lease_path(pair).parent.mkdir(parents=True)
    for number, uuid in ((1, ""), (2, U1)):
        found = {**MANIFEST, "cluster": pair.cluster.site.cluster, "number": number, "generation": number}
        found |= {"cluster_uuid": uuid} if uuid else {}
        repository.archives[offsite.archive_name(found)] = offsite.comment(found).format()
    assert pull(pair.cluster, pair.hosts["host-a"], "borg", "latest").number == 2
    assert uuid_in(lease_path(pair)) == U1
    lease_path(pair).unlink()
    found |= {"cluster_uuid": U2, "number": 3}
    repository.archives[offsite.archive_name(found)] = offsite.comment(found).format()
    with pytest.raises(Refused, match="not of this cluster"):
        pull(pair.cluster, pair.hosts["host-a"], "borg", "latest")


def test_a_standby_host_of_another_cluster_is_refused(pair: Pair) -> None:
    name(pair, U1, on=("host-a",))
    name(pair, U2, on=("host-b",))
    add(pair)
    (done,) = push(pair.cluster, pair.hosts["host-a"], PushOptions(), ["host-b"])
    assert U2 in done.error and done.status == 3 and stores.numbers(store_of(pair, "host-b")) == []
