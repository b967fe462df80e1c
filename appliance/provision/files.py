"""Master copies of files: who has which, their versions, templates, manifests, and what clients say they have."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from sqlalchemy.engine import Connection

from appliance.provision.blobs import Blobs
from appliance.provision.config import Config
from appliance.provision.problem import HttpProblem, bad_request, conflict, not_found
from appliance.provision.store import Store
from appliance.provision.sync_tables import (
    COUNTERS,
    MASTERS,
    REPORTS,
    VERSIONS,
    Node,
    find_nodes,
    raise_counter,
    read_counter,
)

VERSIONS_KEPT = 5
MOST_MASTERS = 5000
LARGEST_B = 16 << 20
LARGEST_TEMPLATE_B = 1 << 20
SERVICES = "services"
"""The services container, among clients; nodes are told from it by ``node/``."""
_ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)


@dataclass(frozen=True)
class Client:
    """Who pulls: a node, or the services container."""

    node: Node
    services: bool = False

    @property
    def key(self) -> str:
        return SERVICES if self.services else f"node/{self.node.name}"


@dataclass(frozen=True)
class Master:
    """The version of a file that counts."""

    path: str
    version: int
    sha256: str
    size: int
    details: dict[str, Any]
    made: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "version": self.version,
            "sha256": self.sha256,
            "size": self.size,
            "made": self.made,
            **self.details,
        }

    def is_for(self, client: Client) -> bool:
        """Whether a client has it: all nodes do, where neither nodes nor groups are named."""
        if client.services:
            return bool(self.details["services"])
        nodes, groups = self.details["nodes"], self.details["groups"]
        if not nodes and not groups:
            return True
        return client.node.name in nodes or not set(groups).isdisjoint(client.node.groups)


@dataclass(frozen=True)
class View:
    """What one client is to have: its manifest's entries, and the contents that were made for it alone."""

    entries: tuple[dict[str, Any], ...]
    held: tuple[str, ...]
    """Paths whose template fails for it: it keeps what it has."""
    made: dict[str, bytes]


