"""QMP with a real QEMU without a disk; the guest agent's protocol with a peer on a real socket."""

from __future__ import annotations

import base64
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.operations.snapshots.vm_state import _convert
from appliance.operations.vm.snapshot import copy_running
from appliance.operations.vm.snapshots import verify_folder
from appliance.operations.vm.vm import DISKS
from appliance.plan.vm.vm import VARIABLES, Machine, Opened, VmPlaces, cards, qemu_machine
from appliance.progress import Silent
from appliance.tools.guest import open_guest
from appliance.tools.qemu import (
    KEEP_LOG,
    Process,
    Run,
    create_user,
    end_machine,
    find_machine,
    grow,
    has_ended,
    image_info,
    launch,
    make_disk,
    make_root,
    make_state,
    probe_accel,
)
from appliance.tools.qmp import NotResponding, open_channel, open_qmp, parse_line
from appliance.tools.scripts import script_argv
from tests.sites import make_site
from tests.support.fake import Fake
from tests.waiting import wait_until

Need = Callable[..., None]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: QEMU runs as another user")
SANDBOX = ("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")


def run_of(folder: Path) -> Run:
    return Run("nobody", f"{folder}/pid", f"{folder}/qmp", f"{folder}/log")


@pytest.fixture
def machine(tmp_path: Path, need: Need) -> Iterator[Path]:
    """Start a machine that does nothing; yields the folder of its sockets, which only root can enter."""
    need("qemu-system-x86_64")
    if os.geteuid():
        pytest.skip("needs root: QEMU runs as another user")
    tmp_path.chmod(0o700)
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    (tmp_path / "disk").chmod(0o600)
    argv = ["qemu-system-x86_64", "-name", "t-nothing,debug-threads=on", "-M", "none", "-nodefaults"]
    argv += [
        "-display",
        "none",
        "-chardev",
        "socket,id=qmp,fd=10,server=on,wait=off",
        "-mon",
        "chardev=qmp,mode=control",
    ]
    argv += ["-chardev", "socket,id=other,fd=11,server=on,wait=off,logfile=/dev/fdset/12,logappend=on"]
    argv += ["-add-fd", "fd=12,set=12", "-add-fd", "fd=13,set=13", *SANDBOX]
    argv += ["-blockdev", "driver=file,node-name=disk,filename=/dev/fdset/13,locking=on"]
    opened = (("socket", "qmp"), ("socket", "other"), ("log", "console"), ("write", "disk"))
    launch(
        Local(), Machine((*argv,), tuple(Opened(kind, f"{tmp_path}/{name}") for kind, name in opened)), run_of(tmp_path)
    )
    yield tmp_path
    if process := find_machine(Local(), f"{tmp_path}/pid", "t-nothing"):
        end_machine(Local(), process)


