"""Exports for Podman, run by Debian's podman 4.3.1: Compose as it is, quadlets as the commands of the generated units.

Podman gets quadlets from 4.4 on, and `Notify=healthy` from 5.0: here the test does what systemd would, in its order.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml

from appliance.host.base import Result
from appliance.lab.engines.hosts import DISK, EngineHost
from appliance.lab.engines.programs import find_program
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.engines.export import export
from appliance.operations.engines.image import make_oci
from appliance.progress import Silent
from tests.real.engines.conftest import need_engines
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NUMBER = 41
PREFIX = "sms-lab-slurmctld"
SERVICES = ["slurmctld", "munge"]
NOT_IN_4_3 = ("--cgroups=split", "--sdnotify=healthy")
"""Options of the generated commands: there is no cgroup of a unit here, and 4.3.1 knows no readiness by health."""


class Podman:
    """Podman of a host without systemd: health is asked for by the test, instead of by timers."""

    def __init__(self) -> None:
        self.host = EngineHost("podman", NUMBER)
        storage, settings = self.host.disk / "storage.conf", self.host.disk / "containers.conf"
        root = f'graphroot = "{self.host.disk}/containers"\nrunroot = "/run/containers"\n'
        storage.write_text(f'[storage]\ndriver = "overlay"\n{root}')
        # crun refuses a machine that has both versions of cgroups.
        settings.write_text('[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n')
        self.environment = (
            "env",
            f"CONTAINERS_STORAGE_CONF={storage}",
            f"CONTAINERS_CONF={settings}",
            "DISABLE_HC_SYSTEMD=true",
        )

    def run(self, *words: str, ok: tuple[int, ...] | None = (0,), input: bytes | None = None) -> Result:
        """Run a command there."""
        return self.host.run(*self.environment, *words, ok=ok, input=input)

    def is_healthy(self, name: str) -> bool:
        """Whether the probe of a container succeeds."""
        return self.run("podman", "healthcheck", "run", name, ok=None).status == 0

    def clear(self) -> None:
        """Remove all containers and volumes."""
        self.run("podman", "pod", "rm", "-af")
        self.run("podman", "rm", "-af", "-t", "20", "--depend")
        self.run("podman", "volume", "rm", "-af")


@pytest.fixture(scope="module")
def podman(site: Cluster, signed_image: Path) -> Iterator[Podman]:
    """Podman with the image and the Munge key."""
    podman = Podman()
    layout = make_oci(site, signed_image, DISK / "t-podman.oci")
    archive = subprocess.run(["tar", "-C", layout.path, "-c", "."], capture_output=True, check=True).stdout
    assert layout.name in podman.run("podman", "load", input=archive).text
    podman.run("podman", "secret", "create", "sms-lab-munge-key", str(site.site.secrets.munge_key))
    yield podman
    podman.clear()
    podman.host.remove()


@pytest.fixture
def files(podman: Podman, site: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An export for the target that the test names; what it ran is gone afterwards."""
    assert site.path
    document = yaml.safe_load(site.path.read_text())
    document |= {"services": SERVICES, "engines": {"podman": {"address": podman.host.address, "host": "podman"}}}
    path = site.path.with_name("podman.yaml")
    path.write_text(yaml.safe_dump(document))
    export(open_cluster(path, None, Silent()), request.param, tmp_path / "out")
    yield tmp_path / "out"
    podman.clear()


def is_up(podman: Podman) -> bool:
    """Whether slurmctld answers a client in its container."""
    ping = podman.run("podman", "exec", f"{PREFIX}-slurmctld", "scontrol", "ping", ok=None)
    return ping.text.endswith("is UP")


@pytest.mark.parametrize("files", ["compose"], indirect=True)
def test_compose_runs_the_services(podman: Podman, files: Path) -> None:
    compose = (sys.executable, "-m", "podman_compose", "-f", str(files / "compose.yaml"))
    podman.run(*compose, "up", "-d")
    for name in SERVICES:
        wait_until(lambda: podman.is_healthy(f"{PREFIX}-{name}"), f"{name} is healthy", 60)  # noqa: B023
    assert is_up(podman)
    podman.run("podman", "kill", f"{PREFIX}-munge")
    assert not podman.is_healthy(f"{PREFIX}-munge")
    podman.run("podman", "start", f"{PREFIX}-munge")
    wait_until(lambda: podman.is_healthy(f"{PREFIX}-munge"), "munge is healthy again", 60)
    assert is_up(podman)


def generate(folder: Path) -> dict[str, RawConfigParser]:
    """The units that Podman's generator makes of quadlets, by name; what a unit sets twice is on lines."""
    need_engines("quadlet")
    done = subprocess.run(
        [find_program("quadlet"), "-dryrun", "-no-kmsg-log"],
        env={**os.environ, "QUADLET_UNIT_DIRS": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    units = {}
    for part in done.stdout.split("\n---"):
        name, _, text = part.removeprefix("---").partition("---\n")
        lines: dict[str, dict[str, list[str]]] = {}
        for line in text.splitlines():
            if line.startswith("["):
                section = lines.setdefault(line.strip("[]"), {})
            elif "=" in line and not line.startswith("#"):
                key, _, value = line.partition("=")
                section.setdefault(key, []).append(value)
        units[name] = RawConfigParser()
        units[name].read_dict({each: {key: "\n".join(v) for key, v in keys.items()} for each, keys in lines.items()})
    return units


def unescape(word: str) -> str:
    """A word as systemd reads it."""
    return re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), word)


@pytest.mark.parametrize("files", ["quadlet"], indirect=True)
def test_units_run_in_their_order(podman: Podman, files: Path) -> None:
    """Each is started when those that it requires are healthy, or have ended: by the command of its unit."""
    units = generate(files)
    names = [f"{PREFIX}-{name}.service" for name in ("place", "munge", "slurmctld")]
    assert {name for name in units if not name.endswith("-volume.service")} == set(names)
    config = Path("/etc/sms/quadlet/lab")
    for number, name in enumerate(names):
        unit = units[name]
        required = unit["Unit"].get("Requires", "").split()
        for other in names[:number]:
            assert other in required
            assert other in unit["Unit"]["After"].split()
        once = name == names[0]
        assert unit["Service"]["Type"] == ("oneshot" if once else "notify")
        command = shlex.split(unit["Service"]["ExecStart"])
        assert ("--sdnotify=healthy" in command) is not once
        words = [
            unescape(word).replace("%t", "/run").replace("%N", name).replace(str(config), str(files))
            for word in command
        ]
        podman.run(*(word for word in words if word not in NOT_IN_4_3))
        if not once:
            container = name.removesuffix(".service")
            wait_until(lambda: podman.is_healthy(container), f"{container} is healthy", 60)  # noqa: B023
    assert is_up(podman)
