"""Private keys that sign images: on which machine they are, and where they must not be."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress

from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.site.keys import fingerprint
from appliance.plan.hosts.doctor import Finding
from appliance.tools.apptainer import has_private_pgp
from appliance.tools.scripts import script_argv

ETC = "/etc/sms"
SEARCH_S = 300
NO_OPENSSL = 3
"""Exit status of definitions/scripts/find-private-keys."""
PGP_REMOVAL = "apptainer key remove --secret %s"
WALK = "docs/security.md, `If keys may have been read`"


def refuse_signing_keys(cluster: Cluster, host: Host) -> None:
    """Refuse a host that has a private signing key and is not the build host; without ``build.host`` none is refused.

    Raises:
        Refused: it has one; nothing was changed.
    """
    signs = cluster.site.build.host
    if signs in (None, host.name):
        return
    found, unknown = find_signing_keys(cluster, host)
    if found:
        raise Refused(
            f"{host.name} has a private signing key, and build.host is {signs}: {', '.join(found)}",
            hint=f"remove it there: {_removal(found)}; {WALK}, says what follows",
        )
    if unknown:
        raise Refused(f"{host.name}: {unknown}", hint="install openssl there")


def examine_signing(cluster: Cluster, host: Host) -> Iterator[Finding]:
    """Report private signing keys on a machine that is not the build host, or that no ``build.host`` names."""
    what, signs = "private signing key", cluster.site.build.host
    if signs == host.name:
        yield Finding(what, "ok", "this is the build host")
        return
    found, unknown = find_signing_keys(cluster, host)
    if found and signs:
        detail = f"{', '.join(found)}: only {signs} may have it (build.host); {WALK}, says what follows"
        yield Finding(what, "missing", detail, _removal(found))
    elif found:
        detail = f"{', '.join(found)}: root here signs for all hosts; name the one machine that does: `build: {{host:"
        yield Finding(what, "warning", f"{detail} {host.name}}}` in the site file")
    elif unknown:
        yield Finding(what, "warning", unknown)
    elif signs:
        yield Finding(what, "ok", f"not here: {signs} signs")


def find_signing_keys(cluster: Cluster, host: Host) -> tuple[list[str], str]:
    """Return the private signing keys on a host, and why others could not be compared; requires root there.

    These are the file that the site file names, each PEM key that belongs to one of the public keys, in the folder of
    the site file, /etc/sms or the state folder, and the PGP key.
    """
    site, signing = cluster.site, cluster.site.signing
    here = set()
    for path in signing.public_keys:
        with suppress(ConfigError):  # it does not exist yet, or PGP is used instead
            here.add(fingerprint(path))
    folders = {ETC, str(site.state), *([str(cluster.path.parent)] if cluster.path else [])}
    paths = sorted({str(signing.private_key), *folders})
    result = host.run(*script_argv("find-private-keys", *paths), ok=(0, NO_OPENSSL), timeout=SEARCH_S)
    listed = [line.partition(" ") for line in result.text.splitlines()]
    found = [path for digest, _, path in listed if digest in here and path]
    named = str(signing.private_key)
    if named not in found and host.works("test", "-e", named):
        found.append(named)
    if signing.pgp_fingerprint:
        keyring = str(signing.pgp_keyring) if signing.pgp_keyring else None
        if has_private_pgp(host, keyring, signing.pgp_fingerprint):
            found.append(f"PGP {signing.pgp_fingerprint} in {keyring or 'the keyring of root'}")
    unknown = f"private keys below {', '.join(paths)} were not compared: openssl is not installed"
    return found, unknown if result.status == NO_OPENSSL else ""


def _removal(found: list[str]) -> str:
    files = [path for path in found if path.startswith("/")]
    commands = [f"shred -u {shlex.join(files)}"] if files else []
    return " && ".join([*commands, *(PGP_REMOVAL % found[-1].split()[1] for _ in found[len(files) :])])
