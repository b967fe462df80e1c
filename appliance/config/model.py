"""The site file, ``sms.yaml``, as typed values.

Every field carries the words that ``sms config schema`` hands to editors and that a problem with
it is explained in.
"""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from appliance.config.provisioning import BmcUser, Provisioning
from appliance.config.section import Section
from appliance.config.types import (
    Address,
    AddressWithPrefix,
    File,
    HostName,
    Interface,
    Line,
    Mac,
    Name,
    NodeList,
    Peer,
    SafeUrl,
    SeenName,
    Text,
    Url,
)

SshUser = Annotated[
    str, Text(r"[a-z_][a-z0-9_-]{0,31}", "a user name", "use lower case letters, digits, dashes and underscores")
]

PartitionName = Annotated[
    str, Text(r"[A-Za-z0-9_-]{1,64}", "a name of a partition", "use letters, digits, dashes and underscores")
]

SlurmTime = Annotated[
    str,
    Text(
        r"INFINITE|UNLIMITED|[0-9]{1,9}(:[0-9]{1,2}){0,2}|[0-9]{1,5}-[0-9]{1,2}(:[0-9]{1,2}){0,2}",
        "a time as Slurm writes it",
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
    """A management controller that speaks Redfish."""

    url: Annotated[
        str,
        Text(
            r"https://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._~/-]*)?",
            "a URL of https",
            "write it as https://bmc-1.example.org, or with the system's path behind it: /redfish/v1/Systems/1",
        ),
    ] = Field(description="Where it is; with the path of the system where it has more than one.")
    user: BmcUser = Field(description="A user that may switch the power.")
    password_file: File = Field(description="A file of mode 0600 with the password.")
    ca: File | None = Field(None, description="The CA that has signed its certificate; those of the system, if none.")
    insecure: bool = Field(False, description="Take any certificate: the password goes to whoever answers.")


class Ipmi(Section):
    """A management controller that speaks IPMI 2.0 (lanplus), asked with ipmitool."""

    address: HostName = Field(description="Its address or name.")
    user: BmcUser = Field(description="A user that may switch the power.")
    password_file: File = Field(description="A file of mode 0600 with the password.")


class Fence(Section):
    """How `sms failover` makes sure that a dead host is off: one of the three."""

    command: tuple[Line, ...] = Field(
        (), description="A command and its arguments; with exit status 0 the host is off for sure."
    )
    timeout_s: int = Field(120, ge=1, le=3600, description="Seconds that it may take until the host is off.")
    redfish: Redfish | None = Field(None, description="Power it off by Redfish, and wait until it is.")
    ipmi: Ipmi | None = Field(None, description="Power it off by IPMI, and wait until it is.")


class AdminHost(Section):
    """A machine that can carry the services container."""

    name: HostName = Field(description="Its host name, as `hostname` prints it there.")
    address: HostName = Field(description="Where SSH reaches it: an address or a name.")
    user: SshUser = Field("root", description="The SSH user; one that is not root needs sudo without a password.")
    port: int = Field(22, ge=1, le=65535, description="The SSH port.")
    key: File | None = Field(None, description="The SSH private key; without it, the agent and the usual files.")
    fence: Fence | None = Field(None, description="How `sms failover` makes sure that this host is off.")


class Network(Section):
    """One of the two networks that the container joins."""

    bridge: Interface = Field(description="The Linux bridge on every admin host.")
    address: AddressWithPrefix = Field(description="The container's address, with its prefix: 10.0.0.1/16.")
    mac: Mac = Field(description="The container's MAC address: it stays the same on every host.")
    port: Interface | None = Field(
        None,
        description="The host's interface that `sms host prepare` puts into the bridge.",
    )


class PublicNetwork(Network):
    """The network towards the outside."""

    gateway: Address = Field(description="The router towards the outside.")
    probe: Address | None = Field(None, description="The address that the NAT probe pings; the gateway when not given.")


class Networks(Section):
    """The provisioning network (compute nodes) and the public one."""

    provisioning: Network = Field(description="Where the compute nodes are (HPE Cray EX: the node management network).")
    public: PublicNetwork = Field(description="Towards the outside (HPE Cray EX: the customer access network).")
    dns: tuple[Address, ...] = Field((), max_length=3, description="Name servers for the container.")


class ServicesFrom(Section):
    """Services taken from a classification, with the site's own changes."""

    classification: File = Field(
        alias="from",
        description="A file that `sms classify --format yaml` (or json) wrote; its time-critical services are taken.",
    )
    also: tuple[Name, ...] = Field((), description="Services besides those.")
    without: tuple[SeenName, ...] = Field((), description="Services of the classification to leave out.")


class Base(Section):
    """What the image is built from."""

    os: Name = Field("debian-12", description="One of the bases under definitions/bases.")
    mirrors: dict[Name, Url] = Field(
        {},
        description="Package mirrors by repository name; the others are those of this host.",
    )


class SlurmNode(Section):
    """A NodeName line of slurm.conf."""

    name: NodeList = Field(description="The nodes, as a Slurm host list: node[001-450].")
    address: NodeList | None = Field(None, description="NodeAddr, where the names do not resolve: 10.0.1.[1-450].")
    cpus: int = Field(1, ge=1, description="CPUs a node.")
    memory_mb: int = Field(1, ge=1, description="Memory a node, in MiB (RealMemory).")
    extra: Line | None = Field(None, description="More of the line: Feature=gpu Gres=gpu:4.")


class SlurmPartition(Section):
    """A PartitionName line of slurm.conf."""

    name: PartitionName = Field(description="Its name.")
    nodes: NodeList = Field("ALL", description="Its nodes, as a Slurm host list.")
    default: bool = Field(False, description="Jobs that name no partition come here.")
    max_time: SlurmTime = Field("INFINITE", description="The longest a job may run: 7-00:00:00.")
    extra: Line | None = Field(None, description="More of the line.")


class Slurm(Section):
    """What slurm.conf says of this cluster."""

    nodes: tuple[SlurmNode, ...] = Field((), description="The compute nodes.")
    partitions: tuple[SlurmPartition, ...] = Field((), max_length=1000, description="The partitions.")
    max_nodes: int = Field(1024, ge=1, le=65533, description="MaxNodeCount: room for nodes that come by themselves.")
    extra: tuple[Line, ...] = Field((), description="More lines of slurm.conf; they come last and win.")


class Accounts(Section):
    """Users that the scheduler must know; uid and gid below 1000 are left to the image."""

    passwd: File | None = Field(None, description="A passwd file.")
    group: File | None = Field(None, description="A group file.")


class Secrets(Section):
    """Files that reach the container through its overlay only, mode 0600, never the image."""

    munge_key: File | None = Field(
        None, description="The cluster's munge key; one is made on first start when not given."
    )
    shadow: File | None = Field(None, description="A shadow file for the accounts.")
    tls_ca: File | None = Field(None, description="The CA that file synchronisation trusts.")
    tls_cert: File | None = Field(None, description="The container's own certificate.")
    tls_key: File | None = Field(None, description="The key of that certificate.")


class FileSync(Section):
    """Files pulled from the provisioning node."""

    server: SafeUrl | None = Field(None, description="Where they are; without it the client waits quietly.")
    interval_s: int = Field(300, ge=5, le=86400, description="Seconds between two looks.")


class Mail(Section):
    """Where mail of nodes and jobs goes."""

    relay: Peer | None = Field(None, description="The site's mail server; without it mail stays in the container.")
    domain: HostName | None = Field(None, description="The domain that local senders get.")
    root: MailAddress | None = Field(None, description="Who reads the mail to root.")


class Signing(Section):
    """Keys that images are signed with and held against."""

    private_key: File = Field(
        Path("/etc/sms/keys/sign.pem"), description="PEM key that `sms build` signs with, mode 0600."
    )
    public_keys: tuple[File, ...] = Field(
        (Path("/etc/sms/keys/sign.pub"),), min_length=1, description="PEM keys of which one must have signed an image."
    )
    pgp_fingerprint: Fingerprint | None = Field(
        None,
        description="Sign and verify with this PGP key, not with PEM: the execution control list knows only PGP.",
    )
    pgp_keyring: File | None = Field(None, description="Folder of Apptainer's PGP keyring.")


class Overlay(Section):
    """The writable part of the container: one ext3 file."""

    size_mb: int = Field(2048, ge=64, le=1 << 24, description="Its size in MiB; it is sparse.")
    directory: File | None = Field(None, description="Where it lies; the state folder's overlays/ when not given.")


class Retention(Section):
    """How many snapshots are kept."""

    last: int = Field(3, ge=1, description="The newest ones, whatever their age.")
    hourly: int = Field(24, ge=0, description="One an hour, for so many hours.")
    daily: int = Field(7, ge=0, description="One a day, for so many days.")
    weekly: int = Field(4, ge=0, description="One a week, for so many weeks.")
    monthly: int = Field(6, ge=0, description="One a month, for so many months.")


class BorgRepository(Section):
    """A Borg repository that snapshots are pushed to, from the admin host that has them."""

    repository: Annotated[
        str,
        Text(
            r"(ssh://[A-Za-z0-9._@:\[\]-]+)?/[A-Za-z0-9._/+@-]*[A-Za-z0-9._+@-]",
            "a Borg repository",
            "write it as /backup/sms.borg or ssh://borg@backup.example.org/srv/sms.borg",
        ),
    ] = Field(description="Where it is: a folder, or ssh://user@host/path.")
    passphrase: File = Field(description="A file of mode 0600 with the passphrase that encrypts it.")
    ssh_key: File | None = Field(None, description="The SSH private key; without it, the usual files of root.")
    known_hosts: File | None = Field(None, description="SSH host keys; root's own file when not given.")


_HOUR, _DAY = 60, 1440
EVEN_MINUTES = tuple(
    every for every in range(1, _DAY + 1) if _HOUR % every == 0 or (every % _HOUR == 0 and _DAY % every == 0)
)
"""Minutes between two runs that both cron and systemd can keep: they divide an hour, or are hours that divide a day."""


class Snapshots(Section):
    """How snapshots of the overlay are taken, and where else they go."""

    directory: File | None = Field(
        None,
        description="Where they lie; the state folder's snapshots/ when not given. On the overlay's own XFS or "
        "Btrfs they are taken by reflink.",
    )
    method: Literal["auto", "reflink", "delta", "full"] = Field("auto", description="How they are taken.")
    every_minutes: int = Field(15, ge=1, le=1440, description="Minutes between two scheduled ones.")
    oldest_minutes: int | None = Field(
        None,
        ge=2,
        le=43200,
        description="Age of the newest verified one that is too old; twice `every_minutes` and "
        "five more when not given.",
    )
    dump: bool = Field(True, description="Dump databases before each one.")
    borg: BorgRepository | None = Field(None, description="A Borg repository that they are pushed to.")
    standby: tuple[HostName, ...] = Field((), description="Admin hosts that they are pushed to.")


class Site(Section):
    """One cluster: all that `sms` needs to know of it."""

    cluster: Name = Field(description="The cluster's name; Slurm's ClusterName as well.")
    hostname: HostName = Field("sms-services", description="The container's host name.")
    admin_hosts: tuple[AdminHost, ...] = Field(min_length=1, description="The machines that can carry the container.")
    known_hosts: File | None = Field(
        None, description="SSH host keys of the admin hosts; the user's own file when not given."
    )
    networks: Networks = Field(description="The two networks that the container joins.")
    services: tuple[Name, ...] | ServicesFrom | None = Field(
        None, description="Services by name, or taken from a classification; the catalogue's usual ones when not given."
    )
    base: Base = Field(Base(), description="What the image is built from.")
    slurm: Slurm = Field(Slurm(), description="The cluster, as slurm.conf has it.")
    ntp: tuple[Peer, ...] = Field((), description="Time servers that the container follows.")
    syslog_forward: Peer | None = Field(None, description="A syslog server that gets all messages as well (TCP).")
    mail: Mail = Field(Mail(), description="Where mail goes.")
    filesync: FileSync = Field(FileSync(), description="Files pulled from the provisioning node.")
    provisioning: Provisioning | None = Field(
        None, description="The provisioning VM, which may be off for days; none where something else provisions."
    )
    accounts: Accounts = Field(Accounts(), description="Users that the scheduler must know.")
    secrets: Secrets = Field(Secrets(), description="Files that never reach an image.")
    signing: Signing = Field(Signing(), description="Keys that images are signed with and held against.")
    overlay: Overlay = Field(Overlay(), description="The writable part of the container.")
    snapshots: Snapshots = Field(Snapshots(), description="How snapshots are taken, and where else they go.")
    retention: Retention = Field(Retention(), description="How many snapshots are kept.")
    state: File = Field(
        Path("/var/lib/sms"), description="Images, overlays, snapshots, leases, journal: all below here."
    )

    @property
    def service_names(self) -> tuple[str, ...]:
        """The services wanted; `open_site` has put their names in the place of all else."""
        if not isinstance(self.services, tuple):
            raise TypeError("the services have not been resolved yet: use open_site")
        return self.services

    @property
    def provisioning_network(self) -> IPv4Network:
        """The network the compute nodes are in."""
        return self.networks.provisioning.address.network
