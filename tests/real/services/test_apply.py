"""`sms apply`: changes of the site file reach the services of the running container, with a job running."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
import yaml

from appliance.config.hostlist import expand, fold
from appliance.lab.layout import PROVISIONING
from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground
from tests.real.processes import begin, kill_sms, wait_for_step
from tests.real.services.test_restart import pids
from tests.waiting import wait_until

pytestmark = pytest.mark.real


DEFAULT = {"name": "normal", "default": True}


def use(playground: Playground, **slurm: Any) -> str:
    """A variant of the site file with other values of its section slurm."""
    return playground.variant("applied.yaml", lambda document: document["slurm"].update(slurm))


def applied(playground: Playground, site: str, *words: str, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(playground.sms("--site", site, "-q", "apply", *words, "--json", ok=ok).stdout)
    return found


def partitions(playground: Playground, on: str = "node1") -> set[str]:
    return set(playground.host(on).run("sinfo", "-h", "-o", "%R").text.split())


def test_a_partition_reaches_the_cluster_without_a_restart(running: Playground) -> None:
    """Adds to `sms start`: reload and restart as planned, nothing else; a second run changes nothing."""
    demo.wait_idle(running.host("node1"), NODES)
    job = demo.as_alice(running.host("node1"), "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_until(lambda: running.host("node1").run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    before, old = pids(running), partitions(running)
    site = use(running, partitions=[DEFAULT, {"name": "night"}])
    planned = applied(running, site, "-n")
    assert [(one["service"], one["kind"], one["predicted_s"]) for one in planned["steps"]] == [
        ("slurmctld", "reload", 0)
    ]
    assert any("PartitionName=night" in line for one in planned["changes"] for line in one["after"].splitlines())
    assert partitions(running) == old
    done = applied(running, site)
    assert done["changed"] == ["/etc/slurm/slurm.conf"] and done["seconds"] == {"slurmctld": 0}
    wait_until(lambda: partitions(running) == {"normal", "night"}, "the partition on a node")
    assert pids(running) == before
    assert applied(running, site)["current"] is True
    undone = applied(running, "/etc/sms/sms.yaml")
    assert [one["kind"] for one in undone["steps"]] == ["reload"]
    wait_until(lambda: partitions(running) == old, "the old partitions")
    assert running.host("node1").run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    running.host("node1").run("scancel", job)
    assert running.status()["healthy"]


def test_settings_that_only_another_image_brings(running: Playground) -> None:
    """Reported; no switch, and no service is touched. The prediction of a first restart is the catalogue's."""

    def change(document: dict[str, Any]) -> None:
        document["base"] = {**document.get("base", {}), "packages": ["socat"]}
        document["munge"] = {"user": {"uid": 973, "gid": 974}}
        document["syslog_forward"] = "10.78.0.254:5141"

    assert applied(running, "/etc/sms/sms.yaml", "-n")["rebuild"] == []
    planned = applied(running, running.variant("rebuilt.yaml", change), "-n")
    assert not planned["current"] and planned["rebuild"] == ["packages (+socat)", "munge.user"]
    assert planned["switch"] == [] and planned["switching"] is None
    assert [one["service"] for one in planned["steps"] if one["predicted_s"] > 0] == ["rsyslog"]


def test_a_service_that_fails_gets_its_old_file_back(running: Playground) -> None:
    """slurmctld refuses the line: it answers with the file of before, and nothing is left to do."""
    before = running.sms("exec", "--", "sha256sum", "/etc/slurm/slurm.conf").text
    site = use(running, extra=["SchedulerType=sched/no_such_plugin"])
    refused = running.sms("--site", site, "-q", "apply", ok=(3,)).stderr.decode()
    assert "no plugin sched_no_such_plugin.so" in refused
    failed = running.sms("--site", site, "-q", "apply", "--force", "--wait", "10", ok=(5,)).stderr.decode()
    assert "slurmctld does not answer" in failed and "files of before" in failed
    assert running.sms("exec", "--", "sha256sum", "/etc/slurm/slurm.conf").text == before
    assert applied(running, "/etc/sms/sms.yaml")["current"] is True
    wait_until(lambda: running.status()["healthy"], "health")


