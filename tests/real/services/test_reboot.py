"""A host with systemd: its reboot restarts the services container. systemd is real, booted in a lab host."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from appliance.operations.image.build import Built
from tests.real.booted import HOST, bootable, booted
from tests.real.conftest import Playground
from tests.waiting import wait_until

pytestmark = pytest.mark.real


def test_the_unit_stops_it_in_order_and_brings_it_back(
    stopped: Playground, built: Built, need: Callable[[str], str]
) -> None:
    unit = "sms-lab.service"
    with bootable(stopped, built, need) as outer:
        with booted(outer) as system:
            reported = system.run("sms", "start", timeout=120)
            assert b"nothing starts the services container after a reboot" not in reported.stderr
            assert system.run("systemctl", "is-enabled", unit).text == "enabled"
            assert system.run("systemctl", "is-active", unit).text == "active"
            guarded = ("systemctl", "is-active", "-q", "sms-lab-guard")
            wait_until(lambda: system.works(*guarded), "the guard runs")
            state = json.loads(system.run("sms", "status", "--json").stdout)
            assert state["healthy"] and not [words for words in state["warnings"] if "guard" in words]
        # The host is down: every daemon ended cleanly, and the lease says that it is to come back.
        assert "Saving all slurm state" in stopped.sms("logs", "slurmctld", on=HOST).text
        lease = stopped.lease(HOST)
        assert lease["holder"] == HOST and not stopped.loops(HOST)
        with booted(outer) as system:

            def back() -> bool:
                status = system.run("sms", "status", "--json", ok=None)
                return status.status == 0 and bool(json.loads(status.stdout)["healthy"])

            # nspawn's read-only cgroups let its first try fail; the unit tries again automatically.
            wait_until(back, "the services container is back")
            assert stopped.lease(HOST)["generation"] > lease["generation"]
            assert system.works(*guarded)
            system.run("sms", "stop", timeout=120)
            assert not system.works("systemctl", "is-active", "-q", "sms-lab-guard")
        with booted(outer) as system:
            time.sleep(3)
            state = json.loads(system.run("sms", "status", "--json", ok=None).stdout)
            assert not state["running"], "an administrator had stopped it"
