"""450 nodes of a legacy node are registered and run jobs while it is adopted, and while it gets its services back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.real import many
from tests.real.conftest import Playground
from tests.real.labs import build_image, fresh_lab
from tests.real.outage import watching
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.alone]

LAB, OLD, TARGET, CONF = "t-450-old", "sms-old", "host-a", "/etc/slurm/slurm.conf"
OF_THE_LAB = ("NodeName=", "PartitionName=")
"""Its own lines about nodes, in the legacy node's slurm.conf."""
PARTITION = "PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP"


@pytest.fixture
def cluster() -> Iterator[Playground]:
    """A lab whose legacy node serves all of them."""
    with fresh_lab(LAB, many.HOSTS, legacy=True) as lab:
        play, old = Playground(lab), lab.host(OLD)
        many.change_site(lab)
        build_image(lab)
        many.stop_usual(play)
        lines = [line for line in old.run("cat", CONF).text.splitlines() if not line.startswith(OF_THE_LAB)]
        conf = "\n".join([*lines, *many.node_lines(), PARTITION, ""]).encode()
        old.write(CONF, conf)
        old.run("systemctl", "restart", "slurmctld")
        wait_until(lambda: old.works("scontrol", "ping"), "slurmctld answers", 30)
        many.start_nodes(play, conf)
        yield play


def test_no_node_is_down_through_an_adoption_and_its_undo(
    cluster: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    node, other = cluster.host("node1"), cluster.host(f"node{many.HOSTS}")
    registered_s = many.wait_states(node, {"idle"}, many.REGISTERED_S)
    before = many.submit(node)
    busy = many.states(node)
    said = [many.load(node), f"idle {registered_s:.0f} s after the last had started"]
    for name, words in (("adopt", (OLD, "--to", TARGET)), ("undo", ("--undo",))):
        with many.States(other) as looked:
            with watching(node, cluster.host("outside")) as noticed:
                found = cluster.sms("-q", "adopt", *words, "--json", on="admin", timeout=500)
                time.sleep(2)
            settled_s = many.wait_states(other, many.BUSY, many.SETTLED_S)
            many.stay(other, busy)
        assert not looked.down, (name, looked.seen)
        assert many.jobs(node) == before
        reported = json.loads(found.stdout)
        away = ", ".join(f"{service} {seconds:.2f} s" for service, seconds in noticed.away.items())
        said += [
            f"{name}: away: {away}; as sms measured it: slurmctld {reported['outage']['slurmctld']:.2f} s",
            f"  at most {max(looked.silent)} nodes had not answered at once, none {settled_s:.0f} s after it",
            f"  it took {reported['seconds']:.0f} s in all; {reported['jobs']} jobs known; notes: {reported['notes']}",
        ]
    many.complete(node)
    with capsys.disabled():
        print("", *said, sep="\n  ")
