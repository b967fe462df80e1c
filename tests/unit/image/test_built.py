"""Settings that an image was not built of: a table over a manifest that a build plan wrote."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from appliance.catalog import read_bases, read_catalog, select
from appliance.config.read import read_site_text
from appliance.plan.image.built import find_other_settings, read_inputs
from appliance.plan.image.definition import BuildInputs, plan_build
from appliance.share import share
from tests.sites import GOOD

BASES = read_bases(share("definitions", "bases"))
CATALOG = read_catalog(share("definitions", "services"))
PASSWD = "list:x:38:38:Mailing List Manager:/:/bin/sh\nslurm:x:64030:64030::/:/bin/sh\nmunge:x:351:351::/:/bin/sh\n"
MIRRORS = {"debian": "http://mirror.example.org/debian", "security": "http://mirror.example.org/security"}
REPOSITORY = {"own": {"url": "http://mirror.example.org/own", "suite": "./", "key": "/etc/sms/own.asc"}}
USER = {"user": {"uid": 971, "gid": 972}}


def described(document: dict[str, Any], passwd: str = PASSWD) -> str:
    """What an image contains that was built of this site file."""
    site = read_site_text(yaml.safe_dump(document), "sms.yaml")[0]
    inputs = BuildInputs(MIRRORS, None, {}, {}, site.system_users, site.base.packages, site.base.repositories)
    services = select(CATALOG, document["services"])
    plan = plan_build(BASES[site.base.os], services, inputs, definitions=share("definitions"))
    return plan.manifest + passwd


def changed(**sections: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(GOOD)
    for name, value in sections.items():
        document[name] = {**document.get(name, {}), **value} if isinstance(value, dict) else value
    return document


def found(document: dict[str, Any], built: str) -> tuple[str, ...]:
    site = read_site_text(yaml.safe_dump(document), "sms.yaml")[0]
    services = select(CATALOG, document["services"])
    return find_other_settings(site, BASES[site.base.os], services, read_inputs(built))


@pytest.mark.parametrize(
    ("built", "now", "expected"),
    [
        ({}, {}, ()),
        ({}, {"base": {"packages": ["socat"]}}, ("packages (+socat)",)),
        ({"base": {"packages": ["socat"]}}, {}, ("packages (-socat)",)),
        ({"base": {"packages": ["socat"]}}, {"base": {"packages": ["munge", "socat"]}}, ()),
        ({}, {"base": {"os": "openhpc-rocky9"}}, ("base.os (debian-12, not openhpc-rocky9)",)),
        ({}, {"base": {"repositories": REPOSITORY}}, ("base.repositories",)),
        ({"base": {"repositories": REPOSITORY}}, {"base": {"repositories": REPOSITORY}}, ()),
        ({}, {"slurm": USER}, ("slurm.user",)),
        ({}, {"munge": USER, "base": {"packages": ["nmap"]}}, ("packages (+nmap)", "munge.user")),
        ({"services": ["slurmctld", "munge", "cron"]}, {}, ()),
        ({"services": ["slurmctld", "munge", "cron"]}, {"base": {"packages": ["nmap"]}}, ("packages (+nmap)",)),
        ({}, {"filesync": {"interval_s": 77}}, ()),
    ],
)
def test_settings_that_an_image_was_not_built_of(
    built: dict[str, Any], now: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert found(changed(**now), described(changed(**built))) == expected


def test_ids_of_users() -> None:
    """As in the image; the catalogue's when the site file no longer gives any."""
    slurm = PASSWD.replace("slurm:x:64030:64030", "slurm:x:971:972")
    assert found(changed(slurm=USER), described(changed(slurm=USER), slurm)) == ()
    munge = PASSWD.replace("munge:x:351:351", "munge:x:971:972")
    assert found(changed(munge=USER), described(changed(munge=USER), munge)) == ()
    assert found(changed(), described(changed(munge=USER), munge)) == ("munge.user",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        '{"base": 1}',
        '{"base": {"name": "x"}, "packages": 3, "services": []}',
        described(changed(), "slurm:x\n"),
        described(changed(), "slurm:x:a:b\n"),
    ],
)
def test_an_invalid_description(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_inputs(text)
