"""Records of services on one node: deploy, ready, removal. Written by `sms-run --jobsync`. Python 3.6 and later.

/run/sms/jobsync has two files of each service: NAME.json, its record, and NAME.lock, locked while its sms-run lives.
Nothing there is needed after a reboot: what a record says of a process holds for this boot only, and a lock ends with
its process however that ends, also in another pid namespace.
"""

import errno
import fcntl
import json
import os
import re
import socket
import stat
import time

import smsfiles

FOLDER = "/run/sms/jobsync"
LARGEST = 65536  # bytes of a record; a service has no reason for more
STATES = ("deploy", "ready", "removal")
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}\Z")  # as in the catalogue


def path_of(name, kind):
    return "%s/%s.%s" % (FOLDER, name, kind)


def read(name):
    """The record of a service; None where there is none, or none that can be understood."""
    try:
        # Who can write in the folder must not block its readers by a pipe or a link.
        descriptor = os.open(
            smsfiles.at(path_of(name, "json")), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            record = json.loads(stream.read(LARGEST).decode())
    except (OSError, ValueError, RecursionError):
        return None
    return record if is_record(record, name) else None


def is_record(record, name):
    """Whether it has all that is used here, of the right kinds."""
    return (
        isinstance(record, dict)
        and record.get("service") == name
        and record.get("state") in STATES
        and isinstance(record.get("detail"), str)
        and isinstance(record.get("holds"), list)
        and all(isinstance(one, str) for one in record["holds"])
        and isinstance(record.get("since"), (int, float))
        and (record.get("process") is None or isinstance(record["process"], dict))
    )


def read_all():
    """Records of this node by service."""
    try:
        names = sorted(name[: -len(".json")] for name in os.listdir(smsfiles.at(FOLDER)) if name.endswith(".json"))
    except OSError:
        return {}
    records = {name: read(name) for name in names if NAME.match(name)}
    return {name: record for name, record in records.items() if record}


def users_of(name):
    """Services of this node that use ``name`` now, sorted."""
    return sorted(
        user
        for user, record in read_all().items()
        if user != name and name in record["holds"] and (is_locked(user) or is_alive(record["process"]))
    )


def is_leaving(name):
    """Whether a service is being stopped: nobody is to begin to use it."""
    record = read(name)
    return bool(record and record["state"] == "removal" and is_locked(name))


# Locks


class Lock:
    """The lock of a service on this node. It ends with the process, and is not inherited by programs."""

    def __init__(self, name):
        self.path = smsfiles.at(path_of(name, "lock"))
        self.descriptor = None

    def take(self):
        """Try to lock; says whether it is locked. One whose file was removed meanwhile is worth nothing."""
        folder = os.path.dirname(self.path)
        smsfiles.make_folder(folder)
        self.release()
        # Who can read a file can lock it. Only containers of a pod, which have several users, read each other's locks.
        mode = 0o644 if os.stat(folder).st_mode & stat.S_ISVTX else 0o600
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        if self.is_there():
            return True
        self.release()
        return False

    def is_there(self):
        """Whether this is locked, and the file is still the one at its path."""
        if self.descriptor is None:
            return False
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        own = os.fstat(self.descriptor)
        return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)

    def release(self):
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def is_locked(name):
    """Whether an sms-run of this service lives on this node, in whatever pid namespace."""
    try:
        descriptor = os.open(smsfiles.at(path_of(name, "lock")), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the owner tries again if it meets this
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# Processes


def describe(pid):
    """What identifies a process on this node: {pid, began, boot, namespace}, or None once it has ended."""
    began = began_at(pid)
    return began and {"pid": pid, "began": began, "boot": boot(), "namespace": namespace()}


def is_alive(process):
    """Whether the process that ``describe`` was given still runs; False where that cannot be known from here."""
    if not process or process.get("boot") != boot() or process.get("namespace") != namespace():
        return False
    pid = process.get("pid")
    return isinstance(pid, int) and pid > 1 and began_at(pid) == process.get("began")


def began_at(pid):
    """The start of a process in ticks since boot (proc(5), field 22); None if it does not run."""
    try:
        with open("/proc/%d/stat" % pid) as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def boot():
    with open("/proc/sys/kernel/random/boot_id") as stream:
        return stream.read().strip()


def namespace():
    """The pid namespace, as text."""
    return os.readlink("/proc/self/ns/pid")


# The record of one's own service


class Record:
    """The record of the service that this process runs; each change is written at once.

    ``left`` and ``held`` are the process of the run before, and the services that it uses if it still runs.
    """

    def __init__(self, name):
        before = read(name) or {}
        self.left, self.held = before.get("process"), before.get("holds")
        self.fields = {
            "service": name,
            "node": socket.gethostname(),
            "state": "deploy",
            "since": time.time(),
            "detail": "",
            "waits_for": [],
            "holds": [],
            "process": None,
            "times": {},
            "status": None,
            "generation": None,
        }

    def write(self, state=None, **changes):
        """Change fields, and note when a state began. Nothing is written if nothing changes."""
        if state and (state != self.fields["state"] or not self.fields["times"]):
            changes.update(state=state, since=time.time())
            self.fields["times"][state] = changes["since"]
        elif all(self.fields[name] == value for name, value in changes.items()):
            return
        self.fields.update(changes)
        self.save()

    def save(self):
        data = json.dumps(self.fields, sort_keys=True).encode() + b"\n"
        try:
            smsfiles.replace(path_of(self.fields["service"], "json"), data, 0o644, os.geteuid(), os.getegid())
        except OSError as error:  # a full /run must not keep a service from running
            print("sms-run: %s" % error, flush=True)


# Liveness


def check_live(name, service):
    """{name, ok, detail, state, since}: whether a service runs, without a question to it or to what it needs.

    A service that waits for another one is alive. One that is ready must listen on its TCP ports.
    """
    record = read(name)
    answer = {"name": name, "ok": False, "detail": "", "state": None, "since": None}
    if record is None:
        return dict(answer, detail="not started by sms-run on this node")
    answer.update(state=record["state"], since=record["since"], detail=record["detail"] or record["state"])
    if not is_locked(name):
        return dict(answer, detail="its sms-run has ended")
    ports = service.get("jobsync", {}).get("ports", [])
    missing = [port for port in ports if port not in listening()] if record["state"] == "ready" else []
    if missing:
        return dict(answer, detail="does not listen on TCP port %s" % ", ".join(map(str, missing)))
    return dict(answer, ok=True)


def listening():
    """TCP ports with a listening socket in this network namespace, over IPv4 or IPv6."""
    ports = set()
    for family in ("tcp", "tcp6"):
        try:
            with open("/proc/net/" + family) as stream:
                rows = [line.split() for line in stream][1:]
        except OSError as error:
            if error.errno != errno.ENOENT:  # a kernel without IPv6
                raise
            continue
        ports.update(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A")
    return ports
