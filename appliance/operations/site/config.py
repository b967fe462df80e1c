"""`sms config`: validates and shows the site file, and checks the files that it names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.catalog import read_bases, select
from appliance.catalog.model import Probe
from appliance.config.check import check_ports
from appliance.config.document import Document, Place, first_problems
from appliance.config.finding import Finding
from appliance.config.hostlist import fold
from appliance.config.model import Site
from appliance.config.read import read_text
from appliance.config.slurm_files import find_unrunnable, site_programs
from appliance.errors import ConfigError, Problem
from appliance.host.local import Local
from appliance.operations.site.ca import ca_folder
from appliance.operations.site.find import Loaded, open_site
from appliance.plan.image.accounts import check_accounts
from appliance.plan.image.definition import has_credentials, packages_for, repository_urls
from appliance.plan.image.openpgp import KeyProblem, read_keys
from appliance.plan.image.repositories import check_repositories, credentials_for, read_credentials
from appliance.plan.overlay.names import find_named, read_resolved
from appliance.plan.overlay.seed import find_short, template_values
from appliance.plan.render import Templates
from appliance.share import share
from appliance.text import one_line
from appliance.tools import resolver


def check_config(path: Path, state: Path | None = None) -> Loaded:
    """Read a site file and check the files that it names.

    Raises:
        ConfigError: with every problem found.
    """
    loaded = open_site(path, state, edited=False)
    problems = [*check_files(loaded.site, loaded.document), *check_build(loaded), *check_own(loaded)]
    if str(path) != "-" and path.stat().st_mode & 0o022:
        message = f"others may write to it (mode {path.stat().st_mode & 0o777:04o}), and root follows it"
        problems.insert(0, Problem(str(path), 0, "", message, f"chmod go-w {path}"))
    keys = sorted(ca_folder(path).glob("*.key")) if str(path) != "-" else ()
    problems += [Problem(str(path), 0, "", *words) for key in keys if (words := _wrong(key, True, needed=False))]
    if problems:
        raise ConfigError(problems=problems)
    return loaded


def check_names(loaded: Loaded) -> None:
    """Check that this machine resolves all names of other machines in a site file.

    Raises:
        ConfigError: it does not; which ones.
    """
    peers = find_named(loaded.site)
    names = list(dict.fromkeys(name for names in peers.values() for name in names))
    found = read_resolved(resolver.resolve(Local(), names), names, {}) if names else {}
    missing = {place: [name for name in names if name not in found] for place, names in peers.items()}
    problems = [
        loaded.document.problem(
            place,
            f"no IPv4 address on this machine for {one_line(fold(names), 200)}",
            "give it in the site file, or in /etc/hosts of the admin hosts" if place[0] == "slurm" else "",
        )
        for place, names in missing.items()
        if names
    ]
    if problems:
        raise ConfigError(problems=first_problems(problems))


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
        elif place == ("secrets", "munge_key") and path.is_file() and (short := find_short(path, path.stat().st_size)):
            problems.append(document.problem(place, *short))
    for place, source, _ in site_programs(site):
        if source and not _wrong(source, False, needed=True) and (wrong := find_unrunnable(source.read_bytes())):
            problems.append(document.problem(place, f"{source} does not run as a program: {wrong[0]}", wrong[1]))
    return sorted(problems, key=lambda problem: problem.line)


def check_build(loaded: Loaded) -> list[Problem]:
    """Return the problems of the image's repositories, packages and accounts, and of ports that hosts refuse."""
    site, document = loaded.site, loaded.document
    base = read_bases(share("definitions", "bases"))[site.base.os]
    found = [*check_ports(site), *check_repositories(site, base)]
    for name, repository in site.base.repositories.items():
        try:
            read_keys(repository.key.read_bytes())
        except KeyProblem as error:
            hint = "`gpg --export FINGERPRINT` writes one"
            found.append(Finding(("base", "repositories", name, "key"), f"{repository.key}: {error}", hint))
        except OSError:
            pass  # check_files reports it
        if has_credentials(repository.url):
            words = "contains a user or a token, which would be stored in the image"
            hint = "write them into a file of mode 0600, and name it under base.credentials"
            found.append(Finding(("base", "repositories", name, "url"), words, hint))
    try:
        repository_urls(base, site.base.mirrors)
    except ConfigError as error:
        found.append(Finding(("base", "mirrors"), error.message, error.hint))
    try:
        services = select(loaded.catalog, site.service_names)
        packages_for(base, services)
        for service in services:
            for name in service.needs_secrets:
                if getattr(site.secrets, name) is None:
                    words = f"{service.name} needs `secrets.{name}`"
                    found.append(Finding(("services",), words, "name the file under `secrets`"))
        found += check_accounts(site, base, services, _account_files(site))
    except ConfigError as error:
        found.append(Finding(("services",), error.message, error.hint))
    problems = [document.problem(one.place, one.message, one.hint) for one in found]
    path = site.base.credentials
    if path and not _wrong(path, True, needed=True):
        try:
            credentials_for(base, site.base.repositories, read_credentials(read_text(path), str(path)))
        except ConfigError as error:
            place = ("base", "credentials")
            problems += error.problems or [document.problem(place, error.message, error.hint)]
    return problems


def _account_files(site: Site) -> dict[str, str]:
    """Return the texts of the site's passwd and group, of those that can be read."""
    given = {name: path for name, path in dict(site.accounts).items() if path and not _wrong(path, False, needed=True)}
    return {name: path.read_text(errors="replace") for name, path in given.items()}


def check_own(loaded: Loaded) -> list[Problem]:
    """Return the problems of the site's own services: files that others may write to, templates that do not render."""
    problems: list[Problem] = []
    if not loaded.own:
        return problems
    site = loaded.site
    templates = Templates(share("overlays"), **template_values(site, [loaded.catalog[n] for n in site.service_names]))
    for one in loaded.own.values():
        path = Path(one.document.file)
        for each in (path.parent, path):
            if each.stat().st_mode & 0o022:
                words = f"others may write to {each} (mode {each.stat().st_mode & 0o777:04o}), and root follows it"
                problems.append(one.document.problem((), words, f"chmod go-w {each}"))
        texts: list[tuple[Place, str]] = [(("setup",), one.service.setup)]
        texts += [(("run", index), word) for index, word in enumerate(one.service.run)]
        texts += [(("engines", "run", index), word) for index, word in enumerate(one.service.engines.run)]
        texts += [(("files", index), file.content or "") for index, file in enumerate(one.service.files)]
        probes: list[tuple[Place, Probe | None]] = [(("probe",), one.service.probe)]
        probes.append((("engines", "probe"), one.service.engines.probe))
        for at, probe in probes:
            if probe:
                texts += [((*at, "exec"), word) for argv in probe.exec or () for word in argv]
                kinds = ("ntp", "smtp", "syslog", "routed", "http")
                texts += [((*at, kind), getattr(probe, kind) or "") for kind in kinds]
        for place, text in texts:
            try:
                templates.text(text)
            except ConfigError as error:
                hint = "docs/services.md lists what a template may use"
                problems.append(one.document.problem(place, error.message, hint))
    return problems


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
    if site.base.credentials is not None:
        yield ("base", "credentials"), site.base.credentials, True
    for name, repository in site.base.repositories.items():
        yield ("base", "repositories", name, "key"), repository.key, False
    for name, source in site.slurm.files.items():
        yield ("slurm", "files", name), source, False
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
