"""A move of the services' state between the services container and an engine: its record, its checks. Pure.

The lease decides who may write the state: an admin host has it for the services container, ``engine:NAME`` for an
engine. A move changes the lease once, when the target has a verified copy. Before that the source may be started
again, and the next run begins with a new copy; after that only the target may be started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.catalog import Service
from appliance.errors import Refused, SmsError
from appliance.plan.services.controllers import CONTAINER
from appliance.shared.lease import Lease
from appliance.shared.records import RecordError, from_json, from_value

STOPPING = "stopping"
"""The source is being stopped. Its state is the only one."""
COPYING = "copying"
"""The source has stopped, and its state is being copied. The source's is the only one that counts."""
COMMITTING = "committing"
"""The target has a verified copy; the lease is being changed. The lease shows which one counts."""
STARTING = "starting"
"""The lease is the target's, which is being started."""
DONE = "done"
RETURNED = "returned"
"""A step before the lease was changed failed, and the source was started again."""

ENDED = (DONE, RETURNED)
RELEASES = {"20.11": 36, "21.08": 37, "22.05": 38, "23.02": 39, "23.11": 40}
"""High byte of the version in the heads of Slurm's state files (src/common/slurm_protocol_common.h), by release."""
HALF_YEARLY = 41
"""That of 24.05; one more each half year since."""


