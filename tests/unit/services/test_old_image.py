"""An image of an earlier version, and a host that cannot confine: a message before anything is stopped or fenced."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import Refused
from appliance.host.base import Unreachable
from appliance.host.fake import Fake
from appliance.operations import preflight
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.hosts import doctor
from appliance.operations.image.deliver import Image, find_refusal
from appliance.operations.migration import failover
from appliance.operations.services import start, stop
from appliance.progress import Silent
from appliance.share import share
from appliance.tools.apptainer import Instance

RUNNING = Instance("sms-lab", 7, "/i.sif")


class Reported(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "sms.yaml"
    path.write_text(share("definitions", "profiles", "lab.yaml").read_text())
    return open_cluster(path, tmp_path / "state", Silent())


def host(labels: dict[str, str] | None, **answers: tuple[int, str]) -> Fake:
    """With an image of these labels; None: without one."""
    inspected = json.dumps({"data": {"attributes": {"labels": labels or {}}}})
    return Fake(
        {
            ("test", "-e"): (int(labels is None), ""),
            ("apptainer", "inspect"): (0, inspected),
            **{(program,): answer for program, answer in answers.items()},
        },
        name="host-a",
    )


@pytest.mark.parametrize(
    ("labels", "refused"),
    [(None, False), ({"sms.key": "k", "sms.confined": "1"}, False), ({"sms.key": "k"}, True), ({}, True)],
)
def test_an_image_that_would_be_refused_is_recognised(labels: dict[str, str] | None, refused: bool) -> None:
    found = find_refusal(host(labels), "/images/lab.sif")
    assert found.startswith("this version of sms cannot start /images/lab.sif again") is refused
    assert bool(found) is refused


def test_an_image_that_cannot_be_read_would_be_refused() -> None:
    broken = host({})
    broken.answers[("apptainer", "inspect")] = (255, "FATAL: image format not recognized")
    assert "/i.sif cannot be read" in find_refusal(broken, "/i.sif")

    def fail(*_: Any) -> Any:
        raise Unreachable("host-a: no route")

    broken.answers[("apptainer", "inspect")] = fail
    with pytest.raises(Unreachable):
        find_refusal(broken, "/i.sif")


@pytest.mark.parametrize(("keep_lease", "runs", "warned"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_a_stop_warns_before_it_stops(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, keep_lease: bool, runs: bool, warned: int
) -> None:
    reported = Reported()

    def take_down(*_: Any) -> bool:
        assert len(reported.lines) == warned
        raise InterruptedError("the stop begins")

    monkeypatch.setattr(stop, "check_programs", lambda *_: None)
    monkeypatch.setattr(stop, "find_instance", lambda *_: RUNNING if runs else None)
    monkeypatch.setattr(stop, "lock_host", lambda *_: nullcontext())
    monkeypatch.setattr(stop, "stop_guard", lambda *_: None)
    monkeypatch.setattr(stop, "Leases", lambda *_: SimpleNamespace(query=lambda: None))
    monkeypatch.setattr(stop, "take_down", take_down)
    with pytest.raises(InterruptedError):
        stop.stop(cluster, host({"sms.key": "k"}), reported, keep_lease=keep_lease)
    assert [line for line in reported.lines if "`sms build` now" in line and "is refused" in line] == reported.lines


def no_seccomp(*_: Any) -> Any:
    raise Refused("host-b does not confine the services container: system calls are not filtered (seccomp)")


def test_a_failover_tries_the_confinement_before_it_fences(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the failed host is off, the overlay replaced, and then the start is refused."""
    me = SimpleNamespace(lease=SimpleNamespace(holder="", cluster_uuid=""))
    leases = SimpleNamespace(top=3, views={"host-a": me}, me="host-a", query=lambda: None, unread={})
    replies: dict[str, Any] = {
        "check_programs": None,
        "_learn_identity": None,
        "Leases": leases,
        "read_history": [],
        "find_open_failover": None,
        "_failed_hosts": ("host-b",),
        "find_known": SimpleNamespace(generation=3),
        "find_admin": None,
        "check_fence": None,
        "check_networks": None,
        "deliver": ("/i.sif", ""),
        "trust": Image("/i.sif", "k", "s", "signer"),
    }
    for name, value in replies.items():
        monkeypatch.setattr(failover, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(failover, "try_confinement", no_seccomp)
    for name in ("_fence", "_restore", "_start"):
        monkeypatch.setattr(failover, name, lambda *_: pytest.fail("too late"))
    with pytest.raises(Refused, match="seccomp"):
        failover.failover(cluster, host({}), failover.FailoverOptions(), Silent())


def test_a_rehearsed_start_tries_the_confinement(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_programs", "find_instance", "check_networks", "refuse_taken"):
        monkeypatch.setattr(start, name, lambda *_: None)
    monkeypatch.setattr(start, "deliver", lambda *_: ("/i.sif", ""))
    monkeypatch.setattr(start, "trust", lambda *_: Image("/i.sif", "k", "s", "signer"))
    monkeypatch.setattr(start, "Leases", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr(start, "try_confinement", no_seccomp)
    with pytest.raises(Refused, match="seccomp"):
        start.rehearse_start(cluster, host({}), Silent(), start.StartOptions())


def nothing(*_: Any) -> None:
    """The host confines."""


@pytest.mark.parametrize(
    ("labels", "trial", "states"),
    [
        (None, nothing, {}),
        ({"sms.confined": "1"}, nothing, {"current image": "ok", "confinement": "ok"}),
        ({}, nothing, {"current image": "missing", "confinement": "ok"}),
        ({"sms.confined": "1"}, no_seccomp, {"current image": "ok", "confinement": "missing"}),
    ],
)
def test_doctor_tries_to_confine_the_current_image(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    labels: dict[str, str] | None,
    trial: Callable[..., None],
    states: dict[str, str],
) -> None:
    monkeypatch.setattr(doctor, "verify", lambda *_: "signer")
    monkeypatch.setattr(doctor, "try_confinement", trial)
    found = list(doctor._image(cluster, host(labels, readlink=(0, "/i.sif"), apptainer=(0, "{}"))))
    assert {finding.what: finding.state for finding in found} == states
    if trial is no_seccomp:
        assert "seccomp" in found[-1].detail


def test_doctor_runs_nothing_of_an_image_without_a_valid_signature(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> str:
        raise Refused("/i.sif cannot be trusted: it is not signed", hint="do not start it")

    monkeypatch.setattr(doctor, "verify", refuse)
    monkeypatch.setattr(doctor, "try_confinement", lambda *_: pytest.fail("it was run"))
    (finding,) = doctor._image(cluster, host({}, readlink=(0, "/i.sif")))
    assert (finding.what, finding.state) == ("current image", "missing") and "not signed" in finding.detail


def test_a_trial_changes_nothing_but_the_state_folder(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel module is loaded by what only checks."""
    here = host({}, find=(0, "/proc/sys"), mkdir=(0, ""), env=(0, ""), unshare=(0, ""))
    monkeypatch.setattr(preflight, "find_gaps", lambda *_: [])
    preflight.try_confinement(cluster, here, "/i.sif")
    assert list(here.files) == [str(cluster.places.seccomp)]
    assert not [argv for argv in here.asked if "modprobe" in argv]
    preflight.check_confinement(cluster, here, "/i.sif")
    assert [argv for argv in here.asked if "modprobe" in argv]
