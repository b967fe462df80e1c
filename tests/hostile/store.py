"""A hostile store of snapshots: what the programs of a machine say to which they are pushed, and what it has stored.

Its programs are replaced by ``tests.hostile.far``.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

from appliance.agent.store import CHUNK
from appliance.agent.transfer import COMPRESSED, FRAME, HEAD, LENGTH, MAGIC, PLAIN
from tests.conftest import find_tool
from tests.hostile.far import Step
from tests.hostile.vm import HOSTILE

MOUNTS, PROC, NETWORK, SIGNALS, REST, PARSERS = (
    *("mounts and links", "/proc and descriptors", "network"),
    *("signals and ptrace", "files at rest", "parsers"),
)
CANARY = "/etc/sms-canary"
"""A secret file of each host."""

# What an agent there answers


def listing(snapshots: list[Any], **more: Any) -> bytes:
    """The result of the command ``list``."""
    usual = {"kind": "result", "snapshots": snapshots, "broken": {}, "stored_bytes": 1, "free_bytes": 1 << 40}
    return json.dumps({**usual, "identity": {}, **more}).encode() + b"\n"


def offer(manifest: dict[str, Any] | bytes, digests: bytes, *, announced: tuple[int, int] | None = None) -> bytes:
    """The first part of an export."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    return MAGIC + struct.pack(HEAD, *(announced or (len(text), len(digests)))) + text + digests


def frame(data: bytes, kind: int = PLAIN, length: int | None = None) -> bytes:
    """A chunk of an export."""
    return struct.pack(FRAME, kind, len(data) if length is None else length) + data


BOMB = zlib.compress(bytes(200 << 20), 9)
"""200 MiB in 200 KiB; the first 128 KiB are as much as a frame may have."""
COUNT = 4
"""Chunks of a snapshot that is offered."""
DIGESTS = b"".join(hashlib.sha256(bytes([number])).digest() for number in range(1, COUNT + 1))
REQUEST = struct.calcsize(LENGTH) + 1
"""Bytes of the request for ``COUNT`` chunks."""


