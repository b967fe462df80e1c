"""What `sms survey` found on a live management node: the content of survey.json."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Carried = Literal["carried", "check", "left"]


class Part(BaseModel):
    """A part of a survey."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class System(Part):
    """The machine and its operating system."""

    hostname: str = ""
    name: str = Field("", description="PRETTY_NAME of os-release.")
    id: str = Field("", description="ID of os-release.")
    version: str = Field("", description="VERSION_ID of os-release.")
    kernel: str = ""
    machine: str = Field("", description="The architecture, as `uname -m` prints it.")
    base: str = Field("", description="The base of sms that is nearest; empty if there is none.")
    root: bool = Field(True, description="Whether it was read as root.")


class Link(Part):
    """A network interface."""

    name: str
    kind: str = Field("", description="bond, vlan, bridge and so on; empty for hardware.")
    mac: str = ""
    mtu: int = 0
    up: bool = False
    master: str = Field("", description="The bond or bridge that it is a port of.")
    parent: str = Field("", description="The interface below it, such as that of a VLAN.")
    vlan: int | None = None
    addresses: tuple[str, ...] = Field((), description="With prefix, IPv4 first.")


class Listener(Part):
    """A socket that waits for clients, and its process."""

    port: str = Field(description="tcp/6817")
    address: str
    process: str = ""
    unit: str = Field("", description="The systemd unit of the process.")
    service: str = Field("", description="The catalogue's name; empty if it has none for it.")
    evidence: str = Field("", description="The verdict of the classification; empty without one.")


class Entry(Part):
    """A NodeName or PartitionName line of slurm.conf, with the defaults of DEFAULT lines."""

    name: str
    settings: dict[str, str]


class Accounting(Part):
    """The accounting database, as the client on the node finds it."""

    client: str = Field("", description="As its --version prints it.")
    dump: str = Field("", description="Path of mariadb-dump or mysqldump.")
    server: str = Field("", description="Version.")
    user: str = Field("", description="Who loads the database when it is given back.")
    options: tuple[str, ...] = Field((), description="Options by which the client runs no commands.")
    rights: tuple[str, ...] = Field((), description="What that user may grant, of what is needed.")
    objects: tuple[str, ...] = Field((), description="What it has besides tables of InnoDB: it is not copied.")
    error: str = Field("", description="Why it could not be queried.")


class Slurm(Part):
    """Slurm's controller. ``state_versions``: the protocol version that wrote each file of the state."""

    file: str
    included: tuple[str, ...] = ()
    cluster: str = ""
    controllers: tuple[str, ...] = Field((), description="SlurmctldHost, the first one first.")
    version: str = ""
    user: str = "slurm"
    uid: int | None = None
    gid: int | None = None
    nodes: tuple[Entry, ...] = ()
    partitions: tuple[Entry, ...] = ()
    settings: tuple[str, ...] = Field((), description="The other lines, without what concerns only the old node.")
    files: tuple[str, ...] = Field((), description="Further files of Slurm's folder.")
    state: str = Field("", description="StateSaveLocation.")
    state_kb: int | None = None
    state_versions: dict[str, int] = {}
    database: bool = Field(False, description="Whether slurmdbd is configured on this node.")
    database_host: str = ""
    database_kb: int | None = None
    accounting: Accounting | None = Field(None, description="Only where slurmdbd is configured on this node.")


class Node(Part):
    """A machine in the table of a provisioning system."""

    name: str
    address: str = ""
    mac: str = ""
    bmc: str = ""
    group: str = Field("", description="Profile, or groups.")


class Provisioner(Part):
    """A provisioning system that has left marks."""

    name: str
    sources: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()


class Scheduled(Part):
    """A program that cron runs."""

    file: str
    when: str
    program: str


class Peers(Part):
    """What the node has to do with other machines."""

    clocks: tuple[str, ...] = Field((), description="Time servers that it follows.")
    serves_time: bool = False
    logs_from: tuple[str, ...] = Field((), description="Protocol and port on which it receives syslog messages.")
    logs_to: tuple[str, ...] = Field(
        (), description="To which servers it forwards them: @host:514 UDP, @@host:514 TCP."
    )
    relay: str = Field("", description="Mail relay.")
    mail_domain: str = ""
    mail_root: str = Field("", description="Recipient of root's mail.")
    nameservers: tuple[str, ...] = ()
    exports: tuple[str, ...] = Field((), description="Folders that it exports by NFS, with their clients.")


class Translation(Part):
    """Forwarding of packets between networks."""

    forwards: bool = False
    rules: tuple[str, ...] = Field((), description="Rules that rewrite addresses.")
    redirects: tuple[str, ...] = Field((), description="Those that redirect ports to inner machines.")
    filters: int = Field(0, description="Number of rules that accept or drop packets.")


class Accounts(Part):
    """Users and groups from which jobs come. ``from_directory``: those that are in no file of the node."""

    users: int = 0
    groups: int = 0
    from_directory: int = 0
    directory: str = Field("", description="Configuration of a directory service: sssd.conf.")


class Finding(Part):
    """What was found: whether the site file has it, and what to do if not."""

    area: str
    what: str
    source: str = ""
    carried: Carried = Field(description="carried: in the written site. check: in part, or doubtful. left: not in it.")
    todo: str = ""


class Survey(Part):
    """What a live management node has."""

    format: Literal[1] = 1
    host: str = Field(description="As it was named.")
    system: System = System()
    links: tuple[Link, ...] = ()
    routes: tuple[str, ...] = Field((), description="As `ip route` prints them.")
    provisioning: str = Field("", description="The interface of the network with compute nodes.")
    public: str = Field("", description="The interface of the default route.")
    gateway: str = ""
    listeners: tuple[Listener, ...] = ()
    services: tuple[str, ...] = Field((), description="Services that run, by the catalogue's names.")
    slurm: Slurm | None = None
    munge_key: bool = False
    munge_uid: int | None = None
    munge_gid: int | None = None
    peers: Peers = Peers()
    translation: Translation = Translation()
    scheduled: tuple[Scheduled, ...] = ()
    provisioners: tuple[Provisioner, ...] = ()
    accounts: Accounts = Accounts()
    findings: tuple[Finding, ...] = ()
