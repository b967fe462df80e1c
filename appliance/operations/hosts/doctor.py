"""``sms doctor``: collect facts about a machine, for appliance.plan.hosts.doctor to evaluate."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from appliance.config.document import Document, dotted
from appliance.config.model import AdminHost, Site
from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.hosts.signing import examine_signing
from appliance.operations.image.deliver import find_refusal, verify
from appliance.operations.preflight import find_instance, query_age, try_confinement
from appliance.operations.site.config import check_files, named_files
from appliance.plan.hosts.apptainer import PINS
from appliance.plan.hosts.doctor import (
    FILE_SYSTEMS,
    PROGRAMS,
    Finding,
    examine,
    examine_addresses,
    examine_users,
    examine_vm_schedule,
    install_fix,
    worst,
)
from appliance.plan.hosts.facts import Facts, parse_values, read_bridges, read_masters, read_veths
from appliance.plan.hosts.integrity import examine_integrity
from appliance.plan.image.definition import fixed_accounts
from appliance.plan.services.network import container_addresses
from appliance.share import share
from appliance.tools.programs import has_program
from appliance.tools.scripts import script_argv

__all__ = ["Finding", "collect_facts", "diagnose", "worst"]

BOOTSTRAP = {"apt": "debootstrap", "dnf": "dnf", "zypper": "zypper"}
"""Program with which Apptainer bootstraps a base, by package manager."""


def diagnose(cluster: Cluster, name: str | None) -> list[Finding]:
    """Check whether a host can run the services container.

    Args:
        name: an admin host; None for this machine.
    """
    here = socket.gethostname()
    admin = {host.name: host for host in cluster.site.admin_hosts}.get(name or here)
    host = cluster.host(name) if name else Local(here)
    networks = cluster.site.networks
    # A build host needs no bridge.
    both = (networks.provisioning, networks.public) if admin else ()
    bridges = {net.bridge: net.port_on(host.name) for net in both if net.attach == "bridge"}
    parents = [net.uplink(host.name) for net in both if net.attach == "macvlan"]
    interfaces = (*bridges, *parents)
    try:
        facts = collect_facts(cluster, host, interfaces)
    except Unreachable as error:
        return [Finding("SSH", "missing", "; ".join(filter(None, [error.message, error.hint])))]
    findings = [] if isinstance(host, Local) else [Finding("SSH", "ok", f"reaches {host.name}")]
    findings += () if admin else [_other_machine(cluster.site, here)]
    findings += examine(facts, bridges=bridges, parents=parents, overlay_bytes=cluster.site.overlay.size_mb << 20)
    accounts = fixed_accounts(cluster.base, cluster.services, cluster.site.system_users)
    findings += examine_users(facts, {name: (uid, gid) for gid, name, uid in accounts if uid is not None})
    findings += examine_integrity(facts, interfaces)
    findings += examine_addresses(facts, list(container_addresses(cluster.site).values())) if admin else []
    if admin and cluster.site.provisioning:
        findings += examine_vm_schedule(facts)
    if facts.values.get("uid") == "0":
        findings += _image(cluster, host) if admin else ()
        findings += examine_signing(cluster, host)
    if isinstance(host, Local):
        findings += _files(cluster.site)
        findings += _known_hosts(cluster.site, host, facts)
        findings.append(_bootstrap(cluster, host, facts))
    return findings


def _other_machine(site: Site, here: str) -> Finding:
    """Return the finding for this machine, which is not an admin host, or has another name than in the site file."""
    names = [host.name for host in site.admin_hosts]
    if here == site.build.host:
        return Finding("admin host", "ok", f"{here} builds and signs images for {', '.join(names)}")
    detail = f"{here} is none of {', '.join(names)}: networks and image are not checked, the rest is for builds and SSH"
    return Finding("admin host", "warning", detail, f"sms doctor --host {names[0]}")


def collect_facts(cluster: Cluster, host: Host, interfaces: Sequence[str]) -> Facts:
    """Collect facts about a machine; read-only.

    Args:
        interfaces: the site's bridges there, and interfaces that carry the container.
    """
    places = cluster.places
    names = (*PROGRAMS, "tc", "singularity", "cron", "crond")
    where = (str(cluster.site.state), str(places.overlay.parent), str(places.overlay), " ".join(FILE_SYSTEMS.values()))
    output = host.run(*script_argv("collect-facts", *where, " ".join(interfaces), *names)).text
    shown = host.run("ip", "-json", "-details", "link", "show", ok=None) if " ip " in output else None
    links = shown.parse(list[dict[str, Any]], empty=b"[]") if shown else []
    kinds = (host.read("/proc/filesystems") or b"").decode(errors="replace").split()
    return Facts(
        host.name,
        (host.read("/etc/os-release") or b"").decode(errors="replace"),
        frozenset(kinds),
        parse_values(output),
        dict(read_bridges(links)),
        share(*PINS).read_text(),
        dict(read_masters(links)),
        dict(read_veths(links)),
    )


def _image(cluster: Cluster, host: Host) -> Iterator[Finding]:
    """Check the host's current image, if there is one, and try to confine it as `sms start` and `sms failover` will."""
    current = str(cluster.places.current)
    if not host.works("test", "-e", current):
        return
    what = "current image"
    try:
        path = host.run("readlink", "-f", current).text
        signer = verify(cluster, host, path)
        refusal = find_refusal(host, current)
        yield Finding(what, "missing", refusal) if refusal else Finding(what, "ok", signer)
        what = "confinement"
        try_confinement(cluster, host, path)
        older = query_age(cluster, host, running) if (running := find_instance(cluster, host)) else ""
        if older:
            yield Finding(what, "warning", older)
        else:
            yield Finding(what, "ok", "namespaces, capabilities, system calls and mounts are limited")
    except SmsError as error:
        yield Finding(what, "missing", ": ".join(filter(None, [error.message, error.hint])))


