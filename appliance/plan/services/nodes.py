"""Slurm's nodes as their controller sees them, which of them to connect to, and processes of the container."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Network

from appliance.config.hostlist import HostListError, expand, fold
from appliance.config.types import is_ipv4
from appliance.text import one_line, printable

NAME, ADDRESS, PORT, STATE, USER = 65, 254, 8, 200, 33
"""Width of the columns of ``NODES``; the reason follows them."""
NODES = (
    *("timeout", "15", "sinfo", "--all", "--noheader", "--Node"),
    f"--Format=NodeList:{NAME},NodeAddr:{ADDRESS},Port:{PORT},StateComplete:{STATE},User:{USER},Reason:200",
)
"""Prints each node of each partition: columns, because a reason may contain any separator."""
NAME_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
ADDRESS_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]*")
STATE_FORM = re.compile(r"[a-z0-9_+*~#!%$@^-]+")
NOT_RESPONDING = "not_responding"
UNREGISTERED = "unknown"
"""State of a node that has not registered since the controller started. If it had before, it becomes DOWN, as the time
of its last response is saved; a node that never has stays as it is."""
KNOWN_S = 600
"""Seconds after the controller's start by which the former is DOWN: SlurmdTimeout (300), and two rounds of queries, one
each third of it."""
EXPECTED = {
    *("drain", "drained", "draining", "maint", "maintenance", "future"),
    *("powered_down", "powering_down", "power_down", "powering_up", "power_up"),
    *("reboot", "reboot_issued", "reboot_requested"),
}
"""Parts of a state in which a node is expected not to respond."""
TAKEN_OUT = {"drain", "drained", "draining", "inval", "invalid_reg", "fail", "failing", "error"}
"""Parts of a state in which no job starts on a node that responds."""
DAEMON_REASONS = re.compile(
    r"Low |gres/|(Prolog|Epilog) error|Kill task failed|Duplicate jobid|Node unexpectedly rebooted|"
    r"batch job complete failure|reboot timed out|ResumeTimeout reached"
)
"""How reasons begin that daemons of Slurm give (node_mgr.c, job_mgr.c, agent.c, proc_req.c in src/slurmctld, req.c in
src/slurmd/slurmd). Their user is the controller's, but root once that has been restarted. Seen with Slurm 22.05.
"""
PER_NETWORK = 3
"""Number of nodes of a network to connect to: one of them may just be restarting."""
MOST_NETWORKS = 16
TOLERATED_PERCENT, MOST_TOLERATED = 5, 32
"""Of the nodes that have to respond, how many may be broken: in a large cluster, some always are."""
TIMED_OUT = 124
"""Exit status of timeout(1)."""


@dataclass(frozen=True)
class NodeState:
    """A node as Slurm's controller sees it.

    ``acknowledged``: an administrator took it out of service, or it is off or booting: it need not respond.
    ``registered``: whether it has registered with the controller, as far as that knows.
    ``taken_out``: a daemon of Slurm, and no administrator, keeps jobs from it.
    """

    name: str
    address: str
    port: int
    state: str
    reason: str
    silent: bool
    acknowledged: bool
    registered: bool = True
    completing: bool = False
    taken_out: bool = False


@dataclass(frozen=True)
class SilentNode:
    """A node that does not respond to the controller; ``registered`` as for ``NodeState``.

    ``accepts``: whether its slurmd accepts connections; None: not tested.
    """

    name: str
    state: str
    reason: str
    acknowledged: bool
    registered: bool = True
    accepts: bool | None = None


@dataclass(frozen=True)
class NodesView:
    """The controller's view of its nodes. ``problem``: why it is not known.

    ``required``: how many of them have to respond, as nobody took them out of service.
    ``refusing``: nodes that refuse the controller as an unknown user.
    ``taken_out``: nodes that respond, and from which a daemon of Slurm keeps jobs.
    """

    count: int = 0
    silent: tuple[SilentNode, ...] = ()
    problem: str = ""
    required: int = 0
    refusing: tuple[str, ...] = ()
    taken_out: tuple[SilentNode, ...] = ()

    @property
    def faulty(self) -> list[SilentNode]:
        """The nodes that have to respond and do not."""
        return [node for node in self.silent if not node.acknowledged and node.registered]

    @property
    def tolerates(self) -> bool:
        """Whether these are so few that they may just be broken."""
        return self._are_few(self.faulty)

    def _are_few(self, nodes: Sequence[SilentNode]) -> bool:
        return len(nodes) <= min(self.required * TOLERATED_PERCENT // 100, MOST_TOLERATED)

    def warnings(self, controller: str) -> tuple[list[str], list[str]]:
        """Return what is wrong, and what is not a fault of the cluster: nodes that do not respond.

        A few broken nodes are none; nodes that accept connections and do not respond are: their key or clock is wrong.
        """
        if self.problem:
            return [f"the nodes' state is not known: {self.problem}"], []
        accepting = [node for node in self.faulty if node.accepts]
        problems = []
        if self.refusing:
            problems.append(
                f"{len(self.refusing)} of {self.count} nodes refuse {controller}, and end no jobs: "
                f"{one_line(fold(self.refusing), 120)}; its user has another id there: compare `id` on both, "
                "and set slurm.user in the site file"
            )
        if accepting:
            problems.append(
                f"{self._describe(accepting, controller)}, but accept connections: compare their munge key and clock"
            )
        others = [node for node in self.faulty if not node.accepts]
        text = f"{self._describe(others, controller)}; repair them, or drain them with `scontrol update`"
        if others and not self.tolerates:
            problems.append(text)
        notes = [text] if others and self.tolerates else []
        if self.taken_out:
            names = one_line(fold(node.name for node in self.taken_out), 120)
            reason = next((node.reason for node in self.taken_out if node.reason), "no reason is recorded")
            (notes if self._are_few(self.taken_out) else problems).append(
                f"{controller} starts no jobs on {len(self.taken_out)} of {self.count} nodes: {names} ({reason}); "
                f"repair them, then `scontrol update NodeName={names} State=RESUME`"
            )
        return problems, notes

    def _describe(self, nodes: Sequence[SilentNode], controller: str) -> str:
        """Return which nodes do not respond, and the first one's reason."""
        names = one_line(fold(node.name for node in nodes), 120)
        reason = next((node.reason for node in nodes if node.reason), "no reason is recorded")
        return f"{len(nodes)} of {self.count} nodes do not respond to {controller}: {names} ({reason})"

    def missing(self, controller: str) -> str:
        """Return which nodes have never registered, as they may not be installed yet; empty if all have."""
        absent = [node.name for node in self.silent if not node.acknowledged and not node.registered]
        names = one_line(fold(absent), 120)
        return f"{len(absent)} of {self.count} nodes have not registered with {controller}: {names}" if absent else ""


