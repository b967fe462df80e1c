"""Tasks of `sms-run --jobsync` that have a lease, on one host and on two that share a folder without its locks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from appliance.shared.state_lease import LEASE_FILE, LOCK_FILE, StateLease, parse_state_lease
from tests.unit.services.conftest import RUNTIME, run_program
from tests.unit.services.tasks import Node, end, gone, later, node_in

STATE = "/var/state"
TIMES = {"RENEW_S = 3": "RENEW_S = 0.2", "LIMIT_S = 20": "LIMIT_S = 3", "TTL_S = 30": "TTL_S = 5"}
LOCKS = "fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)"
WRITER = "while :; do echo {name} >>{root}/var/state/writes; touch {root}/{name}.up; sleep 0.02; done"


def make_host(node: Node, shared: Path, name: str, *, alone: bool) -> None:
    """Let a host's service write into the shared folder; ``alone``: it sees no locks of others, as over a network."""
    root = node.root
    for folder in ("etc/sms", "run/sms", "var"):
        (root / folder).mkdir(parents=True)
    (root / STATE[1:]).symlink_to(shared)
    node.programs = root / "bin"
    shutil.copytree(RUNTIME, node.programs, ignore=shutil.ignore_patterns("__pycache__"))
    lease, sync = node.programs / "smslease.py", node.programs / "smssync.py"
    for old, new in {**TIMES, **({LOCKS: 'raise OSError(errno.ENOLCK, "none")'} if alone else {})}.items():
        assert lease.read_text().count(old) == 1
        lease.write_text(lease.read_text().replace(old, new))
    if alone:
        text = sync.read_text().replace("/proc/sys/kernel/random/boot_id", str(root / "boot"))
        sync.write_text(text)
        (root / "boot").write_text(f"boot of {name}\n")
    node.add("it")
    node.services["it"]["run"] = ["sh", "-c", WRITER.format(name=name, root=root)]
    node.services["it"]["probe"]["exec"] = [["test", "-e", f"{root}/{name}.up"]]
    node.services["it"]["jobsync"]["lease"] = STATE
    node.add("other")


@dataclass
class Pair:
    """Two hosts that share a folder."""

    shared: Path
    a: Node
    b: Node

    @property
    def lease(self) -> StateLease:
        return parse_state_lease((self.shared / LEASE_FILE).read_bytes())

    @property
    def writers(self) -> list[str]:
        """Who wrote, one after the other."""
        return [name for name, _ in groupby((self.shared / "writes").read_text().split())]

    def await_writer(self, *names: str) -> None:
        later(lambda: (self.shared / "writes").exists() and self.writers == list(names))


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    shared = tmp_path / "shared"
    shared.mkdir()
    alone = getattr(request, "param", "hosts") == "hosts"
    with ExitStack() as stack:
        nodes = [stack.enter_context(node_in(tmp_path / name)) for name in ("a", "b")]
        for node in nodes:
            make_host(node, shared, node.root.name, alone=alone)
        yield Pair(shared, *nodes)


@pytest.mark.parametrize("pair", ["host"], indirect=True)
def test_a_killed_holder_on_the_same_host_is_not_waited_for(pair: Pair) -> None:
    """As an allocation beside one whose sms-run was killed: the kernel has killed the service with it."""
    task = pair.a.start("it", holder="first")
    pair.a.await_state("it", "ready")
    assert (pair.lease.generation, pair.lease.holder) == (1, "first")
    assert pair.a.record("it")["generation"] == 1
    pid = pair.a.pid("it")
    pair.b.start("it", holder="second")
    later(lambda: "first holds it" in pair.b.record("it").get("detail", ""))
    task.kill()
    pair.b.await_state("it", "ready")
    assert "until it is silent" not in pair.b.output("it"), "it does not count the time"
    gone(pid)
    pair.await_writer("a", "b")
    assert (pair.lease.generation, pair.lease.holder) == (2, "second")


