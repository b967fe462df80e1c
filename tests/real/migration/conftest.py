"""Two admin hosts, one of which runs the services container."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.operations.image.build import Built
from appliance.operations.lab.demo import wait_idle
from tests.real.conftest import NODES, Playground
from tests.real.moves import CARRIERS, OVERLAY, Hosts, other


@pytest.fixture(scope="module")
def hosts(playground: Playground, built: Built) -> Iterator[Hosts]:
    """The services container runs on one of the hosts; afterwards it is where other tests expect it."""
    found = Hosts(playground.lab)
    for host in CARRIERS:
        found.sms("-q", "stop", on=host)
        found.host(host).remove(f"/var/lib/sms/overlays/lab.img{'' if host == 'host-b' else '.moved'}")
    found.sms("-q", "start", "--host", "host-a", on="admin")
    wait_idle(found.host("node1"), NODES)
    yield found
    for host in CARRIERS:
        found.sms("-q", "stop", on=host)
        script = "rm -rf /var/lib/sms/overlays/lab.img.* /var/lib/sms/snapshots /var/lib/sms/full"
        found.host(host).run("sh", "-c", script)
    found.host("host-b").remove(OVERLAY)
    found.sms("-q", "start", "--host", "host-a", on="admin")


def where(hosts: Hosts) -> tuple[str, str]:
    """Where it runs, and the other host."""
    (source,) = [host for host in CARRIERS if hosts.instances(host)]
    return source, other(source)
