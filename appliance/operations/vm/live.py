"""Moving the VM while it runs: both hosts see its disks, and its memory goes through this process, over SSH.

The target's QEMU waits on a socket of its own host; nobody listens on a network.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.host.stream import Stream
from appliance.operations.context import Cluster
from appliance.operations.vm.image import deliver_vm
from appliance.operations.vm.start import StartedVm, boot, read_note
from appliance.operations.vm.vm import find_running, tidy_run
from appliance.plan.vm.holder import Holder
from appliance.plan.vm.note import VmNote
from appliance.plan.vm.vm import VmPlaces, vm_places
from appliance.progress import Progress
from appliance.tools.qemu import end_machine
from appliance.tools.qmp import Qmp, open_qmp

ALL_S = 3600
LAST_S = 120
"""Until what is on its way has arrived, or a move that was called off has ended."""
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


class Handover:
    """The record of who has the disks, on its way. ``done``: the target has them, whatever comes after."""

    def __init__(self, source: Host, target: Host, where: VmPlaces, holder: Holder) -> None:
        self.hosts = (target, source)
        self.where = where
        self.holder = holder
        self.done = False
        self.trouble: list[str] = []

    def commit(self) -> None:
        """Write it down; both hosts see the folder, so either will do. Raises nothing: there is no way back."""
        if self.done:
            return
        self.done = True
        for host in self.hosts:
            try:
                host.write(str(self.where.holder), self.holder.text(), mode=0o600)
            except SmsError as error:
                self.trouble.append(f"who has the disks could not be written down: {error.message}")
            else:
                return


def move_live(cluster: Cluster, source: Host, target: Host, progress: Progress, holder: Holder) -> float:
    """Move the running VM; give how many milliseconds nothing in it ran. Every host's lock is held by the caller.

    Once QEMU says that the move is completed, the target may have written to the disks: from there on neither is the
    target ended nor does the source run on.

    Raises:
        RolledBack: it failed, and goes on running on the source.
        SmsError: it has moved, and something went wrong after that; or nobody can tell where it is.
    """
    where = vm_places(cluster.site)
    tidy_run(cluster, target)
    written = read_note(cluster, source)
    image = deliver_vm(cluster, target, progress, chosen=written.key)
    check_same_image(written, image.digest)
    # The machine must be the same one on both sides: what the source runs with, the target does.
    accel, why = written.accel or "tcg", written.why
    started = StartedVm(target.name, accel, why, image.path, image.digest, image.signer, holder.generation)
    started.issuer_ends = written.issuer_ends
    handover = Handover(source, target, where, holder)
    with ExitStack() as undo:
        try:
            boot(cluster, target, progress, image, started, undo, incoming=True)
            with progress.step("move its memory") as step:
                paused = move_memory(source, target, where, step, handover)
                step.detail(f"paused for {paused:.0f} ms")
        except BaseException as error:
            raise end_move(source, target, where, handover, undo, error) from error
        finally:
            if handover.done:
                undo.pop_all()
                _end_source(cluster, source, handover)
        undo.pop_all()
    if handover.trouble:
        raise SmsError(
            f"the VM has moved to {target.name}, but {'; '.join(handover.trouble)}", hint="`sms vm status` tells where"
        )
    return paused


def check_same_image(written: VmNote, digest: str) -> None:
    """Refuse a live move where another build of the image has taken the place of the one that the VM runs from."""
    if written.digest and written.digest != digest:
        raise Refused(
            "the VM runs from another build of its image than the one that is here by now",
            hint="`sms vm migrate --stopped` moves it and starts it from the new one",
        )


def end_move(
    source: Host, target: Host, where: VmPlaces, handover: Handover, undo: ExitStack, error: BaseException
) -> BaseException:
    """Bring a move that was broken off to one of its two ends; the error to raise then."""
    status = "completed" if handover.done else _settle(source, where)
    words = error.message if isinstance(error, SmsError) else type(error).__name__
    if status == "completed":
        handover.commit()
        undo.pop_all()
        found: SmsError = SmsError(
            f"{words}\n  the VM had gone to {target.name} before that{_last_words(target, where)}",
            hint=f"`sms vm status`; `sms vm start --host {target.name}` where it does not run",
        )
    elif not status:
        undo.pop_all()
        found = SmsError(
            f"{words}\n  nobody can tell whether the VM has gone to {target.name}: it was ended on neither host",
            hint=f"`sms vm status`; when {source.name} answers, `sms vm stop --host` the one where it does not serve",
        )
    else:
        found = RolledBack(f"{words}\n  the VM goes on on {source.name}", hint=getattr(error, "hint", ""))
        try:
            undo.close()
        except SmsError as second:
            left = f"what waits for it on {target.name} could not be ended: {second.message}"
            found = SmsError(f"{found.message}; {left}", hint=f"`sms vm stop --host {target.name}`")
        if wrong := _go_on(source, where):
            found = SmsError(f"{words}\n  and the VM does not go on on {source.name}: {wrong}", hint="`sms vm status`")
    return found if isinstance(error, Exception) else error


def _last_words(target: Host, where: VmPlaces) -> str:
    """What QEMU has said on the target, if anything and if it can be asked."""
    with suppress(SmsError):
        said = target.run("tail", "-n", "3", "--", str(where.run / "qemu.log"), ok=None).text
        return f"; QEMU there: {' '.join(said.split())[-600:]}" if said.strip() else ""
    return ""


def _end_source(cluster: Cluster, source: Host, handover: Handover) -> None:
    """What has gone from the source does not run there any more: only its process is left."""
    try:
        if process := find_running(cluster, source):
            end_machine(source, process)
        tidy_run(cluster, source)
    except SmsError as error:
        handover.trouble.append(f"what is left of it on {source.name} could not be removed: {error.message}")


def move_memory(source: Host, target: Host, where: VmPlaces, step: Any, handover: Handover) -> float:
    """Send the memory over and wait until the target runs; ``handover`` is committed as soon as it may."""
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
        handover.commit()
        pump.join(LAST_S)
        if failed or pump.is_alive():
            raise SmsError(f"the way to {target.name} broke at the end: {failed[0] if failed else 'it does not end'}")
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


def _settle(source: Host, where: VmPlaces) -> str:
    """How the move ended at the source, once it has been called off; empty where that cannot be told."""
    with suppress(SmsError), open_qmp(source, str(where.qmp)) as qmp:
        with suppress(SmsError):
            qmp.ask("migrate_cancel")
        deadline = time.monotonic() + LAST_S
        while time.monotonic() < deadline:
            status = str(qmp.ask("query-migrate").get("status", "none"))
            if status in ("none", "cancelled", "failed", "completed"):
                return status
            time.sleep(0.1)
    return ""


def _go_on(source: Host, where: VmPlaces) -> str:
    """Let the source's machine run on; gives what went wrong, or nothing."""
    try:
        with open_qmp(source, str(where.qmp)) as qmp:
            if qmp.ask("query-status")["status"] != "running":
                qmp.ask("cont")
    except SmsError as error:
        return error.message
    return ""
