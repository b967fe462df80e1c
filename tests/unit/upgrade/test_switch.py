"""Which image belongs to the overlay after an interrupted switch of an upgrade; overlays are real file systems."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.host.base import Result
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.services.unfinished import has_switched, image_of_unfinished, read_last_upgrade, write_phase
from appliance.plan.upgrade.upgrade import RETURNED, STARTING, SWITCHING, Side, Upgrade
from appliance.tools.apptainer import Instance
from tests.conftest import find_tool
from tests.sites import open_debian
from tests.support.instances import LIST, lists

OLD, NEW = Side("/i/old.sif", "old", "aa"), Side("/i/new.sif", "new", "bb")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    opened = open_debian(tmp_path / "state")
    for folder in (opened.places.overlay.parent, opened.places.journal):
        Path(folder).mkdir(parents=True)
    return opened


def make_overlay(cluster: Cluster, key: str) -> int:
    """Put an overlay in place that was seeded for an image, or never; return its inode."""
    path = Path(cluster.places.overlay)
    made, content = path.with_suffix(".made"), path.with_suffix(".content")
    (content / "upper" / "etc" / "sms").mkdir(parents=True, exist_ok=True)
    mark = content / "upper" / "etc" / "sms" / "seed.mark"
    mark.unlink(missing_ok=True)
    if key:
        mark.write_text(f"{'0' * 64} {key}\n")
    argv = (find_tool("mke2fs"), "-q", "-t", "ext3", "-b", "1024", "-J", "size=1", "-d", str(content))
    subprocess.run([*argv, str(made), "4096"], check=True)
    made.rename(path)
    return path.stat().st_ino


class Here(Local):
    """This machine, on which an image runs or none."""

    def __init__(self, image: str = "") -> None:
        super().__init__()
        self.image = image

    def run(self, *argv: str, **options: Any) -> Result:
        if argv[:3] != LIST:
            return super().run(*argv, **options)
        running = [Instance(argv[-1], 7, self.image)] if self.image else []
        return Result(self.name, argv, 0, lists(running)(argv, None)[1].encode(), b"")


def record(cluster: Cluster, phase: str, inode: int) -> Upgrade:
    upgrade = Upgrade(cluster.site.cluster, phase, OLD, NEW, 100.0, inode=inode)
    return write_phase(cluster, Local(), upgrade)


@pytest.mark.parametrize(
    ("key", "image"),
    [
        ("new", NEW),
        ("old", OLD),  # restored or grown: not the copy
        ("another", OLD),
        ("", NEW),  # never the old image where it is not known
    ],
)
def test_another_file_has_the_key_of_its_image(cluster: Cluster, key: str, image: Side) -> None:
    before = make_overlay(cluster, "old")
    upgrade = record(cluster, SWITCHING, before)
    assert make_overlay(cluster, key) != before
    assert has_switched(cluster, Here(), upgrade) == (image == NEW)
    assert image_of_unfinished(cluster, Here()) == Path(image.path)


def test_the_file_of_before_is_that_of_the_old_image(cluster: Cluster) -> None:
    """Whatever is in it: processes of the container can write there."""
    record(cluster, SWITCHING, make_overlay(cluster, "new"))
    assert image_of_unfinished(cluster, Here()) == Path(OLD.path)


def test_without_an_overlay_and_in_other_phases(cluster: Cluster) -> None:
    upgrade = record(cluster, SWITCHING, 1)
    assert not has_switched(cluster, Here(), upgrade)
    make_overlay(cluster, "new")
    assert has_switched(cluster, Here(), upgrade)
    assert not has_switched(cluster, Here(), upgrade.at(STARTING))
    assert image_of_unfinished(cluster, Here()) == Path(NEW.path)
    write_phase(cluster, Local(), upgrade.at(RETURNED))
    assert image_of_unfinished(cluster, Here()) is None


@pytest.mark.parametrize("running", [OLD, NEW, Side("/i/third.sif", "third", "cc")])
def test_what_runs_decides(cluster: Cluster, running: Side) -> None:
    upgrade = record(cluster, SWITCHING, make_overlay(cluster, "old"))
    assert has_switched(cluster, Here(running.path), upgrade) == (running == NEW)


def test_a_migration_since_then_ends_it(cluster: Cluster) -> None:
    record(cluster, SWITCHING, 1)
    assert read_last_upgrade(cluster, Local())
    note(cluster, Local(), "migrate", "arrived")
    assert read_last_upgrade(cluster, Local()) is None
