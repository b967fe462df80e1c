"""Borg 1.2: a repository of deduplicated, encrypted archives, in a folder or behind SSH.

Its passphrase is in a file that only root can read; borg has it read by a program (BORG_PASSCOMMAND), so that
it is in no argument, no environment and no log. borg asks nothing: what it would ask is an error here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import CommandError, Host, Result, Unreachable
from appliance.progress import Progress
from appliance.tools.agent import Listener

LOCK_WAIT_S = 30
CHUNKER = "fixed,65536"
"""The chunks of our own store: what is the same there is the same here."""
COMPRESSION = "zstd,3"
INSIDE = "overlay.img"
"""The one file of an archive."""
FINE = (0, 1)
"""Exit statuses: done, and done with a warning."""
EMPTY = "This repository contains no valid data"
"""What ``borg check`` says of a repository that never had anything."""

HALF_MADE = """\
rm -f -- "$1/README" && { [ ! -d "$1/data" ] || rmdir -- "$1/data"; } && rmdir -- "$1"
"""
"""Shell: remove folder $1 if it is what borg had made until it was killed, and nothing else is in it."""


@dataclass(frozen=True)
class Repository:
    """Where it is, and what opens it. ``base`` is a folder of the host's for borg's cache and its memory of keys."""

    url: str
    passphrase: str
    base: str
    ssh_key: str | None = None
    known_hosts: str | None = None

    @property
    def local(self) -> bool:
        """Whether it is a folder of the host's own."""
        return self.url.startswith("/")

    @property
    def mark(self) -> str:
        """A file on the host that is there while the repository is being made."""
        return f"{self.base}/making"

    def environment(self) -> dict[str, str]:
        """What borg is told besides its arguments."""
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
            # Another name of the same repository is the site's own doing; its id and its key must be the same.
            "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
            # One without encryption is not what this made.
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "no",
            "BORG_DISPLAY_PASSPHRASE": "no",
        }

    def argv(self, *words: str) -> tuple[str, ...]:
        """A borg command."""
        theirs = ("BORG_PASSPHRASE", "BORG_PASSPHRASE_FD", "BORG_NEW_PASSPHRASE", "BORG_REPO")
        unset = [word for name in theirs for word in ("-u", name)]
        own = [f"{name}={value}" for name, value in self.environment().items()]
        return ("env", *unset, *own, "borg", "--log-json", "--lock-wait", str(LOCK_WAIT_S), *words)

    def by_hand(self, *words: str) -> str:
        """A borg command with all that it needs, for a person's shell."""
        own = self.environment()
        names = ["BORG_PASSCOMMAND", "BORG_BASE_DIR", *([] if self.local else ["BORG_RSH"])]
        return " ".join([*(f"{name}={shlex.quote(own[name])}" for name in names), shlex.join(["borg", *words])])

    def at(self, archive: str) -> str:
        """An archive, as borg names it."""
        return f"{self.url}::{archive}"


@dataclass(frozen=True)
class Archive:
    """One in the repository; ``time`` is Unix time, in seconds."""

    name: str
    time: float
    comment: str


def check_ready(host: Host, repository: Repository) -> None:
    """Whether the host has borg, and a passphrase that nobody else can read.

    Raises:
        Refused: it has not.
    """
    said = host.run("sh", "-c", "command -v borg >/dev/null || exit 44; borg --version", "ask", ok=None)
    if said.status == 44:
        raise Refused(
            f"borg is not installed on {host.name}",
            hint=f"`apt-get install borgbackup` there; `sms host prepare {host.name}` does it on Debian",
        )
    version = re.search(r"(\d+)\.(\d+)", said.text)
    if not version or not (1, 2) <= (int(version[1]), int(version[2])) < (2, 0):
        raise Refused(f"{host.name} has {said.text or 'a borg that does not run'}", hint="borg 1.2 or later 1.x works")
    path = repository.passphrase
    state = host.run("stat", "-Lc", "%a %u %s", "--", path, ok=None)
    if state.status:
        raise Refused(
            f"{host.name} has no passphrase file {path}",
            hint=f"once, and keep a copy elsewhere: (umask 077; head -c 32 /dev/urandom | base64 >{path})",
        )
    mode, owner, length = state.text.split()
    if int(mode, 8) & 0o077 or owner != "0":
        raise Refused(
            f"{path} on {host.name} can be read by others than root (mode {mode})",
            hint=f"chmod 600 {path} && chown root {path}",
        )
    if length == "0":
        raise Refused(f"{path} on {host.name} is empty", hint="put the passphrase of the repository into it")


