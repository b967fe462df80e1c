"""`sms classify`: from captures and the catalogue to a verdict on every service."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from analysis import units
from analysis.classify import classify as judge
from analysis.errors import CaptureError
from analysis.model import Classification, Verdict
from analysis.protocols import warm
from analysis.reading import Reading, Source, Watch, read_captures, read_stream
from analysis.roles import find_roles
from analysis.signatures import PROTOCOLS, FirstBytes, Signature
from appliance.catalog import Service, read_catalog
from appliance.catalog.own import OwnService, read_own
from appliance.config.document import printable
from appliance.config.wording import nearest
from appliance.errors import ConfigError, SmsError
from appliance.flow.init import replace_file
from appliance.host.local import Local
from appliance.progress import Progress
from appliance.share import share
from appliance.tools import tcpdump

__all__ = ["Question", "classify", "units"]

STDIN = "-"
LARGE = 256 << 20
"""Bytes of captures that take the core longer than Python takes to import what comes after."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".html": "html", ".htm": "html"}
"""The form that a file's name asks for."""

SAID = "--override on the command line"


@dataclass(frozen=True)
class Question:
    """What to classify, and what is known beforehand.

    Attributes:
        captures: files; "-" is standard input. Empty with ``live``.
        live, duration_s: capture on this interface for so long instead.
        sms: address or MAC of the management node; found when empty.
        node: look at this node alone: address or MAC.
        services: folder of the site's own services.
        overrides: verdicts of the site by name.
    """

    captures: tuple[str, ...] = ()
    live: str = ""
    duration_s: float = 0
    sms: str = ""
    node: str = ""
    services: Path | None = None
    overrides: Mapping[str, Verdict] = field(default_factory=dict)


def classify(question: Question, progress: Progress) -> Classification:
    """The classification of what the captures hold.

    Raises:
        ConfigError: a capture cannot be opened, or an option makes no sense.
        SmsError: the captures hold nothing that can be classified.
    """
    check_captures(question)
    sms, node = (check_address(value, name) for value, name in ((question.sms, "--sms"), (question.node, "--node")))
    shipped = read_catalog(share("definitions", "services"))
    own = read_own(question.services, shipped) if question.services else {}
    overrides = named(question.overrides, {**shipped, **own})
    signatures = make_signatures(shipped, own, overrides)
    try:
        found = _look(question, sms, node, signatures, progress)
    except CaptureError as error:
        raise SmsError(units.plain(error.message), hint=units.plain(error.hint)) from error
    found, unknown = apply_overrides(found, overrides)
    for name in unknown:
        seen = [service.name for service in found.services]
        progress.say(f"--override: {printable(name)} is not in the captures; {nearest(name, seen)}")
    return found


def _look(
    question: Question, sms: str, node: str, signatures: tuple[Signature, ...], progress: Progress
) -> Classification:
    with progress.step(f"capture on {question.live}" if question.live else "read the captures") as step:
        began = time.monotonic()
        with _warming(question):
            reading = _read(question, signatures, node, lambda now: step.moved(now.done, now.total))
        packets, rate = reading.counter.packets, reading.counter.read_bytes / max(time.monotonic() - began, 0.001)
        step.detail(f"{units.counted(packets, 'packet')}, {units.size(rate)}/s")
    hosts, links = reading.hosts(), reading.links()
    roles = find_roles(hosts, links, reading.samples(), sms=sms, node=node)
    observation = reading.observe(roles.by_index, hosts, links)
    return judge(observation, roles, signatures)


def _read(question: Question, signatures: Sequence[Signature], node: str, watch: Watch) -> Reading:
    """The files, or what passes an interface for as long as was asked."""
    if not question.live:
        return read_captures(question.captures, signatures=signatures, node=node, watch=watch)
    began = time.monotonic()
    with Local().running(*tcpdump.capture_argv(question.live, question.duration_s)) as running:
        # The kernel hands the last second's packets over late.
        late = threading.Timer(tcpdump.LAST_S, running.stop)
        source = Source(running.out, endless=True, end=late.start)
        try:
            reading = read_stream(question.live, source, signatures=signatures, node=node, watch=watch)
        except CaptureError:
            tcpdump.read_counts(running.result())  # which says why, if it could not begin
            raise
        finally:
            late.cancel()
        counts = tcpdump.read_counts(running.result())
    lasted = time.monotonic() - began
    if counts.dropped:
        reading.lost = counts.dropped
    if not reading.interrupted and lasted < question.duration_s - 1:
        reading.remarks.append(f"tcpdump ended after {units.span(lasted)} of {units.span(question.duration_s)}")
    return reading


