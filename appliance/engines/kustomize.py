"""Files for ``kubectl apply -k``: a base of objects, and the site's overlay: namespace, image, services, policies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from appliance.config.model import Site
from appliance.engines.attachment import NAME, has_address, plugin_json
from appliance.engines.kubernetes import (
    IMAGE,
    Object,
    Options,
    Value,
    base_objects,
    inside,
    labels,
    node_port,
    selector,
)
from appliance.engines.model import Deployment, SecretFile, Workload
from appliance.engines.yaml_text import dump

ATTACHMENT = "NetworkAttachmentDefinition"
HEADER = "# Written by `sms export kubernetes`. Changes belong into the site file, or into an overlay of your own.\n"


def kubernetes_files(site: Site, deployment: Deployment, options: Options, image: str) -> dict[str, str]:
    """Return the files of an export by path.

    Args:
        image: name of the image with tag or digest.
    """
    objects = base_objects(deployment, options)
    files = {f"base/{name}.yaml": text_of(documents) for name, documents in objects.items()}
    files["base/kustomization.yaml"] = text_of([_kustomization(resources=[f"{name}.yaml" for name in objects])])
    namespace = site.engines.kubernetes.namespace or site.cluster
    files["site/namespace.yaml"] = text_of([_namespace(namespace, options)])
    resources = ["namespace.yaml", "../base"]
    reached = [objects_for_nodes(deployment, one, options) for one in deployment.workloads]
    for name, kind in (("networks", ATTACHMENT), ("services", "Service"), ("policies", "NetworkPolicy")):
        if found := [each for listed in reached for each in listed if each["kind"] == kind]:
            files[f"site/{name}.yaml"] = text_of(found)
            resources.append(f"{name}.yaml")
    site_wide: dict[str, Value] = {"namespace": namespace, "resources": list(resources), "images": [_image(image)]}
    if patches := list(_patches(deployment, options)):
        site_wide["patches"] = patches
    files["site/kustomization.yaml"] = text_of([_kustomization(**site_wide)])
    return files


def whole_objects(site: Site, deployment: Deployment, options: Options, image: str) -> dict[str, list[Object]]:
    """Return all objects of each workload as the overlay makes them, and the namespace's, by name."""
    namespace = site.engines.kubernetes.namespace or site.cluster
    found = {"namespace": [_namespace(namespace, options)]}
    for one in deployment.workloads:
        objects = base_objects(deployment, options)[one.name] + objects_for_nodes(deployment, one, options)
        found[one.name] = [_placed(each, namespace, options, image) for each in objects]
    return found


def _placed(each: Object, namespace: str, options: Options, image: str) -> Object:
    """Return an object in its namespace, with its image and its class of volumes."""

    def change(value: Value) -> Value:
        if isinstance(value, Mapping):
            made = {key: change(below) for key, below in value.items()}
            if made.get("image") == IMAGE:
                made["image"] = image
            if "accessModes" in made and options.storage_class:
                made["storageClassName"] = options.storage_class
            return made
        return value if isinstance(value, str | int) else [change(below) for below in value]

    metadata = each["metadata"]
    assert isinstance(metadata, Mapping)
    changed = change(each)
    assert isinstance(changed, dict)
    return {**changed, "metadata": {"name": metadata["name"], "namespace": namespace, "labels": metadata["labels"]}}


def secret_command(site: Site, options: Options, secret: SecretFile) -> str:
    """Return the command that creates a Secret; its content is in no file of an export."""
    namespace, path = site.engines.kubernetes.namespace or site.cluster, getattr(site.secrets, secret.name)
    given = options.secrets[secret.name]
    source = shlex.quote(f"{given.key}={path or secret.key}")
    return f"kubectl -n {namespace} create secret generic {given.name} --from-file={source}"


def text_of(documents: list[Object]) -> str:
    """Return a file with these objects."""
    return HEADER + dump(documents)


def _kustomization(**rest: Value) -> Object:
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **rest}


def _namespace(name: str, options: Options) -> Object:
    # Init containers are root, and a host's network is not for others.
    level = "privileged" if options.network == "host" else "baseline"
    metadata: Object = {"name": name, "labels": {"pod-security.kubernetes.io/enforce": level}}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def _image(image: str) -> Object:
    name, _, digest = image.partition("@")
    head, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # the colon of a port
        head, tag = name, ""
    found: Object = {"name": IMAGE, "newName": head}
    if digest:
        return {**found, "digest": digest}
    return {**found, "newTag": tag} if tag else found


