"""Two hosts with leases, which have a folder each or share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs import Pair


@pytest.fixture
def apart(tmp_path: Path) -> Pair:
    return Pair(tmp_path, shared=False)


@pytest.fixture
def together(tmp_path: Path) -> Pair:
    return Pair(tmp_path, shared=True)
