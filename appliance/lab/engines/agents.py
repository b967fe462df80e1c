"""What programs of an engine are started with: settings of Nomad's agents, options and files of Kubernetes. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SERVICES = "10.96.0.0/16"
PAUSE = "localhost/pause:sms"
ALL_PODS = "10.97.0.0/16"
PODS = "10.97.{}.0/24"
"""Addresses of the pods of a cluster node, by its number."""
CONTAINERD = """\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
"""


@dataclass(frozen=True)
class Agent:
    """An agent of Nomad: its host's name and address, its folder, and the interface with that address.

    ``servers``: addresses of all servers. ``client``: further settings of the client, such as ``{"node_pool":
    "compute"}``; None where it runs no tasks.
    """

    name: str
    address: str
    folder: str
    servers: Sequence[str]
    interface: str = ""
    client: dict[str, Any] | None = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Its configuration, for a file of JSON."""
        own: dict[str, Any] = {
            "name": self.name,
            "data_dir": self.folder,
            "bind_addr": "0.0.0.0",  # noqa: S104 - in the host's own network
            "advertise": dict.fromkeys(("http", "rpc", "serf"), self.address),
            "disable_update_check": True,
            "telemetry": {"collection_interval": "30s"},  # statistics of each task, which nothing here uses
            "leave_on_terminate": False,
        }
        if self.address in self.servers:
            own["server"] = {
                "enabled": True,
                "bootstrap_expect": len(self.servers),
                "raft_multiplier": 1,
                "heartbeat_grace": "5s",
                "min_heartbeat_ttl": "5s",
                "server_join": {"retry_join": list(self.servers), "retry_interval": "1s"},
            }
        if self.client is not None:
            own["client"] = {
                "enabled": True,
                "servers": list(self.servers),
                "network_interface": self.interface,
                # It would query the metadata addresses of clouds, and programs that are not there.
                "options": {"fingerprint.denylist": "env_aws,env_azure,env_gce,env_digitalocean,consul,vault"},
                **self.client,
            }
            own["plugin"] = [{"raw_exec": [{"config": [{"enabled": True}]}]}]
        return own


@dataclass(frozen=True)
class Files:
    """Paths on a host of Kubernetes: its data, and below ``keys`` the files of ``pki`` and the kubeconfigs by user."""

    data: str
    keys: str

    def conf(self, user: str) -> str:
        """Return the path of a kubeconfig."""
        return f"{self.keys}/{user}.conf"


def _options(program: str, **options: object) -> tuple[str, ...]:
    return (program, *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()))


