"""The site file for a surveyed node: each value with where it came from, and the files that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface
from typing import Any

from pydantic import TypeAdapter, ValidationError

from appliance.catalog import Service
from appliance.config.check_slurm import SET_BY_KEY
from appliance.config.hostlist import HostListError, expand
from appliance.config.model import LARGEST_ID, MailAddress, SlurmFile, SlurmNode, SlurmPartition, line_settings
from appliance.config.slurm_files import CONFIGLESS, CONTROLLER, FOLDER, RENDERED
from appliance.config.types import Address, HostName, Line, Mac, Name, NetworkAddress, Peer
from appliance.plan.adopt.frames import Frames, Section
from appliance.plan.adopt.model import Carried, Entry, Finding, Link, Slurm, Survey
from appliance.plan.adopt.read_network import addresses_of
from appliance.plan.adopt.read_services import merge_accounts
from appliance.plan.adopt.read_slurm import kept_files, single_setting
from appliance.text import SHORT, printable, whole_number

CHANGE = "(CHANGE)"
LOWEST_ID = 100
"""Smaller ids belong to the distribution."""
DEFAULT_PORT = "6817"
MOST_EXPANDED = 1_000_000
"""Names in the lists of all nodes and partitions; each line may have those of a whole cluster."""
CONFIGLESS_SETTING = "enable_configless"


def fits(kind: Any, value: object) -> bool:
    """Return whether a value is one of a type of the site file."""
    try:
        TypeAdapter(kind).validate_python(value)
    except (ValidationError, ValueError):
        return False
    return True


def quoted(text: str) -> str:
    """Return text as a YAML scalar on one line."""
    return json.dumps(text, ensure_ascii=False)


@dataclass
class Draft:
    """A site file in the making. ``files``: contents by path below the folder of the site."""

    lines: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    munge_key: bool = False

    @property
    def text(self) -> str:
        """The text of sms.yaml."""
        return "\n".join(self.lines) + "\n"

    def add(self, line: str, source: str = "") -> None:
        """Add a line, with a comment above it that names its source."""
        if source:
            indent = line[: len(line) - len(line.lstrip(" "))]
            self.lines.append(f"{indent}# {printable(source, 200)}")
        self.lines.append(line)

    def find(self, area: str, what: str, carried: Carried, source: str = "", todo: str = "") -> None:
        """Add a finding."""
        self.findings.append(
            Finding(area=area, what=printable(what, 300), source=printable(source, 200), carried=carried, todo=todo)
        )


@dataclass(frozen=True)
class Context:
    """What a draft is made from. ``admin``: the name of the machine that runs the survey."""

    survey: Survey
    frames: Frames
    services: Mapping[str, Service]
    admin: str
    munge_key: bool = False


def make_draft(context: Context) -> Draft:
    """Return the site file with its files, and what of the node it has and has not."""
    draft, survey = Draft(munge_key=context.munge_key), context.survey
    draft.lines += [
        f"# sms.yaml: written by `sms survey` of {printable(survey.host, 80)}. Above each value is where it came from.",
        "# REPORT.md has what is not in here. Edit what is marked (CHANGE), and remove the marks; then:",
        "#   sms config check",
        "",
    ]
    _cluster(draft, survey)
    _admin_hosts(draft, context)
    _networks(draft, survey)
    _services(draft, context)
    _base(draft, survey)
    if survey.slurm:
        _slurm(draft, context, survey.slurm)
    _munge(draft, survey)
    _peers(draft, survey)
    _accounts(draft, context)
    draft.add("")
    draft.add("signing:", "Keys that sign images; `sms key create` creates them.")
    draft.add("  private_key: /etc/sms/keys/sign.pem")
    draft.add("  public_keys: [/etc/sms/keys/sign.pub]")
    state = survey.slurm.state_kb if survey.slurm else 0
    size = max(2048, ((state or 0) + (survey.slurm.database_kb or 0 if survey.slurm else 0)) // 1024 * 3)
    draft.add("overlay:", "At least 2 GiB, and three times the size of Slurm's state and database.")
    draft.add(f"  size_mb: {min(size, 1 << 20)}")
    return draft


def _cluster(draft: Draft, survey: Survey) -> None:
    name = survey.slurm.cluster if survey.slurm else ""
    if fits(Name, name):
        draft.add(f"cluster: {quoted(name)}", f"ClusterName in {survey.slurm.file}" if survey.slurm else "")
        draft.find("Slurm", f"ClusterName {name}", "carried", survey.slurm.file if survey.slurm else "")
    else:
        fallback = re.sub(r"[^a-z0-9-]", "-", name.lower()).strip("-0123456789")[:31]
        fallback = fallback if fits(Name, fallback) else "cluster"
        why = f"ClusterName {quoted(name)} is not a name of sms" if name else "no ClusterName was found"
        draft.add(f"cluster: {quoted(fallback)}", f"{CHANGE} {why}")
        todo = "the container's slurmctld would have another ClusterName than the state: choose with care before a move"
        draft.find("Slurm", why, "check", todo=todo)
    host = survey.slurm.controllers[0].partition("(")[0] if survey.slurm and survey.slurm.controllers else ""
    if fits(HostName, host):
        draft.add(f"hostname: {quoted(host)}", "SlurmctldHost: nodes know the controller by this name")
    else:
        draft.add("hostname: sms-services", f"{CHANGE} no SlurmctldHost was found")
    for other in (survey.slurm.controllers if survey.slurm else ())[1:]:
        todo = "the services container moves between hosts instead: remove it when the container serves"
        draft.find("Slurm", f"backup controller {other}", "left", survey.slurm.file if survey.slurm else "", todo)


def _admin_hosts(draft: Draft, context: Context) -> None:
    name = context.admin if fits(HostName, context.admin) else "admin-1"
    draft.add("")
    draft.add("admin_hosts:", f"{CHANGE} This machine, which made the survey: name those that will run the container")
    draft.add(f"  - name: {quoted(name)}")
    draft.add(f"    address: {quoted(name)}")
    todo = "name the machines that will run the container, two of them for migration"
    draft.find("hosts", "admin hosts", "check", "the name of the machine that made the survey", todo)


def _networks(draft: Draft, survey: Survey) -> None:
    links = {link.name: link for link in survey.links}
    inner, outer = links.get(survey.provisioning), links.get(survey.public)
    draft.add("")
    draft.add("networks:")
    used = _network(draft, survey, "provisioning", inner, ("10.255.254.1/24", "02:00:0a:ff:fe:01"), "")
    _network(draft, survey, "public", outer, ("10.255.255.2/24", "02:00:0a:ff:ff:02"), used)
    if outer and fits(Address, survey.gateway):
        draft.add(f"    gateway: {survey.gateway}", "ip route: default")
    else:
        draft.add("    gateway: 10.255.255.1", f"{CHANGE} no default route was found")
    servers = [one for one in survey.peers.nameservers if fits(Address, one)][:3]
    if servers:
        draft.add(f"  dns: [{', '.join(servers)}]", "/etc/resolv.conf")
        draft.find("network", f"name servers {', '.join(servers)}", "carried", "/etc/resolv.conf")


def _network(draft: Draft, survey: Survey, key: str, link: Link | None, example: tuple[str, str], used_mac: str) -> str:
    """Add one network; return its MAC address."""
    addresses = addresses_of(link) if link else []
    draft.add(f"  {key}:")
    draft.add(f"    bridge: br-{'prov' if key == 'provisioning' else 'pub'}", "Created by `sms host prepare`")
    if not link or not addresses:
        draft.add(f"    address: {example[0]}", f"{CHANGE} no such network was found")
        draft.add(f'    mac: "{example[1]}"')
        todo = f"set networks.{key}: it must not overlap the other one"
        draft.find("network", f"no {key} network", "check", todo=todo)
        return example[1]
    main = _main_address(survey, addresses)
    mac = link.mac
    draft.add(f"    address: {main}", f"ip addr: {link.name}")
    if not fits(Mac, mac) or mac == used_mac or int(mac[:2], 16) & 1:
        mac = "02:00:" + ":".join(f"{byte:02x}" for byte in main.ip.packed)
        draft.add(f'    mac: "{mac}"', f"Made from the address: that of {link.name} cannot be used twice")
        todo = "neighbours learn it when the address moves; a reservation in DHCP or a switch has to follow"
        draft.find("network", f"MAC address of {link.name}", "check", "ip link", todo)
    else:
        draft.add(f'    mac: "{mac}"', f"ip link: {link.name}")
    draft.find("network", f"{key} network {main} on {link.name}", "carried", "ip addr")
    if link.mtu not in (0, 1500):
        todo = "set the same MTU on the bridge of each admin host and on the interface in it"
        draft.find("network", f"MTU {link.mtu} of {link.name}", "left", "ip link", todo)
    for other in (one for one in addresses if one != main):
        todo = "the container has one address in each network: keep it on the old node, or change its clients"
        draft.find("network", f"second address {other} of {link.name}", "left", "ip addr", todo)
    if key == "provisioning":
        _routes(draft, survey, link, main)
    return mac


def _main_address(survey: Survey, addresses: list[IPv4Interface]) -> IPv4Interface:
    known = " ".join(survey.slurm.controllers) if survey.slurm else ""
    named = [one for one in addresses if re.search(rf"(?<![0-9.]){re.escape(str(one.ip))}(?![0-9.])", known)]
    return (named or addresses)[0]


def _routes(draft: Draft, survey: Survey, link: Link, main: IPv4Interface) -> None:
    found: list[tuple[str, str]] = []
    for line in survey.routes:
        words = re.match(r"([0-9./]+) via ([0-9.]+) dev (\S+)", line)
        if not words or words[3] != link.name or not (fits(NetworkAddress, words[1]) and fits(Address, words[2])):
            continue
        if IPv4Address(words[2]) in main.network and len(found) < 64:
            found.append((words[1], words[2]))
    if found:
        draft.add("    routes:", f"ip route: dev {link.name}")
        for network, gateway in found:
            draft.add(f"      - {{network: {network}, gateway: {gateway}}}")
            draft.find("network", f"route to {network} via {gateway}", "carried", "ip route")


def _services(draft: Draft, context: Context) -> None:
    able = [name for name in context.survey.services if context.services[name].container]
    draft.add("")
    draft.add(f"services: [{', '.join(able)}]", "Processes, sockets and rules of the node that the catalogue knows")


def _base(draft: Draft, survey: Survey) -> None:
    if not survey.system.base:
        todo = "choose base.os whose Slurm is not older than the node's"
        draft.find("system", f"{survey.system.name or 'an unknown system'}: no base is like it", "check", todo=todo)
        return
    draft.add("")
    draft.add("base:", f"os-release: {survey.system.name}")
    draft.add(f"  os: {survey.system.base}")
    version = survey.slurm.version if survey.slurm else ""
    if version:
        todo = f"the image's Slurm must be {version} or at most two releases newer: `sms image sbom` shows its version"
        draft.find("Slurm", f"version {version}", "check", "slurmctld -V", todo)


def _slurm(draft: Draft, context: Context, slurm: Slurm) -> None:
    draft.add("")
    draft.add("slurm:")
    ids = (slurm.uid, slurm.gid)
    if slurm.user != "slurm":
        todo = "the container runs the controller as slurm: change SlurmUser on the nodes first"
        draft.find("Slurm", f"SlurmUser {slurm.user}", "check", slurm.file, todo)
    elif all(number is not None and LOWEST_ID < number <= LARGEST_ID for number in ids):
        draft.add(f"  user: {{uid: {slurm.uid}, gid: {slurm.gid}}}", "The ids of SlurmUser on the node")
        draft.find("Slurm", f"ids {slurm.uid}:{slurm.gid} of slurm", "carried", "id slurm")
    else:
        todo = "set slurm.user to the ids that `id slurm` prints on a node"
        draft.find("Slurm", "the ids of slurm are not known, or belong to the distribution", "check", todo=todo)
    names = _nodes(draft, slurm)
    defined = _partitions(draft, slurm, names)
    _extra(draft, context, slurm, defined)
    if slurm.state:
        size = f", {slurm.state_kb} KiB" if slurm.state_kb is not None else ", its size is not known"
        todo = "nothing of it is in the site: `sms adopt` copies it"
        draft.find("Slurm", f"state in {slurm.state}{size}", "left", slurm.file, todo)
    if slurm.database:
        size = f", {slurm.database_kb} KiB" if slurm.database_kb is not None else ""
        todo = "`sms adopt` copies it; the container's slurmdbd has a password of its own"
        draft.find("Slurm", f"accounting database{size}", "left", "slurmdbd.conf", todo)


def _rest(entry: Entry, own: set[str]) -> str:
    return " ".join(f"{key}={value}" for key, value in entry.settings.items() if key.lower() not in own)


def _value(entry: Entry, key: str) -> str:
    return next((value for one, value in entry.settings.items() if one.lower() == key), "")


def _nodes(draft: Draft, slurm: Slurm) -> set[str]:
    """Add the nodes; return their names."""
    names: set[str] = set()
    good: list[SlurmNode] = []
    count = 0
    for entry in slurm.nodes:
        cpus, memory = (_value(entry, key) for key in ("cpus", "realmemory"))
        cpus = cpus or _value(entry, "procs")
        extra = _rest(entry, {"cpus", "procs", "realmemory", "nodeaddr"}) or None
        try:
            if count > MOST_EXPANDED:
                raise HostListError("too many names before it")
            expanded = set(expand(entry.name))
            count += len(expanded)
            node = SlurmNode(
                name=entry.name,
                address=_value(entry, "nodeaddr") or None,
                cpus=whole_number(cpus),
                memory_mb=whole_number(memory) or 1,
                extra=extra,
            )
        except (HostListError, ValueError):
            todo = "write it into `slurm.nodes` by hand"
            draft.find("Slurm", f"NodeName {entry.name[:SHORT]} cannot be read", "left", slurm.file, todo)
            continue
        if names & expanded:
            todo = "Slurm takes the last line of a node: keep one of them"
            draft.find("Slurm", f"NodeName {entry.name[:SHORT]} is defined twice", "check", slurm.file, todo)
            continue
        names |= expanded
        good.append(node)
    if not good:
        return names
    draft.add("  nodes:", f"NodeName lines of {slurm.file} and what it includes")
    for node in good:
        draft.add(f"    - name: {quoted(node.name)}")
        for key, value in (("address", node.address), ("extra", node.extra)):
            if value:
                draft.add(f"      {key}: {quoted(value)}")
        if node.cpus:
            draft.add(f"      cpus: {node.cpus}")
        draft.add(f"      memory_mb: {node.memory_mb}")
    draft.find("Slurm", f"{len(names)} nodes", "carried", slurm.file)
    return names


def _partitions(draft: Draft, slurm: Slurm, names: set[str]) -> set[str]:
    """Add the partitions; return their names."""
    sets = {value for line in slurm.settings for key, value in line_settings(line)[:1] if key == "nodeset"}
    good: dict[str, SlurmPartition] = {}
    count, default = 0, False
    for entry in slurm.partitions:
        try:
            nodes = _value(entry, "nodes") or "ALL"
            if count > MOST_EXPANDED:
                raise ValueError("too many names before it")
            listed = set(expand(nodes)) if nodes.upper() != "ALL" else set()
            count += len(listed)
            if listed - names - sets:
                raise ValueError("unknown nodes")
            if entry.name in good:
                raise ValueError("twice")
            partition = SlurmPartition(
                name=entry.name,
                nodes="ALL" if nodes.upper() == "ALL" else nodes,
                default=_value(entry, "default").upper() == "YES" and not default,
                max_time=_value(entry, "maxtime").upper() or "INFINITE",
                extra=_rest(entry, set(SET_BY_KEY)) or None,
            )
        except (HostListError, ValueError):
            todo = "write it into `slurm.partitions` by hand: its name, its time limit, or nodes that no line defines"
            draft.find("Slurm", f"PartitionName {entry.name[:SHORT]} cannot be read", "left", slurm.file, todo)
            continue
        good[partition.name] = partition
        default = default or partition.default
    if good:
        draft.add("  partitions:", f"PartitionName lines of {slurm.file} and what it includes")
        draft.find("Slurm", f"partitions: {len(good)}", "carried", slurm.file)
    for partition in good.values():
        draft.add(f"    - name: {quoted(partition.name)}")
        draft.add(f"      nodes: {quoted(partition.nodes)}")
        draft.add(f"      default: {'true' if partition.default else 'false'}")
        draft.add(f"      max_time: {quoted(partition.max_time)}")
        if partition.extra:
            draft.add(f"      extra: {quoted(partition.extra)}")
    return set(good)


def _extra(draft: Draft, context: Context, slurm: Slurm, defined: set[str]) -> None:
    frames = context.frames
    port = single_setting(frames, slurm.file, "slurmctldport")
    if port and port != DEFAULT_PORT:
        todo = f"the container's controller listens on {DEFAULT_PORT}: change it on the nodes before the move"
        draft.find("Slurm", f"SlurmctldPort {port}", "left", slurm.file, todo)
    limit = single_setting(frames, slurm.file, "maxnodecount")
    if 1 <= (most := whole_number(limit) or 0) <= 65533:
        draft.add(f"  max_nodes: {most}", f"MaxNodeCount in {slurm.file}")
    auth = single_setting(frames, slurm.file, "authtype")
    if auth not in ("", "auth/munge"):
        todo = "the container authenticates with munge only: change the nodes first"
        draft.find("Slurm", f"AuthType {auth}", "left", slurm.file, todo)
    sections = {one.name: one for one in kept_files(frames, slurm.file, list(slurm.included))}
    carried = {path: name for path, section in sections.items() if (name := _keep_file(draft, section))}
    lines, kept = [], set(carried.values())
    for line in slurm.settings:
        text = _moved(line, carried)
        missing = next((path for path in _programs(text) if path.startswith(f"{FOLDER}/")), "")
        if not fits(Line, text) or "REDACTED" in text or (missing and missing.rpartition("/")[2] not in kept):
            todo = "write it into `slurm.extra` by hand"
            draft.find("Slurm", f"setting {line[:SHORT]}", "left", slurm.file, todo)
            continue
        lines.append(text)
    if lines:
        draft.add("  extra:", f"The other settings of {slurm.file} and what it includes")
        for text in lines:
            draft.add(f"    - {quoted(text)}")
        draft.find("Slurm", f"other settings: {len(lines)}", "carried", slurm.file)
    if carried:
        draft.add("  files:", f"Further files of {slurm.file.rpartition('/')[0]}")
        for path, name in carried.items():
            draft.add(f"    {quoted(name)}: {quoted(f'files/slurm/{name}')}")
            draft.find("Slurm", name, "carried", path)


def _programs(line: str) -> list[str]:
    """Return the programs that a prolog or epilog setting names."""
    settings = line_settings(line)
    return [value.strip('"') for key, value in settings if ("prolog" in key or "epilog" in key) and "*" not in value]


def _moved(line: str, carried: Mapping[str, str]) -> str:
    """Return a line with the paths that the carried files have in the container."""
    for path in dict.fromkeys(_programs(line)):
        if path in carried:
            line = line.replace(path, f"{FOLDER}/{carried[path]}")
    if line.lower().startswith("slurmctldparameters=") and CONFIGLESS_SETTING not in line:
        line += f",{CONFIGLESS_SETTING}"  # as in the container's own line, which this one replaces
    return line


def _keep_file(draft: Draft, section: Section) -> str:
    """Add a file of Slurm's; return its name, empty if it is not kept."""
    name = section.name.rpartition("/")[2]
    known = name in CONFIGLESS | CONTROLLER or not name.endswith((".conf", ".lua", ".yaml", ".key", ".sms-old"))
    if section.status != "read" or section.binary:
        why = "is not text" if section.status == "read" else f"was not read: {section.status}"
        draft.find("Slurm", f"{name} {why}", "left", section.name, "copy it by hand, if it is needed")
    elif name in RENDERED or not known or not fits(SlurmFile, name):
        draft.find("Slurm", f"{name} is not a file that Slurm reads", "left", section.name, "nothing, or rename it")
    else:
        draft.files[f"files/slurm/{name}"] = section.body
        if name == "plugstack.conf":
            todo = "its plugins, and what it includes, have to be in the image: base.packages, or a service of the site"
            draft.find("Slurm", "plugins of plugstack.conf", "check", section.name, todo)
        return name
    return ""


