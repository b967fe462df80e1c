"""dnf and zypper: the package mirrors that this host uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from xml.etree import ElementTree

from appliance.errors import ConfigError
from appliance.host.base import Host
from appliance.plan.image.repositories import Credential
from appliance.tools.programs import has_program

# dnf 4 writes "Repo-id            : baseos", dnf 5 "Repo ID : baseos".
LINE = re.compile(r"^\s*(?P<key>Repo-id|Repo ID|Repo-baseurl|Base URL)\s*: (?P<value>\S+)")
URL = re.compile(r"(https?|file)://[^\s\"'\\$]+")


def find_mirrors(host: Host, manager: str, repositories: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the URLs of this host's repositories, by our names of them.

    Args:
        manager: ``dnf`` or ``zypper``; a host without it has none.
        repositories: patterns of the host's names of each repository; the first match is used.
    """
    if not has_program(host, manager):
        return {}
    own = _dnf(host) if manager == "dnf" else _zypper(host)
    found: dict[str, str] = {}
    for name, patterns in repositories.items():
        for pattern in patterns:
            for identity, url in own.items():
                if fnmatchcase(identity.lower(), pattern.lower()) and URL.fullmatch(url):
                    found.setdefault(name, url.rstrip("/"))
    return found


def read_credentials(host: Host, name: str, token: str = "") -> Credential:
    """Return the credentials in a file of zypper's, which the URL of a repository names.

    Raises:
        ConfigError: the file has none.
    """
    path = name if name.startswith("/") else f"/etc/zypp/credentials.d/{name}"
    text = (host.read(path) or b"").decode(errors="replace")
    found = dict(line.replace(" ", "").split("=", 1) for line in text.splitlines() if "=" in line)
    if not found.get("username") or not found.get("password"):
        raise ConfigError(f"{host.name}: {path} has no user and password", hint="is this host registered?")
    return Credential(found["username"], found["password"], token)


def _dnf(host: Host) -> dict[str, str]:
    """Return URLs by repository; dnf itself selects one from a mirror list."""
    output = host.run("env", "LC_ALL=C", "dnf", "-q", "repoinfo", "--enabled", ok=None, timeout=300).text
    repositories: dict[str, str] = {}
    identity = ""
    for line in filter(None, map(LINE.match, output.splitlines())):
        if line["key"].lower().endswith("id"):
            identity = line["value"]
        else:
            # "https://a/, https://b/" and "https://a/ (30 more)": the first is the one in use.
            repositories.setdefault(identity, line["value"].rstrip(","))
    return repositories


def _zypper(host: Host) -> dict[str, str]:
    """Return URLs by alias of all enabled repositories."""
    output = host.run("zypper", "--non-interactive", "--no-refresh", "--xmlout", "repos", ok=None).stdout
    try:
        stream = ElementTree.fromstring(output)  # noqa: S314 - output of this host's package manager
    except ElementTree.ParseError:
        return {}
    return {
        repository.get("alias", ""): (repository.findtext("url") or "").strip()
        for repository in stream.iter("repo")
        if repository.get("enabled") == "1"
    }
