"""Kubernetes, by its own program ``kubectl``; objects are changed by server-side apply.

The cluster and the account are those of a file (kubeconfig), or of the caller's environment (``KUBECONFIG``). Values of
Secrets are in standard input only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ConfigError
from appliance.host.base import CommandError, Host, NoProgram, Result
from appliance.shared.secret import READS_SECRET, SecretInput
from appliance.text import printable
from appliance.tools.engine import Server, at, list_at, number_at, read_json, run_program, text_at, word_at
from appliance.tools.held import Mark, hold_argv, new_mark

MANAGER = "sms"
"""Field manager of server-side apply."""
MASTER, LOCAL = "KUBERNETES_MASTER", "http://localhost:8080"
"""What `kubectl` takes without a server in its configuration: a variable, else an address."""
REQUEST_S, COMMAND_S = 30, 120
"""Time limits of one request, and of a command with several, in seconds."""
HINT = "`engines.kubernetes.kubeconfig` and `context` of the site file, or KUBECONFIG, name cluster and account"
NO_CONFIG = re.compile(
    r"stat \S.*: no such file.*|error loading config file.*|context .*(?:does not exist|not found).*"
)
"""In messages of kubectl about its own configuration."""
CHANGED = 1
"""Status of `kubectl diff` where objects differ."""
MISSING = re.compile(r"\(NotFound\)|not found|doesn't have a resource type", re.IGNORECASE)


@dataclass(frozen=True)
class PodContainer:
    """A container of a pod. ``reason`` and ``message``: why it does not run; ``image_id`` has the image's digest."""

    name: str
    image: str
    image_id: str
    ready: bool
    restarts: int
    running: bool
    reason: str = ""
    message: str = ""
    first: bool = False


@dataclass(frozen=True)
class Pod:
    """A pod. ``phase`` is Kubernetes' own; ``revision``: of its StatefulSet; ``reason``: why it is not scheduled."""

    name: str
    uid: str
    node: str
    phase: str
    ready: bool
    stopping: bool
    owner: str
    revision: str
    reason: str = ""
    containers: tuple[PodContainer, ...] = ()

    @property
    def restarts(self) -> int:
        """Restarts of all its containers."""
        return sum(one.restarts for one in self.containers)


@dataclass(frozen=True)
class StatefulSet:
    """A StatefulSet. ``current`` and ``wanted``: names of the revisions that its pod has and is to have."""

    name: str
    replicas: int
    ready: int
    current: str
    wanted: str
    observed: bool


