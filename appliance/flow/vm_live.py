"""Moving the VM while it runs: both hosts see its disks, and its memory goes through this process, over SSH.

The target's QEMU waits on a socket of its own host; nobody listens on a network.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from appliance.errors import RolledBack, SmsError
from appliance.flow.context import Cluster
from appliance.flow.vm import find_running, tidy
from appliance.flow.vm_image import deliver_vm
from appliance.flow.vm_start import StartedVm, boot, read_note
from appliance.host.base import Host
from appliance.host.stream import Stream
from appliance.plan.vm import VmPlaces, vm_places
from appliance.plan.vm_holder import Holder
from appliance.progress import Progress
from appliance.tools.qemu import end_machine
from appliance.tools.qmp import Qmp, open_qmp

ALL_S = 3600
# Listens on a socket, and gives what comes there on standard output, for one connection.
LISTEN = """\
import os, socket, sys
path = sys.argv[1]
if os.path.exists(path):
    os.unlink(path)
os.umask(0o077)
door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
door.bind(path)
door.listen(1)
door.settimeout(60)
sys.stderr.write("ready\\n")
sys.stderr.flush()
there = door.accept()[0]
there.settimeout(None)
os.unlink(path)
while True:
    data = there.recv(1 << 18)
    if not data:
        break
    while data:
        data = data[os.write(1, data):]
"""
# Gives its standard input to a socket.
GIVE = """\
import os, socket, sys
there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
there.connect(sys.argv[1])
while True:
    data = os.read(0, 1 << 18)
    if not data:
        break
    there.sendall(data)
"""


def move_live(cluster: Cluster, source: Host, target: Host, progress: Progress, holder: Holder) -> float:
    """Move the running VM; give how many milliseconds nothing in it ran. Both hosts' locks are held by the caller.

    Raises:
        RolledBack: it failed, and goes on running on the source.
    """
    where = vm_places(cluster.site)
    tidy_run(cluster, target)
    image = deliver_vm(cluster, target, progress, chosen=str(read_note(cluster, source).get("key", "")))
    written = read_note(cluster, source)
    # The machine must be the same one on both sides: what the source runs with, the target does.
    started = StartedVm(
        target.name,
        str(written.get("accel", "tcg")),
        str(written.get("why", "")),
        image.path,
        image.digest,
        image.signer,
        0,
    )
    started.generation = holder.generation
    with ExitStack() as undo:
        try:
            boot(cluster, target, progress, image, started, undo, incoming=True)
            with progress.step("move its memory") as step:
                paused = _move(source, target, where, step)
                step.detail(f"paused for {paused:.0f} ms")
        except BaseException as error:
            undo.close()
            _go_on(source, where)
            if isinstance(error, SmsError):
                raise RolledBack(f"{error.message}\n  the VM goes on on {source.name}", hint=error.hint) from error
            raise
        target.write(str(where.holder), holder.text(), mode=0o600)
        undo.pop_all()
    if process := find_running(cluster, source):
        end_machine(source, process)
    tidy(cluster, source)
    return paused


def tidy_run(cluster: Cluster, host: Host) -> None:
    """Remove what an earlier machine left on the host, but nothing of the disks, which another one uses."""
    host.run("rm", "-rf", "--one-file-system", "--", str(vm_places(cluster.site).run))


def _move(source: Host, target: Host, where: VmPlaces, step: Any) -> float:
    outgoing = str(where.run / "outgoing.sock")
    ready = threading.Event()
    failed: list[BaseException] = []
    with ExitStack() as stack:
        qmp = stack.enter_context(open_qmp(source, str(where.qmp), silence_s=ALL_S))
        listener = source.stream(
            "python3", "-I", "-c", LISTEN, outgoing, on_line=lambda line: ready.set() if line == "ready" else None
        )
        taking = stack.enter_context(listener)
        giving = stack.enter_context(target.stream("python3", "-I", "-c", GIVE, str(where.incoming)))
        if not ready.wait(30):
            raise SmsError(f"{source.name} cannot make a way for the VM's memory")
        qmp.ask("migrate-set-parameters", **{"downtime-limit": 300, "max-bandwidth": 0})
        pump = threading.Thread(target=_pump, args=(taking, giving, failed), daemon=True)
        qmp.ask("migrate", uri=f"unix:{outgoing}")
        pump.start()
        found = _wait(qmp, step, failed)
        pump.join(60)
    with open_qmp(target, str(where.qmp)) as there:
        _wait_running(there)
    return float(found.get("downtime", 0))


def _pump(taking: Stream, giving: Stream, failed: list[BaseException]) -> None:
    try:
        while block := taking.read():
            giving.write(block)
        giving.end()
    except BaseException as error:
        failed.append(error)


def _wait(qmp: Qmp, step: Any, failed: list[BaseException]) -> dict[str, Any]:
    deadline = time.monotonic() + ALL_S
    while True:
        found: dict[str, Any] = qmp.ask("query-migrate")
        ram = found.get("ram", {})
        step.moved(ram.get("transferred", 0), ram.get("transferred", 0) + ram.get("remaining", 0))
        if found.get("status") == "completed":
            return found
        if found.get("status") in ("failed", "cancelled"):
            raise SmsError(f"QEMU could not move the VM: {found.get('error-desc', found['status'])}")
        if failed:
            raise SmsError(f"the way to the other host broke: {failed[0]}")
        if time.monotonic() > deadline:
            raise SmsError("the VM changes its memory faster than it can be moved", hint="`--stopped` moves it off")
        time.sleep(0.1)


def _wait_running(qmp: Qmp) -> None:
    deadline = time.monotonic() + 60
    while qmp.ask("query-status")["status"] != "running":
        if time.monotonic() > deadline:
            raise SmsError("the VM arrived, and does not run", hint="`sms vm console` shows it")
        time.sleep(0.1)


def _go_on(source: Host, where: VmPlaces) -> None:
    """The source's machine runs on, wherever the move stopped."""
    with suppress(SmsError), open_qmp(source, str(where.qmp)) as qmp:
        with suppress(SmsError):
            qmp.ask("migrate_cancel")
        for _ in range(50):
            if qmp.ask("query-migrate").get("status") not in ("active", "setup", "device", "cancelling"):
                break
            time.sleep(0.1)
        if qmp.ask("query-status")["status"] != "running":
            qmp.ask("cont")
