"""The provisioning VM of an admin host in tests: what the host prints about it, and its guest agent."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

from appliance.host.base import BLOCK, Result
from appliance.host.stream import LineReader
from appliance.tools.guest import GuestResult
from appliance.tools.qmp import parse_line
from tests.support.fake import Answer, FakeStream

Run = Callable[[Sequence[str], bytes], GuestResult | None]


def vm_answers(cluster: str, runs: Callable[[], bool] = lambda: True) -> dict[tuple[str, ...], Answer]:
    """Return the answers of a ``Fake`` that has the VM of a cluster, without disks and snapshots; nobody has a lock."""
    return {
        ("cat", "--"): lambda *_: (0, "7") if runs() else (1, "no such file"),
        ("cat", "/proc/7/cmdline"): (0, f"sms-vm-{cluster},debug-threads=on"),
        ("cat", "/proc/7/status"): (0, "VmRSS: 1024 kB"),
        ("stat", "-c", "%Y"): (0, "5"),
        ("qemu-img",): (1, ""),
        ("test", "-e"): (1, ""),
        ("sh", "-c"): (0, ""),
    }


class GuestStream(FakeStream):
    """The connection to a guest agent. ``run`` is given argv and input of a command; without a result nothing comes."""

    def __init__(self, host: str, argv: tuple[str, ...], run: Run) -> None:
        super().__init__(host, argv, lambda _: Result(host, argv, 0, b"", b""), LineReader(None))
        self.guest = run
        self.ended: dict[str, Any] | None = None

    def write(self, data: bytes | memoryview) -> int:
        for line in bytes(data).splitlines():
            request: Any = parse_line(line, "sms")
            if (reply := self._reply(request["execute"], request["arguments"])) is not None:
                self._out += json.dumps({"return": reply}).encode() + b"\n"
        return len(data)

    def _reply(self, command: str, given: dict[str, Any]) -> Any:
        if command == "guest-sync-delimited":
            return given["id"]
        if command == "guest-exec":
            done = self.guest((given["path"], *given["arg"]), base64.b64decode(given.get("input-data", "")))
            output = base64.b64encode(done.stdout).decode() if done else ""
            self.ended = {"exited": True, "exitcode": done.status, "out-data": output} if done else None
            return {"pid": 1} if done else None
        assert command == "guest-exec-status", f"no answer for {command}"
        return self.ended

    def read(self, size: int = BLOCK) -> bytes:
        block, self._out = self._out[:size], self._out[size:]
        return block
