"""Images of diskless nodes: ``definitions/nodes/PROFILE.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from appliance.catalog.model import Name
from appliance.catalog.traffic import Section
from appliance.config.read import read_model
from appliance.config.types import Line, Text

USUAL = "compute"
"""The definition of profiles without their own file."""

Unit = Annotated[str, Text(r"[A-Za-z0-9:_.@-]{1,200}\.[a-z]{2,9}", "a systemd unit", "write it as fstrim.timer")]
Driver = Annotated[
    str, Text(r"[a-z0-9_-]+(/[A-Za-z0-9_-]+){0,8}(\.ko)?", "a driver folder", "write it as drivers/net/ethernet")
]
Module = Annotated[str, Text(r"[a-z0-9_-]{1,60}", "a kernel module", "use lower case letters, digits and underscores")]


class NodeProfile(Section):
    """Definition of an image for diskless nodes."""

    summary: str
    base: Name = Field(description="The base whose repositories it is built from.")
    packages: tuple[str, ...] = Field(description="Packages; the site's profile adds more.")
    kernels: dict[str, str] = Field(description="Kernel packages, by the name in the site's profile.")
    drivers: tuple[Driver, ...] = Field(description="Driver folders of the initramfs, below the kernel's.")
    modules: tuple[Module, ...] = Field((), description="Additional kernel modules.")
    arguments: Line = Field("quiet", description="Kernel arguments.")
    mask: tuple[Unit, ...] = Field((), description="systemd units to mask.")
    later: tuple[Unit, ...] = Field((), description="systemd units that a virtual machine starts after slurmd.")


def read_node_profile(folder: Path, name: str) -> NodeProfile:
    """Return the profile of that name, or the default one if it has no file.

    Raises:
        ConfigError: with every problem in the file.
    """
    path = folder / f"{name}.yaml"
    path = path if path.is_file() else folder / f"{USUAL}.yaml"
    return read_model(path.read_text(), str(path), NodeProfile)
