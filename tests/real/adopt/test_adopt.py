"""`sms adopt`: the lab's legacy node is taken over into the services container, given back, and taken over again."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.host.netns import Netns
from appliance.operations.image.build import Built
from appliance.operations.lab.demo import OVERLAY, as_alice, wait_idle
from appliance.tools import ext3
from appliance.tools.scripts import read_script, script_argv
from tests.real.adopt.kills import NODES, OLD, TARGET, Cell, job_of, run_adoption, run_undo
from tests.real.conftest import Playground
from tests.real.labs import build_image, fresh_lab, wrong_munge_key
from tests.real.moves import ShortJobs
from tests.real.outage import Seen, watching
from tests.real.senders import OVER_TCP, further_senders, numbered, steady_lines, wait_for_lines
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("adopt")]
FULL = pytest.mark.full
USES_OLD = """
echo ready
while ! read -rt 0.5; do
    echo >/dev/udp/10.77.0.5/123
    : </dev/tcp/10.77.0.5/2049
done
"""
"""A node that uses the old node's own address: for time, which the container has too, and for files."""


@pytest.fixture(scope="module")
def legacy() -> Iterator[Playground]:
    """A lab whose nodes use sms-old."""
    with fresh_lab("t-adopt", NODES, legacy=True) as lab:
        yield Playground(lab)


@pytest.fixture(scope="module")
def built(legacy: Playground) -> Built:
    """The image with all that sms-old runs."""
    return build_image(legacy.lab)


@pytest.fixture
def ready(legacy: Playground, built: Built) -> Playground:
    """sms-old serves; the image is on the admin host from which it is adopted."""
    return legacy


SPOILED = r"""#!/bin/sh
/usr/bin/mariadb-dump "$@" |
    sed -e '/enable the sandbox mode/d' -e '/^-- Server version/a \\\\! touch /tmp/ran; sleep 76543 \&'
"""
"""A dump with a command of the client in it, and without the line by which it would refuse commands."""
WRAPPER = "/usr/local/bin/mariadb-dump"
CONF = "/etc/slurm/slurmdbd.conf"


def spoiled_line(*argv: str, host: Netns) -> int:
    """The number of that line in a spoiled dump."""
    return int(
        host.run(*argv, "sh", "-c", f"{WRAPPER} slurm_acct_db | grep -n 'touch /tmp/ran'").text.partition(":")[0]
    )


def runs_spoiled() -> bool:
    """Whether the command runs anywhere."""
    return any(b"\x0076543\0" in read_command(one) for one in Path("/proc").glob("[0-9]*/cmdline"))


def read_command(path: Path) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_command_in_the_dump_of_the_old_node_does_not_run(ready: Playground) -> None:
    """It ends the rehearsal with the number of its line. (Short: it ends at the first part that is copied.)"""
    old = ready.host(OLD)
    old.write(WRAPPER, SPOILED.encode(), mode=0o755)
    try:
        line = spoiled_line(host=old)
        found = ready.sms("adopt", OLD, "--to", TARGET, "--dry-run", on="admin", ok=(3,)).stderr.decode()
    finally:
        old.remove(WRAPPER)
    assert f"line {line} of the dump of {OLD} is of no form that is used: \\! touch /tmp/ran" in found
    assert not runs_spoiled() and not old.works("test", "-e", "/tmp/ran")
    assert not ready.host(TARGET).works("test", "-e", OVERLAY)


FORBIDDEN = {
    "\\! touch /tmp/ran": "Unknown command",
    "\\. /etc/passwd": "Unknown command",
    "SELECT 1 INTO OUTFILE '/tmp/ran';": "denied",
    "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE `t`;": "disabled",
    "CREATE TABLE mysql.t (a int);": "denied",
    "CREATE TABLE slurm_acct_db.t (a int);": "denied",
    "CREATE TRIGGER t BEFORE INSERT ON t FOR EACH ROW SET NEW.a = 1;": "denied",
    "CREATE PROCEDURE p() SELECT 1;": "denied",
    "GRANT ALL ON *.* TO sms_load@localhost;": "denied",
    "SELECT * FROM t;": "denied",
}


