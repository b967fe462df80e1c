"""A host of a test whose `nomad` has servers that this test plays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.host.base import Result
from appliance.host.local import Local
from appliance.operations.context import Cluster

API = ("nomad", "operator", "api")


class WithNomad(Local):
    """``nomad`` prints what ``api`` has for a path below ``/v1/``, and ``null`` for others; ``job plan`` finds changes.

    ``var put`` changes ``api``. Its other commands only end well.
    """

    def __init__(self, name: str, *rest: Any) -> None:
        super().__init__(name, *rest)
        self.api: dict[str, Any] = {}
        self.error = ""
        """What every command prints instead, with status 1."""
        self.text = ""
        """What the API replies instead."""
        self.commands: list[tuple[str, ...]] = []
        """Words of the commands that change something."""
        self.interrupted = ""
        """A command with this word is interrupted."""
        self.planned: list[str] = []
        """Texts of the jobs whose changes were looked for."""

    def run(self, *argv: str, **options: Any) -> Result:
        if "nomad" not in argv:
            return super().run(*argv, **options)
        words = argv[argv.index("nomad") :]
        if self.error:
            return Result(self.name, argv, 1, b"", self.error.encode()).expect(options.get("ok", (0,)))
        if words[: len(API)] == API:
            found = self.text or json.dumps(self.api.get(words[-1].removeprefix("/v1/")))
            return Result(self.name, argv, 0, found.encode(), b"")
        if words[1:3] == ("job", "plan"):
            self.planned.append(options["input"].decode())
            return Result(self.name, argv, 0, b"+/- Job: x\n", b"")
        self.commands.append(words[1:])
        if self.interrupted in words:
            raise KeyboardInterrupt
        if words[1:3] == ("var", "put"):
            self.api[f"var/{words[-2]}"] = json.loads(options["input"])
        return Result(self.name, argv, 0, b"", b"")

    def has_job(self, name: str, *, runs: bool = True, allocation: str = "", node: str = "n1") -> None:
        """Let the servers have a job, with one allocation if that has an id."""
        job = {"ID": name, "Type": "service", "Stop": not runs, "TaskGroups": [{"Name": name, "Count": 1}] * runs}
        task = {"State": "running"}
        one = {"ID": allocation, "JobID": name, "NodeName": node, "ClientStatus": "running", "DesiredStatus": "run"}
        self.api[f"job/{name}"] = job
        self.api[f"job/{name}/allocations"] = [{**one, "TaskStates": {name: task}}] if allocation else []

    def has_clients(self, *names: str, pool: str = "compute", drained: str = "") -> None:
        """Let the servers have these clients; each can run tasks."""
        keys = {"Status": "ready", "NodePool": pool}
        eligible = {True: "ineligible", False: "eligible"}
        self.api["nodes"] = [
            {"ID": name, "Name": name, "SchedulingEligibility": eligible[name == drained], **keys} for name in names
        ]
        self.api |= {f"node/{name}": {"Drivers": {"raw_exec": {"Healthy": True}}} for name in names}

    @property
    def stopped(self) -> list[str]:
        """Names of the jobs that were stopped, in their order."""
        return [words[-1] for words in self.commands if words[:2] == ("job", "stop")]


def on_nomad(cluster: Cluster, folder: Path) -> Cluster:
    """Return the cluster with what its site needs before Nomad can have the services; ``folder`` gets a key."""
    key = folder / "sign.pub"
    key.write_text("-----BEGIN PUBLIC KEY-----\nnot a key\n-----END PUBLIC KEY-----\n")
    site = cluster.site
    nomad = site.engines.nomad.model_copy(update={"address": "10.20.0.8"})
    engines = site.engines.model_copy(update={"nomad": nomad})
    signing = site.signing.model_copy(update={"public_keys": (key,)})
    return replace(cluster, site=site.model_copy(update={"engines": engines, "signing": signing}))
