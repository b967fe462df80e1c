"""A cluster on one machine, made of namespaces: every host has its own network, mounts, name and pids.

``up`` creates one, ``Lab.open`` opens it, ``down`` removes it.
"""

from __future__ import annotations

from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.netns import Netns
from appliance.lab.down import down
from appliance.lab.journal import Journal, hosts_off, is_complete, read_journal
from appliance.lab.layout import Extras, Layout
from appliance.lab.metal import Metal, find_metal, query_machines
from appliance.lab.up import put_up_cables, up, up_planned

__all__ = ["Extras", "Lab", "Layout", "Metal", "down", "put_up_cables", "up", "up_planned"]


class Lab:
    """A lab that is up."""

    def __init__(self, journal: Journal) -> None:
        self.layout = journal.layout
        self.name = journal.name
        self._pids = journal.pids

    @classmethod
    def open(cls, name: str = "lab") -> Lab:
        """Open the lab of this name. Hosts that are off do not prevent it.

        Raises:
            ConfigError: no lab can have this name.
            Refused: there is none.
            SmsError: it was not completely created.
        """
        journal = read_journal(Layout(name, 0).name)
        if not journal:
            raise Refused(f"there is no lab {name}", hint=f"sms lab up --name {name}")
        if not is_complete(journal):
            raise SmsError(f"lab {name} is incomplete", hint=f"`sms lab up --name {name}` recreates it")
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
        """Return a host to run commands on.

        Raises:
            SmsError: the lab has none of this name.
        """
        if name not in self._pids:
            raise SmsError(f"lab {self.name} has no host {name}", hint=f"it has {', '.join(self.hosts())}")
        return Netns(name, self._pids[name])

    def off(self) -> set[str]:
        """Return the hosts that are off now."""
        journal = read_journal(self.name)
        return hosts_off(journal) if journal else set(self._pids)

    def running_host(self, name: str) -> Netns:
        """Return a host to run commands on.

        Raises:
            SmsError: the lab has none of this name, or it is off.
        """
        host = self.host(name)
        if name in self.off():
            raise SmsError(f"{name} of lab {self.name} is off", hint=f"sms lab power --name {self.name} {name} on")
        return host

    def metal(self, name: str) -> Metal:
        """Return the current state of a diskless machine.

        Raises:
            SmsError: the lab has none of this name.
        """
        return find_metal(self.layout, name)

    def all_metal(self) -> list[Metal]:
        """Return the current state of every diskless machine."""
        return query_machines(self.layout)

    def failing(self, name: str) -> str:
        """Return the names of a host's daemons that do not answer; empty if all do."""
        return self.host(name).run("bash", "/lab/ready.sh", "0", ok=(0, 1)).text
