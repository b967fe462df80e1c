"""What reaches the terminal is what was meant."""

from __future__ import annotations

import sys
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.table import Table

from appliance.cli import screen, steps
from tests.waiting import wait_until


def test_a_mac_address_and_a_line_of_passwd_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    words = "02:ab:00:cd:00:b1 u1:x:2001"
    table = Table(box=None)
    table.add_column("what")
    table.add_row(words)
    screen.out.print(table)
    screen.out.print(words)
    assert capsys.readouterr().out.count(words) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_waited_for_is_shown_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = StringIO()
    console = screen.Screen(file=written, force_terminal=terminal, _environ={"TERM": "xterm"})
    monkeypatch.setattr(screen, "err", console)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    with steps.waiting("query [x]"):
        if terminal:
            wait_until(lambda: "query [x]" in written.getvalue(), "what a thread draws", 10)
    assert terminal or not written.getvalue()
