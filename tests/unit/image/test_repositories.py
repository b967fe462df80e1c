"""Repositories of the site's own and credentials: rendered for every base, and refused where they cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog import read_bases, read_catalog, select
from appliance.config.model import Repository
from appliance.config.model import Site as SiteModel
from appliance.errors import ConfigError
from appliance.operations.image.sources import Sources, credentials_folder
from appliance.plan.image.definition import BuildInputs, BuildPlan, plan_build
from appliance.plan.image.repositories import (
    Credential,
    check_repositories,
    credential_files,
    credentials_for,
    hide,
    read_credentials,
    split_url,
)
from appliance.share import share
from tests.places import GOLDEN
from tests.sites import WITH_VM

BASES = read_bases(share("definitions", "bases"))
SERVICES = select(read_catalog(share("definitions", "services")), ["munge", "chrony"])
SECRET = Credential("sms", "pa:ss/w@rd%1")
TOKEN = Credential(token="0123456789abcdef")


def own(base: str) -> dict[str, Repository]:
    apt = {"suite": "bookworm", "components": ["main"]} if BASES[base].manager == "apt" else {}
    return {"own": Repository(url="https://repo.example.org/own/", key=Path("/key.asc"), **apt)}


def credentials(base: str) -> dict[str, Credential]:
    names = {"debian-12": "security", "openhpc-rocky9": "openhpc-base", "openhpc-leap15": "leap", "sles-15": "sles"}
    found = credentials_for(BASES[base], own(base), {names[base]: SECRET, "own": SECRET})
    if base == "sles-15":
        found["hpc"] = TOKEN
    return found


def plan(base: str) -> tuple[BuildPlan, dict[str, str]]:
    mirrors = {name: f"https://mirror.example.org/{name}" for name in BASES[base].repositories}
    versions = {"munge": "1", "socat": "2"} if BASES[base].manager == "apt" else None
    keys = {name: b"a key\n" for name, each in BASES[base].repositories.items() if each.keys} | {"own": b"own key\n"}
    found = credentials(base)
    inputs = BuildInputs(mirrors, versions, {"sms-run": b""}, keys, {}, ("socat",), own(base), sorted(found))
    urls = {**mirrors, "own": "https://repo.example.org/own"}
    made = plan_build(BASES[base], SERVICES, inputs, definitions=share("definitions"))
    return made, credential_files(BASES[base], urls, found)


@pytest.mark.parametrize("base", sorted(BASES))
def test_what_is_rendered(base: str, golden: Callable[[Path, dict[str, str]], None]) -> None:
    made, files = plan(base)
    texts = {f"mounted/{name}": text for name, text in files.items()}
    golden(GOLDEN / "repositories" / base, {"services.def": made.definition, **texts})


@pytest.mark.parametrize("base", sorted(BASES))
def test_no_secret_is_in_a_definition_or_manifest(base: str) -> None:
    made, files = plan(base)
    assert "w@rd" in "".join(files.values()) or "w%40rd" in "".join(files.values())
    for data in made.context().values():
        for secret in (b"pa:ss", b"pa%3A", b"0123456789abcdef"):
            assert secret not in data.replace(made.key.encode(), b"")
    manifest = json.loads(made.manifest)
    assert manifest["repositories"]["own"]["url"] == "https://repo.example.org/own/"
    assert set(manifest["keys"]) >= {"own"} and "socat" in manifest["packages"]


SITES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("debian-12", {"own": {"suite": "bookworm", "components": ["main"]}}, []),
    ("debian-12", {"own": {"suite": "./"}}, []),
    ("debian-12", {"own": {}}, ["has no suite"]),
    ("debian-12", {"own": {"suite": "bookworm"}}, ["do not fit"]),
    ("debian-12", {"own": {"suite": "./", "components": ["main"]}}, ["do not fit"]),
    ("debian-12", {"security": {"suite": "./"}}, ["is a repository of"]),
    ("sles-15", {"own": {}}, []),
    ("sles-15", {"sles": {}}, ["is a repository of"]),
    ("sles-15", {"own": {"suite": "./"}}, ["are of apt"]),
]


@pytest.mark.parametrize(("base", "given", "expected"), SITES)
def test_what_fits_a_base(base: str, given: dict[str, Any], expected: list[str]) -> None:
    repositories = {name: {"url": "https://r.example.org", "key": "k", **each} for name, each in given.items()}
    site = SiteModel.model_validate({**WITH_VM, "base": {"os": base, "repositories": repositories}})
    found = [one.message for one in check_repositories(site, BASES[base])]
    assert len(found) == len(expected) and all(word in text for word, text in zip(expected, found, strict=True))


BAD: list[tuple[str, int]] = [
    ("", 0),
    ("- a", 0),
    ("a: 1", 1),
    ("a: {user: x}", 1),
    ("a: {user: x, password: Hidden-1, token: y}", 1),
    ("a: {user: x, password: 'Hidden-1 two'}", 1),
    ("a: {user: x, password: 4711}", 1),
    ('a: {user: x, password: "Hidden-1\\n"}', 1),
    ("a: {token: ''}", 1),
    ("a:\n  user: x\n  password: *Hidden-1", 3),
    ("a: {user: x, password: !Hidden-1 y}", 1),
    ("a: {user: x, passwort: Hidden-1}", 1),
    ("a: {user: x, password: Hidden-1", 1),
]


@pytest.mark.parametrize(("text", "line"), BAD)
def test_a_message_about_credentials_has_none_of_them(text: str, line: int) -> None:
    with pytest.raises(ConfigError) as caught:
        read_credentials(text, "c.yaml")
    assert "Hidden" not in str(caught.value) + str(caught.value.problems)
    assert [problem.line for problem in caught.value.problems][:1] == [line]


def test_credentials_are_read() -> None:
    text = 'debian: {user: sms, password: "12345"}\nhpc: {token: a=b&c}\n'
    found = read_credentials(text, "c.yaml")
    assert found == {"debian": Credential("sms", "12345"), "hpc": Credential(token="a=b&c")}
    assert "12345" not in repr(found) and "a=b" not in repr(found)


@pytest.mark.parametrize(
    ("base", "given", "words"),
    [
        ("debian-12", {"debain": SECRET}, "no repository debain"),
        ("debian-12", {"debian": TOKEN}, "tokens are of zypper"),
        ("openhpc-rocky9", {"rocky": SECRET}, "read before dnf is there"),
        ("openhpc-rocky9", {"openhpc": TOKEN}, "tokens are of zypper"),
    ],
)
def test_credentials_that_cannot_work(base: str, given: dict[str, Credential], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        credentials_for(BASES[base], (), given)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://a.example.org/x/", ("https://a.example.org/x", None, "")),
        ("https://a.example.org/x/?tok", ("https://a.example.org/x", Credential(token="tok"), "")),
        ("https://u:p%40@a.example.org:8/x", ("https://a.example.org:8/x", Credential("u", "p@"), "")),
        ("https://a.example.org/x?credentials=SCC", ("https://a.example.org/x", None, "SCC")),
        (
            "https://a.example.org/x?credentials=SCC&ssl_verify=no",
            ("https://a.example.org/x", Credential(token="ssl_verify=no"), "SCC"),
        ),
    ],
)
def test_urls_of_a_registered_host(url: str, expected: tuple[str, Credential | None, str]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize(
    "line",
    [
        "wget http://sms:pa:ss/w@rd%1@host/",
        "http://sms:pa%3Ass%2Fw%40rd%251@host/x",
        "Authorization: Basic c21zOnBhOnNzL3dAcmQlMQ==",
        "https://h/x?0123456789abcdef failed",
    ],
)
def test_output_without_credentials(line: str) -> None:
    hidden = hide(line, [SECRET, TOKEN])
    assert "***" in hidden and not any(each in hidden for each in ("pa:ss", "pa%3A", "c21z", "0123456789abcdef"))
    assert hide("nothing here", [SECRET, TOKEN]) == "nothing here"


def test_the_files_are_for_one_command(tmp_path: Path) -> None:
    """Readable by their owner only, and gone afterwards, even those of a killed run."""
    base = BASES["debian-12"]
    mirrors = {"debian": "http://a.example.org/d", "security": "http://a.example.org/s"}
    sources = Sources(base, mirrors, {}, {}, {"debian": SECRET})
    with credentials_folder(sources) as folder:
        assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.name for path in files} == {"wgetrc", "sms.conf"}
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
        text = (folder / "mounted" / "sms.conf").read_text()
        assert text == "machine http://a.example.org/d login sms password pa:ss/w@rd%1\n"
        left = folder.with_name(folder.name.replace(folder.name.split("-")[2], "4194305"))
        left.mkdir()
    assert not folder.exists()
    with credentials_folder(Sources(base, mirrors, {}, {})) as nothing:
        assert nothing is None and not left.exists()
