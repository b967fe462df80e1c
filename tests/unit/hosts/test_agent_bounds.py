"""What an agent may print, and how long it may be silent: what answers in its place may be hostile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.shared.results import ALIVE_S
from appliance.tools.agent import BOUNDS, Agents, Bounds

RESULT = f"echo '{json.dumps({'kind': 'result', 'state': 'done'})}'"
ROWS = f"echo '{json.dumps({'kind': 'rows', 'rows': [{}]})}'"
ALIVE = f"echo '{json.dumps({'kind': 'alive'})}'"


@dataclass(frozen=True)
class Script(Agents):
    """The agent is a shell script."""

    script: str = ""

    def install(self, host: Host, time_left: Callable[[], float] = lambda: 60.0) -> tuple[str, ...]:
        return ("sh", "-c", self.script, "agent")


@pytest.mark.parametrize(
    ("script", "bounds", "why"),
    [
        ("sleep 60", Bounds(silent_s=0.3), "sent nothing for 0.3 s"),
        (f"{ALIVE}; sleep 60", Bounds(silent_s=0.3), "sent nothing for 0.3 s"),
        (f"{RESULT}; exec >&-; sleep 60", Bounds(silent_s=0.3), "sent nothing for 0.3 s"),
        (f"while :; do {ALIVE}; sleep 0.05; done", Bounds(0.5, silent_s=5), "did not end within 0.5 s"),
        (f"yes {'x' * 4000}", BOUNDS, "printed more than 64 MiB"),
        (f"yes {json.dumps({'kind': 'alive'})!r}", Bounds(size=1 << 20), "printed more than 1 MiB"),
    ],
)
def test_an_agent_is_ended_at_its_bounds(script: str, bounds: Bounds, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(SmsError, match=why):
        Script(script=script).call(Local("a"), "take", {}, bounds=bounds)
    assert time.monotonic() - began < 30


def test_an_agent_that_shows_that_it_is_alive_is_waited_for() -> None:
    script = f"for _ in 1 2 3 4 5 6 7 8; do {ALIVE}; sleep 0.3; done; {RESULT}"
    assert Script(script=script).call(Local("a"), "take", {}, bounds=Bounds(silent_s=2)) == {
        "kind": "result",
        "state": "done",
    }
    assert BOUNDS.silent_s >= 5 * ALIVE_S


def test_what_its_caller_does_is_not_its_silence() -> None:
    """Such as a progress bar at a terminal that is stopped by ^S."""
    call = Script(script=f"{ROWS}; {RESULT}").call
    done = call(Local("a"), "diff", {}, on_rows=lambda _: time.sleep(1), bounds=Bounds(silent_s=0.4))
    assert done["state"] == "done"


def test_a_silent_agent_shows_that_it_is_alive_until_its_caller_is_gone() -> None:
    script = "from appliance.agent import main; main._watch_caller(0.1)"
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        for _ in range(3):
            assert json.loads(process.stdout.readline()) == {"kind": "alive"}
        process.stdin.close()
        assert process.wait(10) == -15