def _files(site: Site) -> Iterator[Finding]:
    """Check the keys, secrets and accounts of the site as `sms config check` does."""
    sections = ("secrets", "accounts", "admin_hosts", *(() if site.signing.pgp_fingerprint else ("signing",)))
    named = sorted(named_files(site), key=lambda each: each[0][0] != "signing")
    files = {place: path for place, path, _ in named if place[0] in sections}
    if site.build.host not in (None, socket.gethostname()):
        files.pop(("signing", "private_key"), None)  # it must not be here: examine_signing
    # A document that contains all of them, so that defaults are checked, too.
    problems = {found.path: found for found in check_files(site, Document("", None, dict.fromkeys(files, 0)))}
    for place, path in files.items():
        what = {"private_key": "signing key", "public_keys": "public key"}.get(str(place[1]), dotted(place))
        if problem := problems.get(dotted(place)):
            if problem.hint.startswith("chmod "):
                yield Finding(what, "missing", problem.message, problem.hint)
            else:
                yield Finding(what, "missing", f"{problem.message}: {problem.hint}")
        elif path.exists():
            yield Finding(what, "ok", str(path))
        elif what == "public key":
            yield Finding(what, "missing", f"{path} does not exist: copy it from the build host")
        elif not all(public.exists() for public in site.signing.public_keys):  # else it is on the build host
            yield Finding(what, "missing", f"{path} does not exist", "sms key create")


def _known_hosts(site: Site, local: Host, facts: Facts) -> Iterator[Finding]:
    """Check that the other admin hosts' keys are known."""
    path = site.known_hosts or Path("~/.ssh/known_hosts").expanduser()
    for admin in site.admin_hosts:
        if admin.name == local.name:
            continue
        what = f"host key of {admin.name}"
        known = _known_name(admin)
        try:
            found = local.works("ssh-keygen", "-F", known, "-f", str(path))
        except SmsError:
            yield Finding(what, "missing", "ssh-keygen is not installed", install_fix(facts, "ssh"))
            return
        scan = f"ssh-keyscan -p {admin.port} {admin.address} >>{path}"
        missing = f"not in {path}; verify the fingerprint of the added key on {admin.name}"
        yield Finding(what, "ok", str(path)) if found else Finding(what, "missing", missing, scan)


def _known_name(admin: AdminHost) -> str:
    return admin.address if admin.port == 22 else f"[{admin.address}]:{admin.port}"


def _bootstrap(cluster: Cluster, local: Host, facts: Facts) -> Finding:
    """Check that this machine can build the site's base."""
    program = BOOTSTRAP[cluster.base.manager]
    what = f"build of {cluster.base.name}"
    if has_program(local, program):
        return Finding(what, "ok", f"{program} is installed")
    return Finding(what, "warning", f"{program} is needed for `sms build` only", install_fix(facts, program))
