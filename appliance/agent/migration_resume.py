"""Recovery of a killed migration on one of its hosts, or of a killed switch on its only host."""

from typing import Any, Dict

from appliance.agent.adopt_arrive import AdoptArrive
from appliance.agent.adopt_yield import AdoptYield
from appliance.agent.host_state import read_mark
from appliance.agent.migration_source import SECOND_S, MigrationSource
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import Busy, field, read_request
from appliance.agent.system import SYSTEM, System
from appliance.shared.locks import Locked, hold_lock
from appliance.shared.migration import MoveMark, SourceRequest, TargetRequest


def resume(request: Dict[str, Any], system: System = SYSTEM) -> Dict[str, Any]:
    """Recover from a killed run on this host, as source or as target: see ``HostState.save_state``."""
    with system.locked(field(request, "lock", str)):
        saved = read_mark(system, field(request, "mark", str))
        if saved is None and not field(request, "second_mark", str, ""):
            return {"found": ""}
        system.private_mounts()
        if saved is None:
            return recover_second(request, system)
        if saved.side == "arrive":
            return recover_saved(saved, system)
        kind = AdoptYield if saved.side == AdoptYield.SIDE else MigrationSource
        source = kind(read_request(SourceRequest, saved.request), None, system)
        if source.request.second:
            recover_second(request, system)  # the source decides by what it finds then
        source.recover(saved)
        facts = {"second": True} if source.request.second else {}
        return {"found": saved.state, "side": saved.side, "state": source.state, **facts}


def recover_second(request: Dict[str, Any], system: System) -> Dict[str, Any]:
    """Recover what the target of a switch on this host has left, once its agent has ended."""
    try:
        with hold_lock(field(request, "second_lock", str), wait_s=SECOND_S):
            return recover_target(field(request, "second_mark", str), system) or {"found": ""}
    except Locked:
        raise Busy("a switch is under way on this host")


def recover_target(mark: str, system: System) -> Dict[str, Any]:
    """Recover what a killed target has left; return the state that it stored, and the present one. The lock is held."""
    saved = read_mark(system, mark)
    return recover_saved(saved, system) if saved else {}


def recover_saved(saved: MoveMark, system: System) -> Dict[str, Any]:
    """Continue as ``MigrationTarget.recover``; return the state that was stored, and the present one."""
    request = read_request(TargetRequest, saved.request)
    target = (AdoptArrive if request.gives else MigrationTarget)(request, None, system)
    target.recover(saved)
    return {"found": saved.state, "side": "arrive", "state": target.state}
