"""ipmitool: switch a machine off and verify it. The password is in a file, never in an argv."""

from __future__ import annotations

import time

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.tools.programs import has_program

POLL_S = 1
ANSWER_S = 30
"""Time limit of one command in seconds; ipmitool retries itself."""


def ipmi_argv(address: str, user: str, password_file: str, *arguments: str) -> tuple[str, ...]:
    """Return the argv of an ipmitool command."""
    return ("ipmitool", "-I", "lanplus", "-H", address, "-U", user, "-f", password_file, *arguments)


def power_off(host: Host, address: str, user: str, password_file: str, *, timeout_s: float) -> None:
    """Switch a machine off hard and wait until its controller reports it off.

    Args:
        host: the host that runs ipmitool and has the password file.

    Raises:
        SmsError: the machine could not be verified to be off.
    """
    if not has_program(host, "ipmitool"):
        raise SmsError("ipmitool is not installed", hint="apt install ipmitool, or dnf install ipmitool")
    deadline = time.monotonic() + timeout_s

    def run(*arguments: str) -> str:
        try:
            return host.run(*ipmi_argv(address, user, password_file, *arguments), timeout=ANSWER_S).text
        except CommandError as error:
            raise SmsError(
                f"the controller {address}: {error.message}", hint="check address, user and password"
            ) from error

    if not run("chassis", "power", "status").endswith("is off"):
        run("chassis", "power", "off")
    while True:
        late = time.monotonic() > deadline
        try:
            state = run("chassis", "power", "status")
        except SmsError:
            if late:
                raise
            state = ""  # controllers may not answer while they switch
        if state.endswith("is off"):
            return
        if late:
            raise SmsError(f"the controller {address}: after {timeout_s:g} s: {state}", hint="check the machine")
        time.sleep(POLL_S)
