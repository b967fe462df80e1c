"""Target of a migration: copy the overlay, start an isolated instance on it, then take over the addresses.

The state decides what happens when the connection to the coordinator is lost:

    copy     the copy is kept for the next attempt
    placed   the copy is the overlay: it is renamed back, and kept
    started  an isolated instance runs: it is ended, the copy is kept
    up       the instance serves: it goes on

On a mirror, the overlay's path is a link into it, made when the copy is complete. Without the link, what the mirror
has is a stale copy.
"""

import hashlib
import os
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Dict, List, Optional

from appliance.agent.channel import Channel
from appliance.agent.chunk_frames import decode_frames
from appliance.agent.clone import clone_chunks, copy_same
from appliance.agent.host_state import HostState
from appliance.agent.instance import Instance
from appliance.agent.machine import Handler, StateMachine, follow_to_the_end
from appliance.agent.protocol import Problem, field, read_request
from appliance.agent.store import CHUNK, ZERO, Damage, Reader, Store, count_chunks, digest_of, disk_error
from appliance.agent.system import SYSTEM, System
from appliance.agent.take import host_locked
from appliance.shared.files import free_bytes, sync_folder, write_at
from appliance.shared.migration import MoveMark, TargetRequest
from appliance.shared.overlay import MarkOverlay, mark_path
from appliance.shared.secret import secret_archive
from appliance.shared.wire import Message

ARMED_S = 2.0
"""It attaches its ports within so many seconds of reporting that it is armed, or never: the source relies on that."""
PORTS_LIMIT_S = 2.9
"""Less than ``migration_source.RECLAIM_S``: after that the source may ask who answers."""


def run_target(request: Dict[str, Any]) -> Dict[str, Any]:
    """Follow the coordinator's messages until the services container serves here, or all is rolled back.

    Raises:
        Problem: the migration failed, and was rolled back.
    """
    follow_to_the_end()
    given = read_request(TargetRequest, request)
    with host_locked(given.lock):
        target = MigrationTarget(given, Channel())
        target.begin()
        return target.run()


