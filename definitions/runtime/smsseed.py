"""The site's files as a tar archive with owners by name: what of it an overlay lacks, and writing that."""

import grp
import hashlib
import json
import os
import pwd
import sys
import tarfile

import smsfiles

RECORD = "/etc/sms/seeded.json"
MARK = "/etc/sms/seed.mark"
MUNGE_KEY = "/etc/munge/munge.key"
MUNGE_KEY_BYTES = 1024  # the largest that munged takes (mungekey(8))
KEPT = ".sms-old"
OWNED = "/etc/slurm/"  # files here are the site's: those that it no longer has are removed


class File:
    """A file of the archive that is not there as it was seeded last. ``current``: None where there is none.

    ``data``: None where it is to be removed.

    ``edited``: somebody has changed it in the container since.
    """

    def __init__(self, path, data, current, mode, ids):
        self.path, self.data, self.current, self.mode, self.ids = path, data, current, mode, ids
        self.edited = False

    @property
    def digest(self):
        return hashlib.sha256(self.data or b"").hexdigest()


def read_archive(stream, record):
    """Yield each File of an archive. A run that was ended before it wrote its record has put some there already."""
    seen = set()
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.isfile():
                seen.add("/" + member.name.lstrip("/"))
                found = _read_member(member, archive.extractfile(member).read(), record)
                if found:
                    yield found
    for path in sorted(path for path in record if path.startswith(OWNED) and path not in seen):
        left = File(path, None, _read(path), 0o644, (0, 0))
        left.edited = left.current is not None and hashlib.sha256(left.current).hexdigest() != record[path]
        yield left


def _read_member(member, data, record):
    path = "/" + member.name.lstrip("/")
    current = _read(path)
    if path in smsfiles.ACCOUNTS:
        before = (current or b"").decode(errors="surrogateescape")
        data = smsfiles.merge_accounts(path, before, data.decode(errors="surrogateescape"))
        data = data.encode(errors="surrogateescape")
    try:
        ids = pwd.getpwnam(member.uname).pw_uid, grp.getgrnam(member.gname).gr_gid
    except KeyError:
        sys.exit(
            "seed of the overlay: %s is for %s:%s, whom the image does not know" % (path, member.uname, member.gname)
        )
    found = File(path, data, current, member.mode, ids)
    if current is not None and record.get(path) == found.digest:
        return None
    found.edited = (
        current not in (None, data) and path in record and hashlib.sha256(current).hexdigest() != record[path]
    )
    return found


def write(stream, mark):
    """Write all files of an archive, then their record, then the mark. Return {changed, kept}, lists of paths."""
    record = read_record()
    report = {"changed": [], "kept": []}
    for file in read_archive(stream, record):
        if file.edited:
            smsfiles.replace(file.path + KEPT, file.current, file.mode, *file.ids)
            report["kept"].append(file.path + KEPT)
        if file.data is None:
            record.pop(file.path)
            if file.current is not None:
                smsfiles.remove(file.path)
                report["changed"].append(file.path)
            continue
        if smsfiles.replace(file.path, file.data, file.mode, *file.ids):
            report["changed"].append(file.path)
        record[file.path] = file.digest
    make_munge_key(report)
    smsfiles.replace(RECORD, json.dumps(record, indent=1, sort_keys=True).encode(), 0o600, 0, 0)
    # Last: a run that was ended before this line is done again from its beginning.
    smsfiles.replace(MARK, (mark + "\n").encode(), 0o600, 0, 0)
    return report


def read_record():
    """Digests of the files as they were seeded last, by path."""
    return _read(RECORD, smsfiles.read_record)


def _read(path, how=smsfiles.read):
    try:
        return how(path)
    except (OSError, smsfiles.Unreadable) as error:
        sys.exit("seed of the overlay: %s" % error)


def make_munge_key(report):
    """A key of this cluster's own, where none was imported. It never leaves the overlay."""
    try:
        munge = pwd.getpwnam("munge")
    except KeyError:
        return
    if _read(MUNGE_KEY) is None:
        smsfiles.replace(MUNGE_KEY, os.urandom(MUNGE_KEY_BYTES), 0o600, munge.pw_uid, munge.pw_gid)
        report["changed"].append(MUNGE_KEY)
