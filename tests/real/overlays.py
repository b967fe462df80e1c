"""A small overlay, mounted from a loop device, and the agent beside it: what tests of snapshots share."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.tools import agent
from tests.waiting import soon

FACTS = {"cluster": "t", "host": "h", "generation": 1, "image": {}, "slurm_cluster": "t"}
HEAD = "/var/spool/slurmctld/job_state"
SLURM = b"\0\0\0\x11PROTOCOL_VERSION\0" + bytes(100)


def sh(*argv: str | Path, **more: Any) -> str:
    """Run a program; give what it says."""
    words = [str(word) for word in argv]
    said: str = subprocess.run(words, check=True, capture_output=True, text=True, **more).stdout
    return said


@dataclass
class Said:
    """How a run of the agent ended."""

    status: int
    lines: list[dict[str, Any]]
    stderr: str
    stdout: bytes = b""

    @property
    def last(self) -> dict[str, Any]:
        """Its result or problem; empty where it was killed."""
        return self.lines[-1] if self.lines and self.lines[-1]["kind"] in ("result", "problem") else {}

    @property
    def steps(self) -> list[str]:
        """Names of the steps that it has begun."""
        return [line["name"] for line in self.lines if line["kind"] == "step"]


@dataclass
class Bed:
    """An overlay and its store below one folder."""

    folder: Path
    size_mb: int = 64
    loop: str = ""
    store_folder: Path | None = None
    requests: dict[str, Any] = field(default_factory=dict)

    @property
    def overlay(self) -> Path:
        return self.folder / "ov.img"

    @property
    def store(self) -> Path:
        return self.store_folder or self.folder / "store"

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def upper(self) -> Path:
        return self.tree / "upper"

    def make(self) -> None:
        """An empty overlay as Apptainer makes it, with something like Slurm's state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sh("apptainer", "overlay", "create", "--size", str(self.size_mb), "--sparse", self.overlay)
        (self.folder / "agent.pyz").write_bytes(agent.build_zipapp())
        self.tree.mkdir()
        self.mount()
        state = self.upper / HEAD[1:]
        state.parent.mkdir(parents=True)
        state.write_bytes(SLURM)

    def mount(self) -> None:
        """As the services container does."""
        self.loop = sh("losetup", "--find", "--show", self.overlay).strip()
        sh("mount", "-t", "ext3", self.loop, self.tree)

    def unmount(self) -> None:
        """As the services container does when it ends."""
        if self.loop:
            # Whatever a test has left: a frozen file system would hold every sync of this machine.
            subprocess.run(["fsfreeze", "--unfreeze", str(self.tree)], capture_output=True, check=False)
            sh("umount", self.tree)
            sh("losetup", "--detach", self.loop)
            self.loop = ""
            # A program that looks at loop devices may hold one for a moment.
            soon(lambda: not sh("losetup", "-j", self.overlay))

    def ask(self, command: str, *, before: str = "", timeout: float = 120, **more: Any) -> Said:
        """Run the agent; ``before`` is Python that runs in it first."""
        request = {"store": str(self.store), **self.requests, **more}
        if command == "take":
            request = {
                "overlay": str(self.overlay),
                "lock": str(self.folder / "lock"),
                "facts": FACTS,
                "state": ["/var/spool/slurmctld"],
                "heads": {HEAD: "PROTOCOL_VERSION"},
                **request,
            }
        program = (
            f"import sys; sys.path.insert(0, {str(self.folder / 'agent.pyz')!r})\n"
            + textwrap.dedent(before)
            + "\nfrom appliance.agent.main import main\nsys.exit(main())\n"
        )
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", program, command, json.dumps(request)],
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        lines = []
        for line in done.stdout.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return Said(done.returncode, lines, done.stderr.decode(errors="replace"), done.stdout)

    def take(self, **more: Any) -> dict[str, Any]:
        """A snapshot that must come out; its manifest."""
        said = self.ask("take", **more)
        assert said.status == 0, (said.last, said.stderr)
        snapshot: dict[str, Any] = said.last["snapshot"]
        return snapshot

    def numbers(self) -> list[int]:
        """Snapshots that count."""
        said = self.ask("list")
        assert not said.last["broken"]
        return [one["number"] for one in said.last["snapshots"]]

    def restore(self, number: int, name: str = "back.img") -> Path:
        """A snapshot laid out as a file."""
        target = self.folder / name
        target.unlink(missing_ok=True)
        said = self.ask("restore", snapshot=str(number), target=str(target))
        assert said.status == 0, (said.last, said.stderr)
        return target

    def writes(self) -> bool:
        """Whether a write succeeds at once: the file system is not frozen."""
        program = "import os,sys; f=os.open(sys.argv[1], os.O_WRONLY|os.O_CREAT); os.write(f, b'x'); os.fsync(f)"
        try:
            subprocess.run([sys.executable, "-c", program, str(self.upper / "probe")], timeout=1.5, check=True)
        except subprocess.TimeoutExpired:
            return False
        return True

    def assert_clean(self) -> None:
        """Nothing of a run is left but what counts: no partial one, no mount, no trace."""
        assert not list(self.store.glob("*.partial"))
        assert not list((self.store / "tmp").iterdir())
        assert not [
            path
            for path in Path("/run/sms").iterdir()
            if path.name.startswith(("agent-", "trace-")) and not path.suffix
        ]
        assert str(self.folder) not in Path("/proc/self/mounts").read_text().replace(str(self.tree), "")


