"""Two admin hosts whose state folders are folders of a test, with or without a shared one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.host.base import Result, Stuck, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.lease import Leases, query_lease, release_lease, take_lease
from appliance.progress import Silent
from appliance.shared.files import ALWAYS
from appliance.shared.requests import Request
from tests.places import DEBIAN_SITE

STATE = "/state-of-this-host"
ALIVE = "/run/sms/sample.alive"


class HostInFolder(Local):
    """A host whose state folder is a folder of this test; its network can be cut."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.folder = folder
        self.cut = False
        self.stuck = False
        self.remote = False
        """Whether the agent performs requests, in a process of its own."""

    def run(self, *argv: str, **options: Any) -> Result:
        if self.cut:
            raise Unreachable(f"{self.name}: interrupted")
        if self.stuck and "query" in argv:
            raise Stuck(f"{self.name}: no banner")
        words = (word.replace(STATE, str(self.folder)).replace(ALIVE, str(self.folder / "alive")) for word in argv)
        return super().run(*words, **options)

    def accepts_connections(self) -> bool:
        return not self.cut

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        with super().hold(*(word.replace(STATE, str(self.folder)) for word in argv), timeout=timeout) as line:
            yield line

    def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
        if self.cut:
            raise Unreachable(f"{self.name}: interrupted")
        if self.remote:
            raise NotImplementedError
        return super().perform(replace(request, path=request.path.replace(STATE, str(self.folder))), may_commit)


class Pair:
    """Two admin hosts."""

    def __init__(self, tmp_path: Path, *, shared: bool) -> None:
        opened = open_cluster(DEBIAN_SITE, Path(STATE), Silent())
        admins = opened.site.admin_hosts
        two = tuple(admins[0].model_copy(update={"name": name, "address": name}) for name in ("host-a", "host-b"))
        self.cluster = Cluster(opened.site.model_copy(update={"admin_hosts": two}), opened.services, opened.base)
        folders = {name: tmp_path / ("both" if shared else name) for name in ("host-a", "host-b")}
        self.hosts = {name: HostInFolder(name, folder) for name, folder in folders.items()}

    def leases(self, name: str, *, query: bool = True, without: tuple[str, ...] = ()) -> Leases:
        found = Leases(self.hosts[name], self.cluster, without=without)
        found.hosts |= {other: host for other, host in self.hosts.items() if other in found.hosts}
        if query:
            found.query()
        return found

    def take(self, name: str) -> int:
        return take_lease(self.hosts[name], self.cluster, leases=self.leases(name)).generation

    def release(self, name: str) -> None:
        release_lease(self.hosts[name], self.cluster, leases=self.leases(name))

    def files(self) -> dict[str, Any]:
        """Return holder, generation and owner of each host's lease file."""
        found = {name: query_lease(host, self.cluster) for name, host in self.hosts.items()}
        return {name: (lease.holder, lease.generation, lease.file) for name, lease in found.items()}
