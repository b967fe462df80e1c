"""Repositories of dnf and zypper, parsed from their output."""

from __future__ import annotations

import pytest

from appliance.catalog import Base, read_bases
from appliance.errors import ConfigError, Refused
from appliance.operations.image.sources import _host_mirrors, _repository_keys
from appliance.plan.image.repositories import Credential
from appliance.share import share
from appliance.tools.programs import FIND
from appliance.tools.rpm import find_mirrors
from tests.support.fake import Fake

DNF4 = """\
Repo-id            : appstream
Repo-name          : Rocky Linux 9 - AppStream
Repo-revision      : 9.4
Repo-pkgs          : 6,100
Repo-size          : 8.9 G
Repo-mirrors       : https://list.example.org/mirrorlist?arch=x86_64&repo=AppStream-9
Repo-baseurl       : https://near.example.org/rocky/9.4/AppStream/x86_64/os/ (41 more)
Repo-expire        : 6 hour(s) (last: Fri 01 Nov 2024 10:00:00 AM UTC)
Repo-filename      : /etc/yum.repos.d/rocky.repo

Repo-id            : baseos
Repo-name          : Rocky Linux 9 - BaseOS
Repo-baseurl       : https://near.example.org/rocky/9.4/BaseOS/x86_64/os/, https://far.example.org/rocky/BaseOS/
Repo-filename      : /etc/yum.repos.d/rocky.repo

Repo-id            : OpenHPC
Repo-baseurl       : file:///srv/repos/openhpc/3/EL_9

Repo-id            : OpenHPC-updates
Repo-baseurl       : https://hpc.example.org/OpenHPC/3/updates/EL_9
Total packages: 10,000
"""

DNF5 = """\
Repo ID              : baseos
Name                 : Rocky Linux - BaseOS
Status               : enabled
URLs:
  Base URL             : https://near.example.org/baseos/
  Mirrors              : https://list.example.org/mirrorlist
Repo ID              : epel
URLs:
  Base URL             : https://near.example.org/epel/ (30 more)
"""

ZYPPER = """\
<?xml version='1.0'?>
<stream>
<message type="info">Repository priorities are without effect.</message>
<repo-list>
<repo alias="repo-oss" name="Main Repository" type="rpm-md" priority="99" enabled="1" autorefresh="1" gpgcheck="1">
<url>https://near.example.org/distribution/leap/15.6/repo/oss/</url>
</repo>
<repo alias="openSUSE:repo-sle-update" name="SLE updates" type="rpm-md" enabled="1" gpgcheck="1">
<url>https://near.example.org/update/leap/15.6/sle</url>
</repo>
<repo alias="repo-backports-update" name="off" type="rpm-md" enabled="0" gpgcheck="1">
<url>https://near.example.org/off</url>
</repo>
<repo alias="Basesystem_Module_x86_64:SLE-Module-Basesystem15-SP6-Pool" name="x" enabled="1">
<url>https://rmt.example.org/repo/SUSE/Products/SLE-Module-Basesystem/15-SP6/x86_64/product/</url>
</repo>
<repo alias="HPC_Module_x86_64:SLE-Module-HPC15-SP6-Pool" name="x" enabled="1">
<url>https://updates.example.org/SUSE/Products/SLE-Module-HPC/15-SP6/x86_64/product?0123456789abcdefsecret</url>
</repo>
<repo alias="cd" name="x" enabled="1"><url>hd:/?device=/dev/sda1</url></repo>
<repo alias="variable" name="x" enabled="1"><url>https://near.example.org/$releasever/</url></repo>
</repo-list>
</stream>
"""


def host(manager: str, said: str, status: int = 0) -> Fake:
    commands = {
        "dnf": ("env", "LC_ALL=C", "dnf", "-q", "repoinfo"),
        "zypper": ("zypper", "--non-interactive", "--no-refresh", "--xmlout", "repos"),
    }
    return Fake({("sh", "-c", FIND): (0, ""), commands[manager]: (status, said)})


