"""Operating systems that images are built from: ``definitions/bases/<name>.yaml``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from appliance.catalog.model import Name, PackageSet, SeedFile
from appliance.catalog.traffic import Section


class Repository(Section):
    """A package repository of the base; the site or the build host gives its mirror."""

    suites: tuple[str, ...] = Field((), description="Suites (apt) below the mirror.")
    components: tuple[str, ...] = Field((), description="Components (apt).")
    mirror: str = Field("", description="Name of the whole mirror that it is a part of.")
    path: str = Field("", description="Its folder below that mirror.")
    ids: tuple[str, ...] = Field((), description="Its ids in dnf or zypper of the build host; * is a wildcard.")
    keys: str = Field(
        "", description="Files of its signing keys on the build host, never fetched from a mirror; * is a wildcard."
    )


class Base(Section):
    """An operating system to build on, and how packages are installed."""

    name: Name
    summary: str
    manager: Literal["apt", "dnf", "zypper"]
    package_sets: tuple[PackageSet, ...] = Field(description="Package sets of the catalogue; the first match is used.")
    repositories: dict[Name, Repository]
    keyring: str = Field("", description="Keyring that packages are verified with (apt).")
    packages: tuple[str, ...] = Field(description="Packages of every image.")
    python: str = Field(
        "/usr/bin/python3", description="Python interpreter of sms's programs in the image, 3.9 or newer."
    )
    header: str = Field(description="Header of the Apptainer definition (Jinja2).")
    setup: str = Field(description="Shell in %post before the packages are installed (Jinja2).")
    install: str = Field(description="Command that installs `packages` (Jinja2).")
    cleanup: str = Field("", description="Shell in %post after the packages are installed (Jinja2).")
    list_packages: str = Field(description="Command that prints name, version, architecture and source, tab-separated.")
    purl: str = Field(description="Type and namespace of package URLs: deb/debian.")


class ExtraFiles(Section):
    """Files of every overlay: ``overlays/base/overlay.yaml``."""

    files: tuple[SeedFile, ...]