def call(host: Host, repository: Repository, *words: str) -> Result:
    """Run borg to its end.

    Raises:
        Busy, Refused, SmsError, Unreachable: what it says went wrong.
    """
    result = host.run(*repository.argv(*words), ok=None, timeout=None)
    if result.status not in FINE:
        raise why(host, repository, result.status, result.stderr.decode(errors="replace").splitlines())
    return result


def list_archives(host: Host, repository: Repository, glob: str) -> list[Archive] | None:
    """Archives whose names match; None where there is no repository yet.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    words = ("list", "--json", "--format", "{comment}", "--glob-archives", glob, repository.url)
    result = host.run("env", "TZ=UTC", *repository.argv(*words), ok=None, timeout=None)
    lines = result.stderr.decode(errors="replace").splitlines()
    if result.status not in FINE:
        if "Repository.DoesNotExist" in _ids(lines) or _was_being_made(host, repository, lines):
            return None
        raise why(host, repository, result.status, lines)
    found = json.loads(result.stdout)["archives"]
    return [Archive(one["name"], _stamp(one["time"]), one.get("comment", "")) for one in found]


def _stamp(text: str) -> float:
    """borg prints local time without saying so: it was asked for in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def make(host: Host, repository: Repository) -> None:
    """Make the repository; one that a killed run had begun is begun anew.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    host.write(repository.mark, repository.url.encode(), mode=0o600)
    call(host, repository, "init", "--encryption=repokey-blake2", repository.url)
    host.remove(repository.mark)


def _was_being_made(host: Host, repository: Repository, lines: list[str]) -> bool:
    """Whether it is a repository that this host was making when it was killed; it is removed then.

    Not by its looks alone: our own mark must be there, and borg must find nothing in it.
    """
    if host.read(repository.mark) != repository.url.encode():
        return False
    if repository.local and "Repository.InvalidRepository" in _ids(lines):
        return host.works("sh", "-c", HALF_MADE, "clear", repository.url)
    if "NoManifestError" not in _ids(lines):
        return False
    seen = host.run(*repository.argv("check", "--repository-only", repository.url), ok=None, timeout=None)
    if EMPTY not in seen.stderr.decode(errors="replace"):
        return False
    argv = ("env", "BORG_DELETE_I_KNOW_WHAT_I_AM_DOING=YES", *repository.argv("delete", repository.url))
    return host.run(*argv, ok=None, timeout=None).status in FINE


def create(
    host: Host,
    repository: Repository,
    name: str,
    source: tuple[str, ...],
    progress: Progress,
    *,
    comment: str,
    timestamp: str,
) -> dict[str, Any]:
    """Make an archive of what ``source`` prints, an agent's command; give borg's figures of it.

    Nothing is archived unless ``source`` ends well: borg starts it and looks at its status.

    Raises:
        Busy, Refused, SmsError, Unreachable: what borg or the agent says went wrong.
    """
    words = ["create", "--json", "--stdin-name", INSIDE, "--stdin-mode", "0600", "--content-from-command"]
    words += ["--files-cache", "disabled", "--chunker-params", CHUNKER, "--compression", COMPRESSION]
    words += ["--timestamp", timestamp, "--comment", comment, repository.at(name), "--", *source]
    lines: list[str] = []
    with ExitStack() as stack:
        listener = Listener(progress, stack)

        def hear(line: str) -> None:
            listener.hear(line)
            lines.append(line)

        with host.stream(*repository.argv(*words), on_line=hear) as stream:
            stream.end()
            printed = b""
            while block := stream.read():
                printed += block
            result = stream.result(ok=None)
        if listener.problem and not listener.problem.get("gone"):
            listener.outcome(result)
        if result.status not in FINE:
            raise why(host, repository, result.status, lines)
    stats: dict[str, Any] = json.loads(printed)["archive"]["stats"]
    return stats


def remove(host: Host, repository: Repository, glob: str, names: Sequence[str]) -> None:
    """Remove archives, and what killed runs left of those that match; give the room back.

    Raises:
        Busy, Refused, SmsError, Unreachable: as ``call``.
    """
    # Only now: until its archive is whole, the next run of borg finds its chunks in them.
    call(host, repository, "delete", "--glob-archives", f"{glob}.checkpoint*", repository.url)
    if names:
        call(host, repository, "delete", repository.url, *names)
        call(host, repository, "compact", repository.url)


def extract_argv(repository: Repository, name: str) -> tuple[str, ...]:
    """The command that prints what ``create`` was given."""
    return repository.argv("extract", "--stdout", repository.at(name), INSIDE)


def _said(lines: list[str]) -> list[dict[str, Any]]:
    """borg's own words among what came on standard error."""
    found = []
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            said = {"type": "log_message", "levelname": "WARNING", "message": line}
        if isinstance(said, dict) and said.get("type") == "log_message":
            found.append(said)
    return found


