"""`sms lab capture`: where it listens, what it says of tcpdump's end, what it writes to and what not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.cli import main
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Result
from appliance.host.local import Local
from appliance.lab.capture import listener, places
from appliance.lab.layout import Layout
from appliance.operations.lab.capture import _sink
from appliance.tools import tcpdump

LAYOUT = Layout("t-lab", 2)
BEGAN = "tcpdump: listening on br-prov, link-type EN10MB (Ethernet), snapshot length 2048 bytes\n"


@pytest.mark.parametrize(
    "place, space, interface",
    [("switch", "switch", "br-prov"), ("host-a", "host-a", "br-prov"), ("node2", "node2", "eth0")],
)
def test_where_it_listens(place: str, space: str, interface: str) -> None:
    host, found = listener(LAYOUT, place)
    assert host.prefix == ("nsenter", f"--net=/run/netns/sms-t-lab-{space}", "--")
    assert (host.name, found) == (place, interface)


@pytest.mark.parametrize("place", ["", "admin", "outside", "node3", "../../etc", "Switch"])
def test_a_place_that_is_not_on_the_network(place: str) -> None:
    with pytest.raises(ConfigError, match="is not on the provisioning network of lab t-lab") as caught:
        listener(LAYOUT, place)
    assert caught.value.hint == "--at switch, host-a, host-b, node1, node2, sms"
    assert set(places(LAYOUT)) == {"switch", "host-a", "host-b", "node1", "node2"}


def ended(status: int, said: str) -> Result:
    return Result("switch", ("tcpdump",), status, b"", said.encode())


@pytest.mark.parametrize(
    "said, counts",
    [
        ("12 packets captured\n14 packets received by filter\n0 packets dropped by kernel\n", (12, 14, 0)),
        ("1 packet captured\n1 packet received by filter\n1 packet dropped by kernel\n", (1, 1, 1)),
        ("0 packets captured\n5 packets dropped by kernel\n2 packets dropped by interface\n", (0, 0, 7)),
    ],
)
def test_what_tcpdump_counted(said: str, counts: tuple[int, int, int]) -> None:
    assert tcpdump.read_counts(ended(0, BEGAN + said)) == tcpdump.Counts(*counts)


@pytest.mark.parametrize(
    "status, said, message, hint",
    [
        (
            1,
            "tcpdump: nope: No such device exists\n(No such device exists)\n",
            "nope: No such device exists",
            "ip link",
        ),
        (1, "tcpdump: eth0: You don't have permission to perform this capture on that device\n", "permission", "root"),
        (-9, BEGAN, "ended with status -9", ""),
        (0, BEGAN, "ended with status 0", ""),
        (127, "timeout: failed to run command 'tcpdump': No such file or directory\n", "failed to run", ""),
        (1, BEGAN + "5 packets captured\n", "5 packets", ""),
    ],
)
def test_a_tcpdump_that_failed(status: int, said: str, message: str, hint: str) -> None:
    with pytest.raises(SmsError, match=message) as caught:
        tcpdump.read_counts(ended(status, said))
    assert hint in caught.value.hint and caught.value.message.startswith("tcpdump on switch: ")


def test_it_ends_by_itself_and_keeps_enough_of_a_frame() -> None:
    argv = tcpdump.capture_argv("br-prov", 90.0)
    assert argv[0] == "timeout" and "90" in argv
    assert int(argv[argv.index("-s") + 1]) >= 1518  # the longest frame of a network of 1500, with a VLAN tag
    assert argv[-2:] == ("-w", "-")


Maker = Callable[[Path], object]
TAKEN: dict[str, tuple[Maker, bool]] = {
    "a file": (lambda path: path.write_bytes(b"old"), False),
    "a folder": (Path.mkdir, False),
    "a folder, by force": (Path.mkdir, True),
    "a link, by force": (lambda path: path.symlink_to("elsewhere"), True),
    "a pipe, by force": (os.mkfifo, True),
}


@pytest.mark.parametrize("make, force", TAKEN.values(), ids=list(TAKEN))
def test_what_is_there_already_stays(tmp_path: Path, make: Maker, force: bool) -> None:
    path = tmp_path / "x.pcap"
    make(path)
    before = path.lstat()
    with pytest.raises(Refused, match="already exists") as caught, _sink(str(path), force):
        pass
    assert ("--force" in caught.value.hint) == path.is_file()
    assert path.lstat() == before and not (tmp_path / "elsewhere").exists()


def test_force_replaces_a_file_with_one_that_its_user_alone_can_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pcap"
    path.write_bytes(b"old and long")
    path.chmod(0o666)
    with _sink(str(path), True) as sink:
        os.write(sink, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_who_called_sudo_owns_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    monkeypatch.setenv("SUDO_UID", "2000")
    monkeypatch.setenv("SUDO_GID", "2001")
    with _sink(str(tmp_path / "x.pcap"), False) as sink:
        os.write(sink, b"new")
    state = (tmp_path / "x.pcap").stat()
    assert (state.st_uid, state.st_gid) == (2000, 2001)


@pytest.mark.parametrize("name", ["nowhere/x.pcap", "x" * 300, "."])
def test_a_file_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, Refused)) as caught, _sink(name, False):
        pass
    assert "-o" in caught.value.hint and not list(tmp_path.iterdir())


def test_a_file_that_nothing_came_into_is_removed_and_a_begun_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.pcap"
    with pytest.raises(SmsError, match=r"^gone$"), _sink(str(path), False):
        raise SmsError("gone")
    assert not path.exists()
    with pytest.raises(SmsError, match=r"^gone; the packets before are in .*x\.pcap$"), _sink(str(path), False) as sink:
        os.write(sink, b"begun")
        raise SmsError("gone")
    assert path.read_bytes() == b"begun"


def test_a_full_disk_is_said_with_what_is_kept(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with (
        pytest.raises(SmsError, match=r"x\.pcap: No space left on device; its first 2 KiB are kept"),
        _sink(str(tmp_path / "x.pcap"), False) as sink,
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        os.write(sink, bytes(2048))
        full.write(b"more")


@pytest.mark.parametrize(
    "words, status, message",
    [
        (["--duration", "soon"], 2, "duration 'soon'"),
        (["--duration", "0"], 2, "duration '0'"),
        (["--name", "nowhere"], 3, "there is no lab nowhere"),
        (["--name", "../etc"], 2, "invalid lab name"),
        (["-o", "-", "--json"], 2, "cannot both be standard output"),
        (["--duration"], 2, "expected one argument"),
        (["extra"], 2, "unrecognized arguments"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str) -> None:
    try:
        found = main(["lab", "capture", *words])
    except SystemExit as end:
        found = int(end.code or 0)
    assert found == status
    errors = capsys.readouterr().err
    assert message in errors and "  hint: " in errors


def test_a_command_that_runs_is_read_as_it_speaks_and_stopped_like_by_ctrl_c() -> None:
    script = 'trap "echo bye; echo ended >&2; exit 3" INT; echo hello; while :; do sleep 0.05; done'
    with Local().running("sh", "-c", script) as running:
        assert os.read(running.out, 100) == b"hello\n"
        running.stop()
        assert os.read(running.out, 100) == b"bye\n"
        assert os.read(running.out, 100) == b""
        result = running.result()
    assert (result.status, result.stderr) == (3, b"ended\n")


def test_a_command_that_does_not_heed_the_first_stop_heeds_the_second() -> None:
    with Local().running("sh", "-c", "trap '' INT; echo hello; while :; do sleep 0.05; done") as running:
        assert os.read(running.out, 100) == b"hello\n"
        running.stop()
        running.stop()
        assert os.read(running.out, 100) == b""
        assert running.result().status == -signal.SIGKILL


def test_a_command_ends_with_its_context() -> None:
    with Local().running("sleep", "1000") as running:
        pass
    assert running.process.returncode == -signal.SIGTERM


def test_much_on_standard_error_holds_nothing_up() -> None:
    with Local().running("sh", "-c", "head -c 1000000 /dev/zero >&2; echo done") as running:
        assert os.read(running.out, 100) == b"done\n"
        assert len(running.result().stderr) == 1_000_000


def test_ctrl_c_lets_the_last_second_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits, the second one does not, and no KeyboardInterrupt is visible."""
    monkeypatch.setattr(tcpdump, "LAST_S", 30.0)
    script = "trap 'echo bye; exit' INT; echo hello; while :; do sleep 0.05; done"
    with Local().running("sh", "-c", script) as running, tcpdump._stopped_by_signals(running) as came:
        assert os.read(running.out, 100) == b"hello\n"
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert came.wait(5) and not running.stopped
        os.kill(os.getpid(), signal.SIGTERM)
        assert running.stopped and os.read(running.out, 100) == b"bye\n"
