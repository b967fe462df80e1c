"""Power and boot control of one system by Redfish; waits until the controller reports the new state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from appliance.errors import SmsError
from appliance.tools.redfish import (
    ACTION,
    ANSWER_S,
    OFF,
    POLL_S,
    Controller,
    Denied,
    RedfishClient,
    Untrusted,
    connect,
    find_system,
    link_of,
    part_of,
)

ON = "On"
RESETS: dict[str, tuple[tuple[str, ...], str]] = {
    "on": (("On", "ForceOn", "PushPowerButton"), ON),
    "off": (("ForceOff",), OFF),
    "soft-off": (("GracefulShutdown", "PushPowerButton"), OFF),
    "reset": (("ForceRestart", "PowerCycle"), ON),
}
"""Reset types of each action, in order of preference, and the resulting power state."""
TARGETS = {"pxe": "Pxe", "http": "UefiHttp", "disk": "Hdd", "uefi": "UefiTarget", "none": "None"}
"""Boot targets, and their names in Redfish."""


def read_power(controller: Controller, *, timeout_s: float = 30) -> str:
    """Return the power state: ``On``, ``Off``, or another value of the controller.

    Raises:
        SmsError: the controller does not answer, or does not report it.
    """
    with connect(controller, timeout_s=timeout_s) as client:
        return _state(client.request("GET", find_system(client)), controller)


def _state(system: Mapping[str, Any], controller: Controller) -> str:
    state = system.get("PowerState")
    if not isinstance(state, str) or not state.isprintable():
        raise SmsError(f"{controller.name} does not report the power state", hint="is it the system's path?")
    return state[:40]


def switch(controller: Controller, action: str, *, timeout_s: float) -> bool:
    """Perform ``action`` of `RESETS` and wait for the resulting power state; return whether anything was done.

    Raises:
        SmsError: the resulting state could not be verified.
    """
    end = RESETS[action][1]
    # Responses take time too, and the state is polled once per second.
    with connect(controller, timeout_s=timeout_s + 4 * ANSWER_S, max_requests=20 + 2 * int(timeout_s)) as client:
        deadline = time.monotonic() + timeout_s
        path = find_system(client)
        system = client.request("GET", path)
        state = system.get("PowerState")
        if state == end and action != "reset":
            return False
        if action == "reset" and state == OFF:
            action = "on"
        _request_reset(client, path, system, action, deadline)
        _wait(client, path, end, deadline, timeout_s)
    return True


def _request_reset(client: RedfishClient, path: str, system: Mapping[str, Any], action: str, deadline: float) -> None:
    """Request a reset of a type that the controller supports; without a restart type switch it off and on."""
    reset = part_of(part_of(system, "Actions"), ACTION)
    target = str(reset.get("target") or f"{path}/Actions/ComputerSystem.Reset")
    known = _allowed(client, reset)
    kinds = RESETS[action][0]
    kind = next((kind for kind in kinds if kind in known), "" if known else kinds[0])
    if not kind and action == "reset":
        _request_reset(client, path, system, "off", deadline)
        _wait(client, path, OFF, deadline, deadline - time.monotonic())
        action, kinds = "on", RESETS["on"][0]
        kind = next((kind for kind in kinds if kind in known), "")
    if not kind:
        raise SmsError(
            f"{client.controller.name} does not support {action}: {', '.join(known)[:200]}",
            hint="sms node power --help",
        )
    client.request("POST", target, {"ResetType": kind})


def _allowed(client: RedfishClient, action: Mapping[str, Any]) -> list[str]:
    """Return the supported reset types; empty if the controller does not list them."""
    listed = action.get("ResetType@Redfish.AllowableValues")
    info = action.get("@Redfish.ActionInfo")
    if listed is None and isinstance(info, str) and (path := link_of({"@odata.id": info})):
        try:
            parameters = client.request("GET", path).get("Parameters")
        except SmsError:
            return []
        for one in parameters if isinstance(parameters, list) else []:
            if isinstance(one, Mapping) and one.get("Name") == "ResetType":
                listed = one.get("AllowableValues")
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []


def _wait(client: RedfishClient, path: str, end: str, deadline: float, timeout_s: float) -> None:
    while True:
        late = time.monotonic() > deadline
        try:
            state = client.request("GET", path).get("PowerState")
        except (Denied, Untrusted):
            raise
        except SmsError:
            if late:
                raise
            state = None  # controllers may not answer while they switch
        if state == end:
            return
        if late:
            raise SmsError(
                f"{client.controller.url}: after {timeout_s:g} s its power state is {str(state)[:40]}",
                hint="check the machine",
            )
        time.sleep(POLL_S)


def set_boot(controller: Controller, target: str, *, path: str = "", mode: str = "", timeout_s: float = 60) -> None:
    """Set the target of the next boot only, one of `TARGETS`.

    Args:
        path: the device path for `uefi`, as the firmware knows it.
        mode: ``UEFI`` or ``Legacy``; empty leaves it unchanged.

    Raises:
        SmsError: the controller did not accept it.
    """
    boot = {
        "BootSourceOverrideEnabled": "Disabled" if target == "none" else "Once",
        "BootSourceOverrideTarget": TARGETS[target],
    }
    if mode:
        boot["BootSourceOverrideMode"] = mode
    if path:
        boot["UefiTargetBootSourceOverride"] = path
    with connect(controller, timeout_s=timeout_s) as client:
        system = find_system(client)
        current = part_of(client.request("GET", system), "Boot")
        known = current.get("BootSourceOverrideTarget@Redfish.AllowableValues")
        if isinstance(known, list) and target != "none" and TARGETS[target] not in known:
            supported = ", ".join(str(one)[:40] for one in known[:20])
            raise SmsError(
                f"{controller.name} cannot boot from {TARGETS[target]}: {supported}", hint="sms node boot --help"
            )
        client.request("PATCH", system, {"Boot": boot})
