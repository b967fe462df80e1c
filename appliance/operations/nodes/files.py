"""``sms files``: master files in the provisioning VM, and reports of the clients that have them."""

from __future__ import annotations

import base64
import difflib
import hashlib
import io
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.context import Cluster, read_given
from appliance.operations.nodes.inventory import Inventory
from appliance.operations.vm.client import read_answer, read_list
from appliance.plan.nodes.files import (
    ACCOUNTS,
    JUDGED,
    Difference,
    Master,
    compare_masters,
    desired_masters,
    forbidden_at,
    named_paths,
    unknown_names,
)
from appliance.plan.overlay.seed import seed_files, slurm_sources
from appliance.provision.payloads import (
    ClientState,
    FileReports,
    FileVersion,
    FileVersions,
    PushNumber,
    Rollback,
    StoredContent,
    StoredFile,
)
from appliance.share import share
from appliance.shared.secret import secret_parts
from appliance.tools.provision import Api
from appliance.tools.sha256 import is_digest

FILES, BLOBS, SYNC = "/sms/v1/files", "/sms/v1/blobs", "/sms/v1/sync"
LARGEST_B = 16 << 20
LARGEST_SHOWN_B = 64 << 10
POLL_S = 0.5
SOURCE = "name a file of this machine, or - for standard input"


@dataclass(frozen=True)
class MasterOptions:
    """Options for a master file that an administrator adds; None where not given."""

    mode: str | None = None
    owner: str | None = None
    group: str | None = None
    template: bool | None = None
    nodes: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    services: bool | None = None


@dataclass(frozen=True)
class ClientReport:
    """Last report of a client: which files it has, and which are missing."""

    client: str
    state: str
    """``has all``; ``waits``: it is online, and its report is pending; ``lacks``: it reported missing files;
    ``silent``: no contact for long, or never."""
    missing: tuple[str, ...]
    failed: Mapping[str, str]
    at: float | None
    has: Mapping[str, StoredFile] = field(default_factory=dict)
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class PushResult:
    """What a push changed, or would change, and the clients' reports."""

    differences: tuple[Difference, ...]
    reports: tuple[ClientReport, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Unified diffs of what would change, of text files that are not secret."""
    refused: tuple[str, ...] = ()
    """What the accounts cost: why it would be refused without ``force``."""

    def summary(self, *, dry_run: bool = False) -> str:
        """Return a one-line summary."""
        counts = Counter(one.what for one in self.differences)
        uploaded, removed, held = counts["add"] + counts["change"], counts["remove"], counts["held"]
        would = "would be " if dry_run else ""
        parts = [f"{uploaded} {would}uploaded"] if uploaded else []
        parts += [f"{removed} {would}removed"] if removed else []
        parts += [f"{held} skipped"] if held else []
        if not parts:
            return f"all {counts['same']} files are up to date, nothing {'would change' if dry_run else 'changed'}"
        parts += [f"{counts['same']} unchanged"] if counts["same"] else []
        return f"{len(self.differences)} files: {', '.join(parts)}"

    @property
    def lacking(self) -> tuple[ClientReport, ...]:
        """Clients that are online and lack a file."""
        return find_lacking(self.reports)

    def as_dict(self) -> dict[str, object]:
        return {
            "differences": [one.as_dict() for one in self.differences],
            "clients": [asdict(one) for one in self.reports],
            "refused": list(self.refused),
        }


class Judge(Protocol):
    """Judges what an upload costs: ``operations/services/pushes.py``."""

    def why_held(self, one: Difference) -> str:
        """Return why a push leaves a file out; empty if it does not."""

    def judge(self, masters: Sequence[Master], there: Sequence[FileVersion], *, dry_run: bool) -> tuple[str, ...]:
        """Return what new files of accounts would cost, as lines; refuse it, unless it is forced or a dry run."""


def find_lacking(reports: Sequence[ClientReport]) -> tuple[ClientReport, ...]:
    """Return the clients that are online and lack a file."""
    return tuple(one for one in reports if one.state in ("waits", "lacks"))


def file_url(path: str) -> str:
    """Return the URL path of a master file.

    Raises:
        ConfigError: it is not an absolute path.
    """
    if not path.startswith("/"):
        raise ConfigError(f"{path} is not an absolute path", hint="give its path on the clients, such as /etc/motd")
    return FILES + quote(path)


def list_masters(api: Api) -> list[FileVersion]:
    """Return all master files, sorted by path."""
    return read_list(FileVersion, api.request("GET", FILES), "files")


def show_master(api: Api, path: str) -> FileVersions:
    """Return a master file with its versions."""
    return read_answer(FileVersions, api.request("GET", file_url(path)))


def read_content(api: Api, digest: str) -> bytes | None:
    """Return the content of a digest; None if the VM no longer has it.

    Raises:
        SmsError: it is not a digest, or the response has another content.
    """
    if not is_digest(digest):
        raise SmsError(f"the provisioning VM: {digest[:70]!r} is not a digest", hint="sms vm status")
    answer = read_answer(StoredContent, api.request("GET", f"{BLOBS}/{digest}", secret=True))
    if not answer["there"]:
        return None
    try:
        data = base64.b64decode(answer.get("content", ""), validate=True)
    except ValueError:
        data = b""
    if hashlib.sha256(data).hexdigest() != digest:
        raise SmsError(f"the provisioning VM: the content of {digest[:16]} is another one", hint="sms vm status")
    return data


def find_master(api: Api, path: str) -> FileVersion | None:
    """Return the current version of a master file; None if there is none."""
    file_url(path)
    return next((each for each in list_masters(api) if each["path"] == path), None)


def read_source(path: Path) -> bytes:
    """Return the content of a local file.

    Raises:
        ConfigError: it cannot be read, or is not a file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}", hint=SOURCE) from None


