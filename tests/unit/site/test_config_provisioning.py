"""Rules of the section ``provisioning``: one change to a valid file, the exact problems it causes."""

from __future__ import annotations

import pytest

from appliance.config.check import check_site
from appliance.config.read import read_site_text
from appliance.errors import ConfigError
from tests.sites import BASES, GOOD, SERVICES

PART = """\
provisioning:
  address: 10.77.0.3/24
  mac: 02:00:0a:4d:00:03
  public: {address: 10.78.0.3/24, mac: "02:00:0a:4e:00:03"}
  unknown: discover
  pool: {first: 10.77.0.200, last: 10.77.0.220}
  profiles:
    compute: {}
    gpu: {groups: [gpu], packages: [nvtop], arguments: "quiet"}
  files:
    - {path: /etc/motd, source: motd, services: true}
    - {path: /etc/issue, source: issue.gpu, groups: [gpu]}
"""

CASES: dict[str, tuple[str, str, list[str]]] = {
    "nothing": ("", "", []),
    "address elsewhere": (
        "10.77.0.3/24",
        "10.79.0.3/24",
        ["provisioning.address: 10.79.0.3/24 is not in the provisioning network 10.77.0.0/24"],
    ),
    "another prefix": (
        "10.77.0.3/24",
        "10.77.0.3/16",
        ["provisioning.address: 10.77.0.3/16 is not in the provisioning network 10.77.0.0/24"],
    ),
    "the container's": (
        "10.77.0.3/24",
        "10.77.0.1/24",
        ["provisioning.address: 10.77.0.1 is the container's address"],
    ),
    "a host's": ("10.78.0.3/24", "10.78.0.11/24", ["provisioning.public.address: 10.78.0.11 is the address of host-a"]),
    "the gateway's": (
        "10.78.0.3/24",
        "10.78.0.254/24",
        ["provisioning.public.address: 10.78.0.254 is the address of the public gateway"],
    ),
    "one MAC for both": (
        "02:00:0a:4e:00:03",
        "02:00:0a:4d:00:03",
        ["provisioning.public.mac: 02:00:0a:4d:00:03 is used twice"],
    ),
    "the container's MAC": (
        "mac: 02:00:0a:4d:00:03",
        "mac: 02:00:0a:4d:00:01",
        ["provisioning.mac: 02:00:0a:4d:00:01 is used twice"],
    ),
    "multicast MAC": (
        "mac: 02:00:0a:4d:00:03",
        "mac: 03:00:0a:4d:00:03",
        ["provisioning.mac: 03:00:0a:4d:00:03 is a multicast address"],
    ),
    "pool outside of the network": (
        "last: 10.77.0.220",
        "last: 10.77.1.220",
        ["provisioning.pool.last: 10.77.1.220 is not an address of the provisioning network 10.77.0.0/24"],
    ),
    "pool in reverse order": (
        "first: 10.77.0.200",
        "first: 10.77.0.230",
        ["provisioning.pool.last: 10.77.0.220 comes before 10.77.0.230"],
    ),
    "pool over nodes": (
        "first: 10.77.0.200",
        "first: 10.77.0.104",
        ["provisioning.pool: it contains 10.77.0.104, a node's address"],
    ),
    "pool over the container": (
        "first: 10.77.0.200",
        "first: 10.77.0.1",
        ["provisioning.pool: it contains 10.77.0.1, the container's address"],
    ),
    "discovery without a pool": (
        "  pool: {first: 10.77.0.200, last: 10.77.0.220}\n",
        "",
        ["provisioning.unknown: discovery of unknown machines needs a pool of addresses"],
    ),
    "two profiles for a group": (
        "compute: {}",
        "compute: {groups: [gpu]}",
        ["provisioning.profiles.gpu.groups: group gpu already boots compute"],
    ),
    "two profiles for the rest": (
        "gpu: {groups: [gpu], ",
        "gpu: {",
        ["provisioning.profiles.gpu.groups: compute is already for all other nodes"],
    ),
    "passwd among the files": (
        "path: /etc/motd, source: motd, ",
        "path: /etc/passwd, source: motd, ",
        ["provisioning.files[0].path: /etc/passwd is pushed from accounts, secrets and slurm"],
    ),
    "a file twice": (
        "path: /etc/issue",
        "path: /etc/motd",
        ["provisioning.files[1].path: /etc/motd is listed twice"],
    ),
    "the container's name": (
        "  unknown:",
        "  hostname: sms-services\n  unknown:",
        ["provisioning.hostname: sms-services is already another machine's name"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rules(name: str) -> None:
    old, new, expected = CASES[name]
    assert not old or PART.count(old) == 1, "the case must change one place"
    part = PART.replace(old, new) if old else PART
    site, document = read_site_text(GOOD + part, "sms.yaml")
    problems = check_site(site, document, services=SERVICES, bases=BASES, controllers=("slurmctld",))
    assert [f"{problem.path}: {problem.message}" for problem in problems] == expected
    assert all(problem.line and problem.hint for problem in problems)


@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("/etc/a", True),
        ("/etc/.a/b.c", True),
        ("/etc/../shadow", False),
        ("/..", False),
        ("/etc/", False),
        ("/", False),
        ("etc/a", False),
        ("/etc/a b", False),
        ("/etc/a\\nb", False),
    ],
)
def test_paths_of_files(path: str, good: bool) -> None:
    files = f'[{{path: "{path}", source: x}}]'
    part = f'provisioning: {{address: 10.77.0.3/24, mac: "02:00:0a:4d:00:03", files: {files}}}\n'
    if good:
        read_site_text(GOOD + part, "sms.yaml")
    else:
        with pytest.raises(ConfigError, match="is not a path on the nodes"):
            read_site_text(GOOD + part, "sms.yaml")
