"""Log lines that rsyslogd has discarded, from lines of its impstats (8.2302)."""

from __future__ import annotations

from appliance.plan.services.discarded import Discarded, read_discarded
from appliance.plan.services.inside import read_inside

HEAD = "2026-11-29T19:5{}:26.792585+00:00 sms-services rsyslogd-pstats: "
QUEUE = "{}: origin=core.queue size=13856 enqueued=40000 full={} discarded.full={} discarded.nf={} maxqsize=20000 "


def line(minute: int, name: str, full: int, early: int = 0) -> str:
    return HEAD.format(minute) + QUEUE.format(name, full, full, early)


def test_lines_are_added_up_by_queue_in_memory_and_on_disk() -> None:
    lines = [
        line(1, "collector queue", 9248),
        line(2, "collector queue[DA]", 12),
        line(3, "main Q", 3, 4),
        HEAD.format(4) + "imudp(w0): called.recvmmsg=0",
        "garbage",
        "",
    ]
    found = read_discarded(lines)
    assert [(one.queue, one.lines, one.since[14:16], one.last[14:16]) for one in found] == [
        ("collector", 9260, "51", "52"),
        ("main Q", 7, "53", "53"),
    ]
    texts = [one.describe("log:514") for one in found]
    assert "9260 lines for the collector log:514" in texts[0] and "'main Q'" in texts[1]
    assert read_inside("".join(f"discarded {one}\n" for one in lines), "").discarded == found


def test_a_line_of_a_node_is_not_one_of_rsyslogd() -> None:
    forged = "2026-11-29T19:51:26+00:00 node1 x rsyslogd-pstats: " + QUEUE.format("collector queue", 1, 1, 0)
    assert read_discarded([forged, "x" * 100_000]) == ()
    assert read_discarded([line(1, "collector queue", 10**14)]) == (
        Discarded("collector", 10**14, HEAD.format(1).split()[0], HEAD.format(1).split()[0]),
    )