@pytest.mark.parametrize(
    ("extra", "partition", "named"),
    [
        (["SlurmctldTimout=300"], {}, "SlurmctldTimout"),
        pytest.param(["SlurmctldTimeout=soon"], {}, "soon", marks=pytest.mark.full),
        pytest.param([], {"extra": "Staet=UP"}, "Staet", marks=pytest.mark.full),
    ],
)
def test_what_slurm_cannot_parse_is_refused_before(
    running: Playground, extra: list[str], partition: dict[str, str], named: str
) -> None:
    """Slurm's own parser finds it, in the plan, too: slurmctld keeps running."""
    before = pids(running)
    site = use(running, extra=extra, partitions=[{"name": "normal", "default": True, **partition}])
    for words in (("-n",), ()):
        failed = running.sms("--site", site, "-q", "apply", *words, ok=(2,)).stderr.decode()
        assert named in failed and "/etc/slurm/slurm.conf" in failed and "/run/sms" not in failed
    assert pids(running) == before
    assert running.sms("exec", "--", "sh", "-c", "ls -d /run/sms/check.* || true").text == ""


GRES = ["GresTypes=widget"]
TWICE = "NodeName=node2 Name=widget Count=1\nNodeName=node2 Name=widget Count=1\n"


@pytest.mark.parametrize(
    ("name", "text", "extra", "why"),
    [
        ("gres.conf", "Name=widget File=/dev/widget[0-1]\n", GRES, ""),
        ("gres.conf", TWICE, GRES, "slurmd on node2 would end: gres.conf duplicate records for widget"),
        ("gres.conf", "Name=gpu File=/dev/nvidia0\n", ["GresTypes=gpu"], "would be refused: 1 of gpu by gres.conf, 2"),
        ("topology.conf", "SwitchName=s1 Node=node[1-4]\n", ["TopologyPlugin=topology/tree"], "unrecognized key: Node"),
        ("job_submit.lua", "function slurm_job_submit(d, p, u\n", ["JobSubmitPlugins=lua"], "')' expected near"),
        pytest.param("gres.conf", "Name=widget Cout=2\n", GRES, "unrecognized key: Cout", marks=pytest.mark.full),
        pytest.param("cgroup.conf", "ConstrainCores=maybe\n", [], "ConstrainCores", marks=pytest.mark.full),
        pytest.param("cgroup.conf", "CgroupPlugin=autodetect\nConstrainCores=yes\n", [], "", marks=pytest.mark.full),
    ],
)
def test_what_slurmd_on_the_nodes_cannot_read_is_refused(
    running: Playground, name: str, text: str, extra: list[str], why: str
) -> None:
    """It would end on all nodes, and slurmctld would not fail for it: the slurmd of the image starts with it first."""
    (running.lab.etc / name).write_text(text)
    has = {"extra": f"Gres={extra[0].partition('=')[2]}:2"} if name == "gres.conf" else {}
    nodes = [{**one, **has} for one in slurm_of(running)["nodes"]]
    site = use(running, files={name: name}, extra=extra, nodes=nodes)
    planned = applied(running, site, "-n", ok=(3,) if why else (0,))
    assert (why in " ".join(planned["refused"])) if why else planned["refused"] == []


def submit(playground: Playground, *words: str, state: str = "RUNNING") -> str:
    """A job of alice, once it is in this state."""
    node = playground.host("node1")
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", *words, "--wrap", "sleep 600")
    wait_until(lambda: node.run("squeue", "-h", "-j", job, "-o", "%T").text == state, f"job {job} is {state}")
    return job


def slurm_of(playground: Playground) -> dict[str, Any]:
    """The section of the site file."""
    found: dict[str, Any] = yaml.safe_load((playground.lab.etc / "sms.yaml").read_text())["slurm"]
    return found


