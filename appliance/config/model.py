"""The site file, ``sms.yaml``, as typed values.

The description of each field is part of the JSON Schema and of the hints of validation errors.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError

from appliance.config.engines import Engines
from appliance.config.provisioning import BmcUser, Provisioning
from appliance.config.section import Section
from appliance.config.types import (
    Address,
    AddressWithPrefix,
    BaseName,
    File,
    HostName,
    Interface,
    Line,
    Mac,
    Name,
    NetworkAddress,
    NodeList,
    Peer,
    SafeUrl,
    SeenName,
    Text,
    Url,
    check_url,
)
from appliance.units import LARGEST_OVERLAY

SshUser = Annotated[
    str, Text(r"[a-z_][a-z0-9_-]{0,31}", "a user name", "use lower case letters, digits, dashes and underscores")
]

PartitionName = Annotated[
    str, Text(r"[A-Za-z0-9_-]{1,64}", "a partition name", "use letters, digits, dashes and underscores")
]

SlurmTime = Annotated[
    str,
    Text(
        r"INFINITE|UNLIMITED|[0-9]{1,9}(:[0-9]{1,2}){0,2}|[0-9]{1,5}-[0-9]{1,2}(:[0-9]{1,2}){0,2}",
        "a time in Slurm's format",
        "write it as 30 (minutes), 12:00:00, 7-00:00:00 or INFINITE",
    ),
]

MailAddress = Annotated[
    str, Text(r"[A-Za-z0-9._+-]+(@[A-Za-z0-9.-]+)?", "a mail address", "write it as operators@example.org")
]

Fingerprint = Annotated[
    str,
    Text(
        r"[0-9A-Fa-f]{40}",
        "the fingerprint of a PGP key",
        "write its 40 hexadecimal digits without spaces, as `gpg --fingerprint` shows it",
    ),
]


class Redfish(Section):
    """A management controller with Redfish."""

    url: Annotated[
        str,
        Text(
            r"https://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._~/-]*)?",
            "an https URL",
            "write it as https://bmc-1.example.org, optionally with the path of the system: /redfish/v1/Systems/1",
        ),
        AfterValidator(check_url),
    ] = Field(description="Its URL; with the path of the system if it has more than one.")
    user: BmcUser = Field(description="User that may switch the power.")
    password_file: File = Field(description="File with the password, mode 0600.")
    ca: File | None = Field(None, description="CA that signed its certificate (default: the CAs of the host).")
    insecure: bool = Field(False, description="Accept any certificate; the password can be intercepted.")


class Ipmi(Section):
    """A management controller with IPMI 2.0 (lanplus), controlled with ipmitool."""

    address: HostName = Field(description="Its address or host name.")
    user: BmcUser = Field(description="User that may switch the power.")
    password_file: File = Field(description="File with the password, mode 0600.")


class Fence(Section):
    """How `sms failover` powers off a failed host: exactly one of command, redfish and ipmi."""

    command: tuple[Line, ...] = Field(
        (), description="Fencing command and its arguments; exit status 0 means that the host is off."
    )
    timeout_s: int = Field(120, ge=1, le=3600, description="Timeout for powering the host off, in seconds.")
    redfish: Redfish | None = Field(None, description="Power the host off with Redfish.")
    ipmi: Ipmi | None = Field(None, description="Power the host off with IPMI.")


class AdminHost(Section):
    """A machine that can run the services container."""

    name: HostName = Field(description="Its host name, as `hostname` prints it.")
    address: HostName = Field(description="Address or host name for SSH.")
    user: SshUser = Field("root", description="SSH user; a user other than root needs sudo without a password.")
    port: int = Field(22, ge=1, le=65535, description="SSH port.")
    key: File | None = Field(None, description="SSH private key (default: the agent's keys and the default files).")
    fence: Fence | None = Field(None, description="How `sms failover` powers this host off.")
    mirror: tuple[File, ...] = Field(
        (),
        max_length=2,
        description="Two folders on two disks of this host, for the mirror of its overlay: `sms overlay mirror create` "
        "and `sms migrate` to this host use them.",
    )


class Network(Section):
    """One of the two networks of the container."""

    attach: Literal["bridge", "macvlan"] = Field(
        "bridge",
        description="How hosts attach the container: to a bridge, or with a macvlan interface on `port`, which may "
        "have addresses of the host.",
    )
    bridge: Interface = Field(
        "", validate_default=True, description="Linux bridge on every admin host; with macvlan there is none."
    )
    address: AddressWithPrefix = Field(description="Address of the container, with prefix: 10.0.0.1/16.")
    mac: Mac = Field(description="MAC address of the container, the same on every host.")
    port: Interface | dict[HostName, Interface] | None = Field(
        None,
        description="Interface of the host that `sms host prepare` adds to the bridge when it creates it, or that "
        "carries the macvlan interface; by admin host if they differ: {admin-1: eno1, admin-2: ens3}.",
    )
    vlan: int | None = Field(
        None,
        ge=1,
        le=4094,
        description="Its VLAN: `sms host prepare` creates the interface PORT.VLAN and adds that to the bridge instead.",
    )

    @field_validator("bridge", mode="wrap")
    @classmethod
    def _needs_bridge(cls, value: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> str:
        if value != "":
            return str(check(value))
        if info.data.get("attach") == "bridge":
            raise PydanticCustomError("missing", "is missing")
        return ""

    def port_on(self, host: str) -> str | None:
        """Return the port on an admin host, with its VLAN; None if the site file has none for it."""
        port = self.port.get(host) if isinstance(self.port, dict) else self.port
        return f"{port}.{self.vlan}" if port and self.vlan else port

    def uplink(self, host: str) -> str:
        """Return what connects the container on an admin host: the bridge, or the interface below the macvlan one."""
        return self.bridge if self.attach == "bridge" else self.port_on(host) or ""


class Route(Section):
    """A network of nodes behind a router of the provisioning network."""

    network: NetworkAddress = Field(description="The network of the nodes: 10.100.0.0/17.")
    gateway: Address = Field(description="Address of the router in the provisioning network.")


class ProvisioningNetwork(Network):
    """The network of the compute nodes, and those behind its routers."""

    routes: tuple[Route, ...] = Field(
        (), max_length=64, description="Networks of further nodes, which are behind routers of this network."
    )


class PublicNetwork(Network):
    """The public network."""

    gateway: Address = Field(description="Default gateway.")
    probe: Address | None = Field(None, description="Address that the NAT probe pings (default: the gateway).")


class Networks(Section):
    """The provisioning network (compute nodes) and the public one."""

    provisioning: ProvisioningNetwork = Field(
        description="Network of the compute nodes (HPE Cray EX: node management network)."
    )
    public: PublicNetwork = Field(description="Public network (HPE Cray EX: customer access network).")
    dns: tuple[Address, ...] = Field((), max_length=3, description="Name servers for the container.")


class ServicesFrom(Section):
    """Services from a classification, with changes of the site."""

    classification: File = Field(
        alias="from",
        description="File written by `sms classify --format yaml` (or json); its time-critical services are used.",
    )
    also: tuple[Name, ...] = Field((), description="Additional services.")
    without: tuple[SeenName, ...] = Field((), description="Services of the classification to exclude.")


class Repository(Section):
    """A package repository of the site's own."""

    url: Url = Field(description="Its URL.")
    suite: (
        Annotated[
            str,
            Text(
                r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}|\./", "a suite", "write it as bookworm, or ./ for one without suites"
            ),
        ]
        | None
    ) = Field(None, description="Suite (apt): bookworm; ./ for a repository without suites.")
    components: tuple[
        Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}", "a component", "write it as main")], ...
    ] = Field((), description="Components (apt): main.")
    key: File = Field(description="File with the public key that its packages are verified with (OpenPGP).")


