"""The native core with hostile captures and callers: no crash, no hang, no leak, every packet counted once.

tests/captures/fuzz.c mutates captures; it is compiled with the core and the address and undefined-behaviour
sanitizers. That file explains how to run a long session by hand.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis import _core
from tests.captures import files, samples
from tests.captures import packets as p
from tests.captures.native import PORTS, run_core
from tests.conftest import find_tool
from tests.places import ROOT

pytestmark = pytest.mark.slow

PUBLIC = Path(os.environ.get("SMS_CAPTURES") or ROOT.parent / "shared" / "captures")
"""Public captures, not part of the project; without them the seeds are only our own."""
INCLUDE = ROOT / "analysis" / "core"
CORE = sorted(path for path in INCLUDE.glob("*.c") if path.name not in ("module.c", "results.c"))
"""The sources that do not use Python."""
FLAGS = [
    *("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *(f"-D{name}=fuzz_{name}" for name in ("read", "poll", "fstat", "realloc", "aligned_alloc", "getrandom")),
]
Counter: Any = _core.Counter
"""Untyped: the tests pass wrong arguments on purpose."""
SMALL = {"max_flows": 256, "max_pairs": 256}
"""Limits with which a counter is created quickly."""
BAD = (TypeError, ValueError, OverflowError)


# ---- mutated captures --------------------------------------------------------------------------------------


def gcc(*argv: str | Path) -> None:
    """Compile or link with the sanitizers."""
    done = subprocess.run([find_tool("gcc"), *FLAGS, *argv], capture_output=True, text=True, timeout=600)
    if "cannot find" in done.stderr and "san" in done.stderr:
        missing = pytest.fail if os.environ.get("CI", "").lower() in ("1", "true", "yes") else pytest.skip
        missing("the compiler's sanitizers are not installed")
    assert done.returncode == 0, done.stderr


def build(folder: Path, *defines: str) -> Path:
    """Build the fuzzer with the core; the object files stay next to it."""
    folder.mkdir()
    for source in [*CORE, ROOT / "tests" / "captures" / "fuzz.c"]:
        gcc(*defines, f"-I{INCLUDE}", "-c", source, "-o", folder / f"{source.stem}.o")
    gcc(*folder.glob("*.o"), "-o", folder / "fuzz")
    return folder / "fuzz"


@pytest.fixture(scope="session")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The fuzzer with ``small`` tables, which a small capture fills, or the ``real`` ones; compiled on first use."""
    folder = tmp_path_factory.mktemp("fuzz")
    defines = {"small": ("-DSMALL_TABLES",), "real": ()}
    return functools.cache(lambda tables: build(folder / tables, *defines[tables]))


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Seed captures: our own of every kind, and the public ones."""
    folder = tmp_path_factory.mktemp("seeds")
    made = {name: sample.data for name, sample in samples.everything().items()} | {"rare": rare()}
    for name, data in made.items():
        (folder / name).write_bytes(data[: 1 << 16])
    there = [path for path in PUBLIC.rglob("*.*cap*") if path.is_file() and path.stat().st_size > 24]
    return sorted(map(str, [*folder.iterdir(), *there]))


def rare() -> bytes:
    """Packets that the samples lack: a neighbour advertisement, TFTP, a frame sent by the capturing machine."""
    six = (samples.B6, samples.A6)
    advertised = p.icmp(136, 0, b"\x60\0\0\0" + p.ip_bytes(samples.B6) + b"\2\1" + p.mac_bytes(samples.MAC_B))
    request = p.udp(b"\0\1vmlinuz\0octet\0", 2070, 69)
    data = p.udp(b"\0\3\0\1" + bytes(512), 40000, 2070)
    made = files.Pcapng()
    made.interface()
    made.interface(files.SLL)
    frames = [
        (0, samples.in_ethernet(p.ipv6(advertised, p.ICMPV6, *six), p.IPV6)),
        (0, samples.in_ethernet(p.ipv4(request, p.UDP, samples.A, samples.B))),
        (0, samples.in_ethernet(p.ipv4(data, p.UDP, samples.B, samples.A))),
        (1, p.sll(p.ipv4(request, p.UDP, samples.A, samples.B), src=samples.MAC_A, sort=4)),
    ]
    for number, (interface, frame) in enumerate(frames):
        made.packet(interface, (samples.START_NS + number * 10**9, frame))
    return bytes(made.data)


RUNS = [("small", 1, 1500)]
LONG_RUNS = [("small", 1, 8000), ("small", 2, 8000), ("real", 3, 400)]


@pytest.mark.parametrize(
    ("tables", "seed", "count"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.full) for run in LONG_RUNS)]
)
def test_tampered_captures(fuzzer: Callable[[str], Path], seeds: list[str], tables: str, seed: int, count: int) -> None:
    """Bits, lengths, times, cuts, splices, floods of flows; reads of odd sizes; failing allocations."""
    argv = [str(fuzzer(tables)), str(seed), str(count), *seeds]
    # The fuzzer itself reports a hang if an input takes 20 s of CPU time.
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout) == (0, f"{count} inputs\n"), done.stderr[-4000:]


FLAWS = {
    "reads behind the end": ("decode.c", "if (b.left < 40)", "if (b.left < 24)", "heap-buffer-overflow"),
    "loses packets": ("flows.c", "c->beyond[0] += ", "c->beyond[0] += 0 * ", "does not hold: packets + others"),
    "does not end": (
        *("reader.c", "s->start < stop; s->start++)\n\t\t\tif (chain_here", "s->start < stop;)\n\t\t\tif (chain_here"),
        "does not end",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("flaw", FLAWS)
def test_the_fuzzer_finds_flaws(flaw: str, fuzzer: Callable[[str], Path], seeds: list[str], tmp_path: Path) -> None:
    """The fuzzer finds known flaws, inserted into a copy of the core."""
    name, right, wrong, message = FLAWS[flaw]
    text = (INCLUDE / name).read_text()
    assert text.count(right) == 1
    (tmp_path / name).write_text(text.replace(right, wrong))
    gcc("-DSMALL_TABLES", f"-I{INCLUDE}", "-c", tmp_path / name, "-o", tmp_path / "flawed.o")
    others = [part for part in fuzzer("small").parent.glob("*.o") if part.stem != Path(name).stem]
    gcc(*others, tmp_path / "flawed.o", "-o", tmp_path / "fuzz")
    environment = {**os.environ, "PATIENCE_S": "1"}
    argv = [str(tmp_path / "fuzz"), "1", "5000", *seeds]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode != 0
    assert message in done.stderr
    assert "input " in done.stderr


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=400), head=st.sampled_from(["", "pcap", "pcapng"]))
def test_any_bytes(data: bytes, head: str) -> None:
    """Arbitrary bytes, through the module itself."""
    starts = {"": b"", "pcap": files.header(), "pcapng": files.pcapng([])}
    whole = starts[head] + data
    assert _core.first_time(whole) >= -1
    counter = Counter(PORTS, [], [], **SMALL)
    try:
        counter.read(-1, whole)
    except ValueError:
        assert not head
    counter.finish()
    totals = counter.totals()
    parts = [link[4] for link in counter.links()] + [packets for packets, _ in totals["other"].values()]
    assert sum(parts) + totals["beyond"][0] == totals["packets"] == counter.packets


@pytest.fixture(scope="session")
def compressed() -> bytes:
    """A capture in three frames of zstd."""
    find_tool("zstd")
    if not _core.has_zstd():
        pytest.skip("this machine has no libzstd")
    return files.compress("zstd", samples.everything()["headers"].data * 3, parts=3)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_tampered_zstd(compressed: bytes, data: st.DataObject) -> None:
    """Reading ends, packets before the damage are counted once, and the damage is reported once."""
    made = bytearray(compressed)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(made) - 1))
        made[place] = data.draw(st.integers(0, 255))
    del made[data.draw(st.integers(4, 3 * len(made))) :]
    _core.first_time(bytes(made), True)
    counter = Counter(PORTS, [], [], **SMALL)
    with contextlib.suppress(ValueError):
        counter.read(-1, bytes(made), True)
    counter.finish()
    totals = counter.totals()
    parts = [link[4] for link in counter.links()] + [packets for packets, _ in totals["other"].values()]
    assert sum(parts) + totals["beyond"][0] == totals["packets"]
    assert sum(what.startswith("zstd") for _, _, what in counter.problems()) <= 1


# ---- callers ---------------------------------------------------------------------------------------------------

ANY = st.one_of(
    st.none(),
    st.integers(),
    st.integers(-2, 70000),
    st.floats(),
    st.binary(max_size=40),
    st.text(max_size=3),
    st.booleans(),
    st.builds(object),
)
LISTS = st.one_of(
    ANY,
    st.lists(st.one_of(ANY, st.lists(ANY, max_size=6), st.tuples(ANY, ANY), st.tuples(ANY, ANY, ANY, ANY, ANY))),
    st.lists(st.tuples(st.integers(0, 255), st.integers(-1, 65536)), max_size=4),
    st.lists(st.tuples(st.integers(-1, 256), st.integers(-1, 65536), st.integers(-1, 70000)), max_size=70),
    st.lists(
        st.tuples(
            st.just(6), st.integers(0, 65535), st.integers(90, 256), st.binary(max_size=33), st.binary(max_size=33)
        ),
        max_size=3,
    ),
)
BOUND = st.one_of(ANY, st.sampled_from([63, 64, 65, 1 << 22, (1 << 22) + 1, (1 << 32) + 64, -1]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ports=LISTS, first=LISTS, kept=LISTS, node=ANY, flows=BOUND, pairs=BOUND, keep=BOUND)
def test_any_arguments(ports: Any, first: Any, kept: Any, node: Any, flows: Any, pairs: Any, keep: Any) -> None:
    """The constructor succeeds or raises; then methods fail, and the constructor can be called again."""
    counter = Counter.__new__(Counter)
    try:
        counter.__init__(ports, first, kept, node, max_flows=flows, max_pairs=pairs, keep_flows=keep)
    except BAD:
        with pytest.raises(RuntimeError, match="not begun"):
            counter.finish()
        counter.__init__(PORTS, [], [], **SMALL)
    else:
        assert 64 <= flows <= 1 << 22
        assert 64 <= pairs <= 1 << 22
    assert (counter.packets, counter.bytes, counter.read_bytes) == (0, 0, 0)
    counter.finish()


@settings(max_examples=200, deadline=None)
@given(one=ANY, two=ANY)
def test_any_arguments_of_its_methods(one: Any, two: Any) -> None:
    counter = Counter(PORTS, [], [], **SMALL)
    # Not a descriptor that the tests themselves have open.
    descriptor = one if not isinstance(one, int) or one < 0 or one > 60000 else -1
    for call in (
        lambda: counter.read(descriptor, two),
        lambda: counter.read(descriptor, prefix=two, more=one),
        lambda: counter.rows(one),
        lambda: counter.finish(one),
        lambda: _core.first_time(one),
    ):
        try:
            call()
        except (*BAD, OSError):
            continue
    assert counter.packets == 0


METHODS: dict[str, Callable[[Any], Any]] = {
    "read": lambda counter: counter.read(-1, files.header()),
    "finish": lambda counter: counter.finish(),
    "hosts": lambda counter: counter.hosts(),
    "rows": lambda counter: counter.rows(b""),
    "links": lambda counter: counter.links(),
    "samples": lambda counter: counter.samples(),
    "boots": lambda counter: counter.boots(),
    "problems": lambda counter: counter.problems(),
    "flows": lambda counter: counter.flows(),
    "totals": lambda counter: counter.totals(),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_counter_that_was_not_begun(method: str) -> None:
    counter = Counter.__new__(Counter)
    counter.stop()
    with pytest.raises(RuntimeError, match="not begun"):
        METHODS[method](counter)


def test_a_counter_is_begun_once() -> None:
    counter = Counter([], [], [], **SMALL)
    with pytest.raises(RuntimeError, match="begun already"):
        counter.__init__([], [], [])


@pytest.mark.parametrize("method", [*METHODS, "begin"])
def test_reentrant_arguments(method: str) -> None:
    """A sequence may run any code when an item is read."""
    counter = Counter.__new__(Counter)
    errors: list[str] = []

    class Ports:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> tuple[int, int]:
            try:
                METHODS[method](counter) if method != "begin" else counter.__init__([], [], [], **SMALL)
            except RuntimeError as error:
                errors.append(str(error))
            return (6, 22)

    if method == "begin":
        with pytest.raises(RuntimeError, match="begun already"):
            counter.__init__(Ports(), [], [], **SMALL)
    else:
        counter.__init__(Ports(), [], [], **SMALL)
        assert errors == ["not begun"]
    counter.finish()


@pytest.mark.parametrize("method", METHODS)
def test_methods_fail_while_another_thread_reads(method: str) -> None:
    counter = Counter(PORTS, [], [], **SMALL)
    out, into = os.pipe()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            counter.read(out)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    os.write(into, files.pcap(samples.spaced(samples.conversation(samples.in_ethernet)))[:-1])
    thread.start()
    try:
        # Until all are counted, and the last byte is waited for: stopping leaves out what was read and not yet counted.
        while counter.packets < 5 and thread.is_alive():
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="another thread reads"):
            METHODS[method](counter)
    finally:
        counter.stop()
        thread.join(60)
        os.close(out)
        os.close(into)
    # The pipe was idle and never ended: stopping early is not a fault of the capture.
    assert not thread.is_alive()
    assert not failure
    assert counter.totals()["truncated"] is False
    assert counter.packets == 5


ROLES = [b"", b"\0", b"\0\0\0", "xx", None, 2, [0, 0]]


@pytest.mark.parametrize("roles", ROLES, ids=repr)
def test_one_role_for_each_host(roles: Any) -> None:
    counter = run_core(files.pcap(samples.spaced(samples.conversation(samples.in_ethernet))), **SMALL)
    assert len(counter.hosts()) == 2
    with pytest.raises((TypeError, ValueError)):
        counter.rows(roles)
    assert sum(sum(row[12]) for row in counter.rows(b"\xff\0")) == counter.packets


@pytest.mark.parametrize(("what", "says"), [("closed", "Bad file descriptor"), ("folder", "Is a directory")])
def test_what_cannot_be_read(what: str, says: str, tmp_path: Path) -> None:
    counter = Counter(PORTS, [], [], **SMALL)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    if what == "closed":
        os.close(descriptor)
    with pytest.raises(OSError, match=says):
        counter.read(descriptor)
    if what == "folder":
        os.close(descriptor)
    # Earlier results are still there, and more can be read.
    counter.read(-1, files.pcap(samples.spaced(samples.conversation(samples.in_ethernet))))
    counter.finish()
    assert counter.totals()["packets"] == 6


# ---- memory ----------------------------------------------------------------------------------------------------


def everything_once(data: bytes) -> None:
    """All calls, valid and invalid."""
    firsts = [(6, 6817, 0, b"hello", b"hello"), (6, 0, 0, b"GET ", b"GET ")]
    counter = Counter(PORTS, firsts, [(17, 67, 9), (6, 6817, 9)], node=b"", keep_flows=99, **SMALL)
    counter.read(-1, data)
    counter.finish()
    for method in METHODS:
        if method != "rows":
            METHODS[method](counter)
    counter.rows(bytes(len(counter.hosts())))
    for wrong, arguments in ((counter.rows, (b"",)), (counter.read, (-1, b"x" * 64)), (counter.read, (1 << 20,))):
        with pytest.raises((ValueError, OSError)):
            wrong(*arguments)
    with pytest.raises(ValueError, match="low and high"):
        Counter(PORTS, [(6, 1, 0, b"ab", b"a")], [])
    _core.first_time(data)


def resident() -> int:
    """Return the memory of this process in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("times", [60, pytest.param(200, marks=pytest.mark.full)])