def kubeconfig(url: str, authority: bytes, certificate: bytes, key: bytes) -> bytes:
    """Return how a user reaches the API server; the certificates and the key are in it."""

    def text(data: bytes) -> str:
        return base64.b64encode(data).decode()

    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority-data": text(authority)}}],
        "users": [{"name": "u", "user": {"client-certificate-data": text(certificate), "client-key-data": text(key)}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    return json.dumps(document).encode()


def control_plane(address: str, files: Files) -> dict[str, tuple[str, ...]]:
    """Return the commands of etcd, API server, controller manager and scheduler, in the order of their start."""
    peer, client = "http://127.0.0.1:2380", "http://127.0.0.1:2379"
    authority, certificate, key = (f"{files.keys}/{name}" for name in ("ca.pem", "apiserver.pem", "apiserver.key"))
    manager, scheduler = files.conf("controller-manager"), files.conf("scheduler")
    return {
        "etcd": _options(
            "etcd", name="e", data_dir=f"{files.data}/etcd", unsafe_no_fsync="true",
            listen_client_urls=client, advertise_client_urls=client,
            listen_peer_urls=peer, initial_advertise_peer_urls=peer, initial_cluster=f"e={peer}",
        ),
        "kube-apiserver": _options(
            "kube-apiserver", advertise_address=address, etcd_servers=client, allow_privileged="true",
            authorization_mode="Node,RBAC", enable_admission_plugins="NodeRestriction", client_ca_file=authority,
            tls_cert_file=certificate, tls_private_key_file=key,
            kubelet_client_certificate=certificate, kubelet_client_key=key,
            # Else logs and exec look the node's name up.
            kubelet_preferred_address_types="InternalIP",
            service_account_issuer="https://kubernetes.default.svc", service_account_key_file=key,
            service_account_signing_key_file=key, service_cluster_ip_range=SERVICES,
        ),
        "kube-controller-manager": _options(
            "kube-controller-manager", kubeconfig=manager, authentication_kubeconfig=manager, leader_elect="false",
            authorization_kubeconfig=manager, root_ca_file=authority, use_service_account_credentials="true",
            service_account_private_key_file=key, bind_address="127.0.0.1",
        ),
        "kube-scheduler": _options(
            "kube-scheduler", kubeconfig=scheduler, authentication_kubeconfig=scheduler, leader_elect="false",
            authorization_kubeconfig=scheduler, bind_address="127.0.0.1",
        ),
    }  # fmt: skip


@dataclass(frozen=True)
class ClusterNode:
    """A node of Kubernetes: name and address, number (of its pods' network), and the cgroup of its pods.

    ``settings``: the folder of its files on the host.
    """

    name: str
    address: str
    cgroup: str
    files: Files
    settings: str
    number: int = 0

    @property
    def pods(self) -> str:
        """The network of its pods."""
        return PODS.format(self.number)

    def texts(self) -> dict[str, str]:
        """Return its files below ``settings``."""
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self.files.keys}/ca.pem"},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "4s",
            "resolvConf": f"{self.settings}/resolv.conf",
            "syncFrequency": "5s",
            "volumePluginDir": f"{self.settings}/plugins",
        }
        bridge = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "ipMasq": True,
                    # A pod reaches itself at the address that nodes use.
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": self.pods}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
                {"type": "loopback"},
            ],
        }
        return {
            "resolv.conf": "",
            "kubelet.json": json.dumps(kubelet, indent=1),
            "cni/10-pods.conflist": json.dumps(bridge),
            "containerd.toml": CONTAINERD.format(pause=PAUSE, cni=f"{self.settings}/cni"),
        }

    @property
    def containerd(self) -> tuple[str, ...]:
        """The command of its container runtime."""
        return ("containerd", "-c", f"{self.settings}/containerd.toml")

    def programs(self) -> dict[str, tuple[str, ...]]:
        """Return the commands that run beside the container runtime."""
        return {
            "kubelet": _options(
                "kubelet", config=f"{self.settings}/kubelet.json", kubeconfig=self.files.conf("kubelet"),
                node_ip=self.address, hostname_override=self.name,
            ),
            "kube-proxy": _options(
                "kube-proxy", kubeconfig=self.files.conf("proxy"), hostname_override=self.name,
                proxy_mode="iptables", cluster_cidr=ALL_PODS,
                conntrack_max_per_core=0, conntrack_tcp_timeout_established=0, conntrack_tcp_timeout_close_wait=0,
                bind_address=self.address, healthz_bind_address="127.0.0.1:10256",
            ),
        }  # fmt: skip


IMPORT = ("ctr", "-n", "k8s.io", "images", "import", "--digests", "-")
"""Reads an image from its standard input into containerd."""


# The kubelet sets these of the whole machine, unless they are so; a file over each keeps them as they are.
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}


def prepare_node(disk: str, cgroup: str) -> list[str]:
    """Return the shell commands of a cluster node's boot; its containers are on ``disk``, its pods in ``cgroup``."""
    folders = [f"/var/lib/{name}" for name in ("containerd", "kubelet")]
    lines = ["mount --make-rshared /run", "mkdir -p /run/sysctls"]
    for folder in folders:
        # An overlay on an overlay is not possible.
        own = f"{disk}/{folder.rpartition('/')[2]}"
        lines += [f"mkdir -p {own} {folder}", f"mount --bind {own} {folder}", f"mount --make-rshared {folder}"]
    # Controllers of version 1 are folders; with version 2 they are all in the one above.
    lines.append("if [ -e /sys/fs/cgroup/cgroup.procs ]; then set -- /sys/fs/cgroup; else set -- /sys/fs/cgroup/*; fi")
    lines.append(f'for each; do mkdir -p "$each/{cgroup}"; done')
    for number, (name, value) in enumerate(SYSCTLS.items()):
        lines += [f"echo {value} >/run/sysctls/{number}", f"mount --bind /run/sysctls/{number} /proc/sys/{name}"]
    return lines