@contextmanager
def _warming(question: Question) -> Iterator[None]:
    """While the native core reads, get ready what reads single packets; small captures are read before that is done."""
    sizes = [Path(name).stat().st_size for name in question.captures if name != STDIN]
    if sum(sizes) < LARGE and STDIN not in question.captures and not question.live:
        yield
        return
    thread = threading.Thread(target=_warm, daemon=True)
    thread.start()
    yield
    thread.join()


def _warm() -> None:
    # What is wrong with it is told where it is used.
    with suppress(Exception):
        warm()


# What the command line says, checked before anything is read


def check_captures(question: Question) -> None:
    """Refuse what cannot be captures, before hours are spent on the others.

    Raises:
        ConfigError: nothing is named, or something that is not there or no file.
    """
    if bool(question.live) == bool(question.captures):
        words = "captures and --live exclude each other" if question.live else "no capture is named"
        raise ConfigError(words, hint="sms classify FILE..., or - for standard input, or --live INTERFACE")
    if question.captures.count(STDIN) > 1:
        raise ConfigError("standard input (-) can be read only once", hint="name - once")
    for name in question.captures:
        if name == STDIN:
            continue
        shown = printable(name, 200)
        if Path(name).is_dir():
            raise ConfigError(f"{shown} is a folder", hint=f"name the files in it: {shown.rstrip('/')}/*.pcap")
        try:
            # A named pipe would wait for its writer here.
            if Path(name).is_fifo():
                continue
            with Path(name).open("rb"):
                pass
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"{shown}: cannot be read: {reason}", hint="check the path and its permissions") from None


def check_address(value: str, option: str) -> str:
    """An IP address, or a MAC in lower case with colons; "" stays.

    Raises:
        ConfigError: it is neither.
    """
    if not value:
        return ""
    mac = value.lower().replace("-", ":")
    if re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", mac):
        return mac
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        hint = "write it as 10.0.0.1, fd00::1 or 02:00:0a:4d:00:01"
        raise ConfigError(f"{option}: {printable(value)} is neither an IP address nor a MAC", hint=hint) from None


def parse_duration(text: str) -> float:
    """Seconds of a span such as 90, 90s, 10m, 1h30m or 2d.

    Raises:
        ConfigError: it is none, or longer than a year.
    """
    parts = r"(?:(\d{1,5})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s?)?"
    found = re.fullmatch(parts, text, re.ASCII) if text else None
    seconds = (
        sum(int(part or 0) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True))
        if found
        else 0
    )
    if not 0 < seconds <= 366 * 86400:
        raise ConfigError(
            f"--duration: {printable(text)} is not a span of time", hint="write it as 90s, 10m, 1h30m or 2d"
        )
    return seconds


def parse_overrides(words: Iterable[str]) -> dict[str, Verdict]:
    """Verdicts by name out of NAME=VERDICT.

    Raises:
        ConfigError: a word is not of that form.
    """
    overrides: dict[str, Verdict] = {}
    for word in words:
        name, _, wanted = word.partition("=")
        verdict = next((one for one in VERDICTS if one == wanted), None)
        if not name or verdict is None:
            hint = nearest(wanted, VERDICTS) if name and wanted else "write NAME=time-critical or NAME=deferrable"
            raise ConfigError(f"--override: {printable(word)} is not NAME=VERDICT", hint=hint)
        if overrides.setdefault(name, verdict) != verdict:
            raise ConfigError(f"--override: {printable(name)} is said to be both", hint="say it once")
    return overrides


# The catalogue, as the room of analysis wants it


def named(overrides: Mapping[str, Verdict], catalog: Mapping[str, Service]) -> dict[str, Verdict]:
    """Overrides by the catalogue's names, where they name a service by another of its names or by its port."""
    other = {alias: each.name for each in catalog.values() for alias in (*each.known_as, *each.ports)}
    return {name if name in catalog else other.get(name.lower(), name): verdict for name, verdict in overrides.items()}


