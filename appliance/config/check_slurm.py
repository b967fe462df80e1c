"""Validation rules of the section ``slurm`` of the site file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from appliance.config.document import Place
from appliance.config.finding import Finding
from appliance.config.hostlist import MAX_HOSTS, HostListError, expand
from appliance.config.model import TOPOLOGY, Site, SlurmNode, SlurmPartition, line_settings
from appliance.text import nearest

OWNED: dict[str, str] = {
    "ClusterName": "it is set from the site's `cluster`",
    "SlurmctldHost": "it is set from the site's `hostname`",
    "ControlMachine": "it is set from the site's `hostname`",
    "ControlAddr": "it is set from the address in networks.provisioning",
    "AuthType": "nodes and container authenticate with munge",
    "BackupController": "other admin hosts take over by `sms failover`",
    "BackupAddr": "other admin hosts take over by `sms failover`",
    "SlurmUser": "the container runs slurmctld as slurm, and the state is that user's",
    "SlurmctldPort": "the probe, the firewall and the engines use 6817",
    "SlurmctldPidFile": "the supervisor of the container reads it",
    "SlurmctldLogFile": "the supervisor keeps what slurmctld prints, within a limit, and `sms status` reads that",
    "SlurmSchedLogFile": "it would grow in the overlay without a limit; `sms logs slurmctld` has what is scheduled",
    "StateSaveLocation": "the state must be in the overlay, which migration and snapshots copy",
}
"""Settings of slurm.conf that sms sets itself, and why a site cannot set them."""

SET_BY_KEY: dict[str, str] = {
    "nodename": "name",
    "nodeaddr": "address",
    "cpus": "cpus",
    "procs": "cpus",
    "realmemory": "memory_mb",
    "partitionname": "name",
    "nodes": "nodes",
    "default": "default",
    "maxtime": "max_time",
}
"""Settings of NodeName and PartitionName lines that keys of the site file set, in lower case."""


@dataclass
class _Nodes:
    """Names and addresses of the site's nodes, collected during validation."""

    names: set[str] = field(default_factory=set)
    addresses: set[str] = field(default_factory=set)


def check_slurm(site: Site, *, scheduled: bool) -> Iterator[Finding]:
    """Yield a finding for every rule that nodes, partitions and extra lines break.

    Args:
        scheduled: whether a service of the site schedules jobs.
    """
    nodes = _Nodes()
    for index, entry in enumerate(site.slurm.nodes):
        yield from _node(site, entry, ("slurm", "nodes", index), nodes)
        if len(nodes.names) > MAX_HOSTS:
            yield Finding(("slurm", "nodes", index), f"there are more than {MAX_HOSTS} nodes", "this is Slurm's limit")
            return
    yield from _extra(site, nodes)
    yield from _partitions(site, nodes)
    if len(nodes.names) > site.slurm.max_nodes:
        yield Finding(
            ("slurm", "max_nodes"),
            f"{site.slurm.max_nodes} is less than the {len(nodes.names)} nodes named",
            f"use {len(nodes.names)} or more; slurmctld does not start otherwise",
        )
    if scheduled:
        yield from _scheduler(site, nodes)


def _node(site: Site, entry: SlurmNode, place: Place, nodes: _Nodes) -> Iterator[Finding]:
    try:
        names = expand(entry.name)
    except HostListError as error:
        yield Finding((*place, "name"), f"{entry.name} {error}", "write it as node[001-450]")
        return
    if again := next((name for name in names if name in nodes.names), "") or _repeated(names):
        yield Finding((*place, "name"), f"{again} is listed twice", "list every node once")
    nodes.names.update(names)
    yield from _own_names(site, names, (*place, "name"))
    yield from _line(entry, place)
    yield from _cpus(entry, place)
    if entry.address is None:
        return
    try:
        addresses = expand(entry.address)
    except HostListError as error:
        yield Finding((*place, "address"), f"{entry.address} {error}", "write it as 10.0.1.[1-450]")
        return
    if len(addresses) != len(names):
        yield Finding(
            (*place, "address"),
            f"expands to {len(addresses)} addresses, but {entry.name} to {len(names)} names",
            "give one address for each name",
        )
    if again := next((each for each in addresses if each in nodes.addresses), "") or _repeated(addresses):
        yield Finding((*place, "address"), f"{again} is listed twice", "every node needs its own address")
    nodes.addresses.update(addresses)
    # One wrong range gives hundreds of wrong addresses: report only the first.
    if problem := next(filter(None, (_node_address_problem(site, each) for each in addresses)), None):
        yield Finding((*place, "address"), *problem)


