"""A Kubernetes cluster of one host: etcd, API server, controller manager and scheduler; a node on Debian's containerd.

Everything is the real program. The control plane alone is enough for a dry run of the server.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.host.base import Result
from appliance.lab.engines.hosts import EngineHost
from appliance.lab.engines.pki import Authority, Pair
from appliance.lab.engines.programs import find_program
from appliance.lab.engines.waiting import wait_until

NUMBER = 31
"""Last number of the host's address."""
SERVICES = "10.96.0.0/16"
PODS = "10.97.0.0/24"
PAUSE = "localhost/pause:tests"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy")
"""Programs that each part needs."""

# The kubelet sets these of the whole machine, unless they are so; a file over each keeps them as they are.
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
CGROUPS = "/sys/fs/cgroup" if Path("/sys/fs/cgroup/cgroup.procs").exists() else "/sys/fs/cgroup/*"
GROUP = f"sms-engines-{Path(os.environ.get('SMS_MACHINE', 'none')).name}"
"""The cgroup of the pods: other runs have others."""
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


class Kubernetes:
    """The cluster; all runs on ``host``, whose name is the node's."""

    def __init__(self) -> None:
        disk = "/var/lib/sms-lab/engines/kube"
        mounts = [
            f"mkdir -p {disk}/containerd {disk}/kubelet {disk}/log /var/lib/kubelet",
            f"mount --bind {disk}/containerd /var/lib/containerd",
            f"mount --bind {disk}/kubelet /var/lib/kubelet",
            "mount --make-rshared /var/lib/containerd",
            "mount --make-rshared /var/lib/kubelet",
            f"mount --bind {disk}/log /var/log",
            "mkdir /run/sysctls",
        ]
        mounts += [f"for each in {CGROUPS}; do mkdir -p $each/{GROUP}; done"]
        for number, (name, value) in enumerate(SYSCTLS.items()):
            mounts.append(f"echo {value} >/run/sysctls/{number}")
            mounts.append(f"mount --bind /run/sysctls/{number} /proc/sys/{name}")
        self.host = host = EngineHost("kube", NUMBER, "\n".join(mounts))
        self.url = f"https://{host.address}:6443"
        self.authority = Authority(host.disk / "pki")
        own = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", "127.0.0.1", "10.96.0.1")
        self.server = self.authority.issue("apiserver", "kube-apiserver", "system:masters", (*own, host.address))
        self.admin = self._kubeconfig("admin", self.authority.issue("admin", "admin", "system:masters"))
        self.start_control_plane()

    def _kubeconfig(self, name: str, pair: Pair) -> Path:
        """Write how a program reaches the API server."""
        path = self.host.disk / f"{name}.conf"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "c",
                    "cluster": {"server": self.url, "certificate-authority": str(self.authority.certificate)},
                }
            ],
            "users": [
                {"name": "u", "user": {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}}
            ],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(document))
        return path

    def _start(self, program: str, **options: object) -> None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self.host.start(program, str(find_program(program)), *words)

    def start_control_plane(self) -> None:
        """Start all of it, and wait until the API server is ready."""
        host, server, authority = self.host, self.server, self.authority.certificate
        peer, client = "http://127.0.0.1:2380", "http://127.0.0.1:2379"
        self._start(
            "etcd", name="e", data_dir=host.disk / "etcd", unsafe_no_fsync="true",
            listen_client_urls=client, advertise_client_urls=client,
            listen_peer_urls=peer, initial_advertise_peer_urls=peer, initial_cluster=f"e={peer}",
        )  # fmt: skip
        self._start(
            "kube-apiserver", advertise_address=host.address, etcd_servers=client, allow_privileged="true",
            authorization_mode="Node,RBAC", enable_admission_plugins="NodeRestriction", client_ca_file=authority,
            tls_cert_file=server.certificate, tls_private_key_file=server.key,
            kubelet_client_certificate=server.certificate, kubelet_client_key=server.key,
            # Else logs and exec look the node's name up.
            kubelet_preferred_address_types="InternalIP",
            service_account_issuer="https://kubernetes.default.svc", service_account_key_file=server.key,
            service_account_signing_key_file=server.key, service_cluster_ip_range=SERVICES,
        )  # fmt: skip
        wait_until(self.is_ready, "the API server is ready", 120, 0.5)
        issue = self.authority.issue
        manager = self._kubeconfig("controller-manager", issue("manager", "system:kube-controller-manager"))
        scheduler = self._kubeconfig("scheduler", issue("scheduler", "system:kube-scheduler"))
        self._start(
            "kube-controller-manager", kubeconfig=manager, authentication_kubeconfig=manager, leader_elect="false",
            authorization_kubeconfig=manager, root_ca_file=authority, use_service_account_credentials="true",
            service_account_private_key_file=server.key, bind_address="127.0.0.1",
        )  # fmt: skip
        self._start(
            "kube-scheduler", kubeconfig=scheduler, authentication_kubeconfig=scheduler, leader_elect="false",
            authorization_kubeconfig=scheduler, bind_address="127.0.0.1",
        )  # fmt: skip
        accounts = ("get", "serviceaccount", "default")
        wait_until(lambda: self.kubectl(*accounts, ok=None).status == 0, "the controller manager works", 60, 0.5)

    def is_ready(self) -> bool:
        """Whether the API server is."""
        self.host.check()
        return self.kubectl("get", "--raw", "/readyz", ok=None).text == "ok"

    @property
    def words(self) -> tuple[str, ...]:
        """Its command line tool, as the administrator of the cluster."""
        return (str(find_program("kubectl")), f"--kubeconfig={self.admin}", f"--cache-dir={self.host.disk}/kubectl")

    def kubectl(self, *words: str, ok: tuple[int, ...] | None = (0,), input: bytes | None = None) -> Result:
        """Run it to its end."""
        return self.host.run(*self.words, *words, ok=ok, input=input)

    def get(self, *words: str) -> dict[str, Any]:
        """Objects, as `kubectl get -o json` has them; empty where it prints nothing (`--ignore-not-found`)."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json").stdout or b"{}")
        return found

    # The node

    def start_node(self) -> None:
        """Start containerd, kubelet and kube-proxy, and wait until the node is ready."""
        host, disk = self.host, self.host.disk
        cni = disk / "cni"
        cni.mkdir()
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
                    "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]},
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
                {"type": "loopback"},
            ],
        }
        (cni / "10-pods.conflist").write_text(json.dumps(bridge))
        (disk / "containerd.toml").write_text(CONTAINERD.format(pause=PAUSE, cni=cni))
        host.start("containerd", "containerd", "-c", str(disk / "containerd.toml"))
        wait_until(lambda: host.run("ctr", "version", ok=None).status == 0, "containerd answers", 60)
        self.load_image(_pause_image(disk))
        self._start_kubelet()
        proxy = self._kubeconfig("proxy", self.authority.issue("proxy", "system:kube-proxy"))
        self._start(
            "kube-proxy", kubeconfig=proxy, hostname_override=host.name, proxy_mode="iptables", cluster_cidr=PODS,
            conntrack_max_per_core=0, conntrack_tcp_timeout_established=0, conntrack_tcp_timeout_close_wait=0,
            bind_address=host.address, healthz_bind_address="127.0.0.1:10256",
        )  # fmt: skip
        wait_until(self._node_is_ready, "the node is ready", 150, 0.5)

    def _start_kubelet(self) -> None:
        host, disk = self.host, self.host.disk
        pair = self.authority.issue("kubelet", f"system:node:{host.name}", "system:nodes")
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.authority.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{GROUP}",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "4s",
            "resolvConf": str(disk / "resolv.conf"),
            "syncFrequency": "5s",
            "volumePluginDir": str(disk / "plugins"),
        }
        (disk / "resolv.conf").write_text("")
        (disk / "kubelet.json").write_text(json.dumps(settings, indent=1))
        conf = self._kubeconfig("kubelet", pair)
        self._start(
            "kubelet", config=disk / "kubelet.json", kubeconfig=conf, node_ip=host.address, hostname_override=host.name
        )

    def _node_is_ready(self) -> bool:
        self.host.check()
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for node in self.get("nodes")["items"]
            for condition in node["status"].get("conditions", ())
        )

    def provide_volumes(self, space: str) -> None:
        """Give each claim of a namespace a folder of the host as its volume, as a storage class would."""
        for claim in self.get("-n", space, "pvc")["items"]:
            self.provide_volume(space, claim["metadata"]["name"], claim["spec"]["resources"]["requests"]["storage"])

    def provide_volume(self, space: str, claim: str, size: str) -> None:
        """Make a volume for a claim, which need not be there yet."""
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{space}-{claim}"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": size},
                "claimRef": {"namespace": space, "name": claim},
                "hostPath": {"path": f"{self.host.disk}/volumes/{space}/{claim}", "type": "DirectoryOrCreate"},
            },
        }
        self.kubectl("apply", "-f", "-", input=json.dumps(volume).encode())

    def load_image(self, archive: bytes | Path) -> None:
        """Put an image of an OCI layout (a folder) or of an archive into the node's containerd."""
        if isinstance(archive, Path):
            members = ("oci-layout", "index.json", "blobs")
            archive = subprocess.run(["tar", "-C", archive, "-c", *members], capture_output=True, check=True).stdout
        self.host.run("ctr", "-n", "k8s.io", "images", "import", "--digests", "-", input=archive)

    def remove(self) -> None:
        """Take it down."""
        self.host.remove()
        wait_until(_remove_cgroups, "the cgroups of its pods are gone", 30)


def _remove_cgroups() -> bool:
    """Remove those of the pods; return whether none is left."""
    top = Path("/sys/fs/cgroup")
    own = [str(each / GROUP) for each in (top, *top.iterdir()) if (each / GROUP).is_dir()]
    argv = ["find", *own, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]
    return not own or subprocess.run(argv, capture_output=True).returncode == 0


def _pause_image(folder: Path) -> bytes:
    """The image of the first process of each pod, as an archive of Docker."""
    program = folder / "pause"
    source = Path(__file__).with_name("pause.c")
    subprocess.run(["gcc", "-static", "-Os", "-s", "-o", program, source], check=True)
    layer = _tar({"pause": program.read_bytes()}, mode=0o755)
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    names = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
    texts = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(names).encode()}
    return _tar({**texts, "layer.tar": layer})


def _architecture() -> str:
    """As OCI names it."""
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def _tar(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


@contextmanager
def kubernetes_cluster(*, node: bool = False) -> Iterator[Kubernetes]:
    """A control plane for as long as the context lasts; ``node``: with a node that runs pods."""
    cluster = Kubernetes()
    try:
        if node:
            cluster.start_node()
        yield cluster
    finally:
        cluster.remove()
