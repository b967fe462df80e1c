"""Admin hosts whose network cards carry addresses: the container is attached with macvlan interfaces on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.lab import Lab
from appliance.lab.layout import PROVISIONING, PUBLIC
from appliance.operations.lab import demo
from tests.real.conftest import Playground, give_image
from tests.real.labs import build_image, cables_out, fresh_lab
from tests.real.moves import Stepping
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full]

CARRIERS = ("host-a", "host-b")
CARDS = {PROVISIONING: "prov0", PUBLIC: "pub0"}
INTERFACES = {PROVISIONING: "eth0", PUBLIC: "eth1"}
NODES = 2


def use_cards(lab: Lab) -> None:
    """Remove the bridges of both admin hosts: their network cards have the addresses."""
    for name in CARRIERS:
        host = next(one for one in lab.layout.hosts if one.name == name)
        lines = []
        for network, card in CARDS.items():
            lines += [f"link set {card} nomaster", f"link delete {lab.layout.plan.bridges[network]}"]
            lines += [f"link set {card} address {host.mac(network)} up"]
            lines += [f"addr add {host.addresses[network]}/{lab.layout.plan.prefixes[network]} dev {card}"]
        lines += [f"route add default via {lab.layout.plan.gateway(host)}"]
        lab.host(name).run("ip", "-batch", "-", input="\n".join([*lines, ""]).encode())


def attach(document: dict[str, Any]) -> None:
    """Attach the container to the cards; the one of the provisioning network is named for each host."""
    networks = document["networks"]
    for network in CARDS:
        del networks[network]["bridge"]
        networks[network]["attach"] = "macvlan"
    networks[PROVISIONING]["port"] = dict.fromkeys(CARRIERS, CARDS[PROVISIONING])
    networks[PUBLIC]["port"] = CARDS[PUBLIC]


@pytest.fixture(scope="module")
def served() -> Iterator[Playground]:
    """The container runs on host-a, attached to its network cards."""
    with fresh_lab("t-macvlan", NODES) as lab:
        playground = Playground(lab)
        use_cards(lab)
        playground.variant("sms.yaml", attach)
        built = build_image(lab)
        for name in CARRIERS:
            give_image(playground, built, name)
        playground.sms("-q", "start", "--host", "host-a", on="admin")
        demo.wait_idle(playground.host("node1"), NODES)
        yield playground


def inside(playground: Playground, on: str, *argv: str) -> str:
    """Run a program of an admin host in the container's network."""
    (instance,) = json.loads(playground.host(on).run("apptainer", "instance", "list", "--json").stdout)["instances"]
    return playground.host(on).run("nsenter", f"--net=/proc/{instance['pid']}/ns/net", *argv).text


def modes(playground: Playground, on: str) -> dict[str, tuple[str, str]]:
    """Mode and queueing discipline of the container's interfaces."""
    links = json.loads(inside(playground, on, "ip", "-json", "-details", "link", "show", "type", "macvlan"))
    return {link["ifname"]: (link["linkinfo"]["info_data"]["mode"], link["qdisc"]) for link in links}


def works(playground: Playground, on: str) -> None:
    """Jobs run, nodes reach the outside, `sms status` finds no fault; the host has its addresses on its cards."""
    node = playground.host("node1")
    demo.wait_idle(node, NODES)
    names = demo.as_alice(node, "srun", f"--nodes={NODES}", "hostname").split()
    assert sorted(names) == sorted(playground.lab.nodes)
    assert "10.78.0.2" in demo.fetch_outside(node)
    found = playground.status(on)
    assert found["healthy"], found["warnings"]
    for network in found["networks"]:
        card = CARDS[network["name"]]
        assert (network["attach"], network["bridge"], network["uplinks"]) == ("macvlan", card, [card])
    assert modes(playground, on) == dict.fromkeys(INTERFACES.values(), ("bridge", "noqueue"))
    assert node.works("ping", "-c", "1", "-W", "2", {"host-a": "10.77.0.11", "host-b": "10.77.0.12"}[on])


