"""Types of the bodies and responses of the VM's HTTP interface, as in ``definitions/provision/openapi.yaml``.

contract.py has validated a body before a route reads it. Keys that may be absent are read with ``get``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

Details = Mapping[str, object]
"""An object of a client that is stored and returned as it is."""


class Address(TypedDict):
    """Further address of an interface."""

    address: str
    network: NotRequired[str]


class Interface(TypedDict):
    """Interface of a node, of another component, or of none yet."""

    mac: str
    description: NotRequired[str]
    component: NotRequired[str]
    addresses: NotRequired[Sequence[str | Address]]


class Node(TypedDict, total=False):
    """Node. A response has all keys, an import at least ``name``, a change those that change."""

    name: str
    xname: str | None
    nid: int | None
    role: str
    subrole: str
    address: str | None
    macs: Sequence[str | Interface]
    interfaces: Sequence[Interface]
    groups: list[str]
    bmc: str
    profile: str
    enabled: bool
    state: str
    arch: str
    details: Details


class Group(TypedDict):
    """Group of nodes, in an export."""

    label: str
    description: NotRequired[str]
    exclusive: NotRequired[str]
    tags: NotRequired[list[str]]
    members: NotRequired[list[str]]


OtherComponent = TypedDict(
    "OtherComponent",
    {
        "id": str,
        "state": NotRequired[str],
        "flag": NotRequired[str],
        "enabled": NotRequired[bool],
        "class": NotRequired[str],
    },
)
"""Component that is not a node, in an export."""


class Endpoint(TypedDict):
    """Redfish service, in an export."""

    id: str
    fqdn: NotRequired[str]
    address: NotRequired[str]
    mac: NotRequired[str]
    enabled: NotRequired[bool]
    details: NotRequired[Details]


Boot = TypedDict(
    "Boot",
    {
        "scope": str,
        "key": str,
        "kernel": NotRequired[str],
        "initrd": NotRequired[str],
        "params": NotRequired[str],
        "cloud-init": NotRequired[Details | None],
    },
)
"""Boot parameters of one key, in an export."""


class Inventory(TypedDict, total=False):
    """The whole inventory, exported or to be imported."""

    nodes: list[Node]
    groups: list[Group]
    components: list[OtherComponent]
    interfaces: list[Interface]
    endpoints: list[Endpoint]
    boot: list[Boot]


BootParameters = TypedDict(
    "BootParameters",
    {
        "hosts": list[str] | None,
        "macs": list[str] | None,
        "nids": list[int] | list[str] | None,
        "groups": list[str] | None,
        "kernel": str,
        "initrd": str,
        "params": str,
        "cloud-init": Details | None,
    },
    total=False,
)
"""Boot parameters of several keys, in BSS's form."""


class SmdComponent(TypedDict, total=False):
    """Component in SMD's form. A change has those keys that change."""

    ID: str
    Type: str
    State: str
    Flag: str
    Enabled: bool
    SoftwareStatus: str
    Role: str
    SubRole: str
    NID: int | str
    Subtype: str
    NetType: str
    Arch: str
    Class: str


class SmdAddress(TypedDict):
    """Address of an interface in SMD's form."""

    IPAddress: str
    Network: NotRequired[str]


class SmdInterface(TypedDict, total=False):
    """Interface in SMD's form."""

    ID: str
    Description: str
    MACAddress: str
    ComponentID: str
    Type: str
    IPAddresses: list[SmdAddress] | None


class ShownInterface(TypedDict):
    """Interface in SMD's form, in a response."""

    ID: str
    Description: str
    MACAddress: str
    LastUpdate: str
    ComponentID: str
    Type: str
    IPAddresses: list[SmdAddress]


class FoundInterface(TypedDict, total=False):
    """Interface as magellan found it."""

    uri: str
    mac: str
    ip: str
    name: str
    description: str


class Found(TypedDict, total=False):
    """System or manager as magellan found it."""

    uri: str
    uuid: str
    name: str
    ethernet_interfaces: list[FoundInterface] | None


class SmdEndpoint(TypedDict, total=False):
    """Redfish service in SMD's form; with what magellan found there."""

    ID: str
    Type: str
    Name: str
    Hostname: str
    Domain: str
    FQDN: str
    Enabled: bool
    UUID: str
    User: str
    Password: str
    MACAddr: str
    IPAddress: str
    UseSSDP: bool
    MACRequired: bool
    RediscoverOnUpdate: bool
    TemplateID: str
    DiscoveryInfo: Details | None
    URI: str
    SchemaVersion: int
    Systems: list[Found] | None
    Managers: list[Found] | None


