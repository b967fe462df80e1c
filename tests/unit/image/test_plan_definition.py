"""The plan of an image: what its key depends on, its packages, mirrors and keys."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog import Base, Service, read_bases, read_catalog, select
from appliance.config.model import SystemUser
from appliance.errors import ConfigError, Refused
from appliance.operations.image.build import check_against_lock
from appliance.plan.image import definition
from appliance.plan.image.definition import (
    BuildInputs,
    BuildPlan,
    apt_sources,
    has_credentials,
    missing_mirrors,
    packages_for,
    plan_build,
    repository_urls,
)
from appliance.share import share

BASES = read_bases(share("definitions", "bases"))
CATALOG = read_catalog(share("definitions", "services"))
DEBIAN = BASES["debian-12"]
ROCKY = BASES["openhpc-rocky9"]
MIRRORS = {"debian": "https://mirror.example.org/debian", "security": "https://mirror.example.org/security"}
RUNTIME = {"sms-init": b"#!/bin/sh\n", "sms-run": b"#!/usr/bin/python3\n"}


def plan(**changes: Any) -> BuildPlan:
    """Return a plan with changes to the default inputs."""
    usual: dict[str, Any] = {
        "base": DEBIAN,
        "services": select(CATALOG, ["munge", "chrony"]),
        "mirrors": MIRRORS,
        "versions": {"munge": "0.5.15-2", "chrony": "4.3-2"},
        "definitions": share("definitions"),
        "runtime": RUNTIME,
    }
    given = usual | changes
    base, services, definitions = (given.pop(name) for name in ("base", "services", "definitions"))
    return plan_build(base, services, BuildInputs(**given), definitions=definitions)


def copied_definitions(folder: Path, old: str, new: str) -> Path:
    text = (share("definitions") / definition.TEMPLATE).read_text()
    assert old in text
    (folder / definition.TEMPLATE).write_text(text.replace(old, new))
    return folder


CHANGES: dict[str, dict[str, Any]] = {
    "another service": {"services": select(CATALOG, ["munge", "chrony", "cron"])},
    "one service less": {"services": select(CATALOG, ["munge"])},
    "a version": {"versions": {"munge": "0.5.15-3", "chrony": "4.3-2"}},
    "a package more": {"versions": {"munge": "0.5.15-2", "chrony": "4.3-2", "new": "1"}},
    "no versions": {"versions": None},
    "a mirror": {"mirrors": MIRRORS | {"debian": "https://other.example.org/debian"}},
    "a program": {"runtime": RUNTIME | {"sms-run": b"#!/usr/bin/python3\npass\n"}},
    "a program more": {"runtime": RUNTIME | {"sms-new": b""}},
    "a program of another name": {"runtime": {"sms-init": b"#!/bin/sh\n", "sms-ran": b"#!/usr/bin/python3\n"}},
    "a key": {"keys": {"debian": b"key"}},
    "another base": {"base": DEBIAN.model_copy(update={"name": "debian-13"})},
    "the base's setup": {"base": DEBIAN.model_copy(update={"setup": DEBIAN.setup + "true\n"})},
    "the base's cleanup": {"base": DEBIAN.model_copy(update={"cleanup": "true\n"})},
    "the base's packages": {"base": DEBIAN.model_copy(update={"packages": (*DEBIAN.packages, "gzip")})},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_key_changes_with(changes: dict[str, Any]) -> None:
    assert plan(**changes).key != plan().key


def test_key_changes_with_the_template_and_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan().key
    assert plan(definitions=copied_definitions(tmp_path, "set -eu", "set -eux")).key != before
    monkeypatch.setattr(definition, "__version__", "9.9")
    assert plan().key != before


SAME: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the order of versions": {"versions": {"chrony": "4.3-2", "munge": "0.5.15-2"}},
    "the order of mirrors": {"mirrors": dict(reversed(MIRRORS.items()))},
    "the order of programs": {"runtime": dict(reversed(RUNTIME.items()))},
    "the order of services asked for": {"services": select(CATALOG, ["chrony", "munge"])},
    "what only the overlay has": {
        "services": tuple(
            service.model_copy(update={"setup": "true", "outage": service.outage})
            for service in select(CATALOG, ["munge", "chrony"])
        )
    },
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_key_does_not_change_with(changes: dict[str, Any], tmp_path: Path) -> None:
    assert plan(**changes) == plan()


def test_key_does_not_depend_on_the_location_of_the_definitions(tmp_path: Path) -> None:
    assert plan(definitions=copied_definitions(tmp_path, "set -eu", "set -eu")) == plan()


def test_versions_are_pinned() -> None:
    text = plan().definition
    assert "install --no-install-recommends chrony=4.3-2 munge=0.5.15-2" in text
    assert f"sms.key {plan().key}" in text


def test_context_holds_all_that_the_definition_copies() -> None:
    made = plan(keys={"debian": b"a key"})
    context = made.context()
    assert context["keys/debian.asc"] == b"a key"
    assert context["runtime/sms-run"] == RUNTIME["sms-run"]
    files = made.definition.split("%files\n")[1].split("\n\n")[0]
    copied = {line.split()[0].removeprefix("}}/") for line in files.replace("{{ files ", "").splitlines()}
    assert copied <= context.keys()


def test_manifest_names_every_input() -> None:
    manifest = json.loads(plan(keys={"debian": b"a key"}).manifest)
    assert manifest["services"] == ["chrony", "munge"]
    assert manifest["versions"]["munge"] == "0.5.15-2"
    assert manifest["mirrors"] == MIRRORS
    assert manifest["runtime"]["sms-run"] == hashlib.sha256(RUNTIME["sms-run"]).hexdigest()
    assert manifest["keys"] == {"debian": hashlib.sha256(b"a key").hexdigest()}


def test_packages_of_a_base(tmp_path: Path) -> None:
    munge = CATALOG["munge"]
    assert "munge" in packages_for(DEBIAN, [munge])
    only = munge.model_copy(update={"packages": {"el": ("munge",)}})
    with pytest.raises(ConfigError, match="munge has no packages for debian-12"):
        packages_for(DEBIAN, [only])
    both = munge.model_copy(update={"packages": {"el": ("generic",), "ohpc-el9": ("special",)}})
    assert "special" in packages_for(ROCKY, [both]), "the first set of the base that the service has"
    assert "generic" not in packages_for(ROCKY, [both])


def test_slurm_of_openhpc() -> None:
    """OpenHPC's own server package, so that controller and nodes have the same version."""
    for name in ("openhpc-rocky9", "openhpc-leap15"):
        packages = packages_for(BASES[name], select(CATALOG, ["slurmctld", "slurmdbd", "slurmrestd"]))
        assert {"ohpc-slurm-server", "slurm-slurmdbd-ohpc", "slurm-ohpc-slurmrestd", "munge"} <= set(packages)