@dataclass(frozen=True)
class NetworkProbe:
    """Connections from the container to nodes of one network. ``detail``: why none of them was accepted."""

    network: str
    nodes: tuple[str, ...]
    port: int
    ok: bool
    detail: str = ""


def read_refused(lines: Sequence[str]) -> set[str]:
    """Return the nodes of jobs that could not start because slurmd did not accept the controller's user.

    They stay in the state COMPLETING, as they refuse to end those jobs, too (_slurm_authorized_user in
    src/slurmd/slurmd/req.c).
    """
    nodes, refused = {}, set()
    for line in lines:
        if found := ALLOCATED.search(line):
            nodes[found[1]] = found[2]
        elif found := REFUSED.search(line):
            refused.add(nodes.get(found["batch"] or found["step"], ""))
    names: set[str] = set()
    for text in refused - {""}:
        with suppress(HostListError):
            names.add(expand(text)[0])  # the node that starts the batch script
    return names


ALLOCATED = re.compile(r"(?:sched: Allocate|_slurm_rpc_allocate_resources) JobId=(\d{1,10})\S* NodeList=(\S{1,4096}) ")
REFUSED = re.compile(
    r"Killing non-startable batch JobId=(?P<batch>\d{1,10})\S*: Invalid user id"
    r"|_job_complete: JobId=(?P<step>\d{1,10})\S* WTERMSIG 36$"
)
"""Messages of slurmctld (src/slurmctld/job_scheduler.c, agent.c, proc_req.c).

An allocation of srun or salloc whose step slurmd refused ends with signal 36; it takes those of its own SlurmUser
alone, and srun reports `Invalid job credential`. Seen with Slurm 22.05.
"""


def read_nodes(lines: Sequence[str], user: str) -> tuple[NodeState, ...]:
    """Parse the output of ``NODES``; what does not have its form is ignored. ``user``: as for ``read_inside``."""
    found: dict[str, NodeState] = {}
    for line in lines:
        node = _read_node(line, user)
        # A line that a reason forged cannot hide a fault: of several lines on a node the worst counts.
        if node and (node.name not in found or (node.silent and not node.acknowledged)):
            found[node.name] = node
    return tuple(found.values())


