"""``sms image push`` and ``rollback``: which node image the provisioning VM hands out."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance.errors import Refused, SmsError
from appliance.operations.context import Cluster
from appliance.operations.nodes.image import current_digest, find_profile, nodes_folder
from appliance.operations.vm.client import open_api, tls_folder
from appliance.plan.nodes.image import FILES
from appliance.progress import Progress
from appliance.tools.provision import Api, Away
from appliance.tools.sealed import MANIFEST, SIGNATURE, check_seal

BASE = "/sms/v1/images"
TRIES = 5
"""Times that a broken upload goes on without a byte more than before."""


@dataclass(frozen=True)
class Pushed:
    """What nodes of a profile boot from now on; ``removed`` are digests that the VM has no more."""

    profile: str
    digest: str
    fresh: bool
    sent_bytes: int
    removed: tuple[str, ...] = ()


def push_node(cluster: Cluster, name: str, progress: Progress, *, keep: int = 3) -> Pushed:
    """Bring the current image of a profile to the VM and let nodes boot it; an upload that broke off goes on.

    Args:
        keep: how many of the profile's images stay in the VM at least; those in use always do.

    Raises:
        Refused: it was not built or not sealed with a key of the site's, its nodes would believe another CA than the
            site's, or the VM has no room.
        SmsError: the VM does not answer, or it got other bytes than were sent; it hands out what it did before.
    """
    find_profile(cluster, name)
    digest = current_digest(nodes_folder(cluster) / name)
    if digest is None:
        raise Refused(f"no image of {name} has been built", hint=f"sms image build {name}")
    folder = nodes_folder(cluster) / name / digest
    with progress.step("hold the image against its seal") as step:
        files = {each: size for each, (_, size) in check_seal(folder, cluster.site.signing.public_keys).files.items()}
        step.detail(digest[:12])
    need_own_ca(folder, tls_folder(cluster) / "ca.pem", name)
    files |= {each: (folder / each).stat().st_size for each in (MANIFEST, SIGNATURE)}
    api = open_api(cluster)
    place = f"{BASE}/{quote(name)}/{digest}"
    told = api.ask("GET", place)
    sent = 0
    if not told["whole"]:
        with progress.step(f"bring {name} to the provisioning VM") as step:
            total = sum(files.values())
            upload = Upload(api, place, folder, files, lambda done: step.moved(done, total))
            sent = upload.run()
    with progress.step("hold it against its manifest there, and make it current"):
        done = api.ask("POST", place, {"keep": keep}, timeout_s=600)
    return Pushed(name, digest, not told["whole"], sent, tuple(done["removed"]))


def need_own_ca(folder: Path, authority: Path, name: str) -> None:
    """Raise Refused where an image's manifest names another CA than the site's: its nodes would not believe the VM."""
    built_with = json.loads((folder / MANIFEST).read_text()).get("ca")
    try:
        now = hashlib.sha256(authority.read_bytes()).hexdigest()
    except OSError as error:
        raise Refused(f"cannot read {authority}: {error.strerror}", hint="`sms key ca create` makes it") from error
    if built_with and built_with != now:  # images from before have none in their manifests
        raise Refused(
            f"the image of {name} was built with another CA than {authority}: its nodes would not believe the VM",
            hint=f"sms image build {name}",
        )


class Upload:
    """Files on their way to the VM, its manifest first: by that it knows what may come."""

    def __init__(self, api: Api, place: str, folder: Path, files: dict[str, int], moved: Any) -> None:
        self.api, self.place, self.folder, self.files, self.moved = api, place, folder, files, moved
        self.sent = 0

    def run(self) -> int:
        """Send what is not there yet; give the bytes that went.

        Raises:
            Away: it breaks off again and again.
            Refused, SmsError: the VM says no.
        """
        most, tries = -1, TRIES
        while True:
            try:
                here: dict[str, int] = self.api.ask("GET", self.place)["arrived"]
                # Progress gives a broken line new tries; that of the manifest, which is sent anew, is none.
                had = sum(here.get(name, 0) for name in FILES)
                most, tries = max(most, had), TRIES if had > most else tries
                self._send_missing(here)
                return self.sent
            except Away:
                tries -= 1
                if not tries:
                    raise
                time.sleep(1)

    def _send_missing(self, here: dict[str, int]) -> None:
        done = 0
        for name in (MANIFEST, SIGNATURE, *FILES):
            size = self.files[name]
            # Another seal of the same root has another manifest.
            offset = here.get(name, 0) if name in FILES and here.get(name, 0) <= size else 0
            if offset < size:
                self._send(name, offset, size, done)
            done += size
            self.moved(done)

    def _send(self, name: str, offset: int, size: int, done: int) -> None:
        def gone(count: int) -> None:
            self.moved(done + offset + count)

        with (self.folder / name).open("rb") as stream:
            stream.seek(offset)
            told = self.api.send(f"{self.place}/{name}?offset={offset}", stream, size - offset, sent=gone)
        self.sent += size - offset
        if told["bytes"] != size:
            raise SmsError(f"{told['bytes']} of {size} bytes of {name} arrived", hint="run it again")


def rollback_node(cluster: Cluster, name: str) -> dict[str, str]:
    """Let nodes of a profile boot the image that was current before; give the digests of both.

    Raises:
        Refused: there was none before, or no such profile.
        SmsError: the VM does not answer.
    """
    find_profile(cluster, name)
    told: dict[str, str] = open_api(cluster).ask("POST", f"{BASE}/{quote(name)}/rollback")
    return told


def ask_images(cluster: Cluster) -> tuple[list[dict[str, Any]], str]:
    """Images that the VM has, and why it does not tell, where it does not."""
    try:
        told: dict[str, Any] = open_api(cluster).ask("GET", BASE)
    except SmsError as error:
        return [], error.message
    return told["images"], ""
