"""`sms status` with a full overlay."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.host.fake import Fake
from appliance.operations.context import open_cluster
from appliance.operations.services import status
from appliance.plan.services.note import StartNote
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.tools.apptainer import Instance
from tests.places import DEBIAN_SITE


@pytest.mark.parametrize(("percent", "full"), [(79, False), (80, True), (97, True)])
def test_nearly_full_overlay_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: int, full: bool
) -> None:
    cluster = open_cluster(DEBIAN_SITE, tmp_path, Silent())
    output = f"1B-blocks Used\n{100 << 20} {percent << 20}\n"
    host = Fake({("apptainer",): (0, output), ("ps",): (0, "5"), ("test",): (1, "")}, name="host-a")
    monkeypatch.setattr(status.apptainer, "find_instance", lambda *_: Instance("sms-sample", 7, "/i.sif"))
    monkeypatch.setattr(status, "query_services", lambda *_: [])
    monkeypatch.setattr(status, "read_note", lambda *_: StartNote("/i.sif", "", "", "", 1, "host-a", 0.0))
    found = status._container_status(cluster, host, Lease(cluster.site.cluster, 1, "host-a", 0.0), [], {})
    warning = f"the overlay is {percent}% full; `sms overlay grow +1G` makes it larger"
    assert (found.healthy, found.warnings) == (not full, [warning] if full else [])
