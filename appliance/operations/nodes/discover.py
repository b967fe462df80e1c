"""``sms node discover``: scan for controllers, read them, add their systems to the inventory."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from ipaddress import AddressValueError, IPv4Address
from urllib.parse import urlsplit

from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.context import Cluster
from appliance.operations.nodes.bmc import Login, find_login, run_parallel
from appliance.operations.nodes.inventory import (
    Inventory,
    node_network,
    open_inventory,
    read_cache,
    reserved_addresses,
    site_addresses,
)
from appliance.plan.nodes.discover import CHANGED, CONFLICT, DIFFERS, NEW, Decision, Found, decide
from appliance.plan.nodes.nodes import GROUP, XNAME
from appliance.plan.nodes.scan import check_pattern, find_targets, free_addresses, free_names
from appliance.plan.vm.vm import need_vm
from appliance.progress import Progress
from appliance.provision.payloads import Endpoint, Node
from appliance.tools.provision import VmUnreachable
from appliance.tools.redfish import Denied, NoRedfish, Silent, Untrusted, connect
from appliance.tools.redfish_read import Bmc, System, read_bmc

KINDS: tuple[tuple[type[SmsError], str], ...] = (
    (Denied, "wrong credentials"),
    (Untrusted, "certificate"),
    (Silent, "hangs"),
    (NoRedfish, "no Redfish"),
)
BATCH = 200
"""Number of new nodes in one request."""
HARMLESS = ("no Redfish",)
"""Not a problem: a switch or a printer in the range is not a broken controller."""


@dataclass(frozen=True)
class Options:
    """Options of a discovery."""

    port: int = 443
    pattern: str = ""
    first: str = ""
    groups: tuple[str, ...] = ()
    update: bool = False
    dry_run: bool = False
    workers: int = 32
    connect_s: float = 2
    timeout_s: float = 60


@dataclass(frozen=True)
class Broken:
    """A target that accepts connections but could not be read, and why."""

    target: str
    why: str
    message: str
    hint: str = ""


@dataclass
class Report:
    """Result of a discovery."""

    scanned: int = 0
    silent: list[str] = field(default_factory=list)
    bmcs: dict[str, Bmc] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    power: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False
    addresses: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What an administrator has to resolve."""
        broken = [f"{one.target}: {one.why}: {one.message}" for one in self.broken if one.why not in HARMLESS]
        failed = [f"{name}: rejected by the inventory: {why}" for name, why in self.failed.items()]
        conflicts = [
            f"{one.name or one.found.bmc}: {difference}"
            for one in self.decisions
            if one.what == CONFLICT
            for difference in one.differences
        ]
        return [*broken, *failed, *conflicts]

    def counts(self) -> dict[str, int]:
        """Return the number of systems by decision."""
        return dict(Counter(one.what for one in self.decisions))

    def as_dict(self) -> dict[str, object]:
        """Return the JSON document."""
        decisions = [{**asdict(one), "power": self.power.get(one.found.bmc, "")} for one in self.decisions]
        return {
            "looked": self.scanned,
            "silent": len(self.silent),
            "controllers": {target: asdict(bmc) for target, bmc in self.bmcs.items()},
            "broken": [asdict(one) for one in self.broken],
            "nodes": decisions,
            "failed": self.failed,
            "dry_run": self.dry_run,
            "problems": self.problems,
        }


def discover(cluster: Cluster, ranges: Sequence[str], options: Options) -> Report:
    """Scan the ranges, read the controllers found, decide what changes, and write it to the inventory.

    Raises:
        ConfigError: a range, a pattern or an address is invalid, or the site has no VM.
        Refused: no credentials; nothing was scanned.
        VmUnreachable: the VM does not answer.
    """
    targets = find_targets(ranges)
    _check_names(targets)
    pattern = check_pattern(options.pattern or need_vm(cluster.site).node_names)
    _check(cluster, options)
    login = find_login(cluster)
    inventory = open_inventory(cluster)
    nodes = _nodes(cluster, inventory, options)
    addresses = {str(node["name"]): str(node.get("address") or "") for node in nodes}
    report = Report(addresses=addresses, scanned=len(targets), dry_run=options.dry_run)
    _scan(report, targets, login, options, cluster.env.progress)
    found = [one for target in targets if target in report.bmcs for one in _systems(report, target)]
    report.decisions = list(
        decide(
            found,
            nodes,
            name=_name_source(pattern, nodes),
            address=_address_source(cluster, nodes, options.first),
            groups=options.groups,
            update=options.update,
        )
    )
    if not options.dry_run:
        _write(report, inventory, cluster.env.progress)
    return report


