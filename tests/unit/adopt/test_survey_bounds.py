"""A survey of a node whose files are meant to hang its reader: bounded, and what was left out is a finding."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from appliance.catalog import read_catalog
from appliance.plan.adopt.frames import LARGEST, Frames, Section, read_frames
from appliance.plan.adopt.read_slurm import DEEPEST, find_included
from appliance.plan.adopt.survey import MOST_LEFT, Request, examine
from appliance.share import share
from tests.surveyed import debian, run_script

SERVICES = read_catalog(share("definitions", "services"))
CONF = "/etc/slurm/slurm.conf"
OWN = "ClusterName=a\nSlurmctldHost=b\n"
SIZE = 262144
LIMIT_S = 15
"""Far more than any of them takes alone; without bounds they took minutes."""


def frames_of(files: dict[str, str], runs: dict[str, str] | None = None) -> Frames:
    made = Frames()
    for path, text in {CONF: OWN, **files}.items():
        made.files[path] = Section(path, "read", text.encode())
    for name, text in (runs or {}).items():
        made.runs[name] = Section(name, "read", text.encode())
    return made


def left(frames: Frames) -> list[str]:
    began = time.monotonic()
    found, _ = examine(frames, SERVICES, Request("sms-old", "host-a"))
    assert time.monotonic() - began < LIMIT_S
    return [one.what for one in found.findings if one.what.startswith("not read: ")]


def test_files_that_include_one_another_are_read_once() -> None:
    names = [f"part{number}.conf" for number in range(20)]
    every = "".join(f"Include {name}\n" for name in names)
    files = {f"/etc/slurm/{name}": f"{every}NodeName=n-{name[:-5]} CPUs=1\n" for name in names}
    frames = frames_of({CONF: OWN + every, **files})
    assert len(left(frames)) == MOST_LEFT + 1
    found, _ = examine(frames, SERVICES, Request("sms-old", "host-a"))
    assert found.slurm
    # Each is read at its first include, so the file that was reached last ends first, up to the deepest level.
    assert sorted(one.name for one in found.slurm.nodes) == sorted(f"n-{name[:-5]}" for name in names)
    assert set(found.slurm.included) == {*files}


def test_includes_that_are_too_deep_are_named() -> None:
    files = {f"/etc/slurm/{number}": f"Include {number + 1}\nNodeName=n{number}\n" for number in range(9)}
    frames = frames_of({CONF: f"{OWN}Include 0\n", **files})
    assert left(frames) == [f"not read: /etc/slurm/{DEEPEST}, which is included more than {DEEPEST} levels deep"]
    assert find_included(frames).files == [CONF, *(f"/etc/slurm/{number}" for number in range(DEEPEST))]


HANGS = {
    "/etc/ganesha/ganesha.conf": "\n",
    "/etc/rsyslog.conf": 'input(type="imudp" ',
    "/etc/rsyslog.d/a.conf": 'action(type="omfwd"',
    CONF: "\n",
    "/etc/slurm/slurm.conf ": "NodeName=a[1",
}
BEGUN = {"NodeName=a NodeAddr=": "[1", "SlurmctldHost=": "1", "NodeName=": "a,", "NodeName=b[1-2]": "[1-2]"}
"""The same within one setting."""
"""By file, what it consists of; patterns of regular expressions took the square of its length."""


@pytest.mark.parametrize("path", HANGS)
def test_no_pattern_takes_the_square_of_a_file(path: str) -> None:
    name = path.strip()
    text = (HANGS[path] * SIZE)[:SIZE]
    left(frames_of({name: OWN + text if name == CONF else text}))


@pytest.mark.parametrize("begin", BEGUN)
def test_no_pattern_takes_the_square_of_a_setting(begin: str) -> None:
    left(frames_of({CONF: f"{OWN}{begin}{(BEGUN[begin] * SIZE)[:SIZE]}\n"}))


OUTPUTS = {"slurm-user": "uid=1(", "netstat": "1"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_pattern_takes_the_square_of_an_output(name: str) -> None:
    begin = "tcp LISTEN 0 1 0.0.0.0:1 " if name == "netstat" else ""
    left(frames_of({}, {name: begin + (OUTPUTS[name] * SIZE)[:SIZE]}))


class Compared(str):
    """A line that counts with what it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.compared += 1
        return super().__eq__(other)


class Lines(Frames):
    """Sections whose lines are ``Compared``."""

    def output(self, name: str) -> list[str]:
        return [Compared(line) for line in super().output(name)]


def steps_of(work: Callable[[], object]) -> int:
    """How many lines of Python a call runs, and how many lines of outputs it compares."""
    found = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal found
        found += event == "line"
        return trace

    Compared.compared, before = 0, sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return found + Compared.compared


def many(count: int, line: str) -> str:
    return "".join(line.format(number) + "\n" for number in range(count))


