"""`sms overlay push` and `pull` between the lab's admin hosts, over its SSH: to a standby store, and to Borg."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.store import Store
from appliance.host.base import Result
from appliance.lab import Lab
from tests import stores
from tests.conftest import find_tool
from tests.real.labs import fresh_lab
from tests.stores import keep_image, make_image, read_all, write_site
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME = "t-push"
BIG_MB, BIG_FILES = 160, 600
FAST_MB, FAST_FILES = 800, 3000
"""To measure with."""
IMPATIENT = """
import sys
from appliance.cli import main
from appliance.host import ssh
from appliance.tools import agent
ssh.GONE_MS = 5000
agent.MAIN = "from appliance.agent import transfer\\ntransfer.PATIENCE_S = 5.0\\n" + agent.MAIN
sys.exit(main(sys.argv[1:]))
"""
"""`sms` that waits seconds for the far side where others wait a minute, and so does its agent there."""


@dataclass
class Hosts:
    """A lab without an appliance; snapshots are put into host-a's store by hand."""

    lab: Lab
    folder: Path

    def store(self, host: str) -> Store:
        return Store(str(self.lab.layout.disk / host / "snapshots" / "lab"))

    def add(self, name: str, **facts: Any) -> int:
        return keep_image(self.store("host-a"), self.folder / name, **facts).number

    def sms(self, *words: str, on: str = "host-a", ok: tuple[int, ...] = (0,)) -> Result:
        return self.lab.host(on).run("sms", "--site", "/etc/sms/push.yaml", *words, ok=ok, timeout=300)

    def push(self, *words: str, on: str = "host-a", ok: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            self.sms("-q", "overlay", "push", "--json", *words, on=on, ok=ok).stdout
        )
        return found

    def come(self) -> int:
        """Chunks that have come to host-b's store."""
        return len(stores.stored_chunks(Path(self.store("host-b").root)))

    def wait_for(self, count: int, process: subprocess.Popen[Any]) -> None:
        """Until so many have come."""
        while self.come() < count:
            assert process.poll() is None, "it has ended before"
            time.sleep(0.005)

    def clear(self) -> None:
        for host in ("host-a", "host-b"):
            for name in ("snapshots", "repo", "borg"):
                shutil.rmtree(self.lab.layout.disk / host / name, ignore_errors=True)

    def agents(self) -> list[str]:
        """Agents that work on snapshots of this lab."""
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return [line for line in listed.splitlines() if "pyz import " in line or "pyz export " in line]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    find_tool("borg")
    with fresh_lab(NAME, 0) as opened:
        found = Hosts(opened, tmp_path_factory.mktemp("push"))
        write_site(found.lab, "push.yaml")
        make_image(found.folder / "one.img", seed=1)
        make_image(found.folder / "two.img", seed=2)
        make_image(found.folder / "big.img", seed=3, size_mb=BIG_MB, files=BIG_FILES)
        yield found


@pytest.fixture
def hosts(lab: Hosts) -> Hosts:
    lab.clear()
    return lab


def find_text(image: Path) -> int:
    """Where the contents of the file of text begin."""
    with image.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"the same again")


@pytest.mark.parametrize("on", ["host-a", pytest.param("admin", marks=pytest.mark.full)])
def test_everywhere_and_back(hosts: Hosts, on: str) -> None:
    """From the host itself, and from where a person sits: then both ends are far."""
    hosts.add("one.img")
    hosts.add("two.img")
    where = ("--host", "host-a") if on == "admin" else ()
    would = hosts.push("--all-missing", "-n", *where, on=on)
    assert [(one["target"], one["snapshot"], one["state"]) for one in would] == [
        (target, number, "would push") for target in ("borg", "host-b") for number in (1, 2)
    ]
    assert not (hosts.lab.layout.disk / "host-b" / "snapshots").exists()
    done = hosts.push("--all-missing", *where, on=on)
    assert [one["state"] for one in done] == ["pushed"] * 4, done
    assert hosts.push("--all-missing", *where, on=on) == []
    assert {one["state"] for one in hosts.push("2", *where, on=on)} == {"present"}
    there = hosts.store("host-b")
    stores.assert_whole(there)
    for number, name in ((1, "one.img"), (2, "two.img")):
        assert read_all(there, number) == (hosts.folder / name).read_bytes()
    shutil.rmtree(hosts.store("host-a").root)
    for source, which in (("borg", "1"), ("host-b", "latest")):
        hosts.sms("overlay", "pull", "--from", source, which, *where, on=on)
    assert stores.numbers(hosts.store("host-a")) == [1, 2]
    stores.assert_whole(hosts.store("host-a"))
    again = hosts.sms("overlay", "pull", "--from", "borg", "1", *where, on=on).text
    assert again == "snapshot 1 of borg is on host-a already"
    shown = hosts.sms("overlay", "pull", "--from", "borg", "--list", *where, on=on).text.splitlines()
    assert len(shown) == 2 and "sms-lab-000002-" in shown[1]
    assert hosts.agents() == []


def change_text(image: Path) -> None:
    """Change a few bytes of the file of text."""
    with image.open("r+b") as stream:
        stream.seek(find_text(image) + 1000)
        stream.write(b"changed")


