"""`sms survey`: read what a live management node has; change nothing there."""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.classification import ClassificationError, read_classification
from analysis.units import span
from appliance.catalog import Service, read_catalog
from appliance.config.read import read_text
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.host.local import Local
from appliance.operations.adopt.capture import capture_services
from appliance.operations.classify.classify import ClassifyOptions, render
from appliance.operations.site.find import open_site
from appliance.plan.adopt.accounting import accounting_conf
from appliance.plan.adopt.draft import Draft
from appliance.plan.adopt.frames import Frames, Section, read_frames
from appliance.plan.adopt.model import Finding, Survey
from appliance.plan.adopt.read_slurm import find_conf
from appliance.plan.adopt.report import compare, report_text, schema_text, survey_json
from appliance.plan.adopt.survey import Request, examine
from appliance.plan.adopt.traffic import no_ssh, ssh_ports
from appliance.progress import Progress
from appliance.share import share
from appliance.shared.files import make_folder, replace_file
from appliance.text import one_line, printable
from appliance.tools.scripts import script_argv

if TYPE_CHECKING:
    from analysis.model import Classification

__all__ = ["SurveyOptions", "Written", "schema_text", "survey", "survey_json", "write_json", "write_site"]

SECONDS = 60
"""After which the script begins no further section; each takes five seconds at most."""
KILLED_S, LATE_S = 120, 15
QUERY_S = 60
MOST_BYTES = 64 << 20
KEY = "/etc/munge/munge.key"
KEY_BYTES = range(32, 1025)
"""What munge accepts as a key."""
TARGET = re.compile(r"(?:([a-z_][a-z0-9_-]{0,31})@)?([A-Za-z0-9][A-Za-z0-9.-]{0,252})(?::([0-9]{1,5}))?")
FOLDER = re.compile(r"/[A-Za-z0-9._/@:+-]{0,200}")


@dataclass(frozen=True)
class SurveyOptions:
    """What to read.

    Attributes:
        target: [USER@]HOST[:PORT]; empty: this machine.
        folder: of slurm.conf, if it is none of the usual ones.
        munge_key: fetch the munge key, too.
        classification: a file of `sms classify`.
        live_s: capture the nodes' network there for this long, and classify it; 0: do not.
        services: folder of the site's own services, for that.
    """

    target: str = ""
    folder: str = ""
    munge_key: bool = False
    classification: Path | None = None
    live_s: float = 0
    services: Path | None = None


@dataclass(frozen=True)
class Written:
    """A site that was written; ``problems``: what its reader does not accept yet."""

    files: tuple[str, ...]
    problems: tuple[str, ...]


def survey(options: SurveyOptions, progress: Progress) -> tuple[Survey, Draft]:
    """Return what the node has, and the draft of its site.

    Raises:
        ConfigError: an option is invalid.
        Refused: sudo is not permitted without a password there, or the munge key cannot be read.
        Unreachable: the host does not answer, or its host key is not the known one.
    """
    if options.folder and not FOLDER.fullmatch(options.folder):
        raise ConfigError(
            f"--slurm-folder: {printable(options.folder, 60)} is not an absolute path",
            hint="write it as /opt/slurm/etc",
        )
    verdicts = _read_verdicts(options.classification) if options.classification else {}
    host = open_host(options.target)
    services = read_catalog(share("definitions", "services"))
    with progress.step(f"read {host.name}"):
        frames = read_frames(collect(host, options.folder))
        query_accounting(host, frames, options.folder)
        key = fetch_key(host) if options.munge_key else b""
    request = Request(options.target or host.name, socket.gethostname(), options.folder, bool(key))
    found, draft = examine(frames, services, request)
    if key:
        draft.files["secrets/munge.key"] = key
    if options.live_s:
        classified = _capture(host, found, options, progress)
        verdicts = {one.name: one.verdict for one in classified.services}
        draft.files["classification.yaml"] = render(classified, "yaml").encode()
    return (_judge(found, verdicts, services) if verdicts else found), draft


def _capture(host: Host, found: Survey, options: SurveyOptions, progress: Progress) -> Classification:
    """Capture the network of the compute nodes on the node, and classify its services.

    Raises:
        Refused: that network was not found, or it has no tcpdump.
        SmsError: it cannot be captured or classified.
    """
    link = next((one for one in found.links if one.name == found.provisioning and one.addresses), None)
    if link is None:
        raise Refused(
            f"{host.name}: the network of the compute nodes was not found: nothing to capture",
            hint="capture it with tcpdump, then: sms classify FILE -o found.yaml, and --classification found.yaml",
        )
    own = link.addresses[0].partition("/")[0]
    with progress.step(f"capture {link.name} of {host.name}, {span(options.live_s)}") as step:
        wanted = ClassifyOptions(
            live=link.name,
            duration_s=options.live_s,
            host=host,
            only=no_ssh(ssh_ports(found)),
            sms=own,
            services=options.services,
        )
        classified = capture_services(wanted)
        step.detail(f"{classified.capture.packets} packets")
    return classified


