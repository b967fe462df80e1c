"""Files of the site in the container and on nodes: replaced whole, accounts merged. Python 3.6 and later."""

import errno
import fcntl
import json
import os
import re
import stat
import time

ROOT = os.environ.get("SMS_ROOT", "")
"""Stands before every path of the container, so that its programs can be tried elsewhere."""
IMAGE_ACCOUNTS = "/opt/sms/accounts"
"""passwd and group as the image was built with: these names and ids are its own."""
SITE_FROM = 1000  # ids below belong to the image's distribution (login.defs: UID_MIN)
NO_ID = 2**32 - 1  # stands for no id in system calls; more wraps around to root
ACCOUNTS = {"/etc/passwd": 2, "/etc/group": 2, "/etc/shadow": None}
"""Account files and the field of their numeric id; shadow has none and goes by name."""

MAX_BYTES = 64 << 20
"""Of a file that is read whole: more than any file of a site has."""
WRITER_S = 5
"""Seconds that a writer may take from giving its new file to an owner until it renames it."""


def at(path):
    """Where a path of the container is. Below a root, links of its folders lead to where they do in the container."""
    if not ROOT:
        return path
    folder, name = os.path.split(path)
    return os.path.join(_in_root(folder), name)


def _in_root(path):
    """A folder below the root, without links: nobody else changes what is there."""
    place, left, links = ROOT, path.split("/")[::-1], 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            place = place if place == ROOT else os.path.dirname(place)
            continue
        there = os.path.join(place, name)
        if not os.path.islink(there):
            place = there
            continue
        links += 1
        if links > 40:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(there)
        place = ROOT if target.startswith("/") else place
        left += target.split("/")[::-1]
    return place