class Base(Section):
    """What the image is built from."""

    os: BaseName = Field("debian-12", description="A base of definitions/bases.")
    mirrors: dict[Name, Url] = Field(
        {},
        description="Package mirrors by repository name (default: the mirrors of the build host).",
    )
    repositories: dict[Name, Repository] = Field(
        {}, max_length=100, description="Package repositories of the site's own, by name."
    )
    packages: tuple[
        Annotated[
            str,
            Text(r"[A-Za-z0-9][A-Za-z0-9+._-]{0,99}", "a package name", "write it as the package manager does: socat"),
        ],
        ...,
    ] = Field((), max_length=500, description="Additional packages.")
    credentials: File | None = Field(
        None, description="File of mode 0600 with users, passwords and tokens of repositories; see docs/build.md."
    )


_SETTING = re.compile(r'(?:^|\s)([A-Za-z]+)\s*=\s*((?:"[^"]*"|[^\s"])*)')
"""A setting of slurm.conf; quoted text is part of its value."""


def line_settings(line: str) -> list[tuple[str, str]]:
    """Return the keys of a line of slurm.conf, in lower case, and their values."""
    return [(key.lower(), value) for key, value in _SETTING.findall(line.partition("#")[0])]


class _SlurmLine(Section):
    """A line of slurm.conf with settings of the site's own."""

    extra: Line | None = Field(None, description="Additional settings of the line.")

    @property
    def settings(self) -> tuple[str, ...]:
        """The keys that ``extra`` sets, in lower case."""
        return tuple(key for key, _ in line_settings(self.extra or ""))

    def sets(self, key: str) -> bool:
        """Return whether ``extra`` sets a key."""
        return key.lower() in self.settings


