"""The move itself: copy while it runs, stop what keeps state, start it unseen on the target, switch the addresses."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import RolledBack, SmsError
from appliance.flow.context import Cluster
from appliance.flow.fence import fence
from appliance.flow.image import Image
from appliance.flow.lease import look_at_lease
from appliance.flow.snapshots import store
from appliance.flow.start import PROBE
from appliance.flow.unfinished import mark_path
from appliance.host.base import CommandError, Host, Unreachable
from appliance.host.local import Local
from appliance.plan.jobs import ASK_NODES, JOBS, read_jobs
from appliance.plan.machine import inside_argv, instance_name, start_argv, stop_argv, stop_timeout
from appliance.plan.move import PARTS, missing_jobs, needs_outside, stop_groups
from appliance.plan.network import INTERFACES, conflists, hold_bridges
from appliance.progress import Progress, Silent, Step
from appliance.tools import agent
from appliance.tools.move import End, open_end

ROUNDS = 6
"""Passes over what has changed, before writers are stopped."""
WAIT_S = 60.0
"""Seconds that the services may take on the target before it counts as failed."""
SETTLE_S = 10.0
"""Seconds that those whose probe leads outside get, once the addresses are there."""
LONG_S = 3600.0
"""Seconds until one that reads a whole overlay does."""
CHUNK = 1 << 16
"""Bytes that go together (agent/store.py)."""
QUICK_S = 20.0
"""Seconds until an end that has only a moment's work counts as lost."""
SURE_S = 8.0
"""Longer than a source that lives keeps its ports off the bridges (agent/leave.py, RECLAIM_S), and asking takes."""
LEAP = 1000
"""A source that was cut off has raised its own generation meanwhile; it is not to win."""
ARRIVING = ("seen", "wanted", "verified", "placed", "started", "probed", "told", "armed", "up", "appended")
LEAVING = ("offer", "parcels", "sent", "final", "connections", "released", "tails", "handed")
SWITCH_S = 5.0
"""The same, while nobody serves: the target has 2 s (agent/arrive.py, ARMED_S)."""
ABORT_S = 10.0
"""Seconds that the target gets to end its instance."""
"""Each task of an array for itself: '5_[1-9]' is '5_[2-9]' as soon as one runs."""


@dataclass
class Moved:
    """What a move did. Times in seconds; bytes as they went over the wire.

    ``outage`` by service: from its last answer on the source to its first on the target, as seen from here.
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


class OnlySays(Silent):
    """Passes on what stays; the steps are told here, not by the two ends."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def say(self, text: str) -> None:
        self.progress.say(text)


