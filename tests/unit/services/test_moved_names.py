"""The guard follows names of nodes that get other addresses: what it writes, and what the controller gets."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.operations.context import Cluster
from appliance.operations.services.names import SPLIT, NameWatch
from appliance.share import share
from tests.sites import open_debian
from tests.support.env import FakeAgents, Unlocked, fake_env
from tests.support.fake import Fake

NODES = [
    {"name": "n[1-2]", "cpus": 1, "memory_mb": 512},
    {"name": "m1", "address": "m1.example.org", "cpus": 1, "memory_mb": 512},
    {"name": "k1", "address": "10.20.0.9", "cpus": 1, "memory_mb": 512},
]


class World:
    """A host whose resolver has ``dns``, and a container with ``hosts``; ``updates``: commands for the controller.

    ``used``: the hosts file that the controller uses; ``accept``: addresses at which a slurmd answers, None: at all.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.dns = {"n1": "10.0.0.1", "n2": "10.0.0.2", "m1.example.org": "10.0.0.3"}
        self.hosts = "127.0.0.1 localhost\n10.0.0.1 n1\n10.0.0.2 n2\n10.0.0.3 m1.example.org m1\n10.20.0.9 k1\n"
        self.used = ""
        self.present = ["n1", "n2", "m1", "k1"]
        self.accept: set[str] | None = None
        self.updates: list[list[str]] = []
        self.written: list[dict[str, Any]] = []
        self.edited, self.down, self.runs, self.busy = False, False, True, False
        self.lines: list[str] = []
        listed = {"instances": [{"instance": "sms-sample", "pid": 7, "img": "/x", "logErrPath": "", "logOutPath": ""}]}
        none: dict[str, list[str]] = {"instances": []}
        self.host = Fake(
            {
                ("python3", "-I", "-c"): lambda *_: (
                    0,
                    "".join(f"{name} {one}\n" for name, one in self.dns.items()),
                ),
                ("apptainer", "instance", "list"): lambda *_: (0, json.dumps(listed if self.runs else none)),
                ("unshare",): self.inside,
            }
        )
        opened = open_debian(tmp_path)
        nodes = [type(opened.site.slurm.nodes[0]).model_validate(one) for one in NODES]
        site = opened.site.model_copy(update={"slurm": opened.site.slurm.model_copy(update={"nodes": tuple(nodes)})})
        env = fake_env({"fake": self.host}, here="fake", agents=FakeAgents(), locks=Unlocked())
        self.cluster: Cluster = replace(opened, site=site, env=env)
        self.watch = self.renewed()

    def renewed(self) -> NameWatch:
        """That of another guard."""
        return NameWatch(self.cluster, self.host, self.lines.append)

    def inside(self, argv: tuple[str, ...], given: bytes | None) -> tuple[int, str]:
        if argv[-1] == "read":
            return 0, f"{self.hosts}\n{SPLIT}\n{self.used}"
        if argv[-1] == "use":
            self.used = (given or b"").decode()
            return 0, ""
        if "sinfo" in argv:
            return (1, "") if self.down else (0, "\n".join(self.present))
        if "config" in argv:
            return 0, "SlurmctldPort = 6817\nSlurmdPort              = 7003\n"
        if "scontrol" in argv:
            if self.down:
                return 1, "slurm_update error: Unable to contact slurm controller"
            self.updates.append(list(argv[argv.index("update") + 1 :]))
            return 0, ""
        if any("connect-each" in word for word in argv):
            words = argv[next(at for at, word in enumerate(argv) if "connect-each" in word) + 1 :]
            assert set(words[1::2]) == {"7003"}
            good = [self.accept is None or one in self.accept for one in words[::2]]
            return 0, "".join(f"{number} {0 if one else 124}\n" for number, one in enumerate(good, 1))
        change = json.loads(given or b"{}")
        self.written.append(change)
        if not self.edited:
            lines = []
            for line in self.hosts.splitlines():
                found = [change["names"][name] for name in line.split()[1:] if name in change["names"]]
                lines.append(" ".join([found[0], *line.split()[1:]]) if found else line)
            self.hosts = "\n".join([*lines, *change["lines"], ""])
        return 0, json.dumps({"edited": self.edited})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_nothing_is_written_where_nothing_has_changed(world: World) -> None:
    world.watch.check()
    world.watch.check()
    assert not world.written and not world.updates and not world.lines
    assert world.used == world.hosts


def test_other_addresses_reach_the_controller(world: World) -> None:
    world.watch.check()
    world.dns |= {"n2": "10.0.0.22", "m1.example.org": "10.0.0.33"}
    world.watch.check()
    assert world.written == [{"names": {"n2": "10.0.0.22", "m1.example.org": "10.0.0.33"}, "lines": []}]
    assert world.updates == [["NodeName=n2,m1", "NodeAddr=n2,m1.example.org"]]
    assert "10.0.0.33 m1.example.org m1" in world.hosts and "10.20.0.9 k1" in world.hosts
    world.watch.check()
    assert len(world.updates) == 1 and len(world.lines) == 1


def test_what_is_not_resolved_keeps_its_address(world: World) -> None:
    world.watch.check()
    world.dns = {}
    world.watch.check()
    world.dns = {"n1": "127.0.1.1", "n2": "10.0.0.2"}
    world.watch.check()
    assert not world.written and not world.updates