TOPOLOGY = ("boards", "sockets", "socketsperboard", "corespersocket", "threadspercore", "procs")
"""Settings of a node that give its number of CPUs, in lower case."""


class SlurmNode(_SlurmLine):
    """A NodeName line of slurm.conf."""

    name: NodeList = Field(description="The nodes, as a Slurm host list: node[001-450].")
    address: NodeList | None = Field(None, description="NodeAddr, if the names do not resolve: 10.0.1.[1-450].")
    cpus: int | None = Field(
        None, ge=1, description="CPUs per node (default: 1, or those of Sockets, CoresPerSocket ... in `extra`)."
    )
    memory_mb: int = Field(1, ge=1, description="Memory per node, in MiB (RealMemory).")
    extra: Line | None = Field(None, description="Additional settings of the line: Feature=gpu Gres=gpu:4.")

    @property
    def shown_cpus(self) -> int | None:
        """The value of CPUs= of the line; None if the topology in ``extra`` gives it."""
        return self.cpus or (None if any(map(self.sets, TOPOLOGY)) else 1)


class SlurmPartition(_SlurmLine):
    """A PartitionName line of slurm.conf."""

    name: PartitionName = Field(description="Name of the partition.")
    nodes: NodeList = Field("ALL", description="Its nodes, as a Slurm host list.")
    default: bool = Field(False, description="Use it for jobs that name no partition.")
    max_time: SlurmTime = Field("INFINITE", description="Time limit of a job: 7-00:00:00.")


SlurmFile = Annotated[
    str,
    Text(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        "the name of a file in /etc/slurm",
        "use letters, digits, dots, dashes and underscores, without folders: gres.conf, prolog.sh",
    ),
]

LARGEST_ID = (1 << 32) - 2
"""The largest user or group id of Linux; the next one stands for none."""


class SystemUser(Section):
    """Ids of a system user and its group. They must be the same on every node and in the container."""

    uid: int = Field(ge=1, le=LARGEST_ID, description="Its user id.")
    gid: int = Field(ge=1, le=LARGEST_ID, description="Id of the group of the same name.")


class Slurm(Section):
    """Settings for slurm.conf."""

    user: SystemUser | None = Field(
        None, description="Ids of the user slurm, as `id slurm` prints them on a node (default: those of the base)."
    )
    nodes: tuple[SlurmNode, ...] = Field((), description="The compute nodes.")
    partitions: tuple[SlurmPartition, ...] = Field((), max_length=1000, description="The partitions.")
    max_nodes: int = Field(1024, ge=1, le=65533, description="MaxNodeCount: room for dynamic nodes (slurmd -Z).")
    extra: tuple[Line, ...] = Field((), description="Additional lines of slurm.conf; they take precedence.")
    files: dict[SlurmFile, File] = Field(
        {}, max_length=100, description="Further files in /etc/slurm, by name: gres.conf, topology.conf, prolog.sh."
    )


class Munge(Section):
    """The daemon that authenticates Slurm's messages."""

    user: SystemUser | None = Field(
        None, description="Ids of the user munge, as `id munge` prints them on a node (default: those of the base)."
    )


class Accounts(Section):
    """Users that the scheduler must know; entries with a uid or gid below 1000 are ignored."""

    passwd: File | None = Field(None, description="A passwd file.")
    group: File | None = Field(None, description="A group file.")


