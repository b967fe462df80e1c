"""Borg 1.2: a repository of deduplicated, encrypted archives, in a folder or over SSH.

The passphrase is in a file readable only by root. Borg reads it with BORG_PASSCOMMAND, so it appears in no argument,
environment or log. Prompts of borg are disabled; they become errors.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NotRequired, TypedDict

from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import CommandError, Host, OddOutput, Result, Unreachable
from appliance.progress import Progress
from appliance.tools.agent import MessageReader
from appliance.tools.programs import has_program

LOCK_WAIT_S = 30
CHUNKER = "fixed,65536"
"""The same chunk size as in the snapshot store, so that borg deduplicates the same blocks."""
COMPRESSION = "zstd,3"
ARCHIVE_FILE = "overlay.img"
"""The only file in an archive."""
OK_STATUSES = (0, 1)
"""Exit statuses for success, and success with warnings."""
COMPACTED = "compaction freed about"
"""In borg's log of a compaction, unless the repository was opened append-only (borg/repository.py)."""
PARTIAL_FILES = ("(", "-name", "README", "-o", "-name", "config-*.tmp", ")")
"""The files that an interrupted ``borg init`` leaves beside its folder for data, for find(1) (borg/repository.py)."""
LAST_LINES, LONGEST_LINE = 1000, 1 << 16
"""What is kept of borg's standard error: lines, and letters of each."""
NO_DATA = "This repository contains no valid data"
"""Message of ``borg check`` for a repository without data."""


@dataclass(frozen=True)
class Repository:
    """Location and credentials. ``base`` is a folder on the host for borg's cache and security data."""

    url: str
    passphrase: str
    base: str
    ssh_key: str | None = None
    known_hosts: str | None = None

    @property
    def local(self) -> bool:
        """Whether it is a folder on the host."""
        return self.url.startswith("/")

    @property
    def init_marker(self) -> str:
        """A file on the host that exists while the repository is being initialized."""
        return f"{self.base}/making"

    def environment(self) -> dict[str, str]:
        """Return borg's environment variables."""
        ssh = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10"]
        ssh += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
        if self.ssh_key:
            ssh += ["-i", self.ssh_key, "-o", "IdentitiesOnly=yes"]
        if self.known_hosts:
            ssh += ["-o", f"UserKnownHostsFile={self.known_hosts}"]
        return {
            "BORG_PASSCOMMAND": shlex.join(["cat", "--", self.passphrase]),
            "BORG_RSH": shlex.join(ssh),
            "BORG_BASE_DIR": self.base,
            # Another URL of the same repository is allowed; its ID and key must match.
            "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
            # Unencrypted repositories were not created by this program.
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "no",
            "BORG_DISPLAY_PASSPHRASE": "no",
        }

    def argv(self, *arguments: str) -> tuple[str, ...]:
        """Return the argv of a borg command."""
        conflicting = ("BORG_PASSPHRASE", "BORG_PASSPHRASE_FD", "BORG_NEW_PASSPHRASE", "BORG_REPO")
        unset = [option for name in conflicting for option in ("-u", name)]
        own = [f"{name}={value}" for name, value in self.environment().items()]
        return ("env", *unset, *own, "borg", "--log-json", "--lock-wait", str(LOCK_WAIT_S), *arguments)

    def shell_command(self, *arguments: str) -> str:
        """Return a borg command with its environment, for use in a shell."""
        own = self.environment()
        names = ["BORG_PASSCOMMAND", "BORG_BASE_DIR", *([] if self.local else ["BORG_RSH"])]
        return " ".join([*(f"{name}={shlex.quote(own[name])}" for name in names), shlex.join(["borg", *arguments])])

    def at(self, archive: str) -> str:
        """Return borg's location of an archive."""
        return f"{self.url}::{archive}"


@dataclass(frozen=True)
class Archive:
    """An archive in the repository; ``time`` is Unix time in seconds, ``id`` is a digest of its content."""

    name: str
    time: float
    comment: str
    id: str = ""


