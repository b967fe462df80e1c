"""All that is rendered from a sample site, verified against files that a person can read."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.catalog import Base, Service, read_bases, read_catalog, read_extra_files, select
from appliance.config.model import Site
from appliance.operations.context import read_given, runtime_files
from appliance.operations.site.find import open_site
from appliance.plan.image.definition import (
    BuildInputs,
    BuildPlan,
    missing_mirrors,
    packages_for,
    plan_build,
    repository_urls,
)
from appliance.plan.machine import Places, inside_argv, seed_argv, start_argv, stop_argv, stop_timeout
from appliance.plan.overlay.seed import SECRET_PLACES, Seed, seed_files
from appliance.plan.services.confinement import Confinement, capabilities_for
from appliance.plan.services.network import conflists
from appliance.plan.services.runs import shown
from appliance.plan.services.unit import guard_unit_name, guard_unit_text, unit_name, unit_text
from appliance.plan.vm.vm import firewall, listen_files, network_units
from appliance.share import share
from tests.ownnet import own_network
from tests.places import GOLDEN, ROOT
from tests.sites import make_site

CASES = sorted(path.stem for path in (GOLDEN / "sites").glob("*.yaml"))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def site(case: str) -> Site:
    return open_site(GOLDEN / "sites" / f"{case}.yaml").site


@pytest.fixture
def services(site: Site) -> tuple[Service, ...]:
    return select(read_catalog(share("definitions", "services")), site.service_names)


@pytest.fixture
def base(site: Site) -> Base:
    return read_bases(share("definitions", "bases"))[site.base.os]


def build_plan(site: Site, base: Base, services: tuple[Service, ...]) -> BuildPlan:
    mirrors = repository_urls(base, site.base.mirrors)
    assert not missing_mirrors(base, mirrors)
    versions = dict.fromkeys(packages_for(base, services), "1.0-1") if base.manager == "apt" else None
    inputs = BuildInputs(
        mirrors,
        versions,
        # Their names only: a change of a program should change no golden file.
        runtime=dict.fromkeys(runtime_files(), b"a program\n"),
        keys={name: b"a key\n" for name, repository in base.repositories.items() if repository.keys},
    )
    return plan_build(base, services, inputs, definitions=share("definitions"))


def seeds_of(site: Site, services: tuple[Service, ...]) -> tuple[Seed, ...]:
    sources = {**dict(site.secrets), **dict(site.accounts)}
    overlays = share("overlays")
    return seed_files(
        site,
        services,
        overlays=overlays,
        extra=read_extra_files(overlays / "base" / "overlay.yaml").files,
        given=read_given([(name, sources[name]) for name in SECRET_PLACES]),
    )


def rendered(site: Site, base: Base, services: tuple[Service, ...]) -> dict[str, str]:
    """Everything by the name of its golden file."""
    image = str(Places(site).current)
    confinement = Confinement(capabilities_for(services), str(Places(site).seccomp), str(Places(site).empty))
    commands = (
        start_argv(site, confinement, image),
        stop_argv(site, stop_timeout(services)),
        seed_argv(site, confinement, image, str(Places(site).overlay), "MARK"),
        inside_argv(site, services, "true"),
    )
    seeds = seeds_of(site, services)
    plan = build_plan(site, base, services)
    texts = {
        "services.def": plan.definition,
        "manifest.json": plan.manifest,
        "commands": "".join(f"{shlex.join(shown(argv))}\n" for argv in commands),
        unit_name(site.cluster): unit_text(
            site.cluster,
            sms="/usr/bin/sms",
            site="/etc/sms/sms.yaml",
            state=str(site.state),
            overlays=str(Places(site).overlay.parent),
            stop_timeout=stop_timeout(services),
        ),
        guard_unit_name(site.cluster): guard_unit_text(
            site.cluster, sms="/usr/bin/sms", site="/etc/sms/sms.yaml", state=str(site.state)
        ),
        "seed.list": "".join(f"{seed.owner}:{seed.group} {seed.mode:04o} {seed.path}\n" for seed in seeds),
    }
    texts |= {
        f"cni/{Path(path).name}": text for path, text in conflists(site, services, site.admin_hosts[0].name).items()
    }
    return texts | {f"seed{seed.path}": seed.data.decode() for seed in seeds}


def test_what_is_rendered(
    case: str,
    site: Site,
    base: Base,
    services: tuple[Service, ...],
    golden: Callable[[Path, dict[str, str]], None],
) -> None:
    golden(GOLDEN / case, rendered(site, base, services))


@pytest.mark.parametrize("cards", ["one-card", "public-card"])
def test_the_network_of_the_vm(cards: str, tmp_path: Path, golden: Callable[[Path, dict[str, str]], None]) -> None:
    """Its firewall, the addresses that its web server listens on, its cards."""
    public = {"public": {"address": "192.0.2.10/24", "mac": "02:00:c0:00:02:0a"}} if cards == "public-card" else {}
    site = make_site(tmp_path, **public)
    golden(
        GOLDEN / "vm" / cards, {"etc/sms/nftables.conf": firewall(site), **listen_files(site), **network_units(site)}
    )


@pytest.mark.slow
def test_the_firewall_of_the_vm_is_valid_and_replaces_itself(need: Callable[[str], str]) -> None:
    nft = need("nft")
    with own_network([]):
        for cards in ("one-card", "public-card", "one-card"):
            subprocess.run([nft, "-f", str(GOLDEN / "vm" / cards / "etc/sms/nftables.conf")], check=True)
            rules = subprocess.run([nft, "list", "ruleset"], check=True, capture_output=True, text=True).stdout
            assert rules.count("tcp dport 8443 accept") == (cards == "public-card") and rules.count("policy drop") == 2


def test_every_base_has_a_sample() -> None:
    assert set(CASES) == {path.stem for path in share("definitions", "bases").glob("*.yaml")}


def test_nothing_tells_where_it_was_rendered(site: Site, base: Base, services: tuple[Service, ...]) -> None:
    checkout = str(ROOT)
    assert not [name for name, text in rendered(site, base, services).items() if checkout in text]


def test_packages_are_held_against_keys_of_the_build_host(
    site: Site, base: Base, services: tuple[Service, ...]
) -> None:
    text = build_plan(site, base, services).definition
    assert "gpgcheck=0" not in text
    assert "--no-gpg-checks" not in text
    assert "--gpg-auto-import-keys" not in text
    assert "--nogpgcheck" not in text
    if base.manager == "apt":
        assert base.keyring
        return
    assert all(repository.keys.startswith("/") for repository in base.repositories.values())
    # dnf takes the header's options, zypper a root that knows the keys already.
    assert "--setopt=base.gpgcheck=1" in text or 'rpmkeys --root "$root" --import' in text
