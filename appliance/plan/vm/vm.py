"""The provisioning VM: its paths, its QEMU command line, and the seed that it gets at each start. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import PurePosixPath

from appliance.config.model import Site
from appliance.config.provisioning import Provisioning
from appliance.errors import ConfigError
from appliance.plan.overlay import seed
from appliance.plan.services.network import VM_TAP

QEMU = "qemu-system-x86_64"
PROGRAMS = (QEMU, "qemu-img", "mke2fs", "e2fsck", "ip", "arping", "flock", "python3", "setpriv")
FIRST_DESCRIPTOR = 10
"""Number of the first inherited descriptor."""
FIRMWARE = "/usr/share/OVMF/OVMF_CODE_4M.fd"
VARIABLES = "/usr/share/OVMF/OVMF_VARS_4M.fd"
STATE = "/var/lib/sms-provision"
SECTOR = 512
HTTP, HTTPS, TFTP, DHCP = 80, 8443, 69, 67
"""Ports of the VM's services; the last two are UDP."""
REVOKED_MAP = "revoked.map"
"""Serial numbers of revoked certificates, in the VM's folder of certificates; nginx and the service read it."""
QEMU_OVERHEAD_MB = 160
"""Memory that QEMU needs in addition to the machine's own."""
TCG_CPU = "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,-svm"


def need_vm(site: Site) -> Provisioning:
    """Return the site's settings of the VM.

    Raises:
        ConfigError: the site has no VM.
    """
    if site.provisioning is None:
        raise ConfigError(
            "the site file has no provisioning VM",
            hint="add the section `provisioning:` with address and mac; `sms config schema` describes it",
        )
    return site.provisioning


class VmPlaces:
    """The VM's paths on an admin host; ``run`` does not survive a reboot."""

    def __init__(self, site: Site) -> None:
        self.images = PurePosixPath(site.state) / "vm" / "images"
        self.current = self.images / "current"
        self.disks = PurePosixPath(need_vm(site).directory or site.state / "vm") / site.cluster
        self.root = self.disks / "root.qcow2"
        self.root_image = self.disks / "root.image"
        self.state = self.disks / "state.qcow2"
        self.holder = self.disks / "holder.json"
        self.restore = self.disks / "restore.json"
        self.snapshots = self.disks / "snapshots"
        self.console_log = self.disks / "console.log"
        self.console_failed = self.disks / "console.failed.log"
        self.run = PurePosixPath("/run/sms/vm") / site.cluster
        self.pid = self.run / "pid"
        self.note = self.run / "vm.json"
        self.seed = self.run / "seed.tar"
        self.variables = self.run / "firmware.fd"
        self.qmp = self.run / "qmp.sock"
        self.guest = self.run / "guest.sock"
        self.console = self.run / "console.sock"
        self.lock = PurePosixPath("/run/sms") / f"{site.cluster}.vm.lock"


@dataclass(frozen=True)
class Card:
    """A network card of the VM: its tap on a bridge of the host."""

    tap: str
    bridge: str
    mac: str
    address: str
    prefix: int
    gateway: str = ""


def _tag(site: Site) -> str:
    """Return digits for names that must be short and differ between the clusters of a host."""
    return hashlib.sha256(site.cluster.encode()).hexdigest()[:6]


def find_account(site: Site) -> str:
    """Return the system account that QEMU runs as: one for each cluster of a host, so that none reaches another's.

    It owns no file: QEMU inherits what it uses as open descriptors.
    """
    return f"sms-vm-{_tag(site)}"


def cards(site: Site) -> tuple[Card, ...]:
    """Return the VM's network cards, the one in the provisioning network first."""
    settings = need_vm(site)
    tag = _tag(site)
    provisioning, public = site.networks.provisioning, site.networks.public
    found = [
        Card(
            f"{VM_TAP}p{tag}",
            provisioning.bridge,
            settings.mac.lower(),
            str(settings.address.ip),
            settings.address.network.prefixlen,
            # Without a public card, its route leads through the services container.
            "" if settings.public else str(provisioning.address.ip),
        )
    ]
    if settings.public:
        place = settings.public
        found.append(
            Card(
                f"{VM_TAP}x{tag}",
                public.bridge,
                place.mac.lower(),
                str(place.address.ip),
                place.address.network.prefixlen,
                str(public.gateway),
            )
        )
    return tuple(found)


def machine_name(site: Site) -> str:
    """Return QEMU's name of the machine; its process is recognised by it."""
    return f"sms-vm-{site.cluster}"