@dataclass(frozen=True)
class StateMove:
    """Record of a move, on the admin host that runs it.

    Attributes:
        began: Unix time.
        generation: of the lease that the target has, or is to have.
        files, bytes, digest: of the copy.
        parts: durations in seconds.
    """

    cluster: str
    phase: str
    source: str
    target: str
    began: float
    generation: int = 0
    files: int = 0
    bytes: int = 0
    digest: str = ""
    why: str = ""
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it is finished or was undone."""
        return self.phase in ENDED

    def at(self, phase: str, **changes: Any) -> StateMove:
        """Return a copy in ``phase``."""
        return replace(self, phase=phase, **changes)


def read_state_move(data: bytes | None, cluster: str) -> StateMove | None:
    """Return the record of the last move; None if there was none.

    Raises:
        SmsError: it is invalid, or belongs to another cluster.
    """
    if data is None:
        return None
    try:
        found = from_json(StateMove, data)
    except RecordError as error:
        raise SmsError(
            f"the record of the last move of the state is invalid: {error}",
            hint="`sms status` shows who has the lease; then remove it",
        ) from error
    if found.cluster != cluster:
        raise SmsError(
            f"the record of the last move of the state belongs to cluster {found.cluster}",
            hint="do two clusters share a state folder?",
        )
    return found


def describe_interrupted(last: StateMove | None, lease: Lease, host: str) -> str:
    """Return what a move left unfinished on a host whose services container does not run; empty if nothing.

    Args:
        lease: as the host has it.
    """
    if last is None or last.ended:
        return ""
    again = f"`sms migrate --to {last.target}` goes on"
    if last.generation and last.generation == lease.generation:
        # An engine shows itself whether its services run.
        return (
            "" if lease.engine else f"a move of the services from {last.source} was interrupted after its copy; {again}"
        )
    if last.generation and last.generation < lease.generation:
        return ""  # others had the services since
    if lease.engine:
        back = f"`sms migrate --to {last.source}` starts them there" if lease.engine == last.source else ""
    else:
        back = "`sms start` starts them here" if lease.holder == host and last.source == CONTAINER else ""
    what = f"a move of the services from {last.source} to {last.target} is under way or was interrupted ({last.phase})"
    return f"{what}; {again}, {back}" if back else ""


@dataclass(frozen=True)
class Tree:
    """The state of services at one place.

    Attributes:
        files, bytes: number of entries, and size of their contents.
        digest: of all entries with owner, mode and content; empty if they were not read.
        slurm: version in the heads of Slurm's files; 0 if there are none.
        mariadb: version of the server that wrote the database, such as 10.11; empty if there is none.
        clustername: of Slurm's state, with the cluster's id where that Slurm has one.
        entries: each with kind, mode, owner, group, size and digest or target.
    """

    files: int = 0
    bytes: int = 0
    digest: str = ""
    slurm: int = 0
    mariadb: str = ""
    clustername: str = ""
    entries: dict[str, list[Any]] = field(default_factory=dict)


def read_tree(value: Any) -> Tree:
    """Return the state in the output of ``state-tree``.

    Raises:
        SmsError: it is not such an output: a program of an engine wrote it.
    """
    try:
        return from_value(Tree, value)
    except RecordError as error:
        raise SmsError(f"the state could not be read: {error}") from error


def compare_trees(source: Tree, target: Tree) -> None:
    """Check that a copy is complete.

    Raises:
        SmsError: it differs; the message has the first differences.
    """
    if source.entries == target.entries and source.digest == target.digest:
        return
    names = sorted(
        name for name in {*source.entries, *target.entries} if source.entries.get(name) != target.entries.get(name)
    )
    shown = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    raise SmsError(f"the copy of the state differs from the original in {len(names)} files: {shown}")


@dataclass(frozen=True)
class Versions:
    """Versions of the programs in an image, such as 22.05 and 10.11; empty where the image lacks the program."""

    slurm: str = ""
    mariadb: str = ""


def read_versions(output: str) -> Versions:
    """Return the versions in the output of ``slurmctld -V`` and ``mariadbd --version``."""
    slurm = re.search(r"^slurm(?:-wlm)? (\d+\.\d+)", output, re.MULTILINE)
    mariadb = re.search(r"Ver (\d+\.\d+)\.\d+-MariaDB", output)
    return Versions(slurm[1] if slurm else "", mariadb[1] if mariadb else "")


def state_version(release: str) -> int:
    """Return the version that a release of Slurm writes into its state; 0 if the release is not known."""
    if release in RELEASES:
        return RELEASES[release] << 8
    match = re.fullmatch(r"(\d\d)\.(05|11)", release)
    if not match or int(match[1]) < 24:
        return 0
    return HALF_YEARLY + 2 * (int(match[1]) - 24) + (match[2] == "11") << 8


def release_of(version: int) -> str:
    """Return the release that writes this version into its state, as text for a message."""
    high = version >> 8
    for release, number in RELEASES.items():
        if number == high:
            return release
    if high < HALF_YEARLY:
        return f"of version {version}"
    year, half = divmod(high - HALF_YEARLY, 2)
    return f"{24 + year}.{'11' if half else '05'}"


def oldest_read(version: int) -> int:
    """Return the oldest state version that the release with this one reads.

    That of two releases before it, since 24.11 of three (Slurm's upgrade guide).
    """
    return version - ((3 if version >= state_version("24.11") else 2) << 8)


def refuse_newer(tree: Tree, image: Versions, where: str) -> None:
    """Check that the programs of an image can read a state: none reads what a newer version wrote.

    Raises:
        Refused: they cannot, or the version of Slurm is not known.
    """
    hint = "upgrade the image there first (`sms build`), or move the services to where the newer image is"
    if tree.slurm:
        known = state_version(image.slurm)
        if not known:
            raise Refused(f"the version of Slurm in the image of {where} is not known: {image.slurm!r}", hint=hint)
        if tree.slurm > known:
            raise Refused(
                f"Slurm {release_of(tree.slurm)} wrote the state, and the image of {where} has {image.slurm}", hint=hint
            )
    if tree.mariadb and (not image.mariadb or _number(tree.mariadb) > _number(image.mariadb)):
        has = f"has {image.mariadb}" if image.mariadb else "has none"
        raise Refused(f"MariaDB {tree.mariadb} wrote the database, and the image of {where} {has}", hint=hint)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def check_identity(tree: Tree, cluster: str, databases: Sequence[str] | None) -> None:
    """Check that state and database are those of the cluster: slurmctld stops where they are not.

    Args:
        databases: clusters in the database, as NAME or NAME|ID; None if there is none.

    Raises:
        Refused: they are another cluster's.
    """
    name, _, number = tree.clustername.partition("|")
    if name and name != cluster:
        raise Refused(f"the state is of cluster {name}, not {cluster}", hint="is this the site file of that cluster?")
    if databases is None:
        return
    known = dict(one.partition("|")[::2] for one in databases)
    if cluster not in known:
        raise Refused(
            f"the database does not have cluster {cluster}",
            hint="slurmctld registers it: wait until `sacctmgr list cluster` shows it",
        )
    if number and known[cluster] and number != known[cluster]:
        raise Refused(
            f"the state has ClusterID {number} and the database {known[cluster]}",
            hint="state and database are not of the same cluster: restore both from one snapshot",
        )


def moved_paths(services: Sequence[Service]) -> tuple[str, ...]:
    """Return the paths of the state that moves with services: not what an engine makes at each start."""
    found = {
        path
        for one in services
        if one.engines.place == "one"
        for path in one.state
        if not path.startswith("/etc/") and path not in one.engines.scratch
    }
    return tuple(sorted(found))


@dataclass(frozen=True)
class MovePlan:
    """What a move will do.

    Attributes:
        paths: of the state.
        files, bytes: of the state now.
        free_bytes: at the target; -1 if that is not known.
        slurm, mariadb: versions of the programs in the target's image.
        left: services that do not run while an engine has the others, and why.
        predicted_s: outage; ``measured``: of how many moves that is the median.
        resumes: the state is there already; the target is only started.
        stays: services that run on in the services container, on this admin host.
    """

    source: str
    target: str
    paths: tuple[str, ...]
    files: int
    bytes: int
    free_bytes: int
    slurm: str
    mariadb: str
    left: dict[str, str]
    predicted_s: float
    measured: int = 0
    resumes: bool = False
    stays: tuple[str, ...] = ()


@dataclass
class MoveResult:
    """What a move did. Times in seconds; ``outage_s``: from the stop until every service was ready.

    ``same``: the target had the services already, nothing was done.
    """

    source: str
    target: str
    generation: int
    files: int = 0
    bytes: int = 0
    same: bool = False
    resumed: bool = False
    outage_s: float = 0.0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
