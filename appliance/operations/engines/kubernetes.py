"""The services on Kubernetes: server-side apply, StatefulSets with one pod each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.config.engines import SecretRef
from appliance.engines.attachment import DEFINITIONS
from appliance.engines.deploy import Bundle, Item
from appliance.engines.kubernetes import find_secrets
from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Result
from appliance.operations.context import Cluster
from appliance.operations.engines.clients import find_kubectl
from appliance.operations.engines.engine import (
    Difference,
    Instance,
    Part,
    SecretState,
    WorkloadState,
    decode_secret,
    with_answers,
)
from appliance.operations.engines.export import UNBUILT
from appliance.operations.env import Env
from appliance.plan.services.probes import read_probe
from appliance.progress import Progress
from appliance.tools.engine import Forbidden, at, text_at
from appliance.tools.kubectl import Kubectl, Pod, PodContainer, StatefulSet

OLDEST = 29
"""Minor version of Kubernetes 1 from which it has native sidecars."""
LOCAL = "localhost/"
"""Start of the name of an image that is in no registry."""
PART_OF = "app.kubernetes.io/part-of"
"""Label of what sms has created."""
CHANGING = "sms/changing"
"""Label of a Secret while pods may have its earlier content: a run that is killed leaves it to the next one."""
LISTED = 50
"""Images that a kubelet reports at most (nodeStatusMaxImages)."""
REPORTED_S = 45
"""Seconds that a kubelet takes to report a new image: it lists them every 30 s, its status has them within 10 more."""
DELETE_S = 30


@dataclass(frozen=True)
class OnKubernetes:
    """The site's Kubernetes cluster.

    ``secret_refs``: Secret and key by the name of the file; ``node``: the cluster node that runs the pods, if one is
    set; ``attached``: whether Multus attaches a pod.
    """

    kubectl: Kubectl
    secret_refs: Mapping[str, SecretRef]
    env: Env
    node: str = ""
    attached: bool = False
    name = "kubernetes"

    def check(self, cluster: Cluster, bundle: Bundle, *, send: bool = True) -> None:
        """Check the server's version, and that nodes have the image or can pull it."""
        found = self.kubectl.version()
        if found < (1, OLDEST):
            raise Refused(f"Kubernetes {found[0]}.{found[1]} has no sidecars", hint=f"use version 1.{OLDEST} or later")
        if self.attached:
            self._check_multus(cluster.env.progress)
        if bundle.image.startswith(LOCAL):
            if bundle.image.endswith(f":{UNBUILT}"):
                raise Refused(
                    f"this host has no image {cluster.places.current}, after which that of the nodes is named",
                    hint="`sms build` creates one; or set `engines.kubernetes.image`",
                )
            self._check_image(bundle.image, cluster.env.progress)

    def _check_multus(self, progress: Progress) -> None:
        try:
            found = self.kubectl.get("customresourcedefinition", DEFINITIONS)
        except Forbidden:
            progress.report("note: the account cannot list definitions: whether the cluster has Multus is not known")
            return
        if found is None:
            raise Refused(
                f"the Kubernetes cluster has no {DEFINITIONS}, which `network: attached` needs",
                hint="install Multus, or set another `network` in `engines.kubernetes`",
            )

    def _check_image(self, image: str, progress: Progress) -> None:
        deadline, said = self.env.clock.monotonic() + REPORTED_S, False
        while True:
            try:
                nodes = [one for one in self.kubectl.nodes() if one.ready and not one.cordoned]
            except Forbidden:
                progress.report("note: the account cannot list nodes: whether they have the image is not known")
                return
            nodes = [one for one in nodes if self.node in ("", one.name)]
            lacking = [one.name for one in nodes if image not in one.images and len(one.images) < LISTED]
            if len(lacking) < len(nodes) or self.env.clock.monotonic() > deadline:
                break
            if not said:
                progress.report(f"note: no node has reported the image yet, which can take {REPORTED_S} s: waiting")
                said = True
            self.env.clock.sleep(1)
        hint = (
            "`sms image oci -o DIR --load HOST` imports it on an admin host; on others: "
            "tar -C DIR -c oci-layout index.json blobs | ssh NODE ctr -n k8s.io images import --digests -"
        )
        if not nodes:
            raise Refused("no node of the Kubernetes cluster is ready for pods", hint="kubectl get nodes")
        if len(lacking) == len(nodes):
            raise Refused(f"no node has the image {image}", hint=hint)
        if lacking:
            progress.report(f"warning: {', '.join(lacking)} lacks the image {image}; {hint}")

    def differences(self, bundle: Bundle) -> list[Difference]:
        """Return the differences by a dry run of the server."""
        if self.kubectl.get("namespace", bundle.namespace) is None:
            return [Difference(one.name, "create", one.text) for one in bundle.items]
        there = {one.name for one in self.kubectl.stateful_sets()} | {"namespace"}
        with self.env.pool(3) as pool:
            texts = list(pool.map(lambda one: self.kubectl.diff(one.text.encode()), bundle.items))
        return [
            Difference(one.name, "unchanged" if not text else "change" if one.name in there else "create", text)
            for one, text in zip(bundle.items, texts, strict=True)
        ]

    def secrets(self, bundle: Bundle) -> list[SecretState]:
        """Return the Secrets; one that sms has created has its label."""
        found = []
        for name in sorted({name for one in bundle.items for name in one.secrets}):
            given = self.secret_refs[name]
            present = self.kubectl.get("secret", given.name)
            text = "" if at(present, "metadata", "labels", CHANGING) else text_at(present, "data", given.key)
            found.append(
                SecretState(
                    name,
                    f"secret {given.name}",
                    tuple(one.name for one in bundle.items if name in one.secrets),
                    None if present is None else decode_secret(text),
                    present is None or text_at(present, "metadata", "labels", PART_OF) == "sms",
                )
            )
        return found

    def prepare(self, bundle: Bundle, secrets: Sequence[tuple[SecretState, bytes]]) -> list[str]:
        """Create the namespace, and write the Secrets; pods that have an earlier one are deleted."""
        made = self.prepare_namespace(bundle)
        own = {"app.kubernetes.io/instance": bundle.cluster, PART_OF: "sms"}
        changed = [each for each in secrets if each[0].value is not None]
        for one, value in secrets:
            given, mark = self.secret_refs[one.name], {CHANGING: "true"} if one.value is not None else {}
            self.kubectl.put_secret(given.name, {given.key: value}, own | mark)
            made.append(one.where)
        for name in dict.fromkeys(name for one, _ in changed for name in one.items):
            item = bundle.find(name)
            self.kubectl.delete("pod", f"{name}-0", wait_s=(item.stop_s if item else 0) + DELETE_S)
        for one, value in changed:
            given = self.secret_refs[one.name]
            self.kubectl.put_secret(given.name, {given.key: value}, own)
        return made

    def prepare_namespace(self, bundle: Bundle) -> list[str]:
        """Create the namespace; return it, unless it was there."""
        made = []
        if self.kubectl.get("namespace", bundle.namespace) is None:
            made.append(f"namespace {bundle.namespace}")
        for one in bundle.items:
            if one.kind == "namespace":
                self.kubectl.apply(one.text.encode())
        return made

    def apply(self, item: Item) -> None:
        """Apply the objects of a workload."""
        self.kubectl.apply(item.text.encode())

    def nudge(self, state: WorkloadState) -> None:
        """Delete a pod of an earlier revision that is not ready: a StatefulSet waits for it for ever."""
        for one in state.instances:
            if not one.current and not one.ready:
                self.kubectl.delete("pod", one.name)

    def states(self, bundle: Bundle) -> list[WorkloadState]:
        """Return the state of each StatefulSet."""
        chosen = selector(bundle)
        with self.env.pool(3) as pool:
            sets = pool.submit(self.kubectl.stateful_sets, chosen)
            claims = pool.submit(self.kubectl.find, "persistentvolumeclaims", chosen_claims(bundle))
            pods = self.kubectl.pods(chosen)
            by_name = {one.name: one for one in sets.result()}
            volumes = {text_at(one, "metadata", "name"): _volume(one) for one in claims.result()}
        return [
            _state(item, by_name.get(item.name), pods, volumes.get(f"state-{item.name}-0", ""))
            for item in bundle.items
            if item.kind == "service"
        ]

    def probe(self, bundle: Bundle, states: Sequence[WorkloadState]) -> list[WorkloadState]:
        """Run the probe of each service in its container."""
        units = {unit for item in bundle.items for unit in item.units}
        todo = [(one.name, part.name) for each in states for one in each.instances for part in one.parts]
        todo = [(pod, part) for pod, part in todo if part in units]

        def ask(one: tuple[str, str]) -> tuple[bool, str]:
            try:
                argv = ("/opt/sms/bin/sms-probe", one[1])
                result = self.kubectl.exec(*one, *argv, ok=None, timeout=30)
            except SmsError as error:
                return False, error.message
            answer = next(filter(None, map(read_probe, result.stdout.decode(errors="replace").splitlines())), None)
            return (answer.ok, answer.detail) if answer else (False, "no answer")

        with self.env.pool(4) as pool:
            answers = dict(zip(todo, pool.map(ask, todo), strict=True))
        return [with_answers(state, answers) for state in states]

    def log(self, bundle: Bundle, state: WorkloadState, lines: int) -> str:
        """Return the last lines of the container that is not ready."""
        for one in state.instances:
            for part in one.parts:
                if not part.ready:
                    text = self.kubectl.logs(one.name, part.name, lines)
                    return text or self.kubectl.logs(one.name, part.name, lines, previous=True)
        return ""

    def stop(self, item: Item) -> None:
        """Scale a StatefulSet to no pod; its objects and its claim stay."""
        if item.kind == "service" and self.kubectl.get("statefulset", item.name) is not None:
            self.kubectl.scale(item.name, 0)

    def control(self, bundle: Bundle, *argv: str, timeout: float = 60) -> Result:
        """Run a command in the controller's container."""
        pod = f"{bundle.controller}-0"
        return self.kubectl.exec(pod, bundle.controller, *argv, ok=None, timeout=timeout)

    def has_node(self, node: str) -> bool:
        """Return whether the cluster has that node."""
        return self.kubectl.get("node", node) is not None

    def drain_node(self, bundle: Bundle, node: str, timeout_s: float) -> list[str]:
        """Cordon a node, stop our pods there, and evict all others.

        The budget of the controller's pod permits no eviction: it is deleted, as nodes and jobs live with its outage.
        """
        self.kubectl.cordon(node)
        done = [f"{node} is cordoned"]
        for pod in self.kubectl.pods(selector(bundle)):
            if pod.node == node:
                self.kubectl.delete("pod", pod.name, wait_s=timeout_s)
                done.append(f"{pod.name} was stopped there; it starts on another node if its volume can follow")
        result = self.kubectl.drain(node, timeout_s)
        if result.status:
            why = result.stderr.decode(errors="replace").strip().splitlines()
            raise SmsError(
                f"{node} is cordoned, but still has pods: {why[-1] if why else 'no message'}",
                hint=f"kubectl get pods -A --field-selector spec.nodeName={node}; then run this again",
            )
        done.append("its other pods were evicted")
        return done

    def drained(self) -> list[str]:
        """Return the nodes that are cordoned."""
        try:
            return [one.name for one in self.kubectl.nodes() if one.cordoned]
        except Forbidden:
            return []

    def undo_drain(self, node: str) -> None:
        """Let pods start on the node."""
        self.kubectl.cordon(node, undo=True)


