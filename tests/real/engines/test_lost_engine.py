"""While Nomad has the services: another Munge key; and all of Nomad is lost, the services continue in the container."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from appliance.host.base import Host
from appliance.lab import Lab
from appliance.lab.power import power_off, power_on
from appliance.operations.lab.demo import as_alice, wait_idle
from appliance.tools.ports import probe_argv
from tests.real.conftest import give_image
from tests.real.engines.conftest import need_engines
from tests.real.engines.moving import NODES, Jobs, assert_gateway, move, moving_lab, writers
from tests.real.labs import build_image
from tests.real.moves import Hosts
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full]

NAME = "t-lost"
SERVERS = ("server1", "server2", "server3")
ON_NOMAD, ON_CONTAINER = "10.77.0.11", "10.77.0.1"
PORT = 6817
LEASE = "var/spool/slurmctld/.sms-lease"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A lab with Nomad, whose services container runs."""
    need_engines("nomad")
    with moving_lab(NAME, ("nomad",)) as found:
        yield found


def reopen() -> Hosts:
    """The lab as it is now: a host that was off has another first process."""
    return Hosts(Lab.open(NAME))


def lease_path(hosts: Hosts) -> str:
    site = yaml.safe_load((hosts.lab.etc / "sms.yaml").read_text())
    return f"{site['engines']['nomad'].get('state', '/var/lib/sms/nomad/lab')}/{LEASE}"


def listens(node: Host, address: str) -> bool:
    return node.works(*probe_argv(address, PORT))


def starts(host: Host) -> list[dict[str, Any]]:
    """The states of slurmctld's task in each allocation."""
    listed = host.run("nomad", "job", "allocs", "-json", "slurm-ctl", ok=None)
    found = json.loads(listed.stdout) if not listed.status else []
    return [each["TaskStates"]["slurmctld"] for each in found if "slurmctld" in (each["TaskStates"] or {})]


def refused_starts(host: Host) -> int:
    """How often a task of slurmctld has ended because its state was moved."""
    events = [event for state in starts(host) for event in state["Events"] or []]
    return sum("Exit Code: 3" in event["DisplayMessage"] for event in events)


def test_another_munge_key_while_an_engine_has_the_services(hosts: Hosts) -> None:
    """`sms apply` refers to `sms deploy`, which replaces the tasks. Jobs run on; a later move has the key, too."""
    move(hosts, "--to", "nomad", "--force")
    jobs = Jobs(hosts, 60)
    key = os.urandom(128)
    (hosts.lab.etc / "keys" / "munge.key").write_bytes(key)
    refused = hosts.sms("apply", on="host-a", ok=(3,))
    assert b"sms deploy" in refused.stderr
    assert b"another munge_key" in hosts.sms("deploy", "status", on="host-a").stdout
    done = json.loads(hosts.sms("-q", "deploy", "--json", on="host-a").stdout)
    assert "variable nomad/jobs/slurm-ctl" in done["created"]
    for name in hosts.lab.nodes:
        node = hosts.host(name)
        node.write("/etc/munge/munge.key", key, mode=0o400)
        node.run("chown", "munge:munge", "/etc/munge/munge.key")
        node.run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "munged", "slurmd")
    jobs.assert_whole()
    again = json.loads(hosts.sms("-q", "deploy", "--json", on="host-a").stdout)
    assert again["created"] == [] and set(again["changes"].values()) == {"unchanged"}


