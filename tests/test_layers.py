"""The import rules; HACKING.md gives the reasons."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from appliance.tools import agent
from appliance.tools.python import OLDEST

ROOT = Path(__file__).parents[1]

LEAVES = {"errors", "progress", "share", "text", "units", "__version__"}
"""Small modules that import nothing of the rest; any package may import them."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "progress": set(),
    "share": set(),
    "text": set(),
    "units": set(),
    "config": set(),
    # A catalogue file is read, and its mistakes are reported, as those of a site file are.
    "catalog": {"config"},
    # On both ends of a connection: copied with the agent.
    "shared": set(),
    "plan": {"config", "catalog", "shared"},
    "engines": {"plan", "config", "catalog"},
    "host": {"shared"},
    # Copied to admin hosts: nothing of the rest is copied with it.
    "agent": {"shared"},
    "tools": {"host", "plan", "shared"},
    "lab": {"host", "tools", "plan"},
    # Copied into the VM, where it runs on Debian's own packages.
    "provision": {"shared"},
    "operations": {"config", "catalog", "plan", "shared", "engines", "host", "tools", "lab", "provision", "analysis"},
    "cli": {"operations", "config"},
    # Reads captures wherever they are: it imports nothing of `appliance`, not even its errors.
    "analysis": set(),
}
"""Package, and the packages it may import besides the leaves and itself."""

PUBLIC: dict[str, dict[str, set[str]]] = {
    "operations": {
        "classify": {"classify"},
        "engines": {"abandon", "container_owner", "deployed", "gateway", "owners", "transfer"},
        "hosts": {"guarded", "host", "installed"},
        "image": {"build", "copy", "deliver", "sources"},
        "lab": {"demo"},
        "migration": {"agents", "here", "inspection", "rollback", "start", "state", "switch"},
        "nodes": {"files", "image"},
        "overlay": {"frozen", "generation", "mirror", "mirrored", "names", "newest", "overlay", "standby"},
        "services": {
            "apply",
            "boot",
            "effect",
            "generation",
            "holding",
            "inside",
            "restart",
            "start",
            "stop",
            "unfinished",
        },
        "site": {"ca", "config", "find", "init", "issued", "keys", "locate"},
        "snapshots": {"list", "pull", "push", "report", "repository", "restore", "snapshot", "status", "transfer"},
        "vm": {"build", "certificates", "client", "deferred", "restore", "snapshot", "snapshots", "vm"},
    },
    "plan": {
        "adopt": {"frames", "read_slurm"},
        "migration": {"move", "plan", "state"},
        "overlay": {"seed"},
        "services": {
            "apply",
            "confinement",
            "controllers",
            "effect",
            "links",
            "network",
            "nodes",
            "supervisor",
            "runs",
        },
        "snapshots": {"retention"},
    },
    "cli": {},
}
"""Of each subject, the modules that other subjects may import."""

SUBJECTS = {
    "site": set(),
    "classify": {"site"},
    "image": {"site"},
    "hosts": {"image", "site"},
    "vm": {"hosts", "image", "site"},
    "nodes": {"image", "vm"},
    "lab": {"classify", "image", "nodes", "site", "vm"},
    "overlay": {"image"},
    "snapshots": {"hosts", "overlay", "vm"},
    "services": {"hosts", "image", "nodes", "overlay", "snapshots", "vm"},
    "engines": {"hosts", "image", "overlay", "services"},
    "migration": {"engines", "hosts", "image", "overlay", "services", "snapshots"},
    "adopt": {"classify", "engines", "hosts", "image", "migration", "services", "site"},
    "upgrade": {"hosts", "image", "lab", "migration", "services", "snapshots", "vm"},
}
"""Subject of operations, and the subjects that it imports: only those above it, so that there is no cycle.

What several of them need is in modules beside their folders: context, preflight, history, lease, start_note."""

PURE = {"shared", "config", "catalog", "plan", "engines", "errors", "progress", "share", "text", "units"}
"""Packages without effects: text and values in, text and values out."""

EFFECTS = {"subprocess", "socket", "paramiko", "spython", "ansible_runner", "rich"}

