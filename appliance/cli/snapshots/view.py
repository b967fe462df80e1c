"""Text output of snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from appliance.text import printable
from appliance.units import YEAR_S, format_age, format_size, format_time, format_uptime

if TYPE_CHECKING:
    from appliance.operations.snapshots.list import Listing, Snapshot, Verified
    from appliance.operations.snapshots.restore import Restored

WIDTH = 100
"""Columns of the widest line of a list."""
HOST_WIDTH = 10
FOUND_BY = {
    "trace": "changes by block trace",
    "inodes": "changes by inodes",
    "all": "everything compared",
}
"""How changes since the first reading were found during the freeze; other values are not shown."""


def day(stamp: float, now: float) -> str:
    """Format date and time to the minute; with the year only if it may be another one."""
    text = format_time(stamp)[:16]
    return text[5:] if abs(now - stamp) < YEAR_S * 0.8 else text


def waited(snapshot: Snapshot) -> str:
    """Format how long writers waited."""
    return f"{snapshot['frozen_ms']:.0f} ms" if snapshot["running"] else "-"


def state(snapshot: Snapshot) -> str:
    """Return the result of its last verification."""
    ok = snapshot["health"].get("ok")
    return "damaged" if ok is False else "verified" if ok else "unchecked"


def checks(snapshot: Snapshot) -> str:
    """Format the checks it passed before it was committed."""
    results = snapshot["checks"]
    e2fsck = results.get("e2fsck", "not recorded")
    parts = ["e2fsck" if e2fsck == "clean" else f"e2fsck ({e2fsck})"]
    if "state_files" in results:
        parts.append(f"{results['state_files']} state file{'s' * (results['state_files'] != 1)}")
    if results.get("state_unread"):
        parts[-1] += " (the largest not read)"
    return ", ".join(parts)


def taken_line(cluster: str, snapshot: Snapshot) -> str:
    """Format the last line of ``sms overlay snapshot``."""
    how = "; ".join(part for part in (snapshot["method"], FOUND_BY.get(snapshot["found_by"], "")) if part)
    wait = f"writers waited {waited(snapshot)}" if snapshot["running"] else "not in use"
    return (
        f"snapshot {snapshot['number']} of {cluster}: {format_size(snapshot['used_bytes'])} used, "
        f"{format_size(snapshot['new_bytes'])} new, {wait} ({how}), checked: {checks(snapshot)}"
    )


TITLES = ("no.", "taken", "age", "method", "used", "new", "waited", "host", "state", "reason")
RIGHT = (0, 2, 4, 5, 6)
STYLES = {"verified": "green", "damaged": "red", "unchecked": "yellow"}


def list_lines(listing: Listing, now: float) -> Iterator[str]:
    """Format the table of ``sms overlay list`` and its totals, in rich markup; no line is longer than WIDTH."""
    rows = [tuple(printable(cell) for cell in _row(one, now)) for one in listing.snapshots]
    from appliance.operations.snapshots.list import foreign_note

    broken = [(number, printable(why)) for number, why in sorted(listing.broken.items())]
    if rows:
        widths = [max(len(row[at]) for row in (TITLES, *rows)) for at in range(len(TITLES) - 1)]
        room = max(6, WIDTH - sum(widths) - 2 * len(widths))
        yield f"[bold]{escape(_line(TITLES, widths, room))}[/]"
        for row in rows:
            yield _colour(_line(row, widths, room), row[8])
    for number, why in broken:
        yield f"[red]{number:>6}  damaged: {escape(why)}[/]"
    count = len(rows) + len(broken)
    yield (
        f"{count} snapshot{'s' * (count != 1)} on {escape(listing.host)}, {format_size(listing.stored_bytes)} in all, "
        f"room for {format_size(listing.free_bytes)} more"
    )
    if note := foreign_note(listing.foreign, listing.host):
        yield f"[yellow]{escape(printable(note))}[/]"


def _row(one: Snapshot, now: float) -> tuple[str, ...]:
    return (
        str(one["number"]),
        day(one["taken"], now),
        format_age(now - one["taken"]),
        one["method"],
        format_size(one["used_bytes"]),
        format_size(one["new_bytes"]),
        waited(one),
        clip(one["host"], HOST_WIDTH),
        state(one),
        one.get("reason", ""),
    )


def clip(text: str, width: int) -> str:
    """Shorten text to ``width`` columns."""
    return text if len(text) <= width else text[: width - 1] + "…"


def _line(row: Sequence[str], widths: Sequence[int], room: int) -> str:
    cells = [
        f"{cell:>{width}}" if at in RIGHT else f"{cell:<{width}}"
        for at, (cell, width) in enumerate(zip(row[:-1], widths, strict=True))
    ]
    return "  ".join([*cells, clip(row[-1], room)]).rstrip()


def _colour(line: str, word: str) -> str:
    before, _, after = line.partition(f"  {word}")
    return f"{escape(before)}  [{STYLES[word]}]{word}[/]{escape(after)}"


def show_lines(one: Snapshot, now: float) -> Iterator[str]:
    """Format a manifest, one line per field."""
    image = one["image"]
    ran = f"while in use; writers waited {waited(one)}" if one["running"] else "while stopped"
    found = f" ({FOUND_BY[one['found_by']]})" if one["found_by"] in FOUND_BY else ""
    facts: list[tuple[str, str]] = [
        ("snapshot", f"{one['number']} of {one['cluster']}, {one['uuid']}"),
        (
            "taken",
            f"{format_time(one['taken'])}, {format_uptime(max(0, int(now - one['taken'])))} ago, on {one['host']}",
        ),
        ("how", f"{one['method']}{found}, {ran}"),
        ("lease", f"generation {one['generation']}"),
        ("cluster UUID", one.get("cluster_uuid") or "-"),
        ("Slurm cluster", one["slurm_cluster"]),
        ("image", f"sha256:{image['sha256'][:16]} key {image['key'][:12]}" if image.get("key") else "not known"),
        (
            "size",
            f"{format_size(one['size'])}, {format_size(one['used_bytes'])} used, "
            f"{format_size(one['new_bytes'])} of it new",
        ),
        ("digests", f"sha256:{one['digests']}"),
        ("checked", checks(one)),
        ("state", _health(one)),
        ("reason", one["reason"] or "-"),
    ]
    if heads := one["checks"].get("heads"):
        facts.insert(-2, ("", f"valid headers: {', '.join(heads)}"))
    facts += [("note", note) for note in one["notes"]]
    facts += [("damage", damage) for damage in one["health"].get("damage", [])]
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        yield f"{name:<{width}}  {printable(text)}"


def _health(one: Snapshot) -> str:
    health = one["health"]
    at = f", checked {format_time(health['at'])}" if "at" in health else ""
    return state(one) + at


def verified_lines(found: list[Verified], cluster: str) -> Iterator[str]:
    """Format the results of a verification, in rich markup."""
    for one in found:
        if one.ok:
            yield f"snapshot {one.number} of {cluster}: [green]intact[/]"
        for damage in one.damage:
            yield f"snapshot {one.number} of {cluster}: [red]damaged[/]: {escape(printable(damage))}"


def restored_lines(cluster: str, done: Restored) -> Iterator[str]:
    """Describe what a restore did, and how to undo it."""
    what = f"snapshot {done.snapshot} of {cluster}"
    if done.kept and done.kept.same:
        yield f"the overlay on {done.host} is identical to {what}: nothing is changed"
        return
    yield f"{what} is restored to {done.target} on {done.host}: {format_size(done.size)} in {done.seconds:.1f} s"
    if done.other_image:
        yield "it was taken under another image: the next start seeds it for the current one"
    if done.kept and done.kept.snapshot is not None:
        back = done.kept.snapshot
        yield f"the previous overlay is snapshot {back}; to undo: sms overlay restore {back}"
    elif done.kept:
        yield f"the previous overlay is kept; to undo: mv {done.kept.path} {done.target}"
