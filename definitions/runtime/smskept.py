"""What file synchronisation has written, and how it writes and removes. Python 3.9 and later.

Beside the last version that came whole, what was there before a file of the server's first came is kept: it comes back
when the server has the file no longer.
"""

import grp
import hashlib
import json
import os
import pwd
import re

import smsfiles

GOOD = "/var/lib/sms/filesync"
RECORD = GOOD + ".json"
BEFORE, PREVIOUS = "%before", "%previous"
"""Behind a kept file's name: what was there before, and the version before the last."""
MODES = {"/etc/shadow": (0o640, "root", "shadow")}
FORBIDDEN = ("/proc", "/sys", "/dev", "/run", "/var/run", "/etc/sms", "/opt/sms", GOOD, RECORD)
"""Never written on a node: no files, or what this program itself is trusted by."""


class NodePaths:
    """The paths that may be written on a node."""

    def __init__(self, prefixes=None):
        self.prefixes = tuple(prefixes or ("/",))

    def __contains__(self, path):
        if not isinstance(path, str) or len(path) > 1000 or os.path.normpath(path) != path:
            return False
        if not re.match(r"/[A-Za-z0-9._+@%/-]+\Z", path) or path.startswith("//"):
            return False
        if not any(path == each or path.startswith(each.rstrip("/") + "/") for each in self.prefixes):
            return False
        # A link on the way leads elsewhere.
        root = os.path.realpath(smsfiles.ROOT or "/")
        real = os.path.realpath(smsfiles.ROOT + os.path.dirname(path))
        inside = real if root == "/" else real[len(root) :] if (real + "/").startswith(root + "/") else "/proc"
        whole = os.path.join(inside or "/", os.path.basename(path))
        return not any(one == each or one.startswith(each + "/") for each in FORBIDDEN for one in (path, whole))


def good_copy(path):
    """Where the last version of a file lies that came whole: no two paths have one place, however they are called."""
    return os.path.join(GOOD, hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest())


def owner_of(path):
    """Mode, uid and gid that the file has now, or the usual ones."""
    try:
        state = os.stat(smsfiles.at(path))
        return state.st_mode & 0o7777, state.st_uid, state.st_gid
    except FileNotFoundError:
        mode, user, group = MODES.get(path, (0o644, "root", "root"))
        try:
            return mode, pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid
        except KeyError:
            return mode & 0o600, 0, 0


def wanted_owner(entry):
    """Mode, uid and gid that a manifest asks for; an older server asks for none.

    Raises ValueError: there is no such user or group, or the mode is none.
    """
    if "mode" not in entry:
        return owner_of(entry["path"])
    mode = int(entry["mode"], 8)
    if not 0 <= mode <= 0o777:
        raise ValueError("%s: invalid mode %s" % (entry["path"], entry["mode"]))
    user, group = entry.get("owner", "root"), entry.get("group", "root")
    try:
        return mode, pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid
    except KeyError:
        if entry["path"] in MODES:  # not every distribution has a group shadow
            return mode & 0o700, 0, 0
        raise ValueError("%s: there is no %s:%s here" % (entry["path"], user, group))


