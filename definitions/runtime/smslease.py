"""The lease of a folder with state: which task may write there. Of `sms-run --jobsync`. Python 3.6 and later.

The folder has two files. LEASE names the holder; it is replaced when the lease is taken, released or moved. LOCK is
locked while the holder lives: that keeps others away on one host, and on all hosts of a file system with common locks
(NFSv4). The holder also writes a number into it every few seconds. On another host it counts as dead when that has
not changed for TTL_S; clocks of hosts are not compared.

A holder ends its service when another one has a higher generation, or when it has not written the number for LIMIT_S,
which is less than TTL_S.
"""

import errno
import fcntl
import json
import os
import stat
import threading
import time
from contextlib import suppress

import smsfiles
import smssync

LEASE, LOCK = ".sms-lease", ".sms-lock"
RENEW_S = 3
LIMIT_S = 20
TTL_S = 30
SETTLE_S = 2 * RENEW_S + 1  # after this a holder that was only slow has seen who took its place
GONE_S = 0.5  # the kernel kills the service of a killed holder with it; locks end a moment before
LARGEST = 65536
LAST_GENERATION = 1 << 40  # as in appliance/shared/lease.py
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
CLOCK_BOOTTIME = 7  # linux/time.h; it runs on while the host is suspended
FREE = {"generation": 0, "holder": None, "since": 0, "last": "", "moved": "", "boot": "", "token": ""}
"""Fields of a lease, as of one that was never taken.

``holder``: who has it, None when it is free. ``last``: who released it. ``moved``: where the state was carried; it is
not to be used here then. ``boot``: of the holder's or last holder's host. ``token``: of one run of sms-run.
"""


class Refused(Exception):
    """The state must not be used here, or nobody knows whether it may; the message is for the log."""


def now():
    """Seconds since boot."""
    return time.clock_gettime(CLOCK_BOOTTIME)


def own_name():
    """Who this task is: the pod or allocation and the node, as its engine has it; else the host name."""
    text = os.environ.get("SMS_HOLDER") or os.uname().nodename
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]


def parse(data):
    """The fields of a lease. Raises ValueError: it is not one."""
    try:
        found = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply")
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    lease = dict(FREE, **{name: found[name] for name in FREE if name in found})
    if type(lease["generation"]) is not int or not 0 <= lease["generation"] <= LAST_GENERATION:
        raise ValueError("its generation is not a number")
    if type(lease["since"]) not in (int, float):
        raise ValueError("since is not a time")
    texts = [lease[name] for name in ("last", "moved", "boot", "token")] + [lease["holder"] or ""]
    if not all(isinstance(text, str) and len(text) <= 255 and (not text or text.isprintable()) for text in texts):
        raise ValueError("a name is not text")
    return lease


def lost_to(lease, mine):
    """Why a lease that is in the file is not ``mine``; empty if it is, or if mine is the newer one."""
    if lease["moved"]:
        return "the state was moved to %s (generation %d)" % (lease["moved"], lease["generation"])
    if lease["generation"] > mine["generation"]:
        return "%s has it (generation %d)" % (lease["holder"] or lease["last"], lease["generation"])
    if lease["generation"] == mine["generation"] and lease["token"] != mine["token"]:
        return "%s has the same generation (%d)" % (lease["holder"] or lease["last"], lease["generation"])
    return ""


