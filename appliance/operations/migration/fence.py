"""Fencing: powers off a host that does not answer before another one takes over."""

from __future__ import annotations

from appliance.config.model import AdminHost, Redfish
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import read_password
from appliance.tools import ipmi, redfish
from appliance.tools.redfish_power import switch


def describe_fence(admin: AdminHost) -> str:
    """Return how a host is fenced, as text for the user; empty when the site file does not configure it."""
    fence = admin.fence
    if not fence:
        return ""
    if fence.command:
        return f"power it off with {fence.command[0]}"
    if fence.redfish:
        return f"power it off by Redfish at {fence.redfish.url} and wait until it is off"
    return f"power it off by IPMI at {fence.ipmi.address} and wait until it is off" if fence.ipmi else ""


def check_fence(admin: AdminHost) -> None:
    """Check that the site file configures fencing for the host, and that the password can be read.

    Raises:
        Refused: it does not, or it cannot.
    """
    if not describe_fence(admin):
        raise Refused(
            f"no fencing is configured for {admin.name}: two hosts must never run the services container",
            hint=f"set admin_hosts[].fence of {admin.name} in the site file; or power it off yourself, verify that it "
            "is off, and pass --i-have-fenced",
        )
    assert admin.fence
    if controller := admin.fence.redfish or admin.fence.ipmi:
        read_password(controller.password_file)


def fence(admin: AdminHost, here: Host) -> None:
    """Power off the host from ``here`` and verify that it is off.

    Raises:
        Refused: it is not known to be off.
    """
    check_fence(admin)
    assert admin.fence
    try:
        if admin.fence.command:
            here.run(*admin.fence.command, timeout=admin.fence.timeout_s)
        elif admin.fence.redfish:
            switch(_controller(admin.fence.redfish), "off", timeout_s=admin.fence.timeout_s)
        elif found := admin.fence.ipmi:
            timeout_s = admin.fence.timeout_s
            ipmi.power_off(here, found.address, found.user, str(found.password_file), timeout_s=timeout_s)
    except Refused:
        raise
    except SmsError as error:
        raise Refused(
            f"{admin.name} is not known to be off: {error.message}",
            hint=f"{error.hint + '; or p' if error.hint else 'P'}ower it off yourself, verify that it is off, and pass "
            "--i-have-fenced",
        ) from error


def _controller(settings: Redfish) -> redfish.Controller:
    password = read_password(settings.password_file)
    return redfish.Controller(settings.url, settings.user, password, settings.ca, settings.insecure)
