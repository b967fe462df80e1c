"""A failed host: it is fenced, another one takes over from its snapshot or overlay, and it steps down when it returns.

A lab host is disconnected by its cables in the switch and keeps running: the worst kind of failed host.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.operations.image.build import Built
from appliance.operations.lab import demo
from appliance.plan.upgrade.upgrade import RETURNING, Side, Upgrade
from appliance.shared.records import to_json
from tests.real.conftest import NODES, Playground, give_image
from tests.real.moves import ssh_cut
from tests.real.processes import begin, kill_sms, wait_for_step
from tests.redfish import PASSWORD, USER, UUID, Emulator, emulator
from tests.waiting import wait_until

pytestmark = pytest.mark.real

DEAD, HERE = "host-a", "host-b"
MARK = "/var/lib/this-was-there"


def small(document: dict[str, Any]) -> None:
    document["services"] = ["munge", "chrony"]
    document["overlay"] = {"size_mb": 64}


def cables(playground: Playground, state: str) -> None:
    """Pull the dead host's cables, or plug them in."""
    switch = f"sms-{playground.lab.name}-switch"
    for port in (f"p-{DEAD}", f"u-{DEAD}"):
        subprocess.run(["ip", "-n", switch, "link", "set", port, state], check=True)


@contextmanager
def cut(playground: Playground) -> Iterator[None]:
    """The host is gone for as long as the context lasts."""
    cables(playground, "down")
    try:
        yield
    finally:
        cables(playground, "up")


@contextmanager
def controller(playground: Playground, folder: str) -> Iterator[Emulator]:
    """The dead host's management controller, which the other host reaches."""
    outer = playground.lab.etc / folder
    shutil.rmtree(outer, ignore_errors=True)  # it keeps what was switched off
    outer.mkdir()
    host = playground.lab.host(HERE)
    with emulator(outer, prefix=host.prefix, seen=f"/etc/sms/{folder}") as bmc:
        wait_until(lambda: host.works("curl", "-sk", "--max-time", "2", f"{bmc.url}/redfish/v1"), "the controller")
        yield bmc


def power(playground: Playground, bmc: Emulator) -> str:
    """What the controller says."""
    words = ("curl", "-sk", "--user", f"{USER}:{PASSWORD}", f"{bmc.url}/redfish/v1/Systems/{UUID}")
    return str(json.loads(playground.host(HERE).run(*words).stdout)["PowerState"])


def history(playground: Playground, on: str) -> list[tuple[str, str]]:
    lines = (playground.host(on).read("/var/lib/sms/journal/lab.history") or b"").splitlines()
    return [(line["verb"], line["event"]) for line in map(json.loads, lines)]  # every line is whole


def begin_on_the_host_that_dies(playground: Playground, site: str) -> None:
    """It runs there, and has written something that only a snapshot knows."""
    playground.sms("--site", site, "-q", "start", on=DEAD)
    playground.sms("--site", site, "exec", "--", "touch", MARK, on=DEAD)


@pytest.fixture
def both(stopped: Playground, built: Built) -> Iterator[Playground]:
    """Nothing of earlier tests on either host, and the image on both."""
    give_image(stopped, built, HERE)
    hosts = [stopped.host(name) for name in (DEAD, HERE)]
    forget = "rm -rf /var/lib/sms/overlays /var/lib/sms/snapshots /srv/shared/overlays /var/lib/sms/journal/lab.*"
    for host in hosts:
        host.run("sh", "-c", forget)
    yield stopped
    cables(stopped, "up")
    for name in (DEAD, HERE):
        wait_until(lambda name=name: stopped.host("admin").works("ssh", name, "true"), f"ssh to {name}")  # type: ignore[misc]
        stopped.sms("-q", "stop", on=name)
    for host in hosts:  # a guard writes to the other host's folder, too
        host.run("sh", "-c", forget)


