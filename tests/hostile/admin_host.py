"""A hostile admin host: root there has replaced root's shell, so that what another host runs is what it says.

The shell asks the test for each command, by a socket in the folder that is /var/lib/sms there: whether to run it,
what to print instead, or what to make of each line that it prints. What an attack is aimed at is a regular expression
for commands. It needs no key of the other host; that it has one, and is root there with it, is public
(docs/security.md).
"""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.host.netns import Netns
from tests.hostile.engine import NUMBER

SHELL, SOCKET = "/usr/local/sbin/hostile-shell", "/var/lib/sms/hostile.sock"
PROGRAM = rf"""#!/usr/bin/python3 -I
import base64, json, os, socket, subprocess, sys
words = sys.argv[1:]
command = words[words.index("-c") + 1] if "-c" in words else ""
link = socket.socket(socket.AF_UNIX)
try:
    link.connect("{SOCKET}")
except OSError:
    os.execv("/bin/sh", ["sh", *words])
reader = link.makefile("rb")

def ask(**what):
    link.sendall(json.dumps(what).encode() + b"\n")
    return json.loads(reader.readline() or b"{{}}")

def put(number, data):
    while data:
        data = data[os.write(number, data):]

plan = ask(command=command)
if "out" in plan:
    if plan["first"]:
        subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.DEVNULL)
    put(2, base64.b64decode(plan["errors"]))
    out = base64.b64decode(plan["out"])
    for _ in range(plan["times"]):
        put(1, out)
    sys.exit(plan["status"])
if not plan.get("lines"):
    os.execv("/bin/sh", ["sh", *words])
child = subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE)
for line in child.stdout:
    put(1, base64.b64decode(ask(line=base64.b64encode(line).decode())["out"]))
sys.exit(child.wait() & 255)
"""


@dataclass(frozen=True)
class Instead:
    """What a command prints; ``first``: after it was run."""

    out: bytes = b""
    errors: bytes = b""
    status: int = 0
    times: int = 1
    first: bool = False


Attack = Instead | Callable[[bytes], bytes]
"""What is printed instead, or what is made of each line."""


@dataclass
class Attacker:
    """The test's side. ``asked``: commands that were run there; ``tried``: those that were attacked."""

    attack: Attack | None = None
    aim: str = ""
    asked: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)

    def talk(self, link: socket.socket) -> None:
        """Answer one shell."""
        with suppress(OSError, ValueError), link, link.makefile("rb") as lines:
            command = json.loads(lines.readline())["command"]
            attack = self.attack if self.attack and re.search(self.aim, command, re.DOTALL) else None
            self.asked.append(command)
            self.tried += [command] if attack else []
            plan: dict[str, Any] = {}
            if isinstance(attack, Instead):
                out, errors = (base64.b64encode(each).decode() for each in (attack.out, attack.errors))
                plan = {"out": out, "errors": errors, "status": attack.status}
                plan |= {"times": attack.times, "first": attack.first}
            elif attack:
                plan = {"lines": True}
            link.sendall(json.dumps(plan).encode() + b"\n")
            for line in lines:
                assert attack and not isinstance(attack, Instead)
                made = attack(base64.b64decode(json.loads(line)["line"]))
                link.sendall(json.dumps({"out": base64.b64encode(made).decode()}).encode() + b"\n")

    def honest(self) -> None:
        """Attack no longer."""
        self.attack, self.aim = None, ""
        self.asked.clear()
        self.tried.clear()


@contextmanager
def taken_over(host: Netns, disk: Path) -> Iterator[Attacker]:
    """Root's shell on a host of a lab is replaced; ``disk``: its /var/lib/sms as this machine has it."""
    attacker, path = Attacker(), disk / Path(SOCKET).name
    path.unlink(missing_ok=True)
    host.run("sh", "-c", f"cat >{SHELL} && chmod 755 {SHELL}", input=PROGRAM.encode())
    passwd = host.run("cat", "/etc/passwd").stdout
    replaced = re.sub(rb"(?m)^(root:.*:)[^:\n]*$", rb"\1" + SHELL.encode(), passwd)
    assert replaced != passwd
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(64)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=attacker.talk, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        host.run("sh", "-c", "cat >/etc/passwd", input=replaced)
        try:
            yield attacker
        finally:
            host.run("sh", "-c", "cat >/etc/passwd", input=passwd)
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            path.unlink(missing_ok=True)


def in_json(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Return an attack: each line that is JSON, such as a message of an agent or a lease, is changed."""

    def made(line: bytes) -> bytes:
        try:
            found = json.loads(line)
        except ValueError:
            return line
        if not isinstance(found, dict | list):
            return line
        # json writes no numbers that Python cannot read again.
        return NUMBER.sub(r"\1", json.dumps(change(found))).encode(errors="replace") + b"\n"

    return made
