"""Validation rules of the section ``engines`` of the site file."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from appliance.config.check_starter import documentation_problem, find_documentation
from appliance.config.engines import Kubernetes
from appliance.config.finding import Finding
from appliance.config.model import Site


def check_engines(site: Site, selected: Collection[str]) -> Iterator[Finding]:
    """Yield addresses at which no engine can be, memory of services that the site lacks, and contradictions.

    Args:
        selected: services of the site.
    """
    for service in sorted(set(site.engines.memory_mb) - set(selected)):
        yield Finding(
            ("engines", "memory_mb", service), "the site has no such service", "`services` lists those it has"
        )
    networks = (site.networks.provisioning, site.networks.public)
    own = {network.address.ip for network in networks}
    engines, hint = site.engines, "name the machine at which nodes reach the engine"
    for name, each in (("kubernetes", engines.kubernetes), ("nomad", engines.nomad), ("podman", engines.podman)):
        place, address = ("engines", name, "address"), each.address
        if address is None:
            continue
        if address in own:
            yield Finding(place, f"{address} is the services container's", hint)
        elif address.is_unspecified or address.is_loopback or address.is_multicast:
            yield Finding(place, f"{address} is not that of a machine in a network", hint)
        elif found := find_documentation(str(address)):
            yield Finding(place, *documentation_problem(found))
    cluster = engines.kubernetes
    yield from _check_objects(cluster)
    if not cluster.used:
        return
    namespace = cluster.namespace or site.cluster
    if namespace == "default" or namespace.startswith("kube-"):
        setting = "namespace" if cluster.namespace else "address" if cluster.address else "network"
        yield Finding(
            ("engines", "kubernetes", setting),
            f"the namespace {namespace} is the cluster's own: the export sets labels of it",
            "set `namespace` to one for these services alone",
        )
    if cluster.network == "host" and not cluster.node:
        yield Finding(
            ("engines", "kubernetes", "network"),
            "`network: host` needs a cluster node, whose address nodes use",
            "set `node` to its name, as `kubectl get nodes` prints it",
        )
    if cluster.network == "attached" and not cluster.interface:
        yield Finding(
            ("engines", "kubernetes", "network"),
            "`network: attached` needs the interface of cluster nodes that is in the provisioning network",
            "set `interface`, such as br-prov; with `attach: macvlan` to a network card, such as eno1",
        )


def _check_objects(cluster: Kubernetes) -> Iterator[Finding]:
    """Yield what the API server would refuse, and Secrets that would overwrite one another."""
    place = ("engines", "kubernetes")
    for number, one in enumerate(cluster.tolerations):
        if one.operator == "Exists" and one.value is not None:
            yield Finding((*place, "tolerations", number), "`operator: Exists` has no value", "remove `value`")
        if one.operator == "Equal" and one.key is None:
            yield Finding(
                (*place, "tolerations", number), "a toleration without `key` is one of all", "set `operator: Exists`"
            )
    taken: set[str] = set()
    for setting in ("munge_secret", "jwt_secret", "sssd_secret", "ssh_secret"):
        name = getattr(cluster, setting).name
        if name in taken:
            yield Finding((*place, setting), f"the Secret {name} is used twice", "sms needs one for each file")
        taken.add(name)
    if cluster.node and cluster.node_selector.get("kubernetes.io/hostname", cluster.node) != cluster.node:
        yield Finding((*place, "node_selector"), "it names another cluster node than `node`", "remove one of them")
