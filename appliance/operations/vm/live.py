"""Live migration of the VM: both hosts share its disks; its memory is relayed by this process over SSH.

The target's QEMU listens on a Unix socket of its host; no network port is opened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.host.stream import Stream
from appliance.operations.context import Cluster
from appliance.operations.vm.image import deliver_vm
from appliance.operations.vm.start import VmNote, boot, issuer_end, make_note, read_note, stop_and_clean
from appliance.operations.vm.vm import find_running, tidy_run
from appliance.plan.vm.holder import Holder
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Progress
from appliance.shared.records import to_json
from appliance.tools.qemu import end_machine
from appliance.tools.qmp import Qmp, open_qmp

MIGRATE_S = 3600
SETTLE_S = 120
"""Seconds to wait until data in transit has arrived, or until a cancelled migration has ended."""
# Accepts one connection on a socket and copies what arrives there to standard output.
RECEIVE = """\
import os, socket, sys
path = sys.argv[1]
if os.path.exists(path):
    os.unlink(path)
os.umask(0o077)
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.bind(path)
server.listen(1)
server.settimeout(60)
sys.stderr.write("ready\\n")
sys.stderr.flush()
peer = server.accept()[0]
peer.settimeout(None)
os.unlink(path)
while True:
    data = peer.recv(1 << 18)
    if not data:
        break
    while data:
        data = data[os.write(1, data):]
"""
# Copies its standard input to a socket.
SEND = """\
import os, socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.connect(sys.argv[1])
while True:
    data = os.read(0, 1 << 18)
    if not data:
        break
    peer.sendall(data)
"""


class Handover:
    """The pending change of the disks' holder. ``done``: the target has them, and there is no way back."""

    def __init__(self, source: Host, target: Host, where: VmPlaces, holder: Holder) -> None:
        self.hosts = (target, source)
        self.where = where
        self.holder = holder
        self.done = False
        self.problems: list[str] = []

    def commit(self) -> None:
        """Write the record on one host; both share the folder. Errors are collected in ``problems``, not raised."""
        if self.done:
            return
        self.done = True
        for host in self.hosts:
            try:
                host.write(str(self.where.holder), to_json(self.holder), mode=0o600)
            except SmsError as error:
                self.problems.append(f"the record of the disks' holder could not be written: {error.message}")
            else:
                return


def move_live(cluster: Cluster, source: Host, target: Host, progress: Progress, holder: Holder) -> float:
    """Move the running VM to ``target``; the caller holds the lock of every host.

    Once QEMU reports the migration as completed, the target may have written to the disks: from then on the target is
    not stopped and the source is not resumed.

    Returns:
        How long the VM was paused, in milliseconds.

    Raises:
        RolledBack: the migration failed; the VM still runs on the source.
        SmsError: the VM has moved, but a later step failed; or it is unknown on which host it is.
    """
    where = VmPlaces(cluster.site)
    tidy_run(cluster, target)
    written = read_note(cluster, source)
    image = deliver_vm(cluster, target, progress, chosen=written.key)
    check_same_image(written, image.digest)
    # QEMU needs the same machine on both sides: the target uses the source's accelerator.
    accel = (written.accel or "tcg", written.why)
    # The VM keeps the issuer that it has.
    started = make_note(target, image, holder, accel, written.issuer_ends or issuer_end(cluster))
    handover = Handover(source, target, where, holder)
    with ExitStack() as undo:
        try:
            undo.callback(stop_and_clean, cluster, target)
            boot(cluster, target, progress, started, incoming=True)
            with progress.step("transfer its memory") as step:
                paused = move_memory(source, target, where, step, handover)
                step.detail(f"paused for {paused:.0f} ms")
        except BaseException as error:
            raise resolve_interrupted(source, target, where, handover, undo, error) from error
        finally:
            if handover.done:
                undo.pop_all()
                _end_source(cluster, source, handover)
        undo.pop_all()
    if handover.problems:
        raise SmsError(f"the VM has moved to {target.name}, but {'; '.join(handover.problems)}", hint="`sms vm status`")
    return paused


def check_same_image(written: VmNote, digest: str) -> None:
    """Raise Refused if the image that the VM runs from was replaced by another build: it cannot move live then."""
    if written.digest and written.digest != digest:
        raise Refused(
            "the VM runs from another build of its image than the one in the store",
            hint="`sms vm migrate --stopped` moves it and starts it from the new one",
        )


def resolve_interrupted(
    source: Host, target: Host, where: VmPlaces, handover: Handover, undo: ExitStack, error: BaseException
) -> BaseException:
    """Commit or roll back an interrupted migration. Returns the error to raise."""
    status = "completed" if handover.done else _cancel(source, where)
    words = error.message if isinstance(error, SmsError) else type(error).__name__
    if status == "completed":
        handover.commit()
        undo.pop_all()
        found: SmsError = SmsError(
            f"{words}\n  the VM had already moved to {target.name}{_qemu_log_tail(target, where)}",
            hint=f"`sms vm status`; `sms vm start --host {target.name}` if it is not running",
        )
    elif not status:
        undo.pop_all()
        found = SmsError(
            f"{words}\n  it is unknown whether the VM has moved to {target.name}: it was stopped on neither host",
            hint=f"`sms vm status`; when {source.name} answers, `sms vm stop --host` the one that is not healthy",
        )
    else:
        found = RolledBack(f"{words}\n  the VM keeps running on {source.name}", hint=getattr(error, "hint", ""))
        try:
            undo.close()
        except SmsError as second:
            left = f"its new instance on {target.name} could not be stopped: {second.message}"
            found = SmsError(f"{found.message}; {left}", hint=f"`sms vm stop --host {target.name}`")
        if wrong := _resume(source, where):
            found = SmsError(f"{words}\n  the VM was not resumed on {source.name}: {wrong}", hint="`sms vm status`")
    return found if isinstance(error, Exception) else error


