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
        has_state: the state's disk lies there.
    """

    name: str
    reachable: bool = True
    running: bool = False
    holder: Holder | None = None
    has_state: bool = False


def read_holder(data: bytes | None) -> Holder | None:
    """A record; None where there is none, or it cannot be read."""
    try:
        said = json.loads(data or b"")
        return Holder(str(said["holder"]), int(said["generation"]))
    except (ValueError, KeyError, TypeError):
        return None


def may_start(here: str, views: Sequence[HostView], *, shared: bool = False, force: bool = False) -> Holder:
    """The record to write down before the VM starts on ``here``.

    Args:
        views: of every admin host, ``here`` among them.
        shared: ``here`` sees the disks of the one that has them.
        force: start although hosts that cannot be asked may have newer disks, or the one that had them is lost.

    Raises:
        Refused: it runs elsewhere, or its disks are elsewhere.
    """
    others = [view for view in views if view.name != here]
    for view in others:
        if view.running:
            raise Refused(
                f"the VM runs on {view.name} already",
                hint=f"`sms vm migrate {here}` moves it; `sms vm stop --host {view.name}` stops it",
            )
    known = [view.holder for view in views if view.holder]
    newest = max(known, key=lambda holder: holder.generation, default=None)
    silent = [view.name for view in views if not view.reachable]
    if newest is None:
        if silent and not force:
            raise Refused(
                f"nobody knows where the VM's disks are, and {', '.join(silent)} cannot be asked",
                hint="make them reachable; `--force` begins with empty disks here",
            )
        return Holder(here, 1)
    if newest.host == here:
        return newest
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
