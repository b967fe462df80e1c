"""What several tests share."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings


def pytest_configure() -> None:
    """Who runs the tests in the background of a shell has SIGINT ignored, and so have all programs that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long an example takes depends on what runs beside it.
    settings.register_profile("sms", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("sms")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, dict[str, str]], None]:
    """Holds texts by relative path against the files of a folder; with --update-golden it writes them."""

    def compare(folder: Path, texts: dict[str, str]) -> None:
        if request.config.getoption("--update-golden"):
            for left in sorted(folder.rglob("*")) if folder.is_dir() else []:
                if left.is_file() and str(left.relative_to(folder)) not in texts:
                    left.unlink()
            for name, text in texts.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        held = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
        assert sorted(texts) == sorted(held), "other files than the golden ones: pytest --update-golden writes them"
        for name, text in texts.items():
            assert text == held[name], f"{name} differs from its golden file: pytest --update-golden writes it"

    return compare


def find_tool(tool: str) -> str:
    """Path of a program, the virtual environment's first. Without it the test skips, and fails in CI."""
    beside = Path(sys.executable).with_name(tool)
    found = str(beside) if beside.exists() else shutil.which(tool)
    if not found:
        missing = pytest.fail if os.environ.get("CI", "").lower() in ("1", "true", "yes") else pytest.skip
        missing(f"{tool} is not installed")
    return str(found)


@pytest.fixture
def need() -> Callable[[str], str]:
    """``need("shellcheck")`` gives its path; a missing tool skips on a laptop and fails in CI."""
    return find_tool
