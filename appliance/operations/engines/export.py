"""``sms export``: files with which another engine runs the services."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from appliance.catalog import read_catalog
from appliance.engines.config import Sources
from appliance.engines.model import Placement
from appliance.engines.oci import image_name
from appliance.engines.render import Input, render
from appliance.errors import ConfigError, Refused
from appliance.operations.context import Cluster, read_given, runtime_files
from appliance.plan.overlay.seed import slurm_sources
from appliance.plan.services.jobsync import PROGRAMS
from appliance.share import share
from appliance.shared.files import replace_file

RECORD = ".sms-export.json"
"""In the folder: its target, and the digest of each file as it was written."""
MODE = 0o644
PUBLIC_KEY = re.compile(r"\s*-----BEGIN PUBLIC KEY-----\s[A-Za-z0-9+/=\s]+-----END PUBLIC KEY-----\s*")
UNBUILT = "current"
"""Tag of the image where this host has none."""
SIGNED = ("nomad", "terraform")
"""Targets that contain the public keys of the site."""


@dataclass(frozen=True)
class Exported:
    """Result of an export: what differed, and was written unless it was only checked.

    Attributes:
        placements: where each service of the site runs.
        notes: what is to be done besides.
    """

    path: str
    target: str
    cluster: str
    files: int
    written: list[str]
    removed: list[str]
    placements: tuple[Placement, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether the folder had the same files already."""
        return not self.written and not self.removed


@dataclass(frozen=True)
class Record:
    """What an export wrote: digest by path. ``previous``: digests of those before, while files are replaced."""

    target: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    previous: Mapping[str, list[str]] = field(default_factory=dict)

    def known(self, name: str) -> set[str]:
        """Return the digests that a file has if nobody else changed it."""
        return {*self.previous.get(name, ()), *([self.files[name]] if name in self.files else ())}


def export(cluster: Cluster, target: str, folder: Path, *, check: bool = False) -> Exported:
    """Write the files for a target into a folder; with ``check``, only compare.

    Files of others in the folder stay as they are.

    Raises:
        ConfigError: the site cannot be rendered for the target.
        Refused: a file of the folder is not of an export, or was changed since.
    """
    shown, folder = folder, folder.absolute()
    made = render(target, read_input(cluster, target))
    if not any(each.place == "engine" for each in made.placements):
        raise ConfigError(
            f"none of the services of {cluster.site.cluster} can run there: there is nothing to export",
            hint="add one to `services`, such as slurmctld; docs/engines.md says what runs where",
        )
    digests = {name: _digest(text.encode()) for name, text in made.files.items()}
    record = read_record(folder)
    if record.target and record.target != target:
        raise Refused(f"{folder} has an export for {record.target}", hint="name another folder: -o DIR")
    written = [name for name in digests if _current(folder, name) != digests[name]]
    stale = {**record.files, **record.previous}.keys() - digests.keys()
    removed = sorted(name for name in stale if _current(folder, name))
    if not check and (written or removed or record.previous):
        for name in (*written, *removed):
            _refuse_foreign(folder, name, record)
        left = {name: sorted(record.known(name)) for name in {*record.files, *record.previous}}
        _write_record(folder, Record(target, digests, left))
        for name in written:
            replace_file(str(folder / name), made.files[name].encode(), MODE)
        for name in removed:
            (folder / name).unlink()
        _write_record(folder, Record(target, digests))
    return Exported(
        str(shown),
        target,
        cluster.site.cluster,
        len(digests),
        written,
        removed,
        made.placements,
        made.notes,
    )


def read_input(cluster: Cluster, target: str) -> Input:
    """Return what an export is rendered from. Secrets of the site are not read.

    Raises:
        ConfigError: a file of ``slurm.files`` is readable by its owner only.
    """
    site = cluster.site
    sources = slurm_sources(site)
    for _, path in sources:
        if path and not path.stat().st_mode & 0o004:
            raise ConfigError(
                f"{path} is not readable by all: an exported file would be",
                hint="keep secrets out of `slurm.files`; `chmod o+r` it if it contains none",
            )
    given = read_given([("passwd", site.accounts.passwd), ("group", site.accounts.group), *sources])
    # Also where `sms start` of another machine has put the image, without its manifest.
    current = Path(cluster.places.current)
    image_key = current.resolve().stem if current.is_symlink() else ""
    image = f"{image_name(site.cluster)}:{image_key[:12] or UNBUILT}"
    keys = tuple(_read_key(path) for path in site.signing.public_keys) if target in SIGNED else ()
    catalog = read_catalog(share("definitions", "services"))
    runtime = runtime_files()
    return Input(
        site,
        cluster.services,
        cluster.base,
        Sources(share("overlays"), given),
        image,
        keys,
        nodes=[one for one in catalog.values() if one.run and not one.container],
        programs={name: runtime[name].decode() for name in PROGRAMS},
        sif=str(cluster.places.images / f"{image_key}.sif") if image_key else "",
    )


def _read_key(path: Path) -> str:
    try:
        text = path.read_text()
        if not PUBLIC_KEY.fullmatch(text):
            raise ValueError
        return text
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not one public key in PEM form"
        raise Refused(f"cannot use {path}: {reason}", hint="`sms key create` creates the keys of the site") from error


def read_record(folder: Path) -> Record:
    """Return the record of a folder; an empty one if there is none.

    Raises:
        Refused: it is unreadable.
    """
    path = folder / RECORD
    if folder.exists() and not folder.is_dir():
        raise Refused(f"{folder} is not a folder", hint="name another one: -o DIR")
    try:
        if path.exists() and not path.is_file():
            raise ValueError
        found = json.loads(path.read_text())
        files = {str(name): str(digest) for name, digest in found["files"].items()}
        previous = {str(name): [str(digest) for digest in each] for name, each in found.get("previous", {}).items()}
        if not all(is_below(name) for name in (*files, *previous)):
            raise ValueError
        return Record(str(found["target"]), files, previous)
    except FileNotFoundError:
        return Record()
    except NotADirectoryError:
        raise Refused(f"{folder} is below a file", hint="name another folder: -o DIR") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Refused(f"{path} is not a record of an export", hint="name another folder: -o DIR") from None


def is_below(name: str) -> bool:
    """Return whether a name of a record is that of a file in the folder: others can have written the record."""
    return not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))


def _write_record(folder: Path, record: Record) -> None:
    content: dict[str, object] = {"target": record.target, "files": dict(sorted(record.files.items()))}
    if record.previous:
        content["previous"] = dict(sorted(record.previous.items()))
    replace_file(str(folder / RECORD), (json.dumps(content, indent=1) + "\n").encode(), MODE)


def _refuse_foreign(folder: Path, name: str, record: Record) -> None:
    path = folder / name
    links = [
        each
        for each in (path, path.with_name(f"{path.name}.new"), *path.parents)
        if each != folder and each.is_relative_to(folder) and each.is_symlink()
    ]
    if links:
        raise Refused(f"{links[0]} is a link", hint="name another folder: -o DIR")
    if not path.exists():
        return
    if not path.is_file():
        raise Refused(f"{path} is not a file", hint="name another folder: -o DIR")
    known = record.known(name)
    if _current(folder, name) not in known:
        what = "was changed since it was written" if known else "is not of an export"
        raise Refused(f"{path} {what}", hint="move it elsewhere, or name another folder: -o DIR")


def _current(folder: Path, name: str) -> str:
    """Return the digest of a file; empty if there is none."""
    path = folder / name
    try:
        return _digest(path.read_bytes()) if path.is_file() else ""  # a pipe would be waited for
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
