"""What stays in the services container while an engine has the other services: what it is, who may start it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest

from appliance.catalog import read_catalog, select
from appliance.cli.engines import deploy as deploy_verbs
from appliance.cli.services.status import Shown
from appliance.config.types import Name
from appliance.engines.deploy import Bundle, Item
from appliance.engines.render import make_bundle
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host, OnLine, Result
from appliance.host.stream import LineReader, Stream
from appliance.operations.context import Cluster
from appliance.operations.deployed import DEPLOYED, Deployed, record_path
from appliance.operations.engines import deploy as deploy_module
from appliance.operations.engines import deploy_plan
from appliance.operations.engines import gateway as module
from appliance.operations.engines.bundles import units_of
from appliance.operations.engines.deploy import Outcome
from appliance.operations.engines.gateway import find_gateway, find_silent, keep_gateway, missing_gateway
from appliance.operations.engines.writer import refuse_interrupted
from appliance.operations.env import Locks
from appliance.operations.lease import give_lease, hand_over, query_lease
from appliance.operations.migration.failover import FailoverOptions
from appliance.operations.migration.failover_gateway import find_dead_gateway
from appliance.operations.migration.inspection import find_source
from appliance.operations.preflight import lock_host
from appliance.operations.services import guard, inside, restart, status, stop
from appliance.operations.services.apply import plan_apply
from appliance.operations.services.guard import Guard
from appliance.operations.services.start import StartOptions
from appliance.operations.services.status import Status
from appliance.operations.services.unfinished import moved_path
from appliance.operations.snapshots.snapshot import inspect_overlay
from appliance.plan.machine import instance_name
from appliance.plan.migration.state import COPYING, DONE, RETURNED, STOPPING, StateMove
from appliance.plan.services.gateway import find_staying, find_stopping
from appliance.share import share
from appliance.shared.lease import ENGINE
from appliance.shared.records import to_json
from appliance.tools.apptainer import Instance
from tests.pairs import HostInFolder, Pair
from tests.sites import open_debian
from tests.support.env import FakeHosts, with_env
from tests.support.fake import FakeStream
from tests.support.nomad import WithNomad, on_nomad
from tests.unit.engines.cases import CASES, make_input

ALL = {"slurmctld", "munge", "slurmdbd", "mariadb", "slurmrestd", "login", "sssd"}
RECORD = Deployed("nomad", DEPLOYED, 1, "0", "", 1.0, "host-a", services=("munge", "slurmctld"))
BUNDLE = Bundle(
    "nomad", "sample", "default", "/i.sif", "c", (Item("c", "service", "job", units=("slurmctld", "munge")),)
)


@pytest.mark.parametrize(
    ("services", "moved", "stays", "stops"),
    [
        ("slurmctld munge nat chrony cron", "slurmctld munge", "nat chrony cron", ""),
        ("slurmctld munge nat filesync", "slurmctld munge", "nat", ""),  # files are the engine's
        ("slurmctld munge cron filesync", "slurmctld munge", "", ""),  # cron would serve nobody
        ("slurmctld munge rsyslog postfix", "slurmctld munge postfix", "rsyslog", ""),
        ("slurmctld munge nat slurmrestd", "slurmctld munge", "nat", "slurmrestd"),  # it needs slurmctld
        ("slurmctld munge nat login", "slurmctld munge", "nat", "login"),  # it reads files of slurmctld
        ("slurmctld munge slurmdbd mariadb nat", "slurmctld munge mariadb", "nat", "slurmdbd"),  # its state moved
        ("slurmctld munge", "slurmctld munge", "", ""),
        ("slurmctld munge nat", "", "slurmctld munge nat", ""),
    ],
)
def test_what_stays(services: str, moved: str, stays: str, stops: str) -> None:
    given = select(read_catalog(share("definitions", "services")), services.split())
    chosen = tuple(one for one in given if one.name in services.split())
    assert {one.name for one in find_staying(chosen, moved.split())} == {*stays.split()}
    assert {*find_stopping(chosen, moved.split())} == {*stops.split()}


def test_a_helper_without_state_runs_at_both_places() -> None:
    """Munge, beside a service of the site that needs it; not MariaDB, whose state is the engine's."""
    given = select(read_catalog(share("definitions", "services")), ["munge", "mariadb", "nat"])
    nat = next(one for one in given if one.name == "nat")
    for need, stays in (("munge", {"munge", "own", "nat"}), ("mariadb", {"nat"})):
        own = nat.model_copy(update={"name": "own", "needs": (need,)})
        found = find_staying([*(one for one in given if one.name in ("munge", "mariadb", "nat")), own], ALL)
        assert {one.name for one in found} == stays


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] in ("kubernetes", "nomad")])
def test_nothing_with_state_runs_twice(tmp_path: Path, name: str) -> None:
    target, site, changes = CASES[name]
    given = make_input(tmp_path, site, changes)
    has = units_of(make_bundle(target, given))
    for one in find_staying(given.services, has):
        assert not one.engines.lease and one.role not in ("controller", "accounting")
        assert one.name not in has