def test_it_serves_and_migrates_while_a_job_runs(served: Playground) -> None:
    works(served, "host-a")
    node = served.host("node1")
    job = demo.as_alice(node, "sbatch", "--parsable", "--wrap=sleep 20").strip()
    moved = json.loads(served.sms("migrate", "host-b", "--json", "--force", on="admin").stdout)
    assert moved["jobs"] >= 1 and moved["notes"] == [] and served.instances("host-a") == []
    print(moved["outage"])
    works(served, "host-b")
    served.sms("migrate", "host-a", "--force", on="admin")
    works(served, "host-a")
    assert served.instances("host-b") == []
    show = ("exec", "--", "scontrol", "show", "job", job)
    wait_until(lambda: "JobState=COMPLETED" in served.sms(*show).text, "the job")


@pytest.mark.parametrize("step", ["<probe", ">release", ">up"])
def test_a_migration_that_is_killed_leaves_one_host_that_serves(served: Playground, step: str) -> None:
    """The instance on the target is detached, no host has the addresses, or the target has them."""
    (source,) = where(served)
    target = next(host for host in CARRIERS if host != source)
    stepping = Stepping(served.lab, "-q", "migrate", target)
    try:
        assert stepping.to(step), stepping.end(60)
        if step == "<probe":
            assert is_detached(served, target) and not is_detached(served, source)
    finally:
        stepping.kill()
        stepping.end(60)
    wait_until(lambda: len(where(served)) == 1, "one instance", 90)
    (serves,) = where(served)
    print(step, source, serves)
    assert step != "<probe" or serves == source
    wait_until(lambda: not is_detached(served, serves), "its interfaces", 30)
    served.sms("-q", "start", on=serves)  # starts its guard, which the killed run has not
    works(served, serves)
    if serves != "host-a":
        served.sms("-q", "migrate", "host-a", "--force", on="admin")


def where(playground: Playground) -> list[str]:
    """The hosts that run an instance."""
    return [host for host in CARRIERS if playground.instances(host)]


@contextmanager
def fault(playground: Playground, words: str) -> Iterator[None]:
    """`sms status` finds nothing wrong before, and reports what is wrong after with these words."""
    assert playground.status()["healthy"]
    yield
    found = playground.status()
    assert not found["healthy"] and any(words in warning for warning in found["warnings"]), found["warnings"]


def healthy(playground: Playground, on: str = "host-a") -> None:
    wait_until(lambda: playground.status(on)["healthy"], "health", 60)


def test_status_names_each_fault(served: Playground) -> None:
    host = served.host("host-a")
    detach = "tc qdisc replace dev eth0 root blackhole; ip link set dev eth0 type macvlan mode source"
    again = "ip link set dev eth0 type macvlan mode bridge; tc qdisc replace dev eth0 root noqueue"
    with fault(served, "eth0 of the container is detached from prov0"):
        inside(served, "host-a", "sh", "-c", detach)
    inside(served, "host-a", "sh", "-c", again)
    healthy(served)
    with fault(served, "eth1 of the container has lost its address 10.78.0.2"):
        inside(served, "host-a", "ip", "addr", "del", "10.78.0.2/24", "dev", "eth1")
    inside(served, "host-a", "ip", "addr", "add", "10.78.0.2/24", "dev", "eth1")
    inside(served, "host-a", "ip", "route", "replace", "default", "via", "10.78.0.254")
    healthy(served)
    with fault(served, "prov0, which carries the container's eth0, is down"):
        host.run("ip", "link", "set", "prov0", "down")
    host.run("ip", "link", "set", "prov0", "up")
    healthy(served)


def is_detached(playground: Playground, on: str) -> bool:
    return set(modes(playground, on).values()) == {("source", "blackhole")}


def history(playground: Playground, on: str) -> list[tuple[str, str]]:
    lines = (playground.host(on).read("/var/lib/sms/journal/lab.history") or b"").splitlines()
    return [(line["verb"], line["event"]) for line in map(json.loads, lines)]


