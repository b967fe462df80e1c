"""The compiled form of the shipped catalogue: what `sms classify` needs of it, as JSON.

``python -m appliance.operations.classify.compiled`` writes it, when the package is built and when a checkout is set up.
It is used only if it was made from the same files: reading those takes a hundredth of what converting them takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.signatures import FirstBytes, Signature
from appliance.share import PACKAGE, share

FILE = PACKAGE / "_signatures.json"
SOURCES = (
    "analysis/signatures.py",
    "appliance/catalog/__init__.py",
    "appliance/catalog/model.py",
    "appliance/catalog/traffic.py",
    "appliance/config/document.py",
    "appliance/operations/classify/compiled.py",
    "appliance/operations/classify/convert.py",
)
"""The programs that the content depends on."""


@dataclass(frozen=True)
class Known:
    """A service of the catalogue: other names of it, and its signature."""

    ports: tuple[str, ...]
    known_as: tuple[str, ...]
    signature: Signature


def read(file: Path | None = None) -> dict[str, Known] | None:
    """Return the services by name; None if there is no compiled form of the files that are there now.

    A file that anybody could have written is not used.
    """
    file = file or FILE
    try:
        with file.open("rb") as stream:
            if (os.fstat(stream.fileno()).st_mode | file.parent.stat().st_mode) & stat.S_IWOTH:
                return None
            data = json.loads(stream.read())
        if data["digest"] != digest():
            return None
        return {one["signature"]["name"]: _known(one) for one in data["services"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def write(services: Mapping[str, Known], file: Path = FILE) -> None:
    """Write the compiled form; the file appears whole or not at all."""
    made = {"digest": digest(), "services": [asdict(one) for one in services.values()]}
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(made, default=bytes.hex), encoding="ascii")
    new.chmod(0o644)
    new.replace(file)


def digest() -> str:
    """Return the digest of the shipped definitions and of the programs that convert them: names and contents."""
    found = hashlib.sha256()
    folder = share("definitions", "services")
    definitions = sorted(path for path in folder.iterdir() if path.suffix == ".yaml")
    for path in (*definitions, *(PACKAGE.parent / name for name in SOURCES)):
        data = path.read_bytes()
        found.update(f"{path.name} {len(data)}\n".encode() + data)
    return found.hexdigest()


def _known(data: Mapping[str, Any]) -> Known:
    values = data["signature"]
    first = [
        {
            **each,
            "low": bytes.fromhex(each["low"]),
            "high": bytes.fromhex(each["high"]),
            "beside": tuple(each["beside"]) if each["beside"] else None,
        }
        for each in values["first"]
    ]
    signature = Signature(
        **{**values, "ports": tuple(map(tuple, values["ports"])), "first": tuple(FirstBytes(**each) for each in first)}
    )
    return Known(tuple(data["ports"]), tuple(data["known_as"]), signature)


if __name__ == "__main__":
    from appliance.operations.classify.convert import read_services

    write(read_services()[0])