def test_its_files_are_others_than_those_of_the_cluster() -> None:
    cluster = open_debian()
    part = cluster.of_gateway()
    same = {name for name, path in vars(cluster.places).items() if path == vars(part.places)[name]}
    assert {"overlay", "lease", "lock", "history", "snapshots", "sign", "uplink_mark"} & same == set()
    assert {"current", "guard_lock", "images", "public_keys"} <= same
    assert part.is_gateway and not cluster.is_gateway
    assert part.site.networks == cluster.site.networks and part.site.overlay.size_mb <= cluster.site.overlay.size_mb
    assert not re.fullmatch(get_args(Name)[1].pattern, part.site.cluster), "no cluster has this name"


class Admin(WithNomad, HostInFolder):
    """An admin host; ``inside``: commands in its instances, which print what ``prints`` has for one of their words."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.inside: list[tuple[str, ...]] = []
        self.debugged: list[tuple[str, ...]] = []
        self.prints: dict[str, str] = {}

    def run(self, *argv: str, **options: Any) -> Result:
        if argv[0] == "debugfs":
            self.debugged.append(argv)
            return Result(self.name, argv, 0, b"", b"")
        if any(word.startswith("instance://") for word in argv):
            self.inside.append(argv)
            printed = next((text for word, text in self.prints.items() if word in argv), "")
            return Result(self.name, argv, 0, printed.encode(), b"")
        return super().run(*argv, **options)

    def interact(self, *argv: str) -> int:
        return self.run(*argv).status

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        yield FakeStream(self.name, argv, lambda _: self.run(*argv), LineReader(on_line))


class Moved(Pair):
    """Two hosts; Nomad has the lease, and the deployment is recorded on host-a. ``admins``: these hosts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, shared=False)
        self.admins = {name: Admin(name, host.folder) for name, host in self.hosts.items()}
        self.hosts = dict[str, HostInFolder](self.admins)
        self.cluster = with_env(on_nomad(self.cluster, folder), hosts=FakeHosts(self.hosts))
        self.take("host-a")
        hand_over(self.hosts["host-a"], self.cluster, self.leases("host-a"), holder=f"{ENGINE}nomad", generation=2)
        write_record(self, to_json(RECORD))

    def part(self) -> Pair:
        """Return the same hosts with what stays."""
        found = Pair(self.hosts["host-a"].folder.parent, shared=False)
        found.cluster, found.hosts = self.cluster.of_gateway(), self.hosts
        return found


@pytest.fixture
def moved(tmp_path: Path) -> Moved:
    return Moved(tmp_path)