def read(path):
    """The bytes of a file of the container, or None where there is none.

    Raises OSError: it is something else, or larger than MAX_BYTES. Root in the container may have put a link to
    /dev/zero there, or a named pipe, before its overlay is seeded.
    """
    try:
        descriptor = os.open(at(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file", path)
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return data


def boot_word(name):
    """The value of a word of the kernel's command line; empty where there is none."""
    for word in (read("/proc/cmdline") or b"").decode(errors="replace").split():
        if word.startswith(name + "="):
            return word[len(name) + 1 :]
    return ""


def keep_image_accounts():
    """On a node: what passwd and group of its image are, kept before the site's names come into them."""
    for name in ("passwd", "group"):
        path = IMAGE_ACCOUNTS + "/" + name
        if read(path) is None:
            replace(path, read("/etc/" + name) or b"", 0o644, 0, 0)


def replace(path, data, mode, uid, gid):
    """Make ``path`` hold ``data``: written beside it, flushed, renamed. Says whether it changed."""
    path = at(path)
    try:
        state = os.stat(path)
        same = (stat.S_ISREG(state.st_mode), state.st_size) == (True, len(data))
        if same and (state.st_mode & 0o7777, state.st_uid, state.st_gid) == (mode, uid, gid):
            with open(path, "rb") as stream:
                if stream.read(len(data) + 1) == data:
                    return False
    except FileNotFoundError:
        pass
    make_folder(os.path.dirname(path))
    beside = path_beside(path)
    descriptor = _open_alone(beside)  # sms-filesync and sms-apply may write the same file
    with os.fdopen(descriptor, "wb") as stream:  # until the rename: this is its lock
        try:
            os.fchown(descriptor, uid, gid)
            os.fchmod(descriptor, mode)
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
            os.rename(beside, path)
        except OSError:  # a full disk, most of all: what is half written only takes more of it
            os.unlink(beside)
            raise
    flush(os.path.dirname(path))
    return True


def path_beside(path):
    """Where the new content of a file is written: a name that nothing takes from a folder such as /etc/cron.d.

    As appliance/shared/files.py has it.
    """
    folder, name = os.path.split(path)
    hidden = "" if os.path.basename(folder) == "logrotate.d" else "."
    return os.path.join(folder, "%s%s.new~" % (hidden, name))


def _open_alone(path):
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            _remove_left(path)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):  # not removed by another writer, who locked it before us
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_left(path):
    """Remove what a killed run left; wait while its writer lives. The folder may be that of another user."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError:  # a link, or not a file
        os.unlink(path)
        return
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _wait_for_writer(descriptor)
        if _is_at(descriptor, path):
            os.unlink(path)
    except FileNotFoundError:
        pass
    finally:
        os.close(descriptor)


def _wait_for_writer(descriptor):
    """Wait until a file is not locked; WRITER_S for one that belongs to another user, who could lock it himself."""
    deadline = time.monotonic() + WRITER_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline and os.fstat(descriptor).st_uid != os.geteuid():
                return
            time.sleep(0.01)


def _is_at(descriptor, path):
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def rename(path, new):
    """Rename a file of the container within its folder; the new name is on the disk then."""
    os.rename(at(path), at(new))
    flush(os.path.dirname(at(new)))


def remove(path):
    """Remove a file of the container, if it exists; it does not come back after a power failure."""
    try:
        os.unlink(at(path))
    except FileNotFoundError:
        return
    flush(os.path.dirname(at(path)))


def make_folder(path):
    """Create a folder of the host, unless it exists, and what is missing above it; new ones are on the disk then."""
    if path and not os.path.isdir(path):
        make_folder(os.path.dirname(path))
        try:
            os.mkdir(path)
        except FileExistsError:
            pass
        flush(os.path.dirname(path) or ".")


def flush(folder):
    """Flush the entries of a folder to the disk: what was created, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_record(path):
    """The JSON object in a file that these programs wrote; empty where there is none.

    Raises Unreadable: it is not one. To go on as if nothing were recorded would replace what somebody has changed.
    """
    data = read(path)
    if data is None:
        return {}
    try:
        record = json.loads(data.decode())
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise Unreadable("%s cannot be read: restore it from a snapshot, or remove it" % path)
    return record


class Unreadable(ValueError):
    """A record is damaged."""


def merge_accounts(path, current, site):
    """The image's own accounts, then the site's; a site's line never takes over a name or id of the image.

    ``current`` and ``site`` are the texts of two files of the kind that ``path`` names.
    """
    field = ACCOUNTS[path]
    own = _own_accounts("/etc/passwd" if field is None else path)
    kept = {line.split(":")[0]: line for line in _lines(current)}
    merged = [kept[name] for name in own if name in kept]
    if field is not None:  # an overlay of an older image knows fewer, and other ids
        merged = [_with_ids(kept.get(name, line), line) for name, line in own.items()]
    taken = {_number(line.split(":")[2]) for line in own.values()}
    names = set(own)
    for line in _lines(site):
        parts = line.split(":")
        if parts[0] in names:
            continue
        if field is not None:
            number = _number(parts[field]) if len(parts) > field else None
            if number is None or not SITE_FROM <= number < NO_ID or number in taken:
                continue
        names.add(parts[0])
        merged.append(line)
    return "\n".join(merged) + "\n"


def _with_ids(line, other):
    """A line of passwd or group with the ids of another one."""
    parts, wanted = line.split(":"), other.split(":")
    last = 3 if len(wanted) < 7 else 4
    return ":".join(parts[:2] + wanted[2:last] + parts[last:])


def _number(text):
    """The number that a C library reads, or None. isdigit() takes digits of other scripts, too."""
    return int(text) if re.match(r"[0-9]{1,10}\Z", text) else None


def _lines(text):
    return [line for line in text.split("\n") if line and not line.startswith(("#", "+", "-", ":")) and ":" in line]


def _own_accounts(path):
    """Name to line of the image's own accounts."""
    path = os.path.join(IMAGE_ACCOUNTS, os.path.basename(path))
    data = read(path)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return {line.split(":")[0]: line for line in _lines(data.decode(errors="surrogateescape"))}
