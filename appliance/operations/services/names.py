"""Part of the guard: nodes whose names a name service gives other addresses are reached at these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from appliance.config.hostlist import fold
from appliance.errors import Busy, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.preflight import find_instance, lock_host
from appliance.operations.services.reach import see_accepting
from appliance.plan.machine import inside_argv
from appliance.plan.overlay.names import HOSTS, find_named_nodes, find_names, read_hosts, read_resolved
from appliance.plan.overlay.seed import node_addresses
from appliance.text import one_line
from appliance.tools.resolver import resolve
from appliance.tools.scripts import python_argv

SPLIT = "# of the controller"
"""Between both files that ``follow-names read`` prints."""
PORT = re.compile(r"^SlurmdPort\s*=\s*(\d{1,5})", re.MULTILINE)
BATCH = 200
"""Nodes in one command."""
COMMAND_S = 20
Item = TypeVar("Item")


class NameWatch:
    """The addresses of nodes' names, by the resolver of this host, and those that the running container has."""

    def __init__(self, cluster: Cluster, host: Host, report: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.host = host
        self._report = report
        self._reported: set[str] = set()
        self.nodes = find_named_nodes(cluster.site) if cluster.find_role("controller") else []

    def check(self) -> None:
        """Write addresses that have changed into the container, and let the controller use all that it does not use.

        It does not read its configuration again, which would drop what somebody has set by `scontrol update`.

        Raises:
            SmsError: a command failed; the next check goes on.
        """
        if not self.nodes or not find_instance(self.cluster, self.host):
            return
        names = find_names(self.cluster.site)
        output = resolve(self.host, names)
        text, hosts, used = self._read(names)
        if used is None:  # the controller has read it when the instance started
            self._script("use", text)
            used = hosts
        found = read_resolved(output, names, hosts, self.cluster.site.node_networks)
        moved = {name: address for name, address in found.items() if hosts.get(name) != address}
        if not moved:
            self._reported.clear()
        elif self._write(moved, hosts):
            text, hosts, _ = self._read(names)
        if late := {name for name, address in hosts.items() if used.get(name) != address}:
            self._notify(late)
            self._script("use", text)

    def _read(self, names: Sequence[str]) -> tuple[str, dict[str, str], dict[str, str] | None]:
        """Return the container's hosts file, its addresses of these names, and those that the controller uses."""
        text, _, used = self._script("read").decode(errors="replace").partition(f"\n{SPLIT}\n")
        both = [{name: known[name] for name in names if name in known} for known in map(read_hosts, (text, used))]
        return text, both[0], both[1] if used.strip() else None

    def _write(self, moved: Mapping[str, str], hosts: Mapping[str, str]) -> bool:
        """Write those that can be followed into the container's hosts file; return whether it was changed."""
        placed = {name for _, name in self._find_present()}
        known = {name: address for name, address in moved.items() if name in placed & hosts.keys()}
        new = {name: address for name, address in moved.items() if name in placed - hosts.keys()}
        wrong = self._find_wrong(known, hosts)
        known = {name: address for name, address in known.items() if name not in wrong}
        if not (known or new):
            return False
        pairs = node_addresses(self.cluster.site, new)
        lines = [f"{address} {words}" for address, words in pairs if not new.keys().isdisjoint(words.split())]
        given = json.dumps({"names": known, "lines": lines})
        try:
            with lock_host(self.cluster, self.host):
                done = self._script("write", given)
        except Busy:  # another sms is at work here: the next check does it
            return False
        if edited := b"true" in done:
            names = {*known, *new}
            self._report_once(f"{HOSTS} of the container stays as somebody has changed it, until `sms apply`", names)
        return not edited

    def _find_wrong(self, moved: Mapping[str, str], hosts: Mapping[str, str]) -> set[str]:
        """Return the names whose nodes accept connections where they were, and not at the new address.

        A wrong zone, or a name server that answers every name, must not take nodes away.
        """
        if not moved:
            return set()
        shown = PORT.search(self._inside("scontrol", "show", "config").decode(errors="replace"))
        port = shown[1] if shown else "6818"
        wrong = set()
        for some in _batches(sorted(moved)):
            places = [(addresses[name], port) for addresses in (moved, hosts) for name in some]
            accept = see_accepting(self.cluster, self.host, places)
            there, before = accept[: len(some)], accept[len(some) :]
            wrong |= {name for name, now, then in zip(some, there, before, strict=True) if then and not now}
        if wrong:
            self._report_once("no slurmd answers there, and one does where they were: not followed", wrong)
        return wrong

    def _notify(self, late: set[str]) -> None:
        """Let the controller resolve the names of these nodes again: it is given the addresses that it has.

        Raises:
            SmsError: it did not take one of the commands.
        """
        nodes = [(node, name) for node, name in self._find_present() if name in late]
        if not nodes:
            return
        failed: SmsError | None = None
        for some in _batches(nodes):
            words = (f"NodeName={','.join(node for node, _ in some)}", f"NodeAddr={','.join(name for _, name in some)}")
            try:
                self._inside("scontrol", "update", *words)
            except SmsError as error:
                failed = error
        if failed:
            raise failed
        folded = one_line(fold([node for node, _ in nodes]), 500)
        self._report(f"{len(nodes)} nodes have other addresses: {folded}")
        with suppress(SmsError):
            note(self.cluster, self.host, "guard", "names", nodes=folded, count=len(nodes))

    def _find_present(self) -> list[tuple[str, str]]:
        """Return (node, name of its address) of those that the controller has: one that it lacks ends an update."""
        shown = self._inside("sinfo", "--noheader", "--Node", "--format=%N").decode(errors="replace").split()
        present = set(shown)
        return [(node, name) for node, name in self.nodes if node in present]

    def _script(self, mode: str, text: str = "") -> bytes:
        return self._inside(*python_argv("follow-names", mode), input=text.encode())

    def _inside(self, *argv: str, input: bytes = b"") -> bytes:
        site, services = self.cluster.site, self.cluster.services
        return self.host.run(*inside_argv(site, services, *argv), input=input, timeout=COMMAND_S).stdout

    def _report_once(self, what: str, names: Iterable[str]) -> None:
        text = f"names of nodes have other addresses: {one_line(fold(sorted(names)), 120)}; {what}"
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)


def _batches(all_of: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (all_of[at : at + BATCH] for at in range(0, len(all_of), BATCH))
