"""Snapshots between stores: from one admin host to another, into a Borg repository and back out of it."""

from __future__ import annotations

import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import only_one
from appliance.operations.snapshots.list import Snapshot, state_heads, state_paths, store
from appliance.plan.snapshots.offsite import archive_glob, archive_name, archive_time, comment, not_kept, read_comment
from appliance.progress import Progress
from appliance.tools import agent, borg

BORG = "borg"
"""The target that is no host."""
NOTHING = struct.pack(">I", 0)
HEAD = struct.Struct(">4sIQ")
"""What begins a snapshot on its way: a mark, bytes of the manifest, bytes of the digests (agent/transfer.py)."""
MOST_CHUNKS = 1 << 28
"""Of 64 KiB each, in the largest overlay that a site file allows (overlay.size_mb)."""
MOST = {"a manifest": 1 << 18, "a list of digests": MOST_CHUNKS * 32, "a list of what is wanted": MOST_CHUNKS // 8}
"""Bytes of what a host may say: it may be one that somebody else holds."""
BLOCK = 1 << 18
"""Bytes that are held at a time."""


@dataclass(frozen=True)
class Sent:
    """A snapshot that has gone somewhere: what it is there, whether it was there before, bytes that it took."""

    name: str
    present: bool
    bytes: int


def send(cluster: Cluster, source: Host, number: int, target: Host, progress: Progress) -> Sent:
    """Copy a snapshot from one host's store to another's: only chunks that are not there, all of them verified there.

    Raises:
        Busy, Refused, SmsError: why it does not count there; chunks that have come are kept for the next try.
        Unreachable: a connection broke.
    """
    # Over SSH, packing a chunk costs less than encrypting what it saves.
    over_ssh = not (isinstance(source, Local) and isinstance(target, Local))
    taking_in = {
        "store": store(cluster),
        "cluster": cluster.site.cluster,
        "state": state_paths(cluster),
        "heads": state_heads(cluster),
        "origin": source.name,
        "what": f"send snapshot {number} from {source.name} to {target.name}",
    }
    giving_out = {"store": store(cluster), "snapshot": number, "compress": over_ssh}
    with (
        agent.converse(source, "export", giving_out) as giving,
        agent.converse(target, "import", taking_in, progress) as taking,
    ):
        said = connect(giving, taking)
    return _sent(said)


def connect(giving: agent.Conversation, taking: agent.Conversation) -> dict[str, Any]:
    """Let an export and an import speak with each other to their end; give what the import says.

    Raises:
        Busy, Refused, SmsError, Unreachable: what either of them says went wrong.
    """
    _pass_offer(giving, taking)
    answer = taking.read_exactly(len(NOTHING))
    (length,) = struct.unpack(">I", answer)
    _check_length("a list of what is wanted", length)
    giving.write(answer)
    _pass_on(taking, giving, length)
    giving.end()
    try:
        while block := giving.read():
            taking.write(block)
        giving.outcome()
    except SmsError:
        # What has come it keeps, and finds its end by itself; its own words would be of that end.
        with suppress(SmsError):
            taking.end()
            taking.outcome()
        raise
    taking.end()
    return taking.outcome()


def _sent(said: dict[str, Any]) -> Sent:
    return Sent(str(said["snapshot"]["number"]), said["present"], said["bytes"])


def estimate(cluster: Cluster, source: Host, number: int, target: Host) -> Sent:
    """What ``send`` would do; changes nothing.

    Raises:
        Refused, SmsError, Unreachable: as ``send``.
    """
    request = {"store": store(cluster), "cluster": cluster.site.cluster}
    with (
        agent.converse(source, "export", {**request, "snapshot": number}) as giving,
        agent.converse(target, "estimate", request) as asking,
    ):
        _pass_offer(giving, asking)
        giving.write(NOTHING)
        giving.end()
        giving.outcome()
        asking.end()
        said = asking.outcome()
    return Sent(str(said["present"] or number), bool(said["present"]), said["bytes"])


def _pass_offer(giving: agent.Conversation, taking: agent.Conversation) -> None:
    head = giving.read_exactly(HEAD.size)
    _, manifest, digests = HEAD.unpack(head)
    _check_length("a manifest", manifest)
    _check_length("a list of digests", digests)
    taking.write(head)
    _pass_on(giving, taking, manifest + digests)


def _check_length(what: str, length: int) -> None:
    if length > MOST[what]:
        raise SmsError(
            f"a host says that {what} of {length} bytes comes: no snapshot has one of more than {MOST[what]}",
            hint="is `sms` the same version on both sides?",
        )


def _pass_on(one: agent.Conversation, other: agent.Conversation, length: int) -> None:
    """So many bytes, a block at a time: memory does not grow with what the other side says."""
    while length > 0:
        block = one.read_exactly(min(length, BLOCK))
        other.write(block)
        length -= len(block)


class Offsite:
    """The site's Borg repository, used from one admin host."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
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
        self.glob = archive_glob(cluster.site.cluster)
        self.exists = False

    def one_at_a_time(self, stack: ExitStack) -> None:
        """From now on, no other run of this host works on it.

        Raises:
            Busy: one does.
        """
        lock = str(self.cluster.places.borg_lock)
        stack.enter_context(only_one(self.host, lock, f"another push or pull is at work on {self.host.name}"))

    def open(self) -> list[tuple[Snapshot, float]]:
        """Manifests of what is in there, and the time that borg has for each; nothing where there is no repository.

        Raises:
            Busy, Refused, SmsError, Unreachable: it cannot be used.
        """
        borg.check_ready(self.host, self.repository)
        found = borg.list_archives(self.host, self.repository, self.glob)
        self.exists = found is not None
        told = [(read_comment(one.comment, one.name), one.time) for one in found or []]
        return [(manifest, at) for manifest, at in told if manifest]

    def push(self, one: Snapshot, known: list[tuple[Snapshot, float]], progress: Progress) -> Sent:
        """Put a snapshot into it; the repository is made where there is none.

        Raises:
            Busy, Refused, SmsError, Unreachable: why it is not in there.
        """
        if not self.exists:
            with progress.step(f"make the repository {self.repository.url}"):
                borg.make(self.host, self.repository)
            self.exists = True
            progress.say(
                f"note: who has {self.repository.url} needs {self.repository.passphrase} as well: keep a copy of it "
                "elsewhere, not on this cluster alone"
            )
        what = f"push snapshot {one['number']} to {self.repository.url}"
        request = {"store": store(self.cluster), "snapshot": one["number"], "what": what}
        source = agent.argv(agent.install(self.host), "image", request)
        name = archive_name(one)
        stats = borg.create(
            self.host,
            self.repository,
            name,
            source,
            progress,
            comment=comment(one),
            timestamp=archive_time(one, known),
        )
        return Sent(name, False, stats["deduplicated_size"])

    def prune(self, there: list[Snapshot], progress: Progress, *, dry_run: bool = False) -> list[Snapshot]:
        """Remove what the site's retention does not keep of those that are in it, by our own rule; say which.

        Raises:
            Busy, Refused, SmsError, Unreachable: as borg says.
        """
        going = not_kept(there, self.cluster.site.retention, now=time.time())
        if self.exists and not dry_run:
            with progress.step(f"prune {self.repository.url}") as step:
                borg.remove(self.host, self.repository, self.glob, [archive_name(one) for one in going])
                step.detail(f"{len(going)} archive{'s' * (len(going) != 1)} removed")
        return going

    def pull(self, one: Snapshot, progress: Progress) -> Sent:
        """Take a snapshot out of it, into the store of the host; it counts when every digest is right.

        Raises:
            Busy, Refused, SmsError, Unreachable: why it does not count.
        """
        request = {
            "store": store(self.cluster),
            "cluster": self.cluster.site.cluster,
            "manifest": one,
            "argv": list(borg.extract_argv(self.repository, archive_name(one))),
            "program": BORG,
            "state": state_paths(self.cluster),
            "heads": state_heads(self.cluster),
            "origin": f"the repository, of {one['host']}",
            "what": f"pull {archive_name(one)}",
        }
        lines: list[str] = []
        with agent.converse(self.host, "import_image", request, progress, on_line=lines.append) as talk:
            talk.end()
            try:
                said = talk.outcome()
            except SmsError as error:
                problem = talk.listener.problem
                if problem and "program" in problem:
                    raise borg.why(self.host, self.repository, problem["program"], lines) from error
                raise
        return _sent(said)
