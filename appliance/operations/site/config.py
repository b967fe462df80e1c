"""`sms config`: validates and shows the site file, and checks the files that it names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.config.document import Document, Place
from appliance.config.model import Site
from appliance.errors import ConfigError, Problem
from appliance.operations.site.ca import ca_folder
from appliance.operations.site.find import Loaded, open_site


def check_config(path: Path, state: Path | None = None) -> Loaded:
    """Read a site file and check the files that it names.

    Raises:
        ConfigError: with every problem found.
    """
    loaded = open_site(path, state)
    problems = check_files(loaded.site, loaded.document)
    if str(path) != "-" and path.stat().st_mode & 0o022:
        message = f"others may write to it (mode {path.stat().st_mode & 0o777:04o}), and root follows it"
        problems.insert(0, Problem(str(path), 0, "", message, f"chmod go-w {path}"))
    for key in sorted(ca_folder(path).glob("*.key")) if str(path) != "-" else ():
        if words := _wrong(key, True, needed=False):
            problems.append(Problem(str(path), 0, "", *words))
    if problems:
        raise ConfigError(problems=problems)
    return loaded


def check_files(site: Site, document: Document) -> list[Problem]:
    """Return the problems of the files that the site file names.

    The signing keys may be missing before `sms key create`; the verbs that use them and `sms doctor`
    check that they exist.
    """
    problems = []
    for place, path, private in named_files(site):
        # A path that the file does not set is a default and need not exist yet.
        if place in document.lines and (words := _wrong(path, private, needed=place[0] != "signing")):
            problems.append(document.problem(place, *words))
    return sorted(problems, key=lambda problem: problem.line)


def show_config(site: Site) -> dict[str, Any]:
    """Return every setting with its value, including defaults."""
    return site.model_dump(mode="json", by_alias=True)


def named_files(site: Site) -> Iterator[tuple[Place, Path, bool]]:
    """Yield place, path, and whether only the owner may read the file."""
    for section, private in (("secrets", True), ("accounts", False)):
        values: dict[str, Path | None] = dict(getattr(site, section))
        for name, path in values.items():
            if path is not None:
                # Certificates are public.
                yield (section, name), path, private and name not in ("tls_ca", "tls_cert")
    for index, host in enumerate(site.admin_hosts):
        place: Place = ("admin_hosts", index)
        if host.key is not None:
            yield (*place, "key"), host.key, True
        for kind, device in dict(host.fence or ()).items():
            for name, private in (("password_file", True), ("ca", False)):
                if (path := getattr(device, name, None)) is not None:
                    yield (*place, "fence", kind, name), path, private
    if site.known_hosts is not None:
        yield ("known_hosts",), site.known_hosts, False
    if borg := site.snapshots.borg:
        for name, private in (("passphrase", True), ("ssh_key", True), ("known_hosts", False)):
            if (path := getattr(borg, name)) is not None:
                yield ("snapshots", "borg", name), path, private
    if site.provisioning:
        for name, private in (("password_file", True), ("ca", False)):
            if (path := getattr(site.provisioning.bmc, name)) is not None:
                yield ("provisioning", "bmc", name), path, private
    yield ("signing", "private_key"), site.signing.private_key, True
    for index, public in enumerate(site.signing.public_keys):
        yield ("signing", "public_keys", index), public, False


def _wrong(path: Path, private: bool, *, needed: bool) -> tuple[str, str] | None:
    """Return message and hint for what is wrong with a file, or None."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return (f"{path} does not exist", "check the path, or remove the setting") if needed else None
    except (OSError, ValueError) as error:
        return f"{path} cannot be reached: {error}", "check the path and the permissions of its folders"
    if not stat.S_ISREG(info.st_mode):
        return f"{path} is not a regular file", "give the path of a file"
    if private and info.st_mode & 0o077:
        return f"{path} can be read by others (mode {info.st_mode & 0o777:04o})", f"chmod 600 {path}"
    if not os.access(path, os.R_OK):
        return f"{path} is not readable", "run as root, or change its owner"
    return None
