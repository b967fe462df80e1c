"""The seed of an overlay, and the places of secrets."""

from __future__ import annotations

import io
import json
import shlex
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.catalog import read_bases, read_catalog, read_extra_files, select
from appliance.catalog.model import SeedFile
from appliance.config.model import Site, SlurmNode
from appliance.operations.context import read_given
from appliance.operations.site.find import open_site
from appliance.plan.image.definition import BuildInputs, plan_build, repository_urls
from appliance.plan.machine import Places, inside_argv, seed_argv, start_argv, stop_argv
from appliance.plan.overlay.seed import (
    OF_SERVICES,
    SECRET_PLACES,
    Seed,
    node_addresses,
    seed_archive,
    seed_digest,
    seed_files,
)
from appliance.plan.services.confinement import Confinement, capabilities_for
from appliance.plan.services.network import conflists
from appliance.plan.services.unit import unit_text
from appliance.share import share
from tests.places import GOLDEN

SITES = GOLDEN / "sites"
SITE = open_site(SITES / "debian-12.yaml").site
CATALOG = read_catalog(share("definitions", "services"))
SERVICES = select(CATALOG, SITE.service_names)
SOURCES = {**dict(SITE.secrets), **dict(SITE.accounts)}
GIVEN = read_given([(name, SOURCES[name]) for name in SECRET_PLACES])
SECRETS = sorted(set(SECRET_PLACES) - {"passwd", "group", *OF_SERVICES})


def seeds(given: dict[str, bytes], site: Site = SITE) -> tuple[Seed, ...]:
    overlays = share("overlays")
    extra = read_extra_files(overlays / "base" / "overlay.yaml").files
    return seed_files(site, SERVICES, overlays=overlays, extra=extra, given=given)


def test_secrets_are_readable_by_their_owner_only() -> None:
    found = {seed.path: seed for seed in seeds(GIVEN)}
    for name in SECRETS:
        seed = found[SECRET_PLACES[name][0]]
        assert seed.mode == 0o600, seed
        assert seed.owner == seed.group == ("munge" if name == "munge_key" else "root")
        assert seed.data == GIVEN[name]
    assert found["/etc/slurm/slurmdbd.conf"].mode == 0o600
    assert not [seed for seed in found.values() if seed.mode & 0o022], "others can write"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["slurmctld"], {"jwt_key": "slurm"}),
        (["sssd"], {"sssd_conf": "root"}),
        (["login"], {"ssh_host_key": "root"}),
        (["munge"], {}),
    ],
)
def test_secrets_of_services_are_there_for_these_only(names: list[str], expected: dict[str, str]) -> None:
    """Their owners are in images with such a service."""
    given = dict.fromkeys(OF_SERVICES, b"secret")
    found = {
        each.path: each
        for each in seed_files(SITE, select(CATALOG, names), overlays=share("overlays"), extra=(), given=given)
    }
    paths = {name: SECRET_PLACES[name][0] for name in OF_SERVICES}
    assert {name: found[path].owner for name, path in paths.items() if path in found} == expected
    assert all(found[paths[name]].mode == 0o600 for name in expected)


def everything_but_the_seed(site: Site) -> str:
    """Return all text that is rendered, recorded, shown or passed on a command line."""
    base = read_bases(share("definitions", "bases"))[site.base.os]
    inputs = BuildInputs(repository_urls(base, site.base.mirrors), {"munge": "1"}, runtime={})
    plan = plan_build(base, SERVICES, inputs, definitions=share("definitions"))
    image = str(Places(site).current)
    confinement = Confinement(capabilities_for(SERVICES), str(Places(site).seccomp), str(Places(site).empty))
    commands = [
        start_argv(site, confinement, image),
        stop_argv(site, 99),
        seed_argv(site, confinement, image, "o.img", "mark"),
        inside_argv(site, SERVICES, "true"),
    ]
    unit = unit_text(site.cluster, sms="sms", site="sms.yaml", state="/s", overlays="/", stop_timeout=9)
    texts = [plan.definition, plan.manifest, repr(plan), unit, *conflists(site, SERVICES, "host-a").values()]
    texts += [data.decode(errors="replace") for data in plan.context().values()]
    return "\n".join([*texts, *(shlex.join(argv) for argv in commands)])