def test_the_newest_snapshot_is_started_elsewhere_and_the_old_host_steps_down(both: Playground) -> None:
    with controller(both, "bmc") as bmc:

        def fenced(document: dict[str, Any]) -> None:
            small(document)
            settings = {"url": bmc.url, "user": USER, "password_file": "bmc/password", "ca": "bmc/ca.pem"}
            document["admin_hosts"][0]["fence"] = {"redfish": settings}

        site = both.variant("fenced.yaml", fenced)
        begin_on_the_host_that_dies(both, site)
        reported = both.sms("--site", site, "failover", HERE, on=HERE, ok=(3,)).stderr.decode()
        assert f"the services container runs on {DEAD}" in reported and f"sms migrate {HERE}" in reported
        both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
        both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
        both.sms("--site", site, "exec", "--", "touch", f"{MARK}-too-late", on=DEAD)
        before = both.lease(HERE)
        assert before["holder"] == DEAD and before["file"] == HERE, "it knows who holds"
        with cut(both):
            reported = both.sms("--site", site, "start", on=HERE, ok=(3,)).stderr.decode()
            assert "cannot be reached" in reported and f"sms failover {HERE}" in reported
            (both.lab.etc / "bmc" / "password").write_text("wrong\n")
            reported = both.sms("--site", site, "failover", HERE, on=HERE, ok=(3,)).stderr.decode()
            assert "not known to be off" in reported and "--i-have-fenced" in reported
            assert both.lease(HERE) == before and power(both, bmc) == "On"
            assert both.instances(HERE) == []
            (both.lab.etc / "bmc" / "password").write_text(f"{PASSWORD}\n")
            steps = json.loads(both.sms("--site", site, "failover", HERE, "-n", "--json", on=HERE).stdout)["steps"]
            assert "Redfish" in steps[0] and "restore snapshot" in steps[1] and power(both, bmc) == "On"
            by_hand = json.loads(both.sms("failover", HERE, "-n", "--json", on=HERE, ok=(3,)).stdout)
            assert "restore snapshot" in by_hand["steps"][1] and "--i-have-fenced" in by_hand["hint"]
            done = json.loads(both.sms("--site", site, "-q", "failover", HERE, "--json", on=HERE).stdout)
            assert power(both, bmc) == "Off"
            assert (done["old"], done["taken_on"], done["shared"]) == ([DEAD], DEAD, False)
            assert done["lost_s"] >= 0 and done["generation"] >= before["generation"] + 1000
            both.sms("--site", site, "exec", "--", "test", "-e", MARK, on=HERE)
            both.sms("--site", site, "exec", "--", "test", "!", "-e", f"{MARK}-too-late", on=HERE)
            assert both.instances(DEAD) == ["sms-lab"], "its own controller lied: it still runs"
            both.sms("--site", site, "failover", HERE, on=HERE, ok=(3,))
        wait_until(lambda: not both.instances(DEAD), "the old host stepped down")
        wait_until(lambda: both.lease(DEAD)["holder"] == HERE, "it was written down")
        wait_until(lambda: history(both, DEAD)[-2:] == [("guard", "stale"), ("guard", "stopped")], "the guard stops it")
        said = both.sms("--site", site, "start", "--boot", on=DEAD).stderr.decode()
        assert f"{HERE} has taken over" in said and both.instances(DEAD) == []
        both.sms("--site", site, "start", on=DEAD, ok=(3,))
        assert both.instances(HERE) == ["sms-lab"]


def unguarded(playground: Playground, site: str) -> bool:
    """Whether `sms status` warns of it."""
    status = json.loads(playground.sms("--site", site, "status", "--json", on=DEAD, ok=(0, 4)).stdout)
    return any("no guard runs" in words for words in status["warnings"])