class Secrets(Section):
    """Files of mode 0600 that are stored in the overlay of the container, never in the image."""

    munge_key: File | None = Field(None, description="Munge key of the cluster (default: created at the first start).")
    shadow: File | None = Field(None, description="A shadow file for the accounts.")
    jwt_key: File | None = Field(
        None, description="Key of Slurm's tokens (auth/jwt), for slurmrestd on other engines: 32 random bytes."
    )
    ssh_host_key: File | None = Field(None, description="Private host key of the service login, of type ed25519.")
    sssd_conf: File | None = Field(None, description="sssd.conf of the service sssd.")
    tls_ca: File | None = Field(None, description="CA that file synchronisation trusts.")
    tls_cert: File | None = Field(None, description="Certificate of the container.")
    tls_key: File | None = Field(None, description="Key of that certificate.")


class FileSync(Section):
    """File synchronisation: files pulled from the provisioning node."""

    server: SafeUrl | None = Field(None, description="URL of the server; without it the client is idle.")
    interval_s: int = Field(300, ge=5, le=86400, description="Polling interval, in seconds.")


class Mail(Section):
    """Delivery of mail from nodes and jobs."""

    relay: Peer | None = Field(None, description="The site's mail relay; without it mail stays in the container.")
    domain: HostName | None = Field(None, description="Domain of local senders.")
    root: MailAddress | None = Field(None, description="Recipient of root's mail.")


class Signing(Section):
    """Keys that sign and verify images."""

    private_key: File = Field(
        Path("/etc/sms/keys/sign.pem"), description="PEM key that `sms build` signs with, mode 0600."
    )
    public_keys: tuple[File, ...] = Field(
        (Path("/etc/sms/keys/sign.pub"),), min_length=1, description="PEM keys, one of which must have signed an image."
    )
    pgp_fingerprint: Fingerprint | None = Field(
        None,
        description="Sign and verify with this PGP key instead of PEM keys, for Apptainer's execution control list.",
    )
    pgp_keyring: File | None = Field(None, description="Folder of Apptainer's PGP keyring.")


class Build(Section):
    """Where images are built and signed."""

    host: HostName | None = Field(
        None,
        description="The machine that builds and signs, as `hostname` prints its name: an admin host or another one "
        "(default: any machine that has the signing key).",
    )


class Overlay(Section):
    """The writable layer of the container: an ext3 image file."""

    size_mb: int = Field(2048, ge=64, le=LARGEST_OVERLAY >> 20, description="Size in MiB; the file is sparse.")
    directory: File | None = Field(None, description="Folder of the overlay (default: overlays/ in the state folder).")


class Retention(Section):
    """How many snapshots are kept."""

    last: int = Field(3, ge=1, description="Number of the newest snapshots to keep, whatever their age.")
    hourly: int = Field(24, ge=0, description="Number of hourly snapshots to keep.")
    daily: int = Field(7, ge=0, description="Number of daily snapshots to keep.")
    weekly: int = Field(4, ge=0, description="Number of weekly snapshots to keep.")
    monthly: int = Field(6, ge=0, description="Number of monthly snapshots to keep.")


class BorgRepository(Section):
    """A Borg repository to which the admin host pushes its snapshots."""

    repository: Annotated[
        str,
        Text(
            r"(ssh://[A-Za-z0-9._@:\[\]-]+)?/[A-Za-z0-9._/+@-]*[A-Za-z0-9._+@-]",
            "a Borg repository",
            "write it as /backup/sms.borg or ssh://borg@backup.example.org/srv/sms.borg",
        ),
    ] = Field(description="Its location: a folder, or ssh://user@host/path.")
    passphrase: File = Field(description="File with the passphrase of the repository, mode 0600.")
    ssh_key: File | None = Field(None, description="SSH private key (default: root's default files).")
    known_hosts: File | None = Field(None, description="SSH known_hosts file (default: root's).")
    append_only: bool = Field(
        False,
        description="The key of the admin hosts may only append: they never prune the repository, another machine does "
        "(`sms overlay prune --at borg`).",
    )


_HOUR, _DAY = 60, 1440
EVEN_MINUTES = tuple(
    every for every in range(1, _DAY + 1) if _HOUR % every == 0 or (every % _HOUR == 0 and _DAY % every == 0)
)
"""Intervals in minutes that cron and systemd support: they divide an hour, or are whole hours that divide a day."""


