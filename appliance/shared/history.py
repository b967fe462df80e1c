"""The history of a host: a file with one JSON line per event."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from appliance.shared.files import ALWAYS, make_folder, sync_folder


def make_event(host: str, verb: str, event: str, facts: dict[str, Any]) -> str:
    """Return the line of an event that happens now."""
    line = {"at": round(time.time(), 3), "host": host, "verb": verb, "event": event, **facts}
    return json.dumps(line, ensure_ascii=True)


@dataclass(frozen=True)
class AppendLine:
    """Append a line to file ``path`` in one write, so that concurrent lines never mix; it is then on the disk."""

    path: str
    line: str

    def perform(self, may_commit: AbstractContextManager[bool] = ALWAYS) -> None:
        """Append the line, if it may be.

        Raises:
            OSError: it cannot be written.
        """
        folder = os.path.dirname(self.path)
        make_folder(folder, 0o700)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            # A crash may have truncated the last line.
            whole = not size or os.pread(descriptor, 1, size - 1) == b"\n"
            data = (b"" if whole else b"\n") + self.line.encode() + b"\n"
            with may_commit as allowed:
                done = os.write(descriptor, data) if allowed else len(data)
            if done < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            os.fsync(descriptor)
            if not size:  # perhaps it was created just now
                sync_folder(folder)
        finally:
            os.close(descriptor)
