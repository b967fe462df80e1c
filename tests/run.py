"""Runs the tests on this machine: `python -m tests.run`, as root; more words go to pytest.

Unit tests run at low priority while the images of the real ones are built. Then come the real ones, four at a time,
which need both cores: beside other work, what has a time limit fails. Each worker is on a machine of its own
(`tests/machine`). Last come, one after the other, those that measure or inspect the whole machine. Real tests of the
engines are among the others once these are built; before that they come last, and the build runs in the background
meanwhile. `--core` leaves the engines out, `--engines` the others.
`--full` runs every case and records it (`tests/record.py`); a part that has passed at this content is not run again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from appliance.lab.engines.programs import PROGRAMS, find_missing
from tests.budgets import NONE, Spent, compare, read_budgets
from tests.conftest import FIRST, find_group
from tests.places import ROOT
from tests.record import (
    OUTCOME,
    RECORD,
    Part,
    find_content,
    git,
    read_outcome,
    read_record,
    read_slowest,
    summarize,
    write_record,
)

MACHINE = ROOT / "tests" / "machine"
STATE = Path(os.environ.get("SMS_TESTS", "/var/lib/sms-tests"))
RUN = "SMS_TESTS_RUN"
"""Set in the environment of tests by this program, which builds what they need: nothing that is missing is skipped."""
WORKERS = 4
"""Real tests wait half of the time: two cores are busy with four of them. Each takes 1 to 3 GiB."""
ENGINE_WORKERS = 3
"""One deploys to Nomad, one to Kubernetes, one the clusters that several files share."""
NO_TESTS = 5
"""pytest's status where nothing was selected."""
UNITS = ("tests/unit", "tests/test_layers.py")
USUAL = "not full and not alone"
ALONE = "alone and not full"
FROM_NOTHING, BUILT = "from nothing", "engines built"
"""What there was before a run, as `budgets.toml` names it."""
ENGINES = "tests/real/engines"
BUILD = [sys.executable, "-m", "tests.engines.build"]
IMAGES = [str(MACHINE), "--fill", sys.executable, "-m", "tests.images"]


def pytest_argv(*words: str, workers: int = 0) -> list[str]:
    """pytest on machines of their own: one, or a number of workers."""
    python = [str(MACHINE), sys.executable]
    if not workers:
        return [*python, "-m", "pytest", *words]
    tx = f"{workers}*popen//python={' '.join(python)}"
    return [sys.executable, "-m", "pytest", "--tx", tx, "--dist", "loadscope", "--no-loadscope-reorder", *words]


@dataclass
class Stage:
    """A command, how it ended and how long it took."""

    name: str
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    seconds: float = 0
    empty: bool = False
    slowest: list[tuple[str, float]] = field(default_factory=list)

    @property
    def how(self) -> str:
        """How it ended."""
        if self.empty:
            return "nothing was selected"
        return {0: "passed", None: "not run"}.get(self.status, f"failed, status {self.status}")

    def run(self, *, quiet: bool = False) -> int:
        """Run it to its end; ``quiet``: print what it printed when it has ended."""
        began, plain = time.monotonic(), self.name.replace("/", "-")
        outcome = Path(self.environment.setdefault(OUTCOME, str(STATE / "outcomes" / f"{plain}.json")))
        outcome.parent.mkdir(parents=True, exist_ok=True)
        outcome.unlink(missing_ok=True)
        environment = {**os.environ, RUN: "1", "SMS_MACHINE_NAME": plain, **self.environment}
        done = subprocess.run(self.argv, cwd=ROOT, env=environment, capture_output=quiet, text=True, check=False)
        self.seconds = time.monotonic() - began
        self.empty = done.returncode == NO_TESTS
        self.status = 0 if self.empty else done.returncode
        self.slowest = read_slowest(outcome)
        if quiet:
            print(done.stdout + (done.stderr if self.status else ""), end="", flush=True)
        return self.status


