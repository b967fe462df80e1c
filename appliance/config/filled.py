"""Defaults of one section of a site that depend on another section."""

from __future__ import annotations

from pathlib import Path

from appliance.config.model import Site

SYNC_PORT = 8443
SYNC_PATH = "/sms/v1/sync"
TLS_FILES = {"tls_ca": "ca.pem", "tls_cert": "services.pem", "tls_key": "services.key"}
"""Secrets of the container, and their files that `sms init` creates in the folder tls/ beside the site file."""


def fill_provisioning(site: Site, folder: Path) -> Site:
    """Configure file synchronisation from the provisioning VM, with certificates of the site's own CA.

    Explicit settings of the site file take precedence.

    Args:
        folder: the folder of the site file.
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