def check_ready(host: Host, repository: Repository) -> None:
    """Check that the host has borg, and a passphrase file readable only by root.

    Raises:
        Refused: it does not.
    """
    if not has_program(host, "borg"):
        raise Refused(
            f"borg is not installed on {host.name}",
            hint=f"`apt-get install borgbackup` there; `sms host prepare {host.name}` does it on Debian",
        )
    result = host.run("borg", "--version", ok=None)
    version = re.search(r"(\d+)\.(\d+)", result.text)
    if not version or not (1, 2) <= (int(version[1]), int(version[2])) < (2, 0):
        raise Refused(f"{host.name} has {result.text or 'a borg that does not run'}", hint="use borg 1.2 or later 1.x")
    path = repository.passphrase
    state = host.run("stat", "-Lc", "%a %u %s", "--", path, ok=None)
    if state.status:
        raise Refused(
            f"{host.name} has no passphrase file {path}",
            hint=f"create it once, and keep a copy elsewhere: (umask 077; head -c 32 /dev/urandom | base64 >{path})",
        )
    mode, owner, length = state.words(3)
    if int(mode, 8) & 0o077 or owner != "0":
        raise Refused(
            f"{path} on {host.name} must be readable only by root (mode {mode})",
            hint=f"chmod 600 {path} && chown root {path}",
        )
    if length == "0":
        raise Refused(f"{path} on {host.name} is empty", hint="write the passphrase of the repository to it")


def call(host: Host, repository: Repository, *arguments: str) -> Result:
    """Run borg and wait for it to end.

    Raises:
        Busy, Refused, SmsError, Unreachable: the error that borg reports.
    """
    result = host.run(*repository.argv(*arguments), ok=None, timeout=None)
    if result.status not in OK_STATUSES:
        raise error_of(host, repository, result.status, result.stderr.decode(errors="replace").splitlines())
    return result


class _Archive(TypedDict):
    name: str
    time: str
    id: str
    comment: NotRequired[str]


class _Listed(TypedDict):
    """What ``borg list`` prints."""

    archives: list[_Archive]


class _New(TypedDict):
    stats: dict[str, int]


class _Created(TypedDict):
    """What ``borg create`` prints."""

    archive: _New


def list_archives(host: Host, repository: Repository, glob: str) -> list[Archive] | None:
    """Return the archives whose names match; None if there is no repository yet.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    arguments = ("list", "--json", "--format", "{comment}", "--glob-archives", glob, repository.url)
    result = host.run("env", "TZ=UTC", *repository.argv(*arguments), ok=None, timeout=None)
    lines = result.stderr.decode(errors="replace").splitlines()
    if result.status not in OK_STATUSES:
        if "Repository.DoesNotExist" in _ids(lines) or _remove_partial(host, repository, lines):
            return None
        raise error_of(host, repository, result.status, lines)
    found = result.parse(_Listed)["archives"]
    try:
        return [Archive(one["name"], _parse_time(one["time"]), one.get("comment", ""), one["id"]) for one in found]
    except ValueError as error:
        raise OddOutput(result, str(error)) from None


def _parse_time(text: str) -> float:
    """Parse a time of borg's, which has no time zone; the command ran with TZ=UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def init(host: Host, repository: Repository) -> None:
    """Initialize the repository.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    host.write(repository.init_marker, repository.url.encode(), mode=0o600)
    call(host, repository, "init", "--encryption=repokey-blake2", repository.url)
    host.remove(repository.init_marker)


def _remove_partial(host: Host, repository: Repository, lines: list[str]) -> bool:
    """Remove a repository whose initialization on this host was interrupted; return whether it was one.

    The marker file must exist, and borg must find no data in the repository.
    """
    if host.read(repository.init_marker) != repository.url.encode():
        return False
    if repository.local and "Repository.InvalidRepository" in _ids(lines):
        # Only what an interrupted `borg init` creates: rmdir refuses folders with more.
        host.run("find", repository.url, "-maxdepth", "1", "-type", "f", *PARTIAL_FILES, "-delete", ok=None)
        host.run("rmdir", "--", f"{repository.url}/data", ok=None)
        return host.works("rmdir", "--", repository.url)
    if "NoManifestError" not in _ids(lines):
        return False
    checked = host.run(*repository.argv("check", "--repository-only", repository.url), ok=None, timeout=None)
    if NO_DATA not in checked.stderr.decode(errors="replace"):
        return False
    argv = ("env", "BORG_DELETE_I_KNOW_WHAT_I_AM_DOING=YES", *repository.argv("delete", repository.url))
    return host.run(*argv, ok=None, timeout=None).status in OK_STATUSES


class LastLines:
    """The last lines of borg's standard error: it passes on what the other side prints, which may have no end."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    def add(self, line: str) -> None:
        """Add a line."""
        self._lines.append(line[:LONGEST_LINE])

    @property
    def found(self) -> list[str]:
        """The lines."""
        return list(self._lines)


