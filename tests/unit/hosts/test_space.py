"""Free space and programs, from what the host prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.host.local import Local
from appliance.tools.programs import find_missing, has_program
from appliance.tools.space import Space, query_space, query_used
from tests.support.fake import Fake


@pytest.mark.parametrize(
    ("printed", "space"),
    [
        ("      1B-blocks         Avail\n270453178368   75161927680", Space(270453178368, 75161927680)),
        ("1B-blocks Avail\n0 0\n", Space(0, 0)),
    ],
)
def test_query_space(printed: str, space: Space) -> None:
    assert query_space(Fake({("test", "-d"): (0, ""), ("df",): (0, printed)}), "/x") == space


def test_a_folder_that_is_not_there_yet_has_the_space_of_the_one_above(tmp_path: Path) -> None:
    assert query_space(Local(), str(tmp_path / "a" / "b")).size == query_space(Local(), str(tmp_path)).size > 0


def test_query_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10000)
    assert query_used(Local(), str(tmp_path / "file"), str(tmp_path / "none")) >= 8192


def test_find_missing() -> None:
    assert find_missing(Local(), "sh", "no-such-program", "cat", "nor-this") == ["no-such-program", "nor-this"]
    assert has_program(Local(), "sh") and not has_program(Local(), "no-such-program")
