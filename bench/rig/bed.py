"""The lab of the benchmarks, with the services container on host-a."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.lab import Extras, Lab
from appliance.lab.layout import Layout
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.image.build import Built, build
from appliance.operations.lab.lab import lab_down, lab_up
from appliance.progress import Progress

LAB = "bench"
CARRIER = "host-a"


class Bed:
    """A lab with one compute node and the image on host-a."""

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
        """Run ``sms start`` on host-a; return the seconds of the whole command and its JSON output."""
        return self.timed(self.carrier, "start", "--json")

    def stop(self) -> tuple[float, dict[str, Any]]:
        """Run ``sms stop`` on host-a; like ``start``."""
        return self.timed(self.carrier, "stop", "--json")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the services container for the duration of the context."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def timed(self, host: Host, *verb: str) -> tuple[float, dict[str, Any]]:
        """Run a verb on a host of the lab; return the seconds of the whole command and its JSON output."""
        began = time.monotonic()
        reply = host.run("sms", "--quiet", *verb, timeout=300)
        return time.monotonic() - began, json.loads(reply.stdout)


@contextmanager
def open_bed(
    progress: Progress,
    name: str = LAB,
    *,
    nodes: int = 1,
    size_mb: int = 0,
    engines: Sequence[str] = (),
    legacy: bool = False,
) -> Iterator[Bed]:
    """Create the lab, build the image if needed, start once to seed the overlay.

    Leftovers of an earlier run are removed first. The lab is removed at the end.

    Args:
        size_mb: size of the overlay in MiB; 0 for the default.
        engines: engines of the lab.
        legacy: a legacy node serves; the services container is not started.
    """
    try:
        _remove_lab(name, progress)
        lab_up(name, nodes, progress, Extras(engines=engines, legacy=legacy))
        lab = Lab.open(name)
        if size_mb:
            _set_size(lab, size_mb)
        cluster = open_cluster(lab.etc / "sms.yaml", None, progress)
        bed = Bed(lab, cluster, _build(cluster, lab.etc / "sms.lock", progress))
        _place_image(bed)
        if not legacy:
            with bed.running():
                pass
        yield bed
    finally:
        _remove_lab(name, progress)


def _remove_lab(name: str, progress: Progress) -> None:
    """Remove the lab and its files; the root file system shared by all labs is kept."""
    lab_down(name, False, progress)
    Local().run("rm", "-rf", "--one-file-system", str(Layout(name, 0).disk), timeout=300)


def _set_size(lab: Lab, size_mb: int) -> None:
    path = lab.etc / "sms.yaml"
    path.write_text(re.sub(r"(?m)^( +size_mb:).*", rf"\1 {size_mb}", path.read_text()))


def _build(cluster: Cluster, lock: Path, progress: Progress, patience_s: float = 300) -> Built:
    """Build the image; wait while another lab builds it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return build(cluster, lock=lock)
        except Refused as error:
            if "another build" not in error.message or time.monotonic() > deadline:
                raise
        time.sleep(2)


def _place_image(bed: Bed) -> None:
    """Copy the image to host-a's store and make it current."""
    store = bed.lab.layout.disk / CARRIER / "images"
    source = Path(bed.built.image)
    store.mkdir(mode=0o700, exist_ok=True)
    Local().run("cp", str(source), str(store / source.name))
    (store / Path(bed.cluster.places.current).name).symlink_to(source.name)
