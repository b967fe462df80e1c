"""The record of a scheduled run on a host, and how it is reported: syslog and mail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.machine import inside_argv
from appliance.plan.snapshots.runs import (
    SNAPSHOTS,
    Mail,
    Notice,
    Run,
    Subject,
    log_line,
    mail_text,
    merge_previous,
    one_line,
    overtaken,
    read_run,
)
from appliance.shared.records import to_json
from appliance.units import format_time

SENDMAIL = (
    "env",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib",
    "sendmail",
    "-oi",
    "-t",
)
"""Send the mail on standard input to the recipient in its header. Distributions have sendmail in several folders."""


def finish(cluster: Cluster, host: Host, run: Run, subject: Subject = SNAPSHOTS) -> Run:
    """Record the run, send mail if due, write syslog; return the run as recorded."""
    previous = read_record(cluster, host, subject)
    if newer := overtaken(previous, run):
        problems = write_record(cluster, host, newer, subject)
        _log(cluster, host, log_line(cluster.site.cluster, run, "", subject), run, problems)
        return run
    run, notice = merge_previous(previous, run)
    problems = []
    if notice and (not run.ok or notice == "missed" or (previous and previous.mailed is not None)):
        problems += _mail(cluster, host, run, notice, subject)
    problems += write_record(cluster, host, run, subject)
    _log(cluster, host, log_line(cluster.site.cluster, run, notice, subject), run, problems)
    return run


def finish_interrupted(cluster: Cluster, host: Host, run: Run, subject: Subject = SNAPSHOTS) -> None:
    """Record an interrupted run and write syslog: the host shuts down, or a timeout expired; no time to send mail."""
    _log(cluster, host, log_line(cluster.site.cluster, run, "", subject), run)
    write_record(cluster, host, _without_notice(read_record(cluster, host, subject), run), subject)


def _without_notice(previous: Run | None, run: Run) -> Run:
    """As ``merge_previous``, when no mail is sent: the next failure is still mailed."""
    merged, _ = merge_previous(previous, run)
    before = previous or Run(run.started, run.ended, True)
    return replace(
        merged,
        failing_since=before.failing_since,
        mailed=before.mailed,
        put_off=max(before.put_off, run.put_off),
        push_waits_since=before.push_waits_since or run.push_waits_since,
    )


def record_path(cluster: Cluster, subject: Subject = SNAPSHOTS) -> str:
    """Return the path of a host's record of its last run."""
    return str(cluster.places.snapshots / subject.record)


def read_record(cluster: Cluster, host: Host, subject: Subject = SNAPSHOTS) -> Run | None:
    """Return the record of the last run; None where there is none or it cannot be read."""
    try:
        return read_run(host.read(record_path(cluster, subject)))
    except SmsError:
        return None


def write_record(cluster: Cluster, host: Host, run: Run, subject: Subject = SNAPSHOTS) -> list[str]:
    """Write the record; return errors instead of raising them: a full disk must not prevent the report."""
    path = record_path(cluster, subject)
    try:
        host.write(path, to_json(run), mode=0o600)
    except SmsError as error:
        return [f"{path} cannot be written: {one_line(error.message)}"]
    return []


def _log(cluster: Cluster, host: Host, text: str, run: Run, problems: Sequence[str] = ()) -> None:
    line = "; ".join(filter(None, [text, *problems]))
    if line:
        level = "notice" if run.ok and not problems and not run.missed else "err"
        host.run("logger", "-t", "sms", "-p", f"cron.{level}", "--", line[:900], ok=None)


def _mail(cluster: Cluster, host: Host, run: Run, notice: Notice, subject: Subject) -> list[str]:
    """Send mail through the services container, else the host's sendmail; return the error if both fail."""
    to = cluster.site.mail.root or "root"
    since = format_time(run.failing_since) if run.failing_since else ""
    text = mail_text(Mail(cluster.site.cluster, host.name, to, since), run, notice, subject).encode()
    try:
        if cluster.find_role("mail"):
            argv = inside_argv(cluster.site, cluster.services, *SENDMAIL)
            if not host.run(*argv, input=text, ok=None, timeout=60).status:
                return []
        if not host.run(*SENDMAIL, input=text, ok=None, timeout=60).status:
            return []
    except SmsError as error:
        return [f"no mail could be sent: {one_line(error.message)}"]
    return ["no mail could be sent: neither the services container nor the host accepts it"]
