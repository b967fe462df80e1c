"""The lab for real: its hosts, its end, and its end after a crash."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import lab
from appliance.errors import Refused, SmsError
from appliance.lab.down import empty_folder, loops_below
from appliance.operations.lab.lab import lab_exec
from appliance.progress import Silent
from tests.real.labs import assert_gone, need_machine, remains
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME = "t-lab"
CRASH = "t-crash"


@pytest.fixture(scope="module", autouse=True)
def _machine() -> None:
    need_machine()


@pytest.fixture(scope="module")
def cluster() -> Iterator[lab.Lab]:
    """A lab of two nodes without the container."""
    lab.down(NAME)
    lab.up(NAME, 2, Silent())
    try:
        yield lab.Lab.open(NAME)
    finally:
        lab.down(NAME)
        assert_gone(NAME)


def test_hosts_have_names_and_reach_each_other(cluster: lab.Lab) -> None:
    for name in cluster.hosts():
        assert cluster.host(name).run("hostname").text == name
    for host in ("host-a", "node2"):
        cluster.host("node1").run("ping", "-c1", "-W2", host)
    cluster.host("outside").run("ping", "-c1", "-W2", "host-b")
    assert not cluster.host("outside").works("ping", "-c1", "-W1", "10.77.0.101")


def test_ssh_needs_the_key_and_the_right_host_key(cluster: lab.Lab) -> None:
    admin = cluster.host("admin")
    assert admin.run("ssh", "-o", "BatchMode=yes", "host-a", "hostname").text == "host-a"
    assert admin.run("ssh", "-o", "BatchMode=yes", "10.78.0.12", "hostname").text == "host-b"
    assert not admin.works("ssh", "-o", "BatchMode=yes", "-o", "UserKnownHostsFile=/dev/null", "host-a", "true")
    assert not admin.works("ssh", "-o", "BatchMode=yes", "-F", "none", "-i", "/dev/null", "10.78.0.11", "true")


def test_the_outside_logs_its_clients(cluster: lab.Lab) -> None:
    fetch = "exec 3<>/dev/tcp/10.78.0.254/80; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    assert cluster.host("host-a").run("bash", "-c", fetch).text.endswith("outside sees 10.78.0.11")
    outside = cluster.host("outside")
    assert '10.78.0.11 "GET / HTTP/1.0" 200' in outside.run("cat", "/var/log/nginx/access.log").text
    assert outside.run("stat", "-c", "%s", "/srv/www/big").text == str(50 << 20)


def test_the_outside_takes_mail_syslog_and_time_requests(cluster: lab.Lab) -> None:
    outside = cluster.host("outside")
    outside.run("mail", "-s", "test mail", "someone@example.test", input=b"words\n")
    cluster.host("host-a").run("bash", "-c", "echo '<13>tester: a syslog line' >/dev/tcp/10.78.0.254/514")
    outside.run("sh", "-c", wait_for("grep -q 'test mail' /var/mail/all"))
    outside.run("sh", "-c", wait_for("grep -q '^10.78.0.11 .*a syslog line' /var/log/remote.log"))
    ask = (
        "import socket; s = socket.socket(2, 2); s.settimeout(3); "
        "s.sendto(b'\\x23' + bytes(47), ('10.78.0.254', 123)); print(s.recv(99)[1])"
    )
    assert cluster.host("host-a").run("python3", "-c", ask).text == "2"


def wait_for(condition: str) -> str:
    return f"for try in $(seq 50); do {condition} && exit; sleep 0.1; done; exit 1"


def test_nodes_wait_for_their_controller(cluster: lab.Lab) -> None:
    node = cluster.host("node1")
    assert node.run("id", "-u", "alice").text == "2000"
    assert "STATUS:          Success" in node.run("sh", "-c", "munge -n | unmunge").text
    assert not cluster.failing("node1")
    assert node.run("ip", "route", "show", "default").text.startswith("default via 10.77.0.1 ")
    keys = {cluster.host(name).run("sha256sum", "/etc/munge/munge.key").text for name in cluster.nodes}
    assert len(keys) == 1


def test_admin_hosts_share_what_they_should_and_no_more(cluster: lab.Lab) -> None:
    a, b = cluster.host("host-a"), cluster.host("host-b")
    a.run("sh", "-c", "echo shared >/srv/shared/file; echo own >/var/lib/sms/file; echo own >/etc/apptainer-file")
    assert b.read("/srv/shared/file") == b"shared\n"
    assert b.read("/var/lib/sms/file") is None
    assert b.read("/etc/apptainer-file") is None
    assert not Path("/etc/apptainer-file").exists()
    assert {
        cluster.host(name).run("sha256sum", "/etc/sms/sms.yaml").text for name in ("admin", "host-a", "host-b")
    } == {a.run("sha256sum", "/etc/sms/sms.yaml").text}


def test_a_second_up_changes_nothing(cluster: lab.Lab) -> None:
    before = json.loads(Path(f"/run/sms-lab/{NAME}/journal.json").read_text())
    assert lab.up(NAME, 2, Silent()) is False
    assert json.loads(Path(f"/run/sms-lab/{NAME}/journal.json").read_text()) == before


def start_up(name: str, nodes: int = 1) -> subprocess.Popen[bytes]:
    code = f"from appliance import lab; lab.up({name!r}, {nodes})"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def test_an_unknown_host_or_lab_is_named(cluster: lab.Lab) -> None:
    with pytest.raises(SmsError, match="has no host node9"):
        cluster.host("node9")
    with pytest.raises(SmsError, match="there is no lab nowhere"):
        lab.Lab.open("nowhere")


def test_two_at_once_one_is_refused(cluster: lab.Lab) -> None:
    """The first is stopped in its midst, so that the second surely meets it."""
    lab.down(CRASH)
    first = start_up(CRASH)
    try:
        while not Path(f"/run/sms-lab/{CRASH}/journal.json").exists():
            time.sleep(0.01)
        with pytest.raises(Refused, match="another run"):
            lab.up(CRASH, 1, Silent())
        assert first.wait(60) == 0
    finally:
        first.kill()
        lab.down(CRASH)
    assert_gone(CRASH)


def test_down_takes_loop_devices_and_foreign_processes_along(cluster: lab.Lab) -> None:
    lab.up(CRASH, 1, Silent())
    host = lab.Lab.open(CRASH).host("host-a")
    host.run("truncate", "-s", "8M", "/var/lib/sms/a.img", "/srv/shared/b.img")
    host.run("mke2fs", "-q", "-F", "/var/lib/sms/a.img")
    host.run("sh", "-c", "mkdir /tmp/m && mount -o loop /var/lib/sms/a.img /tmp/m && losetup -f /srv/shared/b.img")
    host.run("sh", "-c", "cd /tmp/m; setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    assert len(loops_below(lab.Layout(CRASH, 1).disk)) == 2
    lab.down(CRASH)
    assert_gone(CRASH)


BUILD = """#!/bin/sh
readlink /proc/self/ns/net >/tmp/network; cat /etc/resolv.conf >/tmp/names; hostname >/tmp/name; exit 7
"""


def test_a_build_uses_the_network_and_the_name_servers_of_this_machine(cluster: lab.Lab) -> None:
    admin = cluster.host("admin")
    admin.write("/tmp/sms", BUILD.encode(), mode=0o755)
    assert lab_exec(NAME, "admin", ["/tmp/sms", "build"]) == 7
    assert admin.run("cat", "/tmp/network").text == str(Path("/proc/self/ns/net").readlink())
    assert admin.read("/tmp/names") == Path("/etc/resolv.conf").read_bytes()
    assert admin.run("cat", "/tmp/name").text == "admin"
    assert lab_exec(NAME, "admin", ["/tmp/sms", "status"]) == 7
    assert admin.run("cat", "/tmp/network").text != str(Path("/proc/self/ns/net").readlink())
    assert admin.read("/tmp/names") == b""


def test_a_cache_that_is_a_mount_is_emptied(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=True)
    try:
        (tmp_path / "root").mkdir()
        for _ in range(2):
            empty_folder(tmp_path, "/run/sms/lab/t-lab-cache.lock")
            assert tmp_path.is_mount() and not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_an_interrupted_up_made_is_undone(cluster: lab.Lab) -> None:
    command = [sys.executable, "-m", "appliance", "lab", "up", "--name", CRASH, "--nodes", "1"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(Path(f"/run/sms-lab/{CRASH}").exists, "it has begun", 60)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) != 0
    assert_gone(CRASH)


@pytest.mark.parametrize("run", [0, *(pytest.param(run, marks=pytest.mark.full) for run in range(1, 8))])
def test_down_after_a_kill_leaves_nothing(cluster: lab.Lab, run: int) -> None:
    moment = random.uniform(0.1, 2.5)
    print(f"killed after {moment:.3f} s")
    running = start_up(CRASH, nodes=2)
    time.sleep(moment)
    running.kill()
    running.wait()
    lab.down(CRASH)
    assert_gone(CRASH)


def test_down_removes_what_a_run_left_that_was_killed_before_its_record(cluster: lab.Lab) -> None:
    folder = Path(f"/run/sms-lab/{CRASH}")
    folder.mkdir()
    (folder / ".journal.json.new~").write_text("{")
    assert not lab.down(CRASH)
    assert_gone(CRASH)


def test_an_incomplete_lab_is_recreated(cluster: lab.Lab) -> None:
    running = start_up(CRASH)
    # The first process of all writes the lab's record.
    while not (Path(f"/run/sms-lab/{CRASH}/journal.json").exists() and remains(CRASH)["processes"]):
        time.sleep(0.01)
    running.kill()
    running.wait()
    with pytest.raises(SmsError, match="is incomplete"):
        lab.Lab.open(CRASH)
    assert lab.up(CRASH, 1, Silent()) is True
    assert not lab.Lab.open(CRASH).failing("node1")
    lab.down(CRASH, everything=True)
    assert_gone(CRASH)
    assert not Path(f"/var/lib/sms-lab/{CRASH}").exists()
    # Another lab is up: the root that both stand on stays.
    assert list(Path("/var/cache/sms-lab").glob("root-*"))
