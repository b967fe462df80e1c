"""A host of the one-machine lab: a process tree with its own network, mount, UTS and PID namespaces."""

from __future__ import annotations

from appliance.host.local import Local


class Netns(Local):
    """Commands enter all namespaces of process ``pid``, the init process of the lab host.

    Not ``ip netns exec``: it remounts /sys and hides the cgroups, and slurmd refuses to start.
    """

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(name, ("nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"))
        self.pid = pid

    @property
    def without_network(self) -> tuple[str, ...]:
        """The words before a command that uses the network of this machine."""
        return tuple(word for word in self.prefix if word != "-n")
