"""Real engines, one of each for all tests of a run; each test has a job or a namespace of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.lab.engines.hosts import DISK
from appliance.lab.engines.kubernetes import CONTROL_PLANE, NODE, Kubernetes, kubernetes_cluster
from appliance.lab.engines.nomad import NomadCluster, nomad_cluster
from appliance.lab.engines.programs import find_missing
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.image.build import build
from appliance.progress import Silent
from tests.images import make_site
from tests.run import RUN

STATE = DISK / "state"
"""The host volume ``sms-full`` of Nomad's first client."""


def need_engines(*programs: str) -> None:
    """Skip where they are not built; in CI and in a run of all tests that is a failure."""
    if missing := find_missing(programs):
        stop = pytest.fail if os.environ.get("CI") or os.environ.get(RUN) else pytest.skip
        stop(f"not built: {', '.join(missing)}; `make engines` does that")


@pytest.fixture(scope="session")
def nomad() -> Iterator[NomadCluster]:
    """Three servers and two clients, of which the first has the volume of a cluster's state."""
    need_engines("nomad")
    STATE.mkdir(parents=True, exist_ok=True)
    own = {"host_volume": {"sms-full": {"path": str(STATE), "read_only": False}}, "max_kill_timeout": "300s"}
    with nomad_cluster(servers=3, clients=2, settings={"c1": own}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Kubernetes]:
    """A Kubernetes cluster, which has a node once a test has requested ``kubernetes``."""
    need_engines(*CONTROL_PLANE)
    with kubernetes_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubernetes(control_plane: Kubernetes) -> Kubernetes:
    """The same cluster with its node, which runs pods."""
    need_engines(*NODE)
    control_plane.start_node()
    return control_plane


@pytest.fixture(scope="session")
def site() -> Cluster:
    """The site file of a lab, with its keys, without the lab."""
    return open_cluster(make_site(), None, Silent())


@pytest.fixture(scope="session")
def signed_image(site: Cluster) -> Path:
    """The signed SIF of that site."""
    assert site.path
    return Path(build(site, lock=site.path.with_name("sms.lock")).image)


@pytest.fixture(scope="module", autouse=True)
def current_image(request: pytest.FixtureRequest) -> None:
    """Exports name the current image of the cluster: tests of other files may have built another one of this name."""
    here = (item for item in request.session.items if item.path == request.path)
    if any("signed_image" in getattr(item, "fixturenames", ()) for item in here):
        site = request.getfixturevalue("site")
        build(site, lock=site.path.with_name("sms.lock"))