def test_a_change_that_would_end_jobs_is_refused(running: Playground) -> None:
    """R1, R2: a partition or a node with jobs or a reservation is removed. Without them, nothing is in the way."""
    node = running.host("node1")
    node.run("scancel", "--user", "alice")  # of other tests with this lab
    demo.wait_idle(node, NODES)
    both = use(running, partitions=[DEFAULT, {"name": "night"}])
    applied(running, both)
    runs = submit(running, "-p", "night", "-w", "node2")
    waits = submit(running, "-p", "night", "--begin=now+1hour", "--time=2:00:00", state="PENDING")
    tied = submit(running, "-p", "night,normal", "-d", f"afterok:{runs}", state="PENDING")
    reservation = ("reservation=soon", "start=now+1days", "duration=60", "users=root", "nodes=node3")
    running.sms("exec", "--", "scontrol", "create", *reservation)
    (entry,) = slurm_of(running)["nodes"]
    each = zip(expand(entry["name"]), expand(entry["address"]), strict=True)
    kept = [{**entry, "name": name, "address": address} for name, address in each if name in ("node1", "node4")]
    before = running.sms("exec", "--", "sha256sum", "/etc/slurm/slurm.conf").text
    fewer = use(running, partitions=[{"name": "normal", "default": True, "nodes": "node[1,4]"}], nodes=kept)
    planned = applied(running, fewer, "-n", ok=(3,))
    lost = {(one["kind"], one["name"]) for one in planned["losses"]}
    assert lost == {("job", runs), ("job", waits), ("job", tied), ("reservation", "soon")}
    refused = running.sms("--site", fewer, "-q", "apply", ok=(3,)).stderr.decode()
    assert runs in refused and waits in refused and "soon" in refused and "alice" in refused
    refused = running.sms("--site", fewer, "-q", "upgrade", "--no-rehearsal", "-n", ok=(3,)).stderr.decode()
    assert runs in refused and "soon" in refused, "an upgrade brings the site's files, too"

    def more(document: dict[str, Any]) -> None:
        document["slurm"] |= {"partitions": [DEFAULT | {"nodes": "node[1,4]"}], "nodes": kept}
        document["networks"]["dns"] = ["10.78.0.253"]

    refused = running.sms("--site", running.variant("switch.yaml", more), "-q", "apply", ok=(3,)).stderr.decode()
    assert runs in refused, "by a second instance"
    assert "1 running, 2 waiting" in running.sms("-q", "stop", "-n").text

    def both_and(**slurm: Any) -> str:
        parts = {"partitions": [DEFAULT, {"name": "night"}], **slurm}
        return running.variant("other.yaml", lambda document: document["slurm"].update(parts))

    wider = both_and(nodes=[{**entry, "cpus": 2 * entry["cpus"]}])
    assert [one["name"] for one in applied(running, wider, "-n", ok=(3,))["losses"]] == [runs, tied], "it is aborted"
    shorter = both_and(partitions=[DEFAULT, {"name": "night", "max_time": "1:00:00"}])
    assert [one["name"] for one in applied(running, shorter, "-n", ok=(3,))["losses"]] == [waits], "it never starts"
    here = both_and(partitions=[DEFAULT, {"name": "night", "extra": "AllocNodes=node2 MaxNodes=1"}])
    assert [one["name"] for one in applied(running, here, "-n", ok=(3,))["losses"]] == [waits], "nor from node1"
    running.sms("exec", "--", "scontrol", "update", "PartitionName=normal", "State=DOWN")
    slower = both_and(extra=["SlurmctldTimeout=121"])
    (why,) = applied(running, slower, "-n", ok=(3,))["refused"]
    assert "State is DOWN" in why, "a reload would open the partition"
    moved = running.sms("-q", "migrate", "host-b", on="admin", ok=(3,)).stderr.decode()
    assert "State is DOWN" in moved, "and so would a migration"
    assert "State is DOWN" in running.sms("-q", "stop", "-n").text, "or a stop and a start"
    planned = json.loads(running.sms("-q", "migrate", "host-b", "-n", "--json", on="admin").stdout)
    assert "State is DOWN" in " ".join(planned["warnings"])
    running.sms("exec", "--", "scontrol", "update", "PartitionName=normal", "State=UP")
    assert applied(running, slower, "-n")["refused"] == []
    assert running.sms("exec", "--", "sha256sum", "/etc/slurm/slurm.conf").text == before
    assert node.run("squeue", "-h", "-j", runs, "-o", "%T").text == "RUNNING"
    node.run("scancel", runs, waits, tied)
    running.sms("exec", "--", "scontrol", "delete", "reservation=soon")
    wait_until(lambda: not node.run("squeue", "-h").text, "no job is left")
    done = applied(running, fewer)
    assert done["losses"] == [] and partitions(running) == {"normal"}
    wait_until(
        lambda: node.run("sinfo", "-h", "-N", "-o", "%N").text.split() == ["node1", "node4"], "two nodes are left"
    )
    applied(running, "/etc/sms/sms.yaml")
    demo.wait_idle(node, NODES)


