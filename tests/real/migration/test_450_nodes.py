"""450 nodes are registered and run jobs while the controller moves to another admin host."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from appliance.operations.context import open_cluster
from appliance.operations.image.build import build
from appliance.plan.machine import inside_argv
from appliance.progress import Silent
from tests.real import many
from tests.real.conftest import Playground, give_image
from tests.real.labs import fresh_lab
from tests.real.outage import watching

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.alone]

LAB = "t-450"


@pytest.fixture
def cluster() -> Iterator[Playground]:
    """A lab with the services container on host-a, and all nodes registered."""
    with fresh_lab(LAB, many.HOSTS) as lab:
        play = Playground(lab)
        many.change_site(lab)
        opened = open_cluster(play.lab.etc / "sms.yaml", None, Silent())
        give_image(play, build(opened, lock=play.lab.etc / "sms.lock"))
        many.stop_usual(play)
        play.sms("-q", "start", "--host", "host-a", on="admin")
        conf = inside_argv(opened.site, opened.services, "cat", "/etc/slurm/slurm.conf")
        many.start_nodes(play, play.host("host-a").run(*conf).stdout)
        yield play


def test_the_controller_moves_with_every_node_registered(
    cluster: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    node, other = cluster.host("node1"), cluster.host(f"node{many.HOSTS}")
    registered_s = many.wait_states(node, {"idle"}, many.REGISTERED_S)
    began = time.monotonic()
    before = many.submit(node)
    submitted_s = time.monotonic() - began
    busy, load = many.states(node), many.load(node)
    with many.States(other) as looked:
        with watching(node, cluster.host("outside")) as noticed:
            reported = json.loads(cluster.sms("-q", "migrate", "host-b", "--json", on="admin").stdout)
            time.sleep(2)
        settled_s = many.wait_states(other, many.BUSY, many.SETTLED_S)
        many.stay(other, busy)
    assert not looked.down, looked.seen
    assert many.jobs(node) == before
    many.complete(node)
    away = ", ".join(f"{service} {seconds:.2f} s" for service, seconds in noticed.away.items())
    said = [
        load,
        f"idle {registered_s:.0f} s after the last had started; all jobs ran {submitted_s:.0f} s after sbatch",
        f"away: {away}; parts {reported['parts']}, {reported['last_bytes'] >> 10} KiB in the outage",
        f"at most {max(looked.silent)} nodes had not answered at once, none {settled_s:.0f} s after the move",
        f"the move took {reported['seconds']:.0f} s in all",
    ]
    with capsys.disabled():
        print("", *said, sep="\n  ")