@pytest.mark.full
def test_a_host_that_returns_after_a_reboot_starts_nothing(both: Playground) -> None:
    """Its own lease still says that it holds."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
    assert not unguarded(both, site)
    both.host(DEAD).run("sh", "-c", 'kill "$(cat /run/sms/lab.guard.lock)"')
    wait_until(lambda: unguarded(both, site), "the guard's end")
    assert json.loads(both.sms("--site", site, "guard", "--once", "--json", on=DEAD).stdout) is None
    both.sms("--site", site, "-q", "start", on=DEAD)
    assert not unguarded(both, site), "a start of what runs already starts a guard"
    both.sms("--site", site, "-q", "stop", "--keep-lease", on=DEAD)
    with cut(both):
        both.sms("--site", site, "-q", "failover", HERE, "--i-have-fenced", on=HERE)
        # Its guard would write the lease to the host that returns, which is to find out without it.
        here, lock = both.host(HERE), "/run/sms/lab.guard.lock"
        wait_until(lambda: not here.works("flock", "-n", "-s", lock, "true"), "its guard")
        wait_until(lambda: here.works("sh", "-c", f'kill "$(cat {lock})"; flock -w 1 {lock} true'), "its end")
    assert both.lease(DEAD)["holder"] == DEAD
    said = both.sms("--site", site, "--quiet", "start", "--boot", on=DEAD).stderr.decode()
    assert f"{HERE} has taken over" in said and both.instances(DEAD) == []
    lease = both.lease(DEAD)
    assert lease["holder"] == HERE and lease["generation"] == both.lease(HERE)["generation"]
    assert history(both, DEAD)[-1] == ("start", "gave way")


def overlays(playground: Playground, on: str) -> list[str]:
    return playground.host(on).run("sh", "-c", "cd /var/lib/sms/overlays && ls -d lab.img*").text.split()


def guarded(playground: Playground, on: str) -> bool:
    host, lock = playground.host(on), "/run/sms/lab.guard.lock"
    return host.works("test", "-e", lock) and not host.works("flock", "-n", "-s", lock, "true")


@pytest.mark.full
def test_a_stale_overlay_is_not_started_whoever_wrote_the_lease(both: Playground) -> None:
    """The guard on the new host writes the lease of the old one before that has found out itself."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
    sign = "/run/sms/lab.alive"
    wait_until(lambda: both.host(HERE).read(sign) == DEAD.encode(), "a sign of life")
    time.sleep(6)
    both.sms("--site", site, "-q", "stop", "--keep-lease", on=DEAD)
    died = time.time()
    with cut(both):
        time.sleep(5)
        done = json.loads(both.sms("--site", site, "-q", "failover", HERE, "--i-have-fenced", "--json", on=HERE).stdout)
    served = time.time()
    assert abs(done["alive"] - died) < 9 and done["alive"] <= died
    assert done["lost_s"] == pytest.approx(done["alive"] - done["taken"], abs=0.2)
    assert 5 <= done["dead_s"] <= served - done["alive"]
    both.sms("--site", site, "exec", "--", "touch", f"{MARK}-since", on=HERE)
    wait_until(lambda: both.lease(DEAD)["holder"] == HERE, "the guard wrote the lease")
    assert "lab.img" in overlays(both, DEAD)
    said = both.sms("--site", site, "start", "--boot", on=DEAD).stderr.decode()
    kept = f"lab.img.past-{both.lease(HERE)['generation']}"
    assert f"renamed to /var/lib/sms/overlays/{kept}" in said and overlays(both, DEAD) == [kept]
    both.sms("--site", site, "-q", "stop", on=HERE)
    reported = both.sms("--site", site, "start", "--host", DEAD, on="admin", ok=(3,)).stderr.decode()
    assert f"the newest one is on {HERE}" in reported and f"sms start --host {HERE}" in reported
    # Even if somebody puts it back; without a mark it might be the overlay of both hosts, and keeps its name.
    both.host(DEAD).run("mv", f"/var/lib/sms/overlays/{kept}", "/var/lib/sms/overlays/lab.img")
    reported = both.sms("--site", site, "start", on=DEAD, ok=(3,)).stderr.decode()
    assert (
        "is out of date" in reported and f"sms start --host {HERE}" in reported and overlays(both, DEAD) == ["lab.img"]
    )
    both.host(DEAD).run("rm", "/var/lib/sms/overlays/lab.img")
    both.sms("--site", site, "-q", "start", on=HERE)
    both.sms("--site", site, "exec", "--", "test", "-e", f"{MARK}-since", on=HERE)


