"""sssd and login in the services container: a user of Debian's slapd logs in, with Slurm's commands."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.real.conftest import Playground
from tests.real.engines.entries import PASSWORD, UID, USER, Entries
from tests.real.labs import build_image
from tests.real.runners import LabRunner

pytestmark = [pytest.mark.real, pytest.mark.full]

ADDRESS, DIRECTORY = "10.77.0.1", "10.77.0.12"
SITE = ("--site", "/etc/sms/engines.yaml")


def assert_not_lost(playground: Playground, entries: Entries, login: tuple[str, int]) -> None:
    """A user with a job stays known: a wrong base of the directory is taken back, and sssd is not taken out."""
    job = entries.ssh(*login, "sbatch", "--parsable", "--begin=now+1hour", "--output=/dev/null", "--wrap=true")
    assert job.isdigit(), job
    conf = entries.secrets["sssd_conf"]
    good = conf.read_text()
    for old, new in (("ldap_search_base = dc=lab", "ldap_search_base = dc=elsewhere"), (DIRECTORY, "10.77.0.99")):
        assert old in good
        conf.write_text(good.replace(old, new))
        error = json.loads(playground.sms(*SITE, "-q", "apply", "--json", ok=(5,)).stdout)["error"]
        assert USER in error["message"], error
    conf.write_text(good)
    assert entries.ssh(*login, "id", "-un") == USER
    assert json.loads(playground.sms(*SITE, "-q", "apply", "--json").stdout)["current"]
    document = yaml.safe_load((playground.lab.etc / "engines.yaml").read_text())
    document["services"] = [name for name in document["services"] if name not in ("sssd", "login")]
    (playground.lab.etc / "fewer.yaml").write_text(yaml.safe_dump(document))
    fewer = ("--site", "/etc/sms/fewer.yaml", "-q", "apply", "-n", "--json")
    (why,) = json.loads(playground.sms(*fewer, ok=(3,)).stdout)["refused"]
    assert USER in why
    assert entries.ssh(*login, "scancel", job) == ""
    assert json.loads(playground.sms(*fewer, ok=(0, 3)).stdout)["refused"] == [], "nobody has a job"


def test_a_user_of_a_directory_logs_in(playground: Playground) -> None:
    directory = LabRunner(playground.lab, "host-b")
    overlay = {"size_mb": 1024, "directory": "/var/lib/sms/users"}
    try:
        entries = Entries(playground.lab, {}, directory, DIRECTORY, cluster="users", overlay=overlay)
        build_image(playground.lab, "engines")
        for host in ("host-a", "host-b"):
            playground.sms("-q", "stop", on=host)
        playground.sms(*SITE, "config", "check")
        playground.sms(*SITE, "-q", "start", "--host", "host-a", on="admin")
        services = json.loads(playground.sms(*SITE, "status", "--json", ok=(0, 4)).stdout)["services"]
        assert {one["name"]: one["ok"] for one in services if one["name"] in ("sssd", "login", "slurmrestd")} == {
            "sssd": True,
            "login": True,
            "slurmrestd": True,
        }
        login = (ADDRESS, 2222)
        assert entries.ssh(*login, "id") == f"uid={UID}({USER}) gid={UID}({USER}) groups={UID}({USER})"
        assert entries.ssh(*login, "id", "-un", password=PASSWORD) == USER
        assert "Permission denied" in entries.ssh(*login, "id", "-un", password="wrong")
        assert "node1" in entries.ssh(*login, "sinfo", "-N")
        status = entries.ssh(*login, "cat", "/proc/self/status")
        assert all(
            line in status for line in ("CapEff:\t0000000000000000", "CapBnd:\t00000000200400eb", "NoNewPrivs:\t1")
        )
        secret = entries.ssh(*login, "cat", "/etc/sssd/sssd.conf")
        assert "Permission denied" in secret
        assert_not_lost(playground, entries, login)
    finally:
        playground.sms(*SITE, "-q", "stop", ok=None)
        playground.host("host-a").run("rm", "-rf", "/var/lib/sms/users")
        directory.remove()