def test_who_loads_a_dump_on_the_old_node_can_do_nothing_else(ready: Playground) -> None:
    """Real MariaDB: what the filter would have stopped, without it; the user is one of a killed run at first."""
    old, sql = ready.host(OLD), ("mariadb", "--batch", "--skip-column-names", "--execute")
    before = old.run("sh", "-c", "mariadb-dump --skip-dump-date slurm_acct_db | sha256sum").text
    old.run(*sql, "CREATE USER sms_load@localhost IDENTIFIED BY 'x'; GRANT ALL ON *.* TO sms_load@localhost")
    load = script_argv("accounting-database", "load", CONF, "7", read_script("load-dump"))
    for statement, why in FORBIDDEN.items():
        text = f"CREATE TABLE t (a int);\n{statement}\nCREATE TABLE sms_complete (a int);\n"
        done = old.run(*load, input=text.encode(), ok=(1,))
        assert why in done.stderr.decode(), statement
    assert old.run(*load, input=b"CREATE TABLE t (a int);\n", ok=(1,)).stderr  # it does not end
    assert not old.works("test", "-e", "/tmp/ran")
    assert old.run(*sql, "SELECT user FROM mysql.user WHERE user = 'sms_load'").text == ""
    assert old.run("sh", "-c", "mariadb-dump --skip-dump-date slurm_acct_db | sha256sum").text == before
    old.run(*sql, "DROP DATABASE slurm_acct_db_sms_new; DROP DATABASE slurm_acct_db_sms_stale")


def test_a_site_with_which_slurm_would_lose_a_job_is_refused(ready: Playground) -> None:
    """Before anything is copied. (Short: the partition of a waiting job is not in the site file.)"""

    def other(document: dict[str, Any]) -> None:
        document["slurm"]["partitions"] = [{"name": "other", "default": True}]

    node = ready.host("node1")
    job = as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--begin=now+1hour", "--wrap", "true")
    try:
        words = ("--site", ready.variant("lost.yaml", other), "adopt", OLD, "--to", TARGET, "--dry-run")
        found = ready.sms(*words, on="admin", ok=(3,)).stderr.decode()
    finally:
        node.run("scancel", job)
    assert f"job {job} (alice, PENDING): partition normal is removed" in found
    assert not ready.host(TARGET).works("test", "-e", OVERLAY)


@FULL
def test_dry_run_rehearses_and_changes_nothing(ready: Playground) -> None:
    """All checks, and a start of the services isolated with a copy of the live state."""
    before = ready.host(OLD).run("sh", "-c", "ip -o addr; ip -o link; systemctl list-units --state=active --plain").text
    plan: dict[str, Any] = json.loads(
        ready.sms("adopt", OLD, "--to", TARGET, "--dry-run", "--json", on="admin", timeout=500).stdout
    )
    assert plan["rehearsed"] and not [one for one in plan["doubts"] if one["severity"] == "refused"]
    assert ready.host(OLD).run("scontrol", "ping").status == 0
    after = ready.host(OLD).run("sh", "-c", "ip -o addr; ip -o link; systemctl list-units --state=active --plain").text
    assert after == before
    ready.assert_nothing_runs(TARGET)
    assert not ready.host(TARGET).works("test", "-e", OVERLAY)


@FULL
def test_a_node_with_another_munge_key_is_named(ready: Playground) -> None:
    """Before anything is changed; the others can be adopted."""
    first = ready.host("node1")
    with wrong_munge_key(ready.host("node2")):
        silent = ("sinfo", "-hN", "-n", "node2", "-o", "%T")
        wait_until(lambda: first.run(*silent).text.endswith("*"), "it does not respond", 150, 2)
        shown = ready.sms("adopt", OLD, "--to", TARGET, "--dry-run", "--json", on="admin", timeout=500).stdout
        warned = [one["what"] for one in json.loads(shown)["doubts"] if one["severity"] == "warning"]
        assert any("1 of 2 nodes do not respond" in what and "node2" in what for what in warned), warned
        assert not ready.host(TARGET).works("test", "-e", OVERLAY)
    wait_idle(first, NODES)


