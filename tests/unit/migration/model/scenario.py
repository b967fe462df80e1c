"""What may happen in a scenario, and what must hold in each of its states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from appliance.host.base import Unreachable
from appliance.shared.lease import SwapLease, parse_lease, peek
from appliance.shared.order import last_place
from appliance.tools.move import Lost
from tests.unit.migration.model import programs
from tests.unit.migration.model import world as w
from tests.unit.migration.model.engine import Failure, Found, Node, State, explore, forget, root
from tests.unit.migration.model.programs import setting
from tests.unit.migration.model.world import Fields, World, host_of, other

FUSED = {
    *("send", "reply", "find_instance", "exists", "in_use", "stale", "clock", "contents"),
    *("history", "snapshots", "brief", "now", "ended", "close"),
    *("read_mark", "unlock", "services", "settle", "received"),
}
"""Effects that happen together with the one before them. They read what only the holder of the host's lock changes, or
no other process sees whether they have happened."""
OTHER_INODE = 40
"""Of an overlay that another run has copied."""
LINKS = {"ab": w.AB, "ca": w.CA, "cb": w.CB, "all": w.AB | w.LAN, "ssh": w.AB | w.CA | w.CB}
LINKS["source"] = w.AB | w.CA | w.LAN


class Done(NamedTuple):
    """An effect that has happened, as a step to print."""

    role: int
    node: Node
    result: Any

    def __str__(self) -> str:
        args = ", ".join(shorten(one) for one in self.node.args)
        return f"{ROLE_NAMES[self.role]}: {self.node.name}({args}) = {shorten(self.result)}"


Label = str | Done


def shorten(value: Any) -> str:
    """Return a value as in the steps to a violation: a lease as holder@generation."""
    if isinstance(value, SwapLease):
        return shorten(value.text.encode())
    if not isinstance(value, bytes):
        return repr(value)
    head, _, data = value.partition(b"\n") if value[:1] in (b"0", b"1") else (b"", b"", value)
    if b'"side"' in data:
        return f"mark {json.loads(data)['state']}"
    generation, holder = peek(data)
    return ("runs, " if head[:1] == b"1" else "") + f"{holder or 'free'}@{generation}"


@dataclass
class Scenario:
    """Initial hosts, what may happen and how often.

    Attributes:
        verbs: "start a", "failover b", "move b" (to that host), and how often.
        faults: "crash", "cut", "lose", "spoil", "fail", "slow", "kill", "unanswered",
            "tick", "jump", "write", "push", "moved" (another run has migrated).
        links: that a fault "cut" may cut.
        excused: notes of faults after which the documents promise less.
    """

    name: str
    host_a: dict[str, Any]
    host_b: dict[str, Any]
    verbs: dict[str, int]
    faults: dict[str, int]
    links: tuple[str, ...] = ("ab",)
    shared: bool = False
    fenced: bool = True
    excused: int = 0
    world: World = field(init=False)

    def __post_init__(self) -> None:
        self.world = World(shared=self.shared)

    @cached_property
    def names(self) -> list[str]:
        """What is counted in the budget of a state."""
        return [*self.verbs, *self.faults]

    def initial(self) -> State:
        """Return the first state."""
        return w.start_state(self.host_a, self.host_b, (*self.verbs.values(), *self.faults.values()))

    def explore(self, limit: int) -> Found:
        """Visit its states."""
        forget()
        with setting(shared=self.shared, fenced=self.fenced):
            return explore(self.initial(), self.successors, self.check, limit=limit, settled=quiet)

    # Transitions

    def left(self, state: State | Fields, name: str) -> bool:
        """Whether something may happen once more."""
        return name in self.names and state[w.BUDGET][self.names.index(name)] > 0

    def spend(self, fields: Fields, name: str) -> None:
        """Count what happens."""
        place = self.names.index(name)
        budget = fields[w.BUDGET]
        fields[w.BUDGET] = (*budget[:place], budget[place] - 1, *budget[place + 1 :])

    def successors(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield each step from a state, and the state after it."""
        for role in (w.VERB_A, w.VERB_B, w.MOVER, w.GUARD_A, w.GUARD_B, w.SOURCE, w.TARGET):
            node = state[role]
            if node is not None:
                yield from self.idle_steps(state, role) if w.is_idle(node) else self.steps(state, role, node)
        yield from self.begin_guards(state)
        yield from self.begin_verbs(state)
        yield from self.faults_in(state)

    def steps(self, state: State, role: int, node: Node) -> Iterator[tuple[Label, State]]:
        """Yield the outcomes of the next effect of a process."""
        fields = list(state)
        result = self.world.effects[node.name](fields, role, *node.args)
        if result is not w.BLOCKED:
            yield self.after(fields, role, node, result)
        if node.name == "works" and self.left(state, "fail"):
            yield self.after(self.spent(state, "fail"), role, node, False)
        if node.name == "receive" and self.left(state, "slow"):
            fields = self.spent(state, "slow")
            fields[w.TIME] += 1
            yield self.after(fields, role, node, Failure(Lost))
        if node.name == "swap" and self.left(state, "unanswered") and result is not w.BLOCKED:
            fields = self.spent(state, "unanswered")
            self.world.effects["swap"](fields, role, *node.args)
            yield self.after(fields, role, node, Failure(Unreachable))

    def spent(self, state: State, name: str) -> Fields:
        """Return the fields of a state after something has happened once more."""
        fields = list(state)
        self.spend(fields, name)
        return fields

    def after(self, fields: Fields, role: int, node: Node, result: Any) -> tuple[Label, State]:
        """Return the state after an effect had a result, with the effects that happen at once after it."""
        label = Done(role, node, result)
        node = fields[role] = node.after(result)
        while node.name in FUSED:
            done = self.world.effects[node.name](fields, role, *node.args)
            if done is w.BLOCKED:
                break
            node = fields[role] = node.after(done)
        if not node.name:
            self.end(fields, role, node)
        return label, self.tidy(fields)

    def begin(self, fields: Fields, role: int, label: Label, *key: Any) -> tuple[Label, State]:
        """Start a process."""
        node = fields[role] = root(*key)
        while node.name in FUSED:
            node = fields[role] = node.after(self.world.effects[node.name](fields, role, *node.args))
        if not node.name:
            self.end(fields, role, node)
        return label, self.tidy(fields)

    def end(self, fields: Fields, role: int, node: Node) -> None:
        """A process has ended."""
        fields[role] = None
        if role in (w.GUARD_A, w.GUARD_B):
            name = node.key[1]
            if host_of(fields, name)[w.GUARD] is not None:
                w.put(fields, name, guard=node.args)
            return
        if role not in (w.SOURCE, w.TARGET):
            return
        agent, name = node.key[1:3]
        if node.args[0] == "idle":
            fields[role] = root("idle", agent, name, node.args[1])
            return
        if host_of(fields, name)[w.LOCK] == role:
            w.put(fields, name, lock=0)
        place = w.TO_SOURCE if role == w.SOURCE else w.TO_TARGET
        channel, _, replies = fields[place]
        ended = w.FAILED if node.args[0] == "failed" else w.ENDED
        fields[place] = (channel if channel == w.BROKEN else ended, (), replies)

    def idle_steps(self, state: State, role: int) -> Iterator[tuple[Label, State]]:
        """Yield what an agent does with its next message."""
        place = w.TO_SOURCE if role == w.SOURCE else w.TO_TARGET
        channel, asked, replies = state[place]
        _, agent, name, attributes = state[role].key
        fields = list(state)
        if asked:
            fields[place] = (channel, asked[1:], replies)
            yield self.begin(fields, role, f"{agent}: {asked[0][0]}", "handle", agent, name, attributes, asked[0])
        elif channel in (w.BROKEN, w.CLOSED):
            yield self.begin(fields, role, f"{agent}: lost", "handle", agent, name, attributes, programs.LOST)

    def begin_guards(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield the next turns of guards."""
        for name, role in w.GUARDS.items():
            known = host_of(state, name)[w.GUARD]
            if known is None or state[role] is not None:
                continue
            for task in ("query", "check"):
                fields = list(state)
                node = fields[role] = root("guard", name, task, *known)
                result = self.world.effects[node.name](fields, role, *node.args)
                yield self.after(fields, role, node, result)

    def begin_verbs(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield the verbs that may begin."""
        for place, verb in enumerate(self.verbs):
            if not state[w.BUDGET][place]:
                continue
            word, name = verb.split()
            role = w.MOVER if word == "move" else w.PROCESSES[f"verb-{name}"]
            if state[role] is not None or (role != w.MOVER and not host_of(state, name)[w.UP]):
                continue
            fields = self.spent(state, verb)
            if word == "start":
                yield self.begin(fields, role, verb, "start", name, False)
            elif word in ("stop", "create", "pull", "restore"):
                yield self.begin(fields, role, verb, word, name)
            elif word == "move":
                yield self.begin(fields, role, verb, "migrate", name)
            elif word == "failover":
                yield self.begin(fields, role, verb, "failover", name, False)
            elif word == "by-snapshot":
                yield self.begin(fields, role, verb, "failover", name, False, "latest")
            elif word == "by-hand" and not host_of(state, other(name))[w.UP]:
                yield self.begin(fields, role, verb, "failover", name, True)
            elif word == "lie" and host_of(state, other(name))[w.UP]:
                fields[w.NOTES] |= w.FALSE_FENCE
                yield self.begin(fields, role, verb, "failover", name, True)

    def faults_in(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield faults, their ends, and what users and clocks do."""
        for name in "ab":
            yield from self.faults_of(state, name)
        if state[w.CUT]:
            fields = list(state)
            fields[w.CUT] = 0
            yield "all links work", tuple(fields)
        elif self.left(state, "cut"):
            for link in self.links:
                yield from self.cut(state, link)
        if self.left(state, "kill"):
            for role in w.PROCESSES.values():
                if state[role] is not None:
                    yield self.kill(state, role)
        if self.left(state, "moved"):
            for name in "ab":
                yield from self.moved(state, name)
        if self.left(state, "tick") and (state[w.SOURCE] or state[w.TARGET]):
            fields = self.spent(state, "tick")
            fields[w.TIME] += 1
            yield "seconds pass", self.tidy(fields)

    def faults_of(self, state: State, name: str) -> Iterator[tuple[Label, State]]:
        """Yield what happens to one host."""
        host, role = host_of(state, name), w.PROCESSES[f"verb-{name}"]
        there = state[w.PROCESSES[f"verb-{other(name)}"]]
        if not host[w.UP]:
            busy = (there is not None and there.key[0] == "failover") or (
                state[w.MOVER] is not None and state[w.NOTES] & w.TAKEN_OVER
            )
            if state[role] is None and not busy:
                fields = list(state)
                w.put(fields, name, up=True)
                yield self.begin(fields, role, f"{name} boots", "start", name, True)
            return
        if self.left(state, "crash"):
            fields = self.spent(state, "crash")
            self.world.power_off(fields, name)
            yield f"{name} loses power", self.tidy(fields)
        folder = self.world.folder(name)
        if host_of(state, folder)[w.LEASE] is not None and name == folder:
            for fault, data in (("lose", None), ("spoil", b"{")):
                if self.left(state, fault):
                    fields = self.spent(state, fault)
                    w.put(fields, name, lease=data)
                    fields[w.NOTES] |= w.LOST_LEASE
                    yield f"{fault} the lease file of {name}", self.tidy(fields)
        if self.left(state, "jump"):
            fields = self.spent(state, "jump")
            w.put(fields, name, clock=host[w.CLOCK] - 3)
            yield f"the clock of {name} is set back by three days", self.tidy(fields)
        instance = host[w.INSTANCE]
        if instance and instance[w.ATTACHED] and instance[w.WRITES]:
            files = host_of(state, folder)[w.FILES]
            newest = next(one[1] for one in files if one[2] == instance[w.INODE])
            if self.left(state, "write"):
                fields = self.spent(state, "write")
                written = (newest[0], newest[1] + 1)
                changed = [(one[0], written if one[2] == instance[w.INODE] else one[1], one[2]) for one in files]
                w.put(fields, folder, files=tuple(changed))
                fields[w.CURRENT] = written
                yield f"{name} acknowledges a write", self.tidy(fields)
            there, locked = host_of(state, other(name)), host[w.LOCK] or host_of(state, folder)[w.LEASE_LOCK]
            if self.left(state, "push") and there[w.UP] and not locked:
                fields = self.spent(state, "push")
                w.put(fields, other(name), store=(*there[w.STORE], self.snapshot(fields, name, there[w.STORE], newest)))
                yield f"{name} pushes a snapshot", self.tidy(fields)

    def moved(self, state: State, name: str) -> Iterator[tuple[Label, State]]:
        """Yield the state after another run has migrated from a host: at once, as it has the locks of both hosts."""
        here, there, target = host_of(state, name), host_of(state, other(name)), other(name)
        instance, data = here[w.INSTANCE], here[w.LEASE]
        busy = any(one[field] for one in (here, there) for field in (w.LOCK, w.LEASE_LOCK, w.MARK))
        serves = instance and instance[w.ATTACHED] and instance[w.WRITES] and peek(data)[1] == name
        if busy or state[w.CUT] or self.shared or not (serves and there[w.UP] and not there[w.INSTANCE]):
            return
        fields = self.spent(state, "moved")
        before = parse_lease(data)
        after = {one: replace(before, generation=before.generation + 1, holder=target, file=one).text() for one in "ab"}
        mark, copy = ("generation", (before.generation + 1,), 0), ("img", contents(here, instance), OTHER_INODE)
        kept = tuple(("moved", *one[1:]) if one[0] == "img" else one for one in here[w.FILES] if one[0] != "moved")
        known = (w.MISSING, w.MISSING, False) if here[w.GUARD] else None
        w.put(fields, name, lease=after[name], files=kept, instance=None, guard=None)
        w.put(
            fields, target, lease=after[target], files=(mark, copy), instance=(OTHER_INODE, True, True, 1), guard=known
        )
        yield f"another run migrates to {target}", self.tidy(fields)

    def snapshot(self, fields: Fields, name: str, known: tuple[Any, ...], newest: Any) -> tuple[Any, ...]:
        """Take a snapshot; return it. ``known``: all before it."""
        folder, number = self.world.folder(name), len(known) + 1
        data = host_of(fields, folder)[w.LEASE]
        own = [{"generation": one[1], "sequence": one[2], "host": one[4]} for one in known]
        generation, used = last_place(name, peek(data)[0], own)
        data, sequence = w.advance_file(data, used)
        w.put(fields, folder, lease=data)
        return number, generation, sequence, 10.0 + number + host_of(fields, name)[w.CLOCK], name, newest

    def cut(self, state: State, link: str) -> Iterator[tuple[Label, State]]:
        """Yield a state in which links are cut, with messages under way lost or not."""
        for lost in (False, True):
            fields = self.spent(state, "cut")
            fields[w.CUT] |= LINKS[link]
            if LINKS[link] & w.LAN and (state[w.MOVER] or state[w.HOST_A][w.MARK] or state[w.HOST_B][w.MARK]):
                fields[w.NOTES] |= w.PARTED
            changed = False
            for role, place in ((w.SOURCE, w.TO_SOURCE), (w.TARGET, w.TO_TARGET)):
                bit = w.CA if state[role] is not None and state[role].key[2] == "a" else w.CB
                if state[place] is not None and state[role] is not None and LINKS[link] & bit:
                    _, asked, replies = state[place]
                    fields[place] = (w.BROKEN, () if lost else asked, () if lost else replies)
                    changed |= bool(asked or replies)
            if changed or not lost:
                yield f"{link} is cut{', messages are lost' if lost else ''}", self.tidy(fields)

    def kill(self, state: State, role: int) -> tuple[Label, State]:
        """Return the state after SIGKILL of a process."""
        fields = self.spent(state, "kill")
        self.world.kill(fields, role)
        if role == w.MOVER:
            for place in (w.TO_SOURCE, w.TO_TARGET):
                if fields[place] and fields[place][0] == w.OPEN:
                    fields[place] = (w.CLOSED, fields[place][1], ())
        elif role in (w.SOURCE, w.TARGET):
            place = w.TO_SOURCE if role == w.SOURCE else w.TO_TARGET
            fields[place] = (w.ENDED, (), fields[place][2])
        return f"kill {ROLE_NAMES[role]}", self.tidy(fields)

    # What must hold

    def check(self, state: State) -> str:
        """Return what is wrong with a state."""
        if state[w.NOTES] & w.OLD_SNAPSHOT:
            return "an older snapshot was restored"
        if has_two_uuids(state) and not state[w.NOTES] & w.LOST_LEASE:
            return "two UUIDs"
        a, b = host_of(state, "a")[w.INSTANCE], host_of(state, "b")[w.INSTANCE]
        if not (a or b) or state[w.NOTES] & w.SPLIT:
            return ""
        if a and b and self.shared:
            return "two instances have the shared overlay open"
        if a and b and a[w.ATTACHED] and b[w.ATTACHED]:
            return "two instances serve"
        for name, instance in (("a", a), ("b", b)):
            if instance and instance[w.ATTACHED] and instance[w.WRITES]:
                found = contents(host_of(state, self.world.folder(name)), instance)
                if found != state[w.CURRENT] and not self.is_reported(state, name, instance):
                    return f"{name} serves {found}, acknowledged was {state[w.CURRENT]}"
        return ""

    def is_reported(self, state: State, name: str, instance: tuple[Any, ...]) -> bool:
        """Whether the loss of an interrupted failover, whose snapshot an instance has, is still to be reported.

        The start that goes on reports it, or the next one. Nothing was acknowledged since that failover began.
        """
        restored = w.INODES["restored"] <= instance[w.INODE] < w.INODES["restored"] + 10
        begun = [line for one in host_of(state, name)[w.HISTORY] if (line := dict(one))["event"] == "begun"]
        return restored and bool(begun) and begun[-1]["acknowledged"] == state[w.CURRENT]

    def tidy(self, fields: Fields) -> State:
        """Return the state of these fields: channels and ticks without a meaning are removed."""
        if fields[w.MOVER] is None:
            for role, place in ((w.SOURCE, w.TO_SOURCE), (w.TARGET, w.TO_TARGET)):
                if fields[role] is None:
                    fields[place] = None
            if fields[w.SOURCE] is None and fields[w.TARGET] is None:
                fields[w.TIME] = 0
        if fields[w.NOTES] & self.excused and not fields[w.NOTES] & w.SPLIT and self.check(tuple(fields)):
            fields[w.NOTES] |= w.SPLIT
        return tuple(fields)


def has_two_uuids(state: State) -> bool:
    """Whether the lease files have different UUIDs of the cluster."""
    return len({uuid_in(host_of(state, name)[w.LEASE]) for name in "ab"} - {""}) > 1


def quiet(state: State) -> State | None:
    """Return a state in which both hosts are on, all links work and nothing runs, without what may still happen."""
    if state[w.CUT] or any(state[role] is not None for role in range(w.VERB_A, w.GUARD_B + 1)):
        return None
    if not (state[w.HOST_A][w.UP] and state[w.HOST_B][w.UP]):
        return None
    fields = list(state)
    fields[w.BUDGET] = ()
    for name in "ab":
        if host_of(fields, name)[w.GUARD]:
            w.put(fields, name, guard=(w.MISSING, w.MISSING, False))
    return tuple(fields)


@cache
def uuid_in(data: bytes | None) -> str:
    """Return the UUID of the cluster in the bytes of a lease file; empty without one."""
    found: str = json.loads(data or b"{}").get("cluster_uuid", "")
    return found


def contents(folder: tuple[Any, ...], instance: tuple[Any, ...]) -> Any:
    """Return the contents of the overlay that an instance uses."""
    return next((one[1] for one in folder[w.FILES] if one[2] == instance[w.INODE]), None)


ROLE_NAMES = {
    w.VERB_A: "verb on a",
    w.VERB_B: "verb on b",
    w.MOVER: "mover",
    w.SOURCE: "source",
    w.TARGET: "target",
    w.GUARD_A: "guard of a",
    w.GUARD_B: "guard of b",
}
