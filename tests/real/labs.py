"""Labs of one test or module."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from appliance.errors import Refused
from appliance.lab import Extras, Lab, Metal
from appliance.lab.up import check_machine
from appliance.operations.context import open_cluster
from appliance.operations.image.build import Built, build
from appliance.operations.lab.lab import lab_down, lab_up
from appliance.progress import Silent


@contextmanager
def fresh_lab(
    name: str,
    nodes: int,
    *,
    metal: int = 0,
    shape: str = "flat",
    engines: Sequence[str] = (),
    legacy: bool = False,
) -> Iterator[Lab]:
    """A lab without anything of an earlier run; nothing is left of it afterwards."""
    remove_lab(name)
    lab_up(name, nodes, Silent(), Extras(metal, shape, engines, legacy))
    try:
        yield Lab.open(name)
    finally:
        remove_lab(name)


def build_image(lab: Lab, site: str = "sms") -> Built:
    """The image of a site file of the lab, built for real where nothing like it has been built before."""
    return build(open_cluster(lab.etc / f"{site}.yaml", None, Silent()), Silent(), lock=lab.etc / f"{site}.lock")


def console_text(machine: Metal) -> str:
    """The output of a diskless machine's serial console."""
    return machine.console.read_text(errors="replace") if machine.console.exists() else ""


def need_machine(*, metal: bool = False) -> None:
    """Skip where this machine cannot run a lab; in CI that is a failure."""
    try:
        check_machine(metal=metal)
    except Refused as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(error.message)


def remove_lab(name: str) -> None:
    """Remove a lab with its files."""
    lab_down(name, False, Silent())
    shutil.rmtree(f"/var/lib/sms-lab/{name}", ignore_errors=True)