def offered(manifest: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The manifest of a snapshot of ``COUNT`` chunks, without ``health`` and with changes."""
    fits = {"digests": hashlib.sha256(DIGESTS).hexdigest(), "size": COUNT * CHUNK, "used_bytes": COUNT * CHUNK}
    kept = {key: value for key, value in manifest.items() if key != "health"}
    return {**kept, "uuid": "00000000-0000-4000-8000-000000000bad", "number": 7, **fits, **changes}


def streams(honest: dict[str, Any]) -> dict[str, list[Step]]:
    """Exports, by attack. ``honest``: a manifest of the store."""
    made = offered(honest)
    head = offer(made, DIGESTS)
    asked: list[Step] = [("out", head), ("read", REQUEST)]
    texts = {"reason": HOSTILE * 100, "notes": [HOSTILE] * 100}
    heads: dict[str, bytes] = {
        "not a snapshot": b"#!/bin/sh\ntouch /PWNED\n" * 100,
        "a path as its number": offer(offered(honest, number="../../../PWNED"), DIGESTS),
        "a path as its uuid": offer(offered(honest, uuid="../" * 10 + "PWNED"), DIGESTS),
        "an option as its host": offer(offered(honest, host="--help"), DIGESTS),
        "escape sequences in names": offer(offered(honest, host=HOSTILE), DIGESTS),
        "another cluster": offer(offered(honest, cluster="other"), DIGESTS),
        "a generation that is none": offer(offered(honest, generation=1 << 62), DIGESTS),
        "terabytes": offer(offered(honest, size=1 << 60, used_bytes=1 << 60), DIGESTS),
        "a size that its digests do not have": offer(offered(honest, size=1 << 40), DIGESTS),
        "deep JSON": offer(b"[" * 200_000, DIGESTS),
        "lists for objects": offer(offered(honest, checks=[1], image=[]), DIGESTS),
        "digests without end announced": offer(made, b"", announced=(10, 1 << 62)),
        "a manifest without end announced": offer(made, b"", announced=(0xFFFFFFFF, 0)),
        "other digests": offer(made, bytes(len(DIGESTS))),
    }
    found: dict[str, list[Step]] = {name: [("out", data)] for name, data in heads.items()}
    found |= {
        "escape sequences in its notes": [("out", offer(offered(honest, **texts), DIGESTS)), ("read", REQUEST)],
        "chunks with other contents": [*asked, ("out", frame(bytes(range(256)) * 256) * COUNT)],
        "a chunk that unpacks without end": [*asked, ("out", frame(BOMB[: 2 * CHUNK], COMPRESSED) * COUNT)],
        "a chunk of gigabytes announced": [*asked, ("out", frame(b"", PLAIN, 0xFFFFFFFF))],
        "an encoding that is none": [*asked, ("out", frame(b"x", 77) * COUNT)],
        "chunks without end": [*asked, ("endless", frame(b"\2" * 65531))],
        "a list without end before the offer": [("endless", b"\0" * CHUNK)],
        "messages without end": [*asked, ("endless error", b'{"kind":"detail","text":"' + b"n" * 65507 + b'"}\n')],
        "lines without end on the other channel": [("endless error", b"x" * CHUNK)],
        "it kills itself in the middle": [*asked, ("out", frame(bytes(CHUNK))), ("killed", 0)],
        "it ends with success too early": asked,
    }
    return found


def lists(honest: dict[str, Any]) -> dict[str, bytes]:
    """Lists of snapshots, by attack. ``honest``: a snapshot of the list."""

    def one(**changes: Any) -> bytes:
        return listing([{**honest, **changes}])

    return {
        "nothing but a number": listing([{"number": 1}]),
        "texts for numbers": one(generation="9", taken="x", size="../x", used_bytes=[1]),
        "null": listing([dict.fromkeys(honest) | {"number": 1}]),
        "an object for each value": listing([{key: {"x": [1]} for key in honest} | {"number": 1}]),
        "no health": one(health=7),
        "a generation that is none": one(generation=1 << 62),
        "the last generation": one(generation=(1 << 31) - 1, uuid="f" * 32),
        "a negative generation": one(generation=-(1 << 40)),
        "a time that is none": one(taken=1e300),
        "an impossible number": one(number=-7),
        "escape sequences": one(host=HOSTILE, reason=HOSTILE, notes=[HOSTILE], uuid=HOSTILE, method=HOSTILE),
        "paths": one(host="../../../../PWNED", uuid="/PWNED", cluster="../PWNED"),
        "options": one(host="--help", uuid="-rf", reason="--"),
        "another cluster's identity": one(cluster_uuid="00000000-0000-4000-8000-000000000bad"),
        "an identity that is none": listing([honest], identity={"uuid": [1], "adopted": "x"}),
        "the same one many times": listing([honest] * 5000),
        "broken ones with other keys": listing([honest], broken={"../x": HOSTILE, "1": HOSTILE}),
        "no list": listing({"number": 1}),  # type: ignore[arg-type]
        "deep JSON": b'{"kind":"result","snapshots":' + b"[" * 100_000 + b"\n",
        "bytes": bytes(range(256)) * 1000 + b"\n",
        "a refusal with escape sequences": json.dumps(
            {"kind": "problem", "message": HOSTILE, "hint": HOSTILE, "status": 3}
        ).encode()
        + b"\n",
        "a problem of another kind": b'{"kind":"problem","message":{"x":1},"status":"x","busy":[]}\n',
    }


# What an overlay in its snapshots has

TREE = {
    "to a file": "/etc/sms-canary",
    "to a folder": "../../../../../../../../../etc",
    "to itself": "to itself",
    "to the host's processes": "/proc/1/root/etc/sms-canary",
    "to a descriptor": "/proc/self/fd/0",
}
"""Links, by name, in the folder ``h``."""


def make_hostile_image(path: Path) -> Path:
    """A file system as root of the container leaves it: links out, programs of root, devices, pipes, names, holes."""
    tree = path.with_suffix(".tree")
    top = tree / "upper" / "h"
    top.mkdir(parents=True)
    for name, target in TREE.items():
        (top / name).symlink_to(target)
    for name, mode in (("setuid", 0o4755), ("setgid", 0o2755)):
        (top / name).write_bytes(b"#!/bin/sh\ntouch /PWNED\n")
        (top / name).chmod(mode)
    os.mknod(top / "memory", 0o020666, os.makedev(1, 1))
    os.mknod(top / "disk", 0o060666, os.makedev(254, 0))
    os.mkfifo(top / "pipe")
    for name in ("--help", "$(touch PWNED)", "a\x1b]0;title\x07\nb", "..."):
        (top / name).write_text("x")
    (top / "inner").mkdir()
    (top / "inner" / "file").write_text("y")
    with (top / "holes").open("wb") as stream:
        stream.truncate(15 << 30)
    path.unlink(missing_ok=True)
    argv = [find_tool("mke2fs"), "-q", "-t", "ext3", "-b", "1024", "-d", str(tree), str(path), "16M"]
    subprocess.run(argv, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1"})
    # cap_setuid, in effect (linux/capability.h, struct vfs_cap_data)
    capability = path.with_suffix(".capability")
    capability.write_bytes(struct.pack("<5I", 0x02000001, 1 << 7, 0, 0, 0))
    commands = (
        "set_inode_field /upper/h/setuid uid 0",
        "ea_set /upper/h/inner trusted.overlay.redirect /../../../../etc",
        "ea_set /upper/h/inner trusted.overlay.opaque y",
        "ea_set /upper/h/inner/file trusted.overlay.metacopy x",
        f"ea_set -f {capability} /upper/h/inner/file security.capability",
    )
    subprocess.run(
        [find_tool("debugfs"), "-w", "-f", "/dev/stdin", str(path)],
        input="".join(f"{line}\n" for line in commands).encode(),
        check=True,
        capture_output=True,
    )
    subprocess.run(["rm", "-rf", str(tree)], check=True)
    return path


FAULTS = {
    "no file system": (1024, bytes(1024)),
    "blocks of another size": (1024 + 24, struct.pack("<I", 0xFFFF)),
    "more blocks than it has": (1024 + 4, struct.pack("<I", 0xFFFFFFFF)),
    "no inodes in a group": (1024 + 40, struct.pack("<I", 0)),
    "no blocks in a group": (1024 + 32, struct.pack("<I", 0)),
    "inodes of another size": (1024 + 88, struct.pack("<H", 0xFFFF)),
    "groups that lie elsewhere": (2048, b"\xff" * 64),
    "a panic of the kernel at an error": (1024 + 60, struct.pack("<H", 3)),
    "features of a later time": (1024 + 96, struct.pack("<I", 0x7FFFFFFF)),
}
"""File systems that are none: what is written where. The superblock is at 1024 (fs/ext4/ext4.h)."""


def borgs() -> dict[str, list[Step]]:
    """What the borg of a backup machine says instead of `borg serve`, by attack."""
    return {
        "output without end": [("endless", b"\x91" * CHUNK)],
        "messages without end": [("endless error", b"x" * 1023 + b"\n" + b"x" * (CHUNK - 1024))],
        "lines without end": [("endless error", (b"Remote: x\n" * 6554)[:CHUNK])],
        "an array of gigabytes announced": [("read", 1), ("out", b"\xdd\xff\xff\xff\xff" * 10)],
        "bytes of gigabytes announced": [("read", 1), ("out", b"\xc6\xff\xff\xff\xff" + bytes(CHUNK))],
        "arrays within arrays": [("read", 1), ("out", b"\x91" * 500_000)],
        "a reply that is none": [("read", 1), ("out", b"\x84\xa1i\x01\xa1r\x00\xa1s\xc0\xa1x\xc0" * 100)],
        "escape sequences": [("error", HOSTILE.encode() * 100), ("out", HOSTILE.encode() * 100)],
        "an error with escape sequences": [
            (
                "error",
                json.dumps(
                    {
                        "type": "log_message",
                        "levelname": "ERROR",
                        "name": HOSTILE,
                        "msgid": HOSTILE,
                        "message": HOSTILE,
                        "time": 1,
                    }
                ).encode()
                + b"\n"
                + b"$LOG ERROR x Remote: "
                + HOSTILE.encode()
                + b"\n",
            ),
        ],
        "it kills itself": [("read", 1), ("killed", 0)],
        "nothing": [],
    }
