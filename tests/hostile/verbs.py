"""A verb that an attacker answers: what it prints, and the memory that it needs."""

from __future__ import annotations

from appliance.host.base import Host, Result
from tests.hostile.vm import FORBIDDEN

MEASURED = "/run/measured"
MEASURE = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[2:])
with open(sys.argv[1], "w") as stream:
    stream.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10))
sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
"""


def run_measured(host: Host, *argv: str, timeout: float) -> tuple[Result, int]:
    """Run a command; return its result, and the most memory in MiB that a process of it needed."""
    host.remove(MEASURED)
    done = host.run("python3", "-c", MEASURE, MEASURED, *argv, ok=None, timeout=timeout)
    return done, int(host.read(MEASURED) or b"")


def run_safely(host: Host, *argv: str, ok: tuple[int, ...], secret: str, memory_mb: int, timeout: float) -> Result:
    """Run a verb; it ends as documented within its memory, and prints neither secrets nor what controls a terminal."""
    done, needed_mb = run_measured(host, *argv, timeout=timeout)
    printed = (done.stdout + done.stderr).decode(errors="replace")
    assert done.status in ok, f"{argv}: {done.status}: {printed[-3000:]}"
    assert "Traceback" not in printed and secret not in printed, f"{argv}: {printed[-6000:]}"
    assert not [one for one in FORBIDDEN if one in printed], (argv, printed[-2000:])
    assert needed_mb < memory_mb, (argv, needed_mb)
    return done