def _ids(lines: list[str]) -> set[str]:
    return {str(said.get("msgid")) for said in _said(lines)}


OTHERS = "is not one that this site made, or was changed behind its back"
NOT_OURS = (
    "KeyfileNotFoundError",
    "KeyfileMismatchError",
    "KeyfileInvalidError",
    "RepoKeyNotFoundError",
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
TAKEN = (
    "Repository.InvalidRepository",
    "Repository.InvalidRepositoryConfig",
    "Repository.PathAlreadyExists",
    "Repository.AlreadyExists",
)
FULL = ("No space left on device", "Disk quota exceeded", "InsufficientFreeSpaceError", "StorageQuotaExceeded")
TRACE = re.compile(r"^Traceback|^(Local|Remote) Exception|\nPlatform:", re.MULTILINE)
"""What of borg's errors is for its makers."""
NO_BORG = re.compile("borg: (command )?not found|borg: No such file")
SSH_SAID = re.compile(
    f"ssh: |Host key verification failed|IDENTIFICATION HAS CHANGED|Permission denied|{NO_BORG.pattern}"
)
"""What ssh, or the shell on the far side, gives as the reason."""
BROKEN = ("IntegrityError", "CheckNeeded", "ObjectNotFound", "DecompressionError", "FileIntegrityError")


def why(host: Host, repository: Repository, status: int, lines: list[str]) -> SmsError:
    """What went wrong, by borg's words, as a person reads it."""
    said = _said(lines)
    ids = {str(one.get("msgid")) for one in said}
    words = "\n".join(str(one.get("message", "")) for one in said)
    url, name = repository.url, host.name
    if ids & {"PassphraseWrong", "PasswordRetriesExceeded"}:
        return Refused(
            f"{name}: the passphrase in {repository.passphrase} does not open {url}",
            hint="without the right one nobody can: look for the copy that was kept elsewhere",
        )
    if "PasscommandFailure" in ids:
        return Refused(f"{name}: {repository.passphrase} cannot be read", hint=f"ls -l {repository.passphrase}")
    if "LockTimeout" in ids:
        return Busy(
            f"{name}: {url} is locked: another borg is at work on it",
            hint=f"wait for it; if none runs on any host: {repository.by_hand('break-lock', url)}",
        )
    if "Repository.ParentPathDoesNotExist" in ids:
        return Refused(f"{name}: the folder that {url} is to be made in is not there", hint="is its disk mounted?")
    if "Repository.DoesNotExist" in ids:
        return Refused(f"{name}: there is no repository {url}", hint="`sms overlay push --to borg` makes it")
    if ids & set(TAKEN):
        return Refused(f"{name}: {url} is there and is no Borg repository", hint="give snapshots.borg another path")
    if ids & set(NOT_OURS):
        return Refused(f"{name}: {url} {OTHERS}: {_last(said)}", hint="give snapshots.borg a path of its own")
    if any(word in words or word in " ".join(ids) for word in FULL):
        return SmsError(
            f"{name}: there is no room left at {url}; the archive was not made, those before it are whole",
            hint="make room there, or keep fewer (`retention:` of the site file); then push again",
        )
    if "PathNotAllowed" in ids:
        return Refused(f"{name}: the far side does not let us use {url}", hint="see its authorized_keys: borg serve")
    if ids & {"ConnectionClosed", "ConnectionClosedWithHint"} or "ssh:" in words:
        return _connection(host, repository, words)
    if any(word in " ".join(ids) or word in words for word in BROKEN):
        return SmsError(
            f"{name}: {url} is damaged: {_last(said)}",
            hint=f"{repository.by_hand('check', '--repair', url)}; then: sms overlay push --all-missing --to borg",
        )
    result = Result(name, ("borg",), status, b"", words.encode())
    return CommandError(result, hint="nothing half made counts; run it again")


def _connection(host: Host, repository: Repository, words: str) -> SmsError:
    url = repository.url
    place = re.match(r"ssh://(?:([^@/]*)@)?(\[[^\]]+\]|[^:/]+)(?::(\d+))?", url)
    address, port = (place[2].strip("[]"), place[3] or "22") if place else (url, "22")
    if place and not SSH_SAID.search(words):
        # borg may see the end before it has read why, or all of it: ssh is asked once more, without borg.
        user = ["-l", place[1]] if place[1] else []
        ssh = shlex.split(repository.environment()["BORG_RSH"])
        try:
            asked = host.run(*ssh, "-p", port, *user, address, "borg", "--version", ok=None)
            words += "\n" + asked.stderr.decode(errors="replace")
        except CommandError:
            pass
    if "Host key verification failed" in words or "IDENTIFICATION HAS CHANGED" in words:
        known = repository.known_hosts or "/root/.ssh/known_hosts"
        changed = "shows another host key than the known one" if "HAS CHANGED" in words else "has no known host key"
        return Refused(
            f"{host.name}: {address} {changed}",
            hint=f"compare its fingerprint on that machine, then: ssh-keyscan -p {port} {address} >>{known}",
        )
    if "Permission denied" in words:
        key = repository.ssh_key or "root's own key"
        return Refused(f"{host.name}: {url} refuses the login with {key}", hint="is its .pub in authorized_keys there?")
    if NO_BORG.search(words):
        return Refused(f"borg is not installed on {address}", hint="apt-get install borgbackup, on that machine")
    said = [line for line in words.splitlines() if "onnection" in line or "resolve" in line or "route" in line]
    return Unreachable(
        f"{host.name}: the connection to {url} broke: {said[0] if said else 'no reason was given'}",
        hint="is that machine up? Nothing half made counts; run it again",
    )


def _last(said: list[dict[str, Any]]) -> str:
    """The line that says what went wrong: not borg's traceback, nor the facts of the machine that follow it."""
    texts = [str(one.get("message", "")).strip() for one in said if one.get("levelname") in ("ERROR", "CRITICAL")]
    plain = [text for text in texts if text and not TRACE.search(text)]
    for text in plain[-1:] or texts[-1:]:
        # A traceback ends with the exception; what follows it begins with the platform.
        lines = [line.strip() for line in text.partition("\nPlatform:")[0].splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return "it does not say why"
