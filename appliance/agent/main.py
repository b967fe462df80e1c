"""The agent's door: ``python3 agent.pyz COMMAND REQUEST``, where the request is a JSON object."""

import json
import signal
import sys
from typing import Any, Callable, Dict, List, Optional

from appliance.agent import keep, words
from appliance.agent.carry import carry
from appliance.agent.grow import grow
from appliance.agent.paths import extract_paths, place_paths, restore_paths
from appliance.agent.remove import remove
from appliance.agent.status import brief
from appliance.agent.take import take
from appliance.agent.tree import diff

Command = Callable[[Dict[str, Any]], Dict[str, Any]]

COMMANDS: Dict[str, Command] = {
    "take": take,
    "list": keep.tell,
    "verify": keep.verify,
    "restore": keep.restore,
    "remove": remove,
    "brief": brief,
    "grow": grow,
    "carry": carry,
    "diff": diff,
    "restore_paths": restore_paths,
    "place_paths": place_paths,
    "extract_paths": extract_paths,
}


def main(argv: Optional[List[str]] = None) -> int:
    """Do one thing; the last line printed is its result, or the problem."""
    arguments = sys.argv[1:] if argv is None else argv
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if len(arguments) != 2 or arguments[0] not in COMMANDS:
            raise words.Problem("the agent knows: " + ", ".join(sorted(COMMANDS)), status=2)
        result = COMMANDS[arguments[0]](json.loads(arguments[1]))
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
