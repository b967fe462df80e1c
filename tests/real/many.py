"""Many nodes in a lab of few hosts, as the cluster of "Decoupled management nodes" (2018) has.

Every node is a real slurmd; several share a host of the lab, each with a port of its own (Slurm's MULTIPLE_SLURMD).
``SMS_TEST_NODES``, ``SMS_TEST_HOSTS``, ``SMS_TEST_WATCHED_S``: how many, and for how long they are
looked at after a move.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import yaml

from appliance.host.base import Host
from appliance.lab import Lab
from appliance.operations.lab.demo import as_alice
from tests.real.conftest import Playground
from tests.real.moves import Background

NODES = int(os.environ.get("SMS_TEST_NODES", "450"))
HOSTS = int(os.environ.get("SMS_TEST_HOSTS", "10"))
WATCHED_S = float(os.environ.get("SMS_TEST_WATCHED_S", "10"))
"""How long the nodes' states are looked at after a move."""
FIRST_PORT = 20000
SHARE = 5
"""One in so many nodes has a job of its own, and as many have a part of one job."""
JOBS = NODES // SHARE + 1
SETTLED_S = 150
"""The controller queries every node again after its start, and has the replies of all within so many seconds."""
REGISTERED_S = 300
START = """\
number=$1
mkdir -p /etc/slurm /var/spool/slurmd
cat >/etc/slurm/slurm.conf
printf 'CgroupPlugin=cgroup/v1\\n' >/etc/slurm/cgroup.conf
while [ "$number" -le "$2" ]; do
    slurmd -N "$(printf 'c%03d' "$number")" || exit
    number=$((number + 1))
done
"""
GATE = "/home/alice/gate"
BUSY = {"idle", "allocated"}
"""States of nodes while jobs run on some."""


def spans() -> list[tuple[int, int]]:
    """First and last node of each host of the lab."""
    ends = [NODES * number // HOSTS for number in range(HOSTS + 1)]
    return [(first + 1, last) for first, last in pairwise(ends)]


def node_lines() -> list[str]:
    """Lines of slurm.conf with all nodes; after them, the paths of slurmd are those of one of several on a host."""
    lines = ["SlurmdSpoolDir=/var/spool/slurmd/%n", "SlurmdPidFile=/run/slurmd.%n.pid"]
    for host, (first, last) in enumerate(spans(), 1):
        names = f"NodeName=c[{first:03}-{last:03}] NodeHostname=node{host} NodeAddr=10.77.0.{100 + host}"
        lines.append(f"{names} Port=[{FIRST_PORT + first}-{FIRST_PORT + last}] RealMemory=64")
    return lines


def change_site(lab: Lab) -> None:
    """Have the site file say who the nodes are; several that share an address it takes in words of Slurm's only."""
    path = lab.etc / "sms.yaml"
    document = yaml.safe_load(path.read_text())
    document["slurm"] |= {"nodes": [], "extra": node_lines()}
    path.write_text(yaml.safe_dump(document))


def on_all(play: Playground, work: Callable[[int, Host], object]) -> None:
    """Do it on every host of nodes at once."""
    with ThreadPoolExecutor(HOSTS) as pool:
        list(pool.map(lambda number: work(number, play.host(f"node{number}")), range(1, HOSTS + 1)))


def stop_usual(play: Playground) -> None:
    """End the slurmd that each host of the lab has of its own."""
    on_all(play, lambda _, host: host.run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "slurmd"))


def start_nodes(play: Playground, conf: bytes) -> None:
    """Start every node with this slurm.conf."""

    def start(number: int, host: Host) -> None:
        first, last = spans()[number - 1]
        host.run("sh", "-c", START, "start", str(first), str(last), input=conf, timeout=300)

    on_all(play, start)


def states(node: Host) -> Counter[str]:
    """How many nodes are in each state; one that does not answer has a star."""
    return Counter(node.run("sinfo", "--noheader", "-N", "-o", "%T", ok=None).text.split())


def wait_states(node: Host, allowed: set[str], seconds: float) -> float:
    """Wait until every node is in one of the states; give the seconds that it took."""
    began = time.monotonic()
    while True:
        found = states(node)
        if set(found) <= allowed and found.total() == NODES:
            return time.monotonic() - began
        assert time.monotonic() < began + seconds, f"after {seconds:g} s the nodes are {dict(found)}"
        time.sleep(0.5)


def stay(node: Host, expected: Counter[str]) -> None:
    """The nodes stay in these states for a while."""
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        assert states(node) == expected
        time.sleep(1)


def jobs(node: Host) -> dict[str, str]:
    """Each job's state."""
    lines = node.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").text.splitlines()
    return dict(line.split() for line in lines)


def submit(node: Host) -> dict[str, str]:
    """Jobs that end when the gate is opened: many of one node, and one of many with a step on each of them."""
    as_alice(node, "mkfifo", GATE)
    share = NODES // SHARE
    wait = f"read -r line <{GATE}; exit 0"
    as_alice(node, "sbatch", f"--array=1-{share}", "--output=/dev/null", f"--wrap={wait}", timeout=60)
    step = f"srun --overlap sh -c 'read -r line <{GATE}; exit 0'"
    as_alice(node, "sbatch", f"--nodes={share}", "--output=/dev/null", f"--wrap={step}", timeout=60)
    deadline = time.monotonic() + 300
    while set(found := jobs(node).values()) != {"RUNNING"} or len(jobs(node)) != JOBS:
        assert time.monotonic() < deadline, Counter(found)
        time.sleep(0.5)
    return jobs(node)


def complete(node: Host) -> None:
    """Open the gate: all jobs complete, and every node is idle again."""
    as_alice(node, "sh", "-c", f": >{GATE}")
    wait_states(node, {"idle"}, 300)
    assert set(jobs(node).values()) == {"COMPLETED"}


class States(Background):
    """Looks all the time in which states the nodes are.

    ``seen``: how often each; ``silent``: how many did not answer, each time.
    """

    def __init__(self, node: Host) -> None:
        self.node = node
        self.seen: Counter[str] = Counter()
        self.silent: list[int] = []
        super().__init__()

    def work(self) -> None:
        while not self._ended.wait(0.5):
            found = states(self.node)
            self.seen.update(found)
            self.silent.append(sum(count for state, count in found.items() if state.endswith("*")))

    @property
    def down(self) -> list[str]:
        """States in which no job would run."""
        return [state for state in self.seen if "down" in state.lower() or "drain" in state.lower()]


def load(node: Host) -> str:
    """How many there are, and how many have jobs."""
    return (
        f"{NODES} slurmd on {HOSTS} hosts, {JOBS} jobs on {states(node)['allocated']} of them; {used_mb()} MiB in use"
    )


def used_mb() -> int:
    """Memory of this machine that is in use."""
    reported = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    return (int(reported["MemTotal"]) - int(reported["MemAvailable"])) >> 10
