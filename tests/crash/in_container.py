"""What is written in the services container and on nodes."""

from __future__ import annotations

import grp
import hashlib
import io
import json
import os
import pwd
import struct
import subprocess
import sys
import tarfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.crash.workload import Mark, Marks, Workload, nothing
from tests.places import ROOT

RUNTIME = ROOT / "definitions" / "runtime"
LOADED: dict[str, ModuleType] = {}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Files of the site in the container: definitions/runtime/smsfiles.py, smskept.py


def load(name: str, root: Path) -> Any:
    """Return a program of the container as a module that works below ``root``."""
    if str(RUNTIME) not in sys.path:
        sys.path.insert(0, str(RUNTIME))
    if name not in LOADED:
        loader = SourceFileLoader(f"crash_{name.replace('-', '_')}", str(RUNTIME / name))
        LOADED[name] = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
        loader.exec_module(LOADED[name])
    # That of this module: other tests of the same process import programs that have their own.
    LOADED[name].smsfiles.ROOT = str(root)
    return LOADED[name]


def kept_of(root: Path) -> Any:
    return load("smskept.py", root).Kept()


def prepare_kept(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc" / "motd").write_text("our own")
    (root / "etc" / "motd").chmod(0o600)


def pull(root: Path, version: bytes) -> None:
    """As sms-filesync does; without a version the server has the file no longer."""
    kept = kept_of(root)
    entry = {"path": "/etc/motd", "sha256": digest(version)}
    if version:
        kept.apply(entry, version)
    else:
        for path in kept.left({}):
            kept.remove(path)


def run_kept(root: Path, mark: Mark) -> None:
    for version in (b"one", b"two", b""):
        pull(root, version)
        mark(version.decode() or "removed")


def check_kept(root: Path, marks: Marks) -> None:
    motd = root / "etc" / "motd"
    assert motd.read_text() in ["our own", "one", "two", "our own"][len(marks) : len(marks) + 2]
    if len(marks) < 2:
        pull(root, b"two")
        assert motd.read_text() == "two"
    pull(root, b"")
    assert motd.read_text() == "our own"


# The site's files in the overlay: definitions/runtime/smsseed.py

US = pwd.getpwuid(os.getuid()).pw_name
SEEDED = [b"site 1", b"site 2"]


def prepare_seed(root: Path) -> None:
    """The first version was seeded, and somebody has changed it since."""
    run_seed_of(root, SEEDED[0])
    (root / "etc" / "motd").write_bytes(b"our own")


def run_seed_of(root: Path, data: bytes) -> None:
    program = load("smsseed.py", root)
    # There is no account munge here.
    program.pwd = SimpleAccounts()
    program.write(site_archive(data), digest(data))


def site_archive(data: bytes) -> io.BytesIO:
    """Return an archive of the site's files, which is one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("etc/motd")
        member.size, member.mode, member.uname = len(data), 0o600, US
        member.gname = grp.getgrgid(os.getgid()).gr_name
        archive.addfile(member, io.BytesIO(data))
    buffer.seek(0)
    return buffer


class SimpleAccounts:
    """The accounts of an image."""

    @staticmethod
    def getpwnam(name: str) -> Any:
        return pwd.getpwuid(os.getuid())


def run_seed(root: Path, mark: Mark) -> None:
    mark("key " + digest((root / "etc" / "munge" / "munge.key").read_bytes()))
    run_seed_of(root, SEEDED[1])
    mark("seeded")


def check_seed(root: Path, marks: Marks) -> None:
    """What somebody has changed is kept beside it, and the key of munge stays."""
    motd = root / "etc" / "motd"
    assert motd.read_bytes() in ([SEEDED[1]] if "seeded" in marks else [b"our own", SEEDED[1]])
    run_seed_of(root, SEEDED[1])
    assert motd.read_bytes() == SEEDED[1]
    assert motd.with_name("motd.sms-old").read_bytes() == b"our own"
    assert "key " + digest((root / "etc" / "munge" / "munge.key").read_bytes()) in marks or not marks
    assert (root / "etc" / "sms" / "seed.mark").read_text().strip() == digest(SEEDED[1])


def run_first_seed(root: Path, mark: Mark) -> None:
    run_seed_of(root, SEEDED[0])
    mark(digest((root / "etc" / "munge" / "munge.key").read_bytes()))


def check_first_seed(root: Path, marks: Marks) -> None:
    run_seed_of(root, SEEDED[0])
    assert (root / "etc" / "motd").read_bytes() == SEEDED[0]
    key = (root / "etc" / "munge" / "munge.key").read_bytes()
    assert len(key) == 1024 and digest(key) in (marks or [digest(key)])
    assert not (root / "etc" / "motd.sms-old").exists()


# The same in a running container, which can be undone: definitions/runtime/sms-apply

APPLIED = [b"site 1", b"site 2", b"site 3"]


def applier(root: Path, data: bytes) -> Any:
    """Return the program, with a version of the site's files as its standard input."""
    program = load("sms-apply", root)
    program.smsseed.pwd = SimpleAccounts()
    program.sys = SimpleNamespace(stdin=SimpleNamespace(buffer=site_archive(data)))
    return program


def prepare_apply(root: Path) -> None:
    run_seed_of(root, APPLIED[0])


def run_apply(root: Path, mark: Mark) -> None:
    """The second version is applied; the third one is applied and undone. ``postfix`` reads it each time."""
    for data in APPLIED[1:]:
        applier(root, data).write(digest(data), {"postfix": "reload"})
        mark("written")
        applier(root, data).done("postfix")
        mark("read")
        if data == APPLIED[2]:
            assert applier(root, data).undo({})["pending"] == {"postfix": "reload"}
            mark("undone")
            applier(root, data).done("postfix")
        applier(root, data).finish()
        mark("finished")


def check_apply(root: Path, marks: Marks) -> None:
    """The next run restores the version of the last complete one; who may have read another one reads it again."""
    found = applier(root, APPLIED[0]).compare()
    if found["left"] == "complete":
        applier(root, b"").finish()
    applier(root, b"another").write("", {"chrony": "restart"})
    pending = applier(root, b"").undo({**found["pending"], "chrony": "restart"})["pending"]
    one, two, three = APPLIED
    versions = [{one}, {one, two}, {two}, {two}, {two, three}, {two, three}, {two}, {two}][len(marks)]
    assert (root / "etc" / "motd").read_bytes() in versions
    if found["left"] == "incomplete" and marks[-1:] not in ((), ("finished",)):
        assert pending == {"postfix": "reload", "chrony": "restart"}
    applier(root, b"").finish()
    assert all(path.name.endswith(".new~") for path in (root / "run" / "sms").iterdir())


# The job ids of slurmctld: definitions/runtime/sms-slurm-ids

OWN = 500


def prepare_ids(root: Path) -> None:
    program = load("sms-slurm-ids", root)
    head = struct.pack("!I", len(program.HEAD)) + program.HEAD + struct.pack("!HqI", 1, 1000, OWN)
    (root / "job_state").write_bytes(head + b"jobs" * 200)


def run_ids(root: Path, mark: Mark) -> None:
    program = load("sms-slurm-ids", root)
    for now in (1000.0, 2000.0):
        program.time = SimpleClock(now)
        program.raise_id("/job_state")
        mark(str(read_id(root)))


class SimpleClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


def read_id(root: Path) -> int:
    program = load("sms-slurm-ids", root)
    data = (root / "job_state").read_bytes()
    assert data.endswith(b"jobs" * 200) and len(data) == program.AT + 14 + 800
    found: int = struct.unpack("!I", data[program.AT + 10 : program.AT + 14])[0]
    return found


def check_ids(root: Path, marks: Marks) -> None:
    """An id that slurmctld may have assigned is not the next one again."""
    program = load("sms-slurm-ids", root)
    least = max([OWN, *map(int, marks)])
    assert read_id(root) >= least
    program.time = SimpleClock(2000.0)
    program.raise_id("/job_state")
    assert read_id(root) >= OWN + program.MARGIN + program.PER_S * 1000


# The lease of a folder with state on an engine: definitions/runtime/smslease.py


def run_state_lease(root: Path, mark: Mark) -> None:
    for _ in range(2):
        lease = load("smslease.py", root).Lease("/state")
        assert lease.attempt() == ""
        mark(str(lease.mine["generation"]))
        lease.renew()
        lease.release()
        mark(str(lease.read()["generation"]))


def check_state_lease(root: Path, marks: Marks) -> None:
    """A generation that was taken is not taken again, and what is left is a lease."""
    program = load("smslease.py", root)
    program.GONE_S = 0
    lease = program.Lease("/state")
    assert lease.attempt() == ""
    assert lease.mine["generation"] > max([0, *map(int, marks)])
    lease.release()


# The certificate of a node, in memory: definitions/runtime/smsenroll.py


class SimpleServer:
    """The provisioning VM: its certificate names the public key of the request."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> SimpleServer:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def post(self, path: str, body: dict[str, str]) -> bytes:
        argv = ("openssl", "req", "-noout", "-pubkey")
        public = subprocess.run(argv, input=body["csr"].encode(), capture_output=True, check=True).stdout
        return json.dumps({"name": "n1", "certificate": public.decode(), "renew_s": 60}).encode()


def enroll(root: Path) -> None:
    program = load("smsenroll.py", root)
    (root / "etc" / "sms" / "tls").mkdir(parents=True, exist_ok=True)
    program.smslink = SimpleLink
    program.enroll("https://server", "n1", "token", False)


class SimpleLink:
    Link = SimpleServer

    @staticmethod
    def trust(*_: Any) -> None:
        return None


def run_enroll(root: Path, mark: Mark) -> None:
    for number in (1, 2):
        enroll(root)
        mark(str(number))


def check_enroll(root: Path, marks: Marks) -> None:
    """The certificate and the key belong together at any time, as they are read by other programs."""
    folder = root / "run" / "sms" / "tls"
    if (folder / "cert.pem").exists():
        argv = ("openssl", "pkey", "-pubout", "-in", str(folder / "key.pem"))
        public = subprocess.run(argv, capture_output=True, check=True).stdout
        assert public in (folder / "cert.pem").read_bytes(), "the certificate is not that of the key"
    else:
        assert not marks
    enroll(root)
    assert (folder / "renew").exists()


CONTAINER = {
    "files of the site": Workload(prepare_kept, run_kept, check_kept),
    "first seed of an overlay": Workload(nothing, run_first_seed, check_first_seed),
    "seed of an overlay": Workload(prepare_seed, run_seed, check_seed),
    "changed files of a running container": Workload(prepare_apply, run_apply, check_apply, again=False, memory=True),
    "job ids": Workload(prepare_ids, run_ids, check_ids),
    "lease of a state folder": Workload(nothing, run_state_lease, check_state_lease),
    "certificate of a node": Workload(nothing, run_enroll, check_enroll, memory=True),
}
