"""The host that a verb without ``--host`` acts on, by the leases of the hosts."""

from __future__ import annotations

import pytest

from appliance.errors import Refused
from appliance.operations.services.serving import find_serving
from tests.pairs import Pair
from tests.support.env import FakeHosts, with_env
from tests.unit.snapshots.clusters import start_on


@pytest.mark.parametrize("name", ["host-a", "host-b"])
def test_a_machine_that_is_no_admin_host_finds_the_holder(apart: Pair, name: str) -> None:
    start_on(apart, name)
    assert find_serving(with_env(apart.cluster, hosts=FakeHosts(apart.hosts, "elsewhere"))) == name


def test_an_admin_host_acts_on_itself(apart: Pair) -> None:
    start_on(apart, "host-a")
    assert find_serving(with_env(apart.cluster, hosts=FakeHosts(apart.hosts, "host-b"))) is None


def test_without_a_holder_the_hosts_are_named(apart: Pair) -> None:
    with pytest.raises(Refused) as caught:
        find_serving(with_env(apart.cluster, hosts=FakeHosts(apart.hosts, "elsewhere")))
    assert {"host-a", "host-b"} <= {one.strip(",") for one in caught.value.hint.split()}
