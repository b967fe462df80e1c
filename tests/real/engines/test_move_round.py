"""E16: container, Kubernetes, Nomad, container; each move while jobs run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.engines.conftest import need_engines
from tests.real.engines.moving import Jobs, move, moving_lab, writers
from tests.real.moves import Hosts
from tests.real.processes import begin, kill_sms, wait_for_step

pytestmark = [pytest.mark.real, pytest.mark.full]

STEPS = ("stop ", "copy the state", "compare digests", "change the lease", "apply slurmctld")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A lab with both engines, whose services container runs."""
    need_engines("nomad", "kubectl", "kubelet", "kube-proxy", "kube-apiserver")
    with moving_lab("t-round", ("nomad", "kubernetes")) as found:
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
