"""The cluster of "Decoupled management nodes" (2018): 450 nodes are registered and run jobs while the controller moves.

Every node is a real slurmd; several share a host of the lab, each with a port of its own (Slurm's MULTIPLE_SLURMD).
``SMS_TEST_NODES``, ``SMS_TEST_HOSTS``, ``SMS_TEST_WATCHED_S``: how many, and for how long they are looked at after it.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.host.base import Host
from appliance.operations.context import open_cluster
from appliance.operations.image.build import build
from appliance.operations.lab.demo import as_alice
from appliance.plan.machine import inside_argv
from appliance.progress import Silent
from tests.real.conftest import Playground, give_image
from tests.real.labs import fresh_lab
from tests.real.outage import watching

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(1200)]

LAB = "t-450"
NODES = int(os.environ.get("SMS_TEST_NODES", "450"))
HOSTS = int(os.environ.get("SMS_TEST_HOSTS", "10"))
WATCHED_S = float(os.environ.get("SMS_TEST_WATCHED_S", "10"))
"""How long the nodes' states are looked at after the move."""
FIRST_PORT = 20000
SHARE = 5
"""One in so many nodes has a job of its own, and as many have a part of one job."""
SETTLED_S = 150
"""The controller queries every node again after its start, and has the replies of all within so many seconds."""
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


def spans() -> list[tuple[int, int]]:
    """First and last node of each host of the lab."""
    ends = [NODES * number // HOSTS for number in range(HOSTS + 1)]
    return [(first + 1, last) for first, last in pairwise(ends)]


def change_site(path: Path) -> None:
    """Have the site file say who the nodes are; several that share an address it takes in words of Slurm's only."""
    document = yaml.safe_load(path.read_text())
    lines = ["SlurmdSpoolDir=/var/spool/slurmd/%n", "SlurmdPidFile=/run/slurmd.%n.pid"]
    for host, (first, last) in enumerate(spans(), 1):
        names = f"NodeName=c[{first:03}-{last:03}] NodeHostname=node{host} NodeAddr=10.77.0.{100 + host}"
        lines.append(f"{names} Port=[{FIRST_PORT + first}-{FIRST_PORT + last}] RealMemory=64")
    document["slurm"] |= {"nodes": [], "extra": lines}
    path.write_text(yaml.safe_dump(document))


@pytest.fixture
def cluster() -> Iterator[Playground]:
    """A lab with the services container on host-a, and all nodes registered."""
    with fresh_lab(LAB, HOSTS) as lab:
        play = Playground(lab)
        change_site(play.lab.etc / "sms.yaml")
        opened = open_cluster(play.lab.etc / "sms.yaml", None, Silent())
        give_image(play, build(opened, Silent(), lock=play.lab.etc / "sms.lock"))
        on_all(play, lambda number, host: host.run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "slurmd"))
        play.sms("-q", "start", "--host", "host-a", on="admin")
        conf = (
            play.host("host-a").run(*inside_argv(opened.site, opened.services, "cat", "/etc/slurm/slurm.conf")).stdout
        )

        def start(number: int, host: Host) -> None:
            first, last = spans()[number - 1]
            host.run("sh", "-c", START, "start", str(first), str(last), input=conf, timeout=300)

        on_all(play, start)
        yield play


def on_all(play: Playground, work: Any) -> None:
    """Do it on every host of nodes at once."""
    with ThreadPoolExecutor(HOSTS) as pool:
        list(pool.map(lambda number: work(number, play.host(f"node{number}")), range(1, HOSTS + 1)))


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
    while set(found := jobs(node).values()) != {"RUNNING"} or len(jobs(node)) != share + 1:
        assert time.monotonic() < deadline, Counter(found)
        time.sleep(0.5)
    return jobs(node)


def used_mb() -> int:
    """Memory of this machine that is in use."""
    reported = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    return (int(reported["MemTotal"]) - int(reported["MemAvailable"])) >> 10


def test_the_controller_moves_with_every_node_registered(
    cluster: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    node, other = cluster.host("node1"), cluster.host(f"node{HOSTS}")
    registered_s = wait_states(node, {"idle"}, 300)
    began = time.monotonic()
    before = submit(node)
    submitted_s = time.monotonic() - began
    busy, used = states(node), used_mb()
    seen: Counter[str] = Counter()
    silent: list[int] = []
    moved = threading.Event()

    def look() -> None:
        while not moved.wait(0.5):
            found = states(other)
            seen.update(found)
            silent.append(sum(count for state, count in found.items() if state.endswith("*")))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    with watching(node, cluster.host("outside")) as noticed:
        reported = json.loads(cluster.sms("-q", "migrate", "host-b", "--json", on="admin").stdout)
        time.sleep(2)
    settled_s = wait_states(other, {"idle", "allocated"}, SETTLED_S)
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        assert states(other) == busy
        time.sleep(1)
    moved.set()
    looking.join()
    assert not [state for state in seen if "down" in state.lower() or "drain" in state.lower()], seen
    assert jobs(node) == before
    as_alice(node, "sh", "-c", f": >{GATE}")
    wait_states(other, {"idle"}, 300)
    assert set(jobs(node).values()) == {"COMPLETED"}
    away = ", ".join(f"{service} {seconds:.2f} s" for service, seconds in noticed.away.items())
    said = [
        f"{NODES} slurmd on {HOSTS} hosts, {len(before)} jobs on {busy['allocated']} of them; {used} MiB in use",
        f"idle {registered_s:.0f} s after the last had started; all jobs ran {submitted_s:.0f} s after sbatch",
        f"away: {away}; parts {reported['parts']}, {reported['last_bytes'] >> 10} KiB in the outage",
        f"at most {max(silent)} nodes had not answered at once, none {settled_s:.0f} s after the move",
        f"the move took {reported['seconds']:.0f} s in all",
    ]
    with capsys.disabled():
        print("", *said, sep="\n  ")
