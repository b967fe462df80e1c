"""Escape sequences in text of others reach no terminal, by whatever way the text is printed."""

from __future__ import annotations

import argparse
import io
import logging
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from appliance.cli import main, screen, steps
from appliance.cli.common import print_result
from appliance.cli.edge import PrintableStream, data_writer, guard_standard_streams, write_data
from appliance.cli.nodes.common import show_table
from appliance.cli.services import logs, status
from appliance.cli.vm import exec as vm_exec
from appliance.errors import ConfigError, Problem, SmsError
from appliance.host.base import Result
from appliance.plan.machine import inside_argv, instance_name
from appliance.progress import Progress
from appliance.text import printable_text
from appliance.tools.apptainer import Instance
from tests.places import ROOT
from tests.sites import open_debian
from tests.support.fake import Fake
from tests.support.instances import LIST, lists

HOSTILE = "a\x1b]0;title\x07b\x1b[31;5mc\x9b2Jd\u202ee\x00f\x85g"
"""Sets the title and colours, clears the screen, in two ways to write CSI; reverses text; ends a line for some."""
HARMLESS = printable_text(HOSTILE)
FORBIDDEN = ("\x1b]", "\x1b[31;5m", "\x07", "\x9b", "\u202e", "\0", "\x85")


OPTIONS: dict[str, Any] = {"highlight": False, "emoji": False, "soft_wrap": True, "color_system": "standard"}
"""Of the consoles in ``screen``."""


class Terminal(io.StringIO):
    """A terminal, which keeps what it is given."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard output and standard error a terminal, for the rest of the test."""
    shown = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, shown)
    for name in ("out", "err"):
        monkeypatch.setattr(screen, name, screen.Screen(stderr=name == "err", force_terminal=True, **OPTIONS))
    return shown


