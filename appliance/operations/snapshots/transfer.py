"""Copy snapshots between stores: from one admin host to another, and to and from a Borg repository."""

from __future__ import annotations

import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.snapshots.list import Snapshot, check_request, store
from appliance.plan.snapshots.offsite import (
    BORG,
    archive_glob,
    archive_name,
    archive_time,
    comment,
    is_archive,
    not_kept,
    read_comment,
)
from appliance.progress import Progress
from appliance.shared.identity import Identity, uuid_of
from appliance.tools import agent, borg
from appliance.units import LARGEST_OVERLAY

EMPTY_REQUEST = struct.pack(">I", 0)
HEADER = struct.Struct(">4sIQ")
"""Header of a snapshot stream: magic, bytes of the manifest, bytes of the digests (agent/transfer.py)."""
MAX_CHUNKS = LARGEST_OVERLAY >> 16
"""Chunks of 64 KiB in the largest overlay."""
MAX_BYTES = {"a manifest": 1 << 18, "a list of digests": MAX_CHUNKS * 32, "a list of chunks": MAX_CHUNKS // 8}
"""Largest parts of a stream, in bytes: a host may be compromised."""
BLOCK = 1 << 18
"""Bytes relayed at a time."""


@dataclass(frozen=True)
class Sent:
    """A copied snapshot: its name at the target, whether it was present before, and the bytes that were stored."""

    name: str
    present: bool
    bytes: int


def send(cluster: Cluster, source: Host, number: int, target: Host, *, into: str = "") -> Sent:
    """Copy a snapshot from one host's store to another's: only missing chunks, all of them verified by the target.

    Args:
        into: the target's store, if not the cluster's.

    Raises:
        Busy, Refused, SmsError: it was not committed; chunks that have arrived are kept for the next attempt.
        Unreachable: a connection broke.
    """
    # Over SSH, compressing a chunk costs less than encrypting the bytes it saves.
    over_ssh = not (isinstance(source, Local) and isinstance(target, Local))
    import_request = {
        "store": into or store(cluster),
        "cluster": cluster.label,
        **check_request(cluster),
        "origin": source.name,
        "what": f"send snapshot {number} from {source.name} to {target.name}",
    }
    export_request = {"store": store(cluster), "snapshot": number, "compress": over_ssh}
    with (
        cluster.env.agents.open_session(source, "export", export_request) as exporter,
        cluster.env.agents.open_session(target, "import", import_request, cluster.env.progress) as importer,
    ):
        reply = relay_snapshot(exporter, importer)
    return _sent(reply)


def relay_snapshot(exporter: agent.Session, importer: agent.Session) -> dict[str, Any]:
    """Relay between an export and an import until both end; return the import's result.

    Raises:
        Busy, Refused, SmsError, Unreachable: the error of either.
    """
    _relay_offer(exporter, importer)
    answer = importer.read_exactly(len(EMPTY_REQUEST))
    (length,) = struct.unpack(">I", answer)
    _check_length("a list of chunks", length)
    exporter.write(answer)
    _relay_bytes(importer, exporter, length)
    exporter.end()
    try:
        while block := exporter.read():
            importer.write(block)
        exporter.outcome()
    except SmsError:
        # The import keeps what has arrived; its own error would only be the early end of the stream.
        with suppress(SmsError):
            importer.end()
            importer.outcome()
        raise
    importer.end()
    return importer.outcome()


def _sent(reply: dict[str, Any]) -> Sent:
    return Sent(str(reply["snapshot"]["number"]), reply["present"], reply["bytes"])


def estimate(cluster: Cluster, source: Host, number: int, target: Host) -> Sent:
    """Return what ``send`` would do; changes nothing.

    Raises:
        Refused, SmsError, Unreachable: as ``send``.
    """
    request = {"store": store(cluster), "cluster": cluster.label}
    with (
        cluster.env.agents.open_session(source, "export", {**request, "snapshot": number}) as exporter,
        cluster.env.agents.open_session(target, "estimate", request) as estimating,
    ):
        _relay_offer(exporter, estimating)
        exporter.write(EMPTY_REQUEST)
        exporter.end()
        exporter.outcome()
        estimating.end()
        reply = estimating.outcome()
    return Sent(str(reply["present"] or number), bool(reply["present"]), reply["bytes"])


def _relay_offer(exporter: agent.Session, importer: agent.Session) -> None:
    head = exporter.read_exactly(HEADER.size)
    _, manifest, digests = HEADER.unpack(head)
    _check_length("a manifest", manifest)
    _check_length("a list of digests", digests)
    importer.write(head)
    _relay_bytes(exporter, importer, manifest + digests)


def _check_length(what: str, length: int) -> None:
    if length > MAX_BYTES[what]:
        raise SmsError(
            f"a host announces {what} of {length} bytes, more than the limit of {MAX_BYTES[what]}",
            hint="is `sms` the same version on both sides?",
        )


def _relay_bytes(source: agent.Session, target: agent.Session, length: int) -> None:
    """Relay ``length`` bytes, a block at a time: memory does not grow with the announced length."""
    while length > 0:
        block = source.read_exactly(min(length, BLOCK))
        target.write(block)
        length -= len(block)


class Offsite:
    """The site's Borg repository, used from one host.

    ``ids``: of the archives that ``open`` has found, by name. ``foreign``: manifests of archives of other clusters of
    this name, which are neither restored nor removed.
    """

    def __init__(self, cluster: Cluster, host: Host, identity: Identity | None = None) -> None:
        """``identity``: of the cluster; without one, the archives of all clusters of this name count as its own."""
        settings = cluster.site.snapshots.borg
        if not settings:
            raise Refused("the site has no Borg repository", hint="set snapshots.borg in the site file")
        self.cluster = cluster
        self.host = host
        self.repository = borg.Repository(
            settings.repository,
            str(settings.passphrase),
            str(cluster.places.borg),
            str(settings.ssh_key) if settings.ssh_key else None,
            str(settings.known_hosts) if settings.known_hosts else None,
        )
        self.append_only = settings.append_only
        hosts = tuple(admin.name for admin in cluster.site.admin_hosts)
        self.identity = identity and replace(identity, hosts=hosts)
        self.foreign: list[Snapshot] = []
        self.exists = False
        self.ids: dict[str, str] = {}

    def lock_repository(self, stack: ExitStack) -> None:
        """Lock the repository against other runs of this host until ``stack`` ends.

        Raises:
            Busy: another run holds the lock.
        """
        lock = str(self.cluster.places.borg_lock)
        busy = f"another push or pull is at work on {self.host.name}"
        stack.enter_context(self.cluster.env.locks.hold(self.host, lock, busy))

    def open(self) -> list[tuple[Snapshot, float]]:
        """Return the manifests of its archives, each with borg's time; empty where there is no repository.

        Raises:
            Busy, Refused, SmsError, Unreachable: it cannot be used.
        """
        borg.check_ready(self.host, self.repository)
        cluster = self.cluster.label
        found = borg.list_archives(self.host, self.repository, f"sms-{cluster}-*")
        self.exists = found is not None
        self.ids = {one.name: one.id for one in found or []}
        ours = [one for one in found or [] if is_archive(one.name, cluster)]
        read = [(manifest, one.time) for one in ours if (manifest := read_comment(one.comment, one.name))]
        if self.identity is None:
            return read
        self.foreign = [manifest for manifest, _ in read if not self.identity.owns(manifest)]
        return [(manifest, at) for manifest, at in read if self.identity.owns(manifest)]

    def push(self, one: Snapshot, known: list[tuple[Snapshot, float]], progress: Progress) -> Sent:
        """Store a snapshot as an archive; the repository is created where there is none.

        Raises:
            Busy, Refused, SmsError, Unreachable: the archive was not created.
        """
        if not self.exists:
            with progress.step(f"create the repository {self.repository.url}"):
                borg.init(self.host, self.repository)
            self.exists = True
            progress.report(
                f"note: {self.repository.url} cannot be read without {self.repository.passphrase} and the key that it "
                "contains: keep copies of both outside of this cluster: sms overlay key export FILE"
            )
        what = f"push snapshot {one['number']} to {self.repository.url}"
        request = {"store": store(self.cluster), "snapshot": one["number"], "what": what}
        source = agent.argv(self.cluster.env.agents.install(self.host), "image", request)
        name = archive_name(one)
        archive = borg.NewArchive(name, comment(one), archive_time(one, known))
        stats = borg.create(self.host, self.repository, archive, source, progress)
        return Sent(name, False, stats["deduplicated_size"])

    def may_remove(self, one: Snapshot) -> bool:
        """Return whether an archive, of those that count as the cluster's own, certainly is: see ``Identity.owns``.

        A cluster without a UUID cannot tell those without one from another's, unless one of its hosts has taken them.
        """
        return bool(uuid_of(one)) or one["host"] in {admin.name for admin in self.cluster.site.admin_hosts}

    def select_removed(self, there: list[Snapshot]) -> list[Snapshot]:
        """Return the manifests of the archives that the site's retention does not keep, and that may be removed."""
        there = [one for one in there if self.may_remove(one)]
        return not_kept(there, self.cluster.site.retention, now=self.cluster.env.clock.time())

    def prune(self, there: list[Snapshot], progress: Progress, *, dry_run: bool = False) -> list[Snapshot]:
        """Remove the archives that the site's retention does not keep; return their manifests.

        Raises:
            Busy, Refused, SmsError, Unreachable: borg failed.
        """
        doomed = self.select_removed(there)
        if self.exists and not dry_run:
            with progress.step(f"prune {self.repository.url}") as step:
                # Checkpoints have no comment: only by the UUID in the name it is certain whose they are.
                glob = archive_glob(self.cluster.label, self.identity.uuid if self.identity else "")
                borg.remove(self.host, self.repository, glob, [archive_name(one) for one in doomed])
                step.detail(f"{len(doomed)} archive{'s' * (len(doomed) != 1)} removed")
        return doomed

    def pull(self, one: Snapshot, progress: Progress, *, into: str = "") -> Sent:
        """Extract a snapshot into the store of the host; it is committed once every digest is verified.

        Args:
            into: a store of the host, if not the cluster's.

        Raises:
            Busy, Refused, SmsError, Unreachable: it was not committed.
        """
        request = {
            "store": into or store(self.cluster),
            "cluster": self.cluster.label,
            "manifest": one,
            "argv": list(borg.extract_argv(self.repository, archive_name(one))),
            "program": BORG,
            **check_request(self.cluster),
            "origin": f"the repository, of {one['host']}",
            "what": f"pull {archive_name(one)}",
        }
        lines, agents = borg.LastLines(), self.cluster.env.agents
        with agents.open_session(self.host, "import_image", request, progress, on_line=lines.add) as conversation:
            conversation.end()
            try:
                reply = conversation.outcome()
            except SmsError as error:
                problem = conversation.reader.problem
                if problem and "program" in problem:
                    raise borg.error_of(self.host, self.repository, problem["program"], lines.found) from error
                raise
        return _sent(reply)
