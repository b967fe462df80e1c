"""Cases of parametrized tests, and a verb that they run in this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import main


def sample(cases: Iterable[str], *chosen: str) -> list[Any]:
    """Cases for ``parametrize``: the chosen ones run always, the others in `make test-full` alone."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.full) for case in cases]


def run_verb(captured: pytest.CaptureFixture[str], site: Path, *words: str) -> tuple[int, str]:
    """Run a verb with a site file; return its exit status, and all that it has printed."""
    captured.readouterr()
    try:
        status = main(["-q", "--site", str(site), *words])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, "".join(captured.readouterr())
