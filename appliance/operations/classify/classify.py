"""`sms classify`: classify the services in captures by the catalogue."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from analysis import units
from analysis.addresses import read_address
from analysis.errors import CaptureError
from analysis.reading import ProgressCallback, Reading, read_captures, read_stream
from analysis.signatures import Signature
from analysis.sources import STDIN, Source, check_files
from appliance import __version__
from appliance.errors import ConfigError, SmsError
from appliance.operations.classify.signatures import Catalogue, make_signatures, open_catalogue
from appliance.progress import Progress
from appliance.text import SHORT, nearest, printable

if TYPE_CHECKING:
    from analysis.classification import Report
    from analysis.model import Classification, Verdict
    from appliance.host.base import Host

__all__ = ["STDIN", "Catalogue", "ClassifyOptions", "classify", "open_catalogue", "units"]

SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".html": "html", ".htm": "html"}
"""Output format by the suffix of the file's name."""


@dataclass(frozen=True)
class ClassifyOptions:
    """What to classify, and what is already known.

    Attributes:
        captures: files; "-" is standard input. Empty with ``live``.
        live, duration_s: capture on this interface for this long instead.
        host: that has the interface; None: this machine.
        only: filter of that capture (pcap-filter(7)).
        sms: address or MAC of the management node; detected if empty.
        node: restrict the capture to this node: address or MAC.
        nodes: networks whose addresses are compute nodes.
        services: folder of the site's own services.
        overrides: the site's verdicts by service name.
        compare: file with an earlier classification.
    """

    captures: tuple[str, ...] = ()
    live: str = ""
    duration_s: float = 0
    host: Host | None = None
    only: str = ""
    sms: str = ""
    node: str = ""
    nodes: tuple[str, ...] = ()
    services: Path | None = None
    overrides: Mapping[str, Verdict] = field(default_factory=dict)
    compare: str = ""


