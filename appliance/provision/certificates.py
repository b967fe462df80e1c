"""Certificates that this service issued to nodes: a log of all, and which of them is accepted."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from appliance.provision.payloads import NodeCertificate, RefusedRequests
from appliance.provision.problem import HttpProblem
from appliance.provision.store import Store
from appliance.provision.sync_tables import CERTIFICATES

KEPT_S = 400 * 86400
"""Seconds for which a certificate stays in the log after it has expired."""
MAX_REFUSED = 1000


@dataclass(frozen=True)
class Certificate:
    """A certificate of a node.

    ``fingerprint``: SHA-1 of its DER form in hex, as nginx computes it. A serial number alone would not do: a holder of
    the issuer's key can sign another certificate with the same one. ``uuid``: of the node's entry in the inventory;
    ``replaces``: fingerprint of the certificate that it renews, empty if it was issued for a token. ``issued``,
    ``ends``, ``used`` (first request with it): Unix time.
    """

    fingerprint: str
    serial: str
    uuid: str
    node: str
    address: str
    mac: str
    issued: float
    ends: float
    replaces: str = ""
    used: float | None = None


class RevokedSerials:
    """The list of revoked certificates that the admin host installs: lines ``SERIAL 1;``; read again after a change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[tuple[int, int, int] | None, frozenset[str]] = (None, frozenset())

    def serials(self) -> frozenset[str]:
        """Return the serial numbers in hex, in upper case; HttpProblem 503 if the list cannot be read."""
        try:
            found = self.path.stat()
            stamp = found.st_ino, found.st_ctime_ns, found.st_size
            if stamp != self._read[0]:
                lines = self.path.read_text().splitlines()
                self._read = stamp, frozenset(line.partition(" ")[0].upper() for line in lines)
        except FileNotFoundError:
            return frozenset()  # an older admin host started the VM
        except (OSError, ValueError) as error:
            raise HttpProblem(503, "the list of revoked certificates cannot be read") from error
        return self._read[1]


class Certificates:
    """The certificates of a store. Of each node only the newest is accepted.

    Until a renewed certificate is used for the first time, the one that it replaces is accepted too: the response may
    have been lost.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store, self.clock = store, clock
        self._accepted: dict[str, list[Certificate]] = {}
        self._refused: OrderedDict[tuple[str, str, str], RefusedRequests] = OrderedDict()
        self._lock = threading.Lock()
        query = sa.select(CERTIFICATES).where(CERTIFICATES.c.ends > clock()).order_by(CERTIFICATES.c.issued)
        with store.read() as connection:
            for row in connection.execute(query).mappings():
                self._accept(Certificate(**row))

    def _accept(self, new: Certificate) -> None:
        known = self._accepted.get(new.uuid, []) if new.replaces and new.used is None else []
        self._accepted[new.uuid] = [new, *(each for each in known if each.fingerprint == new.replaces)]

    def add(self, new: Certificate) -> Certificate | None:
        """Record a certificate before it is sent. Return the valid one that it supersedes, if there is one."""
        now = self.clock()
        with self.store.write() as connection:
            connection.execute(CERTIFICATES.delete().where(CERTIFICATES.c.ends < now - KEPT_S))
            connection.execute(CERTIFICATES.insert().values(**asdict(new)))
        with self._lock:
            before = self._accepted.get(new.uuid)
            self._accept(new)
        return before[0] if before and before[0].ends > now else None

    def find(self, uuid: str, fingerprint: str) -> Certificate | None:
        """Return the certificate if it is accepted for this node."""
        found = (each for each in self._accepted.get(uuid, ()) if each.fingerprint == fingerprint)
        return next(found, None)

    def is_first_use(self, certificate: Certificate) -> bool:
        """Return whether ``record_use`` must record that a renewed certificate has arrived."""
        return bool(certificate.replaces) and certificate.used is None

    def record_use(self, certificate: Certificate) -> None:
        """Record the first request with a renewed certificate: from now on the previous one is refused."""
        used = replace(certificate, used=self.clock())
        where = CERTIFICATES.c.fingerprint == certificate.fingerprint
        with self.store.write() as connection:
            connection.execute(CERTIFICATES.update().where(where).values(used=used.used))
        with self._lock:
            known = self._accepted.get(certificate.uuid)
            if known and known[0].fingerprint == certificate.fingerprint:
                self._accepted[certificate.uuid] = [used]

    def refuse(self, node: str, address: str, why: str) -> bool:
        """Count a refused request. Return whether it is the first of this node, address and reason."""
        key = node, address, why
        with self._lock:
            before = self._refused.pop(key, None)
            count = before["count"] + 1 if before else 1
            self._refused[key] = {"node": node, "address": address, "reason": why, "count": count, "last": self.clock()}
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        return before is None

    def refused(self, node: str = "") -> list[RefusedRequests]:
        """Return the refused requests since the start of this service, latest first; of one node if it is named."""
        with self._lock:
            return [each for each in reversed(self._refused.values()) if node in ("", each["node"])]

    def log(self, node: str = "") -> list[NodeCertificate]:
        """Return the issued certificates, latest first; of one node if it is named."""
        query = sa.select(CERTIFICATES).order_by(CERTIFICATES.c.issued.desc())
        if node:
            query = query.where(CERTIFICATES.c.node == node)
        with self.store.read() as connection:
            found = [Certificate(**row) for row in connection.execute(query).mappings()]
        now = self.clock()
        return [
            {
                "node": each.node,
                "serial": each.serial,
                "fingerprint": each.fingerprint,
                "uuid": each.uuid,
                "address": each.address,
                "mac": each.mac,
                "issued": each.issued,
                "ends": each.ends,
                "renewed": bool(each.replaces),
                "accepted": each.ends > now and self.find(each.uuid, each.fingerprint) is not None,
            }
            for each in found
        ]
