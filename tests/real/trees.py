"""Trees with everything that files can have, and a comparison of two of them: written without the agent's code."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import struct
import subprocess
from pathlib import Path
from typing import Any

Print = dict[bytes, dict[str, Any]]
"""By path below the root: all that a file has."""

BOOKS = {f"trusted.overlay.{name}" for name in ("origin", "impure", "nlink", "uuid")}
"""What overlayfs writes for itself."""


def fingerprint(root: Path, *, below: tuple[bytes, ...] = (b"",)) -> Print:
    """Every file below ``root``, or below some paths in it, with all that it has."""
    found: Print = {}
    links: dict[int, bytes] = {}
    for at in below:
        top = (os.fsencode(root) + b"/" + at).rstrip(b"/")
        if os.path.lexists(top):
            _print(top, len(os.fsencode(root)), found, links)
    return found


def _print(path: bytes, cut: int, found: Print, links: dict[int, bytes]) -> None:
    state = os.lstat(path)
    name = path[cut:] or b"/"
    kind = stat.S_IFMT(state.st_mode)
    one: dict[str, Any] = {"mode": oct(state.st_mode), "owner": (state.st_uid, state.st_gid)}
    one["attributes"] = {
        key: os.getxattr(path, key, follow_symlinks=False)
        for key in os.listxattr(path, follow_symlinks=False)
        if key not in BOOKS
    }
    if kind != stat.S_IFDIR or state.st_mtime < 10**9:  # folders' times change with what is in them; old ones were set
        one["mtime"] = state.st_mtime_ns
    if kind == stat.S_IFREG:
        data = Path(os.fsdecode(path)).read_bytes()
        one["size"], one["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        one["flags"] = subprocess.run(["lsattr", "-d", path], capture_output=True, check=True).stdout.split()[0]
    if kind == stat.S_IFLNK:
        one["target"] = Path(os.fsdecode(path)).readlink()
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        one["device"] = state.st_rdev
    if kind != stat.S_IFDIR and state.st_nlink > 1:
        one["same as"] = links.setdefault(state.st_ino, name)
    found[name] = one
    if kind == stat.S_IFDIR:
        for entry in sorted(Path(os.fsdecode(path)).iterdir()):
            _print(os.fsencode(entry), cut, found, links)


def write(path: Path, data: bytes = b"x") -> Path:
    """A file, its folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def access_list(*more: tuple[int, int, int]) -> bytes:
    """A POSIX ACL as its attribute holds it; ``more`` are tag, permissions, id of named users (2) and groups (8)."""
    nobody = 0xFFFFFFFF
    entries = sorted([(1, 6, nobody), *more, (4, 4, nobody), (16, 7, nobody), (32, 4, nobody)])
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def make_everything(root: Path) -> dict[str, Path]:
    """One of each kind of file, with each thing that a file can have; by the name of that thing."""
    made = {
        "plain": write(root / "plain", b"text\n"),
        "empty": write(root / "empty", b""),
        "set-user-id": write(root / "suid"),
        "no permissions": write(root / "secret"),
        "owner": write(root / "owned"),
        "old": write(root / "old"),
        "large": write(root / "large", random.Random(1).randbytes(5_000_001)),
        "sparse": write(root / "sparse", b""),
        "user attribute": write(root / "user"),
        "trusted attribute": write(root / "trusted"),
        "capability": write(root / "capable"),
        "access list": write(root / "listed"),
        "immutable": write(root / "immutable"),
        "append only": write(root / "append"),
        "hard link": write(root / "one", b"linked"),
        "newline": write(root / "new\nline"),
        "no text": write(root / os.fsdecode(b"\xff\xfe\x1b[2J")),
        "longest name": write(root / ("n" * 255)),
        "like an option": write(root / "-rf"),
    }
    made["set-user-id"].chmod(0o6755)
    made["no permissions"].chmod(0)
    os.chown(made["owner"], 12345, 4294967)
    with made["sparse"].open("wb") as stream:
        stream.truncate(300 << 20)
        stream.seek(123 << 20)
        stream.write(b"in the middle")
    os.setxattr(made["user attribute"], "user.note", b"\0\xff" * 100)
    os.setxattr(made["trusted attribute"], "trusted.sms", b"1")
    os.setxattr(made["access list"], "system.posix_acl_access", access_list((2, 6, 77), (8, 4, 88)))
    os.setxattr(made["capability"], "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    folder = root / "folder"
    folder.mkdir()
    os.link(made["hard link"], folder / "two")
    os.link(made["hard link"], root / "three")
    made["symbolic link"] = root / "link"
    made["symbolic link"].symlink_to("/nowhere/at/all")
    made["long symbolic link"] = root / "longlink"
    made["long symbolic link"].symlink_to("x/" * 200)
    os.chown(made["long symbolic link"], 5, 6, follow_symlinks=False)
    os.setxattr(made["symbolic link"], "trusted.on.link", b"2", follow_symlinks=False)
    made["pipe"] = root / "pipe"
    os.mkfifo(made["pipe"], 0o640)
    made["socket"] = root / "socket"
    os.mknod(made["socket"], stat.S_IFSOCK | 0o700)
    made["device"] = root / "device"
    os.mknod(made["device"], stat.S_IFCHR | 0o620, os.makedev(1, 7))
    made["block device"] = root / "block"
    os.mknod(made["block device"], stat.S_IFBLK | 0o600, os.makedev(259, 300))
    made["whiteout"] = root / "whiteout"
    os.mknod(made["whiteout"], stat.S_IFCHR, 0)
    made["opaque folder"] = root / "opaque"
    made["opaque folder"].mkdir(mode=0o1777)
    os.setxattr(made["opaque folder"], "trusted.overlay.opaque", b"y")
    made["default access list"] = root / "inherits"
    made["default access list"].mkdir()
    write(made["default access list"] / "before", b"")
    os.setxattr(made["default access list"], "system.posix_acl_default", access_list((2, 7, 77)))
    made["immutable folder"] = root / "fixed"
    write(made["immutable folder"] / "inside")
    os.utime(made["old"], ns=(123456789, 987654321))
    os.utime(made["symbolic link"], ns=(10**18, 10**17 + 1), follow_symlinks=False)
    for path in (folder, made["default access list"], made["opaque folder"]):
        os.utime(path, ns=(5 * 10**17, 6 * 10**17 + 7))
    os.link(made["append only"], root / "append too")
    subprocess.run(["chattr", "+i", made["immutable"], made["immutable folder"]], check=True)
    subprocess.run(["chattr", "+a", made["append only"]], check=True)
    return made


def thaw_flags(root: Path) -> None:
    """So that it can be removed."""
    subprocess.run(["chattr", "-R", "-f", "-i", "-a", root], check=False)


def stir(root: Path, seed: int, count: int) -> None:
    """Change a tree at random, from a seed."""
    dice = random.Random(seed)
    for _ in range(count):
        folders = [Path(top) for top, _, _ in os.walk(root)]
        files = [Path(top) / name for top, _, names in os.walk(root) for name in names]
        try:
            _stir(dice, dice.choice(folders), files)
        except OSError:
            continue


def _stir(dice: random.Random, folder: Path, files: list[Path]) -> None:
    new = folder / f"n{dice.randrange(8)}"
    old = dice.choice(files) if files else None
    what = dice.randrange(15)
    if what < 3 and (new.is_file() or not new.exists()):  # a pipe would wait for its reader
        new.write_bytes(dice.randbytes(dice.choice((0, 10, 5000, 200_000))))
    elif what < 5:
        new.mkdir()
    elif what == 5:
        new.symlink_to(f"to{dice.randrange(3)}")
    elif what == 6:
        os.mkfifo(new)
    elif old is None:
        return
    elif what == 7:
        old.unlink()
    elif what == 8:
        subprocess.run(["rm", "-rf", folder / "n1"], check=True)
    elif what == 9:
        old.chmod(dice.choice((0o600, 0o644)))
    elif what == 10:
        os.chown(old, dice.randrange(3), 0, follow_symlinks=False)
    elif what == 11:
        os.setxattr(old, "user.n", bytes([dice.randrange(3)]))
    elif what == 12 and old.is_file() and not old.is_symlink():
        with old.open("r+b") as stream:
            stream.seek(dice.randrange(old.stat().st_size + 1))
            stream.write(b"changed")
    elif what == 13:
        old.rename(new)
    elif what == 14:
        os.link(old, new, follow_symlinks=False)
