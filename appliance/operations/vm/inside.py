"""``sms vm exec`` and ``sms vm console``: commands in the VM, and its serial console."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.vm.vm import find_running, find_vm
from appliance.plan.vm.vm import VmPlaces
from appliance.tools.guest import GuestResult, open_guest
from appliance.tools.qmp import NotResponding

LAST_BYTES = 1 << 20
NO_COMMAND = 127
"""Exit status, as a shell gives it."""
NO_SUCH = ("No such file or directory", "Failed to execute child process")
CONSOLE = """\
import os, select, socket, sys, termios, tty
there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
there.settimeout(5)
try:
    there.connect(sys.argv[1])
except OSError as error:
    sys.exit("sms: %s: %s" % (sys.argv[1], error.strerror or error))
there.settimeout(None)
saved = termios.tcgetattr(0) if os.isatty(0) else None
try:
    if saved:
        tty.setraw(0)
    while True:
        ready = select.select([0, there], [], [])[0]
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                break
            there.sendall(data.partition(b"\\x1d")[0])
            if b"\\x1d" in data:
                break
        if there in ready:
            data = there.recv(65536)
            if not data:
                break
            while data:
                data = data[os.write(1, data):]
finally:
    if saved:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)
        sys.stderr.write("\\r\\n")
"""
"""Connects the terminal to a socket until Ctrl-] or until either side closes."""


def need_running(cluster: Cluster, host: Host) -> None:
    """Raise Refused if the VM does not run on the host."""
    if find_running(cluster, host) is None:
        raise Refused(f"the VM is not running on {host.name}", hint="`sms vm start`; `sms vm status` shows its host")


def run_in_vm(
    cluster: Cluster, host: Host, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60
) -> GuestResult:
    """Run a command in the VM.

    Raises:
        Refused: the VM is not running, or its guest agent does not answer.
    """
    need_running(cluster, host)
    try:
        with open_guest(host, str(VmPlaces(cluster.site).guest)) as guest:
            return guest.run(argv, input=input, timeout_s=timeout_s)
    except NotResponding as error:
        raise Refused(
            f"the VM's guest agent is not reachable: {error.message}",
            hint="is the VM still starting? `sms vm console` shows it",
        ) from error
    except SmsError as error:
        if not all(words in error.message for words in NO_SUCH):
            raise
        return GuestResult(NO_COMMAND, b"", f"sms: {argv[0]}: no such command in the VM\n".encode())


def attach_console(cluster: Cluster, host: Host) -> int:
    """Attach the terminal to the VM's serial console. Returns the exit status."""
    need_running(cluster, host)
    return host.interact("python3", "-I", "-c", CONSOLE, str(VmPlaces(cluster.site).console))


def find_console(cluster: Cluster, name: str | None) -> Host:
    """Return the host whose console log to print: the one that has the VM, else one where a start failed.

    Raises:
        Refused: no host has a log.
    """
    try:
        return find_vm(cluster, name)
    except Refused:
        failed = str(VmPlaces(cluster.site).console_failed)
        for admin in cluster.site.admin_hosts if name is None else ():
            with suppress(SmsError):
                host = cluster.host(admin.name)
                if host.works("test", "-f", failed):
                    return host
        raise


def read_console(cluster: Cluster, host: Host) -> bytes:
    """Return the VM's console output since its last boot, at most the last MiB.

    Raises:
        Refused: the host has no log.
    """
    where = VmPlaces(cluster.site)
    path = str(where.console_log)
    if find_running(cluster, host) is None:
        # The newer of two logs: that of the last run, and that of the last failed start.
        paths = (path, str(where.console_failed))
        path = next(iter(host.run("ls", "-td", "--", *paths, ok=None).text.splitlines()), path)
    found = host.run("tail", "-c", str(LAST_BYTES), "--", path, ok=None)
    if found.status:
        raise Refused(f"{host.name} has no log of the VM's console", hint="the VM was never started there")
    return found.stdout
