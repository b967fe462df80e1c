"""The image of the first process of each pod."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

from appliance.lab.engines.agents import PAUSE
from appliance.share import share


def pause_image(folder: Path) -> bytes:
    """The image of the first process of each pod, as an archive of Docker."""
    program = folder / "pause"
    source = share("definitions", "lab", "pause.c")
    subprocess.run(["gcc", "-static", "-Os", "-s", "-o", program, source], check=True)
    layer = _tar({"pause": program.read_bytes()}, mode=0o755)
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    names = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
    texts = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(names).encode()}
    return _tar({**texts, "layer.tar": layer})


def _architecture() -> str:
    """As OCI names it."""
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def _tar(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()
