"""Messages about agents that end without a result: neither their requests nor their messages are shown."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from appliance.errors import SmsError
from appliance.host.base import CommandError, CommandTimeout, Result
from appliance.host.stream import LineReader
from appliance.progress import Silent
from appliance.shared.lease import SwapLease
from appliance.tools import python
from appliance.tools.agent import AgentEnded, Agents, MessageReader, Session
from tests.support.fake import Answer, Fake, FakeStream

REQUEST = {"cluster": "lab", "overlay": "/o/lab.img"}
STEP = json.dumps({"kind": "step", "name": "leave.offer", "text": ""})
RESULT = json.dumps({"kind": "result", "state": "gone"})
INNER = ("lab.img", "pyz", "python3", "{", "kind", "early:", "bytes")


def session(status: int, *lines: str) -> Session:
    """Return the session of an agent that has printed these lines on standard error, and ended."""
    argv = ("python3", "-I", Agents().installed_path(), "leave", json.dumps(REQUEST))
    reader = MessageReader(Silent(), ExitStack())
    errors = "\n".join(lines).encode()
    stream = FakeStream("a", argv, lambda _: Result("a", argv, status, b"", errors), LineReader(reader.feed))
    return Session(stream, reader)


ENDS = [
    ("it gave up on its own", 0, (STEP, RESULT), "a: the agent there ended before it had finished"),
    ("killed", -9, (STEP,), "a: the agent there was killed by signal 9, without a result"),
    ("killed over ssh", 137, (STEP,), "a: the agent there ended with status 137, without a result"),
    ("an error of python", 1, (STEP, "MemoryError"), "without a result\n    MemoryError"),
]


@pytest.mark.parametrize(("status", "lines", "words"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_an_agent_that_ends_early(status: int, lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(SmsError) as caught:
        session(status, *lines).read_exactly(4)
    said = f"{caught.value.message}\n{caught.value.hint}"
    assert words in said and "run the command again" in said
    assert not [inner for inner in INNER if inner in said], said


def test_its_problem_is_shown_as_it_is() -> None:
    problem = {"kind": "problem", "message": "chunk 17 is not what was sent", "hint": "again", "status": 1}
    with pytest.raises(SmsError, match=r"^a: chunk 17 is not what was sent$"):
        session(1, STEP, json.dumps(problem)).read_exactly(4)


def host(answer: Answer) -> Fake:
    class Remote(Fake):
        def perform(self, *_: object) -> object:
            raise NotImplementedError

    answers: dict[tuple[str, ...], Answer] = {
        ("sh", "-c", python.FIND): (0, "python3"),
        ("test", "-s"): (0, ""),
        ("python3", "-I"): answer,
    }
    return Remote(answers, name="a")


@pytest.mark.parametrize("timeout", [True, False])
def test_a_request_that_fails_is_not_shown(timeout: bool) -> None:
    def fail(argv: tuple[str, ...], _: bytes | None) -> tuple[int, str]:
        result = Result("a", argv, 124, b"", f"{STEP}\nsh: not found".encode())
        raise (CommandTimeout if timeout else CommandError)(result)

    for work in (
        lambda: Agents().perform(host(fail), SwapLease("/o/lab.img.lease", "{}")),
        lambda: Agents().call(host(fail), "resume", REQUEST),
    ):
        with pytest.raises(AgentEnded, match="sh: not found") as caught:
            work()
        assert isinstance(caught.value, CommandTimeout) is timeout
        assert not [inner for inner in INNER if inner in str(caught.value)]
