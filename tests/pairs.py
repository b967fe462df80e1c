"""Two admin hosts whose state folders are folders of a test, with or without a shared one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.agent.main import find_command
from appliance.errors import SmsError
from appliance.host.base import Host, Result, Stuck, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.lease import QUERY, Leases, query_lease, release_lease, take_lease
from appliance.shared.files import ALWAYS
from appliance.shared.requests import Request
from appliance.tools.agent import Agents
from appliance.tools.apptainer import Instance
from appliance.tools.programs import FIND
from tests.sites import open_debian
from tests.support.env import fake_env
from tests.support.instances import LIST, lists

STATE = "/state-of-this-host"
RUN = "/run/sms/"
"""Begins the paths of locks and signs of life, which each host has in its folder, too."""


class HostInFolder(Local):
    """A host whose state folder is a folder of this test; its network can be cut."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.folder = folder
        self.cut = False
        self.stuck = False
        self.accepts = True
        """Whether a new connection works; not where the network is cut."""
        self.remote = False
        """Whether the agent performs requests, in a process of its own."""
        self.unreadable = ""
        """A file that cannot be read."""
        self.instances: list[Instance] = []
        """Instances of Apptainer."""

    def run(self, *argv: str, **options: Any) -> Result:
        if self.cut:
            raise Unreachable(f"{self.name}: interrupted")
        if self.stuck and "query" in argv:
            raise Stuck(f"{self.name}: no banner")
        if argv[: len(LIST)] == LIST:
            return Result(self.name, argv, 0, lists(self.instances)(argv, None)[1].encode(), b"")
        if argv[2:3] == (FIND,):
            return Result(self.name, argv, 0, b"", b"")  # it has all programs
        result = super().run(*map(self.path, argv), **options)
        if self.instances and argv[2:3] == (QUERY,):
            return replace(result, stdout=b"1" + result.stdout[1:])
        return result

    def path(self, word: str) -> str:
        """Return a word of a command with the real place of a file."""
        if word.startswith(RUN):
            return f"{self.folder}/run/{word.removeprefix(RUN)}"
        return word.replace(STATE, str(self.folder))

    def read(self, path: str) -> bytes | None:
        if path == self.unreadable:
            raise SmsError(f"{self.name}: input/output error")
        return super().read(path)

    def accepts_connections(self) -> bool:
        return self.accepts and not self.cut

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        with super().hold(*map(self.path, argv), timeout=timeout) as line:
            yield line

    def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
        if self.cut:
            raise Unreachable(f"{self.name}: interrupted")
        if self.remote:
            raise NotImplementedError
        return super().perform(replace(request, path=self.path(request.path)), may_commit)


Instead = Callable[[Host, Request], Any]


@dataclass(frozen=True)
class AgentsInFolders(Agents):
    """Agents whose commands this process runs, in the folder of each host."""

    instead: Instead = lambda host, request: None
    """Called before a request is performed. What it returns is the reply; None: the host performs the request."""

    def install(self, host: Host, time_left: Any = None) -> tuple[str, ...]:
        return ("agent",)

    def call(self, host: Host, command: str, request: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        assert isinstance(host, HostInFolder)
        if host.cut:
            raise Unreachable(f"{host.name}: interrupted")
        words = json.dumps(request).replace(STATE, str(host.folder)).replace(f'"{RUN}', f'"{host.folder}/run/')
        reply: dict[str, Any] = json.loads(json.dumps(find_command(command)(json.loads(words))))
        return reply

    query = call

    def perform(self, host: Host, request: Request, *, timeout: float = 60) -> Any:
        reply = self.instead(host, request)
        return super().perform(host, request, timeout=timeout) if reply is None else reply


class Pair:
    """Two admin hosts; ``parts``: of the environment of their cluster."""

    def __init__(self, tmp_path: Path, *, shared: bool, **parts: Any) -> None:
        opened = open_debian(Path(STATE))
        admins = opened.site.admin_hosts
        two = tuple(admins[0].model_copy(update={"name": name, "address": name}) for name in ("host-a", "host-b"))
        folders = {name: tmp_path / ("both" if shared else name) for name in ("host-a", "host-b")}
        self.hosts = {name: HostInFolder(name, folder) for name, folder in folders.items()}
        env = fake_env(self.hosts, **{"agents": Agents(str(tmp_path / "run")), **parts})
        site = opened.site.model_copy(update={"admin_hosts": two})
        self.cluster = Cluster(site, opened.services, opened.base, env=env)

    def leases(self, name: str, *, query: bool = True, without: tuple[str, ...] = ()) -> Leases:
        found = Leases(self.hosts[name], self.cluster, without=without)
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
