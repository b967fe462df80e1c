"""Images that are like the one of a lab but for something: made from it, which is much faster than a build."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from appliance.flow.build import Built
from appliance.lab import Lab

BROKEN = "no such luck"
"""What the broken controller says."""
SCRIPTS = {
    "good": "echo good >/opt/sms/variant",
    "broken": f"printf '#!/bin/sh\\necho {BROKEN}\\nexit 1\\n' >/usr/sbin/slurmctld",
}


def make_variant(built: Built, lab: Lab, name: str, *, signed: bool = True) -> str:
    """An image with the change of ``SCRIPTS``, kept beside others for the next run; its path in the lab."""
    key = hashlib.sha256(f"{built.key} {SCRIPTS[name]}".encode()).hexdigest()
    kept = Path(built.image).parent / "variants" / f"{key}.sif"
    if not kept.is_file():
        kept.parent.mkdir(exist_ok=True)
        definition = kept.with_suffix(".def")
        definition.write_text(
            f"Bootstrap: localimage\nFrom: {built.image}\n%post\n    {SCRIPTS[name]}\n%labels\n    sms.key {key}\n"
        )
        part = kept.with_suffix(".part")
        subprocess.run(
            ["apptainer", "build", "--force", str(part), str(definition)], check=True, capture_output=True, timeout=600
        )
        part.rename(kept)
    target = lab.etc / f"{name}{'' if signed else '-unsigned'}.sif"
    subprocess.run(["install", "-m", "0600", str(kept), str(target)], check=True)
    if signed:
        sign = ["apptainer", "sign", "--key", str(lab.etc / "keys" / "sign.pem"), str(target)]
        subprocess.run(sign, check=True, capture_output=True)
    return f"/etc/sms/{target.name}"
