"""Hosts of a lab that run programs of engines, beside those of the engines' own."""

from __future__ import annotations

from pathlib import Path

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.hosts import Runner
from appliance.lab.layout import PROVISIONING


class LabRunner(Runner):
    """A host of a lab. Its address is that in the provisioning network."""

    disk = Path("/var/lib/engines")

    def __init__(self, lab: Lab, name: str) -> None:
        self.name = name
        self.lab = lab
        (own,) = (host for host in lab.layout.hosts if host.name == name)
        self.address = own.addresses[PROVISIONING]
        self._own_root = own.own_root
        super().__init__()

    @property
    def host(self) -> Netns:
        """To run commands on it."""
        return self.lab.host(self.name)

    def install(self, program: Path) -> str:
        """Admin hosts see the files of this machine; compute nodes get a copy."""
        if not self._own_root:
            return str(program)
        path = f"/usr/local/bin/{program.name}"
        if not self.host.works("test", "-x", path):
            self.host.write(path, program.read_bytes(), mode=0o755)
        return path
