"""`sms classify`: from captures and the catalogue to a verdict on every service."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from analysis import units
from analysis.addresses import read_address
from analysis.classify import classify as judge
from analysis.errors import CaptureError
from analysis.model import Classification, Made, Verdict
from analysis.protocols import warm
from analysis.reading import Reading, Source, Watch, read_captures, read_stream
from analysis.roles import find_roles
from analysis.signatures import PROTOCOLS, FirstBytes, Signature
from appliance import __version__
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

__all__ = ["Catalogue", "Question", "classify", "open_catalogue", "units"]

STDIN = "-"
LARGE = 256 << 20
"""Bytes of captures that take the core longer than Python takes to import what comes after."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".html": "html", ".htm": "html"}
"""The form that a file's name asks for."""


@dataclass(frozen=True)
class Question:
    """What to classify, and what is known beforehand.

    Attributes:
        captures: files; "-" is standard input. Empty with ``live``.
        live, duration_s: capture on this interface for so long instead.
        sms: address or MAC of the management node; found when empty.
        node: look at this node alone: address or MAC.
        nodes: networks whose addresses are compute nodes.
        services: folder of the site's own services.
        overrides: verdicts of the site by name.
    """

    captures: tuple[str, ...] = ()
    live: str = ""
    duration_s: float = 0
    sms: str = ""
    node: str = ""
    nodes: tuple[str, ...] = ()
    services: Path | None = None
    overrides: Mapping[str, Verdict] = field(default_factory=dict)


@dataclass(frozen=True)
class Catalogue:
    """The services that are shipped, and the site's own, which stand before them."""

    shipped: Mapping[str, Service]
    own: Mapping[str, OwnService]

    def find(self, name: str) -> str:
        """The name of a service that is called so, or has such a port; else the name as it is."""
        both: dict[str, Service] = {**self.shipped, **self.own}
        other = {alias.lower(): each.name for each in both.values() for alias in (*each.ports, *each.known_as)}
        lower = name.lower()
        return lower if lower in both else other.get(lower, name)

    def has(self, name: str) -> bool:
        """Whether a service has this name."""
        return name in self.shipped or name in self.own

    def nearest(self, name: str, seen: Iterable[str]) -> str:
        """A hint for a name that nothing goes by."""
        names = {*self.shipped, *self.own, *(alias for each in self.shipped.values() for alias in each.known_as)}
        hint = nearest(name, {*names, *seen})
        return hint if hint.startswith("did you mean") else nearest(name, seen).replace("known here", "seen here")


def open_catalogue(services: Path | None) -> Catalogue:
    """What is shipped, and the site's own folder.

    Raises:
        ConfigError: with every mistake in that folder.
    """
    shipped = read_catalog(share("definitions", "services"))
    return Catalogue(shipped, read_own(services, shipped) if services else {})


def classify(question: Question, progress: Progress, catalogue: Catalogue | None = None) -> Classification:
    """The classification of what the captures hold.

    Raises:
        ConfigError: a capture cannot be opened, or an option makes no sense.
        SmsError: the captures hold nothing that can be classified.
    """
    check_captures(question)
    sms, node = (check_address(value, name) for value, name in ((question.sms, "--sms"), (question.node, "--node")))
    nodes = tuple(map(check_network, question.nodes))
    catalogue = catalogue or open_catalogue(question.services)
    question = replace(question, sms=sms, node=node, nodes=nodes)
    overrides = {catalogue.find(name): verdict for name, verdict in question.overrides.items()}
    try:
        found = _look(question, make_signatures(catalogue), overrides, progress)
    except CaptureError as error:
        raise SmsError(units.plain(error.message), hint=units.plain(error.hint)) from error
    return replace(found, made=Made(__version__, options=options_of(question)))


def options_of(question: Question) -> dict[str, str]:
    """The options that change what comes out, as they were given."""
    overrides = ", ".join(f"{name}={verdict}" for name, verdict in question.overrides.items())
    folder = str(question.services or "")
    said = {"sms": question.sms, "node": question.node, "nodes": ", ".join(question.nodes)}
    said |= {"services": folder, "override": overrides, "live": question.live}
    return {name: value for name, value in said.items() if value}


def unused_overrides(question: Question, catalogue: Catalogue, found: Classification) -> list[str]:
    """Words on each override that changed nothing, because there is no such service in the captures."""
    seen = {each.name for each in found.services}
    unused = [name for name in question.overrides if catalogue.find(name) not in seen]
    return [f"--override: {printable(name)} is not in the captures; {_else(name, catalogue, seen)}" for name in unused]


def _else(name: str, catalogue: Catalogue, seen: Iterable[str]) -> str:
    known = catalogue.find(name)
    return f"{known} was not seen" if catalogue.has(known) else catalogue.nearest(name, seen)


def _look(
    question: Question, signatures: Sequence[Signature], overrides: Mapping[str, Verdict], progress: Progress
) -> Classification:
    with progress.step(f"capture on {question.live}" if question.live else "read the captures") as step:
        began = time.monotonic()
        with _warming(question):
            reading = _read(question, signatures, lambda now: step.moved(now.done, now.total))
        rate = reading.counter.read_bytes / max(time.monotonic() - began, 0.001)
        # How fast packets came, where one waits for them, says nothing.
        waited = question.live or STDIN in question.captures
        step.detail(units.counted(reading.counter.packets, "packet") + ("" if waited else f", {units.size(rate)}/s"))
    hosts, links = reading.hosts(), reading.links()
    sms, node, nodes = question.sms, question.node, question.nodes
    totals = reading.counter.totals()
    roles = find_roles(hosts, links, reading.samples(), sms=sms, node=node, nodes=nodes, totals=totals)
    observation = reading.observe(roles.by_index, hosts, links)
    return judge(observation, roles, signatures, overrides)


