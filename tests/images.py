"""Builds what real tests share, where it is not there yet: `tests/machine --fill python -m tests.images`.

These are the roots of a lab's nodes and of its legacy node, the services container with and without accounting, the VM
and its nodes' packages; with `--engines` also the image that tests of these run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from appliance.lab import Layout
from appliance.lab.etc import make_etc
from appliance.lab.root import MANAGEMENT, make_root
from appliance.operations.context import open_cluster
from appliance.operations.image.build import build
from appliance.operations.lab.lab import SIGNING, certify_controllers
from appliance.operations.nodes.image import build_node
from appliance.operations.site.keys import create_pair
from appliance.operations.vm.build import build_vm
from appliance.progress import Silent
from tests.real.images import SCRIPTS, kept_variant

ACCOUNTING = ("slurmctld", "munge", "nat", "rsyslog", "chrony", "postfix", "cron", "filesync", "slurmdbd", "slurmrestd")

ON_ENGINES = ("slurmctld", "munge", "slurmdbd", "slurmrestd", "sssd", "login")
"""Services of labs with an engine: tests/real/engines/entries.py."""


def with_accounting(document: dict[str, Any]) -> None:
    """Change a lab's site file to a cluster with slurmdbd, MariaDB and slurmrestd, beside the usual one."""
    document["cluster"] = "full"
    document["services"] = list(ACCOUNTING)
    document["overlay"] = {"size_mb": 1024, "directory": "/var/lib/sms/full"}


def make_site() -> Path:
    """The site file of a lab, with keys, without the lab."""
    layout = Layout("images", 1, metal=2)
    certify_controllers(layout)
    make_etc(layout)
    if not SIGNING.exists():
        create_pair(SIGNING / "sign.pem", SIGNING / "sign.pub")
    for key in SIGNING.iterdir():
        copy = layout.etc / "keys" / key.name
        copy.write_bytes(key.read_bytes())
        copy.chmod(0o600)
    site = layout.etc / "sms.yaml"
    document = yaml.safe_load(site.read_text())
    with_accounting(document)
    (layout.etc / "full.yaml").write_text(yaml.safe_dump(document))
    document = yaml.safe_load(site.read_text()) | {"services": list(ON_ENGINES)}
    (layout.etc / "engines.yaml").write_text(yaml.safe_dump(document))
    return site


def timed(what: str, work: Callable[[], object]) -> None:
    """Do it, and print how long it took."""
    began = time.monotonic()
    work()
    print(f"images: {what}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Build all of it, three at a time: the roots mostly wait for the mirror and for the disk."""
    site = make_site()
    names = ("sms.yaml", "full.yaml", "engines.yaml")
    usual, full, engines = (open_cluster(site.with_name(name), None, Silent()) for name in names)

    def variants() -> None:
        built = build(usual, lock=site.with_name("sms.lock"))
        for name in SCRIPTS:
            kept_variant(built, name)

    def containers() -> None:
        timed("services container and its variants", variants)
        timed("with accounting", lambda: build(full, lock=site.with_name("full.lock")))
        if "--engines" in sys.argv[1:]:
            timed("for engines", lambda: build(engines, lock=site.with_name("engines.lock")))

    def roots() -> None:
        timed("root of lab nodes", lambda: make_root(Silent()))
        timed("root of a legacy node", lambda: make_root(Silent(), MANAGEMENT))

    def machines() -> None:
        timed("provisioning VM", lambda: build_vm(usual))
        timed("node image", lambda: build_node(usual, "compute"))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for work in (containers, machines, roots)]:
            done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
