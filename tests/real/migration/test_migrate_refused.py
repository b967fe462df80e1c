"""`sms migrate` where it is refused or only rehearsed: nothing is changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from tests.real.migration.conftest import where
from tests.real.moves import CARRIERS, Hosts, ssh_cut

pytestmark = pytest.mark.real


def picture(hosts: Hosts) -> dict[str, Any]:
    """All that a refused move might have changed."""
    found: dict[str, Any] = {}
    for host in CARRIERS:
        files = hosts.files(host)
        # It runs on, and writes.
        found[host] = {name: state for name, state in files.items() if name != "overlays/lab.img"}
        found[f"{host} lease"] = hosts.lease(host)
        found[f"{host} instances"] = hosts.instances(host)
        found[f"{host} loops"] = hosts.loops(host)
        found[f"{host} links"] = sorted(
            line.split()[0] for line in hosts.host(host).run("ip", "-br", "link").text.splitlines()
        )
        found[f"{host} networks"] = sorted(
            hosts.host(host).run("sh", "-c", "ls /etc/apptainer/network", ok=None).text.split()
        )
    return found


Break = Callable[[Hosts, str, str], AbstractContextManager[tuple[str, tuple[str, ...]]]]
"""Of hosts, source and target: breaks something for a while; gives what is said of it, and words for `sms`."""


def on_host(do: str, undo: str, words: str) -> Break:
    """Something done on the target, in a shell."""

    @contextmanager
    def broken(hosts: Hosts, source: str, target: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        host = hosts.host(target)
        host.run("sh", "-c", f"set -e; {do}")
        try:
            yield words.format(source=source, target=target), ()
        finally:
            host.run("sh", "-c", undo, ok=None)

    return broken


@contextmanager
def unreachable(hosts: Hosts, source: str, target: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    with ssh_cut(hosts.lab, target, reset=True):
        yield target, ()


@contextmanager
def unknown_key(hosts: Hosts, source: str, target: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    known = (hosts.lab.etc / "known_hosts").read_text().splitlines()
    (hosts.lab.etc / "some_hosts").write_text("".join(f"{line}\n" for line in known if target not in line))
    yield "key", ("--site", hosts.variant("some.yaml", lambda it: it.update(known_hosts="some_hosts")))


@contextmanager
def over_budget(hosts: Hosts, source: str, target: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    path = hosts.disk(source) / "journal" / "lab.history"
    before = path.read_bytes()
    parts = {"stop": 1, "last changes": 1, "start": 9000, "switch": 1}
    slow = [
        {"at": time.time() + n, "event": "moved", "host": source, "to": source, "shared": False, "parts": parts}
        for n in range(9)
    ]
    path.write_bytes(before + "".join(json.dumps(line) + "\n" for line in slow).encode())
    try:
        yield "predicted outages exceed their budgets", ()
    finally:
        path.write_bytes(before)


@contextmanager
def full_overlay(hosts: Hosts, source: str, target: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """T4: MariaDB started on neither host, and slurmctld, which had answered, was down."""
    filled = "/var/lib/filled"
    hosts.sms("exec", "--", "sh", "-c", f"dd if=/dev/zero of={filled} bs=1M || :", on=source)
    try:
        yield "the overlay has 0 MiB free", ()
    finally:
        # Its blocks are free once the journal has it.
        hosts.sms("exec", "--", "sh", "-c", f"rm {filled} && sync", on=source)


NAMESPACE = """\
ip link set prov0 nomaster
ip netns add stranger
ip link add st0 type veth peer name st1 netns stranger
ip link set st0 master br-prov up
ip -n stranger addr add 10.77.0.1/24 dev st1
ip -n stranger link set st1 up
"""
BREAKS: dict[str, Break] = {
    "unreachable": unreachable,
    "unknown host key": unknown_key,
    "no bridge": on_host(
        "ip link set br-prov down; ip link set br-prov name br-away",
        "ip link set br-away name br-prov; ip link set br-prov up",
        "bridge br-prov does not exist or is down",
    ),
    "no port": on_host(
        "ip link set prov0 nomaster", "ip link set prov0 master br-prov", "bridge br-prov has no port that is up"
    ),
    "wrong network": on_host(
        "ip link set prov0 nomaster; ip link add dum0 type veth peer name dum1; ip link set dum1 up; "
        "ip link set dum0 master br-prov up",
        "ip link del dum0; ip link set prov0 master br-prov",
        "{target} does not see 10.77.0.1 on br-prov",
    ),
    "stranger": on_host(
        NAMESPACE, "ip netns del stranger; ip link set prov0 master br-prov", "10.77.0.1 is used by another machine"
    ),
    "clock": on_host(
        'printf \'#!/bin/sh\\nexec /bin/date -d "+10 minutes" "$@"\\n\' >/usr/local/bin/date; '
        "chmod 755 /usr/local/bin/date",
        "rm /usr/local/bin/date",
        "the clock of {target} is 600 s ahead of that of {source}",
    ),
    "no room": on_host(
        "mkdir /run/few; mount -t tmpfs -o size=4m tmpfs /run/few; cp /var/lib/sms/overlays/lab.lease* /run/few; "
        "mount --bind /run/few /var/lib/sms/overlays",
        "umount /var/lib/sms/overlays /run/few; rmdir /run/few",
        "MiB free, ",
    ),
    "no conntrack": on_host(
        "mv /usr/sbin/conntrack /usr/sbin/conntrack.away",
        "mv /usr/sbin/conntrack.away /usr/sbin/conntrack",
        "{target} lacks conntrack",
    ),
    "over its budget": over_budget,
    "full overlay": full_overlay,
}


COVERED = ("no bridge", "no conntrack")
"""What test_refusals.py breaks in every run, on the host of a start: the same checks refuse it."""


SELDOM = (*COVERED, "full overlay")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SELDOM else []) for name in BREAKS]
)
def test_what_cannot_be_is_refused_and_nothing_changed(hosts: Hosts, name: str) -> None:
    source, target = where(hosts)
    with BREAKS[name](hosts, source, target) as (said, words):
        before = picture(hosts)
        reported = hosts.sms("-q", *words, "migrate", target, on="admin", ok=None)
        text = reported.stderr.decode()
        assert reported.status == 3, text
        assert said in text and "hint:" in text, text
        assert picture(hosts) == before
    assert hosts.status(source)["healthy"]


def test_force_ignores_a_budget(hosts: Hosts) -> None:
    source, target = where(hosts)
    with over_budget(hosts, source, target):
        refused = hosts.sms("-q", "migrate", "-n", "--json", target, on="admin", ok=(3,))
        assert refused.stdout, refused.stderr.decode()
        assert "slurmctld" in json.loads(refused.stdout)["over"]
        assert hosts.sms("-q", "migrate", "-n", "--force", target, on="admin").status == 0


def test_a_rehearsal_changes_nothing(hosts: Hosts) -> None:
    source, target = where(hosts)
    before = picture(hosts)
    reported = hosts.sms("migrate", "--dry-run", "--force", target, on="admin")
    assert f"{source} to {target}" in reported.text and "tolerated" in reported.text
    plan = json.loads(hosts.sms("-q", "migrate", "-n", "--force", "--json", target, on="admin").stdout)
    over = [one["name"] for one in plan["away"] if one["predicted_s"] > one["budget_s"]]
    assert (plan["source"], plan["target"], plan["over"]) == (source, target, over)
    assert {one["name"] for one in plan["away"]} == {one["name"] for one in hosts.status(source)["services"]}
    assert picture(hosts) == before


def test_the_host_that_runs_it_and_an_unknown_host_are_refused(hosts: Hosts) -> None:
    source, _ = where(hosts)
    before = picture(hosts)
    assert f"runs on {source} already" in hosts.sms("migrate", source, on="admin", ok=(3,)).stderr.decode()
    assert "no admin host named host-z" in hosts.sms("migrate", "host-z", on="admin", ok=(2,)).stderr.decode()
    assert picture(hosts) == before


@pytest.mark.parametrize(
    ("gap_s", "verb"),
    [
        (0.3, "migrate"),
        pytest.param(1.5, "stop", marks=pytest.mark.full),
        pytest.param(1.0, "migrate", marks=pytest.mark.full),
        pytest.param(2.5, "migrate", marks=pytest.mark.full),
        pytest.param(0.5, "stop", marks=pytest.mark.full),
        pytest.param(3.0, "stop", marks=pytest.mark.full),
    ],
)
def test_two_runs_at_once(hosts: Hosts, gap_s: float, verb: str) -> None:
    """One of them is refused, or finds the other's work done.

    Adds to the model: real locks and agents, and how long each step takes.
    """
    source, target = where(hosts)
    with ThreadPoolExecutor(1) as pool:
        # Outages that a busy machine has made longer are no reason to refuse: they are another test's subject.
        first = pool.submit(hosts.sms, "-q", "migrate", target, "--force", on="admin", ok=None)
        time.sleep(gap_s)
        words = ("migrate", target, "--force") if verb == "migrate" else ("stop", "--host", source)
        second = hosts.sms("-q", *words, on="admin", ok=None)
    migrated, texts = first.result(), (first.result().stderr.decode(), second.stderr.decode())
    assert not any("Traceback" in text for text in texts), texts
    statuses = (migrated.status, second.status)
    # Both succeed if the second finds nothing left to stop on the source, or a migration that only has to be recorded.
    assert statuses in ((0, 0), (0, 3), (3, 0)), texts
    time.sleep(3)  # a guard that found a wrong lease would have stopped the services container by now
    # On a busy machine the second one may be the first at the lock.
    holder = target if migrated.status == 0 or (verb == "migrate" and second.status == 0) else None
    if holder is None:
        assert not any(hosts.instances(one) for one in CARRIERS)
        hosts.sms("-q", "start", "--host", source, on="admin")
        holder = source
    assert where(hosts)[0] == holder and hosts.status(holder)["healthy"]
    assert {hosts.lease(one)["holder"] for one in CARRIERS} == {holder}
    assert not [name for one in CARRIERS for name in hosts.files(one) if ".img.past-" in name]


@pytest.mark.full
def test_what_is_not_running_on_any_host(hosts: Hosts) -> None:
    source, target = where(hosts)
    hosts.sms("-q", "stop", on=source)
    before = picture(hosts)
    reported = hosts.sms("migrate", target, on="admin", ok=(3,)).stderr.decode()
    assert "not running on any host" in reported and "sms start" in reported
    assert picture(hosts) == before
    hosts.sms("-q", "start", "--host", source, on="admin")
