"""Messages from the agent to its caller: one JSON object per line."""

import json
import os
import threading
from typing import Any, Dict, Optional, Type

from appliance.shared.records import Record, RecordError, from_value

OUTPUT = [1]
"""File descriptor of the messages. Commands whose standard output carries data set it to standard error."""

WHOLE = threading.Lock()
"""Held while a message is written: a pipe takes a long one in parts."""
IMMUTABLE_HINT = "is the folder that it is in immutable? `lsattr -d` shows it, `chattr -i` clears the flag"
"""For an operation that is not permitted, even to root."""


class Problem(Exception):
    """The command failed; ``status`` is the exit status: 1 failed, 2 usage, 3 refused and nothing changed."""

    def __init__(self, message: str, hint: str = "", status: int = 1, **facts: Any) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.hint = hint
        self.status = status
        self.facts = facts


class Busy(Problem):
    """Another run holds the lock; trying again later helps."""

    def __init__(self, message: str) -> None:
        Problem.__init__(self, message, "wait for it, then run this again", 3, busy=True)


def send(kind: str, **fields: Any) -> None:
    """Write one message. When the reader is gone, discard it and all later ones: the command runs to its end."""
    line = json.dumps(dict(fields, kind=kind)) + "\n"
    with WHOLE:
        try:
            os.write(OUTPUT[0], line.encode())
        except OSError:
            OUTPUT[0] = os.open(os.devnull, os.O_WRONLY)


def step(name: str, text: str) -> None:
    """Report that a step begins; ``name`` is for programs, ``text`` for people (empty: not shown)."""
    send("step", name=name, text=text)


def progress(done: int, total: int) -> None:
    """Report how many of the step's bytes are done."""
    send("moved", done=done, total=total)


def detail(text: str) -> None:
    """Report a short detail of the current step."""
    send("detail", text=text)


def note(text: str) -> None:
    """Report a line for people that stays on the screen."""
    send("note", text=text)


def field(request: Dict[str, Any], name: str, kind: type, default: Optional[Any] = None) -> Any:
    """Return a value of the request.

    Raises:
        Problem: it is missing or has another type.
    """
    value = request.get(name, default)
    if not isinstance(value, kind):
        raise Problem("the request has no " + name, status=2)
    return value


def read_request(kind: Type[Record], request: Any) -> Record:
    """Return a request as a typed record.

    Raises:
        Problem: it is not one.
    """
    try:
        return from_value(kind, request)
    except RecordError as error:
        raise Problem("the request is invalid: %s" % error, status=2) from None
