"""``sms files``: master copies in the provisioning VM, and who has them."""

from __future__ import annotations

import base64
import difflib
import io
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance.errors import ConfigError, Refused
from appliance.operations.context import Cluster, read_given
from appliance.operations.nodes.inventory import Inventory
from appliance.operations.vm.client import open_api
from appliance.plan.nodes.files import (
    Difference,
    Master,
    compare_masters,
    forbidding,
    named_paths,
    unknown_names,
    wanted_masters,
)
from appliance.plan.overlay.seed import seed_files
from appliance.progress import Progress
from appliance.share import share
from appliance.tools.provision import Api

FILES, BLOBS, SYNC = "/sms/v1/files", "/sms/v1/blobs", "/sms/v1/sync"
LARGEST_B = 16 << 20
LARGEST_SHOWN_B = 64 << 10
LOOK_S = 0.5


@dataclass(frozen=True)
class Told:
    """What one client should have and has not, as it has told itself."""

    client: str
    state: str
    """``has all``; ``waits``: it is there, and its report is to come; ``lacks``: it has reported that it has not all;
    ``silent``: it was not heard for long, or never."""
    missing: tuple[str, ...]
    failed: Mapping[str, str]
    at: float | None
    has: Mapping[str, Any] = field(default_factory=dict)
    held: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "client": self.client,
            "state": self.state,
            "missing": list(self.missing),
            "failed": dict(self.failed),
            "held": list(self.held),
            "at": self.at,
            "has": dict(self.has),
        }


