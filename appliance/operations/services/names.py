"""Part of the guard: nodes whose names a name service gives other addresses are reached at these."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from appliance.config.hostlist import fold
from appliance.errors import Busy, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.preflight import find_instance, lock_host
from appliance.plan.machine import inside_argv
from appliance.plan.overlay.names import HOSTS, find_named_nodes, find_names, read_hosts, read_resolved
from appliance.plan.overlay.seed import node_addresses
from appliance.text import one_line
from appliance.tools.resolver import resolve
from appliance.tools.scripts import python_argv

BATCH = 500
"""Nodes in one command of Slurm."""
COMMAND_S = 60
UNEDITED = b'{"edited": false}'


class NameWatch:
    """The addresses of nodes' names, by the resolver of this host, and the running container's hosts file."""

    def __init__(self, cluster: Cluster, host: Host, report: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.host = host
        self.report = report
        self._seen: Mapping[str, str] = {}
        self._pending: set[str] = set()
        """Nodes of which the controller does not know yet that they have another address."""
        self._edited = False

    def check(self) -> None:
        """Write addresses that have changed into the container, and let the controller use them.

        It does not read its configuration again, which would drop what somebody has set by `scontrol update`.

        Raises:
            SmsError: a command failed; the next check goes on.
        """
        names = find_names(self.cluster.site) if self.cluster.find_role("controller") else []
        if not names:
            return
        output = resolve(self.host, names)
        found = read_resolved(output, names, self._seen, self.cluster.site.node_networks)
        if found == self._seen and not self._pending:
            return
        if not find_instance(self.cluster, self.host):
            return
        if self._pending or any(self._compare(output, names)):
            try:
                with lock_host(self.cluster, self.host):
                    if not find_instance(self.cluster, self.host):
                        return
                    self._follow(*self._compare(output, names))
            except Busy:
                return  # another sms is at work here: the next check does it
        self._seen = found

    def _compare(self, output: str, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the addresses of names that have another one in the container, and of those that have none there."""
        hosts = read_hosts(self._inside("cat", HOSTS).decode(errors="replace"))
        known = {name: hosts[name] for name in names if name in hosts}
        found = read_resolved(output, names, known, self.cluster.site.node_networks)
        other = {name: address for name, address in found.items() if known.get(name, address) != address}
        return other, {name: address for name, address in found.items() if name not in known}

    def _follow(self, other: Mapping[str, str], new: Mapping[str, str]) -> None:
        """Write these addresses into the container unless somebody has edited its hosts file; notify the controller."""
        if other or new:
            pairs = node_addresses(self.cluster.site, new)
            lines = [f"{address} {names}" for address, names in pairs if not new.keys().isdisjoint(names.split())]
            given = json.dumps({"names": other, "lines": lines}).encode()
            edited = self._inside(*python_argv("follow-names"), input=given).strip() != UNEDITED
            if edited and not self._edited:
                names = one_line(fold(sorted({**other, **new})), 120)
                self.report(
                    f"names of nodes have other addresses: {names}; {HOSTS} of the container stays as somebody has "
                    "changed it there, until the next `sms apply`"
                )
            self._edited = edited
            if edited:
                return
        self._pending.update(node for node, name in find_named_nodes(self.cluster.site) if name in {**other, **new})
        if self._pending:
            self._notify()

    def _inside(self, *argv: str, input: bytes = b"") -> bytes:
        site, services = self.cluster.site, self.cluster.services
        return self.host.run(*inside_argv(site, services, *argv), input=input, timeout=COMMAND_S).stdout

    def _notify(self) -> None:
        """Let the controller resolve the names of these nodes again: it is given the addresses that it has."""
        nodes = [(node, name) for node, name in find_named_nodes(self.cluster.site) if node in self._pending]
        for at in range(0, len(nodes), BATCH):
            some = nodes[at : at + BATCH]
            words = ",".join(node for node, _ in some), ",".join(name for _, name in some)
            self._inside("scontrol", "update", f"NodeName={words[0]}", f"NodeAddr={words[1]}")
        folded = one_line(fold([node for node, _ in nodes]), 500)
        self._pending.clear()
        self.report(f"{len(nodes)} nodes have other addresses: {folded}")
        try:
            note(self.cluster, self.host, "guard", "names", nodes=folded, count=len(nodes))
        except SmsError as error:
            self.report(error.message)