def open_host(target: str) -> Host:
    """Return the host that is named; this machine if none is.

    Raises:
        ConfigError: it is not a host.
    """
    if not target:
        return Local(socket.gethostname())
    found = TARGET.fullmatch(target)
    if not found or not 0 < int(found[3] or 22) < 65536:
        raise ConfigError(f"{printable(target, 60)} is not a host", hint="write it as sms-old or admin@10.0.0.1:22")
    from appliance.host.ssh import Ssh  # importing paramiko takes 0.1 s

    return Ssh(found[2], found[2], user=found[1] or "root", port=int(found[3] or 22))


def collect(host: Host, folder: str, *, root: str = "") -> bytes:
    """Run the script there by its standard input; return its output.

    Args:
        root: where the file system of the node is on the host; for tests.

    Raises:
        Refused: nothing can be run there as root.
        CommandTimeout, TooMuchOutput: it does not end, or prints more than 64 MiB.
    """
    script = share("definitions", "scripts", "survey").read_bytes()
    argv = ("timeout", "-k", "5", str(KILLED_S), "sh", "-s", "--", root, str(SECONDS), folder)
    # The limit of time over there is a program of that node.
    done = host.run(*argv, input=script, ok=None, timeout=KILLED_S + LATE_S, limit=MOST_BYTES)
    if b"@sms-survey" not in done.stdout:
        raise not_permitted(host, done.stderr.decode(errors="replace"))
    return done.stdout


def query_accounting(host: Host, frames: Frames, folder: str) -> None:
    """Add what the accounting database there says, if the node has slurmdbd.conf. It is only read."""
    conf = accounting_conf(find_conf(frames, folder))
    if conf not in frames.files:
        return
    try:
        result = host.run(*script_argv("accounting-database", "check", conf), timeout=QUERY_S).stdout
    except CommandError as error:
        result = f"error {one_line(error.result.stderr.decode(errors='replace'), 300)}\n".encode()
    frames.runs["accounting"] = Section("accounting", "read", result)


def not_permitted(host: Host, text: str) -> Refused:
    """Return the error of a host where nothing can be run as root; ``text``: the output of the attempt."""
    hint = (
        "log in as root, or permit sudo without a password for this user" if "sudo" in text else "does it have a shell?"
    )
    return Refused(f"{host.name}: nothing can be run there as root: {one_line(text, 300)}", hint=hint)


def fetch_key(host: Host) -> bytes:
    """Return the munge key of the host.

    Raises:
        Refused: it cannot be read.
    """
    try:
        key = host.run("head", "-c", str(KEY_BYTES.stop), KEY).stdout
    except Unreachable:
        raise
    except SmsError:
        key = b""
    if len(key) not in KEY_BYTES:
        raise Refused(
            f"{host.name}: {KEY} cannot be read, or is not a key", hint="run it as root, or without --munge-key"
        )
    return key


def _read_verdicts(path: Path) -> dict[str, str]:
    try:
        report = read_classification(read_text(path))
    except ClassificationError as error:
        raise ConfigError(
            f"--classification: {path}: {error}", hint="`sms classify CAPTURE -o FILE.yaml` writes one"
        ) from None
    return {one.name: one.verdict for one in report.services}


def _judge(found: Survey, verdicts: Mapping[str, str], services: Mapping[str, Service]) -> Survey:
    """Return the survey with the verdicts of a capture, and the differences as findings."""
    listeners = tuple(one.model_copy(update={"evidence": verdicts.get(one.service, "")}) for one in found.listeners)
    more = tuple(
        Finding(area="capture", what=printable(what, 300), source="the classification", carried="check", todo=todo)
        for what, todo in compare(found, verdicts, services)
    )
    return found.model_copy(update={"listeners": listeners, "findings": (*found.findings, *more)})


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written.

    Raises:
        ConfigError: there is no such folder.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written", hint="name a file in a folder that exists")


def write_json(found: Survey, path: Path) -> None:
    """Write survey.json, mode 0600: it describes a network from inside."""
    replace_file(str(path.absolute()), survey_json(found).encode())


def check_folder(folder: Path) -> None:
    """Refuse a folder that has a site.

    Raises:
        ConfigError: it is not a folder, or that above it does not exist.
        Refused: it has a site file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint="name a new folder")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {folder.absolute().parent}", hint="create it, or name another one")
    if (folder / "sms.yaml").exists():
        raise Refused(f"{folder} has a site file", hint="name a new folder, and compare both")


def write_site(found: Survey, draft: Draft, folder: Path) -> Written:
    """Write the site: files, secrets, the report, and last sms.yaml. All of mode 0600 in folders of mode 0700."""
    check_folder(folder)
    folder = folder.absolute()
    problems = check_draft(draft)
    texts = {"survey.json": survey_json(found), "REPORT.md": report_text(found, problems), "sms.yaml": draft.text}
    contents = {**draft.files, **{name: text.encode() for name, text in texts.items()}}
    for name, data in contents.items():
        path = folder / name
        for above in (folder, *(folder / one for one in reversed(Path(name).parents))):
            make_folder(str(above), 0o700)
        replace_file(str(path), data)
    return Written(tuple(contents), problems)


def check_draft(draft: Draft) -> tuple[str, ...]:
    """Return what the reader of the site file does not accept."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "sms.yaml")
        path.write_text(draft.text, encoding="utf-8", errors="replace")
        try:
            open_site(path)
        except ConfigError as error:
            found = [f"line {one.line}: {one.path}: {one.message}" for one in error.problems]
            return tuple(printable(one, 300) for one in found or [error.message])
    return ()
