"""A headless Chromium that is controlled over a pair of pipes (DevTools protocol); no driver, no network."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run
    --no-default-browser-check --disable-background-networking --disable-component-update --disable-sync
    --disable-extensions --disable-default-apps --mute-audio --hide-scrollbars --remote-debugging-pipe
"""
NO_NAMES = "--host-resolver-rules=MAP * ~NOTFOUND"
"""No name has an address: whatever Chromium itself would like to fetch stays here."""

PATIENCE_S = 60.0


class Browser:
    """One tab. ``events`` holds what the browser said unasked, since `visit` was last called."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: object) -> Any:
        """What the browser answers; its refusal is raised."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + PATIENCE_S
        while True:
            said = self._receive(until)
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                return said["result"]
            self.events.append(said)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(until - time.monotonic(), 0))[0]:
                raise TimeoutError("chromium says nothing")
            read = os.read(self._read, 1 << 20)
            if not read:
                raise EOFError("chromium ended")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def visit(self, page: Path, *, width: int, height: int = 900, scheme: str = "light", media: str = "") -> None:
        """Show a file in a window of so many pixels, and wait until it is loaded."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + PATIENCE_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(until))

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def requests(self) -> list[str]:
        """The requests of the page since it was visited, including the page itself."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Errors and words on the console, violations of the content policy among them."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]


@contextmanager
def open_browser(chromium: str, folder: Path) -> Iterator[Browser]:
    """A browser with its profile below ``folder``; it and all its processes are gone afterwards."""
    pipes = [*os.pipe(), *os.pipe()]
    # Numbers of 10 and above: 3 and 4 are those that chromium reads from and writes to.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipes]
    for end in pipes:
        os.close(end)
    theirs_in, ours_out, ours_in, theirs_out = high
    script = 'in=$1 out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"'
    argv = [chromium, *FLAGS.split(), NO_NAMES, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", str(theirs_in), str(theirs_out), *argv],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
            start_new_session=True,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Chromium ends when its pipe is closed; then its group does, whose number is its own until it is waited for."""
    until = time.monotonic() + 10
    while time.monotonic() < until and not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
