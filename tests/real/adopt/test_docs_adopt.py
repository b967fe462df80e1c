"""The commands of the document about adoption, in a lab that has a node to adopt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.blocks import Reader
from tests.real.labs import build_image, fresh_lab
from tests.real.pages import LEGACY

pytestmark = [pytest.mark.real, pytest.mark.full]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Somebody in the lab of the documents' name, whose nodes use sms-old."""
    with fresh_lab("lab", 2, legacy=True) as lab:
        build_image(lab)
        yield Reader("lab")


@pytest.mark.parametrize("name", LEGACY)
def test_the_page_is_true(reader: Reader, name: str) -> None:
    reader.check(LEGACY[name], name)
