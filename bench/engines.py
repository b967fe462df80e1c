"""Outage of the controller, as seen by a node, when Kubernetes or Nomad has to start another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from appliance.host.base import Host
from appliance.lab import Lab
from appliance.lab.layout import CONTAINER_ADDRESSES, ENGINES, PROVISIONING
from appliance.operations.lab.demo import CARRIER, wait_for, wait_idle
from appliance.operations.lab.demo_engines import (
    LIMIT_S,
    answers,
    delete_controller,
    load_image,
    release_nodes,
)
from bench.rig import Rig, Samples, result
from bench.rig.bed import Bed, open_bed
from tests.real.outage import watching

LAB = "bench-engines"
RESTART = "sms restart slurmctld, in the container"
STOP_START = "sms stop, sms start"
WHAT = {"kubernetes": "pod deleted", "nomad": "allocation stopped"}
SETTLED_S = 2.0
"""Seconds of answers after the outage."""


def deploy_on(lab: Lab, engine: str) -> None:
    """Stop the services container, if it runs, and deploy the services on an engine."""
    admin = lab.host(CARRIER)
    admin.run("sms", "-q", "stop", timeout=LIMIT_S, ok=(0, 3))
    admin.run("sms", "-q", "deploy", "--engine", engine, timeout=LIMIT_S)


def stop_on(admin: Host) -> None:
    """Stop the services on their engine."""
    admin.run("sms", "-q", "deploy", "stop", timeout=LIMIT_S)


def outages(bed: Bed, runs: int, address: str, work: Callable[[], None]) -> Samples:
    """Return the outages of the controller at an address, while ``work`` is done, so many times."""
    node, seconds = bed.lab.host("node1"), Samples()
    for _ in range(runs):
        wait_idle(node, len(bed.lab.nodes))
        with watching(node, bed.lab.host("outside"), address) as seen:
            time.sleep(0.5)
            work()
            wait_for("a controller", lambda: "up" if answers(node) else "")
            time.sleep(SETTLED_S)
        seconds.append(seen.away["slurmctld"])
    return seconds


def on_engine(bed: Bed, engine: str, runs: int) -> Samples:
    """Deploy the services, delete the controller several times, stop them."""
    if engine == "kubernetes":
        load_image(bed.lab)
    else:
        release_nodes(bed.lab)
    deploy_on(bed.lab, engine)
    node = bed.lab.host("node1")

    def delete() -> None:
        delete_controller(bed.carrier, engine)
        wait_for("the end of the controller", lambda: "" if answers(node) else "down")

    try:
        return outages(bed, runs, bed.lab.layout.engine_addresses[engine], delete)
    finally:
        stop_on(bed.carrier)


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Measure at each place in turn, because a move takes longer than an outage; a node probes every 10 ms."""
    with ExitStack() as stack:
        bed = stack.enter_context(open_bed(rig.progress, LAB, engines=ENGINES))

        def restart() -> None:
            bed.carrier.run("sms", "-q", "restart", "slurmctld", timeout=120)

        def stop_and_start() -> None:
            bed.stop()
            bed.start()

        container = CONTAINER_ADDRESSES[PROVISIONING]
        with rig.progress.step("measure") as step, bed.running():
            step.detail(RESTART)
            restarted = outages(bed, rig.runs, container, restart)
            step.detail(STOP_START)
            started = outages(bed, rig.runs, container, stop_and_start)
        # Nomad last: from then on it has the nodes' daemons.
        for engine in reversed(ENGINES):
            with rig.progress.step(f"measure {engine}"):
                own = on_engine(bed, engine, rig.runs)
            ratio = round(own.median / restarted.median, 2)
            facts: dict[str, Any] = {"restart": restarted.median, "restart_ratio": ratio}
            yield result(f"engines/away, {WHAT[engine]}", own, STOP_START, started, ratio_below=2, **facts)
