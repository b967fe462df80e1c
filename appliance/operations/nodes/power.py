"""``sms node power`` and ``boot``: many controllers at once, each waited for until it is so."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from appliance.config.hostlist import fold
from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.context import Cluster
from appliance.operations.nodes.bmc import Login, at_once, controller_of, find_login
from appliance.operations.nodes.inventory import Node, known_nodes, open_inventory, pick
from appliance.operations.vm.client import need_vm
from appliance.progress import Progress, Step
from appliance.tools.redfish_power import read_power, set_boot, switch

WORKERS = 32
LOOK_S = 2.0
IMAGES, PARAMETERS = "/sms/v1/images", "/boot/v1/bootparameters"
SLURMD = 6818
"""Where slurmd listens: whoever answers there has booted."""


@dataclass(frozen=True)
class Outcome:
    """What came of one node: its state, or what went wrong; ``changed`` says whether anything was done."""

    name: str
    state: str = ""
    changed: bool = False
    error: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Boot:
    """How nodes are to boot."""

    target: str = "pxe"
    path: str = ""
    mode: str = ""
    cycle: bool = True
    wait_s: float = 0
    timeout_s: float = 120


def choose(cluster: Cluster, words: Sequence[str], progress: Progress) -> list[Node]:
    """The nodes that are meant, of the inventory or of what was kept of it.

    Raises:
        ConfigError, Refused: as `pick` and `known_nodes` say.
    """
    return pick(known_nodes(cluster, progress), words)


def power(cluster: Cluster, nodes: Sequence[Node], wish: str, timeout_s: float, progress: Progress) -> list[Outcome]:
    """Have them all as ``wish`` says (``status`` asks only); the outcomes in the nodes' order.

    Raises:
        Refused: no credentials.
    """
    login = find_login(cluster)

    def work(node: Node) -> Outcome:
        controller = controller_of(node, login)
        if wish == "status":
            return Outcome(node["name"], read_power(controller, timeout_s=timeout_s))
        changed = switch(controller, wish, timeout_s=timeout_s)
        return Outcome(node["name"], "Off" if wish.endswith("off") else "On", changed)

    words = "ask" if wish == "status" else f"power {wish} of"
    return _all(nodes, work, f"{words} {_number(nodes)}", progress)


def boot(cluster: Cluster, nodes: Sequence[Node], how: Boot, progress: Progress) -> list[Outcome]:
    """Have their next boot lead where ``how`` says, restart them, and wait until they are up if it says so.

    Raises:
        ConfigError: it cannot be meant so.
        Refused: no credentials, or nothing to know by that a node is up.
    """
    if (how.target == "uefi") != bool(how.path):
        raise ConfigError("a boot from `uefi` and a device path go together", hint="--target uefi --path PATH")
    if how.wait_s and not how.cycle:
        raise ConfigError("nothing boots that could be waited for", hint="without --no-cycle, or without --wait")
    if how.wait_s and (unknown := [node["name"] for node in nodes if not node.get("address")]):
        raise Refused(
            f"{', '.join(unknown[:5])} has no address in the inventory: nobody would know when it is up",
            hint=f"sms node edit {unknown[0]} --address ADDRESS; or without --wait",
        )
    if how.cycle and how.target in ("pxe", "http"):
        _check_images(cluster, nodes)
    login = find_login(cluster)

    def work(node: Node) -> Outcome:
        return _boot(node, how, login)

    before = _reports(cluster) if how.wait_s else None
    done = _all(nodes, work, f"boot {_number(nodes)}", progress)
    if not how.wait_s:
        return done
    try:
        return _wait(cluster, nodes, done, before, how.wait_s, progress)
    except KeyboardInterrupt:
        names = [one.name for one in done if not one.error]
        was = f"{fold(names)} {'was' if len(names) == 1 else 'were'} restarted; " if names else ""
        # In place of the words of those whose changes are undone.
        raise KeyboardInterrupt(f"{was}nobody waits any more") from None


def _check_images(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Refuse where the VM has nothing that a node would boot; what cannot be asked is no reason."""
    api = open_inventory(cluster).api
    try:
        images = api.ask("GET", IMAGES)["images"]
        parameters = api.ask("GET", PARAMETERS)
        current = {str(one["profile"]): list(one.get("groups") or ()) for one in images if one.get("current")}
        own_kernel = any(one.get("kernel") for one in parameters)
    except (SmsError, AttributeError, LookupError, TypeError):
        return
    if own_kernel:
        return
    sites = {name: profile.groups for name, profile in need_vm(cluster).profiles.items()}
    for node in nodes:
        groups, named = [str(one) for one in node.get("groups") or ()], str(node.get("profile") or "")
        if named in current if named else profile_for(groups, current):
            continue
        profile = named or profile_for(groups, sites)
        raise Refused(
            f"{node['name']} would boot nothing: the VM has no image of {profile or 'any profile that is for it'}",
            hint=f"sms image push {profile}" if profile else "sms image profiles",
        )


