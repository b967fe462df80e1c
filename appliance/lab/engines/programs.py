"""Find the programs of engines: in the folder ``SMS_ENGINES``, else where ``make engines`` puts them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Refused
from appliance.share import PACKAGE

PINS = PACKAGE.parent / "tests" / "engines"
"""A folder for each tool, with its ``go.mod`` and ``go.sum``; in a checkout only."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sms" / "engines"


@dataclass(frozen=True)
class Tool:
    """A Go module with programs: their packages by name, build tags, variables that the linker sets to the version."""

    name: str
    module: str
    programs: dict[str, str]
    tags: str = ""
    version_in: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where its pins are."""
        return PINS / self.name

    @property
    def version(self) -> str:
        """The pinned version of the module, such as ``v1.34.3``.

        Raises:
            ValueError: its pins do not require it.
        """
        pins = (self.folder / "go.mod").read_text()
        pinned = re.search(rf"^(?:require)?\s+{re.escape(self.module)} (v\S+)", pins, re.MULTILINE)
        if not pinned:
            raise ValueError(f"{self.folder}/go.mod does not require {self.module}")
        return pinned[1]

    @property
    def ldflags(self) -> str:
        """Options of the linker: no symbols, the version where the program reports it."""
        return " ".join(("-s -w", *(f"-X {variable}={self.version}" for variable in self.version_in)))

    @property
    def cached(self) -> Path:
        """The folder of its programs: another pin, tag or option makes another one."""
        digest = hashlib.sha256(f"{self.tags}\n{self.ldflags}\n".encode())
        for path in sorted(self.folder.iterdir()):
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
        return CACHE / f"{self.name}-{self.version}-{digest.hexdigest()[:8]}"


_KUBERNETES = ("kubectl", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
TOOLS = (
    Tool(
        "nomad",
        "github.com/hashicorp/nomad",
        {"nomad": "github.com/hashicorp/nomad"},
        tags="hashicorpmetrics,codegen_generated,release",
    ),
    Tool("etcd", "go.etcd.io/etcd/server/v3", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Tool(
        "quadlet",
        "github.com/containers/podman/v5",
        {"quadlet": "github.com/containers/podman/v5/cmd/quadlet"},
        tags="remote,exclude_graphdriver_btrfs,containers_image_openpgp",
    ),
    Tool(
        "kubernetes",
        "k8s.io/kubernetes",
        {name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES},
        version_in=("k8s.io/component-base/version.gitVersion", "k8s.io/client-go/pkg/version.gitVersion"),
    ),
    Tool("coredns", "github.com/coredns/coredns", {"coredns": "."}),
    Tool("tofu", "github.com/opentofu/opentofu", {"tofu": "github.com/opentofu/opentofu/cmd/tofu"}),
)
PROGRAMS = {program: tool for tool in TOOLS for program in tool.programs}
"""All of them, in the order of the build."""


def find_program(name: str) -> Path:
    """Return the path of a program; it need not exist.

    Raises:
        Refused: this is not a checkout, and ``SMS_ENGINES`` is not set.
    """
    if given := os.environ.get("SMS_ENGINES"):
        return Path(given) / name
    if not PINS.is_dir():
        raise Refused(
            f"where {name} is, is not known: a checkout builds it, and this is an installed package",
            hint="SMS_ENGINES=DIR names a folder with ready-made programs",
        )
    return PROGRAMS[name].cached / name


def find_missing(names: Iterable[str]) -> list[str]:
    """Return the programs that are not there.

    Raises:
        Refused: this is not a checkout, and ``SMS_ENGINES`` is not set.
    """
    return [name for name in names if not find_program(name).exists()]


def need_programs(names: Iterable[str]) -> None:
    """Check that programs are there.

    Raises:
        Refused: some are not, with the command that builds them.
    """
    if missing := find_missing(names):
        given = os.environ.get("SMS_ENGINES")
        raise Refused(
            f"{given or 'this machine'} has no {', '.join(missing)}",
            hint="unset SMS_ENGINES, and `make engines` builds them" if given else "make engines",
        )