@dataclass(frozen=True)
class Node:
    """A node of the cluster. ``images``: names of those in its containerd."""

    name: str
    ready: bool
    cordoned: bool
    images: tuple[str, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Kubectl:
    """The program on a host, for a cluster and one of its namespaces."""

    host: Host
    namespace: str
    kubeconfig: str = ""
    context: str = ""
    _prefix: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        words = ["kubectl"]
        words += [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        words += [f"--context={self.context}"] if self.context else []
        words += [f"--namespace={self.namespace}"] if self.namespace else []
        object.__setattr__(self, "_prefix", tuple(words))

    def argv(self, *words: str) -> tuple[str, ...]:
        """Return the words of a command."""
        return (*self._prefix, *words)

    def run(
        self,
        *words: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float = COMMAND_S,
        limited: bool = True,
    ) -> Result:
        """Run a command.

        Args:
            limited: whether each request has a time limit; not where one lasts as long as the command.

        Raises:
            Refused: there is no such program, or it is not permitted.
            ConfigError: its configuration is missing or invalid.
            Unreachable: the API server did not answer.
            CommandError: another error.
        """
        limit = (f"--request-timeout={REQUEST_S}s",) if limited else ()
        try:
            return run_program(self.host, self.argv(*limit, *words), input=input, ok=ok, timeout=timeout, hint=HINT)
        except CommandError as error:
            why = error.result.stderr.decode(errors="replace")
            if found := NO_CONFIG.search(why):
                raise ConfigError(
                    f"{self.host.name}: `kubectl` cannot use its configuration: {printable(found[0])}", hint=HINT
                ) from error
            raise

    def server(self) -> Server:
        """Return the API server of its configuration; nothing is sent there.

        Without a configuration it is that of a variable, or this machine.
        """
        where = f"the kubeconfig {self.kubeconfig}" if self.kubeconfig else "the kubeconfig of `kubectl`"
        try:
            # It prints no credentials. Its status is 1 where there is no current context, which is not an error here.
            shown = self.host.run(*self.argv("config", "view", "--minify", "-o", "json"), ok=None, timeout=REQUEST_S)
            given = at(json.loads(shown.stdout or b"{}"), "clusters", 0, "cluster")
        except (NoProgram, ValueError, RecursionError):
            given = None
        if url := text_at(given, "server"):
            return Server(url, where, at(given, "insecure-skip-tls-verify") is not True)
        url = self.host.run("printenv", MASTER, ok=None).text
        return Server(url or LOCAL, MASTER if url else where)

    def version(self) -> tuple[int, int]:
        """Return the version of the API server."""
        found = read_json(self.run("version", "-o", "json").stdout, "kubectl version")
        major, minor = (
            re.sub(r"\D.*", "", text_at(found, "serverVersion", part)) or "0" for part in ("major", "minor")
        )
        return int(major), int(minor)

    # Objects

    def apply(self, objects: bytes) -> list[str]:
        """Make objects what the text says, YAML or JSON; return the line of each that kubectl prints.

        Fields that others have changed become ours again.
        """
        words = ("apply", "--server-side", f"--field-manager={MANAGER}", "--force-conflicts", "-f", "-")
        return self.run(*words, input=objects).text.splitlines()

    def diff(self, objects: bytes) -> str:
        """Return how the cluster's objects differ from these, by a dry run of the server; empty if they do not.

        Secrets are masked by kubectl.
        """
        words = ("diff", "--server-side", f"--field-manager={MANAGER}", "--force-conflicts", "-f", "-")
        result = self.run(*words, input=objects, ok=(0, CHANGED))
        if result.status == CHANGED and not result.text:
            raise CommandError(result)  # of diff(1), or of kubectl itself, which then prints nothing
        return result.stdout.decode(errors="replace")

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if there is none."""
        secret = kind == "secret"
        result = self.run("get", kind, name, "--ignore-not-found", "-o", "json", input=READS_SECRET if secret else None)
        found = read_json(result.stdout, f"kubectl get {kind}", secret=secret) if result.stdout.strip() else None
        return found if isinstance(found, dict) else None

    def find(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind that have these labels, such as ``app.kubernetes.io/instance=NAME``."""
        chosen = (f"--selector={selector}",) if selector else ()
        found = read_json(self.run("get", kind, *chosen, "-o", "json").stdout, f"kubectl get {kind}")
        return [each for each in list_at(found, "items") if isinstance(each, dict)]

    def delete(self, kind: str, name: str, *, wait_s: float = 0) -> None:
        """Delete an object, if there is one; wait at most so long until it is gone."""
        wait = (f"--timeout={wait_s:g}s",) if wait_s else ("--wait=false",)
        self.run(
            "delete", kind, name, "--ignore-not-found", *wait, timeout=max(COMMAND_S, wait_s + 30), limited=not wait_s
        )

    def put_secret(self, name: str, values: dict[str, bytes], labels: dict[str, str]) -> None:
        """Create or replace a Secret. Its values are in standard input only."""
        import base64

        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": labels},
            "type": "Opaque",
            "data": {key: base64.b64encode(value).decode() for key, value in values.items()},
        }
        self.apply(SecretInput(json.dumps(secret).encode(), *values.values()))

    # Workloads

    def pods(self, selector: str = "") -> list[Pod]:
        """Return the pods that have these labels, by name."""
        found = (read_pod(each) for each in self.find("pods", selector))
        return sorted((one for one in found if one.name), key=lambda one: one.name)

    def stateful_sets(self, selector: str = "") -> list[StatefulSet]:
        """Return the StatefulSets that have these labels."""
        return [read_stateful_set(each) for each in self.find("statefulsets", selector)]

    def nodes(self) -> list[Node]:
        """Return the nodes of the cluster."""
        return [read_node(each) for each in self.find("nodes")]

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of pods of a StatefulSet."""
        self.run("scale", "statefulset", name, f"--replicas={replicas}")

    def logs(self, pod: str, container: str, lines: int, *, previous: bool = False) -> str:
        """Return the last lines of a container; ``previous``: of the one before its last restart; empty if none."""
        words = ("logs", pod, f"--container={container}", f"--tail={lines}", *(["--previous"] if previous else []))
        result = self.run(*words, ok=(0, 1))
        return "" if result.status else result.stdout.decode(errors="replace")

    def exec_argv(self, pod: str, container: str, *argv: str, mark: Mark | None = None) -> tuple[str, ...]:
        """Return the words of a command in a container, with its standard input; held if it has a mark.

        With an input that the command does not read, kubectl may send the end of it after the API server has closed
        the connection, which is reset then: status and output are lost.
        """
        inside = hold_argv(mark, *argv) if mark else argv
        return self.argv("exec", "--stdin", pod, f"--container={container}", "--", *inside)

    def exec(
        self, pod: str, container: str, *argv: str, ok: Container[int] | None = (0,), timeout: float = 60
    ) -> Result:
        """Run a command in a container to its end; its status is the command's, or 1 of kubectl."""
        mark = new_mark()
        words = self.exec_argv(pod, container, *argv, mark=mark)
        return run_program(self.host, words, input=mark, ok=ok, timeout=timeout, hint=HINT)

    # Nodes

    def cordon(self, node: str, *, undo: bool = False) -> None:
        """Let no new pod start on a node; with ``undo``, again."""
        self.run("uncordon" if undo else "cordon", node)

    def drain(self, node: str, timeout_s: float) -> Result:
        """Evict the pods of a node, which is cordoned first; budgets of disruption hold. Whatever its status."""
        words = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={timeout_s:g}s")
        return self.run(*words, ok=(0, 1), timeout=timeout_s + 60, limited=False)


def read_pod(given: Any) -> Pod:
    """Return a pod of its JSON. Fields that it does not have are empty."""
    conditions = {text_at(one, "type"): one for one in list_at(given, "status", "conditions")}
    unscheduled = conditions.get("PodScheduled")
    first = [_container(one, first=True) for one in list_at(given, "status", "initContainerStatuses")]
    return Pod(
        word_at(given, "metadata", "name"),
        text_at(given, "metadata", "uid"),
        text_at(given, "spec", "nodeName"),
        text_at(given, "status", "phase"),
        text_at(conditions.get("Ready"), "status") == "True",
        bool(text_at(given, "metadata", "deletionTimestamp")),
        text_at(given, "metadata", "ownerReferences", 0, "name"),
        text_at(given, "metadata", "labels", "controller-revision-hash"),
        text_at(unscheduled, "message") if text_at(unscheduled, "status") == "False" else "",
        (*first, *(_container(one) for one in list_at(given, "status", "containerStatuses"))),
    )


def _container(given: Any, *, first: bool = False) -> PodContainer:
    """Return a container. ``first``: an init container, of which some are sidecars."""
    state = next((one for one in ("waiting", "terminated") if at(given, "state", one) is not None), "")
    reason, message = text_at(given, "state", state, "reason"), text_at(given, "state", state, "message")
    if state == "waiting" and (last := text_at(given, "lastState", "terminated", "reason")):
        reason, message = f"{reason}, {last}", text_at(given, "lastState", "terminated", "message") or message
    if first and state == "terminated" and not number_at(given, "state", state, "exitCode"):
        reason = ""  # it has done its work
    return PodContainer(
        text_at(given, "name"),
        text_at(given, "image"),
        text_at(given, "imageID"),
        at(given, "ready") is True,
        number_at(given, "restartCount"),
        at(given, "state", "running") is not None,
        reason,
        message,
        first,
    )


def read_stateful_set(given: Any) -> StatefulSet:
    """Return a StatefulSet of its JSON."""
    return StatefulSet(
        text_at(given, "metadata", "name"),
        number_at(given, "spec", "replicas"),
        number_at(given, "status", "readyReplicas"),
        text_at(given, "status", "currentRevision"),
        text_at(given, "status", "updateRevision"),
        number_at(given, "status", "observedGeneration") >= number_at(given, "metadata", "generation"),
    )


def read_node(given: Any) -> Node:
    """Return a node of its JSON."""
    ready = [one for one in list_at(given, "status", "conditions") if text_at(one, "type") == "Ready"]
    names = [name for image in list_at(given, "status", "images") for name in list_at(image, "names")]
    return Node(
        text_at(given, "metadata", "name"),
        any(text_at(one, "status") == "True" for one in ready),
        at(given, "spec", "unschedulable") is True,
        tuple(name for name in names if isinstance(name, str)),
        tuple(text_at(one, "address") for one in list_at(given, "status", "addresses")),
    )
