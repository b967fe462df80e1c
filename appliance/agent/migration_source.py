"""Source of a migration: copy the overlay while it is in use, then hand over the services and their addresses.

The state decides what happens when the connection to the coordinator is lost:

    read      the services run here: nothing is done
    stopping  services that keep state are stopped: they are started again
    released  the ports are detached from the bridges: no host serves. The target attaches its own within ``ARMED_S`` of
              its last message or never. After ``RECLAIM_S`` the source asks who answers for the addresses: if it is the
              target, the migration is completed, else the ports are attached again
    ended     with a shared overlay: the instance here has ended. It is started again unless the target has the lease
    given     the target serves: the instance here is ended

Where the target is this host as well, it decides as a second process with a lock and a mark of its own. The source
waits for its end and completes what a killed one left; the copy then exists if the second instance serves, and only
then. It gets the names of the first one once that has ended.
"""

import hashlib
import os
from contextlib import ExitStack
from typing import Any, Dict, List, Optional, Set, Tuple

from appliance.agent.changes import IN_MEMORY, Changes
from appliance.agent.channel import PATIENCE_S, Channel
from appliance.agent.chunk_frames import BATCH, FrameEncoder, chunk_digest
from appliance.agent.connections import without_timeout
from appliance.agent.datagrams import DatagramCounter
from appliance.agent.freeze import Frozen, find_loops, mounted_again, private_mounts
from appliance.agent.host_state import CHANGED, CHANGED_HINT, HostState
from appliance.agent.machine import Handler, StateMachine, follow_to_the_end, reason
from appliance.agent.protocol import Problem, field, read_request
from appliance.agent.source import Source
from appliance.agent.store import digest_of
from appliance.agent.system import SYSTEM, System
from appliance.agent.take import FREEZE_CHUNKS, host_locked
from appliance.agent.transfer import read_bits
from appliance.shared.files import remove_state
from appliance.shared.locks import Locked, hold_lock
from appliance.shared.migration import MoveMark, Second, SourceRequest
from appliance.shared.wire import Message

RECLAIM_S = 3.0
"""Longer than ``migration_target.ARMED_S``, by more than two clocks can differ in that time."""
LEASE_S = 90.0
"""Seconds that the target may take to return the lease of a shared overlay."""
NOTICE_S = 0.1
"""Seconds that the switch waits for log senders; one that is down never answers."""
TAIL_BYTES = 64 << 20
"""Bytes of log lines that are copied after the switch, of all files together. Processes inside may write any number."""
READ_S = 2.0
"""Seconds that the log server may take to read what it has received."""
FREEZE_LIMIT_S = 5.0
"""Seconds that writers wait for a freeze at most."""
SECOND_S = 120.0
"""Seconds that the agent of the target may take to end, if it is on this host."""


def run_source(request: Dict[str, Any]) -> Dict[str, Any]:
    """Follow the coordinator's messages until the services container runs on the target, or here again.

    Raises:
        Problem: the migration failed; the services container runs here as before.
    """
    follow_to_the_end()
    given = read_request(SourceRequest, request)
    with host_locked(given.lock):
        private_mounts()
        source = MigrationSource(given, Channel())
        source.begin()
        return source.run()


