"""The Borg repository itself: ``sms overlay prune --at borg``, ``sms overlay key``, and its check."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster, need_root
from appliance.operations.snapshots.list import Snapshot, describe_foreign, foreign_note, list_snapshots
from appliance.operations.snapshots.transfer import Offsite
from appliance.plan.snapshots.offsite import KeyNote, KnownArchives, archive_name, find_vanished
from appliance.shared.identity import Identity, assume, uuid_of
from appliance.shared.records import RecordError, from_json, to_json
from appliance.shared.secret import SecretInput
from appliance.tools import borg

MOST_NAMED = 5
"""Names in a message."""
KEY_START = b"BORG_KEY "


@dataclass(frozen=True)
class PrunedRepository:
    """Names of the cluster's archives in the repository, oldest first; ``removed`` would be, in a dry run."""

    repository: str
    kept: tuple[str, ...]
    removed: tuple[str, ...]


def pruning_host(cluster: Cluster, name: str | None) -> Host:
    """Return the admin host of that name, else this machine, which need not be one.

    Raises:
        ConfigError: no admin host has that name.
        Refused: this process is not root.
    """
    if name:
        return cluster.target(name)
    need_root()
    return cluster.env.hosts.this


def prune_repository(
    cluster: Cluster, host: Host, *, dry_run: bool = False, cluster_uuid: str = ""
) -> PrunedRepository:
    """Remove the archives that the site's retention does not keep, from a machine whose key may remove.

    A key that may only append can hide archives, and compaction would then remove them for good. So where the site
    file says that admin hosts have such a key, the archives that a run leaves are recorded on ``host``, and the next
    one is refused if one of them is missing or was replaced.

    Args:
        cluster_uuid: the beginning of the cluster's UUID, if ``host`` does not know it and the repository has several.

    Raises:
        Refused: it is not known which cluster is this one, archives have vanished, the key may only append, or there is
            no repository.
        Busy, SmsError, Unreachable: borg failed.
    """
    offsite = Offsite(cluster, host)
    with ExitStack() as stack:
        if not dry_run:
            offsite.lock_repository(stack)
        every = [manifest for manifest, _ in offsite.open()]
        url = offsite.repository.url
        if not offsite.exists:
            raise Refused(f"there is no repository {url}", hint="is its disk mounted?")
        known = _read_known(host, str(cluster.places.borg_archives)) if offsite.append_only else KnownArchives()
        _check_vanished(cluster, host, offsite, known)
        offsite.identity = identity = _identify(cluster, host, every, known, cluster_uuid)
        there = [one for one in every if identity.owns(one) and offsite.may_remove(one)]
        if note := foreign_note([one for one in every if one not in there], url):
            cluster.env.progress.report(note)
        if not dry_run and not borg.compact(host, offsite.repository):
            raise Refused(
                f"{host.name} may only append to {url}: nothing can be removed with its key",
                hint="prune it from a machine with another key: docs/snapshots-elsewhere.md",
            )
        doomed = {archive_name(one) for one in offsite.select_removed(there)}
        kept = {name: offsite.ids[name] for name in map(archive_name, there) if name not in doomed}
        if not dry_run:
            if offsite.append_only:
                # Before they are removed: a run that is killed meanwhile has not lost them.
                host.write(str(cluster.places.borg_archives), to_json(KnownArchives(kept, identity.uuid)), mode=0o600)
            offsite.prune(there, cluster.env.progress)
    return PrunedRepository(url, _names(there, kept), _names(there, doomed))


def _names(there: list[Snapshot], chosen: set[str] | dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name in map(archive_name, there) if name in chosen)


def _identify(cluster: Cluster, host: Host, every: list[Snapshot], known: KnownArchives, chosen: str = "") -> Identity:
    """Return the identity of the cluster: of its lease, else of the last prune, else of all archives if it is only one.

    Args:
        chosen: the beginning of its UUID, or empty.

    Raises:
        Refused: there are archives of several clusters, and it is not known which is this one; or it is not ``chosen``.
    """
    recorded = list_snapshots(cluster, host).identity
    of_known = [one for one in every if known.cluster_uuid in ("", uuid_of(one)) and uuid_of(one).startswith(chosen)]
    identity = replace(assume(recorded, of_known), hosts=tuple(admin.name for admin in cluster.site.admin_hosts))
    named = [one for one in every if uuid_of(one)]
    own = recorded.uuid or known.cluster_uuid
    if chosen and own and not own.startswith(chosen):
        raise Refused(f"{host.name} prunes the archives of cluster {own}, not of {chosen}", hint="leave --uuid out")
    if named and not identity.uuid:
        raise Refused(
            f"the repository has archives of {describe_foreign(named)}, and {host.name} does not know which "
            f"{'of them begins with ' + chosen if chosen else 'cluster is this one'}",
            hint="`sms overlay prune --at borg --uuid UUID` names it; `sms overlay identity` on an admin host shows it",
        )
    return identity


