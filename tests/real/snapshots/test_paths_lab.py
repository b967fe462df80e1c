"""`sms overlay diff` and `restore --path` beside an appliance that runs, and when it is stopped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real.conftest import Playground
from tests.waiting import wait_until

pytestmark = pytest.mark.real

CHANGE = """
set -e
echo two >/srv/t/a
chmod 600 /srv/t/b
rm -r /srv/t/c /etc/debian_version
mkdir /srv/t/new
echo 1 >"/srv/t/new/name with
a line end"
"""
PREPARE = """
set -e
mkdir -p /srv/t/c/d
echo one >/srv/t/a; echo b >/srv/t/b; echo e >/srv/t/c/d/e
chown munge /srv/t/b
ln -s /etc /srv/t/link
"""


def inside(playground: Playground, script: str) -> str:
    return playground.sms("exec", "--", "sh", "-c", script).text


def changes(playground: Playground, *words: str) -> dict[str, dict[str, Any]]:
    said = json.loads(playground.sms("overlay", "diff", *words, "--json").stdout)
    return {row["path"]: row for row in said["changes"]}


def test_single_files_come_back(running: Playground) -> None:
    inside(running, f"rm -rf /srv/t; {PREPARE}")
    number = str(json.loads(running.sms("overlay", "snapshot", "--json").stdout)["number"])
    inside(running, CHANGE)
    reported = changes(running, number, "--path", "/srv", "--path", "/etc/debian_version")
    assert {path: row["change"] for path, row in reported.items()} == {
        "/etc/debian_version": "gone",
        "/srv/t/a": "changed",
        "/srv/t/b": "changed",
        "/srv/t/c": "gone",
        "/srv/t/new": "added",
    }
    assert reported["/etc/debian_version"]["image"] == "removed" and reported["/srv/t/a"]["what"] == ["content"]
    words = running.sms("overlay", "diff", number, "--path", "/srv", "--all").stdout.decode()
    assert "+ /srv/t/new/name with\\na line end  file, 2 B\n" in words
    assert "~ /srv/t/b  mode 0644 -> 0600\n" in words and words.endswith("2 added, 2 changed, 3 gone\n")
    assert running.status()["healthy"]

    refused = running.sms("overlay", "restore", number, "--path", "/srv/t", ok=(3,))
    assert b"the services container runs on host-a" in refused.stderr and b"--to DIR" in refused.stderr
    host = running.host("host-a")
    host.run("rm", "-rf", "/root/out")
    out = running.sms(
        "overlay", "restore", number, "--path", "/srv/t/c", "--path", "/srv/t/b", "--to", "/root/out"
    ).text
    assert "extracted from snapshot" in out
    assert host.run("stat", "-c", "%a", "/root/out").text == "700"
    assert host.run("cat", "/root/out/srv/t/c/d/e").text == "e"
    assert host.run("stat", "-c", "%a", "/root/out/srv/t/b").text == "644"
    again = running.sms("overlay", "restore", number, "--path", "/srv/t/c", "--to", "/root/out", ok=(3,))
    assert b"already exists" in again.stderr
    host.run("rm", "-rf", "/root/out")

    running.sms("-q", "stop")
    paths = ("--path", "/srv/t", "--path", "/etc/debian_version")
    rehearsed = running.sms("overlay", "restore", number, *paths, "-n").text
    assert "- /srv/t/new/" in rehearsed and "+ /srv/t/c/" in rehearsed
    assert "+ /etc/debian_version  the image's version is visible again" in rehearsed
    done = json.loads(running.sms("overlay", "restore", number, *paths, "--json").stdout)
    assert done["kept"] > int(number) and done["changed"]
    kept = json.loads(running.sms("overlay", "show", str(done["kept"]), "--json").stdout)
    assert kept["reason"] == f"before restore of {number}: /etc/debian_version /srv/t"
    twice = json.loads(running.sms("overlay", "restore", number, *paths, "--json").stdout)
    assert not twice["changed"] and twice["kept"] is None
    running.assert_nothing_runs()

    running.sms("-q", "start", "--host", "host-a", on="admin")
    assert inside(running, "cat /srv/t/a /srv/t/c/d/e; stat -c '%U %a' /srv/t/b; ls /srv/t") == (
        "one\ne\nmunge 644\na\nb\nc\nlink"
    )
    assert inside(running, "cat /etc/debian_version")
    # Right after a start under load, nodes may not have answered the new controller yet.
    wait_until(lambda: running.status()["healthy"], "healthy", 30)
    assert changes(running, str(done["kept"]), "--path", "/srv")["/srv/t/new"]["change"] == "gone"
    refused = running.sms("overlay", "diff", number, "--path", "/srv/t/link/shadow", ok=(3,))
    assert b"/srv/t/link was a symbolic link" in refused.stderr
