"""An image of an earlier version, and a host that cannot confine: a message before anything is stopped or fenced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from appliance.errors import Refused
from appliance.host.base import Unreachable
from appliance.operations import preflight
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.hosts import doctor
from appliance.operations.image.deliver import Image, find_refusal
from appliance.operations.lease import QUERY
from appliance.operations.migration import failover
from appliance.operations.services import start, stop
from appliance.operations.site.keys import create_pair
from appliance.plan.machine import inside_argv, stop_argv, stop_timeout
from appliance.plan.services.confinement import Confinement, capabilities_for
from appliance.plan.services.effect import PRESENT
from appliance.plan.services.runs import NOT_CONFINED
from appliance.progress import Silent
from appliance.share import share
from appliance.shared.lease import Lease
from appliance.tools.apptainer import Instance
from appliance.tools.programs import FIND
from appliance.tools.scripts import script_argv
from tests.confined import confined_output
from tests.support.env import Reports, fake_env
from tests.support.fake import Fake
from tests.support.instances import LIST, lists

RUNNING = Instance("sms-lab", 7, "/i.sif")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two hosts, of which host-b does not answer."""
    path = tmp_path / "sms.yaml"
    path.write_text(share("definitions", "profiles", "lab.yaml").read_text())
    opened = open_cluster(path, tmp_path / "state", Silent())
    hosts = {one.name: Fake({(): silent}, name=one.name) for one in opened.site.admin_hosts}
    return replace(opened, env=fake_env(hosts))


def silent(*_: Any) -> Any:
    raise Unreachable("host-b: no route")


