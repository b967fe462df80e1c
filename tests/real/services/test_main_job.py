"""The main job: real compute nodes run jobs through a container that was built, signed and started."""

from __future__ import annotations

import json
import re
import time
from functools import partial

import pytest

from appliance.host.base import Host
from appliance.operations.image.build import Built
from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground

pytestmark = pytest.mark.real

SILENT = b"""\
table ip silent {
chain out { type filter hook output priority 0; ip daddr %s tcp sport 514 drop; }
}
"""


def completed(node: Host, job: str) -> str:
    return "yes" if "COMPLETED" in node.run("scontrol", "show", "job", job).text else ""


def next_job(running: Playground) -> int:
    """The id that the controller gives out next."""
    settings = running.host("node1").run("scontrol", "show", "config").text
    return int(re.findall(r"^NEXT_JOB_ID\s*= (\d+)$", settings, re.MULTILINE)[0])


def test_every_service_answers_in_its_own_protocol(running: Playground) -> None:
    status = running.status()
    assert status["healthy"] and status["warnings"] == []
    answers = {service["name"]: service for service in status["services"]}
    assert set(answers) == {"slurmctld", "munge", "nat", "rsyslog", "chrony", "postfix", "cron", "filesync"}
    assert all(answer["ok"] for answer in answers.values())
    assert "Success" in answers["munge"]["detail"]
    assert "UP" in answers["slurmctld"]["detail"]
    assert answers["chrony"]["detail"].startswith("stratum")
    assert answers["postfix"]["detail"].startswith("220 ")
    assert status["lease"]["holder"] == "host-a" and status["lease"]["generation"] >= 1
    assert 0 < status["overlay"]["used"] < status["overlay"]["size"]


def test_status_tells_which_image_runs_and_who_signed_it(running: Playground, built: Built) -> None:
    image = running.status()["image"]
    assert image["key"] == built.key
    there = running.host("host-a").run("sha256sum", image["path"]).text.split()[0]
    assert image["sha256"] == there
    assert image["signer"].startswith("sign.pub sha256:")


def test_a_job_submitted_from_a_node_completes_and_its_mail_arrives(running: Playground) -> None:
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    seen = demo.run_job(node)
    assert "COMPLETED" in seen
    assert "COMPLETED" in demo.mail_arrives(running.host("outside"), seen.split()[1])


def test_a_job_runs_on_all_nodes_at_once(running: Playground) -> None:
    node = running.host("node2")
    demo.wait_idle(node, NODES)
    names = demo.as_alice(node, "srun", f"--nodes={NODES}", "hostname").split()
    assert sorted(names) == sorted(running.lab.nodes)


def test_a_node_reaches_the_outside_by_the_containers_address(running: Playground) -> None:
    assert "10.78.0.2" in demo.fetch_outside(running.host("node3"))
    log = running.host("outside").run("tail", "-n", "1", "/var/log/nginx/access.log").text
    assert log.startswith("10.78.0.2 ")


def test_the_outside_reaches_no_node(running: Playground) -> None:
    outside = running.host("outside")
    outside.run("ip", "route", "replace", "10.77.0.0/24", "via", "10.78.0.2")
    try:
        assert not outside.works("ping", "-c", "1", "-W", "1", "10.77.0.101")
    finally:
        outside.run("ip", "route", "del", "10.77.0.0/24")


def test_syslog_of_every_node_arrives_and_is_forwarded(running: Playground) -> None:
    for name in running.lab.nodes:
        assert name in demo.syslog_arrives(running.lab, running.host(name))
    remote = running.host("outside")
    remote.run("true")
    demo.wait_for(
        "the forwarded line", lambda: remote.run("grep", "-m1", "sms-demo", "/var/log/remote.log", ok=None).text
    )


def test_no_line_is_lost_where_a_connection_ended_without_a_word(running: Playground) -> None:
    """As after a host lost its power: what is written into such a connection is lost, so nodes probe theirs."""
    node = running.host("node3")
    demo.syslog_arrives(running.lab, node)
    carrier = running.host("host-a")
    (instance,) = json.loads(carrier.run("apptainer", "instance", "list", "--json").stdout)["instances"]
    inside = ("nsenter", "-t", str(instance["pid"]), "-n")
    peer = "10.77.0.103"
    carrier.run(*inside, "nft", "-f", "-", input=SILENT % peer.encode())
    try:
        assert ":514" in carrier.run(*inside, "ss", "-HtnK", "sport", "=", ":514", "dst", peer).text
    finally:
        carrier.run(*inside, "nft", "delete", "table", "ip", "silent")
    established = ("ss", "-Htn", "state", "established", "dport", "=", ":514")
    assert node.run(*established).text
    demo.wait_for("the probe", lambda: "" if node.run(*established).text else "gone")
    assert "node3" in demo.syslog_arrives(running.lab, node)


def test_node_clocks_follow_the_container(running: Playground) -> None:
    for name in running.lab.nodes:
        assert "10.77.0.1" in demo.clock_follows(running.host(name))


def test_a_second_start_changes_nothing(running: Playground) -> None:
    before, lease = running.instances(), running.lease()
    started = json.loads(running.sms("start", "--json").stdout)
    assert started["already"]
    assert running.instances() == before
    assert running.lease() == lease


