"""`install-apptainer-debian` on a `/usr` of its own, with a mirror of this test: only pinned packages are installed.

What uses it goes on with an Apptainer that works where the pinned one is not available: the role, and `scripts/setup`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from appliance.plan.hosts.facts import Facts, parse_values
from appliance.plan.hosts.integrity import examine_integrity
from appliance.share import share
from tests.waiting import wait_until

pytestmark = pytest.mark.real

SCRIPT = share("playbooks", "roles", "apptainer", "files", "install-apptainer-debian")
ARCHITECTURE = "amd64"
INDEX = f"Package: x\nVersion: 1\nArchitecture: {ARCHITECTURE}\nFilename: x\nSize: 1\nSHA256: {'0' * 64}\n"
PRIVATE_USR = r"""
set -eu
for name in usr etc; do
    mkdir -p "$1/$name/up" "$1/$name/work"
    mount -t overlay -o "lowerdir=/$name,upperdir=$1/$name/up,workdir=$1/$name/work" overlay "/$name"
done
rm -rf /usr/lib/apptainer-private /usr/bin/apptainer* /etc/apt/sources.list.d
echo "deb [trusted=yes] $2 $(. /etc/os-release && echo "$VERSION_CODENAME") main" >/etc/apt/sources.list
mkdir -p /etc/apt/lists/partial
echo 'Dir::State::lists "/etc/apt/lists";' >/etc/apt/apt.conf
echo "Acquire::http::Proxy::snapshot.debian.org \"$2\";" >>/etc/apt/apt.conf
apt-get -q update
echo ready
exec sleep infinity
"""
"""Shell: a `/usr` and an `/etc` of its own, without Apptainer, whose apt knows one mirror."""


class Machine:
    """A mirror, and a mount namespace in which the script runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mirror = folder / "mirror"
        self.process: subprocess.Popen[bytes]

    def package(self, name: str, version: str, files: dict[str, str]) -> str:
        """Put a package of files of this machine on the mirror; return its pin."""
        root = self.folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        (root / "DEBIAN").mkdir(parents=True)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: {ARCHITECTURE}\nMaintainer: x\nDescription: x\n"
        (root / "DEBIAN" / "control").write_text(control)
        for target, source in files.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / target)
        deb = self.mirror / "pool" / f"{name}_{version}.deb"
        subprocess.run(["dpkg-deb", "-Znone", "-b", str(root), str(deb)], check=True, capture_output=True)
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        return f"{ARCHITECTURE} {name} {version} {digest} {'0' * 40} pool/{deb.name}\n"

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace."""
        enter = ["nsenter", "-t", str(self.process.pid), "-m", *argv]
        return subprocess.run(enter, capture_output=True, text=True, timeout=120, check=False)

    def install(self, pins: str, *options: str) -> tuple[int, str]:
        """Run the script with pins; return its status and standard output."""
        path = self.folder / "pins"
        path.write_text(pins)
        done = self.run("sh", str(SCRIPT), *options, str(path))
        print(done.stderr)
        return done.returncode, done.stdout

    def pins(self, version: str) -> str:
        """Put a version of Apptainer and its libraries on the mirror; return their pins.

        Its programs know --version, and keep running when requested.
        """
        program = {
            "usr/bin/apptainer": "/bin/sleep",
            "usr/lib/x86_64-linux-gnu/apptainer/bin/starter": "/bin/true",
            "etc/apptainer/apptainer.conf": "/etc/os-release",
        }
        libraries = {
            "lib64/ld-linux-x86-64.so.2": "/lib64/ld-linux-x86-64.so.2",
            "lib/libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6",
        }
        return self.package("apptainer", version, program) + self.package("libc6", version, libraries)

    def empty_mirror(self) -> None:
        for package in (self.mirror / "pool").iterdir():
            package.unlink()

    def record(self) -> str:
        return self.run("cat", "/usr/lib/apptainer-private/installed").stdout


@pytest.fixture
def machine(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Machine]:
    for program in ("patchelf", "dpkg-deb", "apt-get"):
        need(program)
    if subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True).stdout.strip() != ARCHITECTURE:
        pytest.skip(f"the packages of this test are for {ARCHITECTURE}")
    made = Machine(tmp_path)
    (made.mirror / "pool").mkdir(parents=True)
    codename = subprocess.run(
        ["sh", "-c", '. /etc/os-release && echo "$VERSION_CODENAME"'], capture_output=True, text=True, check=True
    ).stdout.strip()
    index = made.mirror / "dists" / codename / "main" / f"binary-{ARCHITECTURE}" / "Packages"
    index.parent.mkdir(parents=True)
    index.write_text(INDEX)
    (made.mirror / "dists" / codename / "Release").write_text(
        f"Origin: Debian\nCodename: {codename}\nComponents: main\nArchitectures: {ARCHITECTURE}\nSHA256:\n"
        f" {hashlib.sha256(INDEX.encode()).hexdigest()} {len(INDEX)} main/binary-{ARCHITECTURE}/Packages\n"
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(made.mirror))
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    subprocess.run(["mount", "-t", "tmpfs", "disk", str(disk)], check=True)
    made.process = subprocess.Popen(
        [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            PRIVATE_USR,
            "sh",
            str(disk),
            f"http://127.0.0.1:{http.server_port}/",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert made.process.stdout is not None
    try:
        said = b""
        while not said.endswith(b"ready\n"):
            line = made.process.stdout.readline()
            assert line, said.decode()
            said += line
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.process.stdout.close()
        subprocess.run(["umount", "-l", str(disk)], check=True)
        http.shutdown()
        http.server_close()


def test_only_pinned_packages_are_installed(machine: Machine) -> None:
    first = machine.pins("1.4.5-2")
    assert machine.install(first, "--dry-run") == (0, "changed\n")
    assert not machine.run("sh", "-c", "command -v apptainer").stdout
    altered = first.replace(first.split()[3], "f" * 64)
    assert machine.install(altered)[0] == 3
    assert not machine.run("sh", "-c", "command -v apptainer").stdout, "what is not pinned is not installed"

    assert machine.install(first) == (0, "changed\n")
    assert machine.record() == first
    assert machine.install(first) == (0, "")
    assert machine.install(first, "--dry-run") == (0, "")

    machine.run("rm", "/usr/bin/singularity")
    assert machine.install(first, "--dry-run") == (0, "linked\n")
    assert machine.install(first) == (0, "linked\n"), "Apptainer itself is not installed again"
    assert machine.install(first) == (0, "") and machine.run("test", "-e", "/usr/bin/singularity").returncode == 0

    second = machine.pins("1.4.6-1")
    program = "/usr/bin/apptainer-unwrapped"
    if machine.run("test", "-e", program).returncode:
        program = "/usr/bin/apptainer"
    running = subprocess.Popen(["nsenter", "-t", str(machine.process.pid), "-m", program, "600"])
    try:
        assert machine.install(second) == (0, "changed\n")
        assert running.poll() is None, "a program that runs keeps its files"
    finally:
        running.kill()
        running.wait()
    assert machine.record() == second
    assert machine.install(first) == (0, ""), "never an older one"
    assert machine.record() == second

    # An installation without a record is replaced, whatever it is.
    machine.run("rm", "/usr/lib/apptainer-private/installed")
    assert machine.install(second) == (0, "changed\n")
    assert machine.record() == second
    # What the mirror has replaced comes from the archive of snapshots; what is nowhere is not replaced by anything.
    machine.run("rm", "-r", "/usr/lib/apptainer-private")
    kept = machine.mirror / "http:" / "snapshot.debian.org" / "file" / ("0" * 40)
    kept.parent.mkdir(parents=True)
    (machine.mirror / "pool" / "apptainer_1.4.6-1.deb").rename(kept)
    assert machine.install(second) == (0, "changed\n")
    machine.run("rm", "-r", "/usr/lib/apptainer-private")
    kept.unlink()
    assert machine.install(second) == (3, "")


FACTS = share("definitions", "scripts", "collect-facts")
DPKG = """
mkdir -p "$1/dpkg/up" "$1/dpkg/work"
mount -t overlay -o "lowerdir=/var/lib/dpkg,upperdir=$1/dpkg/up,workdir=$1/dpkg/work" overlay /var/lib/dpkg
rm -r /usr/lib/apptainer-private /usr/bin/apptainer*
dpkg -i --force-depends "$2"
"""


def test_doctor_compares_what_was_installed(machine: Machine) -> None:
    """With the digests that the script recorded; with dpkg's, once Debian packages it; with modes alone, by hand."""

    def examine() -> tuple[str, str]:
        done = machine.run("sh", str(FACTS), "/nowhere", "/nowhere", "/nowhere/overlay", "overlay", "")
        (found,) = examine_integrity(Facts("a", "ID=debian\n", frozenset(), parse_values(done.stdout)), ())
        return found.state, found.detail

    first = machine.pins("1.4.5-2")
    assert machine.install(first) == (0, "changed\n")
    starter = "/usr/lib/x86_64-linux-gnu/apptainer/bin/starter"
    assert examine() == ("ok", "as `sms host prepare` installed it")
    machine.run("sh", "-c", f"echo >>{starter}; rm /usr/lib/apptainer-private/libc.so.6")
    state, words = examine()
    assert state == "missing" and f"{starter} differs" in words and "libc.so.6 is missing" in words
    machine.run("rm", "/usr/lib/apptainer-private/digests")
    assert examine()[0] == "warning" and "recorded no digests" in examine()[1]

    made = machine.run("sh", "-c", DPKG, "sh", str(machine.folder / "disk"), f"{machine.mirror}/{first.split()[5]}")
    assert made.returncode == 0, made.stderr
    assert examine() == ("ok", "as in its package")
    machine.run("chmod", "4777", "/usr/bin/apptainer")
    assert examine()[0] == "missing" and "/usr/bin/apptainer has mode 4777" in examine()[1]
    machine.run("chmod", "755", "/usr/bin/apptainer")
    machine.run("sh", "-c", f"echo >>{starter}; echo >>/etc/apptainer/apptainer.conf")
    assert examine()[0] == "missing" and f"{starter} differs from its package" in examine()[1]
    machine.run("sh", "-c", "cp /bin/sleep /usr/local/bin/apptainer")
    state, words = examine()
    assert state == "warning" and "/usr/local/bin/apptainer belongs to no package" in words