def selector(bundle: Bundle) -> str:
    """Return the labels of all objects of a cluster."""
    return f"{chosen_claims(bundle)},{PART_OF}=sms"


def chosen_claims(bundle: Bundle) -> str:
    """Return the label of its claims, which have those that never change."""
    return f"app.kubernetes.io/instance={bundle.cluster}"


def find_kubernetes(cluster: Cluster, host: Host) -> OnKubernetes:
    """Return the site's cluster, with ``kubectl`` of a host."""
    site, given = cluster.site, cluster.site.engines.kubernetes
    kubectl, secrets = find_kubectl(site, host), find_secrets(site)
    return OnKubernetes(kubectl, secrets, cluster.env, given.node or "", given.network == "attached")


def _volume(claim: dict[str, object]) -> str:
    """Return a claim in a few words."""
    phase, volume = text_at(claim, "status", "phase"), text_at(claim, "spec", "volumeName")
    return f"{text_at(claim, 'metadata', 'name')}: {phase or 'unknown'}" + (f" ({volume})" if volume else "")


def _state(item: Item, found: StatefulSet | None, pods: Iterable[Pod], volume: str) -> WorkloadState:
    if found is None:
        return WorkloadState(item.name, item.kind, False, 1, (), volume)
    own = tuple(_instance(pod, found) for pod in pods if pod.owner == item.name)
    problem = "" if found.observed else "its change was not seen by the controller manager yet"
    return WorkloadState(item.name, item.kind, True, found.replicas, own, volume, problem)


def _instance(pod: Pod, owner: StatefulSet) -> Instance:
    parts = tuple(
        Part(one.name, one.ready or _has_worked(one), one.restarts, _why(one))
        for one in pod.containers
        if not _has_worked(one)
    )
    image = next((one.image_id for one in pod.containers if one.image_id), "")
    why = "it is being stopped" if pod.stopping else pod.reason or pod.phase
    current = not owner.wanted or pod.revision == owner.wanted
    return Instance(pod.name, pod.node, pod.ready and not pod.stopping, current, parts, image, why)


def _has_worked(one: PodContainer) -> bool:
    """Return whether it is an init container that has done its work."""
    return one.first and not one.running and not one.reason


def _why(one: PodContainer) -> str:
    if one.reason:
        return f"{one.reason}: {one.message}" if one.message else one.reason
    return "" if one.ready else "its readiness probe fails"
