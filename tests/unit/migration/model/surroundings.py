"""What the real code of the model's programs gets instead of its surroundings: effects of the model."""

from __future__ import annotations

import io
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

from appliance.agent import endpoint, machine, migration_resume, migration_source, migration_target
from appliance.agent.endpoint import HostState, Instance
from appliance.agent.protocol import Busy as AgentBusy
from appliance.agent.protocol import Problem
from appliance.errors import Busy, Refused, SmsError
from appliance.operations import identity, lease
from appliance.operations.migration import copy, failover, inspection, migrate, rollback, steps, switch
from appliance.operations.migration import start as migration_start
from appliance.operations.migration.state import Migration, MigrationResult
from appliance.operations.overlay import create, generation, newest, overlay
from appliance.operations.services import generation as known_generation
from appliance.operations.services import guard, start, stop, unfinished
from appliance.operations.snapshots import restore
from appliance.shared.lease import SwapLease
from appliance.shared.overlay import MarkOverlay
from tests.unit.migration.model import fakes
from tests.unit.migration.model.engine import effect
from tests.unit.migration.model.fakes import FakeEndpoint
from tests.unit.migration.model.programs import BEGIN, FENCED, IMAGE, SHARED, STARTING, begin

UUID_A, UUID_B = (f"{letter * 8}-0000-4000-8000-{letter * 12}" for letter in "ab")


def _lock_agent(path: str) -> Any:
    return _HostLock(path.partition(":")[0])


class _HostLock:
    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        try:
            effect("lock", self.name, "lock")
        except Busy:
            raise AgentBusy("another sms is at work on this host") from None

    def __exit__(self, *_: object) -> None:
        effect("unlock", self.name, "lock")


def _find_agent_instance(name: str) -> Any:
    name = name.partition(":")[0]
    found = effect("find_instance", name)
    return found and _instance(name, found[0])


def _instance(name: str, serial: int) -> Instance:
    return Instance(fakes.pid_of(name, serial))


