"""How the agent talks to who started it: one JSON object a line."""

import json
import os
from typing import Any, Dict, Optional

CHANNEL = [1]
"""The file descriptor that words go to; where standard output carries data they go to standard error."""


class Problem(Exception):
    """The work failed; ``status`` is the exit status that the user sees: 1 it failed, 3 refused and nothing changed."""

    def __init__(self, message: str, hint: str = "", status: int = 1, **facts: Any) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.hint = hint
        self.status = status
        self.facts = facts


class Busy(Problem):
    """Another run is at work on the same; later it will do."""

    def __init__(self, message: str) -> None:
        Problem.__init__(self, message, "wait for it, then run this again", 3, busy=True)


def say(kind: str, **fields: Any) -> None:
    """One line. Nobody reading on is no reason to stop: the work goes on to its end."""
    line = json.dumps(dict(fields, kind=kind)) + "\n"
    try:
        os.write(CHANNEL[0], line.encode())
    except OSError:
        CHANNEL[0] = os.open(os.devnull, os.O_WRONLY)


def step(name: str, text: str) -> None:
    """A step begins; ``name`` is for programs, ``text`` for people (empty: they need not know)."""
    say("step", name=name, text=text)


def moved(done: int, total: int) -> None:
    """How many of how many bytes the step has done."""
    say("moved", done=done, total=total)


def detail(text: str) -> None:
    """A few words on the step under way."""
    say("detail", text=text)


def note(text: str) -> None:
    """A line for people that stays."""
    say("note", text=text)


def field(request: Dict[str, Any], name: str, kind: type, default: Optional[Any] = None) -> Any:
    """A value of the request.

    Raises:
        Problem: it is missing or of another kind.
    """
    value = request.get(name, default)
    if not isinstance(value, kind):
        raise Problem("the request has no " + name, status=2)
    return value
