"""Copy image files: from this machine to a host, from a host to this machine, and between two hosts."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.progress import Progress
from appliance.tools import files
from appliance.tools.sha256 import find_digest


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
    part = f"{path}.part"
    done = files.size_of(target, part)
    if not 0 < done <= size:
        target.run("mkdir", "-p", "-m", "0700", str(PurePosixPath(path).parent))
        files.make_file(target, part)
        done = 0
    with (
        progress.step(f"send the image to {target.name}") as step,
        source.stream("tail", "-c", f"+{done + 1}", "--", path) as reader,
        target.stream("dd", f"of={part}", "oflag=append", "conv=notrunc", "bs=1M", "status=none") as writer,
    ):
        while block := reader.read():
            writer.write(block)
            done += len(block)
            step.moved(done, size)
        reader.result()
        writer.end()
        writer.result()
    if find_digest(target, part) != sha256:
        target.remove(part)
        raise SmsError(f"the copy of {path} on {target.name} is corrupt", hint="run it again to send it again")
    files.place(target, part, path)
    return True
