"""Rendered files of the lab: configurations, start scripts, the site file. Pure except for reading templates."""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jinja2

from appliance.lab import legacy
from appliance.lab.engines import members
from appliance.lab.layout import (
    BMC_ADDRESS,
    BRIDGES,
    CONTAINER,
    CONTAINER_ADDRESSES,
    CONTROL,
    GATEWAY,
    LEGACY,
    PROVISION_ADDRESSES,
    PROVISIONING,
    PUBLIC,
    ROUTED,
    ROUTER_ADDRESS,
    USUAL,
    LabHost,
    Layout,
    Plan,
    mac,
)
from appliance.plan.hosts.authorized import authorized_line, peer_addresses
from appliance.share import share

DOMAIN = "example.test"

Bind = tuple[str, str, bool]
"""A folder of the machine, its mount point on a host, and whether it is read-only."""


@dataclass(frozen=True)
class File:
    """A file to write: content and mode."""

    data: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Daemon:
    """A supervised program of a host; ``probe`` is bash that succeeds once it answers."""

    name: str
    command: str
    probe: str
    user: str = "root"


@dataclass(frozen=True)
class Keys:
    """Keys of the hosts; created once, kept on disk."""

    munge: bytes
    authorized: bytes
    host: Mapping[str, bytes]
    bmc: Mapping[str, bytes] = field(default_factory=dict)
    engines: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """By host and path."""
    database: str = ""
    """The password of slurmdbd on the legacy node."""


def _listens(port: int, address: str = "127.0.0.1") -> str:
    return f": </dev/tcp/{address}/{port}"


def _slurmd(*controllers: str) -> Daemon:
    """With its configuration from the first of these controllers that answers: ADDRESS:PORT."""
    # It exits if none answers: start it once one listens.
    listening = " || ".join(f"nc -z -w 1 {each.replace(':', ' ')}" for each in controllers)
    command = (
        f"/bin/sh -c 'until munge -n </dev/null >/dev/null 2>&1 && {{ {listening}; }}; "
        f"do sleep 0.3; done; exec slurmd -D --conf-server {','.join(controllers)}'"
    )
    return Daemon("slurmd", command, "pgrep -f 6817")


_SSHD = Daemon("sshd", "/usr/sbin/sshd -D -e -f /lab/sshd_config", _listens(22))
_COMMON = (
    Daemon("rsyslogd", "rsyslogd -n -iNONE", "[ -S /dev/log ]"),
    Daemon("chronyd", "chronyd -d -x", "[ -S /run/chrony/chronyd.sock ]"),
    Daemon("postfix", "/usr/sbin/postfix start-fg", "[ -S /var/spool/postfix/public/pickup ]"),
)
DAEMONS: dict[str, tuple[Daemon, ...]] = {
    "admin": (),
    "bmc": (Daemon("bmc", f"{Path(sys.prefix) / 'bin' / 'python'} /lab/bmc.py", _listens(443, BMC_ADDRESS)),),
    "carrier": (_SSHD,),
    "router": (),
    "server": (_SSHD,),
    "control": (_SSHD,),
    "worker": (_SSHD,),
    # systemd starts them there.
    LEGACY: tuple(Daemon(unit, "", probe) for unit, probe in legacy.probes().items()),
    "outside": (*_COMMON, Daemon("nginx", "nginx -g 'daemon off;'", _listens(80))),
    "node": (
        Daemon("munged", "munged --foreground", "munge -n", user="munge"),
        _slurmd(f"{CONTAINER_ADDRESSES[PROVISIONING]}:6817"),
        _SSHD,
        *_COMMON,
    ),
}
TAKEN_OVER = ("slurmd", "munged")
"""Daemons of compute nodes that jobs of Nomad start themselves."""
_NAMES = Daemon("names", "python3 /lab/names.py", "[ -e /run/names.ready ]")


