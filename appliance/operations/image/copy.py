"""Copy image files: from this machine to a host, from a host to this machine, and between two hosts."""

from __future__ import annotations

from pathlib import Path

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.progress import Progress
from appliance.tools.sha256 import find_digest

APPEND = """\
umask 077
mkdir -p "$(dirname "$1")" && cat >>"$1.part"
"""
FINISH = """\
sync "$1.part" && mv -fT "$1.part" "$1"
"""


def send_file(source: Path, host: Host, *, path: str, what: str, progress: Progress) -> None:
    """Send a file of this machine to ``path`` on a host, atomically, readable only by root; the caller verifies it."""
    size = source.stat().st_size
    with progress.step(f"send {what} to {host.name}") as step, source.open("rb") as stream:
        host.send(stream, path, mode=0o600, progress=lambda done: step.moved(done, size))


def fetch_file(host: Host, path: str, *, target: Path, size: int, what: str, progress: Progress) -> None:
    """Fetch a file of a host as ``target``, readable only by root; the caller verifies and renames it."""
    with progress.step(f"fetch {what} from {host.name}") as step, target.open("wb") as sink:
        target.chmod(0o600)
        host.fetch(path, sink, progress=lambda done: step.moved(done, size))


def copy_image(source: Host, path: str, sha256: str, target: Host, progress: Progress) -> bool:
    """Copy ``path`` from one host to the other; return whether anything was sent.

    Raises:
        SmsError: the copy is corrupt or was interrupted; a partial copy is resumed by the next call.
    """
    if find_digest(target, path, needed=False) == sha256:
        return False
    size = int(source.run("stat", "-c", "%s", "--", path).text)
    script = 'stat -c %s -- "$1.part" 2>/dev/null || echo 0'
    done = int(target.run("sh", "-c", script, "part", path).text)
    if done > size:
        target.remove(f"{path}.part")
        done = 0
    with (
        progress.step(f"send the image to {target.name}") as step,
        source.stream("tail", "-c", f"+{done + 1}", "--", path) as reader,
        target.stream("sh", "-c", APPEND, "append", path) as writer,
    ):
        while block := reader.read():
            writer.write(block)
            done += len(block)
            step.moved(done, size)
        reader.result()
        writer.end()
        writer.result()
    if find_digest(target, f"{path}.part") != sha256:
        target.remove(f"{path}.part")
        raise SmsError(f"the copy of {path} on {target.name} is corrupt", hint="run it again to send it again")
    target.run("sh", "-c", FINISH, "finish", path, timeout=600)
    return True
