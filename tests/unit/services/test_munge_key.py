"""A new munge key: whom it would not reach, its swap on nodes and in the container, and that a push leaves it out."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import pytest

from appliance.errors import Refused
from appliance.operations.context import Cluster
from appliance.operations.overlay.overlay import seeds_for
from appliance.operations.services.munge_key import NEXT, KeySwap, find_key_faults, judge_key
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.files import MUNGE_KEY
from appliance.plan.services.effect import PRESENT
from appliance.tools.provision import VmUnreachable
from tests.sites import open_debian
from tests.support.fake import Fake
from tests.unit.services.test_effect import node


@pytest.mark.parametrize(("old", "new", "faults"), [(b"a", b"b", 1), (b"a", b"a", 0), (b"", b"b", 0)])
def test_a_start_with_another_key(old: bytes, new: bytes, faults: int) -> None:
    assert len(list(judge_key(lambda _: old, new))) == faults


@dataclass
class Vm:
    """The VM's files and clients. ``lacking``: clients that take no file; ``silent``: that it has never heard of."""

    files: dict[str, str] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    away: bool = False
    secrets: list[bytes] = field(default_factory=list)

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        if self.away:
            raise VmUnreachable("it does not answer")
        if path.endswith("/reports"):
            names = ("services", "n1", "n2", "n3")
            clients = [self.client(name) for name in names]
            return {"push": 1, "began": 0.0, "now": 9e9, "clients": clients, "unknown": []}
        if path.endswith("/push"):
            return {"push": 1}
        name = path.removeprefix("/sms/v1/files")
        if method == "DELETE":
            return self.files.pop(name, None)
        self.files[name] = body["sha256"]
        return {"path": name, "version": 1, "size": 4, "made": 1.0, **body}

    def send(self, path: str, stream: IO[bytes], size: int, **_: Any) -> None:
        assert len(stream.read()) == size

    def client(self, name: str) -> dict[str, Any]:
        taken = {} if name in self.lacking else self.files
        at = None if name in self.silent else 9e9 - 1
        has = {path: {"sha256": digest, "since": 1.0} for path, digest in taken.items()}
        lists: dict[str, list[str]] = {"missing": [], "left": [], "held": []}
        return {"client": name, "kind": "node", "at": at, "seen": at, "push": 1, "has": has, "failed": {}, **lists}


def key_host(cluster: Cluster) -> Fake:
    """A host whose container has the old key; n3 is down."""
    inside = inside_argv(cluster.site, cluster.services)
    shown = "\n".join([node("n1", "mixed"), node("n2", "idle"), node("n3", "down")])
    update = (*inside, "scontrol", "update")
    return Fake({(*inside, *PRESENT): (0, shown), (*inside, "cat", "--", MUNGE_KEY): (0, "old"), update: (0, "")})


@pytest.mark.parametrize(
    ("vm", "switch", "why"),
    [
        (Vm(), False, ""),
        (Vm(silent=frozenset({"n3"})), False, ""),
        (Vm(silent=frozenset({"n2"})), False, "the VM does not reach nodes in use (1): n2"),
        (Vm(away=True), False, "is not known"),
        (None, False, "there is no provisioning VM"),
        (Vm(), True, "a second instance cannot swap it"),
    ],
)
def test_whom_a_new_key_would_not_reach(cluster: Cluster, vm: Any, switch: bool, why: str) -> None:
    """A node that takes no job now gets it when it boots."""
    found = list(find_key_faults(cluster, key_host(cluster), {"n1", "n2", "n3"}, vm, switch=switch))
    assert [why in one.why for one in found] == ([True] if why else [])


def swap(cluster: Cluster, vm: Any) -> KeySwap:
    return KeySwap(cluster, key_host(cluster), b"new", {"n1", "n2", "n3"}, vm)


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def test_a_key_is_laid_beside_the_old_one_and_then_swapped(cluster: Cluster) -> None:
    vm = Vm({MUNGE_KEY: digest(b"old")}, lacking=frozenset({"n3"}))
    work = swap(cluster, vm)
    work.stage(frozenset())
    assert vm.files == {MUNGE_KEY: digest(b"old"), NEXT: digest(b"new")}
    work.begin()
    assert work.finish() == () and vm.files == {MUNGE_KEY: digest(b"new")}


def test_a_node_that_does_not_take_it(cluster: Cluster) -> None:
    """Refused, and nothing is left; with --force, or as a person has seen it, it is drained afterwards."""
    vm = Vm({MUNGE_KEY: digest(b"old")}, lacking=frozenset({"n2"}))
    work = swap(cluster, vm)
    with pytest.raises(Refused) as refused:
        work.stage(frozenset())
    assert vm.files == {MUNGE_KEY: digest(b"old")}
    work.stage(frozenset({refused.value.message.partition("\n  ")[2]}))
    work.stage(None)
    work.begin()
    assert "n2" in work.finish()[0]
    assert "NodeName=n2" in work.host.asked[-1] and "State=DRAIN" in work.host.asked[-1]  # type: ignore[attr-defined]


def test_a_swap_that_is_taken_back(cluster: Cluster) -> None:
    """Nodes get the key that the container has again; a VM that is away is reported."""
    vm = Vm({MUNGE_KEY: digest(b"old")})
    work = swap(cluster, vm)
    work.stage(frozenset())
    work.begin()
    work.take_back()
    assert vm.files == {MUNGE_KEY: digest(b"old")}
    vm.away = True
    work.take_back()
    assert "not known" in work.finish()[0], "what the container has stays"


@pytest.mark.parametrize(("size", "refused"), [(6, True), (31, True), (32, False), (1024, False)])
def test_a_key_with_which_munged_does_not_start(tmp_path: Path, size: int, refused: bool) -> None:
    """Whatever verb reads it: only `sms config check` named it."""
    key = tmp_path / "munge.key"
    key.write_bytes(b"k" * size)
    cluster = open_debian()
    secrets = cluster.site.secrets.model_copy(update={"munge_key": key})
    cluster = replace(cluster, site=cluster.site.model_copy(update={"secrets": secrets}))
    with pytest.raises(Refused, match=f"has {size} bytes") if refused else nullcontext():
        assert key.read_bytes() in [one.data for one in seeds_for(cluster)]