class Files:
    """The master files of a VM."""

    def __init__(self, store: Store, config: Config, blobs: Blobs) -> None:
        self.store, self.config, self.blobs = store, config, blobs
        self._masters: tuple[int, list[Master]] = (-1, [])
        self._views: dict[str, tuple[Any, View]] = {}
        self._seen: dict[str, float] = {}
        """When each client looked last, since this service runs; it reports only what it has got by then."""
        self._began = time.time()
        with store.read() as connection:
            self._heard = connection.execute(sa.select(sa.func.max(REPORTS.c.at))).scalar()
        """When this service runs since, and when it last heard any client before; None: never."""

    # What is there

    def masters(self, connection: Connection) -> list[Master]:
        """All that count, by path."""
        return self._current(connection)[1]

    def _current(self, connection: Connection) -> tuple[int, list[Master]]:
        """The generation, and what counts in it: the two belong together, whatever other threads read meanwhile."""
        generation = read_counter(connection, "files")
        known = self._masters
        if known[0] != generation:
            joined = sa.and_(VERSIONS.c.path == MASTERS.c.path, VERSIONS.c.version == MASTERS.c.version)
            rows = connection.execute(sa.select(VERSIONS).join(MASTERS, joined).order_by(VERSIONS.c.path))
            self._masters = known = generation, [_master(row) for row in rows]
        return known

    def generation(self, connection: Connection) -> int:
        """How many changes of masters there were, ever; 0 in a new database."""
        return read_counter(connection, "files")

    def show(self, path: str) -> dict[str, Any]:
        """A file with its versions, the newest first; 404 where it has none."""
        with self.store.read() as connection:
            current = connection.execute(sa.select(MASTERS.c.version).where(MASTERS.c.path == path)).scalar()
            query = sa.select(VERSIONS).where(VERSIONS.c.path == path).order_by(VERSIONS.c.version.desc())
            versions = [_master(row) for row in connection.execute(query)]
        if not versions:
            raise _no_file(path)
        return {"path": path, "current": current, "versions": [version.as_dict() for version in versions]}

    # Changes

    def put(self, path: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Make a content, which is there already, the newest version; the same once more is none."""
        details = {
            "mode": wanted.get("mode", "0644"),
            "owner": wanted.get("owner", "root"),
            "group": wanted.get("group", "root"),
            "template": wanted.get("template", False),
            "nodes": sorted(set(wanted.get("nodes", []))),
            "groups": sorted(set(wanted.get("groups", []))),
            "services": wanted.get("services", False),
            "origin": wanted.get("origin", "admin"),
        }
        data = self.blobs.read(wanted["sha256"])
        if data is None:
            raise conflict("its content is not there: send it first, to /sms/v1/blobs")
        if len(data) > (LARGEST_TEMPLATE_B if details["template"] else LARGEST_B):
            raise bad_request(f"{path} is too large for a file that all clients keep")
        with self.store.write() as connection:
            masters = {master.path: master for master in self.masters(connection)}
            master = Master(path, 0, wanted["sha256"], len(data), details, time.time())
            if details["template"]:
                self._try_template(connection, master, data)
            now = masters.get(path)
            if now and (now.sha256, now.details) == (master.sha256, details):
                return {**now.as_dict(), "changed": False}
            if now is None and len(masters) >= MOST_MASTERS:
                raise conflict(f"there are {MOST_MASTERS} files already")
            self._refuse_below(path, masters)
            version = self._add_version(connection, master)
        return {**master.as_dict(), "version": version, "changed": True}

    def remove(self, path: str) -> None:
        """Take a file from all its clients; its versions stay, for a rollback."""
        with self.store.write() as connection:
            if not connection.execute(MASTERS.delete().where(MASTERS.c.path == path)).rowcount:
                raise _no_file(path)
            raise_counter(connection, "files")

    def roll_back(self, path: str, version: int | None = None) -> dict[str, Any]:
        """Make an older version the one that counts: the last before, or the one named; a removed file's last one."""
        with self.store.write() as connection:
            current = connection.execute(sa.select(MASTERS.c.version).where(MASTERS.c.path == path)).scalar()
            query = sa.select(VERSIONS).where(VERSIONS.c.path == path).order_by(VERSIONS.c.version.desc())
            versions = [_master(row) for row in connection.execute(query)]
            if not versions:
                raise _no_file(path)
            older = [each for each in versions if current is None or each.version < current]
            found = next((each for each in versions if each.version == version), None) if version else None
            chosen = found if version else (older[0] if older else None)
            if chosen is None or self.blobs.read(chosen.sha256) is None:
                raise conflict(f"{path} has no such older version", hint=f"sms files show {path}")
            self._refuse_below(path, [master.path for master in self.masters(connection)])
            _set_current(connection, path, chosen.version)
            raise_counter(connection, "files")
        return chosen.as_dict()

    def _add_version(self, connection: Connection, master: Master) -> int:
        query = sa.select(VERSIONS.c.version).where(VERSIONS.c.path == master.path).order_by(VERSIONS.c.version)
        there = [row.version for row in connection.execute(query)]
        version = (there[-1] if there else 0) + 1
        row = {key: getattr(master, key) for key in ("path", "sha256", "size", "details", "made")}
        connection.execute(VERSIONS.insert().values(version=version, **row))
        for old in there[: max(0, len(there) + 1 - VERSIONS_KEPT)]:
            connection.execute(VERSIONS.delete().where(VERSIONS.c.path == master.path, VERSIONS.c.version == old))
        _set_current(connection, master.path, version)
        raise_counter(connection, "files")
        return version

    def _refuse_below(self, path: str, masters: Iterable[str]) -> None:
        for other in masters:
            if other.startswith(path + "/") or path.startswith(other + "/"):
                raise conflict(f"{path} and {other} cannot both be files")

    def prune(self) -> int:
        """Remove contents that no version names any more; how many."""
        with self.store.read() as connection:
            named = set(connection.execute(sa.select(VERSIONS.c.sha256)).scalars())
        return self.blobs.prune(named)

    # Manifests

    def client(self, connection: Connection, role: str, name: str) -> Client:
        """The client that a certificate stands for; 403 for a node that the inventory does not know any more."""
        if role == "services":
            own = self.config.services_hostname or SERVICES
            return Client(Node(own, self.config.services_address, ()), services=True)
        nodes = find_nodes(connection, name)
        if not nodes:
            raise HttpProblem(403, f"the inventory knows no node {name}", hint="sms node list")
        return Client(nodes[0])

    def view(self, connection: Connection, client: Client) -> View:
        """What a client is to have. Made anew only when masters, or what its templates see of it, have changed."""
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
        entries, held, made = [], [], {}
        for master in masters:
            digest, size = master.sha256, master.size
            if master.details["template"]:
                try:
                    data = self._render(self.blobs.read(digest), client)
                except (TemplateError, ArithmeticError, TypeError, ValueError):
                    held.append(master.path)
                    continue
                digest, size = hashlib.sha256(data).hexdigest(), len(data)
                made[digest] = data
            wanted = {key: master.details[key] for key in ("mode", "owner", "group")}
            entries.append({"path": master.path, "sha256": digest, "size": size, **wanted})
        return View(tuple(entries), tuple(held), made)

    def _render(self, source: bytes | None, client: Client) -> bytes:
        if source is None:
            raise ValueError("the template is not there")
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
            raise ValueError("what the template makes is too large")
        return text.encode()

    def _try_template(self, connection: Connection, master: Master, data: bytes) -> None:
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
        """A content of a client's own manifest; 404 for any other."""
        view = self.view(connection, client)
        if digest in view.made:
            return view.made[digest]
        if any(entry["sha256"] == digest for entry in view.entries):
            data = self.blobs.read(digest)
            if data is None:
                raise HttpProblem(500, "a content is lost or damaged", hint="sms files push brings it again")
            return data
        raise not_found("no file of yours has this content")

    # Who has what

    def note_look(self, client: Client) -> None:
        """Keep when a client looked last: from then on a push waits for it."""
        self._seen[client.key] = time.time()

    def report(self, connection: Connection, client: Client, body: dict[str, Any]) -> None:
        """Keep what a client says it has; what it said before is forgotten, but for since when it has a version."""
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

    def reports(self, connection: Connection) -> dict[str, Any]:
        """For each client: what it should have and has not, and when it was last heard."""
        clients = [self.client(connection, "services", ""), *map(Client, find_nodes(connection))]
        rows = {row.client: row for row in connection.execute(sa.select(REPORTS))}
        gone = [key for key in rows if key not in {client.key for client in clients}]
        reports = [self._told(connection, client, rows.get(client.key)) for client in clients]
        push = read_counter(connection, "push")
        return {"push": push, "began": self._began, "heard": self._heard, "clients": reports, "unknown": gone[:100]}

    def _told(self, connection: Connection, client: Client, row: Any) -> dict[str, Any]:
        view = self.view(connection, client)
        has = row.files if row else {}
        wanted = {entry["path"]: entry["sha256"] for entry in view.entries}
        return {
            "client": client.node.name if not client.services else SERVICES,
            "kind": SERVICES if client.services else "node",
            "at": row.at if row else None,
            "seen": max(row.at if row else 0.0, self._seen.get(client.key, 0.0)) or None,
            "push": row.push if row else 0,
            "has": {path: {"sha256": digest, "since": since} for path, (digest, since) in has.items()},
            "missing": sorted(path for path, digest in wanted.items() if has.get(path, [""])[0] != digest),
            "left": sorted(path for path in has if path not in wanted and path not in view.held),
            "held": sorted(view.held),
            "failed": row.failed if row else {},
        }

    def count_push(self) -> int:
        """One push more."""
        with self.store.write() as connection:
            return raise_counter(connection, "push")

    def last_push(self) -> int:
        with self.store.read() as connection:
            return connection.execute(sa.select(COUNTERS.c.value).where(COUNTERS.c.name == "push")).scalar() or 0


def _master(row: Any) -> Master:
    return Master(row.path, row.version, row.sha256, row.size, row.details, row.made)


def _set_current(connection: Connection, path: str, version: int) -> None:
    if not connection.execute(MASTERS.update().where(MASTERS.c.path == path).values(version=version)).rowcount:
        connection.execute(MASTERS.insert().values(path=path, version=version))


def _no_file(path: str) -> HttpProblem:
    return not_found(f"there is no master file {path}", hint="sms files list")