@pytest.mark.parametrize("service, process", [("munge", "munged"), ("slurmctld", "slurmctld"), ("rsyslog", "rsyslogd")])
def test_a_service_that_dies_is_restarted(running: Playground, service: str, process: str) -> None:
    inside = ("exec", "--", "pidof", "-s", process)
    next_id = next_job(running)
    before = running.sms(*inside).text
    running.sms("exec", "--", "kill", "-KILL", before)

    def back() -> str:
        now = running.sms(*inside, ok=None).text
        answers = {answer["name"]: answer["ok"] for answer in running.status()["services"]} if now else {}
        return now if now not in ("", before) and answers.get(service) else ""

    demo.wait_for(f"the return of {service}", back)
    # The ids that it had assigned since it last saved its state are unknown.
    further = next_job(running) - next_id
    assert further >= 900 if service == "slurmctld" else further == 0


def test_a_stopped_service_makes_status_unhealthy(running: Playground) -> None:
    control = ("exec", "--", "supervisorctl", "-c", "/etc/sms/supervisord.conf")
    running.sms(*control, "stop", "postfix")
    try:
        assert running.sms("status", ok=None).status == 4
        answers = {answer["name"]: answer for answer in running.status()["services"]}
        assert not answers["postfix"]["ok"] and "refused" in answers["postfix"]["detail"]
        assert answers["munge"]["ok"]
    finally:
        running.sms(*control, "start", "postfix")
        demo.wait_for("postfix", lambda: "yes" if running.status()["healthy"] else "")


def test_logs_exec_and_their_exit_status(running: Playground) -> None:
    assert running.sms("exec", "--", "sh", "-c", "exit 7", ok=None).status == 7
    assert running.sms("exec", "hostname").text == "sms-services"
    assert "Running as primary controller" in running.sms("logs", "slurmctld", "-n", "1000").text
    assert running.sms("logs", "nonsense", ok=None).status == 2


def test_only_the_kernel_is_the_hosts(running: Playground) -> None:
    hosts = running.sms("exec", "cat", "/etc/hosts").text
    assert "10.77.0.101 node1" in hosts and "host-a" not in hosts
    addresses = running.sms("exec", "--", "ip", "-br", "address").text
    assert "10.77.0.1/24" in addresses and "10.78.0.2/24" in addresses
    links = running.sms("exec", "--", "ip", "-br", "link").text
    assert "02:00:0a:4d:00:01" in links and "02:00:0a:4e:00:02" in links


def test_stop_saves_the_controllers_state_and_the_next_start_has_it(running: Playground) -> None:
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    held = demo.as_alice(node, "sbatch", "--parsable", "--hold", "--wrap=hostname")
    go = f"/home/alice/go-{held}"
    long = demo.as_alice(node, "sbatch", "--parsable", f"--wrap=until [ -e {go} ]; do sleep 0.2; done; echo survived")
    demo.wait_for("the long job", lambda: "yes" if "RUNNING" in node.run("scontrol", "show", "job", long).text else "")
    generation, next_id = running.lease()["generation"], next_job(running)
    reported = running.sms("stop").text
    assert "the lease is free" in reported
    assert "Saving all slurm state" in running.sms("logs", "slurmctld").text  # read from the overlay at rest
    running.assert_nothing_runs()
    assert running.sms("status", ok=None).status == 4
    running.sms("-q", "start")
    assert running.lease()["generation"] == generation + 1
    assert next_job(running) == next_id
    assert "JobHeldUser" in node.run("scontrol", "show", "job", held).text
    assert "RUNNING" in node.run("scontrol", "show", "job", long).text
    demo.as_alice(node, "touch", go)
    demo.as_alice(node, "scontrol", "release", held)
    for job in (held, long):
        demo.wait_for(f"job {job}", partial(completed, node, job))
    assert "survived" in node.run("cat", f"/home/alice/slurm-{long}.out").text


def test_a_start_from_another_machine_over_ssh(running: Playground) -> None:
    running.sms("stop")
    began = time.monotonic()
    started = json.loads(running.sms("start", "--host", "host-a", "--json", on="admin").stdout)
    assert time.monotonic() - began > sum(started["parts"].values()) > 0
    assert running.status("host-a")["healthy"]
    assert running.sms("exec", "--host", "host-a", "hostname", on="admin").text == "sms-services"
    found = json.loads(running.sms("status", "--json", "-q", on="admin").stdout)
    assert (found["host"], found["healthy"]) == ("host-a", True), "the host that holds the lease"
    for words in (("start",), ("exec", "hostname")):
        refused = running.sms("-q", words[0], "--host", "host-b", *words[1:], on="admin", ok=(3,))
        assert b"on host-a" in refused.stderr, refused
    other = json.loads(running.sms("-q", "stop", "--host", "host-b", "--json", on="admin").stdout)
    assert (other["ran"], other["holder"]) == (False, "host-a")
    would = json.loads(running.sms("stop", "--host", "host-a", "-n", "--json", on="admin").stdout)
    assert would["lease_released"] and "slurmctld" in would["services"]
    assert running.status("host-a")["running"], "a dry run stops nothing"
    lines = json.loads(running.sms("logs", "slurmctld", "--json", "-n", "3", "--host", "host-a", on="admin").stdout)
    assert len(lines["lines"]) == 3