def test_a_dry_run_and_a_failed_replacement_leave_what_is_installed(machine: Machine) -> None:
    first, second = machine.pins("1.4.5-2"), machine.pins("1.4.6-1")
    assert machine.install(first) == (0, "changed\n")
    staged = ("/usr/lib/apptainer-private.new", "/usr/lib/x86_64-linux-gnu/apptainer.new")
    machine.run("mkdir", *staged)
    assert machine.install(second, "--dry-run") == (0, "changed\n")
    assert machine.run("ls", "-d", *staged).returncode == 0, "another installation may be at work"

    mv = machine.folder / "bin" / "mv"
    mv.parent.mkdir()
    mv.write_text('#!/bin/sh\ncase "$*" in *"private.new "*) exit 1 ;; esac\nexec /bin/mv "$@"\n')
    mv.chmod(0o755)
    path = machine.folder / "pins"
    path.write_text(second)
    failed = machine.run("env", f"PATH={mv.parent}:/usr/sbin:/usr/bin:/sbin:/bin", "sh", str(SCRIPT), str(path))
    assert failed.returncode == 1
    assert machine.run("apptainer", "--version").returncode == 0, "its loader is back"
    assert machine.record() == first
    assert machine.run("ls", "-d", *staged).returncode == 2
    assert machine.install(second) == (0, "changed\n")