class Kept:
    """The record of written files: path to the digest of the server's version and the digest of what was written."""

    def __init__(self):
        self.files = smsfiles.read_record(RECORD)
        for path in sorted(self.files):
            self._rename_old(path)

    def _rename_old(self, path):
        """Copies of earlier versions were called by the path with % for /, which two paths could share."""
        old = os.path.join(GOOD, path.strip("/").replace("/", "%"))
        if not os.path.lexists(smsfiles.at(old)) and not os.path.lexists(smsfiles.at(old + BEFORE)):
            return
        for suffix in ("", BEFORE, PREVIOUS):
            if suffix == "":
                # The one that it is the copy of has its digest.
                data = smsfiles.read(old)
                ours = data is not None and _digest(data) == self.files[path]["sha256"]
            else:
                ours = suffix == PREVIOUS or "before" in self.files[path]
            there, new = old + suffix, good_copy(path) + suffix
            if ours and os.path.lexists(smsfiles.at(there)) and not os.path.lexists(smsfiles.at(new)):
                smsfiles.rename(there, new)

    def digests(self):
        """What is here of the server's, by path."""
        return {path: one["sha256"] for path, one in self.files.items()}

    def apply(self, entry, data):
        """Put one fetched file into place and keep it as the last one known to be good; says whether it changed."""
        path = entry["path"]
        there = smsfiles.read(path)
        written = data
        if path in smsfiles.ACCOUNTS:
            # Names of people in old files are not always UTF-8.
            texts = [text.decode(errors="surrogateescape") for text in (there or b"", data)]
            written = smsfiles.merge_accounts(path, *texts).encode(errors="surrogateescape")
        mode, uid, gid = wanted_owner(entry)
        record = self.files.get(path)
        if path not in smsfiles.ACCOUNTS and there is not None and there != written:
            if record is None or not _is_ours(record, there):
                self._keep_before(path, there)
        if there != written:
            # Whatever happens from here on, what is written now is not mistaken for somebody's own.
            self.files.setdefault(path, {"sha256": "", "written": ""})["next"] = _digest(written)
            self._save()
        changed = smsfiles.replace(path, written, mode, uid, gid)
        good = smsfiles.read(good_copy(path))
        if good is not None and good != data:
            smsfiles.replace(good_copy(path) + PREVIOUS, good, 0o600, 0, 0)
        smsfiles.replace(good_copy(path), data, 0o600, 0, 0)
        now = {"sha256": _digest(data), "written": _digest(written)}
        if self.files.get(path) != dict(self.files.get(path, {}), **now) or "next" in self.files[path]:
            self.files.setdefault(path, {}).update(now)
            self.files[path].pop("next", None)
            self._save()
        return changed

    def left(self, wanted):
        """What was written here and is wanted no more, the deepest first."""
        # Accounts stay: nobody means that all users are gone.
        return sorted(
            (path for path in self.files if path not in wanted and path not in smsfiles.ACCOUNTS), reverse=True
        )

    def remove(self, path):
        """Take a file away that came from the server, or put back what was there before; says whether it changed.

        One that somebody has changed since stays.
        """
        there = smsfiles.read(path)
        changed = False
        if there is not None and _is_ours(self.files[path], there):
            before = smsfiles.read(good_copy(path) + BEFORE)
            if before is not None:
                mode, uid, gid = self.files[path].get("before", (0o600, 0, 0))
                changed = smsfiles.replace(path, before, mode, uid, gid)
            else:
                smsfiles.remove(path)
                changed = True
        # The record first: as long as it has the file, what was there before is needed.
        del self.files[path]
        self._save()
        smsfiles.remove(good_copy(path) + BEFORE)
        if smsfiles.read(good_copy(path)) is not None:
            smsfiles.rename(good_copy(path), good_copy(path) + PREVIOUS)
        return changed

    def forget(self, paths):
        """Leave files of the server's alone from now on, as what is here of them is somebody else's."""
        for path in paths:
            del self.files[path]
        if paths:
            self._save()

    def _keep_before(self, path, data):
        smsfiles.replace(good_copy(path) + BEFORE, data, 0o600, 0, 0)
        self.files.setdefault(path, {"sha256": "", "written": _digest(data)})["before"] = list(owner_of(path))
        self._save()

    def _save(self):
        smsfiles.replace(RECORD, json.dumps(self.files, sort_keys=True).encode(), 0o600, 0, 0)


def _is_ours(record, data):
    """Whether the content of a file is what was written here last, or was about to be written."""
    return _digest(data) in (record["written"], record.get("next"))


def _digest(data):
    return hashlib.sha256(data).hexdigest()
