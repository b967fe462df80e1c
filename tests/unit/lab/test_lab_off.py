"""A lab with a host that is off: the others stay usable."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance import lab
from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.lab import journal
from appliance.lab.journal import Journal
from appliance.lab.up import SPAWN
from appliance.operations.lab import lab as verbs

NAMES = {host.name for host in Journal("x", 1).layout.hosts}
WHOLE = Journal("x", 1, "d", dict.fromkeys(NAMES, 7))


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of hosts that are off; the lab's record is ``WHOLE``."""
    dead: set[str] = set()
    found = {f"/run/netns/{WHOLE.layout.namespace(name)}": name for name in NAMES}
    monkeypatch.setattr(Path, "samefile", lambda _, space: found[space] not in dead)
    for module in (lab, journal):
        monkeypatch.setattr(module, "read_journal", lambda _: WHOLE)
    return dead


def test_a_lab_with_a_host_that_is_off_is_open(off: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Lab, "failing", lambda *_: "")
    off.add("host-a")
    states = {state.name: (state.pid, state.failing) for state in verbs.lab_status("x")}
    assert states["host-a"] == (0, "it is off") and states["host-b"] == (7, "")
    with pytest.raises(SmsError, match="host-a of lab x is off") as caught:
        verbs.lab_exec("x", "host-a", ["true"])
    assert caught.value.hint == "sms lab power --name x host-a on"
    assert lab.Lab.open("x").running_host("host-b").pid == 7
    assert not journal.alive(WHOLE), "`sms lab up` recreates it"


def test_a_lab_that_ended_with_its_machine_is_not_open(off: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    off.update(NAMES)
    with pytest.raises(SmsError, match="lab x is incomplete"):
        lab.Lab.open("x")
    off.clear()
    monkeypatch.setattr(lab, "read_journal", lambda _: replace(WHOLE, pids={}))
    with pytest.raises(SmsError, match="lab x is incomplete"):
        lab.Lab.open("x")


def spawn(folder: Path, init: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script that starts a host, with this first process, without namespaces."""
    (folder / "init.sh").write_text(init)
    tools = folder / "bin"
    tools.mkdir()
    for name, script in {
        "nsenter": 'shift; exec "$@"',
        "unshare": 'while [ "${1#-}" != "$1" ] || [ "$1" = private ]; do shift; done\n"$@" & wait $!; exec sleep 0.3',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    script = f'PATH="{tools}:$PATH"\n{SPAWN}'
    return Local().run("sh", "-c", script, "spawn", "space", str(folder), ok=None, timeout=20)


def test_the_first_process_of_a_host_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = spawn(tmp_path, "echo entered; exec sleep 2", monkeypatch)
    assert done.status == 0, done.stderr
    os.kill(int(done.text), 15)


def test_a_host_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is there for a moment longer, without a child."""
    # Its last act is to write: a shell could be interrupted between that and its end.
    done = spawn(tmp_path, "echo no such port; exec /bin/echo entered", monkeypatch)
    assert done.status == 1 and b"no such port" in done.stderr
