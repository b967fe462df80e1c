"""Power and boot of one system by Redfish: asked for, and waited for until the controller says that it is so."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from appliance.errors import SmsError
from appliance.tools.redfish import (
    ACTION,
    ANSWER_S,
    LOOK_S,
    OFF,
    Controller,
    Conversation,
    Denied,
    Untrusted,
    converse,
    find_system,
    link_of,
)

ON = "On"
WISHES: dict[str, tuple[tuple[str, ...], str]] = {
    "on": (("On", "ForceOn", "PushPowerButton"), ON),
    "off": (("ForceOff",), OFF),
    "soft-off": (("GracefulShutdown", "PushPowerButton"), OFF),
    "reset": (("ForceRestart", "PowerCycle"), ON),
}
"""What is wished for: the reset types that do it, the best first, and the power that it ends with."""
TARGETS = {"pxe": "Pxe", "http": "UefiHttp", "disk": "Hdd", "uefi": "UefiTarget", "none": "None"}
"""Where a boot may lead, in our words and in Redfish's."""


def read_power(controller: Controller, *, timeout_s: float = 30) -> str:
    """``On``, ``Off``, or as the controller says.

    Raises:
        SmsError: it does not answer, or says nothing of it.
    """
    with converse(controller, timeout_s=timeout_s) as asked:
        return _state(asked.ask("GET", find_system(asked)), controller)


def _state(system: Mapping[str, Any], controller: Controller) -> str:
    state = system.get("PowerState")
    if not isinstance(state, str) or not state.isprintable():
        raise SmsError(f"{controller.name} says nothing of the power", hint="is it the system's path?")
    return state[:40]


def switch(controller: Controller, wish: str, *, timeout_s: float) -> bool:
    """Have the power as ``wish`` of `WISHES` says, and wait until it is so; say whether anything had to be done.

    Raises:
        SmsError: it is not known to be so.
    """
    end = WISHES[wish][1]
    # The answers themselves take time, and a question a second is asked in between.
    with converse(controller, timeout_s=timeout_s + 4 * ANSWER_S, questions=20 + 2 * int(timeout_s)) as asked:
        deadline = time.monotonic() + timeout_s
        path = find_system(asked)
        system = asked.ask("GET", path)
        state = system.get("PowerState")
        if state == end and wish != "reset":
            return False
        if wish == "reset" and state == OFF:
            wish = "on"
        _ask_for(asked, path, system, wish, deadline)
        _wait(asked, path, end, deadline, timeout_s)
    return True


def _ask_for(asked: Conversation, path: str, system: Mapping[str, Any], wish: str, deadline: float) -> None:
    """The reset of the type that the controller knows; one that knows no restart is switched off and on."""
    action = _part(_part(system, "Actions"), ACTION)
    target = str(action.get("target") or f"{path}/Actions/ComputerSystem.Reset")
    known = _allowed(asked, action)
    kinds = WISHES[wish][0]
    kind = next((kind for kind in kinds if kind in known), "" if known else kinds[0])
    if not kind and wish == "reset":
        _ask_for(asked, path, system, "off", deadline)
        _wait(asked, path, OFF, deadline, deadline - time.monotonic())
        wish, kinds = "on", WISHES["on"][0]
        kind = next((kind for kind in kinds if kind in known), "")
    if not kind:
        raise SmsError(
            f"{asked.controller.name} knows no reset for {wish}: {', '.join(known)[:200]}", hint="sms node power --help"
        )
    asked.ask("POST", target, {"ResetType": kind})


def _part(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def _allowed(asked: Conversation, action: Mapping[str, Any]) -> list[str]:
    """Reset types that the controller says it takes; none where it does not say."""
    listed = action.get("ResetType@Redfish.AllowableValues")
    info = action.get("@Redfish.ActionInfo")
    if listed is None and isinstance(info, str) and (path := link_of({"@odata.id": info})):
        try:
            parameters = asked.ask("GET", path).get("Parameters")
        except SmsError:
            return []
        for one in parameters if isinstance(parameters, list) else []:
            if isinstance(one, Mapping) and one.get("Name") == "ResetType":
                listed = one.get("AllowableValues")
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []


def _wait(asked: Conversation, path: str, end: str, deadline: float, timeout_s: float) -> None:
    while True:
        late = time.monotonic() > deadline
        try:
            state = asked.ask("GET", path).get("PowerState")
        except (Denied, Untrusted):
            raise
        except SmsError:
            if late:
                raise
            state = None  # controllers are slow to answer while they switch
        if state == end:
            return
        if late:
            raise SmsError(
                f"{asked.controller.url}: after {timeout_s:g} s its power is {str(state)[:40]}",
                hint="look at the machine",
            )
        time.sleep(LOOK_S)


def set_boot(controller: Controller, target: str, *, path: str = "", mode: str = "", timeout_s: float = 60) -> None:
    """Have the next boot, and only that, lead to ``target`` of `TARGETS`.

    Args:
        path: the device path for `uefi`, as the firmware knows it.
        mode: ``UEFI`` or ``Legacy``; as it is where none is given.

    Raises:
        SmsError: the controller did not take it.
    """
    boot = {
        "BootSourceOverrideEnabled": "Disabled" if target == "none" else "Once",
        "BootSourceOverrideTarget": TARGETS[target],
    }
    if mode:
        boot["BootSourceOverrideMode"] = mode
    if path:
        boot["UefiTargetBootSourceOverride"] = path
    with converse(controller, timeout_s=timeout_s) as asked:
        system = find_system(asked)
        said = _part(asked.ask("GET", system), "Boot")
        known = said.get("BootSourceOverrideTarget@Redfish.AllowableValues")
        if isinstance(known, list) and target != "none" and TARGETS[target] not in known:
            words = ", ".join(str(one)[:40] for one in known[:20])
            raise SmsError(
                f"{controller.name} cannot boot from {TARGETS[target]}: {words}", hint="sms node boot --help"
            )
        asked.ask("PATCH", system, {"Boot": boot})