@dataclass(frozen=True)
class Opened:
    """What root opens for QEMU: a file to ``read`` or ``write``, a listening ``socket``, a ``tap`` named ``path``.

    Of a new ``log``, or one to ``append`` to, QEMU gets a pipe to a process that keeps its end.
    """

    kind: str
    path: str


@dataclass(frozen=True)
class Machine:
    """QEMU's command line, and what it inherits: descriptors from FIRST_DESCRIPTOR on, in this order.

    Attributes:
        kvm: whether it uses /dev/kvm.
    """

    argv: tuple[str, ...]
    opened: tuple[Opened, ...] = ()
    kvm: bool = False


class _Descriptors:
    """Collects what is opened for QEMU."""

    def __init__(self) -> None:
        self.opened: list[Opened] = []

    def number(self, kind: str, path: PurePosixPath | str) -> int:
        """Return the number of a new descriptor."""
        self.opened.append(Opened(kind, str(path)))
        return FIRST_DESCRIPTOR + len(self.opened) - 1

    def name(self, kind: str, path: PurePosixPath | str) -> str:
        """Return the name under which QEMU opens a new descriptor as a file."""
        return f"/dev/fdset/{self.number(kind, path)}"

    def sets(self) -> list[str]:
        """Return the options that declare the files."""
        numbers = [FIRST_DESCRIPTOR + i for i, one in enumerate(self.opened) if one.kind not in ("socket", "tap")]
        return [word for number in numbers for word in ("-add-fd", f"fd={number},set={number}")]


def qemu_machine(site: Site, image: str, accel: str, *, incoming: bool = False) -> Machine:
    """Return the command that runs the machine, and what is opened for it. It contains no secret.

    Args:
        accel: ``kvm`` or ``tcg``.
        incoming: wait for a live migration, and do not run after it.
    """
    settings, where, inherited = need_vm(site), VmPlaces(site), _Descriptors()
    accelerator, cpu = ("kvm", "host") if accel == "kvm" else ("tcg,thread=multi,tb-size=256", TCG_CPU)
    argv = [QEMU, "-name", f"{machine_name(site)},debug-threads=on", "-M", "q35", "-nodefaults", "-no-user-config"]
    argv += ["-accel", accelerator, "-cpu", cpu, "-m", str(settings.memory_mb), "-smp", str(settings.cpus)]
    argv += ["-display", "none", "-rtc", "base=utc", "-device", "virtio-rng-pci"]
    argv += ["-drive", f"if=pflash,format=raw,unit=0,readonly=on,file={FIRMWARE}"]
    # QEMU would first open it for reading only, which needs another descriptor.
    variables = inherited.name("write", where.variables)
    argv += ["-drive", f"if=pflash,format=raw,unit=1,auto-read-only=off,file={variables}"]
    argv += _disks(where, image, inherited)
    for number, card in enumerate(cards(site)):
        argv += ["-netdev", f"tap,id=net{number},fd={inherited.number('tap', card.tap)}"]
        argv += ["-device", f"virtio-net-pci,netdev=net{number},mac={card.mac},romfile="]
    argv += ["-device", "virtio-serial-pci"]
    argv += ["-chardev", _socket("guest", where.guest, inherited)]
    argv += ["-device", "virtserialport,chardev=guest,name=org.qemu.guest_agent.0"]
    # The source of a migration still writes to the same log.
    log = f"logfile={inherited.name('append' if incoming else 'log', where.console_log)},logappend=on"
    argv += ["-chardev", f"{_socket('console', where.console, inherited)},{log}"]
    argv += ["-serial", "chardev:console"]
    argv += ["-chardev", _socket("qmp", where.qmp, inherited), "-mon", "chardev=qmp,mode=control"]
    if incoming:
        argv += ["-S", "-incoming", "defer"]
    argv += ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    return Machine((*argv, *inherited.sets()), tuple(inherited.opened), accel == "kvm")


def _socket(name: str, path: PurePosixPath, inherited: _Descriptors) -> str:
    return f"socket,id={name},fd={inherited.number('socket', path)},server=on,wait=off"