def _read(question: Question, signatures: Sequence[Signature], watch: Watch) -> Reading:
    """The files, or what passes an interface for as long as was asked."""
    if not question.live:
        return read_captures(question.captures, signatures=signatures, node=question.node, watch=watch)
    began = time.monotonic()
    with Local().running(*tcpdump.capture_argv(question.live, question.duration_s)) as running:
        # The kernel hands the last second's packets over late.
        late = threading.Timer(tcpdump.LAST_S, running.stop)
        source = Source(running.out, endless=True, end=late.start)
        try:
            reading = read_stream(question.live, source, signatures=signatures, node=question.node, watch=watch)
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
    try:
        yield
    finally:
        thread.join()  # an interpreter that ends under a thread that imports aborts


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
        except (OSError, ValueError) as error:
            reason = (getattr(error, "strerror", "") or str(error)).lower()
            raise ConfigError(f"{shown}: cannot be read: {reason}", hint="check the path and its permissions") from None
    _check_twice(question.captures)


def _check_twice(captures: Iterable[str]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for name in captures:
        if name == STDIN:
            continue
        status = Path(name).stat()
        file = (status.st_dev, status.st_ino)
        if file in seen:
            also = f", as {printable(seen[file], 200)} too" if seen[file] != name else ""
            raise ConfigError(f"{printable(name, 200)} is given twice{also}", hint="name every file once")
        seen[file] = name


def check_address(value: str, option: str) -> str:
    """An IP address, or a MAC in lower case with colons; "" stays.

    Raises:
        ConfigError: it is neither.
    """
    if value and not (address := read_address(value)):
        hint = "write it as 10.0.0.1, fd00::1 or 02:00:0a:4d:00:01"
        raise ConfigError(f"{option}: {printable(value)} is neither an IP address nor a MAC", hint=hint)
    return address if value else ""


def check_network(value: str) -> str:
    """A network in its usual form; host bits are dropped.

    Raises:
        ConfigError: it is none, or all addresses.
    """
    try:
        network = ipaddress.ip_network(value, strict=False)
    except ValueError:
        hint = "write it as 10.2.0.0/16 or fd00:2::/64"
        raise ConfigError(f"--nodes: {printable(value)} is not a network", hint=hint) from None
    if not network.prefixlen:
        raise ConfigError(f"--nodes: {network} is every address there is", hint="name the compute nodes' networks")
    return str(network)


def check_port(option: str, name: str) -> None:
    """Refuse the name of a port that cannot be.

    Raises:
        ConfigError: the number is none, or none of a port.
    """
    protocol, slash, number = name.lower().partition("/")
    if not slash or protocol not in ("tcp", "udp", "sctp") or number == "dynamic":
        return
    if not re.fullmatch(r"[0-9]{1,5}", number, re.ASCII) or not 0 < int(number) < 65536:
        raise ConfigError(f"{option}: {printable(name)} is not a port", hint="ports are 1 to 65535, such as tcp/4444")


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
        check_port("--override", name)
        if overrides.setdefault(name, verdict) != verdict:
            raise ConfigError(f"--override: {printable(name)} is said to be both", hint="say it once")
    return overrides


# The catalogue, as the room of analysis wants it


def make_signatures(catalogue: Catalogue) -> tuple[Signature, ...]:
    """How every service is told by its traffic: the site's own first, whose ports are then nobody else's."""
    shipped, own = catalogue.shipped, catalogue.own
    ours = [make_signature(each, _carried(each, shipped)) for each in own.values()]
    taken = {port for each in ours for port in each.ports}
    theirs = [make_signature(each, each.container) for name, each in shipped.items() if name not in own]
    return (*ours, *(_without(each, taken) for each in theirs))


def _without(signature: Signature, taken: Collection[tuple[int, int]]) -> Signature:
    """Less the ports that a service of the site's own has; not seeing it means nothing then."""
    left = tuple(port for port in signature.ports if port not in taken)
    return replace(signature, ports=left, silent=signature.silent or left != signature.ports)


def _carried(service: Service, shipped: Mapping[str, Service]) -> bool:
    return service.name in shipped and shipped[service.name].container


def make_signature(service: Service, carried: bool) -> Signature:
    """One service of the catalogue as the room of analysis wants it."""
    traffic = service.traffic
    verdict: str = service.verdict if isinstance(service, OwnService) else ""
    why = service.why if isinstance(service, OwnService) else ""
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
    try:
        if path.exists() and not path.is_file():
            # By its own name: what /dev/stdout leads to has none where that is a pipe.
            with path.open("w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            replace_file(text, path.resolve(), force=True)
    except OSError as error:
        reason = (error.strerror or os.strerror(error.errno or 0)).lower()
        raise SmsError(f"{path} cannot be written: {reason}", hint="name another file with -o") from None