class Lease:
    """The lease of ``folder``, and this task's part in it.

    ``mine``: the fields as this task has written them, None while it has not. ``renewed``: when the last renewal began
    that succeeded. ``lost``: why it is no longer this task's; empty while it is.
    """

    def __init__(self, folder):
        self.folder = smsfiles.at(folder)
        self.path = self.folder + "/" + LEASE
        self.token = os.urandom(8).hex()
        self.descriptor = None  # of LOCK
        self.locks = True  # whether the file system has them
        self.mine = None
        self.count = 0
        self.renewed = 0.0
        self.lost = ""
        self.seen = None  # what was read last of another holder, and when it was new
        self.seen_at = 0.0
        self.settle_at = None
        self.thread = None
        self.ended = threading.Event()

    # Taking it

    def attempt(self):
        """Try to take it: empty once it is held, else why it is not yet. Raises Refused, OSError."""
        if self.settle_at is not None:
            return self.settle()
        if not self.lock():
            return "%s holds it" % (self.read()["holder"] or "another task of this host")
        try:
            reason = self.take()
        finally:
            if not self.mine:
                self.unlock()
        return reason

    def take(self):
        lease = self.read()
        if lease["moved"]:
            raise Refused(
                "its state was moved to %s (generation %d): start it there, or carry the state back with `sms migrate`"
                % (lease["moved"], lease["generation"])
            )
        here = self.locks and lease["boot"] == smssync.boot()
        if lease["holder"] and here:
            time.sleep(GONE_S)  # its lock was free
        elif lease["holder"]:
            reason = self.watch(lease)
            if reason:
                return reason
        first = lease == FREE
        changes = {"generation": lease["generation"] + 1, "holder": own_name(), "since": time.time()}
        if not self.write(dict(lease, **changes), first):
            return "another task has taken it just now"
        self.beat()
        if not (here or first):
            self.settle_at = now() + SETTLE_S
            return "waits %d s for a holder that was only slow" % SETTLE_S
        return ""

    def watch(self, lease):
        """Why a holder of another host still counts as alive; empty once it does not."""
        state = (lease["generation"], lease["token"], os.pread(self.descriptor, LARGEST, 0))
        if state != self.seen:
            self.seen, self.seen_at = state, now()
        if now() >= self.seen_at + TTL_S:
            return ""
        return "%s holds it (generation %d), until it is silent for %d s" % (
            lease["holder"],
            lease["generation"],
            TTL_S,
        )

    def outlast(self, lease):
        """Return once the holder of another host, or of before a reboot, counts as ended. Raises Refused: it lives."""
        while self.watch(lease):
            time.sleep(RENEW_S)
            if lease != self.read() or self.seen[2] != os.pread(self.descriptor, LARGEST, 0):
                raise Refused("%s holds it (generation %d)" % (lease["holder"], lease["generation"]))

    def settle(self):
        """After a holder of another host: it ends its service if it is alive, and one of several who took it stays."""
        if now() < self.settle_at:
            self.beat()
            return "waits for a holder that was only slow"
        self.settle_at = None
        reason = lost_to(self.read(), self.mine)
        if reason:
            self.mine = self.seen = None
            self.unlock()
            return reason
        self.beat()
        return ""

    def lock(self):
        """Lock the folder; whether it is locked. Where the file system has no locks, the number decides alone."""
        if self.descriptor is None:
            smsfiles.make_folder(self.folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self.descriptor = os.open(self.folder + "/" + LOCK, flags, 0o600)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.locks = False
        return True

    def unlock(self):
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    # The files

    def read(self):
        """The lease in the file; one that was never taken if the file is missing. Raises Refused, OSError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return dict(FREE)
        with open(descriptor, "rb") as stream:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            data = stream.read(LARGEST) if regular else b""
        try:
            return parse(data)
        except ValueError as error:
            raise Refused("%s is damaged (%s): remove it once nothing writes there" % (self.path, error))

    def write(self, lease, first=False):
        """Write a lease as this task's. ``first``: only if there is none yet; says whether it was written.

        It has a name of its own until it is complete and on the disk: hosts without common locks may do the same.
        """
        lease = dict(lease, token=self.token, boot=smssync.boot())
        beside = "%s.%s" % (self.path, self.token)
        with suppress(FileNotFoundError):
            os.unlink(beside)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as stream:
                self.give(descriptor)
                stream.write((json.dumps(lease, sort_keys=True) + "\n").encode())
                stream.flush()
                os.fsync(descriptor)
            if first:
                os.link(beside, self.path)
            else:
                os.rename(beside, self.path)
        except FileExistsError:
            return False
        finally:
            with suppress(OSError):
                os.unlink(beside)
        smsfiles.flush(self.folder)
        self.mine = lease
        return True

    def give(self, descriptor):
        """Both files belong to the owner of the folder: the next task may run as that user."""
        if os.geteuid() == 0:
            owner = os.stat(self.folder)
            for each in (descriptor, self.descriptor):
                with suppress(PermissionError):
                    if each is not None:
                        os.fchown(each, owner.st_uid, owner.st_gid)

    # Holding it

    def hold(self, tell):
        """Renew it from now on, beside this thread: a file system that hangs must not stop who ends the service.

        ``tell`` is called, by another thread, once it is lost.
        """
        self.thread = threading.Thread(target=self.renew_all, args=(tell,), daemon=True)
        self.thread.start()

    def renew_all(self, tell):
        while not self.ended.wait(RENEW_S):
            with suppress(OSError, Refused):  # not renewed: check sees it
                self.renew()
            if self.lost:
                tell()
                break

    def renew(self):
        """Show that this task lives, if the lease is still its own; it is read first, as after a freeze."""
        lease = self.read()
        self.lost = self.check() or lost_to(lease, self.mine)
        if self.lost:
            return
        if lease["token"] != self.token:  # removed, or an older one: its holder was frozen while it wrote
            self.write(self.mine)
        if not self.is_locked() and not self.lock():
            self.lost = "another task has locked the folder"
            return
        self.beat()

    def is_locked(self):
        """Whether the file that is locked is still the one in the folder."""
        own = os.fstat(self.descriptor)
        try:
            found = os.stat(self.folder + "/" + LOCK, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found and (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino):
            return True
        self.unlock()
        return False

    def beat(self):
        """Write the next number, of a fixed length: it needs no room on a full disk."""
        began = now()
        self.count += 1
        os.pwrite(self.descriptor, b"%s %12d\n" % (self.token.encode(), self.count), 0)
        os.fsync(self.descriptor)
        self.renewed = began

    def check(self):
        """Why it is lost; empty while it is held. It is not renewed in time where its file system fails or hangs."""
        silent = now() - self.renewed
        if not self.lost and silent > LIMIT_S:
            self.lost = "it could not be renewed for %d s" % silent
        return self.lost

    def release(self, **changes):
        """Let others have it; ``changes``: further fields. One that was lost, or is not held, is left alone."""
        self.ended.set()
        if self.thread and not self.check():
            self.thread.join(LIMIT_S)
        try:
            if self.mine and not self.check() and not lost_to(self.read(), self.mine):
                self.write(dict(self.mine, holder=None, last=self.mine["holder"] or self.mine["last"], **changes))
        finally:
            self.mine = None
            self.unlock()
