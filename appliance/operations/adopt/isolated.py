"""Starts the services isolated on the target, with the controller held until its state is complete."""

from __future__ import annotations

from appliance.catalog import Service
from appliance.operations.context import Cluster
from appliance.operations.engines.container_owner import ContainerOwner
from appliance.operations.migration.agents import LONG_S
from appliance.operations.migration.start import launch, probe_isolated
from appliance.operations.migration.state import Migration
from appliance.plan.adopt.adoption import HOLD, hold_argv, waits_for


def find_controller(cluster: Cluster) -> Service:
    """Return the controller, which the checks of an adoption have found."""
    controller = cluster.find_role("controller")
    assert controller
    return controller


def start_held(cluster: Cluster, owner: ContainerOwner, migration: Migration) -> float:
    """Put the prepared overlay in place, and start the instance with the controller held; return the seconds it took.

    The accounting database is complete then, and the controller's state is not: it must not start before it is.

    Raises:
        SmsError: one of the other services does not answer.
    """
    began, controller, target = cluster.env.clock.monotonic(), find_controller(cluster), migration.target
    with migration.cluster.env.progress.step(f"start isolated on {target.name}, without {controller.name}") as step:
        command = owner.inside(hold_argv(controller, owner.place(HOLD)), copy=True)
        command.run(timeout=60)
        target.send("place")
        target.receive("placed", patience_s=LONG_S)
        launch(migration)
        others = [one.name for one in cluster.services if not waits_for(cluster.services, one, controller)]
        probe_isolated(migration, others)
        step.detail(f"{len(migration.result.services)} services answer")
    return cluster.env.clock.monotonic() - began


def wait_for_held(cluster: Cluster, migration: Migration) -> None:
    """Wait until the controller answers, which is not held any more, and what needs it.

    Raises:
        SmsError: one of them does not.
    """
    began, controller = cluster.env.clock.monotonic(), find_controller(cluster)
    with migration.cluster.env.progress.step(f"start {controller.name} on {migration.target.name}"):
        probe_isolated(
            migration, [one.name for one in cluster.services if waits_for(cluster.services, one, controller)]
        )
        migration.result.measured("start", cluster.env.clock.monotonic() - began)
