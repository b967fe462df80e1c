"""``sms vm exec`` and ``sms vm console``: commands in the VM, and its serial console."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.vm.vm import find_running, find_vm
from appliance.plan.vm.vm import vm_places
from appliance.tools.guest import Ran, open_guest
from appliance.tools.qmp import NotThere

LAST_BYTES = 1 << 20
NO_COMMAND = 127
"""As of a shell."""
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
"""The terminal to a socket and back, until Ctrl-] or either end."""


def need_running(cluster: Cluster, host: Host) -> None:
    """Refuse where the VM does not run."""
    if find_running(cluster, host) is None:
        raise Refused(f"the VM does not run on {host.name}", hint="`sms vm start`; `sms vm status` tells where it runs")


def run_in_vm(
    cluster: Cluster, host: Host, argv: Sequence[str], *, input: bytes | None = None, timeout_s: float = 60
) -> Ran:
    """Run a command in the VM.

    Raises:
        Refused: it does not run, or its guest agent does not answer.
    """
    need_running(cluster, host)
    try:
        with open_guest(host, str(vm_places(cluster.site).guest)) as guest:
            return guest.run(argv, input=input, timeout_s=timeout_s)
    except NotThere as error:
        raise Refused(
            f"the VM cannot be asked: {error.message}", hint="does it still start? `sms vm console` shows it"
        ) from error
    except SmsError as error:
        if not all(words in error.message for words in NO_SUCH):
            raise
        return Ran(NO_COMMAND, b"", f"sms: {argv[0]}: no such command in the VM\n".encode())


def attach_console(cluster: Cluster, host: Host) -> int:
    """Attach the terminal to the VM's serial console; give the exit status."""
    need_running(cluster, host)
    return host.interact("python3", "-I", "-c", CONSOLE, str(vm_places(cluster.site).console))


def find_console(cluster: Cluster, wanted: str | None) -> Host:
    """The host whose log of the console is asked for: that which has the VM; else one where a start has failed.

    Raises:
        Refused: there is none.
    """
    try:
        return find_vm(cluster, wanted)
    except Refused:
        failed = str(vm_places(cluster.site).console_failed)
        for admin in cluster.site.admin_hosts if wanted is None else ():
            with suppress(SmsError):
                host = cluster.host(admin.name)
                if host.works("test", "-f", failed):
                    return host
        raise


def read_console(cluster: Cluster, host: Host) -> str:
    """What the VM has said on its console since its last boot; the last MiB of it."""
    where = vm_places(cluster.site)
    path = str(where.console_log)
    if find_running(cluster, host) is None:
        # The later one of the last run, and of the last start that failed.
        paths = (path, str(where.console_failed))
        path = host.run("sh", "-c", 'ls -td -- "$@" 2>/dev/null | head -n 1', "ls", *paths, ok=None).text or path
    found = host.run("tail", "-c", str(LAST_BYTES), "--", path, ok=None)
    if found.status:
        raise Refused(f"{host.name} has no log of the VM's console", hint="it has not been started there")
    return found.stdout.decode(errors="replace")
