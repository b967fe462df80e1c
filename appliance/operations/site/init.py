"""`sms init`: writes a commented site file to start from."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from appliance.config.wording import nearest
from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.site.ca import ca_folder, make_ca
from appliance.share import share
from appliance.text import SHORT, printable


def list_profiles() -> dict[str, str]:
    """The profiles, each with the first line of its file, which says what it is for."""
    profiles = {}
    for path in sorted(share("definitions", "profiles").glob("*.yaml")):
        with path.open(encoding="utf-8") as stream:
            profiles[path.stem] = stream.readline().lstrip("# ").removeprefix("sms.yaml: ").strip()
    return profiles


def read_profile(name: str) -> str:
    """The text of a profile's site file."""
    profiles = list_profiles()
    if name not in profiles:
        raise ConfigError(f"there is no profile {printable(name, SHORT)}", hint=nearest(name, profiles))
    return share("definitions", "profiles", f"{name}.yaml").read_text(encoding="utf-8")


def write_site(text: str, path: Path, *, force: bool = False) -> None:
    """Write a new site file, whole or not at all.

    Raises:
        Refused: there is a file already, and ``force`` does not say to replace it.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint=f"name a file, such as {path / 'sms.yaml'}")
    if not force and os.path.lexists(path):
        raise Refused(f"{path} is there already", hint="name another file with -o, or replace it with --force")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(text, path, force=force)
    except FileExistsError:
        raise Refused(f"{path} is there already", hint="name another file with -o") from None
    except OSError as error:
        hint = "run as root, or name another file with -o"
        raise SmsError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}", hint=hint) from None


def make_missing_ca(path: Path) -> bool:
    """Make the authority beside a site file where there is none; says whether one was made."""
    folder = ca_folder(path)
    if os.path.lexists(folder / "ca.pem"):
        return False
    make_ca(folder)
    return True


def replace_file(text: str, path: Path, *, force: bool) -> None:
    """Write beside and put in place; without ``force``, never over a file that came meanwhile.

    A new file has the permissions that the umask leaves it, one that takes the place of another has those of that one.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            if force and path.exists():
                _take_after(descriptor, path.stat())
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if force:
            beside.replace(path)
        else:
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _take_after(descriptor: int, before: os.stat_result) -> None:
    # Who may not give files away keeps its own, and gives nobody more than there was.
    with suppress(PermissionError):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
