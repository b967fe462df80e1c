"""Parser of users and groups from passwd, group and shadow lines of any source; comparison with earlier ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from appliance.errors import Problem

PASSWD, GROUP, SHADOW = "/etc/passwd", "/etc/group", "/etc/shadow"
UID_MIN, UID_MAX = 1000, 2_000_000_000
RESERVED = {65534, 65535, 2**32 - 1}
"""nobody, and values that mean "no id"."""
MOST_LINES = 200_000
MOST_PROBLEMS = 20
MOST_REMOVED = 10
"""Percentage of the users or groups that may be removed at once."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.@+-]{0,63}\Z")
_NUMBER = re.compile(r"[0-9]{1,10}\Z")
_PATH = re.compile(r"(/[A-Za-z0-9_.@+,~ -]{0,200}){1,20}\Z")
_HASH = re.compile(r"[A-Za-z0-9./$!*,=+_-]{0,512}\Z")


@dataclass(frozen=True)
class User:
    """A line of passwd, without a password."""

    name: str
    uid: int
    gid: int
    gecos: str
    home: str
    shell: str

    def line(self) -> str:
        return f"{self.name}:x:{self.uid}:{self.gid}:{self.gecos}:{self.home}:{self.shell}"


@dataclass(frozen=True)
class Group:
    """A line of group."""

    name: str
    gid: int
    members: tuple[str, ...]

    def line(self) -> str:
        return f"{self.name}:x:{self.gid}:{','.join(self.members)}"


@dataclass(frozen=True)
class Accounts:
    """Accounts of a source that are within the bounds, sorted by id; ``left_out``: the number of lines that are not."""

    users: tuple[User, ...]
    groups: tuple[Group, ...]
    shadow: tuple[str, ...] = ()
    left_out: int = 0

    def texts(self) -> dict[str, bytes]:
        """Return the files by path; shadow only if the source has one."""
        parts = {
            PASSWD: [user.line() for user in self.users],
            GROUP: [group.line() for group in self.groups],
        }
        if self.shadow:
            parts[SHADOW] = list(self.shadow)
        return {path: "".join(f"{line}\n" for line in lines).encode() for path, lines in parts.items()}


