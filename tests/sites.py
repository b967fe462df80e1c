"""Small site files, and what they may name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from appliance.config.model import Site
from appliance.config.read import read_site
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.env import Env
from appliance.progress import Silent
from tests.places import DEBIAN_SITE

GOOD = """\
cluster: lab
hostname: sms-services
admin_hosts:
  - {name: host-a, address: 10.78.0.11}
  - {name: host-b, address: 10.78.0.12}
networks:
  provisioning:
    bridge: br-prov
    address: 10.77.0.1/24
    mac: 02:00:0a:4d:00:01
  public:
    bridge: br-pub
    address: 10.78.0.2/24
    mac: 02:00:0a:4e:00:02
    gateway: 10.78.0.254
services: [slurmctld, munge]
slurm:
  nodes:
    - {name: "node[1-4]", address: "10.77.0.[101-104]"}
  partitions:
    - {name: batch, default: true}
"""

SERVICES = ("chrony", "munge", "nat", "slurmctld")
BASES = ("debian-12", "sles-15")

WITH_VM: dict[str, Any] = {
    "cluster": "one",
    "admin_hosts": [{"name": "a", "address": "192.0.2.1"}],
    "networks": {
        "provisioning": {"bridge": "br-p", "address": "10.0.0.1/16", "mac": "02:00:0a:00:00:01"},
        "public": {"bridge": "br-x", "address": "192.0.2.9/24", "mac": "02:00:c0:00:02:09", "gateway": "192.0.2.254"},
        "dns": ["192.0.2.53"],
    },
    "provisioning": {"address": "10.0.0.2/16", "mac": "02:00:0A:00:00:02"},
}


def make_site(tmp_path: Path, **changes: Any) -> Site:
    """Return a site whose VM has these additional settings."""
    document = {**WITH_VM, "provisioning": {**WITH_VM["provisioning"], **changes}}
    (tmp_path / "sms.yaml").write_text(yaml.safe_dump(document))
    site, _ = read_site(tmp_path / "sms.yaml")
    return site


@cache
def _read_sample() -> Cluster:
    return open_cluster(DEBIAN_SITE, None, Silent())


def open_debian(state: Path | None = None) -> Cluster:
    """Return the sample site of Debian, with that folder of its state; its files are read once."""
    found = _read_sample()
    site = found.site if state is None else found.site.model_copy(update={"state": state.absolute()})
    return replace(found, site=site, env=Env())
