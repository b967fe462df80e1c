"""Which changed files need nothing, a reload, a restart: a table over the real catalogue."""

from __future__ import annotations

import json

import pytest

from appliance.catalog import Service, read_catalog
from appliance.plan.services.apply import SERVICES, Action, FileChange, plan_actions, predict_restart
from appliance.share import share

SLURM, MAIN, NAT = "/etc/slurm/slurm.conf", "/etc/postfix/main.cf", "/etc/sms/nat.nft"
TABLE = [
    (SLURM, "A=1\n", "A=1\nPartitionName=new Nodes=ALL\n", "slurmctld", "reload"),
    (SLURM, "SlurmdTimeout=300\n", "SlurmdTimeout=60\n", "slurmctld", "reload"),
    (SLURM, "InactiveLimit=0\n", "InactiveLimit=60\n", "slurmctld", "restart"),
    (SLURM, "A=1\n", "A=1\nNodeName=n9 CPUs=1\n", "slurmctld", "restart"),
    (SLURM, "SelectType=a\n", "SelectType=b\nPartitionName=x\n", "slurmctld", "restart"),
    (SLURM, "A=1\n", "# comment\n\nA=1\n", "", ""),
    ("/etc/slurm/cgroup.conf", "A=1\n", "A=2\n", "slurmctld", "restart"),
    ("/etc/slurm/gres.conf", "A=1\n", "A=2\n", "slurmctld", "restart"),
    ("/etc/slurm/gres.conf", "A=1\n", None, "slurmctld", "restart"),
    ("/etc/slurm/topology.conf", None, "A=2\n", "slurmctld", "reload"),
    ("/etc/slurm/job_submit.lua", "a\n", "b\n", "slurmctld", "reload"),
    ("/etc/slurm/prolog.sh", "a\n", "b\n", "slurmctld", "reload"),
    ("/etc/slurm/epilog", "a\n", None, "slurmctld", "reload"),
    (MAIN, "relayhost =\n", "relayhost = mail\n", "postfix", "reload"),
    (MAIN, "inet_interfaces = all\n", "inet_interfaces = eth0\n", "postfix", "restart"),
    ("/etc/aliases", "root: a\n", "root: b\n", "postfix", "reload"),
    (NAT, "a\n", "b\n", "nat", "reload"),
    ("/etc/rsyslog.conf", "a\n", "b\n", "rsyslog", "restart"),
    ("/etc/logrotate.d/sms-messages", "a\n", "b\n", "", ""),
    ("/etc/chrony/sms.conf", "a\n", "b\n", "chrony", "restart"),
    ("/etc/chrony/sms.d/site.sources", "server a iburst\n", "server b iburst\n", "chrony", "reload"),
    ("/etc/munge/munge.key", None, None, "munge", "restart"),
    ("/etc/sssd/sssd.conf", None, None, "sssd", "restart"),
    ("/etc/ssh/ssh_host_ed25519_key", None, None, "login", "restart"),
    ("/etc/sms/tls/cert.pem", None, None, "filesync", "restart"),
    ("/etc/hosts", "a\n", "b\n", "", ""),
    ("/etc/passwd", "a\n", "b\n", "", ""),
]


@pytest.fixture(scope="module")
def services() -> list[Service]:
    catalog = read_catalog(share("definitions", "services"))
    return [service for service in catalog.values() if service.container]


@pytest.mark.parametrize(("path", "before", "after", "service", "kind"), TABLE)
def test_what_a_change_needs(
    services: list[Service], path: str, before: str | None, after: str | None, service: str, kind: str
) -> None:
    actions = plan_actions(services, [FileChange(path, before, after)], {})
    assert [(one.service, one.kind) for one in actions] == ([(service, kind)] if service else [])