@dataclass(frozen=True)
class Pushed:
    """What was done, or would be, and who has it."""

    differences: tuple[Difference, ...]
    told: tuple[Told, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Unified diffs of what would change, where it is text and no secret."""

    def summary(self, *, dry_run: bool = False) -> str:
        """What was done, or would be, in one sentence."""
        counts = Counter(one.what for one in self.differences)
        brought, removed, held = counts["add"] + counts["change"], counts["remove"], counts["held"]
        would = "would be " if dry_run else ""
        parts = [f"{brought} {would}brought"] if brought else []
        parts += [f"{removed} {would}removed"] if removed else []
        parts += [f"{held} left alone"] if held else []
        if not parts:
            return (
                f"all {counts['same']} files are as they should be, nothing {'would change' if dry_run else 'changed'}"
            )
        parts += [f"{counts['same']} the same as before"] if counts["same"] else []
        return f"{len(self.differences)} files: {', '.join(parts)}"

    @property
    def lacking(self) -> tuple[Told, ...]:
        """Clients that are there, and have not all."""
        return find_lacking(self.told)

    def as_dict(self) -> dict[str, Any]:
        return {
            "differences": [one.as_dict() for one in self.differences],
            "clients": [one.as_dict() for one in self.told],
        }


def find_lacking(told: Sequence[Told]) -> tuple[Told, ...]:
    """Clients that are there, and have not all."""
    return tuple(one for one in told if one.state in ("waits", "lacks"))


def at(path: str) -> str:
    """Where the VM has a master file.

    Raises:
        ConfigError: it is no absolute path.
    """
    if not path.startswith("/"):
        raise ConfigError(f"{path} is no absolute path", hint="name it as it is on the clients, such as /etc/motd")
    return FILES + quote(path)


def list_masters(api: Api) -> list[dict[str, Any]]:
    """All master files, by path."""
    found: list[dict[str, Any]] = api.ask("GET", FILES)["files"]
    return found


def show_master(api: Api, path: str) -> dict[str, Any]:
    """One, with its versions."""
    shown: dict[str, Any] = api.ask("GET", at(path))
    return shown


def read_content(api: Api, digest: str) -> bytes | None:
    """A content; None where the VM has it no longer."""
    answer = api.ask("GET", f"{BLOBS}/{digest}")
    return base64.b64decode(answer["content"]) if answer["there"] else None


def find_master(api: Api, path: str) -> dict[str, Any] | None:
    """The version that counts; None where there is none."""
    at(path)
    return next((each for each in list_masters(api) if each["path"] == path), None)


def read_source(path: Path) -> bytes:
    """What an administrator gives for a master file.

    Raises:
        ConfigError: it cannot be read, or is no file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None


def make_master(path: str, data: bytes, wishes: Mapping[str, Any], before: Mapping[str, Any] | None) -> Master:
    """A master file that an administrator adds by hand; a push leaves it alone, unless the site file names it.

    Args:
        wishes: mode, owner, group, template, nodes, groups, services, where they are named.
        before: the version that counts now, from which comes what is not named.

    Raises:
        ConfigError: it is no absolute path, or none that nodes take.
    """
    at(path)
    if place := forbidding(path):
        raise ConfigError(f"{path}: nodes take no files at {place} or below", hint="docs/files.md says which they take")
    keys = ("mode", "owner", "group", "template", "nodes", "groups", "services")
    kept = {key: before[key] for key in keys if before and key in before}
    whole = {**kept, **{key: value for key, value in wishes.items() if value is not None}}
    whole |= {key: tuple(whole[key]) for key in ("nodes", "groups") if key in whole}
    return Master(path, data, origin="admin", **whole)


def need_known(cluster: Cluster, api: Api, master: Master) -> None:
    """Raise Refused where a file is for nodes or groups that the inventory does not know."""
    if not master.nodes and not master.groups:
        return
    if unknown := unknown_names(master, Inventory(cluster, api).nodes()):
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise Refused(
            f"the inventory has no {', '.join(unknown[:5])}{more}",
            hint="`sms node list` shows all nodes and groups; --force adds it all the same",
        )


def is_pushed(cluster: Cluster, path: str, there: Mapping[str, Any] | None) -> bool:
    """Whether ``sms files push`` brings a path from the site file."""
    if there and there["origin"] == "users":  # `sms user sync` is its source
        return False
    return path in named_paths(cluster.site, cluster.services)


def put_master(api: Api, master: Master) -> dict[str, Any]:
    """Make it the newest version; says whether it is another than before.

    Raises:
        Refused: it is too large, its template fails, or the VM says no otherwise.
    """
    if len(master.data) > LARGEST_B:
        raise Refused(f"{master.path}: {len(master.data)} bytes are more than {LARGEST_B >> 20} MiB")
    api.send(f"{BLOBS}/{master.sha256}", io.BytesIO(master.data), len(master.data))
    done: dict[str, Any] = api.ask("PUT", at(master.path), master.as_body())
    return done


def remove_master(api: Api, path: str) -> None:
    """Take it from its clients; its versions stay."""
    api.ask("DELETE", at(path))


def roll_back(api: Api, path: str, version: int | None) -> dict[str, Any]:
    """Make an older version the one that counts; gives it."""
    body = {"path": path} if version is None else {"path": path, "version": version}
    done: dict[str, Any] = api.ask("POST", f"{SYNC}/rollback", body)
    return done


def site_masters(cluster: Cluster) -> tuple[Master, ...]:
    """What the site file names, read and rendered.

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
        *((file.path, file.source) for file in vm.files),
    ]
    seeds = seed_files(site, cluster.services, overlays=share("overlays"), extra=(), given={})
    return wanted_masters(site, read_given(site, sources), seeds)


def push(
    cluster: Cluster,
    progress: Progress,
    *,
    wait_s: float = 30,
    dry_run: bool = False,
    accounts: bool = False,
    api: Api | None = None,
) -> Pushed:
    """Bring what the site file names to the VM, only what differs, wake all clients, and wait for what they tell.

    Raises:
        Refused: the site has no VM, a file cannot be read, or the VM says no.
        Away: the VM does not answer.
    """
    api = api or open_api(cluster)
    wanted = site_masters(cluster)
    if not cluster.site.secrets.munge_key:
        progress.say("note: the site file names no munge key (secrets.munge_key): nodes get none from the VM")
    there = list_masters(api)
    differences = compare_masters(wanted, there, accounts=accounts)
    if dry_run:
        return Pushed(differences, texts=_texts(api, differences, there))
    with progress.step("master files") as step:
        for one in differences:
            if one.master:
                step.detail(one.path)
                put_master(api, one.master)
        for one in differences:
            if one.what == "remove":
                remove_master(api, one.path)
        done = sum(one.what in ("add", "change", "remove") for one in differences)
        step.detail(f"{done} of {len(differences)} brought or removed" if done else "nothing to bring")
    return Pushed(differences, wake(cluster, api, progress, wait_s))


def wake(cluster: Cluster, api: Api, progress: Progress, wait_s: float) -> tuple[Told, ...]:
    """Wake all clients; what they report once all that are there have reported, or the time is over."""
    number = api.ask("POST", f"{SYNC}/push")["push"]
    with progress.step("clients") as step:
        deadline = time.monotonic() + wait_s
        while True:
            told = read_reports(cluster, api, push=number)
            waiting = [one for one in told if one.state == "waits"]
            step.detail(f"{sum(one.state == 'has all' for one in told)} of {len(told)} have all")
            if not waiting or time.monotonic() >= deadline:
                return told
            time.sleep(LOOK_S)


def read_reports(cluster: Cluster, api: Api, *, push: int = 0) -> tuple[Told, ...]:
    """What every client has told, the container first. What was told before the push of this number does not count."""
    answer = api.ask("GET", f"{SYNC}/reports")
    old = find_silence(answer, 3 * cluster.site.filesync.interval_s + 60)
    return tuple(_told(each, push, answer["push"], old) for each in answer["clients"])


def find_silence(answer: Mapping[str, Any], old_s: float) -> float:
    """The time before which a client must have been heard last to count as one that is off.

    No client can be heard while the VM is off. For ``old_s`` from its start, those count as there that were heard
    within ``old_s`` of the last one that was heard before.

    Args:
        answer: the service's reports.
        old_s: seconds in which a client that is there is heard.
    """
    began = answer.get("began", 0.0)  # the server of an older image does not say it
    if answer["now"] - began >= old_s:
        return float(answer["now"] - old_s)
    return float(answer["heard"] or began) - old_s


def need_known_path(api: Api, path: str, told: Sequence[Told]) -> None:
    """Raise Refused where no client has or should have a file of this path, and the VM has none."""
    if not any(path in one.has or path in one.missing for one in told) and find_master(api, path) is None:
        raise Refused(f"there is no master file {path}", hint="sms files list")


def _told(each: Mapping[str, Any], push: int, last: int, old: float) -> Told:
    """Args:
    push: what it reported before this one does not count.
    last: the newest push; what a client lacks that has reported since is not on its way.
    """
    missing = tuple(each["missing"])
    seen = _seen(each)
    if seen is None or seen < old:
        state = "silent"
    elif each["at"] is None or each["push"] < (last if missing else push):
        state = "waits"
    else:
        state = "lacks" if missing else "has all"
    return Told(each["client"], state, missing, each["failed"], each["at"], has=each["has"], held=tuple(each["held"]))


def _seen(each: Mapping[str, Any]) -> float | None:
    """When a client was heard last; None: never."""
    seen = each.get("seen") or each["at"]  # the server of an older image knows of reports alone
    return float(seen) if seen is not None else None


def _texts(api: Api, differences: Sequence[Difference], there: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Unified diffs of what would change; nothing for secrets, and for what is no text."""
    now = {each["path"]: each for each in there}
    texts = {}
    for one in differences:
        old = now.get(one.path)
        if one.what != "change" or not one.master or not old or one.master.secret or not int(old["mode"], 8) & 0o004:
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
