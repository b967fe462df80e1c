"""The services that `sms classify` knows: the catalogue, and the site's own folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.catalog import read_catalog
from appliance.catalog.own import read_own
from appliance.errors import ConfigError
from appliance.operations.classify import convert, signatures
from appliance.share import share
from tests.unit.classify_cases import OWN, own

SHIPPED = read_catalog(share("definitions", "services"))
CATALOGUE = signatures.open_catalogue(None)


def test_signatures_of_the_catalogue() -> None:
    made = {each.name: each for each in signatures.make_signatures(CATALOGUE)}
    assert made.keys() == SHIPPED.keys()
    slurm, nat, ssh, munge = (made[name] for name in ("slurmctld", "nat", "ssh", "munge"))
    assert slurm.ports == ((6, 6817), (6, 6818))
    assert [(first.protocol, first.port) for first in slurm.first] == [(6, 0)]
    assert (slurm.budget_s, slurm.carried, slurm.critical) == (300, True, True)
    assert (nat.ports, nat.routed) == ((), True)
    assert not ssh.carried
    assert munge.silent
    assert made["warewulf"].poll
    assert made["provisioning"].boot
    assert not any(each.verdict for each in made.values())


@pytest.mark.parametrize("version", [0x1A00, 0x2600, 0x2E00])
@pytest.mark.parametrize("length", [60, 1500, 70000])
def test_slurm_is_recognized_on_any_port(version: int, length: int) -> None:
    """2.6, 22.05 and 26.11; HTTP, SSH and TLS are not mistaken for it."""
    (first,) = (first for first in convert.make_signature(SHIPPED["slurmctld"], True).first if not first.port)

    def fits(data: bytes) -> bool:
        part = data[first.offset : first.offset + len(first.low)]
        return all(low <= byte <= high for low, byte, high in zip(first.low, part, first.high, strict=True))

    assert fits(length.to_bytes(4, "big") + version.to_bytes(2, "big") + bytes(20))
    for other in (
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-OpenSSH",
        b"\x16\x03\x01\x02\x00\x01\x00",
        bytes(20),
        b"\x00\x00\x00\x10\x26\x01",
    ):
        assert not fits(other)


def test_services_of_the_site(tmp_path: Path) -> None:
    """One that is new, one that changes only a verdict, one that takes a port from another."""
    folder = own(
        tmp_path / "own",
        licences=OWN,
        nfs="name: nfs\nverdict: deferrable\nwhy: read while booting only\n",
        portal=OWN.replace("licences", "portal").replace("1947", "443"),
    )
    made = {each.name: each for each in signatures.make_signatures(signatures.open_catalogue(folder))}
    new = made["licences"]
    assert (new.ports, new.budget_s, new.critical, new.carried, new.verdict) == (((6, 1947),), 600, True, False, "")
    nfs, before = made["nfs"], convert.make_signature(SHIPPED["nfs"], False)
    assert nfs == replace(before, verdict="deferrable", verdict_why="read while booting only")
    assert (6, 443) in made["portal"].ports
    assert (6, 443) not in made["https"].ports
    assert made["https"].silent, "its absence means nothing now"
    assert not made["dns"].silent
    assert list(made)[:3] == ["licences", "nfs", "portal"], "the site's own are tried first"


def test_a_service_of_the_container_stays_in_it(tmp_path: Path) -> None:
    folder = own(tmp_path / "own", chrony="name: chrony\noutage: {seconds: 60, why: we are strict}\n")
    made = {each.name: each for each in signatures.make_signatures(signatures.open_catalogue(folder))}
    assert (made["chrony"].budget_s, made["chrony"].carried, made["chrony"].every_s) == (60, True, 1024)


MANY = ", ".join(f"{{port: tcp/9, starts: a{number}}}" for number in range(250))
BAD_OWN: list[tuple[dict[str, str], str]] = [
    ({}, "has no .yaml files"),
    ({"licences": OWN + "surprise: 1\n"}, "licences.yaml:5: surprise: unknown key"),
    ({"licences": OWN.replace("tcp/1947", "tcp/any")}, "would match every service"),
    ({"other": OWN}, "licences does not match the file's name"),
    ({"licences": "name: licences\n"}, "summary: is missing"),
    ({"licences": OWN + "verdict: maybe\n"}, "verdict"),
    ({"licences": "[" * 1000}, "licences.yaml:1"),
    ({"licences": "- a\n"}, "is not a mapping"),
    ({"licences": OWN + "verdict: maybe\n"}, "known: deferrable, time-critical"),
    (
        {"licences": OWN, "portal": OWN.replace("licences", "portal")},
        "portal.yaml: ports: tcp/1947 already belongs to licences",
    ),
    (
        {
            "nfs": "name: nfs\nverdict: deferrable\n",
            "portal": OWN.replace("licences", "portal").replace("1947", "2049"),
        },
        "portal.yaml: ports: tcp/2049 already belongs to nfs",
    ),
    (
        {"licences": OWN + f"traffic: {{first: [{MANY}]}}\n"},
        "licences.yaml: traffic.first: 250 patterns",
    ),
]


@pytest.mark.parametrize(("texts", "expected"), BAD_OWN, ids=range(len(BAD_OWN)))
def test_problems_in_services_of_the_site(texts: dict[str, str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_own(own(tmp_path / "own", **texts), SHIPPED)
    assert expected in str(caught.value)


def test_folders_in_the_folder_of_services_are_skipped(tmp_path: Path) -> None:
    folder = own(tmp_path / "own", licences=OWN)
    (folder / "old.yaml").mkdir()
    assert set(read_own(folder, SHIPPED)) == {"licences"}


def test_no_folder_of_services(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_own(tmp_path / "none", SHIPPED)
