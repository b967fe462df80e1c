"""What speaks against an adoption: each of it is named, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog import Service, read_catalog, select
from appliance.config.model import Site
from appliance.config.read import read_site
from appliance.errors import Refused
from appliance.plan.adopt.accounting import RIGHTS
from appliance.plan.adopt.adoption import (
    AdoptPlan,
    OldFacts,
    TargetFacts,
    plan_adoption,
    predict_adoption,
    refuse_doubtful,
    spare_mac,
)
from appliance.plan.adopt.model import Accounting, Link, Listener, Slurm, Survey, Translation
from appliance.plan.migration.state import oldest_read, release_of, state_version
from appliance.plan.services.effect import Loss
from appliance.plan.services.nodes import NodesView, SilentNode
from appliance.share import share
from tests.sites import GOOD

PROV, PUB = ("10.77.0.1/24", "02:00:0a:4d:00:01"), ("10.78.0.2/24", "02:00:0a:4e:00:02")
CATALOG = read_catalog(share("definitions", "services"))


@dataclass
class Case:
    """All that a plan is made from."""

    site: Site
    survey: Survey
    old: OldFacts
    target: TargetFacts
    services: tuple[Service, ...] = field(default=())

    def plan(self) -> AdoptPlan:
        services = self.services or select(CATALOG, self.site.service_names)
        return plan_adoption(self.site, services, self.survey, self.old, self.target, [])


def link(name: str, address: str, mac: str, *more: str) -> Link:
    return Link(name=name, mac=mac, mtu=1500, up=True, addresses=(address, *more))


def accounting(**changes: Any) -> Accounting:
    values: dict[str, Any] = {
        "client": "mariadb  Ver 15.1 Distrib 10.11.19-MariaDB",
        "dump": "/usr/bin/mariadb-dump",
        "server": "10.11.19-MariaDB-0+deb12u1",
        "user": "root@localhost",
        "options": ("sandbox", "binary-mode"),
        "rights": RIGHTS,
    }
    return Accounting(**{**values, **changes})


def slurm(**changes: Any) -> Slurm:
    values: dict[str, Any] = {
        "file": "/etc/slurm/slurm.conf",
        "cluster": "lab",
        "version": "22.05.8",
        "uid": 64030,
        "gid": 64030,
        "state": "/var/spool/slurmctld",
        "state_kb": 100,
        "state_versions": {"job_state": 9728},
        "database": True,
        "database_kb": 2048,
        "accounting": accounting(),
    }
    return Slurm(**{**values, **changes})


@pytest.fixture
def case(tmp_path: Path) -> Case:
    text = GOOD.replace("[slurmctld, munge]", "[slurmctld, munge, nat, slurmdbd, mariadb, rsyslog]")
    (tmp_path / "sms.yaml").write_text(text)
    site, _ = read_site(tmp_path / "sms.yaml")
    links = (link("eth0", *PROV, "10.77.0.5/24"), link("eth1", *PUB, "10.78.0.5/24"))
    survey = Survey(
        host="sms-old",
        links=links,
        slurm=slurm(),
        listeners=(
            Listener(port="tcp/6817", address="*", process="slurmctld", service="slurmctld"),
            Listener(port="tcp/22", address="*", process="sshd", service="ssh"),
            Listener(port="tcp/2049", address="*", service="nfs"),
            Listener(port="tcp/3306", address="127.0.0.1", process="mariadbd", service="mariadb"),
        ),
        translation=Translation(forwards=True, rules=("masquerade",)),
    )
    old = OldFacts(
        "sms-old",
        "10.78.0.5",
        frozenset({"python3", "systemctl", "conntrack", "ip"}),
        "ab" * 32,
        0.1,
        frozenset({"slurmctld.service", "slurmdbd.service"}),
        (6817, 22),
        "",
        "lab|77",
    )
    answering = {str(IPv4Interface(address).ip): mac for address, mac in (PROV, PUB)}
    own = ("10.77.0.11", "10.78.0.11")
    target = TargetFacts("host-a", own, "ab" * 32, 0.0, "22.05", 64030, 1 << 30, (), answering)
    return Case(site, survey, old, target)


def test_a_node_without_doubts_is_adopted(case: Case) -> None:
    plan = case.plan()
    assert plan.doubts == ()
    refuse_doubtful(plan)
    first, second = plan.interfaces
    assert (first.name, first.inside, first.moves, first.keeps) == ("eth0", "eth0", (PROV[0],), ("10.77.0.5/24",))
    assert first.witnesses == ("10.77.0.11", "10.77.0.101", "10.77.0.102")
    assert second.witnesses == ("10.78.0.11", "10.78.0.254")
    assert plan.stops == ("slurmctld.service", "slurmdbd.service")
    assert plan.stays == ("nfs (tcp/2049)", "ssh (tcp/22)")
    assert {one.name for one in plan.outages} >= {"slurmctld", "slurmdbd", "nat"}


def test_what_slurm_would_lose_is_refused(case: Case) -> None:
    case.old = replace(case.old, losses=(Loss("job", "7", "partition night is removed", "alice, RUNNING"),))
    (doubt,) = case.plan().doubts
    assert doubt.severity == "refused" and "1 job" in doubt.what and "partition night" in doubt.what


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"rights": ("SELECT", "INSERT")},
            "root@localhost of the database may not grant CREATE, DROP, ALTER, CREATE USER",
        ),
        ({"server": "", "error": "ERROR 1045 (28000): Access denied"}, "cannot be queried: ERROR 1045"),
        ({"server": ""}, "cannot be queried: it does not answer"),
        ({"server": "5.1.73"}, "the database server is 5.1.73"),
        ({"objects": ("trigger t", "view v")}, "the accounting database has trigger t, view v: only tables of InnoDB"),
    ],
)
def test_what_keeps_the_accounting_from_coming_back_is_refused_first(
    case: Case, changes: dict[str, Any], what: str
) -> None:
    """Only where slurmdbd runs there."""
    case.survey = case.survey.model_copy(update={"slurm": slurm(accounting=accounting(**changes))})
    assert [one.what for one in case.plan().refused if what in one.what]
    case.old = replace(case.old, units=frozenset({"slurmctld.service"}))
    assert case.plan().doubts == ()


def test_an_accounting_that_was_not_queried_is_refused(case: Case) -> None:
    case.survey = case.survey.model_copy(update={"slurm": slurm(accounting=None)})
    assert ["was not queried" in one.what for one in case.plan().refused] == [True]


SILENT = SilentNode("node3", "idle+not_responding", "Not responding", acknowledged=False)


def on_survey(**changes: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.survey = case.survey.model_copy(update=changes)

    return change


def on_old(**changes: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.old = replace(case.old, **changes)

    return change


def on_target(**changes: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.target = replace(case.target, **changes)

    return change


def no_accounting(case: Case) -> None:
    case.services = select(CATALOG, ["slurmctld", "munge", "nat"])
    case.site = case.site.model_copy(update={"services": ("slurmctld", "munge", "nat")})


@pytest.mark.parametrize(
    ("change", "severity", "word"),
    [
        (on_old(programs=frozenset({"systemctl", "conntrack"})), "refused", "python3"),
        (on_old(programs=frozenset({"python3", "conntrack"})), "refused", "systemd"),
        (on_old(programs=frozenset({"python3", "systemctl"})), "warning", "conntrack"),
        (on_old(mark="given"), "refused", "given"),
        (on_old(connected="10.77.0.1"), "refused", "10.77.0.1"),
        (on_old(key_sha256="cd" * 32), "refused", "munge key"),
        (on_old(key_sha256=""), "refused", "munge key"),
        (on_old(offset_s=90.0), "refused", "clocks"),
        (on_old(units=frozenset()), "refused", "slurmctld.service"),
        (on_old(clustername="other|77"), "refused", "other"),
        (on_old(used=(2049,)), "refused", "nfs"),
        (on_old(nodes=NodesView(4, (SILENT,), required=4)), "warning", "node3"),  # as with another munge key
        (on_survey(slurm=None), "refused", "StateSaveLocation"),
        (on_survey(slurm=slurm(uid=202)), "refused", "uid 202"),
        (on_survey(slurm=slurm(state_versions={"job_state": 10240})), "refused", "23.11"),
        (on_survey(slurm=slurm(state_versions={"job_state": 8960})), "refused", "of version 8960"),  # 20.02
        (on_survey(slurm=slurm(state_kb=2 << 20)), "refused", "MiB"),
        (
            on_survey(links=(link("eth0", *PROV), link("eth1", PUB[0], "02:00:00:00:00:77"))),
            "refused",
            "02:00:00:00:00:77",
        ),
        (on_survey(links=(link("eth0", *PROV),)), "refused", "10.78.0.2/24"),
        (on_survey(links=(link("eth0", "10.77.0.1/16", PROV[1]), link("eth1", *PUB))), "refused", "10.77.0.1/16"),
        (on_target(answering={"10.77.0.1": PROV[1]}), "refused", "does not see 10.78.0.2"),
        (on_target(answering={"10.77.0.1": PROV[1], "10.78.0.2": "02:00:00:00:00:99"}), "refused", "02:00:00:00:00:99"),
        (on_target(problems=("bridge br-prov does not exist or is down",)), "refused", "br-prov"),
        (on_target(free_bytes=1 << 20), "refused", "MiB"),
        (on_target(slurm=""), "refused", "none"),
        (on_target(other_runtime=True), "refused", "another version"),
        (no_accounting, "refused", "slurmdbd"),
    ],
)
def test_each_doubt_is_named(case: Case, change: Callable[[Case], None], severity: str, word: str) -> None:
    change(case)
    plan = case.plan()
    found = [one for one in plan.doubts if word in one.what]
    assert [one.severity for one in found] == [severity]
    assert found[0].todo
    if severity == "refused":
        with pytest.raises(Refused):
            refuse_doubtful(plan)
    else:
        refuse_doubtful(plan)


@pytest.mark.parametrize(
    ("image", "oldest"), [("22.05", "20.11"), ("24.05", "23.02"), ("24.11", "23.02"), ("25.05", "23.11")]
)
def test_the_oldest_state_that_is_read(image: str, oldest: str) -> None:
    assert release_of(oldest_read(state_version(image))) == oldest


def test_an_interface_has_another_address_of_its_own_meanwhile() -> None:
    """The same one in each run: a neighbour that has learned it need not learn another one."""
    first = spare_mac("lab", PROV[1])
    assert first == spare_mac("lab", PROV[1].upper())
    assert len({first, spare_mac("lab", PUB[1]), spare_mac("other", PROV[1]), PROV[1]}) == 4
    assert int(first[:2], 16) & 3 == 2  # locally administered, of one machine


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([], {"slurmctld": 2.7, "slurmdbd": 11.7, "mariadb": 11.7, "nat": 0.2}),
        (
            [{"stop": 1.0, "last changes": 0.5, "start": 1.0, "switch": 0.1, "database": 20.0, "isolated": 4.0}],
            {"slurmctld": 2.6, "slurmdbd": 26.6, "mariadb": 26.6, "nat": 0.1},
        ),
    ],
)
def test_the_accounting_is_away_longer(measured: list[dict[str, float]], expected: dict[str, float]) -> None:
    """It stops before its database is copied; slurmctld queues its records."""
    services = select(CATALOG, ["slurmctld", "slurmdbd", "nat"])
    found = {one.name: one.predicted_s for one in predict_adoption(services, measured, database=True)}
    assert {name: found[name] for name in expected} == expected
    without = {one.name: one.predicted_s for one in predict_adoption(services, measured, database=False)}
    assert without["slurmdbd"] == without["slurmctld"] == expected["slurmctld"]