class Move:
    """One move under way."""

    def __init__(
        self,
        cluster: Cluster,
        source: Host,
        target: Host,
        image: Image,
        progress: Progress,
        *,
        pid: int,
        generation: int,
        shared: bool,
    ) -> None:
        self.cluster = cluster
        self.source = source
        self.target = target
        self.image = image
        self.pid = pid
        self.progress = progress
        self.shared = shared
        self.moved = Moved(source.name, target.name, image.path, generation + 1, shared=shared)
        self.generation = generation
        self.began_at: dict[str, float] = {}
        self.connections = b""
        self.neighbours: list[str] = []
        self.before: dict[str, str] = {}
        self.complete = False
        """Whether the target has all that the source wrote."""
        self.started = False
        self.silent = ""
        """What does not answer there, although it serves: what has come in since is not to be lost by going back."""

    def run(self) -> Moved:
        """All of it.

        Raises:
            RolledBack: it failed, and the appliance serves on the source as before.
            SmsError: it failed, and where it serves now is in the message.
        """
        began = time.monotonic()
        with ExitStack() as stack:
            heard = OnlySays(self.progress)
            arriving = stack.enter_context(open_end(self.target, "arrive", self._arriving(), heard))
            leaving = stack.enter_context(open_end(self.source, "leave", self._leaving(), heard))
            try:
                if self.shared:
                    self.move_shared(leaving, arriving)
                else:
                    self.move(leaving, arriving)
            except BaseException as error:
                if not self.take_over(arriving, error):
                    self.back(leaving, arriving, error)
                    raise
            else:
                self.settle(leaving, arriving)
        self.moved.seconds = round(time.monotonic() - began, 3)
        return self.moved

    def move(self, leaving: End, arriving: End) -> None:
        """With an overlay on each host: what keeps no state serves on the source until the switch."""
        self.copy(leaving, arriving)
        before = self.jobs()
        self.catch_up(leaving, arriving)
        self.stop(leaving, arriving)
        self.start(arriving, before)
        self.switch(leaving, arriving)
        self.silent = self.check(arriving)

    def move_shared(self, leaving: End, arriving: End) -> None:
        """With one overlay that both hosts see: the source must have let go of it before the target begins."""
        before = self.jobs()
        with self.progress.step(f"stop on {self.source.name}") as step:
            began = self.began_at["stop"] = time.monotonic()
            leaving.say("hand")
            handed, self.connections = leaving.hear("handed", patience_s=LONG_S)
            self.moved.connections, self.neighbours = handed["connections"], handed["neighbours"]
            self._part("stop", time.monotonic() - began)
            self._part("last changes", 0)
            step.detail("the overlay is free")
            self.complete = True
        self.start(arriving, before)
        with self.progress.step("show the addresses") as step:
            began = time.monotonic()
            arriving.say("arm", neighbours=self.neighbours)
            arriving.hear("armed", patience_s=QUICK_S)
            self.show(arriving)
            self._part("switch", time.monotonic() - began)
            step.detail(f"{handed['connections']} connections go on")
        self._count_outage(time.monotonic(), self.began_at["stop"])
        if silent := self.check(arriving):
            # What has come in lies where the source finds it.
            raise SmsError(silent)

    # What the ends are asked for

    def _common(self, host: Host, peer: Host) -> dict[str, Any]:
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

    def _leaving(self) -> dict[str, Any]:
        services = self.cluster.services
        over_ssh = not (isinstance(self.source, Local) and isinstance(self.target, Local))
        return {
            **self._common(self.source, self.target),
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

    def _arriving(self) -> dict[str, Any]:
        return {
            **self._common(self.target, self.source),
            "store": store(self.cluster),
            "holds": list(hold_bridges(self.cluster.site)),
            "ask_nodes": list(ASK_NODES) if self._has_controller else [],
        }

    @property
    def _has_controller(self) -> bool:
        return "slurmctld" in {service.name for service in self.cluster.services}

    # Its steps

    def copy(self, leaving: End, arriving: End) -> None:
        """Bring the overlay over while it is written, until little is left to bring."""
        with self.progress.step(f"copy the overlay to {self.target.name} while it runs") as step:
            step.detail("reading it")
            leaving.say("offer")
            offer, digests = leaving.hear("offer", patience_s=LONG_S)
            self.moved.overlay_bytes = offer["used"]
            step.detail("looking at what is there already")
            arriving.say("build", digests, size=offer["size"])
            wanted, bits = arriving.hear("wanted", patience_s=LONG_S)
            leaving.say("send", bits)
            self.moved.copied_bytes = self.relay(leaving, arriving, step, wanted["chunks"] * CHUNK)["sent_bytes"]
            self._rounds(leaving, arriving, step)
            step.detail("reading the copy again")
            arriving.say("verify")
            arriving.hear("verified", patience_s=LONG_S)
            there = (wanted["used"] - wanted["chunks"]) * CHUNK
            step.detail(f"{self.moved.copied_bytes >> 20} MiB sent, {there >> 20} MiB were there")

    def catch_up(self, leaving: End, arriving: End) -> None:
        """Bring over what was written while the copy was read again: next, writers stop."""
        with self.progress.step("send what has changed meanwhile") as step:
            before = self.moved.copied_bytes
            self._rounds(leaving, arriving, step)
            step.detail(f"{(self.moved.copied_bytes - before) >> 10} KiB")

    def _rounds(self, leaving: End, arriving: End, step: Step) -> None:
        for number in range(ROUNDS):
            leaving.say("round", anew=number == 0)
            sent = self.relay(leaving, arriving, step, 0)
            self.moved.rounds += 1
            self.moved.copied_bytes += sent["sent_bytes"]
            if sent["settled"]:
                return

    def relay(self, leaving: End, arriving: End, step: Step, total: int) -> dict[str, Any]:
        """Pass chunks on until the source says that there are no more; give what it says then.

        Args:
            total: bytes of the chunks before they are packed; 0 where nobody knows.
        """
        done = 0
        while True:
            message, data = leaving.hear("parcels", "sent")
            if message["kind"] == "sent":
                return message
            arriving.say("parcels", data)
            done += message["chunks"] * CHUNK
            step.moved(done, total)

    def jobs(self) -> dict[str, str]:
        """The jobs that the source's controller knows; none where there is none, or no answer, which is noted."""
        if not self._has_controller:
            return {}
        try:
            return read_jobs(self.source.run(*inside_argv(self.cluster.site, *JOBS)).text)
        except CommandError as error:
            # It may be the reason for the move, as it is for one back.
            self.moved.notes.append(f"jobs are not compared: {error.message.splitlines()[-1].strip()}")
            return {}

    def stop(self, leaving: End, arriving: End) -> None:
        """End what keeps state, and bring over the last that it wrote."""
        with self.progress.step("stop what keeps state; send the last changes") as step:
            self.began_at["stop"] = time.monotonic()
            leaving.say("stop")
            sent = self.relay(leaving, arriving, step, 0)
            final, _ = leaving.hear("final", patience_s=QUICK_S)
            self.neighbours = final["neighbours"]
            arriving.say("place", digests=final["digests"])
            arriving.hear("placed", patience_s=QUICK_S)
            self.complete = True
            took = time.monotonic() - self.began_at["stop"]
            self.moved.last_bytes = sent["sent_bytes"]
            self.moved.frozen_ms = round(final["frozen_s"] * 1000, 1)
            self._part("stop", final["stop_s"])
            self._part("last changes", took - final["stop_s"])
            step.detail(f"{sent['sent_bytes'] >> 10} KiB, found by {final['found_by']}")

    def start(self, arriving: End, before: dict[str, str]) -> None:
        """Start it on the target, seen by nobody, and ask every service that can answer so."""
        began = time.monotonic()
        site = self.cluster.site
        with self.progress.step(f"start on {self.target.name}, unseen") as step:
            arriving.say("start", argv=list(start_argv(site, self.image.path, held=True)))
            arriving.hear("started", patience_s=90)
            self.started = True
            outside = needs_outside(self.cluster.services)
            inside = [one.name for one in self.cluster.services if one.name not in outside]
            if silent := self.probe(arriving, inside, WAIT_S):
                raise SmsError(silent)
            self.before = before
            if before:
                if lost := self._lost_jobs(arriving):
                    raise SmsError(
                        f"the controller on {self.target.name} does not know job {', '.join(lost[:10])} as it was",
                        hint="the log of slurmctld there says why: sms journal",
                    )
                self.moved.jobs = len(before)
            self._part("start", time.monotonic() - began)
            step.detail(f"{len(self.moved.services)} services answer; {self.moved.jobs} jobs known")

    def probe(self, arriving: End, names: Sequence[str], wait_s: float) -> str:
        """Ask services there until they answer; give what is said of those that do not."""
        arriving.say("probe", argv=[PROBE, "--wait", f"{wait_s:g}", *names], limit_s=wait_s + 30)
        _, said = arriving.hear("probed", patience_s=wait_s + 60)
        failed = []
        for line in said.decode(errors="replace").splitlines():
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if answer["ok"]:
                self.moved.services[answer["name"]] = answer["after_s"]
            else:
                failed.append(f"{answer['name']} does not answer on {self.target.name}: {answer['detail']}")
        if failed or not set(names) <= set(self.moved.services):
            return "\n".join(failed) or f"the services on {self.target.name} cannot be asked"
        return ""

    def switch(self, leaving: End, arriving: End) -> None:
        """Take the addresses from the one and give them to the other."""
        with self.progress.step("switch the addresses") as step:
            leaving.say("connections")
            _, self.connections = leaving.hear("connections", patience_s=QUICK_S)
            arriving.say("arm", self.connections, neighbours=self.neighbours)
            arriving.hear("armed", patience_s=QUICK_S)
            began = self.began_at["switch"] = time.monotonic()
            leaving.say("release")
            released, self.connections = leaving.hear("released", patience_s=SWITCH_S)
            self.moved.connections = released["connections"]
            self.show(arriving)
            now = time.monotonic()
            self._part("switch", now - began)
            self._count_outage(now, began)
            step.detail(f"{(now - began) * 1000:.0f} ms; {released['connections']} connections go on")

    def show(self, arriving: End, *, leap: int = 0) -> None:
        """Have the target take the addresses, and the connections that went through them."""
        arriving.say("up", self.connections, leap=leap)
        up, _ = arriving.hear("up", patience_s=SWITCH_S)
        if up["trouble"]:
            self.moved.notes.append(f"connections could not be carried over: {up['trouble']}")

    def _count_outage(self, now: float, live_since: float) -> None:
        for service in self.cluster.services:
            since = live_since if service.live else self.began_at["stop"]
            self.moved.outage[service.name] = round(now - since, 3)

    def check(self, arriving: End) -> str:
        """Ask every service once more, where all can see it; give what is said of those that do not answer."""
        with self.progress.step("ask every service"):
            silent = self.probe(arriving, [service.name for service in self.cluster.services], SETTLE_S)
            # A controller that does not answer is why it goes back: it cannot be asked for its jobs.
            if self.before and not silent and (lost := self._lost_jobs(arriving)):
                self.moved.notes.append(f"job {', '.join(lost[:10])} is not as it was; `scontrol show job` says why")
        return silent

    def _lost_jobs(self, arriving: End) -> list[str]:
        """Jobs of before that the controller there does not know as they were."""
        arriving.say("ask", argv=list(JOBS))
        _, said = arriving.hear("told", patience_s=QUICK_S)
        return missing_jobs(self.before, read_jobs(said.decode(errors="replace")))

    def settle(self, leaving: End, arriving: End) -> None:
        """It serves there: bring what logs received last, and end what is left on the source.

        What fails from here on is told, and undoes nothing.
        """
        with self.progress.step(f"end what is left on {self.source.name}"):
            if not self.shared:
                self._bring_tails(leaving, arriving)
            arriving.say("commit")
            arriving.hear("committed")
            try:
                leaving.say("finish")
                leaving.hear("finished")
            except SmsError as error:
                self.moved.notes.append(f"{self.source.name} could not be tidied up: {error.message}")

    def _bring_tails(self, leaving: End, arriving: End) -> None:
        try:
            leaving.say("given")
            tails, data = leaving.hear("tails")
            self.moved.lost_datagrams = tails["lost"]
            arriving.say("tails", data, files=tails["files"])
            arriving.hear("appended")
        except SmsError as error:
            self.moved.notes.append(f"lines that logs received last may be missing: {error.message}")

    def take_over(self, arriving: End, cause: BaseException) -> bool:
        """Go on without the source, where it is dead and the target has all that it wrote; say whether it was so.

        A source that lives answers by SSH, or for its addresses: taken off the bridges it is for a moment only
        (agent/leave.py). One that is cut off from everybody gives way when it is back: the generation leaps.
        """
        if not self.complete or not isinstance(cause, Unreachable) or self._source_answers():
            return False
        shown = False
        try:
            with self.progress.step(f"{self.source.name} is gone: make sure") as step:
                arriving.say("unseen", for_s=SURE_S)
                # Words of what was under way may come before.
                while (said := arriving.hear(*ARRIVING)[0])["kind"] != "seen":
                    pass
                step.detail(f"{said['mac']} answers for its addresses" if said["mac"] else "nobody has its addresses")
            if said["mac"] or self._source_answers():
                return False
            self._fence_source()
            if not self.started:
                self.start(arriving, {})
            with self.progress.step(f"take over on {self.target.name}"):
                arriving.say("arm", neighbours=self.neighbours)
                arriving.hear("armed", patience_s=QUICK_S)
                self.show(arriving, leap=LEAP)
                self.moved.generation += LEAP
                shown = True
                self._count_outage(time.monotonic(), self.began_at["stop"])
            if silent := self.check(arriving):
                # There is nowhere to go back to.
                self.moved.notes.append(silent)
            arriving.say("commit")
            arriving.hear("committed")
        except SmsError as error:
            if not shown:
                self.progress.say(f"note: it could not be taken over: {error.message}")
                return False
            # There is nowhere to go back to.
            self.moved.notes.append(error.message)
        self.moved.notes.append(
            f"{self.source.name} went down in the middle; {self.target.name} had all that it wrote and took over"
        )
        return True

    def _fence_source(self) -> None:
        """Where the site says how, the source is switched off before another host has its addresses.

        Raises:
            SmsError: it is not known to be off.
        """
        admin = next(host for host in self.cluster.site.admin_hosts if host.name == self.source.name)
        if admin.fence:
            with self.progress.step(f"make sure that {admin.name} is off"):
                fence(admin)
        else:
            self.moved.notes.append(
                f"{admin.name} was not fenced, as the site says no way to: were it only cut off, its guard "
                "ends it when it is back; set admin_hosts.fence"
            )

    def _source_answers(self) -> bool:
        try:
            self.source.run("true", ok=None, timeout=5)
        except SmsError:
            return False
        return True

    def back(self, leaving: End, arriving: End, cause: BaseException) -> None:
        """It failed: the target first, so that the source need not wait to be sure of it.

        Raises:
            RolledBack: it serves on the source as before.
            SmsError: who serves now cannot be told from here.
        """
        why = str(cause) or type(cause).__name__
        with self.progress.step(f"go back to {self.source.name}"):
            sure, over = self._gave_up(arriving, why)
            if over:
                try:
                    leaving.say("abort", why=why, sure=sure)
                    while leaving.hear("back", *LEAVING)[0]["kind"] != "back":
                        pass
                except SmsError:
                    leaving.close()
            else:
                # Nobody can tell from here. The source makes sure before it comes back, and the target gives up alone.
                leaving.close()
            arriving.close()
            leaving.wait()
            arriving.wait()
        self._tell_back(cause)

    def _gave_up(self, arriving: End, why: str) -> tuple[bool, bool]:
        """Whether the target has said that nothing of it is left, and whether it has ended at least."""
        try:
            arriving.say("abort", why=why)
            while arriving.hear("aborted", *ARRIVING, patience_s=ABORT_S)[0]["kind"] != "aborted":
                pass
        except SmsError:
            return False, arriving.ended_itself
        return True, True

    def _tell_back(self, cause: BaseException) -> None:
        """Ask the source whether it serves, and say so.

        Raises:
            RolledBack: it does.
            SmsError: it does not, or cannot be asked.
        """
        said = cause.message if isinstance(cause, SmsError) else "the move was interrupted"
        try:
            # Its agent may have been killed, too: what it has left is taken up.
            agent.ask(self.source, "resume", {"mark": mark_path(self.cluster), "lock": str(self.cluster.places.lock)})
            argv = inside_argv(self.cluster.site, PROBE, "--wait", "20", *(one.name for one in self.cluster.services))
            answers = self.source.run(*argv, ok=None, timeout=60)
        except SmsError as error:
            raise SmsError(
                f"{said}\n  {self.source.name} cannot be asked whether it serves again: {error.message}",
                hint=f"where it is dead: sms failover {self.target.name}",
            ) from cause
        if answers.status and self._target_holds():
            raise SmsError(
                f"{said}\n  it serves on {self.target.name} all the same", hint=f"sms migrate {self.target.name}"
            ) from cause
        if answers.status:
            raise SmsError(
                f"{said}\n  not every service answers on {self.source.name} again",
                hint=f"sms status --host {self.source.name}",
            ) from cause
        hint = cause.hint if isinstance(cause, SmsError) else ""
        raise RolledBack(f"{said}\n  the appliance serves on {self.source.name} as before", hint=hint) from cause

    def _target_holds(self) -> bool:
        try:
            return look_at_lease(self.target, self.cluster).holder == self.target.name
        except SmsError:
            return False

    def _part(self, name: str, seconds: float) -> None:
        assert name in PARTS
        self.moved.parts[name] = round(seconds, 3)


def held_conflists(cluster: Cluster) -> dict[str, bytes]:
    """The networks that lead nowhere, as files of the target."""
    return {path: text.encode() for path, text in conflists(cluster.site, held=True).items()}
