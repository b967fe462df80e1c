"""A host of a test whose `kubectl` has a cluster that this test plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from appliance.host.base import OnLine, Result
from appliance.host.local import Local
from appliance.host.stream import LineReader, Stream
from appliance.operations.context import Cluster
from appliance.tools.held import HOLD
from tests.support.fake import FakeStream

KINDS = {"persistentvolumeclaims": "persistentvolumeclaim", "pods": "pod", "statefulsets": "statefulset"}


class WithKubectl(Local):
    """``kubectl`` gets, lists, applies and deletes ``objects``, by kind and name; it finds no other differences.

    A namespace has its service account at once, a pod is ready at once. A command in a pod prints what ``prints`` has
    for one of its words. Its other commands only end well.
    """

    def __init__(self, name: str, *rest: Any) -> None:
        super().__init__(name, *rest)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {("serviceaccount", "default"): {}}
        self.prints: dict[str, str] = {}
        self.applied: list[str] = []
        """Kinds of the objects that were applied, in their order."""
        self.deleted: list[str] = []
        """Names of the objects that were to be deleted."""
        self.interrupted = ""
        """A command with this word is interrupted."""

    def run(self, *argv: str, **options: Any) -> Result:
        if "kubectl" not in argv:
            return super().run(*argv, **options)
        verb, *words = [one for one in argv[argv.index("kubectl") + 1 :] if not one.startswith("--")]
        found = ""
        if self.interrupted in (verb, *words):
            raise KeyboardInterrupt
        if verb == "version":
            found = '{"serverVersion": {"major": "1", "minor": "31"}}'
        elif verb == "get" and words[0] in KINDS:
            found = json.dumps({"items": [one for key, one in self.objects.items() if key[0] == KINDS[words[0]]]})
        elif verb == "get":
            one = self.objects.get((words[0], words[1]))
            found = "" if one is None else json.dumps(one)
        elif verb == "apply":
            self._apply(options["input"])
        elif verb == "delete":
            self.deleted.append(words[1])
            self.objects.pop((words[0], words[1]), None)
        elif verb == "exec":
            found = next((text for word, text in self.prints.items() if word in words), "")
            found += words[words.index(HOLD) + 2] if HOLD in words else ""
        return Result(self.name, argv, 0, found.encode(), b"")

    def _apply(self, objects: bytes) -> None:
        for given in yaml.safe_load_all(objects):
            for one in given.get("items", [given]) if given else []:
                self.applied.append(one["kind"])
                self.objects[one["kind"].lower(), one["metadata"]["name"]] = one

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        if "kubectl" in argv:
            yield FakeStream(self.name, argv, lambda given: self.run(*argv, input=given), LineReader(on_line))
        else:
            with super().stream(*argv, on_line=on_line) as stream:
                yield stream


def on_kubernetes(cluster: Cluster, folder: Path) -> Cluster:
    """Return the cluster with what its site needs before Kubernetes can have the services; ``folder`` gets a key."""
    key = folder / "munge.key"
    key.write_bytes(b"not a key")
    site = cluster.site
    changes = {"address": "10.20.0.9", "image": f"registry.example.org/sms@sha256:{'a' * 64}", "namespace": "lab"}
    engines = site.engines.model_copy(update={"kubernetes": site.engines.kubernetes.model_copy(update=changes)})
    secrets = site.secrets.model_copy(update={"munge_key": key})
    return replace(cluster, site=site.model_copy(update={"engines": engines, "secrets": secrets}))
