"""Which functions write files: state goes through the functions that ``tests/crash`` tests, and each path is tested."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.crash.paths import DIRECT, SHARED
from tests.crash.workloads import WORKLOADS
from tests.places import ROOT

NAMES = {"rename", "replace", "link", "symlink", "truncate", "ftruncate"}
"""Functions of os that change names or sizes; of pathlib, with one argument."""
COPIES = {"move", "copy", "copy2", "copyfile", "copytree"}
FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}
WRITES = {"write_text", "write_bytes", "symlink_to", "hardlink_to"}
FUNCTIONS = {"replace_file", "AppendLine", "SwapLease", "MarkOverlay", "advance_sequence", "write_new"}
"""The shared functions that write state; besides them ``Host.write``, and those of tools/files.py and smsfiles.py."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the programs that run on admin hosts, in the VM, in the container and on nodes."""
    files = sorted((ROOT / "appliance").rglob("*.py")) + sorted((ROOT / "definitions" / "runtime").iterdir())
    for path in files:
        name = str(path.relative_to(ROOT))
        if name.startswith("appliance/lab/") or not path.is_file():
            continue  # a cluster for tests
        text = path.read_text()
        if path.suffix == ".py" or text.startswith("#!/usr/bin/python3"):
            yield name, ast.parse(text)


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with the name of the function that it is in."""

    def visit(node: ast.AST, where: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield where, child
            yield from visit(child, child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else where)

    yield from visit(tree, "")


def text_of(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_direct(call: ast.Call) -> bool:
    """Whether a call creates, renames or truncates a file directly."""
    function, args = call.func, call.args
    modes = [*args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    opens = any(set(text_of(one)) & set("wax+") and len(text_of(one)) <= 3 for one in modes)
    if isinstance(function, ast.Name):
        return function.id == "open" and opens
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if owner == "os" and function.attr == "open":
        return any(isinstance(one, ast.Attribute) and one.attr in FLAGS for arg in args for one in ast.walk(arg))
    if owner == "os":
        return function.attr in NAMES
    if isinstance(function.value, ast.Attribute) and function.value.attr == "system":  # an agent's System
        return function.attr == "rename"
    if owner == "shutil":
        return function.attr in COPIES
    if function.attr in ("rename", "replace"):
        return len(args) == 1 and not call.keywords
    return function.attr in WRITES or (function.attr == "open" and opens)


def text_owner(function: ast.Attribute) -> str:
    """Return the last name before that of a method."""
    return getattr(function.value, "attr", getattr(function.value, "id", ""))


def is_shared(call: ast.Call) -> bool:
    """Whether a call writes state by one of the shared functions."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in FUNCTIONS
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr == "replace" and len(call.args) == 2 and text_owner(function) in ("self", "system"):
        return True  # an agent's System
    if owner == "files" and function.attr in ("rename", "place", "link"):
        return True
    if owner == "smsfiles" and function.attr in ("replace", "rename", "remove"):
        return True
    if function.attr == "write" and isinstance(function.value, ast.Attribute) and function.value.attr == "store":
        return True
    return function.attr == "write" and len(call.args) == 2 and owner != "os"


def find(kind: str) -> set[str]:
    """Return the places of calls: file and function of direct ones, file of the others."""
    found = set()
    for name, tree in sources():
        for where, call in calls(tree):
            if kind == "direct" and is_direct(call):
                found.add(f"{name}:{where}")
            if kind == "shared" and is_shared(call):
                found.add(name)
    return found


def test_files_are_written_by_the_shared_functions() -> None:
    found = find("direct")
    assert found - set(DIRECT) == set(), "write state by replace_file, Host.write or smsfiles.replace; else list it"
    assert set(DIRECT) - found == set(), "no longer there"


def test_every_path_that_writes_state_has_a_workload() -> None:
    found = find("shared")
    assert found - set(SHARED) == set(), "add a workload in tests/crash/, and list it"
    assert set(SHARED) - found == set(), "no longer there"


def test_the_lists_name_workloads() -> None:
    for place, name in {**DIRECT, **SHARED}.items():
        assert name in WORKLOADS or name.startswith("not state: "), f"{place}: {name}"
    named = {name for name in {**DIRECT, **SHARED}.values() if name in WORKLOADS}
    assert set(WORKLOADS) - named <= UNNAMED


UNNAMED = {
    "certificate in the container",
    "first seed of an overlay",
    "migration source on a mirror",
    "new inventory",
    "received snapshot",
    "rollback on a mirror",
}
"""Workloads of a shell script, and further ones of a path that is listed with another one."""


def test_a_direct_write_is_found(tmp_path: Path) -> None:
    wrong = ('open(p, "w")', "os.rename(a, b)", "p.write_text(t)", "os.open(p, os.O_WRONLY)", "p.replace(q)")
    right = ("open(p)", 's.replace("a", "b")', "os.open(p, os.O_RDONLY)", "replace(a, b=1)", "p.open()")
    for text in wrong + right:
        ((_, call),) = [one for one in calls(ast.parse(text)) if one[1].func]
        assert is_direct(call) == (text in wrong), text
