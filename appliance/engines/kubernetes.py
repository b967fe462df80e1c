"""Objects of Kubernetes for a deployment: a StatefulSet with one pod for each workload, and what belongs to it.

Each pod has the same image. Root runs in init containers only, which give files and folders their owners; then each
service runs as its own user on a read-only root. Helpers are sidecars (1.29), so that they start before the service and
stop after it, and each is restarted alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from appliance.config.engines import Kubernetes as Cluster
from appliance.config.engines import SecretRef
from appliance.config.model import Site
from appliance.engines.attachment import (
    ANNOTATION,
    Attachment,
    check_attachment,
    has_address,
    keeps_away,
    plugin_json,
    read_attachment,
    selection_json,
)
from appliance.engines.config import Network, placed_files, unit_argv
from appliance.engines.model import Deployment, Placement, Port, SecretFile, Unit, Workload
from appliance.engines.oci import PATH
from appliance.errors import ConfigError

Value: TypeAlias = "str | int | bool | Sequence[Value] | Mapping[str, Value]"
Object: TypeAlias = "dict[str, Value]"

IMAGE = "sms"
"""Name of the image in the base; the site's overlay replaces it."""
PLACE = ("CHOWN", "DAC_OVERRIDE", "FOWNER")
PREPARE = (*PLACE, "SETGID", "SETUID")
"""Capabilities of init containers: files get their owners, and mariadb-install-db changes to its user."""
ENVIRONMENT: Sequence[Value] = ({"name": "PATH", "value": PATH}, {"name": "LC_ALL", "value": "C.UTF-8"})
HOLDER: Sequence[Value] = (
    {"name": "SMS_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "SMS_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    {"name": "SMS_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    {"name": "SMS_HOLDER", "value": "$(SMS_POD) $(SMS_UID) on $(SMS_NODE)"},
)
"""Environment of what takes a lease: who has it."""
CONFIG, SECRETS, ETC = "/sms/config", "/sms/secrets", "/sms/etc"
LIST = "files.json"
FIRST_PRIVILEGED, NODE_PORTS = 1024, (30000, 32767)
START_S, START_TRIES = 2, 150
"""Period and number of startup probes: the first start creates a database."""
ALWAYS = 2**31 - 1
"""Number of startup probes of what may recover or convert its data for hours: the largest that the API server takes."""
EXEC_S = 25
"""Seconds that a probe's timeout leaves for the start of its program, above those in which that ends: on a busy machine
this takes long, and a healthy service must not be restarted for it. Only a service that hangs is noticed later: the
kubelet does not need a probe to see that a process has ended."""


@dataclass(frozen=True)
class Options:
    """What of the site's settings the objects depend on.

    Attributes:
        network: ``service``, ``host`` or ``attached``.
        address: at which nodes reach the services; empty where none needs one.
        node: cluster node that runs the pods; empty for any.
        secrets: Secret and key of each secret file, by its name in the site file.
        scheduling: fields of all pods that say where they may run, and their priority.
        dns: name servers, as those of the container: pods need no name of the cluster, and none of its DNS.
        attachment: interface of slurmctld's pod in the provisioning network.
    """

    network: Literal["service", "host", "attached"]
    address: str
    node: str
    secrets: Mapping[str, SecretRef]
    storage_gb: int
    dns: tuple[str, ...] = ()
    service: Literal["NodePort", "LoadBalancer", "ExternalIPs"] = "NodePort"
    storage_class: str = ""
    attachment: Attachment | None = None
    scheduling: Mapping[str, Value] = field(default_factory=dict)


def read_options(site: Site) -> Options:
    """Return the options of a site.

    Raises:
        ConfigError: they contradict each other.
    """
    given = site.engines.kubernetes
    if not given.used:
        raise ConfigError(
            "`engines.kubernetes.address` is missing: the address at which nodes reach the services",
            hint="of a cluster node or a load balancer; it cannot be the container's, which keeps what stays in it",
        )
    return Options(
        given.network,
        str(given.address or ""),
        given.node or "",
        find_secrets(site),
        given.storage_gb,
        tuple(str(server) for server in site.networks.dns) or ("127.0.0.1",),
        given.service,
        given.storage_class or "",
        read_attachment(site),
        dict(_scheduling(given)),
    )


def _scheduling(given: Cluster) -> Iterator[tuple[str, Value]]:
    """Yield the fields of a pod that say where it may run, and its priority."""
    host = {"kubernetes.io/hostname": given.node} if given.node else {}
    if chosen := {**given.node_selector, **host}:
        yield "nodeSelector", chosen
    if given.tolerations:
        yield "tolerations", [one.model_dump(exclude_none=True) for one in given.tolerations]
    if given.priority_class:
        yield "priorityClassName", given.priority_class


def find_secrets(site: Site) -> dict[str, SecretRef]:
    """Return Secret and key of each secret file, by its name in the site file."""
    given = site.engines.kubernetes
    return {
        "munge_key": given.munge_secret,
        "jwt_key": given.jwt_secret,
        "ssh_host_key": given.ssh_secret,
        "sssd_conf": given.sssd_secret,
    }


def network_of(deployment: Deployment, options: Options) -> Network:
    """Return how the pods are reached: a pod in the network of a cluster node has its host name."""
    host = options.network == "host"
    hosts = {one.name: options.node if host else f"{one.name}-0" for one in deployment.workloads}
    ports: dict[int, int] = {}
    taken: dict[tuple[str, int], str] = {}
    if not host and options.service == "NodePort":
        moved = [one for one in deployment.workloads if not has_address(one, options.attachment)]
        for port in (port for one in moved for port in one.ports):
            ports[port.number] = node_port(port)
            other = taken.setdefault((port.protocol, node_port(port)), f"{port.service} ({port.number})")
            if other != f"{port.service} ({port.number})":
                raise ConfigError(
                    f"{port.service} ({port.number}) would have the node port {node_port(port)} of {other}",
                    hint="set `engines.kubernetes.service: ExternalIPs` or `LoadBalancer`, or `network: host`",
                )
    controller = options.attachment.ip if options.attachment else ""
    return Network(options.address, hosts, ports, shared=host, controller=controller)


def node_port(port: Port) -> int:
    """Return the port of cluster nodes at which a service is reached: 30817 for 6817, 30514 for 514.

    Raises:
        ConfigError: there is none that follows from its number.
    """
    number = port.number + (NODE_PORTS[0] if port.number < FIRST_PRIVILEGED else NODE_PORTS[0] - 6000)
    if port.number >= FIRST_PRIVILEGED and not NODE_PORTS[0] <= number <= NODE_PORTS[1]:
        number = NODE_PORTS[0] + port.number
    if not NODE_PORTS[0] <= number <= NODE_PORTS[1]:
        raise ConfigError(
            f"{port.service} has no node port: {port.number} is too large",
            hint="set `engines.kubernetes.service: ExternalIPs` or `LoadBalancer`, or `network: host`",
        )
    return number


def inside(one: Workload, port: Port, options: Options) -> int:
    """Return the port in the pod: the controller listens on its node port, as slurm.conf has one number."""
    at_node = options.network == "service" and options.service == "NodePort"
    return node_port(port) if at_node and one.main.service.role == "controller" else port.number


def refused(deployment: Deployment, options: Options) -> Deployment:
    """Return the deployment without workloads that pods in a host's network cannot run; their placement says why.

    Raises:
        ConfigError: the pod of slurmctld cannot have the container's address.
    """
    if options.attachment:
        check_attachment(deployment, options.attachment, options.address, options.node)
    if options.network != "host":
        return deployment
    why = "as its own user it cannot bind port {} in a host's network: only a setting of the host permits it"
    gone = {}
    for one in deployment.workloads:
        low = [port for port in one.ports if port.number < FIRST_PRIVILEGED and one.main.ids.uid]
        if low:
            gone[one.name] = why.format(low[0].number)
    places = tuple(
        Placement(each.service, "gateway", why=gone[each.workload]) if each.workload in gone else each
        for each in deployment.placements
    )
    kept = tuple(one for one in deployment.workloads if one.name not in gone)
    return Deployment(deployment.cluster, kept, places, deployment.networks)


def base_objects(deployment: Deployment, options: Options) -> dict[str, list[Object]]:
    """Return the objects of each workload, by its name."""
    return {one.name: list(_workload_objects(deployment, one, options)) for one in deployment.workloads}


def _workload_objects(deployment: Deployment, one: Workload, options: Options) -> Iterator[Object]:
    config = config_map(deployment, one)
    yield config
    yield headless_service(deployment, one, options)
    yield stateful_set(deployment, one, options, config)
    if one.fragile:
        yield disruption_budget(deployment, one)


def labels(deployment: Deployment, one: Workload) -> dict[str, Value]:
    """Return the recommended labels of a workload's objects."""
    return {
        **selector(deployment, one),
        "app.kubernetes.io/component": one.main.service.role or one.name,
        "app.kubernetes.io/part-of": "sms",
        "app.kubernetes.io/managed-by": "sms",
    }


def selector(deployment: Deployment, one: Workload) -> dict[str, Value]:
    """Return the labels that select a workload's pod; they never change."""
    return {"app.kubernetes.io/name": one.name, "app.kubernetes.io/instance": deployment.cluster}


def _object(kind: str, name: str, deployment: Deployment, one: Workload, **rest: Value) -> Object:
    version = {"StatefulSet": "apps/v1", "PodDisruptionBudget": "policy/v1", "NetworkPolicy": "networking.k8s.io/v1"}
    metadata: Object = {"name": name, "labels": labels(deployment, one)}
    return {"apiVersion": version.get(kind, "v1"), "kind": kind, "metadata": metadata, **rest}


def config_map(deployment: Deployment, one: Workload) -> Object:
    """Return the ConfigMap with all files of a workload; it is mounted as a folder."""
    paths = {secret.name: f"{_secret_folder(secret)}/{secret.key}" for secret in one.secrets}
    data = {file.key: file.text for file in one.files} | {LIST: placed_files(one, CONFIG, paths)}
    return _object("ConfigMap", f"{one.name}-config", deployment, one, data=data)


def headless_service(deployment: Deployment, one: Workload, options: Options) -> Object:
    """Return the Service that gives the pod its name."""
    spec: Object = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector(deployment, one)}
    if one.ports:
        spec["ports"] = [
            {"name": port.name, "protocol": port.protocol.upper(), "port": inside(one, port, options)}
            for port in one.ports
        ]
    return _object("Service", one.name, deployment, one, spec=spec)


def disruption_budget(deployment: Deployment, one: Workload) -> Object:
    """Return the budget that keeps an eviction from the pod: nodes tolerate no restart, jobs are drained first."""
    spec: Object = {"maxUnavailable": 0, "selector": {"matchLabels": selector(deployment, one)}}
    return _object("PodDisruptionBudget", one.name, deployment, one, spec=spec)


def stateful_set(deployment: Deployment, one: Workload, options: Options, config: Object) -> Object:
    """Return the StatefulSet: at most one pod, so that there is one writer of its state."""
    claims: list[Value] = [
        {
            "metadata": {"name": "state", "labels": selector(deployment, one)},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": f"{options.storage_gb}Gi"}},
            },
        }
    ]
    attached = options.attachment if has_address(one, options.attachment) else None
    content = repr(config["data"]) + (plugin_json(attached) if attached else "")
    annotations = {
        "kubectl.kubernetes.io/default-container": one.name,
        # Another configuration is another pod.
        "checksum/config": hashlib.sha256(content.encode()).hexdigest(),
    }
    if attached:
        annotations[ANNOTATION] = selection_json(attached)
    spec: Object = {
        "replicas": 1,
        "serviceName": one.name,
        "selector": {"matchLabels": selector(deployment, one)},
        "template": {
            "metadata": {"labels": labels(deployment, one), "annotations": annotations},
            "spec": pod_spec(deployment, one, options),
        },
    }
    if one.state:
        spec["volumeClaimTemplates"] = claims
    return _object("StatefulSet", one.name, deployment, one, spec=spec)


