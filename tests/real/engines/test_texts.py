"""Nomad's parser reads from a job what was written, whatever a text contains."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from appliance.engines.hcl import write
from appliance.engines.nomad_json import job_json
from appliance.lab.engines.programs import find_program
from tests.real.engines.conftest import need_engines
from tests.unit.engines.test_texts import HOSTILE, job

pytestmark = pytest.mark.real


@pytest.mark.parametrize("text", [text for text in HOSTILE if "\x00" not in text], ids=ascii)
def test_nomad_reads_what_was_written(text: str, tmp_path: Path) -> None:
    """Nomad's own parser, also of heredocs; and the JSON of the same job has the same texts."""
    need_engines("nomad")
    (tmp_path / "job.hcl").write_text(write([job(text)]))
    done = subprocess.run(
        [str(find_program("nomad")), "job", "run", "-output", str(tmp_path / "job.hcl")],
        capture_output=True,
        check=True,
        timeout=60,
    )
    (task,) = json.loads(done.stdout)["Job"]["TaskGroups"][0]["Tasks"]
    assert task["Config"]["args"][0] == text
    assert task["Templates"][0]["EmbeddedTmpl"] == text
    assert task["Env"]["X"] == text
    (ours,) = json.loads(job_json(job(text)))["Job"]["TaskGroups"][0]["Tasks"]
    assert (ours["Config"], ours["Templates"][0]["EmbeddedTmpl"]) == (
        task["Config"],
        task["Templates"][0]["EmbeddedTmpl"],
    )
