"""slurmdbd with MariaDB, and slurmrestd: built and started once, in a snapshot, used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from appliance.host.base import Result
from appliance.operations.lab import demo
from tests.images import with_accounting
from tests.real.conftest import NODES, Playground
from tests.real.labs import build_image

pytestmark = pytest.mark.real


@dataclass(frozen=True)
class Full:
    """The services container with all optional services on host-a."""

    playground: Playground
    site: str

    def sms(self, *words: str, **more: Any) -> Result:
        return self.playground.sms("--site", self.site, *words, **more)

    def within(self, script: str) -> str:
        """What a shell in the container prints."""
        return self.sms("exec", "--", "sh", "-c", script).text


@pytest.fixture(scope="module")
def full(playground: Playground) -> Iterator[Full]:
    made = Full(playground, playground.variant("full.yaml", with_accounting))
    build_image(playground.lab, "full")
    for host in ("host-a", "host-b"):
        playground.sms("-q", "stop", on=host)
    made.sms("-q", "start", "--host", "host-a", "--wait", "120", on="admin")
    made.sms("-q", "start")  # with this site file: its guard
    # slurmd keeps the slurm.conf of the site before until the controller says that it has changed.
    made.sms("exec", "--", "scontrol", "reconfigure")
    demo.wait_idle(playground.host("node1"), NODES)
    try:
        yield made
    finally:
        made.sms("-q", "stop")
        playground.host("host-a").run("rm", "-rf", "/var/lib/sms/full", "/var/lib/sms/snapshots/full")


def test_a_database_is_dumped(full: Full) -> None:
    """MariaDB's dump is in the snapshot, readable by root only; a failed one is reported and does not stop it."""
    reported = full.sms("overlay", "snapshot")
    assert b"dump mariadb" in reported.stderr
    dump = "/var/lib/mysql-dump/all.sql"
    assert full.within(f"stat -c %a:%U {dump} /var/lib/mysql-dump").split() == ["600:root", "700:root"]
    assert "slurm_acct_db" in full.within(f"grep -m1 -o slurm_acct_db {dump}")
    assert full.within("ls /var/lib/mysql-dump").split() == ["all.sql"]
    for _ in range(5):  # Slurm may have recorded something meanwhile
        inode, digest = full.within(f"stat -c %i {dump}; sha256sum <{dump}").split()[:2]
        full.sms("-q", "overlay", "snapshot")
        if full.within(f"sha256sum <{dump}").split()[0] == digest:
            break
    assert full.within(f"stat -c %i {dump}") == inode, "one that says the same is left alone"
    full.within("mv /usr/bin/mariadb-dump /usr/bin/mariadb-dump.away")
    reported = full.sms("overlay", "snapshot", ok=(4,))
    assert b" of full" in reported.stdout and b"warning: mariadb was not dumped: " in reported.stderr
    shown = json.loads(full.sms("overlay", "show", "latest", "--json").stdout)
    assert "mariadb was not dumped" in shown["notes"][0] and shown["health"]["ok"]
    assert full.within(f"stat -c %i {dump}") == inode, "the last good one stays"
    full.sms("-q", "overlay", "snapshot", "--no-dump")
    full.within("mv /usr/bin/mariadb-dump.away /usr/bin/mariadb-dump")


def test_all_optional_services_are_real_when_turned_on(full: Full) -> None:
    status = json.loads(full.sms("status", "--json").stdout)
    assert status["healthy"] and len(status["services"]) == 11
    job = demo.run_job(full.playground.host("node1")).split()[1]
    account = ("sacct", "-X", "-n", "-P", "-j", job, "-o", "jobid,user,state")
    demo.wait_for(
        "the job's record",
        lambda: "yes" if f"{job}|alice|COMPLETED" in full.sms("exec", "--", *account, ok=None).text else "",
    )
    # On a node, too: slurm.conf, which nodes fetch from the controller, names the container's address.
    node = full.playground.host("node1")
    demo.wait_for(
        "the job's record, as a node sees it",
        lambda: "yes" if f"{job}|alice|COMPLETED" in node.run(*account, ok=None).text else "",
    )
    associations = ("sacctmgr", "-n", "-P", "show", "assoc", "format=cluster,account,user")
    demo.wait_for(
        "the cluster's associations", lambda: "yes" if "full|root" in node.run(*associations, ok=None).text else ""
    )
    unix = "/run/slurmrestd/slurmrestd.sock"
    ask = f"import socket; s=socket.socket(socket.AF_UNIX); s.connect({unix!r}); "
    ask += "s.sendall(b'GET /slurm/v0.0.38/nodes HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n'); "
    ask += "print(b''.join(iter(lambda: s.recv(65536), b'')).decode())"
    answer = full.sms("exec", "--", "python3", "-c", ask).text
    assert "200 OK" in answer and '"node4"' in answer


