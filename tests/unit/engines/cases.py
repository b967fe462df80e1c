"""Sites for exports: the golden ones, with an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from appliance.catalog import read_bases, read_catalog, select
from appliance.config.read import read_site
from appliance.engines.config import Sources
from appliance.engines.render import Input
from appliance.operations.context import read_given
from appliance.plan.overlay.seed import slurm_sources
from appliance.plan.services.jobsync import PROGRAMS
from appliance.share import share
from tests.places import GOLDEN

SITES = GOLDEN / "sites"
IMAGE = "localhost/sms/sample:0123456789ab"
SIF = f"/var/lib/sms/images/{'0123456789ab'.ljust(64, '0')}.sif"
KEY = "-----BEGIN PUBLIC KEY-----\nnot a key\n-----END PUBLIC KEY-----\n"
KUBERNETES = {"address": "10.20.0.9"}
ATTACHED = {**KUBERNETES, "network": "attached", "interface": "br-prov"}
NOMAD = {"address": "10.20.0.8"}
PODMAN = {"address": "10.20.0.7"}
SMALL = ("slurmctld", "munge")
SECRETS = {
    "munge_key": "files/munge.key",
    "jwt_key": "files/jwt.key",
    "ssh_host_key": "files/ssh_host_key",
    "sssd_conf": "files/sssd.conf",
}
FULL = {
    "services": ["slurmctld", "munge", "slurmdbd", "mariadb", "slurmrestd", "login", "sssd", "nat"],
    "secrets": SECRETS,
}
"""Services that a site has to choose, with their secrets."""
ONE = {"services": ["slurmctld", "munge", "slurmdbd", "mariadb", "nat"]}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kubernetes": ("kubernetes", "debian-12", {"engines": {"kubernetes": KUBERNETES}}),
    "kubernetes-host": (
        "kubernetes",
        "debian-12",
        {"engines": {"kubernetes": {**KUBERNETES, "network": "host", "node": "control-1"}}},
    ),
    "kubernetes-attached": (
        "kubernetes",
        "debian-12",
        {
            "services": [*SMALL, "slurmdbd", "mariadb", "rsyslog", "postfix", "cron"],
            "engines": {"kubernetes": ATTACHED},
        },
    ),
    "kubernetes-balanced": (
        "kubernetes",
        "openhpc-rocky9",
        {
            "services": [*SMALL, "slurmdbd"],
            "slurm": {"user": {"uid": 450, "gid": 450}, "nodes": [{"name": "node[1-3]"}]},
            "engines": {
                "kubernetes": {
                    **KUBERNETES,
                    "service": "LoadBalancer",
                    "namespace": "slurm",
                    "storage_class": "fast",
                    "munge_secret": {"name": "slurm.munge", "key": "munge"},
                    "node_selector": {"kubernetes.io/os": "linux", "pool": "services"},
                    "tolerations": [
                        {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}
                    ],
                    "priority_class": "slurm-system-critical",
                    "image": f"registry.example.org:5000/sms/sample@sha256:{'a' * 64}",
                }
            },
        },
    ),
    "kubernetes-external": (
        "kubernetes",
        "debian-12",
        {"services": [*SMALL, "rsyslog"], "engines": {"kubernetes": {**KUBERNETES, "service": "ExternalIPs"}}},
    ),
    "kubernetes-full": ("kubernetes", "debian-12", {**FULL, "engines": {"kubernetes": KUBERNETES}}),
    "nomad": ("nomad", "debian-12", {"engines": {"nomad": NOMAD}}),
    "nomad-full": ("nomad", "debian-12", {**FULL, "engines": {"nomad": NOMAD}}),
    "nomad-small": (
        "nomad",
        "sles-15",
        {
            "services": list(SMALL),
            "slurm": {"user": {"uid": 450, "gid": 450}, "nodes": [{"name": "node[1-3]"}]},
            "engines": {"nomad": {**NOMAD, "host": "control-1", "datacenters": ["a", "b"], "pool": "services"}},
        },
    ),
    "terraform": ("terraform", "debian-12", {**ONE, "engines": {"kubernetes": KUBERNETES, "nomad": NOMAD}}),
    "quadlet": ("quadlet", "debian-12", {**ONE, "engines": {"podman": PODMAN}}),
    "compose": ("compose", "debian-12", {**FULL, "engines": {"podman": PODMAN}}),
}
"""Name, and target, golden site and changes of it."""


def make_input(folder: Path, site: str, changes: dict[str, Any]) -> Input:
    """What an export of a changed golden site is rendered from."""
    document = yaml.safe_load((SITES / f"{site}.yaml").read_text())
    document.update(changes)
    for section in ("accounts", "secrets"):
        document[section] = {key: str(SITES / value) for key, value in document[section].items()}
    path = folder / "sms.yaml"
    path.write_text(yaml.safe_dump(document))
    found, _ = read_site(path)
    catalog = read_catalog(share("definitions", "services"))
    services = select(catalog, found.service_names)
    given = read_given([("passwd", found.accounts.passwd), ("group", found.accounts.group), *slurm_sources(found)])
    base = read_bases(share("definitions", "bases"))[found.base.os]
    nodes = [one for one in catalog.values() if one.run and not one.container]
    # Their names only: a change of a program should change no golden file.
    programs = dict.fromkeys(PROGRAMS, "a program\n")
    return Input(found, services, base, Sources(share("overlays"), given), IMAGE, (KEY,), nodes, programs, SIF)


def case_input(folder: Path, name: str) -> tuple[str, Input]:
    """Target and input of a case."""
    target, site, changes = CASES[name]
    return target, make_input(folder, site, changes)
