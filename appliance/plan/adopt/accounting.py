"""The accounting database of the old node: what copies of it need there, to the container and back. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from appliance.plan.adopt.frames import Section
from appliance.plan.adopt.model import Accounting
from appliance.text import one_line, printable

RIGHTS = ("SELECT", "INSERT", "CREATE", "DROP", "ALTER", "CREATE USER")
"""Of who loads what comes back, on all databases, and with the right to grant them."""
OLDEST = (5, 5, 3)
"""Server that has utf8mb4."""
NO_COMMANDS = ("sandbox", "binary-mode")
"""Options of the client by which it runs no commands."""


def accounting_conf(slurm_conf: str) -> str:
    """Return the path of slurmdbd.conf, which is beside slurm.conf."""
    return f"{slurm_conf.rpartition('/')[0]}/slurmdbd.conf"


def read_accounting(section: Section | None) -> Accounting | None:
    """Return what `accounting-database check` printed; None if it was not run."""
    if section is None:
        return None
    values: dict[str, list[str]] = {}
    for line in section.lines[:200]:
        name, _, value = line.partition(" ")
        values.setdefault(name, []).append(printable(value.strip(), 120))
    one = {name: found[0] for name, found in values.items()}
    return Accounting(
        client=one.get("client", ""),
        dump=one.get("dump", ""),
        server=one.get("server", ""),
        user=one.get("user", ""),
        options=tuple(name for name in NO_COMMANDS if name in values.get("option", ())),
        rights=tuple(name for name in RIGHTS if name in values.get("right", ())),
        objects=tuple(values.get("object", ())[:20]),
        error=one_line(one.get("error", ""), 200),
    )


def find_lacking(accounting: Accounting | None) -> Iterator[tuple[str, str]]:
    """Yield what keeps the database from being copied, or from being given back, and what to do about it."""
    if accounting is None:
        yield "the accounting database was not queried", "is slurmdbd.conf beside slurm.conf?"
        return
    if accounting.error or not accounting.server:
        what = f"the accounting database cannot be queried: {accounting.error or 'it does not answer'}"
        yield what, "does it run, and are StorageHost, StorageUser and StoragePass of slurmdbd.conf right?"
        return
    version = tuple(int(one) for one in re.findall(r"[0-9]{1,6}", accounting.server)[:3])
    if version < OLDEST:
        yield f"the database server is {accounting.server}", "upgrade it to MariaDB or MySQL 5.5 or later"
    if lacking := [one for one in RIGHTS if one not in accounting.rights]:
        yield (
            f"{accounting.user} of the database may not grant {', '.join(lacking)}: `--undo` could not load the "
            "accounting back",
            "let root of the database log in by its socket, or write its password to /root/.my.cnf",
        )
    if accounting.objects:
        yield (
            f"the accounting database has {', '.join(accounting.objects)}: only tables of InnoDB are copied",
            "move it to another database",
        )


def has_commands(accounting: Accounting | None) -> bool:
    """Return whether the client of the node runs commands that are in a dump."""
    return accounting is not None and bool(accounting.client) and not accounting.options