ONLY_IN = {
    "spython": {"appliance/tools/apptainer.py"},
    "ansible_runner": {"appliance/tools/ansible.py"},
    "paramiko": {"appliance/host/ssh.py", "appliance/host/transport.py"},
}
"""External modules that only one file may import."""

ONLY_BELOW = {"rich": "appliance/cli/", "scapy": "analysis/protocols/", "shtab": "appliance/cli/"}

LONGEST = 600
"""Lines of a file; a longer one is two files."""
MOST_PARAMETERS = 6
"""Parameters of a function besides self and cls; more of them are a dataclass."""


@dataclass(frozen=True)
class Import:
    """One imported module, where it stands, and whether only the type checker sees it."""

    module: str
    line: int
    for_types: bool


def sources() -> list[Path]:
    return sorted(path for top in ("appliance", "analysis") for path in (ROOT / top).rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "appliance" and len(parts) > 1 else parts[0]


def imports_of(path: Path) -> list[Import]:
    """Every import of a file, those inside of functions too."""
    tree = ast.parse(path.read_text(), str(path))
    return list(_imports(tree, path, for_types=False))


def _imports(node: ast.AST, path: Path, *, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, for_types)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{path}:{child.lineno}: write the whole name, not a relative import"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, for_types)
        elif isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            yield from _imports(child, path, for_types=True)
        else:
            yield from _imports(child, path, for_types=for_types)


def target_package(module: str) -> str | None:
    """The package of ours that a module is in; None for one that is not ours."""
    parts = module.split(".")
    if parts[0] == "appliance":
        return parts[1] if len(parts) > 1 else "appliance"
    return "analysis" if parts[0] == "analysis" else None


def breaks(path: Path) -> list[str]:
    """What in a file is against the rule."""
    name, package = str(path.relative_to(ROOT)), package_of(path)
    if package == "__init__":
        package = "errors"  # appliance/__init__.py: the version and nothing else
    allowed = {package, *LEAVES, *MAY_IMPORT[package]} if package != "analysis" else {"analysis"}
    found = []
    for one in imports_of(path):
        where, target, top = f"{name}:{one.line}", target_package(one.module), one.module.split(".")[0]
        # An annotation has no effect at run time; the command line may name the types of its results.
        if target and target not in allowed and not (one.for_types and package == "cli"):
            found.append(f"{where}: {package} must not import {one.module}")
        if top in EFFECTS and package in PURE:
            found.append(f"{where}: {package} is pure and must not import {top}")
        if top in ONLY_IN and name not in ONLY_IN[top]:
            found.append(f"{where}: {top} is imported in {', '.join(sorted(ONLY_IN[top]))} only")
        if top in ONLY_BELOW and not name.startswith(ONLY_BELOW[top]):
            found.append(f"{where}: {top} is imported below {ONLY_BELOW[top]} only")
    return found


def find_subject(path: Path) -> tuple[str, str]:
    """The package of a file and its subject in there; an empty one of a file that belongs to none."""
    parts = path.relative_to(ROOT).parts
    return parts[1], parts[2] if parts[1] in PUBLIC and len(parts) > 3 else ""


def sideways(path: Path) -> list[tuple[str, str]]:
    """What a file imports of other subjects of its package: subject and module."""
    package, subject = find_subject(path)
    modules = [one.module.split(".") for one in imports_of(path)]
    return [
        (module[2], module[3])
        for module in modules
        if module[:2] == ["appliance", package]
        and len(module) > 3
        and (ROOT / "appliance" / package / module[2] / f"{module[3]}.py").is_file()
        and module[2] != subject
    ]


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_subjects_know_only_public_modules_of_each_other(package: str) -> None:
    files = [path for path in sources() if package_of(path) == package and path.name != "__init__.py"]
    used = {one for path in files for one in sideways(path)}
    assert used == {(subject, module) for subject, modules in PUBLIC[package].items() for module in modules}


def test_subjects_of_operations_do_not_import_each_other_in_circles() -> None:
    used: dict[str, set[str]] = {}
    for path in (ROOT / "appliance" / "operations").glob("*/*.py"):
        used.setdefault(path.parent.name, set()).update(subject for subject, _ in sideways(path))
    assert used == SUBJECTS
    names = list(SUBJECTS)
    assert [name for name in names if not SUBJECTS[name] <= set(names[: names.index(name)])] == []


SHARED = (
    *("context", "deployed", "env", "preflight", "history", "identity", "lease", "networks", "start_note"),
    "under_way",
)
"""Modules of operations that all subjects may import."""


def test_shared_modules_of_operations_import_no_verb() -> None:
    folder = ROOT / "appliance" / "operations"
    assert sorted(path.stem for path in folder.glob("*.py")) == sorted(("__init__", *SHARED))
    used = {(name, *one) for name in SHARED for one in sideways(folder / f"{name}.py")}
    assert used == {("context", "site", "find"), ("start_note", "image", "deliver")}


def test_every_package_is_in_the_table() -> None:
    packages = {package_of(path) for path in sources()} - {"__init__", "__main__"}
    assert packages <= set(MAY_IMPORT), "a new package: add it to MAY_IMPORT and HACKING.md"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports(package: str) -> None:
    assert [line for path in sources() if package_of(path) in (package, "__init__") for line in breaks(path)] == []


ON_HOSTS = [
    *(path for name in ("agent", "shared") for path in sorted((ROOT / "appliance" / name).glob("*.py"))),
    *(ROOT / "appliance" / name for name in agent.LEAVES),
]


@pytest.mark.parametrize("path", ON_HOSTS, ids=lambda path: path.name)
def test_the_agent_runs_on_the_oldest_python(path: Path) -> None:
    """With nothing but its standard library."""
    ast.parse(path.read_text(), feature_version=OLDEST)
    tops = {one.module.split(".")[0] for one in imports_of(path)}
    assert tops - {"appliance", "__future__"} <= sys.stdlib_module_names


FORBIDDEN_CALLS = {
    "os.system": "use host.run with an argv",
    "os.popen": "use host.run with an argv",
    "yaml.load": "use yaml.safe_load, or a loader derived from SafeLoader with config.read",
    "yaml.unsafe_load": "use yaml.safe_load",
    "pickle.loads": "use JSON",
    "pickle.load": "use JSON",
}


def bad_calls(path: Path) -> Iterator[str]:
    """Calls that let text become code."""
    name = path.relative_to(ROOT)
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        safe = called == "yaml.load" and any("Safe" in ast.unparse(word) for word in [*node.args[1:], *_values(node)])
        if called in FORBIDDEN_CALLS and not safe:
            yield f"{name}:{node.lineno}: {called}: {FORBIDDEN_CALLS[called]}"
        for keyword in node.keywords:
            # shtab's `shell` is the name of one, and runs none.
            if keyword.arg == "shell" and called != "shtab.complete" and ast.unparse(keyword.value) != "False":
                yield f"{name}:{node.lineno}: shell=True: give an argv"


def _values(node: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in node.keywords]


def inside_programs() -> list[Path]:
    """Programs of the container, which have no .py at their end."""
    folder = ROOT / "definitions" / "runtime"
    return sorted(path for path in folder.iterdir() if path.is_file() and "python" in path.read_text().split("\n")[0])


def test_no_text_becomes_code() -> None:
    files = [*sources(), *inside_programs(), *(ROOT / "definitions" / "runtime").glob("*.py")]
    assert [line for path in files for line in bad_calls(path)] == []


def test_files_are_short() -> None:
    files = [*sources(), *inside_programs(), *(ROOT / "analysis" / "core").glob("*.[ch]")]
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in long.items() if lines > LONGEST} == {}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of a function's parameters, without self and cls."""
    given = function.args
    rest = [one for one in (given.vararg, given.kwarg) if one]
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def long_signatures(path: Path) -> list[str]:
    """The functions of a file that have too many parameters."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(parameters(node)) > MOST_PARAMETERS
    ]


def test_functions_have_few_parameters() -> None:
    assert [line for path in sources() for line in long_signatures(path)] == []


SHELL = {
    "appliance/host/base.py": 4,
    "appliance/host/ssh.py": 2,
    "appliance/lab/down.py": 1,
    "appliance/lab/etc.py": 1,
    "appliance/lab/root.py": 1,
    "appliance/lab/up.py": 1,
    "appliance/operations/engines/deployed.py": 1,
    "appliance/operations/lease.py": 1,
    "appliance/plan/machine.py": 1,
    "appliance/plan/services/jobs.py": 1,
    "appliance/tools/apptainer.py": 1,
    "appliance/tools/ext3.py": 1,
    "appliance/tools/guest.py": 1,
    "appliance/tools/held.py": 1,
    "appliance/tools/mdadm.py": 1,
    "appliance/tools/mmdebstrap.py": 1,
    "appliance/tools/nomad.py": 1,
    "appliance/tools/ports.py": 1,
    "appliance/tools/programs.py": 2,
    "appliance/tools/python.py": 1,
    "appliance/tools/qemu.py": 2,
    "appliance/tools/scripts.py": 1,
}
"""Shell scripts that programs of ours run, by file. A new one is an argv, a file of
definitions/scripts/, or belongs into a file of ``tools``."""
MOST_SHELL = 40


def shell_scripts(path: Path) -> int:
    """Count the command lines of a file that run a script with a shell."""
    found = 0
    for node in ast.walk(ast.parse(path.read_text())):
        words = node.elts if isinstance(node, ast.Tuple | ast.List) else node.args if isinstance(node, ast.Call) else []
        values = [word.value if isinstance(word, ast.Constant) else None for word in words]
        found += sum(one in ("sh", "bash", "/bin/sh") and two == "-c" for one, two in pairwise(values))
    return found


def test_shell_scripts_are_few() -> None:
    counted = {str(path.relative_to(ROOT)): shell_scripts(path) for path in sources()}
    assert {name: number for name, number in counted.items() if number} == SHELL
    assert sum(SHELL.values()) < MOST_SHELL


def test_the_document_names_every_package() -> None:
    text = (ROOT / "HACKING.md").read_text()
    there = {package_of(path) for path in sources()} - {"__init__", "__main__"}
    assert sorted(package for package in there if not re.search(rf"`{package}[`/.]", text)) == []


def test_the_picture_is_up_to_date(tmp_path: Path) -> None:
    drawn = tmp_path / "imports.svg"
    subprocess.run([sys.executable, str(ROOT / "docs" / "imports.py"), str(drawn)], check=True, timeout=60)
    assert (ROOT / "docs" / "imports.svg").read_text() == drawn.read_text(), "`make imports` draws it"


BAD = {
    "import appliance.operations.services.start": "appliance/plan/x.py",
    "from appliance.host.local import Local": "appliance/cli/x.py",
    "import subprocess": "appliance/config/x.py",
    "def f():\n    import paramiko": "appliance/tools/x.py",
    "from appliance import errors": "analysis/x.py",
    "from rich.table import Table": "appliance/operations/x.py",
}


@pytest.mark.parametrize("text", BAD)
def test_the_rule_bites(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / BAD[text]
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(breaks(path)) == 1


@pytest.mark.parametrize(
    "text", ["os.system('x')", "run('x', shell=True)", "yaml.load(x)", "yaml.load(x, Loader=Loader)"]
)
def test_the_calls_are_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(list(bad_calls(path))) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('run("sh", "-c", X, "x")', 1),
        ('A = ("unshare", "-m", "sh", "-c", X)\nrun(["/bin/sh", "-c", Y])', 2),
        ('run("tar", "-c", "sh")', 0),
    ],
)
def test_shell_scripts_are_found(text: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    assert shell_scripts(path) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(a, b, c, d, e, f): ...", 0),
        ("def f(a, b, c, d, e, f, *, g): ...", 1),
        ("class A:\n    def f(self, a, b, c, d, e, f): ...", 0),
        ("class A:\n    async def f(self, a, /, b, *c, d, e, f, **g): ...", 1),
    ],
)
def test_long_signatures_are_found(text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(long_signatures(path)) == count