def write_record(pair: Pair, data: bytes, name: str = "host-a") -> None:
    path = pair.hosts[name].folder / Path(record_path(pair.cluster)).relative_to("/state-of-this-host")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_what_the_engine_has_never_stays(moved: Moved) -> None:
    """By the record, and by what the site file gives to the engine now: whatever is in one of them."""
    host = moved.hosts["host-a"]
    names = {one.name for one in find_gateway(moved.cluster, host, "nomad").services}
    assert "nat" in names and not {"slurmctld", "munge"} & names
    write_record(moved, to_json(Deployed("nomad", DEPLOYED, 2, "0", "", 1.0, "host-a", services=("nat",))))
    assert not {"nat", "slurmctld"} & {one.name for one in find_gateway(moved.cluster, host, "nomad").services}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"", "is unreadable"),
        (b"{}", "is unreadable"),
        (to_json(Deployed("kubernetes", DEPLOYED, 1, "0", "", 1.0, "host-a", services=("slurmctld",))), "nomad has"),
        (to_json(Deployed("nomad", DEPLOYED, 1, "0", "", 1.0, "host-a")), "nomad has the services"),
    ],
)
def test_a_record_that_does_not_tell_what_the_engine_has(moved: Moved, record: bytes, message: str) -> None:
    write_record(moved, record)
    with pytest.raises(Refused, match=message):
        find_gateway(moved.cluster, moved.hosts["host-a"], "nomad")


def test_an_engine_that_has_the_lease_no_more(moved: Moved) -> None:
    """Also where the file of this host does not know it: another one has been written since."""
    with pytest.raises(Refused, match="nomad has the lease by now, not kubernetes"):
        find_gateway(moved.cluster, moved.hosts["host-a"], "kubernetes")
    moved.hosts["host-a"].cut = True
    leases = moved.leases("host-b")
    hand_over(moved.hosts["host-b"], moved.cluster, leases, holder=None, generation=9)
    moved.hosts["host-a"].cut = False
    moved.take("host-b")
    with pytest.raises(Refused, match="host-b has the lease by now"):
        find_gateway(moved.cluster, moved.hosts["host-a"], "nomad")


@pytest.mark.parametrize("damaged", [True, False])
def test_what_should_stay_and_does_not_run_is_not_healthy(moved: Moved, *, damaged: bool) -> None:
    """On the host that has its lease, or had it, while an engine has the other services."""
    part = moved.part()
    engine, container = MagicMock(healthy=True), MagicMock(running=False)

    def shown(name: str) -> Status | None:
        found = status.gateway_status(moved.cluster, moved.hosts[name])
        assert Shown(container, engine, found).healthy == (found is None)
        return found

    assert shown("host-a") is None
    part.take("host-a")
    if damaged:
        path = moved.hosts["host-a"].folder / Path(part.cluster.places.lease).relative_to("/state-of-this-host")
        path.write_bytes(b"{")
    found = shown("host-a")
    assert found and not found.running and any("lease" in line for line in found.warnings)
    assert shown("host-b") is None
    hand_over(moved.hosts["host-a"], moved.cluster, moved.leases("host-a"), holder=None, generation=9)
    assert shown("host-a") is None


@pytest.mark.parametrize("released", [True, False])
def test_a_host_that_did_not_hear_of_a_takeover(moved: Moved, *, released: bool) -> None:
    """Its file names the engine: nothing stays there, and a start is one of all services, as on any admin host."""
    host = moved.hosts["host-a"]
    assert module.serving_engine(moved.cluster, host) == "nomad"
    host.cut = True
    hand_over(moved.hosts["host-b"], moved.cluster, moved.leases("host-b"), holder=None, generation=9)
    moved.take("host-b")
    if released:
        moved.release("host-b")
    host.cut = False
    assert query_lease(host, moved.cluster).engine == "nomad"
    with pytest.raises(Refused, match="has the lease by now, not nomad") as refused:
        find_gateway(moved.cluster, host, "nomad")
    assert "host-b has the newest state" in str(refused.value.hint)
    assert module.serving_engine(moved.cluster, host) == ""
    assert query_lease(host, moved.cluster).taker == "host-b"


@pytest.mark.parametrize("last", ["", "host-a", "host-b"])
def test_a_host_that_was_off_when_the_engine_gave_the_lease_back(moved: Moved, last: str) -> None:
    """`sms deploy stop` on the other host released it; nobody has taken it since. A dry run writes nothing."""
    host = moved.hosts["host-a"]
    host.cut = True
    give_lease(moved.leases("host-b"), None, 9, last)
    host.cut = False
    assert module.serving_engine(moved.cluster, host, adopt=False) == ""
    assert query_lease(host, moved.cluster).engine == "nomad"
    assert module.serving_engine(moved.cluster, host, boot=True) == ""
    lease = query_lease(host, moved.cluster)
    assert (lease.holder, lease.generation, lease.last) == (None, 9, last)
    assert moved.take("host-a") == 10