def test_a_name_that_had_no_address(world: World) -> None:
    world.hosts = world.hosts.replace("10.0.0.3 m1.example.org m1\n", "").replace("10.0.0.2 n2\n", "")
    world.watch.check()
    assert world.written == [{"names": {}, "lines": ["10.0.0.2 n2", "10.0.0.3 m1.example.org m1"]}]
    assert world.updates == [["NodeName=n2,m1", "NodeAddr=n2,m1.example.org"]]


def test_a_node_that_the_controller_does_not_have_is_left_out(world: World) -> None:
    """The site file has it, and it was not applied: one unknown name would end an update of all after it."""
    world.present.remove("n1")
    world.watch.check()
    world.dns |= {"n1": "10.0.0.11", "n2": "10.0.0.22"}
    world.watch.check()
    assert world.written[0]["names"] == {"n2": "10.0.0.22"} and world.updates == [["NodeName=n2", "NodeAddr=n2"]]


@pytest.mark.parametrize(
    ("accept", "followed"),
    [
        ({"10.0.0.1", "10.0.0.2", "10.0.0.3"}, set()),
        ({"10.0.0.1", "10.0.0.3"}, {"n2"}),  # it moves, and is off
        ({"10.0.0.1", "203.0.113.9"}, {"n1", "n2", "m1.example.org"}),
    ],
)
def test_nodes_that_answer_where_they_were_do_not_move(world: World, accept: set[str], followed: set[str]) -> None:
    """A name server that answers every name, a wrong zone."""
    world.watch.check()
    world.dns, world.accept = dict.fromkeys(world.dns, "203.0.113.9"), accept
    world.watch.check()
    world.watch.check()
    assert {name for one in world.written for name in one["names"]} == followed
    assert len(world.updates) == bool(followed)
    assert len([line for line in world.lines if "no slurmd answers" in line]) == (len(followed) < 3)


def test_a_controller_that_does_not_answer_is_notified_later(world: World) -> None:
    """Also by another guard, and also if `sms apply` has written the addresses."""
    world.watch.check()
    world.hosts, world.dns["n1"], world.down = world.hosts.replace("10.0.0.1 n1", "10.0.0.11 n1"), "10.0.0.11", True
    with pytest.raises(SmsError):
        world.watch.check()
    world.down = False
    world.renewed().check()
    assert world.updates == [["NodeName=n1", "NodeAddr=n1"]] and not world.written
    world.renewed().check()
    assert len(world.updates) == 1


def test_a_hosts_file_of_before_is_written_again(world: World) -> None:
    """As by a restore of that path."""
    world.watch.check()
    before, world.dns["n1"] = world.hosts, "10.0.0.11"
    world.watch.check()
    world.hosts = before
    world.watch.check()
    assert "10.0.0.11 n1" in world.hosts


def test_a_file_that_somebody_has_edited_stays(world: World) -> None:
    """It is reported once, not every minute; what it has the controller uses."""
    world.watch.check()
    world.dns["n1"], world.edited = "10.0.0.11", True
    world.watch.check()
    world.watch.check()
    assert not world.updates and len(world.lines) == 1
    world.hosts = world.hosts.replace("10.0.0.2 n2", "10.0.0.99 n2")
    world.watch.check()
    assert world.updates == [["NodeName=n2", "NodeAddr=n2"]]


def test_without_an_instance(world: World) -> None:
    world.runs, world.dns["n1"] = False, "10.0.0.11"
    world.watch.check()
    assert not world.written
    world.runs = True
    world.watch.check()
    assert world.updates == [["NodeName=n1", "NodeAddr=n1"]]


@pytest.mark.parametrize("edited", [False, True])
def test_the_program_in_the_container(tmp_path: Path, *, edited: bool) -> None:
    """With the modules of the image, below another root."""
    text = "127.0.0.1 localhost\n10.0.0.1  n1 # rack 1\n10.0.0.3 m1.example.org m1\n"
    for folder in ("etc/sms", "opt/sms/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/hosts").write_text(text)
    digest = hashlib.sha256((text + edited * "x").encode()).hexdigest()
    record = tmp_path / "etc/sms/seeded.json"
    record.write_text(json.dumps({"/etc/hosts": digest, "/etc/other": "1"}))
    script = share("definitions", "scripts", "follow-names").read_text()
    program = script.replace("/opt/sms/bin", str(share("definitions", "runtime")))
    given = {"names": {"n1": "10.0.0.11", "m1.example.org": "10.0.0.33"}, "lines": ["10.0.0.2 n2"]}
    done = subprocess.run(
        [sys.executable, "-c", program, "write"],
        input=json.dumps(given),
        env={"SMS_ROOT": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"edited": edited}
    after = (tmp_path / "etc/hosts").read_text()
    if edited:
        assert after == text
        return
    assert after == ("127.0.0.1 localhost\n10.0.0.11  n1 # rack 1\n10.0.0.33 m1.example.org m1\n10.0.0.2 n2\n")
    kept = json.loads(record.read_text())
    assert kept == {"/etc/hosts": hashlib.sha256(after.encode()).hexdigest(), "/etc/other": "1"}