def _disks(where: VmPlaces, image: str, inherited: _Descriptors) -> list[str]:
    """Return the disks' options. The backing chain is explicit: backing files named in the images are not trusted."""
    base, seed_file = inherited.name("read", image), inherited.name("read", where.seed)
    root, state = inherited.name("write", where.root), inherited.name("write", where.state)
    nodes: list[dict[str, str | bool | None]] = [
        {"driver": "file", "node-name": "image-file", "filename": base, "read-only": True},
        {"driver": "qcow2", "node-name": "image", "file": "image-file", "read-only": True},
        {"driver": "file", "node-name": "root-file", "filename": root, "discard": "unmap", "locking": "on"},
        {"driver": "qcow2", "node-name": "root", "file": "root-file", "backing": "image", "discard": "unmap"},
        {"driver": "file", "node-name": "state-file", "filename": state, "discard": "unmap", "locking": "on"},
        {"driver": "qcow2", "node-name": "state", "file": "state-file", "backing": None, "discard": "unmap"},
        {"driver": "file", "node-name": "seed-file", "filename": seed_file, "read-only": True},
        {"driver": "raw", "node-name": "seed", "file": "seed-file", "read-only": True},
    ]
    argv = [word for node in nodes for word in ("-blockdev", json.dumps(node))]
    for name, more in (("root", ",bootindex=0"), ("state", ""), ("seed", "")):
        argv += ["-device", f"virtio-blk-pci,drive={name},serial=sms-{name}{more}"]
    return argv


def provision_document(site: Site, *, database: str = "") -> dict[str, object]:
    """Return the contents of ``/etc/sms/provision.json`` of the VM.

    Args:
        database: URL of a PostgreSQL database; may contain a password.
    """
    settings = need_vm(site)
    provisioning = site.networks.provisioning
    return {
        "cluster": site.cluster,
        "hostname": settings.hostname,
        "address": str(settings.address.ip),
        "prefix": settings.address.network.prefixlen,
        "network": str(settings.address.network),
        "gateway": str(provisioning.address.ip),
        "dns": [str(server) for server in site.networks.dns],
        "services": {"address": str(provisioning.address.ip), "hostname": site.hostname},
        "database": database or f"sqlite:///{STATE}/inventory.db",
        "state": STATE,
        "unknown": settings.unknown,
        "pool": [str(settings.pool.first), str(settings.pool.last)] if settings.pool else None,
        "profiles": {name: profile.model_dump(mode="json") for name, profile in settings.profiles.items()},
        "tls": "/etc/sms/tls",
        "socket": "/run/sms-provision/api.sock",
        "token_s": 600,
        "interval_s": site.filesync.interval_s,
    }


def unique_local(address: str, prefix: int) -> str:
    """Return the VM's IPv6 address in the provisioning network; provision/dnsmasq.py computes the same one."""
    whole = int(IPv4Network(f"{address}/{prefix}", strict=False).network_address)
    return str(IPv6Address((0xFD536D73 << 96) | (whole << 64) | (int(IPv4Address(address)) - whole)))


def network_units(site: Site) -> dict[str, str]:
    """Return the files of systemd-networkd for the VM's cards, by path."""
    units = {}
    for number, card in enumerate(cards(site)):
        # The firewall finds the card by its group: the kernel gives cards their names in no fixed order.
        lines = ["[Match]", f"MACAddress={card.mac}", "", "[Link]", f"Group={number + 1}", ""]
        lines += ["[Network]", f"Address={card.address}/{card.prefix}"]
        lines += [f"Gateway={card.gateway}"] if card.gateway else []
        routes = () if number else site.networks.provisioning.routes
        # dnsmasq announces this network: without a router advertisement iPXE waits 13 seconds for one.
        lines += [] if number else [f"Address={unique_local(card.address, card.prefix)}/64"]
        lines += ["LinkLocalAddressing=ipv6", "IPv6AcceptRA=no", "LLMNR=no", "ConfigureWithoutCarrier=yes"]
        for route in routes:
            lines += ["", "[Route]", f"Destination={route.network}", f"Gateway={route.gateway}"]
        units[f"run/systemd/network/{10 + number}-sms.network"] = "\n".join(lines) + "\n"
    return units


def listen_files(site: Site) -> dict[str, str]:
    """Return the files with nginx's addresses, by path: the provisioning address; HTTPS on the public one, too.

    Admin hosts outside of the provisioning network reach the service there (``_reachable`` in operations/vm/client.py).
    """
    first, *others = cards(site)
    secure = "".join(f"listen {card.address}:{HTTPS} ssl;\n" for card in others)
    return {
        "etc/sms/listen-http.conf": f"listen {first.address}:{HTTP} default_server;\n",
        "etc/sms/listen-https.conf": f"listen {first.address}:{HTTPS} ssl default_server;\n{secure}",
    }


