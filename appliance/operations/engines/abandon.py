"""An engine whose state is lost: what keeps it from starting the services again when it comes back."""

from __future__ import annotations

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.engines.bundles import find_engine, render_bundle
from appliance.operations.engines.clients import find_nomad
from appliance.operations.engines.nomad_owner import NomadOwner
from appliance.plan.migration.state import moved_paths
from appliance.plan.services.controllers import NOMAD
from appliance.tools.nomad import DEFAULT


def refuse_running(cluster: Cluster, host: Host, name: str) -> None:
    """Check that an engine that the user has stopped does not answer, or runs no service.

    Raises:
        Refused: it runs one, or has answered something else.
        ConfigError: it was not reached, because its program has a wrong configuration, or none.
    """
    bundle, engine = render_bundle(cluster, name), find_engine(cluster, host, name)
    try:
        states = engine.states(bundle)
    except Unreachable as error:
        if name == NOMAD and DEFAULT in error.message and not find_nomad(cluster.site, host).is_addressed():
            raise ConfigError(
                f"only the agent of {host.name} was asked whether Nomad runs the services: {error.message}",
                hint="`engines.nomad.api` of the site file, or NOMAD_ADDR, names the servers; run this again with it",
            ) from error
        return
    except (ConfigError, Refused):
        raise
    except SmsError as error:
        raise Refused(
            f"{name} answers, and it is not known what it runs: {error.message}",
            hint="`sms deploy status` shows the same error; stop the engine, or correct that",
        ) from error
    running = [one.name for state in states if state.kind == "service" for one in state.instances]
    if running:
        raise Refused(
            f"{name} answers and runs {', '.join(running)}",
            hint="`sms migrate --to container` moves the services with their state; `sms deploy stop` stops them there",
        )


def abandon_engine(cluster: Cluster, host: Host, name: str) -> None:
    """Stop the services on an engine as far as it answers, and let no task start with the state that is left there.

    What cannot be done is reported, with what to do when the engine comes back.

    Raises:
        Refused: a task of it still runs.
    """
    stopped = _stop_all(cluster, host, name)
    locked = name == NOMAD and _lock_state(cluster, host)
    if stopped:
        return
    if locked:
        cluster.env.progress.report(
            f"note: when {name} answers again, `sms deploy stop` ends what it starts without state"
        )
    else:
        cluster.env.progress.report(
            f"warning: when {name} comes back, it starts the services with a state of its own: "
            "switch on its servers alone first, then `sms deploy stop`, then its other machines"
        )


def _stop_all(cluster: Cluster, host: Host, name: str) -> bool:
    bundle, engine = render_bundle(cluster, name), find_engine(cluster, host, name)
    with cluster.env.progress.step(f"stop the services on {name}") as step:
        try:
            for item in bundle.items:
                if item.kind == "service":
                    engine.stop(item)
        except SmsError as error:
            step.detail(f"not possible: {error.message}")
            return False
    return True


def _lock_state(cluster: Cluster, host: Host) -> bool:
    """Lock the folders of Nomad's client, if it is reached; return whether they are locked."""
    owner = NomadOwner(cluster, host, moved_paths(cluster.services))
    with cluster.env.progress.step(f"lock the state of {owner.where}") as step:
        try:
            owner.client.run("true")
        except SmsError as error:
            step.detail(f"not possible: {error.message}")
            return False
        owner.abandon()
    return True