@pytest.mark.full
def test_a_rollback_of_an_upgrade_that_was_interrupted_before_the_failover_is_not_finished(both: Playground) -> None:
    """It would restore what the failed host had before the upgrade, and what the other wrote since is newer."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
    started = json.loads(both.host(DEAD).read("/var/lib/sms/journal/lab.json") or b"")
    image, now = Side(started["image"], started["key"], started["sha256"]), time.time()
    upgrade = Upgrade("lab", RETURNING, image, image, now, snapshot=1, kept=1, stopped_at=now, why="it failed")
    both.host(DEAD).write("/var/lib/sms/journal/lab.upgrade.json", to_json(upgrade), mode=0o600)
    both.sms("--site", site, "-q", "stop", "--keep-lease", on=DEAD)
    with cut(both):
        time.sleep(5)
        both.sms("--site", site, "-q", "failover", HERE, "--i-have-fenced", on=HERE)
    both.sms("--site", site, "exec", "--", "touch", f"{MARK}-since", on=HERE)
    wait_until(lambda: both.lease(DEAD)["holder"] == HERE, "the guard wrote the lease")
    both.sms("--site", site, "-q", "stop", on=HERE)
    both.sms("--site", site, "start", on=DEAD, ok=(3,))
    both.sms("--site", site, "-q", "start", on=HERE)
    both.sms("--site", site, "exec", "--", "test", "-e", f"{MARK}-since", on=HERE)


@pytest.mark.full
def test_a_start_without_an_overlay_is_refused_where_another_host_has_one(both: Playground) -> None:
    """It would begin with an empty one: job ids begin at 1 again."""
    site = both.variant("small.yaml", small)
    both.sms("--site", site, "-q", "start", on=HERE)
    assert guarded(both, HERE)
    both.sms("--site", site, "-q", "stop", on=HERE)
    assert not guarded(both, HERE), "a stop right after a start ends the guard, too"
    lease = both.lease(HERE)
    for words in (("start",), ("start", "-n"), ("overlay", "create")):
        reported = both.sms("--site", site, *words, on=DEAD, ok=(3,)).stderr.decode()
        assert (
            f"{DEAD} has no overlay: the newest one is on {HERE}" in reported and f"sms start --host {HERE}" in reported
        )
    assert both.lease(HERE) == lease
    with ssh_cut(both.lab, HERE, reset=True):
        reported = both.sms("--site", site, "start", on=DEAD, ok=(3,)).stderr.decode()
        assert "cannot be reached" in reported and f"sms failover {DEAD}" in reported
    both.sms("--site", site, "-q", "start", on=HERE)
    both.sms("--site", site, "-q", "migrate", "--force", DEAD, on=HERE)
    both.sms("--site", site, "-q", "stop", on=DEAD)
    both.sms("--site", site, "start", on=HERE, ok=(3,))
    both.sms("--site", site, "-q", "start", on=DEAD)


@pytest.mark.full
def test_a_host_whose_sshd_hangs_is_not_off(both: Playground) -> None:
    """Whatever the user states: it is refused before anything is changed."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    leases = [both.lease(name) for name in (DEAD, HERE)]
    signal = ("pkill", "--oldest", "--exact", "sshd", "--signal")
    both.host(DEAD).run(*signal, "STOP")
    try:
        reported = both.sms("--site", site, "failover", HERE, "--i-have-fenced", on=HERE, ok=(3,)).stderr.decode()
    finally:
        both.host(DEAD).run(*signal, "CONT")
    assert f"{DEAD} accepts connections" in reported
    assert [both.lease(name) for name in (DEAD, HERE)] == leases and both.instances(HERE) == []


STEPS = ("restore snapshot", "take the lease", "start the instance")


@pytest.mark.full
def test_a_failover_that_is_killed_is_finished_by_the_next(both: Playground) -> None:
    site = both.variant("small.yaml", small)
    # It has run there before: that overlay is not the one to start from, and is kept.
    both.sms("--site", site, "-q", "start", on=HERE)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=HERE)
    both.sms("--site", site, "-q", "overlay", "push", "--to", DEAD, on=HERE)
    both.sms("--site", site, "exec", "--", "touch", "/var/lib/only-here", on=HERE)
    both.sms("--site", site, "-q", "stop", on=HERE)
    both.sms("--site", site, "-q", "overlay", "restore", "latest", on=DEAD)
    begin_on_the_host_that_dies(both, site)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
    with cut(both):
        for step in STEPS:
            process = begin(both, "--site", site, "failover", HERE, "--i-have-fenced", on=HERE)
            wait_for_step(process, step)
            kill_sms(process.pid)
            process.communicate()
        done = json.loads(both.sms("--site", site, "-q", "failover", HERE, "--i-have-fenced", "--json", on=HERE).stdout)
        assert len(done["services"]) == 2 and both.lease(HERE)["holder"] == HERE
        both.sms("--site", site, "exec", "--", "test", "-e", MARK, on=HERE)
        both.sms("--site", site, "exec", "--", "test", "!", "-e", "/var/lib/only-here", on=HERE)
        reported = history(both, HERE)
        assert reported.count(("failover", "restored")) >= 1 and reported[-1] == ("failover", "done")
        kept = json.loads(both.sms("--site", site, "overlay", "list", "--json", on=HERE).stdout)["snapshots"]
        # One that was killed before it put the snapshot in place has kept the same overlay as well.
        assert sum(one["reason"].startswith("before restore") for one in kept) >= 1
    wait_until(lambda: not both.instances(DEAD), "the old host stepped down")