def make_master(path: str, data: bytes, options: MasterOptions, before: FileVersion | None) -> Master:
    """Return a master file that an administrator adds; a push does not change it, unless the site file names it.

    Args:
        before: the current version, which supplies the options that are not given.

    Raises:
        ConfigError: it is not an absolute path, or nodes do not accept files there.
    """
    file_url(path)
    if place := forbidden_at(path):
        raise ConfigError(f"{path}: nodes accept no files at or below {place}", hint="docs/files.md lists these paths")
    given = asdict(options)
    kept = {name: value for name, value in before.items() if name in given} if before else {}
    whole: Mapping[str, Any] = {**kept, **{name: value for name, value in given.items() if value is not None}}
    lists = {key: tuple(whole[key]) for key in ("nodes", "groups") if key in whole}
    return Master(path, data, origin="admin", **{**whole, **lists})


def need_known(cluster: Cluster, api: Api, master: Master) -> None:
    """Raise Refused if a file is for nodes or groups that are not in the inventory."""
    if not master.nodes and not master.groups:
        return
    if unknown := unknown_names(master, Inventory(cluster, api).nodes()):
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise Refused(
            f"the inventory has no {', '.join(unknown[:5])}{more}",
            hint="`sms node list` shows all nodes and groups; --force adds the file anyway",
        )


def is_pushed(cluster: Cluster, path: str, there: FileVersion | None) -> bool:
    """Return whether ``sms files push`` uploads this path."""
    if there and there["origin"] == "users":  # `sms user sync` is its source
        return False
    return path in named_paths(cluster.site, cluster.services)


def refuse_judged(path: str) -> None:
    """Raise Refused if a change of this file can cost jobs or nodes."""
    if path in JUDGED:
        raise Refused(
            f"{path}: slurmctld has it, too: nodes get it when it was judged what it costs jobs, and changed there",
            hint="change it in the site file, then `sms apply`, then `sms files push`",
        )


def refuse_used(judge: Judge, path: str) -> None:
    """Raise Refused if nodes need a file as long as the services container runs as it does."""
    if why := judge.why_held(Difference("remove", path)):
        raise Refused(f"{path}: {why}", hint="remove it from the site file, then `sms apply`, then `sms files push`")


def find_older(api: Api, path: str, version: int | None) -> FileVersion | None:
    """Return the version to which a rollback leads, as the VM chooses it; None if there is none."""
    found = show_master(api, path)
    current = found["current"]
    older = [one for one in found["versions"] if current is None or one["version"] < current]
    named = [one for one in found["versions"] if one["version"] == version]
    return next(iter(older if version is None else named), None)