def test_the_state_of_a_nomad_that_is_off_moves_to_the_container(hosts: Hosts) -> None:
    """Nothing is lost; when Nomad is back, its slurmctld does not start."""
    assert move(hosts, "--to", "nomad", "--force")["target"] == "nomad"
    jobs = Jobs(hosts, 120)
    hosts.host("node1").run("sleep", "15")  # slurmctld writes its state some seconds later
    for name in (*SERVERS, "host-a"):
        power_off(NAME, name)
    power_on(NAME, "host-a")
    found = reopen()
    host, node, path = found.host("host-a"), found.host("node1"), lease_path(found)
    held = json.loads(host.read(path) or b"")
    assert held["holder"]
    host.write(
        path, json.dumps({**held, "boot": "another"}).encode(), mode=0o600
    )  # hosts of the lab share the machine's

    shown = found.sms("status", on="host-a", ok=(4,))
    assert b"nomad" in shown.stdout and not listens(node, ON_CONTAINER)
    found.sms("-q", "start", on="host-a")  # what stays, as at boot
    assert_gateway(found)
    refused = found.sms("migrate", "--to", "container", on="host-a", ok=(3,))
    assert b"--force" in refused.stderr
    move(found, "--to", "container", "--dry-run", "--force")
    back = move(found, "--to", "container", "--force")
    print(back)
    assert writers(found) == ["host-a"]
    jobs.assert_whole()

    for name in SERVERS:
        power_on(NAME, name)
    wait_until(lambda: refused_starts(host), "slurmctld's task ends with status 3", 120)
    assert listens(node, ON_CONTAINER) and not listens(node, ON_NOMAD)
    assert json.loads(host.read(path) or b"")["moved"] == "container"
    assert b"sms deploy stop" in found.sms("deploy", "status", on="host-a", ok=(4,)).stdout
    found.sms("deploy", "stop", on="host-a")
    found.sms("deploy", "status", on="host-a")
    assert writers(found) == ["host-a"]
    wait_idle(node, NODES)
    dry = found.sms("deploy", "--engine", "nomad", "--dry-run", on="host-a", ok=(3,))
    assert b"sms migrate --to nomad" in dry.stdout + dry.stderr


def test_without_the_state_a_snapshot_is_restored(hosts: Hosts) -> None:
    """host-a is lost with the state; what was done since the snapshot is. Nomad never starts it again."""
    found = reopen()
    give_image(found, build_image(found.lab), "host-b")
    node = found.host("node1")
    as_alice(node, "sbatch", "--parsable", "--wait", "--wrap=true")  # ids continue after those of the first job
    saved = ("exec", "--", "test", "-s", "/var/spool/slurmctld/job_state")
    wait_until(lambda: found.sms(*saved, on="host-a", ok=None).status == 0, "slurmctld has saved it", 60)
    found.sms("overlay", "snapshot", on="host-a")
    found.sms("overlay", "push", "--to", "host-b", on="host-a")
    move(found, "--to", "nomad", "--force")
    lost = as_alice(node, "sbatch", "--parsable", "--wrap=true")
    for name in (*SERVERS, "host-a"):
        power_off(NAME, name)
    found = reopen()
    refused = found.sms("failover", "host-b", on="host-b", ok=(3,))
    assert b"--i-have-fenced" in refused.stderr
    done = found.sms("failover", "host-b", "--i-have-fenced", "--snapshot", "latest", on="host-b")
    print(done.stderr.decode(), done.stdout.decode())
    assert b"switch on its servers alone first" in done.stderr and b"lost: " in done.stdout
    wait_idle(node, NODES)
    new = as_alice(node, "sbatch", "--parsable", "--wrap=true")
    assert int(new) > int(lost), "no job id is used twice"

    for name in SERVERS:
        power_on(NAME, name)
    wait_until(lambda: found.host("host-b").run("nomad", "job", "status", ok=None).status == 0, "a leader", 60)
    waits = found.sms("deploy", "stop", on="host-b", ok=(4,)).stderr
    assert b"on host-a did not end" in waits
    power_on(NAME, "host-a")
    found = reopen()
    ready = ("nomad", "node", "status", "-filter", 'Name == "host-a" and Status == "ready"', "-quiet")
    wait_until(lambda: found.host("host-b").run(*ready, ok=None).text, "Nomad's client is back", 60)
    held = (found.host("host-a").read(lease_path(found)) or b"").decode()
    for _ in range(20):
        assert not listens(node, ON_NOMAD)
        node.run("sleep", "0.5")
    assert (found.host("host-a").read(lease_path(found)) or b"").decode() == held, "no task has taken it"
    assert listens(node, ON_CONTAINER) and found.instances("host-b") and not found.instances("host-a")
    found.sms("deploy", "stop", on="host-b")
