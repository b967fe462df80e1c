"""`slurm.files`: a generic resource reaches the nodes by `sms apply`, a prolog runs, both go again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full]

PROLOG = '#!/bin/sh\necho "$SLURM_JOB_ID" >>/run/prolog-ran\n'


def change(document: dict[str, Any]) -> None:
    slurm = document["slurm"]
    slurm["files"] = {"gres.conf": "gres.conf", "prolog.sh": "prolog.sh"}
    slurm["extra"] = [*slurm.get("extra", []), "GresTypes=widget", "Prolog=/etc/slurm/prolog.sh"]
    for node in slurm["nodes"]:
        node["extra"] = "Gres=widget:2"


def restart_slurmd(running: Playground) -> None:
    """slurmd counts its generic resources when it starts; slurmctld has drained nodes with too few."""
    for number in range(1, NODES + 1):
        running.host(f"node{number}").run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "slurmd")
    demo.wait_for(
        "registration of every node",
        lambda: "" if "inval" in (state := running.host("node1").run("sinfo", "-h", "-N", "-o", "%T").text) else state,
    )
    running.sms("exec", "--", "scontrol", "update", f"NodeName=node[1-{NODES}]", "State=RESUME", ok=None)


def test_they_reach_the_nodes_and_go_again(running: Playground) -> None:
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    etc = running.lab.etc
    (etc / "gres.conf").write_text("Name=widget Count=2\n")
    (etc / "prolog.sh").write_text(PROLOG)
    site = running.variant("files.yaml", change)
    running.sms("--site", site, "config", "check")
    assert b"Prolog=" in running.sms("--site", site, "-q", "apply", ok=(3,)).stderr, "no node reports that it has it"
    # The nodes take no job until their slurmd has been restarted.
    done = json.loads(running.sms("--site", site, "-q", "apply", "--force", "--json", ok=(0, 4)).stdout)
    assert {"/etc/slurm/gres.conf", "/etc/slurm/prolog.sh"} < set(done["changed"])
    assert [(one["service"], one["kind"]) for one in done["steps"]] == [("slurmctld", "restart")]
    restart_slurmd(running)
    demo.wait_idle(node, NODES)
    wait_until(lambda: "Gres=widget:2" in node.run("scontrol", "show", "node", "node1").text, "the resource")
    # `sms files push` does this where the site has a provisioning VM.
    node.write("/etc/slurm/prolog.sh", PROLOG.encode(), mode=0o755)
    job = demo.as_alice(
        node, "sbatch", "--parsable", "-o", "/dev/null", "--gres=widget:2", "-w", "node1", "--wrap", "true"
    )
    assert demo.wait_for("the end of the job", lambda: demo.ended_as(node, job)) == "COMPLETED"
    assert node.run("cat", "/run/prolog-ran").text.split() == [job]
    mode = running.sms("exec", "--", "stat", "-c", "%a", "/etc/slurm/gres.conf", "/etc/slurm/prolog.sh").text
    assert mode.split() == ["644", "755"]
    (etc / "prolog.sh").write_text(PROLOG + "# changed\n")
    done = json.loads(running.sms("--site", site, "-q", "apply", "--json").stdout)
    assert [(one["service"], one["kind"]) for one in done["steps"]] == [("slurmctld", "reload")]
    assert running.sms("exec", "--", "tail", "-n1", "/etc/slurm/prolog.sh").text == "# changed"
    done = json.loads(running.sms("-q", "apply", "--force", "--json", ok=(0, 4)).stdout)
    assert {"/etc/slurm/gres.conf", "/etc/slurm/prolog.sh"} < set(done["changed"])
    left = running.sms("exec", "--", "ls", "/etc/slurm").text.split()
    assert "slurm.conf" in left and not {"gres.conf", "prolog.sh"} & set(left)
    assert json.loads(running.sms("-q", "apply", "-n", "--json").stdout)["current"] is True
    restart_slurmd(running)
    demo.wait_idle(node, NODES)
    wait_until(lambda: running.status()["healthy"], "health")
