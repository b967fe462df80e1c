"""The log of every certificate that the site's authority has issued, and the list of those that were revoked.

Both are in the folder of the authority. The list of revoked ones is installed in the VM, where the web server and the
service refuse them.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import Busy, ConfigError, SmsError
from appliance.shared.files import replace_file
from appliance.shared.history import AppendLine
from appliance.shared.locks import Locked, hold_lock
from appliance.shared.records import RecordError, from_json, from_value, to_json

if TYPE_CHECKING:
    from cryptography import x509

LOG, REVOKED = "issued.log", "revoked.json"
LOCK_WAIT_S = 5
"""Seconds to wait for another process that changes the list."""
SERIAL = re.compile(r"[0-9A-F]{16,40}")
"""A serial number as ``serial_of`` returns it."""


@dataclass(frozen=True)
class Issued:
    """A certificate of the log. ``at``, ``ends``: Unix time; ``by``: user and machine that issued it."""

    at: float
    serial: str
    subject: str
    purpose: str
    ends: float
    by: str = ""


@dataclass(frozen=True)
class Revocation:
    """A revoked certificate. ``at``: Unix time; ``ends``: when it expires, 0 if that is not known."""

    serial: str
    subject: str = ""
    at: float = 0
    ends: float = 0


@dataclass(frozen=True)
class Revocations:
    """Content of the list's file."""

    revoked: list[Revocation] = field(default_factory=list)


def serial_of(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number in hex, as OpenSSL and nginx print it."""
    digits = f"{certificate.serial_number:X}"
    return digits if len(digits) % 2 == 0 else f"0{digits}"


def log_issued(folder: Path, certificate: x509.Certificate, purpose: str, *, issued: float = 0) -> None:
    """Append a certificate to the log; it is on the disk when this returns.

    Args:
        issued: when an earlier release issued it, as Unix time; 0 for a new one.

    Raises:
        SmsError: the log cannot be written; the certificate must not be used.
    """
    try:
        who = getpass.getuser()
    except (KeyError, OSError):
        who = "unknown"
    by = "an earlier release" if issued else f"{who}@{socket.gethostname()}"
    subject, ends = certificate.subject.rfc4514_string(), certificate.not_valid_after_utc.timestamp()
    entry = Issued(round(issued or time.time(), 3), serial_of(certificate), subject, purpose, ends, by)
    try:
        AppendLine(str(folder / LOG), json.dumps(asdict(entry))).perform()
    except OSError as error:
        raise SmsError(f"cannot write {folder / LOG}: {error.strerror}", hint="no certificate was issued") from error


def read_issued(folder: Path) -> list[Issued]:
    """Return the log, the oldest first, without the lines of ``find_unreadable``.

    Raises:
        ConfigError: it cannot be read.
    """
    return [entry for entry in _read_lines(folder) if entry]


def find_unreadable(folder: Path) -> str:
    """Return a warning about lines of the log that are not entries, empty if there are none.

    A crash truncates a line: that certificate was never used. Other causes are a disk and an editor.

    Raises:
        ConfigError: it cannot be read.
    """
    numbers = [str(number) for number, entry in enumerate(_read_lines(folder), 1) if not entry]
    shown = ", ".join(numbers[:10]) + (f" and {len(numbers) - 10} more" if numbers[10:] else "")
    if not numbers:
        return ""
    return (
        f"{folder / LOG}: line {shown} cannot be read: a certificate in it is not found by its name; "
        "`sms key ca revoke SERIAL` revokes it"
    )


def _read_lines(folder: Path) -> list[Issued | None]:
    """Return the entry of each line, None for one that is not an entry."""
    try:
        lines = (folder / LOG).read_bytes().splitlines()
    except FileNotFoundError:
        return []  # an authority of an earlier release
    except OSError as error:
        raise ConfigError(f"cannot read {folder / LOG}: {error.strerror}") from error
    found: list[Issued | None] = []
    for line in lines:
        try:
            found.append(from_value(Issued, json.loads(line)))
        except ValueError:
            found.append(None)
    return found


def read_revoked(folder: Path) -> list[Revocation]:
    """Return the revoked certificates.

    Raises:
        ConfigError: the list cannot be read.
    """
    try:
        return from_json(Revocations, (folder / REVOKED).read_bytes()).revoked
    except FileNotFoundError:
        return []
    except (OSError, RecordError) as error:
        raise ConfigError(
            f"cannot read {folder / REVOKED}: {error}",
            hint="restore it: without it, revoked certificates would work again",
        ) from error


def add_revoked(folder: Path, new: Collection[Revocation]) -> list[Revocation]:
    """Add certificates to the list; return those that it did not have.

    Raises:
        ConfigError: the list cannot be read.
        SmsError: it cannot be written.
    """
    if not new:
        return []
    try:
        with hold_lock(str(folder / f".{REVOKED}.lock"), wait_s=LOCK_WAIT_S, users=True):
            before = read_revoked(folder)
            known = {each.serial for each in before}
            added = [each for each in new if each.serial not in known]
            if added:
                replace_file(str(folder / REVOKED), to_json(Revocations([*before, *added])), 0o644)
    except Locked:
        raise Busy(f"another sms changes {folder / REVOKED}", hint="run this again") from None
    except OSError as error:
        raise SmsError(f"cannot write {folder / REVOKED}: {error.strerror}", hint="nothing was revoked") from error
    return added


def revoked_map(folder: Path) -> bytes:
    """Return the list for the VM: nginx's form of a map, a line for each certificate that has not expired.

    Raises:
        ConfigError: the list cannot be read.
    """
    now = time.time()
    serials = {each.serial for each in read_revoked(folder) if not each.ends or each.ends > now}
    return "".join(f"{serial} 1;\n" for serial in sorted(serials)).encode()