def objects_for_nodes(deployment: Deployment, one: Workload, options: Options) -> list[Object]:
    """Return the objects by which nodes, and they alone, reach a workload; none in the network of a cluster node."""
    if options.network == "host":
        return []
    policy = network_policy(deployment, one, options)
    if has_address(one, options.attachment):
        return [network_attachment(deployment, one, options), policy]
    return [node_service(deployment, one, options), policy] if one.ports else [policy]


def network_attachment(deployment: Deployment, one: Workload, options: Options) -> Object:
    """Return the network by which the workload's pod has the container's address."""
    assert options.attachment
    metadata: Object = {"name": NAME, "labels": labels(deployment, one)}
    spec: Object = {"config": plugin_json(options.attachment)}
    return {"apiVersion": "k8s.cni.cncf.io/v1", "kind": ATTACHMENT, "metadata": metadata, "spec": spec}


def node_service(deployment: Deployment, one: Workload, options: Options) -> Object:
    """Return the Service that nodes use. The pod's own probe goes through it, so it counts before the pod is ready."""
    ports: list[Value] = []
    for port in one.ports:
        made: Object = {"name": port.name, "protocol": port.protocol.upper(), "port": port.number}
        if options.service == "NodePort":
            made["nodePort"] = node_port(port)
        if inside(one, port, options) != port.number:
            made |= {"port": inside(one, port, options)}
        ports.append(made)
    spec: Object = {
        "type": "ClusterIP" if options.service == "ExternalIPs" else options.service,
        "externalTrafficPolicy": _policy(options),
        "publishNotReadyAddresses": True,
        "selector": selector(deployment, one),
        "ports": ports,
    }
    if options.service == "LoadBalancer":
        spec["loadBalancerIP"] = options.address
    if options.service == "ExternalIPs":
        spec["externalIPs"] = [options.address]
    metadata: Object = {"name": f"{one.name}-nodes", "labels": labels(deployment, one)}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _policy(options: Options) -> str:
    """Return Local where the pod runs where the traffic arrives: then it sees the addresses of nodes."""
    return "Local" if options.node or options.service == "LoadBalancer" else "Cluster"


def network_policy(deployment: Deployment, one: Workload, options: Options) -> Object:
    """Return the policy: nodes and the other pods of the cluster reach the ports, others only those for users.

    It is one of the cluster's own network: nodes come to an attached pod by another one.
    """
    blocks = [] if has_address(one, options.attachment) else list(deployment.networks)
    if blocks and _policy(options) == "Cluster":
        blocks.append(f"{options.address}/32")  # traffic of nodes has the address of the cluster node that it passes
    pods: Object = {
        "podSelector": {
            "matchLabels": {
                "app.kubernetes.io/instance": deployment.cluster,
                "app.kubernetes.io/part-of": "sms",
            }
        }
    }
    sources: list[Value] = [*({"ipBlock": {"cidr": block}} for block in blocks), pods]
    users = {unit.name for unit in one.units if unit.service.engines.users}
    ingress: list[Value] = []
    for everybody in (False, True):
        ports: list[Value] = [
            {"protocol": port.protocol.upper(), "port": inside(one, port, options)}
            for port in one.ports
            if (port.service in users) is everybody
        ]
        if ports:
            ingress.append({"ports": ports} if everybody else {"from": sources, "ports": ports})
    spec: Object = {"podSelector": {"matchLabels": selector(deployment, one)}, "policyTypes": ["Ingress"]}
    if ingress:  # without any, nobody reaches the pod
        spec["ingress"] = ingress
    metadata: Object = {"name": one.name, "labels": labels(deployment, one)}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _patches(deployment: Deployment, options: Options) -> Iterator[Mapping[str, Value]]:
    """Yield the patch for the class of volumes."""
    names = "|".join(one.name for one in deployment.workloads if one.state)
    if options.storage_class and names:
        operation: list[Object] = [
            {
                "op": "add",
                "path": "/spec/volumeClaimTemplates/0/spec/storageClassName",
                "value": options.storage_class,
            }
        ]
        yield {"target": {"kind": "StatefulSet", "name": f"^({names})$"}, "patch": dump([operation])}
