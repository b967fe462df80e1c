"""Images that are like the one of a lab but for something: made from it, which is much faster than a build."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from pathlib import Path

from appliance.lab import Lab
from appliance.operations.image.build import Built

BROKEN = "no such luck"
"""What the broken controller says."""
SCRIPTS = {
    "good": "echo good >/opt/sms/variant",
    "broken": f"printf '#!/bin/sh\\necho {BROKEN}\\nexit 1\\n' >/usr/sbin/slurmctld",
}
SQUASHFS = "-comp zstd -Xcompression-level 1"
"""An eighth of the CPU time of gzip, the default of mksquashfs."""


def kept_variant(built: Built, name: str) -> Path:
    """An unsigned image with the change of ``SCRIPTS``, beside the lab's; made by the first who wants it."""
    key = hashlib.sha256(f"{built.key} {SCRIPTS[name]}".encode()).hexdigest()
    kept = Path(built.image).parent / "variants" / f"{key}.sif"
    kept.parent.mkdir(exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            definition, part = kept.with_suffix(".def"), kept.with_suffix(".part")
            words = f"%post\n    {SCRIPTS[name]}\n%labels\n    sms.key {key}\n"
            definition.write_text(f"Bootstrap: localimage\nFrom: {built.image}\n{words}")
            argv = ["apptainer", "build", "--force", "--mksquashfs-args", SQUASHFS, str(part), str(definition)]
            subprocess.run(argv, check=True, capture_output=True, timeout=600)
            part.rename(kept)
    return kept


def make_variant(built: Built, lab: Lab, name: str, *, signed: bool = True) -> str:
    """A variant of its own for a lab, signed with the lab's key; its path there."""
    kept = kept_variant(built, name)
    target = lab.etc / f"{name}{'' if signed else '-unsigned'}.sif"
    subprocess.run(["install", "-m", "0600", str(kept), str(target)], check=True)
    if signed:
        sign = ["apptainer", "sign", "--key", str(lab.etc / "keys" / "sign.pem"), str(target)]
        subprocess.run(sign, check=True, capture_output=True)
    return f"/etc/sms/{target.name}"
