"""The world of the model: two admin hosts, the network, the messages of one migration, and what each effect does.

A state is a tuple; an effect gets a list of its fields. Host fields are tuples of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from appliance.errors import Busy, SmsError
from appliance.host.base import Unreachable
from appliance.shared.lease import BUSY, WRITTEN, SwapLease, advance_sequence, parse_lease, peek
from appliance.shared.overlay import OverlayMark
from appliance.shared.records import to_json
from appliance.tools.move import Lost
from tests.unit.migration.model.engine import Failure, Node, State, root
from tests.unit.migration.model.hosts import cluster_of_model

HOST_A, HOST_B, CUT, TIME, CURRENT, NOTES, BUDGET, TO_SOURCE, TO_TARGET = range(9)
"""Fields of a state: both hosts; links that are cut; ticks; the newest acknowledged contents of an overlay; notes of
the model; what may still happen; the channels of a migration; then the processes."""
VERB_A, VERB_B, MOVER, SOURCE, TARGET, GUARD_A, GUARD_B = range(9, 16)
PROCESSES = {"verb-a": VERB_A, "verb-b": VERB_B, "mover": MOVER, "source": SOURCE, "target": TARGET}
GUARDS = {"a": GUARD_A, "b": GUARD_B}
UP, LEASE, FILES, INSTANCE, LOCK, MARK, HISTORY, GUARD, STORE, LEASE_LOCK, CLOCK = range(11)
"""Fields of a host: whether it is on; bytes of its lease file; files of overlays, as (name, contents, inode); its
instance; who holds its lock; the mark of a migration; open failover in the history; what its guard knows; its verified
snapshots; who holds the lock of its lease file; days that its clock is wrong."""
INODE, WRITES, ATTACHED, SERIAL = range(4)
"""Fields of an instance: its overlay; whether its services write to it; whether it is on the bridges; a number."""

AB, CA, CB, LAN = 1, 2, 4, 8
"""Links: SSH between the hosts, from the machine that runs `sms migrate` to each, and the network of the nodes."""
BLIND_A, BLIND_B, FALSE_FENCE, TAKEN_OVER, LOST_LEASE, SPLIT, OLD_SNAPSHOT, PARTED = 1, 2, 4, 8, 16, 32, 64, 128
SILENT_A, SILENT_B = 256, 512
"""Notes: the instance of a host was started without having reached the other host; the user claimed that a host is off
that is not; a migration went on without its source; a lease file was lost; there are two lines of states because of
one of these; an older snapshot than the newest was restored; the network of the nodes was cut during a migration; the
other host did not answer when the start that goes on on a host queried it last."""
OPEN, CLOSED, BROKEN, ENDED, FAILED = "open", "closed", "broken", "ended", "failed"
"""States of a channel: closed by the coordinator; broken network; the agent has ended, with a problem it reported."""
MISSING = "missing"
NEW = (0, 0)
"""Contents of a new overlay. Others are (epoch, writes): each failover begins an epoch."""
INODES = {"incoming": 10, "restored": 20, "new": 30}
"""The first inode of files created in different ways: one that is not the other never has the same."""

BLOCKED = object()
"""The effect cannot happen yet."""
Fields = list[Any]


def other(name: str) -> str:
    """Return the name of the other host."""
    return "b" if name == "a" else "a"


def host_of(fields: Fields | State, name: str) -> tuple[Any, ...]:
    """Return the fields of a host."""
    found: tuple[Any, ...] = fields[HOST_A if name == "a" else HOST_B]
    return found


def put(fields: Fields, name: str, **changes: Any) -> None:
    """Change fields of a host."""
    place = HOST_A if name == "a" else HOST_B
    values = list(fields[place])
    for key, value in changes.items():
        values[NAMES[key]] = value
    fields[place] = tuple(values)


NAMES = {
    "up": UP,
    "lease": LEASE,
    "files": FILES,
    "instance": INSTANCE,
    "lock": LOCK,
    "mark": MARK,
    "history": HISTORY,
    "guard": GUARD,
    "store": STORE,
    "lease_lock": LEASE_LOCK,
    "clock": CLOCK,
}


def overlay(files: tuple[tuple[str, Any, int], ...], slot: str) -> tuple[str, Any, int] | None:
    """Return a file by its name; None where there is none."""
    for one in files:
        if one[0] == slot:
            return one
    return None


@cache
def swap_file(data: bytes | None, request: SwapLease) -> tuple[bytes | None, str]:
    """Perform the real request on a lease file; return what it becomes, and the outcome."""
    with lease_file(data) as path:
        # Its lock is the model's.
        outcome = replace(request, path=str(path), wait_s=0.0, locked=True).perform()
        return (path.read_bytes() if path.exists() else None), outcome


@cache
def advance_file(data: bytes | None, used: int) -> tuple[bytes | None, int]:
    """Reserve a sequence number by the real code; return what the lease file becomes, and the number."""
    with lease_file(data) as path:
        number = advance_sequence(str(path), used, locked=True)
        return (path.read_bytes() if path.exists() else None), number


@contextmanager
def lease_file(data: bytes | None) -> Iterator[Path]:
    """Write a lease file, unless ``data`` is None; yield its path."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "lease")
        if data is not None:
            path.write_bytes(data)
        yield path


