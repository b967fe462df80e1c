"""The commands of the documents about the lab, and about what the provisioning VM does for its diskless machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.lab import Layout
from appliance.lab.etc import BMC_PAIR
from appliance.lab.layout import BMC
from appliance.operations.lab.lab import certify_controllers
from appliance.operations.site.ca import ca_folder, issue_server
from tests.real.blocks import Reader
from tests.real.labs import need_machine, remove_lab
from tests.real.pages import MACHINES, XNAME

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Somebody on a machine without a lab."""
    pytest.importorskip("sushy")
    need_machine(metal=True)
    remove_lab("lab")
    name_controllers(Layout("lab", 0, metal=2))
    yield Reader("lab")
    remove_lab("lab")


def name_controllers(layout: Layout) -> None:
    """The certificate of the lab's controllers has the name by which a page discovers one."""
    certify_controllers(layout)
    addresses = [machine.bmc for machine in layout.machines]
    pair = issue_server(ca_folder(layout.etc / "sms.yaml"), hostname=XNAME, addresses=addresses)
    for name, data in zip(BMC_PAIR, (pair.certificate, pair.key), strict=True):
        (layout.disk / BMC / name).write_bytes(data)


@pytest.mark.parametrize("name", MACHINES)
def test_the_page_is_true(reader: Reader, name: str) -> None:
    reader.check(MACHINES[name], name)
