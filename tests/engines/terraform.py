"""Terraform's core (OpenTofu) in a folder, with providers of a mirror on this machine's disk.

The providers are those of `provider.py`, or the official ones: `SMS_TF_PROVIDERS` names a folder that is laid out as
`tofu providers mirror` does it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from appliance.host.base import Result
from appliance.lab.engines.hosts import Runner
from appliance.lab.engines.programs import find_program
from tests.places import ROOT

VERSIONS = {"kubernetes": "3.2.1", "nomad": "2.6.1"}
"""Of the official providers that those of `provider.py` follow."""
REGISTRIES = ("registry.opentofu.org", "registry.terraform.io")
MINUTES = 20
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def make_mirror(folder: Path) -> Path:
    """Write a mirror with the providers of the tests, unless the official ones are there."""
    if given := os.environ.get("SMS_TF_PROVIDERS"):
        return Path(given)
    for name, version in VERSIONS.items():
        for registry in REGISTRIES:
            place = folder / registry / "hashicorp" / name / version / f"linux_{MACHINES[platform.machine()]}"
            place.mkdir(parents=True)
            program = place / f"terraform-provider-{name}_v{version}"
            program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.engines.provider {name}\n")
            program.chmod(0o755)
    return folder


class Terraform:
    """A root module in ``folder``, used on a host; ``environment`` is what its providers read."""

    def __init__(self, host: Runner, folder: Path, mirror: Path, environment: Mapping[str, str]) -> None:
        self.host, self.folder = host, folder
        settings = folder / "cli.tfrc"
        path = json.dumps(str(mirror))
        settings.write_text(f"provider_installation {{\n  filesystem_mirror {{\n    path = {path}\n  }}\n}}\n")
        self.words = [
            "env",
            f"TF_CLI_CONFIG_FILE={settings}",
            "TF_IN_AUTOMATION=1",
            "CHECKPOINT_DISABLE=1",
            *(f"{name}={value}" for name, value in environment.items()),
            str(find_program("tofu")),
            f"-chdir={folder}",
        ]
        self.run("init", "-input=false", "-no-color")

    def run(self, *words: str, ok: tuple[int, ...] | None = (0,)) -> Result:
        """Run a command of it."""
        return self.host.host.run(*self.words, *words, ok=ok, timeout=60 * MINUTES)

    def validate(self) -> None:
        """Fail where a module is not valid."""
        self.run("validate", "-no-color")

    def apply(self) -> None:
        """Make it so."""
        self.run("apply", "-auto-approve", "-input=false", "-no-color")

    def destroy(self) -> None:
        """Remove all of it."""
        self.run("destroy", "-auto-approve", "-input=false", "-no-color")

    def has_changes(self) -> bool:
        """Whether a plan, after a refresh, has changes."""
        done = self.run("plan", "-detailed-exitcode", "-input=false", "-no-color", ok=(0, 2))
        return done.status == 2

    @property
    def state(self) -> str:
        """The state, as it is stored."""
        return (self.folder / "terraform.tfstate").read_text()