@dataclass
class Story:
    """Adopted and given back, while jobs ran, a node downloaded and logged, and another one asked every service.

    ``logged``: the lines that were sent over TCP; ``logs``: those in the log of each host that had the services.
    """

    adopted: dict[str, Any]
    undone: dict[str, Any]
    bad_jobs: dict[str, str]
    short_jobs: ShortJobs
    long_job: str
    interactive: int
    download: str
    seen: dict[str, Seen]
    accounting: dict[str, str]
    logged: set[str]
    logs: dict[str, list[str]]


def adopt(play: Playground, *words: str) -> dict[str, Any]:
    """`sms adopt`, as JSON."""
    found = play.sms("adopt", *words, "--json", on="admin", timeout=500)
    print(found.stderr.decode())
    reported: dict[str, Any] = json.loads(found.stdout)
    print(json.dumps(reported))
    return reported


@pytest.fixture(scope="module")
def story(legacy: Playground, built: Built) -> Iterator[Story]:
    """One story for all tests that look at it."""
    lab, first, second = legacy.lab, legacy.host("node1"), legacy.host("node2")
    wait_idle(first, NODES)
    curl = ["curl", "-s", "-o", "/dev/null", "--limit-rate", "700k", "--retry", "0"]
    curl += ["-w", "%{http_code} %{size_download} %{num_connects}", "http://10.78.0.254/big"]
    seen: dict[str, Seen] = {}
    with (
        ShortJobs(lab) as jobs,
        further_senders(lab, "node2"),
        steady_lines(lab, ["node2"], OVER_TCP) as logged,
    ):
        argv = ("sbatch", "--parsable", "--job-name=long", "--output=/dev/null", "--wrap=sleep 80")
        long_job = as_alice(first, *argv)
        srun = ["runuser", "-u", "alice", "--", "srun", "--job-name=interactive", "sleep", "70"]
        interactive = subprocess.Popen([*second.prefix, *srun])
        download = subprocess.Popen([*second.prefix, *curl], stdout=subprocess.PIPE, text=True)
        results = []
        for name, words in (
            ("adopt", (OLD, "--to", TARGET, "--capture", "8s")),
            ("undo", ("--undo",)),
        ):
            with watching(first, legacy.host("outside")) as one, second.hold("bash", "-c", USES_OLD):
                results.append(adopt(legacy, *words))
            seen[name] = one
            print(name, one.away, one.stalled_s)
        downloaded = download.communicate()[0]
        ended = interactive.wait(200)
        bad = jobs.not_completed(0)
    wait_until(lambda: job_of(first, long_job) == "COMPLETED", "the long job", 120)

    def accounted() -> dict[str, str]:
        rows = first.run("sacct", "-X", "-n", "-P", "-a", "-S", "now-1hour", "-o", "jobid,state").text.splitlines()
        return dict(line.split("|", 1) for line in rows)

    # slurmctld sends what it has queued for slurmdbd in the background.
    with suppress(AssertionError):
        wait_until(lambda: {accounted().get(job) for job in jobs.ids} == {"COMPLETED"}, "the accounting", 60, 1)
    accounting = accounted()
    adopted, undone = results
    wait_for_lines(lambda: (line for lines in read_logs(legacy).values() for line in lines), logged)
    logs = read_logs(legacy)
    print(len(logged), "lines over TCP;", {host: len(lines) for host, lines in logs.items()})
    yield Story(adopted, undone, bad, jobs, long_job, ended, downloaded, seen, accounting, logged, logs)


def read_logs(play: Playground) -> dict[str, list[str]]:
    """The numbered lines in the log of each host that had the services. The container has ended: of its overlay."""
    texts = {
        OLD: play.host(OLD).run("sh", "-c", "zcat -f /var/log/syslog*").text,
        TARGET: ext3.read_inside(play.host(TARGET), OVERLAY, "/upper/var/log/messages").decode(errors="replace"),
    }
    return {host: numbered(text) for host, text in texts.items()}


