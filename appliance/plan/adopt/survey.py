"""Make a survey of what a live management node printed: types, the draft of its site file, findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from appliance.catalog import Service
from appliance.plan.adopt.accounting import accounting_conf, find_lacking, has_commands
from appliance.plan.adopt.draft import Context, Draft, make_draft
from appliance.plan.adopt.frames import Frames, Section
from appliance.plan.adopt.model import Finding, Slurm, Survey, System
from appliance.plan.adopt.read_network import (
    find_default,
    find_inner,
    name_service,
    read_links,
    read_listeners,
    read_processes,
    read_translation,
)
from appliance.plan.adopt.read_services import GANESHA, read_accounts, read_peers, read_scheduled
from appliance.plan.adopt.read_slurm import find_ids, find_included, read_slurm
from appliance.plan.adopt.read_tables import read_provisioners
from appliance.text import printable

BASES = {
    "debian-12": {("debian", "12")},
    "openhpc-rocky9": {(name, "9") for name in ("rocky", "almalinux", "rhel", "centos", "ol")},
    "openhpc-leap15": {("opensuse-leap", "15")},
    "sles-15": {("sles", "15"), ("sle_hpc", "15")},
}
"""Base, and the ids with the major versions of distributions like it."""
NOT_READ = (
    *("/etc/syslog-ng/syslog-ng.conf", "/etc/named.conf", "/etc/bind/named.conf", "/etc/unbound/unbound.conf"),
    *("/etc/xinetd.d/tftp", "/etc/default/tftpd-hpa"),
)
"""Configuration of which only the presence is reported."""
CUT_HINT = "its end was not read: look at it on the host"
ROUTING, LOGGING, MAIL = "routing", "logging", "mail"
"""Roles of the catalogue."""


@dataclass(frozen=True)
class Request:
    """What a survey is for.

    Attributes:
        host: the node, as it was named.
        admin: the name of the machine that makes the survey.
        folder: that of slurm.conf, if it is none of the usual ones.
        munge_key: whether the key is fetched, too.
    """

    host: str
    admin: str
    folder: str = ""
    munge_key: bool = False


def examine(frames: Frames, services: Mapping[str, Service], request: Request) -> tuple[Survey, Draft]:
    """Return what the node has, with all findings, and the draft of its site."""
    bare, broken = _read(frames, services, request)
    draft = make_draft(Context(bare, frames, services, request.admin, request.munge_key))
    unread = [path for path in NOT_READ if path in frames.files]
    findings = (*draft.findings, *_left(bare, services, unread), *_unread(frames, broken, request.folder))
    return bare.model_copy(update={"findings": findings}), draft


def _read(frames: Frames, services: Mapping[str, Service], request: Request) -> tuple[Survey, tuple[str, ...]]:
    links, slurm = read_links(frames), read_slurm(frames, request.folder)
    public, gateway = find_default(frames)
    tables, broken = read_provisioners(frames)
    hints = re.findall(r"(?<![0-9])[0-9]{1,3}(?:\.[0-9]{1,3}){3}", " ".join(slurm.controllers)) if slurm else []
    hints += [node.address for table in tables for node in table.nodes if node.address][:1000]
    hints += _first_addresses(slurm)
    hints += re.findall(r"^([0-9]+(?:\.[0-9]+){3})\s", frames.text("/etc/hosts"), re.MULTILINE)[:1000]
    translation, listeners = read_translation(frames), read_listeners(frames, services)
    running = {name_service(services, process) for process in read_processes(frames)}
    running |= {one.service for one in listeners}
    if translation.rules:
        running |= {name for name, one in services.items() if one.role == ROUTING}
    munge_uid, munge_gid = find_ids(frames, "munge", "munge-user")
    survey = Survey(
        host=printable(request.host, 200),
        system=_system(frames),
        links=links,
        routes=tuple(printable(line.strip(), 200) for line in frames.output("routes")[:500]),
        provisioning=find_inner(links, public, hints),
        public=public,
        gateway=gateway,
        listeners=listeners,
        services=tuple(sorted(name for name in running if name)),
        slurm=slurm,
        munge_key="/etc/munge/munge.key" in frames.files,
        munge_uid=munge_uid,
        munge_gid=munge_gid,
        peers=read_peers(frames),
        translation=translation,
        scheduled=read_scheduled(frames),
        provisioners=tables,
        accounts=read_accounts(frames),
    )
    return survey, broken


def _first_addresses(slurm: Slurm | None) -> list[str]:
    """Return the first address of each NodeAddr."""
    values = [one.settings.get("NodeAddr", "") for one in slurm.nodes] if slurm else []
    return [re.sub(r"\[([0-9]+)[^\[\]]*\]", r"\1", value) for value in values]


def _system(frames: Frames) -> System:
    text = frames.text("/etc/os-release", "/usr/lib/os-release")
    values = {key: value.strip("\"'") for key, value in re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE)}
    found = (values.get("ID", ""), values.get("VERSION_ID", "").partition(".")[0])
    hostname = frames.text("/etc/hostname").strip() or " ".join(frames.output("hostname"))
    return System(
        hostname=printable(hostname, 64),
        name=printable(values.get("PRETTY_NAME", ""), 100),
        id=printable(found[0], 40),
        version=printable(values.get("VERSION_ID", ""), 40),
        kernel=printable(frames.text("/proc/sys/kernel/osrelease").strip(), 80),
        machine=printable(" ".join(frames.output("uname")), 40),
        base=next((base for base, known in BASES.items() if found in known), ""),
        root=frames.output("user") in ([], ["0"]),
    )


def _left(survey: Survey, services: Mapping[str, Service], unread: Sequence[str]) -> Iterator[Finding]:
    """Yield what the site file does not have; ``unread``: files whose settings are not read."""

    def left(area: str, what: str, todo: str, source: str = "") -> Finding:
        return Finding(area=area, what=printable(what, 300), source=source, carried="left", todo=todo)

    if not survey.system.root:
        yield left("system", "it was not read as root", "run it as root or with sudo: much of it is missing")
    if survey.slurm is None:
        yield left("Slurm", "no slurm.conf", "name its folder with --slurm-folder, if the node runs slurmctld")
    if survey.slurm and survey.slurm.accounting:
        for what, todo in find_lacking(survey.slurm.accounting):
            yield left("Slurm", what, f"{todo}; `sms adopt` is refused", accounting_conf(survey.slurm.file))
        if has_commands(survey.slurm.accounting):
            todo = "upgrade it, if you can: only the filter of sms is between a dump of the container and this node"
            yield left("Slurm", f"{survey.slurm.accounting.client} has no mode without commands", todo)
    for name in survey.services:
        if not services[name].container:
            used = ", ".join(sorted({one.port for one in survey.listeners if one.service == name}))
            what = f"{name}{f' ({used})' if used else ''}: the container cannot run it"
            yield left("services", what, services[name].advice or "keep it on a machine that stays up")
    for one in survey.listeners:
        if not one.service and not one.address.startswith(("127.", "::1")):
            what = f"{one.process or 'an unknown process'} on {one.port}{f', unit {one.unit}' if one.unit else ''}"
            yield left("services", what, "do nodes use it? If so, add a service to services.d/, or keep the machine on")
    for link in survey.links:
        if link.kind in ("bond", "vlan", "bridge", "team"):
            what = f"{link.kind} {link.name}{f' (VLAN {link.vlan} of {link.parent})' if link.vlan else ''}"
            ports = [each.name for each in survey.links if each.master == link.name]
            what += f" of {', '.join(ports)}" if ports else ""
            yield left("network", what, "configure the same on the admin hosts, and name it as `port` of the network")
    if survey.translation.filters:
        todo = "the container opens what its services need, and no more: keep the others on a router or on the hosts"
        yield left("forwarding", f"{survey.translation.filters} rules that accept or drop packets", todo)
    for rule in survey.translation.redirects:
        yield left("forwarding", rule, "the container only masquerades: keep it on a router, or write a service for it")
    if survey.translation.forwards and not survey.translation.rules:
        todo = "does a router forward for nodes? Without rules for it the container does not"
        yield left("forwarding", "packets are forwarded, but no rule rewrites addresses", todo)
    for path in unread:
        yield left("services", path, "its settings are not read: look at it, if nodes use what it configures")
    for folder in survey.peers.exports:
        source = GANESHA if folder.endswith(" (NFS-Ganesha)") else "/etc/exports"
        yield left("exports", f"NFS export {folder}", "keep it on a file server that stays up", source)
    todo = "does one concern Slurm or nodes? Then it belongs into a service of the site; else it stays on the node"
    for file in dict.fromkeys(job.file for job in survey.scheduled):
        jobs = [f"{job.program} ({job.when})" for job in survey.scheduled if job.file == file]
        yield left("cron", ", ".join(jobs), todo, file)
    for table in survey.provisioners:
        what = f"{table.name}{f' with {len(table.nodes)} nodes' if table.nodes else ''}"
        todo = "it stays there and can be switched off; or `provisioning` and `sms node add` for the VM instead"
        yield left("provisioning", what, todo, ", ".join(table.sources)[:200])
    if survey.accounts.directory:
        todo = "enable sssd and set secrets.sssd_conf, or survey again when accounts change"
        what = f"{survey.accounts.from_directory} users of a directory"
        yield left("accounts", what, todo, survey.accounts.directory)


def _unread(frames: Frames, broken: tuple[str, ...], folder: str) -> Iterator[Finding]:
    """Yield what could not be read: files that are large, special, not text, or not permitted."""

    def check(what: str, source: str, todo: str = CUT_HINT) -> Finding:
        return Finding(area="reading", what=printable(what, 200), source=source, carried="check", todo=todo)

    for path, one in frames.files.items():
        if one.status == "cut":
            yield check(f"{path} has {one.size} bytes", path)
        elif one.status in ("special", "unreadable", "skipped"):
            yield check(f"{path} was not read: {one.status}", path, "look at it on the host")
        elif one.binary:
            yield check(f"{path} is not text", path, "look at it on the host")
        elif not one.encoded:
            yield check(f"{path} is not UTF-8", path, "what is not UTF-8 was replaced: correct the written files")
    for name, run in frames.runs.items():
        if run.status == "skipped" or _timed_out(run):
            yield check(f"`{name}` did not end in time", "", "run it on the host")
        elif run.status == "cut":
            yield check(f"`{name}` printed too much", "", CUT_HINT)
    included = find_included(frames, folder)
    for text in included.left[:MOST_LEFT]:
        yield check(f"not read: {text}", included.files[0], "each file is read once: correct the lines Include")
    if len(included.left) > MOST_LEFT:
        more = f"not read: {len(included.left) - MOST_LEFT} further includes"
        yield check(more, included.files[0], "each file is read once: correct the lines Include")
    for path in broken:
        yield check(f"{path} cannot be understood", path, "look at it on the host")
    if not any(name in frames.runs for name in ("sockets", "netstat")):
        yield check("the host has neither ss nor netstat", "", "its listening sockets are not known")
    if "links" not in frames.runs:
        yield check("the host has no ip", "", "its interfaces are not known: write `networks` by hand")
    if not frames.complete:
        yield check("the survey did not come to its end", "", "run it again; is the host overloaded?")


MOST_LEFT = 20
"""Findings about includes."""


def _timed_out(run: Section) -> bool:
    return run.ended in (124, 137)
