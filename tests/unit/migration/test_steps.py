"""The steps of a migration with agents that reply from a table: the order of requests, and how a failed step ends."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from appliance.agent.protocol import Problem, read_request
from appliance.errors import Busy, Refused, RolledBack, SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.operations.migration import migrate
from appliance.operations.migration.state import Inspected, MigrationResult
from appliance.operations.migration.steps import run_steps
from appliance.plan.machine import PROBE
from appliance.plan.migration.plan import Plan
from appliance.plan.services.confinement import Confinement
from appliance.plan.services.jobs import JOBS
from appliance.progress import Progress
from appliance.shared.lease import Lease
from appliance.shared.migration import SourceRequest, TargetRequest
from tests.sites import open_debian
from tests.support.env import FakeAgents, fake_env
from tests.support.fake import Fake
from tests.unit.migration.requests import SOURCE, TARGET

CONFINED = Confinement((), "/s/seccomp.json", "/s/empty")

IMAGE = Image("/i/x.sif", "k1", "ab" * 32, "us")
Reply = tuple[str, dict[str, Any], bytes]
REPLIES: dict[str, list[Reply]] = {
    "offer": [("offer", {"used": 3 << 16, "size": 9 << 16}, b"digests")],
    "build": [("wanted", {"chunks": 1, "used": 3}, b"bits")],
    "send": [("parcels", {"chunks": 1}, b"data"), ("sent", {"sent_bytes": 40}, b"")],
    "round": [("sent", {"sent_bytes": 5, "settled": True}, b"")],
    "verify": [("verified", {}, b"")],
    "stop": [
        ("sent", {"sent_bytes": 7}, b""),
        ("final", {"neighbours": ["n"], "digests": "d", "frozen_s": 0.01, "stop_s": 0.2, "found_by": "trace"}, b""),
    ],
    "hand": [("handed", {"connections": 2, "neighbours": ["n"]}, b"two")],
    "place": [("placed", {}, b"")],
    "start": [("started", {}, b"")],
    "ask": [("told", {}, b"1 RUNNING\n")],
    "connections": [("connections", {}, b"one")],
    "flush": [("flushed", {}, b"")],
    "arm": [("armed", {}, b"")],
    "release": [("released", {"connections": 2}, b"two")],
    "up": [("up", {"trouble": ""}, b"")],
    "given": [("tails", {"lost": 3, "files": []}, b"")],
    "tails": [("appended", {}, b"")],
    "commit": [("committed", {}, b"")],
    "finish": [("finished", {}, b"")],
    "unseen": [("seen", {"mac": ""}, b"")],
}
COPY = (
    "a.open b.open a.offer b.build a.send b.parcels a.round b.verify a.run a.round a.stop b.place b.start b.probe "
    "b.ask b.flush a.connections b.arm a.release b.up b.probe b.ask"
)
SHARED = "a.open b.open a.run a.hand b.start b.probe b.ask b.arm b.up b.probe b.ask"
CLOSED = "b.close b.wait a.close a.wait"
"""How both contexts end."""
ROLLED_BACK = "b.abort a.abort b.close a.wait b.wait a.resume a.run " + CLOSED


@dataclass
class World:
    """Both hosts: what is asked of them, in order, and what fails."""

    log: list[str] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)
    """By host and request; with " after up", from when the target serves."""
    late: bool = False
    """The replies whose receipt failed come later."""
    probes: list[bytes] = field(default_factory=list)
    requests: dict[str, Any] = field(default_factory=dict)
    serves: bool = True
    """Whether the services answer on the source after a rollback."""
    leases: dict[str, str] = field(default_factory=dict)
    """The holder by the lease file of each host; one that is not here cannot be reached by then."""

    def add(self, host: Host, what: str) -> None:
        self.log.append(f"{host.name}.{what}")
        if error := self.fails.get(self.log[-1]):
            raise error

    def host(self, name: str) -> Fake:
        def run(argv: tuple[str, ...], _: bytes | None) -> tuple[int, str]:
            self.add(host, "run")
            return int(not self.serves and PROBE in argv), "1 RUNNING\n" if argv[-len(JOBS) :] == JOBS else ""

        host = Machine({(): run}, name=name)
        host.world = self
        return host


class Machine(Fake):
    """A host whose lease file is a name of its world."""

    world: World

    def read(self, path: str) -> bytes | None:
        if not path.endswith(".lease"):
            return super().read(path)
        if self.name not in self.world.leases:
            raise LOST
        return Lease("sample", 5, self.world.leases[self.name]).text()


@dataclass(frozen=True)
class WorldAgents(FakeAgents):
    """Agents that reply from a table."""

    world: World = field(default_factory=World)

    def call(self, host: Host, command: str, request: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        self.world.add(host, command)
        return {}

    @contextmanager
    def open_endpoint(self, host: Host, command: str, request: Any, progress: Progress) -> Iterator[Any]:
        self.world.requests[command] = request
        endpoint = FakeEndpoint(self.world, host)
        self.world.add(host, "open")
        try:
            yield endpoint
        finally:
            endpoint.close()
            endpoint.wait()


class FakeEndpoint:
    """Replies to requests from ``REPLIES``."""

    ended_itself = True

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host, self.name = world, host, host.name
        self.replies: deque[Reply] = deque([("ready", {}, b"")])

    def send(self, do: str, data: bytes = b"", **facts: Any) -> None:
        self.world.log.append(f"{self.name}.{do}")
        if do == "probe":
            answers = [{"name": name, "ok": True, "after_s": 0.1} for name in facts["argv"][3:]]
            output = (
                self.world.probes.pop(0)
                if self.world.probes
                else b"\n".join(json.dumps(one).encode() for one in answers)
            )
            self.replies.append(("probed", {}, output))
        elif do == "abort":
            self.replies.append(("aborted" if self.name == "b" else "back", {}, b""))
        else:
            self.replies.extend(REPLIES.get(do, []))

    def receive(self, *kinds: str, patience_s: float = 120) -> tuple[dict[str, Any], bytes]:
        fails, what = self.world.fails, self.world.log[-1]
        if error := fails.get(what) or ("b.up" in self.world.log and fails.get(f"{what} after up")):
            if not self.world.late:
                self.replies.clear()
            raise error
        kind, facts, data = self.replies.popleft()
        assert kind in kinds
        return {**facts, "kind": kind}, data

    def close(self) -> None:
        self.world.log.append(f"{self.name}.close")

    def wait(self) -> None:
        self.world.log.append(f"{self.name}.wait")


def open_sample(world: World | None = None) -> Cluster:
    """Return a cluster of the hosts a and b."""
    opened = open_debian()
    admins = tuple(opened.site.admin_hosts[0].model_copy(update={"name": name}) for name in "ab")
    site, env = (
        opened.site.model_copy(update={"admin_hosts": admins}),
        fake_env(agents=WorldAgents(world=world or World())),
    )
    return Cluster(site, opened.services, opened.base, env=env)


@pytest.fixture
def world() -> World:
    return World()


def move(world: World, *, shared: bool = False) -> tuple[MigrationResult, str]:
    """Migrate from host a to host b."""
    return run_steps(open_sample(world), inspect(world, shared=shared), IMAGE)


def inspect(world: World, *, shared: bool = False) -> Inspected:
    plan = Plan("a", "b", IMAGE.path, IMAGE.sha256, 4, shared, 0, 0, 0.0, {}, 0, [])
    return Inspected(world.host("a"), world.host("b"), 77, Lease("sample", 4, "a"), plan, CONFINED, CONFINED)


def test_with_one_overlay_per_host(world: World) -> None:
    result, failures = move(world)
    assert world.log == f"{COPY} a.given b.tails b.commit a.finish {CLOSED}".split()
    assert (failures, result.notes, result.generation) == ("", [], 5)
    assert (result.overlay_bytes, result.copied_bytes, result.last_bytes, result.frozen_ms) == (3 << 16, 50, 7, 10)
    assert (result.connections, result.lost_datagrams, result.jobs, result.rounds) == (2, 3, 1, 2)
    assert sorted(result.parts) == ["last changes", "start", "stop", "switch"]
    assert set(result.outage) == set(result.services) == {service.name for service in open_sample().services}


def test_with_a_shared_overlay(world: World) -> None:
    result, failures = move(world, shared=True)
    assert world.log == f"{SHARED} b.commit a.finish {CLOSED}".split()
    assert (failures, result.notes, result.shared, result.connections, result.jobs) == ("", [], True, 2, 1)


DOWN = json.dumps({"name": "slurmctld", "ok": False, "detail": "refused"}).encode()


def test_services_that_do_not_answer_after_the_switch_are_no_reason_to_roll_back(world: World) -> None:
    world.probes = [b"\n".join(all_answer()), DOWN]
    _, failures = move(world)
    assert failures == "slurmctld does not answer on b: refused"
    assert world.log[-8:] == f"a.given b.tails b.commit a.finish {CLOSED}".split()


def test_with_a_shared_overlay_they_are_one(world: World) -> None:
    world.probes = [b"\n".join(all_answer()), DOWN]
    with pytest.raises(RolledBack, match=r"slurmctld does not answer on b: refused\n.*serves on a as before"):
        move(world, shared=True)
    assert " ".join(world.log) == f"{SHARED.removesuffix(' b.ask')} {ROLLED_BACK}"


def all_answer() -> list[bytes]:
    names = [service.name for service in open_sample().services]
    return [json.dumps({"name": name, "ok": True, "after_s": 0.1}).encode() for name in names]


@pytest.mark.parametrize(
    "at", ["a.offer", "b.build", "b.verify", "a.stop", "b.place", "b.start", "b.flush", "a.release", "b.up"]
)
def test_a_failed_step_is_rolled_back(world: World, at: str) -> None:
    world.fails[at] = SmsError("it failed", hint="wait")
    with pytest.raises(RolledBack, match="it failed\n  the services container serves on a as before") as caught:
        move(world)
    assert caught.value.hint == "wait"
    assert " ".join(world.log) == f"{COPY[: COPY.index(at) + len(at)]} {ROLLED_BACK}"


TAKEN_OVER = "a.run b.unseen a.run {} b.flush b.arm b.up b.probe {} b.commit " + CLOSED


@pytest.mark.parametrize(
    ("at", "steps"),
    [("b.place", ""), ("a.connections", TAKEN_OVER.format("", "b.ask")), ("a.release", TAKEN_OVER.format("", "b.ask"))],
)
def test_a_dead_source_is_taken_over_from_once_the_target_has_everything(world: World, at: str, steps: str) -> None:
    world.fails = {at: Unreachable("a does not answer")}
    if not steps:
        with pytest.raises(RolledBack):
            move(world)
        return

    def fail(host: Host, what: str, add: Any = world.add) -> None:
        add(host, what)
        if what == "run" and at in world.log:
            raise Unreachable("a does not answer")

    world.add = fail  # type: ignore[method-assign]
    result, failures = move(world)
    assert " ".join(world.log) == " ".join(f"{COPY[: COPY.index(at) + len(at)]} {steps}".split())
    assert (failures, result.generation > 1000) == ("", True)
    assert result.notes[-1] == "a failed during the migration; b had all its data and took over"


# The end on the source


@pytest.mark.parametrize(
    ("error", "again", "notes"),
    [
        (SmsError("/dev/loop0 still has it open"), None, []),
        (
            SmsError("/dev/loop0 still has it open"),
            SmsError("it still has"),
            ["a could not be cleaned up: it still has"],
        ),
        (Unreachable("a does not answer"), None, ["a could not be cleaned up: a does not answer"]),
    ],
)
def test_a_source_that_could_not_be_cleaned_up_is_recovered_at_once(
    world: World, error: SmsError, again: SmsError | None, notes: list[str]
) -> None:
    world.fails["a.finish"] = error
    if again:
        world.fails["a.resume"] = again
    result, failures = move(world)
    tries = "" if isinstance(error, Unreachable) else "a.close a.wait a.resume "
    assert " ".join(world.log).endswith(f"b.commit a.finish {tries}{CLOSED}")
    assert (result.notes, failures) == (notes, "")


@pytest.mark.parametrize("at", ["a.given", "b.tails"])
def test_late_replies_do_not_prevent_the_end(world: World, at: str) -> None:
    world.fails, world.late = {at: Unreachable("sent no message for 120 s")}, True
    result, _ = move(world)
    assert " ".join(world.log).endswith(f"{at} b.commit a.finish {CLOSED}")
    assert result.notes == ["the last lines of logs may be missing: sent no message for 120 s"]


# Broken connections after the switch

LOST = Unreachable("b sent no message for 120 s")


def lose(world: World, at: str, *, target: bool | None) -> SmsError:
    """Lose the source at a request; return the error. ``target``: whether it holds the lease, None if lost as well."""
    world.fails = {at: LOST, "a.resume": Unreachable("a does not answer"), "b.abort": LOST}
    world.leases = {} if target is None else dict.fromkeys("ab", "b" if target else "a")
    with pytest.raises(SmsError, match="b sent no message for 120 s\n  ") as caught:
        move(world)
    return caught.value


@pytest.mark.parametrize(
    ("at", "target", "status", "words", "hint"),
    [
        ("b.start", None, 1, "serves on a again, unless it has failed", "sms status --host a"),
        ("b.up", None, 1, "neither a nor b can be reached; .* serves on one of them", "sms host list"),
        ("b.up", True, 4, "serves on b, but the end .* was not confirmed", "sms migrate b"),
        ("b.up", False, 1, "serves on a again, unless it has failed", "sms failover b"),
        ("b.commit", True, 4, "serves on b, but the end .* was not confirmed", "sms migrate b"),
        ("b.commit", None, 4, "serves on b since the switch, unless it has failed", "sms failover a"),
    ],
)
def test_a_broken_connection_names_who_serves(
    world: World, at: str, target: bool | None, status: int, words: str, hint: str
) -> None:
    error = lose(world, at, target=target)
    assert error.status == status and hint in error.hint
    assert re.search(words, error.message), error.message


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("at", "holder", "status", "words", "hint"),
    [
        ("b.start", "b", 1, "b has the lease of the shared overlay and cannot be reached", "sms failover a"),
        ("b.arm", "b", 1, "if it has failed, no host serves", "sms failover a"),
        ("b.probe after up", "b", 4, "serves on b since the switch, unless it has failed", "sms failover a"),
        ("b.start", "a", 1, " on a again", "sms status --host a"),
    ],
)
def test_a_silent_target_with_the_lease_of_a_shared_overlay_is_named(
    world: World, at: str, holder: str, status: int, words: str, hint: str, waits: bool
) -> None:
    """The source still waits for the lease, or has given up; it does not serve, and a start there would be refused."""
    world.fails = {at: LOST, "b.abort": LOST}
    world.leases, world.serves = {"a": holder}, False
    if waits:
        world.fails["a.resume"] = Busy("a migration is under way", hint="wait")
    with pytest.raises(SmsError, match="b sent no message for 120 s\n  ") as caught:
        move(world, shared=True)
    assert caught.value.status == status and hint in caught.value.hint
    assert re.search(words, caught.value.message), caught.value.message


@pytest.mark.parametrize("at", ["copy", "b.open", "a.open"])
def test_a_host_that_is_gone_before_the_migration_has_begun_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def prepare(*_: object) -> Image:
        if at == "copy":
            raise Unreachable("b: the connection broke")
        return IMAGE

    monkeypatch.setattr(migrate, "prepare", prepare)
    world.fails[at] = Unreachable("b: the connection broke")
    with pytest.raises(Refused, match=r"broke\n  nothing was changed: a has the services container, by its lease$"):
        migrate.execute(open_sample(world), inspect(world))
    assert not [one for one in world.log if one.partition(".")[2] not in ("open", "close", "wait")]


# The requests


ADDED = {
    "leave": ["stream_ports", "reset_ports", "mirror", "second", "gives"],
    "arrive": ["mirror", "base", "gate", "macvlan", "prepared", "gives"],
}


@pytest.mark.parametrize(
    ("command", "kind", "keys"), [("leave", SourceRequest, SOURCE), ("arrive", TargetRequest, TARGET)]
)
def test_requests_have_the_keys_that_the_first_version_wrote(
    world: World, command: str, kind: type[SourceRequest | TargetRequest], keys: dict[str, Any]
) -> None:
    move(world)
    sent = json.loads(json.dumps(asdict(world.requests[command])))
    assert list(sent) == [*keys, *ADDED[command]]
    assert read_request(kind, sent) == world.requests[command]
    assert read_request(kind, keys), "also without what was added since"
    assert (sent["host"], sent["peer"]) == (("a", "b") if command == "leave" else ("b", "a"))
    assert (sent["mark"], sent["generation"]) == ("/var/lib/sms/journal/sample.move", 4)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pid": "77"}, "pid is not a int"),
        ({"bridges": {"eth0": 1}}, r"bridges.eth0 is not a str"),
        ({"stop": [["slurmctld"], "munge"]}, r"stop\[1\] is not a tuple"),
        ({"lock": None}, "lock is not a str"),
    ],
)
def test_an_invalid_request_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(Problem, match=f"the request is invalid: {error}"):
        read_request(SourceRequest, {**SOURCE, **changes})
