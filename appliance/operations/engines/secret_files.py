"""Secret files of the site on an engine."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.engines.deploy import Bundle
from appliance.errors import Refused
from appliance.operations.context import Cluster, read_given
from appliance.operations.engines.engine import Engine, SecretState
from appliance.plan.overlay.seed import SECRET_PLACES
from appliance.progress import Progress


def read_secret(cluster: Cluster, name: str) -> bytes:
    """Return a secret file of the site.

    Raises:
        Refused: the site file names none.
    """
    path = getattr(cluster.site.secrets, name)
    if path is None:
        where = f"; a services container that has run has one in {SECRET_PLACES[name][0]}"
        raise Refused(f"the site file has no `secrets.{name}`, which the engine needs", hint=f"set it{where}")
    return read_given([(name, path)])[name]


def compare_secrets(cluster: Cluster, bundle: Bundle, engine: Engine) -> list[str]:
    """Return the secrets on the engine that are not sms's own, and are not those of the site.

    Raises:
        Refused: one is neither on the engine nor in the site file.
    """
    different = []
    for one in engine.secrets(bundle):
        given = getattr(cluster.site.secrets, one.name) is not None
        value = read_secret(cluster, one.name) if given or one.value is None else one.value
        if not one.own and value != one.value:
            different.append(one.where)
    return different


def report_drift(different: Sequence[str], progress: Progress) -> None:
    """Report secrets that are not those of the site."""
    for where in different:
        progress.report(f"warning: {where} is not the secret of the site file, and sms did not create it: it stays")


def new_secrets(cluster: Cluster, bundle: Bundle, engine: Engine) -> list[tuple[SecretState, bytes]]:
    """Return the secrets to write: those that are missing, and those of sms that are not those of the site any more."""
    found = []
    for one in engine.secrets(bundle):
        if one.value is None or (one.own and getattr(cluster.site.secrets, one.name) is not None):
            value = read_secret(cluster, one.name)
            if value != one.value:
                found.append((one, value))
    return found
