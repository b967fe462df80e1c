"""``sms node power`` and ``boot``: switch many controllers in parallel, and wait for each to reach its state."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from appliance.config.hostlist import fold
from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.context import Cluster
from appliance.operations.nodes.bmc import Login, controller_of, find_login, run_parallel
from appliance.operations.nodes.controllers import check_controllers
from appliance.operations.nodes.inventory import open_inventory
from appliance.plan.vm.vm import need_vm
from appliance.progress import Progress
from appliance.provision.payloads import Node
from appliance.tools.redfish_power import read_power, set_boot, switch

WORKERS = 32
POLL_S = 2.0
IMAGES, PARAMETERS = "/sms/v1/images", "/boot/v1/bootparameters"
SLURMD = 6818
"""TCP port of slurmd: a node that accepts connections on it has booted."""


@dataclass(frozen=True)
class Outcome:
    """Result for one node: its state, or the error; ``changed``: whether anything was done."""

    name: str
    state: str = ""
    changed: bool = False
    error: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Boot:
    """Options of a boot."""

    target: str = "pxe"
    path: str = ""
    mode: str = ""
    cycle: bool = True
    wait_s: float = 0
    timeout_s: float = 120


def power(cluster: Cluster, nodes: Sequence[Node], operation: str, timeout_s: float) -> list[Outcome]:
    """Switch nodes on, off or reset them; ``status`` only queries. Returns the outcomes in the order of the nodes.

    Raises:
        Refused: no credentials, or a controller has changed and is not confirmed.
    """
    login = find_login(cluster)
    check_controllers(cluster, nodes)

    def work(node: Node) -> Outcome:
        controller = controller_of(node, login)
        if operation == "status":
            return Outcome(node["name"], read_power(controller, timeout_s=timeout_s))
        changed = switch(controller, operation, timeout_s=timeout_s)
        return Outcome(node["name"], "Off" if operation.endswith("off") else "On", changed)

    words = "query" if operation == "status" else f"power {operation}"
    return _all(nodes, work, f"{words} {_number(nodes)}", cluster.env.progress)


def boot(cluster: Cluster, nodes: Sequence[Node], options: Boot) -> list[Outcome]:
    """Set the next boot of nodes, restart them, and wait until they are up, as ``options`` says.

    Raises:
        ConfigError: options contradict each other.
        Refused: no credentials, no image for a node, no address to tell whether a node is up, or a controller has
            changed and is not confirmed.
    """
    if (options.target == "uefi") != bool(options.path):
        raise ConfigError("only target `uefi` takes a device path, and needs it", hint="--target uefi --path PATH")
    if options.wait_s and not options.cycle:
        raise ConfigError("--wait and --no-cycle exclude each other", hint="omit one of them")
    if options.wait_s and (unknown := [node["name"] for node in nodes if not node.get("address")]):
        raise Refused(
            f"{', '.join(unknown[:5])} has no address in the inventory: --wait cannot tell when it is up",
            hint=f"sms node edit {unknown[0]} --address ADDRESS; or omit --wait",
        )
    if options.cycle and options.target in ("pxe", "http"):
        _check_images(cluster, nodes)
    login = find_login(cluster)
    check_controllers(cluster, nodes)

    def work(node: Node) -> Outcome:
        return _boot(node, options, login)

    before = _reports(cluster) if options.wait_s else None
    done = _all(nodes, work, f"boot {_number(nodes)}", cluster.env.progress)
    if not options.wait_s:
        return done
    try:
        return _wait(cluster, nodes, done, before, options.wait_s)
    except KeyboardInterrupt:
        names = [one.name for one in done if not one.error]
        was = f"{fold(names)} {'was' if len(names) == 1 else 'were'} restarted; " if names else ""
        # Replaces the usual message, which says that changes are rolled back.
        raise KeyboardInterrupt(f"{was}stopped waiting") from None


def _check_images(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Raise Refused if the VM has no image for a node. Errors of the query are ignored."""
    api = open_inventory(cluster).api
    try:
        images = api.request("GET", IMAGES)["images"]
        parameters = api.request("GET", PARAMETERS)
        current = {str(one["profile"]): list(one.get("groups") or ()) for one in images if one.get("current")}
        own_kernel = any(one.get("kernel") for one in parameters)
    except (SmsError, AttributeError, LookupError, TypeError):
        return
    if own_kernel:
        return
    sites = {name: profile.groups for name, profile in need_vm(cluster.site).profiles.items()}
    for node in nodes:
        groups, named = [str(one) for one in node.get("groups") or ()], str(node.get("profile") or "")
        if named in current if named else profile_for(groups, current):
            continue
        profile = named or profile_for(groups, sites)
        raise Refused(
            f"{node['name']} cannot boot: the VM has no image of {profile or 'any profile for it'}",
            hint=f"sms image push {profile}" if profile else "sms image profiles",
        )