@dataclass(frozen=True)
class Changes:
    """Names that differ between two versions of a file; ``before``: the number of names in the old one.

    ``renumbered``: those of ``changed`` with another id, also of their first group. ``members``: how many members the
    groups of both had; ``lost_members``: how many of these they have no more.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    before: int
    renumbered: tuple[str, ...] = ()
    members: int = 0
    lost_members: int = 0

    @property
    def removed_percent(self) -> float:
        """Percentage of the old names that are removed."""
        return 100 * len(self.removed) / self.before if self.before else 0.0

    @property
    def none(self) -> bool:
        return not (self.added or self.changed or self.removed)

    def as_dict(self) -> dict[str, list[str]]:
        return {"added": list(self.added), "changed": list(self.changed), "removed": list(self.removed)}


def read_accounts(
    passwd: str,
    group: str,
    shadow: str = "",
    *,
    only: Collection[str] = (),
    uid_min: int = UID_MIN,
    uid_max: int = UID_MAX,
) -> tuple[Accounts, list[Problem]]:
    """Return the accounts of three texts, and a problem for every invalid line.

    Args:
        only: groups; only their members are included, only these groups, and the primary groups of the members.
    """
    problems: list[Problem] = []
    bounds = range(uid_min, uid_max + 1)
    users, out_users = _within_bounds(_users(passwd, problems), bounds)
    groups, out_groups = _within_bounds(_groups(group, problems), bounds)
    users, groups = _unique(users, "passwd", problems), _unique(groups, "group", problems)
    if only:
        users, groups = _choose(users, groups, only, problems)
    names = {user.name for user in users}
    # Unknown members are dropped: the name could be given to another user later.
    groups = [Group(each.name, each.gid, tuple(name for name in each.members if name in names)) for each in groups]
    hashes = tuple(line for name, line in _shadow(shadow, problems) if name in names)
    accounts = Accounts(
        tuple(sorted(users, key=lambda user: user.uid)),
        tuple(sorted(groups, key=lambda each: each.gid)),
        hashes,
        out_users + out_groups,
    )
    return accounts, problems[:MOST_PROBLEMS]


def compare_lines(before: str, after: str) -> Changes:
    """Compare two files of accounts by name."""
    old, new = _by_name(before), _by_name(after)
    both = [(name, old[name].split(":"), new[name].split(":")) for name in new.keys() & old.keys()]
    had = {(name, one) for name, line, _ in both for one in _members(line)}
    has = {(name, one) for name, _, line in both for one in _members(line)}
    return Changes(
        _sorted(new.keys() - old.keys()),
        _sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
        _sorted(old.keys() - new.keys()),
        len(old),
        _sorted(name for name, was, now in both if _ids(was) != _ids(now)),
        len(had),
        len(had - has),
    )


def _ids(line: Sequence[str]) -> Sequence[str]:
    """Return the ids in a line of passwd or group."""
    return line[2 : {7: 4, 4: 3}.get(len(line), 2)]


def _members(line: Sequence[str]) -> set[str]:
    return {*line[3].split(",")} - {""} if len(line) == 4 else set()


def too_many_removed(changes: Mapping[str, Changes], most_removed: float) -> str:
    """Return which files would lose more than this percentage of their entries, ids or members; empty if none.

    A single id or member may change in the smallest file, too.
    """
    found = []
    for path, one in changes.items():
        if one.removed_percent > most_removed:
            found.append(f"{path}: {len(one.removed)} of {one.before} would be removed ({one.removed_percent:.0f} %)")
        counts = (
            (len(one.renumbered), one.before, "would get another id"),
            (one.lost_members, one.members, "members would leave their groups"),
        )
        for count, there, what in counts:
            if count > 1 and 100 * count > most_removed * there:
                found.append(f"{path}: {count} of {there} {what} ({100 * count / there:.0f} %)")
    return "; ".join(found)


def without_own(text: str, own: Collection[str]) -> str:
    """Return the lines of a container's passwd or group without those of its image, which no site's replace.

    Args:
        own: users of its services, which may have any id; others have a system account's.
    """

    def is_own(parts: Sequence[str]) -> bool:
        number = int(parts[2]) if parts[2:3] and _NUMBER.match(parts[2]) else UID_MIN
        return parts[0] in own or number < UID_MIN or number in RESERVED

    return "".join(line for line in text.splitlines(keepends=True) if not is_own(line.split(":")))


def compare_accounts(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[dict[str, Changes], list[Problem]]:
    """Return how the site's accounts change, by file, and the invalid lines of the new ones; without system accounts.

    Args:
        before, after: texts of passwd and group, by path; the container's, and the site's.
    """
    accounts, problems = read_accounts(after.get(PASSWD, ""), after.get(GROUP, ""))
    old, _ = read_accounts(before.get(PASSWD, ""), before.get(GROUP, ""))
    sides = [{path: data.decode() for path, data in one.texts().items()} for one in (old, accounts)]
    return {path: compare_lines(*(side[path] for side in sides)) for path in (PASSWD, GROUP) if path in after}, problems


def read_ids(passwd: str) -> dict[str, str]:
    """Return the id of each user in a text of passwd."""
    return {parts[0]: parts[2] for line in passwd.split("\n") if len(parts := line.split(":")) == 7}


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names naturally: u2 before u10."""

    def counted(name: str) -> tuple[list[tuple[int, str]], str]:
        # Text and numbers alternate, starting with text: the two are never compared with each other.
        parts = re.split(r"([0-9]+)", name)
        return [(int(part), "") if at % 2 else (0, part) for at, part in enumerate(parts)], name

    return tuple(sorted(names, key=counted))


def _by_name(text: str) -> Mapping[str, str]:
    return {line.split(":")[0]: line for line in text.split("\n") if ":" in line}


