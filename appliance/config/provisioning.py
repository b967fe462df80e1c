"""The provisioning VM in the site file: the machine, what nodes boot, the files that it is master of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.section import Section
from appliance.config.types import Address, AddressWithPrefix, File, HostName, Line, Mac, Name, Text

BmcUser = Annotated[
    str,
    Text(r"[A-Za-z0-9._@+-]{1,64}", "a user name", "use letters, digits, dots, dashes, underscores, @ and +"),
]

GroupName = Annotated[
    str,
    Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "a name of a group", "use letters, digits, dots, dashes and underscores"),
]

NodeName = Annotated[
    str, Text(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", "a name of a node", "use letters, digits and dashes, such as node001")
]

NamePattern = Annotated[
    str,
    Text(
        r"[A-Za-z0-9][A-Za-z0-9-]{0,40}%(0[1-9])?d([A-Za-z0-9-]{0,20}[A-Za-z0-9])?",
        "a pattern of node names",
        "write it as node%03d or nid%06d: one number in it",
    ),
]

PackageName = Annotated[
    str, Text(r"[a-z0-9][a-z0-9+.-]{1,99}", "a name of a package", "write it as apt knows it, such as libopenmpi3")
]

ClientPath = Annotated[
    str,
    Text(
        r"(/\.?[A-Za-z0-9_+@%-][A-Za-z0-9._+@%-]{0,200}){1,30}",
        "a path on the nodes",
        "begin with /, without .. and spaces, such as /etc/security/limits.conf",
    ),
]

FileMode = Annotated[
    str, Text(r"0?[0-7]{3}", "a file mode", 'write it in quotes as "0644": three digits of permissions')
]

SystemUser = Annotated[
    str, Text(r"[a-z_][a-z0-9_-]{0,31}", "a user or group name", "use lower case letters, digits and dashes")
]


class VmNetwork(Section):
    """The VM's place in a network besides the provisioning one."""

    address: AddressWithPrefix = Field(description="The VM's address there, with its prefix.")
    mac: Mac = Field(description="The VM's MAC address there.")


class Pool(Section):
    """Addresses for nodes that the inventory does not know, while they are looked at."""

    first: Address = Field(description="The first address.")
    last: Address = Field(description="The last one.")


class Bmc(Section):
    """How management controllers of nodes are reached."""

    user: BmcUser = Field("root", description="A user that may switch the power; $SMS_BMC_USER stands before it.")
    password_file: File | None = Field(
        None, description="A file of mode 0600 with the password; $SMS_BMC_PASSWORD stands before it."
    )
    ca: File | None = Field(None, description="The CA that has signed their certificates; the site's own, if none.")
    insecure: bool = Field(False, description="Take any certificate: the password goes to whoever answers.")


class Profile(Section):
    """What nodes of some groups boot."""

    groups: tuple[GroupName, ...] = Field((), description="Nodes of these groups boot it; of none: all others.")
    packages: tuple[PackageName, ...] = Field((), max_length=500, description="Debian packages besides the usual ones.")
    arguments: Line | None = Field(None, description="More of the kernel's command line.")
    kernel: Literal["cloud", "generic"] = Field(
        "generic", description="Debian's kernel: `generic` for real machines, `cloud` for virtual ones."
    )


class MasterFile(Section):
    """A file that the VM is master of: nodes and the container pull it."""

    path: ClientPath = Field(description="Where it lies on those who have it.")
    source: File = Field(description="Where `sms files push` takes it from, on the machine where that runs.")
    mode: FileMode = Field("0644", description="Its permissions.")
    owner: SystemUser = Field("root", description="Its owner there.")
    group: SystemUser = Field("root", description="Its group there.")
    template: bool = Field(False, description="It is a Jinja template: {{ node.name }}, {{ node.address }}.")
    groups: tuple[GroupName, ...] = Field((), description="Nodes of these groups have it.")
    nodes: tuple[NodeName, ...] = Field(
        (), description="These nodes have it; all, if neither nodes nor groups are named."
    )
    services: bool = Field(False, description="The services container has it, too.")


class Provisioning(Section):
    """A virtual machine that provisions nodes and is master of their files; the cluster runs on when it is off."""

    address: AddressWithPrefix = Field(description="The VM's address in the provisioning network: 10.0.0.2/16.")
    hostname: HostName = Field("sms-provision", description="The VM's host name.")
    mac: Mac = Field(description="The VM's MAC address in the provisioning network.")
    public: VmNetwork | None = Field(None, description="Its place in the public network, where it has one.")
    memory_mb: int = Field(1024, ge=384, le=1 << 20, description="Its memory, in MiB.")
    cpus: int = Field(1, ge=1, le=256, description="Its CPUs.")
    disk_mb: int = Field(
        16384, ge=512, le=1 << 24, description="The disk of its inventory, files and node images, in MiB; it is sparse."
    )
    directory: File | None = Field(None, description="Where its disks lie; the state folder's vm/ when not given.")
    unknown: Literal["refuse", "discover"] = Field(
        "refuse", description="What a machine that the inventory does not know gets: a refusal, or a look at it."
    )
    pool: Pool | None = Field(None, description="Addresses for machines that the inventory does not know.")
    database: File | None = Field(
        None, description="A file of mode 0600 with the URL of a PostgreSQL database; SQLite on its own disk, if none."
    )
    profiles: dict[Name, Profile] = Field(
        {"compute": Profile()}, min_length=1, max_length=100, description="What nodes boot, by the image's name."
    )
    files: tuple[MasterFile, ...] = Field((), max_length=2000, description="The site's own files.")
    node_names: NamePattern = Field("node%03d", description="How `sms node discover` names new nodes.")
    bmc: Bmc = Field(Bmc(), description="How management controllers of nodes are reached.")
