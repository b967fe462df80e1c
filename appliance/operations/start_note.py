"""The start note of a host: written by each start, read by other verbs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.shared.lease import Lease
from appliance.shared.records import RecordError, from_json, to_json
from appliance.tools import files
from appliance.tools.sha256 import is_digest

PATH = re.compile(r"(/(?!\.\.?(/|$))[^/\x00-\x1f\x7f]+)+|")
"""An absolute path that leads through no parent folder."""


@dataclass(frozen=True)
class StartNote:
    """The record that a host keeps of the instance started last.

    Image, generation of the lease and time of a start (Unix time, seconds).

    ``key`` identifies the image's contents, ``sha256`` is the digest of its file, ``signer`` the key that verified it.
    """

    image: str
    key: str
    sha256: str
    signer: str
    generation: int
    host: str
    started: float


def start_note_path(cluster: Cluster) -> str:
    """Return the path of the record on a host."""
    return f"{cluster.places.journal}/{cluster.site.cluster}.json"


def read_note(cluster: Cluster, host: Host) -> StartNote | None:
    """Return the record of the last start; None if it is missing or unreadable: the next start rewrites it."""
    return parse_note(host.read(start_note_path(cluster)))


def parse_note(data: bytes | None) -> StartNote | None:
    """Return the record in a file's bytes; None if there are none, or they are unreadable.

    Another host may have written it: the image is an absolute path, and its digest is one, if they are known.
    """
    try:
        found = from_json(StartNote, data) if data is not None else None
    except RecordError:
        return None
    sound = found and PATH.fullmatch(found.image) and (not found.sha256 or is_digest(found.sha256))
    return found if sound else None


def record_start(cluster: Cluster, host: Host, image: Image, lease: Lease) -> None:
    """Record the running image, for status and later verbs."""
    now = cluster.env.clock.time()
    note = StartNote(image.path, image.key, image.sha256, image.signer, lease.generation, host.name, now)
    host.write(start_note_path(cluster), to_json(note))
    current, (folder, _, name) = str(cluster.places.current), image.path.rpartition("/")
    if folder == str(cluster.places.images) and f"{folder}/{name}" != current:
        # The next start, such as after a reboot, must use the same image.
        files.link(host, current, name)
