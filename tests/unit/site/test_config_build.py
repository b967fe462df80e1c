"""What `config check` refuses of the image: accounts with other ids than its own, mirrors, repositories."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import ConfigError
from appliance.operations.site.config import check_config
from tests.sites import GOOD

ALICE = "alice:x:1001:1001::/home/alice:/bin/bash\n"
FILES = "accounts: {passwd: passwd, group: group}\n"


def _problems(folder: Path, more: str, passwd: str = "", group: str = "", site: str = GOOD) -> list[tuple[str, str]]:
    """Return path and hint of each problem of a site file with these accounts."""
    (folder / "sms.yaml").write_text(f"{site}{FILES}{more}")
    (folder / "sms.yaml").chmod(0o644)
    (folder / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nbroken\n{passwd}")
    (folder / "group").write_text(f"root:x:0:\n{group}")
    try:
        check_config(folder / "sms.yaml")
    except ConfigError as error:
        assert all(problem.hint for problem in error.problems)
        return [(problem.path, problem.hint) for problem in error.problems]
    return []


def _slurm(ids: str) -> str:
    uid, gid = ids.split(":")
    return GOOD.replace("slurm:\n", f"slurm:\n  user: {{uid: {uid}, gid: {gid}}}\n")


@pytest.mark.parametrize(
    ("name", "line", "site", "place"),
    [
        ("slurm", "202:202", GOOD, "accounts.passwd"),
        ("slurm", "64030:64030", GOOD, ""),
        ("slurm", "202:202", _slurm("202:202"), ""),
        ("slurm", "202:203", _slurm("202:202"), "slurm.user"),
        ("slurm", "202:202", GOOD + "base: {os: openhpc-rocky9}\n", "accounts.passwd"),
        ("slurm", "202:202", GOOD.replace("[slurmctld, munge]", "[munge]"), ""),
        ("munge", "971:972", GOOD, "accounts.passwd"),
        ("munge", "351:351", GOOD, ""),
        ("munge", "971:972", GOOD + "munge: {user: {uid: 971, gid: 972}}\n", ""),
    ],
)
def test_ids_of_the_present_cluster_are_to_be_taken_over(
    tmp_path: Path, name: str, line: str, site: str, place: str
) -> None:
    uid, gid = line.split(":")
    hint = f"set `{name}.user: {{uid: {uid}, gid: {gid}}}`: its ids must be the same everywhere"
    found = _problems(tmp_path, "", f"{name}:x:{line}::/:/bin/false\n{ALICE}", site=site)
    assert found == ([(place, hint)] if place else [])


def test_the_group_of_the_same_name_counts(tmp_path: Path) -> None:
    """A user's first group can be another one."""
    (found,) = _problems(tmp_path, "", "slurm:x:202:100::/:/bin/false\n", "slurm:x:203:\n")
    assert "{uid: 202, gid: 203}" in found[1]


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        ("33:202", "slurm.user"),
        ("202:33", "slurm.user"),
        ("202:100", "slurm.user"),
        ("100:101", ""),
        ("65534:202", "slurm.user"),
        ("202:65534", "slurm.user"),
        ("1001:1002", "slurm.user"),
        ("1003:1001", "slurm.user"),
        ("1003:1003", ""),
        ("351:202", "slurm.user"),
        ("202:351", "slurm.user"),
    ],
)
def test_ids_of_others(tmp_path: Path, ids: str, place: str) -> None:
    """Those of the distribution, of the site's users, of another account of the image."""
    found = _problems(tmp_path, "", ALICE, "alice:x:1001:\n", _slurm(ids))
    assert [where for where, _ in found] == ([place] if place else [])


