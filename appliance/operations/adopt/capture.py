"""Captures of a survey and of an adoption: what nodes use, and who still speaks to the old node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
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


def capture_services(
    host: Host, interface: str, seconds: float, *, sms: str, only: str, folder: Path | None, progress: Progress
) -> Classification:
    """Capture on an interface of the host, and classify the services of the management node with the address ``sms``.

    Args:
        folder: with the site's own services.

    Raises:
        Refused: the host has no tcpdump.
        SmsError: it cannot be captured or classified.
    """
    _need_tcpdump(host)
    options = ClassifyOptions(live=interface, duration_s=seconds, host=host, only=only, sms=sms, services=folder)
    return classify(options, progress)


def _need_tcpdump(host: Host) -> None:
    if not has_program(host, "tcpdump"):
        raise Refused(f"{host.name} has no tcpdump", hint="install it there, or capture on a mirror port of the switch")


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


def begin_capture(
    cluster: Cluster, old: Host, plan: AdoptPlan, survey: Survey, seconds: float
) -> Future[Classification]:
    """Begin to capture on the old node what nodes use there."""
    inside = next(one for one in plan.interfaces if one.inside == INTERFACES[0])
    only = no_ssh(ssh_ports(survey))
    return _begin(lambda: _services(cluster, old, inside.name, only, seconds))


def _services(cluster: Cluster, host: Host, interface: str, only: str, seconds: float) -> Classification:
    sms, folder = str(cluster.site.networks.provisioning.address.ip), services_folder(cluster.path)
    return capture_services(host, interface, seconds, sms=sms, only=only, folder=folder, progress=Silent())


def capture_after(
    cluster: Cluster,
    old: Host,
    target: Host,
    plan: AdoptPlan,
    survey: Survey,
    earlier: Future[Classification] | None,
    seconds: float,
    progress: Progress,
) -> Traffic:
    """Capture on both hosts for ``seconds`` what nodes use now.

    Errors and Ctrl-C are problems in the result: the adoption is done.
    """
    uplink, problems = cluster.site.networks.provisioning.uplink(target.name), list[str]()
    with progress.step(f"capture on {target.name} and {old.name} for {seconds:g} s") as step:
        now = _begin(lambda: _services(cluster, target, uplink, no_ssh(()), seconds))
        there = _begin(lambda: _speakers(cluster, old, plan, survey, seconds))
        try:
            running: list[Future[Any]] = [now, there]
            wait(running)
        except KeyboardInterrupt:
            return Traffic(seconds, problems=("the capture after the adoption was interrupted",))
        found, speakers = _result(now, problems), _result(there, problems)
        before = _result(earlier, problems) if earlier else None
        unplanned = sum(not one.planned for one in speakers or ())
        step.detail(f"{unplanned} uses of {old.name} that the plan does not name" if speakers is not None else "")
    services = {one.name: one.verdict for one in found.services} if found else {}
    compared = _compare(before, f"{seconds:g} s before", found) if before and found else None
    return Traffic(seconds, services, compared, tuple(speakers or ()), tuple(problems))


def _result(future: Future[Found], problems: list[str]) -> Found | None:
    try:
        return future.result()
    except SmsError as error:
        problems.append(error.message)
        return None


def _speakers(cluster: Cluster, old: Host, plan: AdoptPlan, survey: Survey, seconds: float) -> list[Speaker]:
    _need_tcpdump(old)
    interface = next(one for one in plan.interfaces if one.inside == INTERFACES[0])
    only = unicast_filter(interface, ssh_ports(survey))
    flows = read_flows(
        ClassifyOptions(
            live=interface.name, duration_s=seconds, host=old, only=only, services=services_folder(cluster.path)
        )
    )
    return find_speakers(
        flows,
        own={one.partition("/")[0] for one in (*interface.moves, *interface.keeps)},
        others={str(one.address) for one in cluster.site.admin_hosts},
        survey=survey,
        services=cluster.services,
    )


def _compare(before: Classification, name: str, found: Classification) -> Comparison:
    from analysis.classification import read_classification
    from analysis.comparison import compare

    return compare(read_classification(render(before, "json")), name, found)
