"""`sms deploy` on an admin host of a lab, and jobs of a user."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from appliance.errors import SmsError
from appliance.host.base import Result
from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.operations.image.build import Built
from tests.copies import give
from tests.images import ON_ENGINES
from tests.real.engines.entries import UID, USER, Entries
from tests.waiting import wait_until

SITE = "/etc/sms/engines.yaml"
FIRST = ("slurmctld", "munge")
"""Services of the first deployment; ``grow`` adds accounting, logins and the REST interface."""
URL = "slurm/v0.0.38/nodes"


class Deployer:
    """The site file ``engines.yaml`` of a lab (``Entries``), and `sms` with it on host-a; at first with few services.

    ``document``: its content; ``write`` writes it.
    """

    def __init__(self, lab: Lab, engine: str) -> None:
        self.lab, self.engine = lab, engine
        self.document = yaml.safe_load((lab.etc / "engines.yaml").read_text())
        self.document["services"] = list(FIRST)
        self.write()

    @property
    def host(self) -> Netns:
        """The admin host."""
        return self.lab.host("host-a")

    def write(self) -> None:
        """Write the site file."""
        (self.lab.etc / "engines.yaml").write_text(yaml.safe_dump(self.document))

    @contextmanager
    def changed(self, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Have another site file; the one of before is there again at the end."""
        before = yaml.safe_dump(self.document)
        change(self.document)
        self.write()
        try:
            yield
        finally:
            self.document = yaml.safe_load(before)
            self.write()

    def sms(self, *words: str, ok: tuple[int, ...] | None = (0,), timeout: float = 420) -> Result:
        """Run it."""
        return self.host.run("sms", "--site", SITE, *words, ok=ok, timeout=timeout)

    def deploy(self, *words: str, ok: tuple[int, ...] | None = (0,)) -> dict[str, Any]:
        """`sms deploy --json`, of the engine."""
        result = self.sms("deploy", "--engine", self.engine, *words, "--json", ok=ok)
        found: dict[str, Any] = json.loads(result.stdout) if result.stdout else {}
        return found

    def status(self, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """`sms deploy status --json`."""
        found: dict[str, Any] = json.loads(self.sms("deploy", "status", "--json", ok=ok).stdout)
        return found

    @property
    def record(self) -> dict[str, Any]:
        """What host-a knows of the deployment."""
        data = self.host.read("/var/lib/sms/engines/lab.json")
        return json.loads(data) if data else {}

    @property
    def controller(self) -> str:
        """The workload of slurmctld."""
        return "slurm-ctl" if self.engine == "nomad" else "slurmctld"

    @property
    def holder(self) -> str | None:
        """Who has the lease."""
        shown: dict[str, Any] = json.loads(self.sms("status", "--json", ok=None).stdout)
        holder: str | None = shown["lease"]["holder"]
        return holder

    def deploy_after_a_kill(self) -> dict[str, Any]:
        """Kill `sms deploy` once it has recorded what it does, and run it again."""
        script = 'sms --site "$1" deploy --engine "$2" >/dev/null 2>&1 & echo $!; exec >/dev/null; wait'
        with self.host.hold("sh", "-c", script, "deploy", SITE, self.engine) as pid:
            wait_until(lambda: self.record or not self.host.works("kill", "-0", pid), "it is recorded", 120)
            self.host.run("kill", "-KILL", pid)
        assert self.record["phase"] == "applying"
        return self.deploy()


class Jobs:
    """Jobs of a user on the nodes of a lab."""

    def __init__(self, lab: Lab, nodes: tuple[str, ...]) -> None:
        self.node, self.nodes = lab.host(nodes[0]), nodes

    def run(self, *argv: str) -> str:
        """What a command of a user prints."""
        return self.node.run("runuser", "-u", "alice", "--", *argv, timeout=180).text

    def submit(self, seconds: int, *options: str) -> str:
        """Submit a job that sleeps; its number."""
        return self.run("sbatch", "--parsable", *options, "-D", "/home/alice", "--wrap", f"sleep {seconds}; hostname")

    def submit_two(self, seconds: int) -> tuple[str, str]:
        """Submit a job on all nodes, which runs on return, and one that waits for its end; their numbers."""
        running, queued = (self.submit(each, "-N2", "--exclusive") for each in (seconds, 1))
        self.wait_for(running, "RUNNING", 60)
        return running, queued

    def accounted(self, job: str) -> str:
        """State, user and number of nodes as sacct shows them; empty where it does not answer."""
        listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,User,AllocNodes")
        return self.node.run(*listed, ok=None).text

    def wait_until_accounted(self, job: str, nodes: int = 1, seconds: float = 120) -> None:
        """Wait until sacct shows it as completed."""
        wait_until(lambda: self.accounted(job) == f"COMPLETED|alice|{nodes}", f"job {job} is accounted", seconds, 0.5)

    def state(self, job: str) -> str:
        """Its state; empty while the controller does not answer."""
        return self.node.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", ok=None).text

    def wait_for(self, job: str, state: str, seconds: float = 150) -> None:
        """Wait until it has a state."""
        wait_until(lambda: self.state(job) == state, f"job {job} is {state}", seconds, 0.5)

    def node_states(self) -> dict[str, str]:
        """State of each node; empty while the controller does not answer."""
        lines = self.node.run("sinfo", "-h", "-N", "-o", "%N %T", ok=None).text.splitlines()
        return dict(line.split() for line in lines)

    def wait_until_idle(self) -> None:
        """Wait until all nodes are."""
        try:
            wait_until(lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"), "the nodes are idle", 150, 0.5)
        except SmsError as error:
            shown = (self.node.run(*argv, ok=None).text for argv in (("scontrol", "show", "node"), ("squeue", "-a")))
            raise AssertionError("\n".join([str(error), *shown])) from None

    @property
    def partitions(self) -> set[str]:
        """Names of the partitions, without the mark of the default one."""
        return {line.rstrip("*") for line in self.node.run("sinfo", "-h", "-o", "%P", ok=None).text.split()}


def give_image(lab: Lab, built: Built) -> None:
    """Give host-a the image, as the current one."""
    host = lab.host("host-a")
    host.run("mkdir", "-p", "-m", "0700", "/var/lib/sms/images")
    give(host, built.image, f"/var/lib/sms/images/{built.key}.sif")
    host.run("ln", "-sfn", f"{built.key}.sif", "/var/lib/sms/images/lab.sif")


def add_partition(document: dict[str, Any]) -> None:
    """Add a partition with all nodes."""
    document["slurm"]["partitions"] = [*document["slurm"].get("partitions", [{"name": "batch"}]), {"name": "fresh"}]


def assert_all_nodes(jobs: Jobs) -> None:
    """A job on all nodes completes."""
    assert sorted(jobs.run("srun", f"-N{len(jobs.nodes)}", "hostname").split()) == sorted(jobs.nodes)


def assert_accounted(jobs: Jobs) -> None:
    """E5: a job on all nodes completes, and sacct shows it."""
    count = len(jobs.nodes)
    job = jobs.run("sbatch", "--parsable", f"-N{count}", "-D", "/tmp", "--wrap", "srun hostname")
    jobs.wait_until_accounted(job, count)


def read_controller(deployer: Deployer) -> dict[str, Any]:
    """The controller's workload in the status, which is healthy and as it was deployed."""
    found = deployer.status()
    assert found["healthy"] and not found["drift"] and not found["pending"]
    (controller,) = (each for each in found["workloads"] if each["name"] == deployer.controller)
    parts = {part["name"]: part for part in controller["instances"][0]["parts"]}
    assert parts["slurmctld"]["ready"] and "UP" in parts["slurmctld"]["detail"], parts
    assert deployer.sms("status").text.startswith(f"lab on {deployer.engine}: healthy")
    return dict(controller)


def drain_with_a_job(deployer: Deployer, jobs: Jobs, node: str, uses: Callable[[], Iterable[bool]]) -> None:
    """E9: a node with a job is drained, and used again; another one runs jobs meanwhile.

    ``uses``: for each use that the engine has for the node, whether it has it: all until the job has ended, then none.
    """
    script = "trap 'exit 0' USR1; sleep 600 & wait"
    job = jobs.run("sbatch", "--parsable", "-w", node, "-D", "/tmp", "--wrap", script)
    jobs.wait_for(job, "RUNNING", 60)
    failed = deployer.sms("deploy", "drain", node, "--timeout", "1s", ok=(1,)).stderr.decode()
    assert f": {job};" in failed and f"{deployer.engine} was not touched" in failed
    assert jobs.node_states()[node] == "draining" and all(uses())
    jobs.run("scancel", "--batch", "--signal=USR1", job)
    deployer.sms("deploy", "drain", node)
    assert (jobs.state(job), jobs.node_states()[node].rstrip("*")) == ("COMPLETED", "drained")
    wait_until(lambda: not any(uses()), f"nothing of the engine is on {node}", 90)
    assert jobs.run("srun", "-N1", "hostname") in {*jobs.nodes} - {node}
    deployer.sms("deploy", "drain", node, "--undo")
    jobs.wait_until_idle()


def log_in(entries: Entries, login: tuple[str, int]) -> None:
    """A user of the directory logs in, with the known host key; a job of this user is accounted."""
    assert entries.ssh(*login, "id") == f"uid={UID}({USER}) gid={UID}({USER}) groups={UID}({USER})"
    job = entries.ssh(*login, "sbatch", "--parsable", "-D", "/tmp", "--wrap", "'id -un'")
    assert job.isdecimal()
    listed = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,User")
    wait_until(lambda: entries.ssh(*login, *listed) == f"COMPLETED|{USER}", "the job completes", 60)


def change_with_a_job(deployer: Deployer, jobs: Jobs) -> None:
    """E8: a new partition is there, a running and a queued job complete, no node is down; and back again."""
    running, queued = jobs.submit_two(30)
    controller = deployer.controller
    seen: list[set[str]] = []
    with deployer.changed(add_partition):
        began = time.monotonic()
        done = deployer.deploy()
        print(f"deployed another configuration in {time.monotonic() - began:.1f} s: {done['waited']}")
        assert {name for name, change in done["changes"].items() if change == "change"} == {controller}
        wait_until(lambda: "fresh" in jobs.partitions, "the partition is there", 30, 0.5)
        seen.append(set(jobs.node_states().values()))
        assert deployer.deploy()["changes"] == dict.fromkeys(done["changes"], "unchanged")
        back = json.loads(deployer.sms("deploy", "rollback", "--json").stdout)
        assert (back["changes"][controller], back["generation"]) == ("change", done["generation"] + 1)
        wait_until(lambda: jobs.partitions and "fresh" not in jobs.partitions, "it is gone", 30, 0.5)
        status = deployer.status()
        assert controller in status["pending"], "the site file still has it"
    seen.append(set(jobs.node_states().values()))
    assert not [state for states in seen for state in states if "down" in state]
    for job in (running, queued):
        jobs.wait_for(job, "COMPLETED")
    assert set(deployer.deploy()["changes"].values()) == {"unchanged"}


def grow(deployer: Deployer, jobs: Jobs) -> None:
    """More services in the site file are deployed; a job that runs meanwhile completes.

    Another partition would not restart slurmdbd then.
    """
    jobs.wait_until_idle()  # a controller that was restarted starts no job on a node that has not answered it
    job = jobs.submit(10, "-N1")
    jobs.wait_for(job, "RUNNING", 60)
    deployer.document["services"] = list(ON_ENGINES)
    deployer.write()
    done = deployer.deploy()
    assert {name: change for name, change in done["changes"].items() if change != "unchanged"} == {
        **dict.fromkeys(("slurmdbd", "login", "slurmrestd"), "create"),
        deployer.controller: "change",
    }
    print(f"ready: {done['waited']}")
    jobs.wait_for(job, "COMPLETED")
    jobs.wait_until_idle()
    with deployer.changed(add_partition):
        planned = {one["name"]: one["change"] for one in deployer.deploy("--dry-run")["differences"]}
    assert (planned[deployer.controller], planned["slurmdbd"]) == ("change", "unchanged")


def need_tokens(entries: Entries, base: str, login: tuple[str, int]) -> None:
    """slurmrestd at a URL answers with a token only, and not with a forged one."""
    url = f"{base}/{URL}"
    assert " 200 " not in f" {entries.request(url)} " and "401" in entries.request(url)
    token = entries.ssh(*login, "scontrol", "token").removeprefix("SLURM_JWT=")
    answer = entries.request(url, token)
    assert answer.endswith("200 application/json") and '"node1"' in answer
    assert "200 application" not in entries.request(url, token[:-5] + "AAAAA")


def stop_and_start(deployer: Deployer, jobs: Jobs) -> None:
    """A stop keeps the state and lets jobs run; the second one finds nothing to do."""
    job = jobs.submit(20, "-N1")
    jobs.wait_for(job, "RUNNING", 60)
    stopped = json.loads(deployer.sms("deploy", "stop", "--json").stdout)
    assert "stop" in stopped["changes"].values() and deployer.record["phase"] == "stopped"
    assert deployer.holder is None
    assert json.loads(deployer.sms("deploy", "stop", "--json").stdout)["changes"] == dict.fromkeys(
        stopped["changes"], "unchanged"
    )
    assert deployer.status()["healthy"]
    assert "drain a node" in deployer.sms("deploy", "drain", "node1", ok=(3,)).stderr.decode()
    deployer.deploy()
    assert deployer.holder == f"engine:{deployer.engine}"
    jobs.wait_for(job, "COMPLETED")