def _own_names(site: Site, names: Sequence[str], place: Place) -> Iterator[Finding]:
    """Yield a finding for a node with the name of another machine: the controller would find that one."""
    taken = {"localhost": "every machine itself", site.hostname: "the services container"}
    for name in names:
        if owner := taken.get(name):
            yield Finding(place, f"{name} is the name of {owner}", "a node needs a name of its own")


def _line(entry: SlurmNode | SlurmPartition, place: Place) -> Iterator[Finding]:
    """Yield settings that an entry makes twice: Slurm would take the last, or refuse the line."""
    for key, count in Counter(entry.settings).items():
        own = SET_BY_KEY.get(key)
        if own in type(entry).model_fields and not (key in ("nodeaddr", "procs") and getattr(entry, own) is None):
            yield Finding((*place, "extra"), f"{key} is set by `{own}`", f"remove it, and set `{own}:` instead")
        elif count > 1:
            yield Finding((*place, "extra"), f"{key} is set {count} times", "keep one of them")


def _cpus(entry: SlurmNode, place: Place) -> Iterator[Finding]:
    """Yield a finding if CPUs are not as many as sockets, cores or threads: slurmctld would not take them."""
    given = {key: int(value) for key, value in line_settings(entry.extra or "") if value.isascii() and value.isdigit()}
    boards, cores, threads = (given.get(key, 1) for key in ("boards", "corespersocket", "threadspercore"))
    sockets = given.get("sockets", boards * given.get("socketsperboard", 1))
    if entry.cpus is None or not given.keys() & {*TOPOLOGY}:
        return
    if "sockets" in given or "socketsperboard" in given:
        good = {sockets, sockets * cores, sockets * cores * threads}
    else:  # there are as many sockets as the CPUs fill
        good = {entry.cpus} if entry.cpus % (cores * threads) == 0 else {cores * threads}
    if entry.cpus not in good:
        numbers = " or ".join(map(str, sorted(good)))
        yield Finding(
            (*place, "cpus"), f"{entry.cpus} does not fit the topology in `extra`", f"remove it, or use {numbers}"
        )