def _lines(text: str, file: str, fields: int, problems: list[Problem]) -> Iterator[tuple[int, list[str]]]:
    if text.count("\n") > MOST_LINES:
        problems.append(Problem(file, 0, "", f"more than {MOST_LINES} lines"))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith(("#", "+", "-")):
            continue
        parts = line.split(":")
        if len(parts) != fields:
            problems.append(Problem(file, number, "", f"{len(parts)} fields, not {fields}"))
        elif not _NAME.match(parts[0]):
            problems.append(Problem(file, number, "", f"invalid account name {parts[0][:80]!r}"))
        else:
            yield number, parts


def _users(text: str, problems: list[Problem]) -> Iterator[User]:
    for number, (name, _, uid, gid, gecos, home, shell) in _lines(text, "passwd", 7, problems):
        wrong = ""
        if not _NUMBER.match(uid) or not _NUMBER.match(gid):
            wrong = "has a uid or gid that is not a number"
        elif not gecos.isprintable() or len(gecos) > 500:
            wrong = "has a full name that is too long or not printable"
        elif not _PATH.match(home) or "/../" in f"{home}/":
            wrong = f"has a home that is not a valid path: {home[:80]!r}"
        elif shell and (not _PATH.match(shell) or "/../" in f"{shell}/"):
            wrong = f"has a shell that is not a valid path: {shell[:80]!r}"
        if wrong:
            problems.append(Problem("passwd", number, name, wrong))
        else:
            yield User(name, int(uid), int(gid), gecos, home, shell)


def _groups(text: str, problems: list[Problem]) -> Iterator[Group]:
    for number, (name, _, gid, members) in _lines(text, "group", 4, problems):
        names = tuple(dict.fromkeys(member for member in members.split(",") if member))
        if not _NUMBER.match(gid):
            problems.append(Problem("group", number, name, "has a gid that is not a number"))
        elif wrong := next((member for member in names if not _NAME.match(member)), None):
            problems.append(Problem("group", number, name, f"has an invalid member name: {wrong[:80]!r}"))
        else:
            yield Group(name, int(gid), names)


def _shadow(text: str, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    for number, parts in _lines(text, "shadow", 9, problems):
        # The invalid value is not shown: it may be a password.
        if not _HASH.match(parts[1]) or any(not re.fullmatch(r"-?[0-9]{0,10}", part) for part in parts[2:]):
            problems.append(Problem("shadow", number, parts[0], "is not a valid line of shadow"))
        else:
            yield parts[0], ":".join(parts)


def _within_bounds(found: Iterator[User] | Iterator[Group], bounds: range) -> tuple[list, int]:  # type: ignore[type-arg]
    kept, out = [], 0
    for each in found:
        number = each.uid if isinstance(each, User) else each.gid
        if number in bounds and number not in RESERVED:
            kept.append(each)
        else:
            out += 1
    return kept, out


def _unique(found: Sequence, file: str, problems: list[Problem]) -> list:  # type: ignore[type-arg]
    names: set[str] = set()
    numbers: dict[int, str] = {}
    kept = []
    for each in found:
        number = each.uid if isinstance(each, User) else each.gid
        if each.name in names:
            problems.append(Problem(file, 0, each.name, "is a duplicate"))
        elif number in numbers:
            problems.append(Problem(file, 0, each.name, f"has the id {number} of {numbers[number]}"))
        else:
            kept.append(each)
        names.add(each.name)
        numbers.setdefault(number, each.name)
    return kept


def _choose(
    users: Sequence[User], groups: Sequence[Group], only: Collection[str], problems: list[Problem]
) -> tuple[list[User], list[Group]]:
    by_name = {each.name: each for each in groups}
    chosen = [by_name[name] for name in only if name in by_name]
    problems += [Problem("group", 0, name, "does not exist") for name in only if name not in by_name]
    members = {name for each in chosen for name in each.members}
    gids = {each.gid for each in chosen}
    kept = [user for user in users if user.name in members or user.gid in gids]
    own = {user.gid for user in kept}
    return kept, [each for each in groups if each.name in only or each.gid in own]