def _qemu_log_tail(target: Host, where: VmPlaces) -> str:
    """Return the end of QEMU's log on the target; empty if there is none or the host is not reachable."""
    with suppress(SmsError):
        log = target.run("tail", "-n", "3", "--", str(where.run / "qemu.log"), ok=None).text
        return f"; QEMU there: {' '.join(log.split())[-600:]}" if log.strip() else ""
    return ""


def _end_source(cluster: Cluster, source: Host, handover: Handover) -> None:
    """Stop QEMU on the source and remove its files, after the VM has moved."""
    try:
        if process := find_running(cluster, source):
            end_machine(source, process)
        tidy_run(cluster, source)
    except SmsError as error:
        handover.problems.append(f"its remains on {source.name} could not be removed: {error.message}")


def move_memory(source: Host, target: Host, where: VmPlaces, step: Any, handover: Handover) -> float:
    """Transfer the memory and wait until the target runs; ``handover`` is committed once QEMU has completed."""
    outgoing = str(where.run / "outgoing.sock")
    ready = threading.Event()
    failed: list[BaseException] = []
    with ExitStack() as stack:
        qmp = stack.enter_context(open_qmp(source, str(where.qmp), silence_s=MIGRATE_S))
        listener = source.stream(
            "python3", "-I", "-c", RECEIVE, outgoing, on_line=lambda line: ready.set() if line == "ready" else None
        )
        receiver = stack.enter_context(listener)
        sender = stack.enter_context(target.stream("python3", "-I", "-c", SEND, str(where.incoming)))
        if not ready.wait(30):
            raise SmsError(f"{source.name} cannot open a channel for the VM's memory")
        qmp.execute("migrate-set-parameters", **{"downtime-limit": 300, "max-bandwidth": 0})
        pump = threading.Thread(target=_pump, args=(receiver, sender, failed), daemon=True)
        qmp.execute("migrate", uri=f"unix:{outgoing}")
        pump.start()
        downtime_ms = _wait(qmp, step, failed)
        handover.commit()
        pump.join(SETTLE_S)
        if failed or pump.is_alive():
            reason = failed[0] if failed else "it does not end"
            raise SmsError(f"the connection to {target.name} failed after the transfer: {reason}")
    with open_qmp(target, str(where.qmp)) as there:
        _wait_running(there)
    return downtime_ms


def _pump(receiver: Stream, sender: Stream, failed: list[BaseException]) -> None:
    try:
        while block := receiver.read():
            sender.write(block)
        sender.end()
    except BaseException as error:
        failed.append(error)


def _wait(qmp: Qmp, step: Any, failed: list[BaseException]) -> float:
    """Wait until the memory is transferred; return the milliseconds for which the VM was stopped."""
    deadline = time.monotonic() + MIGRATE_S
    while True:
        found: Mapping[str, Any] = qmp.execute("query-migrate")
        ram = found.get("ram", {})
        step.moved(ram.get("transferred", 0), ram.get("transferred", 0) + ram.get("remaining", 0))
        if found.get("status") == "completed":
            return float(found.get("downtime", 0))
        if found.get("status") in ("failed", "cancelled"):
            raise SmsError(f"QEMU could not move the VM: {found.get('error-desc', found['status'])}")
        if failed:
            raise SmsError(f"the connection to the other host failed: {failed[0]}")
        if time.monotonic() > deadline:
            raise SmsError(
                "the VM changes its memory faster than it can be transferred", hint="`--stopped` stops it for the move"
            )
        time.sleep(0.1)


def _wait_running(qmp: Qmp) -> None:
    deadline = time.monotonic() + 60
    while qmp.execute("query-status")["status"] != "running":
        if time.monotonic() > deadline:
            raise SmsError("the VM has moved, but does not run", hint="`sms vm console` shows it")
        time.sleep(0.1)


def _cancel(source: Host, where: VmPlaces) -> str:
    """Cancel the migration at the source and return its final status; empty if that is unknown."""
    with suppress(SmsError), open_qmp(source, str(where.qmp)) as qmp:
        with suppress(SmsError):
            qmp.execute("migrate_cancel")
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            status = str(qmp.execute("query-migrate").get("status", "none"))
            if status in ("none", "cancelled", "failed", "completed"):
                return status
            time.sleep(0.1)
    return ""


def _resume(source: Host, where: VmPlaces) -> str:
    """Resume the machine on the source. Returns the error message, or nothing."""
    try:
        with open_qmp(source, str(where.qmp)) as qmp:
            if qmp.execute("query-status")["status"] != "running":
                qmp.execute("cont")
    except SmsError as error:
        return error.message
    return ""
