"""What `apptainer instance list` prints on a host of a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from appliance.tools.apptainer import Instance

LIST = ("apptainer", "instance", "list")


def lists(running: Sequence[Instance]) -> Callable[[tuple[str, ...], bytes | None], tuple[int, str]]:
    """Return the answer of a ``Fake`` to ``LIST``; the test may change ``running`` meanwhile."""

    def answer(argv: tuple[str, ...], _: bytes | None = None) -> tuple[int, str]:
        found = [one for one in running if fnmatchcase(one.name, argv[-1])]
        return 0, json.dumps({"instances": [{"instance": one.name, "pid": one.pid, "img": one.image} for one in found]})

    return answer
