"""The target's part of a move: a copy of the overlay, an instance on it whose ports lead nowhere, then the addresses.

How far it is decides what happens when who moves it is gone:

    copy     the copy is kept for the next try
    started  an instance runs, unseen: it ends
    up       it serves, and goes on
"""

import hashlib
import os
import signal
import time
from typing import Any, Dict, List, Optional

from appliance.agent import ends, words
from appliance.agent.ends import Instance, Place
from appliance.agent.line import Gone, Line
from appliance.agent.parcels import open_parcels
from appliance.agent.store import CHUNK, ZERO, Damage, Reader, Store, count_chunks, digest_of, full
from appliance.agent.take import locked
from appliance.agent.words import Problem, field
from appliance.shared.files import free_bytes, sync_folder

ARMED_S = 2.0
"""It goes up within so many seconds of its word that it could, or never: the source relies on it."""
SURE_S = 2.9
"""Less than ``leave.RECLAIM_S``: by then the source may ask who answers."""
CLOCK_BOOTTIME = 7
"""Of clock_gettime(2); it goes on while a machine is suspended. Python 3.6 has no name for it."""


def boot_time() -> float:
    """Seconds since the machine was switched on, those that it slept included."""
    return time.clock_gettime(CLOCK_BOOTTIME)


def arrive(request: Dict[str, Any]) -> Dict[str, Any]:
    """Do as the line says, until the appliance serves here or nothing of it is left.

    Raises:
        Problem: it cannot run here; nothing of it does.
    """
    words.CHANNEL[0] = 2
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with locked(field(request, "lock", str)):
        return Arrive(request, Line()).run()


