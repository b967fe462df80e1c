"""kill -9 at the worst moment, two runs at once, a host that goes down: the next run resumes."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from tests.real.conftest import Playground
from tests.real.processes import begin, kill_sms, sms_pids, wait_for_step
from tests.waiting import wait_until

pytestmark = pytest.mark.real

STEPS = ("check the host", "verify the signature", "take the lease", "seed the overlay", "start the instance")
"""Steps of `sms start`, by words of the lines that report them done; it is interrupted after each."""


def sampled(*sample: str) -> list[Any]:
    """Every step; all but these are for full runs."""
    return [step if step in sample else pytest.param(step, marks=pytest.mark.full) for step in STEPS]


def fresh_overlay(playground: Playground) -> None:
    """No overlay, so that the next start has every step before it."""
    playground.host("host-a").run("sh", "-c", "rm -f /var/lib/sms/overlays/lab.img*")


@pytest.mark.parametrize("delay", [0.0, pytest.param(0.3, marks=pytest.mark.full)])
@pytest.mark.parametrize("step", sampled("take the lease", "start the instance"))
def test_a_start_that_is_killed_is_finished_by_the_next(stopped: Playground, step: str, delay: float) -> None:
    fresh_overlay(stopped)
    process = begin(stopped, "start")
    wait_for_step(process, step)
    time.sleep(delay)
    kill_sms(process.pid)
    process.communicate()
    # Whatever it had come to, the next run makes it whole.
    started = json.loads(stopped.sms("start", "--json").stdout)
    assert len(started["services"]) == 8
    assert stopped.instances() == ["sms-lab"]
    assert len(stopped.loops()) == 1
    assert stopped.lease()["holder"] == "host-a"
    assert stopped.status()["healthy"]


@pytest.mark.parametrize("step", sampled("seed the overlay"))
def test_a_start_that_is_ended_politely_undoes_what_it_did(stopped: Playground, step: str) -> None:
    fresh_overlay(stopped)
    process = begin(stopped, "start")
    wait_for_step(process, step)
    for pid in sms_pids(process.pid):
        os.kill(pid, signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 130, said
    stopped.assert_nothing_runs()


def test_two_starts_at_once_give_one_appliance(stopped: Playground) -> None:
    runs = [begin(stopped, "start") for _ in range(4)]
    ended = [(process.communicate()[1], process.returncode) for process in runs]
    # One starts it. The others wait for a while, then find it running, or say that another is at work.
    assert [status for _, status in ended].count(0) >= 1
    assert all(status in (0, 3) for _, status in ended)
    assert all(b"another sms is at work" in said for said, status in ended if status == 3)
    assert sum(b"start the instance" in said for said, _ in ended) == 1
    assert stopped.instances() == ["sms-lab"]
    assert len(stopped.loops()) == 1


def test_a_reboot_of_the_host_brings_it_back_where_it_ran(running: Playground) -> None:
    """The unit's own commands, on a host whose instance was lost without a word."""
    host = running.host("host-a")
    generation = running.lease()["generation"]
    pid = json.loads(host.run("apptainer", "instance", "list", "--json", "sms-lab").stdout)["instances"][0]["pid"]
    host.run("kill", "-KILL", str(pid))
    wait_until(lambda: not running.loops(), "no loop device is left", 60)
    status = running.status()
    assert not status["running"] and "host-a holds the lease, but runs nothing" in status["warnings"]
    running.sms("--quiet", "start", "--boot")
    assert running.status()["healthy"]
    assert running.lease()["generation"] == generation + 1
    # Stopped by an administrator, it stays stopped at the next boot.
    running.sms("--quiet", "stop")
    assert b"it did not run on host-a" in running.sms("start", "--boot").stderr
    running.assert_nothing_runs()


def test_a_host_that_goes_down_in_order_keeps_the_lease(running: Playground) -> None:
    """At boot nothing that answers is stopped, whatever does not: nobody is there who could repair it."""
    running.sms("exec", "--", "sh", "-c", "cp /etc/chrony/sms.conf /root; echo invalid >/etc/chrony/sms.conf")
    running.sms("--quiet", "stop", "--keep-lease")
    assert running.instances() == [] and running.lease()["holder"] == "host-a"
    running.sms("--quiet", "start", "--boot", "--wait", "20", ok=(4,))
    assert [one["name"] for one in running.status()["services"] if not one["ok"]] == ["chrony"]
    running.sms("exec", "--", "cp", "/root/sms.conf", "/etc/chrony/sms.conf")
    running.sms("--quiet", "restart", "chrony")
    wait_until(lambda: running.status()["healthy"], "health")


FREEZE = """\
loop=$(losetup --noheadings --output NAME --associated /var/lib/sms/overlays/lab.img)
mkdir -p /run/frozen
mount -t ext3 "$loop" /run/frozen
echo frozen >/run/sms/frozen-var-lib-sms-overlays-lab.img
fsfreeze --freeze /run/frozen
umount --lazy /run/frozen
"""


def test_a_freeze_without_an_owner_ends_by_itself(running: Playground) -> None:
    """T1: as a snapshot leaves it that is killed with its whole group, its watchdog, too. The guard ends it."""
    running.host("host-a").run("sh", "-ec", FREEZE)
    said = ("sh", "-c", "cat /var/lib/sms/journal/*")
    wait_until(lambda: '"thawed"' in running.host("host-a").run(*said).text, "the guard has ended it")
    running.sms("exec", "--", "touch", "/root/written")
    running.sms("-q", "overlay", "snapshot")
    wait_until(lambda: running.status()["healthy"], "health")
