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