def profile_for(groups: Sequence[str], profiles: Mapping[str, Sequence[str]]) -> str:
    """The profile of the first group that has one, else that which is for all others, else nothing; as the VM chooses.

    Args:
        profiles: the groups of each; none for all others.
    """
    by_group: dict[str, str] = {}
    for name, wanted in sorted(profiles.items()):
        for group in wanted or ("",):
            by_group.setdefault(group, name)
    return next((by_group[group] for group in (*groups, "") if group in by_group), "")


def _boot(node: Node, how: Boot, login: Login) -> Outcome:
    controller = controller_of(node, login)
    set_boot(controller, how.target, path=how.path, mode=how.mode, timeout_s=how.timeout_s)
    if how.cycle:
        switch(controller, "reset", timeout_s=how.timeout_s)
    return Outcome(node["name"], "booting" if how.cycle else "set", changed=True)


def _number(nodes: Sequence[Node]) -> str:
    return f"{len(nodes)} nodes" if len(nodes) != 1 else str(nodes[0]["name"])


def _all(
    nodes: Sequence[Node], work: Callable[[Node], Outcome], text: str, progress: Progress, workers: int = WORKERS
) -> list[Outcome]:
    done: dict[str, Outcome] = {}
    with progress.step(text) as step:
        for node, outcome in at_once(nodes, work, workers=workers):
            name = node["name"]
            if isinstance(outcome, SmsError):
                outcome = Outcome(name, error=outcome.message, hint=outcome.hint)
            done[name] = outcome
            _tell(step, list(done.values()), len(nodes))
    return [done[node["name"]] for node in nodes]


def _tell(step: Step, done: Sequence[Outcome], total: int) -> None:
    failed = sum(1 for one in done if one.error)
    step.detail(f"{len(done)} of {total}{f', {failed} failed' if failed else ''}")


def _wait(
    cluster: Cluster,
    nodes: Sequence[Node],
    done: Sequence[Outcome],
    before: Mapping[str, float] | None,
    wait_s: float,
    progress: Progress,
) -> list[Outcome]:
    """Wait until slurmd of each answers, or it has told the VM of its files again: it has its certificate then."""
    deadline = time.monotonic() + wait_s
    outcomes = {one.name: one for one in done}
    left = {node["name"]: str(node["address"]) for node in nodes if not outcomes[node["name"]].error}
    with progress.step(
        f"wait until {_number(nodes)} are up" if len(nodes) != 1 else f"wait for {_number(nodes)}"
    ) as step:
        total = len(left)
        while left and time.monotonic() < deadline:
            told = _told_since(cluster, before)
            names = list(left)
            answers = dict(at_once(names, lambda name: _answers(left[name]), workers=WORKERS))
            for name in names:
                if name in told or answers[name] is True:
                    outcomes[name] = Outcome(name, "up", changed=True)
                    del left[name]
            step.detail(f"{total - len(left)} of {total} up")
            if left:
                time.sleep(LOOK_S)
    for name in left:
        outcomes[name] = Outcome(
            name,
            changed=True,
            error=f"is not up after {wait_s:g} s",
            hint=f"its console says why; sms node show {name}",
        )
    return [outcomes[node["name"]] for node in nodes]


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, SLURMD), timeout=1).close()
    except OSError:
        return False
    return True


def _reports(cluster: Cluster) -> dict[str, float] | None:
    """When each node has last told the VM which files it has; None where the VM does not say."""
    try:
        said = open_inventory(cluster).reports()
    except SmsError:
        return None
    return {str(one.get("client")): float(one["at"]) for one in said if isinstance(one.get("at"), int | float)}


def _told_since(cluster: Cluster, before: Mapping[str, float] | None) -> set[str]:
    """Who has told the VM of its files since; nobody where the VM is off, and asking takes its time."""
    now = _reports(cluster) if before is not None else None
    return {name for name, at in (now or {}).items() if at > (before or {}).get(name, 0)}


def as_dicts(done: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For scripts."""
    return [asdict(one) for one in done]