def host(labels: dict[str, str] | None, **answers: tuple[int, str]) -> Fake:
    """With an image of these labels; None: without one."""
    inspected = json.dumps({"data": {"attributes": {"labels": labels or {}}}})
    return Fake(
        {
            ("test", "-e"): (int(labels is None), ""),
            script_argv("image-metadata"): (0, inspected),
            LIST: lists([]),
            ("sh", "-c", FIND): (0, ""),
            ("sh", "-c", QUERY): (0, "0 none\n"),
            ("find",): (0, ""),
            ("mkdir",): (0, ""),
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
    broken.answers[script_argv("image-metadata")] = (255, "FATAL: image format not recognized")
    assert "/i.sif cannot be read" in find_refusal(broken, "/i.sif")

    def fail(*_: Any) -> Any:
        raise Unreachable("host-a: no route")

    broken.answers[script_argv("image-metadata")] = fail
    with pytest.raises(Unreachable):
        find_refusal(broken, "/i.sif")


@pytest.mark.parametrize(("keep_lease", "runs", "warned"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_a_stop_warns_before_it_stops(cluster: Cluster, keep_lease: bool, runs: bool, warned: int) -> None:
    reported, running = Reports(), lists([RUNNING] if runs else [])

    def begin(*_: Any) -> Any:
        assert len(reported.lines) == warned
        raise InterruptedError("the stop begins")

    here = host({"sms.key": "k"}, sh=(0, ""))
    here.answers |= {
        ("test", "-d"): (1, ""),
        ("rm", "-f", "--", str(cluster.places.jobs)): (0, ""),
        inside_argv(cluster.site, cluster.services, *PRESENT): (1, "no answer"),
        # The second instance of a switch is looked for when the first one has stopped, or does not run.
        LIST: lambda argv, _: begin() if argv[-1].endswith(".*") else running(argv, None),
        stop_argv(cluster.site, stop_timeout(cluster.services)): begin,
    }
    with pytest.raises(InterruptedError):
        stop.stop(cluster.showing(reported), here, keep_lease=keep_lease)
    assert [line for line in reported.lines if "`sms build` now" in line and "is refused" in line] == reported.lines


NO_SECCOMP = (NOT_CONFINED, "system calls are not filtered (seccomp)")
"""Answer of a host that does not confine the trial."""


def confines(cluster: Cluster) -> tuple[int, str]:
    """The answer of a host that confines it."""
    return 0, confined_output(Confinement(capabilities_for(cluster.services), "", "", ()), joined=False)


def test_a_failover_tries_the_confinement_before_it_fences(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the failed host is off, the overlay replaced, and then the start is refused."""
    replies: dict[str, Any] = {
        "find_known": SimpleNamespace(generation=3),
        "check_fence": None,
        "check_networks": None,
        "deliver": ("/i.sif", ""),
        "trust": Image("/i.sif", "k", "s", "signer"),
    }
    for name, value in replies.items():
        monkeypatch.setattr(failover, name, lambda *_, value=value, **__: value)
    here = host({}, unshare=NO_SECCOMP)
    lease = Lease(cluster.site.cluster, 3, "host-b", 1.0, "host-a", cluster_uuid=str(uuid4()))
    here.files[str(cluster.places.lease)] = lease.text()
    here.answers["sh", "-c", QUERY] = (0, f"0 file\n{lease.text().decode()}")
    with pytest.raises(Refused, match="seccomp"):  # whatever else it did would have no answer
        failover.failover(cluster, here, failover.FailoverOptions())


def test_a_rehearsed_start_tries_the_confinement(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: dict[str, Any] = {
        "check_networks": None,
        "refuse_taken": None,
        "deliver": ("/i.sif", ""),
        "trust": Image("/i.sif", "k", "s", "signer"),
    }
    for name, value in replies.items():
        monkeypatch.setattr(start, name, lambda *_, value=value, **__: value)
    here = host({}, unshare=NO_SECCOMP)
    del here.answers["sh", "-c", QUERY]  # the leases are queried later
    with pytest.raises(Refused, match="seccomp"):
        start.rehearse_start(cluster, here, start.StartOptions())


@pytest.fixture
def signed(cluster: Cluster, tmp_path: Path) -> Cluster:
    """With a public key, with which images are signed or not."""
    key = tmp_path / "sign.pub"
    create_pair(tmp_path / "sign.pem", key)
    signing = cluster.site.signing.model_copy(update={"public_keys": (key,), "pgp_fingerprint": None})
    return replace(cluster, site=cluster.site.model_copy(update={"signing": signing}))


@pytest.mark.parametrize(
    ("labels", "confined", "states"),
    [
        (None, True, {}),
        ({"sms.confined": "1"}, True, {"current image": "ok", "confinement": "ok"}),
        ({}, True, {"current image": "missing", "confinement": "ok"}),
        ({"sms.confined": "1"}, False, {"current image": "ok", "confinement": "missing"}),
    ],
)
def test_doctor_tries_to_confine_the_current_image(
    signed: Cluster, labels: dict[str, str] | None, confined: bool, states: dict[str, str]
) -> None:
    trial = confines(signed) if confined else NO_SECCOMP
    here = host(labels, readlink=(0, "/i.sif"), unshare=trial)
    here.answers["apptainer", "verify"] = (0, "")
    found = list(doctor._image(signed, here))
    assert {finding.what: finding.state for finding in found} == states
    if not confined:
        assert "seccomp" in found[-1].detail


def test_doctor_runs_nothing_of_an_image_without_a_valid_signature(signed: Cluster) -> None:
    here = host({}, readlink=(0, "/i.sif"))  # a trial would have no answer
    here.answers["apptainer", "verify"] = (255, "FATAL: signature not found")
    (finding,) = doctor._image(signed, here)
    assert (finding.what, finding.state) == ("current image", "missing") and "not signed" in finding.detail


def test_a_trial_changes_nothing_but_the_state_folder(cluster: Cluster) -> None:
    """No kernel module is loaded by what only checks."""
    here = host({}, env=(0, ""), unshare=confines(cluster))
    preflight.try_confinement(cluster, here, "/i.sif")
    assert list(here.files) == [str(cluster.places.seccomp)]
    assert not [argv for argv in here.asked if "modprobe" in argv]
    preflight.check_confinement(cluster, here, "/i.sif")
    assert [argv for argv in here.asked if "modprobe" in argv]
