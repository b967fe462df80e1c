"""Tasks of `sms-run --jobsync` in a folder that is their root, with shell scripts as services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.services.conftest import RUNTIME
from tests.waiting import alive, wait_until

SERVICE = """
stop() {{
    echo "{name} ends" >>{root}/log
    sleep {stop_s}
    rm -f {root}/{name}.up
    echo "{name} ended" >>{root}/log
    exit 0
}}
trap stop TERM
trap 'echo "{name} HUP" >>{root}/log' HUP
for need in {needs}; do [ -e {root}/$need.up ] || echo "{name} BEFORE $need" >>{root}/log; done
echo "{name} starts" >>{root}/log
sleep {ready_s}
touch {root}/{name}.up
while :; do sleep 0.05; done
"""
"""A service that answers while NAME.up exists, and writes what happens to it into a log."""


@dataclass
class Node:
    """Services of one node. ``started``: all tasks, so that none outlives the test."""

    root: Path
    services: dict[str, Any] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    programs: Path = RUNTIME

    def add(self, name: str, needs: Sequence[str] = (), after: Sequence[str] = (), **times: float) -> None:
        """Add a service; ``times``: ready_s and stop_s that it takes, release_s that its stop waits for users."""
        values = {"ready_s": 0, "stop_s": 0, "release_s": 5, **times}
        script = SERVICE.format(name=name, root=self.root, needs=" ".join(needs), **values)
        self.services[name] = {
            "run": ["sh", "-c", script],
            "user": "root",
            "groups": [],
            "capabilities": None,
            "sync": [],
            "setup": f"rm -f {self.root}/{name}.up",
            "needs": [*needs, *after],
            "probe": {"kind": "exec", "exec": [["test", "-e", f"{self.root}/{name}.up"]], "timeout_s": 2},
            "jobsync": {
                "holds": list(needs),
                "signal": "TERM",
                "stop_s": 3,
                "ports": [],
                "lease": None,
                "outlived": False,
                "release_s": values["release_s"],
            },
        }
        (self.root / "etc/sms/services.json").write_text(json.dumps({"services": self.services}))

    def start(self, name: str, *options: str, prefix: Sequence[str] = (), holder: str = "") -> subprocess.Popen[bytes]:
        """Begin a task; its output is NAME.out. ``prefix``: words before its whole command."""
        with (self.root / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                [*prefix, sys.executable, str(self.programs / "sms-run"), "--jobsync", *options, name],
                env={
                    **os.environ,
                    "SMS_ROOT": str(self.root),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "SMS_HOLDER": holder or name,
                },
                stdout=out,
                stderr=out,
            )
        self.started.append(process)
        return process

    def record(self, name: str) -> dict[str, Any]:
        """The record of a service; empty where there is none."""
        try:
            found: dict[str, Any] = json.loads((self.root / f"run/sms/jobsync/{name}.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def await_state(self, name: str, state: str) -> dict[str, Any]:
        """Wait for a state; the record."""
        later(lambda: self.record(name).get("state") == state)
        return self.record(name)

    def output(self, name: str) -> str:
        path = self.root / f"{name}.out"
        return path.read_text() if path.exists() else ""

    @property
    def log(self) -> list[str]:
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    def pid(self, name: str) -> int:
        """The process of a service."""
        return int(self.record(name)["process"]["pid"])


@contextmanager
def node_in(root: Path) -> Iterator[Node]:
    """A node; all its processes end with it."""
    node = Node(root)
    try:
        yield node
    finally:
        for name in node.services:
            process = node.record(name).get("process")
            if process:
                with suppress(ProcessLookupError):
                    os.killpg(process["pid"], signal.SIGKILL)
        for task in node.started:
            task.kill()
            task.wait()


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
    """Send a signal to a task and wait for its end; the exit status."""
    process.send_signal(number)
    return process.wait(timeout_s)


def later(ask: Callable[[], object]) -> None:
    """Wait for what processes do, on a busy machine, too."""
    wait_until(ask, timeout_s=60)


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    later(lambda: not alive(pid))