def run(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Run a verb that does this."""
    monkeypatch.setattr(status, "run", lambda _: work() and 0)
    with suppress(SystemExit, ZeroDivisionError):
        main(["status"])


def fail(error: BaseException) -> None:
    raise error


def print_traceback() -> None:
    try:
        fail(ValueError(HOSTILE))
    except ValueError:
        traceback.print_exc()


def step(progress: Progress) -> None:
    with progress.step(HOSTILE) as one:
        one.detail(HOSTILE)
        one.moved(1 << 21, 1 << 22)
    with progress.step(HOSTILE) as one:
        one.detail(HOSTILE)


def failed_step(progress: Progress) -> None:
    with progress.step(HOSTILE) as one:
        one.detail(HOSTILE)
        raise SmsError("it failed")


def table() -> Table:
    made = Table("what", title=escape(HOSTILE))
    made.add_row(escape(HOSTILE))
    return made


def live() -> None:
    with Live(table(), console=screen.out, auto_refresh=False) as shown:
        shown.update(HOSTILE, refresh=True)


def as_lines(markup: bool) -> Callable[[], None]:
    return lambda: print_result(argparse.Namespace(json=False), None, [escape(HOSTILE)], markup=markup)


LAST_RESORT = logging._StderrHandler()  # type: ignore[attr-defined]
"""What logs where nobody has set up logging."""

WAYS: dict[str, Callable[[], object]] = {
    "an error": lambda: fail(SmsError(HOSTILE)),
    "a hint": lambda: fail(SmsError("failed", hint=HOSTILE)),
    "a problem of a file": lambda: fail(ConfigError(problems=[Problem(HOSTILE, 3, HOSTILE, HOSTILE, HOSTILE)])),
    "an error of the system": lambda: fail(OSError(2, "no such file", HOSTILE)),
    "an interruption": lambda: fail(KeyboardInterrupt(HOSTILE)),
    "a traceback": print_traceback,
    "a message of a library": lambda: LAST_RESORT.emit(logging.makeLogRecord({"msg": HOSTILE})),
    "lines": as_lines(False),
    "lines with markup": as_lines(True),
    "a link": lambda: screen.out.print(f"[link=http://{HOSTILE}]x[/link]{escape(HOSTILE)}"),
    "a table": lambda: screen.out.print(table()),
    "a table of nodes": lambda: show_table(table()),
    "a view that is refreshed": live,
    "a note": lambda: screen.err.print(HOSTILE, markup=False, style="red"),
    "a step": lambda: step(steps.progress(False)),
    "a step that fails": lambda: failed_step(steps.progress(False)),
    "a report": lambda: steps.progress(False).report(HOSTILE),
    "print": lambda: print(HOSTILE),
    "a line on standard error": lambda: sys.stderr.write(HOSTILE),
    "several lines": lambda: sys.stdout.writelines([HOSTILE, HOSTILE]),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_escape_sequence_reaches_a_terminal(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    run(monkeypatch, WAYS[way])
    shown = terminal.getvalue()
    assert [one for one in FORBIDDEN if one in shown] == []
    assert "\\x1b]0;title" in shown


@pytest.mark.parametrize("way", WAYS)
def test_nor_a_file_or_pipe(way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, WAYS[way])
    shown = "".join(capsys.readouterr())
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)
    assert "\\x1b]0;title" in shown


def test_a_wrong_command_line_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    for argv in (["status", HOSTILE], [HOSTILE], ["logs", "--lines", HOSTILE]):
        with pytest.raises(SystemExit):
            main(argv)
    assert [one for one in FORBIDDEN if one in terminal.getvalue()] == []


def test_colours_are_those_of_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    run(monkeypatch, lambda: screen.err.print(f"[red]warning:[/] {escape(HOSTILE)}"))
    shown = HARMLESS.replace("\\x07", "")  # rich leaves it out
    assert terminal.getvalue() == f"\x1b[31mwarning:\x1b[0m {shown}\n"


def test_json_escapes_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(argparse.Namespace(json=True), {HOSTILE: [HOSTILE]}, [])
    shown = capsys.readouterr().out
    assert shown.isascii() and all(letter.isprintable() or letter == "\n" for letter in shown)


def test_text_that_was_escaped_stays_as_it_is() -> None:
    assert printable_text(HARMLESS) == HARMLESS
    assert printable_text("ä\t✓ \\x1b\n") == "ä\t✓ \\x1b\n"


def test_streams_are_guarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    below = io.StringIO()
    monkeypatch.setattr(sys, "stdout", below)
    monkeypatch.setattr(sys, "stderr", below)
    guard_standard_streams()
    first = sys.stdout
    guard_standard_streams()
    assert sys.stdout is first and isinstance(first, PrintableStream) and first.below is below


LOG = HOSTILE.encode() + b"\xff\r\n"


def test_data_is_escaped_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    guard_standard_streams()
    write = data_writer()
    for at in range(len(LOG)):
        write(LOG[at : at + 1])  # a character in two parts
    assert terminal.getvalue().replace("\\r\n", "\n") == f"{HARMLESS}\\xff\n"
    terminal.truncate(0)
    terminal.seek(0)
    write_data(LOG)
    assert terminal.getvalue() == f"{HARMLESS}\\xff\n"


def test_data_is_unchanged_in_a_file(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_data(LOG)
    assert capfdbinary.readouterr().out == LOG


class Logged(Fake):
    """A host where a log is read."""

    def interact(self, *argv: str) -> int:
        raise AssertionError("the log goes to the terminal as it is")

    def run(self, *argv: str, **options: Any) -> Result:
        if argv[0] == "debugfs":  # of the overlay, at rest
            return Result(self.name, argv, 0, b"earlier\n" + LOG, b"")
        return super().run(*argv, **options)


def open_logged(monkeypatch: pytest.MonkeyPatch, *, running: bool = True) -> None:
    """Make `sms logs` act on a host whose log of all messages is hostile; ``running``: whether the container runs."""
    cluster = open_debian()
    host = Logged(
        {
            LIST: lists([Instance(instance_name(cluster.site), 7, "/i.sif")] if running else []),
            inside_argv(cluster.site, cluster.services, "tail"): (0, HOSTILE),
            ("test", "-f"): (0, ""),
            ("test", "-L"): (1, ""),
        }
    )
    monkeypatch.setattr(logs, "open_serving", lambda _: (cluster, host))


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_on_a_terminal_is_escaped(follow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    open_logged(monkeypatch)
    assert main(["logs", *(["-f"] if follow else [])]) == 0
    assert [one for one in FORBIDDEN if one in terminal.getvalue()] == [] and "\\x1b]0;title" in terminal.getvalue()


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_in_a_pipe_is_unchanged(
    follow: bool, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """As journalctl and git log print it; the help of `sms logs` says so."""
    open_logged(monkeypatch)
    assert main(["logs", *(["-f"] if follow else [])]) == 0
    assert HOSTILE.encode() in capfdbinary.readouterr().out
    assert "a file or a pipe gets them unchanged" in " ".join(logs.DESCRIPTION.split())


def test_a_log_at_rest_on_a_terminal_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    open_logged(monkeypatch, running=False)
    assert main(["logs", "-n", "1"]) == 0
    assert terminal.getvalue() == f"{HARMLESS}\\xff\n"


def test_what_a_command_prints_is_passed_on(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user runs it, and may want its colours."""
    from appliance.cli.vm import common
    from appliance.operations.vm import inside as inside_vm

    ran = SimpleNamespace(stdout=LOG, stderr=b"", cut=False, status=3)
    monkeypatch.setattr(common, "open_vm", lambda _: (None, None))
    monkeypatch.setattr(inside_vm, "run_in_vm", lambda *_, **__: ran)
    assert vm_exec.run(argparse.Namespace(command=["ls"], input=False, timeout=1)) == 3
    assert capfdbinary.readouterr().out == LOG


OTHER_WAYS = {
    r"= Console\(|return Console\(": set(),
    r"\.buffer\.write": {"cli/edge.py", "cli/vm/exec.py", "cli/classify/classify.py"},
    r"sys\.__std": set(),
    r"\.interact\(": {
        *("operations/services/inside.py", "operations/vm/inside.py"),
        *("operations/lab/demo.py", "operations/lab/lab.py"),
    },
}
"""What passes by the edge, and the files where it is meant to: machine-readable output, commands of the user."""


@pytest.mark.parametrize("pattern", OTHER_WAYS)
def test_there_is_no_other_way(pattern: str) -> None:
    places = [ROOT / "appliance" / name for name in ("cli", "operations", "tools", "host", "plan", "lab")]
    files = [path for place in places for path in place.rglob("*.py") if re.search(pattern, _code(path))]
    assert {str(path.relative_to(ROOT / "appliance")) for path in files} == OTHER_WAYS[pattern]


def _code(path: Path) -> str:
    return "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
