"""The commands of the documents about the lab, the one with diskless machines included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.blocks import Reader
from tests.real.labs import need_machine, remove_lab
from tests.real.pages import MACHINES

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Somebody on a machine without a lab."""
    pytest.importorskip("sushy")
    need_machine(metal=True)
    remove_lab("lab")
    yield Reader("lab")
    remove_lab("lab")


@pytest.mark.parametrize("name", MACHINES)
def test_the_page_is_true(reader: Reader, name: str) -> None:
    reader.check(MACHINES[name], name)
