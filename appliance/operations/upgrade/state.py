"""Options and result of an upgrade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from appliance.plan.migration.move import ServiceOutage
from appliance.plan.upgrade.upgrade import Side


@dataclass(frozen=True)
class UpgradeOptions:
    """Options of an upgrade.

    Attributes:
        image: a file on this machine; None to build one.
        build: builds the image and returns its path.
        undo: return to the image before the last upgrade.
        with_snapshot: with ``undo``, restore the state before the upgrade as well.
        force: even if jobs are lost, by a changed site file or with ``with_snapshot``.
    """

    image: Path | None = None
    build: Callable[[], Path] | None = None
    rehearsal: bool = True
    nodes: int = 2
    user: str = "root"
    wait_s: float = 60
    undo: bool = False
    with_snapshot: bool = False
    force: bool = False


@dataclass
class UpgradeResult:
    """Result of an upgrade. ``same``: the image already runs, nothing was done. Times in seconds.

    ``predicted_s``, ``outage_s``: the longest outage of a service. ``parts``: of the outage, or of the switch.
    ``stopped``: why the container was stopped and started again; empty if a second instance has taken over. Then
    ``away`` has the predicted outages, ``outage`` the measured ones by service, ``exceeded`` a message about each that
    was longer.
    """

    host: str
    before: Side
    after: Side
    same: bool = False
    resumed: bool = False
    rehearsed: bool = False
    snapshot: int = 0
    kept: int = 0
    jobs: str = ""
    predicted_s: float = 0.0
    outage_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    away: list[ServiceOutage] = field(default_factory=list)
    outage: dict[str, float] = field(default_factory=dict)
    exceeded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
