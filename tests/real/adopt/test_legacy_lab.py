"""The lab's legacy node: one server with systemd that the compute nodes use, and what `sms survey` finds on it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from appliance.host.netns import Netns
from appliance.lab import Lab, down
from appliance.lab.legacy import UNITS
from appliance.operations.lab.demo import wait_idle
from appliance.operations.lab.lab import lab_power
from appliance.progress import Silent
from tests.real.adopt.legacy_clients import DHCP, DNS, NFS, NTP
from tests.real.labs import assert_gone, fresh_lab, need_machine
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME, CRASH = "t-legacy", "t-old-crash"
NODES = 2
OLD = "sms-old"
DROP_IN = "/etc/systemd/system/slurmdbd.service.d/away.conf"


@pytest.fixture(scope="module", autouse=True)
def _machine() -> None:
    need_machine()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two nodes, which sms-old serves."""
    with fresh_lab(NAME, NODES, legacy=True) as opened:
        wait_idle(opened.host("node1"), NODES)
        yield opened
    assert_gone(NAME)


@pytest.fixture(scope="module")
def node(lab: Lab) -> Netns:
    return lab.host("node1")


def as_alice(node: Netns, *argv: str) -> str:
    return node.run("runuser", "-u", "alice", "--", *argv).text


def accounted(lab: Lab) -> set[str]:
    """Jobs, as the accounting has them."""
    shown = ("sacct", "-X", "-n", "-P", "-a", "-S", "now-1hour", "-o", "jobid,user,state")
    return set(lab.host("node1").run(*shown).text.splitlines())


def test_it_is_one_server_with_systemd(lab: Lab) -> None:
    old = lab.host(OLD)
    assert old.run("cat", "/proc/1/comm").text == "systemd"
    assert old.run("systemctl", "--failed", "--no-legend").text == ""
    assert set(old.run("systemctl", "is-active", *UNITS).text.splitlines()) == {"active"}
    assert not lab.failing(OLD)
    assert "cgroup" not in old.run("cat", "/proc/1/cgroup").text.replace("0::/init.scope", "")


