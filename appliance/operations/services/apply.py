"""``sms apply``: changes of the site file in the running container, by reloads and restarts of single services.

What needs a new instance is only found here: ``operations/migration/here.py`` switches to one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from appliance.config.slurm_files import FOLDER
from appliance.errors import ConfigError, Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster, runtime_files
from appliance.operations.env import Event
from appliance.operations.history import note, read_history
from appliance.operations.image.deliver import Image, LacksService, deliver, trust
from appliance.operations.overlay.overlay import archive_for, overlay_mark, query_size, resolve_running, seeds_for
from appliance.operations.preflight import find_instance, lock_host
from appliance.operations.services.effect import (
    Judged,
    compare,
    define,
    held,
    judge,
    need_no_cost,
    resume_nodes,
)
from appliance.operations.services.faults import (
    find_faults,
    find_faults_for_users,
    find_faults_of_present,
)
from appliance.operations.services.holding import release
from appliance.operations.services.inside import need_running, refuse_superseded
from appliance.operations.services.munge_key import KeySwap, find_key_faults
from appliance.operations.services.new_instance import find_faults_of_instance, find_waits, query_network
from appliance.operations.services.node_files import judge_node_files
from appliance.operations.services.reach import inspect_links
from appliance.operations.services.restart import no_answer, reload_service, restart_service
from appliance.operations.services.users import DIRECTORY_CONF
from appliance.operations.start_note import read_note
from appliance.operations.vm.client import open_api
from appliance.plan.image.built import DESCRIPTION, find_other_settings, read_inputs
from appliance.plan.image.definition import runtime_digest
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import GROUP, PASSWD, without_own
from appliance.plan.nodes.files import MUNGE_KEY
from appliance.plan.overlay.seed import Seed, seed_archive
from appliance.plan.services.apply import (
    SUPERVISOR,
    Action,
    FileChange,
    Kind,
    find_exceeded,
    plan_actions,
    predict_restart,
)
from appliance.plan.services.defined import read_allowed
from appliance.plan.services.effect import Fault, Loss
from appliance.plan.services.links import NetworkState, judge_networks
from appliance.plan.services.network import INTERFACES, running_network
from appliance.plan.services.node_files import READ
from appliance.shared.ports import enter, split_macvlan
from appliance.text import one_line
from appliance.tools import apptainer, ports
from appliance.tools.scripts import script_argv
from appliance.tools.sha256 import find_digest

APPLY = "/opt/sms/bin/sms-apply"
TIMEOUT_S = 60
REMOVED = re.compile(rf"{FOLDER}/[A-Za-z0-9._-]+")
CHECKED = re.compile(r"/run/sms/check\.\w+")
"""The folder in which ``check-file`` has a file."""


class Changed(TypedDict):
    """A file that differs; ``text``: what is there, if others can read it. ``edited``: somebody changed it there."""

    path: str
    edited: bool
    text: str | None


class Pending(TypedDict):
    """Actions of services that are to be done: ``reload`` or ``restart``."""

    pending: dict[str, str]


class Compared(Pending):
    """What ``sms-apply compare`` found; ``left``: see there."""

    mark: str
    changed: list[Changed]
    left: str


class Written(TypedDict):
    """Files that ``sms-apply write`` changed, and copies of those that somebody had changed."""

    changed: list[str]
    kept: list[str]


@dataclass(frozen=True)
class Step:
    """A service's part of an apply.

    ``predicted_s``: its outage at most: 0 for a reload, for a restart by earlier ones, or by the catalogue.
    ``tolerated_s``: the outage that its users tolerate.
    """

    service: str
    kind: Kind
    why: tuple[str, ...]
    predicted_s: float
    tolerated_s: float


@dataclass(frozen=True)
class ApplyPlan:
    """What an apply does: the changed files, and the steps in their order.

    ``current``: nothing is to be done. ``switch``: why a new instance is needed, which is started from ``image``; the
    steps are not done then. ``newer``: a note if another image than the running one is current; an apply keeps it.
    ``rebuild``: settings of which the running image was not built; an apply cannot change them. ``losses``: jobs and
    reservations that it would end; ``refused``: why it is refused, with these; ``costs``: the
    same as texts that can be compared with those of a later plan. ``mtus``: those that interfaces of the container get.
    """

    host: str
    current: bool
    changes: tuple[FileChange, ...]
    steps: tuple[Step, ...]
    switch: tuple[str, ...]
    image: Image
    newer: str = ""
    rebuild: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    refused: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    mtus: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Applied:
    """Result of an apply; ``seconds``: how long each service did not answer, as measured. ``kept``: files that somebody
    had changed in the container, under the names that they are kept as. ``switch``: nothing was done, a new instance is
    needed for these reasons. ``exceeded``: outages that were longer than predicted. ``newer``, ``rebuild``,
    ``losses``, ``refused``, ``mtus``: those of the plan. ``unusable``: nodes that take no job since; ``failed``: jobs
    that have failed since; ``unknown``: users with jobs whom the container no longer knows. A reload with them is only
    kept with ``force``.
    """

    host: str
    current: bool
    changed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    switch: tuple[str, ...] = ()
    exceeded: list[str] = field(default_factory=list)
    newer: str = ""
    rebuild: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    refused: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    mtus: Mapping[str, int] = field(default_factory=dict)


def plan_apply(cluster: Cluster, host: Host) -> ApplyPlan:
    """Return what an apply would do, and cost; changes nothing. Sends the image, if a new one is needed.

    Raises:
        Refused: the services container does not run there, or no image has the services of the site file.
        ConfigError: a program of the container finds its file invalid.
    """
    need_running(cluster, host)
    return _Apply(cluster, host).plan


def apply(
    cluster: Cluster, host: Host, *, wait_s: float, force: bool = False, accepted: frozenset[str] = frozenset()
) -> tuple[Applied, Image]:
    """Write the changed files into the running container; services read them again, or are restarted.

    Args:
        wait_s: how long each service may take to answer.
        force: also if jobs, reservations or nodes are lost by it.
        accepted: what may be lost, of ``costs`` of an earlier plan.

    Returns:
        What was done, which is nothing if a new instance is needed; and its image.

    Raises:
        Refused: as for ``plan_apply``, another sms is at work there, or jobs would be lost; nothing was changed.
        ConfigError: as for ``plan_apply``; nothing was changed.
        RolledBack: a service failed, or nodes take no job since; the files of before are back, and services run with
            them.
        SmsError: the services do not answer with the files of before either.
    """
    with lock_host(cluster, host):
        need_running(cluster, host)
        with cluster.env.progress.step("compare the files") as step:
            work = _Apply(cluster, host)
            if not work.left and release(cluster, host, written=True):
                work = _Apply(cluster, host)  # the state that it has judged was that of a killed run
            step.detail(f"{len(work.plan.changes)} differ")
        plan = work.plan
        done = Applied(host.name, plan.current, steps=list(plan.steps), switch=plan.switch, newer=plan.newer)
        done.rebuild, done.losses, done.refused = plan.rebuild, plan.losses, plan.refused
        done.mtus = plan.mtus
        if not force:
            work.judged.refuse("apply", accepted=accepted)
        if work.left == "complete" or (work.left and work.applied):
            work.inside(dict, "finish")
        work.set_mtus()
        if work.applied or work.plan.switch:
            return done, work.plan.image
        with nullcontext() if force else held(cluster, host, work.judged, "apply", accepted):
            if work.swap:
                work.swap.stage(None if force else accepted)
            _change(work, done, wait_s, force)
        bounds = {one.service: one.predicted_s for one in work.plan.steps}
        done.exceeded = find_exceeded(bounds, done.seconds)
        note(cluster, host, "apply", "applied", seconds=done.seconds, exceeded=done.exceeded)
    return done, work.plan.image


def _change(work: _Apply, done: Applied, wait_s: float, force: bool) -> None:
    """Write the files, and do the steps of the plan.

    Raises:
        RolledBack, SmsError: as for ``apply``.
    """
    cluster, host = work.cluster, work.host
    actions = {one.service: one.kind for one in work.plan.steps}
    facts = {"forced": list(work.plan.refused)} if work.plan.refused else {}
    note(cluster, host, "apply", "begun", files=[one.path for one in work.plan.changes], actions=actions, **facts)
    begun: list[Step] = []
    try:
        with cluster.env.progress.step("write the files"):
            report: Written = work.inside(Written, "write", work.mark, json.dumps(actions), input=work.archive)
        done.changed, done.kept = report["changed"], report["kept"]
        if work.swap:
            work.swap.begin()
        for one in work.plan.steps:
            begun.append(one)
            done.seconds[one.service] = work.run(one.service, one.kind, wait_s)
        registers = work.nodes_register()
        if force:
            cost = compare(cluster, host, work.judged, registers=registers)
            done.unusable, done.failed, done.unknown = cost.nodes, cost.jobs, cost.users
        else:
            need_no_cost(cluster, host, work.judged, registers=registers)
        if work.swap:
            done.unusable += work.swap.finish()
        work.inside(dict, "finish")
    except SmsError as error:
        _roll_back(work, begun, wait_s, error)


def _roll_back(work: _Apply, begun: list[Step], wait_s: float, cause: SmsError) -> None:
    """Restore the files of before; services that may have read the new ones read them again.

    Raises:
        RolledBack: done.
        SmsError: a service does not answer; the next run repeats what is pending.
    """
    work.cluster.env.progress.report(f"{cause.message.splitlines()[0]}: restoring the files of before")
    try:
        actions = {**work.pending, **{one.service: one.kind for one in begun}}
        if begun:  # the last one failed: whether it would obey a reload is not known
            actions[begun[-1].service] = "restart"
        restored: Pending = work.inside(Pending, "undo", json.dumps(actions))
        if work.swap:
            work.swap.take_back()
        for action in plan_actions(work.cluster.services, (), _read_kinds(restored)):
            work.run(action.service, action.kind, wait_s)
        resume_nodes(work.cluster, work.host, work.judged)
        work.inside(dict, "finish")
    except SmsError as second:
        raise SmsError(
            f"{cause.message}\n  and the files of before could not be applied: {second.message}",
            hint=f"`sms status` probes every service; the next `sms apply --host {work.host.name}` repeats it",
        ) from cause
    note(work.cluster, work.host, "apply", "undone", why=one_line(cause.message, 500))
    raise RolledBack(f"{cause.message}\n  the files of before are in use again", hint=cause.hint) from cause


class _Apply:
    """The archive of the site's files, and what of it the running container lacks."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self.cluster, self.host = cluster, host
        running = find_instance(cluster, host)
        assert running
        self.running = running
        refuse_superseded(cluster, host)
        self._refuse_larger_overlay()
        resolved = resolve_running(cluster, host)
        seeds = seeds_for(resolved)
        self.archive = seed_archive(seeds)
        image, switch = self._find_image()
        self.mark = overlay_mark(archive_for(cluster), image)
        found: Compared = self.inside(Compared, "compare", input=self.archive)
        self.left = found["left"]
        own = {service.user for service in cluster.services}
        changes = tuple(_read_changes(found, {seed.path: seed for seed in seeds}, own))
        self._check(changes)
        network = query_network(cluster, host)
        switch += self._find_started_with(changes, network)
        self.judged = self._judge(seeds, changes, bool(found["pending"] or switch), image.path)
        self.mtus = self._find_mtus()
        self.pending = _read_kinds(found)
        self.swap, keyless = self._find_swap(seeds, changes, bool(switch))
        waits = [*find_waits(cluster, host, resolved, changes, switch=bool(switch)), *keyless]
        if switch:
            differs, same = any(one.path == DIRECTORY_CONF for one in changes), image.path == running.image
            waits += find_faults_of_instance(
                cluster, host, self.judged.present, network, differs=differs, same_image=same
            )
        self.judged = replace(self.judged, faults=(*self.judged.faults, *waits))
        history = read_history(cluster, host)
        actions = () if switch else plan_actions(cluster.services, changes, self.pending)
        steps = tuple(self._step(action, history) for action in actions)
        self.applied = found["mark"] == self.mark and not (changes or steps or switch or self.mtus)
        kept = not image or image.path == running.image
        newer, rebuild = (self._find_newer(), self._find_rebuild()) if kept else ("", ())
        current = self.applied and not rebuild
        self.plan = ApplyPlan(host.name, current, changes, steps, tuple(switch), image, newer, rebuild)
        self.plan = replace(
            self.plan,
            losses=self.judged.losses,
            refused=tuple(self.judged.lines),
            costs=tuple(sorted(self.judged.costs)),
            mtus={name: network.mtu for name, network in self.mtus.items()},
        )

    def _refuse_larger_overlay(self) -> None:
        """Check that the overlay has the size of the site file: limits of queues that follow it would refuse all mail.

        Raises:
            Refused: it is smaller.
        """
        size, wanted = query_size(self.cluster, self.host), self.cluster.site.overlay.size_mb
        if 0 < size < wanted:
            raise Refused(
                f"overlay.size_mb is {wanted}, and the overlay of {self.host.name} has {size} MiB",
                hint=f"`sms overlay grow {wanted}M --host {self.host.name}` enlarges it while it runs; then apply",
            )

    def _judge(self, seeds: Iterable[Seed], changes: Iterable[FileChange], pending: bool, image: str) -> Judged:
        """Return what the changes of Slurm's files cost; nothing is asked where these do not change.

        Args:
            pending: a new instance is needed, or an interrupted run has written files that a service may not have read.
            image: path of the one that is to read them.
        """
        after = {seed.path: seed.data for seed in seeds}
        new = {path: data for path, data in after.items() if path.startswith(f"{FOLDER}/")}
        before = {one.path: one.before for one in changes}
        changed = {path: text for path, text in before.items() if path in new or REMOVED.fullmatch(path)}
        defined, refused = define(new, after), tuple[Fault, ...]()
        leaves = GROUP in before and any(map(read_allowed, defined.partitions.values()))
        if not (changed or pending or leaves or DIRECTORY_CONF in before):
            judged = Judged(None, defined, defined)
        else:
            accounts = {
                path: (before.get(path) or "").encode() or after[path] for path in {PASSWD, GROUP} & after.keys()
            }
            old = {path: text for path, text in new.items() if path not in changed}
            old |= {path: text.encode() for path, text in changed.items() if text}
            judged = judge(self.cluster, self.host, define(old, accounts), defined)
            refused = judge_node_files(self.cluster, self.host, image, old, new)
        same_image, both = image == self.running.image, (judged.old, judged.new)
        found = [*find_faults_for_users(self.cluster, self.host, judged.present, before, after)]
        found += find_faults(self.cluster, self.host, both, before, after, same_image=same_image)
        if judged.present:
            found += find_faults_of_present(self.cluster, self.host, judged.present, both)
        return replace(judged, faults=(*judged.faults, *refused, *found))

    def _find_swap(
        self, seeds: Iterable[Seed], changes: Iterable[FileChange], switch: bool
    ) -> tuple[KeySwap | None, tuple[Fault, ...]]:
        """Return how nodes get a new munge key together with the container, if a VM gives it to them, and who lacks it.

        Also after a run that was killed between the two.
        """
        key = next((seed.data for seed in seeds if seed.path == MUNGE_KEY), b"")
        changed = any(one.path == MUNGE_KEY for one in changes)
        pending = any("munge_key" in one.secrets and one.name in self.pending for one in self.cluster.services)
        if not key or not (changed or pending):
            return None, ()
        nodes, api = self.judged.new.nodes.keys(), open_api(self.cluster) if self.cluster.site.provisioning else None
        faults = tuple(find_key_faults(self.cluster, self.host, nodes, api, switch=switch)) if changed else ()
        return None if switch or not api else KeySwap(self.cluster, self.host, key, nodes, api), faults

    def _find_image(self) -> tuple[Image, list[str]]:
        """Return the running image; if it lacks a service of the site file, the current one, and why.

        Raises:
            Refused: that lacks one, too.
        """
        try:
            return trust(self.cluster, self.host, self.running.image), []
        except LacksService as error:
            image = trust(self.cluster, self.host, *deliver(self.cluster, self.host, None))
            return image, [error.message]

    def _check(self, changes: tuple[FileChange, ...]) -> None:
        """Let programs of the container check the changed files for which the catalogue has a command.

        Raises:
            ConfigError: one is invalid.
        """
        changed = {change.path for change in changes if change.after is not None}
        for service in self.cluster.services:
            for file in service.files:
                if not file.check or file.path not in changed:
                    continue
                script = script_argv("check-file", file.path, *file.check)
                argv = inside_argv(self.cluster.site, self.cluster.services, *script)
                result = self.host.run(*argv, input=self.archive, ok=None, timeout=TIMEOUT_S)
                if result.status:
                    output = CHECKED.sub("", (result.stderr or result.shown).decode(errors="replace")).strip()
                    why = "; ".join(output.split("\n")[:3]) or f"its check ended with status {result.status}"
                    raise ConfigError(
                        f"{service.name} would not take {file.path}: {one_line(why, 400)}",
                        hint="the site file has the text; nothing was changed",
                    )

    def _find_newer(self) -> str:
        """Return a note about the image that is current on this machine, or on the host, if another one runs."""
        current = str(self.cluster.places.current)
        place = Local() if Path(current).is_file() else self.host
        path = place.run("readlink", "-f", current, ok=None).text
        recorded = read_note(self.cluster, self.host)
        if path == self.running.image or not recorded or recorded.image != self.running.image:
            return ""
        if find_digest(place, path, needed=False) in ("", recorded.sha256):
            return ""
        return f"{path} is the current image, and another one runs: `sms upgrade --image {path}` switches to it"

    def _find_rebuild(self) -> tuple[str, ...]:
        """Return the settings of which the running image was not built.

        Raises:
            SmsError: the container's description of its image is invalid.
        """
        cluster = self.cluster
        text = self.host.run(*inside_argv(cluster.site, cluster.services, "cat", *DESCRIPTION), timeout=TIMEOUT_S).text
        try:
            return find_other_settings(cluster.site, cluster.base, cluster.services, read_inputs(text))
        except ValueError as error:
            raise SmsError(f"the running image's manifest is invalid: {one_line(str(error), 200)}") from error

    def _find_started_with(self, changes: tuple[FileChange, ...], found: Mapping[str, str]) -> list[str]:
        """Return what the running instance was started with that is different now; ``found``: its network."""
        site = self.cluster.site
        different = [
            f"{name} is {one_line(found.get(name, 'unset'), 70)}, not {value or 'unset'}"
            for name, value in running_network(site).items()
            if found.get(name, "").lower() != value.lower()
        ]
        networks = zip(INTERFACES, (site.networks.provisioning, site.networks.public), strict=True)
        for name, network in networks:
            port, uplink = ports.find_ports(self.host, self.running.pid).get(name), network.uplink(self.host.name)
            if port and (network.attach == "macvlan") != bool(split_macvlan(port)):
                different.append(f"{name} is not attached by {network.attach}")
            elif port and (found_on := ports.find_uplink(self.host, port)) not in ("", uplink):
                # "": the guard takes a port off a bridge without an uplink
                different.append(f"{name} is on {found_on}, not {uplink}")
        if any(change.path == SUPERVISOR for change in changes):
            different.append("the list of services or the size of the overlay")
        return different

    def _find_mtus(self) -> dict[str, NetworkState]:
        """Return the networks whose interface or port should get another MTU, by interface of the container."""
        links, _ = inspect_links(self.host, self.running.pid)
        states = judge_networks(self.cluster.site, self.host.name, links)
        return {name: one for name, one in zip(INTERFACES, states, strict=True) if one.mtu and one.port}

    def nodes_register(self) -> bool:
        """Return whether all nodes register again: their controller is restarted, or sends them files."""
        controller = self.cluster.find_role("controller")
        restarted = {one.service for one in self.plan.steps if one.kind == "restart"}
        sent = any(one.path in READ for one in self.plan.changes)
        return sent or (controller is not None and controller.name in restarted)

    def set_mtus(self) -> None:
        """Give interfaces of the container, and their ports, the MTU of the bridge or card while they run."""
        for name, network in self.mtus.items():
            change = ("ip", "link", "set", "mtu", str(network.mtu), "dev")
            if network.attach != "macvlan":
                self.host.run(*change, network.port)
            self.host.run(*enter(self.running.pid), *change, name)
            note(self.cluster, self.host, "apply", "mtu", interface=name, mtu=network.mtu)

    def _step(self, action: Action, history: Iterable[Event]) -> Step:
        service = next(one for one in self.cluster.services if one.name == action.service)
        predicted = 0.0 if action.kind == "reload" else predict_restart(history, service)
        return Step(service.name, action.kind, action.why, predicted, service.outage.budget_s)

    def inside(self, kind: Any, *words: str, input: bytes | None = None) -> Any:
        """Run ``sms-apply`` in the container; return its answer, which is of this type.

        Raises:
            Refused: the image does not have it.
            SmsError: it failed.
        """
        argv = inside_argv(self.cluster.site, self.cluster.services, APPLY, *words)
        result = self.host.run(*argv, input=input, ok=None, timeout=TIMEOUT_S)
        if result.status == 0:
            try:
                return result.parse(kind, last=True)
            except SmsError as error:
                if words[0] != "compare" or self._is_of_this_version():
                    raise
                raise Refused(
                    "the running image was built by another version of sms, whose apply is not compatible",
                    hint="`sms upgrade` builds a new one and switches to it",
                ) from error
        output = one_line((result.stderr or result.shown).decode(errors="replace"), 300)
        if words[0] == "compare" and not self.host.works(
            *inside_argv(self.cluster.site, self.cluster.services, "test", "-x", APPLY)
        ):
            raise Refused(
                "the running image was built by an earlier version of sms, which had no apply",
                hint="`sms upgrade` builds a new one and switches to it",
            )
        raise SmsError(
            f"the files in the container: {words[0]} failed: {output}",
            hint="is its overlay full? `sms status` shows it",
        )

    def _is_of_this_version(self) -> bool:
        """Return whether this version of sms has built the running image."""
        return apptainer.labels(self.host, self.running.image).get("sms.runtime") == runtime_digest(runtime_files())

    def run(self, name: str, kind: Kind, wait_s: float) -> float:
        """Reload or restart a service; return the seconds until it answered, 0 for a reload.

        Raises:
            SmsError: it does not answer.
        """
        service = next(one for one in self.cluster.services if one.name == name)
        seconds = 0.0
        with self.cluster.env.progress.step(f"{kind} {service.name}") as shown:
            if kind == "restart":
                done = restart_service(self.cluster, self.host, service, wait_s)
                seconds = done.seconds
                note(self.cluster, self.host, "apply", "restarted", service=service.name, ok=done.ok, seconds=seconds)
                if not done.ok:
                    raise no_answer(service, done.detail)
            if detail := reload_service(self.cluster, self.host, service, wait_s):
                shown.detail(detail)
        self.inside(dict, "done", service.name)
        return seconds


def _read_changes(found: Compared, seeds: Mapping[str, Seed], own: Collection[str]) -> Iterator[FileChange]:
    """Yield the files that differ; what the container reports is not trusted: only paths of the site's own count, and
    those in /etc/slurm that it no longer has. ``own``: users of the image.
    """
    for entry in found["changed"]:
        path = entry["path"]
        seed = seeds.get(path)
        if seed is None and REMOVED.fullmatch(path):
            yield FileChange(path, entry["text"], None, entry["edited"])
            continue
        if seed is None:
            raise SmsError(f"the container reports an unknown file {path[:70]!r}")
        before, after = entry["text"], seed.data.decode(errors="replace") if seed.mode & 0o004 else None
        if path in (PASSWD, GROUP):  # the container keeps the image's own, whatever the site has
            before, after = (text and without_own(text, own) for text in (before, after))
        yield FileChange(seed.path, before, after, entry["edited"])


def _read_kinds(found: Pending) -> dict[str, Kind]:
    return {name: "reload" if kind == "reload" else "restart" for name, kind in found["pending"].items()}