@given(st.dictionaries(st.sampled_from(SECRETS), st.binary(min_size=12, max_size=40), min_size=1))
@settings(max_examples=60, deadline=None)
def test_secrets_are_in_their_own_file_only(secrets: dict[str, bytes]) -> None:
    marked = {name: b"SECRET-" + name.encode() + b"-" + data.hex().encode() for name, data in secrets.items()}
    made = seeds(GIVEN | marked)
    shown = everything_but_the_seed(SITE) + repr(made)
    for name, data in marked.items():
        assert data.decode() not in shown
        assert data not in repr(seed_digest(seed_archive(made))).encode()
        assert [seed.path for seed in made if data in seed.data] == [SECRET_PLACES[name][0]]


def test_sample_secrets_are_in_their_own_file_only() -> None:
    shown = everything_but_the_seed(SITE)
    for name in SECRETS:
        assert GIVEN[name].decode().strip() not in shown


def members(archive: bytes) -> dict[str, tuple[str, str, int, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {}
        for member in tar:
            stream = tar.extractfile(member)
            assert stream
            found[f"/{member.name}"] = (member.uname, member.gname, member.mode, stream.read())
        return found


def test_archive_names_owners() -> None:
    found = members(seed_archive(seeds(GIVEN)))
    assert found["/etc/munge/munge.key"] == ("munge", "munge", 0o600, GIVEN["munge_key"])
    assert found["/etc/slurm/slurmdbd.conf"][:3] == ("slurm", "slurm", 0o600)
    assert found["/etc/shadow"][:3] == ("root", "root", 0o600)


def test_archive_has_no_clock_and_no_ids() -> None:
    archive = seed_archive(seeds(GIVEN))
    assert archive == seed_archive(seeds(GIVEN))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert {(member.mtime, member.uid, member.gid) for member in tar} == {(0, 0, 0)}


def test_digest_distinguishes_seeds() -> None:
    one = seed_digest(seed_archive(seeds(GIVEN)))
    assert one != seed_digest(seed_archive(seeds(GIVEN | {"munge_key": b"another"})))
    mine = Seed("/etc/x", b"data")
    for other in (Seed("/etc/y", b"data"), Seed("/etc/x", b"data", mode=0o600), Seed("/etc/x", b"data", owner="munge")):
        assert seed_digest(seed_archive([mine])) != seed_digest(seed_archive([other]))


def test_passwd_comes_before_shadow() -> None:
    paths = [seed.path for seed in seeds(GIVEN)]
    assert paths == sorted(paths)
    assert paths.index("/etc/passwd") < paths.index("/etc/shadow")
    assert len(paths) == len(set(paths))


def test_without_secrets_there_are_none() -> None:
    paths = {seed.path for seed in seeds({})}
    assert not paths & {place[0] for place in SECRET_PLACES.values()}


NODES: list[tuple[str, str | None, list[tuple[str, str]]]] = [
    ("n[1-2]", "10.20.1.[1-2]", [("10.20.1.1", "n1"), ("10.20.1.2", "n2")]),
    ("n[1-2]", None, []),
    ("n1", "n1.example.org", []),
    ("n[08-10]", "10.20.1.[8-10]", [("10.20.1.8", "n08"), ("10.20.1.9", "n09"), ("10.20.1.10", "n10")]),
]


@pytest.mark.parametrize(("names", "addresses", "expected"), NODES)
def test_node_addresses(names: str, addresses: str | None, expected: list[tuple[str, str]]) -> None:
    slurm = SITE.slurm.model_copy(update={"nodes": (SlurmNode(name=names, address=addresses),)})
    assert node_addresses(SITE.model_copy(update={"slurm": slurm})) == expected


def test_services_json_is_what_the_programs_read() -> None:
    text = next(seed.data for seed in seeds({}) if seed.path == "/etc/sms/services.json")
    services = json.loads(text)["services"]
    assert list(services) == [service.name for service in SERVICES], "in starting order"
    for service in services.values():
        assert set(service) == {
            *(
                "run",
                "user",
                "groups",
                "capabilities",
                "setup",
                "running",
                "saves",
                "unclean",
                "needs",
                "after",
                "sync",
                "probe",
            )
        }
        assert "{{" not in json.dumps(service)


def test_contents_may_be_inline() -> None:
    files = (SeedFile(path="/etc/a", content="{{ site.cluster }}\n", mode="0640"),)
    found = {seed.path: seed for seed in seed_files(SITE, (), overlays=share("overlays"), extra=files, given={})}
    assert (found["/etc/a"].data, found["/etc/a"].mode) == (b"sample\n", 0o640)
