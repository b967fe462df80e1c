"""A Borg repository with an append-only key; pruned from another machine; its exported key."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused, SmsError
from appliance.operations.snapshots.push import FAILED
from appliance.operations.snapshots.repository import check_key, export_key, prune_repository, warn_about_key
from appliance.operations.snapshots.scheduled import push_to
from tests.real.snapshots.conftest import Place
from tests.real.sshd import Server
from tests.stores import make_image

pytestmark = pytest.mark.real


@dataclass
class AppendOnly:
    """A repository behind SSH to which ``place`` may only append, and which ``pruner``, with its own key, may prune."""

    place: Place
    pruner: Place
    repository: Path

    def prune(self, **more: Any) -> tuple[str, ...]:
        return prune_repository(self.pruner.cluster, self.pruner.host, **more).removed

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


@pytest.mark.full
def test_a_key_that_may_only_append(append_only: AppendOnly) -> None:
    place = append_only.place
    for seed in (1, 2, 3):
        place.add(seed)
        push_to(place.cluster, place.host, "borg")
    assert place.numbers() == [1, 2, 3], "a scheduled run prunes nothing there"
    (failed,) = place.push(prune=True)
    assert failed.state == FAILED and "may only append" in failed.error and failed.status == 3
    with pytest.raises(Refused, match="may only append"):
        prune_repository(place.cluster, place.host)
    assert place.numbers() == [1, 2, 3], "what looks removed there would be hidden"
    size = size_of(append_only.repository)
    assert len(append_only.prune(dry_run=True)) == 2 and place.numbers() == [1, 2, 3]
    removed = append_only.prune()
    assert [name.split("-")[-6] for name in removed] == ["000001", "000002"]
    assert place.numbers() == [3] and size_of(append_only.repository) < size / 2
    assert append_only.prune() == ()
    place.add(4)
    push_to(place.cluster, place.host, "borg")
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
    assert prune_repository(place.cluster, place.host).removed == ()
    place.add(seed=2)
    push_to(place.cluster, place.host, "borg")
    assert place.numbers() == [2]
    assert prune_repository(place.cluster, place.host).removed == (), "1 was removed by the host itself"


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
    with pytest.raises(Refused, match=f"cluster {ours} and cluster {other}"):
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
