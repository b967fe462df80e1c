"""A survey of a node whose files are meant to hang its reader: bounded, and what was left out is a finding."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from appliance.catalog import read_catalog
from appliance.plan.adopt.frames import Frames, Section, read_frames
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
"""By file, what it consists of; patterns of regular expressions took the square of its length."""


@pytest.mark.parametrize("path", HANGS)
def test_no_pattern_takes_the_square_of_a_file(path: str) -> None:
    name = path.strip()
    text = (HANGS[path] * SIZE)[:SIZE]
    left(frames_of({name: OWN + text if name == CONF else text}))


def test_no_pattern_takes_the_square_of_an_output() -> None:
    left(frames_of({}, {"slurm-user": ("uid=1(" * SIZE)[:SIZE]}))


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
