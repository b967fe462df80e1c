"""Entry point: ``python3 agent.pyz COMMAND REQUEST [lifeline]``; the request is a JSON object."""

import errno
import importlib
import json
import os
import select
import signal
import sys
import threading
from typing import Any, Callable, Dict, List, Optional

from appliance.agent import protocol
from appliance.shared.results import ALIVE_S

Command = Callable[[Dict[str, Any]], Dict[str, Any]]

COMMANDS: Dict[str, str] = {
    "perform": "requests.perform",
    "take": "take.take",
    "list": "snapshots.list_snapshots",
    "verify": "snapshots.verify",
    "reread": "snapshots.reread",
    "restore": "snapshots.restore",
    "remove": "remove.remove",
    "brief": "status.brief",
    "grow": "grow.grow",
    "thaw": "freeze.end_lost",
    "carry": "copy_file.copy_file",
    "diff": "diff.diff",
    "restore_paths": "paths.restore_paths",
    "place_paths": "paths.place_paths",
    "extract_paths": "paths.extract_paths",
    "image": "transfer.image",
    "export": "transfer.export",
    "estimate": "transfer.estimate",
    "import": "transfer.import_snapshot",
    "import_image": "transfer.receive_image",
    "leave": "migration_source.run_source",
    "arrive": "migration_target.run_target",
    "resume": "migration_resume.resume",
    "adopt_arrive": "adopt_arrive.run_arrive",
    "adopt_leave": "adopt_leave.run_leave",
    "adopt_return": "adopt_return.run_return",
    "adopt_yield": "adopt_yield.run_yield",
    "adopt_hold": "adopt_hold.hold",
    "adopt_resume": "adopt_resume.resume",
}
"""Module and function of each command. Only that module is imported: from a zip file each is compiled every time."""


def find_command(name: str) -> Command:
    """Return the function of a command."""
    module, _, function = COMMANDS[name].partition(".")
    command: Command = getattr(importlib.import_module("appliance.agent." + module), function)
    return command


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command; the last line printed is its result, or the problem."""
    arguments = sys.argv[1:] if argv is None else argv
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if arguments[:1] not in [[name] for name in COMMANDS] or arguments[2:] not in ([], ["lifeline"]):
            raise protocol.Problem("the agent's commands are: " + ", ".join(sorted(COMMANDS)), status=2)
        if len(arguments) == 3:
            threading.Thread(target=_watch_caller, args=(ALIVE_S,), daemon=True).start()
        result = find_command(arguments[0])(json.loads(arguments[1]))
    except protocol.Problem as problem:
        fields = {"message": problem.message, "hint": problem.hint, "status": problem.status}
        protocol.send("problem", **dict(problem.facts, **fields))
        return problem.status
    except KeyboardInterrupt:
        protocol.send("problem", message="interrupted", hint="all changes were undone", status=1)
        return 1
    except OSError as error:
        what = "%s: " % error.filename if error.filename else ""
        hint = getattr(error, "hint", "")
        if not hint and error.filename and error.errno == errno.EPERM:
            hint = protocol.IMMUTABLE_HINT
        protocol.send("problem", message=what + (error.strerror or str(error)).lower(), hint=hint, status=1)
        return 1
    protocol.send("result", **result)
    return 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _watch_caller(alive_s: float) -> None:
    """Show every ``alive_s`` seconds that this process is alive.

    Stop when standard input ends: the caller is gone, and with it the locks that it held for us.
    """
    while True:
        if not select.select([0], [], [], alive_s)[0]:
            protocol.send("alive")
        elif not os.read(0, 4096):
            break
    os.kill(os.getpid(), signal.SIGTERM)