@dataclass(frozen=True)
class NewArchive:
    """Name, comment and time of an archive to create."""

    name: str
    comment: str
    timestamp: str


def create(
    host: Host, repository: Repository, archive: NewArchive, source: tuple[str, ...], progress: Progress
) -> Mapping[str, int]:
    """Archive the output of ``source``, an agent command; return borg's statistics.

    Borg runs ``source`` and creates no archive unless it succeeds.

    Raises:
        Busy, Refused, SmsError, Unreachable: the error that borg or the agent reports.
    """
    arguments = ["create", "--json", "--stdin-name", ARCHIVE_FILE, "--stdin-mode", "0600", "--content-from-command"]
    arguments += ["--files-cache", "disabled", "--chunker-params", CHUNKER, "--compression", COMPRESSION]
    arguments += ["--timestamp", archive.timestamp, "--comment", archive.comment]
    arguments += [repository.at(archive.name), "--", *source]
    lines = LastLines()
    with ExitStack() as stack:
        reader = MessageReader(progress, stack)

        def feed(line: str) -> None:
            reader.feed(line)
            lines.add(line)

        with host.stream(*repository.argv(*arguments), on_line=feed) as stream:
            stream.end()
            output = b""
            while block := stream.read():
                output += block
            result = stream.result(ok=None)
        if reader.problem and not reader.problem.get("gone"):
            reader.outcome(result)
        if result.status not in OK_STATUSES:
            raise error_of(host, repository, result.status, lines.found)
    stats: Mapping[str, int] = replace(result, stdout=output).parse(_Created)["archive"]["stats"]
    return stats


def remove(host: Host, repository: Repository, glob: str, names: Sequence[str]) -> None:
    """Remove archives and matching checkpoints of interrupted runs; free their space.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    # Only now: an interrupted run is resumed from the chunks in its checkpoints.
    call(host, repository, "delete", "--glob-archives", f"{glob}.checkpoint*", repository.url)
    if names:
        call(host, repository, "delete", repository.url, *names)
        call(host, repository, "compact", repository.url)


def compact(host: Host, repository: Repository) -> bool:
    """Free the space of removed archives; return whether the key permits it.

    With a key that may only append borg succeeds and frees nothing, and only its log shows the difference.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    result = call(host, repository, "compact", "--info", repository.url)
    return COMPACTED in result.stderr.decode(errors="replace")


def check(host: Host, repository: Repository) -> None:
    """Check the repository and the metadata of its archives with ``borg check``; contents are not read.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``; also where borg finds damage.
    """
    result = host.run(*repository.argv("check", repository.url), ok=None, timeout=None)
    lines = result.stderr.decode(errors="replace").splitlines()
    if result.status == 1:
        raise _damaged(host, repository, _log_messages(lines))
    if result.status:
        raise error_of(host, repository, result.status, lines)


