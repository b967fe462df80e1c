"""docs/first-day.md, as it is written, in the lab."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from appliance.host.base import Host
from appliance.host.local import Local
from appliance.lab import Lab
from appliance.operations.lab import demo
from appliance.operations.lab.lab import SIGNING
from tests.places import ROOT
from tests.real.labs import fresh_lab
from tests.shellblocks import Block, read_blocks

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(1800)]

VERBS = (
    *("init", "config check", "key create", "host prepare", "doctor", "build", "start", "status", "apply", "restart"),
    *("overlay snapshot", "migrate"),
)
"""What an administrator does on the first day."""


@pytest.fixture(params=["flat"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab whose administrator has no site file yet, but the accounts and the munge key of the old machine."""
    with fresh_lab("t-first", 3, shape=request.param) as lab:
        site = yaml.safe_load((lab.etc / "sms.yaml").read_text())
        lab.etc.joinpath("sms.yaml").unlink()
        for key in ("sign.pem", "sign.pub"):
            (lab.etc / "keys" / key).unlink()
        lab.etc.joinpath("lab.yaml").write_text(yaml.safe_dump(site))
        yield lab


def run_block(lab: Lab, block: Block, text: str) -> str:
    """Run a block on the administrator's machine; builds on this one, as the page says of the lab."""
    host: Host = lab.host("admin")
    argv = ["bash", "-euo", "pipefail", "-c", f"cd /root\n{text}"]
    if "sms build" in text:
        host = Local()
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        argv = ["env", f"PATH={path}", f"SMS_SITE={lab.etc}/sms.yaml", *argv]
    done = host.run(*argv, ok=None, timeout=900)
    output = f"{done.stdout.decode()}\n{done.stderr.decode()}"
    assert done.status == 0, f"{block.place}: status {done.status}\n{text}\n{output}"
    return output


def test_the_page_names_every_step() -> None:
    text = "\n".join(block.text for block in read_blocks(ROOT / "docs" / "first-day.md"))
    assert [verb for verb in VERBS if f"sms {verb}" not in text] == []


def test_the_first_day(lab: Lab) -> None:
    network = yaml.safe_load((lab.etc / "lab.yaml").read_text())["networks"]["provisioning"]
    nodes = yaml.safe_load((lab.etc / "lab.yaml").read_text())["slurm"]["nodes"][0]["address"]
    for block in read_blocks(ROOT / "docs" / "first-day.md"):
        text = block.text
        if "cat >/etc/sms/sms.yaml" in text and "routes" in network:
            # The example is flat; the page says what a router needs.
            routes = yaml.safe_dump(network["routes"], default_flow_style=True, width=200).strip()
            prefix = nodes.partition("[")[0]
            assert "10.77.0.[101-102]" in text
            text = text.replace("10.77.0.[101", f"{prefix}[101")
            text = text.replace("provisioning: {", f"provisioning: {{routes: {routes}, ")
        run_block(lab, block, text)
        if "sms key create" in text:
            # The images of the tests are signed with this pair: they need not be built again.
            for key in ("sign.pem", "sign.pub"):
                shutil.copy(SIGNING / key, lab.etc / "keys" / key)
        if "sms start --host host-a" in text or "node3" in text:
            demo.wait_idle(lab.host("node1"), 2 if "sms start" in text else 3)
            assert "COMPLETED" in demo.run_job(lab.host("node1"))
    demo.wait_idle(lab.host("node1"), 3)
    assert "COMPLETED" in demo.run_job(lab.host("node1"))
