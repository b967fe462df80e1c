"""What the agent makes of another program in the place of the container's supervisor: an error, within limits."""

from __future__ import annotations

import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.agent.instance import Instance, read_states
from appliance.agent.protocol import Problem
from appliance.agent.supervisor import CALL_S
from tests.hostile.supervisor import PROGRAM, REPLIES, make_reply
from tests.support.system import FakeSystem

PATH = "run/sms/supervisor.sock"
LATE = ("single bytes", "nothing")
WHY = "the container's supervisor (sent an invalid reply|does not reply in time)"


class Rooted(Instance):
    """An instance with the root of its system."""

    system: FakeSystem

    @property
    def root(self) -> str:
        return self.system.root


@contextmanager
def replaced(root: Path, first: bytes, then: bytes = b"") -> Iterator[Instance]:
    """An instance with that root, in which another program replies in the place of the supervisor."""
    (root / PATH).parent.mkdir(parents=True)
    argv = [sys.executable, "-I", "-c", PROGRAM, str(root / PATH), first.hex(), then.hex()]
    system = FakeSystem()
    system.root = str(root)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"listens\n"
        try:
            yield Rooted(77, system)
        finally:
            process.kill()


@pytest.mark.parametrize("reply", REPLIES)
def test_what_no_supervisor_replies_is_an_error(tmp_path: Path, reply: str) -> None:
    began, limit_s = time.monotonic(), 0.5 if reply in LATE else CALL_S
    with replaced(tmp_path, *REPLIES[reply]) as instance, pytest.raises(Problem, match=WHY):
        read_states(instance.supervisor(limit_s))
    assert time.monotonic() - began < 10


def test_what_a_supervisor_replies_about_many_services_is_accepted(tmp_path: Path) -> None:
    processes = [{"name": f"s{number}", "statename": "EXITED", "description": "x" * 300} for number in range(100)]
    reply = make_reply(xmlrpc.client.dumps((processes,), methodresponse=True))
    with replaced(tmp_path, reply) as instance:
        assert instance.supervisor().getAllProcessInfo() == processes
        instance.stop_services(["s99"], 1)