class Arrive:
    """One move, seen from its target."""

    def __init__(self, request: Dict[str, Any], line: Optional[Line]) -> None:
        self.place = Place(request, "arrive")
        self.line = line
        self.overlay: str = field(request, "overlay", str)
        self.incoming = self.overlay + ".incoming"
        self.bridges: Dict[str, str] = field(request, "bridges", dict)
        self.holds: List[str] = field(request, "holds", list)
        self.addresses: Dict[str, str] = field(request, "addresses", dict)
        self.name: str = field(request, "instance", str)
        self.ask_nodes: List[str] = field(request, "ask_nodes", list, [])
        self.generation: int = field(request, "generation", int)
        self.shared = self.place.shared
        self.state = "copy"
        self.descriptor = -1
        self.size = 0
        self.digests = bytearray()
        self.armed_at = 0.0
        self.trouble = ""
        self.inode = 0
        self.past = "%s.past-%d" % (self.overlay, self.generation)
        self.ports: Dict[str, str] = {}
        self.instance: Optional[Instance] = None

    def run(self) -> Dict[str, Any]:
        """All of it."""
        assert self.line
        try:
            while self.state != "done":
                self._do(self.line.hear())
        except Gone:
            self.abandon("who moved it is gone")
        except BaseException as error:
            words.step("abandon", "")
            self.abandon(getattr(error, "message", "") or str(error) or type(error).__name__)
            if isinstance(error, OSError):
                raise full(error, self.incoming)
            raise
        return {"state": self.state}

    def _do(self, message: Dict[str, Any]) -> None:
        handlers = {
            "build": self.build,
            "parcels": self.store,
            "verify": self.verify,
            "place": self.put_in_place,
            "start": self.start,
            "probe": self.probe,
            "ask": self.ask,
            "unseen": self.unseen,
            "arm": self.arm,
            "up": self.go_up,
            "tails": self.append,
            "commit": self.commit,
            "abort": self.abort,
        }
        if message.get("do") != "parcels":
            words.step("arrive." + str(message.get("do")), "")
        handlers[message["do"]](message)

    # The copy

    def build(self, message: Dict[str, Any]) -> None:
        """Make the copy out of what is here already; say what is wanted besides."""
        assert self.line
        self.size = field(message, "size", int)
        self.digests = bytearray(self.line.body(message))
        count = count_chunks(self.size)
        if len(self.digests) != count * 32:
            raise Problem("%d bytes of digests came for %d chunks" % (len(self.digests), count))
        self.place.reached("copy")
        self.place.note("copy", bytes=self.size)
        os.makedirs(os.path.dirname(self.overlay), 0o700, exist_ok=True)
        if os.path.lexists(self.incoming):
            os.rename(self.incoming, self.overlay + ".partial")
        self.descriptor = os.open(self.incoming, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self.descriptor, self.size)
        missing = {number for number in range(count) if self._digest(number) != ZERO}
        used = len(missing)
        for base in (self.overlay, self.overlay + ".moved", self.overlay + ".partial"):
            self._from_file(base, missing)
        self._from_store(missing)
        bits = bytearray((count + 7) // 8)
        for number in missing:
            bits[number // 8] |= 1 << number % 8
        self._check_room(len(missing) * CHUNK)
        self.line.say("wanted", bits, chunks=len(missing), used=used)

    def _digest(self, number: int) -> bytes:
        return bytes(self.digests[number * 32 : number * 32 + 32])

    def _from_file(self, path: str, missing: "set[int]") -> None:
        """Take what an older copy has at the same place."""
        try:
            base = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            for number in sorted(missing):
                data = os.pread(base, CHUNK, number * CHUNK)
                if len(data) == self._length(number) and digest_of(data) == self._digest(number):
                    self._put(number, data)
                    missing.discard(number)
        finally:
            os.close(base)

    def _from_store(self, missing: "set[int]") -> None:
        """Take what the newest snapshot here has."""
        root = field(self.place.request, "store", str)
        if not missing or not os.path.isdir(root):
            return
        store = Store(root)
        try:
            with store.reading():
                verified = [one for one in store.list()[0] if one.verified]
                if not verified:
                    return
                newest = max(verified, key=lambda one: float(one.manifest["taken"]))
                with Reader(newest) as reader:
                    known = {reader.digest(number): number for number in range(reader.count)}
                    for number in sorted(missing):
                        at = known.get(self._digest(number))
                        if at is not None and reader.length(at) == self._length(number):
                            self._put(number, reader.read(at))
                            missing.discard(number)
        except (Damage, Problem):
            return  # what is damaged comes from the source

    def _length(self, number: int) -> int:
        return min(CHUNK, self.size - number * CHUNK)

    def _put(self, number: int, data: bytes) -> None:
        if len(data) != self._length(number):
            raise Problem("chunk %d came with %d bytes" % (number, len(data)))
        view, at = memoryview(data), number * CHUNK
        while len(view):
            written = os.pwrite(self.descriptor, view, at)
            view, at = view[written:], at + written

    def _check_room(self, wanted: int) -> None:
        free = free_bytes(self.descriptor)
        if free < wanted + (16 << 20):
            raise Problem(
                "the file system of %s has %d MiB free, %d are needed"
                % (self.incoming, free >> 20, (wanted >> 20) + 16),
                "make room on %s, then run it again" % self.place.host,
            )

    def store(self, message: Dict[str, Any]) -> None:
        """Write chunks that have come."""
        assert self.line
        for number, data, digest in open_parcels(self.line.body(message)):
            if not 0 <= number < len(self.digests) // 32:
                raise Problem("chunk %d came, and there are %d" % (number, len(self.digests) // 32))
            self._put(number, data or bytes(self._length(number)))
            self.digests[number * 32 : number * 32 + 32] = digest

    def verify(self, message: Dict[str, Any]) -> None:
        """Read the copy from the disk, all of it, and hold it against the digests."""
        assert self.line
        os.fsync(self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        count = len(self.digests) // 32
        for number in range(count):
            digest = self._digest(number)
            if digest != ZERO and digest_of(os.pread(self.descriptor, CHUNK, number * CHUNK)) != digest:
                os.unlink(self.incoming)
                raise Problem(
                    "the copy on %s is not what was sent, at chunk %d" % (self.place.host, number),
                    "is the disk of %s failing? run it again" % self.place.host,
                )
        self.line.say("verified")

    def put_in_place(self, message: Dict[str, Any]) -> None:
        """The copy is whole: it becomes the overlay."""
        assert self.line
        said = field(message, "digests", str)
        if hashlib.sha256(self.digests).hexdigest() != said:
            raise Problem("the copy on %s is not the overlay: the digests differ" % self.place.host, "run it again")
        self.inode = os.fstat(self.descriptor).st_ino
        self._reached("placed")
        self.state = "placed"
        if os.path.exists(self.overlay):
            # Not what a move from here has left: it may hold what nobody else has.
            os.rename(self.overlay, self.past)
            words.note("note: %s had an overlay of its own; it is kept as %s" % (self.place.host, self.past))
        os.rename(self.incoming, self.overlay)
        self.line.say("placed")

    # The instance

    def start(self, message: Dict[str, Any]) -> None:
        """Start it, with its ports on bridges that lead nowhere."""
        assert self.line
        began = time.monotonic()
        if self.shared and not self.place.hand_lease(self.place.host, self.generation + 1, only_from=self.generation):
            raise Problem("the lease of the shared overlay has changed meanwhile", "sms status", 3)
        self._reached("started")
        self.state = "started"
        self.place.note("started", what="an instance that nobody sees yet")
        ends.run(*field(message, "argv", list), timeout=60)
        self.instance = ends.find_instance(self.name)
        if not self.instance:
            raise Problem("the instance ended as soon as it had started")
        self.ports = self.instance.ports(sorted(self.bridges))
        self._reached("started")
        self.line.say("started", pid=self.instance.pid, took_s=time.monotonic() - began)

    def probe(self, message: Dict[str, Any]) -> None:
        """Ask services inside; what they say, a line each."""
        assert self.line and self.instance
        argv = self.instance.argv(*field(message, "argv", list))
        limit = float(field(message, "limit_s", (int, float)))  # type: ignore[arg-type]
        self.line.say("probed", ends.run(*argv, ok=(0, 4), timeout=limit))

    def ask(self, message: Dict[str, Any]) -> None:
        """Run a command inside; what it prints."""
        assert self.line and self.instance
        said = ends.run(*self.instance.argv(*field(message, "argv", list)), ok=range(256), timeout=30)
        self.line.say("told", said)

    def arm(self, message: Dict[str, Any]) -> None:
        """All is ready: from now on it may go up, for a moment. What can be known before is."""
        assert self.line and self.instance
        lines = self.line.body(message).decode(errors="replace").splitlines()
        self.trouble = ends.load_connections(self.instance, lines)
        ends.load_neighbours(self.instance, field(message, "neighbours", list, []))
        self.armed_at = boot_time()
        self.line.say("armed")

    def go_up(self, message: Dict[str, Any]) -> None:
        """Take the connections, the lease and the addresses."""
        assert self.line and self.instance
        lines = self.line.body(message).decode(errors="replace").splitlines()
        self.generation += field(message, "leap", int, 0)
        began = time.monotonic()
        trouble = ends.load_connections(self.instance, lines) or self.trouble
        if not self.place.hand_lease(self.place.host, self.generation + 1):
            raise Problem("another host has taken the lease meanwhile", "sms status", 3)
        self._reached("up")
        # Nothing that may take long, as a disk can, comes between the look at the clock and the ports.
        if boot_time() > self.armed_at + ARMED_S:
            raise Problem("the word to go up came too late", "is the network slow? run it again")
        self.state = "up"
        try:
            ends.set_bridges({port: self.bridges[name] for name, port in self.ports.items()}, timeout=1)
            if boot_time() > self.armed_at + SURE_S:
                raise Problem("the ports were put on the bridges too late", "is %s overloaded?" % self.place.host)
        except Problem:
            # Half of it is worse than nothing: the source asks who answers, by any of the addresses.
            self.back_off()
            raise
        took = time.monotonic() - began
        self.instance.announce(self.addresses)
        self.place.note("up", generation=self.generation + 1)
        self.line.say("up", up_s=took, trouble=trouble)

    def append(self, message: Dict[str, Any]) -> None:
        """Lines of logs that the source received last."""
        assert self.line and self.instance
        data = self.line.body(message)
        for one in field(message, "files", list):
            part, data = data[: one["bytes"]], data[one["bytes"] :]
            path = os.path.normpath("/" + one["path"].lstrip("/"))  # two slashes at the front would stay
            if part and path.startswith("/var/log/"):
                # Through the container's own root, so that no link in it leads out of it.
                argv = self.instance.argv("sh", "-c", 'exec cat >>"$1"', "append", path)
                ends.run(*argv, given=part)
        self.line.say("appended")

    def commit(self, message: Dict[str, Any]) -> None:
        """It serves, and stays."""
        assert self.line
        self._settle()
        self.line.say("committed")

    def _settle(self) -> None:
        descriptor = os.open(self.overlay, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(os.path.dirname(self.overlay))
        for left in (".partial", ".moved"):
            if os.path.exists(self.overlay + left):
                os.unlink(self.overlay + left)
        self._remove_holds()
        if self.instance and self.ask_nodes:
            try:
                ends.run(*self.instance.argv(*self.ask_nodes), ok=range(256), timeout=20)
            except Problem as problem:  # they are asked sooner or later
                self.place.note("trouble", why=problem.message)
        self.state = "done"
        self.place.note("arrived", generation=self.generation + 1)
        self.place.over()

    def unseen(self, message: Dict[str, Any]) -> None:
        """Whether nobody answers for the addresses, for as long as the message says; nobody here does, as yet."""
        assert self.line
        end = time.monotonic() + float(field(message, "for_s", (int, float)))  # type: ignore[arg-type]
        found = ""
        while time.monotonic() < end and not found:
            for name in sorted(self.bridges):
                found = found or ends.neighbour(self.bridges[name], self.addresses[name])
        self.line.say("seen", mac=found)

    def _remove_holds(self) -> None:
        for bridge in self.holds:
            ends.run("ip", "link", "delete", bridge, ok=range(256))

    # The way back

    def abort(self, message: Dict[str, Any]) -> None:
        """Nothing of it is to be left here."""
        assert self.line
        self.back_out(str(message.get("why", "")))
        self.line.say("aborted")

    def abandon(self, why: str) -> None:
        """Whatever has been begun: nothing that serves is to end, nothing that does not is to be left."""
        if self.state == "up":
            self._settle()
        elif self.state != "done":
            self.back_out(why)

    def back_out(self, why: str) -> None:
        """End the instance, keep the copy for the next try."""
        if self.state == "up":
            self.back_off()
        if self.state in ("started", "up"):
            if self.shared:
                stop = field(self.place.request, "stop_argv", list)
                ends.run(*stop, ok=range(256), timeout=300)
            else:
                # It is a copy, and thrown away: no need to end its daemons one by one.
                ends.run("apptainer", "instance", "stop", "--force", self.name, ok=range(256), timeout=30)
            ends.wait_free(self.overlay, 20)
        if self.shared:
            if self.state in ("started", "up"):
                self.place.hand_lease(self.place.peer, self.generation + 2)
        elif self.state in ("placed", "started", "up") and self._is_ours():
            os.rename(self.overlay, self.overlay + ".partial")
        elif os.path.exists(self.incoming):
            os.rename(self.incoming, self.overlay + ".partial")
        if os.path.exists(self.past) and not os.path.exists(self.overlay):
            os.rename(self.past, self.overlay)
        if not self.shared and self.place.holder() == self.place.host:
            # It had been written that it is here; it never was.
            self.place.hand_lease(self.place.peer, self.place.generation())
        self._remove_holds()
        self.state = "done"
        self.place.note("backed out", why=why)
        self.place.over()

    def _is_ours(self) -> bool:
        """Whether the overlay is the copy that this move has put there; a restore may have put another there since."""
        try:
            return os.stat(self.overlay).st_ino == self.inode
        except OSError:
            return False

    def _reached(self, state: str) -> None:
        self.place.reached(state, ports=self.ports, inode=self.inode)

    def back_off(self) -> None:
        """Take the ports off the bridges; nobody sees the instance."""
        ends.set_bridges(dict.fromkeys(self.ports.values()))
        self.state = "started"

    def take_up(self, told: Dict[str, Any]) -> None:
        """Go on where a killed run was: what is seen stays, what runs unseen ends.

        Where the host itself went down no instance is left. One that was up had all, and may have served: its overlay
        stays where it is, and the lease says whether that is the newest.
        """
        self.state, self.ports, self.inode = told["state"], told.get("ports", {}), told.get("inode", 0)
        self.instance = ends.find_instance(self.name)
        if self.instance:
            ports = self.instance.ports(sorted(self.bridges))
            seen = all(ends.is_port(port, self.bridges[name]) for name, port in ports.items())
            self.state, self.ports = "up" if seen else "started", ports
        self.abandon("the run that moved it was killed")