def test_two_installations_at_the_same_time(machine: Machine) -> None:
    """Both put files at the same places. The second waits for the first, and has nothing to do."""
    path, patchelf, begun, go = (machine.folder / name for name in ("pins", "bin/patchelf", "begun", "go"))
    path.write_text(machine.pins("1.4.5-2"))
    patchelf.parent.mkdir()
    wait = f"mkdir {begun} 2>/dev/null && until [ -e {go} ]; do sleep 0.1; done"
    patchelf.write_text(f'#!/bin/sh\n{wait}\nexec {shutil.which("patchelf")} "$@"\n')
    patchelf.chmod(0o755)
    environment = ["env", f"PATH={patchelf.parent}:/usr/sbin:/usr/bin:/sbin:/bin"]
    argv = ["nsenter", "-t", str(machine.process.pid), "-m", *environment, "sh", str(SCRIPT), str(path)]
    locked = ["pgrep", "-fc", "^flock --close /run/install-apptainer"]
    with subprocess.Popen(argv, stdout=-1, text=True) as first:
        wait_until(begun.exists, "the first one")
        with subprocess.Popen(argv, stdout=-1, text=True) as second:
            both = partial(subprocess.run, locked, capture_output=True, text=True, check=False)
            wait_until(lambda: second.poll() is not None or both().stdout == "2\n", "the second one")
            go.touch()
            assert [second.communicate()[0], first.communicate()[0]] == ["", "changed\n"]
            assert (first.returncode, second.returncode) == (0, 0)
    assert machine.record() == path.read_text()