def _node_address_problem(site: Site, text: str) -> tuple[str, str] | None:
    """Return message and hint if a node cannot have this address; host names are not checked."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+){3}", text):
        return None
    try:
        address = IPv4Address(text)
    except ValueError:
        return f"{text} is not an IPv4 address", "use four numbers of at most 255, without leading zeros"
    network = next((each for each in site.node_networks if address in each), None)
    if network is None:
        routed = " or behind its routers" if site.networks.provisioning.routes else ""
        return (
            f"{text} is not in the provisioning network {site.provisioning_network}{routed}",
            "is the prefix right? Networks behind a router are listed in networks.provisioning.routes",
        )
    if any(address == route.gateway for route in site.networks.provisioning.routes):
        return f"{text} is the address of a router", "exclude it from the range"
    if address == site.networks.provisioning.address.ip:
        return f"{text} is the container's address", "exclude it from the range"
    if network.prefixlen < 31 and address in (network.network_address, network.broadcast_address):
        return f"{text} is the network or broadcast address of {network}", "exclude it from the range"
    return None


def _partitions(site: Site, nodes: _Nodes) -> Iterator[Finding]:
    names: set[str] = set()
    default = ""
    for index, partition in enumerate(site.slurm.partitions):
        place: Place = ("slurm", "partitions", index)
        if partition.name.upper() == "DEFAULT":
            yield Finding((*place, "name"), "DEFAULT is Slurm's line of defaults, not a partition", "rename it")
        if partition.name in names:
            yield Finding((*place, "name"), f"{partition.name} is listed twice", "list every partition once")
        names.add(partition.name)
        yield from _line(partition, place)
        if partition.default and default:
            yield Finding((*place, "default"), f"{default} is already the default", "only one can be the default")
        if partition.default:
            default = partition.name
        if partition.nodes == "ALL":
            continue
        try:
            unknown = [name for name in expand(partition.nodes) if name not in nodes.names]
        except HostListError as error:
            yield Finding((*place, "nodes"), f"{partition.nodes} {error}", "write it as node[001-450], or ALL")
            continue
        if unknown:
            more = f" and {len(unknown) - 1} more are" if len(unknown) > 1 else " is"
            yield Finding((*place, "nodes"), f"{unknown[0]}{more} not among slurm.nodes", _hint(unknown[0], nodes))


def _hint(name: str, nodes: _Nodes) -> str:
    if len(nodes.names) > 20:
        return "use the names of slurm.nodes, with the same number of digits"
    return nearest(name, nodes.names) if nodes.names else "describe the nodes under slurm.nodes"


def _extra(site: Site, nodes: _Nodes) -> Iterator[Finding]:
    owned = {key.lower(): (key, why) for key, why in OWNED.items()}
    partitions = {partition.name for partition in site.slurm.partitions}
    default = next((partition.name for partition in site.slurm.partitions if partition.default), "")
    for index, line in enumerate(site.slurm.extra):
        place: Place = ("slurm", "extra", index)
        settings = line_settings(line)
        for key, value in settings:
            if key in owned:
                name, why = owned[key]
                yield Finding(place, f"{name} cannot be set by the site", f"remove it: {why}")
            if key == "jobcomptype" and value.strip('"').lower().endswith("filetxt"):
                text = f"{value[:60]} writes a file that grows in the overlay without a limit"
                yield Finding(place, text, "remove it, and add slurmdbd to `services`: `sacct` shows the jobs")
            if key == "slurmctldparameters" and "enable_configless" not in value.lower():
                text = "SlurmctldParameters without enable_configless"
                yield Finding(place, text, "add it: without it slurmctld sends nodes no files")
            # Partitions may refer to nodes that these lines define.
            if key in ("nodename", "nodeset"):
                try:
                    names = expand(value)
                except HostListError as error:
                    yield Finding(place, f"{value[:60]} {error}", "write it as node[001-450]")
                    continue
                if key == "nodename":
                    if again := next((name for name in names if name in nodes.names), ""):
                        yield Finding(place, f"{again} is also among slurm.nodes", "set `extra` of that entry instead")
                    yield from _own_names(site, names, place)
                nodes.names.update(set(names) - {"DEFAULT"})
            if key == "partitionname" and (
                again := next((name for name in value.split(",") if name in partitions), "")
            ):
                yield Finding(place, f"{again} is also among slurm.partitions", "set `extra` of that entry instead")
        if (
            default
            and settings[:1]
            and settings[0][0] == "partitionname"
            and ("default", "yes") in ((key, value.lower()) for key, value in settings)
        ):
            yield Finding(place, f"{default} is already the default", "only one partition can be the default")


def _scheduler(site: Site, nodes: _Nodes) -> Iterator[Finding]:
    if not nodes.names:
        yield Finding(
            ("slurm", "nodes"),
            "slurmctld is enabled, but there are no compute nodes",
            "add them, such as `nodes: [{name: 'node[001-450]', cpus: 32}]`, or remove slurmctld from `services`",
        )
    if not site.slurm.partitions:
        yield Finding(
            ("slurm", "partitions"),
            "slurmctld is enabled, but there is no partition",
            "add one, such as `partitions: [{name: batch, default: true}]`",
        )


def _repeated(names: list[str]) -> str:
    """Return the first name that occurs more than once, or an empty string."""
    return next((name for name, count in Counter(names).items() if count > 1), "")