def classify(
    options: ClassifyOptions,
    progress: Progress,
    catalogue: Catalogue | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Classification:
    """Classify the services in the captures.

    Args:
        meanwhile: called once while files are read, which does not need this thread.

    Raises:
        ConfigError: a capture cannot be opened, or an option is invalid.
        SmsError: the captures cannot be classified.
    """
    check_captures(options)
    sms, node = (check_address(value, name) for value, name in ((options.sms, "--sms"), (options.node, "--node")))
    nodes = tuple(map(check_network, options.nodes))
    before = read_earlier(options.compare) if options.compare else None
    catalogue = catalogue or open_catalogue(options.services)
    options = replace(options, sms=sms, node=node, nodes=nodes)
    overrides = {catalogue.find(name): verdict for name, verdict in options.overrides.items()}
    try:
        found = _analyze(options, make_signatures(catalogue), overrides, progress, meanwhile)
    except CaptureError as error:
        raise SmsError(units.plain(error.message), hint=units.plain(error.hint)) from error
    from analysis.model import Provenance

    found = replace(found, made=Provenance(__version__, options=options_of(options)))
    if before is None:
        return found
    from analysis.comparison import compare

    return replace(found, compared=compare(before, options.compare, found))


def read_earlier(file: str) -> Report:
    """Read the classification to compare with, before the captures, which may take hours.

    Raises:
        ConfigError: it cannot be read, or is not a classification.
    """
    from analysis.classification import ClassificationError, read_classification
    from appliance.config.read import read_text

    hint = "name a file that sms classify -o FILE.yaml or FILE.json wrote"
    try:
        return read_classification(read_text(Path(file)))
    except ConfigError as error:
        if not error.problems:
            raise
        raise ConfigError(f"--compare: {file}: it is not text", hint=hint) from None
    except ClassificationError as error:
        raise ConfigError(f"--compare: {file}: {units.plain(str(error))}", hint=hint) from None


def options_of(options: ClassifyOptions) -> dict[str, str]:
    """Return the options that affect the result, as given."""
    overrides = ", ".join(f"{name}={verdict}" for name, verdict in options.overrides.items())
    folder = str(options.services or "")
    given = {"sms": options.sms, "node": options.node, "nodes": ", ".join(options.nodes)}
    given |= {"services": folder, "override": overrides, "live": options.live, "compare": options.compare}
    return {name: value for name, value in given.items() if value}


def unused_overrides(options: ClassifyOptions, catalogue: Catalogue, found: Classification) -> list[str]:
    """Return a message for each override without effect, because its service is not in the captures."""
    seen = {each.name for each in found.services}
    unused = [name for name in options.overrides if catalogue.find(name) not in seen]
    return [
        f"--override: {printable(name, SHORT)} is not in the captures; {_explain_unused(name, catalogue, seen)}"
        for name in unused
    ]


def _explain_unused(name: str, catalogue: Catalogue, seen: Collection[str]) -> str:
    known = catalogue.find(name)
    return f"{known} was not seen" if catalogue.has(known) else catalogue.nearest(name, seen)


def _analyze(
    options: ClassifyOptions,
    signatures: Sequence[Signature],
    overrides: Mapping[str, Verdict],
    progress: Progress,
    meanwhile: Callable[[], None] | None,
) -> Classification:
    def prepare() -> None:
        """Import what judges: it takes as long as the core takes for 200 MB."""
        import analysis.classify
        import analysis.servers  # noqa: F401

        if meanwhile:
            meanwhile()

    with progress.step(f"capture on {options.live}" if options.live else "read the captures") as step:
        began = time.monotonic()
        reading = _read(options, signatures, lambda now: step.moved(now.done, now.total), prepare)
        rate = reading.counter.read_bytes / max(time.monotonic() - began, 0.001)
        # The rate means nothing if packets had to be waited for.
        waited = options.live or STDIN in options.captures
        step.detail(units.counted(reading.counter.packets, "packet") + ("" if waited else f", {units.size(rate)}/s"))
    from analysis.classify import classify as judge
    from analysis.roles import find_roles, no_hosts_error
    from analysis.servers import find_servers

    hosts, links = reading.hosts(), reading.links()
    if not hosts:
        raise no_hosts_error(options.node, reading.counter.totals())
    roles = find_roles(hosts, links, reading.samples, sms=options.sms, node=options.node, nodes=options.nodes)
    roles = find_servers(roles, hosts, links, signatures)
    observation = reading.observe(roles.by_index, hosts, links)
    return judge(observation, roles, signatures, overrides)


def _read(
    options: ClassifyOptions,
    signatures: Sequence[Signature],
    on_progress: ProgressCallback,
    meanwhile: Callable[[], None],
) -> Reading:
    """Read the files, or capture on the interface for the given duration."""
    if not options.live:
        return read_captures(
            options.captures, signatures=signatures, node=options.node, on_progress=on_progress, meanwhile=meanwhile
        )
    return _read_live(options, signatures, on_progress)


def read_flows(options: ClassifyOptions) -> list[tuple[str, str, int, int]]:
    """Capture on an interface; return client, server, IP protocol and the server's port of all traffic.

    Raises:
        SmsError: it cannot be captured.
        Unreachable: the connection to the host broke.
    """
    try:
        reading = _read_live(options, make_signatures(open_catalogue(options.services)))
    except CaptureError as error:
        raise SmsError(units.plain(error.message), hint=units.plain(error.hint)) from error
    hosts = reading.hosts()
    return [(hosts[one.client].address, hosts[one.server].address, one.protocol, one.port) for one in reading.links()]


def _read_live(
    options: ClassifyOptions, signatures: Sequence[Signature], on_progress: ProgressCallback | None = None
) -> Reading:
    """Capture on an interface for the given duration.

    Raises:
        CaptureError: the output is not a capture.
        SmsError: tcpdump could not start.
        Unreachable: the connection to the host broke.
    """
    from appliance.host.local import Local
    from appliance.tools import tcpdump

    began = time.monotonic()
    with tcpdump.capturing(options.host or Local(), options.live, options.duration_s, options.only) as running:
        # The kernel delivers the packets of the last second late.
        late = threading.Timer(tcpdump.LAST_S, running.stop)
        source = Source(running.out, endless=True, end=late.start)
        try:
            reading = read_stream(
                options.live, source, signatures=signatures, node=options.node, on_progress=on_progress
            )
        except CaptureError:
            tcpdump.read_counts(running.result())  # raises the reason if tcpdump could not start
            raise
        finally:
            late.cancel()
        counts = tcpdump.read_counts(running.result())
    lasted = time.monotonic() - began
    if counts.dropped:
        reading.lost = counts.dropped
    if not reading.interrupted and lasted < options.duration_s - 1:
        reading.remarks.append(f"tcpdump ended after {units.span(lasted)} of {units.span(options.duration_s)}")
    return reading


# Command line arguments, checked before anything is read


def check_captures(options: ClassifyOptions) -> None:
    """Check all captures before the first is read, which may take hours.

    Raises:
        ConfigError: no capture is given, or one does not exist or is not readable.
    """
    if options.live and options.captures:
        raise ConfigError("captures and --live are mutually exclusive", hint="sms classify --live INTERFACE")
    if options.live:
        return
    try:
        check_files(options.captures)
    except CaptureError as error:
        raise ConfigError(units.plain(error.message), hint=units.plain(error.hint)) from None


def check_address(value: str, option: str) -> str:
    """Return an IP address, or a MAC in lower case with colons; "" for "".

    Raises:
        ConfigError: it is neither.
    """
    if value and not (address := read_address(value)):
        hint = "write it as 10.0.0.1, fd00::1 or 02:00:0a:4d:00:01"
        raise ConfigError(f"{option}: {printable(value, SHORT)} is neither an IP address nor a MAC", hint=hint)
    return address if value else ""


def check_network(value: str) -> str:
    """Return a network in canonical form, without host bits.

    Raises:
        ConfigError: it is not a network, or it contains all addresses.
    """
    try:
        network = ipaddress.ip_network(value, strict=False)
    except ValueError:
        hint = "write it as 10.2.0.0/16 or fd00:2::/64"
        raise ConfigError(f"--nodes: {printable(value, SHORT)} is not a network", hint=hint) from None
    if not network.prefixlen:
        raise ConfigError(f"--nodes: {network} contains every address", hint="name the compute nodes' networks")
    return str(network)


def check_port(option: str, name: str) -> None:
    """Reject invalid ports such as tcp/99999.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    protocol, slash, number = name.lower().partition("/")
    if not slash or protocol not in ("tcp", "udp", "sctp") or number == "dynamic":
        return
    if not re.fullmatch(r"[0-9]{1,5}", number, re.ASCII) or not 0 < int(number) < 65536:
        raise ConfigError(
            f"{option}: {printable(name, SHORT)} is not a port", hint="ports are 1 to 65535, such as tcp/4444"
        )


def parse_overrides(values: Iterable[str]) -> dict[str, Verdict]:
    """Parse NAME=VERDICT options into verdicts by name.

    Raises:
        ConfigError: a value does not have this form.
    """
    from analysis.model import VERDICTS

    overrides: dict[str, Verdict] = {}
    for value in values:
        name, _, text = value.partition("=")
        verdict = next((one for one in VERDICTS if one == text), None)
        if not name or verdict is None:
            hint = nearest(text, VERDICTS) if name and text else "write NAME=time-critical or NAME=deferrable"
            raise ConfigError(f"--override: {printable(value, SHORT)} is not NAME=VERDICT", hint=hint)
        check_port("--override", name)
        if overrides.setdefault(name, verdict) != verdict:
            raise ConfigError(f"--override: {printable(name, SHORT)} has two verdicts", hint="name it once")
    return overrides


# Output


def render(found: Classification, form: str) -> str:
    """Render the classification as json, yaml or html."""
    if form == "json":
        return json.dumps(found.as_dict(), indent=2) + "\n"
    if form == "yaml":
        import yaml

        return str(yaml.safe_dump(found.as_dict(), sort_keys=False, width=120))
    from analysis.report.html import render_html

    return render_html(found)


def check_output(path: Path, captures: Iterable[str]) -> None:
    """Reject an output that would replace a capture, or that cannot be written, before anything is read.

    Raises:
        ConfigError: it is one of the captures, a folder, or in a folder that does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint=f"name a file, such as {path / 'classification.yaml'}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder", hint="create it first, or name another file with -o")
    for name in captures:
        if name != STDIN and path.exists() and path.samefile(name):
            raise ConfigError(f"{path} is one of the captures", hint="name another file with -o")


def write_output(text: str, path: Path) -> None:
    """Write a file atomically; write directly to what is not a regular file (/dev/stdout, a pipe).

    Raises:
        SmsError: it cannot be written.
    """
    from appliance.operations.site.init import replace_file

    try:
        if path.exists() and not path.is_file():
            # Not resolved: if /dev/stdout is a pipe, its target has no path.
            with path.open("w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            replace_file(text, path.resolve(), force=True)
    except OSError as error:
        reason = (error.strerror or os.strerror(error.errno or 0)).lower()
        raise SmsError(f"{path} cannot be written: {reason}", hint="name another file with -o") from None