@pytest.mark.full
def test_a_start_that_would_end_jobs_is_refused(running: Playground) -> None:
    """R2: stop, edit, start. At boot, where nobody decides, the files of before start. Without a record: refused."""
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    both = use(running, partitions=[DEFAULT, {"name": "night"}])
    applied(running, both)
    number = str(json.loads(running.sms("-q", "overlay", "snapshot", "--json").stdout)["number"])
    job = submit(running, "-p", "night")
    stopped = json.loads(running.sms("--site", both, "-q", "stop", "--keep-lease", "--json").stdout)
    assert stopped["jobs"] == "1 running, 0 waiting"
    fewer = running.variant("fewer.yaml", lambda document: document["slurm"].update(partitions=[DEFAULT]))
    refused = running.sms("--site", fewer, "-q", "start", ok=(3,)).stderr.decode()
    assert job in refused and "night" in refused
    for words in ((), ("-n",), ("--path", "/var/spool/slurmctld")):
        assert job in running.sms("-q", "overlay", "restore", number, *words, ok=(3,)).stderr.decode()
    assert job in running.sms("-q", "overlay", "restore", number, "-n", "--force").text
    running.host("host-a").run("mv", "/var/lib/sms/journal/lab.jobs", "/root/lab.jobs")
    assert "not known" in running.sms("--site", fewer, "-q", "start", ok=(3,)).stderr.decode()
    running.host("host-a").run("mv", "/root/lab.jobs", "/var/lib/sms/journal/lab.jobs")
    assert job in running.sms("--site", fewer, "-q", "start", ok=(3,)).stderr.decode(), (
        "a refused start changes nothing"
    )
    forced = running.sms("--site", fewer, "start", "--force", "-n").stderr.decode()
    assert job in forced and "forced" in forced
    other = running.variant("other.yaml", lambda document: document.update(cluster="labb"))
    for words in (("-n",), ()):
        refused = running.sms("--site", other, "-q", "start", *words, ok=(3,)).stderr.decode()
        assert "labb never ran" in refused and "of lab, which is stopped" in refused
    assert "files of before" in running.sms("--site", fewer, "start", "--boot").stderr.decode()
    wait_until(lambda: partitions(running) == {"normal", "night"}, "both partitions")
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    assert job in running.sms("--site", fewer, "-q", "apply", ok=(3,)).stderr.decode()
    judged = running.lab.etc / "judged.json"
    judged.write_bytes(running.sms("--site", fewer, "-q", "apply", "-n", "--json", ok=(3,)).stdout)
    other = submit(running, "-p", "night", "--begin=now+1hour", state="PENDING")
    refused = running.sms("--site", fewer, "-q", "apply", "--judged", "/etc/sms/judged.json", ok=(3,)).stderr.decode()
    assert other in refused, "it was submitted since"
    node.run("scancel", other)
    assert applied(running, fewer, "--judged", "/etc/sms/judged.json")["losses"][0]["name"] == job
    wait_until(lambda: partitions(running) == {"normal"}, "one partition")
    node.run("scancel", "--user", "alice")
    demo.wait_idle(node, NODES)
    applied(running, "/etc/sms/sms.yaml")


@pytest.mark.full
def test_a_start_with_new_files_is_compared_with_the_stop(running: Playground) -> None:
    """R12, by stop, edit and start: nodes register with less memory than slurm.conf has, and are drained."""
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    typo = use(running, nodes=[{**one, "memory_mb": 900_000_000} for one in slurm_of(running)["nodes"]])
    running.sms("-q", "stop", "--keep-lease")
    started = json.loads(running.sms("--site", typo, "-q", "start", "--json", ok=(4,)).stdout)
    assert len(started["unusable"]) == NODES and not started["failed"]
    applied(running, "/etc/sms/sms.yaml")
    running.sms("exec", "--", "scontrol", "update", f"nodename=node[1-{NODES}]", "state=resume")
    demo.wait_idle(node, NODES)


