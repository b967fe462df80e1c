"""Whether a migration is possible and what it would do, from what was found on both hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.catalog import Service
from appliance.errors import Refused
from appliance.plan.migration.move import (
    MUNGE_LIMIT_S,
    SKEW_LIMIT_S,
    SKEW_WARN_S,
    ServiceOutage,
    predict_outages,
    predict_parts,
)

RESERVE = 16 << 20
"""Free bytes required in addition to the copy (agent/migration_target.py)."""
START_ROOM = 16 << 20
"""Free bytes inside an overlay with which services start."""
RECENT = 5
"""Number of previous migrations that a prediction uses."""


@dataclass(frozen=True)
class HostFacts:
    """What was found on one host.

    ``lacks``: what it lacks for a migration. ``offset_s``: seconds that its clock is ahead of the local one.
    """

    name: str
    lacks: Sequence[str]
    offset_s: float
    apptainer: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """What was found on both hosts. Sizes in bytes.

    ``address_problems``: networks where the target does not see the services container. ``outdated``: the site file
    has changed since the start. ``measured``: the parts of previous migrations, in seconds. ``mirrored``: the source's
    overlay is on a mirror. ``mirror``: folders of the mirror that the target gets, empty without one;
    ``mirror_problems``: why it cannot. ``room_bytes``: free inside the source's overlay; None if that is not known.
    ``by_hand``: what the start of Slurm's controller drops of changes by ``scontrol update``.
    """

    source: HostFacts
    target: HostFacts
    image: str
    sha256: str
    generation: int
    overlay_folder: str
    shared: bool
    used_bytes: int
    free_bytes: int
    address_problems: Sequence[str]
    outdated: bool
    measured: Sequence[Mapping[str, float]]
    mirrored: bool
    mirror: tuple[str, ...] = ()
    mirror_problems: Sequence[str] = ()
    room_bytes: int | None = None
    by_hand: Sequence[str] = ()

    @property
    def skew_s(self) -> float:
        """Seconds by which the target's clock is ahead."""
        return self.target.offset_s - self.source.offset_s


@dataclass(frozen=True)
class Plan:
    """What a migration would do. Sizes in bytes; ``skew_s``: seconds by which the target's clock is ahead.

    ``mirrored``: the source's overlay is on a mirror. ``mirror``: folders of the mirror that the target gets; empty
    without one.
    """

    source: str
    target: str
    image: str
    sha256: str
    generation: int
    shared: bool
    used_bytes: int
    free_bytes: int
    skew_s: float
    parts: dict[str, float]
    measured: int
    away: list[ServiceOutage]
    warnings: list[str] = field(default_factory=list)
    mirrored: bool = False
    mirror: tuple[str, ...] = ()

    @property
    def over(self) -> list[ServiceOutage]:
        """Services whose predicted outage exceeds their budget."""
        return [one for one in self.away if one.over]


def plan_migration(facts: Facts, services: Sequence[Service], *, force: bool) -> Plan:
    """Return the plan of a migration.

    Args:
        force: allow an older version of Apptainer on the target, and what is only warned of then.

    Raises:
        Refused: with all problems.
    """
    source, target = facts.source.name, facts.target.name
    problems, warnings = judge(facts, force=force)
    if problems:
        hint = f"`sms doctor --host {target}` shows how to fix it; `sms host prepare {target}` fixes most"
        if not judge(facts, force=True)[0]:
            hint += "\n  --force: move nevertheless"
        raise Refused(f"cannot migrate from {source} to {target}:\n  " + "\n  ".join(problems), hint=hint)
    parts = predict_parts(facts.measured)
    return Plan(
        source,
        target,
        facts.image,
        facts.sha256,
        facts.generation,
        facts.shared,
        facts.used_bytes,
        facts.free_bytes,
        round(facts.skew_s, 3),
        parts,
        len(facts.measured),
        predict_outages(services, parts, shared=facts.shared),
        warnings,
        facts.mirrored,
        facts.mirror,
    )


def judge(facts: Facts, *, force: bool) -> tuple[list[str], list[str]]:
    """Return what prevents a migration, and warnings."""
    source, target, skew = facts.source, facts.target, facts.skew_s
    problems, warnings = [*source.lacks, *target.lacks], []
    if abs(skew) > SKEW_LIMIT_S:
        problems.append(
            f"the clock of {target.name} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} that of "
            f"{source.name}: munge rejects messages at {MUNGE_LIMIT_S} s (munge(7)), and nodes may be off as well"
        )
    elif abs(skew) > SKEW_WARN_S:
        warnings.append(f"the clocks of {source.name} and {target.name} are {abs(skew):.1f} s apart")
    if source.apptainer != target.apptainer:
        here, there = (".".join(map(str, one.apptainer)) for one in (source, target))
        message = f"{source.name} has Apptainer {here}, {target.name} {there}"
        (warnings if force or source.apptainer < target.apptainer else problems).append(message)
    if not problems:
        problems += facts.address_problems
    if not (facts.shared or facts.mirror) and facts.free_bytes < facts.used_bytes + RESERVE:
        problems.append(
            f"the file system of {facts.overlay_folder} on {target.name} has "
            f"{facts.free_bytes >> 20} MiB free, {facts.used_bytes + RESERVE >> 20} are needed"
        )
    if facts.shared and facts.mirrored:
        problems.append(
            f"both share an overlay that is on a mirror, which one host at a time can open: `sms stop --host "
            f"{source.name}`, then `sms start --host {target.name}`"
        )
    problems += facts.mirror_problems
    if room := room_problem(facts.room_bytes):
        (warnings if force else problems).append(room)
    for one in facts.by_hand:
        text = f"{one} on {target.name}: write it into the site file, or repeat it after the move"
        (warnings if force else problems).append(text)
    if facts.outdated:
        warnings.append("the site file has changed since the start; a migration does not apply it; `sms apply` does")
    return problems, warnings


def room_problem(room_bytes: int | None) -> str:
    """Return why services may not start again from an overlay with this much room; empty if there is enough.

    Where they run already, they go on: a full overlay shows only at the next start.
    """
    if room_bytes is None or room_bytes >= START_ROOM:
        return ""
    return (
        f"the overlay has {room_bytes >> 20} MiB free, and services may need {START_ROOM >> 20} to start, such as "
        "MariaDB for its temporary tablespace: `sms overlay grow +1G` makes it larger while it runs"
    )


def recent_parts(lines: Sequence[Mapping[str, Any]], *, shared: bool) -> list[dict[str, float]]:
    """Return the parts of the last migrations of this kind from the histories; each is in that of both hosts."""
    kind = {
        float(line["at"]): {name: float(took) for name, took in line["parts"].items() if isinstance(took, int | float)}
        for line in lines
        if line.get("event") == "moved"
        and line.get("host") == line.get("to")
        and line.get("shared") == shared
        and isinstance(line.get("parts"), dict)
        and isinstance(line.get("at"), int | float)
    }
    return [kind[at] for at in sorted(kind)[-RECENT:]]
