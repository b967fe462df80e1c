"""The section ``engines`` of the site file: settings of the engine that `sms export` renders for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.section import Section
from appliance.config.types import Address, File, HostName, Interface, Name, Text, Url

ImageName = Annotated[
    str,
    Text(
        r"[a-z0-9][a-z0-9._-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*){0,8}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?"
        r"(@sha256:[0-9a-f]{64})?",
        "the name of an OCI image",
        "write it as registry.example.org/sms/cluster@sha256:DIGEST",
    ),
]

Label = Annotated[
    str,
    Text(
        r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
        "a name that an engine can use",
        "use 1 to 63 letters, digits, dots, dashes and underscores",
    ),
]

Context = Annotated[
    str,
    Text(r"[A-Za-z0-9][A-Za-z0-9@:/._-]{0,252}", "the name of a context", "`kubectl config get-contexts` lists them"),
]


ObjectName = Annotated[
    str,
    Text(
        r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?",
        "a name of an object of Kubernetes",
        "use 1 to 253 lower case letters, digits, dashes and dots",
    ),
]

SecretKey = Annotated[
    str,
    Text(
        r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}",
        "a key of a Secret",
        "use 1 to 253 letters, digits, dashes, dots and underscores, no dot first",
    ),
]

LabelKey = Annotated[
    str,
    Text(
        r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
        "a key of a label",
        "write it as kubernetes.io/os or pool",
    ),
]


class SecretRef(Section):
    """A key of a Secret of Kubernetes. A Secret that is missing is created by `sms deploy`."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: SecretKey = Field(description="Its key with the file.")


class Toleration(Section):
    """A taint of cluster nodes on which the pods may run all the same."""

    key: LabelKey | None = Field(None, description="Key of the taint (default: all, with `operator: Exists`).")
    operator: Literal["Equal", "Exists"] = Field("Equal", description="Whether its value counts.")
    value: Label | None = Field(None, description="Its value, with `operator: Equal`.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Its effect (default: any)."
    )


class Kubernetes(Section):
    """A Kubernetes cluster for the services, from version 1.29."""

    namespace: Name | None = Field(None, description="Namespace of the objects (default: the cluster's name).")
    image: ImageName | None = Field(
        None, description="The image in a registry, with its digest (default: the imported one of `sms image oci`)."
    )
    network: Literal["service", "host", "attached"] = Field(
        "service",
        description="How nodes reach the pods: by services, in the network of a cluster node, or slurmctld's at the "
        "services container's address and MAC address, by Multus, and the others by services.",
    )
    attach: Literal["bridge", "macvlan"] = Field(
        "bridge", description="With `network: attached`: `interface` is a bridge, or carries a macvlan interface."
    )
    interface: Interface | None = Field(
        None, description="With `network: attached`: interface of cluster nodes in the provisioning network."
    )
    address: Address | None = Field(
        None,
        description="Address at which nodes reach the services: of a cluster node, or of the load balancer.",
    )
    service: Literal["NodePort", "LoadBalancer", "ExternalIPs"] = Field(
        "NodePort",
        description="Services that nodes use: NodePort gives them ports from 30000; LoadBalancer and ExternalIPs keep "
        "their own. With ExternalIPs cluster nodes forward `address`, which is that of one of them.",
    )
    node: Label | None = Field(None, description="Cluster node that runs the pods; needed with `network: host`.")
    node_selector: dict[LabelKey, Label] = Field(
        {}, max_length=20, description="Labels that cluster nodes must have to run the pods."
    )
    tolerations: tuple[Toleration, ...] = Field(
        (), max_length=20, description="Taints of cluster nodes on which the pods may run."
    )
    priority_class: ObjectName | None = Field(None, description="PriorityClass of the pods (default: the cluster's).")
    storage_class: Label | None = Field(None, description="Class of the volumes (default: the cluster's).")
    storage_gb: int = Field(4, ge=1, le=65536, description="Size of each volume, in GiB.")
    munge_secret: SecretRef = Field(
        SecretRef(name="munge-key", key="munge.key"), description="The Secret with the Munge key."
    )
    jwt_secret: SecretRef = Field(
        SecretRef(name="jwt-key", key="jwt_hs256.key"), description="That with the key of tokens."
    )
    sssd_secret: SecretRef = Field(
        SecretRef(name="sssd-conf", key="sssd.conf"), description="That with the file of sssd."
    )
    ssh_secret: SecretRef = Field(
        SecretRef(name="ssh-host-key", key="ssh_host_ed25519_key"), description="That with the host key of logins."
    )
    kubeconfig: File | None = Field(
        None, description="File with cluster and account for `kubectl` (default: KUBECONFIG of the environment)."
    )
    context: Context | None = Field(None, description="Context of that file (default: its current one).")

    @property
    def used(self) -> bool:
        """Whether the site file says how nodes reach the services there."""
        return self.address is not None or self.network == "attached"


class Nomad(Section):
    """A Nomad cluster for the services, from version 1.8."""

    namespace: Label = Field("default", description="Namespace of the jobs.")
    datacenters: tuple[Label, ...] = Field(("dc1",), min_length=1, max_length=100, description="Datacenters.")
    host: HostName | None = Field(
        None, description="Client that runs the services and has their state (default: the first admin host)."
    )
    address: Address | None = Field(
        None, description="Its address in the provisioning network, at which nodes reach the services."
    )
    pool: Label = Field("default", description="Node pool of that client.")
    compute_pool: Label = Field("compute", description="Node pool of the compute nodes.")
    image: File | None = Field(None, description="The SIF on that client (default: that of `sms build`).")
    state: File | None = Field(None, description="Folder of the state on that client (default: nomad/ in `state`).")
    api: Url | None = Field(
        None, description="URL of the servers for `nomad` (default: NOMAD_ADDR of the environment)."
    )
    token_file: File | None = Field(
        None, description="File with the token for `nomad` (default: NOMAD_TOKEN of the environment)."
    )


class Podman(Section):
    """A host on which Podman runs the services, by quadlets (Podman 5) or Compose."""

    host: HostName | None = Field(None, description="Its host name (default: the first admin host).")
    address: Address | None = Field(
        None, description="Its address in the provisioning network, at which nodes reach the services."
    )
    image: ImageName | None = Field(None, description="The image (default: the imported one of `sms image oci`).")


MOST_MEMORY_MB = 16 << 20


class Engines(Section):
    """Other engines that can run the services."""

    kubernetes: Kubernetes = Field(Kubernetes(), description="A Kubernetes cluster.")
    nomad: Nomad = Field(Nomad(), description="A Nomad cluster.")
    podman: Podman = Field(Podman(), description="A host with Podman.")
    memory_mb: dict[Name, Annotated[int, Field(ge=16, le=MOST_MEMORY_MB)]] = Field(
        {},
        description="Memory of services in MiB, in place of the catalogue's: Nomad ends a task that uses more, and "
        "Kubernetes reserves it.",
    )
