"""ipmitool: switches a machine off for sure. The password is in a file, never in an argv."""

from __future__ import annotations

import time

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.tools.programs import has_program

LOOK_S = 1
ANSWER_S = 30
"""Seconds for one question: ipmitool asks again by itself."""


def ipmi_argv(address: str, user: str, password_file: str, *words: str) -> tuple[str, ...]:
    """An ipmitool command."""
    return ("ipmitool", "-I", "lanplus", "-H", address, "-U", user, "-f", password_file, *words)


def power_off(host: Host, address: str, user: str, password_file: str, *, timeout_s: float) -> None:
    """Switch it off, at once, and wait until the controller says that it is.

    Args:
        host: where ipmitool runs, and the file lies.

    Raises:
        SmsError: it is not known to be off.
    """
    if not has_program(host, "ipmitool"):
        raise SmsError("ipmitool is not installed", hint="apt install ipmitool, or dnf install ipmitool")
    deadline = time.monotonic() + timeout_s

    def ask(*words: str) -> str:
        try:
            return host.run(*ipmi_argv(address, user, password_file, *words), timeout=ANSWER_S).text
        except CommandError as error:
            raise SmsError(
                f"the controller {address}: {error.message}", hint="are address, user and password right?"
            ) from error

    if not ask("chassis", "power", "status").endswith("is off"):
        ask("chassis", "power", "off")
    while True:
        late = time.monotonic() > deadline
        try:
            state = ask("chassis", "power", "status")
        except SmsError:
            if late:
                raise
            state = ""  # controllers are slow to answer while they switch
        if state.endswith("is off"):
            return
        if late:
            raise SmsError(f"the controller {address}: after {timeout_s:g} s: {state}", hint="look at the machine")
        time.sleep(LOOK_S)
