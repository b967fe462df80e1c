"""Captures of a survey and of an adoption: what nodes use, and who still speaks to the old node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.classify.classify import ClassifyOptions, classify, read_flows, render
from appliance.operations.context import Cluster
from appliance.operations.site.locate import services_folder
from appliance.plan.adopt.adoption import AdoptPlan
from appliance.plan.adopt.model import Survey
from appliance.plan.adopt.traffic import Speaker, find_speakers, no_ssh, ssh_ports, unicast_filter
from appliance.plan.services.network import INTERFACES
from appliance.progress import Progress, Silent
from appliance.shared.adopt import OldInterface
from appliance.tools.programs import has_program

if TYPE_CHECKING:
    from analysis.model import Classification, Comparison, Verdict

Found = TypeVar("Found")


@dataclass(frozen=True)
class Traffic:
    """What was seen of nodes during ``seconds`` after an adoption.

    Attributes:
        services: that nodes use at the target, with their verdicts.
        compared: with the same time before it; None if that was not captured.
        speakers: who uses what of the old node.
        problems: why something was not captured, as sentences.
    """

    seconds: float
    services: dict[str, Verdict] = field(default_factory=dict)
    compared: Comparison | None = None
    speakers: tuple[Speaker, ...] = ()
    problems: tuple[str, ...] = ()


def capture_services(options: ClassifyOptions) -> Classification:
    """Capture on an interface of a host, and classify the services of its management node.

    Raises:
        Refused: the host has no tcpdump.
        SmsError: it cannot be captured or classified.
    """
    _need_tcpdump(options.host)
    return classify(options, Silent())


def _need_tcpdump(host: Host | None) -> None:
    if host and not has_program(host, "tcpdump"):
        raise Refused(f"{host.name} has no tcpdump", hint="install it there, or capture on a mirror port of the switch")


@dataclass
class Captures:
    """Captures of an adoption before and after it, each for ``seconds``; with 0 there are none."""

    cluster: Cluster
    old: Host
    plan: AdoptPlan
    survey: Survey
    seconds: float
    earlier: Future[Classification] | None = None

    @property
    def interface(self) -> OldInterface:
        """The old node's interface in the nodes' network."""
        return next(one for one in self.plan.interfaces if one.inside == INTERFACES[0])

    def begin(self) -> None:
        """Begin to capture on the old node what nodes use there."""
        if self.seconds:
            only = no_ssh(ssh_ports(self.survey))
            self.earlier = _begin(lambda: self._services(self.old, self.interface.name, only))

    def wait(self, progress: Progress) -> None:
        """Wait for the end of that capture."""
        if self.earlier:
            with progress.step(f"capture on {self.old.name} for {self.seconds:g} s, before anything is stopped"):
                wait([self.earlier])

    def finish(self, target: Host, progress: Progress) -> Traffic | None:
        """Capture on both hosts what nodes use now.

        Errors and Ctrl-C are problems in the result: the adoption is done.
        """
        if not self.seconds:
            return None
        uplink, problems = self.cluster.site.networks.provisioning.uplink(target.name), list[str]()
        with progress.step(f"capture on {target.name} and {self.old.name} for {self.seconds:g} s") as step:
            now = _begin(lambda: self._services(target, uplink, no_ssh(())))
            there = _begin(self._speakers)
            running: list[Future[Any]] = [now, there]
            try:
                wait(running)
            except KeyboardInterrupt:
                return Traffic(self.seconds, problems=("the capture after the adoption was interrupted",))
            found, speakers = _result(now, problems), _result(there, problems)
            before = _result(self.earlier, problems) if self.earlier else None
            if speakers is not None:
                unplanned = sum(not one.planned for one in speakers)
                step.detail(f"{unplanned} uses of {self.old.name} that the plan does not name")
        services = {one.name: one.verdict for one in found.services} if found else {}
        compared = _compare(before, f"{self.seconds:g} s before", found) if before and found else None
        return Traffic(self.seconds, services, compared, tuple(speakers or ()), tuple(problems))

    def _options(self, host: Host, interface: str, only: str) -> ClassifyOptions:
        return ClassifyOptions(
            live=interface,
            duration_s=self.seconds,
            host=host,
            only=only,
            sms=str(self.cluster.site.networks.provisioning.address.ip),
            services=services_folder(self.cluster.path),
        )

    def _services(self, host: Host, interface: str, only: str) -> Classification:
        return capture_services(self._options(host, interface, only))

    def _speakers(self) -> list[Speaker]:
        _need_tcpdump(self.old)
        interface = self.interface
        only = unicast_filter(interface, ssh_ports(self.survey))
        return find_speakers(
            read_flows(self._options(self.old, interface.name, only)),
            own={one.partition("/")[0] for one in (*interface.moves, *interface.keeps)},
            others={str(one.address) for one in self.cluster.site.admin_hosts},
            survey=self.survey,
            services=self.cluster.services,
        )


def _begin(work: Callable[[], Found]) -> Future[Found]:
    """Run work in a thread that ends with the process, at the latest."""
    future: Future[Found] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="capture", daemon=True).start()
    return future


def _result(future: Future[Found], problems: list[str]) -> Found | None:
    try:
        return future.result()
    except SmsError as error:
        problems.append(error.message)
        return None


def _compare(before: Classification, name: str, found: Classification) -> Comparison:
    from analysis.classification import read_classification
    from analysis.comparison import compare

    return compare(read_classification(render(before, "json")), name, found)