def test_a_name_that_gets_another_address_is_followed(running: Playground) -> None:
    """A name of a node is in the resolver of the host only; the node is given another address while it runs.

    Adds to the tables of tests/unit/services/test_moved_names.py: the controller reaches the node at the new one.
    """
    host, node, name = running.host("host-a"), running.host("node4"), "rack4.example"
    old = next(one.addresses[PROVISIONING] for one in running.lab.layout.hosts if one.name == "node4")
    other = "10.77.0.244"
    blocked = "table ip moved { chain in { type filter hook input priority 0; ip daddr %s tcp dport 6818 drop; }; }"
    nft = ("ip", "netns", "exec", running.lab.layout.namespace("node4"), "nft")
    (entry,) = slurm_of(running)["nodes"]
    rest = {**entry, "name": "node[1-3]", "address": fold(expand(entry["address"])[:3])}
    hosts = host.run("cat", "/etc/hosts").stdout
    device = json.loads(node.run("ip", "-j", "-4", "address", "show", "to", old).stdout)[0]["ifname"]

    def resolve(address: str) -> None:
        host.write("/etc/hosts", hosts + f"{address} {name}\n".encode(), mode=0o644)

    def inside() -> str:
        return running.sms("exec", "--", "getent", "hosts", name, ok=None).text.partition(" ")[0]

    node.run("ip", "address", "add", f"{other}/16", "dev", device)
    resolve(old)
    site = use(running, nodes=[rest, {**entry, "name": "node4", "address": name}])
    try:
        applied(running, site)
        assert inside() == old
        demo.wait_idle(running.host("node1"), NODES)
        resolve(other)
        subprocess.run([*nft, blocked % old], check=True)
        running.sms("--site", site, "-q", "guard", "--once")
        assert inside() == other
        out = ("--parsable", "-w", "node4", "-o", "/dev/null", "--wrap", "true")
        job = demo.as_alice(running.host("node1"), "sbatch", *out)
        shown = ("scontrol", "show", "job", job)
        wait_until(lambda: "JobState=COMPLETED" in running.host("node1").run(*shown).text, "the job, there")
        assert applied(running, site)["current"] is True, "what the guard has written is what the site file wants"
    finally:
        subprocess.run([*nft, "delete table ip moved"], check=False)
        host.write("/etc/hosts", hosts, mode=0o644)
        applied(running, "/etc/sms/sms.yaml")
        node.run("ip", "address", "del", f"{other}/16", "dev", device)
    demo.wait_idle(running.host("node1"), NODES)


def test_settings_with_which_nodes_take_no_job_are_taken_back(running: Playground) -> None:
    """R12: more memory than nodes have. They register as invalid, and the settings of before are back."""
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    job = submit(running)
    typo = [{**one, "memory_mb": 900_000_000} for one in slurm_of(running)["nodes"]]
    site = use(running, nodes=typo)
    failed = running.sms("--site", site, "-q", "apply", ok=(5,)).stderr.decode()
    assert "take no job" in failed and "RealMemory" in failed
    node.run("scancel", job)
    demo.wait_idle(node, NODES)
    assert applied(running, "/etc/sms/sms.yaml")["current"] is True
    wait_until(lambda: running.status()["healthy"], "health")


@pytest.mark.full
def test_what_slurm_does_with_jobs_whose_nodes_change(running: Playground) -> None:
    """The rules by which a change is judged are those of this Slurm: what `--force` costs is what was predicted."""
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    applied(running, use(running, extra=["Licenses=matlab:1"]))
    job = submit(running, "-w", "node2", "--no-requeue")
    waits = submit(running, "-L", "matlab:1", "--begin=now+5", state="PENDING")
    (entry,) = slurm_of(running)["nodes"]
    wider = use(running, nodes=[{**entry, "cpus": 2 * entry["cpus"]}])
    done = applied(running, wider, "--force")
    assert {one["name"] for one in done["losses"]} == {job, waits}
    wait_until(lambda: "NODE_FAIL" in node.run("scontrol", "show", "job", job).text, "Slurm has ended it")
    shown = ("scontrol", "show", "job", waits)
    wait_until(lambda: "Licenses=(null)" in node.run(*shown).text, "it lost what it waited for")
    node.run("scancel", waits)
    applied(running, "/etc/sms/sms.yaml")
    running.sms("exec", "--", "scontrol", "update", "NodeName=ALL", "State=RESUME", ok=None)
    demo.wait_idle(node, NODES)


