"""Brings the image that runs on one host to another: what has come stays, so that a cut connection costs little."""

from __future__ import annotations

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


def bring(source: Host, path: str, sha256: str, target: Host, progress: Progress) -> bool:
    """Have ``path`` of one host on the other, with the same bytes; say whether anything had to be sent.

    Raises:
        SmsError: it did not arrive whole; what has come is kept for the next try.
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
        source.stream("tail", "-c", f"+{done + 1}", "--", path) as giving,
        target.stream("sh", "-c", APPEND, "append", path) as taking,
    ):
        while block := giving.read():
            taking.write(block)
            done += len(block)
            step.moved(done, size)
        giving.result()
        taking.end()
        taking.result()
    if find_digest(target, f"{path}.part") != sha256:
        target.remove(f"{path}.part")
        raise SmsError(f"{path} did not arrive whole on {target.name}", hint="run it again: it is sent anew")
    target.run("sh", "-c", FINISH, "finish", path, timeout=600)
    return True
