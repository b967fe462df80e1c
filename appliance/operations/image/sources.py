"""What an image is installed from: repositories, their keys and credentials."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from appliance.catalog import Base
from appliance.config.model import Repository
from appliance.config.read import read_text
from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.image.definition import has_credentials, missing_mirrors, repository_urls
from appliance.plan.image.openpgp import KeyProblem, read_keys
from appliance.plan.image.repositories import (
    Credential,
    credential_files,
    credentials_for,
    read_credentials,
    split_url,
    wgetrc,
)
from appliance.tools import apt, rpm

CREDENTIALS = "sms-credentials-"


@dataclass(frozen=True)
class Sources:
    """Repositories of an image: ``mirrors`` those of its base, ``own`` the site's.

    Attributes:
        keys: keys that packages are verified with, by repository; for apt only the site's.
        credentials: by repository; they are secret.
    """

    base: Base
    mirrors: Mapping[str, str]
    own: Mapping[str, Repository]
    keys: Mapping[str, bytes]
    credentials: Mapping[str, Credential] = field(default_factory=dict, repr=False)

    @property
    def urls(self) -> dict[str, str]:
        """URL of every repository."""
        return {**self.mirrors, **{name: each.url.rstrip("/") for name, each in self.own.items()}}


def find_sources(cluster: Cluster, host: Host) -> Sources:
    """Return the repositories of the site's image.

    Raises:
        ConfigError: a repository has no mirror; a key or the file of credentials is invalid.
        Refused: this host has no key for a repository, or others can read the credentials.
    """
    base, given = cluster.base, cluster.site.base
    found, of_host = _host_mirrors(host, base)
    urls = repository_urls(base, given.mirrors)
    mirrors = _find_mirrors(base, {**found, **urls})
    keys = {**_repository_keys(base), **{name: read_key(each) for name, each in given.repositories.items()}}
    for name, each in given.repositories.items():
        if has_credentials(each.url):
            raise ConfigError(
                f"the URL of repository {name} contains a user or a token, which would be stored in the image",
                hint="write them into a file of mode 0600, and name it under base.credentials",
            )
    credentials = {name: each for name, each in of_host.items() if name not in urls}
    if given.credentials:
        credentials |= credentials_for(base, given.repositories, _read_credentials(given.credentials))
    return Sources(base, mirrors, given.repositories, keys, credentials)


def read_key(repository: Repository) -> bytes:
    """Return the public keys of a site's repository in ASCII armour.

    Raises:
        ConfigError: its file is not one of public keys.
    """
    try:
        return read_keys(repository.key.read_bytes())[0]
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
    except KeyProblem as error:
        problem = str(error)
    raise ConfigError(
        f"{repository.key}: {problem}",
        hint="`gpg --export FINGERPRINT` writes one; check the fingerprint with its owner",
    )


def _read_credentials(path: Path) -> dict[str, Credential]:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or '').lower()}", hint="base.credentials names it") from None
    if mode & 0o077:
        raise Refused(f"others can read {path}", hint=f"chmod 600 {path}")
    return read_credentials(read_text(path), str(path))


@contextmanager
def credentials_folder(sources: Sources) -> Iterator[Path | None]:
    """Yield a folder of this user's own with the files of the credentials, for one command; None if there are none.

    ``mounted/`` has those for the build, ``wgetrc`` that for debootstrap. It is in memory where possible; those of
    killed runs are removed.
    """
    parent = "/run" if os.access("/run", os.W_OK) else tempfile.gettempdir()
    for left in Path(parent).glob(f"{CREDENTIALS}*"):
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    if not sources.credentials:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix=f"{CREDENTIALS}{os.getpid()}-", dir=parent) as made:
        folder = Path(made)
        (folder / "mounted").mkdir()
        for name, text in credential_files(sources.base, sources.urls, sources.credentials).items():
            _write_secret(folder / "mounted" / name, text)
        if sources.base.manager == "apt" and (first := sources.credentials.get("debian")):
            _write_secret(folder / "wgetrc", wgetrc(first))
        yield folder


def _write_secret(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


def find_mirrors(host: Host, base: Base, given: Mapping[str, str]) -> dict[str, str]:
    """Return the URL of each repository of the base: as ``given`` by the site, else as configured on this host.

    Raises:
        ConfigError: a repository has no mirror.
    """
    return _find_mirrors(base, {**_host_mirrors(host, base)[0], **repository_urls(base, given)})


def _find_mirrors(base: Base, mirrors: dict[str, str]) -> dict[str, str]:
    missing = missing_mirrors(base, mirrors)
    if missing:
        raise ConfigError(
            f"no mirror is known for {', '.join(missing)}, a repository of {base.name}",
            hint=f"set it in the site file: base: {{mirrors: {{{missing[0]}: https://...}}}}; "
            "mirrors of this host are used, of apt and dnf unless their URL contains a password or a token",
        )
    return mirrors


def _host_mirrors(host: Host, base: Base) -> tuple[dict[str, str], dict[str, Credential]]:
    """Return the base's repositories as configured in this host's package manager, and credentials of its registration.

    No URL has credentials: it gets into the image.
    """
    if base.manager == "apt":
        return apt.find_mirrors(host, {name: each.suites for name, each in base.repositories.items()}), {}
    found = rpm.find_mirrors(host, base.manager, {name: each.ids for name, each in base.repositories.items()})
    if base.manager == "dnf":
        return {name: url for name, url in found.items() if not has_credentials(url)}, {}
    urls: dict[str, str] = {}
    credentials: dict[str, Credential] = {}
    for name, url in found.items():
        urls[name], credential, file = split_url(url)
        if file:
            credential = rpm.read_credentials(host, file, credential.token if credential else "")
        if credential:
            credentials[name] = credential
    return urls, credentials


def _repository_keys(base: Base) -> dict[str, bytes]:
    """Return the keys of this host that packages are verified with. Keys are never fetched from a mirror.

    Raises:
        Refused: this host has no key for a repository.
    """
    keys: dict[str, bytes] = {}
    for name, repository in base.repositories.items():
        if not repository.keys:
            continue
        files = sorted(Path("/").glob(repository.keys.lstrip("/")))
        if not files:
            raise Refused(
                f"there is no key for repository {name}: {repository.keys}",
                hint="install the distribution's release package and verify the fingerprint of its key",
            )
        keys[name] = b"\n".join(file.read_bytes() for file in files)
    return keys
