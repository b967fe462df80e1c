"""A hostile old node: what root there prints when it is surveyed, captured on, and adopted.

Its programs are replaced by ``tests.hostile.far``.
"""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
from collections.abc import Callable
from typing import Any

from appliance.shared.wire import pack_message
from tests.hostile.far import Step
from tests.hostile.vm import HOSTILE

CANARY = "/etc/sms-canary"
"""A secret file of each host."""
BLOCK = 1 << 16
NASTY = HOSTILE.replace("\r\n", " ").encode()
"""On one line."""


# A survey


def _bodies(honest: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Change what stands in sections."""
    return b"\n".join(b" " + change(line[1:]) if line.startswith(b" ") else line for line in honest.split(b"\n"))


def _values(value: bytes) -> Callable[[bytes], bytes]:
    return lambda line: re.sub(rb"=[^\s]+", lambda _: b"=" + value, line)


def _file(path: str, text: bytes, *numbers: int) -> bytes:
    """A section of a file."""
    size, mode, uid, gid = numbers or (len(text), 644, 0, 0)
    lines = b"\n".join(b" " + line for line in text.split(b"\n"))
    return f"@file {path} read {size} {mode} {uid} {gid}\n".encode() + lines + b"\n@end 0 0\n"


def _with(honest: bytes, *sections: bytes) -> bytes:
    """Put sections before all others: the first of a name counts."""
    head, _, rest = honest.partition(b"\n")
    return head + b"\n" + b"".join(sections) + rest


ELSEWHERE = (
    *("/etc/slurm/../../../../../../PWNED", "/etc/slurm/..", "../../../PWNED", "/etc/slurm/prolog/../../../PWNED"),
    *(
        "/etc/slurm/--help",
        "/etc/slurm/$(touch PWNED)",
        "/etc/slurm/;touch;PWNED",
        "/etc/slurm/.",
        "/etc/slurm/sms.yaml",
    ),
)
CONF = b"ClusterName=lab\nSlurmctldHost=sms-old\nSlurmUser=slurm\nStateSaveLocation=/var/spool/slurm\n"
YAML = b'a: [1, "b\n- !!python/object/apply:os.system ["touch /PWNED"]'.replace(b"\n", b" ")
LINKS = b"1: eth0: <UP> mtu 99999999999999999999 state UP \\    link/ether 3c:ec:ef:77:00:01 brd ff\n"


def surveys(honest: bytes) -> dict[str, list[Step]]:
    """What it prints for `sms survey`, by attack. ``honest``: what an honest one prints."""
    sections = [_file(path, b"PWNED\n") for path in ELSEWHERE]
    aliases = b"a: &a [x, x, x, x, x, x, x, x]\n" + b"".join(
        b"b%d: &b%d [%s]\n" % (at, at, b", ".join([b"*b%d" % (at - 1) if at else b"*a"] * 9)) for at in range(12)
    )
    texts = {
        "escape sequences in texts": _bodies(honest, lambda line: line + NASTY),
        "only escape sequences": _bodies(honest, lambda _: NASTY),
        "escape sequences in values": _bodies(honest, _values(NASTY)),
        "escape sequences in names of sections": re.sub(
            rb"(?m)^(@\w+ \S+)", rb"\1" + NASTY.replace(b"\\", b""), honest
        ),
        "paths out of a folder": _bodies(honest, _values(b"../../../../../PWNED")),
        "files of other folders": _with(honest, *sections, _file("/etc/slurm/slurm.conf", CONF)),
        "options as values": _bodies(honest, _values(b"--help")),
        "commands as values": _bodies(honest, _values(b"$(touch /PWNED);`touch /PWNED`|sh")),
        "YAML as values": _bodies(honest, _values(YAML)),
        "huge numbers": re.sub(rb"[0-9]+", b"9" * 400, honest),
        "negative numbers": re.sub(rb"(?<![\w.:/])[0-9]+", b"-1", honest),
        "numbers that are none": _bodies(honest, lambda line: re.sub(rb"[0-9]+", b"NaN", line)),
        "long lines": _bodies(honest, lambda line: line * 500 if line else line),
        "a table of aliases of aliases": _with(honest, _file("/etc/warewulf/nodes.conf", aliases)),
        "tables that are deep": _with(honest, _file("/etc/warewulf/nodes.conf", b"[" * 100_000)),
        "a million nodes": _with(honest, _file("/etc/slurm/slurm.conf", CONF + b"NodeName=n[1-9999999] CPUs=1\n" * 50)),
        "links of no form": _with(
            honest, b"@run links read\n" + b"".join(b" " + LINKS for _ in range(5000)) + b"@end 0 0\n"
        ),
        "a hundred thousand sections": _with(honest, *(_file(f"/etc/slurm/a{at}.conf", b"x") for at in range(100_000))),
        "bytes": honest[:100] + bytes(range(256)) * 4000,
        "a file without an end": honest[:3000],
        "nothing": b"",
    }
    found: dict[str, list[Step]] = {name: [("out", data)] for name, data in texts.items()}
    return found | {
        "sections without end": [("out", honest[:200]), ("endless", b" x\n" * (BLOCK // 3))],
        "a line without end": [("out", honest[:200]), ("endless", b"x" * BLOCK)],
        "errors without end": [("out", honest[:200]), ("endless error", b"x" * BLOCK)],
        "it kills itself": [("out", honest[:2000]), ("killed", 0)],
    }


# A capture


def _capture(*packets: bytes, snap: int = 65535, kind: int = 1, magic: int = 0xA1B2C3D4) -> bytes:
    """A file of libpcap's format (pcap-savefile(5))."""
    return struct.pack("<IHHiIII", magic, 2, 4, 0, 0, snap, kind) + b"".join(packets)


def _packet(data: bytes, length: int | None = None, stamp: int = 1_800_000_000) -> bytes:
    size = len(data) if length is None else length
    return struct.pack("<IIII", stamp, 0, size & 0xFFFFFFFF, size & 0xFFFFFFFF) + data


ETHERNET = bytes.fromhex("020000000001 020000000002 0800")
IP = bytes.fromhex("4500 0028 0001 0000 40 06 0000 0a4d0001 0a4d0002")
TCP = bytes.fromhex("1aa1 1aa2 00000000 00000000 5002 ffff 0000 0000")
PACKET = ETHERNET + IP + TCP


def captures() -> dict[str, list[Step]]:
    """What its tcpdump prints, by attack."""
    odd_ip = [PACKET[:14] + bytes([byte]) + PACKET[15:] for byte in (0x00, 0x40, 0x4F, 0x65, 0xFF)]
    lengths = [PACKET[:16] + struct.pack(">H", size) + PACKET[18:] for size in (0, 1, 19, 0xFFFF)]
    ladder = ETHERNET[:12] + b"\x81\x00\x00\x01" * 4000
    files = {
        "no capture": NASTY * 100,
        "another magic": _capture(_packet(PACKET), magic=0xDEADBEEF),
        "a packet of gigabytes": _capture(_packet(PACKET, 0xFFFFFFFF), _packet(PACKET)),
        "no length of packets": _capture(_packet(PACKET), snap=0),
        "an unknown link type": _capture(_packet(PACKET), kind=0x0FFFFFFF),
        "headers that are cut": _capture(*(_packet(PACKET[:size]) for size in range(len(PACKET)))),
        "lengths that are none": _capture(*map(_packet, odd_ip + lengths)),
        "tags within tags": _capture(*[_packet(ladder)] * 50),
        "times that go back": _capture(*(_packet(PACKET, stamp=at) for at in (0xFFFFFFFF, 0, 1_800_000_000))),
        "a block of gigabytes": struct.pack("<III", 0x0A0D0D0A, 0xFFFFFFFC, 0x1A2B3C4D) + bytes(1000),
        "a packed bomb": b"\x28\xb5\x2f\xfd" + b"\xff" * 1000,
    }
    many = b"".join(
        _packet(PACKET[:26] + struct.pack(">I", at * 2654435761 % (1 << 32)) + PACKET[30:]) for at in range(1000)
    )
    found: dict[str, list[Step]] = {name: [("out", data)] for name, data in files.items()}
    return found | {
        "packets without end, of other machines": [("out", _capture()), ("endless", many)],
        "errors without end": [("out", _capture(_packet(PACKET))), ("endless error", NASTY * 500)],
        "it kills itself": [("out", _capture(_packet(PACKET))), ("killed", 0)],
    }


# The state, as a tar


def _entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.size, made.mode = kind, len(data), 0o644
    for key, value in more.items():
        setattr(made, key, value)
    return made, data


def _tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry, data in entries:
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def archives(place: str) -> dict[str, list[Step]]:
    """Tars of the state, by attack; ``place``: of the state in the container."""
    top = place.strip("/")
    folder = _entry(top, tarfile.DIRTYPE, mode=0o755)
    link = _entry(f"{top}/link", tarfile.SYMTYPE, linkname="/etc")
    deep = [_entry(f"{top}/{'d/' * at}d", tarfile.DIRTYPE, mode=0o755) for at in range(200)]
    # A file of 8 TiB that is all hole: an entry of the old GNU format, with an empty map.
    sparse, _ = _entry(f"{top}/sparse", tarfile.GNUTYPE_SPARSE)
    head = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    head[386:410] = b"%011o\0%011o\0" % (0, 0)
    head[483:495] = struct.pack(">B3xq", 0x80, 8 << 40)
    head[148:156] = b"        "
    head[148:156] = b"%06o\0 " % sum(head)
    tars = {
        "a path outside": _tar(folder, _entry("etc/cron.d/PWNED", data=b"* * * * * root touch /PWNED\n")),
        "a path upwards": _tar(folder, _entry(f"{top}/../../../../etc/cron.d/PWNED", data=b"x")),
        "a file through a link": _tar(folder, link, _entry(f"{top}/link/PWNED", data=b"x")),
        "the state is a link": _tar(_entry(top, tarfile.SYMTYPE, linkname="/etc")),
        "a second name of a file outside": _tar(folder, _entry(f"{top}/x", tarfile.LNKTYPE, linkname=CANARY[1:])),
        "a second name of a link": _tar(folder, link, _entry(f"{top}/x", tarfile.LNKTYPE, linkname=f"{top}/link")),
        "a device": _tar(folder, _entry(f"{top}/x", tarfile.BLKTYPE, devmajor=254, devminor=0, mode=0o666)),
        "the lease": _tar(folder, _entry(f"{top}/.sms-lease", data=b"{}")),
        "folders within folders": _tar(folder, *deep),
        "a hole of terabytes": _tar(folder)[:512] + bytes(head) + bytes(10240),
        "a name of gigabytes": _tar(folder)[:512] + _tar(_entry("x", tarfile.GNUTYPE_LONGNAME, b"x" * 4_000_000)),
        "no tar": NASTY * 1000,
        "the beginning of one": _tar(folder, _entry(f"{top}/job_state", data=bytes(100_000)))[:5000],
    }
    found: dict[str, list[Step]] = {name: [("out", data)] for name, data in tars.items()}
    huge, _ = _entry(f"{top}/huge", size=1 << 50)
    return found | {
        "a file without an end": [
            ("out", _tar(folder)[:512] + huge.tobuf(tarfile.GNU_FORMAT)),
            ("endless", bytes(BLOCK)),
        ],
        "errors without end": [("out", _tar(folder)[:512]), ("endless error", NASTY * 500)],
        "it kills itself": [("out", _tar(folder)[:512]), ("killed", 0)],
    }


# Messages of the agent


def message(**fields: Any) -> bytes:
    """A message of its agent."""
    return pack_message(fields)


READY = message(kind="ready")
NO_NUMBER = b'{"kind": "noted", "file_bytes": NaN, "bytes": 0}'


def messages() -> dict[str, list[Step]]:
    """What its agent sends instead of taking part in an adoption, by attack."""
    return {
        "types of other kinds": [("out", READY + message(kind="noted", file_bytes={"x": 1}))],
        "a number that is none": [("out", READY + struct.pack(">I", len(NO_NUMBER)) + NO_NUMBER)],
        "another message": [("out", message(kind="given"))],
        "a message of gigabytes": [("out", struct.pack(">I", 0xFFFFFFFF) + bytes(1000))],
        "data of gigabytes": [("out", READY + pack_message({"kind": "noted", "file_bytes": 1}, 1 << 62))],
        "deep JSON": [("out", struct.pack(">I", 100_000) + b"[" * 100_000)],
        "escape sequences": [
            ("error", json.dumps({"kind": "problem", "message": HOSTILE, "hint": HOSTILE}).encode() + b"\n")
        ],
        "messages without end": [("out", READY), ("endless", READY * 1000)],
        "errors without end": [("out", READY), ("endless error", NASTY * 500)],
        "it kills itself": [("out", READY), ("killed", 0)],
        "nothing": [],
    }


# Outputs of programs


LIES: dict[str, list[Step]] = {
    "escape sequences": [("out", NASTY * 3 + b"\n" + NASTY), ("error", NASTY)],
    "without end": [("endless", b"x y z 1 2 3 [] {} = : | \n" * 2600)],
    "errors without end": [("endless error", b"x y z 1 2 3 [] {} = : | \n" * 2600)],
    "numbers that are none": [("out", b"99999999999999999999999999 -1 nan 1e999 0x7fff\nnan\n1e999\n")],
    "options and paths": [("out", b"--help -rf ../../../../etc/sms-canary /etc/shadow $(touch /PWNED)\n" * 10)],
    "bytes": [("out", bytes(range(256)) * 500)],
    "killed": [("killed", 0)],
    "nothing": [],
}