@pytest.mark.parametrize("pair", ["host"], indirect=True)
def test_a_process_that_the_service_leaves_behind_does_not_hold_the_lock(pair: Pair) -> None:
    task = pair.a
    pid_file = task.root / "left"
    task.services["it"]["run"][2] = f"setsid sleep 600 & echo $! >{pid_file}; " + task.services["it"]["run"][2]
    (task.root / "etc/sms/services.json").write_text(json.dumps({"services": task.services}))
    first = task.start("it")
    task.await_state("it", "ready")
    later(lambda: pid_file.exists() and pid_file.read_text().strip())
    left = int(pid_file.read_text())
    try:
        opened = {path.name for path in Path(f"/proc/{task.pid('it')}/fd").iterdir()}
        assert opened & {str(number) for number in range(3, 10)} == set(), "nothing of sms-run"
        os.killpg(task.pid("it"), signal.SIGKILL)
        assert first.wait(60) == 137
        task.start("it")
        later(lambda: pair.lease.generation == 2 and task.record("it")["state"] == "ready")
        os.kill(left, 0)
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_frozen_holder_is_superseded_and_ends_when_it_wakes_up(pair: Pair) -> None:
    frozen = pair.a.start("it", holder="first")
    pair.a.await_state("it", "ready")
    service = pair.a.pid("it")
    os.killpg(service, signal.SIGSTOP)
    frozen.send_signal(signal.SIGSTOP)
    pair.b.start("it", holder="second")
    later(lambda: "first holds it (generation 1)" in pair.b.record("it").get("detail", ""))
    pair.await_writer("a", "b")
    assert (pair.lease.generation, pair.lease.holder) == (2, "second")
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(60) == 1
    gone(service)
    assert "is ended at once" in pair.a.output("it") and pair.a.record("it")["status"] == 1
    written = (pair.shared / "writes").stat().st_size
    later(lambda: (pair.shared / "writes").stat().st_size > written)
    assert pair.writers == ["a", "b"] and pair.lease.holder == "second"


def test_a_live_holder_on_another_host_is_waited_for(pair: Pair) -> None:
    first = pair.a.start("it", holder="first")
    pair.a.await_state("it", "ready")
    second = pair.b.start("it", "--wait", "7", holder="second")
    assert second.wait(60) == 1
    assert "first holds it" in pair.b.output("it") and pair.writers == ["a"]
    assert end(first) == 0
    assert (pair.lease.generation, pair.lease.holder, pair.lease.last) == (1, None, "first")
    pair.b.start("it", holder="second")
    pair.await_writer("a", "b")


@pytest.mark.parametrize("how", ["higher generation", "moved", "no renewal"])
def test_a_holder_that_has_lost_it_kills_its_service(pair: Pair, how: str) -> None:
    task = pair.a.start("it", holder="first")
    pair.a.await_state("it", "ready")
    if how == "no renewal":
        (pair.shared / LOCK_FILE).unlink()
        (pair.shared / LOCK_FILE).mkdir()
    elif how == "moved":
        (pair.shared / LEASE_FILE).write_bytes(StateLease(pair.lease.generation + 1, moved="container").text())
    else:
        (pair.shared / LEASE_FILE).write_bytes(StateLease(7, "second").text())
    service = pair.a.pid("it")
    assert task.wait(60) == 1
    gone(service)
    words = {"higher generation": "second has it (generation 7)", "moved": "moved to container (generation 2)"}
    assert words.get(how, "could not be renewed") in pair.a.output("it")
    if how == "moved":
        assert pair.lease.moved == "container", "it is not released"


@pytest.mark.parametrize("words", [("--jobsync",), ("--prepare",)])
def test_a_moved_state_is_refused(pair: Pair, words: tuple[str, ...]) -> None:
    (pair.shared / LEASE_FILE).write_bytes(StateLease(5, moved="container").text())
    done = run_program("sms-run", pair.a.root, *words, "it")
    assert done.returncode == 3
    assert b"its state was moved to container (generation 5)" in done.stdout and b"sms migrate" in done.stdout
    assert not (pair.shared / "writes").exists() and pair.lease.generation == 5


def test_a_preparation_is_the_one_writer_too(pair: Pair) -> None:
    assert run_program("sms-run", pair.a.root, "--prepare", "it").returncode == 0
    assert (pair.lease.generation, pair.lease.holder) == (1, None)
    pair.b.start("it", holder="second")
    pair.b.await_state("it", "ready")
    done = run_program("sms-run", pair.a.root, "--prepare", "--wait", "0", "it")
    assert done.returncode == 1 and b"it is not prepared: the lease of" in done.stdout
