"""What several tests share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import causes, processor
from tests.record import OUTCOME


def pytest_configure(config: pytest.Config) -> None:
    """In the background of a shell, SIGINT is ignored, after `nohup` SIGHUP: also in all programs that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # How long an example takes depends on what runs beside it.
    settings.register_profile("sms", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("sms")
    if any("real" in word for word in config.args):
        causes.watch()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker reports to the controller."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["spent"] = tuple(dict(each) for each in SPENT)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker has reported."""
    for counter, reported in zip(SPENT, getattr(node, "workeroutput", {}).get("spent", ()), strict=False):
        counter.update(reported)


SPENT = (causes.seconds, causes.counts, processor.seconds)
"""What workers report."""
TABLE_FROM_S = 60.0
SLOWEST = 5
"""How many tests of a group are named."""
TOGETHER = {
    "machines": ("test_provision", "test_lab_metal", "test_docs_machines"),
    "vm": ("test_vm", "test_node_image"),
    "nomad": ("test_nomad", "test_one_writer", "test_signed_image", "test_texts"),
    "kubernetes": ("test_terraform", "test_exports"),
}
"""Files that run on one worker: of those with QEMU two at a time; others share the cluster of an engine."""
FIRST = (
    *("machines", "vm", "test_kubernetes_runs_slurm", "test_move", "test_nomad_runs_slurm", "kubernetes", "nomad"),
    *("test_migrate_faults", "test_shared_faults", "test_migrate", "test_return", "test_upgrade"),
    *("test_rehearse", "test_snapshots", "test_push"),
)
"""Groups that take longest begin first, so that no worker is left with one at the end."""


def find_group(nodeid: str) -> str:
    """What stays together on a worker: a file's tests, which share its labs; and some files."""
    name = Path(nodeid.partition("::")[0]).stem
    return next((group for group, names in TOGETHER.items() if name in names), name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups by the name of the file: the mark xdist_group does nothing with pytest 9.2 and pytest-xdist 3.8."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return find_group(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On each worker alike: the scheduler gives out groups in this order."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        order = {name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: order.get(find_group(item.nodeid), len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The processor time of a test, with its fixtures, is its file's."""
    before = processor.used()
    result = yield
    processor.seconds[item.nodeid.partition("::")[0]] += processor.used() - before  # type: ignore[assignment]
    return result


def write_outcome(path: Path, stats: Mapping[str, list[Any]]) -> None:
    """Write what came of the tests, for `tests/record.py`."""
    skipped = {
        one.nodeid: one.longrepr[2] if isinstance(one.longrepr, tuple) else "" for one in stats.get("skipped", [])
    }
    failed = sorted({one.nodeid for kind in ("failed", "error") for one in stats.get(kind, [])})
    spent: dict[str, float] = {}
    for report in (one for reports in stats.values() for one in reports if isinstance(one, pytest.TestReport)):
        spent[report.nodeid] = spent.get(report.nodeid, 0.0) + report.duration
    most = sorted(spent.items(), key=lambda one: -one[1])[:SLOWEST]
    slowest = [(name, round(seconds, 1)) for name, seconds in most if seconds >= 1]
    found = {"passed": len(stats.get("passed", [])), "failed": failed, "skipped": skipped, "slowest": slowest}
    path.write_text(json.dumps(found))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where time went: files by seconds of set-up, tests, teardown and processor; and the outcome in a file."""
    if path := os.environ.get(OUTCOME):
        write_outcome(Path(path), terminalreporter.stats)
    spent: dict[str, dict[str, float]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                row = spent.setdefault(
                    report.nodeid.partition("::")[0], dict.fromkeys(("setup", "call", "teardown"), 0.0)
                )
                row[report.when] += report.duration
    total = sum(sum(row.values()) for row in spent.values())
    if total < TABLE_FROM_S:
        return
    terminalreporter.section("seconds by file: set-up, tests, teardown; processor")
    for name, row in spent.items():
        row["processor"] = processor.seconds[name]
    spent = dict(sorted(spent.items(), key=lambda item: -item[1]["processor"]))
    columns = {when: sum(row[when] for row in spent.values()) for when in ("setup", "call", "teardown", "processor")}
    for name, row in {**spent, "all": columns}.items():
        if row["setup"] + row["call"] + row["teardown"] >= 1:
            terminalreporter.line(" ".join(f"{seconds:7.1f}" for seconds in row.values()) + f"  {name}")
    if causes.seconds:
        terminalreporter.section("seconds by cause, and how often; the rest is the tests' own")
        for line in causes.table(causes.seconds, causes.counts):
            terminalreporter.line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


@pytest.fixture(autouse=True)
def signals_of_verbs_end() -> Iterator[None]:
    """A verb that a test runs in this process changes what its signals do: for that test only."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, dict[str, str]], None]:
    """Compare texts by relative path with the files of a folder; with --update-golden, write them."""

    def compare(folder: Path, texts: dict[str, str]) -> None:
        if request.config.getoption("--update-golden"):
            for left in sorted(folder.rglob("*")) if folder.is_dir() else []:
                if left.is_file() and str(left.relative_to(folder)) not in texts:
                    left.unlink()
            for name, text in texts.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        held = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
        assert sorted(texts) == sorted(held), "other files than the golden ones: pytest --update-golden writes them"
        for name, text in texts.items():
            assert text == held[name], f"{name} differs from its golden file: pytest --update-golden writes it"

    return compare


def find_tool(tool: str) -> str:
    """Path of a program, the virtual environment's first. Without it the test skips, and fails in CI."""
    beside = Path(sys.executable).with_name(tool)
    found = str(beside) if beside.exists() else shutil.which(tool)
    if not found:
        missing = pytest.fail if os.environ.get("CI", "").lower() in ("1", "true", "yes") else pytest.skip
        missing(f"{tool} is not installed")
    return str(found)


@pytest.fixture
def need() -> Callable[[str], str]:
    """``need("shellcheck")`` gives its path; a missing tool skips on a laptop and fails in CI."""
    return find_tool