def test_apt_sources() -> None:
    assert apt_sources(DEBIAN, MIRRORS) == [
        f"deb [signed-by={DEBIAN.keyring}] https://mirror.example.org/debian bookworm main",
        f"deb [signed-by={DEBIAN.keyring}] https://mirror.example.org/debian bookworm-updates main",
        f"deb [signed-by={DEBIAN.keyring}] https://mirror.example.org/security bookworm-security main",
    ]


URLS: list[tuple[Base, dict[str, str], dict[str, str]]] = [
    (DEBIAN, {}, {}),
    (DEBIAN, {"debian": "https://m.example.org/debian/"}, {"debian": "https://m.example.org/debian"}),
    (
        ROCKY,
        {"rocky": "https://m.example.org/rocky/"},
        {
            "baseos": "https://m.example.org/rocky/9/BaseOS/x86_64/os",
            "appstream": "https://m.example.org/rocky/9/AppStream/x86_64/os",
            "crb": "https://m.example.org/rocky/9/CRB/x86_64/os",
        },
    ),
    (
        ROCKY,
        {"openhpc": "file:///srv/openhpc", "openhpc-updates": "https://m.example.org/updates"},
        {"openhpc-base": "file:///srv/openhpc/3/EL_9", "openhpc-updates": "https://m.example.org/updates"},
    ),
]


@pytest.mark.parametrize(("base", "mirrors", "expected"), URLS)
def test_repository_urls(base: Base, mirrors: dict[str, str], expected: dict[str, str]) -> None:
    assert repository_urls(base, mirrors) == expected
    assert missing_mirrors(base, expected) == sorted(base.repositories.keys() - expected.keys())


