"""The site's accounts compared with those of the image, whose ids files in the overlay have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from appliance.catalog import Base, Service
from appliance.config.finding import Finding
from appliance.config.model import Site
from appliance.plan.image.definition import IdTaken, fixed_accounts

DEBIAN_SLURM = 64030
"""The ids of slurm that Debian's packages allocate."""
SITE_FROM = 1000
"""The smallest id that the container takes from the site's files (definitions/runtime/smsfiles.py)."""
RESERVED = 99
"""The largest id that distributions give out themselves; as a group, 100 is ``users``."""
NOBODY = (65534, 65535)
"""nobody, and what stands for no id in 16 bits."""


def check_accounts(site: Site, base: Base, services: Sequence[Service], files: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each account of the site whose ids are not those that the image has, or another's.

    Args:
        files: the texts of the site's passwd and group, by these names; without one of them, it is missing.
    """
    for name, user in site.system_users.items():
        if user.uid <= RESERVED or user.gid <= RESERVED + 1 or {user.uid, user.gid} & {*NOBODY}:
            text = f"ids to {RESERVED} (groups: {RESERVED + 1}), {NOBODY[0]} and {NOBODY[1]} belong to the distribution"
            yield Finding((name, "user"), text, f"use the ids that `id {name}` prints on a node")
    try:
        accounts = fixed_accounts(base, services, site.system_users)
    except IdTaken as error:
        given = [name for name in error.names if name in site.system_users]
        yield Finding((given[0], "user") if given else ("services",), error.message, error.hint)
        return
    image: dict[str, tuple[int, int]] = {name: (uid, gid) for gid, name, uid in accounts if uid is not None}
    run_as = {service.user for service in services}
    for name in run_as & {"slurm"} - image.keys() if base.manager == "apt" else ():
        image[name] = (DEBIAN_SLURM, DEBIAN_SLURM)
    users, groups = _ids(files.get("passwd", ""), 2), _ids(files.get("group", ""), 1)
    for name in site.user_settings:
        if name in users and name in run_as:
            uid, gid = users[name][0], groups.get(name, users[name][1:])[0]
            if image.get(name) != (uid, gid):
                has = "{}:{}".format(*image[name]) if name in image else "what its package allocates"
                yield Finding(
                    (name, "user") if name in site.system_users else ("accounts", "passwd"),
                    f"{name} is {uid}:{gid} in {site.accounts.passwd}, but {has} in the image",
                    f"set `{name}.user: {{uid: {uid}, gid: {gid}}}`: its ids must be the same everywhere",
                )
    for index, (file, theirs) in enumerate((("passwd", users), ("group", groups))):
        taken = {ids[index]: name for name, ids in image.items()}
        for other, (number, *_) in theirs.items():
            name = taken.get(number, other)
            if number >= SITE_FROM and name != other and other not in image:
                yield Finding(
                    (name, "user") if name in site.system_users else ("accounts", file),
                    f"id {number} of {name} is also that of {other} in {getattr(site.accounts, file)}",
                    f"{other} would be missing in the container: each needs an id of its own",
                )
                break


def _ids(text: str, count: int) -> dict[str, list[int]]:
    """Return the first ``count`` ids of each name in a passwd or group file; lines without them are left out."""
    found: dict[str, list[int]] = {}
    for line in text.splitlines():
        name, *numbers = line.split(":")
        numbers = numbers[1 : count + 1]
        if len(numbers) == count and all(re.fullmatch(r"[0-9]{1,10}", number) for number in numbers):
            found.setdefault(name, [int(number) for number in numbers])
    return found
