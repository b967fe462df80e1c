"""Accounts that a change or an overlay lacks: a user with jobs, many at once, or all users of a reservation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from appliance.errors import ConfigError
from appliance.operations.context import Cluster
from appliance.operations.overlay.overlay import seeds_for
from appliance.plan.nodes.accounts import (
    GROUP,
    MOST_REMOVED,
    PASSWD,
    compare_accounts,
    read_ids,
    too_many_removed,
    without_own,
)
from appliance.plan.nodes.files import last_pulled
from appliance.plan.services.admission import read_groups
from appliance.plan.services.effect import Fault, Present
from appliance.text import one_line

LOST_WAYS = "`sms overlay restore N --path /etc/passwd` and `--path /etc/group`, of a snapshot that has them"


def find_lost_accounts(
    cluster: Cluster,
    before: Mapping[str, str | None],
    after: Mapping[str, bytes],
    present: Present | None = None,
    most_removed: float = MOST_REMOVED,
) -> Iterator[Fault]:
    """Yield that too many users or groups would go, or users with jobs, or all users of a reservation.

    Args:
        present: what the controller has, if that is known.
        most_removed: percentage of the users or groups that may go.

    Raises:
        ConfigError: lines of the accounts are invalid.
    """
    if not {PASSWD, GROUP} & before.keys() & after.keys():
        return
    new = {path: after[path].decode(errors="surrogateescape") for path in (PASSWD, GROUP) if path in after}
    old = {path: new[path] if before.get(path) is None else str(before[path]) for path in new}
    own = {service.user for service in cluster.services}
    old = {path: without_own(text, own) for path, text in old.items()}
    changes, problems = compare_accounts(old, new)
    if problems:
        raise ConfigError(problems=problems)
    if refusal := too_many_removed(changes, most_removed):
        removed = changes[PASSWD].removed if PASSWD in changes else ()
        names = f": {one_line(', '.join(removed), 200)}" if removed else ""
        yield Fault(f"{refusal}{names}", "is the new file complete?")
    present = present or Present()
    ids = [read_ids(side.get(PASSWD, "")) for side in (old, new)]
    groups = [read_groups(side.get(PASSWD, ""), side.get(GROUP, "")) for side in (old, new)]
    gone = ids[0].keys() - ids[1].keys()
    if lost := sorted(one.name for one in present.reservations if one.loses_all(gone, groups[0], groups[1])):
        yield Fault(
            f"reservations lose all of their users ({len(lost)}): {one_line(', '.join(lost), 200)}; slurmctld deletes "
            "them when it reads its files again, and holds their jobs",
            "`scontrol update ReservationName=NAME Users=OTHERS` first, or delete them",
        )
    if lost := sorted(name for name in present.users & ids[0].keys() if ids[0][name] != ids[1].get(name)):
        yield Fault(
            f"users with jobs are removed, or get another id ({len(lost)}): {one_line(', '.join(lost), 200)}; their "
            "waiting jobs never start",
            "remove a user when the jobs have ended: `squeue --user NAME`",
        )


def find_missing_accounts(cluster: Cluster, read: Callable[[str], bytes], present: Present) -> Iterator[Fault]:
    """Yield which accounts an overlay lacks of those that were written there last: the site's, or the VM's.

    Args:
        read: returns a file of the overlay; empty if it is not there. Only for one that has the site's files.
        present: what the controller had when it stopped.
    """
    own = {service.user for service in cluster.services}
    seeded = {seed.path: seed.data for seed in seeds_for(cluster)}
    before, after = dict[str, str | None](), dict[str, bytes]()
    for path in (PASSWD, GROUP):
        found = seeded.get(path, b""), read(last_pulled(path)), read(path)
        site, pulled, here = (data.decode(errors="surrogateescape") for data in found)
        here = without_own(here, own)
        if pulled and site and compare_accounts({path: site}, {path: here})[0][path].none:
            continue  # applied after the last pull
        if pulled or site:
            before[path], after[path] = pulled or site, here.encode(errors="surrogateescape")
    try:
        faults = [*find_lost_accounts(cluster, before, after, present)]
    except ConfigError as error:
        faults = [Fault(error.message, error.hint)]
    for one in faults:
        yield replace(one, hint=LOST_WAYS)