def test_no_leaks(times: int) -> None:
    data = samples.everything()["headers"].data
    for _ in range(20):
        everything_once(data)
    before, references = resident(), sys.getrefcount(Counter)
    tracemalloc.start()
    everything_once(data)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    for _ in range(times):
        everything_once(data)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    assert sys.getrefcount(Counter) < references + 5
    assert grown < 100 * times
    # A counter that was not freed would be 5 MB, a window 2 MB.
    assert resident() - before < 30 << 20


def columns(head: bytes, count: int, places: dict[int, bytes]) -> bytes:
    """``count`` times ``head``, with the bytes of a column at each place."""
    data = bytearray(head * count)
    for place, column in places.items():
        data[place :: len(head)] = column
    return bytes(data)


COUNT = 1_000_000
SYN = struct.pack("<IIII", 1_700_000_000, 0, 54, 60) + samples.in_ethernet(
    p.ipv4(p.tcp(b"", 40000, 6817, p.SYN), p.TCP, samples.A, samples.B)
)
MACS, HOSTS, ENDS, TIMES = range(16, 28), range(42, 50), range(50, 54), range(4)
LITTLE = struct.pack("<IIII", 1_700_000_000, 0, 16, 16)


def random_columns(places: Iterator[int] | range | list[int]) -> Callable[[], bytes]:
    """SYNs with random bytes at these places of each record."""
    dice = random.Random(7)
    return lambda: columns(SYN, COUNT, {place: dice.randbytes(COUNT) for place in places})


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing special": lambda: SYN * COUNT,
    "addresses and ports": random_columns([*HOSTS, *ENDS]),
    "all that a frame has": random_columns([*MACS, *HOSTS, *ENDS]),
    "addresses of one router": random_columns([*range(42, 46), *ENDS]),
    "times": random_columns([*TIMES, *HOSTS, *ENDS]),
    "clocks of which one was never set": lambda: (SYN + bytes(4) + SYN[4:]) * (COUNT // 2),
    "nanoseconds for microseconds": random_columns(range(4, 7)),
    "nearly records": lambda: (LITTLE + LITTLE) * 1_000_000 + bytes(32 << 20),
    "two of three records": lambda: (LITTLE + LITTLE + bytes(5)) * 2_000_000,
    "a record, and none": lambda: (SYN * 3 + bytes(3)) * 600_000,
}
"""Captures after a pcap header, by what is random in them or almost a record."""

SCRIPT = r"""
import re, sys
from tests.captures.native import run_core
from pathlib import Path
counter = run_core(Path(sys.argv[1]), keep=0)
counter.rows(bytes(len(counter.hosts()))), counter.links(), counter.totals()
peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
print(counter.packets, int(peak[1]) >> 10)
"""


@pytest.mark.parametrize("what", HOSTILE)
def test_bounds_of_memory_and_steps(what: str, tmp_path: Path) -> None:
    """Memory is bounded whatever a capture holds, and time is linear in its size."""
    file = tmp_path / "hostile.pcap"
    with file.open("wb") as out:
        out.write(files.header())
        out.write(HOSTILE[what]())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Each takes one to three seconds; quadratic time would be hours.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, file], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    packets, megabytes = map(int, done.stdout.split())
    assert packets == COUNT or "record" in what
    # The limit of the whole command, including Python's copies of the tables.
    assert megabytes < 150