class MigrationSource(StateMachine):
    """The source's state machine of one migration."""

    SIDE = "leave"
    ENDED = ("gone",)

    def __init__(self, request: SourceRequest, channel: Optional[Channel], system: System = SYSTEM) -> None:
        StateMachine.__init__(self, channel, system)
        self.request = request
        self.host_state = HostState(request, self.SIDE, self.system)
        self.state = "read"
        self.released_at = 0.0
        self.ports: Dict[str, str] = {}
        self.lengths: Dict[str, int] = {}
        self.counter: Optional[DatagramCounter] = None
        self.sent_connections: Set[str] = set()
        self.source: Optional[Source] = None
        self.changes: Optional[Changes] = None
        self.encoder = FrameEncoder(request.compress)
        self.instance = self.system.instance(request.pid)
        self.sessions = self.system.open_sessions(request.pid, request.stream_ports, request.reset_ports)

    def patience_s(self) -> float:
        """Return how many seconds without a message mean that the coordinator is gone."""
        return RECLAIM_S if self.state == "released" else PATIENCE_S

    def handlers(self) -> Dict[str, Handler]:
        """Return the function of each message."""
        return {
            "offer": self.offer,
            "send": self.send_wanted,
            "round": self.send_round,
            "stop": self.stop,
            "connections": self.send_connections,
            "release": self.release,
            "hand": self.hand_over,
            "given": self.send_log_tails,
            "finish": self.finish,
            "abort": self.abort,
        }

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the history."""
        self.host_state.record_event(event, **facts)

    def begin(self) -> None:
        """Check that the instance of the plan still runs and serves here, and report to be ready.

        Raises:
            Problem: it does not. Nothing has been done.
        """
        assert self.channel
        self.host_state.check_plan(holds=True)
        found = self.system.find_instance(self.request.instance)
        if not found or found.pid != self.request.pid:
            raise Problem(CHANGED, CHANGED_HINT, 3)
        if self.request.second:
            self.system.record_path(self.request.instance)
        self.channel.send("ready")

    # The copy

    def offer(self, message: Message) -> None:
        """Start to follow changes, read all chunks in use, send their digests."""
        assert self.channel
        loops = find_loops(self.request.overlay)
        if len(loops) != 1:
            raise Problem("%s is in use by %d loop devices" % (self.request.overlay, len(loops)), "losetup -l", 3)
        self.loop = loops[0]
        self.ports = self.instance.ports(sorted(self.request.bridges))
        self.host_state.save_state("read", ports=self.ports)
        self.source = Source(self.request.overlay)
        self.stack.callback(self.source.close)
        os.makedirs(os.path.dirname(self.request.frozen_mark), 0o700, exist_ok=True)
        self.changes = Changes(self.source, self.loop, self.stack, FREEZE_LIMIT_S, self.request.frozen_mark)
        self.changes.start()
        numbers = set(self.source.data_chunks()) - self.changes.free
        self.source.read_chunks(numbers, lambda number, data: digest_of(data))
        self.channel.send("offer", bytes(self.source.digests), size=self.source.size, used=self.source.used_bytes())

    def send_wanted(self, message: Message) -> None:
        """Send the chunks that the target lacks."""
        assert self.channel and self.source
        wanted = read_bits(self.channel.read_body(message), self.source.count)
        self._send(((number, self.source.chunk(number)) for number in wanted), True)

    def send_round(self, message: Message) -> None:
        """Send the chunks that changed since the last round."""
        assert self.channel and self.source and self.changes
        self.changes.flush()
        found = self.changes.collect(restart=field(message, "anew", bool, False))
        numbers = sorted(found or ())
        settled = found is None or len(numbers) <= FREEZE_CHUNKS
        self._send(((number, self.source.chunk(number)) for number in numbers), False, settled=settled)

    def _send(self, chunks: Any, everything: bool, **facts: Any) -> None:
        assert self.channel and self.source
        batch: List[bytes] = []
        size = sent = done = 0
        for number, data in chunks:
            digest = chunk_digest(data)
            place = slice(number * 32, number * 32 + 32)
            if not everything and self.source.digests[place] == digest:
                continue
            self.source.digests[place] = digest
            frame = self.encoder.encode(number, data, digest)
            batch.append(frame)
            size += len(frame)
            done += 1
            if size >= BATCH:
                self.channel.send("parcels", b"".join(batch), chunks=len(batch))
                batch, sent, size = [], sent + size, 0
        if batch:
            self.channel.send("parcels", b"".join(batch), chunks=len(batch))
        self.channel.send("sent", chunks=done, sent_bytes=sent + size, **facts)

    # The switch

    def stop(self, message: Message) -> None:
        """Stop the services that keep state, and send their last changes. Services without state go on."""
        assert self.channel and self.source and self.changes
        began = self.system.monotonic()
        self._enter("stopping", "stopping services that keep state")
        for group in self.request.stop:
            self.instance.stop_services(group, self.request.stop_wait_s)
        stopped = self.system.monotonic()
        self.system.step("freeze")
        before = bytes(self.source.digests)
        with mounted_again(self.loop) as folder:
            frozen = Frozen(folder, FREEZE_LIMIT_S, self.request.frozen_mark)
            try:
                frozen.hold()
                many: List[Tuple[int, bytes]] = []
                held = self.changes.final(lambda number, data: _keep(many, number, data))
                self.lengths = {path: self.instance.file_size(path) for path in self.request.tails}
                frozen.release()
            finally:
                frozen.close()
        # Chunks that did not fit into memory were only digested during the freeze. Send those too that became zeros.
        listed = {number for number, _ in many}
        for number in range(self.source.count):
            place = slice(number * 32, number * 32 + 32)
            if len(held) >= IN_MEMORY and before[place] != self.source.digests[place] and number not in listed:
                many.append((number, b""))
        self.source.digests[:] = before
        self._send([*many, *held], False)
        self.channel.send(
            "final",
            digests=hashlib.sha256(self.source.digests).hexdigest(),
            stop_s=stopped - began,
            frozen_s=frozen.seconds,
            found_by=self.changes.found_by,
            chunks=len(held) + len(many),
            neighbours=self.system.read_neighbours(self.instance),
        )

    def send_connections(self, message: Message) -> None:
        """Send the current connections before the switch: to transfer thousands takes longer than the rest of it."""
        assert self.channel
        self._close_sessions()
        lines = self.system.read_connections(self.instance)
        self.sent_connections = {without_timeout(line) for line in lines}
        self.channel.send("connections", "\n".join(lines).encode())

    def release(self, message: Message) -> None:
        """Detach the ports from the bridges; send the connections that ``send_connections`` has not sent."""
        assert self.channel
        self._close_sessions()
        with self.system.ports_locked(self.request.lock):  # the guard attaches none of them from this state on
            self._enter("released", "ports detached from the bridges", ports=self.ports)
            began = self.system.monotonic()
            self.counter = self.system.count_datagrams(
                sorted(self.request.bridges.items())[0][1], sorted(self.ports.items())[0][1], self.request.mac
            )
            self.released_at = self.system.monotonic()
            self.system.set_bridges(dict.fromkeys(self.ports.values()))
        down = self.system.monotonic()
        lines = self.system.read_connections(self.instance)
        text = "\n".join(line for line in lines if without_timeout(line) not in self.sent_connections).encode()
        self.channel.send("released", text, down_s=down - began, connections=len(lines))

    def _close_sessions(self) -> None:
        """Close the TCP sessions of log senders; they send what follows on new ones, which only the target accepts."""
        try:
            self.sessions.close()
        except Exception as error:
            text = "the TCP sessions of log senders cannot be closed, lines may be lost: %s" % reason(error)
            self.host_state.record_event("trouble", why=text)
            self.system.note("note: " + text)
            return
        self.sessions.wait_until_noticed(NOTICE_S)

    def hand_over(self, message: Message) -> None:
        """With a shared overlay: end the instance, so that the target can use the overlay."""
        assert self.channel
        self.ports = self.instance.ports(sorted(self.request.bridges))
        began = self.system.monotonic()
        self._enter("stopping", "stopping services that keep state", ports=self.ports)
        for group in self.request.stop:
            self.instance.stop_services(group, self.request.stop_wait_s)
        self._close_sessions()
        self.sessions.wait_until_read(READ_S)
        lines, known = self.system.read_connections(self.instance), self.system.read_neighbours(self.instance)
        self._enter("ended", "ending the instance, releasing the overlay", ports=self.ports)
        self._end_instance()
        self.system.wait_until_unused(self.request.overlay, 20)
        text = "\n".join(lines).encode()
        took = self.system.monotonic() - began
        self.channel.send("handed", text, stop_s=took, connections=len(lines), neighbours=known)

    def send_log_tails(self, message: Message) -> None:
        """The target serves: send it the log lines that arrived here since the last freeze."""
        assert self.channel
        self._enter("given", "%s serves" % self.request.peer, ports=self.ports)
        # First: if this host crashes now, it must not start the instance after its boot.
        self._give_lease()
        lost = self.counter.count() if self.counter else 0
        self.sessions.wait_until_read(READ_S)
        self.instance.stop_services(self.request.loggers, self.request.stop_wait_s)
        files, parts, cut, left = [], [], [], TAIL_BYTES
        for path in self.request.tails:
            data, more = self.instance.read_from(path, self.lengths.get(path, 0), left)
            files.append({"path": path, "bytes": len(data)})
            parts.append(data)
            left -= len(data)
            if more:
                cut.append(path)
        self.channel.send("tails", b"".join(parts), files=files, lost=lost, cut=cut)

    def finish(self, message: Message) -> None:
        """End the instance here and rename its overlay, which is stale now."""
        self._finish()
        assert self.channel
        self.channel.send("finished")

    def _finish(self) -> None:
        if self.request.second:
            self._second_serves()  # it does: what its agent has left to do is done
        # After a reboot the pid may belong to another process.
        found = self.system.find_instance(self.request.instance)
        if found and found.pid == self.instance.pid and not self.request.shared:
            self._end_instance()
        if self.host_state.generation() <= self.request.generation:  # else the target has written it since
            self._give_lease()
        if not self.request.shared:
            self.system.wait_until_unused(self.request.overlay, 20)
            self._retire_overlay()
        self.state = "gone"
        self.host_state.record_event("gone", to=self.request.peer, generation=self.request.generation + 1)
        self.host_state.clear_state()

    def _give_lease(self) -> None:
        """Write the lease of the target."""
        self.host_state.write_lease(self.request.peer, self.request.generation + 1)

    def _retire_overlay(self) -> None:
        """Rename the overlay, which is stale now."""
        if self.request.second:
            self._replace_first(self.request.second)
        elif self.request.mirror and os.path.islink(self.request.overlay):
            # Without the link, what the mirror has is a stale copy (migration_target).
            remove_state(self.request.overlay)
        elif self.system.exists(self.request.overlay):
            self.system.rename(self.request.overlay, self.request.overlay + ".moved")
            self.system.flush_folder(self.request.overlay)

    def _replace_first(self, second: Second) -> None:
        """Give the second instance and its overlay the names of the first ones, which have ended; may be repeated."""
        if self.system.exists(second.overlay):
            self.system.rename(second.overlay, self.request.overlay)
            self.system.flush_folder(self.request.overlay)
        self.system.rename_instance(second.instance, self.request.instance)

    def _end_instance(self) -> None:
        apptainer = self.system.find_parent(self.instance.pid) if self.request.second else 0
        try:
            # In parallel: a supervisor that ends stops its services one after the other.
            self.instance.stop_services(self.request.live, self.request.stop_wait_s)
        except (Problem, OSError) as error:
            # They keep no state, and the instance must end: the next command kills what does not stop.
            self.host_state.record_event("trouble", why=reason(error))
        self.system.run(*self.request.stop_argv, ok=range(256), timeout=self.request.stop_wait_s + 60)
        self.system.wait_until_ended(apptainer, 20)  # it removes the record of this name as its last act

    # Rollback

    def abort(self, message: Message) -> None:
        """Roll back on the coordinator's request; ``sure``: the target has confirmed that it has rolled back."""
        assert self.channel
        why = str(message.get("why", ""))
        if not message.get("sure") and self.state == "released" and self.target_answers(alone=False):
            self.host_state.record_event("given", why=why, seen="%s answers for the addresses" % self.request.peer)
            self._finish()
            raise Problem("the services run on %s: it answers for the addresses" % self.request.peer, "sms status")
        if self.state == "ended" and not self._reclaim_lease(why):
            raise Problem("%s has not returned the lease of the overlay" % self.request.peer, "sms journal")
        self.restore_service(why)
        self.channel.send("back")
        self.state = "gone"

    def abandon(self, why: str) -> None:
        """End the migration from any state, so that exactly one host serves."""
        if self.state in ("gone", "read"):
            if self.state == "read":
                self.host_state.clear_state()
            return
        if self.state == "given":
            self._finish()
            return
        if self.state == "released":
            while self.system.monotonic() < self.released_at + RECLAIM_S:
                self.system.sleep(0.05)
            if self.target_answers(alone=self.channel is not None):
                self.host_state.record_event("given", why=why, seen="%s answers for the addresses" % self.request.peer)
                self._finish()
                return
            if self.host_state.was_served_by(self.request.peer):
                self.host_state.record_event("given", why=why, seen="%s served and was stopped" % self.request.peer)
                self._finish()
                return
        if self.state == "ended" and not self._reclaim_lease(why):
            return
        self.restore_service(why)

    def _reclaim_lease(self, why: str) -> bool:
        """Take the lease of a shared overlay back; return False where the target serves or still has it."""
        end = self.system.monotonic() + LEASE_S
        while self.system.monotonic() < end:
            now = self.host_state.generation()
            if self.host_state.holder() == self.request.host:
                # From here on a host that takes the lease from its previous generation is refused.
                if self.host_state.write_lease(self.request.host, now + 1, only_from=now):
                    return True
            elif self.target_answers(alone=False):
                self.host_state.record_event("given", why=why, seen="%s answers for the addresses" % self.request.peer)
                self._finish()
                return False
            self.system.sleep(0.5)
        self.host_state.record_event("lost", why=why, what="%s has the lease, but does not serve" % self.request.peer)
        self.state = "gone"
        self.host_state.clear_state()
        return False

    def target_answers(self, *, alone: bool) -> bool:
        """Return whether the target answers for the addresses: its instance has the same MAC addresses as ours.

        Args:
            alone: nobody waits for the answer.
        """
        if self.request.second:
            return self._second_serves()
        # The target attaches its ports only after ours were detached, which a killed or failed run had not done yet, or
        # has undone. Our own instance would answer.
        if any(self.system.is_attached(port, self.request.bridges[name]) for name, port in self.ports.items()):
            return False
        macs = {mac.lower() for mac in self.request.macs}
        queries = [(self.request.bridges[name], self.request.addresses[name]) for name in sorted(self.request.bridges)]
        with self.system.pool(len(queries)) as pool:
            found = list(pool.map(lambda pair: self.system.find_mac(*pair), queries))
        return any(mac in macs for mac in found)

    def _second_serves(self) -> bool:
        """Wait until the agent of the target on this host has ended; return whether the second instance serves.

        Raises:
            Problem: the agent did not end.
        """
        from appliance.agent.migration_resume import recover_target

        second = self.request.second
        assert second
        try:
            with hold_lock(second.lock, wait_s=SECOND_S):
                recover_target(second.mark, self.system)
                return self.system.exists(second.overlay)
        except Locked:
            raise Problem("the agent of the second instance did not end", "run this again")

    def restore_service(self, why: str) -> None:
        """Make the services run here as before."""
        if self.state == "released":
            self._outbid_lease()
            ports: Dict[str, Optional[str]] = {port: self.request.bridges[name] for name, port in self.ports.items()}
            with ExitStack() as stack:
                self.attempt("", lambda: stack.enter_context(self.system.ports_locked(self.request.lock)))
                self.attempt("", lambda: self.system.set_bridges(ports))
            self.attempt("", lambda: self.instance.announce(self.request.addresses))
        if self.state == "ended":
            self.system.wait_until_unused(self.request.overlay, 20)
            self.system.run(*self.request.start_argv, timeout=90)
            self.state = "gone"
            self.host_state.record_event("back", why=why)
            self.host_state.clear_state()
            return
        self.attempt("log senders cannot connect: ", self.sessions.reopen)
        names = [*(name for group in reversed(self.request.stop) for name in group), *self.request.loggers]
        self.instance.start_services(names)
        self.state = "gone"
        self.host_state.record_event("back", why=why)
        self.host_state.clear_state()

    def _outbid_lease(self) -> None:
        """Write a lease newer than one that the target may have written; leave that of any other host."""
        try:
            if self.host_state.holder() in ("", self.request.host, self.request.peer):
                self.host_state.write_lease(
                    self.request.host, max(self.request.generation, self.host_state.generation()) + 2
                )
        except OSError as error:  # a full disk must not prevent services from starting again
            self.host_state.record_event("trouble", why="the lease cannot be written: %s" % (error.strerror or error))

    def recover(self, saved: MoveMark) -> None:
        """Continue from the state that a killed run saved. After a crash of the host only the overlay is left."""
        self.state, self.ports = saved.state, saved.ports
        self.released_at = self.system.monotonic() - RECLAIM_S
        found = self.system.find_instance(self.request.instance)
        if (found and found.pid == self.instance.pid) or (not found and self.state == "ended"):
            self.abandon("the migration was killed")
            return
        if self.request.second and self.state == "given":
            self._finish()
            return
        if not found and (self.state == "given" or (self.state == "released" and self.target_answers(alone=False))):
            self._finish()
            return
        # The lease decides which host starts the instance.
        self.state = "gone"
        self.host_state.record_event("cut off", what="the host crashed, and the instance with it", was=saved.state)
        self.host_state.clear_state()

    def _enter(self, state: str, event: str, *, ports: Optional[Dict[str, str]] = None) -> None:
        self.host_state.save_state(state, ports=ports)
        self.state = state
        self.host_state.record_event(state, what=event)


def _keep(many: List[Tuple[int, bytes]], number: int, data: Any) -> bytes:
    many.append((number, bytes(data)))
    return digest_of(data)