def own(name: str, **given: object) -> Service:
    """A service as a site has it: its templates are texts."""
    probe, outage = {"exec": [["true"]]}, {"seconds": 1, "why": "x"}
    fields = {"name": name, "summary": "x", "critical": False, "run": ["x"], "probe": probe, "outage": outage}
    return Service.model_validate({**fields, **given})


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ('#include "a"\n', '#include "b"\n', "restart"),
        ("a\n\nb\n", "a\nb\n", "restart"),
        ("a\n", "a\n", ""),
        ("a=1\n", "a=2\n", "reload"),
        ("a=1\n#b\n", "a=2\n#c\n", "restart"),
    ],
)
def test_every_line_of_a_service_of_the_site_counts(before: str, after: str, kind: str) -> None:
    """Whether a line is a comment in its file is not known."""
    files = [{"path": "/etc/own", "content": "x", "change": "reload", "reloaded": "^(a=|$)"}]
    actions = plan_actions([own("own", files=files, reload=[["true"]])], [FileChange("/etc/own", before, after)], {})
    assert [one.kind for one in actions] == ([kind] if kind else [])


def test_state_belongs_to_the_service_with_the_longest_path(services: list[Service]) -> None:
    wide = own("wide", state=["/etc", "/etc/mun"])
    for order in ([wide, *services], [*services, wide]):
        actions = plan_actions(order, [FileChange("/etc/munge/munge.key", None, None)], {})
        assert [one.service for one in actions] == ["munge"]


def entry(**changes: object) -> dict[str, object]:
    return {"run": ["x"], "setup": "", "needs": [], "sync": [], "probe": {"kind": "exec"}, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"probe": {"kind": "ntp"}}, []),
        ({"run": ["y"]}, ["postfix"]),
        ({"setup": "true"}, ["postfix"]),
        ({"sync": ["/etc/motd"]}, ["filesync"]),
    ],
)
def test_a_change_of_a_services_entry(services: list[Service], changes: dict[str, object], expected: list[str]) -> None:
    before, after = (
        json.dumps({"services": {"postfix": one, "filesync": entry()}}) for one in (entry(), entry(**changes))
    )
    actions = plan_actions(services, [FileChange(SERVICES, before, after)], {})
    assert [one.service for one in actions] == expected


@pytest.mark.parametrize("text", ["", "[]", '{"services": []}', '{"services": {"postfix": 1}}', "{"])
def test_an_invalid_record_of_the_container_restarts_all(services: list[Service], text: str) -> None:
    after = json.dumps({"services": {"postfix": entry()}})
    assert [one.service for one in plan_actions(services, [FileChange(SERVICES, text, after)], {})] == ["postfix"]


def test_order_and_the_stronger_action(services: list[Service]) -> None:
    """In the order of the services; what an interrupted run has left is repeated."""
    changes = [FileChange(NAT, "a\n", "b\n"), FileChange("/etc/rsyslog.conf", "a\n", "b\n")]
    actions = plan_actions(services, changes, {"nat": "restart", "gone": "restart"})
    by_name = {one.service: one for one in actions}
    assert by_name["nat"] == Action("nat", "restart", ("an interrupted run", NAT))
    order = [service.name for service in services]
    assert [one.service for one in actions] == sorted(by_name, key=order.index) and "gone" not in by_name


def test_a_prediction_is_above_the_last_five() -> None:
    line = {"event": "restarted", "service": "x", "ok": True}
    history = [{**line, "seconds": value} for value in (90, 1, 5, 2, 3, 4)]
    noise = [{**line, "seconds": 99, "ok": False}, {**line, "seconds": "a"}, {**line, "service": "y", "seconds": 70}]
    service = own("x", stop_wait_s=20)
    assert predict_restart([*history, *noise[:1], *noise[2:]], service) == 7.5


def test_a_restart_that_was_never_measured_has_a_bound(services: list[Service]) -> None:
    """The catalogue's; a service without one ends within its time to stop, or is killed."""
    assert predict_restart([], own("x", stop_wait_s=20)) == 20
    assert predict_restart([], own("x", stop_wait_s=20, restart_s=2)) == 2
    for service in services:
        assert service.restart_s and predict_restart([], service) == service.restart_s <= service.stop_wait_s
