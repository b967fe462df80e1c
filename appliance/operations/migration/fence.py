"""Fencing: making sure that a host which does not answer is off before another takes its place."""

from __future__ import annotations

import socket
from pathlib import Path

from appliance.config.model import AdminHost, Redfish
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.tools import ipmi, redfish


def fence_way(admin: AdminHost) -> str:
    """How a host is fenced, for people; empty where the site does not say."""
    fence = admin.fence
    if not fence:
        return ""
    if fence.command:
        return f"run {fence.command[0]}, which makes sure that it is off"
    if fence.redfish:
        return f"power it off by Redfish at {fence.redfish.url}, and wait until it is off"
    return f"power it off by IPMI at {fence.ipmi.address}, and wait until it is off" if fence.ipmi else ""


def check_fence(admin: AdminHost) -> None:
    """Whether the site says how to fence the host, and what that takes is there.

    Raises:
        Refused: it does not, or is not.
    """
    if not fence_way(admin):
        raise Refused(
            f"nothing says how to make sure that {admin.name} is off: two hosts must never run the appliance",
            hint=f"set admin_hosts[].fence of {admin.name} in the site file; or switch it off yourself, look that it "
            "is, and say so: --i-have-fenced",
        )
    assert admin.fence
    if controller := admin.fence.redfish or admin.fence.ipmi:
        read_password(controller.password_file)


def read_password(path: Path) -> str:
    """The password in a file that only its owner may read.

    Raises:
        Refused: it cannot be read, others may read it, or it is empty.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read {path}: {error}", hint="the site file names it as password_file") from error
    if mode & 0o077:
        raise Refused(f"others may read the password in {path}", hint=f"chmod 600 {path}")
    if not text or "\n" in text:
        raise Refused(f"{path} does not hold one line with a password", hint="write the password into it, nothing else")
    return text


def fence(admin: AdminHost) -> None:
    """Switch the host off, and know that it is.

    Raises:
        Refused: it is not known to be off.
    """
    check_fence(admin)
    assert admin.fence
    here = Local(socket.gethostname())
    try:
        if admin.fence.command:
            here.run(*admin.fence.command, timeout=admin.fence.timeout_s)
        elif admin.fence.redfish:
            redfish.power_off(_controller(admin.fence.redfish), timeout_s=admin.fence.timeout_s)
        elif admin.fence.ipmi:
            _power_off_ipmi(here, admin)
    except Refused:
        raise
    except SmsError as error:
        raise Refused(
            f"{admin.name} is not known to be off: {error.message}",
            hint=f"{error.hint + '; or s' if error.hint else 'S'}witch it off yourself, look that it is, and say so: "
            "--i-have-fenced",
        ) from error


def _controller(settings: Redfish) -> redfish.Controller:
    password = read_password(settings.password_file)
    return redfish.Controller(settings.url, settings.user, password, settings.ca, settings.insecure)


def _power_off_ipmi(here: Host, admin: AdminHost) -> None:
    assert admin.fence and admin.fence.ipmi
    settings = admin.fence.ipmi
    ipmi.power_off(here, settings.address, settings.user, str(settings.password_file), timeout_s=admin.fence.timeout_s)
