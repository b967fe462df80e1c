"""The build of engines, with a small program in their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.lab.engines.programs import PROGRAMS, TOOLS
from tests.engines.build import BESIDE
from tests.waiting import wait_until

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[3]
DRIVER = """
import sys
from pathlib import Path
from appliance.lab.engines import programs
from tests.engines import build
programs.PINS = Path(sys.argv[1])
build.NEEDED_GB = float(sys.argv[2])
programs.PROGRAMS.clear()
programs.PROGRAMS["tiny"] = programs.Tool("tiny", "example.org/none", {"tiny": "."})
del sys.argv[1:]
sys.exit(build.main())
"""
BESIDE_A_RUN = """
import sys, time
from tests import run
run.BUILD = sys.argv[1:]
with run.engines_built_beside():
    time.sleep(600)
"""
GO_MOD = "module tiny\ngo 1.25\nrequire example.org/none v1.2.3\nreplace example.org/none => ../none\n"


class Builder:
    """Builds one program from a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.pins = folder / "pins"
        self.cache = folder / "cache/sms/engines"
        for name, text in (("tiny", GO_MOD), ("none", "module example.org/none\n")):
            (self.pins / name).mkdir(parents=True)
            (self.pins / name / "go.mod").write_text(text)
        self.write("package main\nfunc main() {}\n")
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self.environment.pop("SMS_ENGINES", None)

    def write(self, program: str) -> None:
        (self.pins / "tiny/main.go").write_text(program)

    def argv(self, needed_gb: float = 0) -> list[str]:
        return [sys.executable, "-c", DRIVER, str(self.pins), str(needed_gb)]

    def begin(self, needed_gb: float = 0) -> subprocess.Popen[str]:
        return self.start(self.argv(needed_gb))

    def start(self, argv: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            argv, cwd=ROOT, env=self.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, needed_gb: float = 0) -> tuple[int, str]:
        process = self.begin(needed_gb)
        said = process.communicate(timeout=300)[1]
        return process.returncode, said

    def begin_and_wait(self, *before: str) -> subprocess.Popen[str]:
        """A build whose compiler runs; ``before``: what runs its command."""
        process = self.start([*before, *self.argv()])
        wait_until(lambda: list(self.cache.glob(f"{BESIDE}*/compiled/*")), "it compiles", 60)
        return process

    @property
    def built(self) -> list[Path]:
        return list(self.cache.glob("tiny-v1.2.3-*/tiny"))

    @property
    def left(self) -> list[Path]:
        return list(self.cache.glob(f"{BESIDE}*"))


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


def test_the_second_run_does_nothing(builder: Builder) -> None:
    assert builder.run()[0] == 0
    (program,) = builder.built
    subprocess.run([program], check=True)
    before = program.stat().st_mtime_ns
    status, said = builder.run()
    assert status == 0 and " built in " not in said
    assert program.stat().st_mtime_ns == before
    assert not builder.left
    # Another pin is another program.
    builder.write("package main\nfunc main() { println() }\n")
    assert builder.run()[0] == 0
    assert len(builder.built) == 2


def test_too_little_disk_is_found_before_it_starts(builder: Builder) -> None:
    status, said = builder.run(1e6)
    assert status == 1 and "GB of disk" in said
    assert [path.name for path in builder.cache.iterdir()] == ["lock"]


def test_ready_made_programs(builder: Builder, tmp_path: Path) -> None:
    builder.environment["SMS_ENGINES"] = str(tmp_path)
    assert builder.run()[0] == 1
    (tmp_path / "tiny").write_text("")
    assert builder.run()[0] == 0
    assert not builder.cache.exists()


@pytest.mark.full
def test_a_program_that_cannot_be_compiled(builder: Builder) -> None:
    builder.write("package main\nfunc main() { nothing() }\n")
    status, said = builder.run()
    assert status == 1 and "undefined: nothing" in said
    assert not builder.built and not builder.left


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_build_leaves_nothing(builder: Builder, number: signal.Signals) -> None:
    process = builder.begin_and_wait()
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode in (128 + number, -number)
    assert not builder.built and not builder.left
    assert builder.run()[0] == 0


@pytest.mark.full
def test_the_next_build_removes_what_a_killed_one_left(builder: Builder) -> None:
    process = builder.begin_and_wait()
    process.kill()
    process.communicate(timeout=60)
    assert builder.left
    assert builder.run()[0] == 0
    assert builder.built and not builder.left


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_build_beside_a_run_ends_with_it(builder: Builder, number: signal.Signals, tmp_path: Path) -> None:
    builder.environment["SMS_TESTS"] = str(tmp_path / "state")
    run = builder.begin_and_wait(sys.executable, "-c", BESIDE_A_RUN)
    os.kill(run.pid, number)
    run.communicate(timeout=60)
    wait_until(lambda: not builder.left, "nothing is left", 30)
    assert not builder.built


@pytest.mark.full
def test_two_builds_at_once_build_once(builder: Builder) -> None:
    first = builder.begin_and_wait()
    status, said = builder.run()
    assert status == 0 and "waiting for another build" in said and " built in " not in said
    assert " built in " in first.communicate(timeout=60)[1]
    assert first.returncode == 0


def test_every_tool_is_pinned() -> None:
    for tool in TOOLS:
        assert tool.version.startswith("v") and (tool.folder / "go.sum").stat().st_size
    assert {"nomad", "etcd", "kube-apiserver", "kubelet", "kubectl", "quadlet"} <= set(PROGRAMS)
