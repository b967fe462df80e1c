"""Package repositories of the site's own, and credentials of repositories: they never get into an image."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from appliance.catalog import Base
from appliance.config.document import read_document
from appliance.config.finding import Finding
from appliance.config.model import Repository, Site
from appliance.errors import ConfigError, Problem

KEYS = "/opt/sms/keys"
"""Folder of the keys in the image."""
BOOTSTRAPPED = ("baseos", "appstream")
"""Repositories of dnf bases that Apptainer itself reads, without credentials."""
MOUNTS = {"apt": "/etc/apt/auth.conf.d", "dnf": "/etc/dnf/vars", "zypper": "/etc/zypp/repos.d"}
"""Folder over which the files with credentials are mounted during a build."""
_WORD = re.compile(r"[!-~]{1,1000}")
_KEYS = ("user", "password", "token")


@dataclass(frozen=True)
class Credential:
    """What a repository demands; ``token``: what follows ? in its URL (zypper)."""

    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)


def check_repositories(site: Site, base: Base) -> Iterator[Finding]:
    """Yield a finding for each repository of the site that does not fit the base."""
    known = {*base.repositories, *(each.mirror for each in base.repositories.values())}
    for name, repository in site.base.repositories.items():
        place = ("base", "repositories", name)
        if name in known:
            yield Finding(place, f"{name} is a repository of {base.name}", "choose another name")
        if base.manager == "apt" and not repository.suite:
            yield Finding(place, "has no suite", "add suite: bookworm, or suite: ./ for a repository without suites")
        if base.manager == "apt" and repository.suite and (repository.suite == "./") == bool(repository.components):
            hint = "a suite has components, such as [main]; ./ has none"
            yield Finding((*place, "components"), "do not fit the suite", hint)
        if base.manager != "apt" and (repository.suite or repository.components):
            yield Finding(place, f"suites and components are of apt, not {base.manager}", "remove them")


def own_sources(repositories: Mapping[str, Repository], keys: str) -> list[str]:
    """Return the lines of sources.list for the site's repositories; ``keys``: the folder of their keys."""
    return [
        f"deb [signed-by={keys}/{name}.asc] {each.url.rstrip('/')} {each.suite} {' '.join(each.components)}".rstrip()
        for name, each in sorted(repositories.items())
    ]


def read_credentials(text: str, file: str) -> dict[str, Credential]:
    """Read a file of credentials: ``REPOSITORY: {user, password}`` or ``{token}``.

    Raises:
        ConfigError: it is invalid; no message has a part of its values.
    """
    try:
        document = read_document(text, file)
    except ConfigError as error:
        problems = [Problem(file, each.line, "", "invalid YAML", "quote the values") for each in error.problems]
        raise ConfigError(problems=problems) from None
    if not isinstance(document.data, dict):
        raise ConfigError(problems=[Problem(file, 0, "", "not a mapping", "REPOSITORY: {user: NAME, password: TEXT}")])
    found: dict[str, Credential] = {}
    problems = []
    for name, entry in document.data.items():
        place = (name,)
        if not isinstance(entry, dict) or set(entry) not in ({"user", "password"}, {"token"}):
            problems.append(document.problem(place, "invalid", "give either user and password, or token"))
        elif not all(isinstance(value, str) and _WORD.fullmatch(value) for value in entry.values()):
            hint = "use printable ASCII characters without spaces; quote numbers"
            problems.append(document.problem(place, "has an invalid value", hint))
        else:
            found[name] = Credential(**entry)
    if problems:
        raise ConfigError(problems=problems)
    return found


def split_url(url: str) -> tuple[str, Credential | None, str]:
    """Separate the credentials of a zypper URL: the bare URL, the credentials, the name of a file that has them."""
    parts = urlsplit(url)
    queries = parse_qsl(parts.query, keep_blank_values=True)
    named = [value for key, value in queries if key == "credentials"]
    token = urlencode([each for each in queries if each[0] != "credentials"]) if named else parts.query
    bare = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")
    made = Credential(unquote(parts.username or ""), unquote(parts.password or ""), token)
    return bare, made if made != Credential() else None, named[0] if named else ""


def credentials_for(base: Base, own: Collection[str], given: Mapping[str, Credential]) -> dict[str, Credential]:
    """Return the credentials of each repository; a whole mirror's are those of its parts.

    Raises:
        ConfigError: a name is unknown, or the base cannot use them.
    """
    found: dict[str, Credential] = {}
    for name, credential in given.items():
        parts = [each for each, repository in base.repositories.items() if name in (each, repository.mirror)]
        names = [*parts, *([name] if name in own else [])]
        if not names:
            raise ConfigError(
                f"base.credentials: {base.name} has no repository {name}",
                hint=f"known: {', '.join(sorted({*base.repositories, *own}))}",
            )
        if credential.token and base.manager != "zypper":
            raise ConfigError(f"base.credentials: {name}: tokens are of zypper", hint="give user and password")
        if base.manager == "dnf" and (first := next((each for each in names if each in BOOTSTRAPPED), None)):
            raise ConfigError(
                f"base.credentials: {first} is read before dnf is there, without credentials",
                hint="mirror it without credentials, such as on the provisioning network",
            )
        found |= dict.fromkeys(names, credential)
    return found


def credential_files(base: Base, urls: Mapping[str, str], credentials: Mapping[str, Credential]) -> dict[str, str]:
    """Return the files that are mounted over the folder of ``MOUNTS`` during a build, by name. They are secret."""
    if base.manager == "apt":
        lines = [
            f"machine {urls[name].rstrip('/')} login {each.user} password {each.password}\n"
            for name, each in credentials.items()
        ]
        return {"sms.conf": "".join(dict.fromkeys(lines))}
    if base.manager == "dnf":
        texts = {}
        for name, each in credentials.items():
            texts[f"{dnf_variable(name)}_user"] = f"{each.user}\n"
            texts[f"{dnf_variable(name)}_password"] = f"{each.password}\n"
        return texts
    return {f"{name}.repo": _zypper_repository(name, url, credentials.get(name)) for name, url in urls.items()}


def dnf_variable(name: str) -> str:
    """Return the beginning of the names of dnf's variables with the credentials of a repository."""
    return f"sms_{name.replace('-', '_')}"


def _zypper_repository(name: str, url: str, credential: Credential | None) -> str:
    parts = urlsplit(url)
    if credential and credential.user:
        user = f"{quote(credential.user, safe='')}:{quote(credential.password, safe='')}@"
        parts = parts._replace(netloc=user + parts.netloc)
    if credential and credential.token:
        parts = parts._replace(query=credential.token)
    lines = (f"[{name}]", f"name={name}", f"baseurl={urlunsplit(parts)}", "enabled=1", "autorefresh=0", "gpgcheck=1")
    return "\n".join((*lines, "pkg_gpgcheck=1", ""))


def wgetrc(credential: Credential) -> str:
    """Return wget's configuration, with which debootstrap reads the first packages."""
    return f"user = {credential.user}\npassword = {credential.password}\n"


def hide(text: str, credentials: Collection[Credential]) -> str:
    """Return a line of output without credentials, in whatever encoding a program prints them."""
    for each in credentials:
        pair = base64.b64encode(f"{each.user}:{each.password}".encode()).decode() if each.password else ""
        for secret in (each.password, quote(each.password, safe=""), pair, each.token, unquote(each.token)):
            if secret:
                text = text.replace(secret, "***")
    return text