def _munge(draft: Draft, survey: Survey) -> None:
    ids = (survey.munge_uid, survey.munge_gid)
    if all(number is not None and LOWEST_ID < number <= LARGEST_ID for number in ids):
        draft.add("")
        draft.add("munge:", "The ids of the user munge on the node")
        draft.add(f"  user: {{uid: {ids[0]}, gid: {ids[1]}}}")
    if not survey.munge_key:
        return
    if draft.munge_key:
        draft.add("")
        draft.add("secrets:", "/etc/munge/munge.key, fetched on request")
        draft.add("  munge_key: secrets/munge.key")
        draft.find("secrets", "munge key", "carried", "/etc/munge/munge.key")
    else:
        todo = "run it again with --munge-key, or copy it to secrets/munge.key (mode 0600) and set secrets.munge_key"
        draft.find("secrets", "munge key", "left", "/etc/munge/munge.key", todo)


def _peers(draft: Draft, survey: Survey) -> None:
    peers = survey.peers
    clocks = [one for one in peers.clocks if fits(Peer, one)]
    draft.add("")
    if clocks:
        draft.add(f"ntp: [{', '.join(quoted(one) for one in clocks)}]", "Time servers that the node follows")
        draft.find("time", f"time servers {', '.join(clocks)}", "carried")
    tcp = [one[2:] for one in peers.logs_to if one.startswith("@@") and fits(Peer, one[2:])]
    if tcp:
        draft.add(f"syslog_forward: {quoted(tcp[0])}", "Where rsyslog forwards messages, over TCP")
        draft.find("logs", f"messages are forwarded to {tcp[0]}", "carried", "rsyslog.conf")
    for one in peers.logs_to:
        if one[2:] not in tcp[:1]:
            todo = "set `syslog_forward` to a server that accepts TCP; the container forwards to one"
            draft.find("logs", f"messages are forwarded to {one}", "left", "rsyslog.conf", todo)
    for one in peers.logs_from:
        known = one in ("udp/514", "tcp/514")
        todo = "" if known else "the container receives on tcp/514 and udp/514: change the senders, or write a service"
        draft.find("logs", f"messages are received on {one}", "carried" if known else "left", "rsyslog.conf", todo)
    relay = re.sub(r"[\[\]]", "", peers.relay)
    mail = [("relay", relay, Peer), ("domain", peers.mail_domain, HostName), ("root", peers.mail_root, MailAddress)]
    good = [(key, value) for key, value, kind in mail if value and fits(kind, value)]
    if good:
        draft.add("mail:", "Settings of the mail server, /etc/aliases")
        for key, value in good:
            draft.add(f"  {key}: {quoted(value)}")
            draft.find("mail", f"{key} {value}", "carried")


def _accounts(draft: Draft, context: Context) -> None:
    users, _ = merge_accounts(context.frames, "passwd")
    groups, _ = merge_accounts(context.frames, "group")
    if not users:
        return
    draft.files["files/passwd"], draft.files["files/group"] = users.encode(), groups.encode()
    draft.add("accounts:", "Users and groups with ids from 1000 on, of the node's files and of getent; no passwords")
    draft.add("  passwd: files/passwd")
    draft.add("  group: files/group")
    found = context.survey.accounts
    draft.find("accounts", f"users: {found.users}, groups: {found.groups}", "carried", "getent passwd")