def daemons(layout: Layout, host: LabHost) -> tuple[Daemon, ...]:
    """Return the daemons of a host."""
    plan = layout.plan
    controllers = (plan.addresses[PROVISIONING], *layout.engine_addresses.values())
    usual = {"slurmd": _slurmd(*(f"{address}:6817" for address in controllers))}
    found = tuple(usual.get(one.name, one) for one in DAEMONS[host.kind] if plan.ssh or one is not _SSHD)
    found += tuple(Daemon(name, *each) for name, each in members.commands(layout, host).items())
    return (*found, _NAMES) if host.kind == "outside" and plan.answers is not None else found


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(share("definitions", "lab")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - shell and daemon configuration, no HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(q=shlex.quote, mac=mac)
    return environment


_ENVIRONMENT = _environment()


def _render(template: str, **values: object) -> str:
    return _ENVIRONMENT.get_template(f"{template}.j2").render(values)


def _span(first: int, count: int) -> str:
    """Return the number part of a Slurm host list."""
    return f"[{first}-{first + count - 1}]" if count > 1 else str(first)


def _cluster(layout: Layout) -> dict[str, object]:
    """Return what the site file and the legacy node's files have in common."""
    return {
        "cluster": "lab",
        "container": CONTAINER_ADDRESSES,
        "outside": GATEWAY[PUBLIC],
        "nodes": layout.nodes,
        "span": _span(1, layout.count),
        "address_span": _span(101, layout.count),
        "address_prefix": "10.100.0." if layout.plan.routed else "10.77.0.",
        "domain": DOMAIN,
    }


def site_file(layout: Layout) -> str:
    """Return the site file of this lab."""
    return _render(
        "sms.yaml",
        **_cluster(layout),
        container_name=CONTAINER,
        carriers=[host for host in layout.hosts if host.kind == "carrier"],
        bridges=BRIDGES,
        legacy=layout.legacy,
        routed=layout.plan.routed,
        router=ROUTER_ADDRESS,
        metal=layout.machines,
        metal_span=_span(1, layout.metal),
        metal_address_span=_span(151, layout.metal),
        vm=PROVISION_ADDRESSES,
        bmcs=", ".join(f"{address}/32" for address in (BMC_ADDRESS, *(each.bmc for each in layout.machines))),
        engines=layout.engine_addresses,
        nomad_api=members.API if "nomad" in layout.engines else "",
    )


def switch_batch(layout: Layout) -> str:
    """Return the ``ip -batch`` input of the switch: two bridges, and a cable to each host."""
    bridges = layout.plan.bridges | ({ROUTED: "br-routed"} if layout.plan.routed else {})
    lines = [f"link add {bridge} type bridge stp_state 0 forward_delay 0" for bridge in bridges.values()]
    lines += [f"link set {name} up" for name in ("lo", *bridges.values())]
    for host in layout.hosts:
        for network in host.addresses:
            port, far, space = host.port(network), host.interface(network), layout.namespace(host.name)
            lines += [f"link add {port} type veth peer name {far} netns {space}"]
            held = layout.plan.held and host.kind == "node"
            lines += [f"link set {port} master {bridges[network]}{'' if held else ' up'}"]
    for machine in layout.machines:
        lines += [f"tuntap add dev {machine.port} mode tap"]
        lines += [f"link set {machine.port} master {bridges[PROVISIONING]} up"]
    return "\n".join(lines) + "\n"


def host_batch(host: LabHost, plan: Plan = USUAL) -> str:
    """Return the ``ip -batch`` input of a host: its bridges if any, its addresses, its default route."""
    lines = ["link set lo up"]
    for network, address in host.addresses.items():
        served = host.serves.get(network)
        cable, holder = host.interface(network), host.interface(network)
        if host.kind == "carrier":
            # Without an explicit MAC a bridge takes the lowest of its ports, which changes with them.
            holder = plan.bridges[network]
            lines += [f"link add {holder} address {host.mac(network)} type bridge stp_state 0 forward_delay 0"]
            lines += [f"link set {cable} master {holder} up"]
        else:
            lines += [f"link set {cable} address {host.mac(network)}"]
        lines += [f"link set {holder} up"]
        has = filter(None, (served, address))
        lines += [f"addr add {each}/{plan.prefix(network, each)} dev {holder}" for each in has]
    for where, address in host.more:
        lines += [f"addr add {address} dev {where if where == 'lo' else host.interface(where)}"]
    if gateway := plan.gateway(host):
        lines += [f"route add default via {gateway}"]
    return "\n".join(lines) + "\n"


def host_files(
    layout: Layout, host: LabHost, keys: Keys, *, sms: str, programs: Mapping[str, str] | None = None
) -> dict[str, File]:
    """Return the files that are specific to a host, by path in its root file system.

    Args:
        sms: path of the program.
        programs: paths of the engines' programs that the host has, by name.
    """
    programs = programs or {}
    values = {
        "host": host,
        "daemons": daemons(layout, host),
        "programs": programs,
        "steps": members.steps(layout, host),
        "legacy": legacy,
        "has_legacy": layout.legacy,
        "engines": layout.engines,
        "address_lines": list(layout.address_lines(host)),
        "names": [name for each in layout.hosts for name in (each.name, *each.addresses.values())],
        "container": layout.plan.addresses[PROVISIONING],
        "domain": DOMAIN,
        "passwd": layout.plan.user[0],
        "group": layout.plan.user[1],
        "ports": layout.plan.ports,
        "answers": layout.plan.answers or {},
        "addresses": [*host.addresses.values(), *(address.partition("/")[0] for _, address in host.more)],
        "sms": sms,
    }
    templates = {
        "lab/setup.sh": "setup.sh",
        "lab/ready.sh": "ready.sh",
        "lab/supervisord.conf": "supervisord.conf",
        "etc/hosts": "hosts",
    }
    if host.kind == LEGACY:
        # systemd starts its daemons.
        del templates["lab/supervisord.conf"]
        templates |= {"etc/ssh/sshd_config": "sshd_config", **legacy.templates()}
        values |= _cluster(layout) | {
            "network": layout.plan.network(PROVISIONING),
            "reserved": layout.hosts_of("node"),
            "password": keys.database,
        }
    if host.kind in ("node", "outside"):
        templates |= {"etc/rsyslog.conf": "rsyslog.conf", "etc/chrony/chrony.conf": "chrony.conf"}
        templates |= {"etc/postfix/main.cf": "postfix.cf"}
    elif not host.own_root:
        templates |= {"etc/ssh/ssh_config.d/sms-lab.conf": "ssh_config"}
    if host.kind == "outside":
        templates |= {"etc/nginx/nginx.conf": "nginx.conf"}
        templates |= {"lab/names.py": "names.py"} if layout.plan.answers is not None else {}
    if layout.plan.ssh and _SSHD in DAEMONS[host.kind]:
        templates |= {"lab/sshd_config": "sshd_config"}
    files = {path: File(_render(template, **values).encode()) for path, template in templates.items()}
    plain = {"etc/hostname": f"{host.name}\n", "lab/net": host_batch(host, layout.plan)}
    plain["etc/resolv.conf"] = _resolvers(layout, host)
    files |= {path: File(text.encode()) for path, text in plain.items()}
    if host.kind == LEGACY:
        files |= {path: replace(files[path], mode=0o600) for path in legacy.PRIVATE}
        files["etc/machine-id"] = File(f"{legacy.machine_id(layout, host)}\n".encode(), 0o444)
    if host.kind == "bmc":
        files["lab/bmc.py"] = File(share("definitions", "lab", "bmc.py").read_bytes())
        files["lab/bmc.json"] = File(_bmc_settings(layout).encode())
    if host.kind == CONTROL:
        files["lab/cloud.py"] = File(share("definitions", "lab", "cloud.py").read_bytes())
    if members.is_forwarded(layout, host):
        files["lab/forward.py"] = File(share("definitions", "lab", "forward.py").read_bytes())
    files |= {path: File(text.encode()) for path, text in members.texts(layout, host).items()}
    return files | _secret_files(layout, host, keys)


def _resolvers(layout: Layout, host: LabHost) -> str:
    """Return resolv.conf: the legacy node has a name server for the nodes, else there is none."""
    if not layout.legacy or host.kind not in ("node", LEGACY):
        return ""
    (server,) = layout.hosts_of(LEGACY)
    return f"search {DOMAIN}\nnameserver {'127.0.0.1' if host == server else server.addresses[PROVISIONING]}\n"


def _bmc_settings(layout: Layout) -> str:
    machines = [{**asdict(machine), "mac": machine.mac} for machine in layout.machines]
    return json.dumps({"own": BMC_ADDRESS, "machines": machines}, indent=2)


def _secret_files(layout: Layout, host: LabHost, keys: Keys) -> dict[str, File]:
    files = {}
    if host.name in keys.host:
        files["lab/ssh_host_key"] = File(keys.host[host.name], 0o600)
        files["lab/authorized_keys"] = File(_authorized(layout, keys.authorized), 0o600)
    if host.kind in ("node", LEGACY):
        files["etc/munge/munge.key"] = File(keys.munge, 0o400)
    if host.kind == "bmc":
        files |= {f"lab/{name}": File(data, 0o600) for name, data in keys.bmc.items()}
    files |= {path: File(data, 0o600) for path, data in keys.engines.get(host.name, {}).items()}
    return files


def _authorized(layout: Layout, public: bytes) -> bytes:
    """Return the line that accepts the lab's key as `sms host prepare` writes those of admin hosts."""
    key, _, comment = public.decode().strip().rpartition(" ")
    addresses = peer_addresses(address for host in layout.hosts for address in host.addresses.values())
    return f"{authorized_line(key, addresses, comment)}\n".encode()


def init_script(layout: Layout, host: LabHost, *, lower: str, binds: list[Bind]) -> str:
    """Return the script with which a host's first process sets up its root file system."""
    folder, switch = str(layout.running / host.name), f"/run/netns/{layout.namespace('switch')}"
    disk, cgroup = layout.disk_of(host), members.cgroup(layout, host)
    changes = str(disk) if disk else f"{folder}/mnt"
    values = {"folder": folder, "changes": changes, "lower": lower, "binds": binds, "switch": switch, "cgroup": cgroup}
    return _render("init.sh", host=host, disk=disk, **values)


def archive(files: Mapping[str, File]) -> bytes:
    """Return the files as a reproducible tar archive."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(files[path].data), files[path].mode
            tar.addfile(entry, io.BytesIO(files[path].data))
    return sink.getvalue()


def digest(*parts: bytes) -> str:
    """Return a short digest of content."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:16]


def ssh_hosts(layout: Layout) -> tuple[str, ...]:
    """Return the hosts that run sshd."""
    return tuple(host.name for host in layout.hosts if host.kind == LEGACY or _SSHD in daemons(layout, host))


def known_hosts(layout: Layout, public_keys: Mapping[str, str]) -> str:
    """Return the known_hosts lines of the lab's hosts, by name and by each address."""
    lines = []
    for host in layout.hosts:
        if host.name in public_keys:
            names = ",".join([host.name, *host.addresses.values()])
            lines.append(f"{names} {' '.join(public_keys[host.name].split()[:2])}")
    return "\n".join(lines) + "\n"