def put_master(api: Api, master: Master) -> FileVersion:
    """Upload a master file as its newest version. Returns the version, with ``changed``.

    Raises:
        Refused: it is too large, its template fails, or the VM rejects it for another reason.
    """
    if len(master.data) > LARGEST_B:
        raise Refused(f"{master.path}: {len(master.data)} bytes are more than {LARGEST_B >> 20} MiB")
    if master.secret:
        api.secrets.extend(secret_parts(master.path, master.data))
    api.send(f"{BLOBS}/{master.sha256}", io.BytesIO(master.data), len(master.data))
    return read_answer(FileVersion, api.request("PUT", file_url(master.path), master.as_body()))


def remove_master(api: Api, path: str) -> None:
    """Remove a master file from its clients; the VM keeps its versions."""
    api.request("DELETE", file_url(path))


def roll_back(api: Api, judge: Judge, path: str, version: int | None) -> FileVersion:
    """Make an older version the current one, by default the previous one. Returns it.

    Raises:
        Refused: a change of the file can cost jobs; or it has accounts, and users or groups would go.
    """
    refuse_judged(path)
    body: Rollback = {"path": path} if version is None else {"path": path, "version": version}
    if path in ACCOUNTS.values() and (older := find_older(api, path, version)):
        data = read_content(api, older["sha256"])
        judge.judge([Master(path, data or b"", template=older["template"])], list_masters(api), dry_run=False)
        body = {"path": path, "version": older["version"]}
    return read_answer(FileVersion, api.request("POST", f"{SYNC}/rollback", body))


def site_masters(cluster: Cluster) -> tuple[Master, ...]:
    """Return the master files that the site file defines, read and rendered.

    Raises:
        Refused: a file cannot be read.
    """
    site = cluster.site
    vm = site.provisioning
    assert vm
    sources: list[tuple[str, Path | None]] = [
        ("passwd", site.accounts.passwd),
        ("group", site.accounts.group),
        ("shadow", site.secrets.shadow),
        ("munge_key", site.secrets.munge_key),
        *slurm_sources(site),
        *((file.path, file.source) for file in vm.files),
    ]
    seeds = seed_files(site, cluster.services, overlays=share("overlays"), extra=(), given={})
    return desired_masters(site, read_given(sources), seeds)


def push(
    cluster: Cluster, api: Api, judge: Judge, *, wait_s: float = 30, dry_run: bool = False, accounts: bool = False
) -> PushResult:
    """Upload the site's files that differ to the VM, notify all clients, and wait for their reports.

    Raises:
        ConfigError: lines of the accounts are invalid.
        Refused: a file cannot be read, users or groups would go, or the VM rejects a file.
        VmUnreachable: the VM does not answer.
    """
    desired = site_masters(cluster)
    if not cluster.site.secrets.munge_key:
        cluster.env.progress.report(
            "note: the site file has no munge key (secrets.munge_key): nodes get none from the VM"
        )
    there = list_masters(api)
    differences = tuple(hold(one, judge) for one in compare_masters(desired, there, accounts=accounts))
    refused = judge.judge([one.master for one in differences if one.master], there, dry_run=dry_run)
    if dry_run:
        return PushResult(differences, texts=_texts(api, differences, there), refused=refused)
    with cluster.env.progress.step("master files") as step:
        for one in differences:
            if one.master:
                step.detail(one.path)
                put_master(api, one.master)
        for one in differences:
            if one.what == "remove":
                remove_master(api, one.path)
        done = sum(one.what in ("add", "change", "remove") for one in differences)
        step.detail(f"{done} of {len(differences)} uploaded or removed" if done else "nothing to upload")
    return PushResult(differences, notify_clients(cluster, api, wait_s), refused=refused)


def notify_clients(cluster: Cluster, api: Api, wait_s: float) -> tuple[ClientReport, ...]:
    """Notify all clients. Returns their reports when all online ones have reported, or after ``wait_s`` seconds."""
    return wait_for_clients(cluster, api, announce(api), wait_s)


def hold(one: Difference, judge: Judge) -> Difference:
    """Return what a push does with a file: it waits until the services container has it, if that is to be first."""
    why = judge.why_held(one)
    return replace(one, what="held", why=why, master=None) if why else one


