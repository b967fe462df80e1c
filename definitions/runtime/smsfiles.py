"""Files of the site inside the container: replaced whole, accounts merged. Python 3.6 and later."""

import os

SYSTEM_BELOW = 1000  # ids that belong to the image (login.defs: SYS_UID_MAX)
NOBODY = 65534
ACCOUNTS = {"/etc/passwd": 2, "/etc/group": 2, "/etc/shadow": None}
"""Account files and the field of their numeric id; shadow has none and goes by name."""


def replace(path, data, mode, uid, gid):
    """Make ``path`` hold ``data``: written beside it, flushed, renamed. Says whether it changed."""
    try:
        with open(path, "rb") as stream:
            state = os.fstat(stream.fileno())
            if stream.read() == data and (state.st_mode & 0o7777, state.st_uid, state.st_gid) == (mode, uid, gid):
                return False
    except FileNotFoundError:
        pass
    os.makedirs(os.path.dirname(path), exist_ok=True)
    beside = path + ".sms-new"
    if os.path.lexists(beside):
        os.unlink(beside)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        os.fchown(descriptor, uid, gid)
        os.fchmod(descriptor, mode)
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)
    os.rename(beside, path)
    return True


def merge_accounts(path, current, site):
    """The image's own accounts, then the site's; a site's line never takes over a system name or id.

    ``current`` and ``site`` are the texts of two files of the kind that ``path`` names.
    """
    field = ACCOUNTS[path]
    kept = [line for line in _lines(current) if _is_system(line, field)]
    names = {line.split(":")[0] for line in kept}
    for line in _lines(site):
        parts = line.split(":")
        if parts[0] in names or _is_system(line, field):
            continue
        if field is not None and len(parts) <= field:
            continue
        names.add(parts[0])
        kept.append(line)
    return "\n".join(kept) + "\n"


def _lines(text):
    return [line for line in text.split("\n") if line and not line.startswith(("#", "+", "-")) and ":" in line]


def _is_system(line, field):
    if field is None:
        return line.split(":")[0] in _system_names()
    parts = line.split(":")
    return len(parts) <= field or not parts[field].isdigit() or int(parts[field]) < SYSTEM_BELOW or int(parts[field]) == NOBODY


def _system_names():
    with open("/etc/passwd") as stream:
        return {line.split(":")[0] for line in _lines(stream.read()) if _is_system(line, 2)}