def test_what_is_known_there_does_not_travel(hosts: Hosts) -> None:
    hosts.add("one.img")
    hosts.push("--to", "host-b")
    image = hosts.folder / "changed.img"
    shutil.copy(hosts.folder / "one.img", image)
    change_text(image)
    hosts.add("changed.img")
    (second,) = hosts.push("--to", "host-b")
    assert second["bytes"] == 1 << 16


@pytest.mark.full
@pytest.mark.alone
def test_how_fast(hosts: Hosts) -> None:
    """Random bytes do not pack; what is known there does not travel."""
    make_image(hosts.folder / "fast.img", seed=4, size_mb=FAST_MB, files=FAST_FILES)
    hosts.add("fast.img")
    (first,) = hosts.push("--to", "host-b")
    rate = first["bytes"] / first["seconds"] / 1e6
    print(f"{first['bytes'] / 1e6:.0f} MB in {first['seconds']} s: {rate:.0f} MB/s")
    assert first["bytes"] > 500_000_000
    assert rate > 20
    change_text(hosts.folder / "fast.img")
    hosts.add("fast.img")
    (second,) = hosts.push("--to", "host-b")
    print(f"{second['bytes'] / 1e6:.1f} MB in {second['seconds']} s")
    assert second["bytes"] == 1 << 16
    (third,) = hosts.push("--to", "borg")
    print(f"borg: {third['bytes'] / 1e6:.0f} MB in {third['seconds']} s")


@pytest.mark.parametrize("chunks", [1, *(pytest.param(count, marks=pytest.mark.full) for count in (0, 500, 1000))])
def test_sms_is_killed_and_the_next_run_resumes(hosts: Hosts, chunks: int) -> None:
    """Once so many chunks have come; there are some 1,900."""
    hosts.add("big.img")
    host = hosts.lab.host("host-a")
    argv = [*host.prefix, "sms", "--site", "/etc/sms/push.yaml", "-q", "overlay", "push", "--to", "host-b"]
    with subprocess.Popen(argv, start_new_session=True) as process:
        while not hosts.agents():
            time.sleep(0.01)
        hosts.wait_for(chunks, process)
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not hosts.agents(), "both ends see that nobody is in between", 60)
    there = hosts.store("host-b")
    assert stores.numbers(there) == []
    came = hosts.come()
    (again,) = hosts.push("--to", "host-b")
    assert (again["state"], again["bytes"] // 65536 + came) == ("pushed", len(stores.named_chunks(there)))
    stores.assert_whole(there)


def test_a_network_that_is_cut(hosts: Hosts) -> None:
    """The end is not signalled: this side gives up after a while, and so does the other one's agent."""
    hosts.add("big.img")
    host = hosts.lab.host("host-a")
    sms = [*host.prefix, sys.executable, "-c", IMPATIENT]
    argv = [*sms, "--site", "/etc/sms/push.yaml", "-q", "overlay", "push", "--json", "--to", "host-b"]
    switch = ["ip", "-n", hosts.lab.layout.namespace("switch"), "link", "set", "u-host-b"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            hosts.wait_for(1, process)
            subprocess.run([*switch, "down"], check=True)
            out, _ = process.communicate(timeout=200)
        finally:
            subprocess.run([*switch, "up"], check=True)
    (failed,) = json.loads(out)
    assert (process.returncode, failed["state"]) == (1, "failed")
    assert "host-b" in failed["error"] and failed["hint"]
    wait_until(lambda: not hosts.agents(), "no agent is left", 90)
    (again,) = hosts.push("--to", "host-b")
    assert again["state"] == "pushed"
    stores.assert_whole(hosts.store("host-b"))


def test_a_target_that_fails_hinders_no_other(hosts: Hosts) -> None:
    hosts.add("one.img")
    (hosts.lab.etc / "keys" / "borg.pass").chmod(0o644)
    try:
        done = hosts.push(ok=(1,))
    finally:
        (hosts.lab.etc / "keys" / "borg.pass").chmod(0o600)
    assert [(one["target"], one["state"]) for one in done] == [("borg", "failed"), ("host-b", "pushed")]
    said = hosts.sms("overlay", "push", "--to", "host-b", ok=(0,)).text
    assert said == "snapshot 1 is at host-b already"


def test_a_second_run_and_words_that_are_wrong(hosts: Hosts) -> None:
    hosts.add("one.img")
    there = hosts.store("host-b")
    there_lock = there.writing()
    with there_lock:
        (busy,) = hosts.push("--to", "host-b", ok=(3,))
    assert "another run is at work" in busy["error"]
    assert b"are on host-a already" in hosts.sms("overlay", "push", "--to", "host-a", ok=(3,)).stderr
    assert b"no admin host named host-c" in hosts.sms("overlay", "push", "--to", "host-c", ok=(2,)).stderr
    assert b"there is no snapshot 9" in hosts.sms("overlay", "push", "9", ok=(3,)).stderr
    assert b"has no snapshot 9" in hosts.sms("overlay", "pull", "--from", "host-b", "9", ok=(3,)).stderr
    assert b"there is no repository" in hosts.sms("overlay", "pull", "--from", "borg", ok=(3,)).stderr
