"""What slurmd on the nodes makes of changed files: which nodes stand for all, and what its answers mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.operations.context import Cluster
from appliance.operations.services.node_files import judge_node_files
from appliance.plan.services.defined import GRES_CONF, read_defined
from appliance.plan.services.node_files import (
    JOB_SUBMIT,
    MOST_KINDS,
    Tried,
    find_kinds,
    judge_tried,
    read_tried,
    reads_other,
)
from tests.places import DEBIAN_SITE
from tests.sites import open_debian
from tests.support.env import Reports, fake_env
from tests.support.fake import Fake

CONF = "/etc/slurm/slurm.conf"
NODES = b"NodeName=g[1-3] NodeAddr=10.0.0.[1-3] Gres=gpu:2\nNodeName=c[1-9] CPUs=4\nPartitionName=all Nodes=ALL\n"
DEFINED = read_defined({CONF: NODES})
GOOD = (
    "node g1\ngres Name=gpu Type=a100 Count=1 Index=0 ID=7 File=/dev/nvidia0 (null)\n"
    "gres Name=gpu Type=(null) Count=1 Index=1 ID=7 File=/dev/nvidia1 (null)\nstarted\nnode c1\nstarted\n"
)


@pytest.mark.parametrize(
    ("changed", "new", "wanted"),
    [
        ([CONF], NODES, False),
        ([CONF], NODES + b"PartitionName=night Nodes=c1\n", False),
        ([GRES_CONF], NODES, True),
        (["/etc/slurm/topology.conf"], NODES, True),
        (["/etc/slurm/prolog.sh"], NODES, False),
        ([CONF], NODES.replace(b"gpu:2", b"gpu:4"), True),
        ([CONF], NODES + b"NodeName=d1 CPUs=4\n", False),
        ([CONF], NODES + b"NodeName=d1 Gres=gpu:1\n", True),
    ],
)
def test_which_changes_are_tried(changed: list[str], new: bytes, wanted: bool) -> None:
    assert reads_other(changed, DEFINED, read_defined({CONF: new})) is wanted


def test_one_node_of_each_kind() -> None:
    assert find_kinds(DEFINED, "") == {"c1": tuple(f"c{n}" for n in range(1, 10)), "g1": ("g1", "g2", "g3")}
    lines = "Name=gpu File=/dev/nvidia[0-1]\n  NodeName=g[1-2] Name=gpu File=/dev/nvidia0\nnodename=c9 Name=x Count=1\n"
    assert set(find_kinds(DEFINED, lines).values()) == {
        tuple(f"c{n}" for n in range(1, 9)), ("c9",), ("g1", "g2"), ("g3",),
    }  # fmt: skip
    many = read_defined({CONF: b"".join(b"NodeName=n%d CPUs=%d\n" % (n, n) for n in range(1, 40))})
    assert len(find_kinds(many, "")) == MOST_KINDS


def test_answers_are_read() -> None:
    assert read_tried(GOOD) == {"g1": Tried(gres={"gpu": 2}), "c1": Tried()}
    assert read_tried("node g1\nfailed Parse\x1b[2J error\n")["g1"].failed == r"Parse\x1b[2J error"
    assert read_tried("node g1\nfailed \n")["g1"].failed
    assert read_tried("") == {} == read_tried("gres Name=gpu\nnode x\n")


KINDS = find_kinds(DEFINED, "")


@pytest.mark.parametrize(
    ("output", "gres", "wanted"),
    [
        (GOOD, "", []),
        (GOOD.replace("gres Name=gpu Type=(null) Count=1", "gres Name=x Type=(null) Count=1"), "", ["g[1-3] would be"]),
        (GOOD.replace("Name=gpu", "Name=x"), "AutoDetect=nvml\n", []),
        (GOOD.replace("Name=gpu", "Name=x"), "# AutoDetect=nvml\nAutoDetect=off\n", ["g[1-3] would be"]),
        ("node g1\nfailed no\nnode c1\nstarted\n", "", ["slurmd on g[1-3] would end: no"]),
        ("", "", ["slurmd on c[1-9] would end", "slurmd on g[1-3] would end"]),
    ],
)
def test_what_is_refused(output: str, gres: str, wanted: list[str]) -> None:
    found = list(judge_tried(read_tried(output), KINDS, DEFINED, gres))
    assert len(found) == len(wanted) and all(one.startswith(begin) for one, begin in zip(found, wanted, strict=True))


@pytest.fixture
def cluster() -> Cluster:
    return replace(open_debian(DEBIAN_SITE.parent), env=fake_env())


class Image(Fake):
    """A host that runs the image; ``outputs``: of each run."""

    def __init__(self, *outputs: str | int) -> None:
        self.outputs = list(outputs)
        super().__init__({("unshare",): self.tried, ("find", "-L"): (0, ""), ("mkdir", "-p"): (0, "")})

    def tried(self, argv: tuple[str, ...], given: bytes | None) -> tuple[int, str]:
        assert given is not None and b"StoragePass" not in given
        output = self.outputs.pop(0)
        return (output, "no loop device") if isinstance(output, int) else (0, output)


BAD = "node g1\nfailed Parse error\nnode c1\nstarted\n"


@pytest.mark.parametrize(
    ("outputs", "wanted"),
    [
        ([GOOD], 0),
        ([BAD, GOOD], 1),
        ([BAD, BAD], 0),  # it is so already
        ([BAD, "node g1\nfailed another\nnode c1\nstarted\n"], 1),
        (["no slurmd\n"], 0),
        ([1], 1),  # unknown is not empty
    ],
)
def test_what_a_change_is_refused_for(cluster: Cluster, outputs: list[str | int], wanted: int) -> None:
    shown = Reports()
    host = Image(*outputs)
    before = {CONF: NODES, GRES_CONF: b"Name=gpu\n"}
    after = {CONF: NODES, GRES_CONF: b"Name=gpu File=/dev/nvidia[0-1]\n", "/etc/slurm/slurmdbd.conf": b"StoragePass=x"}
    assert len(judge_node_files(cluster.showing(shown), host, "/i.sif", before, after)) == wanted and not host.outputs
    assert bool(shown.lines) == (outputs in (["no slurmd\n"], [BAD, BAD]))
    assert judge_node_files(cluster, host, "/i.sif", after, after) == ()
    assert judge_node_files(cluster, host, "", before, after) == ()


LUA = b"function slurm_job_submit(a, b, c) return 0 end function slurm_job_modify(a, b, c, d) return 0 end"
PLUGIN = NODES + b"JobSubmitPlugins=lua\n"


@pytest.mark.parametrize(
    ("before", "script", "printed", "wanted"),
    [
        ({CONF: PLUGIN, JOB_SUBMIT: b"old"}, LUA, [""], 0),
        ({CONF: PLUGIN, JOB_SUBMIT: b"old"}, LUA[:-3], ["1: 'end' expected"], 1),
        ({CONF: PLUGIN}, b"-- slurm_job_submit", [""], 1),
        ({CONF: PLUGIN, JOB_SUBMIT: b"old"}, LUA, [1], 1),  # unknown is not good
        ({CONF: PLUGIN, JOB_SUBMIT: LUA}, LUA, [], 0),
        ({CONF: NODES, JOB_SUBMIT: LUA}, LUA, [""], 0),  # it is loaded from now on
    ],
)
def test_a_lua_script_with_which_slurmctld_would_not_start(
    cluster: Cluster, before: dict[str, bytes], script: bytes, printed: list[str | int], wanted: int
) -> None:
    """Also at a start, where no container runs: the image's Lua tries it."""
    host = Image(*printed)
    after = {CONF: PLUGIN, JOB_SUBMIT: script}
    assert len(judge_node_files(cluster, host, "/i.sif", before, after)) == wanted and not host.outputs
    assert judge_node_files(cluster, host, "/i.sif", before, {**after, CONF: NODES}) == ()
