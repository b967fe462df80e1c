"""A new munge key: laid beside the old one on all nodes, then swapped there and in the container in one step.

munged has one key: until a node has the new one, it refuses the controller, and is refused (munge(7)).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from appliance.config.hostlist import fold
from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.nodes.files import (
    announce,
    put_master,
    read_reports,
    remove_master,
    wait_for_clients,
)
from appliance.operations.services.present import QUERY_S, query_present
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.files import MUNGE_KEY, MUNGE_USER, Master
from appliance.plan.services.effect import Fault
from appliance.text import one_line
from appliance.tools.provision import Api

NEXT = "/var/lib/munge/munge.key.next"
"""The key of nodes beside the present one, in a folder that no daemon watches. The next push removes what a killed run
has left."""
TAKE_S = 30
"""Seconds that nodes may take to fetch a file of which they are notified."""
REASON = "sms: has the munge key of before"
CHANGES = "the munge key changes: the controller and a node with another key refuse each other"
BY_HAND = (
    "clush -w {nodes} 'install -o munge -g munge -m 0400 /dev/stdin {path} && systemctl restart munge' <KEYFILE\n  "
    "in the same minute as `sms apply --force`"
)
Read = Callable[[str], bytes]


def find_key_faults(cluster: Cluster, host: Host, nodes: Set[str], api: Api | None, *, switch: bool) -> Iterator[Fault]:
    """Yield why a changed key does not reach all nodes together with the running container.

    Args:
        api: of the VM, if there is one.
        nodes: those of slurm.conf; the ones that take no job now do not count, if the controller answers.
        switch: a second instance is started.
    """
    if switch:
        yield Fault(f"{CHANGES}; a second instance cannot swap it", "apply the new key alone first, then the rest")
        return
    by_hand = BY_HAND.format(nodes=one_line(fold(sorted(nodes)), 120), path=MUNGE_KEY)
    if not api:
        yield Fault(f"{CHANGES}, and there is no provisioning VM that gives it to nodes", by_hand)
        return
    try:
        reports = read_reports(cluster, api)
    except SmsError as error:
        yield Fault(f"{CHANGES}, and whom the VM reaches is not known: {one_line(error.message, 120)}", by_hand)
        return
    reached = {one.client for one in reports if one.state != "silent"}
    if missing := _find_used(cluster, host, nodes) - reached:
        yield _unreached(missing)


def judge_key(read: Read, after: bytes) -> Iterator[Fault]:
    """Yield that a start would give the controller another key than nodes have; ``read``: of the overlay or inside."""
    before = read(MUNGE_KEY)
    if before and after and before != after:
        yield Fault(CHANGES, "`sms apply` of the running container, with the new key alone, swaps it on nodes as well")


def _unreached(nodes: Set[str]) -> Fault:
    names = one_line(fold(sorted(nodes)), 120)
    return Fault(
        f"{CHANGES}, and the VM does not reach nodes in use ({len(nodes)}): {names}",
        f"repair or drain {names}, which take the new key when they boot; --force drains them",
    )


def _find_used(cluster: Cluster, host: Host, nodes: Set[str]) -> Set[str]:
    """Return the nodes that take jobs; all if the controller does not answer."""
    try:
        return query_present(cluster, host).usable
    except CommandError:
        return nodes


def read_key(cluster: Cluster, host: Host) -> bytes:
    """Return the key of the running container; empty if it has none. It is a secret: keep it in memory only."""
    argv = inside_argv(cluster.site, cluster.services, "cat", "--", MUNGE_KEY)
    return host.run(*argv, ok=None, timeout=QUERY_S).stdout


@dataclass
class KeySwap:
    """The swap of a key; each step may be repeated after a killed run.

    ``nodes``: those of slurm.conf. ``push``: the number of the one that swaps it.
    """

    cluster: Cluster
    host: Host
    key: bytes
    nodes: Set[str]
    api: Api
    push: int = 0

    def stage(self, accepted: Set[str] | None) -> None:
        """Lay the key beside the present one on the nodes.

        Args:
            accepted: what the change may cost, of ``Judged.costs``; None: anything.

        Raises:
            Refused: nodes in use did not take it.
            SmsError: the VM does not answer.
        """
        put_master(self.api, _make_master(NEXT, self.key))
        late = self._wait(NEXT, announce(self.api))
        if late and accepted is not None and (fault := _unreached(late)).why not in accepted:
            remove_master(self.api, NEXT)
            raise Refused(f"apply is refused\n  {fault.why}", hint=fault.hint)

    def begin(self) -> None:
        """Let all nodes take it; they do within a second or two, so the container's munged is to restart now."""
        put_master(self.api, _make_master(MUNGE_KEY, self.key))
        self.push = announce(self.api)

    def finish(self) -> tuple[str, ...]:
        """Drain nodes that did not take it; return them, a text for each."""
        try:
            late = fold(sorted(self._wait(MUNGE_KEY, self.push)))
            remove_master(self.api, NEXT)
            announce(self.api)
        except SmsError as error:  # the container has it, and so may all nodes: nothing is taken back
            return (f"which nodes have the new munge key is not known: {error.message}",)
        if not late:
            return ()
        words = ("scontrol", "update", f"NodeName={late}", "State=DRAIN", f"Reason={REASON}")
        self.host.run(*inside_argv(self.cluster.site, self.cluster.services, *words), ok=None, timeout=QUERY_S)
        return (f"{late}: drained, as the munge key there is that of before",)

    def take_back(self) -> None:
        """Give nodes the key that the container has again."""
        try:
            if key := read_key(self.cluster, self.host):
                put_master(self.api, _make_master(MUNGE_KEY, key))
            remove_master(self.api, NEXT)
            announce(self.api)
        except SmsError as error:
            self.cluster.env.progress.warn(
                f"nodes may have the new munge key, and the container that of before: {error.message}; "
                "the next `sms apply` swaps it"
            )

    def _wait(self, path: str, push: int) -> Set[str]:
        """Return the nodes in use that do not report the key at this path after the push."""
        digest = hashlib.sha256(self.key).hexdigest()
        reports = wait_for_clients(self.cluster, self.api, push, TAKE_S)
        have = {one.client for one in reports if path in one.has and one.has[path]["sha256"] == digest}
        return _find_used(self.cluster, self.host, self.nodes) - have


def _make_master(path: str, key: bytes) -> Master:
    return Master(path, key, "0400", MUNGE_USER, MUNGE_USER)
