"""The image as a folder, seeded like the overlay, to run the same daemons without container."""

from __future__ import annotations

import shutil
from pathlib import Path

from appliance.host.local import Local
from appliance.operations.overlay.overlay import archive_for
from appliance.plan.overlay.seed import seed_digest, seed_program
from bench.rig.bed import Bed
from bench.rig.measure import CACHE

# In a separate mount namespace; chroot(2) is not permitted on some machines.
SEED = """
set -eu
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
pivot_root . mnt
shift
exec "$@"
"""


def unpack(bed: Bed) -> Path:
    """Unpack the image and seed it, unless that is done; return the folder."""
    archive = archive_for(bed.cluster)
    root = CACHE / f"bench-{bed.built.key[:16]}-{seed_digest(archive)[:16]}"
    if root.is_dir():
        return root
    for old in CACHE.glob("bench-*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    beside = root.with_name(root.name + ".new")
    CACHE.mkdir(parents=True, exist_ok=True)
    local = Local()
    local.run("apptainer", "build", "--sandbox", str(beside), bed.built.image, timeout=300)
    # The same as Apptainer's --dns in the container.
    (beside / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
    shell = ("unshare", "-m", "--propagation", "private", "sh", "-c", SEED, "seed", str(beside))
    seed = (*shell, *seed_program("", "bench"))
    local.run(*seed, input=archive)
    beside.rename(root)
    return root
