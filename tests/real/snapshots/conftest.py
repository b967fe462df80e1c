"""An overlay that is mounted, and a site with a Borg repository, in a folder or behind SSH."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from appliance.agent.store import Snapshot, Store
from appliance.config.model import BorgRepository
from appliance.errors import Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.snapshots.list import list_snapshots
from appliance.operations.snapshots.pull import list_remote, pull
from appliance.operations.snapshots.push import FAILED, PUSHED, Pushed, PushOptions, push
from appliance.progress import Silent
from appliance.shared.lease import Lease
from tests import stores
from tests.conftest import find_tool
from tests.places import DEBIAN_SITE
from tests.real.overlays import Bed, bed
from tests.real.sshd import Server
from tests.stores import keep_image, make_image, read_all

CLUSTER = f"t-push-{token_hex(4)}"
"""Its lock is the machine's: other runs have other names."""


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Bed]:
    """Without a lab."""
    with bed(tmp_path / "bed") as made:
        yield made


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
        return push(self.cluster, self.host, PushOptions(wanted, **more), ["borg"])

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
        done = pull(other.cluster, other.host, "borg", str(number))
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