def make_signatures(
    shipped: Mapping[str, Service], own: Mapping[str, OwnService], overrides: Mapping[str, Verdict]
) -> tuple[Signature, ...]:
    """How every service is told by its traffic: the site's own first, whose ports are then nobody else's."""
    ours = [make_signature(each, _carried(each, shipped), overrides) for each in own.values()]
    taken = {port for each in ours for port in each.ports}
    theirs = [make_signature(each, each.container, overrides) for name, each in shipped.items() if name not in own]
    return (*ours, *(replace(each, ports=tuple(port for port in each.ports if port not in taken)) for each in theirs))


def _carried(service: Service, shipped: Mapping[str, Service]) -> bool:
    return service.name in shipped and shipped[service.name].container


def make_signature(service: Service, carried: bool, overrides: Mapping[str, Verdict]) -> Signature:
    """One service of the catalogue as the room of analysis wants it."""
    traffic = service.traffic
    verdict: str = service.verdict if isinstance(service, OwnService) else ""
    why = service.why if isinstance(service, OwnService) else ""
    if service.name in overrides:
        verdict, why = overrides[service.name], SAID
    # The ports of a service that routes are what it answers itself, not what it is told by.
    ports = () if traffic.routed else dict.fromkeys((*service.ports, *traffic.ports))
    return Signature(
        name=service.name,
        summary=service.summary,
        ports=tuple(_port(port) for port in ports),
        first=tuple(FirstBytes(*_port(each.port), each.at, *each.bounds) for each in traffic.first),
        routed=traffic.routed,
        critical=service.critical,
        boot=traffic.boot,
        poll=traffic.poll,
        every_s=traffic.every_s,
        budget_s=service.outage.seconds,
        budget_why=service.outage.why,
        carried=carried,
        silent=traffic.silent,
        advice=service.advice,
        verdict=verdict,
        verdict_why=why,
    )


def _port(text: str) -> tuple[int, int]:
    protocol, _, number = text.partition("/")
    return PROTOCOLS[protocol], 0 if number == "any" else int(number)


def apply_overrides(found: Classification, overrides: Mapping[str, Verdict]) -> tuple[Classification, list[str]]:
    """Verdicts of the site on services that the catalogue does not know; and the names that nothing goes by."""
    services = tuple(
        replace(
            each, verdict=overrides[each.name], overridden=True, reasons=(f"the site says so: {SAID}", *each.reasons)
        )
        if each.name in overrides and not each.overridden
        else each
        for each in found.services
    )
    seen = {each.name for each in services}
    return replace(found, services=services), [name for name in overrides if name not in seen]


# What comes out


def render(found: Classification, form: str) -> str:
    """The classification as text: json, yaml or html."""
    if form == "json":
        return json.dumps(found.as_dict(), indent=2) + "\n"
    if form == "yaml":
        import yaml

        return str(yaml.safe_dump(found.as_dict(), sort_keys=False, width=120))
    from analysis.report.html import render_html

    return render_html(found)


def check_output(path: Path, captures: Iterable[str]) -> None:
    """Refuse an output that would replace a capture, or that cannot be written, before anything is read.

    Raises:
        ConfigError: it is one of the captures, a folder, or in a folder that is not there.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint=f"name a file, such as {path / 'classification.yaml'}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder", hint="create it first, or name another file with -o")
    for name in captures:
        if name != STDIN and path.exists() and path.samefile(name):
            raise ConfigError(f"{path} is one of the captures", hint="name another file with -o")


def write_output(text: str, path: Path) -> None:
    """Write it whole or not at all; what is no file (/dev/stdout, a pipe) is written to as it is.

    Raises:
        SmsError: it cannot be written.
    """
    target = path.resolve()
    try:
        if target.exists() and not target.is_file():
            with target.open("w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            replace_file(text, target, force=True)
    except OSError as error:
        reason = (error.strerror or os.strerror(error.errno or 0)).lower()
        raise SmsError(f"{path} cannot be written: {reason}", hint="name another file with -o") from None
