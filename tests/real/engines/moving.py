"""What tests of `sms migrate --to` share: a lab with accounting and engines, jobs that run through a move."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from appliance.lab.engines.agents import IMPORT
from appliance.lab.layout import DISK
from appliance.operations.context import open_cluster
from appliance.operations.engines.bundles import render_bundle
from appliance.operations.engines.image import make_oci
from appliance.operations.lab.demo import as_alice, wait_idle
from appliance.progress import Silent
from tests.images import ACCOUNTING
from tests.real.conftest import give_image
from tests.real.labs import build_image, fresh_lab
from tests.real.moves import CARRIERS, Hosts
from tests.waiting import wait_until

NODES = 2
SACCT = ("sacct", "-X", "-n", "-P", "-a", "-S", "now-2hours", "-o", "jobid,state")


STAYS = "sms-lab_gateway"
"""Instance with what stays in the services container while an engine has the other services."""
ANSWERS = """\
import socket
socket.create_connection(("10.78.0.254", 80), 5).close()
clock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
clock.settimeout(5)
clock.sendto(b"\\x23" + bytes(47), ("10.77.0.1", 123))
assert len(clock.recv(100)) == 48
"""
"""Python: connect through NAT, and ask for the time (RFC 5905)."""
WORKER, ADDRESS = "worker1", "10.77.0.32"
"""The cluster node that runs the pods, and its address in the provisioning network."""


@contextmanager
def moving_lab(name: str, engines: Sequence[str]) -> Iterator[Hosts]:
    """A lab with accounting, whose services container runs on host-a; host-a is a client of Nomad, too.

    The nodes keep their own munged and slurmd.
    """
    with fresh_lab(name, NODES, engines=engines) as lab:
        path = lab.etc / "sms.yaml"
        document = yaml.safe_load(path.read_text())
        document["services"] = list(ACCOUNTING)
        document["overlay"] = {"size_mb": 1024}
        document["engines"]["nomad"]["compute_pool"] = "native"
        if "kubernetes" in engines:
            document["engines"]["kubernetes"] |= {"network": "host", "node": WORKER, "address": ADDRESS}
        path.write_text(yaml.safe_dump(document))
        found = Hosts(lab)
        found.host("host-a").run("nomad", "node", "pool", "apply", "-", input=b'node_pool "native" {}')
        built = build_image(lab)
        give_image(found, built)
        if "kubernetes" in engines:
            folder = DISK / f"{name}.oci"
            make_oci(open_cluster(path, None, Silent()), Path(built.image), folder)
            tar = ("tar", "-C", str(folder), "-c", "oci-layout", "index.json", "blobs")
            archive = subprocess.run(tar, capture_output=True, check=True)
            shutil.rmtree(folder)
            lab.host(WORKER).run(*IMPORT, input=archive.stdout)
        found.sms("-q", "start", on="host-a")
        wait_idle(found.host("node1"), NODES)
        yield found


class Jobs:
    """A running and a queued job, which are to complete whatever happens, and the records of earlier ones."""

    def __init__(self, hosts: Hosts, seconds: int) -> None:
        self.node = hosts.host("node1")
        wait_until(
            lambda: not any(one.endswith(("|RUNNING", "|PENDING")) for one in self.records()), "all have ended", 60
        )
        self.earlier = self.records()
        submit = ("sbatch", "--parsable", "-N2", "--exclusive")
        self.running = as_alice(self.node, *submit, f"--wrap=sleep {seconds}; hostname")
        self.queued = as_alice(self.node, *submit, "--wrap=hostname")
        wait_until(lambda: self.state(self.running) == "RUNNING", "the first job runs", 60)

    def state(self, job: str) -> str:
        return self.node.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", ok=None).text

    def records(self) -> set[str]:
        return {*self.node.run(*SACCT, ok=None).text.splitlines()}

    def assert_whole(self) -> None:
        """Both complete under their ids, no node went down, and no record is lost."""
        for job in (self.running, self.queued):
            wait_until(lambda: self.state(job) == "COMPLETED", f"job {job} completes", 180, 0.5)  # noqa: B023
        wait_idle(self.node, NODES)
        assert not [line for line in self.node.run("sinfo", "-h", "-N", "-o", "%t").text.split() if "down" in line]
        mine = {f"{self.running}|COMPLETED", f"{self.queued}|COMPLETED"}
        wait_until(lambda: self.records() >= self.earlier | mine, f"all of {self.earlier | mine}", 60)
        new = as_alice(self.node, "sbatch", "--parsable", "--wrap=true")
        assert int(new) > int(self.queued)
        wait_until(lambda: self.state(new) == "COMPLETED", "a new job completes", 60)


def move(hosts: Hosts, *words: str, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """`sms migrate --json`, on host-a."""
    result = hosts.sms("-q", "migrate", "--json", *words, on="host-a", ok=ok, timeout=900)
    print(result.stdout.decode()[-3000:], result.stderr.decode()[-3000:])
    found: dict[str, Any] = json.loads(result.stdout) if result.stdout.strip() else {}
    return found


def assert_gateway(
    hosts: Hosts,
    on: str = "host-a",
    *,
    among: tuple[str, ...] = CARRIERS,
    moved: tuple[str, ...] = ("munged", "rsyslogd"),
) -> None:
    """One of these admin hosts has what the engine does not run; nothing that has ``moved`` runs there."""
    assert [name for name in among if STAYS in hosts.instances(name)] == [on]
    node = hosts.lab.host("node1").pid
    subprocess.run(("nsenter", f"--net=/proc/{node}/ns/net", sys.executable, "-c", ANSWERS), check=True)
    listed = hosts.host(on).run("apptainer", "exec", f"instance://{STAYS}", "sh", "-c", "cat /proc/[0-9]*/comm; true")
    assert {"nft", "chronyd"} <= {*listed.text.split()}
    assert not {"slurmctld", "slurmdbd", "mariadbd", "mysqld", *moved} & {*listed.text.split()}


def writers(hosts: Hosts, among: tuple[str, ...] = CARRIERS) -> list[str]:
    """Who runs a service whose state two at once would destroy: admin hosts (those that are on), the engines.

    One that runs twice on an engine is there twice.
    """
    host, cluster = hosts.host("host-b"), open_cluster(hosts.lab.etc / "sms.yaml", None, Silent())
    found = Counter(name for name in among if "sms-lab" in hosts.instances(name))
    for item in render_bundle(cluster, "nomad").items:
        if item.lease:
            listed = host.run("nomad", "job", "allocs", "-json", item.name, ok=None)
            allocations = json.loads(listed.stdout) if not listed.status else []
            found |= Counter("nomad" for each in allocations if each["ClientStatus"] == "running")
    if "kubernetes" in hosts.lab.layout.engines:
        for item in render_bundle(cluster, "kubernetes").items:
            if item.lease:
                pod = f"{item.name}-0"
                listed = host.run("kubectl", "-n", "lab", "get", "pod", pod, "--ignore-not-found", "-o", "name")
                found |= Counter(["kubernetes"] if listed.text else [])
    return sorted(found.elements())