def test_a_move_that_was_interrupted_on_the_other_host(moved: Moved) -> None:
    """Its record is there only. A later one, such as that which served from the source again, counts instead."""

    def record(name: str, move: StateMove) -> None:
        moved.hosts[name].write(moved_path(moved.cluster), to_json(move))

    back = StateMove("sample", COPYING, "nomad", "container", 5.0, 3)
    for move, hint in (
        (back, "on host-b: `sms migrate --to container` goes on, `sms migrate --to nomad` starts them there"),
        (dataclasses.replace(back, phase=RETURNED), ""),
        (dataclasses.replace(back, phase=STOPPING, generation=0), "on host-b: "),
    ):
        record("host-b", move)
        with pytest.raises(Refused, match="interrupted") if hint else nullcontext() as refused:
            refuse_interrupted(moved.cluster, moved.hosts["host-a"])
        assert not hint or hint in str(refused and refused.value.hint)
    record("host-a", StateMove("sample", DONE, "container", "nomad", 6.0))
    refuse_interrupted(moved.cluster, moved.hosts["host-a"])
    record("host-a", StateMove("sample", DONE, "container", "nomad", 4.0))
    moved.hosts["host-b"].cut = True
    refuse_interrupted(moved.cluster, moved.hosts["host-a"])  # what it has recorded is not known


def test_what_stays_is_not_moved_while_it_runs(moved: Moved) -> None:
    """The hint names what there is: no `sms migrate`, which is refused while an engine has the services."""
    part = moved.part()
    part.take("host-b")
    with pytest.raises(Refused, match="stay on host-b") as refused:
        module.start_gateway(moved.cluster, moved.hosts["host-a"], "nomad", StartOptions())
    assert "sms stop --host host-b" in str(refused.value.hint) and "migrate" not in str(refused.value.hint)


@pytest.mark.parametrize("knows", [True, False])
def test_a_guard_ends_it_once_another_host_has_all_services(moved: Moved, *, knows: bool) -> None:
    """By the lease of the whole; while the engine has that, and after it is free, it stays."""
    part = moved.part()
    part.take("host-a")
    watcher = Guard(moved.cluster, moved.hosts["host-a"], lambda _: None)

    def check() -> None:
        watcher.leases.query()
        watcher.end_gateway()

    check()
    leases = moved.leases("host-b")
    hand_over(moved.hosts["host-b"], moved.cluster, leases, holder=None, generation=9)
    check()
    assert query_lease(moved.hosts["host-a"], part.cluster).holder == "host-a"
    moved.hosts["host-a"].cut = not knows
    moved.take("host-b")
    moved.hosts["host-a"].cut = False
    check()
    assert query_lease(moved.hosts["host-a"], part.cluster).holder is None, "it was stopped"


def test_a_guard_leaves_it_to_a_start_that_is_under_way(moved: Moved) -> None:
    """It has the lease of all services already, and stops what stays only when it needs the addresses."""
    hand_over(moved.hosts["host-a"], moved.cluster, moved.leases("host-a"), holder=None, generation=9)
    moved.take("host-a")
    part = moved.part()
    part.take("host-a")
    reported: list[str] = []
    watcher = Guard(moved.cluster, moved.hosts["host-a"], reported.append)
    watcher.leases.query()
    with lock_host(moved.cluster, moved.hosts["host-a"]):
        watcher.end_gateway()
    assert query_lease(moved.hosts["host-a"], part.cluster).holder == "host-a" and not reported
    watcher.end_gateway()
    assert query_lease(moved.hosts["host-a"], part.cluster).holder is None, "once nobody else is at work"


