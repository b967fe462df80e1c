"""What rehearsals and drills must leave as it is, and that nothing is left of them."""

from __future__ import annotations

from typing import Any

from appliance.host.local import Local
from appliance.lab.down import loops_below
from appliance.operations.lab import demo
from tests.real.conftest import Playground


def assert_nothing_left(stage: Playground, on: str = "host-a") -> None:
    """No folder, no namespace, no loop device of a rehearsal."""
    script = "ls -A /var/lib/sms/rehearsals/lab /run/sms-lab /run/netns 2>/dev/null | grep rh-"
    assert stage.host(on).run("sh", "-c", script, ok=None).text == ""
    # By inode: `losetup` lists the devices of other labs as well.
    assert loops_below(stage.lab.layout.disk / on / "rehearsals") == []
    demo.wait_for("devices on files that are gone", lambda: "" if gone_loops() else "none", 30)


def gone_loops() -> list[str]:
    """Loop devices on a removed file of a rehearsal, of this lab or another."""
    listed = Local().run("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE").text.splitlines()
    return [line for line in listed if "rehearsals" in line and line.endswith("(deleted)")]


def production(stage: Playground) -> tuple[Any, ...]:
    """What a rehearsal must leave as it is."""
    state = "/var/lib/sms"
    script = 'stat -c %i "$1.img" && cat "$1.lease" "$2/journal/lab.json" && readlink "$2/images/lab.sif"'
    files = stage.host("host-a").run("sh", "-c", script, "look", f"{state}/overlays/lab", state).text
    jobs = stage.host("node1").run("squeue", "--noheader", "--format=%i %T %N").text
    return files, stage.instances(), len(stage.loops()), jobs