@pytest.mark.full
def test_settings_that_end_running_jobs_are_refused(running: Playground) -> None:
    """Partitions and nodes stay, a limit or a rank is another one. `--force` then costs what was predicted.

    Adds to the tables of tests/unit/services/test_ending.py and test_preemption.py: squeue and scontrol print it so.
    """
    node = running.host("node1")
    node.run("scancel", "--user", "alice")
    demo.wait_idle(node, NODES)
    parts = [DEFAULT, {"name": "urgent", "extra": "PriorityTier=10"}]

    def site(*extra: str) -> str:
        return use(running, partitions=parts, extra=list(extra))

    over = ("OverTimeLimit=UNLIMITED", "ResvOverRun=UNLIMITED")
    applied(running, site(*over))
    reservation = ("reservation=short", "start=now", "duration=1", "users=alice", "nodes=node3")
    running.sms("exec", "--", "scontrol", "create", *reservation)
    inside = submit(running, "--reservation=short", "--no-requeue")
    late = submit(running, "--time=1", "-w", "node2", "--exclusive", "--no-requeue")
    waits = submit(running, "-p", "urgent", "-w", "node2", "--exclusive", state="PENDING")
    preempting = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    time.sleep(70)  # its limit of a minute passes, and the reservation ends

    def lost(*extra: str) -> list[str]:
        return [one["name"] for one in applied(running, site(*extra), "-n", ok=(0, 3))["losses"]]

    assert lost("OverTimeLimit=60", "ResvOverRun=UNLIMITED") == []
    assert lost("ResvOverRun=UNLIMITED") == [late]
    assert lost(*over, *preempting) == [late]
    assert lost(*over, *preempting, "PreemptExemptTime=1-0") == [], "its time limit has passed by then"
    assert lost("OverTimeLimit=UNLIMITED") == [inside]
    done = applied(running, site("OverTimeLimit=UNLIMITED", *preempting), "--force")
    assert {one["name"] for one in done["losses"]} == {late, inside}
    wait_until(lambda: "PREEMPTED" in node.run("scontrol", "show", "job", late).text, "Slurm has ended it", 90)
    wait_until(lambda: "TIMEOUT" in node.run("scontrol", "show", "job", inside).text, "and that one", 90)
    node.run("scancel", waits)
    (why,) = applied(running, site("MaxJobCount=2"), "-n", ok=(3,))["refused"]
    assert "MaxJobCount=2" in why and "nobody could submit" in why
    demo.wait_idle(node, NODES)
    applied(running, "/etc/sms/sms.yaml")


@pytest.mark.full
def test_the_next_run_goes_on_after_a_killed_one(running: Playground) -> None:
    """Killed when the files were written and slurmctld has not read them."""
    site = use(running, extra=["MaxArraySize=2002"])
    process = begin(running, "--site", site, "apply")
    wait_for_step(process, "write the files")
    kill_sms(process.pid)
    process.communicate()
    done = applied(running, site)
    assert [(one["service"], one["kind"]) for one in done["steps"]] == [("slurmctld", "restart")]
    shown = running.sms("exec", "--", "scontrol", "show", "config").text
    assert "MaxArraySize            = 2002" in shown
    assert applied(running, site)["current"] is True
    applied(running, "/etc/sms/sms.yaml")


