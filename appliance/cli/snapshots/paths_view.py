"""Text output of differences between snapshots, and of restored paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from appliance.text import printable
from appliance.units import format_size

if TYPE_CHECKING:
    from appliance.operations.snapshots.paths import Diff, PathResult, RestoredPaths, Row

SIGNS = {"added": "+", "changed": "~", "gone": "-"}


def diff_line(row: Row) -> str:
    """Format one difference: its sign, its path, its description."""
    slash = "/" if row.get("kind") == "folder" and row["path"] != "/" else ""
    text = ", ".join(_changed(row) if row["change"] == "changed" else _one_sided(row))
    return f"{SIGNS[row['change']]} {printable(row['path'])}{slash}  {text}"


def _one_sided(row: Row) -> Iterator[str]:
    """Describe what exists on one side only."""
    if row["kind"] == "image":
        yield "removed from the image" if row["image"] == "removed" else "the image's version is visible again"
        return
    yield from _what_it_is(row)
    if row.get("image") == "removed":
        yield "removed from the image too, if it has one"
    elif row.get("image") == "hides":
        yield "hides the image's folder, if it has one"


def _what_it_is(row: Row) -> Iterator[str]:
    yield row["kind"]
    count = row.get("size", row.get("was_size", row.get("bytes")))
    if "entries" in row:
        yield f"{row['entries']} {'entry' if row['entries'] == 1 else 'entries'}"
    if count is not None:
        yield format_size(count)


def _changed(row: Row) -> Iterator[str]:
    for word in row.get("what", ()):
        if word == "size":
            yield f"size {format_size(row['was_size'])} -> {format_size(row['size'])}"
        elif word in ("mode", "owner"):
            yield f"{word} {row[f'was_{word}']} -> {row[word]}"
        elif word == "type":
            yield f"{row['was']} -> {row['kind']}"
        else:
            yield "attributes" if word == "xattr" else word
    image = row.get("image")
    if image in ("hides", "shows") and row["kind"] == "folder" and "the image's again" not in row.get("what", ()):
        yield f"{image} the image's folder"


def diff_summary(found: Diff) -> str:
    """Format the last line."""
    names = [f"snapshot {one}" if one is not None else f"now on {found.host}" for one in (found.before, found.after)]
    if not found.lines:
        return f"{names[0]} and {names[1]}: no differences"
    counts = ", ".join(f"{found.counts[word]} {word}" for word in SIGNS)
    more = f"; {found.shown} of {found.lines} lines are shown, --all shows all" if found.shown < found.lines else ""
    return f"{names[0]} -> {names[1]}: {counts}{more}"


def restored_paths_lines(cluster: str, done: RestoredPaths, *, dry_run: bool = False) -> Iterator[str]:
    """Describe restored or extracted paths, and how to undo a restore."""
    what = f"snapshot {done.snapshot} of {cluster}"
    for note in done.notes:
        yield f"note: {printable(note)}"
    if not done.changed and not dry_run:
        yield f"{', '.join(printable(one['path']) for one in done.paths)}: as in {what} already, nothing was changed"
        return
    for one in done.paths:
        yield f"{printable(one['path'])}: {_path_result(one, dry_run)}"
    if done.folder:
        yield f"{'would be' if dry_run else f'{done.seconds:.1f} s:'} extracted from {what} into {done.folder}"
        return
    if done.other_image:
        yield "note: the snapshot was taken under another image than the next start uses"
    yield f"restored into the overlay on {done.host} from {what} ({done.seconds:.1f} s)"
    yield f"the previous overlay is snapshot {done.kept}; to undo: sms overlay restore {done.kept}"


def _path_result(one: PathResult, dry_run: bool) -> str:
    if one["kind"] == "image":
        return "the image's, as in the snapshot"
    if one["kind"] == "removed":
        return "removed from the image, as in the snapshot"
    if dry_run:
        return str(one["kind"])
    replaced = f"; {one['removed']} replaced" if one["removed"] else ""
    return f"{one['entries']} {'entry' if one['entries'] == 1 else 'entries'}, {format_size(one['bytes'])}{replaced}"
