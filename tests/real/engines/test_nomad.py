"""Nomad itself: what it says of jobs and does with them, as docs/engines.md states it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.lab.engines.hosts import EngineHost
from appliance.lab.engines.nomad import NomadCluster
from tests.waiting import wait_until

pytestmark = pytest.mark.real


def job(name: str, kind: str, groups: str) -> str:
    """A job with groups."""
    return f'job "{name}" {{\n  type = "{kind}"\n{groups}\n}}\n'


def group(name: str, tasks: str) -> str:
    """A group with tasks, which is not moved to another client."""
    return f'group "{name}" {{\n  {tasks}\n}}\n'


def task(name: str, script: str, more: str = "") -> str:
    """A task that runs a shell script."""
    return f"""
  task "{name}" {{
    driver = "raw_exec"
    {more}
    config {{
      command = "/bin/sh"
      args    = ["-c", {json.dumps(script)}]
    }}
    resources {{
      cpu    = 20
      memory = 32
    }}
  }}
"""


def on_client(name: str) -> str:
    """A constraint."""
    return f'constraint {{\n  attribute = "${{attr.unique.hostname}}"\n  value = "{name}"\n}}\n'


@pytest.mark.full
def test_a_job_is_run_not_applied(nomad: NomadCluster) -> None:
    """X1: "nomad job apply" is not a command."""
    assert nomad.nomad("job", "apply", "job.nomad.hcl", ok=None).status != 0
    commands = nomad.nomad("job", "-help", ok=None)
    listed = {
        line.split()[0] for line in (commands.stdout + commands.stderr).decode().splitlines() if line[:4] == "    "
    }
    assert {"plan", "run", "validate", "stop"} <= listed
    assert "apply" not in listed


def test_the_servers_validate_a_job(nomad: NomadCluster, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.hcl", tmp_path / "bad.hcl"
    good.write_text(job("good", "service", group("g", task("t", "sleep 60"))))
    bad.write_text(job("bad", "servce", group("g", task("t", "sleep 60"))))
    assert nomad.validate(good).status == 0
    assert nomad.validate(bad).status != 0


@pytest.mark.full
def test_distinct_hosts_does_nothing_in_a_system_job(nomad: NomadCluster) -> None:
    """X2: two groups that must not share a host, on one host: the service job waits, the system job runs both."""
    distinct = "constraint {\n  distinct_hosts = true\n}\n" + on_client("c1")
    groups = distinct + group("one", task("t", "sleep 600")) + group("two", task("t", "sleep 600"))
    nomad.submit(job("distinct-service", "service", groups))
    nomad.submit(job("distinct-system", "system", groups))
    wait_until(lambda: len(nomad.running("distinct-system")) == 2, "both run", 60)
    wait_until(lambda: len(nomad.running("distinct-service")) == 1, "one runs", 60)
    blocked = nomad.get("job/distinct-service/summary")["Summary"]
    assert sum(each["Queued"] for each in blocked.values()) == 1
    for kind in ("service", "system"):
        nomad.purge(f"distinct-{kind}")


@pytest.mark.full
def test_a_prestart_task_is_not_run_again_after_a_reboot(nomad: NomadCluster) -> None:
    """X3: after a power failure of the client the main task runs without the prestart task before it."""
    client = nomad.clients[1]
    assert isinstance(client, EngineHost)
    began = client.disk / "began"
    record = f"echo $NOMAD_TASK_NAME >>{began}"
    hook = 'lifecycle {\n  hook = "prestart"\n}\n'
    tasks = on_client(client.name) + task("munge", record, hook) + task("slurmd", f"{record}; exec sleep 600")
    nomad.submit(job("order", "service", group("node", tasks)))
    wait_until(lambda: began.exists() and began.read_text().split() == ["munge", "slurmd"], "both ran", 60)
    (before,) = wait_until(lambda: nomad.running("order"), "the allocation runs", 30)

    client.off()
    client.on()
    nomad.start_agent(client)
    wait_until(lambda: len(began.read_text().split()) > 2, "a task runs after the boot", 60)
    assert began.read_text().split() == ["munge", "slurmd", "slurmd"]
    wait_until(lambda: [each["ID"] for each in nomad.running("order")] == [before["ID"]], "the same allocation", 60)
    nomad.purge("order")


@pytest.mark.full
def test_a_task_of_another_user_needs_a_data_folder_that_it_may_enter(nomad: NomadCluster) -> None:
    """Nomad makes its data folder with mode 0700: such a task fails there, and runs where others may enter it."""
    client = nomad.clients[0]
    tasks = on_client(client.name) + task("t", "exec sleep 600", 'user = "nobody"')
    stop = 'restart {\n  attempts = 0\n  mode = "fail"\n}\nreschedule {\n  attempts = 0\n  unlimited = false\n}\n'
    for mode, state in (("0700", "failed"), ("0711", "running")):
        client.run("chmod", mode, f"{client.disk}/nomad")
        nomad.submit(job(f"user-{mode}", "service", group("g", stop + tasks)))
        wait_until(lambda: [each["ClientStatus"] for each in nomad.allocations(f"user-{mode}")] == [state], state, 60)  # noqa: B023
        nomad.purge(f"user-{mode}")


@pytest.mark.full
def test_another_server_leads_when_the_leader_fails(nomad: NomadCluster) -> None:
    leader = nomad.leader().partition(":")[0]
    first = nomad.servers[0]
    failed = next(server for server in nomad.servers if server.address == leader)
    assert isinstance(failed, EngineHost)
    nomad.submit(job("kept", "service", group("g", task("t", "sleep 600"))))
    wait_until(lambda: nomad.running("kept"), "it runs", 60)
    failed.off()
    if failed is first:
        nomad.servers.append(nomad.servers.pop(0))  # commands go to another one
    wait_until(lambda: nomad.leader().partition(":")[0] not in ("", leader), "another leads", 60)
    assert len(nomad.running("kept")) == 1
    failed.on()
    nomad.start_agent(failed)
    wait_until(
        lambda: sum(each["Voter"] for each in nomad.get("operator/raft/configuration")["Servers"]) == 3, "three", 60
    )
    nomad.purge("kept")
