"""Linters, type checker and house rules over everything that is tracked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.lab import render
from appliance.lab.layout import SHAPES, Layout

ROOT = Path(__file__).parents[1]

Need = Callable[[str], str]


def lint(*argv: str) -> None:
    """Run a linter; its words are the failure's."""
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.fail(f"{Path(argv[0]).name}:\n{done.stdout}{done.stderr}", pytrace=False)


def tracked(need: Need) -> list[Path]:
    """Files of the repository that are text and there."""
    git = need("git")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run([git, "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


def shebang(path: Path) -> str:
    """The interpreter of a script; empty where there is none."""
    first = path.read_text(errors="replace").partition("\n")[0]
    found = re.match(r"#!\s*/(?:usr/)?bin/(?:env +)?(\w+)", first)
    return found[1] if found else ""


def test_ruff_check(need: Need) -> None:
    # Programs of the container have no .py at their end, and ruff looks only where it is pointed.
    programs = [str(path) for path in tracked(need) if not path.suffix and shebang(path).startswith("python")]
    lint(need("ruff"), "check", "--no-cache", ".", *programs)


def test_ruff_format(need: Need) -> None:
    lint(need("ruff"), "format", "--check", "--no-cache", ".")


def test_mypy(need: Need) -> None:
    lint(need("mypy"))


def test_shellcheck(need: Need) -> None:
    scripts = [str(path) for path in tracked(need) if shebang(path) in ("sh", "bash") and path.suffix != ".j2"]
    assert len(scripts) >= 5
    lint(need("shellcheck"), "--source-path=SCRIPTDIR", *scripts)


@pytest.mark.parametrize("name", ["outside", "host-a", "node1", "bmc"])
def test_shellcheck_of_the_labs_scripts(name: str, need: Need, tmp_path: Path) -> None:
    """They are templates: what they become is looked at."""
    layout = Layout("lab", 2, SHAPES["routed"], metal=1)
    host = next(host for host in layout.hosts if host.name == name)
    keys = render.Keys(b"", b"", {each.name: b"" for each in layout.hosts})
    files = render.host_files(layout, host, keys, sms="/usr/bin/sms")
    binds = [("/srv/some where", "/srv", True)]
    (tmp_path / "init.sh").write_text(render.init_script(layout, host, lower="/var/cache/root", binds=binds))
    for script in ("setup.sh", "ready.sh"):
        (tmp_path / script).write_bytes(files[f"lab/{script}"].data)
    lint(need("shellcheck"), *map(str, sorted(tmp_path.glob("*.sh"))))


@pytest.mark.parametrize("playbook", sorted(path.name for path in (ROOT / "playbooks").glob("*.yml")))
def test_playbooks(playbook: str, need: Need, tmp_path: Path) -> None:
    need("ansible-playbook")
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path), "ANSIBLE_LOCALHOST_WARNING": "False"}
    argv = [sys.executable, "-m", "ansible", "playbook", "--syntax-check", "-i", "localhost,", playbook]
    done = subprocess.run(argv, cwd=ROOT / "playbooks", env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def mirror_hosts() -> set[str]:
    """Host names of the mirrors that this machine installs packages from."""
    apt = shutil.which("apt-get")
    if not apt:
        return set()
    said = subprocess.run([apt, "indextargets", "--format", "$(SITE)"], capture_output=True, text=True).stdout
    hosts = {re.sub(r"^\w+://|[:/].*$", "", line.strip()) for line in said.splitlines()}
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    hosts |= set(re.findall(r"https?://(?:[^@/'\s]*@)?([^/:'\s]+)", pip))
    return {host for host in hosts if "." in host}


def workplace() -> list[str]:
    """Paths that only this machine has: the checkout's own, and those of what lies beside it."""
    if ROOT.parent in map(Path, ("/", "/opt", "/srv", "/tmp", "/var/tmp", "/home", "/root", "/usr/src")):
        return [str(ROOT)] if ROOT.parent == Path("/root") or Path("/home") in ROOT.parents else []
    return sorted({str(path) for path in [ROOT, *ROOT.parent.iterdir()]})


def test_nothing_names_this_workplace(need: Need) -> None:
    words = [re.escape(word) for word in (*workplace(), *mirror_hosts())]
    if not words:
        pytest.skip("nothing here tells this workplace from any other")
    pattern = re.compile(rf"(?<![\w/.-])({'|'.join(words)})(?![\w-])")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[1]}"
        for path in tracked(need)
        if path.suffix != ".lock"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


def test_readme_shows_both_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    assert re.search(r"^ *make demo\b", first_screen, re.MULTILINE)
    assert re.search(r"^ *make test\b", first_screen, re.MULTILINE)
    assert "docs/architecture.svg" in first_screen
