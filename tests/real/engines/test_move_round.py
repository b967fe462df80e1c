"""E16: container, Kubernetes, Nomad, container; each move while jobs run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.lab import Lab
from appliance.lab.power import power_off, power_on
from tests.real.conftest import give_image
from tests.real.engines.conftest import need_engines
from tests.real.engines.moving import Jobs, assert_gateway, move, moving_lab, writers
from tests.real.labs import build_image
from tests.real.moves import Hosts
from tests.real.processes import begin, kill_sms, wait_for_step

pytestmark = [pytest.mark.real, pytest.mark.full]

NAME = "t-round"
STEPS = ("stop ", "copy the state", "compare digests", "change the lease", "apply slurmctld")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A lab with both engines, whose services container runs."""
    need_engines("nomad", "kubectl", "kubelet", "kube-proxy", "kube-apiserver")
    with moving_lab(NAME, ("nomad", "kubernetes")) as found:
        yield found


def test_there_and_back(hosts: Hosts) -> None:
    figures = {}
    for target, owner in (("kubernetes", "kubernetes"), ("nomad", "nomad"), ("container", "host-a")):
        jobs = Jobs(hosts, 60)
        figures[target] = move(hosts, "--to", target, "--force")["parts"]
        assert writers(hosts) == [owner]
        assert move(hosts, "--to", target)["same"]
        jobs.assert_whole()
    print(figures)


@pytest.mark.parametrize("step", STEPS)
def test_a_move_to_kubernetes_that_is_killed(hosts: Hosts, step: str) -> None:
    jobs = Jobs(hosts, 60)
    process = begin(hosts, "migrate", "--to", "kubernetes", "--force", on="host-a")
    wait_for_step(process, step)
    kill_sms(process.pid)
    process.wait()
    assert len(writers(hosts)) <= 1
    move(hosts, "--to", "kubernetes", "--force")
    assert writers(hosts) == ["kubernetes"]
    jobs.assert_whole()
    move(hosts, "--to", "container")
    assert writers(hosts) == ["host-a"]


def test_the_admin_host_with_what_stays_fails(hosts: Hosts) -> None:
    """NAT and time continue on the other one, whatever that runs; the engine's services and jobs are not concerned."""
    give_image(hosts, build_image(hosts.lab), "host-b")
    jobs = Jobs(hosts, 60)
    move(hosts, "--to", "kubernetes", "--force")
    power_off(NAME, "host-a")
    found = Hosts(Lab.open(NAME))
    found.sms("failover", "host-b", "--i-have-fenced", on="host-b")
    moved = ("munged",)  # rsyslog stays where pods have the network of their node
    assert_gateway(found, on="host-b", among=("host-b",), moved=moved)
    assert writers(found, among=("host-b",)) == ["kubernetes"]
    jobs.assert_whole()
    power_on(NAME, "host-a")
    found = Hosts(Lab.open(NAME))
    assert b"host-b" in found.sms("start", on="host-a", ok=(3,)).stderr
    assert_gateway(found, on="host-b", moved=moved)
    found.sms("migrate", "--to", "container", on="host-b", timeout=420)
    assert writers(found) == ["host-b"]
    jobs.assert_whole()