@pytest.mark.full
def test_a_start_after_a_failover_that_was_killed_does_not_hide_what_is_lost(both: Playground) -> None:
    """The failed host had released the lease, so nothing else prevents the start."""
    site = both.variant("small.yaml", small)
    both.sms("--site", site, "-q", "start", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
    both.sms("--site", site, "exec", "--", "touch", MARK, on=DEAD)
    both.sms("--site", site, "-q", "stop", on=DEAD)
    with cut(both):
        process = begin(both, "--site", site, "failover", HERE, "--i-have-fenced", on=HERE)
        wait_for_step(process, "restore snapshot")
        kill_sms(process.pid)
        process.communicate()
        refused = both.sms("--site", site, "-q", "start", on=HERE, ok=(3,)).stderr.decode()
        assert f"the newest one is on {DEAD}" in refused and f"sms failover {HERE}" in refused
        done = json.loads(both.sms("--site", site, "-q", "failover", HERE, "--i-have-fenced", "--json", on=HERE).stdout)
        assert done["lost_s"] >= 0 and len(done["services"]) == 2
        both.sms("--site", site, "exec", "--", "test", "!", "-e", MARK, on=HERE)


@pytest.mark.full
def test_a_start_reports_what_a_failover_lost_that_was_killed(both: Playground) -> None:
    """This host released the lease last, so its overlay counts as the newest one whatever was restored."""
    site = both.variant("small.yaml", small)
    both.sms("--site", site, "-q", "start", on=HERE)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=HERE)
    both.sms("--site", site, "exec", "--", "touch", MARK, on=HERE)
    both.sms("--site", site, "-q", "stop", on=HERE)
    words = ("--site", site, "failover", HERE, "--i-have-fenced", "--snapshot", "latest")
    with cut(both):
        process = begin(both, *words, on=HERE)
        wait_for_step(process, "take the lease")
        kill_sms(process.pid)
        process.communicate()
        assert ("failover", "restored") in history(both, HERE)
        done = json.loads(both.sms("--site", site, "-q", "start", "--json", on=HERE).stdout)
        both.sms("--site", site, "exec", "--", "test", "!", "-e", MARK, on=HERE)
        lost = done["failover"]
        assert lost["old"] == [DEAD] and lost["lost_s"] >= 0 and lost["dead_s"] is None
        assert lost["alive"] < lost["taken"]  # a sign of the failed host from before this test, or none
        assert history(both, HERE)[-2:] == [("failover", "done"), ("start", "started")]
        again = json.loads(both.sms("--site", site, "-q", "start", "--json", on=HERE).stdout)
        assert again["failover"] is None


ON_THE_NETWORK = """
import os, select, sys, time
def serves():
    try:
        ports = os.listdir("/sys/class/net/br-prov/brif")
        up = open("/sys/class/net/prov0/carrier").read().strip() == "1"
    except OSError:
        return False
    return up and any(port.startswith("veth") for port in ports)
before = None
while not select.select([sys.stdin], [], [], 0.005)[0]:
    now = serves()
    if now != before:
        print(time.monotonic(), int(now), flush=True)
        before = now
"""
"""Prints when a host's container begins to be connected to the provisioning network, and when it ceases to be. It ends
with its input: what nsenter has started survives nsenter."""


