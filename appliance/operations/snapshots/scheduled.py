"""What cron or systemd runs: a snapshot, pruned, pushed, written down; people are told when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from appliance.errors import Busy, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.hosts.preflight import only_one
from appliance.operations.migration.lease import look_at_lease
from appliance.operations.overlay.mirror import scrub
from appliance.operations.overlay.mirrored import find_mirror
from appliance.operations.services.status import when
from appliance.operations.snapshots.list import store
from appliance.operations.snapshots.prune import prune
from appliance.operations.snapshots.schedule import run_record, schedule_files
from appliance.operations.snapshots.snapshot import Wanted, snapshot
from appliance.plan.machine import inside_argv
from appliance.plan.migration.lease import Lease
from appliance.plan.overlay.mirror import scrub_is_due
from appliance.plan.snapshots.runs import (
    Run,
    Word,
    find_gap,
    follow,
    log_line,
    mail_text,
    meet,
    one_line,
    put_off,
    read_run,
)
from appliance.plan.snapshots.schedule import installed
from appliance.progress import Progress
from appliance.tools import agent

BORG = "borg"
"""Names the site's Borg repository among the targets of a push."""
REREAD_EVERY_S = 86400
SENDMAIL = """\
PATH=$PATH:/usr/sbin:/usr/lib:/sbin
command -v sendmail >/dev/null || exit 44
exec sendmail -oi -t
"""
"""Shell: a mail on standard input, to whom its header says."""


@dataclass
class Work:
    """What a run has done so far."""

    number: int | None = None
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stored_bytes: int | None = None
    put_off: int = 0
    missed: str = ""
    generation: int | None = None

    def attempt(self, what: str, do: Callable[[], None]) -> str:
        """Do a part of it; its failure is no reason not to try the others. What another run holds up is a note.

        Give what held it up, if anything did.
        """
        try:
            do()
        except Busy as error:
            self.notes += (f"{what}: {one_line(error.message)}",)
            return one_line(error.message)
        except Exception as error:
            self.fail(f"{what}: ", error)
        return ""

    def fail(self, what: str, error: Exception) -> None:
        """Keep why it failed. Nobody looks on: a mistake of ours must be told as any other failure is."""
        if isinstance(error, SmsError):
            words = error.message + (f"\nhint: {error.hint}" if error.hint else "")
        else:
            words = f"{type(error).__name__}: {error}"
        self.errors += (what + words,)

    def run(self, started: float, *interrupted: str) -> Run:
        """What is written down of it."""
        errors = interrupted or self.errors
        run = Run(started, time.time(), not errors, self.number, "\n".join(errors), self.notes, self.stored_bytes)
        return replace(run, put_off=self.put_off, missed=self.missed, generation=self.generation)


def run_scheduled(cluster: Cluster, host: Host, progress: Progress, wanted: Wanted) -> Run | None:
    """Take a snapshot as the schedule wants it, prune, push; give what is written down of it.

    None: it did nothing, for the host does not carry the appliance, or another run is at work. What fails is not
    raised; it is written down, and goes to syslog and mail.
    """
    started = time.time()
    work = Work()
    try:
        try:
            lease = look_at_lease(host, cluster)
            if lease.holder != host.name:
                return None
            work.generation = lease.generation
            work.missed = look_for_gap(cluster, host, lease, started)
            # Before it is taken: chunks that have changed are stored anew with it.
            work.attempt("read again", partial(reread_when_due, cluster, host, progress))
            taken = snapshot(cluster, host, progress, wanted)
            work.number = taken.snapshot["number"]
            work.errors += taken.not_dumped
        except Busy as error:
            _write(cluster, host, meet(_read(cluster, host), now=time.time(), what=one_line(error.message)))
            return None
        except Exception as error:
            work.fail("", error)
        after_scheduled(cluster, host, progress, work)
    except KeyboardInterrupt:
        # The host goes down, or systemd lost its patience: no time for mails.
        run = work.run(started, "it was interrupted")
        _log(cluster, host, run, "")
        _write(cluster, host, _quietly(_read(cluster, host), run))
        raise
    return finish(cluster, host, work.run(started))


def after_scheduled(cluster: Cluster, host: Host, progress: Progress, work: Work) -> None:
    """What follows a scheduled snapshot. Also one that failed: a full disk is helped by pruning."""

    def thin() -> None:
        work.stored_bytes = prune(cluster, host, (), progress).stored_bytes

    if busy := work.attempt("prune", thin):
        work.put_off, trouble = put_off(_read(cluster, host), busy)
        work.errors += (trouble,) if trouble else ()
    for target in push_targets(cluster, host):
        work.attempt(f"push to {target}", partial(push_to, cluster, host, target, progress))
    work.attempt("scrub", partial(scrub_when_due, cluster, host, progress))


def reread_when_due(cluster: Cluster, host: Host, progress: Progress) -> None:
    """Once a day hold the newest verified snapshot against its digests: disks rot, and later ones are built on it.

    Raises:
        SmsError: it has changed.
    """
    said = agent.ask(host, "reread", {"store": store(cluster), "every_s": REREAD_EVERY_S}, progress)
    if said["damage"]:
        raise SmsError(f"snapshot {said['number']} is damaged: {said['damage'][0]}", hint="sms overlay verify --all")


