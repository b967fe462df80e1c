"""apt: the mirrors that this host uses, and the package versions of an image."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host
from appliance.plan.image.definition import has_credentials
from appliance.tools.programs import has_program

TARGET = re.compile(r"^(?P<uri>\S+) (?P<origin>[^|]*)\|(?P<codename>\S+)$")
CACHE_PREFIX = "versions"
INSTALL = re.compile(r"^Inst (?P<name>\S+) (?:\[[^\]]*\] )?\((?P<version>\S+) ")


def find_mirrors(host: Host, repositories: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the mirrors of this host's configuration by repository name; none with credentials.

    Args:
        repositories: suites of each repository; the first one is searched.
    """
    if not has_program(host, "apt-get"):
        return {}
    listed = host.run(
        "apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN)|$(CODENAME)", "Identifier: Packages", ok=None
    )
    found = filter(None, map(TARGET.match, listed.text.splitlines()))
    # The definition is stored in the image, so it must not contain credentials.
    targets = [target for target in found if not has_credentials(target["uri"])]
    mirrors: dict[str, str] = {}
    for name, suites in repositories.items():
        exact = [target for target in targets if target["codename"] == suites[0]]
        # Another release of the same distribution uses the same mirror with other suites.
        kind = suites[0].partition("-")[2]
        alike = [t for t in targets if t["origin"] == "Debian" and t["codename"].partition("-")[2] == kind]
        for target in (*exact, *alike):
            mirrors.setdefault(name, target["uri"].rstrip("/"))
    return mirrors


KEYS = "KEYS"
"""Stands in the lines of sources for the folder of ``Extra.keys``."""


@dataclass(frozen=True)
class Extra:
    """What sources need besides the host's keys: ``keys`` by file name, ``auth`` a file with credentials."""

    keys: Mapping[str, bytes]
    auth: str = ""


NOTHING = Extra({})


class Resolver:
    """A separate apt configuration below ``folder``, independent of the host's lists and pins."""

    def __init__(self, host: Host, folder: str, sources: Sequence[str], extra: Extra = NOTHING) -> None:
        self.extra = extra
        self.host = host
        self.folder = folder
        self.sources = sources

    def resolve(self, packages: Sequence[str]) -> dict[str, str]:
        """Return name and version of every package that an image with ``packages`` would contain.

        Raises:
            SmsError: a package does not exist, or the mirror does not answer.
        """
        self._prepare()
        self._apt(
            "update",
            "-q",
            "-o",
            "APT::Update::Error-Mode=any",
            *("-o", "pkgCacheFile::Generate=false"),  # the package cache is created on demand
            hint="is the mirror reachable? base.mirrors configures others",
        )
        argv = ("install", "-s", "-q", "--no-install-recommends", "?essential", "?priority(required)", *packages)
        # apt takes seconds of CPU time, and its result depends only on the lists: cache it.
        key = hashlib.sha256(json.dumps([argv, self._releases()]).encode()).hexdigest()
        cached = f"{self.folder}/{CACHE_PREFIX}-{key}.json"
        if versions := self._read_cache(cached):
            return versions
        result = self._apt(*argv, hint="a package of the catalogue does not exist on this mirror")
        versions = {found["name"]: found["version"] for line in result.splitlines() if (found := INSTALL.match(line))}
        self.host.write(cached, json.dumps(versions).encode())
        return versions

    def _releases(self) -> str:
        """Return apt's version and the digests of its lists, which identify the result."""
        find = ("find", f"{self.folder}/lists", "-maxdepth", "1", "-name")
        digests = self.host.run(*find, "*Release", "-exec", "sha256sum", "--", "{}", "+").text.splitlines()
        if not digests:
            raise SmsError(f"{self.host.name}: no package lists in {self.folder}/lists", hint="run it again")
        packages = self.host.run(*find, "*_Packages*").text.splitlines()
        return "\n".join([self.host.run("apt-get", "--version").text, *sorted(digests), *sorted(packages)])

    def _read_cache(self, path: str) -> dict[str, str] | None:
        self.host.run("find", self.folder, "-maxdepth", "1", "-name", f"{CACHE_PREFIX}-*", "-mtime", "+30", "-delete")
        try:
            cached = json.loads(self.host.read(path) or b"")
        except (ValueError, RecursionError):
            return None
        return cached if isinstance(cached, dict) else None

    def _prepare(self) -> None:
        self.host.run(
            *("mkdir", "-p"),
            *(f"{self.folder}/{name}" for name in ("lists/partial", "cache/archives/partial", "etc/empty")),
        )
        self.host.write(f"{self.folder}/status", b"")
        keys = f"{self.folder}/etc/keys"
        for name, data in self.extra.keys.items():
            self.host.write(f"{keys}/{name}", data)
        lines = "".join(f"{line}\n" for line in self.sources).replace(f"[signed-by={KEYS}/", f"[signed-by={keys}/")
        self.host.write(f"{self.folder}/etc/sources.list", lines.encode())

    def _apt(self, *argv: str, hint: str) -> str:
        options = {
            "Dir::Etc::sourcelist": f"{self.folder}/etc/sources.list",
            "Dir::Etc::sourceparts": f"{self.folder}/etc/empty",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": f"{self.folder}/etc/empty",
            "Dir::State": self.folder,
            "Dir::State::lists": f"{self.folder}/lists",
            "Dir::State::status": f"{self.folder}/status",
            "Dir::State::extended_states": f"{self.folder}/extended_states",
            "Dir::Cache": f"{self.folder}/cache",
            "Dir::Cache::pkgcache": "pkgcache.bin",
            "APT::Sandbox::User": "root",
            "APT::Get::AllowUnauthenticated": "false",
            "Debug::NoLocking": "true",
        }
        if self.extra.auth:
            options["Dir::Etc::netrc"] = self.extra.auth
        arguments = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        try:
            return self.host.run("apt-get", *arguments, *argv, timeout=300).stdout.decode(errors="replace")
        except CommandError as error:
            errors = [
                line for line in error.result.stderr.decode(errors="replace").splitlines() if line.startswith("E:")
            ]
            raise SmsError("cannot resolve packages: " + ("; ".join(errors) or error.message), hint=hint) from error
