"""QMP against a real QEMU without a disk; the guest agent's protocol against a peer on a real socket."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.tools.guest import open_guest
from appliance.tools.qemu import (
    Process,
    end_machine,
    find_machine,
    has_ended,
    image_info,
    launch,
    make_state,
    probe_accel,
)
from appliance.tools.qmp import NotThere, open_line, open_qmp, parse_line

Need = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, need: Need) -> Iterator[Path]:
    """A machine that does nothing; the folder of its sockets."""
    need("qemu-system-x86_64")
    argv = ["qemu-system-x86_64", "-name", "t-nothing,debug-threads=on", "-M", "none", "-nodefaults"]
    argv += ["-display", "none", "-qmp", f"unix:{tmp_path}/qmp,server=on,wait=off", "-pidfile", f"{tmp_path}/pid"]
    argv += ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    launch(Local(), argv, qmp=f"{tmp_path}/qmp", log=f"{tmp_path}/log")
    yield tmp_path
    if process := find_machine(Local(), f"{tmp_path}/pid", "t-nothing"):
        end_machine(Local(), process)


def test_qemu_is_asked_and_refuses_in_its_own_words(machine: Path) -> None:
    """Answers, errors, and again after an error."""
    with open_qmp(Local(), f"{machine}/qmp") as qmp:
        assert qmp.ask("query-name")["name"] == "t-nothing"
        with pytest.raises(SmsError, match="has not been found"):
            qmp.ask("no-such-command")
        assert qmp.ask("query-status")["status"]


def test_jobs_are_waited_for(machine: Path) -> None:
    """A job that ends well, and one that fails."""
    with open_qmp(Local(), f"{machine}/qmp") as qmp:
        good = {"driver": "file", "filename": f"{machine}/disk", "size": 1 << 20}
        qmp.ask("blockdev-create", **{"job-id": "good", "options": good})
        qmp.wait_for_jobs(["good"], timeout_s=30)
        assert (machine / "disk").stat().st_size == 1 << 20
        bad = {"driver": "file", "filename": f"{machine}/no/such/folder", "size": 1 << 20}
        qmp.ask("blockdev-create", **{"job-id": "bad", "options": bad})
        with pytest.raises(SmsError, match="No such file"):
            qmp.wait_for_jobs(["bad"], timeout_s=30)
        assert qmp.ask("query-jobs") == []


def test_a_machine_is_found_by_its_name_and_ended(machine: Path) -> None:
    """A pid that is somebody else's by now is not it."""
    assert find_machine(Local(), f"{machine}/pid", "t-other") is None
    found = find_machine(Local(), f"{machine}/pid", "t-nothing")
    assert found
    (machine / "other").write_text(f"{os.getpid()}\n")
    assert find_machine(Local(), f"{machine}/other", "t-nothing") is None
    end_machine(Local(), found)
    assert find_machine(Local(), f"{machine}/pid", "t-nothing") is None
    with pytest.raises(NotThere), open_qmp(Local(), f"{machine}/qmp", silence_s=5):
        pass


def test_a_process_has_ended_when_its_files_are_closed() -> None:
    with subprocess.Popen(["sleep", "60"]) as runs:
        assert not has_ended(Local(), Process(runs.pid, 0.0))
        runs.kill()
        os.waitid(os.P_PID, runs.pid, os.WEXITED | os.WNOWAIT)  # a zombie, until it is waited for
        assert has_ended(Local(), Process(runs.pid, 0.0))
    assert has_ended(Local(), Process(runs.pid, 0.0))


def test_a_qemu_that_ends_at_once_is_told_in_its_words(tmp_path: Path, need: Need) -> None:
    """Not by the absence of a socket."""
    need("qemu-system-x86_64")
    with pytest.raises(SmsError, match="unsupported machine type"):
        argv = ["qemu-system-x86_64", "-M", "no-such-machine"]
        launch(Local(), argv, qmp=f"{tmp_path}/qmp", log=f"{tmp_path}/log")


def test_the_states_disk_is_an_empty_file_system(tmp_path: Path, need: Need) -> None:
    """As qcow2, whole or not there."""
    need("qemu-img")
    need("mke2fs")
    disk = tmp_path / "state.qcow2"
    make_state(Local(), str(disk), 600)
    info = image_info(Local(), str(disk))
    assert info and info["virtual-size"] == 600 << 20 and info["format"] == "qcow2"
    assert [path.name for path in tmp_path.iterdir()] == ["state.qcow2"]
    assert image_info(Local(), str(tmp_path / "none")) is None


def test_the_probe_says_why() -> None:
    """On whatever machine this runs."""
    accel, why = probe_accel(Local())
    assert (accel, bool(why)) in (("kvm", False), ("tcg", True))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"return": {}}\n', {"return": {}}),
        (b'rest of somebody else"}\xff{"return": 7}', {"return": 7}),
        (b"\xff\n", {}),
        (b"  ", {}),
    ],
)
def test_lines_are_read(line: bytes, found: dict[str, Any]) -> None:
    """What stands before 0xFF is another one's."""
    assert parse_line(line, "x") == found


@pytest.mark.parametrize("line", [b"no json", b"[1]", b"7"])
def test_what_is_no_object_is_refused(line: bytes) -> None:
    """In words, not by a traceback."""
    with pytest.raises(SmsError, match="not a JSON object"):
        parse_line(line, "x")


class Agent:
    """Speaks as a guest agent does, for one who asks; ``script`` answers all but the first greeting."""

    def __init__(self, path: Path, script: Callable[[dict[str, Any]], Any]) -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind(str(path))
        self.door.listen(1)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        there = self.door.accept()[0]
        with there, there.makefile("rb") as lines:
            for line in lines:
                said = parse_line(line, "peer")
                self.asked.append(said)
                if said["execute"] == "guest-sync-delimited":
                    # The answers to somebody who has gone come first.
                    there.sendall(
                        b'{"return": 1}\n{"ret\xff' + json.dumps({"return": said["arguments"]["id"]}).encode()
                    )
                    there.sendall(b"\n")
                elif (answer := self.script(said)) is not None:
                    there.sendall(json.dumps(answer).encode() + b"\n")


