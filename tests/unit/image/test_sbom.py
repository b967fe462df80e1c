"""The bill of materials, validated against CycloneDX's own schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from hypothesis import given, settings
from hypothesis import strategies as st
from packageurl import PackageURL

from appliance.plan.image.sbom import Package, read_packages, sbom

PACKAGES = [
    Package("munge", "0.5.15-2", "amd64"),
    Package("libmunge2", "0.5.15-2", "amd64"),
    Package("gcc-12-base", "12.2.0-14+deb12u1", "amd64"),
    Package("tzdata", "2024a-0+deb12u1", "all"),
    Package("dbus", "1:1.14.10-1~deb12u1", "amd64"),
]


def make(packages: list[Package] = PACKAGES, **changes: str) -> str:
    usual = {"key": "ab" * 32, "image": "sms-lab", "purl": "deb/debian", "distribution": "debian-12"}
    return sbom(packages, **{**usual, **changes})


@pytest.mark.parametrize("purl", ["deb/debian", "rpm/rocky", "rpm/opensuse", "rpm/sles"])
@pytest.mark.parametrize("packages", [PACKAGES, [], PACKAGES * 2], ids=["some", "none", "twice"])
def test_valid(purl: str, packages: list[Package]) -> None:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(make(packages, purl=purl))
    assert error is None, error


def test_the_validator_rejects() -> None:
    wrong = make().replace('"type": "container"', '"type": "thing"')
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(wrong) is not None


def test_deterministic() -> None:
    assert make() == make()
    assert make(list(reversed(PACKAGES))) == make(), "the order of the packages does not count"
    assert json.loads(make())["serialNumber"] != json.loads(make(key="cd" * 32))["serialNumber"]


def test_every_package_is_listed() -> None:
    document: dict[str, Any] = json.loads(make())
    assert {(each["name"], each["version"]) for each in document["components"]} == {
        (each.name, each.version) for each in PACKAGES
    }
    assert document["metadata"]["component"]["name"] == "sms-lab"
    needed = next(each for each in document["dependencies"] if each["ref"] == "image")
    assert len(needed["dependsOn"]) == len(PACKAGES)


def test_package_urls() -> None:
    document: dict[str, Any] = json.loads(make())
    urls = {each["name"]: PackageURL.from_string(each["purl"]) for each in document["components"]}
    assert urls["dbus"].version == "1:1.14.10-1~deb12u1", "an epoch and a tilde survive"
    assert (urls["munge"].type, urls["munge"].namespace) == ("deb", "debian")
    assert urls["munge"].qualifiers == {"arch": "amd64", "distro": "debian-12"}


LINES: list[tuple[str, list[Package]]] = [
    ("", []),
    ("munge\t0.5\tamd64\tmunge\n", [Package("munge", "0.5", "amd64")]),
    ("munge\t0.5\tamd64\n", [Package("munge", "0.5", "amd64")]),
    (
        "slurm-ohpc\t23.11.10-1\tx86_64\tslurm-23.11.10-1.src.rpm\n",
        [Package("slurm-ohpc", "23.11.10-1", "x86_64")],
    ),
    ("no tabs at all\nmunge\t0.5\n\n", []),
]


@pytest.mark.parametrize(("text", "expected"), LINES)
def test_read_packages(text: str, expected: list[Package]) -> None:
    assert read_packages(text) == expected


NAME = st.text("abcdefghijklmnopqrstuvwxyz0123456789+-.", min_size=1, max_size=20)
VERSION = st.text("0123456789abc.+~:-", min_size=1, max_size=20)


@given(st.lists(st.tuples(NAME, VERSION, st.sampled_from(["amd64", "all", "x86_64"])), max_size=8))
@settings(max_examples=15, deadline=None)
def test_valid_for_any_package(rows: list[tuple[str, str, str]]) -> None:
    text = "".join(f"{name}\t{version}\t{architecture}\t{name}\n" for name, version, architecture in rows)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(make(read_packages(text))) is None
