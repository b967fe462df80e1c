"""The agent's door: ``python3 agent.pyz COMMAND REQUEST [lifeline]``, where the request is a JSON object."""

import importlib
import json
import os
import signal
import sys
import threading
from typing import Any, Callable, Dict, List, Optional

from appliance.agent import words

Command = Callable[[Dict[str, Any]], Dict[str, Any]]

COMMANDS: Dict[str, str] = {
    "take": "take.take",
    "list": "keep.tell",
    "verify": "keep.verify",
    "reread": "keep.reread",
    "restore": "keep.restore",
    "remove": "remove.remove",
    "brief": "status.brief",
    "grow": "grow.grow",
    "carry": "carry.carry",
    "diff": "tree.diff",
    "restore_paths": "paths.restore_paths",
    "place_paths": "paths.place_paths",
    "extract_paths": "paths.extract_paths",
    "image": "transfer.image",
    "export": "transfer.export",
    "estimate": "transfer.estimate",
    "import": "transfer.take_in",
    "import_image": "transfer.receive_image",
    "leave": "leave.leave",
    "arrive": "arrive.arrive",
    "resume": "leave.resume",
}
"""Each with its module and function. Only that one is loaded: from a zip file every module is compiled anew."""


def find_command(name: str) -> Command:
    """The function that does it."""
    module, _, function = COMMANDS[name].partition(".")
    command: Command = getattr(importlib.import_module("appliance.agent." + module), function)
    return command


def main(argv: Optional[List[str]] = None) -> int:
    """Do one thing; the last line printed is its result, or the problem."""
    arguments = sys.argv[1:] if argv is None else argv
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if arguments[:1] not in [[name] for name in COMMANDS] or arguments[2:] not in ([], ["lifeline"]):
            raise words.Problem("the agent knows: " + ", ".join(sorted(COMMANDS)), status=2)
        if len(arguments) == 3:
            threading.Thread(target=_watch_caller, daemon=True).start()
        result = find_command(arguments[0])(json.loads(arguments[1]))
    except words.Problem as problem:
        told = {"message": problem.message, "hint": problem.hint, "status": problem.status}
        words.say("problem", **dict(problem.facts, **told))
        return problem.status
    except KeyboardInterrupt:
        words.say("problem", message="interrupted", hint="what was begun has been undone", status=1)
        return 1
    except OSError as error:
        what = "%s: " % error.filename if error.filename else ""
        words.say("problem", message=what + (error.strerror or str(error)).lower(), hint="", status=1)
        return 1
    words.say("result", **result)
    return 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _watch_caller() -> None:
    """Give up when standard input ends: who asked is gone, and so are the locks that it held for us."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