@contextmanager
def connected(playground: Playground) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Fill in, at the end, when each host's container was connected: from and until, in monotonic seconds."""
    argv = ("python3", "-c", ON_THE_NETWORK)
    runs = {
        name: subprocess.Popen([*playground.lab.host(name).prefix, *argv], stdin=-1, stdout=-1, text=True)
        for name in (DEAD, HERE)
    }
    spans: dict[str, list[tuple[float, float]]] = {}
    first = {name: run.stdout.readline() for name, run in runs.items() if run.stdout}
    try:
        yield spans
    finally:
        ended = time.monotonic()
        for name, run in runs.items():
            lines = [first[name], *run.communicate()[0].splitlines()]
            changes = [(float(at), state == "1") for at, state in map(str.split, lines)]
            ends = [at for at, _ in changes[1:]] + [ended]
            spans[name] = [(at, end) for (at, state), end in zip(changes, ends, strict=True) if state]


def both_s(spans: dict[str, list[tuple[float, float]]], *, since: float) -> float:
    """Seconds after ``since`` in which both hosts' containers were connected."""
    pairs = [(one, two) for one in spans[DEAD] for two in spans[HERE]]
    return sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0], since)) for one, two in pairs)


def off_the_bridge(playground: Playground) -> bool:
    return not playground.host(DEAD).run("sh", "-c", "ls /sys/class/net/br-prov/brif | grep veth || true").text


def fail_over_without_fencing(playground: Playground, site: str) -> None:
    playground.sms("--site", site, "-q", "failover", HERE, "--i-have-fenced", on=HERE)


@pytest.mark.full
def test_a_cable_that_is_plugged_in_again_after_a_false_statement(both: Playground) -> None:
    """Nobody has fenced the old host: its cables were out, and are plugged in after the other one has taken over."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
    with connected(both) as spans:
        with cut(both):
            wait_until(lambda: off_the_bridge(both), "the guard", 60)
            fail_over_without_fencing(both, site)
        healed = time.monotonic()
        wait_until(lambda: not both.instances(DEAD), "the old host stepped down")
        stopped_s = time.monotonic() - healed
    took = both_s(spans, since=healed)
    print(f"both on the network for {took:.2f} s; the old one stopped after {stopped_s:.1f} s")
    assert took <= 0.5 and spans[DEAD] and spans[HERE]
    assert ("guard", "uplink lost") in history(both, DEAD) and ("guard", "uplink back") not in history(both, DEAD)


def test_a_cable_that_was_out_and_nobody_took_over(both: Playground) -> None:
    """The container is back once the other host's lease has been read, also if the guard was killed meanwhile."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    with cut(both):
        wait_until(lambda: off_the_bridge(both), "the guard", 60)
        both.host(DEAD).run("sh", "-c", 'kill -KILL "$(cat /run/sms/lab.guard.lock)"')
    assert off_the_bridge(both), "nobody has read the lease"
    both.sms("--site", site, "-q", "start", on=DEAD)
    wait_until(lambda: not off_the_bridge(both), "its return", 60)
    assert both.sms("--site", site, "status", on=DEAD).status == 0
    with cut(both):
        wait_until(lambda: off_the_bridge(both), "the guard", 60)
    began = time.monotonic()
    wait_until(lambda: not off_the_bridge(both), "its return", 60)
    print(f"back after {time.monotonic() - began:.1f} s")
    wait_until(lambda: history(both, DEAD)[-1] == ("guard", "uplink back"), "its record", 10)


