"""Labels are read from what the build stored in the SIF, by Apptainer; nothing of the SIF is run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.tools import apptainer

GENERIC_JSON = "6"


def test_only_the_stored_description_is_read(need: Callable[[str], str], tmp_path: Path) -> None:
    need("apptainer")
    sif, labels = tmp_path / "x.sif", {"sms.key": "k"}

    def add(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        more = ("--datatype", GENERIC_JSON, "--filename", name)
        subprocess.run(["apptainer", "sif", "add", *more, str(sif), str(tmp_path / name)], check=True)

    subprocess.run(["apptainer", "sif", "new", str(sif)], check=True)
    add("other.json", "{}")
    with pytest.raises(SmsError, match=r"has no inspect-metadata\.json"):
        apptainer.labels(Local(), str(sif))
    add("inspect-metadata.json", json.dumps({"data": {"attributes": {"labels": labels}}}))
    assert apptainer.labels(Local(), str(sif)) == labels
    (tmp_path / "y.sif").write_text("not a SIF")
    with pytest.raises(SmsError, match="ended with status 1"):
        apptainer.labels(Local(), str(tmp_path / "y.sif"))