def pod_spec(deployment: Deployment, one: Workload, options: Options) -> Object:
    """Return the pod: files are placed, then each service is prepared by root and started as its user."""
    host = options.network == "host"
    first: list[Value] = [_place(one)]
    mains: list[Value] = []
    for unit in one.units:
        if unit.service.setup:
            first.append(_prepare(one, unit))
        (first if unit.helper else mains).append(_container(one, unit, options))
    security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not host and any(port.number < FIRST_PRIVILEGED for port in one.ports):
        security["sysctls"] = [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]
    spec: Object = {
        "automountServiceAccountToken": False,
        # Else every service of the namespace is in the environment: SLURMCTLD_PORT=tcp://...
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": one.stop_s,
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": list(options.dns)},
        "securityContext": security,
    }
    if host:
        spec["hostNetwork"] = True
    spec |= options.scheduling
    controller = deployment.find("controller")
    if controller and keeps_away(deployment, one, options.attachment):
        term: Object = {
            "labelSelector": {"matchLabels": selector(deployment, controller)},
            "topologyKey": "kubernetes.io/hostname",
        }
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {**spec, "initContainers": first, "containers": mains, "volumes": _volumes(one, options)}


def _place(one: Workload) -> Object:
    """Return the init container that assembles /etc of the image's, the site's files and the secrets."""
    mounts: list[Value] = [
        {"name": "etc", "mountPath": ETC},
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        {"name": "run", "mountPath": "/run"},
        _log_mount(one),
    ]
    mounts += [{"name": secret.slug, "mountPath": _secret_folder(secret), "readOnly": True} for secret in one.secrets]
    return _root("place", ["/opt/sms/bin/sms-place", f"{CONFIG}/{LIST}", ETC], mounts, PLACE)