@pytest.mark.parametrize(
    ("url", "has"),
    [
        ("https://m.example.org/debian", False),
        ("file:///srv/mirror", False),
        ("http://[2001:db8::1]:8080/x", False),
        ("https://user:password@m.example.org/debian", True),
        ("https://user@m.example.org/debian", True),
        ("https://m.example.org/SUSE/product?0123456789abcdef", True),
        ("plugin:/susecloud?credentials=Basesystem", True),
    ],
)
def test_credentials_are_detected(url: str, has: bool) -> None:
    assert has_credentials(url) is has


def test_invalid_mirrors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no mirror debain"):
        repository_urls(DEBIAN, {"debain": "https://m.example.org/debian"})
    with pytest.raises(ConfigError, match="would be stored in the image") as caught:
        repository_urls(DEBIAN, {"debian": "https://user:hunter2@m.example.org/debian"})
    assert "hunter2" not in str(caught.value)


# The lock


def lock(folder: Path, text: str) -> Path:
    path = folder / "sms.lock"
    path.write_text(text)
    return path


HELD = {"munge": "1", "chrony": "2"}


def test_lock_that_matches(tmp_path: Path) -> None:
    check_against_lock(lock(tmp_path, json.dumps({"base": "debian-12", "packages": HELD})), DEBIAN, HELD)


LOCKS: list[tuple[str | None, type[Exception], str]] = [
    (None, Refused, "there is no lock file"),
    ("{", ConfigError, "is not a lock file"),
    ("[]", ConfigError, "is not a lock file"),
    ('{"base": "debian-12"}', ConfigError, "is not a lock file"),
    (json.dumps({"base": "debian-13", "packages": HELD}), Refused, "is for debian-13"),
    (json.dumps({"base": "debian-12", "packages": {"munge": "1"}}), Refused, "chrony: absent -> 2"),
    (json.dumps({"base": "debian-12", "packages": HELD | {"old": "1"}}), Refused, "old: 1 -> absent"),
    (json.dumps({"base": "debian-12", "packages": HELD | {"munge": "0"}}), Refused, "munge: 0 -> 1"),
]


@pytest.mark.parametrize(("text", "error", "words"), LOCKS)
def test_lock_that_does_not_match(tmp_path: Path, text: str | None, error: type[Exception], words: str) -> None:
    path = tmp_path / "sms.lock" if text is None else lock(tmp_path, text)
    with pytest.raises(error, match=words):
        check_against_lock(path, DEBIAN, HELD)


def test_lock_lists_at_most_a_screen(tmp_path: Path) -> None:
    path = lock(tmp_path, json.dumps({"base": "debian-12", "packages": {}}))
    with pytest.raises(Refused, match="and 80 more"):
        check_against_lock(path, DEBIAN, {f"p{number:03}": "1" for number in range(100)})


def test_service_is_not_named_twice() -> None:
    services: tuple[Service, ...] = select(CATALOG, ["slurmctld", "slurmdbd"])
    packages = packages_for(DEBIAN, services)
    assert len(packages) == len(set(packages))


def test_ids_of_system_users() -> None:
    """What the site gives wins over the catalogue; users of services that are not built are left out."""
    ids = {"munge": SystemUser(uid=971, gid=972), "slurm": SystemUser(uid=202, gid=202)}
    usual, given = plan(), plan(users=ids)
    assert usual.key != given.key and plan(users={"slurm": ids["slurm"]}).key == usual.key
    assert "useradd --system --uid 351 --gid munge" in usual.definition
    assert "groupadd --system --gid 972 munge" in given.definition
    assert "useradd --system --uid 971 --gid munge" in given.definition and "351" not in given.definition
    assert '"$(id -u munge):$(id -g munge)" = 971:972' in given.definition and "--gid slurm" not in given.definition
    both = plan(services=select(CATALOG, ["munge", "slurmctld"]), users=ids, versions=None)
    assert "useradd --system --uid 202 --gid slurm" in both.definition


@pytest.mark.parametrize(("uid", "gid"), [(202, 7), (7, 202)])
def test_two_users_with_one_id(uid: int, gid: int) -> None:
    ids = {"munge": SystemUser(uid=202, gid=202), "slurm": SystemUser(uid=uid, gid=gid)}
    with pytest.raises(ConfigError, match=r"id 202 of (munge|slurm) is already used"):
        plan(services=select(CATALOG, ["munge", "slurmctld"]), users=ids, versions=None)
