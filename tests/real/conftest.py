"""A lab with a running appliance, shared by the tests of one session."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.host.base import Result
from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.operations.image.build import Built
from appliance.tools import ext3
from tests.copies import give
from tests.real.labs import build_image, fresh_lab
from tests.real.logs import keep_logs
from tests.real.sshd import Server, run_sshd

Wrapper = Generator[None, pytest.TestReport, pytest.TestReport]
NODES = 4
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything in this folder needs root and real namespaces: skipped on a laptop, failing in CI."""
    if os.geteuid() == 0 or os.environ.get("CI"):
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Wrapper:
    """A test that fails leaves the logs of all labs in one folder, and names it."""
    report = yield
    if report.failed and item.get_closest_marker("real"):
        try:
            kept = str(keep_logs(item.nodeid))
        except Exception as error:  # whatever it is, the test's own failure is what counts
            kept = f"could not be kept: {error!r}"
        report.sections.append(("logs of the labs", kept))
    return report


@dataclass(frozen=True)
class Playground:
    """A lab, and `sms` on its hosts."""

    lab: Lab

    def host(self, name: str) -> Netns:
        """A host of the lab."""
        return self.lab.host(name)

    def sms(self, *words: str, on: str = "host-a", ok: tuple[int, ...] | None = (0,), timeout: float = 240) -> Result:
        """Run sms on a host of the lab."""
        return self.host(on).run("sms", *words, ok=ok, timeout=timeout)

    def status(self, on: str = "host-a") -> dict[str, Any]:
        """`sms status --json`."""
        found: dict[str, Any] = json.loads(self.sms("status", "--json", on=on, ok=(0, 4)).stdout)
        return found

    def instances(self, on: str = "host-a") -> list[str]:
        """Instances that run on a host."""
        listed = json.loads(self.host(on).run("apptainer", "instance", "list", "--json").stdout)
        return [entry["instance"] for entry in listed["instances"] or []]

    def loops(self, on: str = "host-a") -> list[str]:
        """Loop devices on the overlay."""
        return ext3.users_of(self.host(on), "/var/lib/sms/overlays/lab.img")

    def lease(self, on: str = "host-a") -> dict[str, Any]:
        """The lease as it lies on a host."""
        data = self.host(on).read("/var/lib/sms/overlays/lab.lease")
        return json.loads(data) if data else {}

    def at_rest(self, on: str) -> bool:
        """Nothing for `sms stop` to do: no instance, the overlay is not open, no lease held."""
        return not (self.instances(on) or self.loops(on) or self.lease(on).get("holder"))

    def assert_nothing_runs(self, on: str = "host-a") -> None:
        """No instance, no loop device, no lease held, no half overlay."""
        assert self.instances(on) == []
        assert self.loops(on) == []
        assert self.lease(on).get("holder") is None
        left = self.host(on).run("sh", "-c", "ls -A /var/lib/sms/overlays 2>/dev/null", ok=None).text.split()
        assert not [name for name in left if name.endswith((".new", ".new~"))]

    def variant(self, name: str, change: Callable[[dict[str, Any]], None]) -> str:
        """A changed copy of the site file beside it; its path on the lab's hosts."""
        import yaml

        document = yaml.safe_load((self.lab.etc / "sms.yaml").read_text())
        change(document)
        (self.lab.etc / name).write_text(yaml.safe_dump(document))
        return f"/etc/sms/{name}"


@pytest.fixture(scope="session")
def playground() -> Iterator[Playground]:
    """A fresh lab whose admin hosts have never run the services container."""
    with fresh_lab("t-main", NODES) as lab:
        yield Playground(lab)


@pytest.fixture(scope="session")
def built(playground: Playground) -> Built:
    """The lab's image, built for real where nothing like it has been built before."""
    return build_image(playground.lab)


@pytest.fixture
def stopped(playground: Playground, built: Built) -> Playground:
    """The services container is not running on any host; its image is where the admin hosts expect it."""
    for host in ("host-a", "host-b"):
        if not playground.at_rest(host):
            playground.sms("-q", "stop", on=host)
    begin_on(playground, "host-a")
    give_image(playground, built)
    return playground


@pytest.fixture
def running(playground: Playground, built: Built) -> Playground:
    """The services container runs on host-a and every service answers.

    They do if nothing was started or ended since the last start that said so, which takes seconds.
    """
    if [playground.lease(), services()] != SERVING:
        begin_on(playground, "host-a")
        playground.sms("-q", "start", "--host", "host-a", on="admin")
        SERVING[:] = [playground.lease(), services()]
    return playground


SERVING: list[object] = []
"""The lease of host-a, and ``services``, when the services container was last known to serve there."""


def services() -> set[tuple[str, str]]:
    """The processes of services containers on this machine, and guards, by id and time of their start."""
    daemons, guards, all_of = set(), set(), {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        pid = stat.parent.name
        with suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            all_of[pid] = (fields[1], fields[19])
            if name == "supervisord":
                daemons.add(pid)
            elif name == "sms" and b"guard" in stat.with_name("cmdline").read_bytes():
                guards.add(pid)
    return {(pid, begun) for pid, (parent, begun) in all_of.items() if pid in daemons | guards or parent in daemons}


def begin_on(playground: Playground, name: str) -> None:
    """An earlier test may have left the newest overlay on the other: then neither has one, and ``name`` may start."""
    other = "host-b" if name == "host-a" else "host-a"
    overlay = "/var/lib/sms/overlays/lab.img"
    if playground.at_rest(name) and playground.at_rest(other) and playground.host(other).works("test", "-e", overlay):
        for host in (name, other):
            playground.host(host).run("sh", "-c", f"rm -f {overlay}*")


def give_image(playground: Playground, built: Built, name: str = "host-a") -> None:
    """Put the image into an admin host's own store, as a delivery does."""
    host = playground.host(name)
    host.run("mkdir", "-p", "-m", "0700", "/var/lib/sms/images")
    target = f"/var/lib/sms/images/{built.key}.sif"
    if not host.works("test", "-f", target):
        give(host, built.image, target)
    host.run("ln", "-sfn", f"{built.key}.sif", "/var/lib/sms/images/lab.sif")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An sshd on the loopback."""
    yield from run_sshd(tmp_path_factory.mktemp("sshd"), "127.0.0.1")


def processes(pattern: str) -> list[int]:
    """Processes of this machine whose command line holds ``pattern``."""
    listed = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]
