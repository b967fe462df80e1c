"""What one part of a site says for another."""

from __future__ import annotations

from pathlib import Path

from appliance.config.model import Site

SYNC_PORT = 8443
SYNC_PATH = "/sms/v1/sync"
TLS_FILES = {"tls_ca": "ca.pem", "tls_cert": "services.pem", "tls_key": "services.key"}
"""The container's secrets, and what `sms init` has made of them in the folder tls/ beside the site file."""


def fill_provisioning(site: Site, folder: Path) -> Site:
    """A site with a provisioning VM takes its files from there, with the certificates of the site's own authority.

    What the site file says itself stays. ``folder`` is the site file's.
    """
    if site.provisioning is None:
        return site
    changes: dict[str, object] = {}
    if site.filesync.server is None:
        server = f"https://{site.provisioning.address.ip}:{SYNC_PORT}{SYNC_PATH}"
        changes["filesync"] = site.filesync.model_copy(update={"server": server})
    tls = {name: folder / "tls" / file for name, file in TLS_FILES.items()}
    missing = {name: path for name, path in tls.items() if getattr(site.secrets, name) is None}
    if missing:
        changes["secrets"] = site.secrets.model_copy(update=missing)
    return site.model_copy(update=changes)
