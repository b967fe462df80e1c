"""Live migration of the VM: both hosts share its disks; its memory is relayed by this process over SSH.

The target loads the memory, confirms that to the source, and waits. Only then is it started; until then the source
can go on. Without KVM the VM is paused before: QEMU older than 9.0 misses writes of a machine that it emulates while it
copies the memory (fixed by its commit 03bfc2188f06), and the target gets old pages, such as the rings of its disks.
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
from appliance.operations.env import Clock
from appliance.operations.vm.image import deliver_vm, make_current
from appliance.operations.vm.start import VmNote, boot, issuer_end, make_note, read_note, stop_and_clean
from appliance.operations.vm.vm import find_running, tidy_run
from appliance.plan.vm.holder import Holder
from appliance.plan.vm.vm import VmPlaces
from appliance.shared.records import to_json
from appliance.tools.guest import open_guest
from appliance.tools.memory import MEMORY_URI, SETTLE_S, open_memory, resume
from appliance.tools.qemu import Process, end_machine, has_ended
from appliance.tools.qmp import NotResponding, Qmp, open_qmp

MIGRATE_S = 3600
PAUSED_S = 300
"""Limit without KVM: the VM is paused all the time."""
LIMITS = {"downtime-limit": 300, "max-bandwidth": 0}
"""Pause of a VM with KVM, in milliseconds; bandwidth in bytes per second, 0 for no limit."""


class Handover:
    """The pending change of the disks' holder.

    Attributes:
        begun: the target was requested to run: it may have written to the disks.
        done: the target runs, and there is no way back.
        problems: what failed after that.
    """

    def __init__(self, source: Host, target: Host, where: VmPlaces, holder: Holder, clock: Clock) -> None:
        self.clock = clock
        self.hosts = (target, source)
        self.where = where
        self.holder = holder
        self.begun = self.done = False
        self.problems: list[str] = []
        self._before: bytes | None = None
        self._written = False

    def commit(self) -> None:
        """Write the record on one host; both share the folder.

        Raises:
            SmsError: it cannot be written on either.
        """
        _, source = self.hosts
        self._before = source.read(str(self.where.holder))
        self._written = True
        try:
            self._write(to_json(self.holder))
        except SmsError as error:
            raise SmsError(f"the record of the disks' holder could not be written: {error.message}") from error

    def withdraw(self) -> str:
        """Restore the record. Returns the problem, or nothing."""
        if self._written:
            try:
                self._write(self._before)
            except SmsError as error:
                return f"the record of the disks' holder could not be restored: {error.message}"
        return ""

    def _write(self, data: bytes | None) -> None:
        first, second = self.hosts
        try:
            _put(first, str(self.where.holder), data)
        except SmsError:
            _put(second, str(self.where.holder), data)


def _put(host: Host, path: str, data: bytes | None) -> None:
    if data is None:
        host.remove(path)
    else:
        host.write(path, data, mode=0o600)


def move_live(cluster: Cluster, source: Host, target: Host, holder: Holder) -> float:
    """Move the running VM to ``target``; the caller holds the lock of every host.

    Returns:
        How long the VM was paused, in milliseconds.

    Raises:
        Refused: the source's machine does not run, or the image was replaced; nothing was changed.
        RolledBack: the migration failed; the VM still runs on the source.
        SmsError: the VM has moved, but a later step failed; or it is unknown on which host it is.
    """
    where = VmPlaces(cluster.site)
    check_runs(source, where)
    tidy_run(cluster, target)
    written = read_note(cluster, source)
    image = deliver_vm(cluster, target, chosen=written.key)
    check_same_image(written, image.digest)
    # QEMU needs the same machine on both sides: the target uses the source's accelerator.
    accel = (written.accel or "tcg", written.why)
    # The VM keeps the issuer that it has.
    started = make_note(target, image, holder, accel, written.issuer_ends or issuer_end(cluster))
    handover = Handover(source, target, where, holder, cluster.env.clock)
    with ExitStack() as undo:
        try:
            undo.callback(stop_and_clean, cluster, target)
            boot(cluster, target, started, incoming=True)
            with cluster.env.progress.step("transfer its memory") as step:
                paused = move_memory(source, target, where, step, handover)
                step.detail(f"paused for {paused:.0f} ms")
        except BaseException as error:
            raise resolve_interrupted(source, target, where, handover, undo, error) from error
        finally:
            if handover.done:
                undo.pop_all()
                _end_source(cluster, source, handover)
    set_clock(target, where)
    make_current(cluster, target, image.path)
    if handover.problems:
        raise SmsError(f"the VM has moved to {target.name}, but {'; '.join(handover.problems)}", hint="`sms vm status`")
    return paused


def set_clock(host: Host, where: VmPlaces) -> None:
    """Set the VM's clock, which stood still while it was paused; it has no other source of time."""
    with suppress(SmsError), open_guest(host, str(where.guest), silence_s=20) as guest:
        guest.execute("guest-set-time", time=time.time_ns())


