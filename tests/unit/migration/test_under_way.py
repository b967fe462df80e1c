"""What a host knows of a move that is under way there, or was killed: in status, and to verbs that have to wait."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest

from appliance.errors import Busy
from appliance.host.base import CommandError, Result
from appliance.operations import history
from appliance.operations.env import LOCKED
from appliance.operations.preflight import lock_host
from appliance.operations.services.unfinished import recover_migration
from appliance.operations.under_way import mark_path, query_move
from appliance.plan.migration.under_way import STEPS, Move, find_move
from appliance.shared.migration import MoveMark
from appliance.shared.records import to_json
from appliance.tools.files import HELD
from tests.places import ROOT
from tests.support.env import FakeAgents, FakeHosts, with_env
from tests.support.fake import Fake
from tests.unit.migration.requests import SOURCE, TARGET
from tests.unit.migration.test_steps import open_sample

BEGUN = {"at": 1e9, "verb": "migrate", "event": "begun", "from": "a", "to": "b", "by": "alice", "on": "admin"}
BEGUN |= {"process": 4242}
STARTER = {"since": 1e9, "by": "alice", "on": "admin", "process": 4242}
UNKNOWN = {"since": 0.0, "by": "", "on": "", "process": 0}
LATER = {"at": 2e9, "verb": "migrate", "event": "stopping", "peer": "b"}


@pytest.mark.parametrize(
    ("mark", "lines", "under_way", "found"),
    [
        (None, [BEGUN], False, None),
        (None, [], True, None),
        (None, [BEGUN, LATER], True, None),  # a snapshot, or any other moment's work
        (None, [BEGUN], True, ("migrate", "a", "b", "", True, STARTER)),
        (("leave", "read", SOURCE), [BEGUN], True, ("migrate", "a", "b", "read", True, STARTER)),
        (("leave", "stopping", SOURCE), [BEGUN, LATER], False, ("migrate", "a", "b", "stopping", False, STARTER)),
        (("arrive", "up", {**TARGET, "host": "a"}), [], True, ("migrate", "b", "a", "up", True, UNKNOWN)),
        # Of another verb, and of a version that did not write who it was.
        (("leave", "read", {**SOURCE, "verb": "apply", "peer": "a"}), [BEGUN], True, ("apply", "a", "a", "read", True)),
        (("leave", "read", SOURCE), [{"verb": "migrate", "event": "begun", "at": "x"}], True, ("migrate", "a", "b")),
        (("", "", {}), [], True, ("migrate", "a", "?", "", True, UNKNOWN)),
    ],
)
def test_what_is_found(mark: Any, lines: list[dict[str, Any]], under_way: bool, found: Any) -> None:
    known = MoveMark(mark[0], mark[1], 7, mark[2]) if mark else None
    move = find_move("a", known, lines, under_way=under_way)
    if found is None:
        assert move is None
        return
    assert move and move.host == "a" and move.step == STEPS.get(move.state, "")
    shown = (move.verb, move.source, move.target, move.state, move.under_way)
    assert shown[: len(found)] == found[:5]
    if len(found) == 6:
        assert {name: value for name, value in asdict(move).items() if name in STARTER} == found[5]


SAVED = re.compile(r'(?:_enter|save_state)\("(\w+)"')


def test_every_state_that_an_agent_stores_has_words() -> None:
    sources = (path.read_text() for path in (ROOT / "appliance" / "agent").glob("*.py"))
    assert set(STEPS) == {state for text in sources for state in SAVED.findall(text)}


def test_an_administrator_reads_who_it_was_and_what_to_do() -> None:
    move = Move("migrate", "a", "b", "a", "read", STEPS["read"], True, **STARTER)  # type: ignore[arg-type]
    assert all(word in move.text for word in ("from a to b", "2001-09-09", STEPS["read"], "alice", "admin", "4242"))
    assert "`kill 4242` on admin" in move.hint and "`sms migrate b` again" in move.hint
    killed = replace(move, under_way=False)
    assert "interrupted on a" in killed.text and "kill" not in killed.hint and "`sms migrate b` again" in killed.hint
    assert "kill" not in replace(move, on="").hint, "whom?"
    assert "`sms apply` again" in replace(move, verb="apply", target="a").hint


class Locked(Fake):
    """A host whose lock another run holds."""

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        raise CommandError(Result(self.name, argv, LOCKED, b"", b""))
        yield


def busy_host(*lines: dict[str, Any], state: str = "") -> Locked:
    host = Locked({("test",): (0, ""), ("flock",): (HELD, ""), ("apptainer",): (0, ""), ("sh",): (0, "")}, name="a")
    cluster = open_sample()
    host.files[str(cluster.places.history)] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    if state:
        host.files[mark_path(cluster)] = to_json(MoveMark("leave", state, 7, SOURCE))
    return host


def test_a_verb_that_has_to_wait_says_for_what() -> None:
    host = busy_host(BEGUN, LATER, state="stopping")
    move = query_move(open_sample(), host)
    assert move and move.under_way
    with pytest.raises(Busy) as caught, lock_host(open_sample(), host):
        pass
    assert (caught.value.message, caught.value.hint) == (move.text, move.hint)

    def resume(*_: Any) -> dict[str, Any]:
        raise Busy("another sms is at work on this host")

    with pytest.raises(Busy) as caught:
        recover_migration(with_env(open_sample(), agents=FakeAgents(answers={"resume": resume})), host)
    assert (caught.value.message, caught.value.hint) == (move.text, move.hint)


def test_what_is_refused_inside_the_lock_stays_as_it_is() -> None:
    host = busy_host(BEGUN, state="stopping")
    host.hold = Fake({}).hold  # type: ignore[method-assign]
    with pytest.raises(Busy, match=r"^another$"), lock_host(open_sample(), host):
        raise Busy("another")


def test_a_moment_s_work_has_no_words() -> None:
    with pytest.raises(Busy, match="another sms is at work on a"), lock_host(open_sample(), busy_host(BEGUN, LATER)):
        pass


@pytest.mark.parametrize("lives", [True, False])
def test_a_run_that_was_killed_before_its_first_step_does_not_have_the_lock(lives: bool) -> None:
    host = busy_host({**BEGUN, "on": "a"})
    host.answers["test", "-d", "/proc/4242"] = (int(not lives), "")
    assert (query_move(open_sample(), host) is not None) is lives


def test_the_beginning_of_a_verb_has_who_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "alice")
    host = Fake({}, name="a")
    cluster = with_env(open_sample(), hosts=FakeHosts({"a": host}, "a"))
    history.note(cluster, host, "migrate", "begun", **{"from": "a", "to": "b"})
    history.note(cluster, host, "migrate", "moved")
    begun, moved = history.read_history(cluster, host)
    assert (begun["by"], begun["on"]) == ("alice", "a") and isinstance(begun["process"], int)
    assert "by" not in moved
    assert find_move("a", None, [begun], under_way=True)