def _check_vanished(cluster: Cluster, host: Host, offsite: Offsite, known: KnownArchives) -> None:
    path = str(cluster.places.borg_archives)
    vanished = find_vanished(known, offsite.ids)
    if vanished:
        more = f" and {len(vanished) - MOST_NAMED} more" if len(vanished) > MOST_NAMED else ""
        raise Refused(
            f"archives of {offsite.repository.url} are missing or were replaced since {host.name} last pruned it: "
            f"{', '.join(vanished[:MOST_NAMED])}{more}; nothing is removed, because that would be final",
            hint="who has removed them? docs/snapshots-elsewhere.md shows how to get them back; if it was intended, "
            f"remove {path} on {host.name}",
        )


def _read_known(host: Host, path: str) -> KnownArchives:
    data = host.read(path)
    try:
        return from_json(KnownArchives, data) if data is not None else KnownArchives()
    except RecordError as error:
        raise SmsError(
            f"{host.name}: {path} cannot be read: {error}",
            hint="compare `sms overlay pull --from borg --list` with what must be there, then remove the file",
        ) from error


def check_repository(cluster: Cluster, host: Host) -> str:
    """Check the repository with ``borg check``; return what was checked.

    Raises:
        Busy, Refused, SmsError, Unreachable: it is damaged, or cannot be checked.
    """
    offsite = Offsite(cluster, host)
    with ExitStack() as stack:
        offsite.lock_repository(stack)
        count = len(offsite.open())
        borg.check(host, offsite.repository)
    return f"{offsite.repository.url}: {count} archives"


@dataclass(frozen=True)
class KeyCopy:
    """A copy of the repository's key; ``written``: by this run."""

    repository: str
    path: str
    written: bool


def export_key(cluster: Cluster, host: Host, path: Path) -> KeyCopy:
    """Write the repository's key to a new file of this machine, mode 0600.

    Raises:
        Refused: the file has other content; it is never replaced.
        Busy, SmsError, Unreachable: borg failed.
    """
    offsite = Offsite(cluster, host)
    key = query_key(host, offsite)
    written = not path.exists()
    if written:
        Local().write(str(path), SecretInput(key), mode=0o600)
    return _compare(cluster, host, offsite, key, path, written=written)


def check_key(cluster: Cluster, host: Host, path: Path) -> KeyCopy:
    """Compare a file of this machine with the repository's key.

    Raises:
        Refused: it is not the key, or cannot be read.
        Busy, SmsError, Unreachable: borg failed.
    """
    offsite = Offsite(cluster, host)
    return _compare(cluster, host, offsite, query_key(host, offsite), path, written=False)


def query_key(host: Host, offsite: Offsite) -> bytes:
    """Return the repository's key, encrypted with the passphrase.

    Raises:
        Busy, Refused, SmsError, Unreachable: borg failed, or the passphrase does not open the repository.
    """
    # `key export` needs no passphrase; a listing shows that key and passphrase open the repository.
    offsite.open()
    if not offsite.exists:
        raise Refused(
            f"there is no repository {offsite.repository.url}", hint="`sms overlay push --to borg` creates it"
        )
    key = borg.export_key(host, offsite.repository)
    if not key.startswith(KEY_START):
        raise SmsError(f"{host.name}: borg exports no key of {offsite.repository.url}")
    return key


def _compare(cluster: Cluster, host: Host, offsite: Offsite, key: bytes, path: Path, *, written: bool) -> KeyCopy:
    try:
        there = path.read_bytes()
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", hint=f"sms overlay key export {path}") from error
    if there.split() != key.split():
        same = there.split()[:2] == key.split()[:2]
        why = "an earlier key of it: was its passphrase changed?" if same else "not its key"
        raise Refused(
            f"{path} is not the key of {offsite.repository.url}, but {why}",
            hint="export it to another file: sms overlay key export FILE",
        )
    note = KeyNote(_digest(key), str(path.absolute()), round(cluster.env.clock.time(), 3))
    host.write(str(cluster.places.borg_key_note), to_json(note), mode=0o600)
    return KeyCopy(offsite.repository.url, str(path), written)


def _digest(key: bytes) -> str:
    return hashlib.sha256(b" ".join(key.split())).hexdigest()


def warn_about_key(cluster: Cluster, host: Host) -> str:
    """Return a warning where no copy of the repository's key is known on the host; else an empty string.

    Raises:
        Busy, Refused, SmsError, Unreachable: borg failed.
    """
    offsite = Offsite(cluster, host)
    digest = _digest(query_key(host, offsite))
    try:
        data = host.read(str(cluster.places.borg_key_note))
        note = from_json(KeyNote, data) if data else None
    except RecordError:
        note = None
    if note and note.sha256 == digest:
        return ""
    what = f"is not the one in {PurePosixPath(note.path)}" if note else "was never exported"
    return f"the key of {offsite.repository.url} {what}: `sms overlay key export FILE`, and keep FILE elsewhere"