def export_key(host: Host, repository: Repository) -> bytes:
    """Return the repository's key as ``borg key export`` prints it: encrypted with the passphrase.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    return call(host, repository, "key", "export", repository.url).stdout


def extract_argv(repository: Repository, name: str) -> tuple[str, ...]:
    """Return the command that prints the content that ``create`` archived."""
    return repository.argv("extract", "--stdout", repository.at(name), ARCHIVE_FILE)


@dataclass(frozen=True)
class LogMessage:
    """A log message of borg; ``id`` names the error, if it is one."""

    text: str
    level: str = "WARNING"
    id: str = ""


def _log_messages(lines: list[str]) -> list[LogMessage]:
    """Return borg's log messages from lines of standard error."""
    found = []
    for line in lines:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            found.append(LogMessage(line))
            continue
        if isinstance(message, dict) and message.get("type") == "log_message":
            text, level, name = (str(message.get(key) or "") for key in ("message", "levelname", "msgid"))
            found.append(LogMessage(text, level, name))
    return found


def _ids(lines: list[str]) -> set[str]:
    return {message.id for message in _log_messages(lines)}


FOREIGN = "was not created by this site, or was replaced"
FOREIGN_IDS = (
    "KeyfileNotFoundError",
    "KeyfileMismatchError",
    "KeyfileInvalidError",
    "UnsupportedManifestError",
    "UnsupportedPayloadError",
    "NoManifestError",
    "Cache.CacheInitAbortedError",
    "Cache.EncryptionMethodMismatch",
    "Cache.RepositoryIDNotUnique",
    "Cache.RepositoryAccessAborted",
    "Cache.RepositoryReplay",
    "Repository.AtticRepository",
)
NOT_A_REPOSITORY = (
    "Repository.InvalidRepository",
    "Repository.InvalidRepositoryConfig",
    "Repository.PathAlreadyExists",
    "Repository.AlreadyExists",
)
FULL = ("No space left on device", "Disk quota exceeded", "InsufficientFreeSpaceError", "StorageQuotaExceeded")
TRACE = re.compile(r"^Traceback|^(Local|Remote) Exception|\nPlatform:", re.MULTILINE)
"""Parts of borg's errors that only help its developers."""
NO_BORG = re.compile("borg: (command )?not found|borg: No such file")
SSH_ERROR = re.compile(
    f"ssh: |Host key verification failed|IDENTIFICATION HAS CHANGED|Permission denied|{NO_BORG.pattern}"
)
"""Error messages of ssh, or of the remote shell."""
DAMAGED = ("IntegrityError", "CheckNeeded", "ObjectNotFound", "DecompressionError", "FileIntegrityError")


def error_of(host: Host, repository: Repository, status: int, lines: list[str]) -> SmsError:
    """Return the error for borg's exit status and messages."""
    messages = _log_messages(lines)
    ids = {one.id for one in messages}
    text = "\n".join(one.text for one in messages)
    url, name = repository.url, host.name
    if ids & {"PassphraseWrong", "PasswordRetriesExceeded"}:
        return Refused(
            f"{name}: the passphrase in {repository.passphrase} does not open {url}",
            hint="use the copy of the passphrase that was kept elsewhere; without it the archives are lost",
        )
    if "PasscommandFailure" in ids:
        return Refused(f"{name}: cannot read {repository.passphrase}", hint=f"ls -l {repository.passphrase}")
    if "LockTimeout" in ids:
        return Busy(
            f"{name}: {url} is locked by another borg process",
            hint=f"wait for it; if none runs on any host: {repository.shell_command('break-lock', url)}",
        )
    if "Repository.ParentPathDoesNotExist" in ids:
        return Refused(f"{name}: the parent folder of {url} does not exist", hint="is its disk mounted?")
    if "Repository.DoesNotExist" in ids:
        return Refused(f"{name}: there is no repository {url}", hint="`sms overlay push --to borg` creates it")
    if ids & set(NOT_A_REPOSITORY):
        return Refused(f"{name}: {url} exists and is not a Borg repository", hint="set snapshots.borg to another path")
    if "RepoKeyNotFoundError" in ids:
        restore = repository.shell_command("key", "import", url, "FILE")
        return Refused(
            f"{name}: {url} has lost its key, or another program has created it: {_last(messages)}",
            hint=f"with a copy that `sms overlay key export` has written: {restore}",
        )
    if ids & set(FOREIGN_IDS):
        return Refused(
            f"{name}: {url} {FOREIGN}: {_last(messages)}", hint="set snapshots.borg to a path used by nothing else"
        )
    if any(word in text or word in " ".join(ids) for word in FULL):
        return SmsError(
            f"{name}: no space left at {url}; the archive was not created, earlier ones are intact",
            hint="free space there, or keep fewer archives (`retention:` of the site file); then push again",
        )
    if "PathNotAllowed" in ids:
        return Refused(
            f"{name}: the server does not permit access to {url}", hint="check `borg serve` in its authorized_keys"
        )
    if ids & {"ConnectionClosed", "ConnectionClosedWithHint"} or "ssh:" in text:
        return _connection_error(host, repository, text)
    if any(word in " ".join(ids) or word in text for word in DAMAGED):
        return _damaged(host, repository, messages)
    result = Result(name, ("borg",), status, b"", text.encode())
    return CommandError(result, hint="no incomplete archive was kept; run the command again")