def test_a_command_inside_gives_its_output_and_status(tmp_path: Path) -> None:
    """After whatever others have left on the line."""
    seen = 0

    def script(said: dict[str, Any]) -> Any:
        nonlocal seen
        if said["execute"] == "guest-exec":
            return {"return": {"pid": 5}}
        seen += 1
        if seen < 3:
            return {"return": {"exited": False}}
        out = base64.b64encode(b"hello").decode()
        return {"return": {"exited": True, "exitcode": 3, "out-data": out}}

    agent = Agent(tmp_path / "guest", script)
    with open_guest(Local(), str(tmp_path / "guest")) as guest:
        ran = guest.run(["/bin/x", "a"], input=b"secret")
    assert (ran.status, ran.stdout, ran.stderr) == (3, b"hello", b"")
    asked = next(said["arguments"] for said in agent.asked if said["execute"] == "guest-exec")
    assert asked["arg"] == ["a"] and base64.b64decode(asked["input-data"]) == b"secret"


def test_an_agent_that_says_nothing_is_not_there(tmp_path: Path) -> None:
    """As one whose machine still starts."""
    Agent(tmp_path / "guest", lambda said: None)
    with open_guest(Local(), str(tmp_path / "guest"), silence_s=0.3) as guest, pytest.raises(NotThere, match="within"):
        guest.ask("guest-ping")
    with pytest.raises(NotThere), open_guest(Local(), str(tmp_path / "none"), silence_s=1):
        pass


def test_a_command_that_does_not_end_is_told_of(tmp_path: Path) -> None:
    """It runs on inside."""

    def script(said: dict[str, Any]) -> Any:
        return {"return": {"pid": 5} if said["execute"] == "guest-exec" else {"exited": False}}

    Agent(tmp_path / "guest", script)
    with open_guest(Local(), str(tmp_path / "guest")) as guest, pytest.raises(SmsError, match="runs on there"):
        guest.run(["/bin/x"], timeout_s=0.1)


def test_file_systems_that_somebody_left_held_are_let_go(tmp_path: Path) -> None:
    """A snapshot that was killed in its moment leaves an agent that runs nothing."""
    held = True

    def script(said: dict[str, Any]) -> Any:
        nonlocal held
        if said["execute"] == "guest-fsfreeze-thaw":
            held = False
            return {"return": 2}
        if said["execute"] == "guest-exec" and held:
            why = "Command guest-exec has been disabled: the agent is in frozen state"
            return {"error": {"class": "CommandNotFound", "desc": why}}
        return {"return": {"pid": 5} if said["execute"] == "guest-exec" else {"exited": True, "exitcode": 0}}

    Agent(tmp_path / "guest", script)
    with open_guest(Local(), str(tmp_path / "guest")) as guest:
        assert guest.run(["/bin/true"]).status == 0


@pytest.mark.parametrize(
    "answers",
    [
        {"guest-exec": {"error": "words"}},
        {"guest-exec": {"error": {"desc": ["\x1b[2J"]}}},
        {"guest-exec": {"return": []}},
        {"guest-exec": {"return": {"pid": "5"}}},
        {"guest-exec": {"return": {"pid": 5}}, "guest-exec-status": {"return": None}},
        {"guest-exec": {"return": {"pid": 5}}, "guest-exec-status": {"return": {"exited": True, "exitcode": "x"}}},
        {"guest-exec": {"return": {"pid": 5}}, "guest-exec-status": {"return": {"exited": True, "signal": []}}},
        {"guest-exec": {"return": {"pid": 5}}, "guest-exec-status": {"return": {"exited": True, "out-data": 7}}},
        {"guest-exec": {"return": {"pid": 5}}, "guest-exec-status": {"return": {"exited": True, "out-data": "a"}}},
    ],
)
def test_an_agent_that_was_taken_over_is_told_of_in_words(tmp_path: Path, answers: dict[str, Any]) -> None:
    """Whatever it answers, it is an error of ours."""
    Agent(tmp_path / "guest", lambda said: answers[said["execute"]])
    with open_guest(Local(), str(tmp_path / "guest")) as guest, pytest.raises(SmsError, match="guest agent"):
        guest.run(["/bin/x"])


def test_an_agent_that_chatters_does_not_answer(tmp_path: Path) -> None:
    """One that says other things without an end is as good as one that says nothing."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(tmp_path / "guest"))
    door.listen(1)

    def chatter() -> None:
        there = door.accept()[0]
        with suppress(OSError):
            while True:
                there.sendall(b'{"event": "more"}\n' * 10)

    threading.Thread(target=chatter, daemon=True).start()
    with pytest.raises(NotThere, match="no answer within"), open_guest(Local(), str(tmp_path / "guest"), silence_s=0.5):
        pass


def test_an_agent_that_does_not_listen_does_not_answer(tmp_path: Path) -> None:
    """What it is told stays in the pipe; whoever tells it is not held for ever."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(tmp_path / "guest"))
    door.listen(1)
    with open_line(Local(), str(tmp_path / "guest"), "peer", silence_s=0.5) as line, pytest.raises(NotThere):
        for _ in line.ask("x", {"data": "x" * (4 << 20)}):
            pass


def test_words_that_nest_without_an_end_are_no_object() -> None:
    """They are not to end us."""
    with pytest.raises(SmsError, match="not a JSON object"):
        parse_line(b"[" * 200_000, "x")