def test_a_user_with_an_id_of_the_image(tmp_path: Path) -> None:
    assert [where for where, _ in _problems(tmp_path, "", ALICE.replace("1001:", "64030:", 1))] == ["accounts.passwd"]


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("gateway: 10.78.0.254", "gateway: 10.78.0.254\n    probe: 192.0.2.53", "networks.public.probe"),
        ("networks:", "networks:\n  dns: [10.78.0.1, 198.51.100.53]", "networks.dns[1]"),
        ("slurm:\n", "ntp: [203.0.113.3]\nslurm:\n", "ntp[0]"),
        ("slurm:\n", "syslog_forward: 192.0.2.4:514\nslurm:\n", "syslog_forward"),
        ("slurm:\n", "mail: {relay: '192.0.2.25:25'}\nslurm:\n", "mail.relay"),
        ("slurm:\n", "filesync: {server: 'https://192.0.2.25:8443'}\nslurm:\n", "filesync.server"),
        ("slurm:\n", "base: {mirrors: {debian: 'http://192.0.2.25/debian'}}\nslurm:\n", "base.mirrors.debian"),
        ("cluster: lab", "cluster: lab # (CHANGE)", ""),
        ("10.78.0.11", "192.0.2.11", "admin_hosts[0].address"),
        ("gateway: 10.78.0.254", "gateway: 10.78.0.254\n    probe: 10.192.0.2", None),
        ("cluster: lab", "cluster: lab # change", None),
    ],
)
def test_what_is_left_of_a_starter_file(tmp_path: Path, old: str, new: str, place: str | None) -> None:
    assert old in GOOD
    found = [where for where, _ in _problems(tmp_path, "", site=GOOD.replace(old, new, 1))]
    assert found == ([] if place is None else [place])


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("bridge: br-prov", "bridge: br-prov\n    port: lo", "networks.provisioning.port"),
        ("bridge: br-prov", "bridge: br-prov\n    port: br-prov", "networks.provisioning.port"),
        ("bridge: br-prov", "bridge: br-prov\n    port: {host-a: eth1, host-b: br-pub}", "networks.provisioning.port"),
        ("bridge: br-prov", "bridge: br-prov\n    port: eth1", ""),
        ("slurm:\n", "slurm:\n  extra: [Prolog=/etc/slurm/p.sh]\n", "slurm.extra[0]"),
        ("slurm:\n", "slurm:\n  extra: [Prolog=/usr/local/sbin/p.sh]\n", ""),
        (
            "slurm:\n",
            "slurm:\n  extra: [EpilogSlurmctld=/etc/slurm/p.sh]\n  files: {p.sh: passwd}\n",
            "slurm.files.p.sh",
        ),
        ("slurm:\n", "slurm:\n  extra: [Epilog=/etc/slurm/p.sh]\n  files: {p.sh: script}\n", ""),
        ("slurm:\n", "slurm:\n  files: {p.env: passwd}\n", ""),
    ],
)
def test_ports_and_programs(tmp_path: Path, old: str, new: str, place: str) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")
    assert [where for where, _ in _problems(tmp_path, "", site=GOOD.replace(old, new, 1))] == ([place] if place else [])


@pytest.mark.parametrize(
    ("base", "place"),
    [
        ("mirrors: {debian: 'http://m.example.org:8080/debian'}", ""),
        ("mirrors: {debian: 'http://[::1'}", "base.mirrors.debian"),
        ("mirrors: {debian: 'http://[::1]/debian'}", ""),
        ("mirrors: {debian: 'http://m.example.org:99999'}", "base.mirrors.debian"),
        ("mirrors: {debian: 'http:///debian'}", "base.mirrors.debian"),
        ("mirrors: {debian: 'http://u:p@m.example.org'}", "base.mirrors"),
        ("mirrors: {nosuch: 'http://m.example.org'}", "base.mirrors"),
        ("repositories: {x: {url: 'http://[::1', suite: ./, key: passwd}}", "base.repositories.x.url"),
    ],
)
def test_addresses_of_repositories(tmp_path: Path, base: str, place: str) -> None:
    assert [where for where, _ in _problems(tmp_path, f"base: {{{base}}}\n")] == ([place] if place else [])
