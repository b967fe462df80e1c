"""Find the site file and the folder of the site's own services. Imports little: `sms classify` needs no more."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.errors import ConfigError

SERVICES_FOLDER = "services.d"
"""Folder of the site's own services, beside the site file."""


def find_site(option: Path | None) -> Path:
    """Return the site file: the first of ``--site``, $SMS_SITE, ./sms.yaml and /etc/sms/sms.yaml."""
    if option is not None:
        return option
    if named := os.environ.get("SMS_SITE"):
        return Path(named)
    places = (Path("sms.yaml"), Path("/etc/sms/sms.yaml"))
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f"no site file: --site and $SMS_SITE are not set, and neither {' nor '.join(map(str, places))} exists",
        hint="write one with `sms init --profile lab`, openhpc or cray-ex",
    )


def services_folder(option: Path | None) -> Path | None:
    """Return the folder with the site's own services; None if there is no site file, or none of them."""
    try:
        folder = find_site(option).absolute().parent / SERVICES_FOLDER
    except ConfigError:
        return None
    return folder if any(folder.glob("*.yaml")) else None