def test_nothing_pinned_for_an_architecture(machine: Machine) -> None:
    first = machine.pins("1.4.5-2")
    other = first.replace(f"{ARCHITECTURE} ", "riscv64 ")
    assert machine.install(other) == (3, "")
    assert machine.install(first) == (0, "changed\n")
    assert machine.install(other) == (0, ""), "installed from pins of the administrator's own"
    machine.run("rm", "/usr/lib/apptainer-private/installed")
    assert machine.install(other, "--dry-run") == (3, "")
    machine.run("rm", "-r", "/usr/lib/apptainer-private", "/usr/bin/apptainer", "/usr/bin/apptainer-unwrapped")
    machine.run("ln", "-s", "/bin/true", "/usr/bin/apptainer")
    assert machine.install(other) == (0, ""), "the administrator's own build"


@pytest.mark.full
def test_a_host_keeps_an_apptainer_that_works(machine: Machine) -> None:
    pins = machine.pins("1.4.5-2")
    play = machine.folder / "play.yml"
    role = shutil.copytree(SCRIPT.parents[1], machine.folder / "roles" / "apptainer")
    (role / "files" / "apptainer-debian.pins").write_text(pins)
    play.write_text("- hosts: all\n  gather_subset: [min]\n  roles: [apptainer]\n")

    def prepare() -> tuple[int, str]:
        home = machine.folder / "ansible"
        runner = ["env", f"ANSIBLE_HOME={home}", "LC_ALL=C.UTF-8", sys.executable, "-m", "ansible", "playbook"]
        inventory = f"localhost ansible_python_interpreter=/usr/bin/python3 ansible_remote_tmp={home}/tmp\n"
        (machine.folder / "hosts").write_text(inventory)
        done = machine.run(*runner, "-c", "local", "-i", str(machine.folder / "hosts"), str(play))
        print(done.stdout, done.stderr)
        return done.returncode, done.stdout

    assert machine.install(pins) == (0, "changed\n")
    machine.run("rm", "-r", "/usr/lib/apptainer-private/installed", "/etc/apptainer/network")
    machine.empty_mirror()
    status, said = prepare()
    assert status == 0
    assert "note: this host keeps sleep (GNU coreutils)" in said and "apptainer 1.4.5-2 is pinned, but neither" in said
    assert machine.run("test", "-d", "/etc/apptainer/network").returncode == 0, "the role went on"
    machine.run("rm", "/usr/bin/apptainer")
    assert prepare()[0] == 2, "there is no Apptainer to keep"


