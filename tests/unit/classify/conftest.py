"""A browser for the tests of the HTML report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import find_tool
from tests.unit.browser import Browser, open_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(find_tool("chromium"), tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
