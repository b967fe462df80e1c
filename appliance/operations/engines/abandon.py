"""An engine whose state is lost: what keeps it from starting the services again when it comes back."""

from __future__ import annotations

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.engines.bundles import find_engine, render_bundle
from appliance.operations.engines.nomad_owner import NomadOwner
from appliance.plan.migration.state import moved_paths
from appliance.plan.services.controllers import NOMAD
from appliance.progress import Progress


def abandon_engine(cluster: Cluster, host: Host, name: str, progress: Progress) -> None:
    """Stop the services on an engine as far as it answers, and let no task start with the state that is left there.

    What cannot be done is reported, with what to do when the engine comes back.

    Raises:
        Refused: a task of it still runs.
    """
    stopped = _stop_all(cluster, host, name, progress)
    locked = name == NOMAD and _lock_state(cluster, host, progress)
    if stopped:
        return
    if locked:
        progress.report(f"note: when {name} answers again, `sms deploy stop` ends what it starts without state")
    else:
        progress.report(
            f"warning: when {name} comes back, it starts the services with a state of its own: "
            "switch on its servers alone first, then `sms deploy stop`, then its other machines"
        )


def _stop_all(cluster: Cluster, host: Host, name: str, progress: Progress) -> bool:
    bundle, engine = render_bundle(cluster, name), find_engine(cluster, host, name)
    with progress.step(f"stop the services on {name}") as step:
        try:
            for item in bundle.items:
                if item.kind == "service":
                    engine.stop(item)
        except SmsError as error:
            step.detail(f"not possible: {error.message}")
            return False
    return True


def _lock_state(cluster: Cluster, host: Host, progress: Progress) -> bool:
    """Lock the folders of Nomad's client, if it is reached; return whether they are locked."""
    owner = NomadOwner(cluster, host, moved_paths(cluster.services), progress)
    with progress.step(f"lock the state of {owner.where}") as step:
        try:
            owner.client.run("true")
        except SmsError as error:
            step.detail(f"not possible: {error.message}")
            return False
        owner.abandon()
    return True
