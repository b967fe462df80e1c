"""What an image is built from: ``definitions/bases/<name>.yaml``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from appliance.catalog.model import Name, PackageSet, SeedFile
from appliance.catalog.traffic import Section


class Repository(Section):
    """A package repository of the base; where its mirror is comes from the site or the build host."""

    suites: tuple[str, ...] = Field((), description="Suites (apt) below the mirror.")
    components: tuple[str, ...] = Field((), description="Components (apt).")
    mirror: str = Field("", description="The mirror it is a part of, where the site names a whole one.")
    path: str = Field("", description="Its folder below that mirror.")
    ids: tuple[str, ...] = Field((), description="What dnf or zypper of the build host call it; * matches anything.")
    keys: str = Field(
        "", description="The keys that sign its packages, on the build host; * matches anything. No mirror is asked."
    )


class Base(Section):
    """An operating system to build on, and how packages come into it."""

    name: Name
    summary: str
    manager: Literal["apt", "dnf", "zypper"]
    package_sets: tuple[PackageSet, ...] = Field(description="Package sets of the catalogue, the first found is taken.")
    repositories: dict[Name, Repository]
    keyring: str = Field("", description="Keys that the packages are held against (apt).")
    packages: tuple[str, ...] = Field(description="Packages that every image has.")
    python: str = Field(
        "/usr/bin/python3", description="The interpreter of our programs in the image, Python 3.9 or newer."
    )
    header: str = Field(description="The head of the Apptainer definition (Jinja2).")
    setup: str = Field(description="Shell in %post before packages come in (Jinja2).")
    install: str = Field(description="The command that installs `packages` (Jinja2).")
    cleanup: str = Field("", description="Shell in %post after that (Jinja2).")
    list_packages: str = Field(description="Prints name, version, architecture and source, separated by tabs.")
    purl: str = Field(description="Type and namespace of package URLs: deb/debian.")


class ExtraFiles(Section):
    """Files of every overlay: ``overlays/base/overlay.yaml``."""

    files: tuple[SeedFile, ...]
