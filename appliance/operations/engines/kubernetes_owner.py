"""Kubernetes, as one that can have the state of the services: volumes of claims, which a pod mounts while it moves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from secrets import token_hex
from typing import Any

import yaml

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.engines.clients import find_kubectl
from appliance.operations.engines.kubernetes import find_kubernetes
from appliance.operations.engines.owners import Command, EngineOwner
from appliance.operations.engines.secret_files import new_secrets
from appliance.plan.services.controllers import KUBERNETES
from appliance.tools.engine import text_at
from appliance.tools.held import new_mark

POD, CONTAINER = "sms-move", "state"
"""Start of the name of the pod, and its container."""
LABELS = {"app.kubernetes.io/part-of": "sms", "app.kubernetes.io/component": "move"}
READY_S = 180
ACCOUNT_S = 60
"""Seconds in which a new namespace has its service account."""
LOST = "has somebody deleted it? `sms failover --i-have-fenced` begins with a snapshot: docs/engines.md"
LONGEST_S = 6 * 3600
"""Seconds after which the pod ends, if the run that started it was killed."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID")


class KubernetesOwner(EngineOwner):
    """The site's Kubernetes cluster."""

    name = KUBERNETES

    def __init__(self, cluster: Cluster, host: Host, paths: Sequence[str]) -> None:
        super().__init__(cluster, host, paths)
        self.kubectl = find_kubectl(cluster.site, host)
        self.kubernetes = find_kubernetes(cluster, host)
        self.where = f"Kubernetes (namespace {self.bundle.namespace})"
        self.pod = f"{POD}-{token_hex(4)}"
        self._mounted: bool | None = None
        """Whether the pod has the volumes; None: there is none of this run."""

    def stop(self) -> None:
        self._delete_others()
        super().stop()

    def lacks(self) -> str:
        name = self.bundle.namespace
        return "" if self.kubectl.get("namespace", name) is not None else f"the namespace {name}"

    def open(self) -> None:
        self.kubernetes.prepare_namespace(self.bundle)
        deadline = self.cluster.env.clock.monotonic() + ACCOUNT_S
        while self.kubectl.get("serviceaccount", "default") is None:  # without it no pod is accepted
            if self.cluster.env.clock.monotonic() > deadline:
                raise SmsError(f"namespace {self.bundle.namespace} has no service account `default`")
            self.cluster.env.clock.sleep(0.5)
        self.check_image()

    def prepare(self) -> None:
        self._delete_others()
        self.engine.prepare(self.bundle, new_secrets(self.cluster, self.bundle, self.engine))
        claims = [_claim(name, spec) for name, spec in self._sets()]
        self.kubectl.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": claims}).encode())
        super().prepare()

    def discard(self) -> None:
        if not self._lacking():
            super().discard()

    def free_bytes(self) -> int:
        """Return the size that the site file gives each volume."""
        return self.cluster.site.engines.kubernetes.storage_gb << 30

    def root(self, path: str) -> str:
        for name, folders in self._folders().items():
            if any(path == folder or path.startswith(f"{folder}/") for folder in folders):
                return f"/state/{name}"
        raise SmsError(f"no workload of Kubernetes has {path}")

    def _sets(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and specification of each StatefulSet with state, as it is deployed."""
        for item in self.bundle.items:
            for each in yaml.safe_load_all(item.text):
                if each and each["kind"] == "StatefulSet" and each["spec"].get("volumeClaimTemplates"):
                    yield item.name, each["spec"]

    def _folders(self) -> dict[str, set[str]]:
        """Return the folders of each volume, by workload."""
        found: dict[str, set[str]] = {}
        for name, spec in self._sets():
            pod = spec["template"]["spec"]
            mounts = (one for each in (*pod["initContainers"], *pod["containers"]) for one in each["volumeMounts"])
            found[name] = {one["mountPath"] for one in mounts if one["name"] == "state"}
        return found

    def inside(self, argv: Sequence[str], *, state: bool = True, copy: bool = False, input: bool = False) -> Command:
        if self._mounted is None or (state and not self._mounted):
            self._delete()
            self._open(state)
        mark = None if input else new_mark()
        return Command(self.host, self.kubectl.exec_argv(self.pod, CONTAINER, *argv, mark=mark), mark)

    def _open(self, state: bool) -> None:
        """Start the pod; with ``state``, it has the volumes.

        Raises:
            Refused: a volume is missing.
        """
        if state and (lacking := self._lacking()):
            raise Refused(f"{self.where} does not have the state: the claim {lacking[0]} is missing", hint=LOST)
        sets = dict(self._sets())
        template = next(iter(sets.values()))["template"]["spec"]
        self.kubectl.apply(
            json.dumps(_pod(self.pod, self.bundle.image, template, list(sets) if state else [])).encode()
        )
        wait = ("wait", "--for=condition=Ready", f"--timeout={READY_S}s", f"pod/{self.pod}")
        self.kubectl.run(*wait, timeout=READY_S + 30, limited=False)
        self._mounted = state

    def _lacking(self) -> list[str]:
        """Return the claims that are not there."""
        there = {text_at(one, "metadata", "name") for one in self.kubectl.find("persistentvolumeclaims")}
        return [name for name in map(_claim_name, dict(self._sets())) if name not in there]

    def close(self) -> None:
        if self._mounted is not None:
            self._delete()

    def _delete(self) -> None:
        self.kubectl.delete("pod", self.pod, wait_s=60)
        self._mounted = None

    def _delete_others(self) -> None:
        """Delete the pods of runs that were killed: their volumes cannot be mounted on another node."""
        for pod in self.kubectl.pods(",".join(f"{name}={value}" for name, value in LABELS.items())):
            if pod.name != self.pod:
                self.kubectl.delete("pod", pod.name, wait_s=60)


def _claim_name(name: str) -> str:
    return f"state-{name}-0"


def _claim(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return a claim as the StatefulSet would create it."""
    template = spec["volumeClaimTemplates"][0]
    metadata = {"name": _claim_name(name), "labels": template["metadata"].get("labels", {})}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": template["spec"]}


def _pod(name: str, image: str, template: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the pod. It runs where those of the services may run."""
    mounts = [{"name": name, "mountPath": f"/state/{name}"} for name in names]
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": _claim_name(name)}} for name in names]
    own = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", str(LONGEST_S)],
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
        },
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "activeDeadlineSeconds": LONGEST_S,
        **{name: template[name] for name in ("nodeSelector", "tolerations", "priorityClassName") if name in template},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [own],
        "volumes": [*volumes, {"name": "tmp", "emptyDir": {}}],
    }
    metadata = {"name": name, "labels": LABELS}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
