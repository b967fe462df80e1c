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
    service: Literal["NodePort", "LoadBalancer"] = Field(
        "NodePort", description="Type of the services that nodes use; NodePort gives them ports from 30000."
    )
    node: Label | None = Field(None, description="Cluster node that runs the pods; needed with `network: host`.")
    storage_class: Label | None = Field(None, description="Class of the volumes (default: the cluster's).")
    storage_gb: int = Field(4, ge=1, le=65536, description="Size of each volume, in GiB.")
    munge_secret: Name = Field("munge-key", description="The Secret with the Munge key, under `munge.key`.")
    jwt_secret: Name = Field("jwt-key", description="That with the key of tokens, under `jwt_hs256.key`.")
    sssd_secret: Name = Field("sssd-conf", description="That with the file of sssd, under `sssd.conf`.")
    ssh_secret: Name = Field(
        "ssh-host-key", description="That with the host key of logins, under `ssh_host_ed25519_key`."
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


class Engines(Section):
    """Other engines that can run the services."""

    kubernetes: Kubernetes = Field(Kubernetes(), description="A Kubernetes cluster.")
    nomad: Nomad = Field(Nomad(), description="A Nomad cluster.")
    podman: Podman = Field(Podman(), description="A host with Podman.")