class MasterFile(TypedDict):
    """Attributes of a master file whose content has been uploaded."""

    sha256: str
    mode: NotRequired[str]
    owner: NotRequired[str]
    group: NotRequired[str]
    template: NotRequired[bool]
    services: NotRequired[bool]
    nodes: NotRequired[list[str]]
    groups: NotRequired[list[str]]
    origin: NotRequired[str]


class FileVersion(TypedDict):
    """Version of a master file, in a response. ``made``: Unix time; ``changed``: the response to PUT has it."""

    path: str
    version: int
    sha256: str
    size: int
    made: float
    mode: str
    owner: str
    group: str
    template: bool
    nodes: list[str]
    groups: list[str]
    services: bool
    origin: str
    changed: NotRequired[bool]


class FileVersions(TypedDict):
    """All versions of a master file, newest first; ``current`` is None for a removed file."""

    path: str
    current: int | None
    versions: list[FileVersion]


class StoredContent(TypedDict):
    """Whether the VM has the content of a digest; ``content``: in base64."""

    there: bool
    content: NotRequired[str]


class PushNumber(TypedDict):
    """Number of a push."""

    push: int


class Rollback(TypedDict):
    """Path of a file, and the version to make current; by default the previous one."""

    path: str
    version: NotRequired[int]


class ManifestEntry(TypedDict):
    """File that a client should have. ``sha256`` and ``size`` are those of its content, rendered for this client."""

    path: str
    sha256: str
    size: int
    mode: str
    owner: str
    group: str


class ReportedFile(TypedDict):
    """File that a client has."""

    path: str
    sha256: str


class FileReport(TypedDict):
    """Report of a client. ``push``: the last push that it knows; ``failed``: messages by path."""

    push: NotRequired[int]
    files: list[ReportedFile]
    failed: NotRequired[dict[str, str]]


class StoredFile(TypedDict):
    """File that a client has, and since when (Unix time)."""

    sha256: str
    since: float


class ClientState(TypedDict):
    """Last report of a client. ``at``: its time, ``seen``: that of the last contact; Unix time, None: never.

    ``missing``: paths that it lacks; ``left``: those that it should no longer have; ``held``: those that it keeps
    because their template fails.
    """

    client: str
    kind: str
    at: float | None
    seen: NotRequired[float | None]
    push: int
    has: dict[str, StoredFile]
    missing: list[str]
    left: list[str]
    held: list[str]
    failed: dict[str, str]


class FileReports(TypedDict):
    """Reports of all clients. ``began``: start of the service, ``heard``: last report before that; Unix time.

    ``waiting``: requests that wait for a push; ``now``: the VM's clock.
    """

    push: int
    began: NotRequired[float]
    heard: NotRequired[float | None]
    clients: list[ClientState]
    unknown: list[str]
    waiting: NotRequired[int]
    now: NotRequired[float]


class UnknownMachine(TypedDict):
    """Machine of no node that requested a boot script ``count`` times. ``last``: Unix time."""

    mac: str
    address: str
    count: int
    last: float


class ImageFile(TypedDict):
    """File of a node image."""

    sha256: str
    bytes: int


class PresentImage(TypedDict):
    """Upload of a node image. ``whole``: all of it is there; ``arrived``: bytes of each file."""

    whole: bool
    arrived: dict[str, int]


class StoredPart(TypedDict):
    """Part of a file that has arrived. ``bytes``: the file's size now."""

    bytes: int


class CurrentImage(TypedDict):
    """Node image that was made current; ``removed``: the digests of those that were removed."""

    removed: list[str]


class NodeImage(TypedDict):
    """Node image in the VM."""

    profile: str
    digest: str
    bytes: int
    current: bool
    previous: bool
    made: str
    kernel: str
    arguments: str
    groups: list[str]
    files: dict[str, ImageFile]


class EnrolRequest(TypedDict):
    """Request for a node's certificate: a signing request in PEM format, and its boot's token."""

    csr: str
    token: NotRequired[str]


class NodeCertificate(TypedDict):
    """Certificate that was issued to a node. ``issued``, ``ends``: Unix time; ``renewed``: not for a boot's token."""

    node: str
    serial: str
    fingerprint: str
    uuid: str
    address: str
    mac: str
    issued: float
    ends: float
    renewed: bool
    accepted: bool


class RefusedRequests(TypedDict):
    """Requests with a certificate of the site that is not accepted for this node. ``last``: Unix time."""

    node: str
    address: str
    reason: str
    count: int
    last: float


class CertificateLog(TypedDict):
    """Certificates issued to nodes and refused requests, latest first; ``now``: the VM's clock."""

    certificates: list[NodeCertificate]
    refused: list[RefusedRequests]
    now: float


class Problem(TypedDict):
    """Error in the form of RFC 7807. ``problems``: all errors of a body."""

    type: str
    title: str
    status: int
    detail: str
    hint: NotRequired[str]
    problems: NotRequired[list[str]]