def _check_names(targets: Sequence[str]) -> None:
    """Check that at least one name resolves: others of a range may be of machines that do not exist yet.

    Raises:
        ConfigError: no name resolves; names the first of them.
    """
    names = [target for target in targets if not re.fullmatch(r"[0-9.]+", target)]
    if not names or len(names) < len(targets):
        return
    unknown = []
    for name, known in run_parallel(names, _is_host, workers=32):
        if known is True:
            return
        unknown.append(name)
    raise ConfigError(
        "; ".join(f"{name}: no such host" for name in sorted(unknown)[:5]), hint="give addresses or host names"
    )


def _is_host(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def _check(cluster: Cluster, options: Options) -> None:
    for group in options.groups:
        if not GROUP.fullmatch(group):
            raise ConfigError(f"{group[:60]!r} is not a group name", hint="use letters, digits, dots and dashes")
    if options.first:
        try:
            inside = IPv4Address(options.first) in node_network(cluster)
        except AddressValueError:
            inside = False
        if not inside:
            raise ConfigError(
                f"{options.first[:60]!r} is not an address in {node_network(cluster)}", hint="--first 10.0.1.1"
            )


def _nodes(cluster: Cluster, inventory: Inventory, options: Options) -> list[Node]:
    try:
        return inventory.nodes()
    except VmUnreachable:
        if not options.dry_run:
            raise
    try:
        nodes, _ = read_cache(cluster)
    except Refused:
        nodes = []
    cluster.env.progress.report(f"note: the provisioning VM does not answer; compared with {len(nodes)} cached nodes")
    return nodes


def _scan(report: Report, targets: Sequence[str], login: Login, options: Options, progress: Progress) -> None:
    """Read all targets in parallel, each with its own timeout."""
    with progress.step(f"scan {len(targets)} address{'es' * (len(targets) != 1)}") as step:

        def probe(target: str) -> Bmc | None:
            return _probe(target, login, options)

        for done, (target, outcome) in enumerate(run_parallel(targets, probe, workers=options.workers), 1):
            if outcome is None:
                report.silent.append(target)
            elif isinstance(outcome, SmsError):
                why = next((words for kind, words in KINDS if isinstance(outcome, kind)), "broken")
                report.broken.append(Broken(target, why, outcome.message, outcome.hint))
            else:
                report.bmcs[target] = outcome
            words = f"{len(report.bmcs)} controllers, {len(report.broken)} broken"
            step.detail(f"{done} of {len(targets)}: {words}, {len(report.silent)} without an answer")
    order = {target: number for number, target in enumerate(targets)}
    report.broken.sort(key=lambda one: order[one.target])
    report.bmcs = dict(sorted(report.bmcs.items(), key=lambda one: order[one[0]]))


def _probe(target: str, login: Login, options: Options) -> Bmc | None:
    """Read the controller at a target; None if nothing listens there.

    Raises:
        SmsError: something listens, but it cannot be read.
    """
    try:
        socket.create_connection((target, options.port), timeout=options.connect_s).close()
    except (OSError, UnicodeError):
        return None
    port = "" if options.port == 443 else f":{options.port}"
    with connect(login.controller(f"https://{target}{port}"), timeout_s=options.timeout_s) as client:
        try:
            bmc = read_bmc(client)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Invalid data of one controller must not abort the others, whatever it breaks in our code.
            raise SmsError(f"{target}: its answers are invalid: {type(error).__name__}: {str(error)[:100]}") from error
    if not bmc.systems:
        raise SmsError(f"{target}: no system could be read: {'; '.join(bmc.notes)[:300] or 'it has none'}")
    return bmc


def _systems(report: Report, target: str) -> list[Found]:
    """Return the systems of a controller."""
    bmc = report.bmcs[target]
    found = []
    for number, system in enumerate(bmc.systems):
        url = f"{bmc.url}{system.path}"
        report.power[url] = system.power
        xname = f"{target}n{number}"
        found.append(Found(url, system.macs, xname if XNAME.fullmatch(xname) else "", facts(bmc, system)))
    return found


def facts(bmc: Bmc, system: System) -> dict[str, object]:
    """Return the hardware facts of a system, without empty ones."""
    values: Mapping[str, object] = {
        "manufacturer": system.manufacturer,
        "model": system.model,
        "serial": system.serial,
        "uuid": system.uuid,
        "bios": system.bios,
        "memory_gib": system.memory_gib,
        "processors": system.processors,
        "processor_model": system.processor_model,
        "nics": [{"mac": nic.mac, "name": nic.name} for nic in system.nics],
        "bmc_model": bmc.model,
        "bmc_firmware": bmc.firmware,
        "bmc_mac": bmc.mac,
    }
    return {key: value for key, value in values.items() if value}


def _name_source(pattern: str, nodes: Sequence[Node]) -> Callable[[], str]:
    names = free_names(pattern, {str(node["name"]) for node in nodes})
    return lambda: next(names)


def _address_source(cluster: Cluster, nodes: Sequence[Node], first: str) -> Callable[[str], str]:
    """Return a function that chooses a new node's address: that of `slurm.nodes`, or the next from ``first`` on."""
    named = site_addresses(cluster)
    taken = {str(node["address"]) for node in nodes if node.get("address")} | set(reserved_addresses(cluster))
    network = node_network(cluster)
    following = free_addresses(IPv4Address(first), network, taken | set(named.values())) if first else iter(())

    def next_address(name: str) -> str:
        address = named.get(name, "")
        return address if address and address not in taken else next(following, "")

    return next_address


def _write(report: Report, inventory: Inventory, progress: Progress) -> None:
    """Write the decisions to the inventory; rejected nodes are reported, the others are written.

    Raises:
        VmUnreachable: the VM does not answer any more.
    """
    changes = [one for one in report.decisions if one.change and one.what in (NEW, CHANGED, DIFFERS)]
    if changes:
        with progress.step(f"write {len(changes)} node{'s' * (len(changes) != 1)} to the inventory") as step:
            left = _write_new(inventory, [one for one in changes if one.what == NEW])
            left += [one for one in changes if one.what != NEW]
            for number, one in enumerate(left, 1 + len(changes) - len(left)):
                step.detail(f"{number} of {len(changes)}")
                send = inventory.put if one.what == NEW else inventory.patch
                _try(report, one.name, partial(send, one.name, one.change))
    if endpoints := _endpoints(report, inventory.nodes()):
        _try(report, "the controllers", partial(inventory.import_document, {"endpoints": endpoints}))


def _write_new(inventory: Inventory, new: Sequence[Decision]) -> list[Decision]:
    """Create many nodes per request, which is fast. Returns those of failed requests: create them one by one."""
    left: list[Decision] = []
    for at in range(0, len(new), BATCH):
        some = new[at : at + BATCH]
        try:
            inventory.import_document({"nodes": [{"name": one.name, **one.change} for one in some]})
        except VmUnreachable:
            raise
        except SmsError:
            left += some
    return left


def _try(report: Report, name: str, act: Callable[[], object]) -> None:
    try:
        act()
    except VmUnreachable:
        raise
    except SmsError as error:
        report.failed[name] = error.message


def _endpoints(report: Report, nodes: Sequence[Node]) -> list[Endpoint]:
    """Return the controllers as SMD's clients expect them: with the xname of their node without its last part."""
    by_target = {_target(str(node.get("bmc") or "")): node for node in nodes if node.get("xname")}
    found: dict[str, Endpoint] = {}
    for bmc in report.bmcs.values():
        node = by_target.get(_target(bmc.url))
        if node is None:
            continue
        host = urlsplit(bmc.url).hostname or ""
        details = {"redfish": bmc.redfish, "uuid": bmc.uuid, "model": bmc.model, "firmware": bmc.firmware}
        xname = str(node["xname"]).rpartition("n")[0]
        found[xname] = {
            "id": xname,
            "fqdn": host,
            "address": host if re.fullmatch(r"[0-9.]+", host) else "",
            "mac": bmc.mac,
            "details": {key: value for key, value in details.items() if value},
        }
    return list(found.values())


def _target(url: str) -> str:
    return urlsplit(url).netloc
