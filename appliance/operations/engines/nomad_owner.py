"""Nomad, as one that can have the services' state: a folder of the client that runs them, which is an admin host."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.engines.nomad import read_options
from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.engines.nomad import find_on_nomad
from appliance.operations.engines.owners import Command, EngineOwner
from appliance.operations.preflight import prepare_confinement
from appliance.plan.services.controllers import CONTAINER, NOMAD
from appliance.plan.services.runs import ROOT, Once, once_run
from appliance.tools import files
from appliance.tools.ports import probe_argv
from appliance.tools.space import query_space


class NomadOwner(EngineOwner):
    """The site's Nomad cluster."""

    name = NOMAD

    def __init__(self, cluster: Cluster, host: Host, paths: Sequence[str]) -> None:
        super().__init__(cluster, host, paths)
        self.options = read_options(cluster.site, ())
        self.where = f"Nomad on {self.options.host}"

    @property
    def client(self) -> Host:
        """The client that runs the services.

        Raises:
            Refused: sms does not reach it.
        """
        if self.options.host not in {one.name for one in self.cluster.site.admin_hosts}:
            raise Refused(
                f"{self.options.host}, which has the state on Nomad, is not an admin host: the state cannot be moved",
                hint="add it to `admin_hosts`, or name one of them as `engines.nomad.host`",
            )
        return self.cluster.host(self.options.host)

    def prepare(self) -> None:
        files.make_folders(self.client, self.options.state)
        super().prepare()

    def check_lost(self) -> None:
        client, folder = self.client, self.options.state
        if not client.works("test", "-d", folder):
            raise Refused(
                f"{self.where} does not answer, and {client.name} does not have the state: there is no {folder}",
                hint="if it is lost: `sms failover`, which continues from a snapshot, as docs/engines.md says",
            )
        self._refuse_running()
        self.lost = True
        self._send_image()

    def abandon(self) -> None:
        """Let no task start with the state here, which is not that of the services any more, or is gone.

        Raises:
            Refused: one runs with it.
        """
        files.make_folders(self.client, self.options.state)
        self._refuse_running()
        self._send_image()
        self.lock(CONTAINER)

    def _send_image(self) -> None:
        find_on_nomad(self.cluster, self.host).send_image(self.cluster, self.bundle)
        self.check_image()

    def _refuse_running(self) -> None:
        """Check that no service listens there."""
        client = self.client
        if ports := [port for port in self._ports() if client.works(*probe_argv(self.options.address, port))]:
            raise Refused(
                f"tasks of {self.where} run: port {', '.join(map(str, ports))} of {self.options.address} is in use",
                hint=f"end them, by a restart of {client.name} if need be; then run this again",
            )

    def _ports(self) -> list[int]:
        """Return the TCP ports of the services that move."""
        names = {unit for item in self.bundle.items if item.kind == "service" for unit in item.units}
        moving = [one for one in self.cluster.services if one.name in names]
        return sorted({int(port.partition("/")[2]) for one in moving for port in one.ports if port.startswith("tcp/")})

    def free_bytes(self) -> int:
        return query_space(self.client, self.options.state).free

    def root(self, path: str) -> str:
        return ROOT

    def inside(self, argv: Sequence[str], *, state: bool = True, copy: bool = False, input: bool = False) -> Command:
        confinement = prepare_confinement(self.cluster, self.client)
        once = Once("write" if state else "query", tuple(argv), bind=self.options.state if state else "")
        return Command(self.client, once_run(self.cluster.site, confinement, self.bundle.image, once))

    def close(self) -> None:
        pass  # each of them is a container of its own
