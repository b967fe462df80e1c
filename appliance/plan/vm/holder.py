"""Who has the provisioning VM's disks: never two machines on one state, never a new state beside an old one. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.errors import Refused


@dataclass(frozen=True)
class Holder:
    """Who has the newest disks; ``generation`` grows each time they go to another host."""

    host: str
    generation: int

    def text(self) -> bytes:
        """As it is written down."""
        return json.dumps({"holder": self.host, "generation": self.generation}).encode() + b"\n"


@dataclass(frozen=True)
class HostView:
    """What an admin host says.

    Attributes:
        reachable: it answered.
        running: the VM runs there.
        holder: its record of who has the disks.
    """

    name: str
    reachable: bool = True
    running: bool = False
    holder: Holder | None = None


def read_holder(data: bytes | None) -> Holder | None:
    """A record; None where there is none, or it cannot be read."""
    try:
        said = json.loads(data or b"")
        return Holder(str(said["holder"]), int(said["generation"]))
    except (ValueError, KeyError, TypeError):
        return None


def newest_holder(views: Sequence[HostView]) -> Holder | None:
    """The record that counts, of all that were found."""
    return max((view.holder for view in views if view.holder), key=lambda holder: holder.generation, default=None)


def has_disks(here: str, views: Sequence[HostView]) -> bool:
    """Whether ``here`` has the disks and no machine uses them, on any host that answers."""
    newest = newest_holder(views)
    return newest is not None and newest.host == here and not any(view.running for view in views)


def check_disks_here(here: str, views: Sequence[HostView]) -> None:
    """Refuse where the VM runs on another host, or another host has its disks: the folder may be a shared one."""
    _refuse_running(here, views)
    newest = newest_holder(views)
    if any(view.running for view in views) or newest is None or newest.host == here:
        return
    raise Refused(f"the VM's disks are on {newest.host}", hint=f"say `--host {newest.host}`")


def _refuse_running(here: str, views: Sequence[HostView]) -> None:
    for view in views:
        if view.running and view.name != here:
            raise Refused(
                f"the VM runs on {view.name} already",
                hint=f"`sms vm migrate {here}` moves it; `sms vm stop --host {view.name}` stops it",
            )


def may_start(here: str, views: Sequence[HostView], *, shared: bool = False, force: bool = False) -> Holder:
    """The record to write down before the VM starts on ``here``.

    Args:
        views: of every admin host, ``here`` among them.
        shared: ``here`` sees the disks of the one that has them.
        force: start although hosts that cannot be asked may have newer disks, or the one that had them is lost.

    Raises:
        Refused: it runs elsewhere, or its disks are elsewhere.
    """
    _refuse_running(here, views)
    others = [view for view in views if view.name != here]
    newest = newest_holder(views)
    silent = [view.name for view in views if not view.reachable]
    if newest is None:
        if silent and not force:
            raise Refused(
                f"nobody knows where the VM's disks are, and {', '.join(silent)} cannot be asked",
                hint="make them reachable; `--force` begins with empty disks here",
            )
        return Holder(here, 2 if silent else 1)
    rivals = {view.holder.host for view in views if view.holder and view.holder.generation == newest.generation}
    if len(rivals) > 1 and not force:
        raise Refused(
            f"{' and '.join(sorted(rivals))} both hold that they have the VM's disks",
            hint="`sms vm start --force` on the one that has the right ones",
        )
    if newest.host == here and len(rivals) == 1:
        # The first generation has never been anywhere else.
        if not silent or newest.generation == 1:
            return newest
        if not force:
            raise Refused(
                f"the VM's disks have been on more than one host, and {', '.join(silent)} cannot be asked: "
                "it may have newer ones",
                hint=f"make it reachable; `--force` starts with the disks of {here}",
            )
    elsewhere = next((view for view in others if view.name == newest.host), None)
    gone = elsewhere is None or not elsewhere.reachable
    if (shared and not gone) or force:
        return Holder(here, newest.generation + 1)
    if gone:
        raise Refused(
            f"the VM's disks are on {newest.host}, which cannot be asked",
            hint="if it is off for good, `--force` goes on with what is here, though it may be old",
        )
    raise Refused(
        f"the VM's disks are on {newest.host}",
        hint=f"`sms vm start --host {newest.host}`, or `sms vm migrate {here}` to bring them over",
    )