@dataclass(frozen=True)
class Grown:
    """Parts of a survey, by path and by name: what is there first, and a line for each number."""

    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)


ADDRESS = "{0}: e{0} inet 10.{0}.0.1/16 scope global"
GROWN = {
    "accounts of a directory": Grown(runs={"passwd": "u{0}:x:1{0:05}:100::/:/bin/sh"}),
    "interfaces and addresses of nodes": Grown(
        {CONF: (OWN, "NodeName=n{0} NodeAddr=10.1.{0}.1")},
        {"addresses": ADDRESS, "links": "{0}: e{0}: <UP> mtu 1500 link/ether 02:00:00:00:00:01"},
    ),
    "addresses of one interface": Grown(runs={"addresses": "1: e0 inet 10.0.{0}.1/24 scope global"}),
    "partitions": Grown({CONF: (f"{OWN}NodeName=a\n", "PartitionName=p{0} Nodes=a")}),
    "defaults": Grown({CONF: (OWN, "NodeName=DEFAULT Feature={0:0900}\nNodeName=n{0}")}),
    "includes of one file": Grown({CONF: (OWN, "Include other{0}.conf")}),
    "prologs": Grown({CONF: (OWN, "PrologSlurmctld=/opt/p{0}")}),
    "sockets": Grown(runs={"sockets": "tcp LISTEN 0 1 0.0.0.0:{0} *:*"}),
    "cron": Grown({"/etc/crontab": ("", "1 2 3 4 5 root /bin/x{0}")}),
    "time servers": Grown({"/etc/chrony.conf": ("", "server s{0}")}),
    "leases": Grown({"/etc/dhcp/dhcpd.conf": ("", "host h{0} {{ hardware ethernet 02:00:00:00:00:01; }}")}),
    "rows of xCAT": Grown(runs={"xcat-nodelist": "#node,groups\nn{0},all"}),
    "rules": Grown(runs={"nft": "masquerade {0}"}),
}


@pytest.mark.parametrize("name", GROWN)
def test_twice_the_input_is_twice_the_work(name: str) -> None:
    grown = GROWN[name]

    def steps(count: int) -> int:
        made = Lines()
        for path, (begin, line) in {CONF: (OWN, ""), **grown.files}.items():
            made.files[path] = Section(path, "read", (begin + (many(count, line) if line else "")).encode())
        for run, line in grown.runs.items():
            made.runs[run] = Section(run, "read", many(count, line).encode())
        return steps_of(lambda: examine(made, SERVICES, Request("sms-old", "host-a")))

    none, once, twice = steps(0), steps(120), steps(240)
    assert twice - none <= 2.3 * (once - none)


@pytest.mark.parametrize("key", ["NodeName=n[1-60000]", "PartitionName=p{0} Nodes=n[1-60000]"])
def test_lists_of_a_whole_cluster_in_each_line_are_not_all_expanded(key: str) -> None:
    files = {CONF: f"{OWN}NodeName=n[1-60000]\n{many(60, key)}"}
    found, _ = examine(frames_of(files), SERVICES, Request("sms-old", "host-a"))
    kinds = [one.what for one in found.findings if "cannot be read" in one.what]
    assert 40 <= len(kinds) < 60


def test_a_section_is_cut_where_the_script_would_have_cut_it() -> None:
    data = b"@file /etc/aliases read 5000000 644 0 0\n " + b"x" * 5_000_000 + b"\n@end\n@done\n"
    section = read_frames(data).files["/etc/aliases"]
    assert (section.status, len(section.body)) == ("cut", LARGEST)


NUMBERS = ["1" * 5000, "²", "-1", "1e9", ""]


@pytest.mark.parametrize("number", NUMBERS)
def test_odd_numbers_are_none(number: str) -> None:
    files = {
        CONF: f"{OWN}MaxNodeCount={number}\nNodeName=n1 CPUs={number} RealMemory={number}\nSlurmUser=me\n",
        "/etc/passwd": f"me:x:{number}:{number}::/:/bin/sh\n",
    }
    runs = {"state-size": f"{number} /var", "database-size": number, "sockets": f"tcp LISTEN 0 1 0.0.0.0:{number} *:*"}
    found, _ = examine(frames_of(files, runs), SERVICES, Request("sms-old", "host-a"))
    assert found.slurm and found.slurm.state_kb is None and found.slurm.uid is None


def test_the_script_ends_where_files_include_one_another(tmp_path: Path) -> None:
    tree = debian()
    root = tree.build(tmp_path)
    conf = next(root.rglob("slurm.conf"))
    names = [f"part{number}.conf" for number in range(400)]
    for name in names:
        (conf.parent / name).write_text("".join(f"Include {other}\n" for other in names[:32]) + f"Include no-{name}\n")
    with conf.open("a") as stream:
        stream.writelines(f"Include {name}\n" for name in names)
    assert read_frames(run_script(root)).complete
