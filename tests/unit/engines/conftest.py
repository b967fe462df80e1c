"""What tests of deployments share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.operations.context import Cluster, open_cluster
from appliance.progress import Silent
from tests.sites import GOOD


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "sms.yaml"
    path.write_text(GOOD + f"state: {tmp_path}/state\n")
    found = open_cluster(path, None, Silent())
    one = found.site.model_copy(update={"admin_hosts": found.site.admin_hosts[:1]})
    return replace(found, site=one)