def firewall(site: Site) -> str:
    """Return the VM's packet filter for nft: what comes in, by card. Nothing is forwarded, all may leave.

    Connections to its services are not tracked: nodes could fill the table of connections otherwise.
    """
    first, *others = cards(site)
    public = [
        f"iifgroup {number} ip daddr {card.address} tcp dport {HTTPS} accept" for number, card in enumerate(others, 2)
    ]
    neighbours = "nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, mld-listener-query"
    chains = {
        "untracked_in": (
            "type filter hook prerouting priority raw",
            f"udp dport {{ {DHCP}, {TFTP} }} notrack",
            f"tcp dport {{ {HTTP}, {HTTPS} }} notrack",
            "icmp type echo-request notrack",
            "icmpv6 type echo-request notrack",
        ),
        "untracked_out": (
            "type filter hook output priority raw",
            f"udp sport {{ {DHCP}, {TFTP} }} notrack",
            f"tcp sport {{ {HTTP}, {HTTPS} }} notrack",
            "icmp type echo-reply notrack",
            "icmpv6 type echo-reply notrack",
        ),
        "input": (
            "type filter hook input priority filter; policy drop",
            'iif "lo" accept',
            "ct state established,related accept",
            # Errors of untracked connections, such as of a smaller MTU, are not related to any.
            "icmp type { echo-request, destination-unreachable, time-exceeded, parameter-problem } accept",
            f"icmpv6 type {{ echo-request, {neighbours} }} accept",
            f"iifgroup 1 udp dport {DHCP} accept",
            f"iifgroup 1 ip daddr {first.address} udp dport {TFTP} accept",
            f"iifgroup 1 ip daddr {first.address} tcp dport {{ {HTTP}, {HTTPS} }} accept",
            *public,
        ),
        "forward": ("type filter hook forward priority filter; policy drop",),
    }
    lines = [
        "# Written by sms at each start of this machine.",
        "table inet sms",
        "delete table inet sms",
        "table inet sms {",
    ]
    for name, rules in chains.items():
        lines += [f"    chain {name} {{", f"        {rules[0]};", *(f"        {rule}" for rule in rules[1:]), "    }"]
    return "\n".join([*lines, "}"]) + "\n"


def seed_archive(site: Site, tls: Mapping[str, bytes], *, database: str = "") -> bytes:
    """Return the tar archive that the VM unpacks at each start: configuration, network, certificates. Has secrets.

    Args:
        tls: ca.pem, server.pem, server.key, issuer.pem, issuer.key, revoked.map.
    """
    settings = need_vm(site)
    names = f"127.0.0.1 localhost\n{settings.address.ip} {settings.hostname}\n"
    names += f"{site.networks.provisioning.address.ip} {site.hostname}\n"
    resolver = "".join(f"nameserver {server}\n" for server in site.networks.dns)
    document = json.dumps(provision_document(site, database=database), indent=1) + "\n"
    texts = {
        "etc/hostname": f"{settings.hostname}\n",
        "etc/hosts": names,
        "etc/resolv.conf": resolver,
        "etc/sms/nftables.conf": firewall(site),
        **listen_files(site),
        **network_units(site),
    }
    seeds = [seed.Seed("etc/sms/tls/", b"", mode=0o755)]
    seeds += [seed.Seed(path, text.encode()) for path, text in texts.items()]
    seeds.append(seed.Seed("etc/sms/provision.json", document.encode(), group="sms-provision", mode=0o640))
    for name, data in sorted(tls.items()):
        # nginx reads its key as root; sms-provd needs the issuer's key to sign.
        group, mode = "sms-provision" if name == "issuer.key" else "root", 0o640 if name.endswith(".key") else 0o644
        seeds.append(seed.Seed(f"etc/sms/tls/{name}", data, group=group, mode=mode))
    archive = seed.seed_archive(seeds)
    return archive + bytes(-len(archive) % SECTOR)


def choose_accel(modules: Sequence[str], device: bool) -> tuple[str, str]:
    """Return ``kvm`` or ``tcg``, and why it is not KVM.

    Args:
        modules: names below /sys/module.
        device: whether QEMU's account can open /dev/kvm, with the group of that file.
    """
    if not device:
        return "tcg", "/dev/kvm is missing, or its group cannot open it"
    if "kvm_pvm" in modules:
        return "tcg", "this host's KVM (kvm_pvm) cannot run stock kernels"
    if not {"kvm_intel", "kvm_amd"} & {*modules}:
        return "tcg", "the kernel has neither kvm_intel nor kvm_amd"
    return "kvm", ""