def test_qemu_runs_without_privileges_on_what_root_opened(machine: Path) -> None:
    """Another account, no capability, none to get, the sandbox; root's files and sockets stay root's."""
    process = find_machine(Local(), f"{machine}/pid", "t-nothing")
    assert process
    lines = (line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    status = {name: value.split() for name, value in lines}
    nobody = pwd.getpwnam("nobody")
    assert status["Uid"] == [f"{nobody.pw_uid}"] * 4 and status["Gid"] == [f"{nobody.pw_gid}"] * 4
    assert not status["Groups"] and status["NoNewPrivs"] == ["1"] and status["Seccomp"] == ["2"]
    assert {int(status[f"Cap{name}"][0], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    for name in ("qmp", "other", "console", "disk", "log", "pid"):
        assert (machine / name).lstat().st_uid == 0 and not (machine / name).lstat().st_mode & 0o077
    with open_qmp(Local(), f"{machine}/qmp") as qmp:
        node = qmp.execute("query-named-block-nodes")[0]
        assert (node["node-name"], node["ro"]) == ("disk", False)
        with pytest.raises(SmsError, match="Permission denied"):
            file = {"driver": "file", "node-name": "x", "filename": f"{machine}/disk"}
            qmp.execute("blockdev-add", **file)


def test_neither_console_nor_log_can_fill_the_disk(machine: Path) -> None:
    """Nor what QEMU itself says: it has pipes; what reads one keeps the end, and ends with it."""
    process = find_machine(Local(), f"{machine}/pid", "t-nothing")
    assert process
    held = [str(one.readlink()) for one in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert f"{machine}/disk" in held and f"{machine}/console" not in held
    lines = b"".join(b"line %d\n" % number for number in range(1_000_000))
    with (machine / "log-of-a-flood").open("ab+") as kept:
        subprocess.run([sys.executable, "-I", "-c", KEEP_LOG], input=lines, stdout=kept, check=True)
    found = (machine / "log-of-a-flood").read_bytes()
    assert 1 << 20 <= len(found) <= 2 << 20 and lines.endswith(found)
    logs = [f"{machine}/{name}" for name in ("console", "log")]
    assert not {*logs} & {*held} and all(map(writers_of, logs))
    end_machine(Local(), process)
    wait_until(lambda: not any(map(writers_of, logs)), "their writers end", timeout_s=10)


def writers_of(path: str) -> list[str]:
    """Return the processes that keep this log."""
    found = Local().run("pgrep", "-f", "while block := os.read", ok=None).text.split()
    return [pid for pid in found if os.path.realpath(f"/proc/{pid}/fd/1") == path]


@pytest.mark.slow
@needs_root
def test_the_vms_own_command_starts(tmp_path: Path, need: Need, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets all that it opens: disks, sockets, taps of a network namespace; the copies of its disks in a snapshot."""
    need("qemu-system-x86_64")
    need("qemu-img")
    if not Path(VARIABLES).exists():
        pytest.skip("needs ovmf")
    site = make_site(tmp_path, directory=str(tmp_path / "vm"), memory_mb=384)
    site = site.model_copy(update={"cluster": "t-command"})
    where = VmPlaces(site)
    for name in vars(where):
        setattr(where, name, PurePosixPath(tmp_path) / getattr(where, name).name)
    for path in (f"{tmp_path}/image", str(where.state)):
        make_disk(Local(), path, size=64 << 20)
    make_root(Local(), str(where.root), f"{tmp_path}/image")
    (tmp_path / "copy").mkdir(mode=0o700)
    (tmp_path / "state").mkdir(mode=0o700)
    Path(where.seed).write_bytes(bytes(4096))
    shutil.copy(VARIABLES, where.variables)
    with subprocess.Popen(["unshare", "-n", "sh", "-c", "echo ready; exec sleep 60"], stdout=subprocess.PIPE) as space:
        assert space.stdout and space.stdout.readline()
        host = Local(prefix=("nsenter", "-t", str(space.pid), "-n", "--"))
        for card in cards(site):
            host.run("ip", "tuntap", "add", "dev", card.tap, "mode", "tap")
        run = Run("nobody", str(where.pid), str(where.qmp), f"{tmp_path}/log")
        for incoming, state in ((False, "running"), (True, "inmigrate")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("appliance.plan.vm.vm.VmPlaces", lambda _: where)
                machine = qemu_machine(site, f"{tmp_path}/image", "tcg", incoming=incoming)
            launch(host, machine, run)
            process = find_machine(host, run.pid, "sms-vm-t-command")
            assert process
            try:
                with open_qmp(host, run.qmp) as qmp:
                    assert qmp.execute("query-status")["status"] == state
                    nodes = {node["node-name"]: node["ro"] for node in qmp.execute("query-named-block-nodes")}
                assert [nodes[name] for name in ("image", "seed", "root", "state")] == [True, True, False, False]
                if not incoming:
                    where.guest = PurePosixPath(tmp_path) / "none"  # no guest agent answers
                    with Silent().step("copy") as step:
                        copy_running(host, where, f"{tmp_path}/copy", step, time)
                        copy_running(host, where, f"{tmp_path}/state", step, time, ["state"])
            finally:
                end_machine(host, process)
        space.kill()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["state.qcow2"]
    for disk in DISKS:
        assert (info := image_info(Local(), f"{tmp_path}/copy/{disk}.qcow2")) and info["virtual-size"] == 64 << 20
        subprocess.run(["qemu-img", "check", "-q", f"{tmp_path}/copy/{disk}.qcow2"], check=True)


def test_qemu_gets_files_that_it_cannot_open(machine: Path) -> None:
    """As the target of a snapshot; two of one session, and a file that is not there."""
    for name in ("one", "two"):
        (machine / name).write_bytes(bytes(1 << 16))
    with open_qmp(Local(), f"{machine}/qmp", files=[f"{machine}/one", f"{machine}/two"]) as qmp:
        for name in ("one", "two"):
            qmp.execute("blockdev-add", **{"driver": "file", "node-name": name, "filename": qmp.pass_file()})
        qmp.execute("blockdev-del", **{"node-name": "one"})
        with pytest.raises(SmsError):
            qmp.pass_file()
    with pytest.raises(NotResponding, match="No such file"), open_qmp(Local(), f"{machine}/qmp", files=["/not/there"]):
        pass


def test_an_account_is_created_once() -> None:
    host = Fake({("id",): (1, ""), ("useradd",): (0, "")})
    assert create_user(host, "sms-x", "x")
    assert [argv[-1] for argv in host.asked if argv[0] == "useradd"] == ["sms-x"]
    assert not create_user(Local(), "nobody", "x")


def test_qmp_commands_and_errors(machine: Path) -> None:
    """Commands work, errors are raised, and commands work after an error."""
    with open_qmp(Local(), f"{machine}/qmp") as qmp:
        assert qmp.execute("query-name")["name"] == "t-nothing"
        with pytest.raises(SmsError, match="has not been found"):
            qmp.execute("no-such-command")
        assert qmp.execute("query-status")["status"]


def test_jobs_are_waited_for(machine: Path) -> None:
    """A job that succeeds, and one that fails."""
    with open_qmp(Local(), f"{machine}/qmp", files=[f"{machine}/disk"]) as qmp:
        good = {"driver": "file", "filename": qmp.pass_file(), "size": 1 << 21}
        qmp.execute("blockdev-create", **{"job-id": "good", "options": good})
        qmp.wait_for_jobs(["good"], timeout_s=30)
        assert (machine / "disk").stat().st_size == 1 << 21
        bad = {"driver": "file", "filename": "/no/such/folder", "size": 1 << 20}
        qmp.execute("blockdev-create", **{"job-id": "bad", "options": bad})
        with pytest.raises(SmsError, match="No such file"):
            qmp.wait_for_jobs(["bad"], timeout_s=30)
        assert qmp.execute("query-jobs") == []


def test_a_machine_is_found_by_name_and_killed(machine: Path) -> None:
    """A pid that was reused by another process does not match."""
    assert find_machine(Local(), f"{machine}/pid", "t-other") is None
    found = find_machine(Local(), f"{machine}/pid", "t-nothing")
    assert found
    (machine / "others").write_text(f"{os.getpid()}\n")
    assert find_machine(Local(), f"{machine}/others", "t-nothing") is None
    end_machine(Local(), found)
    assert find_machine(Local(), f"{machine}/pid", "t-nothing") is None
    with pytest.raises(NotResponding), open_qmp(Local(), f"{machine}/qmp", silence_s=5):
        pass


def test_a_process_has_ended_when_its_files_are_closed() -> None:
    with subprocess.Popen(["sleep", "60"]) as runs:
        assert not has_ended(Local(), Process(runs.pid, 0.0))
        runs.kill()
        os.waitid(os.P_PID, runs.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is reaped
        assert has_ended(Local(), Process(runs.pid, 0.0))
    assert has_ended(Local(), Process(runs.pid, 0.0))


@needs_root
def test_the_error_of_a_failed_launch_is_reported(tmp_path: Path, need: Need) -> None:
    """The error is QEMU's message, not a missing socket."""
    need("qemu-system-x86_64")
    opened = (Opened("socket", f"{tmp_path}/qmp"),)
    with pytest.raises(SmsError, match="No such file"):
        launch(Local(), Machine(("qemu-system-x86_64",), (*opened, Opened("read", "/no/such"))), run_of(tmp_path))
    with pytest.raises(SmsError, match="unsupported machine type"):
        launch(Local(), Machine(("qemu-system-x86_64", "-M", "no-such-machine"), opened), run_of(tmp_path))


def test_the_states_disk_is_an_empty_file_system(tmp_path: Path, need: Need) -> None:
    """The result is a complete qcow2 file or none."""
    need("qemu-img")
    need("mke2fs")
    disk = tmp_path / "state.qcow2"
    make_state(Local(), str(disk), 600)
    info = image_info(Local(), str(disk))
    assert info and info["virtual-size"] == 600 << 20 and info["format"] == "qcow2"
    assert [path.name for path in tmp_path.iterdir()] == ["state.qcow2"]
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(disk), str(tmp_path / "raw")], check=True)
    shown = subprocess.run(["dumpe2fs", "-h", str(tmp_path / "raw")], check=True, capture_output=True, text=True).stdout
    assert re.search(r"^Errors behavior: +Remount read-only$", shown, re.MULTILINE)
    assert image_info(Local(), str(tmp_path / "none")) is None


def test_disks_are_empty_and_readable_by_root_only(tmp_path: Path, need: Need) -> None:
    need("qemu-img")
    image, root, over = (str(tmp_path / name) for name in ("image.qcow2", "root.qcow2", "over.qcow2"))
    make_disk(Local(), image, size=64 << 20)
    make_root(Local(), root, image)
    make_disk(Local(), over, backing="/not/there.qcow2", size=32 << 20)
    for path, size, backing in ((image, 64, None), (root, 64, image), (over, 32, "/not/there.qcow2")):
        info = image_info(Local(), path)
        assert info and (info["virtual-size"], info.get("backing-filename")) == (size << 20, backing)
        assert Path(path).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image.qcow2", "over.qcow2", "root.qcow2"]


@pytest.mark.parametrize("case", ["sound", "backing", "data file", "raw", "empty"])
def test_a_disk_leads_to_no_other_file(tmp_path: Path, need: Need, case: str) -> None:
    """QEMU's account can write its header; root reads, checks and enlarges it."""
    need("qemu-img")
    need("e2fsck")
    secret, disk = tmp_path / "secret", tmp_path / "state.qcow2"
    secret.write_bytes(b"of the host".ljust(1 << 20, b"-"))
    options = {"backing": ("-b", str(secret), "-F", "raw"), "data file": ("-o", f"data_file={secret},data_file_raw=on")}
    if case in ("raw", "empty"):
        disk.write_bytes(b"QFI" * 100 if case == "raw" else b"")
    else:
        argv = ("qemu-img", "create", "-q", "-f", "qcow2", *options.get(case, ()), str(disk), "1M")
        subprocess.run(argv, check=True)
    kept = secret.read_bytes()
    shutil.copy(disk, tmp_path / "root.qcow2")
    if case == "sound":
        grow(Local(), str(disk), 2)
        return
    openers: tuple[Callable[[], None], ...] = (
        lambda: grow(Local(), str(disk), 2),
        lambda: verify_folder(Local(), str(tmp_path)),
        lambda: _convert(Local(), str(disk), str(tmp_path / "raw")),
    )
    for opens in openers:
        with pytest.raises(SmsError, match="names another file" if case in options else "is not a qcow2 disk"):
            opens()
    assert secret.read_bytes() == kept and not (tmp_path / "raw").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_check_of_a_snapshot_leaves_no_state(tmp_path: Path, number: int) -> None:
    """Without FUSE it has all of the state in a folder; a shell may run no EXIT trap when a signal ends it.

    What a killed one left is removed by the next, but not the folder of one that runs.
    """
    programs, snapshot = tmp_path / "bin", tmp_path / "snapshots" / "one"
    for folder in (programs, snapshot):
        folder.mkdir(parents=True)
    for disk in DISKS:
        (snapshot / f"{disk}.qcow2").touch()
    (programs / "qemu-storage-daemon").write_text("#!/bin/sh\n")
    text = '#!/bin/sh\n[ "$1" = check ] && exit\nfor target; do :; done\necho keys >"$target"\nexec sleep 60\n'
    (programs / "qemu-img").write_text(text)
    for program in programs.iterdir():
        program.chmod(0o755)

    def begin() -> tuple[subprocess.Popen[bytes], Path]:
        before = {*snapshot.parent.iterdir()}
        environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
        check = subprocess.Popen(script_argv("vm-verify", str(snapshot)), env=environment, start_new_session=True)
        wait_until(
            lambda: [
                one for one in snapshot.parent.glob(".verify.*/state") if one.parent not in before and one.read_text()
            ],
            "it is there",
        )
        (work,) = {*snapshot.parent.iterdir()} - before
        assert work.stat().st_mode & 0o777 == 0o700
        return check, work

    def end(check: subprocess.Popen[bytes], how: int) -> None:
        os.killpg(check.pid, how)
        check.wait()

    first, of_first = begin()
    second, of_second = begin()
    end(second, number)
    assert of_first.exists() and of_second.exists() == (number == signal.SIGKILL)
    third, _ = begin()
    assert of_first.exists() and not of_second.exists()
    for one in (first, third):
        end(one, signal.SIGTERM)
    assert [path.name for path in snapshot.parent.iterdir()] == ["one"]


def test_the_root_of_a_snapshot_is_checked_without_its_image(tmp_path: Path, need: Need) -> None:
    """Root would open what its header names."""
    need("qemu-img")
    make_disk(Local(), str(tmp_path / "root.qcow2"), backing="/not/there.qcow2", size=1 << 20)
    make_state(Local(), str(tmp_path / "state.qcow2"), 16)
    verify_folder(Local(), str(tmp_path))


def test_when_a_machine_has_ended() -> None:
    host = Fake({("cat",): (1, "No such file or directory")})
    for pid, state in {7: "S (sleeping)", 8: "Z (zombie)"}.items():
        host.answers["cat", f"/proc/{pid}/status"] = (0, f"Name:\tq\nState:\t{state}\n")
    assert [has_ended(host, Process(pid, 0.0)) for pid in (7, 8, 9)] == [False, True, True]


def test_the_probe_gives_a_reason() -> None:
    """On any machine."""
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
def test_lines_are_parsed(line: bytes, found: dict[str, Any]) -> None:
    """Everything before 0xFF belongs to an earlier client."""
    assert parse_line(line, "x") == found


@pytest.mark.parametrize("line", [b"no json", b"[1]", b"7"])
def test_lines_that_are_not_objects_are_rejected(line: bytes) -> None:
    """The error is a message, not a traceback."""
    with pytest.raises(SmsError, match="not a JSON object"):
        parse_line(line, "x")


class Agent:
    """A guest agent for one client; ``script`` answers everything but the synchronisation."""

    def __init__(self, path: Path, script: Callable[[dict[str, Any]], Any]) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(1)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        there = self.server.accept()[0]
        with there, there.makefile("rb") as lines:
            for line in lines:
                request: dict[str, Any] = dict(parse_line(line, "peer"))
                self.requests.append(request)
                if request["execute"] == "guest-sync-delimited":
                    # Answers to an earlier client come first.
                    there.sendall(
                        b'{"return": 1}\n{"ret\xff' + json.dumps({"return": request["arguments"]["id"]}).encode()
                    )
                    there.sendall(b"\n")
                elif (answer := self.script(request)) is not None:
                    there.sendall(json.dumps(answer).encode() + b"\n")


def test_a_guest_command_returns_output_and_status(tmp_path: Path) -> None:
    """Earlier answers on the channel are skipped."""
    seen = 0

    def script(request: dict[str, Any]) -> Any:
        nonlocal seen
        if request["execute"] == "guest-exec":
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
    request = next(request["arguments"] for request in agent.requests if request["execute"] == "guest-exec")
    assert request["arg"] == ["a"] and base64.b64decode(request["input-data"]) == b"secret"


def test_a_silent_agent_is_not_responding(tmp_path: Path) -> None:
    """As in a machine that is still starting."""
    Agent(tmp_path / "guest", lambda request: None)
    with (
        open_guest(Local(), str(tmp_path / "guest"), silence_s=0.3) as guest,
        pytest.raises(NotResponding, match="within"),
    ):
        guest.execute("guest-ping")
    with pytest.raises(NotResponding), open_guest(Local(), str(tmp_path / "none"), silence_s=1):
        pass


def test_a_guest_command_that_times_out_is_reported(tmp_path: Path) -> None:
    """It keeps running in the VM."""

    def script(request: dict[str, Any]) -> Any:
        return {"return": {"pid": 5} if request["execute"] == "guest-exec" else {"exited": False}}

    Agent(tmp_path / "guest", script)
    with open_guest(Local(), str(tmp_path / "guest")) as guest, pytest.raises(SmsError, match="still running"):
        guest.run(["/bin/x"], timeout_s=0.1)


def test_file_systems_left_frozen_are_thawed(tmp_path: Path) -> None:
    """A snapshot that was killed during the freeze leaves an agent that runs no commands."""
    frozen = True

    def script(request: dict[str, Any]) -> Any:
        nonlocal frozen
        if request["execute"] == "guest-fsfreeze-thaw":
            frozen = False
            return {"return": 2}
        if request["execute"] == "guest-exec" and frozen:
            why = "Command guest-exec has been disabled: the agent is in frozen state"
            return {"error": {"class": "CommandNotFound", "desc": why}}
        return {"return": {"pid": 5} if request["execute"] == "guest-exec" else {"exited": True, "exitcode": 0}}

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
def test_invalid_answers_of_the_agent_are_errors(tmp_path: Path, answers: dict[str, Any]) -> None:
    """Any invalid answer raises our error."""
    Agent(tmp_path / "guest", lambda request: answers[request["execute"]])
    with open_guest(Local(), str(tmp_path / "guest")) as guest, pytest.raises(SmsError, match="guest agent"):
        guest.run(["/bin/x"])


def test_an_agent_that_sends_other_messages_times_out(tmp_path: Path) -> None:
    """Unrelated messages do not extend the timeout."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "guest"))
    server.listen(1)

    def chatter() -> None:
        there = server.accept()[0]
        with suppress(OSError):
            while True:
                there.sendall(b'{"event": "more"}\n' * 10)

    threading.Thread(target=chatter, daemon=True).start()
    with (
        pytest.raises(NotResponding, match="no answer within"),
        open_guest(Local(), str(tmp_path / "guest"), silence_s=0.5),
    ):
        pass


def test_an_agent_that_does_not_read_times_out(tmp_path: Path) -> None:
    """Data that is not read stays in the pipe; the sender does not block forever."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "guest"))
    server.listen(1)
    with open_channel(Local(), str(tmp_path / "guest"), "peer", silence_s=0.5) as line, pytest.raises(NotResponding):
        line.execute("x", data="x" * (4 << 20))


def test_deep_nesting_is_an_error() -> None:
    """It must not crash the parser."""
    with pytest.raises(SmsError, match="not a JSON object"):
        parse_line(b"[" * 200_000, "x")
