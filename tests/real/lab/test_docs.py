"""The blocks of commands of the documents, line by line, in one lab; docs/first-day.md has a test of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.host.base import Host
from appliance.host.local import Local
from appliance.lab import Lab
from appliance.operations.lab import demo
from tests.places import ROOT
from tests.real.conftest import Playground, give_image
from tests.real.labs import build_image, fresh_lab
from tests.shellblocks import RUN, Block, read_shell

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(1800)]

BLOCKS = [block for page in RUN for block in read_shell(ROOT / "docs" / page) if not block.reason]
NAMES = {r"\b41\b": "1", r"\b42\b": "2", r"\badmin-1\b": "host-a", r"of-2\b": "of-42"}
"""What stands for something of the reader's own, and what it is in the lab."""
ENDLESS = re.compile(r"--watch|-f |capture|sms shell|exec node1$|exec host-a$")
"""Commands that a person ends."""
PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BEFORE = {
    "lab.md": "sms -q stop",
    "build.md": "true",
    "running.md": "sms -q stop",
    "snapshots.md": "sms -q stop; sms -q overlay snapshot; sms -q overlay snapshot",
    "hosts.md": "true",
    "migrate.md": "sms -q start",
    "overlay.md": "sms -q migrate host-a; sms -q stop; for d in /disk1 /disk2; do mkdir -p $d; "
    "mount -t tmpfs -o size=24g tmpfs $d; done",
}
"""The state that a page begins with, made on host-a."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """The lab of the documents' name, with its image; user alice has run a job."""
    with fresh_lab("lab", 4) as lab:
        play = Playground(lab)
        give_image(play, build_image(lab))
        play.sms("-q", "start")
        demo.wait_idle(lab.host("node1"), 4)
        demo.mail_arrives(lab.host("outside"), demo.run_job(lab.host("node1")).split()[1])
        yield lab


def lines_of(block: Block) -> list[str]:
    """The commands of a block, without comments; what the lab has is put in."""
    text = block.text.replace("\\\n", " ")
    for name, there in NAMES.items():
        text = re.sub(name, there, text)
    lines = [re.sub(r"\s+#\s.*", "", line) for line in text.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def run_line(lab: Lab, where: str, line: str) -> tuple[int, str]:
    """Run a command; return its exit status and output."""
    # Opened anew: a host that was powered off and on has another first process.
    host: Host = Local() if where == "machine" else Lab.open(lab.name).running_host(where)
    limit = "timeout --signal INT --kill-after 20 6 " if ENDLESS.search(line) else ""
    argv = ["env", "-C", "/tmp", "TERM=dumb", f"SMS_SITE={lab.etc if where == 'machine' else '/etc/sms'}/sms.yaml"]
    if where == "machine":
        argv.append(f"PATH={PATH}")
    done = host.run(*argv, "bash", "-c", f"{limit}{line} </dev/null", ok=None, timeout=900)
    status = 0 if limit and done.status in (124, 130) else done.status
    return status, f"{done.stdout.decode()[-2000:]}\n{done.stderr.decode()[-3000:]}"


def test_the_documents(lab: Lab) -> None:
    """In their order: what one page leaves, such as snapshots, the next may use."""
    wrong, begun = [], ""
    for block in BLOCKS:
        if block.page != begun:
            begun = block.page
            status, output = run_line(lab, "host-a", f"bash -ec '{BEFORE[begun]}'")
            assert status == 0, f"before {begun}: {output}"
        for line in lines_of(block):
            status, output = run_line(lab, RUN[block.page], line)
            if status and not (status == 4 and "status" in line):
                wrong.append(f"{block.place}: {line}: status {status}\n{output}")
    for left in ("/tmp/lab.pcap", "/tmp/sms.lock"):
        Path(left).unlink(missing_ok=True)
    assert not wrong, "\n".join(wrong)