def _damaged(host: Host, repository: Repository, messages: list[LogMessage]) -> SmsError:
    repair = repository.shell_command("check", "--repair", repository.url)
    return SmsError(
        f"{host.name}: {repository.url} is damaged: {_last(messages)}",
        hint=f"{repair}; then: sms overlay push --all-missing --to borg",
    )


def _connection_error(host: Host, repository: Repository, text: str) -> SmsError:
    url = repository.url
    place = re.match(r"ssh://(?:([^@/]*)@)?(\[[^\]]+\]|[^:/]+)(?::(\d+))?", url)
    address, port = (place[2].strip("[]"), place[3] or "22") if place else (url, "22")
    if place and not SSH_ERROR.search(text):
        # borg may miss ssh's error message: run ssh again, without borg.
        user = ["-l", place[1]] if place[1] else []
        ssh = shlex.split(repository.environment()["BORG_RSH"])
        try:
            result = host.run(*ssh, "-p", port, *user, address, "borg", "--version", ok=None)
            text += "\n" + result.stderr.decode(errors="replace")
        except CommandError:
            pass
    if "Host key verification failed" in text or "IDENTIFICATION HAS CHANGED" in text:
        known = repository.known_hosts or "/root/.ssh/known_hosts"
        problem = "host key does not match known_hosts" if "HAS CHANGED" in text else "host key is not in known_hosts"
        return Refused(
            f"{host.name}: {address}: {problem}",
            hint=f"compare its fingerprint on that machine, then: ssh-keyscan -p {port} {address} >>{known}",
        )
    if "Permission denied" in text:
        key = repository.ssh_key or "root's default key"
        return Refused(
            f"{host.name}: {url}: authentication failed with {key}", hint="is its .pub in authorized_keys there?"
        )
    if NO_BORG.search(text):
        return Refused(f"borg is not installed on {address}", hint="apt-get install borgbackup, on that machine")
    reasons = [line for line in text.splitlines() if "onnection" in line or "resolve" in line or "route" in line]
    return Unreachable(
        f"{host.name}: the connection to {url} broke: {reasons[0] if reasons else 'no reason given'}",
        hint="is that machine up? No incomplete archive was kept; run the command again",
    )


def _last(messages: list[LogMessage]) -> str:
    """Return the error message without borg's traceback and the platform information that follows it."""
    texts = [one.text.strip() for one in messages if one.level in ("ERROR", "CRITICAL")]
    plain = [text for text in texts if text and not TRACE.search(text)]
    for text in plain[-1:] or texts[-1:]:
        # A traceback ends with the exception; what follows it begins with the platform.
        lines = [line.strip() for line in text.partition("\nPlatform:")[0].splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return "no reason given"
