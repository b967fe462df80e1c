"""Confirmed controllers: what several runs confirm at once is all kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.errors import Busy, Refused
from appliance.operations.nodes import controllers
from appliance.operations.nodes.controllers import (
    check_controllers,
    confirm_controllers,
    confirmed_path,
    read_confirmed,
)
from appliance.provision.payloads import Node
from appliance.shared.locks import hold_lock
from tests.crash.workload import cluster_in

COUNT = 25
CONFIRM = """\
import sys
from pathlib import Path
from appliance.operations.nodes.controllers import confirm_controllers
from tests.crash.workload import cluster_in
cluster = cluster_in(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    confirm_controllers(cluster, {sys.argv[2] + str(number): "https://192.0.2.1"})
"""


def test_two_runs_confirm_at_once(tmp_path: Path) -> None:
    """A lost one would make the next URL of that node the first one, which is not confirmed."""
    runs = [
        subprocess.Popen([sys.executable, "-c", CONFIRM, str(tmp_path), name, str(COUNT)], stderr=subprocess.PIPE)
        for name in ("a", "b")
    ]
    assert [(run.communicate()[1].decode(), run.returncode) for run in runs] == [("", 0)] * 2
    assert len(read_confirmed(cluster_in(tmp_path))) == 2 * COUNT


def test_a_first_url_does_not_replace_one_that_is_confirmed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, node = cluster_in(tmp_path), Node(name="n1", bmc="https://192.0.2.66")

    def late(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(controllers, "hold_lock", hold_lock)
        confirm_controllers(cluster, {"n1": "https://192.0.2.1"})
        return hold_lock(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(controllers, "hold_lock", late)
    with pytest.raises(Refused, match="another controller for n1"):
        check_controllers(cluster, [node])
    assert read_confirmed(cluster) == {"n1": "https://192.0.2.1"}


def test_the_last_one_can_be_removed(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    confirm_controllers(cluster, {"n1": "https://192.0.2.1"})
    confirm_controllers(cluster, {"n1": ""})
    assert read_confirmed(cluster) == {}


def test_a_run_that_holds_the_lock_for_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_in(tmp_path)
    monkeypatch.setattr(controllers, "LOCK_WAIT_S", 0.1)
    with hold_lock(f"{confirmed_path(cluster)}.lock"), pytest.raises(Busy):
        confirm_controllers(cluster, {"n1": "https://192.0.2.1"})
