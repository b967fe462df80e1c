"""While a migration runs: what status says on each host and elsewhere, what other verbs are refused with."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.real.migration.conftest import where
from tests.real.moves import CARRIERS, MARK, Hosts, Stepping
from tests.waiting import wait_until

pytestmark = pytest.mark.real

STATES = {
    ">send": ("read", "copy"),
    ">place": ("stopping", None),
    ">probe": ("stopping", "started"),
    ">given": (None, "up"),
}
"""By step: the states of the source and of the target; None for the one that has just got its message."""
VERBS = (("migrate", "{target}"), ("apply", "--host", "{source}"), ("stop", "--host", "{source}"))


@pytest.fixture
def began() -> Iterator[float]:
    yield time.time() - 1


def status(hosts: Hosts, *words: str, on: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hosts.sms("status", "--json", *words, on=on, ok=(0, 4)).stdout)
    return found


def test_everybody_reads_what_is_under_way(hosts: Hosts, began: float) -> None:
    source, target = where(hosts)
    run = Stepping(hosts.lab, "migrate", target)
    try:
        for step, states in STATES.items():
            assert run.to(step), run.end(60)
            for host, state in zip((source, target), states, strict=True):
                shown = status(hosts, on=host)
                move, said = shown["move"], (step, host, shown)
                names = ("verb", "source", "target", "host", "under_way")
                assert [move[name] for name in names] == ["migrate", source, target, host, True], said
                assert state in (None, move["state"]), said
                assert move["on"] == "admin" and move["by"] == os.environ.get("SUDO_USER", "root"), said
                assert began < move["since"] <= time.time() and move["process"] > 1, said
                assert f"kill {move['process']}" in shown["warnings"][0], said
                assert not [line for line in shown["warnings"] if line.startswith("no guard runs")], said
            seen = status(hosts, on="admin")  # of the host with the lease
            assert seen["host"] in CARRIERS and seen["move"]["under_way"], seen
            listed = hosts.sms("host", "list", "--json", on="admin")  # status 0: nobody is to stop one of them
            assert [line["move"]["target"] for line in json.loads(listed.stdout)] == [target, target]
            if step == ">place":
                check_refusals(hosts, source, target)
            run.go()
        run.free()
        assert run.end(200).status == 0
    finally:
        run.kill()
    for host in CARRIERS:
        assert status(hosts, on=host)["move"] is None
    assert hosts.status(target)["healthy"] and hosts.status(target)["guarded"]


def check_refusals(hosts: Hosts, source: str, target: str) -> None:
    """Other verbs change nothing, and name the run that is to be waited for."""
    process = status(hosts, on=source)["move"]["process"]
    for verb in VERBS:
        words = [word.format(source=source, target=target) for word in verb]
        done = hosts.sms("-q", *words, "--json", on="admin", ok=(3,))
        error = json.loads(done.stdout)["error"]
        assert error["status"] == 3 and f"kill {process}" in error["hint"], (words, error)
        assert source in error["message"] and target in error["message"], (words, error)


def test_the_command_that_status_prints_ends_it_in_order(hosts: Hosts) -> None:
    source, target = where(hosts)
    run = Stepping(hosts.lab, "migrate", target)
    try:
        assert run.to(">stop"), run.end(60)
        move = status(hosts, on=source)["move"]
        hosts.host(move["on"]).run("kill", str(move["process"]))
        run.let_go()
        ended = run.end(200)
    finally:
        run.kill()
    assert ended.status not in (0, -signal.SIGTERM) and f"serves on {source} as before" in ended.stderr.decode(), ended
    assert hosts.status(source)["healthy"] and status(hosts, on=source)["move"] is None


@pytest.mark.full
def test_one_that_was_killed_is_named_with_what_ends_it(hosts: Hosts) -> None:
    """On the target, where no guard runs. The source's agent lives: it restores the services there."""
    source, target = where(hosts)
    run = Stepping(hosts.lab, "migrate", target)
    try:
        assert run.to(">probe"), run.end(60)  # the instance has started
        agent = json.loads(hosts.host(target).read(MARK) or b"{}")["pid"]
        hosts.host(target).run("kill", "-9", str(agent))
    finally:
        run.kill()
    wait_until(lambda: status(hosts, on=source)["move"] is None, "the source serves again")
    shown = status(hosts, on=target)
    move = shown["move"]
    assert (move["state"], move["under_way"], shown["running"], shown["healthy"]) == ("started", False, True, False)
    assert f"`sms migrate {target}`" in shown["warnings"][0] and "kill" not in shown["warnings"][0]
    assert json.loads(hosts.sms("host", "list", "--json", on="admin", ok=(4,)).stdout)
    hosts.sms("-q", "migrate", "--force", target, on="admin")
    assert status(hosts, on=target)["move"] is None and hosts.status(target)["healthy"]
