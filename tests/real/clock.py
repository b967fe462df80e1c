"""The wall clock of a lab host, which jumps. The kernel has no namespace for it: a preloaded library changes it."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from appliance.lab import Lab

LIBRARY, PRELOAD, OFFSET = "/usr/local/lib/sms-clock.so", "/etc/ld.so.preload", "/run/sms-clock"
FLAGS = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f'-DOFFSET="{OFFSET}"')


class Clock:
    """The clock of one host's programs that were started since; those in the services container keep this machine's."""

    def __init__(self, lab: Lab, host: str) -> None:
        self._offset = Path(f"/proc/{lab.host(host).pid}/root{OFFSET}")

    def jump(self, ahead_s: int) -> None:
        """Set how far it is ahead of this machine's, in seconds; at once, for programs that run already, too."""
        with self._offset.open("r+b") as stream:
            stream.write(struct.pack("q", ahead_s))


def compile_clock() -> bytes:
    """Compile the library."""
    with TemporaryDirectory() as folder:
        library = Path(folder, "clock.so")
        subprocess.run(["cc", *FLAGS, "-o", str(library), str(Path(__file__).with_name("clock.c"))], check=True)
        return library.read_bytes()


@contextmanager
def own_clock(lab: Lab, host: str) -> Iterator[Clock]:
    """A host with a clock of its own for as long as the context lasts; it is right at first and afterwards."""
    inside = lab.host(host)
    inside.write(OFFSET, struct.pack("q", 0))
    inside.write(LIBRARY, compile_clock(), mode=0o755)
    inside.write(PRELOAD, f"{LIBRARY}\n".encode(), mode=0o644)
    clock = Clock(lab, host)
    try:
        yield clock
    finally:
        clock.jump(0)
        inside.remove(PRELOAD)
