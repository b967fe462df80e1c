"""Answers of programs that are not what they should be: an error with a hint in every reader, and no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.host.base import OddOutput, Result
from appliance.operations.adopt.inspection import query_old
from appliance.operations.hosts.signing import find_signing_keys
from appliance.operations.overlay import mirror, overlay, standby
from appliance.operations.services import unfinished
from appliance.operations.vm.snapshots import read_listed
from appliance.progress import Silent
from appliance.tools import apptainer, bridge, ext3, ports, qemu, space
from appliance.tools.agent import MessageReader
from appliance.tools.btrfs import Btrfs
from appliance.tools.mdadm import Md
from appliance.tools.reply import Reply
from appliance.units import LARGEST_OVERLAY
from tests.support.env import fake_env
from tests.support.fake import Fake

DEEP = "[" * 100_000
ODD: dict[str, bytes] = {
    "empty": b"",
    "text": b"Segmentation fault\n",
    "not UTF-8": b"\xff\xfe\x00",
    "a number": b"7",
    "a text": b'"x"',
    "null": b"null",
    "a list": b"[1, [2]]",
    "a list of lists": b"[[]]",
    "a list of texts": b'["x"]',
    "an object": b'{"x": 1}',
    "cut": b'{"kept": ["/etc',
    "deep": DEEP.encode(),
    "deep object": (b'{"a":' * 50_000),
    "a long number": b"9" * 6000,
    "other types": b'{"instances": [{"instance": 1, "pid": "x", "img": []}], "kept": 3, "archives": {}, "data": []}',
    "lists of what": b'[{"ifname": 3, "ifindex": "x", "flags": 7, "addr_info": 1}]',
    "superscript": "²".encode(),
    "escapes": b"\x1b]0;title\x07",
    "many": b"1 2 3 4 5 6 7 8 9\n",
    "single words": b"7 \nx \n x\n\nx\n",
}


class Odd(Fake):
    """A host on which every program succeeds and prints the same."""

    def __init__(self, output: bytes) -> None:
        super().__init__({})
        self.output = output

    def run(self, *argv: str, ok: Any = (0,), **_: Any) -> Result:
        return Result("host-a", argv, 0, self.output, b"").expect(ok)


PLACES = SimpleNamespace(overlay=Path("/o"), sign=Path("/sign"))
CLUSTER: Any = SimpleNamespace(
    places=PLACES, site=SimpleNamespace(cluster="lab"), services=(), path=None, env=fake_env()
)
SURVEY: Any = SimpleNamespace(slurm=None)
KEYS = SimpleNamespace(public_keys=(), private_key="/etc/sms/sign.pem", pgp_fingerprint=None)
CLUSTER.site.signing, CLUSTER.site.state = KEYS, "/var/lib/sms"


def seed(host: Odd) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlay, "seed_argv", lambda *_: ("sms-seed",))
        patch.setattr(overlay, "prepare_confinement", lambda *_: None)
        return overlay._seed(CLUSTER, host, "image", "overlay", b"", "mark")


READERS: dict[str, Callable[[Odd], object]] = {
    "sms-seed": seed,
    "apptainer instance list": lambda host: apptainer.list_instances(host, "*"),
    "image-metadata": lambda host: apptainer.labels(host, "image"),
    "apptainer --version": apptainer.version,
    "ip link": ports.list_links,
    "ip link of a process": lambda host: ports.find_ports(host, 7),
    "ip link of a bridge": lambda host: bridge.bridge_ports(host, "br0"),
    "ip link of a parent": lambda host: bridge.parent_problem(host, "eth0"),
    "qemu-img": lambda host: qemu.image_info(host, "/disk"),
    "df": lambda host: space.query_space(host, "/"),
    "du": lambda host: space.query_used(host, "/"),
    "stat": lambda host: standby.overlay_length(CLUSTER, host),
    "stat of an overlay": lambda host: unfinished.overlay_inode(CLUSTER, host),
    "dumpe2fs": lambda host: ext3.sizes_of(host, "/o"),
    "findmnt": lambda host: mirror._file_system(host, "/"),
    "btrfs device stats": lambda host: Btrfs().devices(host, "u", "/m"),
    "btrfs dump-super": lambda host: Btrfs().inspect(host, "/m"),
    "mdadm --detail": lambda host: Md().devices(host, "u", "/m"),
    "adopt-facts": lambda host: query_old(CLUSTER, host, SURVEY),
    "find-private-keys": lambda host: find_signing_keys(CLUSTER, host),
    "vm-list": lambda host: read_listed(host.output.decode(errors="replace")),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_an_odd_answer_is_an_error_with_a_hint(reader: str, odd: str) -> None:
    try:
        READERS[reader](Odd(ODD[odd]))
    except OddOutput as error:
        assert error.hint and "host-a" in error.message and "printed" in error.message
        assert error.message.isprintable() and len(error.message) < 600
    except SmsError as error:
        assert error.message


@pytest.mark.parametrize("odd", [one for one in ODD if one != "an object"])
def test_sms_seed(odd: str) -> None:
    with pytest.raises(OddOutput, match="printed"):
        seed(Odd(ODD[odd]))


def test_sms_seed_after_other_output() -> None:
    assert seed(Odd(b'WARNING: x\n{"kept": ["/etc/motd.sms-new"]}\n')) == {"kept": ["/etc/motd.sms-new"]}


NUMBERS: list[tuple[bytes, int, list[int] | None]] = [
    (b"7\n", 1, [7]),
    (b"Avail\n7 8\n", 2, [7, 8]),
    (b"7 8", 1, None),
    (b"", 1, None),
    (b"-7", 1, None),
    (b"7.5", 1, None),
    (b"9" * 30, 1, None),
    ("²".encode(), 1, None),
]


@pytest.mark.parametrize(("output", "count", "numbers"), NUMBERS)
def test_numbers(output: bytes, count: int, numbers: list[int] | None) -> None:
    result = Result("host-a", ("stat",), 0, output, b"")
    if numbers is None:
        with pytest.raises(OddOutput, match="`stat` printed"):
            result.numbers(count)
    else:
        assert result.numbers(count) == numbers


MESSAGES: list[tuple[dict[str, object], bool]] = [
    ({"kind": "result", "bytes": 7, "seconds": 1, "own": []}, True),
    ({"kind": "result", "bytes": "7"}, False),
    ({"kind": "result", "bytes": 1 << 70}, False),
    ({"kind": "result", "snapshots": [{}]}, False),
    ({"kind": "result", "snapshots": [{"number": "1"}]}, False),
    ({"kind": "result", "broken": {"7": "no manifest"}}, True),
    ({"kind": "result", "broken": [7]}, True),
    ({"kind": "result", "broken": ["x"]}, False),
    ({"kind": "moved", "done": "x", "total": 3}, False),
    ({"kind": "step"}, False),
    ({"kind": "note", "text": 7}, False),
    ({"kind": "problem", "message": "full", "status": "1"}, False),
    ({"kind": "problem"}, False),
    ({"kind": 7}, False),
]


@pytest.mark.parametrize(("message", "valid"), MESSAGES)
def test_an_odd_message_of_an_agent(message: dict[str, object], valid: bool) -> None:
    reader = MessageReader(Silent(), ExitStack())
    for line in ("sudo: unable to resolve host", DEEP, json.dumps(message)):
        reader.feed(line)
    ended = Result("host-b", ("agent",), 0, b"", b"")
    if valid:
        reply = reader.outcome(ended)
        with pytest.raises(SmsError, match="host-b: the reply of the agent there has no frozen_s"):
            print(reply["frozen_s"])
    else:
        with pytest.raises(SmsError, match="host-b"):
            reader.outcome(ended)


def test_a_message_of_the_present_version_is_valid() -> None:
    assert (
        Reply("host-b", {"kind": "final", "stop_s": 1, "neighbours": ["10.1.0.1 eth0 02:00:00:00:00:01"]})["stop_s"]
        == 1
    )
    assert LARGEST_OVERLAY.bit_length() < 63, "sizes are numbers that a message can have"