@pytest.mark.full
def test_limits_and_qos_of_the_database_end_no_job_in_silence(full: Full) -> None:
    """A job runs while limits are not enforced, and no QOS preempts. Once it is, Slurm ends it, as is said before."""
    node = full.playground.host("node1")
    for words in (
        "add account physics",
        "add user alice account=physics",
        "modify account physics set GrpTRESMins=cpu=0",
        "add qos urgent preempt=normal",
        "modify user alice set qos+=urgent",
    ):
        full.within(f"sacctmgr -i {words}")
    job = demo.as_alice(node, "sbatch", "--parsable", "-A", "physics", "-o", "/dev/null", "--wrap", "sleep 600")
    state = ("squeue", "-h", "-j", job, "-o", "%T")
    demo.wait_for("the job runs", lambda: "yes" if node.run(*state).text == "RUNNING" else "")

    def changed(*extra: str) -> str:
        def change(document: dict[str, Any]) -> None:
            with_accounting(document)
            document["slurm"]["extra"] = list(extra)

        return full.playground.variant("limits.yaml", change)

    def site(enforced: str) -> str:
        return changed(f"AccountingStorageEnforce={enforced}")

    apply = ("-q", "apply", "--json")
    refused = json.loads(full.playground.sms("--site", site("limits"), *apply, "-n", ok=(3,)).stdout)["refused"]
    assert len(refused) == 1 and f"{job} (account physics: GrpTRESMins=cpu=0)" in refused[0]
    assert not json.loads(full.playground.sms("--site", site("limits,safe"), *apply, "-n").stdout)["refused"]
    full.playground.sms("--site", site("limits"), *apply, "--force")
    shown = ("scontrol", "show", "job", job)
    demo.wait_for("Slurm ends it", lambda: "yes" if "JobState=TIMEOUT" in node.run(*shown).text else "")
    full.sms(*apply)

    def submit(*words: str) -> str:
        whole = ("-A", "physics", "-w", "node2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
        return demo.as_alice(node, "sbatch", "--parsable", *words, *whole)

    runs = submit("--no-requeue")
    state = ("squeue", "-h", "-j", runs, "-o", "%T")
    demo.wait_for("the job runs", lambda: "yes" if node.run(*state).text == "RUNNING" else "")
    waits = submit("--qos=urgent")
    by_qos = "PreemptType=preempt/qos"
    modes = {"SUSPEND,GANG": [], "CANCEL": [runs]}
    for mode, lost in modes.items():
        planned = full.playground.sms("--site", changed(by_qos, f"PreemptMode={mode}"), *apply, "-n", ok=(0, 3))
        assert [one["name"] for one in json.loads(planned.stdout)["losses"]] == lost
    full.playground.sms("--site", changed(by_qos, "PreemptMode=CANCEL"), *apply, "--force")
    shown = ("scontrol", "show", "job", runs)
    demo.wait_for("Slurm ends it", lambda: "yes" if "JobState=PREEMPTED" in node.run(*shown).text else "")
    node.run("scancel", waits)
    full.sms(*apply)


FILL = """
import subprocess
lines = ["update nodename=node4 state=drain reason=filled", "update nodename=node4 state=resume"] * 5300
subprocess.run(["scontrol"], input="\\n".join(lines) + "\\nquit\\n", text=True, check=True, stdout=subprocess.DEVNULL)
"""
"""More messages for slurmdbd than slurmctld keeps (MaxDBDMsgs: 10,000 at least): each change of a node is one."""


@pytest.mark.full
@pytest.mark.parametrize("how", ["STOP", "drop"])
def test_an_accounting_that_hangs_holds_up_no_job(full: Full, how: str) -> None:
    """R7: slurmdbd takes connections and does not answer, or nobody is there. What is discarded is counted."""

    def fewest(document: dict[str, Any]) -> None:
        with_accounting(document)
        document["slurm"]["extra"] = ["MaxDBDMsgs=10000", "MaxJobCount=100"]

    node = full.playground.host("node1")
    full.playground.sms("--site", full.playground.variant("fewest.yaml", fewest), "-q", "apply")
    rules = "table ip away { chain out { type filter hook output priority 0; tcp dport 6819 drop; }; }"

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(full.sms("status", "--json", ok=(0, 4)).stdout)
        return found

    if how == "STOP":
        full.within("pkill -STOP -x slurmdbd")
    else:
        full.sms("exec", "--", "nft", rules)
    try:
        full.sms("exec", "--", "python3", "-c", FILL, timeout=600)
        demo.wait_idle(node, NODES)
        assert "COMPLETED" in demo.run_job(node), "its record is one of those that are discarded"
        warnings = " ".join(status()["warnings"])
        assert "wait for slurmdbd" in warnings and "slurmctld has discarded " in warnings
    finally:
        full.within("pkill -CONT -x slurmdbd; nft delete table ip away 2>/dev/null; true")
    waits = "sdiag | sed -n 's/^DBD Agent queue size: *//p'"
    demo.wait_for("an empty queue", lambda: "yes" if full.within(waits) == "0" else "", 300)
    job = demo.run_job(node).split()[1]
    shown = ("sacct", "-X", "-n", "-P", "-j", job, "-o", "state")
    demo.wait_for("its record", lambda: "yes" if "COMPLETED" in full.sms("exec", "--", *shown).text else "")
    full.sms("-q", "apply")
    full.within("truncate -s 0 /var/log/sms/slurmctld.log")


DAMAGE = (
    "pkill -STOP mariadbd; dd if=/dev/zero of=/var/lib/mysql/ibdata1 bs=1M count=8 conv=notrunc; pkill -KILL mariadbd"
)


def test_a_damaged_database_stops_nothing_else(full: Full) -> None:
    """R17: jobs run without accounting; the message names the restore of that path, which repairs it."""
    full.sms("-q", "overlay", "snapshot")
    full.within(DAMAGE)
    full.sms("-q", "stop")
    reported = full.sms("start", "--wait", "90", ok=(4,)).stderr.decode()
    assert "mariadb does not answer" in reported and "--path /var/lib/mysql" in reported
    status = json.loads(full.sms("status", "--json", ok=(4,)).stdout)
    assert {one["name"] for one in status["services"] if not one["ok"]} <= {"mariadb", "slurmdbd"}
    demo.run_job(full.playground.host("node1"))
    full.sms("-q", "stop")
    full.sms("-q", "overlay", "restore", "latest", "--path", "/var/lib/mysql")
    full.sms("-q", "start", "--wait", "120")
    demo.wait_for("health", lambda: "yes" if full.sms("status", ok=None).status == 0 else "")
