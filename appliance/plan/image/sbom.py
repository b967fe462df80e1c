"""The software bill of materials of an image, as CycloneDX 1.6 JSON (ECMA-424)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from appliance import __version__


@dataclass(frozen=True)
class Package:
    """A package of an image, as named by its package manager."""

    name: str
    version: str
    architecture: str


def read_packages(text: str) -> list[Package]:
    """Parse lines of tab-separated name, version, architecture and perhaps source."""
    rows = [line.split("\t") for line in text.splitlines() if line.count("\t") >= 2]
    return [Package(*row[:3]) for row in rows]


def sbom(packages: Sequence[Package], *, key: str, image: str, purl: str, distribution: str) -> str:
    """Return the bill of materials; the same image gives the same text.

    Args:
        key: the image's key, from which the serial number is derived.
        purl: type and namespace of package URLs, such as ``deb/debian``.
    """
    kind, _, namespace = purl.partition("/")
    components = [
        Component(
            name=package.name,
            version=package.version,
            type=ComponentType.LIBRARY,
            bom_ref=f"{package.name}@{package.version}#{package.architecture}",
            purl=PackageURL(
                kind,
                namespace or None,
                package.name,
                package.version,
                {"arch": package.architecture, "distro": distribution},
            ),
        )
        for package in packages
    ]
    subject = Component(name=image, version=key[:16], type=ComponentType.CONTAINER, bom_ref="image")
    # A fixed timestamp, so that rebuilds from the same inputs are identical.
    metadata = BomMetaData(component=subject, timestamp=datetime(1970, 1, 1, tzinfo=UTC))
    metadata.tools.components.add(Component(name="sms", version=__version__, type=ComponentType.APPLICATION))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, key)
    bom = Bom(components=components, metadata=metadata, serial_number=serial)
    bom.register_dependency(subject, components)
    return JsonV1Dot6(bom).output_as_string(indent=1)
