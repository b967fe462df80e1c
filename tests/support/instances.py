"""What programs print on a host of a test: instances, folders of an overlay."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from appliance.shared.overlay import LAYERS
from appliance.tools.apptainer import Instance

LIST = ("apptainer", "instance", "list")


def lists(running: Sequence[Instance]) -> Callable[[tuple[str, ...], bytes | None], tuple[int, str]]:
    """Return the answer of a ``Fake`` to ``LIST``; the test may change ``running`` meanwhile."""

    def answer(argv: tuple[str, ...], _: bytes | None = None) -> tuple[int, str]:
        found = [one for one in running if fnmatchcase(one.name, argv[-1])]
        return 0, json.dumps({"instances": [{"instance": one.name, "pid": one.pid, "img": one.image} for one in found]})

    return answer


OPTIONS = "Default mount options:    user_xattr acl\nErrors behavior:          Continue\n"
"""What `dumpe2fs -h` prints of an overlay as Apptainer makes it."""


def list_layers() -> str:
    """Return what `debugfs -R "ls -p /"` prints of a sound overlay."""
    return "".join(f"/12/040755/0/0/{name}//\n" for name in LAYERS)
