"""What the verbs of snapshots print."""

from __future__ import annotations

import pytest

from appliance.cli.snapshots import view
from appliance.operations.snapshots.list import Listing, Verified
from appliance.operations.snapshots.restore import KeptOverlay, Restored
from appliance.units import format_age, format_size, format_time
from tests.unit.overlay.admin_host import NOW, manifest


def test_the_line_of_a_snapshot() -> None:
    assert view.taken_line("lab", manifest()) == (
        "snapshot 42 of lab: 48 MiB used, 1.3 MiB new, writers waited 31 ms (delta; changes by block trace), "
        "checked: e2fsck, 14 state files"
    )
    stopped = manifest(running=False, found_by="stopped", checks={"e2fsck": "repaired: its journal", "state_files": 1})
    assert view.taken_line("lab", stopped) == (
        "snapshot 42 of lab: 48 MiB used, 1.3 MiB new, not in use (delta), "
        "checked: e2fsck (repaired: its journal), 1 state file"
    )


def test_the_list_fits_its_width() -> None:
    rows = [
        manifest(1, taken=NOW - 400 * 86400, health={}),
        manifest(999_999, host="host-with-a-long-name.example.org", reason="before restore of [bold]999998[/] " * 5),
        manifest(7, used_bytes=123 << 30, new_bytes=0, method="reflink", frozen_ms=4999.6, taken=NOW + 3600),
        manifest(8, health={"ok": False, "at": 1.0, "damage": ["x"]}, running=False),
    ]
    listing = Listing("host-a", tuple(rows), {5: "its manifest has changed"}, 5 << 30, 70 << 30)
    from rich.text import Text

    lines = [Text.from_markup(line).plain for line in view.list_lines(listing, NOW)]
    assert max(map(len, lines)) <= view.WIDTH
    assert lines[0].split() == list(view.TITLES)
    assert "400 d" in lines[1] and "unchecked" in lines[1] and format_time(NOW - 400 * 86400)[:10] in lines[1]
    assert "host-with…" in lines[2] and "before" in lines[2] and lines[2].endswith("…")
    assert "123 GiB" in lines[3] and "0 s" in lines[3] and "5000 ms" in lines[3]
    assert "damaged" in lines[4] and " - " in lines[4]
    assert lines[5].split() == ["5", "damaged:", "its", "manifest", "has", "changed"]
    assert lines[6] == "5 snapshots on host-a, 5.0 GiB in all, room for 70 GiB more"


def test_all_of_a_manifest_is_shown() -> None:
    one = manifest(notes=["mariadb was not dumped: x"], health={"ok": False, "at": NOW, "damage": ["chunk 3 is gone"]})
    text = "\n".join(view.show_lines(one, NOW))
    for words in (
        "snapshot       42 of sample",
        "12 min ago, on host-a",
        "delta (changes by block trace), while in use; writers waited 31 ms",
        "generation 7",
        "key k1",
        "2.0 GiB, 48 MiB used, 1.3 MiB of it new",
        "valid headers: /var/spool/slurmctld/job_state",
        "damaged, checked ",
        "note           mariadb was not dumped: x",
        "damage         chunk 3 is gone",
    ):
        assert words in text, words
    assert "not known" in "\n".join(view.show_lines(manifest(image={"key": "", "sha256": ""}), NOW))


def test_control_characters_are_escaped() -> None:
    """A snapshot may come from another host, or from a store that others can write to."""
    nasty = "a\x1b]0;x\x07\r\u202eb"
    one = manifest(reason=nasty, host=nasty, method="delta", notes=[nasty], slurm_cluster=nasty)
    one["health"] = {"ok": False, "damage": [nasty]}
    listing = Listing("host-a", (one,), {9: nasty}, 0, 0)
    lines = [*view.list_lines(listing, NOW), *view.show_lines(one, NOW)]
    lines += view.verified_lines([Verified(9, (nasty,))], "lab")
    assert all(line.isprintable() for line in lines)
    assert r"\x1b]0;x\x07\r\u202eb" in "\n".join(lines)


def test_output_of_a_verification() -> None:
    lines = list(view.verified_lines([Verified(1, ()), Verified(2, ("chunk 3 [x]", "chunk 4"))], "lab"))
    assert lines == [
        "snapshot 1 of lab: [green]intact[/]",
        r"snapshot 2 of lab: [red]damaged[/]: chunk 3 \[x]",
        "snapshot 2 of lab: [red]damaged[/]: chunk 4",
    ]


RESTORED: list[tuple[KeptOverlay | None, bool, list[str]]] = [
    (None, False, ["snapshot 42 of lab is restored to /o/lab.img on host-a: 48 MiB in 0.5 s"]),
    (KeptOverlay(57), False, ["", "the previous overlay is snapshot 57; to undo: sms overlay restore 57"]),
    (KeptOverlay(path="/o/k"), False, ["", "the previous overlay is kept; to undo: mv /o/k /o/lab.img"]),
    (
        KeptOverlay(57),
        True,
        ["", "it was taken under another image: the next start seeds it for the current one", "the previous overlay"],
    ),
    (KeptOverlay(57, same=True), False, ["the overlay on host-a is identical to snapshot 42 of lab"]),
]


@pytest.mark.parametrize(("kept", "other", "lines"), RESTORED)
def test_output_of_a_restore(kept: KeptOverlay | None, other: bool, lines: list[str]) -> None:
    printed = list(view.restored_lines("lab", Restored("host-a", 42, "/o/lab.img", 48 << 20, 0.5, kept, other)))
    assert len(printed) == len(lines)
    assert all(words in line for words, line in zip(lines, printed, strict=True))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1_363_149, "1.3 MiB"),
        (48 << 20, "48 MiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172800, "2 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
