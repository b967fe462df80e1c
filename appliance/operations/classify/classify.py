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
from analysis.addresses import read_address
from analysis.classify import classify as judge
from analysis.errors import CaptureError
from analysis.model import Classification, Made, Verdict
from analysis.protocols import warm
from analysis.reading import Reading, Watch, read_captures, read_stream
from analysis.roles import find_roles
from analysis.signatures import Signature
from analysis.sources import STDIN, Source, check_files
from appliance import __version__
from appliance.config.wording import nearest
from appliance.errors import ConfigError, SmsError
from appliance.host.local import Local
from appliance.operations.classify.signatures import Catalogue, make_signatures, open_catalogue
from appliance.operations.site.init import replace_file
from appliance.progress import Progress
from appliance.text import SHORT, printable
from appliance.tools import tcpdump

__all__ = ["STDIN", "Catalogue", "Question", "classify", "open_catalogue", "units"]

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
    return [
        f"--override: {printable(name, SHORT)} is not in the captures; {_else(name, catalogue, seen)}"
        for name in unused
    ]


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
    if question.live and question.captures:
        raise ConfigError("captures and --live exclude each other", hint="sms classify --live INTERFACE")
    if question.live:
        return
    try:
        check_files(question.captures)
    except CaptureError as error:
        raise ConfigError(units.plain(error.message), hint=units.plain(error.hint)) from None


def check_address(value: str, option: str) -> str:
    """An IP address, or a MAC in lower case with colons; "" stays.

    Raises:
        ConfigError: it is neither.
    """
    if value and not (address := read_address(value)):
        hint = "write it as 10.0.0.1, fd00::1 or 02:00:0a:4d:00:01"
        raise ConfigError(f"{option}: {printable(value, SHORT)} is neither an IP address nor a MAC", hint=hint)
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
        raise ConfigError(f"--nodes: {printable(value, SHORT)} is not a network", hint=hint) from None
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
        raise ConfigError(
            f"{option}: {printable(name, SHORT)} is not a port", hint="ports are 1 to 65535, such as tcp/4444"
        )


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
            raise ConfigError(f"--override: {printable(word, SHORT)} is not NAME=VERDICT", hint=hint)
        check_port("--override", name)
        if overrides.setdefault(name, verdict) != verdict:
            raise ConfigError(f"--override: {printable(name, SHORT)} is said to be both", hint="say it once")
    return overrides


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
