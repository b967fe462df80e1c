"""The generation mark of an overlay: a file beside it with the generation of the lease under which it was last used.

Written by verbs and by the target of a migration. A copy of the overlay made by hand needs a copy of this file.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from appliance.shared.files import ALWAYS, replace_file
from appliance.shared.records import to_json

LAYERS = ("upper", "work")
"""Folders at the top of an overlay: what the container has written, and the kernel's work."""


def mark_path(overlay: str) -> str:
    """Return the path of an overlay's generation mark."""
    return overlay + ".generation"


def frozen_mark(overlay: str) -> str:
    """Return the path of the file that is not empty, and locked by its run, while an overlay is frozen.

    In memory: a reboot ends a freeze, and no other host or slow disk has to do with it.
    """
    return "/run/sms/frozen" + overlay.replace("/", "-")


@dataclass(frozen=True)
class OverlayMark:
    """The contents of a generation mark."""

    cluster: str
    generation: int


@dataclass(frozen=True)
class MarkOverlay:
    """Write ``path``, a generation mark."""

    path: str
    cluster: str
    generation: int

    def perform(self, may_commit: AbstractContextManager[bool] = ALWAYS) -> bool:
        """Return whether it was written.

        Args:
            may_commit: as for ``replace_file``.

        Raises:
            OSError: it cannot be written; it is unchanged.
        """
        data = to_json(OverlayMark(self.cluster, self.generation))
        return replace_file(self.path, data, may_commit=may_commit)
