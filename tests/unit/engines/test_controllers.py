"""Every slurm.conf names all places at which the controller can run, so that jobs run through a move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.engines.render import render
from appliance.plan.overlay.seed import seed_files
from appliance.plan.services.controllers import other_controllers
from tests.unit.engines.cases import KUBERNETES, NOMAD, make_input

CONTAINER = "sms-services(10.20.0.1)"
ON_NOMAD = "admin-1(10.20.0.8)"
HOST = {**KUBERNETES, "network": "host", "node": "control-1"}


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ({}, []),
        ({"nomad": NOMAD}, [ON_NOMAD]),
        ({"nomad": NOMAD, "kubernetes": HOST}, [ON_NOMAD, "control-1(10.20.0.9)"]),
        ({"kubernetes": {**KUBERNETES, "service": "LoadBalancer"}}, ["slurmctld-0(10.20.0.9)"]),
        ({"kubernetes": {**KUBERNETES, "service": "ExternalIPs"}}, ["slurmctld-0(10.20.0.9)"]),
        ({"kubernetes": KUBERNETES}, []),  # at another port
        ({"nomad": {**NOMAD, "host": "control-1"}, "kubernetes": HOST}, ["control-1(10.20.0.8)"]),  # one name
    ],
)
def test_the_others_of_the_services_container(tmp_path: Path, engines: dict[str, Any], expected: list[str]) -> None:
    given = make_input(tmp_path, "debian-12", {"engines": engines})
    assert other_controllers(given.site, given.services, "container") == expected
    sources = given.sources
    seeds = seed_files(given.site, given.services, overlays=sources.overlays, extra=(), given=sources.given)
    text = next(one.data for one in seeds if one.path == "/etc/slurm/slurm.conf").decode()
    assert [line for line in text.splitlines() if line.startswith("SlurmctldHost=")] == [
        f"SlurmctldHost={name}" for name in (CONTAINER, *expected)
    ]


def test_an_engine_has_its_own_first(tmp_path: Path) -> None:
    given = make_input(tmp_path, "debian-12", {"engines": {"nomad": NOMAD, "kubernetes": HOST}})
    (text,) = [text for name, text in render("nomad", given).files.items() if name == "slurm-ctl.nomad.hcl"]
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("SlurmctldHost=")]
    assert lines == [f"SlurmctldHost={name}" for name in (ON_NOMAD, CONTAINER, "control-1(10.20.0.9)")]
