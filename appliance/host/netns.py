"""A host of the one-machine lab: a process tree with its own network, mounts, name and pids."""

from __future__ import annotations

from appliance.host.local import Local


class Netns(Local):
    """Commands enter all namespaces of the host whose first process is ``pid``.

    Not ``ip netns exec``: it remounts /sys and hides the cgroups, and slurmd refuses to start.
    """

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(name, ("nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"))
        self.pid = pid