def make_checkout(machine: Machine, pins: str, available: str) -> Path:
    """A checkout with all but Apptainer set up, and programs that say so; what Debian has now is `available`."""
    checkout = machine.folder / "checkout"
    role = checkout / "playbooks" / "roles" / "apptainer" / "files"
    for folder in (*(checkout / name for name in (".venv", "scripts", "analysis/core", "appliance", "bin")), role):
        folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[3] / "scripts" / "setup", checkout / "scripts")
    shutil.copy(SCRIPT, role / "real")
    (role / "available").write_text(available)
    (role / "apptainer-debian.pins").write_text(pins)
    (role / SCRIPT.name).write_text(
        f'[ "${{1:-}}" = --dry-run ] || echo "$*" >>{checkout}/calls\n'
        f'[ "${{1:-}}" != --print-pins ] || exec cat {role}/available\nexec sh {role}/real "$@"\n'
    )
    for name in (
        "requirements.lock",
        "pyproject.toml",
        "hatch_build.py",
        "analysis/core/a.c",
        "analysis/_core.abi3.so",
        "appliance/_signatures.json",
    ):
        (checkout / name).touch()
    empty = hashlib.sha256().hexdigest() + "  -\n"
    (checkout / ".venv" / "stamp").write_text(empty)
    (checkout / ".venv" / "core").write_text(empty)
    (checkout / ".venv" / "signatures").write_text(empty)
    (checkout / ".venv" / "compiled").touch()
    programs = {
        "dpkg-query": 'case "$*" in *" apptainer") exit 1 ;; esac\nprintf installed\n',
        "id": f"cat {checkout}/uid\n",
    }
    for name, text in programs.items():
        (checkout / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (checkout / "bin" / name).chmod(0o755)
    return checkout


def set_up(machine: Machine, checkout: Path, uid: int = 0) -> tuple[int, str, bool]:
    """Run the set-up; return its status, what it printed, and whether it installed or tried to."""
    (checkout / "uid").write_text(str(uid))
    path = f"PATH={checkout}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = machine.run("env", path, "sh", str(checkout / "scripts" / "setup"))
    print(done.stderr)
    tried = (checkout / "calls").exists()
    (checkout / "calls").unlink(missing_ok=True)
    return done.returncode, done.stderr, tried


def test_the_setup_accepts_an_apptainer_that_works(machine: Machine) -> None:
    pins = machine.pins("1.4.5-2")
    checkout = make_checkout(machine, pins, "")
    status, said, tried = set_up(machine, checkout, 1000)
    assert (status, tried) == (3, False) and "this needs root, to install: apptainer\n" in said
    assert machine.install(pins) == (0, "changed\n")
    assert set_up(machine, checkout) == (0, "", False)

    machine.run("rm", "/usr/lib/apptainer-private/installed")
    machine.empty_mirror()
    status, said, tried = set_up(machine, checkout, 1000)
    assert (status, tried) == (0, False) and "works, but is not the pinned one" in said
    status, said, tried = set_up(machine, checkout)
    assert (status, tried) == (0, True) and "kept sleep (GNU coreutils)" in said
    assert set_up(machine, checkout) == (0, "", False), "not tried at each set-up"
    assert machine.record() == ""
    (checkout / "playbooks/roles/apptainer/files/apptainer-debian.pins").write_text(machine.pins("1.4.6-1"))
    assert set_up(machine, checkout)[::2] == (0, True)
    assert machine.run("test", "-e", "/usr/lib/apptainer-private/instead-of").returncode == 1
    machine.run("rm", "/usr/bin/apptainer")
    machine.empty_mirror()
    assert set_up(machine, checkout)[0] == 3


def test_the_setup_installs_once_what_an_older_mirror_has(machine: Machine) -> None:
    older, newer = machine.pins("1.4.4-1"), machine.pins("1.4.5-2")
    for package in (machine.mirror / "pool").glob("*_1.4.5-2.deb"):
        package.unlink()
    checkout = make_checkout(machine, newer, older)
    status, said, tried = set_up(machine, checkout)
    assert (status, tried) == (0, True) and "installed what the mirror has now" in said
    assert machine.record() == older
    assert set_up(machine, checkout) == (0, "", False)
