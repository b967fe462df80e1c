"""The steps of a migration: copy the overlay, stop stateful services, start isolated on the target, switch over."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import RolledBack, SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.operations.lease import query_lease
from appliance.operations.migration.fence import fence
from appliance.operations.services.start import PROBE
from appliance.operations.services.unfinished import mark_path
from appliance.operations.snapshots.list import store
from appliance.plan.machine import inside_argv, instance_name, start_argv, stop_argv, stop_timeout
from appliance.plan.migration.lease import GENERATION_BUMP
from appliance.plan.migration.move import PARTS, missing_jobs, needs_outside, stop_groups
from appliance.plan.migration.plan import Plan
from appliance.plan.services.jobs import ASK_NODES, JOBS, read_jobs
from appliance.plan.services.network import INTERFACES, conflists, isolated_bridges
from appliance.progress import Progress, Silent, Step
from appliance.shared.lease import Lease
from appliance.tools import agent
from appliance.tools.move import Endpoint, open_endpoint

ROUNDS = 6
"""Maximum passes over changed data before writers are stopped."""
WAIT_S = 60.0
"""Seconds that the services may take to answer on the target before the migration fails."""
SETTLE_S = 10.0
"""Seconds that services with external probes may take to answer after the switch."""
LONG_S = 3600.0
"""Timeout in seconds of requests that read a whole overlay."""
CHUNK = 1 << 16
"""Bytes of a chunk (agent/store.py)."""
QUICK_S = 20.0
"""Timeout in seconds of requests that take only a moment."""
CONFIRM_S = 8.0
"""Longer than a live source keeps its ports off the bridges (agent/migration_source.py, RECLAIM_S) and queries take."""
TARGET_REPLIES = ("seen", "wanted", "verified", "placed", "started", "probed", "told", "armed", "up", "appended")
SOURCE_REPLIES = ("offer", "parcels", "sent", "final", "connections", "released", "tails", "handed")
SWITCH_S = 5.0
"""Timeout in seconds of requests during the switch: the target allows 2 s (agent/migration_target.py, ARMED_S)."""
ABORT_S = 10.0
"""Seconds that the target may take to stop its instance."""


@dataclass
class MigrationResult:
    """What a migration did. Times in seconds; bytes as transferred.

    ``outage`` by service: from its stop on the source until it is reachable on the target, measured by this process.
    """

    source: str
    target: str
    image: str
    generation: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    outage: dict[str, float] = field(default_factory=dict)
    services: dict[str, float] = field(default_factory=dict)
    overlay_bytes: int = 0
    copied_bytes: int = 0
    last_bytes: int = 0
    frozen_ms: float = 0.0
    connections: int = 0
    lost_datagrams: int = 0
    jobs: int = 0
    rounds: int = 0
    shared: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Inspected:
    """Both hosts after all checks, and the plan."""

    source: Host
    target: Host
    pid: int
    lease: Lease
    plan: Plan


class NotesOnly(Silent):
    """Forwards only the lines that stay: the steps are shown by this process, not by the agents."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def report(self, text: str) -> None:
        self.progress.report(text)


