"""A Kubernetes cluster of one host: etcd, API server, controller manager and scheduler; a node on Debian's containerd.

Everything is the real program. The control plane alone is enough for a dry run of the server.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.host.base import Result
from appliance.lab.engines.agents import IMPORT, ClusterNode, Files, control_plane, prepare_node
from appliance.lab.engines.cgroups import remove_cgroups
from appliance.lab.engines.hosts import EngineHost, Runner
from appliance.lab.engines.pause import pause_image
from appliance.lab.engines.pki import Authority
from appliance.lab.engines.programs import find_program
from appliance.lab.waiting import wait_until

NUMBER = 31
"""Last number of the host's address."""
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy")
"""Programs that each part needs."""

GROUP = f"sms-engines-{Path(os.environ.get('SMS_MACHINE', 'none')).name}"
"""The cgroup of the pods: other runs have others."""


class KubernetesClient:
    """A cluster that runs. ``host``: it has kubectl, whose ``options`` lead to it; ``nodes``: hosts that run pods.

    ``volumes``: a folder of all nodes.
    """

    def __init__(self, host: Runner, nodes: Sequence[Runner], options: Sequence[str], volumes: str) -> None:
        self.host, self.nodes, self.options, self.volumes = host, list(nodes), tuple(options), volumes

    def is_ready(self) -> bool:
        """Whether the API server is."""
        self.host.check()
        return self.kubectl("get", "--raw", "/readyz", ok=None).text == "ok"

    @property
    def words(self) -> tuple[str, ...]:
        """Its command line tool, as the administrator of the cluster."""
        return (str(find_program("kubectl")), *self.options)

    def kubectl(self, *words: str, ok: tuple[int, ...] | None = (0,), input: bytes | None = None) -> Result:
        """Run it to its end."""
        return self.host.run(*self.words, *words, ok=ok, input=input)

    def get(self, *words: str) -> dict[str, Any]:
        """Objects, as `kubectl get -o json` has them; empty where it prints nothing (`--ignore-not-found`)."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json").stdout or b"{}")
        return found

    def nodes_are_ready(self) -> bool:
        """Whether all are."""
        self.host.check()
        ready: list[bool] = [
            condition["type"] == "Ready" and condition["status"] == "True"
            for node in self.get("nodes")["items"]
            for condition in node["status"].get("conditions", ())
        ]
        return sum(ready) == len(self.nodes)

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
                "hostPath": {"path": f"{self.volumes}/{space}/{claim}", "type": "DirectoryOrCreate"},
            },
        }
        self.kubectl("apply", "-f", "-", input=json.dumps(volume).encode())

    def load_image(self, archive: bytes | Path) -> None:
        """Put an image of an OCI layout (a folder) or of an archive into the containerd of each node."""
        if isinstance(archive, Path):
            members = ("oci-layout", "index.json", "blobs")
            archive = subprocess.run(["tar", "-C", archive, "-c", *members], capture_output=True, check=True).stdout
        for node in self.nodes:
            node.run(*IMPORT, input=archive)


class Kubernetes(KubernetesClient):
    """One of a single host of its own, whose name is the node's."""

    def __init__(self) -> None:
        disk = "/var/lib/sms-lab/engines/kube"
        prepare = [*prepare_node(disk, GROUP), f"mkdir -p {disk}/log", f"mount --bind {disk}/log /var/log"]
        own = EngineHost("kube", NUMBER, "\n".join(prepare))
        self.own = own
        super().__init__(
            own, [], (f"--kubeconfig={disk}/pki/admin.conf", f"--cache-dir={disk}/kubectl"), f"{disk}/volumes"
        )
        self.files = Files(data=disk, keys=f"{disk}/pki")
        self.authority = Authority(own.disk / "pki")
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", "127.0.0.1", "10.96.0.1")
        self.authority.issue("apiserver", "kube-apiserver", "system:masters", (*names, own.address))
        self._add_user("admin", "admin", "system:masters")
        self.admin = Path(self.files.conf("admin"))
        self.start_control_plane()

    def _add_user(self, name: str, user: str, group: str = "") -> None:
        """Write how a program reaches the API server."""
        pair = self.authority.issue(name, user, group)
        conf = self.authority.kubeconfig(f"https://{self.own.address}:6443", pair)
        self.own.host.write(self.files.conf(name), conf, mode=0o600)

    def _start(self, programs: Mapping[str, Sequence[str]]) -> None:
        for name, (program, *words) in programs.items():
            self.own.start(name, str(find_program(program)), *words)

    def start_control_plane(self) -> None:
        """Start all of it, and wait until it works."""
        self._add_user("controller-manager", "system:kube-controller-manager")
        self._add_user("scheduler", "system:kube-scheduler")
        commands = control_plane(self.own.address, self.files)
        server = ("etcd", "kube-apiserver")
        self._start({name: commands[name] for name in server})
        wait_until(self.is_ready, "the API server is ready", 120, 0.5)
        self._start({name: argv for name, argv in commands.items() if name not in server})
        accounts = ("get", "serviceaccount", "default")
        wait_until(lambda: self.kubectl(*accounts, ok=None).status == 0, "the controller manager works", 60, 0.5)

    def start_node(self) -> None:
        """Start containerd, kubelet and kube-proxy, and wait until the node is ready."""
        own = self.own
        node = ClusterNode(own.name, own.address, GROUP, self.files, str(own.disk))
        for name, text in node.texts().items():
            own.host.write(f"{own.disk}/{name}", text.encode())
        own.start("containerd", *node.containerd)
        wait_until(lambda: own.run("ctr", "version", ok=None).status == 0, "containerd answers", 60)
        self.nodes.append(own)
        self.load_image(pause_image(own.disk))
        self._add_user("kubelet", f"system:node:{own.name}", "system:nodes")
        self._add_user("proxy", "system:kube-proxy")
        self._start(node.programs())
        wait_until(self.nodes_are_ready, "the node is ready", 150, 0.5)

    def remove(self) -> None:
        """Take it down."""
        self.own.remove()
        wait_until(lambda: remove_cgroups(GROUP), "the cgroups of its pods are gone", 30)


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
