"""Everything that Apptainer runs is made in one place, confined as its kind says, and checks that itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from appliance.operations.site.find import open_site
from appliance.plan.services.confinement import HIDDEN_FILES, HIDDEN_FOLDERS, NAMESPACES, Confinement, number_of
from appliance.plan.services.runs import (
    NOT_CONFINED,
    PURPOSES,
    ROOT,
    Once,
    Purpose,
    join_run,
    once_run,
    run_text,
    shown,
    start_run,
)
from appliance.share import share
from tests.places import DEBIAN_SITE
from tests.places import ROOT as TREE

SITE = open_site(DEBIAN_SITE).site
CONFINED = Confinement(("CHOWN", "KILL", "NET_ADMIN"), "/s/seccomp.json", "/s/empty", ())
RUNS = ("exec", "run", "shell", "test", "oci", "checkpoint", "inspect")
"""``inspect`` runs the shell of an image that has no inspect-metadata.json."""
TEXT = re.compile(
    rf"\b(?:apptainer|singularity)\b[\"'`]*(?:\s+-\S+)*\s+(?:{'|'.join(RUNS)}|instance\s+(?:start|run))\b(?!\s+(?:of|as)\b)"
)
"""In the text of a shell, also in a template."""
MAKER = "appliance/plan/services/runs.py"


def words_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    return list(node.args) if isinstance(node, ast.Call) else []


def find_runs(text: str) -> Iterator[int]:
    """Yield the lines of Python in which words of a command of Apptainer may run something."""
    for node in ast.walk(ast.parse(text)):
        words = words_of(node)
        for word, following in zip(words, [*words[1:], None], strict=False):
            if not isinstance(word, ast.Constant) or Path(str(word.value)).name not in ("apptainer", "singularity"):
                continue
            known = following.value if isinstance(following, ast.Constant) else None
            if isinstance(following, ast.expr) and (known is None or known in RUNS):
                yield word.lineno
            if known == "instance" and not {"list", "stop"} & {getattr(each, "value", None) for each in words}:
                yield word.lineno


def sources() -> Iterator[Path]:
    for folder in ("appliance", "analysis", "definitions", "overlays", "playbooks"):
        for path in sorted((TREE / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc", ".lock"):
                yield path


def test_no_other_place_runs_something_with_apptainer() -> None:
    found = set()
    for path in sources():
        text, name = path.read_text(errors="replace"), str(path.relative_to(TREE))
        if TEXT.search(text) or (path.suffix == ".py" and list(find_runs(text))):
            found.add(name)
    # The wrapper of an Apptainer on machines that lack a capability passes on what it is called with.
    assert found == {MAKER}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('run("apptainer", "exec", image)', True),
        ('x = ["env", "apptainer", "instance", "start", *options]', True),
        ('x = ("apptainer", *words)', True),
        ('x = ("/usr/bin/singularity", verb, image)', True),
        ('run("apptainer", "inspect", "--json", image)', True),
        ('run("apptainer", "verify", image)', False),
        ('run("apptainer", "instance", "list", "--json", name)', False),
        ('run("apptainer", "instance", "stop", name)', False),
    ],
)
def test_calls_are_found(text: str, found: bool) -> None:
    assert bool(list(find_runs(text))) is found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('exec apptainer exec "$@"', True),
        ("apptainer --quiet run x.sif", True),
        ("singularity instance start x.sif y", True),
        ("apptainer inspect --json x.sif", True),
        ("apptainer verify --all", False),
        ("apptainer instance list --json", False),
    ],
)
def test_texts_are_found(text: str, found: bool) -> None:
    assert bool(TEXT.search(text)) is found


def test_every_purpose_is_declared() -> None:
    assert set(PURPOSES) == set(get_args(Purpose))
    for name, capabilities in PURPOSES.items():
        assert not {"NET_ADMIN", "NET_RAW", "SYS_CHROOT"} & set(capabilities or ()), name


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_one_shot_run_has_namespaces_of_its_own_and_checks_them(purpose: Purpose) -> None:
    argv = once_run(SITE, CONFINED, "x.sif", Once(purpose, ("cat", "/x"), overlay="/o.img", writable=True))
    assert argv[:4] == ("unshare", "--mount", "--propagation", "slave")
    options = argv[argv.index("apptainer") : argv.index("confined")]
    assert {"--pid", "--no-init", "--ipc", "--uts", "--net", "--contain", "--cleanenv", "--no-privs"} <= set(options)
    assert options[options.index("--network") + 1] == "none"
    assert options[options.index("--security") + 1] == "seccomp:/s/seccomp.json"
    declared = PURPOSES[purpose]
    allowed = CONFINED.capabilities if declared is None else declared
    added = ",".join(f"CAP_{name}" for name in allowed)
    assert ("--add-caps" in options) is bool(added) and (not added or options[options.index("--add-caps") + 1] == added)
    check = argv[argv.index("confined") :]
    assert check[1:4] == (str(number_of(allowed)), " ".join(NAMESPACES), "@HOST@") and check[4:] == ("cat", "/x")


@pytest.mark.parametrize("writable", [True, False])
def test_an_overlay_is_data_and_not_the_root_of_a_one_shot_run(writable: bool) -> None:
    argv = once_run(SITE, CONFINED, "x.sif", Once("read", ("true",), overlay="/o.img", writable=writable))
    assert "--overlay" not in argv
    place = argv.index("run-image")
    assert argv[place + 1 : place + 5] == ("once", "/o.img", "rw" if writable else "ro", "x.sif")
    assert argv[argv.index(f"@OVERLAY@:{ROOT}" + ("" if writable else ":ro")) - 1] == "--bind"


def test_what_is_displayed_is_the_command_without_our_texts() -> None:
    argv = once_run(SITE, CONFINED, "x.sif", Once("seed", ("python3", "-I", "-c", "import x\nx()", "/mnt")))
    words = shown(argv)
    assert words[:2] == ("apptainer", "exec") and words[-6:] == ("x.sif", "python3", "-I", "-c", "PROGRAM", "/mnt")
    assert shown(join_run("i", (), ("true",)))[:2] == ("apptainer", "exec")
    assert shown(start_run(SITE, CONFINED, "x.sif", "i", ()))[:3] == ("apptainer", "instance", "start")
    assert run_text('"$X"') == """unshare --mount --propagation slave /bin/sh -eu "$X" once '' '' '' apptainer exec"""


# definitions/scripts/confined, in this process's own confinement

STATUS = Path("/proc/self/status").read_text()
OWN = dict(line.split(":\t", 1) for line in STATUS.splitlines() if ":\t" in line)
ALL = str((1 << 41) - 1)


def run_confined(*words: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    text = share("definitions", "scripts", "confined").read_text()
    return subprocess.run([*prefix, "sh", "-euc", text, "confined", *words, "echo", "ran"], capture_output=True)


def host_of(*names: str) -> str:
    return " ".join(f"{name}={Path(f'/proc/self/ns/{name}').stat().st_ino}" for name in names)


@pytest.mark.parametrize(
    ("capabilities", "names", "host", "reason"),
    [
        (ALL, "net", host_of("net"), b"host's namespace: net"),
        (ALL, "mnt net", "mnt=1 " + host_of("net"), b"host's namespace: net"),
        (ALL, "net", "", b"namespaces of the host are not known"),
        (ALL, "net", "pid=1", b"namespaces of the host are not known"),
        (ALL, "nonsense", "nonsense=1", b"its namespaces are not known"),
        (ALL, "net", "net=1", b"no_new_privs"),
    ],
)
def test_a_run_that_is_not_confined_runs_nothing(capabilities: str, names: str, host: str, reason: bytes) -> None:
    done = run_confined(capabilities, names, host)
    assert done.returncode == NOT_CONFINED and reason in done.stderr and not done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="root has capabilities")
def test_a_run_with_other_capabilities_runs_nothing() -> None:
    done = run_confined(str(number_of(("CHOWN",))), "net", "net=1")
    assert done.returncode == NOT_CONFINED and b"Cap" in done.stderr and not done.stdout


HIDDEN = ("/proc/sys", *HIDDEN_FOLDERS, *HIDDEN_FILES)
COVER = """\
for path in $1; do
  [ ! -e "$path" ] || mount -o bind,ro "$path" "$path"