@cache
def mark_text(generation: int) -> bytes:
    """Return a generation mark, as the script prints it."""
    return to_json(OverlayMark(cluster_of_model().site.cluster, generation)).replace(b"\n", b"")


@cache
def is_lease(data: bytes | None) -> bool:
    """Return whether a lease file can be read; none is a lease, too."""
    try:
        return data is None or bool(parse_lease(data))
    except (ValueError, TypeError):
        return False


class World:
    """What each effect does. ``shared``: both hosts use one folder of overlays."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.effects: dict[str, Callable[..., Any]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    def folder(self, name: str) -> str:
        """Return the host whose fields hold the folder of overlays of a host."""
        return "a" if self.shared else name

    def reaches(self, fields: Fields | State, role: int, name: str) -> bool:
        """Whether a process reaches a host by SSH."""
        if not host_of(fields, name)[UP]:
            return False
        here = {VERB_A: "a", GUARD_A: "a", VERB_B: "b", GUARD_B: "b"}.get(role, "")
        if here == name or role in (SOURCE, TARGET):
            return True
        link = AB if here else CA if name == "a" else CB
        return not fields[CUT] & link

    # Lease files

    def do_query(self, fields: Fields, role: int, name: str, runs: bool) -> Any:
        """The shell command that reads a lease file, and whether an instance runs."""
        if not self.reaches(fields, role, name):
            self.note_silence(fields, role, name, silent=True)
            return Failure(Unreachable)
        host = host_of(fields, name)
        data = host_of(fields, self.folder(name))[LEASE]
        self.note_silence(fields, role, name, silent=not is_lease(data))
        head = b"1" if runs and host[INSTANCE] else b"0"
        return head + (b" none\n" if data is None else b" file\n" + data)

    def note_silence(self, fields: Fields, role: int, name: str, *, silent: bool) -> None:
        """Note whether a host answers the verb that runs on the other one."""
        here = {VERB_A: "a", VERB_B: "b"}.get(role)
        if here == other(name) and host_of(fields, here)[INSTANCE] is None:
            bit = SILENT_A if here == "a" else SILENT_B
            fields[NOTES] = fields[NOTES] & ~bit | (bit if silent else 0)

    def do_read_lease(self, fields: Fields, role: int, name: str) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        return host_of(fields, self.folder(name))[LEASE]

    def do_swap(self, fields: Fields, role: int, name: str, request: SwapLease) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        folder = self.folder(name)
        if host_of(fields, folder)[LEASE_LOCK] != (role if request.locked else 0):
            return BLOCKED if request.wait_s == float("inf") else BUSY
        before = host_of(fields, folder)[LEASE]
        after, outcome = swap_file(before, request)
        if after != before:
            put(fields, folder, lease=after)
        if outcome == WRITTEN and fields[role].key[0] == "restore" and not request.wait_s:
            self.decide(fields, name)
        return outcome

    # Locks, instances, overlays

    def do_lock(self, fields: Fields, role: int, name: str, what: str) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        place = self.folder(name) if what == "lease_lock" else name
        if host_of(fields, place)[NAMES[what]]:
            return Failure(Busy)
        put(fields, place, **{what: role})
        return None

    def do_unlock(self, fields: Fields, role: int, name: str, what: str) -> Any:
        place = self.folder(name) if what == "lease_lock" else name
        if host_of(fields, place)[NAMES[what]] == role:
            put(fields, place, **{what: 0})
        return None

    def do_find_instance(self, fields: Fields, role: int, name: str) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        found = host_of(fields, name)[INSTANCE]
        return None if found is None else (found[SERIAL], found[ATTACHED])

    def do_exists(self, fields: Fields, role: int, name: str, slot: str) -> Any:
        """The inode of a file of the folder of overlays, 0 where there is none."""
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        found = overlay(host_of(fields, self.folder(name))[FILES], slot)
        return found[2] if found else 0

    def do_stale(self, fields: Fields, role: int, name: str) -> Any:
        """Whether there is an overlay that was set aside."""
        files = host_of(fields, self.folder(name))[FILES]
        return any(one[0] == "moved" or one[0].startswith("past-") for one in files)

    def do_in_use(self, fields: Fields, role: int, name: str, slot: str) -> Any:
        """Whether the instance of this host has a file open: nothing shows the use by another host."""
        found, instance = overlay(host_of(fields, self.folder(name))[FILES], slot), host_of(fields, name)[INSTANCE]
        return bool(found and instance and instance[INODE] == found[2])

    def do_query_overlay(self, fields: Fields, role: int, name: str) -> Any:
        """Whether there are an overlay and older copies of it, and its generation mark."""
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        files = host_of(fields, self.folder(name))[FILES]
        past = any(one[0] == "moved" or one[0].startswith("past-") for one in files)
        mark = overlay(files, "generation")
        return (
            (b"exists\n" if overlay(files, "img") else b"none\n")
            + (b"past\n" if past else b"")
            + b"end\n"
            + (b"=" + mark_text(mark[1][0]) if mark else b"")
            + b"\n\n"
        )

    def do_mark_overlay(self, fields: Fields, role: int, name: str, generation: int) -> Any:
        """Write the generation mark."""
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        left = [one for one in host_of(fields, self.folder(name))[FILES] if one[0] != "generation"]
        put(fields, self.folder(name), files=tuple(sorted([*left, ("generation", (generation,), 0)])))
        found = overlay(tuple(left), "img")
        if found and fields[role].key[0] == "failover" and peek(host_of(fields, self.folder(name))[LEASE])[1] == name:
            fields[CURRENT] = found[1]  # it has the lease: what was acknowledged after its snapshot is lost
        return None

    def do_rename(self, fields: Fields, role: int, name: str, source: str, target: str) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        files = host_of(fields, self.folder(name))[FILES]
        found = overlay(files, source)
        if not found:
            return Failure(SmsError, f"{source} does not exist")
        left = [one for one in files if one[0] not in (source, target)]
        put(fields, self.folder(name), files=tuple(sorted([*left, (target, *found[1:])])))
        return None

    def do_remove(self, fields: Fields, role: int, name: str, slot: str) -> Any:
        files = host_of(fields, self.folder(name))[FILES]
        put(fields, self.folder(name), files=tuple(one for one in files if one[0] != slot))
        return None

    def do_create(self, fields: Fields, role: int, name: str, slot: str, contents: Any, kind: str) -> Any:
        """Create a file, or replace it."""
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        files = host_of(fields, self.folder(name))[FILES]
        used, number = {one[2] for one in files}, INODES[kind]
        while number in used:
            number += 1
        left = [one for one in files if one[0] != slot]
        put(fields, self.folder(name), files=tuple(sorted([*left, (slot, contents, number)])))
        return None

    def do_start_instance(self, fields: Fields, role: int, name: str, attached: bool, serial: int) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        found = overlay(host_of(fields, self.folder(name))[FILES], "img")
        if host_of(fields, name)[INSTANCE] or not found:
            return Failure(SmsError, "it cannot be started")
        put(fields, name, instance=(found[2], True, attached, serial))
        if attached:
            silent, blind = (SILENT_A, BLIND_A) if name == "a" else (SILENT_B, BLIND_B)
            fields[NOTES] = fields[NOTES] & ~(silent | blind) | (blind if fields[NOTES] & silent else 0)
        return None

    def do_stop_instance(self, fields: Fields, role: int, name: str) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        put(fields, name, instance=None)
        fields[NOTES] &= ~(BLIND_A if name == "a" else BLIND_B)
        return None

    def do_services(self, fields: Fields, role: int, name: str, run: bool) -> Any:
        """Start or stop the services that keep state."""
        found = host_of(fields, name)[INSTANCE]
        if found:
            put(fields, name, instance=(found[INODE], run, *found[ATTACHED:]))
        return None

    def do_attach(self, fields: Fields, role: int, name: str, attached: bool, until: int | None) -> Any:
        """Attach the ports to the bridges, or detach them. ``until``: the tick in which that has an effect."""
        found = host_of(fields, name)[INSTANCE]
        if not found or (until is not None and fields[TIME] > until):
            return Failure(SmsError, "the ports cannot be attached")
        put(fields, name, instance=(*found[:ATTACHED], attached, found[SERIAL]))
        return None

    def do_arp(self, fields: Fields, role: int, name: str) -> Any:
        """Whether an instance answers for the addresses on the bridges of a host."""
        here, there = host_of(fields, name)[INSTANCE], host_of(fields, other(name))[INSTANCE]
        return bool((here and here[ATTACHED]) or (there and there[ATTACHED] and not fields[CUT] & LAN))

    def do_contents(self, fields: Fields, role: int, name: str) -> Any:
        """The contents of the overlay in use."""
        found = host_of(fields, name)[INSTANCE]
        files = host_of(fields, self.folder(name))[FILES]
        return next((one[1] for one in files if found and one[2] == found[INODE]), Failure(SmsError))

    # The other state of a host

    def do_mark(self, fields: Fields, role: int, name: str, data: bytes | None) -> Any:
        put(fields, name, mark=data)
        return None

    def do_read_mark(self, fields: Fields, role: int, name: str) -> Any:
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        return host_of(fields, name)[MARK]

    def do_note(
        self, fields: Fields, role: int, name: str, line: tuple[tuple[str, Any], ...] | None, reported: bool = False
    ) -> Any:
        """Append a line of a failover to the history, or one after which no failover is open.

        Args:
            reported: it reports what a failover lost: all but what is in the overlay.
        """
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        if line and dict(line)["event"] == "begun":
            line = (*line, ("acknowledged", fields[CURRENT]))
        put(fields, name, history=() if line is None else (*host_of(fields, name)[HISTORY], line))
        found = overlay(host_of(fields, self.folder(name))[FILES], "img")
        if reported and found:
            fields[CURRENT] = found[1]
        return None

    def do_history(self, fields: Fields, role: int, name: str) -> Any:
        return host_of(fields, name)[HISTORY]

    def do_snapshots(self, fields: Fields, role: int, name: str) -> Any:
        return host_of(fields, name)[STORE]

    def do_brief(self, fields: Fields, role: int, name: str) -> Any:
        """The generations of the snapshots on a host."""
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        return tuple(one[1] for one in host_of(fields, name)[STORE])

    def do_restore(self, fields: Fields, role: int, name: str, number: int) -> Any:
        """The end of a restore: a file in an epoch of its own."""
        if number != len(host_of(fields, name)[STORE]):
            fields[NOTES] |= OLD_SNAPSHOT
        files = (*fields[HOST_A][FILES], *fields[HOST_B][FILES], ("", NEW, 0))
        epoch = 1 + max(one[1][0] for one in files if one[0] != "generation")
        return self.do_create(fields, role, name, "img", (epoch, 0), "restored")

    def do_fetch(self, fields: Fields, role: int, name: str) -> Any:
        """The newest snapshot in a repository to which the host that serves pushes; None without one."""
        found = []
        for one in "ab":
            instance, folder = host_of(fields, one)[INSTANCE], host_of(fields, self.folder(one))
            if instance and instance[ATTACHED] and instance[WRITES]:
                contents = next(file[1] for file in folder[FILES] if file[2] == instance[INODE])
                found.append((0, peek(folder[LEASE])[0], 1, 11.0, one, contents))
        return max(found, default=None)

    def do_received(self, fields: Fields, role: int, name: str, snapshot: tuple[Any, ...]) -> Any:
        store = host_of(fields, name)[STORE]
        put(fields, name, store=(*store, (len(store) + 1, *snapshot[1:])))
        return None

    def decide(self, fields: Fields, name: str) -> None:
        """What was acknowledged since a restored snapshot is given up, unless the other host has the lease."""
        found = overlay(host_of(fields, self.folder(name))[FILES], "img")
        if found and peek(host_of(fields, other(name))[LEASE])[1] != other(name):
            fields[CURRENT] = found[1]

    def do_start_guard(self, fields: Fields, role: int, name: str) -> Any:
        if self.reaches(fields, role, name) and host_of(fields, name)[GUARD] is None:
            put(fields, name, guard=(MISSING, MISSING, False))
        return None

    def do_stop_guard(self, fields: Fields, role: int, name: str) -> Any:
        if self.reaches(fields, role, name):
            if host_of(fields, name)[LOCK] == GUARDS[name]:
                put(fields, name, lock=0)
            put(fields, name, guard=None)
            fields[GUARDS[name]] = None
        return None

    def do_fence(self, fields: Fields, role: int, name: str) -> Any:
        if role == MOVER:
            fields[NOTES] |= TAKEN_OVER
        self.power_off(fields, name)
        return None

    def do_now(self, fields: Fields, role: int) -> Any:
        """The time of day where a process runs: nothing may depend on it."""
        name = {VERB_A: "a", GUARD_A: "a", VERB_B: "b", GUARD_B: "b"}.get(role, "")
        if role in (SOURCE, TARGET):
            name = fields[role].key[2]
        return 1e9 + 86400.0 * host_of(fields, name)[CLOCK] if name else 1e9

    def do_clock(self, fields: Fields, role: int) -> Any:
        return fields[TIME]

    def do_wait(self, fields: Fields, role: int, tick: int) -> Any:
        """Wait until a tick has passed."""
        fields[TIME] = max(fields[TIME], tick + 1)
        return None

    def do_pause(self, fields: Fields, role: int) -> Any:
        return None

    def do_works(self, fields: Fields, role: int) -> Any:
        """Whether the services answer; scenarios have another outcome too."""
        return True

    def do_serves(self, fields: Fields, role: int, name: str) -> Any:
        """The exit status of a probe of the services."""
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        found = host_of(fields, name)[INSTANCE]
        return 0 if found and found[WRITES] and found[ATTACHED] else 4

    def do_settle(self, fields: Fields, role: int) -> Any:
        """The target waits longer than a source takes to decide."""
        state = fields[TO_SOURCE][0] if fields[TO_SOURCE] else OPEN
        waits = fields[SOURCE] is not None and (state != OPEN or not is_idle(fields[SOURCE]))
        return BLOCKED if waits else None

    # A migration

    def do_open(self, fields: Fields, role: int, name: str, agent: str, attributes: tuple[Any, ...]) -> Any:
        """Start an agent, which takes the lock of its host."""
        if not self.reaches(fields, role, name):
            return Failure(Unreachable)
        if host_of(fields, name)[LOCK] or fields[PROCESSES[agent]]:
            return Failure(Busy)
        put(fields, name, lock=PROCESSES[agent])
        fields[TO_SOURCE if agent == "source" else TO_TARGET] = (OPEN, (), ())
        fields[PROCESSES[agent]] = root("idle", agent, name, attributes)
        return None

    def do_send(self, fields: Fields, role: int, agent: str, message: tuple[Any, ...]) -> Any:
        place = TO_SOURCE if agent == "source" else TO_TARGET
        state, asked, replies = fields[place]
        if dict(message[1:]).get("leap"):
            fields[NOTES] |= TAKEN_OVER
        if state in (ENDED, FAILED):
            return Failure(SmsError, "the agent has ended")
        if state == OPEN:
            fields[place] = (state, (*asked, message), replies)
        return None

    def do_receive(self, fields: Fields, role: int, agent: str) -> Any:
        place = TO_SOURCE if agent == "source" else TO_TARGET
        state, asked, replies = fields[place]
        if replies:
            fields[place] = (state, asked, replies[1:])
            return replies[0]
        if state in (ENDED, FAILED):
            return Failure(SmsError, "the agent has ended")
        return BLOCKED if state == OPEN else Failure(Lost)

    def do_ended(self, fields: Fields, role: int, agent: str) -> Any:
        return bool(fields[TO_SOURCE if agent == "source" else TO_TARGET][0] == FAILED)

    def do_close(self, fields: Fields, role: int, agent: str) -> Any:
        place = TO_SOURCE if agent == "source" else TO_TARGET
        if fields[place] and fields[place][0] == OPEN:
            fields[place] = (CLOSED, *fields[place][1:])
        return None

    def do_await_end(self, fields: Fields, role: int, agent: str) -> Any:
        place = TO_SOURCE if agent == "source" else TO_TARGET
        return BLOCKED if fields[place] and fields[place][0] == CLOSED and fields[PROCESSES[agent]] else None

    def do_reply(self, fields: Fields, role: int, message: tuple[Any, ...]) -> Any:
        place = TO_SOURCE if role == SOURCE else TO_TARGET
        state, asked, replies = fields[place]
        if state == OPEN:
            fields[place] = (state, asked, (*replies, message))
        return None

    # Faults

    def power_off(self, fields: Fields, name: str) -> None:
        """End what runs on a host; its disk stays."""
        put(fields, name, up=False, instance=None, lock=0, guard=None)
        fields[NOTES] &= ~(BLIND_A if name == "a" else BLIND_B)
        fields[GUARDS[name]] = None
        ended = [VERB_A if name == "a" else VERB_B]
        for agent, place in ((SOURCE, TO_SOURCE), (TARGET, TO_TARGET)):
            if fields[agent] is not None and fields[agent].key[2] == name:
                fields[place] = (BROKEN, (), fields[place][2])
                ended.append(agent)
        for role in ended:
            self.kill(fields, role)

    def kill(self, fields: Fields, role: int) -> None:
        """End a process; its locks go with it."""
        fields[role] = None
        for name in "ab":
            host = host_of(fields, name)
            if host[LOCK] == role:
                put(fields, name, lock=0)
            if host[LEASE_LOCK] == role:
                put(fields, name, lease_lock=0)


def start_state(host_a: dict[str, Any], host_b: dict[str, Any], budget: tuple[int, ...]) -> State:
    """Return a state without processes."""
    hosts = []
    for given in (host_a, host_b):
        values: list[Any] = [True, None, (), None, 0, None, (), None, (), 0, 0]
        for key, value in given.items():
            values[NAMES[key]] = value
        hosts.append(tuple(values))
    newest = max((one[1] for host in hosts for one in host[FILES] if one[0] != "generation"), default=NEW)
    return (*hosts, 0, 0, newest, 0, budget, None, None, *[None] * 7)


def is_idle(node: Node | None) -> bool:
    """Whether a process waits for messages."""
    return node is not None and node.key[0] == "idle"