@contextmanager
def bed(folder: Path, **more: Any) -> Iterator[Bed]:
    """An overlay that is mounted for as long as the context lasts."""
    made = Bed(folder, **more)
    Path("/run/sms").mkdir(exist_ok=True)
    try:
        made.make()
        yield made
    finally:
        made.unmount()


@contextmanager
def file_system(folder: Path, kind: str, size_mb: int) -> Iterator[Path]:
    """A file system of another kind, on a loop device."""
    image, target = folder / f"{kind}.img", folder / kind
    target.mkdir(parents=True)
    with image.open("wb") as stream:
        stream.truncate(size_mb << 20)
    sh(f"mkfs.{kind}", "-q", image)
    sh("mount", "-o", "loop", image, target)
    try:
        yield target
    finally:
        sh("umount", target)


class Writer:
    """Changes files in every way there is, until it is stopped; from a seed."""

    PROGRAM = textwrap.dedent("""\
        import mmap, os, random, sys, time
        root, seed = sys.argv[1], int(sys.argv[2])
        r = random.Random(seed)
        os.makedirs(root, exist_ok=True)
        n = 0
        lines = open(os.path.join(root, "lines"), "a")
        while True:
            n += 1
            lines.write("%d\\n" % n); lines.flush(); os.fsync(lines.fileno())
            path = os.path.join(root, "f%d" % r.randrange(40))
            try:
                what = r.randrange(9)
                if what == 0: open(path, "wb").write(os.urandom(r.randrange(1, 300000)))
                elif what == 1: open(path, "ab").write(os.urandom(r.randrange(1, 9000)))
                elif what == 2:
                    with open(path, "r+b") as f:
                        f.seek(r.randrange(os.path.getsize(path) or 1)); f.write(b"in the middle")
                elif what == 3:
                    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as m: m[r.randrange(len(m))] = n % 256
                elif what == 4: os.unlink(path)
                elif what == 5: os.truncate(path, r.randrange(1, 100000))
                elif what == 6: os.rename(path, os.path.join(root, "f%d" % r.randrange(40)))
                elif what == 7: os.setxattr(path, "user.n", os.urandom(r.randrange(1, 300)))
                elif what == 8:
                    folder = os.path.join(root, "d%d" % r.randrange(20))
                    if os.path.isdir(folder):
                        for name in os.listdir(folder): os.unlink(os.path.join(folder, name))
                        os.rmdir(folder)
                    else:
                        os.mkdir(folder)
                        for i in range(r.randrange(60)): open(os.path.join(folder, "a long name of a file %d" % i), "w")
            except (OSError, ValueError): pass
            time.sleep(r.random() * 0.004)
    """)

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, str(root), str(seed or random.getrandbits(30))]
        )
        self.lines = root / "lines"
        while not self.lines.exists():
            time.sleep(0.01)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def count(self) -> int:
        """Lines so far."""
        return len(self.lines.read_text().splitlines())


def is_prefix(text: str) -> int:
    """How many numbered lines a text has; they must be the first ones, all of them."""
    lines = text.splitlines()
    assert lines == [str(number) for number in range(1, len(lines) + 1)]
    return len(lines)


def differing_chunks(one: Path, two: Path, *, used_alone: bool = False) -> list[int]:
    """Numbers of the 64 KiB chunks that differ; the journal's log and chunks that belong to no file are left out.

    Args:
        used_alone: compare blocks that a file or the file system uses: what inodes tell does not tell of others, which
            are those of no file, and of inode tables without an inode.
    """
    from appliance.agent import ext, source

    with one.open("rb") as a, two.open("rb") as b:

        def read(offset: int, size: int) -> bytes:
            return os.pread(a.fileno(), size, offset)

        image = ext.Image(read)
        step, first = image.layout.block, image.layout.first
        each = image.layout.blocks_per_group
        bitmaps = [image.blocks(group.block_bitmap) for group in image.layout.groups]
        log, tables = set(image.journal_blocks()), image.unused_table_blocks()
        free = source.free_chunks(image)

        def counts(block: int) -> bool:
            if block in log or block * step >> 16 in free:
                return False
            group, bit = divmod(block - first, each)
            used = block < first or (bool(bitmaps[group][bit >> 3] >> (bit & 7) & 1) and block not in tables)
            return used or not used_alone

        found = []
        for offset in range(0, one.stat().st_size, 1 << 16):
            left, right = (os.pread(stream.fileno(), 1 << 16, offset) for stream in (a, b))
            if left != right and any(
                left[at : at + step] != right[at : at + step] and counts((offset + at) // step)
                for at in range(0, len(left), step)
            ):
                found.append(offset >> 16)
    return found