def _read_node(line: str, user: str) -> NodeState | None:
    columns = []
    for width in (NAME, ADDRESS, PORT, STATE, USER):
        columns.append(line[:width].strip())
        line = line[width:]
    name, address, port, text, reason_user = columns
    state = text.lower()
    valid = NAME_FORM.fullmatch(name) and ADDRESS_FORM.fullmatch(address) and re.fullmatch(r"[0-9]{1,5}", port)
    if not valid or not STATE_FORM.fullmatch(state) or not 0 < int(port) < 65536:
        return None
    parts = set(state.split("+"))
    taken_out = "down" in parts and reason_user not in (user, "", "Unknown", "none", "(null)", "N/A")
    reason = one_line(line, 200)
    return NodeState(
        name,
        address,
        int(port),
        state,
        "" if reason == "none" else reason,
        NOT_RESPONDING in parts,
        bool(parts & EXPECTED) or taken_out,
        UNREGISTERED not in parts,
        "completing" in parts,
        bool(parts & TAKEN_OUT) and (reason_user == user or DAEMON_REASONS.match(reason) is not None),
    )


def expect_nodes(nodes: tuple[NodeState, ...], age_s: float) -> tuple[NodeState, ...]:
    """Return the nodes, all of them as registered if none responds to a controller that may yet set them DOWN.

    Args:
        age_s: since when the controller runs, in seconds.
    """
    responds = any(node.registered and not node.silent and not node.acknowledged for node in nodes)
    return nodes if responds or age_s >= KNOWN_S else tuple(replace(node, registered=True) for node in nodes)


def add_probes(view: NodesView, probes: Sequence[NetworkProbe]) -> NodesView:
    """Return the view with the results of connections to nodes that do not respond, one probe for each."""
    accepts = {probe.network: probe.ok for probe in probes}
    return replace(view, silent=tuple(replace(one, accepts=accepts.get(one.name)) for one in view.silent))


def choose_targets(
    nodes: Sequence[NodeState], routes: Sequence[IPv4Network], addresses: Mapping[str, str]
) -> dict[str, list[NodeState]]:
    """Return up to ``PER_NETWORK`` nodes of each network, preferring those that respond, then those that registered.

    Args:
        routes: of the container; each leads to a network of its own.
        addresses: IPv4 address by name, of nodes whose address is not one.
    """
    networks: dict[str, list[NodeState]] = {}
    for node in nodes:
        if not node.acknowledged:
            address = addresses.get(node.address, node.address)
            networks.setdefault(_find_network(address, routes), []).append(node)
    chosen = {}
    for network, members in sorted(networks.items())[:MOST_NETWORKS]:
        registered = [node for node in members if node.registered]
        some = [node for node in registered if not node.silent] or registered or members
        spread = (some[0], some[len(some) // 2], some[-1])
        chosen[network] = list(dict.fromkeys(spread))[:PER_NETWORK]
    return chosen


def _find_network(address: str, routes: Sequence[IPv4Network]) -> str:
    if not is_ipv4(address):  # a name that only the container resolves
        return "other addresses"
    parsed = ipaddress.IPv4Address(address)
    leading = [route for route in routes if parsed in route]
    return str(max(leading, key=lambda route: route.prefixlen)) if leading else "no route"


def read_probes(targets: Mapping[str, Sequence[NodeState]], output: str) -> tuple[NetworkProbe, ...]:
    """Return the result for each network from the output of ``definitions/scripts/connect-each``."""
    results: dict[int, tuple[int, str]] = {}
    for line in output.splitlines():
        if found := re.match(r"(\d{1,4}) (\d{1,3})(?: (.*))?$", line):
            results[int(found[1])] = (int(found[2]), found[3] or "")
    probes, number = [], 0
    for network, nodes in targets.items():
        details = []
        accepted = False
        for node in nodes:
            number += 1
            status, message = results.get(number, (-1, "no result"))
            accepted = accepted or status == 0
            reason = "no answer within 2 s" if status == TIMED_OUT else message.rpartition(": ")[2]
            details.append(f"{node.name}: {printable(reason, 80)}")
        names = tuple(node.name for node in nodes)
        probes.append(NetworkProbe(network, names, nodes[0].port, accepted, "" if accepted else "; ".join(details)))
    return tuple(probes)


def judge_probes(
    probes: Sequence[NetworkProbe], nodes: Sequence[NodeState], controller: str
) -> tuple[set[str], list[str]]:
    """Return the networks that cannot be reached, and what is wrong: also with one whose nodes do not register.

    One of which no node has ever registered may not be installed yet.
    """
    registered, unreachable, problems = {node.name for node in nodes if node.registered}, set(), []
    for probe in probes:
        known = not registered.isdisjoint(probe.nodes)
        if known and not probe.ok:
            unreachable.add(probe.network)
            problems.append(
                f"no node of {probe.network} accepts connections from the services container: {probe.detail}"
            )
        elif probe.ok and not known:
            problems.append(
                f"nodes of {probe.network} accept connections, but have not registered with {controller}: "
                f"{', '.join(probe.nodes)}; compare their munge key, clock and slurm.conf"
            )
    return unreachable, problems
