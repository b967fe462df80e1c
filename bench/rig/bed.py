"""The lab that benchmarks use, and the appliance on its host-a."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.lab import Lab
from appliance.lab.layout import Layout
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.image.build import Built, build
from appliance.operations.lab.lab import lab_down, lab_up
from appliance.progress import Progress

LAB = "bench"
CARRIER = "host-a"


class Bed:
    """A lab of one compute node; the appliance's image is in place on host-a."""

    def __init__(self, lab: Lab, cluster: Cluster, built: Built) -> None:
        self.lab = lab
        self.cluster = cluster
        self.built = built
        self.carrier = lab.host(CARRIER)
        self.admin = lab.host("admin")

    @property
    def site_file(self) -> Path:
        """The lab's sms.yaml."""
        return self.lab.etc / "sms.yaml"

    def start(self) -> tuple[float, dict[str, Any]]:
        """``sms start`` on host-a: seconds of the whole command, and what it says of itself."""
        return self.timed(self.carrier, "start", "--json")

    def stop(self) -> tuple[float, dict[str, Any]]:
        """``sms stop`` on host-a, likewise."""
        return self.timed(self.carrier, "stop", "--json")

    @contextmanager
    def running(self) -> Iterator[None]:
        """The appliance runs."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def timed(self, host: Host, *verb: str) -> tuple[float, dict[str, Any]]:
        """A verb on a host of the lab: seconds of the whole command, and its JSON."""
        began = time.monotonic()
        said = host.run("sms", "--quiet", *verb, timeout=300)
        return time.monotonic() - began, json.loads(said.stdout)


@contextmanager
def open_bed(progress: Progress, name: str = LAB, *, nodes: int = 1, size_mb: int = 0) -> Iterator[Bed]:
    """Make the lab, build the image if it is not there, start once so that the overlay is seeded.

    What an earlier run left of the lab is removed first, running or on disk; at the end nothing of it stays.

    Args:
        size_mb: of the overlay, where it is not to be the usual one.
    """
    try:
        _remove_lab(name, progress)
        lab_up(name, nodes, progress)
        lab = Lab.open(name)
        if size_mb:
            _set_size(lab, size_mb)
        cluster = open_cluster(lab.etc / "sms.yaml", None, progress)
        bed = Bed(lab, cluster, _build(cluster, lab.etc / "sms.lock", progress))
        _place_image(bed)
        with bed.running():
            pass
        yield bed
    finally:
        _remove_lab(name, progress)


def _remove_lab(name: str, progress: Progress) -> None:
    """The lab and what it keeps on disk; the cached root of all labs stays."""
    lab_down(name, False, progress)
    Local().run("rm", "-rf", "--one-file-system", str(Layout(name, 0).disk), timeout=300)


def _set_size(lab: Lab, size_mb: int) -> None:
    path = lab.etc / "sms.yaml"
    path.write_text(re.sub(r"(?m)^( +size_mb:).*", rf"\1 {size_mb}", path.read_text()))


def _build(cluster: Cluster, lock: Path, progress: Progress, patience_s: float = 300) -> Built:
    """The image of the machine's store; another lab may be building it just now."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return build(cluster, progress, lock=lock)
        except Refused as error:
            if "another build" not in error.message or time.monotonic() > deadline:
                raise
        time.sleep(2)


def _place_image(bed: Bed) -> None:
    """The image lies in host-a's own store, as after a delivery, and is the current one there."""
    store = bed.lab.layout.disk / CARRIER / "images"
    source = Path(bed.built.image)
    store.mkdir(mode=0o700, exist_ok=True)
    Local().run("cp", str(source), str(store / source.name))
    (store / Path(bed.cluster.places.current).name).symlink_to(source.name)