@contextmanager
def engines_built_beside() -> Iterator[None]:
    """Build the engines in the background, at low priority; that build ends with the context, or with this process."""
    log = STATE / "engines.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    low = ["nice", "-n", "19", "ionice", "-c", "3", "setpriv", "--pdeathsig", "TERM"]
    with log.open("wb") as output:
        process = subprocess.Popen([*low, *BUILD], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def run_engines(more: list[str]) -> list[Stage]:
    """Tests of the engines, which are built first, as the images are."""
    stages = [
        Stage("engines built", BUILD),
        Stage("images", [*IMAGES, "--engines"]),
        Stage("engines", pytest_argv("-m", USUAL, ENGINES, *more, workers=ENGINE_WORKERS)),
    ]
    any(stage.run() for stage in stages)
    return stages


def run_both(more: list[str]) -> list[Stage]:
    """The usual cases of all."""
    if not find_missing(PROGRAMS):
        return run_core(more, engines="among the others")
    with engines_built_beside():
        core = run_core(more, engines="later")
        return core if core[0].status else [*core, *run_engines(more)]


def run_core(more: list[str], *, engines: Literal["", "later", "among the others"] = "") -> list[Stage]:
    """All but the engines, whose tests are among the others where these are built."""
    images = Stage("images", [*IMAGES, *(["--engines"] if engines else [])])
    without = () if engines == "among the others" else (f"--ignore={ENGINES}",)
    argv = pytest_argv("-m", USUAL, *UNITS, *more, workers=2)
    units = Stage("unit", ["nice", "-n", "10", *argv], {"SMS_MACHINE_BARE": "1"})
    real = Stage("real", pytest_argv("-m", USUAL, "tests/real", *without, *more, workers=WORKERS))
    alone = Stage("alone", pytest_argv("-m", ALONE, "tests", *without, *more))
    beside = threading.Thread(target=units.run, kwargs={"quiet": True})
    beside.start()
    images.run()
    beside.join()
    if images.status == 0:
        real.run()
        alone.run()
    return [images, units, real, alone]


def find_tasks() -> list[list[str]]:
    """Parts of the full run that may run side by side, without files whose tests are all alone; a group is one."""
    groups: dict[str, list[str]] = {name: [] for name in FIRST}
    for path in sorted((ROOT / "tests/real").rglob("test_*.py")):
        part = str(path.relative_to(ROOT))
        if re.search(r"^pytestmark = .*mark\.alone", path.read_text(), re.MULTILINE):
            continue
        groups.setdefault(find_group(part), []).append(part)
    return [*groups.values(), *([part] for part in UNITS)]


def find_parts() -> list[str]:
    """Names of all parts of the full run."""
    return ["alone", *(part for task in find_tasks() for part in task)]


def run_full(more: list[str]) -> list[Stage]:
    """Every case: those that are alone, then the others, a file each; what has passed at this content is left out.

    A part of the cases, or a tree that is not the commit's, is not recorded.
    """
    content = "" if more else find_content()
    commit = git("rev-parse", "HEAD")
    known = find_parts()
    record = {name: part for name, part in read_record().items() if name in known}
    stages = [Stage("images", [*IMAGES, "--engines"])]
    recording = threading.Lock()
    outcomes = STATE / "full"
    outcomes.mkdir(parents=True, exist_ok=True)

    def run_part(part: str, *words: str) -> None:
        before = record.get(part)
        if before and before.good and before.content == content:
            print(f"{part}: passed before, {before.seconds} s", flush=True)
            return
        outcome = outcomes / f"{part.replace('/', '-')}.json"
        outcome.unlink(missing_ok=True)
        stage = Stage(part, pytest_argv(*words, *more), {OUTCOME: str(outcome)})
        stages.append(stage)
        status = stage.run(quiet=True)
        if not content:
            return
        with recording:
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            record[part] = Part(part, commit, content, date, round(stage.seconds), status, read_outcome(outcome))
            write_record(record.values())

    def run_task(parts: list[str]) -> None:
        for part in parts:
            run_part(part, "-m", "not alone", part)

    if stages[0].run(quiet=True) == 0:
        run_part("alone", "-m", "alone", "tests")
        # What took longest last time begins first; those of the engines come last where these are not built.
        took = {name: part.seconds for name, part in record.items()}
        tasks = sorted(find_tasks(), key=lambda task: -sum(took.get(part, 0) for part in task))
        later = [task for task in tasks if find_missing(PROGRAMS) and task[0].startswith(f"{ENGINES}/")]
        with ThreadPoolExecutor(WORKERS) as pool:
            with engines_built_beside():
                list(pool.map(run_task, [task for task in tasks if task not in later]))
            if later:
                stages.append(built := Stage("engines built", BUILD))
                if built.run() == 0:
                    list(pool.map(run_task, later))
    if content:
        print(f"{RECORD} is to be committed, in a commit of its own", flush=True)
    return stages


def main() -> int:
    """Run the stages; 1 where one has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every case: matrices, soaks, 450 nodes, fuzzing")
    parser.add_argument("--core", action="store_true", help="without the engines: Nomad, Kubernetes")
    parser.add_argument("--engines", action="store_true", help="only these")
    known, more = parser.parse_known_args()
    for before, word in zip(["", *more], more, strict=False):
        if not (word.startswith("-") or before.startswith("-") or Path(word.partition("::")[0]).exists()):
            parser.error(f"there is no {word}")
    if os.geteuid():
        print("tests: this needs root\n  hint: sudo make test; `make fast` needs none", file=sys.stderr)
        return 2
    began, before = time.monotonic(), FROM_NOTHING if find_missing(PROGRAMS) else BUILT
    try:
        chosen = run_full if known.full else run_core if known.core else run_engines if known.engines else run_both
        stages = chosen(more)
    finally:
        subprocess.run([str(MACHINE), "true"], check=False)  # removes what the others have left
    spent = [Spent(stage.name, stage.how, stage.seconds, stage.slowest) for stage in stages]
    budgets = read_budgets() if chosen is run_both and not more else NONE
    for line in compare(budgets, spent, time.monotonic() - began, before):
        print(line)
    for line in summarize(read_record(), find_parts(), time.time()):
        print(line)
    return int(any(stage.status != 0 for stage in stages))


if __name__ == "__main__":
    sys.exit(main())
