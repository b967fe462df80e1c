"""The processes of the model: verbs, guards, and the agents of a migration. Each runs the real code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from appliance.agent.channel import Disconnected
from appliance.agent.migration_source import MigrationSource
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import Problem
from appliance.errors import Refused, SmsError
from appliance.operations import lease, preflight
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.operations.migration import failover, inspection, migrate, steps
from appliance.operations.migration.state import Inspected
from appliance.operations.overlay import create
from appliance.operations.services import start, stop
from appliance.operations.services.guard import Guard
from appliance.operations.services.start import StartOptions
from appliance.operations.snapshots import restore
from appliance.shared.migration import SourceRequest, TargetRequest
from tests.unit.migration.model.engine import effect, programs
from tests.unit.migration.model.hosts import CONFINED, IMAGE, UUIDS, ModelHost, ModelHosts, cluster_of_model
from tests.unit.migration.model.system import ModelChannel, ModelSystem, TargetSystem, as_problem, pid_of
from tests.unit.migration.model.world import MISSING

LOST = ("lost",)
"""The message of a channel that is broken or closed."""
SHARED, FENCED = [False], [True]
"""Whether both hosts use one folder of overlays, and whether fencing is configured."""


@contextmanager
def setting(*, shared: bool, fenced: bool) -> Iterator[None]:
    """Set what the programs of a scenario find."""
    before = SHARED[0], FENCED[0]
    SHARED[0], FENCED[0] = shared, fenced
    try:
        yield
    finally:
        SHARED[0], FENCED[0] = before


def make_cluster(name: str = "") -> Cluster:
    """Return the cluster for a run on a host."""
    cluster = cluster_of_model(fenced=FENCED[0])
    env = replace(cluster.env, new_uuid=lambda: UUIDS[name], hosts=ModelHosts(name))
    return replace(cluster, env=env) if name else cluster


def run_verb(work: Any) -> str:
    """Run a verb; its errors end it."""
    try:
        return work() or "done"
    except SmsError as error:
        return type(error).__name__


def run_start(name: str, boot: bool) -> str:
    """`sms start`; ``boot``: as at boot."""
    return run_verb(lambda: start.start(make_cluster(name), ModelHost(name), StartOptions(boot=boot)) and "")


def run_stop(name: str) -> str:
    """`sms stop`."""
    return run_verb(lambda: str(stop.stop(make_cluster(name), ModelHost(name))) and "")


def run_create(name: str) -> str:
    """`sms overlay create`."""
    return run_verb(lambda: create.create(make_cluster(name), ModelHost(name)) and "")


def run_failover(name: str, by_hand: bool, snapshot: str = "") -> str:
    """`sms failover`; ``by_hand``: with --i-have-fenced; ``snapshot``: from this one, whatever else there is."""
    options = failover.FailoverOptions(fenced=by_hand, shared=SHARED[0], snapshot=snapshot)
    return run_verb(lambda: failover.failover(make_cluster(name), ModelHost(name), options) and "")


def run_pull(name: str) -> str:
    """`sms overlay pull latest` of a repository that the other host has pushed to."""
    return run_verb(lambda: _do_pull(make_cluster(name), ModelHost(name)))


def _do_pull(cluster: Any, host: Any) -> None:
    found = effect("fetch", host.name)
    if found is None:
        raise Refused("there is none")
    with preflight.lock_host(cluster, host):
        lease.raise_lease(host, cluster, found[1])
    effect("received", host.name, found)


def run_restore(name: str) -> str:
    """`sms overlay restore latest`, by hand."""
    return run_verb(lambda: restore.restore(make_cluster(name), ModelHost(name), "latest") and "")


def run_migrate(target: str) -> str:
    """`sms migrate`, on a third machine."""
    return run_verb(lambda: _do_migrate(make_cluster(target), target))


def _do_migrate(cluster: Any, name: str) -> None:
    target = ModelHost(name)
    source, held = inspection.find_source(cluster, target, recover=True)
    running = inspection._find_running(cluster, source)
    if source.name == name or preflight.find_instance(cluster, target):
        raise Refused("it runs there")
    plan: Any = SimpleNamespace(shared=SHARED[0], mirror=(), mirrored=False)
    inspected = Inspected(source, target, running.pid, held, plan, CONFINED, CONFINED)
    image = Image(IMAGE, "key", "", "")
    result, _ = steps.run_steps(cluster, inspected, image)
    migrate.finish(cluster, inspected, image, result)


def run_guard(name: str, task: str, own: Any, others: Any, stopping: bool) -> tuple[Any, ...]:
    """One turn of a thread of the guard: ``query`` another host, or ``check`` the own lease file and step down.

    Args:
        own, others: bytes of the lease files as the guard knows them.
        stopping: it has begun to stop the instance.

    Returns:
        What it knows afterwards.
    """
    peer = "b" if name == "a" else "a"
    watcher = Guard(make_cluster(name), ModelHost(name), lambda text: None)
    for host, data in ((name, own), (peer, others)):
        if data != MISSING:
            watcher.leases.views[host] = watcher.leases.read(host, data)
    watcher._stopping = 0.0 if stopping else None
    with watcher.reporting_errors():
        if task == "query":
            watcher.query(peer)
        else:
            watcher.read_own()
            watcher.check()
    known = watcher.leases._data
    return known.get(name, MISSING), known.get(peer, MISSING), watcher._stopping is not None


# The agents of a migration


def request_of(agent: str, name: str, generation: int, pid: int) -> Any:
    """Return the request to an agent."""
    facts: dict[str, Any] = {
        "cluster": cluster_of_model().site.cluster,
        "host": name,
        "peer": "b" if name == "a" else "a",
        "verb": "migrate",
        "overlay": f"{name}:/img",
        "lease": f"{name}:lease",
        "history": f"{name}:history",
        "mark": f"{name}:mark",
        "lock": f"{name}:lock",
        "instance": f"{name}:sms",
        "generation": generation,
        "macs": ("mac",),
        "bridges": {"eth0": f"{name}:br"},
        "addresses": {"eth0": "ip"},
        "shared": SHARED[0],
        "stop_argv": ("stop-instance", f"{name}:"),
    }
    if agent == "target":
        return TargetRequest(**facts, store="", holds=(), ask_nodes=(), inside=("probe",))
    return SourceRequest(
        **facts,
        pid=pid,
        mac="",
        stop=(("db",),),
        stop_wait_s=1,
        live=("log",),
        loggers=("log",),
        tails=(),
        compress=False,
        frozen_mark="/frozen",
        stream_ports=(),
        start_argv=("start-instance", f"{name}:"),
    )


class ModelSource(MigrationSource):
    """The source, without the copy of the overlay."""

    def offer(self, message: Any) -> None:
        self.ports = self.instance.ports(["eth0"])
        self.host_state.save_state("read", ports=self.ports)
        self.channel.send("offer")  # type: ignore[union-attr]

    def stop(self, message: Any) -> None:
        self._enter("stopping", "stopping services that keep state")
        for group in self.request.stop:
            self.instance.stop_services(group, 1)
        contents = as_problem("contents", self.request.host)
        self.channel.send("sent")  # type: ignore[union-attr]
        self.channel.send("final", digests=contents)  # type: ignore[union-attr]


class ModelTarget(MigrationTarget):
    """The target, without the copy of the overlay."""

    def build(self, message: Any) -> None:
        self.host_state.save_state("copy")
        self.channel.send("wanted")  # type: ignore[union-attr]

    def put_in_place(self, message: Any) -> None:
        contents = message["digests"]
        effect("create", self.request.host, "incoming", contents, "incoming")
        self.descriptor = self.incoming  # type: ignore[assignment]
        MigrationTarget.put_in_place(self, {**message, "digests": hashlib.sha256(self.digests).hexdigest()})


SOURCE_KEPT = ("state", "released_at", "ports")
TARGET_KEPT = ("state", "generation", "armed_at", "inode", "ports")


BEGIN = ("begin",)
"""Stands for a message: the agent looks around under its lock before it handles others."""


def begin(generation: int, pid: int) -> tuple[Any, ...]:
    """Return the attributes of an agent that has just started."""
    return generation, pid, ()


def run_agent(agent: str, name: str, attributes: tuple[Any, ...], message: tuple[Any, ...]) -> tuple[Any, ...]:
    """One message to an agent, as in its ``run``; return ("idle", attributes), ("ended",) or ("failed",)."""
    generation, pid, kept = attributes
    request = request_of(agent, name, generation, pid)
    channel: Any = ModelChannel(dict(message[1:]))
    kind, system = (ModelSource, ModelSystem) if agent == "source" else (ModelTarget, TargetSystem)
    one: Any = kind(request, channel, system())
    for key, value in kept:
        setattr(one, key, dict(value) if key == "ports" else value)
    if agent == "target" and one.ports:
        one.instance = one.system.instance(pid_of(name, 2))
    try:
        if message == LOST:
            raise Disconnected
        if message == BEGIN:
            try:
                one.begin()
            except Problem:
                return ("failed",)
            return "idle", attributes
        facts = {key: list(value) if key == "argv" else value for key, value in message[1:]}
        one._do({"argv": ["probe"], "limit_s": 1, "for_s": 8.0, "files": [], **facts, "do": message[0]})
    except Disconnected:
        _abandon(one, "the connection was lost")
        return ("ended",)
    except (Problem, OSError, SmsError) as error:
        _abandon(one, str(error))
        return ("failed",)
    if one.state in ("gone", "done"):
        return ("ended",)
    names = SOURCE_KEPT if agent == "source" else TARGET_KEPT
    values = tuple((key, tuple(getattr(one, key).items()) if key == "ports" else getattr(one, key)) for key in names)
    return "idle", (generation, pid, values)


def _abandon(one: Any, why: str) -> None:
    """End an agent; what fails is left to the next verb."""
    with suppress(Problem, OSError, SmsError):
        one.abandon(why)


def run_idle(*_: Any) -> str:
    """An agent that waits for a message."""
    return "idle"


programs.update(
    {
        "start": run_start,
        "stop": run_stop,
        "create": run_create,
        "failover": run_failover,
        "pull": run_pull,
        "restore": run_restore,
        "migrate": run_migrate,
        "guard": run_guard,
        "handle": run_agent,
        "idle": run_idle,
    }
)