def _secret_folder(secret: SecretFile) -> str:
    return f"{SECRETS}/{secret.slug}"


def _prepare(one: Workload, unit: Unit) -> Object:
    """Return the init container that runs the preparation of a service as root."""
    added = sorted({*PREPARE, *unit.service.capabilities})
    made = _root(f"prepare-{unit.name}", unit_argv(unit, "--prepare"), _mounts(one, writable_etc=True), added)
    return {**made, "env": [*ENVIRONMENT, *HOLDER]} if unit.service.engines.lease else made


def _root(name: str, argv: Sequence[str], mounts: Sequence[Value], capabilities: Sequence[str]) -> Object:
    return {
        **_image(name, argv),
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": list(capabilities)},
        },
        "volumeMounts": list(mounts),
    }


def _image(name: str, argv: Sequence[str]) -> Object:
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": list(argv),
        "env": ENVIRONMENT,
    }


def _container(one: Workload, unit: Unit, options: Options) -> Object:
    """Return the container of a service. Only readiness depends on what it needs."""
    security: Object = {
        "runAsUser": unit.ids.uid,
        "runAsGroup": unit.ids.gid,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if unit.ids.uid:
        security = {"runAsNonRoot": True, **security}
    else:
        security["capabilities"] = {"drop": ["ALL"], "add": sorted(unit.service.capabilities)}
    made: Object = {**_image(unit.name, unit_argv(unit, "--jobsync", "--prepared")), "securityContext": security}
    if unit.service.engines.lease:
        made["env"] = [*ENVIRONMENT, *HOLDER]
    if unit.helper:
        made["restartPolicy"] = "Always"
    ports = [port for port in one.ports if port.service == unit.name]
    if ports:
        made["ports"] = [_container_port(port, inside(one, port, options), options) for port in ports]
    ready, alive = ["/opt/sms/bin/sms-probe", unit.name], ["/opt/sms/bin/sms-probe", "--live", unit.name]
    assert unit.service.probe
    wait = int(unit.service.probe.timeout_s) + EXEC_S
    tries = ALWAYS if unit.service.engines.starts_long else START_TRIES
    # What follows a sidecar starts when its startup probe has succeeded. It has no dependencies.
    made |= {
        "startupProbe": _probe(ready if unit.helper else alive, START_S, tries, wait),
        "readinessProbe": _probe(ready, 10, 3, wait),
        "livenessProbe": _probe(alive, 10, 6, wait),
        "resources": {"requests": {"cpu": "50m", "memory": f"{unit.service.engines.memory_mb}Mi"}},
        "volumeMounts": _mounts(one, writable_etc=False),
    }
    return made


def _container_port(port: Port, number: int, options: Options) -> Object:
    made: Object = {"name": port.name, "protocol": port.protocol.upper(), "containerPort": number}
    return {**made, "hostPort": number} if options.network == "host" else made


def _probe(argv: Sequence[str], period_s: int, failures: int, timeout_s: int) -> Object:
    return {
        "exec": {"command": list(argv)},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
    }


def _mounts(one: Workload, *, writable_etc: bool) -> list[Value]:
    etc: Object = {"name": "etc", "mountPath": "/etc"}
    mounts: list[Value] = [
        etc if writable_etc else {**etc, "readOnly": True},
        {"name": "run", "mountPath": "/run"},
        {"name": "tmp", "mountPath": "/tmp"},
        _log_mount(one),
    ]
    mounts += [_state_mount(path) for path in one.state if path != "/var/log"]
    return [*mounts, *({"name": _slug(path), "mountPath": path} for path in one.scratch)]


def _state_mount(path: str) -> Object:
    return {"name": "state", "mountPath": path, "subPath": path.lstrip("/")}


def _log_mount(one: Workload) -> Object:
    return _state_mount("/var/log") if "/var/log" in one.state else {"name": "log", "mountPath": "/var/log"}


def _volumes(one: Workload, options: Options) -> list[Value]:
    memory: Object = {"medium": "Memory", "sizeLimit": "64Mi"}
    volumes: list[Value] = [
        {"name": "config", "configMap": {"name": f"{one.name}-config"}},
        {"name": "etc", "emptyDir": memory},
        {"name": "run", "emptyDir": memory},
        {"name": "tmp", "emptyDir": {}},
    ]
    if "/var/log" not in one.state:
        volumes.append({"name": "log", "emptyDir": {}})
    volumes += [{"name": _slug(path), "emptyDir": {}} for path in one.scratch]
    for secret in one.secrets:
        given = options.secrets[secret.name]
        items: list[Value] = [{"key": given.key, "path": secret.key}]
        source: Object = {"secretName": given.name, "defaultMode": 0o400, "items": items}
        volumes.append({"name": secret.slug, "secret": source})
    return volumes


def _slug(path: str) -> str:
    """Return a name for a volume: letters, digits and dashes, at most 63, different for different paths."""
    text = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in path.lower()).strip("-")
    plain = "/" + text.replace("-", "/") == path or text.replace("-", "_") == path
    return text if plain and len(text) < 50 else f"{text[:40]}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
