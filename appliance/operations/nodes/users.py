"""``sms user sync``: upload users and groups of a directory or of files as master files to the provisioning VM."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.nodes.files import Judge, list_masters, put_master, read_content
from appliance.plan.nodes.accounts import (
    UID_MAX,
    UID_MIN,
    Accounts,
    Changes,
    compare_lines,
    read_accounts,
)
from appliance.plan.nodes.files import Master, account_master
from appliance.progress import Progress
from appliance.provision.payloads import FileVersion
from appliance.tools.provision import Api

LARGEST_B = 64 << 20
GETENT_S = 300
BATCH = 200
"""Number of names in one query of the directory."""
FOLDER = "--from names a folder with the files passwd and group, or a passwd file with group beside it"


@dataclass(frozen=True)
class Source:
    """Texts of passwd, group and shadow; an empty shadow leaves the VM's unchanged."""

    passwd: str
    group: str
    shadow: str = ""


@dataclass(frozen=True)
class Synced:
    """What a synchronisation changed, or would change."""

    accounts: Accounts
    changes: Mapping[str, Changes]
    refusal: str = ""
    """After a dry run: why the real run would be refused; empty if it would not."""

    @property
    def changed(self) -> bool:
        return not all(one.none for one in self.changes.values())

    def as_dict(self) -> dict[str, object]:
        return {
            "users": len(self.accounts.users),
            "groups": len(self.accounts.groups),
            "left_out": self.accounts.left_out,
            "changes": {path: one.as_dict() for path, one in self.changes.items()},
            "refusal": self.refusal,
        }


def read_folder(path: Path, shadow: Path | None) -> Source:
    """Read passwd and group of a folder, or a passwd file and the group file next to it.

    Raises:
        ConfigError: one of them cannot be read or is too large, or everybody can read the shadow file.
    """
    folder, passwd = (path, path / "passwd") if path.is_dir() else (path.parent, path)
    if shadow and shadow.exists() and shadow.stat().st_mode & 0o007:
        raise ConfigError(f"{shadow} can be read by everybody", hint=f"chmod o= {shadow}")
    return Source(_read(passwd), _read(folder / "group"), _read(shadow) if shadow else "")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(LARGEST_B + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}", hint=FOLDER) from None
    if len(data) > LARGEST_B:
        raise ConfigError(f"{path} is larger than {LARGEST_B >> 20} MiB", hint=FOLDER)
    return data.decode(errors="surrogateescape")


def this_machine() -> Host:
    """Return the host whose SSSD is queried."""
    return Local(socket.gethostname())


def query_sssd(host: Host, groups: Sequence[str]) -> Source:
    """Return users and groups from a host's SSSD: the members of ``groups``, or all that it lists if there are none.

    Raises:
        Refused: SSSD lists no users, which is its default.
    """
    if not groups:
        passwd, group = (_getent(host, table) for table in ("passwd", "group"))
        if not passwd.strip():
            raise Refused(
                "SSSD lists no users", hint="name groups with --group, or set `enumerate = true` in its configuration"
            )
        return Source(passwd, group)
    group = _getent(host, "group", *groups)
    members = [name for line in group.split("\n") for name in line.rpartition(":")[2].split(",") if name]
    passwd = _getent_batches(host, "passwd", members)
    # Primary groups of the users, by number.
    numbers = {parts[3] for line in passwd.split("\n") if len(parts := line.split(":")) == 7 and parts[3].isdigit()}
    there = {line.split(":")[2] for line in group.split("\n") if line.count(":") == 3}
    return Source(passwd, group + _getent_batches(host, "group", sorted(numbers - there)))


def _getent_batches(host: Host, table: str, names: Sequence[str]) -> str:
    named = [name for name in dict.fromkeys(names) if not name.startswith("-")]
    return "".join(_getent(host, table, *named[at : at + BATCH]) for at in range(0, len(named), BATCH))


def _getent(host: Host, table: str, *names: str) -> str:
    # Status 2: some names are unknown; the others were printed.
    done = host.run("getent", "-s", "sss", "--", table, *names, timeout=GETENT_S, ok=(0, 2))
    return done.stdout.decode(errors="surrogateescape")


@dataclass(frozen=True)
class SyncOptions:
    """Options of a synchronisation.

    Attributes:
        only: groups whose members are selected; empty for all users.
        uid_min, uid_max: bounds of the ids that are selected.
    """

    only: Sequence[str] = ()
    uid_min: int = UID_MIN
    uid_max: int = UID_MAX


def sync(
    api: Api, source: Source, progress: Progress, judge: Judge, options: SyncOptions, *, dry_run: bool = False
) -> Synced:
    """Upload the accounts of a source as master files.

    Raises:
        ConfigError: lines of the source are invalid; names all of them.
        Refused: it has no users; or it would remove too many, or one with jobs, and that is not forced.
    """
    accounts, problems = read_accounts(
        source.passwd,
        source.group,
        source.shadow,
        only=options.only,
        uid_min=options.uid_min,
        uid_max=options.uid_max,
    )
    if problems:
        raise ConfigError(problems=problems)
    if not source.passwd.strip():
        raise Refused("passwd is empty")
    if not accounts.users:
        raise Refused("no user is selected: all are out of bounds, or in none of the groups")
    masters = [account_master(path, data, origin="users") for path, data in accounts.texts().items()]
    there = list_masters(api)
    refused = judge.judge(masters, there, dry_run=dry_run)
    done = Synced(accounts, _compare(api, masters, there), "; ".join(refused))
    if not dry_run:
        with progress.step("accounts") as step:
            for one in masters:
                step.detail(one.path)
                put_master(api, one)
    return done


def _compare(api: Api, masters: Sequence[Master], there: Sequence[FileVersion]) -> dict[str, Changes]:
    now = {each["path"]: each["sha256"] for each in there}
    found = {}
    for one in masters:
        before = read_content(api, now[one.path]) if one.path in now else b""
        found[one.path] = compare_lines(*(side.decode(errors="surrogateescape") for side in (before or b"", one.data)))
    return found
