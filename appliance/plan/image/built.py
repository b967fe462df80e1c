"""Which settings of a site file an image was not built of, by what it contains itself. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.catalog import Base, Service
from appliance.config.model import Site
from appliance.plan.image.definition import fixed_accounts, own_repositories, packages_for

DESCRIPTION = ("/opt/sms/manifest.json", "/opt/sms/accounts/passwd")
"""Files of an image, in the order of ``read_inputs``."""


@dataclass(frozen=True)
class Inputs:
    """What an image was built of; ``ids``: uid and gid of each user."""

    base: str
    packages: frozenset[str]
    services: frozenset[str]
    repositories: Mapping[str, object]
    ids: Mapping[str, tuple[int, int]]


def read_inputs(text: str) -> Inputs:
    """Read the contents of ``DESCRIPTION``, one after the other; programs of the container may have changed them.

    Raises:
        ValueError: they are invalid.
    """
    try:
        manifest, end = json.JSONDecoder().raw_decode(text)
        users = [line.split(":") for line in text[end:].splitlines() if line]
        return Inputs(
            str(manifest["base"]["name"]),
            frozenset(map(str, manifest["packages"])),
            frozenset(map(str, manifest["services"])),
            dict(manifest.get("repositories", {})),
            {words[0]: (int(words[2]), int(words[3])) for words in users},
        )
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def find_other_settings(site: Site, base: Base, services: Sequence[Service], built: Inputs) -> tuple[str, ...]:
    """Return the settings that differ from those that an image was built of.

    An image may have more services than the site: then packages that it does not need are not known. Neither are ids
    that the site no longer gives, of a user without ids in the catalogue.
    """
    different = []
    if base.name != built.base:
        different.append(f"base.os ({built.base}, not {base.name})")
    else:  # another base has other packages
        wanted = frozenset(packages_for(base, services, site.base.packages))
        more = built.packages - wanted if built.services == {service.name for service in services} else ()
        names = [*(f"+{name}" for name in sorted(wanted - built.packages)), *(f"-{name}" for name in sorted(more))]
        if names:
            different.append(f"packages ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})")
    if own_repositories(site.base.repositories) != built.repositories:
        different.append("base.repositories")
    ids = {name: (uid, gid) for gid, name, uid in fixed_accounts(base, services, site.system_users) if uid is not None}
    settable = [name for name in sorted(ids) if hasattr(getattr(site, name, None), "user")]
    return (*different, *(f"{name}.user" for name in settable if ids[name] != built.ids.get(name)))