def check_runs(source: Host, where: VmPlaces) -> None:
    """Raise Refused unless the source's machine runs: a rollback resumes it, and memory that has moved away is old."""
    if (state := _query_state(source, where)) != "running":
        raise Refused(
            f"the machine on {source.name} {f'is {state}' if state else 'does not answer'}: it cannot move live",
            hint="`sms vm start` continues one that a migration left paused; `--stopped` stops it for the move",
        )


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
    """Complete or roll back an interrupted migration. Returns the error to raise."""
    words = error.message if isinstance(error, SmsError) else type(error).__name__
    words += _qemu_log_tail(target, where)
    state = _query_state(target, where) if handover.begun else "paused"
    if state == "paused":
        found = _roll_back(source, target, where, handover, undo, (words, getattr(error, "hint", "")))
    else:
        undo.pop_all()
        handover.done = handover.done or bool(state)
        moved = f"the VM has moved to {target.name}" + ("" if state == "running" else f"; its state there: {state}")
        if not handover.done:
            moved = f"it is unknown whether the VM continues on {target.name}: it was stopped on neither host"
        hint = f"`sms vm status`; `sms vm start --host {target.name}` if it is not running"
        found = SmsError(f"{words}\n  {moved}", hint=hint)
    return found if isinstance(error, Exception) else error


def _roll_back(
    source: Host, target: Host, where: VmPlaces, handover: Handover, undo: ExitStack, words: tuple[str, str]
) -> SmsError:
    """End the target's machine and let the source's go on; return the error to raise. ``words``: message and hint."""
    problems = []
    try:
        undo.close()
    except SmsError as second:
        problems.append(f"its new instance on {target.name} could not be stopped: {second.message}")
        if handover.begun:
            return SmsError(
                f"{words[0]}\n  {problems[0]}: the VM was not resumed on {source.name}",
                hint=f"`sms vm stop --host {target.name}`, then `sms vm start --host {source.name}`",
            )
    problems += filter(None, [handover.withdraw()])
    # Its migration may have completed; the target has not run.
    if wrong := resume(source, str(where.qmp), force=True):
        problems.append(wrong)
        return SmsError(
            f"{words[0]}\n  the VM was not resumed on {source.name}: {'; '.join(problems)}", hint="`sms vm status`"
        )
    message = f"{words[0]}\n  the VM keeps running on {source.name}"
    if problems:
        return SmsError(f"{message}; {'; '.join(problems)}", hint=f"`sms vm stop --host {target.name}`")
    return RolledBack(message, hint=words[1])


