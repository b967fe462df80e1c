"""The channel for a machine's memory in a live migration: QEMU gets one end as a descriptor, over QMP.

No socket has a name for it, and no port is opened: QEMU can open neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.host.stream import Stream
from appliance.text import one_line

MEMORY_URI = "fd:sms-memory"
"""What QMP's ``migrate`` and ``migrate-incoming`` are to use."""
READY_S = 60
SETTLE_S = 120
"""Seconds to wait until a cancelled migration has ended."""

MEMORY = """\
import array, json, os, socket, sys, threading, time
path, mode, patience = sys.argv[1], sys.argv[2], float(sys.argv[3])
sys.excepthook = lambda kind, error, trace: sys.stderr.write("%s\\n" % error)

class Qmp:
    def __init__(self):
        self.there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.there.settimeout(patience)
        self.there.connect(path)
        self.lines = self.there.makefile("rb")
        self.lines.readline()
        self.execute("qmp_capabilities")

    def execute(self, command, fd=None, **arguments):
        text = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\\n"
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.there.sendmsg([text], rights)
        while True:
            line = self.lines.readline()
            if not line:
                raise OSError("QEMU closed the connection")
            reply = json.loads(line.decode())
            if "error" in reply:
                raise OSError(reply["error"]["desc"])
            if "return" in reply:
                return reply["return"]

    def close(self):
        self.lines.close()
        self.there.close()

def resume(force):
    # The machine runs again, unless it has moved away completely and that is not to be undone.
    qmp = Qmp()
    qmp.execute("migrate_cancel")
    deadline = time.monotonic() + patience
    while True:
        migration = qmp.execute("query-migrate").get("status", "none")
        state = qmp.execute("query-status")["status"]
        if migration in ("none", "completed", "failed", "cancelled") and state != "finish-migrate":
            break
        if time.monotonic() > deadline:
            raise OSError("the migration does not end: %s, %s" % (migration, state))
        time.sleep(0.1)
    # A machine that arrived here by a migration, too, has completed one: only the state tells.
    if state == "paused" or state == "postmigrate" and (force or migration != "completed"):
        qmp.execute("cont")
    qmp.close()

def relay():
    ours, theirs = socket.socketpair()
    qmp = Qmp()
    qmp.execute("getfd", fd=theirs.fileno(), fdname="sms-memory")
    qmp.close()
    theirs.close()
    sys.stderr.write("ready\\n")
    sys.stderr.flush()

    def feed():
        try:
            while True:
                data = os.read(0, 1 << 18)
                if not data:
                    break
                ours.sendall(data)
            # No memory comes after the end of the replies, and if QEMU does not send yet, nobody else ends this.
            ours.shutdown(socket.SHUT_RDWR if mode == "send" else socket.SHUT_WR)
        except OSError:
            pass

    threading.Thread(target=feed, daemon=True).start()
    try:
        while True:
            data = ours.recv(1 << 18)
            if not data:
                break
            while data:
                data = data[os.write(1, data):]
    except OSError:
        pass
    ours.close()

if mode in ("send", "receive"):
    relay()
# If sms was killed, nobody else resumes the machine.
if mode != "receive":
    resume(mode == "return")
os._exit(0)
"""


@contextmanager
def open_memory(host: Host, qmp: str, *, sends: bool) -> Iterator[Stream]:
    """Open a channel to a QEMU of the host, in both directions; no QMP session may be open while this enters.

    If the channel of the sending machine is closed before its migration has completed, the machine is resumed, even if
    this process was killed.

    Raises:
        SmsError: QEMU did not accept it.
    """
    ready = threading.Event()
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        ready.set()

    argv = ("python3", "-I", "-c", MEMORY, qmp, "send" if sends else "receive", f"{SETTLE_S}")
    with host.stream(*argv, on_line=note) as stream:
        if not ready.wait(READY_S) or lines != ["ready"]:
            reason = one_line(" ".join(lines), 300) or "no answer"
            raise SmsError(f"QEMU on {host.name} did not accept a channel for the VM's memory: {reason}")
        yield stream


def resume(host: Host, qmp: str, *, force: bool = False) -> str:
    """Cancel a machine's migration and let it run again. Returns the problem, or nothing.

    Args:
        force: even if its migration has completed: the other machine has not run and never will.
    """
    try:
        host.run("python3", "-I", "-c", MEMORY, qmp, "return" if force else "resume", f"{SETTLE_S}", timeout=300)
    except CommandError as error:
        return one_line(error.result.stderr.decode(errors="replace").strip(), 300) or error.message
    except SmsError as error:
        return error.message
    return ""