def look_for_gap(cluster: Cluster, host: Host, lease: Lease, now: float) -> str:
    """What is to be said of runs that did not take place; where that cannot be told, nothing."""
    try:
        found = {path: data for path in schedule_files(cluster) if (data := host.read(path))}
        every = installed({path: data.decode(errors="replace") for path, data in found.items()}, cluster.site.cluster)
        if not every:
            return ""
        written = [float(word) for word in host.run("stat", "-c", "%Y", *found).text.split()]
        booted = float(host.run("sed", "-n", "s/^btime //p", "/proc/stat").text)
    except (SmsError, ValueError):
        return ""
    return find_gap(
        _read(cluster, host),
        now=now,
        every=every[1],
        installed=max(written),
        lease_since=lease.since,
        generation=lease.generation,
        booted=booted,
    )


def scrub_when_due(cluster: Cluster, host: Host, progress: Progress) -> None:
    """Once a week read both members of the mirror, where there is one: only that finds noise that nobody reads."""
    mirror = find_mirror(cluster, host)
    if mirror and scrub_is_due(mirror, now=time.time()):
        scrub(cluster, host, progress)


def push_targets(cluster: Cluster, host: Host) -> list[str]:
    """Where the site's snapshots go to from a host."""
    settings = cluster.site.snapshots
    return [*([BORG] if settings.borg else []), *(name for name in settings.standby if name != host.name)]


def push_to(cluster: Cluster, host: Host, target: str, progress: Progress) -> None:
    """Push what one target lacks, and prune it: no schedule of a standby's own does, while it stands by.

    Raises:
        Busy: an earlier run still pushes there.
        SmsError: not all of it is there.
    """
    from appliance.operations.snapshots.push import FAILED, push
    from appliance.operations.snapshots.push import Wanted as Missing

    lock = f"/run/sms/{cluster.site.cluster}.push-{target}.lock"
    with only_one(host, lock, f"another run pushes to {target}"):
        done = push(cluster, host, Missing(all_missing=True, prune=target == BORG), [target], progress)
        failed = [one for one in done if one.state == FAILED]
        if failed:
            words = [f"snapshot {one.snapshot}: {one.error}" if one.snapshot else one.error for one in failed]
            raise SmsError("\n".join(words), hint=failed[0].hint)
        if target != BORG:
            prune(cluster, cluster.host(target), (), progress)


def finish(cluster: Cluster, host: Host, run: Run) -> Run:
    """Write the run down, and tell people what they should know; give it as it was written."""
    previous = _read(cluster, host)
    run, word = follow(previous, run)
    trouble = []
    if word and (not run.ok or word == "missed" or (previous and previous.mailed is not None)):
        trouble += _mail(cluster, host, run, word)
    trouble += _write(cluster, host, run)
    _log(cluster, host, run, word, trouble)
    return run


def _quietly(previous: Run | None, run: Run) -> Run:
    """As ``follow``, when nobody is mailed: the next failure still is."""
    followed, _ = follow(previous, run)
    before = (previous.failing_since, previous.mailed) if previous else (None, None)
    off = previous.put_off if previous else 0
    return replace(followed, failing_since=before[0], mailed=before[1], put_off=max(off, run.put_off))


def _read(cluster: Cluster, host: Host) -> Run | None:
    try:
        return read_run(host.read(run_record(cluster)))
    except SmsError:
        return None


def _write(cluster: Cluster, host: Host, run: Run) -> list[str]:
    """Write the run down; give what went wrong with that: a full disk must not keep people from being told."""
    try:
        host.write(run_record(cluster), run.text(), mode=0o600)
    except SmsError as error:
        return [f"{run_record(cluster)} cannot be written: {one_line(error.message)}"]
    return []


def _log(cluster: Cluster, host: Host, run: Run, word: Word, trouble: list[str] | None = None) -> None:
    line = "; ".join(filter(None, [log_line(cluster.site.cluster, run, word), *(trouble or [])]))
    if line:
        level = "notice" if run.ok and not trouble and not run.missed else "err"
        host.run("logger", "-t", "sms", "-p", f"cron.{level}", "--", line[:900], ok=None)


def _mail(cluster: Cluster, host: Host, run: Run, word: Word) -> list[str]:
    """Send it by the running appliance, whose work mail is, or by the host's own program; give why neither did."""
    to = cluster.site.mail.root or "root"
    since = when(run.failing_since) if run.failing_since else ""
    text = mail_text(cluster.site.cluster, host.name, run, word, to=to, since=since).encode()
    try:
        if cluster.find_role("mail"):
            argv = inside_argv(cluster.site, "sh", "-c", SENDMAIL, "mail")
            if not host.run(*argv, input=text, ok=None, timeout=60).status:
                return []
        if not host.run("sh", "-c", SENDMAIL, "mail", input=text, ok=None, timeout=60).status:
            return []
    except SmsError as error:
        return [f"no mail could be sent: {one_line(error.message)}"]
    return ["no mail could be sent: neither the appliance nor the host takes it"]