def _query_state(host: Host, where: VmPlaces) -> str:
    """Return the state of a host's machine, ``ended`` without a process; empty if it does not answer."""
    with suppress(SmsError), open_qmp(host, str(where.qmp), silence_s=20) as qmp:
        return str(qmp.execute("query-status")["status"])
    with suppress(SmsError):
        pid = host.run("cat", "--", str(where.pid)).text
        if pid.isdecimal() and has_ended(host, Process(int(pid), 0)):
            return "ended"
    return ""


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
    """Transfer the memory, commit ``handover`` and let the target run. Returns the pause in milliseconds."""
    failed, clock = list[BaseException](), handover.clock
    with ExitStack() as stack:
        ends = [
            stack.enter_context(open_memory(host, str(where.qmp), sends=host is source)) for host in (source, target)
        ]
        qmp = stack.enter_context(open_qmp(source, str(where.qmp), silence_s=SETTLE_S))
        there = stack.enter_context(open_qmp(target, str(where.qmp), silence_s=SETTLE_S))
        _set_capabilities(there, "return-path", "late-block-activate")
        there.execute("migrate-incoming", uri=MEMORY_URI)
        # With it, the source has only completed once the target has loaded everything.
        _set_capabilities(qmp, "return-path")
        qmp.execute("migrate-set-parameters", **LIMITS)
        began = None if qmp.execute("query-kvm")["enabled"] else clock.monotonic()
        if began is not None:
            qmp.execute("stop")
        qmp.execute("migrate", uri=MEMORY_URI)
        pumps = [threading.Thread(target=_pump, args=(*way, failed), daemon=True) for way in (ends, ends[::-1])]
        for pump in pumps:
            pump.start()
        downtime_ms = _wait(qmp, there, step, failed, clock=clock, paused=began is not None)
        if began is None:
            began = clock.monotonic() - downtime_ms / 1000
        _wait_for_state(there, "paused", clock)
        handover.commit()
        continue_there(there, handover)
        return (clock.monotonic() - began) * 1000


def _set_capabilities(qmp: Qmp, *names: str) -> None:
    qmp.execute("migrate-set-capabilities", capabilities=[{"capability": name, "state": True} for name in names])


def continue_there(there: Qmp, handover: Handover) -> None:
    """Let the target's machine run.

    Raises:
        SmsError: it does not; ``handover.begun`` says whether it may have run.
    """
    handover.begun = True
    try:
        there.execute("cont")
    except NotResponding:
        raise
    except SmsError:
        handover.begun = False  # QEMU refused: it could not open the disks
        raise
    _wait_for_state(there, "running", handover.clock)
    handover.done = True


def _pump(source: Stream, target: Stream, failed: list[BaseException]) -> None:
    try:
        while block := source.read():
            target.write(block)
        target.end()
    except BaseException as error:
        failed.append(error)


def _wait(qmp: Qmp, there: Qmp, step: Any, failed: list[BaseException], *, clock: Clock, paused: bool) -> float:
    """Wait until the memory is transferred; return the milliseconds for which QEMU has stopped the VM."""
    deadline = clock.monotonic() + (PAUSED_S if paused else MIGRATE_S)
    while True:
        there.execute("query-status")  # it is alive, and the session stays open
        found: Mapping[str, Any] = qmp.execute("query-migrate")
        ram = found.get("ram", {})
        step.moved(ram.get("transferred", 0), ram.get("transferred", 0) + ram.get("remaining", 0))
        if found.get("status") == "completed":
            return float(found.get("downtime", 0))
        if found.get("status") in ("failed", "cancelled"):
            raise SmsError(f"QEMU could not move the VM: {found.get('error-desc', found['status'])}")
        if failed:
            raise SmsError(f"the connection to the other host failed: {failed[0]}")
        if clock.monotonic() > deadline:
            slow = f"its memory was not transferred within {PAUSED_S:g} s, in which a VM without KVM is paused"
            fast = "the VM changes its memory faster than it can be transferred"
            raise SmsError(slow if paused else fast, hint="`--stopped` stops it for the move")
        clock.sleep(0.1)


def _wait_for_state(qmp: Qmp, wanted: str, clock: Clock) -> None:
    deadline = clock.monotonic() + SETTLE_S
    while (state := qmp.execute("query-status")["status"]) != wanted:
        if clock.monotonic() > deadline:
            raise SmsError(f"the VM is {state} on the target, not {wanted}", hint="`sms vm console` shows it")
        clock.sleep(0.02)