class Migration:
    """One migration under way."""

    def __init__(self, cluster: Cluster, inspected: Inspected, image: Image, progress: Progress) -> None:
        self.cluster = cluster
        self.source = source = inspected.source
        self.target = target = inspected.target
        self.image = image
        self.pid = inspected.pid
        self.progress = progress
        self.shared = inspected.plan.shared
        self.generation = inspected.lease.generation
        self.result = MigrationResult(source.name, target.name, image.path, self.generation + 1, shared=self.shared)
        self.began_at: dict[str, float] = {}
        self.connections = b""
        self.neighbours: list[str] = []
        self.jobs_before: dict[str, str] = {}
        self.complete = False
        """Whether the target has everything that the source wrote."""
        self.started = False
        self.failed_probes = ""
        """Services that do not answer on the target after the switch; a rollback now would lose what they received."""

    def run(self) -> MigrationResult:
        """Run all steps.

        Raises:
            RolledBack: a step failed; the services container serves on the source as before.
            SmsError: a step failed; the message says which host serves now.
        """
        began = time.monotonic()
        with ExitStack() as stack:
            notes_only = NotesOnly(self.progress)
            target = stack.enter_context(open_endpoint(self.target, "arrive", self._target_request(), notes_only))
            source = stack.enter_context(open_endpoint(self.source, "leave", self._source_request(), notes_only))
            try:
                if self.shared:
                    self.migrate_shared(source, target)
                else:
                    self.migrate(source, target)
            except BaseException as error:
                if not self.take_over(target, error):
                    self.roll_back(source, target, error)
                    raise
            else:
                self.clean_up(source, target)
        self.result.seconds = round(time.monotonic() - began, 3)
        return self.result

    def migrate(self, source: Endpoint, target: Endpoint) -> None:
        """Migrate with one overlay per host: stateless services serve on the source until the switch."""
        self.copy(source, target)
        before = self.list_jobs()
        self.catch_up(source, target)
        self.stop(source, target)
        self.start(target, before)
        self.switch(source, target)
        self.failed_probes = self.check(target)

    def migrate_shared(self, source: Endpoint, target: Endpoint) -> None:
        """Migrate with a shared overlay: the source must close it before the target opens it."""
        before = self.list_jobs()
        with self.progress.step(f"stop on {self.source.name}") as step:
            began = self.began_at["stop"] = time.monotonic()
            source.send("hand")
            handed, self.connections = source.receive("handed", patience_s=LONG_S)
            self.result.connections, self.neighbours = handed["connections"], handed["neighbours"]
            self._part("stop", time.monotonic() - began)
            self._part("last changes", 0)
            step.detail("the overlay is free")
            self.complete = True
        self.start(target, before)
        with self.progress.step("activate the addresses") as step:
            began = time.monotonic()
            target.send("arm", neighbours=self.neighbours)
            target.receive("armed", patience_s=QUICK_S)
            self.activate(target)
            self._part("switch", time.monotonic() - began)
            step.detail(f"{handed['connections']} connections kept")
        self._count_outage(time.monotonic(), self.began_at["stop"])
        if failures := self.check(target):
            # A rollback loses nothing: the source uses the same overlay.
            raise SmsError(failures)

    # The requests to the agents

    def _common_request(self, host: Host, peer: Host) -> dict[str, Any]:
        site, where = self.cluster.site, self.cluster.places
        networks = (site.networks.provisioning, site.networks.public)
        return {
            "cluster": site.cluster,
            "host": host.name,
            "peer": peer.name,
            "verb": "migrate",
            "overlay": str(where.overlay),
            "lease": str(where.lease),
            "history": str(where.history),
            "mark": mark_path(self.cluster),
            "lock": str(where.lock),
            "instance": instance_name(site),
            "generation": self.generation,
            "bridges": {name: network.bridge for name, network in zip(INTERFACES, networks, strict=True)},
            "addresses": {name: str(network.address.ip) for name, network in zip(INTERFACES, networks, strict=True)},
            "macs": [network.mac for network in networks],
            "shared": self.shared,
            "stop_argv": list(stop_argv(site, stop_timeout(self.cluster.services))),
        }

    def _source_request(self) -> dict[str, Any]:
        services = self.cluster.services
        over_ssh = not (isinstance(self.source, Local) and isinstance(self.target, Local))
        return {
            **self._common_request(self.source, self.target),
            "pid": self.pid,
            "mac": self.cluster.site.networks.provisioning.mac,
            "stop": stop_groups(services),
            "stop_wait_s": stop_timeout(services),
            "live": [service.name for service in services if service.live],
            "loggers": [service.name for service in services if service.live and service.tails],
            "tails": [path for service in services for path in service.tails],
            "compress": over_ssh,
            "frozen_mark": f"{store(self.cluster)}/frozen",
            "start_argv": list(start_argv(self.cluster.site, self.image.path)),
        }

    def _target_request(self) -> dict[str, Any]:
        return {
            **self._common_request(self.target, self.source),
            "store": store(self.cluster),
            "holds": list(isolated_bridges(self.cluster.site)),
            "ask_nodes": list(ASK_NODES) if self.cluster.find_role("controller") else [],
        }

    # The steps

    def copy(self, source: Endpoint, target: Endpoint) -> None:
        """Copy the overlay while it is in use, until few changes are left."""
        with self.progress.step(f"copy the overlay to {self.target.name} while it runs") as step:
            step.detail("reading the overlay")
            source.send("offer")
            offer, digests = source.receive("offer", patience_s=LONG_S)
            self.result.overlay_bytes = offer["used"]
            step.detail("comparing with what the target has")
            target.send("build", digests, size=offer["size"])
            wanted, bits = target.receive("wanted", patience_s=LONG_S)
            source.send("send", bits)
            self.result.copied_bytes = self.relay(source, target, step, wanted["chunks"] * CHUNK)["sent_bytes"]
            self._rounds(source, target, step)
            step.detail("verifying the copy")
            target.send("verify")
            target.receive("verified", patience_s=LONG_S)
            reused = (wanted["used"] - wanted["chunks"]) * CHUNK
            step.detail(f"{self.result.copied_bytes >> 20} MiB sent, {reused >> 20} MiB reused")

    def catch_up(self, source: Endpoint, target: Endpoint) -> None:
        """Copy what was written while the copy was verified; writers stop in the next step."""
        with self.progress.step("send the changes since then") as step:
            before = self.result.copied_bytes
            self._rounds(source, target, step)
            step.detail(f"{(self.result.copied_bytes - before) >> 10} KiB")

    def _rounds(self, source: Endpoint, target: Endpoint, step: Step) -> None:
        for number in range(ROUNDS):
            source.send("round", anew=number == 0)
            sent = self.relay(source, target, step, 0)
            self.result.rounds += 1
            self.result.copied_bytes += sent["sent_bytes"]
            if sent["settled"]:
                return

    def relay(self, source: Endpoint, target: Endpoint, step: Step, total: int) -> dict[str, Any]:
        """Forward chunks until the source reports the end; return that message.

        Args:
            total: uncompressed bytes of all chunks; 0 if not known.
        """
        done = 0
        while True:
            message, data = source.receive("parcels", "sent")
            if message["kind"] == "sent":
                return message
            target.send("parcels", data)
            done += message["chunks"] * CHUNK
            step.moved(done, total)

    def list_jobs(self) -> dict[str, str]:
        """Return the states of the jobs known to the source's controller; empty, with a note, if it does not answer."""
        if not self.cluster.find_role("controller"):
            return {}
        try:
            return read_jobs(self.source.run(*inside_argv(self.cluster.site, *JOBS)).text)
        except CommandError as error:
            # It may be the reason for this migration, as it is for one back.
            self.result.notes.append(f"jobs are not compared: {error.message.splitlines()[-1].strip()}")
            return {}

    def stop(self, source: Endpoint, target: Endpoint) -> None:
        """Stop the stateful services and copy the last changes."""
        with self.progress.step("stop stateful services; send the last changes") as step:
            self.began_at["stop"] = time.monotonic()
            source.send("stop")
            sent = self.relay(source, target, step, 0)
            final, _ = source.receive("final", patience_s=QUICK_S)
            self.neighbours = final["neighbours"]
            target.send("place", digests=final["digests"])
            target.receive("placed", patience_s=QUICK_S)
            self.complete = True
            took = time.monotonic() - self.began_at["stop"]
            self.result.last_bytes = sent["sent_bytes"]
            self.result.frozen_ms = round(final["frozen_s"] * 1000, 1)
            self._part("stop", final["stop_s"])
            self._part("last changes", took - final["stop_s"])
            step.detail(f"{sent['sent_bytes'] >> 10} KiB, found by {final['found_by']}")

    def start(self, target: Endpoint, before: dict[str, str]) -> None:
        """Start the instance isolated on the target, and probe every service that can answer there."""
        began = time.monotonic()
        site = self.cluster.site
        with self.progress.step(f"start isolated on {self.target.name}") as step:
            target.send("start", argv=list(start_argv(site, self.image.path, isolated=True)))
            target.receive("started", patience_s=90)
            self.started = True
            external = needs_outside(self.cluster.services)
            inside = [one.name for one in self.cluster.services if one.name not in external]
            if failures := self.probe(target, inside, WAIT_S):
                raise SmsError(failures)
            self.jobs_before = before
            if before and (controller := self.cluster.find_role("controller")):
                if lost := self._lost_jobs(target):
                    raise SmsError(
                        f"the controller on {self.target.name} lost or requeued job {', '.join(lost[:10])}",
                        hint=f"see the log of {controller.name} there: sms journal",
                    )
                self.result.jobs = len(before)
            self._part("start", time.monotonic() - began)
            step.detail(f"{len(self.result.services)} services answer; {self.result.jobs} jobs known")

    def probe(self, target: Endpoint, names: Sequence[str], wait_s: float) -> str:
        """Probe services on the target until they answer; return the messages about those that do not."""
        target.send("probe", argv=[PROBE, "--wait", f"{wait_s:g}", *names], limit_s=wait_s + 30)
        _, output = target.receive("probed", patience_s=wait_s + 60)
        failed = []
        for line in output.decode(errors="replace").splitlines():
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if answer["ok"]:
                self.result.services[answer["name"]] = answer["after_s"]
            else:
                failed.append(f"{answer['name']} does not answer on {self.target.name}: {answer['detail']}")
        if failed or not set(names) <= set(self.result.services):
            return "\n".join(failed) or f"the services on {self.target.name} cannot be probed"
        return ""

    def switch(self, source: Endpoint, target: Endpoint) -> None:
        """Move the addresses from the source to the target."""
        with self.progress.step("switch the addresses") as step:
            source.send("connections")
            _, self.connections = source.receive("connections", patience_s=QUICK_S)
            target.send("arm", self.connections, neighbours=self.neighbours)
            target.receive("armed", patience_s=QUICK_S)
            began = self.began_at["switch"] = time.monotonic()
            source.send("release")
            released, self.connections = source.receive("released", patience_s=SWITCH_S)
            self.result.connections = released["connections"]
            self.activate(target)
            now = time.monotonic()
            self._part("switch", now - began)
            self._count_outage(now, began)
            step.detail(f"{(now - began) * 1000:.0f} ms; {released['connections']} connections kept")

    def activate(self, target: Endpoint, *, generation_bump: int = 0) -> None:
        """Attach the target to the networks, with the connections tracked by the source."""
        target.send("up", self.connections, leap=generation_bump)
        up, _ = target.receive("up", patience_s=SWITCH_S)
        if up["trouble"]:
            self.result.notes.append(f"connections could not be transferred: {up['trouble']}")

    def _count_outage(self, now: float, live_since: float) -> None:
        for service in self.cluster.services:
            since = live_since if service.live else self.began_at["stop"]
            self.result.outage[service.name] = round(now - since, 3)

    def check(self, target: Endpoint) -> str:
        """Probe every service again after the switch; return the messages about those that do not answer."""
        with self.progress.step("probe every service"):
            failures = self.probe(target, [service.name for service in self.cluster.services], SETTLE_S)
            # A controller that does not answer cannot report its jobs; the container then migrates back.
            if self.jobs_before and not failures and (lost := self._lost_jobs(target)):
                self.result.notes.append(f"job {', '.join(lost[:10])} was lost or requeued; see `scontrol show job`")
        return failures

    def _lost_jobs(self, target: Endpoint) -> list[str]:
        """Return the jobs that the controller on the target has lost or requeued."""
        target.send("ask", argv=list(JOBS))
        _, output = target.receive("told", patience_s=QUICK_S)
        return missing_jobs(self.jobs_before, read_jobs(output.decode(errors="replace")))

    def clean_up(self, source: Endpoint, target: Endpoint) -> None:
        """Copy the last lines of logs and stop what is left on the source; the target serves already.

        Errors are only noted from here on.
        """
        with self.progress.step(f"clean up on {self.source.name}"):
            if not self.shared:
                self._copy_log_tails(source, target)
            target.send("commit")
            target.receive("committed")
            try:
                source.send("finish")
                source.receive("finished")
            except SmsError as error:
                self.result.notes.append(f"{self.source.name} could not be cleaned up: {error.message}")

    def _copy_log_tails(self, source: Endpoint, target: Endpoint) -> None:
        try:
            source.send("given")
            tails, data = source.receive("tails")
            self.result.lost_datagrams = tails["lost"]
            target.send("tails", data, files=tails["files"])
            target.receive("appended")
        except SmsError as error:
            self.result.notes.append(f"the last lines of logs may be missing: {error.message}")

    def take_over(self, target: Endpoint, cause: BaseException) -> bool:
        """Continue without the source if it has failed and the target has everything it wrote; return whether it did.

        A living source answers by SSH or for its addresses: it leaves the bridges only for a moment
        (agent/migration_source.py). A partitioned source steps down when it returns: the generation is bumped.
        """
        if not self.complete or not isinstance(cause, Unreachable) or self._source_answers():
            return False
        activated = False
        try:
            with self.progress.step(f"verify that {self.source.name} is down") as step:
                target.send("unseen", for_s=CONFIRM_S)
                # Replies to earlier requests may come first.
                while (reply := target.receive(*TARGET_REPLIES)[0])["kind"] != "seen":
                    pass
                step.detail(f"{reply['mac']} answers for its addresses" if reply["mac"] else "its addresses are unused")
            if reply["mac"] or self._source_answers():
                return False
            self._fence_source()
            if not self.started:
                self.start(target, {})
            with self.progress.step(f"take over on {self.target.name}"):
                target.send("arm", neighbours=self.neighbours)
                target.receive("armed", patience_s=QUICK_S)
                self.activate(target, generation_bump=GENERATION_BUMP)
                self.result.generation += GENERATION_BUMP
                activated = True
                self._count_outage(time.monotonic(), self.began_at["stop"])
            if failures := self.check(target):
                # There is no host to roll back to.
                self.result.notes.append(failures)
            target.send("commit")
            target.receive("committed")
        except SmsError as error:
            if not activated:
                self.progress.report(f"note: {self.target.name} could not take over: {error.message}")
                return False
            # There is no host to roll back to.
            self.result.notes.append(error.message)
        self.result.notes.append(
            f"{self.source.name} failed during the migration; {self.target.name} had all its data and took over"
        )
        return True

    def _fence_source(self) -> None:
        """Power off the source, if fencing is configured, before another host takes its addresses.

        Raises:
            SmsError: it is not known to be off.
        """
        admin = next(host for host in self.cluster.site.admin_hosts if host.name == self.source.name)
        if admin.fence:
            with self.progress.step(f"fence {admin.name}"):
                fence(admin)
        else:
            self.result.notes.append(
                f"{admin.name} was not fenced, as no fencing is configured: if it was only partitioned, its guard "
                "stops it when it returns; set admin_hosts.fence"
            )

    def _source_answers(self) -> bool:
        try:
            self.source.run("true", ok=None, timeout=5)
        except SmsError:
            return False
        return True

    def roll_back(self, source: Endpoint, target: Endpoint, cause: BaseException) -> None:
        """Roll back: abort the target first, so that the source need not wait to verify that it is down.

        Raises:
            RolledBack: the services container serves on the source as before.
            SmsError: it is not known which host serves now.
        """
        why = str(cause) or type(cause).__name__
        with self.progress.step(f"roll back to {self.source.name}"):
            confirmed, ended = self._abort_target(target, why)
            if ended:
                try:
                    source.send("abort", why=why, sure=confirmed)
                    while source.receive("back", *SOURCE_REPLIES)[0]["kind"] != "back":
                        pass
                except SmsError:
                    source.close()
            else:
                # The state of the target is unknown: the source verifies it before it resumes; the target aborts alone.
                source.close()
            target.close()
            source.wait()
            target.wait()
        self._raise_outcome(cause)

    def _abort_target(self, target: Endpoint, why: str) -> tuple[bool, bool]:
        """Return whether the target confirmed that it was aborted, and whether its agent has ended."""
        try:
            target.send("abort", why=why)
            while target.receive("aborted", *TARGET_REPLIES, patience_s=ABORT_S)[0]["kind"] != "aborted":
                pass
        except SmsError:
            return False, target.ended_itself
        return True, True

    def _raise_outcome(self, cause: BaseException) -> None:
        """Probe the source and raise the outcome.

        Raises:
            RolledBack: it serves as before.
            SmsError: it does not, or cannot be reached.
        """
        message = cause.message if isinstance(cause, SmsError) else "the migration was interrupted"
        try:
            # The agent may have been killed, too: recover what it left.
            agent.call(self.source, "resume", {"mark": mark_path(self.cluster), "lock": str(self.cluster.places.lock)})
            argv = inside_argv(self.cluster.site, PROBE, "--wait", "20", *(one.name for one in self.cluster.services))
            answers = self.source.run(*argv, ok=None, timeout=60)
        except SmsError as error:
            raise SmsError(
                f"{message}\n  {self.source.name} cannot be reached to verify that it serves again: {error.message}",
                hint=f"if it has failed: sms failover {self.target.name}",
            ) from cause
        if answers.status and self._target_holds():
            raise SmsError(
                f"{message}\n  the services container serves on {self.target.name} nevertheless",
                hint=f"sms migrate {self.target.name}",
            ) from cause
        if answers.status:
            raise SmsError(
                f"{message}\n  not every service answers on {self.source.name} again",
                hint=f"sms status --host {self.source.name}",
            ) from cause
        hint = cause.hint if isinstance(cause, SmsError) else ""
        raise RolledBack(
            f"{message}\n  the services container serves on {self.source.name} as before", hint=hint
        ) from cause

    def _target_holds(self) -> bool:
        try:
            return query_lease(self.target, self.cluster).holder == self.target.name
        except SmsError:
            return False

    def _part(self, name: str, seconds: float) -> None:
        assert name in PARTS
        self.result.parts[name] = round(seconds, 3)


def isolated_conflists(cluster: Cluster) -> dict[str, bytes]:
    """Return the CNI files of the isolated networks on the target."""
    return {path: text.encode() for path, text in conflists(cluster.site, isolated=True).items()}
