"""What nodes without a disk boot: ``definitions/nodes/PROFILE.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from appliance.catalog.model import Name
from appliance.catalog.traffic import Section
from appliance.config.read import read_model
from appliance.config.types import Line, Text

USUAL = "compute"
"""The profile that one without a file of its own begins with."""

Unit = Annotated[str, Text(r"[A-Za-z0-9:_.@-]{1,200}\.[a-z]{2,9}", "a unit of systemd", "write it as fstrim.timer")]
Driver = Annotated[
    str, Text(r"[a-z0-9_-]+(/[A-Za-z0-9_-]+){0,8}(\.ko)?", "a folder of drivers", "write it as drivers/net/ethernet")
]
Module = Annotated[str, Text(r"[a-z0-9_-]{1,60}", "a module", "use lower case letters, digits and underscores")]


class NodeProfile(Section):
    """A system that nodes of one kind boot."""

    summary: str
    base: Name = Field(description="The base whose repositories it is made from.")
    packages: tuple[str, ...] = Field(description="Its packages; the site's profile adds more.")
    kernels: dict[str, str] = Field(description="The kernel's package, by what the site's profile calls it.")
    drivers: tuple[Driver, ...] = Field(description="Drivers of its initramfs, below the kernel's own folder.")
    modules: tuple[Module, ...] = Field((), description="Modules besides those.")
    arguments: Line = Field("quiet", description="Kernel arguments of every node that boots it.")
    mask: tuple[Unit, ...] = Field((), description="Units that it never starts.")
    later: tuple[Unit, ...] = Field((), description="Units that a virtual machine starts once slurmd is up.")


def read_node_profile(folder: Path, name: str) -> NodeProfile:
    """The profile of that name; the usual one where it has no file of its own.

    Raises:
        ConfigError: with every mistake of the file.
    """
    path = folder / f"{name}.yaml"
    path = path if path.is_file() else folder / f"{USUAL}.yaml"
    return read_model(path.read_text(), str(path), NodeProfile)
