"""Nomad runs programs of the signed SIF, and nothing of one whose signature is not the site's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.lab.engines.nomad import NomadCluster
from appliance.operations.context import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.real


def batch(name: str, image: Path, key: Path) -> str:
    """A job that verifies the image, and runs its slurmctld."""
    script = f"apptainer verify --key {key} {image} && exec apptainer exec {image} slurmctld -V"
    return f"""
job "{name}" {{
  type = "batch"
  group "g" {{
    restart {{
      attempts = 0
      mode     = "fail"
    }}
    reschedule {{
      attempts  = 0
      unlimited = false
    }}
    task "slurmctld" {{
      driver = "raw_exec"
      config {{
        command = "/bin/sh"
        args    = ["-c", {json.dumps(script)}]
      }}
      env {{
        HOME = "/root"
      }}
    }}
  }}
}}
"""


def test_a_task_runs_slurmctld_of_the_signed_image(nomad: NomadCluster, site: Cluster, signed_image: Path) -> None:
    (key,) = site.site.signing.public_keys
    other = nomad.hosts[0].disk / "other.pub"
    nomad.hosts[0].run("sh", "-c", f"openssl genpkey -algorithm ed25519 | openssl pkey -pubout -out {other}")
    nomad.submit(batch("signed", signed_image, Path(key)))
    nomad.submit(batch("unsigned", signed_image, other))
    for name, state in (("signed", "complete"), ("unsigned", "failed")):
        wait_until(lambda: [each["ClientStatus"] for each in nomad.allocations(name)] == [state], name, 90)  # noqa: B023
    logs = {name: nomad.logs(nomad.allocations(name)[0]["ID"], "slurmctld") for name in ("signed", "unsigned")}
    assert logs["signed"].splitlines()[-1].startswith("slurm")
    assert "slurm-wlm" not in logs["unsigned"]
    for name in logs:
        nomad.purge(name)
