"""``sms journal``: the recorded events of all verbs, on every admin host that answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.errors import SmsError
from appliance.operations.context import Cluster
from appliance.operations.env import Event
from appliance.operations.history import read_history
from appliance.units import read_time


@dataclass(frozen=True)
class Journal:
    """Lines of all hosts, the oldest first; ``silent`` maps hosts that could not be read to the error."""

    lines: list[Event]
    silent: dict[str, str] = field(default_factory=dict)


def read_journal(cluster: Cluster, only: str | None, *, last: int) -> Journal:
    """Return the last lines of the journals.

    Args:
        only: read the journal of this host; of all hosts when not given.
        last: number of lines; 0 for all.

    Raises:
        ConfigError: no admin host has that name.
        SmsError: no journal can be read.
    """
    names = [only] if only else [host.name for host in cluster.site.admin_hosts]
    silent: dict[str, str] = {}

    def read(name: str) -> list[Event]:
        host = cluster.host(name)
        try:
            return read_history(cluster, host)
        except SmsError as error:
            if only:
                raise
            silent[name] = error.message
            return []

    with cluster.env.pool(len(names)) as pool:
        lines = [line for found in pool.map(read, names) for line in found]
    lines.sort(key=_time_of)
    if len(silent) == len(names):
        raise SmsError("; ".join(silent.values()), hint="sms doctor --host NAME")
    return Journal(lines[-last:] if last else lines, silent)


def _time_of(line: Event) -> float:
    return read_time(line.get("at"))
