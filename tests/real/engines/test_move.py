"""`sms migrate --to`: the services with their state from the container to Nomad and back, while jobs run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.real.engines.conftest import need_engines
from tests.real.engines.moving import Jobs, assert_gateway, move, moving_lab, writers
from tests.real.moves import Hosts
from tests.real.processes import begin, kill_sms, sms_pids, wait_for_step

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(1800)]
"""Two moves with their jobs: three minutes on an idle machine, beside three other labs three times as long."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A lab with Nomad, whose services container runs."""
    need_engines("nomad")
    with moving_lab("t-move", ("nomad",)) as found:
        yield found


def test_a_state_newer_than_the_image_is_refused(hosts: Hosts) -> None:
    """E17; before anything is stopped. A state file of a later Slurm begins as those of this one."""
    made = "printf '\\0\\0\\0\\21PROTOCOL_VERSION\\0\\57\\0' >/var/spool/slurmctld/later_state"
    hosts.sms("exec", "--", "sh", "-c", made, on="host-a")
    before = hosts.status()["uptime_s"]
    for words in (("--dry-run",), ()):
        refused = hosts.sms("migrate", "--to", "nomad", "--force", *words, on="host-a", ok=(3,))
        assert b"wrote the state, and the image of Nomad on host-a has" in refused.stderr
    assert writers(hosts) == ["host-a"] and hosts.status()["uptime_s"] >= before
    hosts.sms("exec", "--", "rm", "/var/spool/slurmctld/later_state", on="host-a")


def test_to_nomad_and_back(hosts: Hosts) -> None:
    plan = move(hosts, "--to", "nomad", "--dry-run", "--force")
    assert (
        {*plan["stays"]} >= {"nat", "chrony"} and plan["left"].keys() == {"slurmrestd"} and writers(hosts) == ["host-a"]
    )
    assert move(hosts, "--to", "nomad", ok=(3,)) == {}, "slurmrestd would stop"
    jobs = Jobs(hosts, 45)
    there = move(hosts, "--to", "nomad", "--force")
    assert writers(hosts) == ["nomad"]
    assert hosts.lease("host-b")["holder"] == "engine:nomad"
    assert_gateway(hosts)
    assert b"stay on host-a" in hosts.sms("start", "--host", "host-b", on="admin", ok=(3,)).stderr
    hosts.sms("-q", "stop", on="host-a")
    hosts.sms("-q", "start", "--host", "host-b", on="admin")
    assert_gateway(hosts, on="host-b")
    found = hosts.status(on="host-b")
    assert found["gateway"]["healthy"] and not found["running"] and writers(hosts) == ["nomad"]
    assert_acts_on_what_stays(hosts, "host-b", "host-a")
    jobs.assert_whole()
    assert move(hosts, "--to", "nomad")["same"]
    jobs = Jobs(hosts, 45)
    back = move(hosts, "--to", "container")
    assert writers(hosts) == ["host-a"] and back["generation"] > there["generation"]
    assert [hosts.instances(name) for name in ("host-a", "host-b")] == [["sms-lab"], []]
    jobs.assert_whole()
    print({"there": there["parts"], "back": back["parts"]})


def assert_acts_on_what_stays(hosts: Hosts, on: str, other: str) -> None:
    """`sms exec`, `logs` and `restart` do, on the host that runs it; what does not act on it names the way."""
    assert b"Reference ID" in hosts.sms("exec", "--", "chronyc", "-n", "tracking", on=on).stdout
    assert b"chronyd" in hosts.sms("logs", "chrony", on=on).stdout
    assert b"chrony answers" in hosts.sms("restart", "chrony", on=on).stdout
    assert f"--host {on}" in hosts.sms("exec", "true", on=other, ok=(3,)).stderr.decode()
    assert b"nomad has it" in hosts.sms("logs", "slurmctld", on=on, ok=(3,)).stderr
    for words in (("apply",), ("overlay", "snapshot"), ("migrate", other, "--dry-run"), ("migrate", other)):
        refused = hosts.sms(*words, on=on, ok=(3,)).stderr.decode()
        assert "nomad has the services" in refused, words
        assert words[0] != "migrate" or f"`sms stop --host {on}`, then `sms start --host {other}`" in refused


def test_another_run_changes_nothing_and_a_killed_one_is_undone(hosts: Hosts) -> None:
    """While the state is copied to the container, its folders on Nomad are locked; `--to nomad` starts it there."""
    move(hosts, "--to", "nomad", "--force")
    jobs = Jobs(hosts, 60)
    process = begin(hosts, "migrate", "--to", "container", on="host-a")
    wait_for_step(process, "copy the state")
    for pid in sms_pids(process.pid):
        os.kill(pid, signal.SIGSTOP)
    record = hosts.sms("deploy", "status", "--json", on="host-a", ok=(0, 4)).stdout
    moves = [("migrate", "--to", *words) for words in (("nomad",), ("container", "--dry-run"))]
    for words in (*moves, *(("deploy", *words) for words in ((), ("stop",), ("rollback",), ("drain", "node1")))):
        refused = hosts.sms(*words, on="host-a", ok=(3,))
        assert b"another `sms migrate --to` or `sms deploy` is at work" in refused.stderr, words
    assert (
        json.loads(record)["record"]
        == json.loads(hosts.sms("deploy", "status", "--json", on="host-a", ok=(0, 4)).stdout)["record"]
    )
    kill_sms(process.pid)
    process.wait()
    assert b"on host-a: `sms migrate --to container` goes on" in hosts.sms("deploy", on="host-b", ok=(3,)).stderr
    move(hosts, "--to", "nomad")
    assert writers(hosts) == ["nomad"] and hosts.lease("host-b")["holder"] == "engine:nomad"
    jobs.assert_whole()
    move(hosts, "--to", "container")
    assert writers(hosts) == ["host-a"]


def test_what_a_killed_start_leaves_has_a_guard(hosts: Hosts) -> None:
    """Of what stays: the guard is there before the instance is."""
    move(hosts, "--to", "nomad", "--force")
    hosts.sms("-q", "stop", on="host-a")
    process = begin(hosts, "start", "--host", "host-b", on="admin")
    wait_for_step(process, "start the instance")
    kill_sms(process.pid)
    process.wait()
    assert hosts.status(on="host-b")["gateway"]["guarded"]
    move(hosts, "--to", "container")
    assert [hosts.instances(name) for name in ("host-a", "host-b")] == [["sms-lab"], []]


STEPS = ("stop ", "copy the state", "compare digests", "change the lease", "apply slurm-ctl", "take the lease")


@pytest.mark.parametrize("step", STEPS)
def test_a_move_that_is_killed_is_resumed(hosts: Hosts, step: str) -> None:
    """E16: at each step there is at most one writer, and the same command goes on; in both directions."""
    jobs = Jobs(hosts, 60)
    for target, owner in (("nomad", "nomad"), ("container", "host-a")):
        if (step, target) in (("apply slurm-ctl", "container"), ("take the lease", "nomad")):
            move(hosts, "--to", target, "--force")
            continue
        process = begin(hosts, "migrate", "--to", target, "--force", on="host-a")
        wait_for_step(process, step)
        kill_sms(process.pid)
        process.wait()
        assert len(writers(hosts)) <= 1, step
        move(hosts, "--to", target, "--force")
        assert writers(hosts) == [owner], step
        assert hosts.lease("host-b")["holder"] == ("engine:nomad" if target == "nomad" else "host-a")
    jobs.assert_whole()
