"""Master copies of files: assignment to clients, versions, templates, manifests and the clients' reports."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import sqlalchemy as sa
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from sqlalchemy.engine import Connection

from appliance.provision.blobs import Blobs
from appliance.provision.config import Config
from appliance.provision.payloads import (
    ClientState,
    FileReport,
    FileReports,
    FileVersion,
    FileVersions,
    ManifestEntry,
    MasterFile,
)
from appliance.provision.problem import HttpProblem, bad_request, conflict, not_found
from appliance.provision.store import Store
from appliance.provision.sync_tables import (
    MASTERS,
    REPORTS,
    VERSIONS,
    Node,
    find_nodes,
    increment_counter,
    read_counter,
)
from appliance.shared.records import from_value

VERSIONS_KEPT = 5
MAX_MASTERS = 5000
LARGEST_B = 16 << 20
LARGEST_TEMPLATE_B = 1 << 20
SERVICES = "services"
"""The services container's client key; those of nodes begin with ``node/``."""
_ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


@dataclass(frozen=True)
class Client:
    """A client that pulls files: a node or the services container."""

    node: Node
    services: bool = False

    @property
    def key(self) -> str:
        return SERVICES if self.services else f"node/{self.node.name}"


@dataclass(frozen=True)
class Attributes:
    """How clients store a file, and which of them get it; the column ``details`` of its versions."""

    mode: str = "0644"
    owner: str = "root"
    group: str = "root"
    template: bool = False
    nodes: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    services: bool = False
    origin: str = "admin"


@dataclass(frozen=True)
class Master:
    """The current version of a file."""

    path: str
    version: int
    sha256: str
    size: int
    made: float
    attributes: Attributes

    def as_dict(self) -> FileVersion:
        """Return it with its attributes beside its other fields."""
        fields = asdict(self)
        attributes = fields.pop("attributes")
        return cast("FileVersion", {**fields, **attributes})

    def is_for(self, client: Client) -> bool:
        """Return whether a client gets it: all nodes do if neither nodes nor groups are given."""
        if client.services:
            return self.attributes.services
        nodes, groups = self.attributes.nodes, self.attributes.groups
        if not nodes and not groups:
            return True
        return client.node.name in nodes or not set(groups).isdisjoint(client.node.groups)


@dataclass(frozen=True)
class View:
    """The desired state of one client: its manifest's entries and the contents rendered for it."""

    entries: tuple[ManifestEntry, ...]
    held: tuple[str, ...]
    """Paths whose template fails for this client: it keeps its current files."""
    made: dict[str, bytes]


