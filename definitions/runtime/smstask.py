"""One service as a task of an engine: deploy, ready, removal (`sms-run --jobsync`). Python 3.6 and later.

The task stays above its service: it waits for what the service needs, starts it, passes signals on, and on a stop lets
the services that use it stop first. An engine that ends this process ends the service; one that kills it (SIGKILL)
leaves nothing running that the next start would not find.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import smslease
import smsstart
import smssync

HERE = os.path.dirname(os.path.abspath(__file__))
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
PASSED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOST = signal.SIGALRM  # what the thread that renews a lease sends
WATCHED = STOPS + PASSED + (signal.SIGCHLD, LOST)
PROBE_S = 5  # one run of sms-probe; then its reasons are recorded
REPEAT_S = 30  # an unchanged reason is printed again after this time
LARGEST = 65536  # bytes of answers of sms-probe, which fit into a pipe


def unblock():
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


HELPER = {"start_new_session": True, "preexec_fn": unblock}
"""Of programs that run beside the service: they can be killed as a whole, and have no signal blocked."""


class Failed(Exception):
    """The service cannot be started, or its time is over; the message is for the log."""

    status = 1


class Refused(Failed):
    """The service must not be started, however often somebody tries."""

    status = 3


class Stopped(Exception):
    """A stop was requested before the service ran."""


class Task:
    """A service of this node.

    ``options``: ``wait``, the limit in seconds of all that is waited for before the start; ``prepared``, whether
    `sms-run --prepare` has run before; ``services``, path of the file of services, None: the usual one. ``parent``: pid
    of the process that started this one.
    """

    def __init__(self, name, services, options, parent):
        self.name, self.service = name, services[name]
        self.sync = self.service["jobsync"]
        self.options, self.parent = options, parent
        self.stop_signal = getattr(signal, "SIG" + self.sync["signal"])
        self.lock = smssync.Lock(name)
        self.lease = smslease.Lease(self.sync["lease"]) if self.sync.get("lease") else None
        self.record = None
        self.child = None  # pid of the service
        self.status = None  # how it ended; negative: by that signal
        self.helper = None  # pid of a probe or preparation
        self.stopping = ""  # why, once a stop was requested
        self.asked = 0  # when the service got the signal to stop
        self.fenced = False  # whether that is because another task may write the state
        self.printed = ("", 0.0)
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def run(self):
        """Start the service and stay until it has ended; returns the exit status of this program."""
        deadline = time.monotonic() + self.options.wait
        try:
            self.take_place(deadline)
            self.take_lease(deadline)
            self.deploy(deadline)
        except Stopped:
            return self.leave(1 if self.fenced else 0, self.stopping if self.fenced else "")
        except Failed as error:
            self.say(str(error))
            return self.leave(error.status, str(error))
        self.follow()
        while self.child and not self.stopping:
            self.pause(1)
        if self.child:
            self.remove()
        return self.leave(self.end_status(), self.stopping if self.fenced else "")

    # Before the start

    def take_place(self, deadline):
        """Be the only task of this service on the node, and let what a killed one left end."""
        began = time.time()
        while not self.lock.take():
            self.report("waits for another sms-run of %s to end" % self.name, began)
            self.expect(deadline, "another sms-run of %s has not ended" % self.name, began)
        self.record = smssync.Record(self.name)
        left = self.record.left
        if smssync.is_alive(left):
            self.record.write("deploy", process=left, holds=self.record.held)
            self.outlive(left, deadline)
        self.record.write("deploy", process=None, holds=[])

    def outlive(self, left, deadline):
        """Wait until the service of a killed sms-run has ended; it has been sent the signal to stop."""
        began = time.time()
        kill_at = time.monotonic() + self.sync["stop_s"]
        while smssync.is_alive(left):
            self.report("waits for process %d of the run before to end" % left["pid"], began)
            if time.monotonic() > kill_at:
                kill_group(left["pid"], signal.SIGKILL)
            self.expect(deadline, "process %d of the run before has not ended" % left["pid"], began)

    def take_lease(self, deadline):
        """Be the only task that writes the state, on whatever host."""
        if not self.lease:
            return
        began = time.time()
        while True:
            try:
                reason = self.lease.attempt()
            except smslease.Refused as error:
                raise Refused("%s is not started: %s" % (self.name, error))
            except OSError as error:
                reason = str(error)
            if not reason:
                break
            reason = "the lease of %s: %s" % (self.lease.folder, reason)
            self.record.write(detail="waits for " + reason)
            self.report("waits for " + reason, began)
            self.expect(deadline, reason, began, 0.5)
        self.lease.hold(lambda: os.kill(os.getpid(), LOST))
        self.record.write(generation=self.lease.mine["generation"])
        self.say("%s has generation %d of %s" % (self.name, self.lease.mine["generation"], self.lease.folder))

    def deploy(self, deadline):
        """Wait for the services that this one needs, prepare it and start it.

        They are probed again right before the start, and are used from before that probe on: one that is to be stopped
        sees this task, or this task sees that.
        """
        while True:
            self.await_needs(deadline)
            self.record.write(waits_for=[], detail="prepares", holds=self.sync["holds"])
            self.prepare_here()
            missing = self.find_missing(self.sync["holds"], 0)
            if not missing:
                break
            self.record.write(holds=[])
            self.expect(deadline, "no answer of %s" % ", ".join(missing), time.time())
        self.record.write(detail="starts")
        self.start()

    def await_needs(self, deadline):
        """Return once all answer; one that is only waited for, not needed, is left out at the deadline."""
        began, wanted = time.time(), self.service["needs"]
        wait_s = 0  # most often all answer at once
        while True:
            missing = self.find_missing(wanted, wait_s)
            if not missing:
                return
            reason = "; ".join("%s: %s" % (name, missing[name]) for name in missing)
            self.record.write(waits_for=list(missing), detail="waits for " + reason)
            self.report("waits for " + reason, began)
            if time.monotonic() >= deadline and not set(missing) & set(self.sync["holds"]):
                self.say("%s starts without %s" % (self.name, ", ".join(missing)))
                return
            self.expect(deadline, "no answer of %s" % reason, began)
            wait_s = max(0, min(PROBE_S, deadline - time.monotonic()))

    def find_missing(self, names, wait_s):
        """Why services cannot be used yet, by name. The reasons are those of one run of sms-probe."""
        missing = {name: "it is being stopped" for name in names if smssync.is_leaving(name)}
        others = [name for name in names if name not in missing]
        if others:
            answers = self.probe(others, wait_s)
            missing.update({name: answers[name]["detail"] for name in others if not answers[name]["ok"]})
            missing.update({name: "it is being stopped" for name in others if smssync.is_leaving(name)})
        elif missing:
            self.pause(0.5)
        return missing

    def probe(self, names, wait_s):
        """Answers of sms-probe, run beside this process so that a signal is seen at once.

        Raises Stopped: a stop was requested meanwhile.
        """
        file = ["--services", self.options.services] if self.options.services else []
        argv = [sys.executable, HERE + "/sms-probe"] + file + ["--wait", str(wait_s)] + names
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **HELPER)
        with process.stdout:
            self.attend(process)
            lines = process.stdout.read(LARGEST).decode(errors="replace").splitlines()
        answers = {
            name: {"ok": False, "detail": "sms-probe ended with status %d" % process.returncode} for name in names
        }
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                answer = json.loads(line)
                if answer["name"] in answers:
                    answers[answer["name"]] = {"ok": answer["ok"] is True, "detail": str(answer["detail"])}
        return answers

    def prepare_here(self):
        process = smsstart.prepare(self.service, self.options.prepared, **HELPER)
        if process:
            self.attend(process)
            if process.returncode:
                raise Failed("the preparation of %s ended with status %d" % (self.name, process.returncode))

    def attend(self, process):
        """Wait for a program beside the service; it is killed when the service has ended, or is to be stopped.

        Raises Stopped: a stop was requested before the service ran, or before it answered.
        """
        self.helper, runs = process.pid, self.child
        try:
            while process.poll() is None and self.child == runs and not self.stopping:
                self.pause(1)
        finally:
            if process.poll() is None:
                kill_group(process.pid, signal.SIGKILL)
                process.wait()
            self.helper = None
        if self.stopping:
            raise Stopped

    def expect(self, deadline, what, began, wait_s=0.05):
        """Pause; raises Failed at the deadline, Stopped on a stop."""
        if time.monotonic() >= deadline:
            raise Failed("%s gives up after %.0f s: %s since %s" % (self.name, time.time() - began, what, clock(began)))
        self.pause(wait_s)
        if self.stopping:
            raise Stopped

    # The service itself

    def start(self):
        """Start the service. Its process is recorded before it becomes one that matters."""
        own = os.getpid()
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(writer)
            if os.read(reader, 1):  # else this process was killed before it could write the record
                self.begin(own)
            os._exit(127)
        os.close(reader)
        self.child = pid
        process = smssync.describe(pid)
        self.record.write(process=process)
        smsstart.set_mark(self.service)
        with suppress(BrokenPipeError):
            os.write(writer, b".")
        os.close(writer)

    def begin(self, parent):
        """In the new process: become the service. Returns only if that fails."""
        # Nobody could end one that has a lease any more: it must not write when another task takes that.
        tie = signal.SIGKILL if self.lease else signal.SIGTERM
        try:
            os.setsid()
            unblock()
            if self.sync.get("outlived"):
                smsstart.leave_cgroups("sms-" + self.name, self.parent)
            smsstart.become(self.service, (tie, parent))
        except (OSError, KeyError) as error:
            print("sms-run: %s cannot be started: %s" % (self.name, error), flush=True)

    def follow(self):
        """Return once the service answers, has ended, or is to be stopped."""
        with suppress(Stopped):
            while self.child:
                answer = self.probe([self.name], PROBE_S)[self.name]
                if answer["ok"] and self.child:
                    self.record.write("ready", detail=answer["detail"])
                    self.say("%s is ready: %s" % (self.name, answer["detail"]))
                    break
                self.record.write(detail="does not answer yet: " + answer["detail"])

    def remove(self):
        """Let the users of this service stop, then stop it."""
        began = time.time()
        self.record.write("removal", detail=self.stopping)
        limit = time.monotonic() + self.sync["release_s"]
        while self.child:
            users = ", ".join(smssync.users_of(self.name))
            if not users:
                break
            if time.monotonic() >= limit:
                self.say("%s stops although %s still uses it, after %g s" % (self.name, users, self.sync["release_s"]))
                break
            self.record.write(detail="is needed by %s" % users)
            self.report("waits until %s, which needs it, has stopped" % users, began)
            self.pause(0.2)
        self.record.write(detail="stops")
        self.asked = time.time()
        if self.child:
            send(self.child, self.stop_signal)
        limit = time.monotonic() + self.sync["stop_s"]
        while self.child:
            self.pause(min(1, max(0.05, limit - time.monotonic())))
            if self.child and time.monotonic() >= limit:
                self.say("%s has not stopped within %g s: killed" % (self.name, self.sync["stop_s"]))
                kill_group(self.child, signal.SIGKILL)

    def end_status(self):
        """The exit status of the service as that of this program; 0 for one that ended by the signal it was sent."""
        if self.status == 0:
            smsstart.end_mark(self.service, self.asked)
        if self.fenced:
            return 1
        if self.stopping and self.status in (0, -self.stop_signal):
            return 0
        return self.status if self.status >= 0 else 128 - self.status

    def leave(self, status, detail=""):
        """Record the end, let others have the place, and return the status."""
        if self.record:
            detail = detail or ("stopped before it ran" if self.status is None else "ended with status %d" % status)
            ended = {"waits_for": [], "holds": [], "process": None, "status": status}
            self.record.fields["times"]["ended"] = time.time()
            self.record.write("removal", detail=detail, **ended)
        if self.lease:
            try:
                self.lease.release()
            except (OSError, smslease.Refused) as error:  # the next task finds that the lock is free
                self.say(str(error))
        self.lock.release()
        return status

    # Signals, children, the log

    def pause(self, seconds):
        """Wait for a signal or the end of a process; keep the lock and the record in place."""
        got = signal.sigtimedwait(WATCHED, seconds)
        while got:
            self.take_signal(got)
            got = signal.sigtimedwait(WATCHED, 0)
        self.reap()
        self.check_lease()
        if os.getppid() != self.parent and not self.stopping:
            self.stopping = "the process that started sms-run has ended"
        if self.record and not self.lock.is_there():  # somebody has emptied the folder
            if self.lock.take():
                self.record.save()

    def check_lease(self):
        """End the service at once if another task may write its state."""
        reason = self.lease.check() if self.lease and self.lease.mine and not self.fenced else ""
        if reason:
            if self.child:
                kill_group(self.child, signal.SIGKILL)
            self.fenced, self.stopping = True, "has lost the lease of %s: %s" % (self.lease.folder, reason)
            self.say("%s is ended at once: it %s" % (self.name, self.stopping))

    def take_signal(self, got):
        if got.si_signo in STOPS and not self.stopping:
            self.stopping = "got the signal %s" % signal.Signals(got.si_signo).name
        elif got.si_signo in PASSED and self.child:
            send(self.child, got.si_signo)

    def reap(self):
        """Collect the service if it has ended, and the orphans that the first process of a container inherits."""
        if self.child:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                self.child = None
                self.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            while ended and ended.si_pid not in (self.child, self.helper):
                os.waitpid(ended.si_pid, 0)
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def report(self, text, began):
        """Print why it waits: once at a time, again when the reason changes or after a while."""
        last, at = self.printed
        if time.time() - began < 1 or (text == last and time.monotonic() - at < REPEAT_S):
            return
        self.printed = (text, time.monotonic())
        self.say("%s %s (since %s, %.0f s)" % (self.name, text, clock(began), time.time() - began))

    def say(self, text):
        print("sms-run: " + text, flush=True)


def send(pid, number):
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(pid, number):
    """Send a signal to a process and those of its session that stayed in its group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def clock(seconds):
    """A time as text, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
