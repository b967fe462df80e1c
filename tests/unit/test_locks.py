"""The lock files of Python packages: every package with its version and digests, and the same one in each."""

from __future__ import annotations

import re
import tomllib

import pytest

from appliance.share import share
from tests.places import ROOT

LOCKS = {
    "checkout": ROOT / "requirements.lock",
    "production": ROOT / "requirements-run.lock",
    "vm": share("playbooks", "roles", "vm_packages", "files", "python-el9.lock"),
}


def packages(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9.-]+)==([^ \\]+)", LOCKS[lock].read_text(), re.MULTILINE))


def plain(requirement: str) -> str:
    """The normalized name in a requirement."""
    return re.split(r"[\[<>=;! ]", requirement.lower(), maxsplit=1)[0].replace("_", "-")


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_digests(lock: str) -> None:
    text = re.sub(r"^ *(?:#.*)?\n", "", LOCKS[lock].read_text(), flags=re.MULTILINE)
    entry = r"[a-z0-9._-]+==[^\n]+ \\\n(?:    --hash=sha256:[0-9a-f]{64} \\\n)*    --hash=sha256:[0-9a-f]{64}\n"
    assert re.fullmatch(f"(?:{entry})+", text)


def test_production_has_what_is_tested() -> None:
    tested, used = packages("checkout"), packages("production")
    assert {name: version for name, version in used.items() if tested.get(name) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {plain(each) for each in project["dependencies"]} <= set(used)
    assert not {"pytest", "mypy", "ruff"} & set(used)


def test_the_vm_has_what_it_asks_for() -> None:
    lines = LOCKS["vm"].with_suffix(".in").read_text().lower().splitlines()
    assert {line for line in lines if not line.startswith("#")} <= {
        f"{name}=={version}" for name, version in packages("vm").items()
    }
