"""The section ``provisioning`` of the site file: the VM, the images that nodes boot, the master files."""

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
    Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "a group name", "use letters, digits, dots, dashes and underscores"),
]

NodeName = Annotated[
    str, Text(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", "a node name", "use letters, digits and dashes, such as node001")
]

NamePattern = Annotated[
    str,
    Text(
        r"[A-Za-z0-9][A-Za-z0-9-]{0,40}%(0[1-9])?d([A-Za-z0-9-]{0,20}[A-Za-z0-9])?",
        "a pattern of node names",
        "write it as node%03d or nid%06d, with one number",
    ),
]

PackageName = Annotated[
    str, Text(r"[a-z0-9][a-z0-9+.-]{1,99}", "a package name", "write it as apt does, such as libopenmpi3")
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
    """An additional network of the VM."""

    address: AddressWithPrefix = Field(description="Address of the VM in this network, with prefix.")
    mac: Mac = Field(description="MAC address of the VM in this network.")


class Pool(Section):
    """Addresses for machines that are not in the inventory, during discovery."""

    first: Address = Field(description="The first address.")
    last: Address = Field(description="The last address.")


class Bmc(Section):
    """Access to the management controllers of nodes."""

    user: BmcUser = Field("root", description="User that may switch the power; $SMS_BMC_USER overrides it.")
    password_file: File | None = Field(
        None, description="File with the password, mode 0600; $SMS_BMC_PASSWORD overrides it."
    )
    networks: tuple[AddressWithPrefix, ...] = Field(
        (), max_length=100, description="Their networks, such as 10.0.9.0/24; the password is sent to no other address."
    )
    ca: File | None = Field(None, description="CA that signed their certificates; needed unless `insecure` is set.")
    insecure: bool = Field(False, description="Accept any certificate; the password can be intercepted.")


class Profile(Section):
    """The image that nodes of some groups boot."""

    groups: tuple[GroupName, ...] = Field((), description="Groups whose nodes boot it (default: all other nodes).")
    packages: tuple[PackageName, ...] = Field((), max_length=500, description="Additional Debian packages.")
    arguments: Line | None = Field(None, description="Additional kernel arguments.")
    kernel: Literal["cloud", "generic"] = Field(
        "generic", description="Debian kernel: `generic` for physical machines, `cloud` for virtual ones."
    )


class MasterFile(Section):
    """A file whose master copy is on the VM; nodes and the container pull it."""

    path: ClientPath = Field(description="Path on the clients.")
    source: File = Field(description="File that `sms files push` uploads, on the machine where it is run.")
    mode: FileMode = Field("0644", description="Permissions.")
    owner: SystemUser = Field("root", description="Owner on the clients.")
    group: SystemUser = Field("root", description="Group on the clients.")
    template: bool = Field(False, description="Whether it is a Jinja template: {{ node.name }}, {{ node.address }}.")
    groups: tuple[GroupName, ...] = Field((), description="Groups whose nodes receive it.")
    nodes: tuple[NodeName, ...] = Field(
        (), description="Nodes that receive it (default: all, if there are no groups either)."
    )
    services: bool = Field(False, description="Whether the services container receives it, too.")


class Provisioning(Section):
    """A VM that provisions nodes and holds their master files; the cluster keeps running while it is off."""

    address: AddressWithPrefix = Field(description="Address of the VM in the provisioning network: 10.0.0.2/16.")
    hostname: HostName = Field("sms-provision", description="Host name of the VM.")
    mac: Mac = Field(description="MAC address of the VM in the provisioning network.")
    public: VmNetwork | None = Field(None, description="Address of the VM in the public network, if it has one.")
    memory_mb: int = Field(1024, ge=384, le=1 << 20, description="Memory, in MiB.")
    cpus: int = Field(1, ge=1, le=256, description="Number of CPUs.")
    disk_mb: int = Field(
        16384, ge=512, le=1 << 24, description="Disk for inventory, files and node images, in MiB; it is sparse."
    )
    directory: File | None = Field(None, description="Folder of its disks (default: vm/ in the state folder).")
    unknown: Literal["refuse", "discover"] = Field(
        "refuse", description="What to do with machines that are not in the inventory: refuse or discover them."
    )
    pool: Pool | None = Field(None, description="Addresses for machines that are not in the inventory.")
    database: File | None = Field(
        None, description="File with the URL of a PostgreSQL database, mode 0600 (default: SQLite on its own disk)."
    )
    profiles: dict[Name, Profile] = Field(
        {"compute": Profile()}, min_length=1, max_length=100, description="Images that nodes boot, by name."
    )
    files: tuple[MasterFile, ...] = Field((), max_length=2000, description="Additional master files of the site.")
    node_names: NamePattern = Field("node%03d", description="Pattern by which `sms node discover` names new nodes.")
    bmc: Bmc = Field(Bmc(), description="Access to the management controllers of nodes.")