class Snapshots(Section):
    """How snapshots of the overlay are taken, and where they are pushed."""

    directory: File | None = Field(
        None,
        description="Folder of the snapshots (default: snapshots/ in the state folder). On the same XFS or Btrfs as "
        "the overlay they are reflinks.",
    )
    method: Literal["auto", "reflink", "delta", "full"] = Field("auto", description="How snapshots are taken.")
    every_minutes: int = Field(15, ge=1, le=1440, description="Interval of scheduled snapshots, in minutes.")
    oldest_minutes: int | None = Field(
        None,
        ge=2,
        le=43200,
        description="Maximum age of the newest verified snapshot, in minutes (default: twice `every_minutes` plus "
        "five).",
    )
    dump: bool = Field(True, description="Dump databases before each snapshot.")
    borg: BorgRepository | None = Field(None, description="Borg repository to which snapshots are pushed.")
    standby: tuple[HostName, ...] = Field((), description="Admin hosts to which snapshots are pushed.")


class Site(Section):
    """The configuration of one cluster."""

    cluster: Name = Field(description="Name of the cluster, also Slurm's ClusterName.")
    hostname: HostName = Field("sms-services", description="Host name of the container.")
    admin_hosts: tuple[AdminHost, ...] = Field(min_length=1, description="Machines that can run the container.")
    known_hosts: File | None = Field(
        None, description="SSH known_hosts file of the admin hosts (default: the user's own)."
    )
    networks: Networks = Field(description="The two networks of the container.")
    services: tuple[Name, ...] | ServicesFrom | None = Field(
        None, description="Services by name, or from a classification (default: the catalogue's default services)."
    )
    base: Base = Field(Base(), description="What the image is built from.")
    slurm: Slurm = Field(Slurm(), description="Settings for slurm.conf.")
    munge: Munge = Field(Munge(), description="The daemon that authenticates Slurm's messages.")
    ntp: tuple[Peer, ...] = Field((), description="Time servers of the container.")
    syslog_forward: Peer | None = Field(None, description="Syslog server to which all messages are forwarded (TCP).")
    mail: Mail = Field(Mail(), description="Delivery of mail.")
    filesync: FileSync = Field(FileSync(), description="File synchronisation from the provisioning node.")
    provisioning: Provisioning | None = Field(
        None, description="The provisioning VM, which may be off for days; omit it if another system provisions nodes."
    )
    accounts: Accounts = Field(Accounts(), description="Users that the scheduler must know.")
    secrets: Secrets = Field(Secrets(), description="Secret files, never stored in an image.")
    build: Build = Field(Build(), description="Where images are built and signed.")
    signing: Signing = Field(Signing(), description="Keys that sign and verify images.")
    overlay: Overlay = Field(Overlay(), description="The writable layer of the container.")
    snapshots: Snapshots = Field(Snapshots(), description="How snapshots are taken, and where they are pushed.")
    retention: Retention = Field(Retention(), description="How many snapshots are kept.")
    engines: Engines = Field(Engines(), description="Other engines that can run the services; `sms export` uses it.")
    state: File = Field(Path("/var/lib/sms"), description="State folder: images, overlays, snapshots, leases, journal.")

    @property
    def service_names(self) -> tuple[str, ...]:
        """The names of the enabled services, as resolved by `open_site`."""
        if not isinstance(self.services, tuple):
            raise TypeError("the services have not been resolved yet: use open_site")
        return self.services

    @property
    def user_settings(self) -> dict[str, SystemUser | None]:
        """The system users whose ids the site can give, by name."""
        return {"slurm": self.slurm.user, "munge": self.munge.user}

    @property
    def system_users(self) -> dict[str, SystemUser]:
        """The system users whose ids the site gives, by name."""
        return {name: user for name, user in self.user_settings.items() if user}

    @property
    def provisioning_network(self) -> IPv4Network:
        """The network that the container shares with compute nodes, or with their routers."""
        return self.networks.provisioning.address.network

    @property
    def node_networks(self) -> tuple[IPv4Network, ...]:
        """The networks of the compute nodes: the provisioning network, then those behind its routers."""
        return (self.provisioning_network, *(route.network for route in self.networks.provisioning.routes))
