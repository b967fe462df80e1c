"""`sms init`: writes a commented site file to start from."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from appliance.errors import ConfigError, Refused, SmsError, disk_hint
from appliance.operations.site.ca import ca_folder, make_ca
from appliance.share import share
from appliance.shared.files import make_folder, sync_folder
from appliance.text import SHORT, nearest, printable


def list_profiles() -> dict[str, str]:
    """Return the profiles, each with the summary in the first line of its file."""
    profiles = {}
    for path in sorted(share("definitions", "profiles").glob("*.yaml")):
        with path.open(encoding="utf-8") as stream:
            profiles[path.stem] = stream.readline().lstrip("# ").removeprefix("sms.yaml: ").strip()
    return profiles


def read_profile(name: str) -> str:
    """Return the text of a profile's site file."""
    profiles = list_profiles()
    if name not in profiles:
        raise ConfigError(f"unknown profile {printable(name, SHORT)}", hint=nearest(name, profiles))
    return share("definitions", "profiles", f"{name}.yaml").read_text(encoding="utf-8")


def write_site(text: str, path: Path, *, force: bool = False, parents: bool = False) -> None:
    """Write a new site file atomically; with ``parents``, create its folder.

    Raises:
        ConfigError: its folder does not exist, or is not one.
        Refused: the file exists and ``force`` is not set.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint=f"give a file, such as {path / 'sms.yaml'}")
    if folder := next((each for each in path.parents if each.exists() and not each.is_dir()), None):
        raise ConfigError(f"{folder} is not a folder", hint="choose another file with -o")
    if not parents and not path.parent.exists():
        raise ConfigError(f"there is no folder {path.parent}", hint="--parents creates it")
    if not force and os.path.lexists(path):
        raise Refused(f"{path} already exists", hint="choose another file with -o, or replace it with --force")
    try:
        make_folder(str(path.parent))
        replace_file(text, path, force=force)
    except FileExistsError:
        raise Refused(f"{path} already exists", hint="choose another file with -o") from None
    except OSError as error:
        hint = disk_hint(error.strerror or "") or "run as root, or choose another file with -o"
        raise SmsError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}", hint=hint) from None


def make_missing_ca(path: Path) -> bool:
    """Create the CA beside a site file if there is none; return whether one was created."""
    folder = ca_folder(path)
    if os.path.lexists(folder / "ca.pem"):
        return False
    make_ca(folder)
    return True


def replace_file(text: str, path: Path, *, force: bool) -> None:
    """Write a temporary file and rename it; without ``force``, never replace a file created meanwhile.

    A new file gets the permissions of the umask; a replaced file keeps its owner and permissions.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            if force and path.exists():
                _copy_ownership(descriptor, path.stat())
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if force:
            beside.replace(path)
        else:
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(str(path.parent))


def _copy_ownership(descriptor: int, before: os.stat_result) -> None:
    # An unprivileged user cannot change the owner; the mode is copied all the same.
    with suppress(PermissionError):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