def announce(api: Api) -> int:
    """Notify all clients that files have changed; return the number of this push."""
    return read_answer(PushNumber, api.request("POST", f"{SYNC}/push"))["push"]


def wait_for_clients(cluster: Cluster, api: Api, number: int, wait_s: float) -> tuple[ClientReport, ...]:
    """Return all reports when the online clients have reported since a push, or after ``wait_s`` seconds."""
    with cluster.env.progress.step("clients") as step:
        deadline = cluster.env.clock.monotonic() + wait_s
        while True:
            reports = read_reports(cluster, api, push=number)
            waiting = [one for one in reports if one.state == "waits"]
            step.detail(f"{sum(one.state == 'has all' for one in reports)} of {len(reports)} are up to date")
            if not waiting or cluster.env.clock.monotonic() >= deadline:
                return reports
            cluster.env.clock.sleep(POLL_S)


def read_reports(cluster: Cluster, api: Api, *, push: int = 0) -> tuple[ClientReport, ...]:
    """Return the report of every client, the container first. Reports from before this push do not count."""
    answer = read_answer(FileReports, api.request("GET", f"{SYNC}/reports"))
    old = offline_before(answer, 3 * cluster.site.filesync.interval_s + 60)
    return tuple(_client_report(each, push, answer["push"], old) for each in answer["clients"])


def offline_before(answer: FileReports, old_s: float) -> float:
    """Return the time of last contact before which a client counts as offline, as Unix time.

    Clients cannot contact a VM that is off. For ``old_s`` seconds after its start, those count as online whose last
    contact was within ``old_s`` of the last contact of any client before that start.

    Args:
        answer: the service's reports.
        old_s: interval in seconds within which an online client is expected to make contact.
    """
    began = answer.get("began", 0.0)  # missing in answers of older images
    now = answer.get("now", time.time())
    if now - began >= old_s:
        return now - old_s
    return (answer.get("heard") or began) - old_s


def need_known_path(api: Api, path: str, reports: Sequence[ClientReport]) -> None:
    """Raise Refused if no client has or lacks a file of this path, and the VM has none."""
    if not any(path in one.has or path in one.missing for one in reports) and find_master(api, path) is None:
        raise Refused(f"there is no master file {path}", hint="sms files list")


def _client_report(each: ClientState, push: int, last: int, old: float) -> ClientReport:
    """Return the report of a client.

    Args:
        push: reports from before this push do not count.
        last: the newest push; what a client lacks that has reported since then is not in transit.
        old: time of last contact before which a client counts as offline.
    """
    missing = tuple(each["missing"])
    seen = _seen(each)
    if seen is None or seen < old:
        state = "silent"
    elif each["at"] is None or each["push"] < (last if missing else push):
        state = "waits"
    else:
        state = "lacks" if missing else "has all"
    return ClientReport(
        each["client"], state, missing, each["failed"], each["at"], has=each["has"], held=tuple(each["held"])
    )


def _seen(each: ClientState) -> float | None:
    """Return the time of a client's last contact; None: never."""
    seen = each.get("seen") or each["at"]  # older images only have the time of the report
    return float(seen) if seen is not None else None


def is_public(mode: str) -> bool:
    """Return whether everybody can read a file of this octal mode."""
    return bool(re.fullmatch(r"[0-7]{3,4}", mode)) and bool(int(mode, 8) & 0o004)


def _texts(api: Api, differences: Sequence[Difference], there: Sequence[FileVersion]) -> dict[str, str]:
    """Return unified diffs of what would change, without secrets and binary files."""
    now = {each["path"]: each for each in there}
    texts = {}
    for one in differences:
        old = now.get(one.path)
        if one.what != "change" or not one.master or not old or one.master.secret or not is_public(old["mode"]):
            continue
        before = read_content(api, old["sha256"]) or b""
        if max(len(before), len(one.master.data)) > LARGEST_SHOWN_B:
            continue
        try:
            old_lines, new_lines = (data.decode().splitlines() for data in (before, one.master.data))
        except UnicodeDecodeError:
            continue
        texts[one.path] = "\n".join(difflib.unified_diff(old_lines, new_lines, lineterm="", n=1))
    return texts