def profile_for(groups: Sequence[str], profiles: Mapping[str, Sequence[str]]) -> str:
    """Return the profile that the VM chooses: that of the first group with one, else the default one, else nothing.

    Args:
        profiles: the groups of each profile; the default profile has none.
    """
    by_group: dict[str, str] = {}
    for name, members in sorted(profiles.items()):
        for group in members or ("",):
            by_group.setdefault(group, name)
    return next((by_group[group] for group in (*groups, "") if group in by_group), "")


def _boot(node: Node, options: Boot, login: Login) -> Outcome:
    controller = controller_of(node, login)
    set_boot(controller, options.target, path=options.path, mode=options.mode, timeout_s=options.timeout_s)
    if options.cycle:
        switch(controller, "reset", timeout_s=options.timeout_s)
    return Outcome(node["name"], "booting" if options.cycle else "set", changed=True)


def _number(nodes: Sequence[Node]) -> str:
    return f"{len(nodes)} nodes" if len(nodes) != 1 else str(nodes[0]["name"])


def _all(nodes: Sequence[Node], work: Callable[[Node], Outcome], text: str, progress: Progress) -> list[Outcome]:
    done: dict[str, Outcome] = {}
    with progress.step(text) as step:
        for node, outcome in run_parallel(nodes, work, workers=WORKERS):
            name = node["name"]
            if isinstance(outcome, SmsError):
                outcome = Outcome(name, error=outcome.message, hint=outcome.hint)
            done[name] = outcome
            failed = sum(1 for one in done.values() if one.error)
            step.detail(f"{len(done)} of {len(nodes)}{f', {failed} failed' if failed else ''}")
    return [done[node["name"]] for node in nodes]


def _wait(
    cluster: Cluster,
    nodes: Sequence[Node],
    done: Sequence[Outcome],
    before: Mapping[str, float] | None,
    wait_s: float,
) -> list[Outcome]:
    """Wait until slurmd of each node answers, or the node has reported its files to the VM since the restart."""
    deadline = cluster.env.clock.monotonic() + wait_s
    outcomes = {one.name: one for one in done}
    left = {node["name"]: str(node["address"]) for node in nodes if not outcomes[node["name"]].error}
    with cluster.env.progress.step(
        f"wait until {_number(nodes)} are up" if len(nodes) != 1 else f"wait for {_number(nodes)}"
    ) as step:
        total = len(left)
        while left and cluster.env.clock.monotonic() < deadline:
            reported = _reported_since(cluster, before)
            names = list(left)
            answers = dict(run_parallel(names, lambda name: _answers(left[name]), workers=WORKERS))
            for name in names:
                if name in reported or answers[name] is True:
                    outcomes[name] = Outcome(name, "up", changed=True)
                    del left[name]
            step.detail(f"{total - len(left)} of {total} up")
            if left:
                cluster.env.clock.sleep(POLL_S)
    for name in left:
        outcomes[name] = Outcome(
            name,
            changed=True,
            error=f"is not up after {wait_s:g} s",
            hint=f"look at its console; sms node show {name}",
        )
    return [outcomes[node["name"]] for node in nodes]


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, SLURMD), timeout=1).close()
    except OSError:
        return False
    return True


def _reports(cluster: Cluster) -> dict[str, float] | None:
    """Return the time of each node's last report of its files; None if the VM does not answer."""
    try:
        reports = open_inventory(cluster).reports()
    except SmsError:
        return None
    return {str(one.get("client")): float(at) for one in reports if isinstance(at := one.get("at"), int | float)}


def _reported_since(cluster: Cluster, before: Mapping[str, float] | None) -> set[str]:
    """Return the nodes that have reported since ``before``; none if the VM did not answer the first query."""
    now = _reports(cluster) if before is not None else None
    return {name for name, at in (now or {}).items() if at > (before or {}).get(name, 0)}