def test_the_guard_detaches_it_when_the_carrier_is_lost(served: Playground) -> None:
    with cables_out(served.lab, "host-a"):
        wait_until(lambda: is_detached(served, "host-a"), "the guard", 30)
    wait_until(lambda: not is_detached(served, "host-a"), "its return", 60)
    assert ("guard", "uplink lost") in history(served, "host-a")
    healthy(served)
    works(served, "host-a")


def test_a_host_that_cannot_attach_it_is_refused(served: Playground) -> None:
    host = served.host("host-b")

    def refused(words: str) -> None:
        result = served.sms("migrate", "host-b", "--force", on="admin", ok=(3,))
        assert words in result.stderr.decode(), result.stderr.decode()
        found = json.loads(served.sms("doctor", "--host", "host-b", "--json", on="admin", ok=(0, 4)).stdout)
        assert [one["state"] for one in found["checks"] if one["what"] == "interface prov0"] == ["missing"], found

    host.run("ip", "link", "set", "prov0", "down")
    refused("prov0 does not exist or is down")
    host.run("ip", "link", "add", "br-x", "type", "bridge")
    host.run("ip", "link", "set", "prov0", "master", "br-x", "up")
    refused("prov0 is a port of br-x")
    host.run("ip", "link", "delete", "br-x")
    assert served.instances() == ["sms-lab"]


def test_a_host_reaches_it_over_a_macvlan_interface_of_its_own(served: Playground) -> None:
    """As docs/hosts.md says; without one, the kernel delivers nothing between the card and what is on it."""
    host, ping = served.host("host-a"), ("ping", "-c", "1", "-W", "2", "10.77.0.1")
    assert not host.works(*ping)
    for words in (
        "link add link prov0 name sms-nmn type macvlan mode bridge",
        "link set sms-nmn up",
        "route add 10.77.0.1/32 dev sms-nmn src 10.77.0.11",
    ):
        host.run("ip", *words.split())
    try:
        wait_until(lambda: host.works(*ping), "an answer", 10)
    finally:
        host.run("ip", "link", "delete", "sms-nmn")
        host.run("arping", "-U", "-c", "2", "-I", "prov0", "10.77.0.11")  # nodes may know the host by either MAC
    works(served, "host-a")


def test_the_host_that_carries_it_is_prepared(served: Playground) -> None:
    """`sms host prepare` over the card that the SSH connection uses."""
    served.sms("-q", "host", "prepare", "host-a", on="admin", timeout=400)
    works(served, "host-a")


def test_apply_changes_what_it_can_and_not_the_attachment(served: Playground) -> None:
    def partition(document: dict[str, Any]) -> None:
        document["slurm"]["partitions"].append({"name": "more"})

    site = served.variant("more.yaml", partition)
    served.sms("--site", site, "apply")
    assert "PartitionName=more" in served.sms("exec", "--", "scontrol", "show", "partition", "more").text

    def card(document: dict[str, Any]) -> None:
        document["networks"][PROVISIONING]["port"]["host-a"] = CARDS[PUBLIC]

    result = served.sms("--site", served.variant("card.yaml", card), "apply", ok=(3,))
    assert "a second instance cannot have the MAC address" in result.stderr.decode()
    served.sms("apply")


def test_a_rehearsal_runs_on_bridges(served: Playground) -> None:
    served.sms("-q", "overlay", "snapshot")
    served.sms("rehearse", "--nodes", "1", timeout=400)
    works(served, "host-a")


def test_a_failover_and_the_return_of_the_old_host(served: Playground) -> None:
    """It steps down without having been on the network beside the new one."""
    served.sms("-q", "overlay", "snapshot")
    served.sms("-q", "overlay", "push", "--to", "host-b")
    with cables_out(served.lab, "host-a"):
        wait_until(lambda: is_detached(served, "host-a"), "the guard", 30)
        served.sms("-q", "failover", "host-b", "--i-have-fenced", on="host-b")
        works(served, "host-b")
    wait_until(lambda: not served.instances("host-a"), "the old host stepped down", 60)
    assert ("guard", "uplink back") not in history(served, "host-a")[-4:]
    works(served, "host-b")
    served.sms("-q", "stop", on="host-b")
