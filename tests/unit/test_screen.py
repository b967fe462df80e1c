"""What reaches the terminal is what was meant."""

from __future__ import annotations

import pytest
from rich.table import Table

from appliance.cli import screen


def test_a_mac_address_and_a_line_of_passwd_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    words = "02:ab:00:cd:00:b1 u1:x:2001"
    table = Table(box=None)
    table.add_column("what")
    table.add_row(words)
    screen.out.print(table)
    screen.out.print(words)
    assert capsys.readouterr().out.count(words) == 2