class MigrationTarget(StateMachine):
    """The target's state machine of one migration."""

    SIDE = "arrive"
    QUIET = ("parcels",)
    ENDED = ("done",)

    def __init__(self, request: TargetRequest, channel: Optional[Channel], system: System = SYSTEM) -> None:
        StateMachine.__init__(self, channel, system)
        self.request = request
        self.host_state = HostState(request, self.SIDE, self.system)
        self.overlay = request.overlay
        # The file itself: on a mirror, the overlay's path is a link to it.
        self.file = os.path.join(request.mirror, os.path.basename(self.overlay)) if request.mirror else self.overlay
        self.incoming = self.file + ".incoming"
        self.generation = request.generation
        self.state = "copy"
        self.descriptor = -1
        self.size = 0
        self.digests = bytearray()
        self.armed_at = 0.0
        self.warning = ""
        self.inode = 0
        # Not the name of one that was set aside because another host took over, which a rollback must not restore.
        self.replaced = ".past-%d-replaced" % self.generation
        self.ports: Dict[str, str] = {}
        self.instance: Optional[Instance] = None
        self.flushed: "Optional[Future[None]]" = None

    def run(self) -> Dict[str, Any]:
        """Handle messages until the migration has ended."""
        try:
            return StateMachine.run(self)
        except OSError as error:
            raise disk_error(error, error.filename or self.incoming)

    def handlers(self) -> Dict[str, Handler]:
        """Return the function of each message."""
        return {
            "build": self.build,
            "parcels": self.store_chunks,
            "verify": self.verify,
            "place": self.put_in_place,
            "seed": self.seed,
            "start": self.start,
            "probe": self.probe,
            "ask": self.run_command,
            "unseen": self.check_unanswered,
            "flush": self.flush,
            "arm": self.arm,
            "up": self.take_over,
            "tails": self.append_logs,
            "commit": self.commit,
            "abort": self.abort,
        }

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the history."""
        self.host_state.record_event(event, **facts)

    def begin(self) -> None:
        """Check that no other run has changed the lease here since the migration was planned; report to be ready.

        Raises:
            Problem: one has. Nothing has been done.
        """
        assert self.channel
        self.host_state.check_plan(holds=False)
        self.channel.send("ready")

    # The copy

    def build(self, message: Message) -> None:
        """Build the copy from chunks that are here already; request the others."""
        assert self.channel
        self.size = field(message, "size", int)
        self.digests = bytearray(self.channel.read_body(message))
        count = count_chunks(self.size)
        if len(self.digests) != count * 32:
            raise Problem("received %d bytes of digests for %d chunks" % (len(self.digests), count))
        self.host_state.save_state("copy")
        self.host_state.record_event("copy", bytes=self.size)
        os.makedirs(os.path.dirname(self.overlay), 0o700, exist_ok=True)
        if self.request.mirror:
            self._check_mirror()
        if os.path.lexists(self.incoming):
            self.system.rename(self.incoming, self.file + ".partial")
        self.descriptor = os.open(self.incoming, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        missing = {number for number in range(count) if self._digest(number) != ZERO}
        used = len(missing)
        if self.request.base:
            self._from_base(missing)
        else:
            os.ftruncate(self.descriptor, self.size)
            for path in self._paths():
                for base in (path, path + ".moved", path + ".partial"):
                    self._from_file(base, missing)
            self._from_store(missing)
        bits = bytearray((count + 7) // 8)
        for number in missing:
            bits[number // 8] |= 1 << number % 8
        self._check_room(len(missing) * CHUNK)
        self.channel.send("wanted", bits, chunks=len(missing), used=used)

    def _paths(self) -> List[str]:
        """Return the file and, on a mirror, the overlay's path, where an overlay of before the mirror may be."""
        return [self.file, self.overlay] if self.request.mirror else [self.overlay]

    def _check_mirror(self) -> None:
        """Check that the mirror is mounted, and rename a stale copy that it has.

        Raises:
            Problem: it is not: the copy would be written to another file system.
        """
        if not self.system.is_mounted(self.request.mirror):
            raise Problem("the mirror at %s is not mounted" % self.request.mirror, "sms overlay mirror status")
        if not os.path.islink(self.overlay) and self.system.exists(self.file):
            self.system.rename(self.file, self.file + ".moved")
            # Else a power failure could leave it under a link that was made later.
            sync_folder(self.request.mirror)

    def _digest(self, number: int) -> bytes:
        return bytes(self.digests[number * 32 : number * 32 + 32])

    def _from_base(self, missing: "set[int]") -> None:
        """Copy the chunks of the overlay that the source uses on this host, by reflink where that is possible."""
        found = clone_chunks(self.request.base, self.descriptor, self.size, self._digest)
        if found is None:
            self._from_file(self.request.base, missing)
        else:
            missing -= found

    def _from_file(self, path: str, missing: "set[int]") -> None:
        """Copy chunks that an older copy has at the same offset."""
        copy_same(path, self.size, self._digest, self._put, missing)

    def _from_store(self, missing: "set[int]") -> None:
        """Copy chunks that the newest snapshot here has."""
        root = self.request.store
        if not missing or not os.path.isdir(root):
            return
        store = Store(root)
        try:
            with store.reading():
                verified = [one for one in store.list()[0] if one.verified]
                if not verified:
                    return
                with Reader(verified[-1]) as reader:
                    known = {reader.digest(number): number for number in range(reader.count)}
                    for number in sorted(missing):
                        at = known.get(self._digest(number))
                        if at is not None and reader.length(at) == self._length(number):
                            self._put(number, reader.read(at))
                            missing.discard(number)
        except (Damage, Problem):
            return  # damaged chunks are fetched from the source

    def _length(self, number: int) -> int:
        return min(CHUNK, self.size - number * CHUNK)

    def _put(self, number: int, data: bytes) -> None:
        if len(data) != self._length(number):
            raise Problem("received chunk %d with %d bytes" % (number, len(data)))
        write_at(self.descriptor, data, number * CHUNK)

    def _check_room(self, wanted: int) -> None:
        free = free_bytes(self.descriptor)
        if free < wanted + (16 << 20):
            raise Problem(
                "the file system of %s has %d MiB free, %d are needed"
                % (self.incoming, free >> 20, (wanted >> 20) + 16),
                "make room on %s, then run it again" % self.request.host,
            )

    def store_chunks(self, message: Message) -> None:
        """Write the received chunks into the copy."""
        assert self.channel
        for number, data, digest in decode_frames(self.channel.read_body(message)):
            if not 0 <= number < len(self.digests) // 32:
                raise Problem("received chunk %d of %d" % (number, len(self.digests) // 32))
            self._put(number, data or bytes(self._length(number)))
            self.digests[number * 32 : number * 32 + 32] = digest

    def verify(self, message: Message) -> None:
        """Read the whole copy back from the disk, and verify it against the digests."""
        assert self.channel
        os.fsync(self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        count = len(self.digests) // 32
        for number in range(count):
            digest = self._digest(number)
            if digest != ZERO and digest_of(os.pread(self.descriptor, CHUNK, number * CHUNK)) != digest:
                self.system.unlink(self.incoming)
                raise Problem(
                    "chunk %d of the copy of the overlay is not what was sent" % number,
                    "is the disk of %s failing? run it again" % self.request.host,
                )
        self.channel.send("verified")

    def put_in_place(self, message: Message) -> None:
        """Rename the complete copy to the overlay; keep an existing overlay as ``replaced``."""
        assert self.channel
        if self.request.prepared:
            self._take_prepared()
        elif hashlib.sha256(self.digests).hexdigest() != field(message, "digests", str):
            raise Problem("the copy on %s is not the overlay: the digests differ" % self.request.host, "run it again")
        self.inode = self.system.inode(self.descriptor)
        self._save_state("placed")
        self.state = "placed"
        for path in self._paths():
            if self.system.exists(path) and self.request.base:
                self.system.unlink(path)  # of a switch that a crash has ended: it never served
            elif self.system.exists(path):
                # Not left behind by a migration from here: it may hold data that exists nowhere else.
                self.system.rename(path, path + self.replaced)
                self.system.flush_folder(path)
                kept = path + self.replaced
                self.system.note("note: %s had another overlay; it is kept as %s" % (self.request.host, kept))
        self.system.rename(self.incoming, self.file)
        if self.request.mirror and not os.path.islink(self.overlay):
            # Relative, because hosts may mount the folder at other paths.
            os.symlink(os.path.relpath(self.file, os.path.dirname(self.overlay)), self.overlay)
        # The instance starts meanwhile; ``flush`` waits for it.
        self.flushed = self.system.pool(1).submit(self._flush)
        self.channel.send("placed")

    def _take_prepared(self) -> None:
        """Use the prepared copy, after a killed run has left another one."""
        self.host_state.save_state("copy")
        if os.path.lexists(self.incoming):
            self.system.rename(self.incoming, self.file + ".partial")
        self.system.rename(self.request.prepared, self.incoming)
        self.descriptor = os.open(self.incoming, os.O_RDWR | os.O_CLOEXEC)

    def _flush(self) -> None:
        """Flush the copy and its name: the lease must not name an overlay that a power failure takes away."""
        os.fsync(self.descriptor)
        for path in self._paths():
            self.system.flush_folder(path)

    def seed(self, message: Message) -> None:
        """Run a command that reads the site's files and writes them into the copy; send its output."""
        assert self.channel
        data = secret_archive(self.channel.read_body(message))
        self.channel.send("seeded", self.system.run(*field(message, "argv", list), stdin=data, timeout=120))

    # The instance

    def start(self, message: Message) -> None:
        """Start the instance on bridges without other ports; replace what shall be a macvlan interface.

        CNI cannot start it with one: its plugin announces the address at once.
        """
        assert self.channel
        began = self.system.monotonic()
        if self.request.shared and not self.host_state.write_lease(
            self.request.host, self.generation + 1, only_from=self.generation
        ):
            raise Problem("the lease of the shared overlay has changed meanwhile", "sms status", 3)
        self._save_state("started")
        self.state = "started"
        self.host_state.record_event("started", what="an isolated instance")
        self.system.run(*field(message, "argv", list), timeout=60)
        self.instance = self.system.find_instance(self.request.instance)
        if not self.instance:
            raise Problem("the instance ended as soon as it had started")
        self.instance.replace_interfaces(self.request.macvlan)
        self.ports = self.instance.ports(sorted(self.request.bridges))
        self._save_state("started")
        self.channel.send("started", pid=self.instance.pid, took_s=self.system.monotonic() - began)

    def _inside(self, *argv: str) -> List[str]:
        """Return the command line that runs ``argv`` inside the container, confined as its processes are.

        nsenter would run a program of the overlay with all capabilities of this process.
        """
        return [*self.request.inside, *argv]

    def probe(self, message: Message) -> None:
        """Run the probe inside; send its output, a line per service."""
        assert self.channel and self.instance
        argv = self._inside(*field(message, "argv", list))
        limit = float(field(message, "limit_s", (int, float)))  # type: ignore[arg-type]
        self.channel.send("probed", self.system.run(*argv, ok=(0, 4), timeout=limit))

    def run_command(self, message: Message) -> None:
        """Run a command inside; send its output."""
        assert self.channel and self.instance
        output = self.system.run(*self._inside(*field(message, "argv", list)), ok=range(256), timeout=30)
        self.channel.send("told", output)

    def flush(self, message: Message) -> None:
        """Wait until the copy is on the disk. ``take_over`` must not: no host has the addresses then."""
        assert self.channel
        if self.flushed:
            self.flushed.result()
        self.channel.send("flushed")

    def arm(self, message: Message) -> None:
        """Load the connections and neighbours known so far; ``take_over`` is allowed for ``ARMED_S`` from now on.

        Raises:
            Problem: the copy is not on the disk yet.
        """
        assert self.channel and self.instance
        if self.flushed and not self.flushed.done():
            raise Problem("the disk of %s has not written the copy of the overlay yet" % self.request.host)
        lines = self.channel.read_body(message).decode(errors="replace").splitlines()
        self.warning = self.system.load_connections(self.instance, lines)
        self.system.load_neighbours(self.instance, field(message, "neighbours", list, []))
        self.armed_at = self.system.boot_time()
        self.channel.send("armed")

    def take_over(self, message: Message) -> None:
        """Take over the connections, the lease and the addresses."""
        assert self.channel and self.instance
        lines = self.channel.read_body(message).decode(errors="replace").splitlines()
        self.generation += field(message, "leap", int, 0)
        began = self.system.monotonic()
        warning = self.system.load_connections(self.instance, lines) or self.warning
        if not self.host_state.write_lease(self.request.host, self.generation + 1):
            raise Problem("another host has taken the lease meanwhile", "sms status", 3)
        self._save_state("up")
        # Nothing slow, such as disk access, may come between reading the clock and attaching the ports.
        if self.system.boot_time() > self.armed_at + ARMED_S:
            raise Problem("the request to take over came too late", "is the network slow? run it again")
        self.state = "up"
        try:
            self.system.set_bridges({port: self.request.bridges[name] for name, port in self.ports.items()}, timeout=1)
            if self.system.boot_time() > self.armed_at + PORTS_LIMIT_S:
                raise Problem(
                    "the ports were attached to the bridges too late", "is %s overloaded?" % self.request.host
                )
        except Problem:
            # One address of two is worse than none: the source completes the migration when any of them answers.
            self.detach_ports()
            raise
        took = self.system.monotonic() - began
        self.instance.announce(self.request.addresses)
        self.host_state.record_event("up", generation=self.generation + 1)
        self.channel.send("up", up_s=took, trouble=warning)

    def append_logs(self, message: Message) -> None:
        """Append the last log lines of the source to the logs here."""
        assert self.channel and self.instance
        data = self.channel.read_body(message)
        for one in field(message, "files", list):
            part, data = data[: one["bytes"]], data[one["bytes"] :]
            path = os.path.normpath("/" + one["path"].lstrip("/"))  # normpath keeps two leading slashes
            if part and path.startswith("/var/log/"):
                # Inside the container, so that no symbolic link leads out of it.
                argv = self._inside("dd", "of=" + path, "oflag=append", "conv=notrunc", "bs=1M", "status=none")
                self.system.run(*argv, stdin=part)
        self.channel.send("appended")

    def commit(self, message: Message) -> None:
        """Commit the migration: remove what only a rollback needs."""
        assert self.channel
        self._commit()
        self.channel.send("committed")

    def _commit(self) -> None:
        self.system.flush(self.overlay)
        for path in self._paths():
            self.system.flush_folder(path)
            for left in (".partial", ".moved"):
                if self.system.exists(path + left):
                    self.system.unlink(path + left)
        self._mark_overlay()
        self._remove_holds()
        if self.instance and self.request.gate:  # the coordinator may be gone
            self.system.run(*self._inside("nft", "delete", "table", "inet", self.request.gate), ok=range(256))
        if self.instance and self.request.ask_nodes and self.request.inside:
            try:
                self.system.run(*self._inside(*self.request.ask_nodes), ok=range(256), timeout=20)
            except Problem as problem:  # slurmctld asks them later anyway
                self.host_state.record_event("trouble", why=problem.message)
        self.state = "done"
        self.host_state.record_event("arrived", generation=self.generation + 1)
        self.host_state.clear_state()

    def _mark_overlay(self) -> None:
        """Record the generation of the lease that this migration has taken."""
        ours = self.host_state.holder() == self.request.host
        generation = max(self.generation + 1, self.host_state.generation() if ours else 0)
        try:
            # On the source's host, it is that of the overlay which this one replaces next.
            mark = MarkOverlay(mark_path(self.request.base or self.overlay), self.request.cluster, generation)
            self.system.perform(mark)
        except OSError as error:  # the lease shows the same for as long as this host holds it
            self.host_state.record_event("trouble", why="the overlay cannot be marked: %s" % (error.strerror or error))

    def check_unanswered(self, message: Message) -> None:
        """Ask for ``for_s`` seconds whether any host answers for the addresses; send its MAC address."""
        assert self.channel
        end = self.system.monotonic() + float(field(message, "for_s", (int, float)))  # type: ignore[arg-type]
        found = ""
        while self.system.monotonic() < end and not found:
            for name in sorted(self.request.bridges):
                found = found or self.system.find_mac(self.request.bridges[name], self.request.addresses[name])
        self.channel.send("seen", mac=found)

    def _remove_holds(self) -> None:
        for bridge in self.request.holds:
            self.system.run("ip", "link", "delete", bridge, ok=range(256))

    # Rollback

    def abort(self, message: Message) -> None:
        """Roll back on the coordinator's request.

        Raises:
            Problem: an instance with an overlay of its own serves here; what it has acknowledged would be lost.
        """
        assert self.channel
        if self.state == "up" and not self.request.shared and not message.get("gated"):
            raise Problem("the services container serves on %s by now" % self.request.host, "sms status")
        self.roll_back(str(message.get("why", "")))
        self.channel.send("aborted")

    def abandon(self, why: str) -> None:
        """End the migration from any state: an instance that serves goes on, anything else is rolled back."""
        if self.state == "up":
            self._commit()
        elif self.state != "done":
            self.roll_back(why)

    def roll_back(self, why: str) -> None:
        """End the instance; keep the copy for the next attempt."""
        if self.state == "up":
            self.attempt("", self.detach_ports)  # the end of the instance does it, too
        if self.state == "started" and self.request.base:
            with suppress(OSError):
                self._save_state("started")  # not up, for the next run: it is ended from here on
        if self.state in ("started", "up"):
            argv, limit_s = self.request.stop_argv, 300.0
            if not self.request.shared:  # its overlay is a copy that is not used: no need for an orderly stop
                argv, limit_s = ("apptainer", "instance", "stop", "--force", self.request.instance), 30.0
            self.system.run(*argv, ok=range(256), timeout=limit_s)
            self.system.wait_until_unused(self.file, 20)
        # Before the copy is renamed: a stored state "up" stands for the overlay that this lease names.
        if not self.request.shared and self._wrote_lease():
            # The instance never served here. An older lease is none of its business: the newest of all hosts counts,
            # and a full disk must not prevent the end of this.
            if self.request.prepared:  # the peer is not an admin host: it cannot hold a lease
                self.host_state.free_lease(self.host_state.generation())
            else:
                self.host_state.write_lease(self.request.peer, self.host_state.generation())
        if self.request.shared:
            if self.state in ("started", "up"):
                self.host_state.write_lease(self.request.peer, self.generation + 2)
        elif self.state in ("placed", "started", "up") and self._is_copy(self.file):
            self._keep(self.file)
        elif self.system.exists(self.incoming):
            self._keep(self.incoming)
        for path in self._paths():
            if self.system.exists(path + self.replaced) and not self.system.exists(path):
                self.system.rename(path + self.replaced, path)  # on a mirror it may replace a link that leads nowhere
            if os.path.isdir(os.path.dirname(path)):
                self.system.flush_folder(path)
        if self.request.mirror:
            self._remove_dangling_link()
        self._remove_holds()
        self.state = "done"
        self.host_state.record_event("backed out", why=why)
        self.host_state.clear_state()

    def _remove_dangling_link(self) -> None:
        path = self.overlay
        if os.path.islink(path) and not self.system.exists(path) and self.system.is_mounted(self.request.mirror):
            self.system.unlink(path)
            self.system.flush_folder(path)

    def _keep(self, copy: str) -> None:
        """Keep a copy for the next attempt, unless the source of its chunks is on this host."""
        if self.request.base:
            self.system.unlink(copy)
        else:
            self.system.rename(copy, self.file + ".partial")

    def _wrote_lease(self) -> bool:
        """Return whether this migration has taken the lease; before ``take_over``, another run has."""
        newer = self.host_state.generation() > self.generation and self.host_state.holder() == self.request.host
        return newer and self.state in ("started", "up")

    def _is_copy(self, path: str) -> bool:
        """Return whether a file is this migration's copy; a restore may have replaced the overlay since."""
        try:
            return self.system.inode(path) == self.inode
        except OSError:
            return False

    def _save_state(self, state: str) -> None:
        self.host_state.save_state(state, ports=self.ports, inode=self.inode)

    def detach_ports(self) -> None:
        """Detach the ports from the bridges; the instance is isolated again."""
        self.system.set_bridges(dict.fromkeys(self.ports.values()))
        self.state = "started"

    def recover(self, saved: MoveMark) -> None:
        """Continue from the state that a killed run saved: an instance that serves goes on, an isolated one is ended.

        After a crash of the host no instance is left. One in state up was complete and may have served: its overlay
        stays, and the lease decides whether it is the newest. With a shared overlay the lease stays, too: the source
        may have stopped waiting for it, and then no host would start.

        Raises:
            Problem: the mirror is not mounted; the stored state is kept.
        """
        if self.request.mirror and os.path.islink(self.overlay) and not self.system.is_mounted(self.request.mirror):
            raise Problem("the mirror at %s is not mounted" % self.request.mirror, "sms overlay mirror status")
        self.state, self.ports, self.inode = saved.state, saved.ports, saved.inode
        self.instance = self.system.find_instance(self.request.instance)
        gone = self.request.base and not self.system.exists(self.overlay)
        if self.instance:
            ports = self.instance.ports(sorted(self.request.bridges))
            attached = all(self.system.is_attached(port, self.request.bridges[name]) for name, port in ports.items())
            self.state, self.ports = "up" if attached else "started", ports
        elif self.state == "up" and (gone or self._is_copy(self.file + ".partial")):
            self.state = "started"  # the crash interrupted its rollback
        elif self.state == "started" and self.request.shared and self.host_state.holder() == self.request.host:
            self._remove_holds()
            self.state = "done"
            self.host_state.record_event("cut off", what="the host crashed; it has the lease", was=saved.state)
            self.host_state.clear_state()
            return
        self.abandon("the migration was killed")