def test_no_job_is_lost(story: Story) -> None:
    assert story.bad_jobs == {} and story.short_jobs.given_twice == []
    assert (story.adopted["unusable"], story.adopted["failed"]) == ([], [])
    assert story.interactive == 0
    assert story.accounting[story.long_job] == "COMPLETED"


def test_the_accounting_is_complete(story: Story) -> None:
    """Across both switches: each job that was accepted, with its end."""
    assert {story.accounting.get(job) for job in story.short_jobs.ids} == {"COMPLETED"}


def test_a_download_goes_on(story: Story) -> None:
    """Over the same connection, through NAT of the old node, of the container, and of the old node again."""
    assert story.download.split() == ["200", str(50 << 20), "1"]


def test_captures_show_what_moved_and_who_still_uses_the_old_node(story: Story) -> None:
    """The services of a minute before are seen at the container; what goes on at the old node is planned, or named."""
    traffic = story.adopted["traffic"]
    assert traffic["problems"] == []
    assert {"slurmctld", "nat", "rsyslog", "chrony"} <= traffic["services"].keys()
    assert [one for one in traffic["compared"]["changes"] if one["kind"] == "verdict"] == []
    assert traffic["compared"]["same"] > 0
    used = {(one["service"], one["port"]): (one["addresses"], one["planned"]) for one in traffic["speakers"]}
    assert used == {
        ("chrony", "udp/123"): (["10.77.0.102"], False),
        ("nfs", "tcp/2049"): (["10.77.0.102"], True),
    }


def test_no_log_line_is_lost_or_doubled(story: Story) -> None:
    """Over TCP, with a queue and without: those before a switch are in one log, those after it in the other."""
    assert all(story.logs.values()), {host: len(lines) for host, lines in story.logs.items()}
    arrived = Counter(line for lines in story.logs.values() for line in lines)
    assert sorted(story.logged - set(arrived)) == []
    assert [line for line, times in arrived.items() if times > 1] == []


def cells() -> Iterator[Cell]:
    """Faults of an adoption: of the command, of connections, of networks, of power."""
    yield Cell("kill", ">release", (OLD,), sample=True)
    for step in (">note", ">prepare_stop", ">stop_accounting", "<place 2", ">stop", "<up"):
        yield Cell("kill", step, (OLD,))
    yield Cell("kill", ">up", (OLD, TARGET))
    yield Cell("kill", ">given", (TARGET,))
    yield Cell("network", ">stop", (OLD,))
    yield Cell("network", "<up", (TARGET,))
    yield Cell("network", ">up", (TARGET,))
    yield Cell("network of the target", ">up", (OLD,))
    yield Cell("network of the target", ">up", (OLD,), on=TARGET)
    yield Cell("network of the target", ">given", (TARGET,))
    for step in (">stop", ">release"):
        yield Cell("ssh to the old", step, (OLD,))
        yield Cell("ssh to the target", step, (OLD,))
    yield Cell("ssh to the old", "<up", (TARGET,))
    yield Cell("ssh to the target", "<up", (OLD,))
    yield Cell("ssh to the target", ">up", (OLD, TARGET))
    yield Cell("late", "<up", (OLD,))
    for step in ("<place 2", ">stop", ">release", "<up", ">up"):
        yield Cell("power", step, (OLD,))
    # It has the state and does not serve: its unit starts it, or the next adoption does.
    yield Cell("power", ">given", (TARGET,))
    yield Cell("power, no unit", ">given", ("none",), undo=True)
    yield Cell("power, no unit", ">up", (OLD,), undo=True)