def test_it_is_not_back_on_the_network_beside_the_whole(moved: Moved) -> None:
    """After a cable was out: the lease of all services is read, too, before its ports are on their bridges again."""
    whole = Guard(moved.cluster, moved.hosts["host-a"], lambda _: None)
    whole.leases.query()
    part = guard.GatewayGuard(whole)
    assert whole.may_return() and part.may_return()
    hosts = moved.cluster.env.hosts
    assert isinstance(hosts, FakeHosts) and hosts.separated == 1, "a connection of before may hang with its network"
    moved.hosts["host-a"].cut = True
    hand_over(moved.hosts["host-b"], moved.cluster, moved.leases("host-b"), holder=None, generation=9)
    moved.take("host-b")
    moved.hosts["host-a"].cut = False
    assert not part.may_return()
    known = whole.find_admin()
    assert known and known.holder == "host-b", "the guard ends it at once"


def test_a_damaged_lease_of_what_stays_does_not_keep_the_whole_running(
    moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    checked: list[str] = []
    part = moved.cluster.of_gateway()
    path = moved.hosts["host-a"].folder / Path(part.places.lease).relative_to("/state-of-this-host")
    path.write_bytes(b"{")
    monkeypatch.setattr(guard, "_has_lease", lambda _: True)
    monkeypatch.setattr(Guard, "check", lambda self: checked.append(self.cluster.site.cluster))
    guard.guard_once(moved.cluster, moved.hosts["host-a"], reported.append)
    assert checked == [moved.cluster.site.cluster]
    assert len(reported) == 1 and str(part.places.lease) in reported[0]


def test_a_stop_without_it_costs_one_query(moved: Moved) -> None:
    class Unused(Locks):
        @contextmanager
        def hold(self, host: Host, path: str, what: str) -> Iterator[None]:
            pytest.fail("nothing is locked")
            yield

    assert not stop.stop_gateway(with_env(moved.cluster, locks=Unused()), moved.hosts["host-a"])


@pytest.mark.parametrize(
    ("silent", "fenced", "snapshot", "gateway"),
    [
        (True, False, "", "host-a"),
        (True, True, "", "host-a"),  # also where the engine does not answer: that host-a is off says nothing about it
        (True, True, "latest", ""),
        (False, True, "", ""),
    ],
)
def test_which_failover_it_is(moved: Moved, *, silent: bool, fenced: bool, snapshot: str, gateway: str) -> None:
    """An engine that does not answer may run the services: their state is restored only if the user says so."""
    part = moved.part()
    host = moved.admins["host-b"]
    host.error = "dial tcp 10.0.0.1:4646: connect: connection refused"
    assert missing_gateway(moved.cluster, host, BUNDLE) != []
    part.take("host-a")
    assert missing_gateway(moved.cluster, host, BUNDLE) == []
    moved.hosts["host-a"].cut = silent
    assert find_silent(moved.cluster, host) == ("host-a" if silent else "")
    assert find_dead_gateway(moved.cluster, host, FailoverOptions(fenced=fenced, snapshot=snapshot)) == gateway


def test_a_stop_of_the_engine_names_what_stays(moved: Moved) -> None:
    """Before and after: NAT runs on where it has its lease."""
    part = moved.part()
    host, shown = moved.hosts["host-a"], MagicMock()
    assert deploy_plan.plan_stop(moved.cluster, host).stays == module.Stays()
    part.take("host-b")
    lines = deploy_verbs._stop_plan_lines(deploy_plan.plan_stop(moved.cluster, host))
    (line,) = (one for one in lines if " stay: " in one)
    assert re.search("on host-b stay: .*nat.*; `sms stop --host host-b` stops them", line) and "slurmctld" not in line
    deploy_module.stop(moved.cluster.showing(shown), host)
    assert f"note: {line}" in [one.args[0] for one in shown.report.call_args_list]


def test_a_deployment_starts_it_where_it_ran(moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it does not start is returned: the engine's services are deployed nevertheless."""
    part = moved.part()
    there: list[str] = []

    def refused(_: Cluster, host: object, *__: object) -> None:
        there.append(getattr(host, "name", ""))
        raise Refused("its image is missing")

    monkeypatch.setattr(module, "start_gateway", refused)  # a real one would start a container on this machine
    assert keep_gateway(moved.cluster, moved.hosts["host-a"], BUNDLE) == "its image is missing"
    part.take("host-b")
    keep_gateway(moved.cluster, moved.hosts["host-a"], BUNDLE)
    assert there == ["host-a", "host-b"]
    # A site from which they were removed, such as before the engine takes the address of the container.
    without = dataclasses.replace(
        moved.cluster, services=tuple(one for one in moved.cluster.services if one.name in ("slurmctld", "munge"))
    )
    assert keep_gateway(without, moved.hosts["host-a"], BUNDLE) == ""
    assert there[2:] == [] and query_lease(moved.hosts["host-b"], part.cluster).holder is None, "it was stopped there"


@pytest.mark.parametrize("network", ["attached", "service"])
def test_its_address_is_not_given_to_a_pod_while_it_may_have_it(moved: Moved, network: str) -> None:
    """The host that ran it cannot be reached: with another address the deployment goes on, with a warning."""
    part = moved.part()
    part.take("host-b")
    moved.hosts["host-b"].cut = True
    engines = moved.cluster.site.engines
    changed = engines.model_copy(update={"kubernetes": engines.kubernetes.model_copy(update={"network": network})})
    without = dataclasses.replace(
        moved.cluster,
        site=moved.cluster.site.model_copy(update={"engines": changed}),
        services=tuple(one for one in moved.cluster.services if one.name in ("slurmctld", "munge")),
    )
    bundle = dataclasses.replace(BUNDLE, engine="kubernetes")
    if network == "attached":
        with pytest.raises(SmsError, match="may have the address that slurmctld's pod is to get: host-b: interrupted"):
            keep_gateway(without, moved.hosts["host-a"], bundle)
    else:
        assert keep_gateway(without, moved.hosts["host-a"], bundle) == "host-b: interrupted"


@pytest.mark.parametrize("verb", ["", "rollback"])
def test_the_exit_status_says_that_it_does_not_serve(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    outcomes = iter([Outcome("nomad", "sample", 1, "0", {}, [], silent=why) for why in ("", "nat does not answer")])
    monkeypatch.setattr(deploy_verbs, "_open", lambda _: (MagicMock(), MagicMock()))
    for name in ("deploy", "rollback"):
        monkeypatch.setattr(deploy_module, name, lambda *_, **__: next(outcomes))
    arguments = argparse.Namespace(engine="nomad", dry_run=False, timeout=1, json=False, quiet=True)
    run = deploy_verbs.run_rollback if verb else deploy_verbs.run
    assert [run(arguments), run(arguments)] == [0, 4]


def test_a_boot_starts_it_only_where_it_ran(moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing stays: the unit of the whole has nothing to do then, which is not a failure."""
    part = moved.part()
    started: list[str] = []
    monkeypatch.setattr(module, "start", lambda _, host, *__: started.append(host.name))  # as above
    boot = StartOptions(boot=True, unit=False)

    def start(name: str) -> None:
        module.start_gateway(moved.cluster, moved.hosts[name], "nomad", boot)

    start("host-a")
    part.take("host-b")
    start("host-a")
    assert started == []
    start("host-b")
    assert started == ["host-b"]


@pytest.mark.parametrize("ends", ["serves", "refused", "runs on"])
def test_its_guard_starts_first(moved: Moved, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Else a kill before it would leave it running without one. Where nothing runs then, the guard ends again."""
    done: list[str] = []

    def start(*_: object) -> MagicMock:
        done.append("start")
        if ends != "serves":
            raise SmsError("it does not serve")
        return MagicMock(stale=False)

    monkeypatch.setattr(module, "start", start)
    if ends != "refused":
        moved.hosts["host-a"].instances.append(Instance(instance_name(moved.cluster.site), 7, "/i.sif"))
    for name in ("start_guard", "stop_guard", "install_unit"):
        monkeypatch.setattr(module, name, lambda *_, name=name: done.append(name))
    try:
        module.start_gateway(moved.cluster, moved.hosts["host-a"], "nomad", StartOptions())
    except SmsError:
        done.append("failed")
    assert (
        done
        == {
            "serves": ["start_guard", "start", "install_unit"],
            "refused": ["start_guard", "start", "stop_guard", "failed"],
            "runs on": ["start_guard", "start", "failed"],
        }[ends]
    )


@pytest.fixture
def stays(moved: Moved) -> Moved:
    """What stays runs on host-a."""
    part, host = moved.part(), moved.admins["host-a"]
    part.take("host-a")
    write_record(moved, to_json(RECORD), "host-b")
    names = [one.name for one in find_gateway(moved.cluster, host, "nomad").services]
    host.prints["/etc/sms/services.json"] = json.dumps({"services": names})
    host.instances.append(Instance(instance_name(part.cluster.site), 7, "/i.sif"))
    return moved


def test_a_command_runs_in_what_stays_here(stays: Moved) -> None:
    """`sms exec` and `sms shell`; on the other host the message names the one where it runs."""
    host = stays.admins["host-a"]
    assert inside.run_inside(stays.cluster, host, ("chronyc", "sources")) == 0
    assert "instance://sms-sample_gateway" in host.inside[-1] and host.inside[-1][-2:] == ("chronyc", "sources")
    commands = len(host.inside)
    with pytest.raises(Refused, match="does not run on host-b, but on host-a") as refused:
        inside.run_inside(stays.cluster, stays.hosts["host-b"], ("true",))
    assert refused.value.hint == "--host host-a" and len(host.inside) == commands
    assert not stays.admins["host-b"].inside


@pytest.mark.parametrize("name", ["slurmctld", "munge"])
def test_what_the_engine_has_is_not_looked_for_here(stays: Moved, name: str) -> None:
    host = stays.hosts["host-a"]
    for act in (
        lambda: inside.show_log(stays.cluster, host, name, lines=1, follow=False, write=MagicMock()),
        lambda: restart.plan_restart(stays.cluster, host, [name]),
    ):
        with pytest.raises(Refused, match=f"{name} is not in the services container of host-a: nomad has it"):
            act()
    with pytest.raises(ConfigError, match="no log nonsense"):
        inside.show_log(stays.cluster, host, "nonsense", lines=1, follow=False, write=MagicMock())


def test_a_log_is_that_of_what_stays(stays: Moved) -> None:
    """Also where it is stopped: that of its own overlay."""
    host = stays.admins["host-a"]
    inside.show_log(stays.cluster, host, "nat", lines=1, follow=False, write=MagicMock())
    argv = host.inside[-1]
    assert "instance://sms-sample_gateway" in argv and argv[-1] == "/var/log/sms/nat.log"
    host.instances.clear()
    overlay = stays.cluster.of_gateway().places.overlay
    host.run("mkdir", "-p", str(overlay.parent))
    host.run("touch", str(overlay))
    inside.show_log(stays.cluster, host, "nat", lines=1, follow=False, write=MagicMock())
    assert host.debugged == [("debugfs", "-R", 'cat "/upper/var/log/sms/nat.log"', str(overlay))]


def test_a_restart_is_one_in_what_stays(stays: Moved) -> None:
    host = stays.admins["host-a"]
    host.prints |= {"--wait": '{"name": "nat", "ok": true}', "nat": "12 13"}
    (done,) = restart.restart(stays.cluster, host, ["nat"], wait_s=1)
    assert done.ok and all("instance://sms-sample_gateway" in argv for argv in host.inside)


def test_what_does_not_act_on_it_names_the_way(stays: Moved) -> None:
    """`sms apply`, a snapshot of the overlay, and a migration to another host."""
    host = stays.hosts["host-a"]
    with pytest.raises(Refused, match="nomad has the services") as refused:
        plan_apply(stays.cluster, host)
    assert "`sms deploy` applies the site file, also to what stays" in refused.value.hint
    with pytest.raises(Refused, match="nomad has the services and their state: the overlay on host-a") as refused:
        inspect_overlay(stays.cluster, host)
    assert "what stays in the services container has none of Slurm, and no snapshots" in refused.value.hint
    for name, way in (
        ("host-b", "`sms stop --host host-a`, then `sms start --host host-b`"),
        ("host-a", "`sms deploy`"),
    ):
        with pytest.raises(Refused, match="nomad has the services") as refused:
            find_source(stays.cluster, stays.hosts[name], recover=False)
        assert refused.value.hint.startswith(way)