@pytest.mark.full
def test_a_carrier_that_was_lost_for_a_moment_while_the_other_host_is_off(both: Playground) -> None:
    """It would take 35 s to wait for that host."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    port = f"u-{HERE}"
    switch = ("ip", "-n", f"sms-{both.lab.name}-switch", "link", "set", port)
    subprocess.run([*switch, "down"], check=True)
    try:
        time.sleep(40)  # until queries of it fail: that of an open session waits for 15 s
        with cut(both):
            wait_until(lambda: off_the_bridge(both), "the guard", 60, 0.01)
        began = time.monotonic()
        wait_until(lambda: not off_the_bridge(both), "its return", 60, 0.01)
        took = time.monotonic() - began
        print(f"back after {took:.2f} s")
        assert took <= 2
    finally:
        subprocess.run([*switch, "up"], check=True)


@pytest.mark.full
def test_a_partition_beyond_the_switch_has_a_window(both: Playground) -> None:
    """Carriers stay, so nothing shows the old host that it was cut: the window is measured, not closed."""
    site = both.variant("small.yaml", small)
    begin_on_the_host_that_dies(both, site)
    both.sms("--site", site, "-q", "overlay", "snapshot", on=DEAD)
    both.sms("--site", site, "-q", "overlay", "push", "--to", HERE, on=DEAD)
    switch = f"sms-{both.lab.name}-switch"
    pairs = [(f"p-{DEAD}", "br-prov"), (f"u-{DEAD}", "br-pub")]
    with connected(both) as spans:
        try:
            for port, _ in pairs:
                subprocess.run(["ip", "-n", switch, "link", "set", port, "nomaster"], check=True)
            fail_over_without_fencing(both, site)
        finally:
            for port, bridge in pairs:
                subprocess.run(["ip", "-n", switch, "link", "set", port, "master", bridge], check=True)
        healed = time.monotonic()
        wait_until(lambda: not both.instances(DEAD), "the old host stepped down")
    took = both_s(spans, since=healed)
    print(f"both on the network for {took:.2f} s after a partition beyond the switch")
    assert took <= 40, "docs/failover.md"


@pytest.mark.full
def test_a_shared_overlay_is_started_as_it_is(both: Playground) -> None:
    def shared(document: dict[str, Any]) -> None:
        small(document)
        document["overlay"]["directory"] = "/srv/shared/overlays"

    site = both.variant("shared.yaml", shared)
    begin_on_the_host_that_dies(both, site)
    host = both.host(DEAD)
    pid = json.loads(host.run("apptainer", "instance", "list", "--json", "sms-lab").stdout)["instances"][0]["pid"]
    with cut(both):
        host.run("kill", "-KILL", str(pid))  # as a power switch does
        wait_until(lambda: "/srv/shared" not in host.run("losetup", "-l", "-n", "-O", "BACK-FILE").text, "its end")
        done = json.loads(both.sms("--site", site, "-q", "failover", HERE, "--i-have-fenced", "--json", on=HERE).stdout)
        assert done["shared"] and done["lost_s"] is None and done["snapshot"] is None
        both.sms("--site", site, "exec", "--", "test", "-e", MARK, on=HERE)
    said = both.sms("--site", site, "start", "--boot", on=DEAD).stderr.decode()
    assert "has taken over" in said and both.instances(DEAD) == []
    both.sms("--site", site, "-q", "stop", on=HERE)


@pytest.mark.full
def test_a_job_that_a_node_could_not_launch_meanwhile_starts_again(both: Playground) -> None:
    """T6. Slurm holds it for good; what the failover has caused is released, and not what was held before."""
    node, stepd = both.host("node1"), "/usr/sbin/slurmstepd"
    both.sms("-q", "start", on=DEAD)
    demo.wait_idle(node, NODES)
    words = ("--parsable", "-w", "node1", "-o", "/dev/null", "--wrap", "true")
    node.run("mount", "--bind", "/dev/null", stepd)
    try:
        before = demo.as_alice(node, "sbatch", *words)
        wait_until(lambda: both.status(DEAD)["held"] == [before], "Slurm holds it")
        since = time.time()
        job = demo.as_alice(node, "sbatch", "--begin=now+60", *words)
        saved = ("exec", "--", "stat", "-c", "%.Y", "/var/spool/slurmctld/job_state")
        wait_until(lambda: float(both.sms(*saved, on=DEAD).text) > since, "its state is saved")
        both.sms("-q", "overlay", "snapshot", on=DEAD)
        both.sms("-q", "overlay", "push", "--to", HERE, on=DEAD)
        time.sleep(max(0, since + 45 - time.time()))  # so that it is due soon after the start
        with cut(both):
            both.sms("-q", "failover", HERE, "--i-have-fenced", on=HERE)
            log = ("exec", "--", "cat", "/var/log/sms/slurmctld.log")
            wait_until(lambda: f"job {job} is released" in both.sms(*log, on=HERE).text, "it is released")
            node.run("umount", stepd)
            # Slurm starts a job that was requeued two minutes later (batch_requeue_fini of src/slurmctld/job_mgr.c).
            wait_until(lambda: demo.ended_as(node, job) == "COMPLETED", "it runs", 300)
            assert both.status(HERE)["held"] == [before]
    finally:
        node.run("umount", stepd, ok=None)
    both.sms("exec", "--", "scancel", "--user=alice", on=HERE)