done
shift
exec "$@"
"""


def test_every_run_checks_what_is_hidden() -> None:
    text = share("definitions", "scripts", "confined").read_text()
    (listed,) = re.findall(r"^for path in (.*?); do$", text, re.M | re.S)
    assert tuple(listed.replace("\\\n", " ").split()) == HIDDEN


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize("uncovered", ["", "/proc/sys", "/proc/keys"])
def test_a_run_that_is_confined_runs(uncovered: str) -> None:
    """With a filter of system calls that lets all pass, and no_new_privs; and without one of the mounts."""
    code = (
        "import ctypes, os, sys; c = ctypes.CDLL(None)\n"
        "assert c.prctl(38, 1, 0, 0, 0) == 0\n"
        "program = (ctypes.c_uint64 * 1)(0x7FFF0000 << 32 | 0x06)\n"
        "class P(ctypes.Structure): _fields_ = [('n', ctypes.c_ushort), ('p', ctypes.c_void_p)]\n"
        "p = P(1, ctypes.addressof(program))\n"
        "assert c.prctl(22, 2, ctypes.byref(p), 0, 0) == 0\n"
        "os.execvp(sys.argv[1], sys.argv[1:])\n"
    )
    covered = " ".join(path for path in HIDDEN if path != uncovered)
    prefix = ("unshare", "--mount", "sh", "-euc", COVER, "cover", covered, sys.executable, "-c", code)
    done = run_confined(ALL, "net", "net=1", prefix=prefix)
    if uncovered:
        assert done.returncode == NOT_CONFINED and f"{uncovered} is the host's".encode() in done.stderr
    else:
        assert done.stdout == b"ran\n", done.stderr
