"""A cluster on one machine, out of namespaces: every host with its own network, mounts, name and pids.

``up`` makes one, ``Lab.open`` finds its hosts, ``down`` removes it.
"""

from __future__ import annotations

from pathlib import Path

from appliance.errors import SmsError
from appliance.host.netns import Netns
from appliance.lab.down import down
from appliance.lab.journal import Journal, alive, read_journal
from appliance.lab.layout import Layout
from appliance.lab.metal import Metal, find_metal, look
from appliance.lab.power import power_off, power_on
from appliance.lab.up import put_up_cables, up, up_planned, wait_ready

__all__ = ["Lab", "Layout", "Metal", "down", "put_up_cables", "up", "up_planned", "wait_ready"]


class Lab:
    """A lab that is up."""

    def __init__(self, journal: Journal) -> None:
        self.layout = journal.layout
        self.name = journal.name
        self._pids = journal.pids

    @classmethod
    def open(cls, name: str = "lab") -> Lab:
        """The lab of this name.

        Raises:
            SmsError: there is none, or it is not whole.
        """
        journal = read_journal(name)
        if not journal:
            raise SmsError(f"there is no lab {name}", hint=f"sms lab up --name {name}")
        if not alive(journal):
            raise SmsError(f"lab {name} is not whole", hint=f"`sms lab up --name {name}` makes it anew")
        return cls(journal)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The compute nodes' names."""
        return self.layout.nodes

    @property
    def etc(self) -> Path:
        """The folder that is /etc/sms on admin, host-a and host-b."""
        return self.layout.etc

    def hosts(self) -> tuple[str, ...]:
        """Every host's name."""
        return tuple(host.name for host in self.layout.hosts)

    def host(self, name: str) -> Netns:
        """A host to run commands on.

        Raises:
            SmsError: the lab has none of this name.
        """
        if name not in self._pids:
            raise SmsError(f"lab {self.name} has no host {name}", hint=f"it has {', '.join(self.hosts())}")
        return Netns(name, self._pids[name])

    def metal(self, name: str) -> Metal:
        """A machine without a disk, as it is now.

        Raises:
            SmsError: the lab has none of this name.
        """
        return find_metal(self.layout, name)

    def all_metal(self) -> list[Metal]:
        """Every one of them."""
        return look(self.layout)

    def power_off(self, name: str) -> None:
        """A host dies, as when its power fails; nobody is told."""
        power_off(self.name, name)

    def power_on(self, name: str) -> None:
        """A host that has died starts; its disk is as it was."""
        self._pids[name] = power_on(self.name, name)

    def failing(self, name: str) -> str:
        """The daemons of a host that do not answer now, by name; empty when all do."""
        return self.host(name).run("bash", "/lab/ready.sh", "0", ok=(0, 1)).text