DNF: list[tuple[str, dict[str, list[str]], dict[str, str]]] = [
    (DNF4, {"baseos": ["baseos"]}, {"baseos": "https://near.example.org/rocky/9.4/BaseOS/x86_64/os"}),
    (DNF4, {"appstream": ["appstream"]}, {"appstream": "https://near.example.org/rocky/9.4/AppStream/x86_64/os"}),
    (DNF4, {"openhpc-base": ["openhpc"]}, {"openhpc-base": "file:///srv/repos/openhpc/3/EL_9"}),
    (
        DNF4,
        {"openhpc-updates": ["openhpc-updates"]},
        {"openhpc-updates": "https://hpc.example.org/OpenHPC/3/updates/EL_9"},
    ),
    (DNF4, {"crb": ["crb"]}, {}),
    (DNF4, {"any": ["nothing", "base*"]}, {"any": "https://near.example.org/rocky/9.4/BaseOS/x86_64/os"}),
    (
        DNF5,
        {"baseos": ["baseos"], "epel": ["epel"]},
        {"baseos": "https://near.example.org/baseos", "epel": "https://near.example.org/epel"},
    ),
    ("", {"baseos": ["baseos"]}, {}),
    ("Repo-id : baseos\nRepo-baseurl : https://x.example.org/$basearch\n", {"baseos": ["baseos"]}, {}),
    ("Repo-id : baseos\nRepo-baseurl : https://x.example.org/'quote\n", {"baseos": ["baseos"]}, {}),
]


@pytest.mark.parametrize(("said", "wanted", "expected"), DNF)
def test_dnf(said: str, wanted: dict[str, list[str]], expected: dict[str, str]) -> None:
    assert find_mirrors(host("dnf", said), "dnf", wanted) == expected


ZYPPERS: list[tuple[dict[str, list[str]], dict[str, str]]] = [
    ({"oss": ["repo-oss", "*:repo-oss"]}, {"oss": "https://near.example.org/distribution/leap/15.6/repo/oss"}),
    (
        {"sle-update": ["repo-sle-update", "*:repo-sle-update"]},
        {"sle-update": "https://near.example.org/update/leap/15.6/sle"},
    ),
    ({"backports-update": ["repo-backports-update"]}, {}),
    ({"cd": ["cd"], "variable": ["variable"]}, {}),
]


@pytest.mark.parametrize(("wanted", "expected"), ZYPPERS)
def test_zypper(wanted: dict[str, list[str]], expected: dict[str, str]) -> None:
    assert find_mirrors(host("zypper", ZYPPER), "zypper", wanted) == expected


@pytest.mark.parametrize("manager", ["dnf", "zypper"])
def test_without_the_package_manager_there_are_none(manager: str) -> None:
    assert find_mirrors(host(manager, "the mirror does not answer", status=1), manager, {"x": ["*"]}) == {}
    assert find_mirrors(Fake({("sh", "-c"): (0, manager)}), manager, {"x": ["*"]}) == {}


def bases() -> dict[str, Base]:
    return read_bases(share("definitions", "bases"))


def test_registration_tokens_stay_on_the_build_host() -> None:
    found = _host_mirrors(host("zypper", ZYPPER), bases()["sles-15"])
    assert found == (
        {
            "basesystem": "https://rmt.example.org/repo/SUSE/Products/SLE-Module-Basesystem/15-SP6/x86_64/product",
            "hpc": "https://updates.example.org/SUSE/Products/SLE-Module-HPC/15-SP6/x86_64/product",
        },
        {"hpc": Credential(token="0123456789abcdefsecret")},
    )
    assert "secret" not in repr(found), "not even in a traceback"


def test_a_registration_may_name_a_file_of_credentials() -> None:
    """As with RMT; the file is read on the build host."""
    listed = ZYPPER.replace("?0123456789abcdefsecret", "?credentials=SCCcredentials")
    machine = host("zypper", listed)
    machine.files["/etc/zypp/credentials.d/SCCcredentials"] = b"username = SCC_1\npassword = secret\n"
    urls, credentials = _host_mirrors(machine, bases()["sles-15"])
    assert urls["hpc"].endswith("/product") and credentials == {"hpc": Credential("SCC_1", "secret")}
    with pytest.raises(ConfigError, match="has no user and password"):
        _host_mirrors(host("zypper", listed), bases()["sles-15"])


def test_every_repository_can_be_found_on_a_host() -> None:
    for base in bases().values():
        for name, repository in base.repositories.items():
            assert repository.suites or repository.ids, f"{base.name}: {name}"


def test_a_repository_without_its_key_is_refused() -> None:
    base = bases()["openhpc-rocky9"]
    gone = base.repositories["epel"].model_copy(update={"keys": "/nowhere/RPM-GPG-KEY-*"})
    with pytest.raises(Refused, match="no key for repository epel: /nowhere"):
        _repository_keys(base.model_copy(update={"repositories": {"epel": gone}}))
    assert _repository_keys(bases()["debian-12"]) == {}
