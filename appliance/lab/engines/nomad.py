"""A Nomad cluster of real agents: servers, and clients that run tasks by raw_exec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from appliance.host.base import Result
from appliance.lab.engines.agents import Agent
from appliance.lab.engines.hosts import EngineHost, Runner
from appliance.lab.engines.programs import find_program
from appliance.lab.waiting import wait_until

FIRST_SERVER, FIRST_CLIENT = 11, 21
"""Last numbers of addresses of hosts of their own."""


class NomadClient:
    """A cluster of servers, and clients; a host can be both. Its agents run."""

    def __init__(self, servers: Sequence[Runner], clients: Sequence[Runner]) -> None:
        self.servers, self.clients = list(servers), list(clients)

    @property
    def hosts(self) -> list[Runner]:
        """All of them."""
        return list({host.name: host for host in (*self.servers, *self.clients)}.values())

    def nomad(self, *words: str, ok: tuple[int, ...] | None = (0,), input: bytes | None = None) -> Result:
        """Run the command on the first server that is on."""
        server = self.servers[0]
        address = f"NOMAD_ADDR=http://{server.address}:4646"
        return server.run("env", address, server.install(find_program("nomad")), *words, ok=ok, input=input)

    def get(self, path: str) -> Any:
        """What the HTTP API returns for a path below ``/v1/``."""
        return json.loads(self.nomad("operator", "api", f"/v1/{path}").stdout)

    def leader(self) -> str:
        """Address of the leader; empty where there is none."""
        done = self.nomad("operator", "api", "/v1/status/leader", ok=None)
        return str(json.loads(done.stdout)) if done.status == 0 and done.stdout.startswith(b'"') else ""

    def has_key(self) -> bool:
        """Return whether the servers sign the identities of clients."""
        return b'"kid"' in self.nomad("operator", "api", "/.well-known/jwks.json", ok=None).stdout

    def ready_nodes(self) -> list[str]:
        """Names of clients that are ready."""
        for host in self.hosts:
            host.check()
        return sorted(node["Name"] for node in self.get("nodes") if node["Status"] == "ready")

    def validate(self, job: Path) -> Result:
        """`nomad job validate`, by the servers; whatever its status."""
        return self.nomad("job", "validate", "-", ok=None, input=job.read_bytes())

    def submit(self, text: str) -> None:
        """Run a job and return at once."""
        self.nomad("job", "run", "-detach", "-", input=text.encode())

    def allocations(self, job: str) -> list[dict[str, Any]]:
        """Allocations of a job."""
        found: list[dict[str, Any]] = self.get(f"job/{job}/allocations")
        return found

    def running(self, job: str) -> list[dict[str, Any]]:
        """Allocations of a job whose tasks run."""
        return [each for each in self.allocations(job) if each["ClientStatus"] == "running"]

    def logs(self, allocation: str, task: str, *words: str) -> str:
        """What a task has printed."""
        return self.nomad("alloc", "logs", *words, allocation, task).stdout.decode()

    def purge(self, job: str) -> None:
        """Stop and forget a job."""
        self.nomad("job", "stop", "-purge", "-detach", job)
        wait_until(lambda: not self.running(job), f"{job} is gone", 60)


class NomadCluster(NomadClient):
    """One whose agents are started here.

    ``settings``: further settings of the client by name of its host, such as ``{"node_pool": "compute"}``.
    """

    def __init__(
        self, servers: Sequence[Runner], clients: Sequence[Runner], settings: Mapping[str, dict[str, Any]] | None = None
    ) -> None:
        super().__init__(servers, clients)
        self.settings = settings or {}
        for host in self.servers:
            self.start_agent(host)
        # A client that registers before they have a key tries it again half a minute later.
        wait_until(self.has_key, "Nomad has a leader and a key", 90)
        for host in self.clients:
            if host not in self.servers:
                self.start_agent(host)
        wait_until(lambda: len(self.ready_nodes()) == len(clients), "Nomad's clients are ready", 120)

    def start_agent(self, host: Runner) -> None:
        """Start the agent of a host, whose data are on its disk."""
        path = f"{host.disk}/nomad.json"
        program = host.install(find_program("nomad"))
        # Nomad makes it with mode 0700: tasks of other users than root do not reach their own folders then.
        host.run("install", "-d", "-m", "0711", str(host.disk), f"{host.disk}/nomad")
        host.host.write(path, json.dumps(self._agent(host).settings, indent=1).encode(), mode=0o600)
        host.start("nomad", "env", "-u", "AWS_CA_BUNDLE", program, "agent", "-config", path)

    def _agent(self, host: Runner) -> Agent:
        return Agent(
            host.name,
            host.address,
            f"{host.disk}/nomad",
            [server.address for server in self.servers],
            host.run("ip", "-o", "-4", "addr", "show", "to", host.address).text.split()[1],
            self.settings.get(host.name, {}) if host in self.clients else None,
        )


@contextmanager
def nomad_cluster(
    servers: int = 3, clients: int = 2, settings: Mapping[str, dict[str, Any]] | None = None
) -> Iterator[NomadCluster]:
    """A cluster of hosts of their own, ``s1``, ``s2`` ... and ``c1`` ..., for as long as the context lasts."""
    with ExitStack() as stack:

        def make(letter: str, number: int) -> EngineHost:
            host = EngineHost(f"{letter}{number + 1}", {"s": FIRST_SERVER, "c": FIRST_CLIENT}[letter] + number)
            stack.callback(host.remove)
            return host

        yield NomadCluster([make("s", n) for n in range(servers)], [make("c", n) for n in range(clients)], settings)