def _name(instance: Instance) -> str:
    return getattr(instance, "name", "") or "ab"[instance.pid // 10]


def _ports(instance: Instance, names: Any) -> dict[str, str]:
    if not effect("find_instance", _name(instance)):
        raise Problem("the other end of eth0 is not on this host")
    return {"eth0": f"{_name(instance)}:p0"}


def _set_bridges(ports: dict[str, str | None], *, timeout: float = 60) -> None:
    for port, bridge in ports.items():
        name = port.partition(":")[0]
        fakes.as_problem("attach", name, bridge is not None, effect("clock") if timeout == 1 else None)


def _open_mark(path: str, _: str) -> io.BytesIO:
    data = effect("read_mark", path.partition(":")[0])
    if data is None:
        raise FileNotFoundError(path)
    return io.BytesIO(data)


class AgentSwap(SwapLease):
    """A write of a lease file by an agent."""

    def perform(self, *_: Any) -> str:
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        outcome: str = effect("swap", self.path.partition(":")[0], SwapLease(**facts))
        return outcome


class AgentMark(MarkOverlay):
    """A generation mark that an agent writes."""

    def perform(self, *_: Any) -> bool:
        effect("mark_overlay", self.path.partition(":")[0], self.generation)
        return True


def _record_event(state: HostState, event: str, **_: Any) -> None:
    if event in fakes.RUN_EVENTS:
        effect("note", state.request.host, None)


def _probe_start(*_: Any, **__: Any) -> dict[str, float]:
    if not effect("works"):
        raise SmsError("a service does not answer")
    return {}


def _open_agents(cluster: Any, inspected: Any, image: Any, progress: Any, stack: ExitStack) -> Migration:
    generation = inspected.lease.generation
    ends = []
    for agent, host in (("source", inspected.source), ("target", inspected.target)):
        effect("open", host.name, agent, begin(generation, inspected.pid))
        one = FakeEndpoint(host, agent)
        stack.callback(one.wait)
        stack.callback(one.close)
        one.send(*BEGIN)
        one.receive("ready")
        ends.append(one)
    source, target = ends
    result = MigrationResult(source.name, target.name, "image", generation + 1, shared=SHARED[0])
    return Migration(cluster, inspected, image, progress, source, target, result)  # type: ignore[arg-type]


def _exchange_offers(migration: Any) -> None:
    """The copy: both agents note that they have begun."""
    migration.source.send("offer")
    migration.source.receive("offer")
    migration.target.send("build")
    migration.target.receive("wanted")


def _restore(cluster: Any, host: Any, selector: str, progress: Any, *, fenced: Any = ()) -> Any:
    with overlay.keep_stopped(cluster, host, fenced=fenced) as held:
        effect("restore", host.name, int(selector))
        marked = restore.restored_generation(held, host.name, failover=bool(fenced))
        generation.mark_overlay(cluster, host, marked)
    return SimpleNamespace(kept=None)


def _find_snapshot(listing: Any, _: str) -> Any:
    if not listing.snapshots:
        raise Refused("there is none")
    return listing.snapshots[-1]


def _replace(cluster: Any, host: Any, chosen: Any, *_: Any) -> Any:
    effect("restore", host.name, chosen["number"])
    return SimpleNamespace(same=True)


def _decide(real: Any) -> Any:
    """A user has decided that the restored overlay is the newest one, from the write of the lease file on."""

    def set_last(host: Any, *args: Any, **options: Any) -> Any:
        result = real(host, *args, **options)
        effect("decided", host.name)
        return result

    return set_last


def _verify_image(cluster: Any, host: Any, *_: Any) -> Any:
    if effect("arp", host.name):
        raise Refused("the services container already runs on another host: its MAC address answers")
    return IMAGE


def _ready_overlay(cluster: Any, host: Any, *_: Any) -> None:
    if not overlay.check_overlay(cluster, host):
        effect("create", host.name, "img", (0, 0), "new")


def _take_lease(real: Any) -> Any:
    def take(host: Any, leases: Any, *args: Any, **options: Any) -> Any:
        taken = real(host, leases, *args, **options)
        effect("taken", host.name, bool(leases.unreachable))
        return taken

    return take


def _find_restored(cluster: Any, host: Any, **known: Any) -> Any:
    """Find an interrupted failover. A start that finds one reports the loss, as the failover would have done."""
    found = unfinished.find_restored(cluster, host, **known)
    if found:
        effect("lost", host.name)
    return found


def _fence_source(migration: Any) -> None:
    effect("takes_over")
    if FENCED[0]:
        effect("fence", migration.source.name)


def nothing(*_: Any, **__: Any) -> Any:
    """Stands for what the model leaves out."""
    return ""


def _list_snapshots(cluster: Any, host: Any, **_: Any) -> Any:
    keys = ("number", "generation", "sequence", "taken", "host", "contents")
    found = [dict(zip(keys, one, strict=True)) for one in effect("snapshots", host.name)]
    return SimpleNamespace(
        snapshots=[{**one, "health": {"ok": True}, "reason": "", "uuid": ""} for one in found],
        host=host.name,
        broken=(),
        foreign=(),
        unknown=False,
    )


def _read_history(cluster: Any, host: Any) -> list[dict[str, Any]]:
    return [dict(line) for line in effect("history", host.name)]


CLOCK, AGENT_CLOCK, FILES = fakes.Clock(), fakes.AgentClock(), fakes.AgentFiles()
TOOLS = SimpleNamespace(
    users_of=lambda host, path: ["loop"] if effect("in_use", host.name, fakes.split(path)[1]) else [],
    shut_down=lambda host, path, python: effect("services", host.name, False),
    rename=lambda host, one, two: effect("rename", host.name, fakes.split(one)[1], fakes.split(two)[1]),
    has_name_like=lambda host, *_: effect("stale", host.name),
    detach=lambda host, ports, down: effect("attach", host.name, False, None),
    find_ports=lambda host, pid: {},
    perform=fakes.perform,
    call=fakes.call_agent,
    query=fakes.call_agent,
    note=fakes.note,
)
SESSIONS = SimpleNamespace(close=nothing, reopen=nothing, wait_until_noticed=nothing, wait_until_read=nothing)


@contextmanager
def surroundings(*, shared: bool, fenced: bool = True) -> Any:
    """Replace what real code uses by effects of the model."""
    SHARED[0], FENCED[0] = shared, fenced
    with ExitStack() as stack:

        def put(place: Any, **values: Any) -> None:
            for key, value in values.items():
                stack.enter_context(mock.patch.object(place, key, value))

        real_take = start._take_lease
        for module in (lease, start, stop, guard, failover, switch, copy, steps, migration_start, rollback):
            put(module, time=CLOCK)
        for module in (lease, start, stop, inspection):
            put(module, ThreadPoolExecutor=fakes.Serial)
        for module in (start, stop, failover):
            put(module, check_programs=nothing)
        for module in (start, stop, guard, failover):
            put(module, note=fakes.note)
        for module in (start, stop, guard, overlay, inspection, unfinished, create):
            put(module, find_instance=fakes.find_instance)
        put(lease, agent=TOOLS, instance_name=lambda site: "sms")
        put(unfinished, agent=TOOLS, time=CLOCK, note=fakes.note, read_history=_read_history)
        put(
            start,
            image_of_unfinished=lambda *_: None,
            check_networks=nothing,
            refuse_deployed=nothing,
            _verify_image=_verify_image,
        )
        put(start, open_mirror=nothing, ready_overlay=_ready_overlay, _wait_for_services=_probe_start)
        put(start, _start_instance=lambda cluster, host, *_: effect("start_instance", host.name, True, 0))
        put(start, record_start=nothing, install_unit=nothing, _take_lease=_take_lease(real_take))
        put(start, start_guard=lambda cluster, host, progress: effect("start_guard", host.name))
        put(start, find_restored=_find_restored)
        put(start, read_note=nothing, trust=lambda *_: IMAGE, running_mark=nothing, overlay_mark=nothing)
        put(start, archive_for=nothing, check_confinement=nothing, is_confined=lambda *_: True)
        put(start, query_age=nothing)
        put(stop, find_second=lambda *_: "")
        put(stop, stop_guard=lambda cluster, host: effect("stop_guard", host.name), close_mirror=nothing)
        put(stop, _warn=nothing, stop_gateway=lambda *_, **__: False)
        put(start, stop_gateway=nothing)
        put(stop, stop_argv=lambda *_: ("stop-instance",), stop_timeout=lambda services: 1, ext3=TOOLS)
        put(overlay, is_linked=lambda *_: False, need_space=nothing, ext3=TOOLS, opened=_opened)
        put(create, check_programs=nothing, opened=_opened, trust=nothing, deliver=lambda *_: (), seeded_with=nothing)
        put(create, overlay_mark=nothing, archive_for=nothing, ready_overlay=_ready_overlay)
        put(generation, time=CLOCK, ThreadPoolExecutor=fakes.Serial, is_linked=lambda *_: False, ext3=TOOLS)
        put(generation, files=TOOLS, agent=TOOLS, start_note_path=lambda cluster: "/note")
        put(known_generation, agent=TOOLS, store=nothing, read_note=lambda *_: None, read_history=_read_history)
        put(identity, note=nothing, agent=TOOLS, new_uuid=lambda: {"a": UUID_A, "b": UUID_B}[STARTING[0]])
        put(migration_target, MarkOverlay=AgentMark)
        put(guard, Path=fakes.OwnPath, ports=TOOLS, ext3=TOOLS)
        put(failover, check_fence=nothing, fence=lambda admin: effect("fence", admin.name), check_networks=nothing)
        put(failover, deliver=lambda *_: (), trust=lambda *_: IMAGE, try_confinement=nothing)
        put(failover, _count_jobs=nothing, restore=_restore, read_deployed=nothing)
        put(failover, list_snapshots=_list_snapshots, read_history=_read_history)
        put(restore, check_programs=nothing, list_snapshots=_list_snapshots, find_snapshot=_find_snapshot)
        put(restore, _replace=_replace, uuid_of=nothing)
        put(newest, set_last=_decide(lease.set_last))
        put(migrate, history=TOOLS, remove_isolated=nothing)
        put(inspection, record_start=nothing, install_unit=nothing)
        put(inspection, start_guard=lambda cluster, host, progress: effect("start_guard", host.name))
        put(migrate, stop_guard=lambda cluster, host: effect("stop_guard", host.name))
        put(steps, open_agents=_open_agents, list_jobs=lambda migration: {}, copy_overlay=_exchange_offers)
        put(steps, catch_up=nothing, open_mirror=nothing)
        for module in (inspection, migrate):
            put(module, close_idle_mirror=nothing)
        put(unfinished, _reopen_mirror=nothing, close_idle_mirror=nothing)
        put(migration_start, start_argv=lambda *_, **__: ("start-isolated", ""), needs_outside=lambda services: ())
        put(migration_start, _check_confined=nothing)
        put(rollback, _fence_source=_fence_source, inside_argv=lambda *_: ("probe",))
        put(endpoint, find_instance=_find_agent_instance, set_bridges=_set_bridges, run=fakes.run_command)
        put(endpoint, is_attached=_is_attached, wait_until_unused=_wait_until_unused, find_mac=_find_mac, time=CLOCK)
        put(endpoint, read_file=lambda path: effect("read_lease", path.partition(":")[0]))
        put(endpoint, ports_locked=_opened)
        put(endpoint, read_connections=lambda _: [], read_neighbours=lambda _: [])
        put(endpoint, load_connections=lambda *_: "", load_neighbours=nothing)
        put(Instance, ports=_ports, announce=nothing)
        put(Instance, stop_services=lambda one, names, _: _services(one, names, run=False))
        put(Instance, start_services=lambda one, names: _services(one, names, run=True))
        put(HostState, record_event=_record_event)
        put(endpoint, replace_file=lambda path, data: effect("mark", path.partition(":")[0], data))
        put(endpoint, remove_state=lambda path: effect("mark", path.partition(":")[0], None))
        stack.enter_context(mock.patch.object(endpoint, "open", _open_mark, create=True))
        put(migration_source, time=AGENT_CLOCK, os=FILES, DatagramCounter=nothing, private_mounts=nothing)
        put(migration_resume, host_locked=_lock_agent, private_mounts=nothing)
        put(migration_source, host_locked=_lock_agent, ThreadPoolExecutor=fakes.Serial, sync_folder=nothing)
        put(migration_source, LogSessions=lambda *_: SESSIONS)
        put(migration_target, boot_time=lambda: 10.0 * effect("clock"), os=FILES, sync_folder=nothing)
        put(migration_target, time=fakes.PollClock(), ThreadPoolExecutor=fakes.Serial)
        for module in (machine, migration_source, migration_target):
            put(module, protocol=SimpleNamespace(step=nothing, note=nothing))
        put(endpoint, SwapLease=AgentSwap)
        yield


@contextmanager
def _opened(*_: Any) -> Any:
    yield None


def _find_mac(bridge: str, address: str) -> str:
    return "mac" if effect("arp", bridge.partition(":")[0]) else ""


def _is_attached(port: str, _: str) -> bool:
    found = effect("find_instance", port.partition(":")[0])
    return bool(found and found[1])


def _wait_until_unused(path: str, patience_s: float) -> None:
    if effect("in_use", *fakes.split(path)):
        raise Problem("it is still open")


def _services(instance: Instance, names: Any, *, run: bool) -> None:
    if "db" in names:
        effect("services", _name(instance), run)
