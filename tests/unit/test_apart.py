"""What a command gets as its input and output: a pipe in the place of a file of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

RUN = "from appliance.host.local import Local; import sys; sys.exit(Local().interact(*sys.argv[1:]))"


def interact(script: str, **files: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", RUN, "sh", "-c", script], cwd=ROOT, **files)  # type: ignore[call-overload,no-any-return]


@pytest.mark.slow
def test_files_are_out_of_reach_of_a_command(tmp_path: Path) -> None:
    """Root in the container would write the administrator's script, or make the output setuid."""
    script, output = tmp_path / "script", tmp_path / "output"
    script.write_text("echo first\n")
    output.write_text("before\n")
    attack = (
        'read -r line; echo "$line"; echo evil >>/proc/self/fd/0; chmod 4777 /proc/self/fd/1; echo error >&2; exit 3'
    )
    with script.open() as stdin, output.open("a") as stdout:
        assert interact(attack, stdin=stdin, stdout=stdout, stderr=subprocess.STDOUT).returncode == 3
    assert script.read_text() == "echo first\n"
    text = output.read_text()
    assert text.startswith("before\necho first\n") and text.endswith("error\n"), "both outputs are in their order"
    assert output.stat().st_mode & 0o7777 == 0o644


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "reads"), [(3, 1), (30000, 1), (3, 0), (30000, 7)])
def test_input_that_is_not_read_is_left_for_the_next_program(tmp_path: Path, lines: int, reads: int) -> None:
    """As in a loop of a shell, whose `read` has the same file."""
    path = tmp_path / "nodes"
    path.write_text("".join(f"n{number}\n" for number in range(lines)))
    # dd reads whole blocks of what is asked for, and no more.
    count = sum(len(f"n{number}\n") for number in range(reads))
    with path.open("rb", buffering=0) as stdin:
        done = interact(f"head -c {count} >/dev/null; exit 0" if count else "exit 0", stdin=stdin)
        assert done.returncode == 0
        assert stdin.read() == path.read_bytes()[count:]


@pytest.mark.slow
def test_pipes_are_passed_as_they_are() -> None:
    done = interact("cat; echo error >&2", input=b"x" * 100000, capture_output=True)
    assert (done.stdout, done.stderr) == (b"x" * 100000, b"error\n")


def test_a_command_cannot_signal_the_group_of_its_caller() -> None:
    """A script calls it, as cron does: the command ends its own process group, and the script goes on."""
    script = 'shift; "$@"; echo $? goes on'
    argv = ["sh", "-c", script, "script", "-", sys.executable, "-c", RUN, "sh", "-c", "kill -TERM 0; sleep 60"]
    done = subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True)
    assert done.stdout == b"143 goes on\n"  # SIGTERM, as shells report it


AS_SOON_AS_IT_RUNS = """
import os, subprocess, time
def start(*args, popen=subprocess.Popen, **options):
    process = popen(*args, **options)
    if args[0][0] == "sh":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    return process
subprocess.Popen = start
"""


@pytest.mark.parametrize("prelude", ["", AS_SOON_AS_IT_RUNS], ids=["while it runs", "before its process ID is known"])
def test_a_command_ends_with_its_interrupted_caller(prelude: str) -> None:
    run = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{prelude}\n{RUN}"
    argv = [sys.executable, "-c", run, "sh", "-c", "trap '' INT; echo $$; sleep 60; sleep 60"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as caller:
        assert caller.stdout
        command = Path("/proc") / caller.stdout.readline().decode().strip()
        if not prelude:
            caller.send_signal(signal.SIGINT)
        assert caller.wait(30) and not command.exists()
