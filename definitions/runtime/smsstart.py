"""How a service is prepared and becomes the process of its daemon. Python 3.6 and later."""

import ctypes
import grp
import os
import pwd
import signal
import subprocess
import time

import smsfiles

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
# linux/prctl.h, linux/capability.h
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAPBSET_READ, PR_CAPBSET_DROP = 1, 8, 23, 24
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4
CAPABILITY_VERSION_3 = 0x20080522


ENDED = ".ended"
"""End of the mark's name while the service does not run."""
SAVED_S = 60
"""Seconds within which a service that ends on its own does so after it has saved its state."""
INIT = "appinit"
"""Apptainer's first process in a container."""
LEFT_S = 3
"""Seconds that what services have left may take to end."""
CLOCK_S = 1
"""Times of files are those of the kernel's last tick."""


def prepare(service, again=False, **options):
    """Begin the preparation of a service; None where it has none. It knows whether the last run ended in order.

    ``again``: root has prepared it before, in another container; what an unclean end needs is done all the same.
    """
    mark = service.get("running")
    unclean = bool(mark and os.path.exists(smsfiles.at(mark)))
    if unclean:
        os.environ["SMS_UNCLEAN"] = "1"
    script = (unclean and service.get("unclean")) if again else service["setup"]
    if not script:
        return None
    return subprocess.Popen(["sh", "-euc", script], stdin=subprocess.DEVNULL, **options)


def set_mark(service):
    """Mark a service that is about to run, so that its end without a stop in order is known.

    The file stays, and only its name changes: on a full overlay none can be made.
    """
    mark = service.get("running")
    if not mark:
        return
    try:
        smsfiles.rename(mark + ENDED, mark)
    except OSError:
        try:
            smsfiles.replace(mark, b"", 0o600, os.geteuid(), os.getegid())
        except OSError as error:  # it runs nevertheless
            print("sms-run: %s" % error, flush=True)


def end_left():
    """End what services have left in this container, such as the job of a cron that has ended: all have had SIGTERM.

    Mail that waits for a disk ignores that, and the container does not end before its last process.
    """
    with open("/proc/1/comm") as stream:
        if stream.read().strip() != INIT:  # not a container of our own
            return
    end = time.monotonic() + LEFT_S
    try:
        os.kill(-1, signal.SIGTERM)
        while time.monotonic() < end:
            time.sleep(0.05)
            os.kill(-1, 0)
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_mark(service, asked=0):
    """Take the mark back from a service that has ended with status 0, unless it could not save its state.

    slurmctld ends with that status also if its file system was full. ``asked``: when it got the signal to stop.
    """
    mark, saved = service.get("running"), service.get("saves")
    if not mark:
        return
    try:
        since = asked - CLOCK_S if asked else time.time() - SAVED_S
        if saved and os.stat(smsfiles.at(saved)).st_mtime < since:
            print("sms-run: %s was not saved: the next start is one after an unclean end" % saved, flush=True)
            return
        smsfiles.rename(mark, mark + ENDED)
    except OSError:
        pass  # it has never saved anything, or has no mark


def become(service, tie=None):
    """Drop to the service's user and capabilities, and become its command.

    ``tie``: a signal, and the parent that it comes from when that ends: what outlives its parent would run without
    anybody who can stop it.
    """
    drop(service)
    if tie:
        call("prctl", PR_SET_PDEATHSIG, tie[0], 0, 0, 0)  # after the change of user, which clears it
        if os.getppid() != tie[1]:
            os._exit(1)
    os.chdir("/")
    os.execvp(service["run"][0], service["run"])


def leave_cgroups(name, parent):
    """Move this process from the cgroups that an engine has made for its task to ones of its own, called ``name``.

    Engines kill all that is in a task's cgroup when the task ends: jobs of a node, too. They are the cgroups in which
    ``parent``, which belongs to the engine, is not.
    """
    engines = cgroups_of(parent)
    for controllers, path in cgroups_of(os.getpid()).items():
        if path == engines.get(controllers):
            continue
        try:
            folder = "%s/%s" % (hierarchy(controllers), name)
            if not os.path.isdir(folder):
                os.mkdir(folder)
                if "cpuset" in controllers.split(","):  # of version 1: a new one has none
                    for kind in ("cpuset.cpus", "cpuset.mems"):
                        with open("%s/../%s" % (folder, kind)) as above, open("%s/%s" % (folder, kind), "w") as own:
                            own.write(above.read())
            with open(folder + "/cgroup.procs", "w") as stream:
                stream.write("%d" % os.getpid())
        except OSError as error:
            print("sms-run: what it starts ends with it: %s" % error, flush=True)


def cgroups_of(pid):
    """Path of a process in each hierarchy of cgroups, by its controllers; those of version 2 are empty."""
    with open("/proc/%d/cgroup" % pid) as stream:
        rows = [line.rstrip("\n").split(":", 2) for line in stream]
    return {controllers: path for _, controllers, path in rows}


def hierarchy(controllers):
    """Where a hierarchy of cgroups is mounted. Raises OSError: it is not."""
    wanted = set(controllers.split(",")) - {""}
    with open("/proc/self/mountinfo") as stream:
        for line in stream:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()
            if kind == ("cgroup" if wanted else "cgroup2") and wanted <= set(options.split(",")):
                return before.split()[4]
    raise FileNotFoundError("no cgroup file system of %s is mounted" % (controllers or "version 2"))


def drop(service):
    """Drop to the service's user and capabilities (None: those of its user).

    An engine that starts this program as the service's user has dropped them before.
    """
    if os.geteuid():
        own = pwd.getpwuid(os.geteuid()).pw_name
        if own != service["user"]:
            raise PermissionError("runs as %s, but it is a service of %s" % (own, service["user"]))
        return
    capabilities = service["capabilities"]
    if capabilities is not None:
        drop_bounds(capabilities)
    if service["user"] != "root":
        user = pwd.getpwnam(service["user"])
        names = service["groups"]
        groups = [group.gr_gid for group in grp.getgrall() if user.pw_name in group.gr_mem or group.gr_name in names]
        call("prctl", PR_SET_KEEPCAPS, capabilities is not None, 0, 0, 0)
        os.setgroups(groups + [user.pw_gid])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        os.environ["HOME"] = user.pw_dir
        os.environ["USER"] = user.pw_name
    if capabilities is not None:
        keep_only(capabilities, ambient=service["user"] != "root")


def call(name, *arguments):
    """Call a function of the C library."""
    result = getattr(LIBC, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "%s: %s" % (name, os.strerror(ctypes.get_errno())))
    return result


def drop_bounds(capabilities):
    """Remove all other capabilities from the bounding set: no program can gain them again."""
    number = 0
    while LIBC.prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0:  # it fails beyond the last one that the kernel has
        if number not in capabilities and call("prctl", PR_CAPBSET_READ, number, 0, 0, 0):
            call("prctl", PR_CAPBSET_DROP, number, 0, 0, 0)
        number += 1


def keep_only(capabilities, ambient):
    """Drop all other capabilities of this process; ``ambient``: let a program that is not root's have them, too."""
    bits = sum(1 << number for number in capabilities)
    sets = [bits, bits, bits if ambient else 0]  # effective, permitted, inheritable
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    low, high = [part & 0xFFFFFFFF for part in sets], [part >> 32 for part in sets]
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    call("capset", header, (ctypes.c_uint32 * 6)(*(low + high)))
    for number in capabilities if ambient else ():
        call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0)