def test_losses_of_users_and_mail_are_refused(running: Playground) -> None:
    """R15: truncated accounts; T2: an overlay whose limits would refuse mail; R5: a node named like the container."""
    text = (running.lab.etc / "passwd").read_text()
    (running.lab.etc / "cut").write_text("")
    seen = running.sms("exec", "--", "getent", "passwd", "alice").text
    assert text.startswith("alice:") and seen

    def cut(document: dict[str, Any]) -> None:
        document["accounts"]["passwd"] = "cut"

    def larger(document: dict[str, Any]) -> None:
        document.setdefault("overlay", {})["size_mb"] = 8192

    def renamed(document: dict[str, Any]) -> None:
        document["slurm"]["nodes"][0]["name"] = "sms-services"

    for change, status, what in (
        (cut, 3, "alice"),
        (larger, 3, "sms overlay grow 8192M"),
        (renamed, 2, "sms-services"),
    ):
        site = running.variant(f"{change.__name__}.yaml", change)
        result = running.sms("--site", site, "-q", "apply", "--json", ok=(status,))
        error = json.loads(result.stdout)["error"]
        assert what in f"{error['message']} {error['hint']}", error
    assert running.sms("exec", "--", "getent", "passwd", "alice").text == seen
    assert applied(running, "/etc/sms/sms.yaml")["current"]


def fewer_nodes(playground: Playground) -> dict[str, Any]:
    """Settings of Slurm without the partition `night` and without the last node."""
    (entry,) = slurm_of(playground)["nodes"]
    names, addresses = expand(entry["name"])[:-1], expand(entry["address"])[:-1]
    return {
        "partitions": [DEFAULT],
        "nodes": [{**entry, "name": fold(names), "address": fold(addresses)}],
    }


def states(playground: Playground) -> set[str]:
    """Of the partition `night`, and of the last node."""
    node = playground.host("node1")
    shown = node.run("sinfo", "-h", "-o", "%a", "-p", "night").text.split()
    shown += node.run("sinfo", "-h", "-N", "-n", f"node{NODES}", "-o", "%T").text.split()
    return set(shown)


def signal_guard(playground: Playground, name: str) -> None:
    playground.host("host-a").run("sh", "-ec", f"kill -{name} $(cat /run/sms/lab.guard.lock)")


@pytest.mark.parametrize("who", [pytest.param("guard", marks=pytest.mark.full), "start"])
def test_what_a_killed_run_held_is_released(running: Playground, who: str) -> None:
    """SIGKILL before its files are written: status names it, and the guard or the next verb ends it."""
    running.host("node1").run("scancel", "--user", "alice")  # of other tests with this lab
    demo.wait_idle(running.host("node1"), NODES)
    applied(running, use(running, partitions=[DEFAULT, {"name": "night"}]))
    site = running.variant("fewer.yaml", lambda document: document["slurm"].update(fewer_nodes(running)))
    signal_guard(running, "STOP")  # it may be quicker than status
    try:
        process = begin(running, "--site", site, "apply")
        wait_until(lambda: "drained" in states(running), "it is held")
        kill_sms(process.pid)
        process.communicate()
        assert states(running) == {"inactive", "drained"}
        found = running.status()
        assert not found["healthy"]
        assert any("partition night" in one and f"nodes node{NODES}" in one for one in found["warnings"]), found
        if who == "start":
            running.sms("--site", "/etc/sms/applied.yaml", "-q", "start")
            wait_until(lambda: states(running) == {"up", "idle"}, "its end", 60)  # for a moment idle*, not responding
    finally:
        signal_guard(running, "CONT")
    wait_until(lambda: states(running) == {"up", "idle"}, "its end", 60)
    assert running.status()["healthy"]
    assert applied(running, "/etc/sms/sms.yaml")["steps"]


@pytest.mark.full
def test_time_servers_are_read_again(running: Playground) -> None:
    """chronyd goes on, with the sources of the site file; rsyslogd is restarted: it reads its file at its start."""

    def change(document: dict[str, Any]) -> None:
        document["ntp"] = ["10.78.0.253"]
        document["syslog_forward"] = "10.78.0.254:5140"

    def sources() -> str:
        return running.sms("exec", "--", "chronyc", "-n", "sources").text

    before = pids(running)
    done = applied(running, running.variant("time.yaml", change))
    kinds = {one["service"]: one["kind"] for one in done["steps"]}
    assert kinds == {"chrony": "reload", "rsyslog": "restart"} and done["seconds"]["chrony"] == 0
    assert "10.78.0.253" in sources()
    after = pids(running)
    assert {name for name in before if after[name] != before[name]} == {"rsyslog"}
    applied(running, "/etc/sms/sms.yaml")
    assert "10.78.0.253" not in sources() and pids(running)["chrony"] == before["chrony"]