class Files:
    """The master files of a VM."""

    def __init__(self, store: Store, config: Config, blobs: Blobs) -> None:
        self.store, self.config, self.blobs = store, config, blobs
        self._masters: tuple[int, list[Master]] = (-1, [])
        self._views: dict[str, tuple[Any, View]] = {}
        self._last_polls: dict[str, float] = {}
        """Time of each client's last poll since this service started; clients report only after changes."""
        self._started_at = time.time()
        with store.read() as connection:
            self._last_report_at = connection.execute(sa.select(sa.func.max(REPORTS.c.at))).scalar()
        """Start of this service, and time of the last report before that; None: never."""

    # Queries

    def masters(self, connection: Connection) -> list[Master]:
        """Return the current master files, by path."""
        return self._current(connection)[1]

    def _current(self, connection: Connection) -> tuple[int, list[Master]]:
        """Return the generation and its master files as one consistent pair, also with concurrent readers."""
        generation = read_counter(connection, "files")
        known = self._masters
        if known[0] != generation:
            joined = sa.and_(VERSIONS.c.path == MASTERS.c.path, VERSIONS.c.version == MASTERS.c.version)
            rows = connection.execute(sa.select(VERSIONS).join(MASTERS, joined).order_by(VERSIONS.c.path))
            self._masters = known = generation, [_master(row) for row in rows]
        return known

    def show(self, path: str) -> FileVersions:
        """Return a file with its versions, newest first; 404 if it has none."""
        with self.store.read() as connection:
            current, versions = _versions(connection, path)
        return {"path": path, "current": current, "versions": [version.as_dict() for version in versions]}

    # Changes

    def put(self, path: str, spec: MasterFile) -> FileVersion:
        """Make an uploaded content the current version; no new version if nothing differs."""
        lists = {"nodes": sorted(set(spec.get("nodes", []))), "groups": sorted(set(spec.get("groups", [])))}
        attributes = from_value(Attributes, {**spec, **lists})
        data = self.blobs.read(spec["sha256"])
        if data is None:
            raise conflict("the content is missing: upload it to /sms/v1/blobs first")
        if len(data) > (LARGEST_TEMPLATE_B if attributes.template else LARGEST_B):
            raise bad_request(f"{path} is too large")
        with self.store.write() as connection:
            masters = {master.path: master for master in self.masters(connection)}
            master = Master(path, 0, spec["sha256"], len(data), time.time(), attributes)
            if attributes.template:
                self._check_template(connection, master, data)
            now = masters.get(path)
            if now and (now.sha256, now.attributes) == (master.sha256, attributes):
                return {**now.as_dict(), "changed": False}
            if now is None and len(masters) >= MAX_MASTERS:
                raise conflict(f"the limit of {MAX_MASTERS} files is reached")
            self._check_path_conflicts(path, masters)
            version = self._add_version(connection, master)
        return {**master.as_dict(), "version": version, "changed": True}

    def remove(self, path: str) -> None:
        """Remove a file from all its clients; its versions are kept for a rollback."""
        with self.store.write() as connection:
            if not connection.execute(MASTERS.delete().where(MASTERS.c.path == path)).rowcount:
                raise _no_file(path)
            increment_counter(connection, "files")

    def roll_back(self, path: str, version: int | None = None) -> FileVersion:
        """Make an older version current: the given or the previous one; for a removed file, its last one."""
        with self.store.write() as connection:
            current, versions = _versions(connection, path)
            older = [each for each in versions if current is None or each.version < current]
            found = next((each for each in versions if each.version == version), None) if version else None
            chosen = found if version else (older[0] if older else None)
            if chosen is None or self.blobs.read(chosen.sha256) is None:
                raise conflict(f"{path} has no such older version", hint=f"sms files show {path}")
            self._check_path_conflicts(path, [master.path for master in self.masters(connection)])
            _set_current(connection, path, chosen.version)
            increment_counter(connection, "files")
        return chosen.as_dict()

    def _add_version(self, connection: Connection, master: Master) -> int:
        query = sa.select(VERSIONS.c.version).where(VERSIONS.c.path == master.path).order_by(VERSIONS.c.version)
        there = [row.version for row in connection.execute(query)]
        version = (there[-1] if there else 0) + 1
        row = {key: getattr(master, key) for key in ("path", "sha256", "size", "made")}
        details = asdict(master.attributes)
        connection.execute(VERSIONS.insert().values(version=version, details=details, **row))
        for old in there[: max(0, len(there) + 1 - VERSIONS_KEPT)]:
            connection.execute(VERSIONS.delete().where(VERSIONS.c.path == master.path, VERSIONS.c.version == old))
        _set_current(connection, master.path, version)
        increment_counter(connection, "files")
        return version

    def _check_path_conflicts(self, path: str, masters: Iterable[str]) -> None:
        for other in masters:
            if other.startswith(path + "/") or path.startswith(other + "/"):
                raise conflict(f"{path} and {other} cannot both be files")

    def prune(self) -> int:
        """Remove contents that no version references; return how many."""
        with self.store.read() as connection:
            named = set(connection.execute(sa.select(VERSIONS.c.sha256)).scalars())
        return self.blobs.prune(named)

    # Manifests

    def client(self, connection: Connection, role: str, name: str) -> Client:
        """Return the client of a certificate; 403 for a node that is no longer in the inventory."""
        if role == "services":
            own = self.config.services_hostname or SERVICES
            return Client(Node(own, self.config.services_address, ()), services=True)
        nodes = find_nodes(connection, name)
        if not nodes:
            raise HttpProblem(403, f"the inventory has no node {name}", hint="sms node list")
        return Client(nodes[0])

    def view(self, connection: Connection, client: Client) -> View:
        """Return a client's desired state; rendered again only if master files or the template variables changed."""
        generation, masters = self._current(connection)
        stamp = (generation, client)
        kept = self._views.get(client.key)
        if kept and kept[0] == stamp:
            return kept[1]
        view = self._make_view(client, [master for master in masters if master.is_for(client)])
        if len(self._views) > 20000:
            self._views.clear()
        self._views[client.key] = (stamp, view)
        return view

    def _make_view(self, client: Client, masters: list[Master]) -> View:
        entries: list[ManifestEntry] = []
        held: list[str] = []
        made: dict[str, bytes] = {}
        for master in masters:
            digest, size = master.sha256, master.size
            if master.attributes.template:
                try:
                    data = self._render(self.blobs.read(digest), client)
                except (TemplateError, ArithmeticError, TypeError, ValueError):
                    held.append(master.path)
                    continue
                digest, size = hashlib.sha256(data).hexdigest(), len(data)
                made[digest] = data
            entries.append(
                {
                    "path": master.path,
                    "sha256": digest,
                    "size": size,
                    "mode": master.attributes.mode,
                    "owner": master.attributes.owner,
                    "group": master.attributes.group,
                }
            )
        return View(tuple(entries), tuple(held), made)

    def _render(self, source: bytes | None, client: Client) -> bytes:
        if source is None:
            raise ValueError("the template's content is missing")
        config = self.config
        text = _ENVIRONMENT.from_string(source.decode()).render(
            node={
                "name": client.node.name,
                "address": client.node.address,
                "groups": list(client.node.groups),
                "xname": client.node.xname,
                "profile": client.node.profile,
            },
            cluster=config.cluster,
            services={"address": config.services_address, "hostname": config.services_hostname},
            vm={"address": config.address, "hostname": config.hostname},
        )
        if len(text) > LARGEST_TEMPLATE_B:
            raise ValueError("the template's output is too large")
        return text.encode()

    def _check_template(self, connection: Connection, master: Master, data: bytes) -> None:
        clients = [Client(node) for node in find_nodes(connection)]
        clients += [self.client(connection, "services", "")]
        try:
            for client in [*clients, Client(Node("node0", "192.0.2.1", ()))]:
                if master.is_for(client):
                    self._render(data, client)
        except (TemplateError, ArithmeticError, TypeError, ValueError) as error:
            where = f" for {client.node.name}" if not isinstance(error, UnicodeDecodeError) else ""
            number = getattr(error, "lineno", None)
            line = f", line {number}" if number else ""
            raise bad_request(f"the template {master.path} fails{where}{line}: {error}") from error

    def content(self, connection: Connection, client: Client, digest: str) -> bytes:
        """Return a content of this client's manifest; 404 for any other."""
        view = self.view(connection, client)
        if digest in view.made:
            return view.made[digest]
        if any(entry["sha256"] == digest for entry in view.entries):
            data = self.blobs.read(digest)
            if data is None:
                raise HttpProblem(500, "the content is missing or damaged", hint="`sms files push` uploads it again")
            return data
        raise not_found("no file of this client has this content")

    # Reports

    def record_poll(self, client: Client) -> None:
        """Record the time of a client's poll: from then on a push waits for it."""
        self._last_polls[client.key] = time.time()

    def report(self, connection: Connection, client: Client, body: FileReport) -> None:
        """Store a client's report. It replaces the previous one; times of unchanged versions are kept."""
        row = connection.execute(sa.select(REPORTS).where(REPORTS.c.client == client.key)).first()
        before = row.files if row else {}
        now = time.time()
        files = {}
        for each in body["files"]:
            old = before.get(each["path"])
            since = old[1] if old and old[0] == each["sha256"] else now
            files[each["path"]] = [each["sha256"], since]
        values = {"push": body.get("push", 0), "files": files, "failed": body.get("failed", {}), "at": now}
        if row:
            connection.execute(REPORTS.update().where(REPORTS.c.client == client.key).values(**values))
        else:
            connection.execute(REPORTS.insert().values(client=client.key, **values))

    def reports(self, connection: Connection) -> FileReports:
        """Return for each client its missing files and the time of its last report."""
        clients = [self.client(connection, "services", ""), *map(Client, find_nodes(connection))]
        rows = {row.client: row for row in connection.execute(sa.select(REPORTS))}
        unknown = [key for key in rows if key not in {client.key for client in clients}]
        reports = [self._client_report(connection, client, rows.get(client.key)) for client in clients]
        push = read_counter(connection, "push")
        return {
            "push": push,
            "began": self._started_at,
            "heard": self._last_report_at,
            "clients": reports,
            "unknown": unknown[:100],
        }

    def _client_report(self, connection: Connection, client: Client, row: Any) -> ClientState:
        view = self.view(connection, client)
        has = row.files if row else {}
        wanted = {entry["path"]: entry["sha256"] for entry in view.entries}
        return {
            "client": client.node.name if not client.services else SERVICES,
            "kind": SERVICES if client.services else "node",
            "at": row.at if row else None,
            "seen": max(row.at if row else 0.0, self._last_polls.get(client.key, 0.0)) or None,
            "push": row.push if row else 0,
            "has": {path: {"sha256": digest, "since": since} for path, (digest, since) in has.items()},
            "missing": sorted(path for path, digest in wanted.items() if has.get(path, [""])[0] != digest),
            "left": sorted(path for path in has if path not in wanted and path not in view.held),
            "held": sorted(view.held),
            "failed": row.failed if row else {},
        }

    def count_push(self) -> int:
        """Increment and return the push counter."""
        with self.store.write() as connection:
            return increment_counter(connection, "push")


def _master(row: Any) -> Master:
    return Master(row.path, row.version, row.sha256, row.size, row.made, from_value(Attributes, row.details))


def _versions(connection: Connection, path: str) -> tuple[int | None, list[Master]]:
    """Return the current version's number, and all versions, newest first; 404 if there are none."""
    current = connection.execute(sa.select(MASTERS.c.version).where(MASTERS.c.path == path)).scalar()
    query = sa.select(VERSIONS).where(VERSIONS.c.path == path).order_by(VERSIONS.c.version.desc())
    versions = [_master(row) for row in connection.execute(query)]
    if not versions:
        raise _no_file(path)
    return current, versions


def _set_current(connection: Connection, path: str, version: int) -> None:
    if not connection.execute(MASTERS.update().where(MASTERS.c.path == path).values(version=version)).rowcount:
        connection.execute(MASTERS.insert().values(path=path, version=version))


def _no_file(path: str) -> HttpProblem:
    return not_found(f"there is no master file {path}", hint="sms files list")