def test_the_kernel_of_the_machine_is_not_changed(lab: Lab) -> None:
    old = lab.host(OLD)
    assert not old.works("sh", "-c", "echo 1 >/proc/sys/kernel/printk")
    assert old.works("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
    assert old.run("systemctl", "is-enabled", "fstrim.timer", ok=(1,)).text == "masked"


def test_it_has_the_containers_addresses_and_its_own(lab: Lab) -> None:
    links = json.loads(lab.host(OLD).run("ip", "-json", "address").stdout)
    seen = {
        link["ifname"]: (link["address"], [one["local"] for one in link["addr_info"] if one["family"] == "inet"])
        for link in links
    }
    site = yaml.safe_load((lab.etc / "sms.yaml").read_text())["networks"]
    assert seen["prov0"] == (site["provisioning"]["mac"], ["10.77.0.1", "10.77.0.5"])
    assert seen["pub0"] == (site["public"]["mac"], ["10.78.0.2", "10.78.0.5"])


def test_jobs_run_and_are_accounted(lab: Lab, node: Netns) -> None:
    assert set(as_alice(node, "srun", "-N2", "hostname").split()) == {"node1", "node2"}
    number = as_alice(node, "sbatch", "--parsable", "--chdir=/home/alice", "--wrap=hostname")
    wait_until(lambda: f"{number}|alice|COMPLETED" in accounted(lab), "the job's record", 60)
    assert re.fullmatch("node[12]", as_alice(node, "cat", f"/home/alice/slurm-{number}.out"))
    assert "1|alice|COMPLETED" in accounted(lab)
    cluster = lab.host(OLD).run("sacctmgr", "-nP", "list", "cluster", "format=cluster,controlhost").text
    assert cluster == "lab|10.77.0.1"


def test_nodes_reach_the_outside_through_it(lab: Lab, node: Netns) -> None:
    assert node.run("curl", "-s", "http://10.78.0.254/").text == "outside sees 10.78.0.2"
    assert "src=10.77.0.101 dst=10.78.0.254" in lab.host(OLD).run("conntrack", "-L", "-p", "tcp").text


def test_nodes_get_time_names_addresses_and_files_from_it(lab: Lab, node: Netns) -> None:
    assert 1 < int(node.run("python3", "-c", NTP).text) < 11
    wait_until(lambda: "^* 10.77.0.1" in node.run("chronyc", "-n", "sources").text, "the node follows it", 60)
    assert node.run("python3", "-c", DNS, "node2.example.test").text == "10.77.0.102"
    (other,) = [host for host in lab.layout.hosts if host.name == "node2"]
    mac = other.mac("provisioning")
    assert node.run("python3", "-c", DHCP, mac).text == "10.77.0.102"
    found, missing, refused = 0, 2, 13
    assert node.run("python3", "-c", NFS, "/home/alice").text == str(found)
    assert node.run("python3", "-c", NFS, "/home/nobody").text == str(missing)
    assert node.run("python3", "-c", NFS, "/etc").text in (str(missing), str(refused))


@pytest.mark.parametrize("option", ["--udp", "--tcp"])
def test_log_lines_of_nodes_arrive(lab: Lab, node: Netns, option: str) -> None:
    line = f"a line by {option.strip('-')}"
    node.run("logger", option, "--server", "10.77.0.1", "--port", "514", line)
    wait_until(lambda: line in lab.host(OLD).run("cat", "/var/log/syslog").text, "the line there", 30)
    wait_until(lambda: line in lab.host("outside").run("cat", "/var/log/remote.log").text, "and outside", 30)


def test_mail_of_nodes_leaves(lab: Lab, node: Netns) -> None:
    node.run("mail", "-s", "from a node", "someone@example.test", input=b"words\n")
    outside = lab.host("outside")
    wait_until(lambda: outside.works("grep", "-q", "Subject: from a node", "/var/mail/all"), "the mail", 60)
    assert "sms-old" in outside.run("cat", "/var/mail/all").text


def test_ssh_leads_to_its_own_address_and_needs_the_key(lab: Lab) -> None:
    admin = lab.host("admin")
    assert admin.run("ssh", "-o", "BatchMode=yes", OLD, "hostname").text == OLD
    assert admin.run("ssh", "-o", "BatchMode=yes", OLD, "echo $SSH_CONNECTION").text.split()[2] == "10.78.0.5"
    assert not admin.works(
        "ssh", "-o", "BatchMode=yes", "-F", "none", "-o", "UserKnownHostsFile=/dev/null", OLD, "true"
    )


def test_a_survey_finds_all_of_it_and_writes_a_site(lab: Lab) -> None:
    admin = lab.host("admin")
    survey = json.loads(admin.run("sms", "survey", OLD, "--json").stdout)
    catalogue = {"chrony", "cron", "dns", "mariadb", "munge", "nat", "nfs", "postfix", "provisioning", "rsyslog"}
    assert set(survey["services"]) == catalogue | {"slurmctld", "slurmdbd", "ssh"}
    assert (survey["provisioning"], survey["public"]) == ("prov0", "pub0")
    assert survey["peers"]["exports"] == ["/home (NFS-Ganesha)"]
    assert (survey["slurm"]["cluster"], survey["slurm"]["version"]) == ("lab", "22.05.8")
    admin.run("sms", "survey", OLD, "--write", "/root/old", "--munge-key")
    written = admin.run("cat", "/root/old/sms.yaml").text
    password = re.search(r"StoragePass=(\w+)", lab.host(OLD).run("cat", "/etc/slurm/slurmdbd.conf").text)
    assert password and not admin.works("grep", "-rq", password[1], "/root/old")
    # Only what it marks remains to be decided.
    check = ("sms", "--site", "/root/old/sms.yaml", "config", "check")
    (line,) = [line for line in admin.run(*check, ok=(2,)).stderr.decode().splitlines() if not line.startswith(" ")]
    assert line.endswith("is still marked (CHANGE)")
    decided = re.sub(r'- name: "admin"\n    address: "admin"', '- name: "host-a"\n    address: "10.78.0.11"', written)
    admin.write("/root/old/sms.yaml", decided.replace("(CHANGE) ", "").encode())
    assert "valid: cluster lab" in admin.run(*check).text
    mine, theirs = (yaml.safe_load(text) for text in (decided, (lab.etc / "sms.yaml").read_text()))
    assert mine["networks"] == theirs["networks"]
    assert set(theirs["services"]) - set(mine["services"]) == {"filesync", "slurmrestd"}


def test_a_survey_captures_what_nodes_use(lab: Lab, node: Netns) -> None:
    """Over the connection that the network of the nodes carries too: a capture that had itself would never end."""
    admin = lab.host("host-a")
    with ThreadPoolExecutor(1) as pool:
        words = ("root@10.77.0.5", "--live", "5s", "--write", "/root/live", "--json")
        running = pool.submit(admin.run, "sms", "-q", "survey", *words, timeout=60)
        while not running.done():
            node.run("scontrol", "ping")
            node.run("logger", "--tcp", "--server", "10.77.0.1", "--port", "514", "a line")
        survey = json.loads(running.result().stdout)
    evidence = {one["service"]: one["evidence"] for one in survey["listeners"]}
    assert (evidence["slurmctld"], evidence["rsyslog"]) == ("time-critical", "time-critical")
    written = yaml.safe_load(admin.run("cat", "/root/live/classification.yaml").text)
    names = {one["name"] for one in written["services"]}
    assert {"slurmctld", "rsyslog"} <= names and "ssh" not in names
    # What runs and was not seen is a finding.
    assert [one for one in survey["findings"] if one["area"] == "capture" and "postfix" in one["what"]]


def test_a_unit_that_a_condition_keeps_off_is_no_failure(lab: Lab) -> None:
    """As after an adoption."""
    old = lab.host(OLD)
    old.write(DROP_IN, b"[Unit]\nConditionPathExists=!/run/away\n")
    old.run("sh", "-c", "touch /run/away; systemctl daemon-reload; systemctl stop slurmdbd")
    try:
        assert lab.failing(OLD) == "slurmdbd"
        old.run("systemctl", "start", "slurmdbd")
        assert not old.works("systemctl", "is-active", "slurmdbd")
        assert lab.failing(OLD) == ""
    finally:
        old.run("sh", "-c", f"rm {DROP_IN} /run/away; systemctl daemon-reload; systemctl start slurmdbd")
    wait_until(lambda: not lab.failing(OLD), "slurmdbd answers", 30)


def test_it_keeps_its_disk_while_its_power_is_off(lab: Lab) -> None:
    before = accounted(lab)
    assert before
    assert lab_power(NAME, OLD, "off", Silent())
    assert Lab.open(NAME).off() == {OLD}
    assert lab_power(NAME, OLD, "on", Silent())
    again = Lab.open(NAME)
    assert not again.failing(OLD)
    assert accounted(again) == before
    wait_idle(again.host("node1"), NODES)


@pytest.mark.full  # systemd waits for what does not end
def test_a_poweroff_inside_ends_it(lab: Lab) -> None:
    Lab.open(NAME).host(OLD).run("systemctl", "poweroff", ok=None)
    wait_until(lambda: Lab.open(NAME).off() == {OLD}, "it is off", 60)
    lab_power(NAME, OLD, "on", Silent())
    assert not Lab.open(NAME).failing(OLD)


@pytest.mark.parametrize("run", [0, *(pytest.param(run, marks=pytest.mark.full) for run in range(1, 6))])
def test_down_after_a_kill_leaves_nothing(run: int) -> None:
    moment = random.uniform(0.5, 4)
    print(f"killed after {moment:.3f} s")
    code = f"from appliance import lab; lab.up({CRASH!r}, 1, extras=lab.Extras(legacy=True))"
    running = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    time.sleep(moment)
    running.kill()
    running.wait()
    down(CRASH)
    assert_gone(CRASH)
    assert not Path(f"/var/lib/sms-lab/{CRASH}/{OLD}").exists()
