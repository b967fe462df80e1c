"""``sms image push`` and ``rollback``: choose the node image that the provisioning VM serves."""

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
from appliance.operations.vm.client import open_api, read_answer, read_list, tls_folder
from appliance.plan.nodes.image import FILES
from appliance.provision.payloads import CurrentImage, NodeImage, PresentImage, StoredPart
from appliance.tools.provision import Api, VmUnreachable
from appliance.tools.sealed import MANIFEST, SIGNATURE, check_seal

BASE = "/sms/v1/images"
TRIES = 5
"""Number of times to resume an upload that makes no progress."""


@dataclass(frozen=True)
class PushedImage:
    """The image that nodes of a profile boot from now on; ``removed``: digests of images removed from the VM."""

    profile: str
    digest: str
    fresh: bool
    sent_bytes: int
    removed: tuple[str, ...] = ()


def push_node(cluster: Cluster, name: str, *, keep: int = 3) -> PushedImage:
    """Upload the current image of a profile to the VM and make nodes boot it; resumes an interrupted upload.

    Args:
        keep: how many of the profile's images the VM keeps at least; images in use are always kept.

    Raises:
        Refused: the image was not built, is not sealed with a key of the site, contains another CA than the site's, or
            does not fit into the VM.
        SmsError: the VM does not answer, or the upload is corrupt; the VM serves the same image as before.
    """
    find_profile(cluster, name)
    digest = current_digest(nodes_folder(cluster) / name)
    if digest is None:
        raise Refused(f"no image of {name} has been built", hint=f"sms image build {name}")
    folder = nodes_folder(cluster) / name / digest
    with cluster.env.progress.step("verify the image's seal") as step:
        files = {each: size for each, (_, size) in check_seal(folder, cluster.site.signing.public_keys).files.items()}
        step.detail(digest[:12])
    check_ca(folder, tls_folder(cluster) / "ca.pem", name)
    files |= {each: (folder / each).stat().st_size for each in (MANIFEST, SIGNATURE)}
    api = open_api(cluster)
    place = f"{BASE}/{quote(name)}/{digest}"
    image = read_answer(PresentImage, api.request("GET", place))
    sent = 0
    if not image["whole"]:
        with cluster.env.progress.step(f"upload {name} to the provisioning VM") as step:
            total = sum(files.values())
            upload = Upload(api, place, folder, files, lambda done: step.moved(done, total))
            sent = upload.run()
    with cluster.env.progress.step("verify it in the VM, and make it current"):
        done = read_answer(CurrentImage, api.request("POST", place, {"keep": keep}, timeout_s=600))
    return PushedImage(name, digest, not image["whole"], sent, tuple(done["removed"]))


def check_ca(folder: Path, authority: Path, name: str) -> None:
    """Raise Refused if an image's manifest has another CA than the site's: its nodes would not trust the VM."""
    built_with = json.loads((folder / MANIFEST).read_text()).get("ca")
    try:
        now = hashlib.sha256(authority.read_bytes()).hexdigest()
    except OSError as error:
        raise Refused(f"cannot read {authority}: {error.strerror}", hint="`sms key ca create` creates it") from error
    if built_with and built_with != now:  # older images have no CA in their manifests
        raise Refused(
            f"the image of {name} was built with another CA than {authority}: its nodes would not trust the VM",
            hint=f"sms image build {name}",
        )


class Upload:
    """A resumable upload of an image. The manifest is sent first: the VM accepts only the files that it lists."""

    def __init__(self, api: Api, place: str, folder: Path, files: dict[str, int], moved: Any) -> None:
        self.api, self.place, self.folder, self.files, self.moved = api, place, folder, files, moved
        self.sent = 0

    def run(self) -> int:
        """Send what the VM does not have yet. Returns the number of bytes sent.

        Raises:
            VmUnreachable: the connection fails repeatedly.
            Refused, SmsError: the VM rejects the upload.
        """
        most, tries = -1, TRIES
        while True:
            try:
                here = read_answer(PresentImage, self.api.request("GET", self.place))["arrived"]
                # Progress resets the number of tries. The manifest does not count: it is sent again each time.
                had = sum(here.get(name, 0) for name in FILES)
                most, tries = max(most, had), TRIES if had > most else tries
                self._send_missing(here)
                return self.sent
            except VmUnreachable:
                tries -= 1
                if not tries:
                    raise
                time.sleep(1)

    def _send_missing(self, here: dict[str, int]) -> None:
        done = 0
        for name in (MANIFEST, SIGNATURE, *FILES):
            size = self.files[name]
            # The same root sealed again has another manifest.
            offset = here.get(name, 0) if name in FILES and here.get(name, 0) <= size else 0
            if offset < size:
                self._send(name, offset, size, done)
            done += size
            self.moved(done)

    def _send(self, name: str, offset: int, size: int, done: int) -> None:
        def on_sent(count: int) -> None:
            self.moved(done + offset + count)

        with (self.folder / name).open("rb") as stream:
            stream.seek(offset)
            put = f"{self.place}/{name}?offset={offset}"
            answer = read_answer(StoredPart, self.api.send(put, stream, size - offset, sent=on_sent))
        self.sent += size - offset
        if answer["bytes"] != size:
            raise SmsError(f"{answer['bytes']} of {size} bytes of {name} arrived", hint="run it again")


def rollback_node(cluster: Cluster, name: str) -> dict[str, str]:
    """Make nodes of a profile boot the previous image. Returns the digests of both.

    Raises:
        Refused: there is no previous image, or no such profile.
        SmsError: the VM does not answer.
    """
    find_profile(cluster, name)
    return read_answer(dict[str, str], open_api(cluster).request("POST", f"{BASE}/{quote(name)}/rollback"))


def query_images(cluster: Cluster) -> tuple[list[NodeImage], str]:
    """Return the images in the VM, and the error message if the query failed."""
    try:
        return read_list(NodeImage, open_api(cluster).request("GET", BASE), "images"), ""
    except SmsError as error:
        return [], error.message