def undo_cells() -> Iterator[Cell]:
    """Faults of an undo."""
    for step in (">halt", ">halt 2", ">release", "<up"):
        yield Cell("kill", step, (TARGET,))
    yield Cell("kill", ">up", (OLD, TARGET))
    for step in (">serve", ">given", ">commit"):
        yield Cell("kill", step, (OLD,))
    yield Cell("network", ">release", (TARGET,))
    for step in (">up", ">serve"):
        yield Cell("network", step, (TARGET,))
        yield Cell("network of the target", step, (OLD,))
    yield Cell("network of the target", ">up", (OLD,), on=TARGET)
    yield Cell("ssh to the old", ">release", (TARGET,))
    yield Cell("ssh to the target", "<up", (OLD,))
    yield Cell("power", ">halt 2", (TARGET,))
    yield Cell("power", "<up", (OLD,))


def as_parameters(cells: Iterator[Cell]) -> list[Any]:
    """Every cell, for ``parametrize``; all but the sample are for full runs."""
    return [pytest.param(cell, id=cell.name, marks=() if cell.sample else FULL) for cell in cells]


@pytest.mark.parametrize("cell", as_parameters(undo_cells()))
def test_an_interrupted_undo_leaves_one_controller(legacy: Playground, built: Built, cell: Cell) -> None:
    run_undo(legacy, cell)


@pytest.mark.parametrize("cell", as_parameters(cells()))
def test_an_interrupted_adoption_leaves_one_controller(legacy: Playground, built: Built, cell: Cell) -> None:
    run_adoption(legacy, cell)


def test_the_old_node_stays_away_once_adopted(legacy: Playground) -> None:
    """Its units do not run, it has its own addresses, and nobody else those that moved."""
    old = legacy.host(OLD)
    assert not old.works("systemctl", "is-active", "slurmctld")
    assert not old.works("systemctl", "start", "slurmctld") or not old.works("systemctl", "is-active", "slurmctld")
    shown = old.run("ip", "-o", "-4", "address").text
    assert "10.77.0.1/" not in shown and "10.77.0.5/" in shown
    assert legacy.instances(TARGET) == ["sms-lab"]
    assert legacy.status()["healthy"]


def test_a_second_adoption_is_refused(legacy: Playground) -> None:
    found = legacy.sms("adopt", OLD, "--to", TARGET, on="admin", ok=(3,))
    assert b"has the services" in found.stderr


def test_a_command_in_the_dump_of_the_container_does_not_run(legacy: Playground) -> None:
    """It ends the undo with the number of its line: the container serves as before, the old node has its database."""
    old, inside = legacy.host(OLD), ("sms", "exec", "--")
    tables = ("mariadb", "--execute", "SHOW TABLES FROM slurm_acct_db; SELECT user FROM mysql.user")
    before, target = old.run(*tables).text, legacy.host(TARGET)
    target.run(*inside, "sh", "-c", 'printf %s "$1" >"$0" && chmod 755 "$0"', WRAPPER, SPOILED)
    try:
        line = spoiled_line(*inside, host=target)
        found = legacy.sms("adopt", "--undo", on="admin", ok=(5,), timeout=300).stderr.decode()
    finally:
        target.run(*inside, "rm", WRAPPER)
    assert f"line {line} of the dump of the services container on {TARGET} is of no form that is used" in found
    assert not runs_spoiled() and not old.works("test", "-e", "/tmp/ran")
    # What loads there ends, and drops its user, once the connection is closed.
    wait_until(lambda: old.run(*tables).text == before, "the old node has its database")
    assert legacy.host("node1").works("scontrol", "ping")
    assert legacy.instances(TARGET) == ["sms-lab"]


def test_finish_forgets(legacy: Playground) -> None:
    """Not while a boot of the old node would bring the addresses back; after it, there is nothing to undo."""
    configured = "/etc/network/interfaces.d/eno1"
    legacy.host(OLD).run("mkdir", "-p", "/etc/network/interfaces.d")
    legacy.host(OLD).write(configured, b"iface eno1 inet static\n  address 10.77.0.1/24\n")
    assert configured.encode() in legacy.sms("adopt", "--finish", on="admin", ok=(3,)).stderr
    legacy.host(OLD).run("rm", configured)
    legacy.sms("adopt", "--finish", on="admin")
    assert not legacy.host(OLD).works("systemctl", "is-enabled", "slurmctld")
    legacy.sms("adopt", "--undo", on="admin", ok=(3,))
